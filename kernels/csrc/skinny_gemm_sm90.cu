// The same products as skinny_gemm.cu on Hopper, m = 1..8, with the weights streamed by the bulk copy engine through a deep
// ring in shared memory. The same layouts.
//
// One block a multiprocessor walks over tiles of 16 rows of w. A producer warp copies 16 rows of 2048 bytes a stage, one bulk copy
// a row, as many stages ahead as shared memory holds, across tiles; 8 or 16 consumer warps take a part of each row of a stage and multiply
// it by x with the tensor cores as skinny_gemm.cu does. Each has its part of x in shared memory and waits for no other until a tile is
// summed. Tiles are finished by the warps in turn, while the next one is multiplied.
//
//       shared memory:  x, m rows | stage 0 | stage 1 | ...          stage: 16 rows of 2048 bytes, one behind the other
//
// Rows lie without padding: a copy to an address that is no multiple of 128 takes 120 cycles in place of 100, which bound everything. Two rows
// then share banks when they are read, which hides behind the copies: 512 of some 1,700 cycles a stage.
// Weights of e4m3 are multiplied as f16: one instruction widens two, where bf16 takes five. x is f16 then, each warp's part times a power of
// two that its largest value allows: nothing of its eight digits is lost above 2^-32 of that.
//
// The producer does not wait for the kernel in front: weights are constant. Where that lets this one in early, the ring is full when it has
// drained. Two blocks must not fit a multiprocessor, others would get none (skinny.cuh).
// Bound by memory, 2 B * n * k: 4.5 TB/s of an H200 in the long run. In a step of one sequence gate and up of 4096 x 28672 take 51.8 us, down 28.0,
// qkv 12.5, o 8.9, 128,256 logits 230.
#include "skinny.cuh"
#include "tma.cuh"

namespace stoker {

constexpr int kStagesMax = 6, kCopied = 2048, kStageBytes = kTileRows * kCopied;
// Of each row of a stage, that a warp takes at a time.
constexpr int kStepBytes = 64;
// Between rows of x: lanes of two rows read different banks.
constexpr int kXPadding = 64;

template <typename Element>
constexpr int kStageValues = kCopied / sizeof(Element);

// Warps that multiply, as `RingForm` in launch/product.rs has them.
template <typename Element>
constexpr int kRingWarps = sizeof(Element) == 1 ? 16 : 8;

#if __CUDA_ARCH__ >= 900

// The weights are read once a step: what they displace in L2 should be other weights.
__device__ __forceinline__ void copy_row(uint32_t shared, const void* row, uint32_t n_bytes, uint64_t* barrier) {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;\n" : "=l"(policy));
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;\n" ::"r"(shared),
      "l"(row), "r"(n_bytes), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}

// Two tiles' sums: one is finished while the other is made.
template <int kWarps>
struct Shared {
  uint64_t full[kStagesMax], empty[kStagesMax];
  Partials<kWarps> partials[2];
  float row_squares[kColumns], x_factor[kWarps][kColumns];
};

// What lies in dynamic shared memory.
struct Room {
  uint32_t x, x_row_bytes, stages, n_stages;

