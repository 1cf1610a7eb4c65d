// Weights of four bits to e4m3 with a scale an output (quantise.cuh says what rows of e4m3 are), for products of many rows: these are
// bound by the tensor cores, which take e4m3 at twice the rate of bf16, and widening costs less than half of the product that it saves.
//
//   largest[n] = max over groups of |scale| * max(zero, 15 - zero)      what no weight of the output is larger than
//   scale[n]   = largest[n] / 448, or 1 for an output of zeros
//   w[n][k]    = e4m3((code - zero) * (scale of the group / scale[n]))   to nearest; the quotient is rounded to f32 first
//
// The largest is of the codes that there might be, not of those that there are: it needs the groups alone, and of a number of e4m3 as
// many digits stay however much smaller it is.
//
// Layout: codes and groups as int4.cuh draws them; w n x k, row-major, k a multiple of 16; one scale an output. A block has a tile of 16
// outputs and some of its chunks of 64 values, which its warps take in turn; each finds the scales of the tile by itself. The four lanes
// that hold 16 values of a row each in parts exchange them, so that each stores 16 bytes.
// Bound by memory: 1.53 B a weight for groups of 128. Figures: docs/benchmarks/NOTES.md.
#include "int4.cuh"
#include "quantise.cuh"

namespace stoker {

constexpr int kWidenThreads = 256;

struct WidenShape {
  int n, k;
  Int4Format format;
  // Of a block.
  int n_chunks;

  __device__ __forceinline__ int chunks() const { return (k + 63) / 64; }
  __device__ __forceinline__ int groups() const { return (k + kInt4Step - 1) / kInt4Step * format.n_units; }
};

// Of a tile, row by row. Words of a group lie in the order of rows g, g + 8: a thread always meets the same row.
__device__ __forceinline__ void find_row_scales(const uint32_t* groups, const WidenShape& shape, float* row_scales) {
  __shared__ uint32_t largest[kInt4Rows];
  if (threadIdx.x < kInt4Rows) largest[threadIdx.x] = 0;
  __syncthreads();
  float most = 0.f;
  for (int at = threadIdx.x; at < shape.groups() * kInt4Rows; at += kWidenThreads) {
    const uint32_t word = groups[at];
    const float zero = high_half(word) - 128.f;
    most = fmaxf(most, fabsf(Int4Group::scale(word, shape.format.is_f16)) * fmaxf(zero, 15.f - zero));
  }
  // Of numbers that are not negative the larger has the larger bits.
  atomicMax(&largest[threadIdx.x % kInt4Rows], __float_as_uint(most));
  __syncthreads();
  if (threadIdx.x < kInt4Rows) {
    const float found = __uint_as_float(largest[threadIdx.x]);
    row_scales[threadIdx.x % 2 * 8 + threadIdx.x / 2] = found > 0.f ? __fdiv_rn(found, kE4m3Max) : 1.f;
  }
  __syncthreads();
}

// Two values of a row, and their neighbours eight further, as e4m3.
__device__ __forceinline__ uint32_t widened(uint32_t near, uint32_t far, float factor) {
  const float values[4] = {low_half(near) * factor, high_half(near) * factor, low_half(far) * factor, high_half(far) * factor};
  return four_e4m3(values);
}

// Lane t of four gives each of the others what it has of its step and gets the whole of step t: words in, words out.
__device__ __forceinline__ void exchange(uint32_t (&words)[4], int t) {
#pragma unroll
  for (int distance = 1; distance < 4; distance *= 2) {
#pragma unroll
    for (int at = 0; at < 4; ++at) {
      if (at & distance) continue;
      const bool upper = t & distance;
      const uint32_t low = words[at], high = words[at | distance];
      const uint32_t got = __shfl_xor_sync(~0u, upper ? low : high, distance);
      words[at] = upper ? got : low;
      words[at | distance] = upper ? high : got;
    }
  }
}

// Sixteen values in their order, of words that hold two and their neighbours eight further.
__device__ __forceinline__ uint4 in_order(const uint32_t (&words)[4]) {
  return make_uint4(__byte_perm(words[0], words[1], 0x5410), __byte_perm(words[2], words[3], 0x5410),
                    __byte_perm(words[0], words[1], 0x7632), __byte_perm(words[2], words[3], 0x7632));
}

__device__ __forceinline__ void widen_chunk(uint8_t* w, const uint4& codes, const uint2* groups, int chunk, const WidenShape& shape,
                                            const float (&row_scale)[2]) {
  const int lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4, n_units = shape.format.n_units;
  const uint32_t steps[4] = {codes.x, codes.y, codes.z, codes.w};
  uint32_t rows[2][4];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    // A group of 128 values has two chunks, a chunk two groups of 32.
    const int group = n_units == 1 ? chunk / 2 : 2 * chunk + half;
    const uint2 two = groups[group * 8 + g];
    const float factors[2] = {__fdiv_rn(Int4Group::scale(two.x, shape.format.is_f16), row_scale[0]),
                              __fdiv_rn(Int4Group::scale(two.y, shape.format.is_f16), row_scale[1])};
#pragma unroll
    for (int step = 2 * half; step < 2 * half + 2; ++step) {
      uint32_t pairs[4];
      to_fragment(pairs, steps[step], Int4Group::zero(two.x), Int4Group::zero(two.y));
      rows[0][step] = widened(pairs[0], pairs[2], factors[0]);
      rows[1][step] = widened(pairs[1], pairs[3], factors[1]);
    }
  }
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    exchange(rows[row], t);
    const int output = blockIdx.y * kInt4Rows + g + 8 * row, at = chunk * 64 + 16 * t;
    if (output < shape.n && at < shape.k) {
      *reinterpret_cast<uint4*>(w + static_cast<size_t>(output) * shape.k + at) = in_order(rows[row]);
    }
  }
}

__device__ __forceinline__ void widen_int4(uint8_t* w, float* scales, const uint4* codes, const uint32_t* groups, const WidenShape& shape) {
  __shared__ float row_scales[kInt4Rows];
  let_next_kernel_start();
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, g = lane / 4;
  codes += static_cast<size_t>(blockIdx.y) * shape.chunks() * kWarp;
  groups += static_cast<size_t>(blockIdx.y) * shape.groups() * kInt4Rows;
  // Weights are constant: what is read of them needs no wait.
  find_row_scales(groups, shape, row_scales);
  const float row_scale[2] = {row_scales[g], row_scales[g + 8]};
  // What is written the product in front may still read.
  wait_for_earlier_kernels();
  const int output = blockIdx.y * kInt4Rows + threadIdx.x;
  if (blockIdx.x == 0 && threadIdx.x < kInt4Rows && output < shape.n) scales[output] = row_scales[threadIdx.x];
  const int begin = blockIdx.x * shape.n_chunks, end = min(begin + shape.n_chunks, shape.chunks());
#pragma unroll 2
  for (int chunk = begin + warp; chunk < end; chunk += kWidenThreads / kWarp) {
    widen_chunk(w, codes[chunk * kWarp + lane], reinterpret_cast<const uint2*>(groups), chunk, shape, row_scale);
  }
}

}  // namespace stoker

extern "C" __global__ void __launch_bounds__(stoker::kWidenThreads)
    widen_int4(uint8_t* w, float* scales, const uint4* codes, const uint32_t* groups, int n_units, int is_f16, int n, int k, int n_chunks) {
  stoker::widen_int4(w, scales, codes, groups, stoker::WidenShape{n, k, {n_units, is_f16}, n_chunks});
}
