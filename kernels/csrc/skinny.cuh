// The end that both small-batch products share: warps that have each summed a part of k add up through shared memory, in a
// fixed order, so that a row of y does not depend on m or on the other rows.
#pragma once
#include "mma.cuh"

namespace stoker {

constexpr int kProductWarps = 8, kTileRows = 16;  // rows of w that a block multiplies at a time

// One row of padding: the lanes of a warp write 8 columns at once.
template <int kTiles>
using Partials = float[kProductWarps][kTiles * 8][kTileRows + 1];

// kTiles * 8 is the room for rows of x, which are the columns of the products.
template <int kTiles>
__device__ __forceinline__ void leave_partial(Partials<kTiles>& partial, const float (&sum)[kTiles][4]) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < 4; ++i) partial[warp][tile * 8 + 2 * t + i % 2][g + 8 * (i / 2)] = sum[tile][i];
  }
}

// Thread -> (row of x, row of w), rows of w fastest: stores of 16 neighbours.
template <int kTiles, typename Out>
__device__ __forceinline__ void store_total(const Partials<kTiles>& partial, Out* y, int first_row, int m, int n) {
  const int row = threadIdx.x % kTileRows, column = threadIdx.x / kTileRows;
  if (column >= m || column >= kTiles * 8 || first_row + row >= n) return;
  float total = 0.f;
#pragma unroll
  for (int w = 0; w < kProductWarps; ++w) total += partial[w][column][row];
  y[static_cast<size_t>(column) * n + first_row + row] = static_cast<Out>(total);
}

// Two products over 32 values of k. A lane holds 16 contiguous bytes of each operand: k may be summed in any order as long
// as both agree, so the first product takes elements 0..3 of each lane and the second 4..7.
__device__ __forceinline__ void multiply_step(float (&sum)[4], const uint4& upper, const uint4& lower, const uint4& x) {
  mma(sum, upper.x, lower.x, upper.y, lower.y, x.x, x.y);
  mma(sum, upper.z, lower.z, upper.w, lower.w, x.z, x.w);
}

}  // namespace stoker
