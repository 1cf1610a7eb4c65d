// The same products as skinny_gemm.cu on Hopper, m = 1..8, with the weights streamed through a ring (skinny_ring.cuh). The same layouts.
//
//       stage: 16 rows of 2048 bytes, one behind the other, a bulk copy each
//
// Rows lie without padding: copies to addresses that are no multiples of 128 take 120 cycles in place of 100, which bound everything. Two rows
// then share banks when they are read, which hides behind the copies: 512 of some 1,700 cycles a stage.
// Weights of e4m3 are multiplied as f16: one instruction widens two, where bf16 takes five. x is f16 then, each warp's part times a power of
// two that its largest value allows: nothing of its eight digits is lost above 2^-32 of that.
//
// Bound by memory, 2 B * n * k: 4.5 TB/s of an H200 in the long run. In a step of one sequence gate and up of 4096 x 28672 take 51.8 us, down 28.0,
// qkv 12.5, o 8.9, 128,256 logits 230.
#include "blocks.cuh"
#include "skinny_ring.cuh"

namespace stoker {

// Warps that multiply, as `RingForm` in launch/product.rs has them.
template <typename Element>
constexpr int kRingWarps = sizeof(Element) == 1 ? 16 : 8;

#if __CUDA_ARCH__ >= 900

// Bytes of a row of a stage, and what a warp takes of it at a time.
constexpr int kCopied = 2048, kStepBytes = 64;

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

// Eight values of bf16 as f16, times a power of two.
__device__ __forceinline__ uint4 as_halves(const uint4& v, float factor) {
  float f[8];
  unpack(v, f);
  return make_uint4(pack_as<__half>(f[0] * factor, f[1] * factor), pack_as<__half>(f[2] * factor, f[3] * factor),
                    pack_as<__half>(f[4] * factor, f[5] * factor), pack_as<__half>(f[6] * factor, f[7] * factor));
}

// Of blocks, whose inputs are what a warp has of a stage. Scales come with their numbers: of both eights of a tile's rows those of a stage
// lie behind it.
constexpr int kStageScales = kCopied / kBlockInputs;

__device__ __forceinline__ float load_shared_float(uint32_t address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];\n" : "=f"(value) : "r"(address));
  return value;
}

// Rows of w as they lie; of e4m3 with a scale a row, or one a block.
template <typename Element, bool kHasBlocks = false>
struct Rows {
  static constexpr int kWarps = kRingWarps<Element>, kValues = kCopied / sizeof(Element);
  static constexpr bool kHalves = sizeof(Element) == 1;
  static constexpr int kXBytes = sizeof(bf16) / sizeof(Element);  // beside a byte of w
  const Element* w;
  const float* scales;  // of e4m3

  __device__ __forceinline__ int n_stages(const Product& p) const { return (p.k + kValues - 1) / kValues; }
  __device__ __forceinline__ uint32_t x_row_bytes(const Product& p) const { return n_stages(p) * kValues * sizeof(bf16); }
  __device__ __forceinline__ uint32_t stage_bytes() const {
    return kTileRows * kCopied + (kHasBlocks ? 2 * kStageScales * sizeof(float) : 0);
  }

  __device__ __forceinline__ void copy(uint32_t target, int first, int stage, uint64_t* barrier, const Product& p) const {
    const int lane = threadIdx.x % kWarp, row_bytes = p.k * sizeof(Element);
    const uint32_t n_bytes = min(kCopied, row_bytes - stage * kCopied);
    const int n_scales = block_scales_of_rows(p.k);
    const uint32_t scale_bytes = kHasBlocks ? min(kStageScales, n_scales - stage * kStageScales) * sizeof(float) : 0;
    if (lane == 0) arrive_expecting(barrier, kTileRows * n_bytes + 2 * scale_bytes);
    __syncwarp();
    if (kHasBlocks && lane >= kTileRows && lane < kTileRows + 2) {
      const int half = lane - kTileRows, block = min(first / kBlockRows + half, (p.n - 1) / kBlockRows);
      const float* from = scales + static_cast<size_t>(block) * n_scales + stage * kStageScales;
      copy_once(target + kTileRows * kCopied + half * kStageScales * sizeof(float), from, scale_bytes, barrier);
    }
    // Rows past the end repeat the last one; their sums are not stored.
    const Element* row = w + static_cast<size_t>(min(first + lane % kTileRows, p.n - 1)) * p.k;
    if (lane < kTileRows) copy_once(target + lane * kCopied, row + stage * kValues, n_bytes, barrier);
  }

  __device__ __forceinline__ void stage_x(Shared<kWarps>& shared, const Room& room, const Product& p) const {
    const int n_values = n_stages(p) * kValues;
    for (int m = 0; m < p.m; ++m) {
      float factor = 1.f;
      if (kHalves) {
        float largest = 0.f;
        each_of_x<kValues, kWarps>(p, m, [&](const uint4& v, int) { largest = fmaxf(largest, largest_of(v)); });
        factor = factor_to(15, warp_max(largest));
        if (threadIdx.x % kWarp == 0) shared.x_factor[threadIdx.x / kWarp][m] = factor;
      }
      each_of_x<kValues, kWarps>(p, m, [&](const uint4& v, int at) {
        if (at < n_values) store_shared(room.x + m * room.x_row_bytes + at * sizeof(bf16), kHalves ? as_halves(v, factor) : v);
      });
    }
  }

