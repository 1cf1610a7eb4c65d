// The residual stream inside the products of gemm_sm90.cu: the forms `update` and `scaled` of skinny.cuh, of up to kScaledRows rows,
// with the same numbers left between them:
//
//   update   h[m][n] = bf16(h[m][n] + sum),   weighted[m][n] = bf16(h[m][n] * norm[n]),
//            squares[m][tile] = sum of h[m][n]^2 over a tile of 16 values of n
//   scaled   sum * r[m], with weighted as x:   r[m] = 1 / sqrt(sum of squares[m] / k + eps)
//
// A warp's accumulators are 16 weight rows of each row of x: a tile of squares is a warp's, whatever the block's tile, and its sum has
// one order. So what is left has the same bits at every tile size, too.
// The accumulators have a weight row a thread, memory has a row of x: pairs of bf16 are turned around eight by eight, so that
// a thread loads and stores two neighbours.
#pragma once
#include "common.cuh"

namespace stoker {

// Rows of x whose factors have room beside the barriers; threads that find them.
constexpr int kScaledRows = 128, kScalers = 64, kSquaresTile = 16;

// The residual stream's neighbours. Of products that neither update nor scale all are null.
struct GemmBeside {
  bf16* weighted;    // written by updates
  const bf16* norm;  // read by updates
  float* squares;    // written by updates, read by what is scaled
  float eps;         // of the norm that scales
  int k;             // its width
};

// Weight rows of a warp, 16 of them, and the first row of x. `n` is a multiple of 8, so eight rows are there or not.
struct WarpPlace {
  int n, m;
};

// An 8x8 matrix across a warp: lane l has elements 2 * (l % 4) and the next of row l / 4, then of column l / 4.
__device__ __forceinline__ uint32_t turned(uint32_t pair) {
  uint32_t result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;\n" : "=r"(result) : "r"(pair));
  return result;
}

// Where a thread loads and stores two neighbours: of row 8 * j + l / 4 of x in either half of the weight rows.
struct PairPlace {
  int n, m;

  __device__ __forceinline__ PairPlace(WarpPlace warp, int j, int half)
      : n(warp.n + 8 * half + threadIdx.x % 4 * 2), m(warp.m + 8 * j + threadIdx.x % kWarp / 4) {}
};

// What an update reads of a warp's tile, long before it is needed.
template <int kColumns>
struct Addends {
  uint32_t residual[kColumns / 8][2], norm[2];

  __device__ __forceinline__ void load(const bf16* h, const bf16* weights, WarpPlace warp, int n_m, int n_n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int n = PairPlace(warp, 0, half).n;
      norm[half] = n < n_n ? *reinterpret_cast<const uint32_t*>(weights + n) : 0;
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j) {
        const PairPlace at(warp, j, half);
        const bool present = at.n < n_n && at.m < n_m;
        residual[j][half] = present ? *reinterpret_cast<const uint32_t*>(h + static_cast<size_t>(at.m) * n_n + at.n) : 0;
      }
    }
  }
};

// By whole warps.
template <int kColumns>
__device__ __forceinline__ void update_residual(const float (&c)[kColumns / 8][4], const Addends<kColumns>& addends, bf16* h,
                                                const GemmBeside& beside, WarpPlace warp, int n_m, int n_n) {
  const int n_tiles = (n_n + kSquaresTile - 1) / kSquaresTile;
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j) {
    float squares = 0.f;
    const int m = PairPlace(warp, j, 0).m;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const PairPlace at(warp, j, half);
      const uint32_t before = turned(addends.residual[j][half]);
      const uint32_t after = turned(pack(low_half(before) + c[j][2 * half], high_half(before) + c[j][2 * half + 1]));
      if (at.n >= n_n || m >= n_m) continue;
      const float low = low_half(after), high = high_half(after);
      squares += low * low + high * high;
      const size_t offset = static_cast<size_t>(m) * n_n + at.n;
      *reinterpret_cast<uint32_t*>(h + offset) = after;
      *reinterpret_cast<uint32_t*>(beside.weighted + offset) = pack(low * low_half(addends.norm[half]), high * high_half(addends.norm[half]));
    }
    squares += __shfl_xor_sync(~0u, squares, 1);
    squares += __shfl_xor_sync(~0u, squares, 2);
    if (threadIdx.x % 4 == 0 && m < n_m && warp.n < n_n) {
      beside.squares[static_cast<size_t>(m) * n_tiles + warp.n / kSquaresTile] = squares;
    }
  }
}

// r of every row, by the kScalers threads: 256 sums a row, from a cache that everybody reads x from at that moment. (Those that
// multiply did this before their first stage at first: 64 rows took 10 us a layer longer.) A warp has kAtOnce rows in flight.
__device__ __forceinline__ void add_up_squares(float* scales, const GemmBeside& beside, int n_m, int thread) {
  constexpr int kAtOnce = 8;
  const int warp = thread / kWarp, lane = thread % kWarp, n_tiles = (beside.k + kSquaresTile - 1) / kSquaresTile;
  for (int first = warp * kAtOnce; first < n_m; first += kScalers / kWarp * kAtOnce) {
    float sums[kAtOnce] = {};
#pragma unroll 8
    for (int tile = lane; tile < n_tiles; tile += kWarp) {
#pragma unroll
      for (int row = 0; row < kAtOnce; ++row) {
        if (first + row < n_m) sums[row] += beside.squares[static_cast<size_t>(first + row) * n_tiles + tile];
      }
    }
#pragma unroll
    for (int row = 0; row < kAtOnce; ++row) {
      const float sum = warp_sum(sums[row]);
      if (lane == row && first + row < n_m) scales[first + row] = rsqrtf(sum / beside.k + beside.eps);
    }
  }
}

}  // namespace stoker
