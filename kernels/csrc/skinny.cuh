// What both small-batch products share: their operands and their end. Warps that have each summed a part of k add up through
// shared memory in a fixed order, so that a row of y does not depend on m or on the other rows; then a tile of 16 values of each
// row is finished in one of these forms:
//
//   plain    y[m][n] = sum_k w[n][k] * x[m][k]
//   update   h[m][n] = bf16(h[m][n] + plain), the residual stream in y; what the norm behind it needs is left beside it:
//            weighted[m][n] = bf16(h[m][n] * norm[n]),   squares[m][tile] = sum of h[m][n]^2 over the tile
//   scaled   y[m][n] = r[m] * plain, with weighted as x:  r[m] = 1 / sqrt(sum of squares[m] / k + eps)
//   gated    y[m][i] = bf16(silu(gate)) * up, gate and up scaled and rounded to bf16, of rows of w that lie as silu_mul.cu reads them
//
// So the norm between two products costs no launch, and neither loop knows of it. (A first version normed x in the loop: its
// instructions made the product 12 % slower.) The models' reference code rounds to bf16 behind r and again behind the norm's
// weight. Here r stands outside the sum and x is rounded once, behind the weight: as near to the exact product, but not
// the same bits.
#pragma once
#include "activation.cuh"
#include "mma.cuh"

namespace stoker {

// Rows of w that a block multiplies at a time, and the room for rows of x, which are the columns of the products.
constexpr int kProductWarps = 8, kTileRows = 16, kColumns = 8;

// All let the next kernel's blocks in at their start, so that its first weights come in while this one drains. If that is a product of
// few blocks, no more of them may fit a multiprocessor than each is to have: they take the places that come free first, would
// crowd there and read at that rate (a step of one sequence: 5.95 ms, 4.03 without).
enum class Form { kPlain, kUpdate, kScaled, kGated };

struct Product {
  const bf16* x;
  int m, n, k;
};

// What lies beside the residual stream between an update and what is scaled.
struct Beside {
  bf16* weighted;    // written by updates
  const bf16* norm;  // read by updates
  float* squares;    // written by updates, read by what is scaled; null: x is normed already
  float eps;         // of the norm that scales
  int squares_tile;  // values of a sum of squares that is read
};

// What each warp has of a tile. One row of padding: the lanes of a warp write 8 columns at once.
template <int kWarps>
struct Partials {
  float products[kWarps][kColumns][kTileRows + 1];
};

// Two products over 32 values of k. A lane holds 16 contiguous bytes of each operand: k may be summed in any order as long
// as both agree, so the first product takes elements 0..3 of each lane and the second 4..7.
__device__ __forceinline__ void multiply_step(float (&sum)[4], const uint4& upper, const uint4& lower, const uint4& x) {
  mma(sum, upper.x, lower.x, upper.y, lower.y, x.x, x.y);
  mma(sum, upper.z, lower.z, upper.w, lower.w, x.z, x.w);
}

// Values of 16 bytes of weights; those of four lanes are a step.
template <typename Element>
constexpr int kLaneValues = 16 / sizeof(Element);

// Four values of e4m3 as two pairs of bf16. The bits in place are the value times 2^-120, numbers too small for e4m3's exponent
// too; the factor is exact.
__device__ __forceinline__ uint2 widened(uint32_t four) {
  auto pair = [](uint32_t bytes) {
    const uint32_t bits = (bytes & 0x80008000u) | (bytes >> 4 & 0x07f007f0u), factor = 0x7b807b80u;
    const __nv_bfloat162 value = __hmul2(reinterpret_cast<const __nv_bfloat162&>(bits), reinterpret_cast<const __nv_bfloat162&>(factor));
    return reinterpret_cast<const uint32_t&>(value);
  };
  return make_uint2(pair(__byte_perm(four, 0, 0x1404)), pair(__byte_perm(four, 0, 0x3424)));
}

// A lane's 16 bytes of either row of weights with its part of a column, null where there is none.
__device__ __forceinline__ void multiply(float (&sum)[4], const uint4& upper, const uint4& lower, const bf16* x, const bf16*) {
  multiply_step(sum, upper, lower, x ? *reinterpret_cast<const uint4*>(x) : make_uint4(0, 0, 0, 0));
}

__device__ __forceinline__ void multiply(float (&sum)[4], const uint4& upper, const uint4& lower, const bf16* x, const uint8_t*) {
  const uint32_t above[4] = {upper.x, upper.y, upper.z, upper.w}, below[4] = {lower.x, lower.y, lower.z, lower.w};
  const uint4* column = reinterpret_cast<const uint4*>(x);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint4 v = x ? column[half] : make_uint4(0, 0, 0, 0);
    const uint2 a = widened(above[2 * half]), b = widened(below[2 * half]), c = widened(above[2 * half + 1]), d = widened(below[2 * half + 1]);
    mma(sum, a.x, b.x, a.y, b.y, v.x, v.y);
    mma(sum, c.x, d.x, c.y, d.y, v.z, v.w);
  }
}