  // A lane's 16 bytes of either row of weights with its part of a column of x.
  __device__ __forceinline__ static void multiply(float (&sum)[4], const uint4& upper, const uint4& lower, uint32_t x, bool present) {
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

  // Two sums, so that a product does not wait for the one in front.
  __device__ __forceinline__ void multiply_tile(float (&sum)[4], Shared<kWarps>& shared, const Room& room, Turn& turn, int first,
                                                const Product& p) const {
    constexpr int kSteps = kCopied / (kWarps * kStepBytes);
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
    const int own = warp * kSteps * kStepBytes + t * 16, row_bytes = p.k * sizeof(Element);
    const uint32_t x = room.x + g * room.x_row_bytes;
    static_assert(!kHasBlocks || kSteps * kStepBytes == kBlockInputs);
    RowScales row_scales(kHasBlocks ? nullptr : scales, min(first + g, p.n - 1), min(first + g + 8, p.n - 1));
    float sums[2][4] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] = 0.f;
    for (int at = own; at - own < row_bytes; at += kCopied, turn.next(room)) {
      const uint32_t rows = turn.stage(room) + g * kCopied + own;
      turn.wait(shared);
      uint4 upper[kSteps], lower[kSteps];
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        // Past the end of k the stage holds what an earlier one left; 0 * NaN would reach the sum.
        const bool present = at + s * kStepBytes < row_bytes;
        upper[s] = present ? load_shared(rows + s * kStepBytes) : make_uint4(0, 0, 0, 0);
        lower[s] = present ? load_shared(rows + 8 * kCopied + s * kStepBytes) : make_uint4(0, 0, 0, 0);
      }
#pragma unroll
      for (int s = 0; s < kSteps; ++s) multiply(sums[s % 2], upper[s], lower[s], x + (at + s * kStepBytes) * kXBytes, g < p.m);
      if (kHasBlocks) {
        // Behind the depth none came.
        const bool present = at - t * 16 < row_bytes;
        const uint32_t own_scale = turn.stage(room) + kTileRows * kCopied + warp * sizeof(float);
        const float above = present ? load_shared_float(own_scale) : 0.f;
        const float below = present ? load_shared_float(own_scale + kStageScales * sizeof(float)) : 0.f;
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[i] = fmaf(i < 2 ? above : below, sums[0][i] + sums[1][i], sum[i]), sums[0][i] = sums[1][i] = 0.f;
      }
      turn.give_back(shared);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] += sums[0][i] + sums[1][i];
    if (!kHalves) return;
    row_scales.apply(sum);
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] = 2 * t + i % 2 < p.m ? sum[i] / shared.x_factor[warp][2 * t + i % 2] : 0.f;
  }

  __device__ __forceinline__ static void leave(Partials<kWarps>& partial, const float (&sum)[4]) { leave_partial(partial, sum); }
};

template <Form kForm, bool kHasBlocks = false, typename Out, typename Element>
__device__ __forceinline__ void skinny_gemm(Out* y, const Element* w, const float* w_scales, const Product& p, const Beside& beside) {
  __shared__ Shared<kRingWarps<Element>> shared;
  multiply_through_ring<kForm>(shared, y, Rows<Element, kHasBlocks>{w, w_scales}, p, beside);
}

#else

template <Form kForm, bool kHasBlocks = false, typename Out, typename Element>
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
#define SKINNY_GEMM_SM90_E4M3(name, form, has_blocks)                                                                                   \
  extern "C" __global__ void __launch_bounds__((stoker::kRingWarps<uint8_t> + 1) * 32, 1)                                                                      \
      name(stoker::bf16* y, const uint8_t* w, const float* w_scales, const stoker::bf16* x, stoker::bf16* weighted,         \
           const stoker::bf16* norm, float* squares, float eps, int m, int n, int k, int squares_tile) {                \
    stoker::skinny_gemm<stoker::Form::form, has_blocks>(y, w, w_scales, stoker::Product{x, m, n, k},                                    \
                                            stoker::Beside{weighted, norm, squares, eps, squares_tile});                    \
  }
SKINNY_GEMM_SM90(skinny_gemm_sm90_bf16, kPlain, stoker::bf16)
SKINNY_GEMM_SM90(skinny_gemm_sm90_f32, kPlain, float)
SKINNY_GEMM_SM90(skinny_gemm_sm90_update, kUpdate, stoker::bf16)
SKINNY_GEMM_SM90(skinny_gemm_sm90_scaled_bf16, kScaled, stoker::bf16)
SKINNY_GEMM_SM90(skinny_gemm_sm90_scaled_f32, kScaled, float)
SKINNY_GEMM_SM90(skinny_gemm_sm90_gated, kGated, stoker::bf16)
SKINNY_GEMM_SM90_E4M3(skinny_gemm_sm90_e4m3_bf16, kPlain, false)
SKINNY_GEMM_SM90_E4M3(skinny_gemm_sm90_e4m3_update, kUpdate, false)
SKINNY_GEMM_SM90_E4M3(skinny_gemm_sm90_e4m3_scaled, kScaled, false)
SKINNY_GEMM_SM90_E4M3(skinny_gemm_sm90_e4m3_gated, kGated, false)
SKINNY_GEMM_SM90_E4M3(skinny_gemm_sm90_blocks_bf16, kPlain, true)
SKINNY_GEMM_SM90_E4M3(skinny_gemm_sm90_blocks_update, kUpdate, true)
SKINNY_GEMM_SM90_E4M3(skinny_gemm_sm90_blocks_scaled, kScaled, true)
SKINNY_GEMM_SM90_E4M3(skinny_gemm_sm90_blocks_gated, kGated, true)
