// Matrix product of a few rows: y[m][n] = sum_k x[m][k] * w[n][k], for m = 1..16 rows of x. This is every linear layer
// while decoding a small batch; the time is the time to read w once.
//
// Layout: w is n x k bf16 row-major (as checkpoints store it), x is m x k bf16, y is m x n bf16 or f32. k is a multiple
// of 8; n is free.
// The tensor core multiplies 16 rows of w (its A operand) by 8 or 16 columns of x (B): any m up to 16 costs the same
// instructions as m = 1, and two of them per 32 bytes of w leave the issue slots to the loads. k may be summed in any
// order as long as A and B agree, so a lane reads 16 contiguous bytes of its row and feeds them to two products as they
// lie; w never touches shared memory:
//
//       k of one step (32):   lane t=0: 0..7    t=1: 8..15   t=2: 16..23   t=3: 24..31
//       first product takes elements 0..3 of each lane, the second 4..7
//
// A block owns 16 rows of w. Its 8 warps take chunks of 4 steps (128 values of k, 256 contiguous bytes a row) in turn and
// add up through shared memory at the end, in a fixed order: a row of y does not depend on m or on the other rows.
// The first chunk of w is requested before the wait for the kernel in front, the next one before each chunk is used:
// about 8 KiB in flight a warp, 64 KiB or more a multiprocessor; 23 KiB would cover the memory's latency at full rate.
// Bound by memory, 2 B * n * k: 93 % of the read ceiling for large w and m = 1, 72 % for 4096 x 4096; 16 rows of x cost 30 %
// more, because every block reads all of x. On Hopper skinny_gemm_sm90.cu is used instead.
#include "skinny.cuh"

namespace stoker {

constexpr int kSteps = 4, kStep = 32;

// The weights are read once a step: they must not push activations out of L1.
__device__ __forceinline__ uint4 load_weights(const bf16* pointer) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(pointer));
  return v;
}

struct WeightChunk {
  uint4 upper[kSteps], lower[kSteps];  // rows g and g + 8
};

__device__ __forceinline__ void load_chunk(WeightChunk& chunk, const bf16* upper, const bf16* lower, int from, int k) {
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    const int at = from + s * kStep;
    chunk.upper[s] = at < k ? load_weights(upper + at) : make_uint4(0, 0, 0, 0);
    chunk.lower[s] = at < k ? load_weights(lower + at) : make_uint4(0, 0, 0, 0);
  }
}

template <int kTiles>
__device__ __forceinline__ void multiply_chunk(float (&sum)[kTiles][4], const WeightChunk& chunk, const bf16* const (&x)[kTiles],
                                               int from, int k) {
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    const int at = from + s * kStep;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      uint4 b = make_uint4(0, 0, 0, 0);
      if (x[tile] != nullptr && at < k) b = *reinterpret_cast<const uint4*>(x[tile] + at);
      multiply_step(sum[tile], chunk.upper[s], chunk.lower[s], b);
    }
  }
}

template <int kTiles, typename Out>
__device__ __forceinline__ void skinny_gemm(Out* y, const bf16* w, const bf16* x, int m, int n, int k) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
  // Rows past the end repeat the last one; their sums are not stored.
  const int first = blockIdx.x * kTileRows;
  const bf16* upper = w + static_cast<size_t>(min(first + g, n - 1)) * k;
  const bf16* lower = w + static_cast<size_t>(min(first + g + 8, n - 1)) * k;
  const int stride = kProductWarps * kSteps * kStep;
  int from = warp * kSteps * kStep;  // the same in all lanes: products need the whole warp
  WeightChunk chunk;
  load_chunk(chunk, upper, lower, from + t * 8, k);
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const bf16* column[kTiles];
  float sum[kTiles][4] = {};
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    column[tile] = tile * 8 + g < m ? x + static_cast<size_t>(tile * 8 + g) * k : nullptr;
  }
  for (; from < k; from += stride) {
    WeightChunk next;
    load_chunk(next, upper, lower, from + stride + t * 8, k);
    multiply_chunk<kTiles>(sum, chunk, column, from + t * 8, k);
    chunk = next;
  }
  __shared__ Partials<kTiles> partial;
  leave_partial<kTiles>(partial, sum);
  __syncthreads();
  store_total<kTiles>(partial, y, first, m, n);
}

}  // namespace stoker

#define SKINNY_GEMM(name, tiles, out)                                                                             \
  extern "C" __global__ void __launch_bounds__(256)                                                               \
      name(out* y, const stoker::bf16* w, const stoker::bf16* x, int m, int n, int k) {                           \
    stoker::skinny_gemm<tiles>(y, w, x, m, n, k);                                                                 \
  }
SKINNY_GEMM(skinny_gemm_m8_bf16, 1, stoker::bf16)
SKINNY_GEMM(skinny_gemm_m8_f32, 1, float)
SKINNY_GEMM(skinny_gemm_m16_bf16, 2, stoker::bf16)
SKINNY_GEMM(skinny_gemm_m16_f32, 2, float)