// Of the two rows of weights of a lane; one where they are bf16.
struct RowScales {
  float upper, lower;

  __device__ __forceinline__ RowScales(const float* scales, int upper_row, int lower_row)
      : upper(scales ? scales[upper_row] : 1.f), lower(scales ? scales[lower_row] : 1.f) {}

  __device__ __forceinline__ void apply(float (&sum)[4]) const { sum[0] *= upper, sum[1] *= upper, sum[2] *= lower, sum[3] *= lower; }
};

// Before the loop, when the first weights are still on their way: a warp for each row of x.
template <Form kForm>
__device__ __forceinline__ void add_up_squares(float (&row_squares)[kColumns], const Beside& beside, const Product& p) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, n_tiles = (p.k + beside.squares_tile - 1) / beside.squares_tile;
  if (kForm == Form::kPlain || kForm == Form::kUpdate || beside.squares == nullptr || warp >= p.m) return;
  const float* squares = beside.squares + static_cast<size_t>(warp) * n_tiles;
  float sum = 0.f;
#pragma unroll 8
  for (int i = lane; i < n_tiles; i += kWarp) sum += squares[i];
  sum = warp_sum(sum);
  if (lane == 0) row_squares[warp] = sum;
}

template <int kWarps>
__device__ __forceinline__ void leave_partial(Partials<kWarps>& partial, const float (&sum)[4]) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int i = 0; i < 4; ++i) partial.products[warp][2 * t + i % 2][g + 8 * (i / 2)] = sum[i];
}

template <int kWarps>
__device__ __forceinline__ float total(const Partials<kWarps>& partial, int column, int row) {
  float sum = 0.f;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) sum += partial.products[w][column][row];
  return sum;
}

// The value of a tile that the `nth` thread finishes, rows of w fastest, so that neighbours store together. Of a gated tile eight rows
// are gate and eight up of the same features: half as many values.
template <Form kForm>
struct Place {
  static constexpr int kFold = kForm == Form::kGated ? 2 : 1, kRows = kTileRows / kFold;
  int row, column;
  bool present;
  size_t at;  // in y

  __device__ __forceinline__ Place(int nth, int first_row, const Product& p)
      : row(nth % kRows), column(nth / kRows), present(column < p.m && first_row + row < p.n),
        at(static_cast<size_t>(column) * (p.n / kFold) + first_row / kFold + row) {}
};

// What an update needs of the residual and the norm: read long before it is needed.
struct Addend {
  float residual, norm;
};

template <Form kForm, typename Out>
__device__ __forceinline__ Addend load_addend(int nth, const Out* y, int first_row, const Beside& beside, const Product& p) {
  const Place<kForm> place(nth, first_row, p);
  if (kForm != Form::kUpdate || !place.present) return {0.f, 0.f};
  return {static_cast<float>(y[place.at]), static_cast<float>(beside.norm[first_row + place.row])};
}

template <Form kForm, typename Out, int kWarps>
__device__ __forceinline__ void finish_tile(int nth, const Partials<kWarps>& partial, const float (&row_squares)[kColumns], const Addend& addend,
                                            Out* y, int first_row, const Beside& beside, const Product& p) {
  const Place<kForm> place(nth, first_row, p);
  if (place.column >= kColumns) return;  // whole warps
  float sum = total(partial, place.column, place.row);
  if constexpr (kForm == Form::kUpdate) {
    const float h = rounded(addend.residual + sum);
    float squares = place.present ? h * h : 0.f;
#pragma unroll
    for (int distance = kTileRows / 2; distance > 0; distance /= 2) squares += __shfl_xor_sync(~0u, squares, distance);
    if (!place.present) return;
    y[place.at] = static_cast<Out>(h);
    beside.weighted[place.at] = __float2bfloat16_rn(h * addend.norm);
    const int n_tiles = (p.n + kTileRows - 1) / kTileRows;
    if (place.row == 0) beside.squares[place.column * n_tiles + first_row / kTileRows] = squares;
    return;
  }
  if (!place.present) return;
  const float scale = kForm == Form::kPlain || beside.squares == nullptr ? 1.f : rsqrtf(row_squares[place.column] / p.k + beside.eps);
  sum *= scale;
  if constexpr (kForm == Form::kGated) {
    sum = silu_mul_of_sums(sum, total(partial, place.column, place.row + place.kRows) * scale);
  }
  y[place.at] = static_cast<Out>(sum);
}

}  // namespace stoker
