// A row to e4m3 with one scale: scale = largest / 448, which is the largest number of e4m3, and q = e4m3(x / scale), to nearest. A row of
// zeros has the scale 1. What is not a number stays none: the products of its row are none, and no other's.
#pragma once
#include <cuda_fp8.h>

#include "common.cuh"

namespace stoker {

constexpr float kE4m3Max = 448.f;

// Every thread of the block gets the largest. `scratch` holds 32 floats.
__device__ __forceinline__ float block_max(float x, float* scratch) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, n_warps = (blockDim.x + kWarp - 1) / kWarp;
  auto warp_max = [](float value) {
#pragma unroll
    for (int distance = kWarp / 2; distance > 0; distance /= 2) value = fmaxf(value, __shfl_xor_sync(~0u, value, distance));
    return value;
  };
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

// By a block, of whose row a thread has the vectors threadIdx.x, threadIdx.x + blockDim.x ...; zeros where there are none.
template <int kVecs>
__device__ __forceinline__ void quantise_row(uint2* out, float* row_scale, const float (&value)[kVecs][8], int n_vecs, float* scratch) {
  float largest = 0.f;
#pragma unroll
  for (int j = 0; j < kVecs; ++j) {
#pragma unroll
    for (int e = 0; e < 8; ++e) largest = fmaxf(largest, fabsf(value[j][e]));
  }
  largest = block_max(largest, scratch);
  const float scale = largest > 0.f ? largest / kE4m3Max : 1.f;
  if (threadIdx.x == 0) *row_scale = scale;
#pragma unroll
  for (int j = 0; j < kVecs; ++j) {
    const int i = threadIdx.x + j * blockDim.x;
    if (i >= n_vecs) break;
    float scaled[8];
#pragma unroll
    for (int e = 0; e < 8; ++e) scaled[e] = __fdiv_rn(value[j][e], scale);
    out[i] = make_uint2(four_e4m3(scaled), four_e4m3(scaled + 4));
  }
}

}  // namespace stoker
