// The same products as skinny_gemm.cu on Hopper, m = 1..8, with the weights streamed by the bulk copy engine through a deep
// ring in shared memory. The same layouts.
// Of weights in e4m3 a stage has twice the values.
// One block a multiprocessor walks over tiles of 16 rows of w. A producer warp copies 16 x 1024 values a stage, one bulk copy
// a row, three stages ahead and across tiles; 8 consumer warps take 128 values of k of each stage and multiply them by x with
// the tensor cores as skinny_gemm.cu does.
//
//       stage: 16 rows of 2048 bytes, 2112 apart (so that lanes of two rows read different banks)      ring: 99 KiB
//
// The producer does not wait for the kernel in front: weights are constant. Where that lets this one in early, up to 99 KiB a
// multiprocessor of its weights, 13 MB together, are read while it drains. A block asks for 119 KiB: two would fit a
// multiprocessor otherwise, and others would get none (skinny.cuh); attention's 96 fit beside it.
// Bound by memory, 2 B * n * k. Copies of 1 KiB come in at one in 80 cycles, of 2 KiB at one in 120: 1 KiB bounds the loop at 3 TB/s,
// 2 at 3.8; 4 gained nothing more. Registers reach 4.06 where w is large, so it multiplies small and middling matrices
// (`SkinnyKernel::for_one_row`): one row and 4096 x 6144 take 14.3 us, by 1 KiB 17.3 in the same run, by registers 15.
#include "skinny.cuh"
#include "tma.cuh"

namespace stoker {

#if __CUDA_ARCH__ >= 900

constexpr int kStages = 3, kCopied = 2048, kRowBytes = kCopied + 64, kStageBytes = kTileRows * kRowBytes;
// Of 64 bytes, that a warp takes of each row of a stage.
constexpr int kStepBytes = 64, kSteps = kCopied / (kProductWarps * kStepBytes);
constexpr int kConsumers = kProductWarps * kWarp;

template <typename Element>
constexpr int kStageValues = kCopied / sizeof(Element);

// The weights are read once a step: what they displace in L2 should be other weights.
__device__ __forceinline__ void copy_row(uint32_t shared, const void* row, uint32_t n_bytes, uint64_t* barrier) {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;\n" : "=l"(policy));
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;\n" ::"r"(shared),
      "l"(row), "r"(n_bytes), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}

struct Ring {
  uint64_t full[kStages], empty[kStages];
};

template <typename Element>
__device__ __forceinline__ void produce(Ring& ring, uint32_t stages, const Element* w, const Product& p) {
  constexpr int kValues = kStageValues<Element>;
  const int lane = threadIdx.x % kWarp, n_chunks = (p.k + kValues - 1) / kValues;
  uint32_t i = 0;
  for (int first = blockIdx.x * kTileRows; first < p.n; first += gridDim.x * kTileRows) {
    // Rows past the end repeat the last one; their sums are not stored.
    const Element* row = w + static_cast<size_t>(min(first + lane % kTileRows, p.n - 1)) * p.k;
    for (int chunk = 0; chunk < n_chunks; ++chunk, ++i) {
      const uint32_t slot = i % kStages, n_bytes = min(kValues, p.k - chunk * kValues) * static_cast<int>(sizeof(Element));
      wait_for(&ring.empty[slot], (i / kStages & 1) ^ 1);
      if (lane == 0) arrive_expecting(&ring.full[slot], kTileRows * n_bytes);
      __syncwarp();
      const uint32_t target = stages + slot * kStageBytes + lane * kRowBytes;
      if (lane < kTileRows) copy_row(target, row + chunk * kValues, n_bytes, &ring.full[slot]);
    }
  }
}

__device__ __forceinline__ void sync_consumers() { asm volatile("bar.sync 1, %0;\n" ::"n"(kConsumers) : "memory"); }

// A lane's part of its column for one chunk. Of bf16 it is loaded a chunk ahead; of e4m3, where it is twice as many values, when it
// is needed: from the second tile on it lies in L1.
template <typename Element>
struct Column {
  const bf16* row;  // null where there is none
  int k;

  __device__ __forceinline__ void load(int) {}
  __device__ __forceinline__ void load_ahead(int) {}
  __device__ __forceinline__ void multiply_by(float (&sum)[4], const uint4& upper, const uint4& lower, int, int at) {
    multiply(sum, upper, lower, row != nullptr && at < k ? row + at : nullptr, static_cast<const Element*>(nullptr));
  }
};

template <>
struct Column<bf16> {
  const bf16* row;
  int k;
  uint4 now[kSteps], ahead[kSteps];

