// The residual stream inside the products of gemm_sm90.cu: the forms `update` and `scaled` of skinny.cuh, of up to kScaledRows rows,
// with numbers left between them as there:
//
//   update   h[m][n] = bf16(h[m][n] + sum),   weighted[m][n] = bf16(h[m][n] * norm[n]),
//            squares[m][tile] = sum of h[m][n]^2 over a tile of 16, 32 or 64 values of n: the weight rows of a block's tile
//   scaled   sum * r[m], with weighted as x:   r[m] = 1 / sqrt(sum of squares[m] / k + eps)
//
// Squares are added up in one order whatever the tile: 16 by a warp, four of these as (a + b) + (c + d). So all has the same bits
// at every tile size, too.
// The accumulators have a weight row a thread, memory has a row of x: pairs of bf16 are turned around eight by eight, so that
// a thread loads and stores two neighbours.
#pragma once
#include "common.cuh"

namespace stoker {

// Rows of x whose factors have room beside the barriers; threads that find them.
constexpr int kScaledRows = 128, kScalers = 64;
// Sums that a warp leaves in shared memory at a time.
constexpr int kScratchColumns = 32;

// The residual stream's neighbours. Of products that neither update nor scale all are null.
struct GemmBeside {
  bf16* weighted;    // written by updates
  const bf16* norm;  // read by updates
  float* squares;    // written by updates, read by what is scaled
  float eps;         // of the norm that scales
  int k;             // its width
  int tile;          // values of a sum of squares that is read
};

// Weight rows of a warp, 16 of them, and the first row of x. `n` is a multiple of 8, so eight rows are there or not.
struct WarpPlace {
  int n, m;
};

__device__ __forceinline__ void sync_warpgroup() { asm volatile("bar.sync 1, 128;\n" ::: "memory"); }

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

// By a warp: eight rows of x of its 16 weight rows. Returns the sum of squares of row l / 4 of these.
template <int kColumns>
__device__ __forceinline__ float update_eight(const float (&c)[4], const Addends<kColumns>& addends, int j, bf16* h,
                                              const GemmBeside& beside, WarpPlace warp, int n_m, int n_n) {
  float squares = 0.f;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const PairPlace at(warp, j, half);
    const uint32_t before = turned(addends.residual[j][half]);
    const uint32_t after = turned(pack(low_half(before) + c[2 * half], high_half(before) + c[2 * half + 1]));
    if (at.n >= n_n || at.m >= n_m) continue;
    const float low = low_half(after), high = high_half(after);
    squares += low * low + high * high;
    const size_t offset = static_cast<size_t>(at.m) * n_n + at.n;
    *reinterpret_cast<uint32_t*>(h + offset) = after;
    *reinterpret_cast<uint32_t*>(beside.weighted + offset) = pack(low * low_half(addends.norm[half]), high * high_half(addends.norm[half]));
  }
  squares += __shfl_xor_sync(~0u, squares, 1);
  return squares + __shfl_xor_sync(~0u, squares, 2);
}

// By a whole warpgroup, whose tile begins at `tile` and has 16, 32 or 64 weight rows: each of its warps with rows has 16 of them.
// `scratch` is shared memory for kScratchColumns sums of each of its warps.
template <int kColumns>
__device__ __forceinline__ void update_residual(const float (&c)[kColumns / 8][4], const Addends<kColumns>& addends, bf16* h,
                                                const GemmBeside& beside, WarpPlace tile, int rows, int n_m, int n_n, float* scratch) {
  constexpr int kAtOnce = kColumns < kScratchColumns ? kColumns : kScratchColumns;
  const int thread = threadIdx.x % 128, own = thread / kWarp * 16, n_tiles = (n_n + rows - 1) / rows;
#pragma unroll
  for (int first = 0; first < kColumns; first += kAtOnce) {
#pragma unroll
    for (int j = first / 8; j < (first + kAtOnce) / 8 && own < rows; ++j) {
      const float squares = update_eight<kColumns>(c[j], addends, j, h, beside, {tile.n + own, tile.m}, n_m, n_n);
      if (thread % 4 == 0) scratch[own / 16 * kAtOnce + 8 * j - first + thread % kWarp / 4] = squares;
    }
    sync_warpgroup();
    const int m = tile.m + first + thread;
    if (thread < kAtOnce && m < n_m && tile.n < n_n) {
      const float* sums = scratch + thread;
      const float pair = rows >= 32 ? sums[0] + sums[kAtOnce] : sums[0];
      const float all = rows == 64 ? pair + (sums[2 * kAtOnce] + sums[3 * kAtOnce]) : pair;
      beside.squares[static_cast<size_t>(m) * n_tiles + tile.n / rows] = all;
    }
    sync_warpgroup();
  }
}

// The sum of a row of sums: of 64 values each first, so that the tile makes no difference.
__device__ __forceinline__ float sum_of_row(const float* row, int n_tiles, int tile) {
  float sum = 0.f;
  if (n_tiles % 4 == 0) {
#pragma unroll 16
    for (int i = 0; i < n_tiles; i += 4) {
      const float4 v = *reinterpret_cast<const float4*>(row + i);
      const float left = v.x + v.y, right = v.z + v.w;
      sum = tile == 16 ? sum + (left + right) : tile == 32 ? sum + left + right : sum + v.x + v.y + v.z + v.w;
    }
    return sum;
  }
  const int n_pieces = 64 / tile;
#pragma unroll 1
  for (int i = 0; i < n_tiles; i += n_pieces) {
    auto piece = [&](int at) { return at < n_pieces && i + at < n_tiles ? row[i + at] : 0.f; };
    sum += (piece(0) + piece(1)) + (piece(2) + piece(3));
  }
  return sum;
}

// r of every row, one a thread of kScalers. At that moment everybody's copies queue up in front of the cache: a load takes 5 us, so few
// rounds of them count, and few sums. So does the size of this code, which every product of a step fetches anew.
__device__ __forceinline__ void add_up_squares(float* scales, const GemmBeside& beside, int n_m, int thread) {
  const int n_tiles = (beside.k + beside.tile - 1) / beside.tile;
#pragma unroll 1
  for (int m = thread; m < n_m; m += kScalers) {
    scales[m] = rsqrtf(sum_of_row(beside.squares + static_cast<size_t>(m) * n_tiles, n_tiles, beside.tile) / beside.k + beside.eps);
  }
}

}  // namespace stoker
