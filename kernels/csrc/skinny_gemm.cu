// Matrix product of a few rows: y[m][n] = sum_k x[m][k] * w[n][k], for m = 1..8 rows of x, and what stands beside it in a
// layer (skinny.cuh). This is every linear layer while decoding one sequence; the time is the time to read w once.
//
// Layout: w is n x k bf16 row-major (as checkpoints store it), x is m x k bf16, y is m x n bf16 or f32 (m x n/2 if gated). k is
// a multiple of 8; n is free, a multiple of 16 if gated.
// The tensor core multiplies 16 rows of w (its A operand) by 8 columns of x (B): any m up to 8 costs the same instructions
// as m = 1, and two of them per 32 bytes of w leave the issue slots to the loads. k may be summed in any order as long as A
// and B agree, so a lane reads 16 contiguous bytes of its row and feeds them to two products as they lie; w never touches
// shared memory:
//
//       k of one step (32):   lane t=0: 0..7    t=1: 8..15   t=2: 16..23   t=3: 24..31
//       first product takes elements 0..3 of each lane, the second 4..7
//
// Weights of e4m3 with a scale a row are the same bytes, of 16 values a lane: they are widened to bf16, exactly, on their way to four
// products, and the sums scaled. x stays bf16, so one row loses nothing by quantising it; 1 B * n * k.
//
// A block owns 16 rows of w. Its 8 warps take chunks of 4 steps (128 values of k, 256 contiguous bytes a row) in turn.
// The first chunk of w is requested before the wait for the kernel in front, the next one before each chunk is used:
// about 8 KiB in flight a warp, 64 KiB or more a multiprocessor; 23 KiB would cover the memory's latency at full rate.
// Bound by memory, 2 B * n * k: 93 % of the read ceiling for large w and m = 1, 72 % for 4096 x 4096. On Hopper
// skinny_gemm_sm90.cu is used instead.
#include "skinny.cuh"

namespace stoker {

constexpr int kSteps = 4;

// The weights are read once a step: they must not push activations out of L1. Loads of constant memory (.nc) the assembler moves as
// it likes, and it moved the first ones behind the wait for the kernel in front; these stay where they stand.
__device__ __forceinline__ uint4 load_weights(const void* pointer) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(pointer)
               : "memory");
  return v;
}

// What a lane holds of one step: rows g and g + 8 of w.
struct Weights {
  uint4 upper, lower;
};

template <typename Element>
__device__ __forceinline__ Weights load_step(const Element* upper, const Element* lower, int at, int k) {
  const uint4 zeros = make_uint4(0, 0, 0, 0);
  return {at < k ? load_weights(upper + at) : zeros, at < k ? load_weights(lower + at) : zeros};
}

template <Form kForm, typename Out, typename Element>
__device__ __forceinline__ void skinny_gemm(Out* y, const Element* w, const float* w_scales, const Product& p, const Beside& beside) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
  // Rows past the end repeat the last one; their sums are not stored.
  const int first = blockIdx.x * kTileRows, k = p.k, upper_row = min(first + g, p.n - 1), lower_row = min(first + g + 8, p.n - 1);
  const Element* upper = w + static_cast<size_t>(upper_row) * k;
  const Element* lower = w + static_cast<size_t>(lower_row) * k;
  constexpr int kOwn = kLaneValues<Element>, kStep = 4 * kOwn;
  const int stride = kProductWarps * kSteps * kStep;
  int from = warp * kSteps * kStep + t * kOwn;
  Weights chunk[kSteps];
#pragma unroll
  for (int s = 0; s < kSteps; ++s) chunk[s] = load_step(upper, lower, from + s * kStep, k);
  const RowScales scales(w_scales, upper_row, lower_row);
  wait_for_earlier_kernels();
  let_next_kernel_start();
  __shared__ Partials<kProductWarps> partial;
  __shared__ float row_squares[kColumns];
  add_up_squares<kForm>(row_squares, beside, p);
  const Addend addend = load_addend<kForm>(threadIdx.x, y, first, beside, p);
  const bf16* x = g < p.m ? p.x + static_cast<size_t>(g) * k : nullptr;
  float sum[4] = {};
  // As many rounds in all lanes: products need the whole warp.
  for (; from - t * kOwn < k; from += stride) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int at = from + s * kStep;
      multiply(sum, chunk[s].upper, chunk[s].lower, x != nullptr && at < k ? x + at : nullptr, w);
      chunk[s] = load_step(upper, lower, at + stride, k);
    }
  }
  if (sizeof(Element) == 1) scales.apply(sum);
  leave_partial(partial, sum);
  __syncthreads();
  finish_tile<kForm>(threadIdx.x, partial, row_squares, addend, y, first, beside, p);
}

}  // namespace stoker

#define SKINNY_GEMM(name, form, out)                                                                                        \
  extern "C" __global__ void __launch_bounds__(256, 4)                                                                      \
      name(out* y, const stoker::bf16* w, const stoker::bf16* x, stoker::bf16* weighted, const stoker::bf16* norm,          \
           float* squares, float eps, int m, int n, int k, int squares_tile) {                                          \
    stoker::skinny_gemm<stoker::Form::form>(y, w, nullptr, stoker::Product{x, m, n, k},                                  \
                                            stoker::Beside{weighted, norm, squares, eps, squares_tile});                    \
  }
#define SKINNY_GEMM_E4M3(name, form)                                                                                        \
  extern "C" __global__ void __launch_bounds__(256, 4)                                                                      \
      name(stoker::bf16* y, const uint8_t* w, const float* w_scales, const stoker::bf16* x, stoker::bf16* weighted,         \
           const stoker::bf16* norm, float* squares, float eps, int m, int n, int k, int squares_tile) {                \
    stoker::skinny_gemm<stoker::Form::form>(y, w, w_scales, stoker::Product{x, m, n, k},                           \
                                            stoker::Beside{weighted, norm, squares, eps, squares_tile});                    \
  }
SKINNY_GEMM(skinny_gemm_bf16, kPlain, stoker::bf16)
SKINNY_GEMM(skinny_gemm_f32, kPlain, float)
SKINNY_GEMM(skinny_gemm_update, kUpdate, stoker::bf16)
SKINNY_GEMM(skinny_gemm_scaled_bf16, kScaled, stoker::bf16)
SKINNY_GEMM(skinny_gemm_scaled_f32, kScaled, float)
SKINNY_GEMM(skinny_gemm_gated, kGated, stoker::bf16)
SKINNY_GEMM_E4M3(skinny_gemm_e4m3_bf16, kPlain)
SKINNY_GEMM_E4M3(skinny_gemm_e4m3_update, kUpdate)
SKINNY_GEMM_E4M3(skinny_gemm_e4m3_scaled, kScaled)
SKINNY_GEMM_E4M3(skinny_gemm_e4m3_gated, kGated)