  __device__ __forceinline__ void load_ahead(int at) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int from = at + s * 32;
      ahead[s] = row != nullptr && from < k ? *reinterpret_cast<const uint4*>(row + from) : make_uint4(0, 0, 0, 0);
    }
  }
  __device__ __forceinline__ void load(int at) {
    load_ahead(at);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) now[s] = ahead[s];
  }
  __device__ __forceinline__ void multiply_by(float (&sum)[4], const uint4& upper, const uint4& lower, int s, int) {
    multiply_step(sum, upper, lower, now[s]), now[s] = ahead[s];
  }
};

__device__ __forceinline__ uint4 load_shared(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];\n" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address) : "memory");
  return v;
}

template <Form kForm, typename Out, typename Element>
__device__ __forceinline__ void consume(Ring& ring, uint32_t stages, Partials& partial, Out* y, const float* w_scales, const Product& p,
                                        const Beside& beside) {
  constexpr int kValues = kStageValues<Element>, kLane = kLaneValues<Element>, kStep = 4 * kLane;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
  const int n_chunks = (p.k + kValues - 1) / kValues, own = warp * kSteps * kStep + t * kLane;
  uint32_t i = 0;
  Column<Element> x{g < p.m ? p.x + static_cast<size_t>(g) * p.k : nullptr, p.k};
  x.load(own);
  add_up_squares<kForm>(partial, beside, p);
  for (int first = blockIdx.x * kTileRows; first < p.n; first += gridDim.x * kTileRows) {
    const Addend addend = load_addend<kForm>(y, first, beside, p);
    const RowScales scales(w_scales, min(first + g, p.n - 1), min(first + g + 8, p.n - 1));
    float sum[4] = {};
    for (int chunk = 0; chunk < n_chunks; ++chunk, ++i) {
      const uint32_t slot = i % kStages, rows = stages + slot * kStageBytes + g * kRowBytes + own * static_cast<int>(sizeof(Element));
      const int at = chunk * kValues + own, next = chunk + 1 < n_chunks ? at + kValues : own;
      wait_for(&ring.full[slot], i / kStages & 1);
      uint4 upper[kSteps], lower[kSteps];
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        // Past the end of k the stage holds what an earlier chunk left; 0 * NaN would reach the sum.
        const bool present = at + s * kStep < p.k;
        upper[s] = present ? load_shared(rows + s * kStepBytes) : make_uint4(0, 0, 0, 0);
        lower[s] = present ? load_shared(rows + 8 * kRowBytes + s * kStepBytes) : make_uint4(0, 0, 0, 0);
      }
      // Every lane for itself: the producer's next copy then stands behind each lane's reads, not only behind one lane's.
      arrive(&ring.empty[slot]);
      x.load_ahead(next);
#pragma unroll
      for (int s = 0; s < kSteps; ++s) x.multiply_by(sum, upper[s], lower[s], s, at + s * kStep);
    }
    if (sizeof(Element) == 1) scales.apply(sum);
    leave_partial(partial, sum);
    sync_consumers();
    finish_tile<kForm>(partial, addend, y, first, beside, p);
    sync_consumers();
  }
}

template <Form kForm, typename Out, typename Element>
__device__ __forceinline__ void skinny_gemm(Out* y, const Element* w, const float* w_scales, const Product& p, const Beside& beside) {
  extern __shared__ __align__(128) uint8_t stages[];
  __shared__ Partials partial;
  __shared__ Ring ring;
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < kStages; ++slot) init_barrier(&ring.full[slot], 1), init_barrier(&ring.empty[slot], kConsumers);
    asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
  }
  __syncthreads();
  let_next_kernel_start();
  if (threadIdx.x >= kConsumers) {
    produce(ring, shared_address(stages), w, p);
    // Every warp waits: this kernel has not ended before the earlier ones have.
    wait_for_earlier_kernels();
  } else {
    wait_for_earlier_kernels();
    consume<kForm, Out, Element>(ring, shared_address(stages), partial, y, w_scales, p, beside);
  }
}

#else

template <Form kForm, typename Out, typename Element>
__device__ __forceinline__ void skinny_gemm(Out*, const Element*, const float*, const Product&, const Beside&) {}

#endif

}  // namespace stoker

#define SKINNY_GEMM_SM90(name, form, out)                                                                                   \
  extern "C" __global__ void __launch_bounds__(288, 2)                                                                      \
      name(out* y, const stoker::bf16* w, const stoker::bf16* x, stoker::bf16* weighted, const stoker::bf16* norm,          \
           float* squares, float eps, int m, int n, int k, int squares_tile) {                                          \
    stoker::skinny_gemm<stoker::Form::form>(y, w, nullptr, stoker::Product{x, m, n, k},                                     \
                                            stoker::Beside{weighted, norm, squares, eps, squares_tile});                    \
  }
#define SKINNY_GEMM_SM90_E4M3(name, form)                                                                                   \
  extern "C" __global__ void __launch_bounds__(288, 2)                                                                      \
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