  template <typename Element>
  static __device__ __forceinline__ Room of(uint32_t start, const Product& p, const Element*) {
    uint32_t n_bytes;
    asm("mov.u32 %0, %%dynamic_smem_size;\n" : "=r"(n_bytes));
    const int values = kStageValues<Element>, padded = (p.k + values - 1) / values * values;
    const uint32_t row = padded * sizeof(bf16) + kXPadding, x_bytes = (p.m * row + 127) / 128 * 128;
    return {start, row, start + x_bytes, min(static_cast<uint32_t>(kStagesMax), (n_bytes - x_bytes) / kStageBytes)};
  }
};

// A position in the ring.
struct Turn {
  uint32_t slot = 0, round = 0;
  __device__ __forceinline__ void next(uint32_t n_stages) {
    if (++slot == n_stages) slot = 0, round ^= 1;
  }
};

template <typename Element, int kWarps>
__device__ __forceinline__ void produce(Shared<kWarps>& shared, const Room& room, const Element* w, const Product& p) {
  const int lane = threadIdx.x % kWarp, row_bytes = p.k * sizeof(Element);
  Turn turn;
  for (int first = blockIdx.x * kTileRows; first < p.n; first += gridDim.x * kTileRows) {
    // Rows past the end repeat the last one; their sums are not stored.
    const Element* row = w + static_cast<size_t>(min(first + lane % kTileRows, p.n - 1)) * p.k;
    for (int at = 0; at < row_bytes; at += kCopied, turn.next(room.n_stages)) {
      const uint32_t n_bytes = min(kCopied, row_bytes - at);
      wait_for(&shared.empty[turn.slot], turn.round ^ 1);
      if (lane == 0) arrive_expecting(&shared.full[turn.slot], kTileRows * n_bytes);
      __syncwarp();
      const uint32_t target = room.stages + turn.slot * kStageBytes + lane * kCopied;
      if (lane < kTileRows) copy_row(target, reinterpret_cast<const uint8_t*>(row) + at, n_bytes, &shared.full[turn.slot]);
    }
  }
}

template <int kWarps>
__device__ __forceinline__ void sync_consumers(const Shared<kWarps>&) {
  asm volatile("bar.sync 1, %0;\n" ::"n"(kWarps * kWarp) : "memory");
}

__device__ __forceinline__ uint4 load_shared(uint32_t address) {
  uint32_t r[4];
  load_shared(r, address);
  return make_uint4(r[0], r[1], r[2], r[3]);
}

// A power of two, behind which the largest is below 2^15: one that f32 has, with its reciprocal.
__device__ __forceinline__ float half_factor(float largest) {
  const int exponent = static_cast<int>(__float_as_uint(largest) >> 23) - 127;
  return largest > 0.f ? exp2f(static_cast<float>(max(-100, min(14 - exponent, 100)))) : 1.f;
}

__device__ __forceinline__ float largest_of(const uint4& v) {
  float f[8], largest = 0.f;
  unpack(v, f);
#pragma unroll
  for (int i = 0; i < 8; ++i) largest = fmaxf(largest, fabsf(f[i]));
  return largest;
}

__device__ __forceinline__ uint4 as_halves(const uint4& v, float factor) {
  float f[8];
  unpack(v, f);
  return make_uint4(pack_as<__half>(f[0] * factor, f[1] * factor), pack_as<__half>(f[2] * factor, f[3] * factor),
                    pack_as<__half>(f[4] * factor, f[5] * factor), pack_as<__half>(f[6] * factor, f[7] * factor));
}

// A warp's part of x, which no other reads, as what the weights are multiplied as, with zeros up to a whole stage. As f16 its values are
// multiplied by a factor of their own. Half a warp takes a stage's part of a row.
template <typename Element, int kWarps>
__device__ __forceinline__ void stage_x(Shared<kWarps>& shared, const Room& room, const Product& p) {
  constexpr int kValues = kStageValues<Element>, kOwn = kValues / kWarps, kLanes = kOwn / 8, kPerRound = kWarp / kLanes;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, n_stages = (p.k + kValues - 1) / kValues;
  const int from = lane / kLanes * kValues + warp * kOwn + lane % kLanes * 8;
  for (int m = 0; m < p.m; ++m) {
    const bf16* row = p.x + static_cast<size_t>(m) * p.k;
    auto load = [&](int at) { return at < p.k ? *reinterpret_cast<const uint4*>(row + at) : make_uint4(0, 0, 0, 0); };
    float factor = 1.f;
    if (sizeof(Element) == 1) {
      float largest = 0.f;
#pragma unroll 4
      for (int stage = 0; stage < n_stages; stage += kPerRound) largest = fmaxf(largest, largest_of(load(from + stage * kValues)));
#pragma unroll
      for (int distance = kWarp / 2; distance > 0; distance /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, distance));
      factor = half_factor(largest);
      if (lane == 0) shared.x_factor[warp][m] = factor;
    }
#pragma unroll 4
    for (int stage = 0; stage < n_stages; stage += kPerRound) {
      const int at = from + stage * kValues;
      const uint4 v = load(at);
      if (at < n_stages * kValues) store_shared(room.x + m * room.x_row_bytes + at * sizeof(bf16), sizeof(Element) == 1 ? as_halves(v, factor) : v);
    }
  }
  __syncwarp();
}

