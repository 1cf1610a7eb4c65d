// A row to e4m3 with one scale: scale = largest / 448, which is the largest number of e4m3 (28 beside codes), and q = e4m3(x / scale), to nearest. A row of
// zeros has the scale 1. What is not a number stays none: the products of its row are none, and no other's.
#pragma once
#include <cuda_fp8.h>

#include <type_traits>

#include "common.cuh"

namespace stoker {

constexpr float kE4m3Max = 448.f;
// Of rows beside codes: an eighth of the sum of 128 numbers is no larger than 448.
constexpr float kBesideCodesMax = 28.f;

// Every thread of the block gets the largest. `scratch` holds 32 floats.
__device__ __forceinline__ float block_max(float x, float* scratch) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, n_warps = (blockDim.x + kWarp - 1) / kWarp;
  x = warp_max(x);
  if (lane == 0) scratch[warp] = x;
  __syncthreads();
  x = warp_max(lane < n_warps ? scratch[lane] : 0.f);
  __syncthreads();
  return x;
}

__device__ __forceinline__ uint32_t four_e4m3(const float* x) {
  const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(x[0], x[1]), __NV_SATFINITE, __NV_E4M3);
  const uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(x[2], x[3]), __NV_SATFINITE, __NV_E4M3);
  return low | high << 16;
}

// How the values of a row are shared out over the threads of a block: 16-byte vectors threadIdx.x, threadIdx.x + blockDim.x ...
struct Vectors {
  int n_vecs;

  __device__ __forceinline__ int at(int j) const { return threadIdx.x + j * blockDim.x; }
  __device__ __forceinline__ bool has(int j) const { return at(j) < n_vecs; }
  __device__ __forceinline__ float width() const { return 8.f * n_vecs; }

  __device__ __forceinline__ uint4 load(const uint4* row, int j) const { return row[at(j)]; }
  __device__ __forceinline__ void store(uint4* row, int j, const uint4& values) const { row[at(j)] = values; }
  __device__ __forceinline__ void store_codes(uint2* row, int j, uint2 codes) const { row[at(j)] = codes; }
  // To the row of this block.
  template <typename T>
  __device__ __forceinline__ T* own_row(T* rows) const {
    return rows + static_cast<size_t>(blockIdx.x) * n_vecs;
  }
};

// What products of codes want of a row besides (gemm_int4_e4m3_sm90.cu): its numbers zipped, and the sum of each 128 of them, as digits, at
// [n / 128][stride]. Null for all others. The row's width is a multiple of 128 then.
struct GroupSums {
  uint4* sums = nullptr;
  int stride = 0;
};

// A sum of 128 numbers with the opposite sign, as 16 of e4m3 that add up to it: eight times an eighth, then what is left four times. Exactly:
// numbers are multiples of 2^-9, and the eighth misses by at most 16, the others by a sixteenth of what is left.
__device__ __forceinline__ uint4 sum_digits(float sum) {
  const auto take = [](float& left, float times, float of) {
    const uint32_t digit = __nv_cvt_float_to_fp8(of, __NV_SATFINITE, __NV_E4M3);
    left -= times * __half2float(__half(__nv_cvt_fp8_to_halfraw(static_cast<__nv_fp8_storage_t>(digit), __NV_E4M3)));
    return digit;
  };
  float left = -sum;
  const uint32_t eighth = take(left, 8.f, left / 8.f) * 0x01010101u;
  uint32_t rest = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) rest |= take(left, 1.f, left) << 8 * i;
  return make_uint4(eighth, eighth, rest, 0);
}

// Of two neighbouring lanes' 16 numbers the two halves in turn: 0 8 1 9 and so on.
__device__ __forceinline__ uint2 zipped(uint2 codes, uint32_t lanes) {
  const bool is_odd = threadIdx.x % 2;
  const uint32_t other = __shfl_xor_sync(lanes, is_odd ? codes.x : codes.y, 1);
  const uint32_t first = is_odd ? other : codes.x, second = is_odd ? codes.y : other;
  return make_uint2(__byte_perm(first, second, 0x5140), __byte_perm(first, second, 0x7362));
}

__device__ __forceinline__ float sum_of_e4m3(uint32_t four) {
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const __half2_raw pair = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(four >> 16 * i), __NV_E4M3);
    const float2 values = __half22float2(__half2(pair));
    sum += values.x + values.y;
  }
  return sum;
}

// By 16 lanes, who have 128 numbers.
__device__ __forceinline__ uint2 beside_codes(uint2 codes, const GroupSums& groups, int group) {
  const uint32_t lanes = 0xffffu << (threadIdx.x & 16);
  float sum = sum_of_e4m3(codes.x) + sum_of_e4m3(codes.y);
#pragma unroll
  for (int distance = 8; distance > 0; distance /= 2) sum += __shfl_xor_sync(lanes, sum, distance);
  if (threadIdx.x % 16 == 0) groups.sums[static_cast<size_t>(group) * groups.stride + blockIdx.x] = sum_digits(sum);
  return zipped(codes, lanes);
}

// Where one row of codes leaves, and its scale.
struct CodesOfRow {
  uint2* row;
  float* row_scale;

  __device__ __forceinline__ void put_scale(float scale) const { *row_scale = scale; }
  template <typename Map>
  __device__ __forceinline__ void put(const Map& map, int j, uint2 codes) const {
    map.store_codes(row, j, codes);
  }
};

// By a block; zeros where a thread has no values.
template <int kVecs, typename Map, typename To>
__device__ __forceinline__ void quantise_row(const To& to, const float (&value)[kVecs][8], const Map& map, float* scratch,
                                             const GroupSums& groups = {}) {
  float largest = 0.f;
#pragma unroll
  for (int j = 0; j < kVecs; ++j) {
#pragma unroll
    for (int e = 0; e < 8; ++e) largest = fmaxf(largest, fabsf(value[j][e]));
  }
  largest = block_max(largest, scratch);
  const float scale = largest > 0.f ? largest / (groups.sums != nullptr ? kBesideCodesMax : kE4m3Max) : 1.f;
  if (threadIdx.x == 0) to.put_scale(scale);
#pragma unroll
  for (int j = 0; j < kVecs; ++j) {
    if (!map.has(j)) break;
    float scaled[8];
#pragma unroll
    for (int e = 0; e < 8; ++e) scaled[e] = __fdiv_rn(value[j][e], scale);
    uint2 codes = make_uint2(four_e4m3(scaled), four_e4m3(scaled + 4));
    if constexpr (std::is_same_v<Map, Vectors>) {
      if (groups.sums != nullptr) codes = beside_codes(codes, groups, map.at(j) / 16);
    }
    to.put(map, j, codes);
  }
}

}  // namespace stoker