// Four values of e4m3 as two pairs of f16.
__device__ __forceinline__ uint2 halves(uint32_t four) {
  uint2 pairs;
  asm("{ .reg .b16 low, high;\n"
      "mov.b32 {low, high}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, low;\n"
      "cvt.rn.f16x2.e4m3x2 %1, high; }\n"
      : "=r"(pairs.x), "=r"(pairs.y)
      : "r"(four));
  return pairs;
}

// A lane's 16 bytes of either row of weights with its part of a column of x.
template <typename Element>
__device__ __forceinline__ void multiply_staged(float (&sum)[4], const uint4& upper, const uint4& lower, uint32_t x, bool present) {
  const uint4 zeros = make_uint4(0, 0, 0, 0);
  if constexpr (sizeof(Element) == 2) {
    multiply_step(sum, upper, lower, present ? load_shared(x) : zeros);
  } else {
    const uint32_t above[4] = {upper.x, upper.y, upper.z, upper.w}, below[4] = {lower.x, lower.y, lower.z, lower.w};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 v = present ? load_shared(x + half * 16) : zeros;
      const uint2 a = halves(above[2 * half]), b = halves(below[2 * half]), c = halves(above[2 * half + 1]), d = halves(below[2 * half + 1]);
      mma_f16(sum, a.x, b.x, a.y, b.y, v.x, v.y);
      mma_f16(sum, c.x, d.x, c.y, d.y, v.z, v.w);
    }
  }
}

// A warp's part of a tile. Two sums, so that a product does not wait for the one in front.
template <typename Element, int kWarps>
__device__ __forceinline__ void multiply_tile(float (&sum)[4], Shared<kWarps>& shared, const Room& room, Turn& turn, const Product& p) {
  constexpr int kXBytes = sizeof(bf16) / sizeof(Element);  // beside a byte of w
  constexpr int kSteps = kCopied / (kWarps * kStepBytes);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
  const int own = warp * kSteps * kStepBytes + t * 16, row_bytes = p.k * sizeof(Element);
  const uint32_t x = room.x + g * room.x_row_bytes;
  float sums[2][4] = {};
  for (int at = own; at - own < row_bytes; at += kCopied, turn.next(room.n_stages)) {
    const uint32_t rows = room.stages + turn.slot * kStageBytes + g * kCopied + own;
    wait_for(&shared.full[turn.slot], turn.round);
    uint4 upper[kSteps], lower[kSteps];
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      // Past the end of k the stage holds what an earlier chunk left; 0 * NaN would reach the sum.
      const bool present = at + s * kStepBytes < row_bytes;
      upper[s] = present ? load_shared(rows + s * kStepBytes) : make_uint4(0, 0, 0, 0);
      lower[s] = present ? load_shared(rows + 8 * kCopied + s * kStepBytes) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int s = 0; s < kSteps; ++s) multiply_staged<Element>(sums[s % 2], upper[s], lower[s], x + (at + s * kStepBytes) * kXBytes, g < p.m);
    // Behind the products: reads that were only issued may still be on their way when this arrives.
    __syncwarp();
    if (lane == 0) arrive(&shared.empty[turn.slot]);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) sum[i] = sums[0][i] + sums[1][i];
}

template <Form kForm, typename Out, typename Element, int kWarps>
__device__ __forceinline__ void consume(Shared<kWarps>& shared, const Room& room, Out* y, const float* w_scales, const Product& p, const Beside& beside) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
  stage_x<Element>(shared, room, p);
  // Seen behind the first tile's sums.
  add_up_squares<kForm>(shared.row_squares, beside, p);
  Turn turn;
  // The thread's turn among those that finish a tile: few rows of x are a warp's work, each time another one's.
  int nth = threadIdx.x, tile = 0;
  for (int first = blockIdx.x * kTileRows; first < p.n; first += gridDim.x * kTileRows, ++tile) {
    const Addend addend = load_addend<kForm>(nth, y, first, beside, p);
    RowScales scales(w_scales, min(first + g, p.n - 1), min(first + g + 8, p.n - 1));
    float sum[4];
    multiply_tile<Element>(sum, shared, room, turn, p);
    if (sizeof(Element) == 1) {
      scales.apply(sum);
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[i] = 2 * t + i % 2 < p.m ? sum[i] / shared.x_factor[warp][2 * t + i % 2] : 0.f;
    }
    Partials<kWarps>& partial = shared.partials[tile % 2];
    leave_partial(partial, sum);
    sync_consumers(shared);
    finish_tile<kForm>(nth, partial, shared.row_squares, addend, y, first, beside, p);
    nth = nth < kWarp ? nth + (kWarps - 1) * kWarp : nth - kWarp;
  }
}

template <Form kForm, typename Out, typename Element>
__device__ __forceinline__ void skinny_gemm(Out* y, const Element* w, const float* w_scales, const Product& p, const Beside& beside) {
  extern __shared__ __align__(128) uint8_t dynamic[];
  constexpr int kWarps = kRingWarps<Element>;
  __shared__ Shared<kWarps> shared;
  const Room room = Room::of(shared_address(dynamic), p, w);
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < kStagesMax; ++slot) init_barrier(&shared.full[slot], 1), init_barrier(&shared.empty[slot], kWarps);
    asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
  }
  __syncthreads();
  let_next_kernel_start();
  if (threadIdx.x >= kWarps * kWarp) {
    produce(shared, room, w, p);
    // Every warp waits: this kernel has not ended before the earlier ones have.
    wait_for_earlier_kernels();
  } else {
    wait_for_earlier_kernels();
    consume<kForm, Out, Element>(shared, room, y, w_scales, p, beside);
  }
}

#else

template <Form kForm, typename Out, typename Element>
__device__ __forceinline__ void skinny_gemm(Out*, const Element*, const float*, const Product&, const Beside&) {}

#endif

}  // namespace stoker

#define SKINNY_GEMM_SM90(name, form, out)                                                                                   \
  extern "C" __global__ void __launch_bounds__((stoker::kRingWarps<stoker::bf16> + 1) * 32, 1)                                                                      \
      name(out* y, const stoker::bf16* w, const stoker::bf16* x, stoker::bf16* weighted, const stoker::bf16* norm,          \
           float* squares, float eps, int m, int n, int k, int squares_tile) {                                          \
    stoker::skinny_gemm<stoker::Form::form>(y, w, nullptr, stoker::Product{x, m, n, k},                                     \
                                            stoker::Beside{weighted, norm, squares, eps, squares_tile});                    \
  }
#define SKINNY_GEMM_SM90_E4M3(name, form)                                                                                   \
  extern "C" __global__ void __launch_bounds__((stoker::kRingWarps<uint8_t> + 1) * 32, 1)                                                                      \
      name(stoker::bf16* y, const uint8_t* w, const float* w_scales, const stoker::bf16* x, stoker::bf16* weighted,         \
           const stoker::bf16* norm, float* squares, float eps, int m, int n, int k, int squares_tile) {                \
    stoker::skinny_gemm<stoker::Form::form>(y, w, w_scales, stoker::Product{x, m, n, k},                                    \
                                            stoker::Beside{weighted, norm, squares, eps, squares_tile});                    \
  }
SKINNY_GEMM_SM90(skinny_gemm_sm90_bf16, kPlain, stoker::bf16)
SKINNY_GEMM_SM90(skinny_gemm_sm90_f32, kPlain, float)
SKINNY_GEMM_SM90(skinny_gemm_sm90_update, kUpdate, stoker::bf16)
SKINNY_GEMM_SM90(skinny_gemm_sm90_scaled_bf16, kScaled, stoker::bf16)
SKINNY_GEMM_SM90(skinny_gemm_sm90_scaled_f32, kScaled, float)
SKINNY_GEMM_SM90(skinny_gemm_sm90_gated, kGated, stoker::bf16)
SKINNY_GEMM_SM90_E4M3(skinny_gemm_sm90_e4m3_bf16, kPlain)
SKINNY_GEMM_SM90_E4M3(skinny_gemm_sm90_e4m3_update, kUpdate)
SKINNY_GEMM_SM90_E4M3(skinny_gemm_sm90_e4m3_scaled, kScaled)
SKINNY_GEMM_SM90_E4M3(skinny_gemm_sm90_e4m3_gated, kGated)
