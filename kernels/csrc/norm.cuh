// RMSNorm of a row by a block, over where its values come from (Stored; the ranks' sums of reduce.cuh) and how they leave (Rows,
// QuantisedRows). The row stays in registers between the two passes.
#pragma once
#include "quantise.cuh"

namespace stoker {

// Values as they lie in memory.
struct Stored {
  const uint4* x;

  __device__ __forceinline__ void give(int) {}

  template <int kVecs>
  __device__ __forceinline__ void take(float (&value)[kVecs][8], int n_vecs) const {
#pragma unroll
    for (int j = 0; j < kVecs; ++j) {
      const int i = threadIdx.x + j * blockDim.x;
      if (i < n_vecs) unpack(x[static_cast<size_t>(blockIdx.x) * n_vecs + i], value[j]);
    }
  }
};

// Where rows leave as bf16, or as e4m3.
struct Rows {
  uint4* out;
};
struct QuantisedRows {
  uint2* out;
  float* scales;
};

template <int kVecs>
__device__ __forceinline__ void store_row(const Rows& rows, const float (&y)[kVecs][8], int n_vecs, float*) {
#pragma unroll
  for (int j = 0; j < kVecs; ++j) {
    const int i = threadIdx.x + j * blockDim.x;
    if (i < n_vecs) rows.out[static_cast<size_t>(blockIdx.x) * n_vecs + i] = pack(y[j]);
  }
}

template <int kVecs>
__device__ __forceinline__ void store_row(const QuantisedRows& rows, const float (&y)[kVecs][8], int n_vecs, float* scratch) {
  quantise_row(rows.out + static_cast<size_t>(blockIdx.x) * n_vecs, rows.scales + blockIdx.x, y, n_vecs, scratch);
}

template <bool kAdd, int kVecs, typename In, typename Out>
__device__ __forceinline__ void rms_norm_row(const Out& out, uint4* residual, In x, const uint4* weight, int n_vecs, float eps) {
  __shared__ float scratch[kWarp];
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const size_t row = static_cast<size_t>(blockIdx.x) * n_vecs;
  x.give(n_vecs);
  uint4 carried[kVecs];
  if constexpr (kAdd) {
#pragma unroll
    for (int j = 0; j < kVecs; ++j) {
      const int i = threadIdx.x + j * blockDim.x;
      if (i < n_vecs) carried[j] = residual[row + i];
    }
  }
  float value[kVecs][8] = {};
  x.take(value, n_vecs);
  float squares = 0.f;
#pragma unroll
  for (int j = 0; j < kVecs; ++j) {
    const int i = threadIdx.x + j * blockDim.x;
    if (i >= n_vecs) break;
    if constexpr (kAdd) {
      float before[8];
      unpack(carried[j], before);
#pragma unroll
      for (int e = 0; e < 8; ++e) value[j][e] = rounded(value[j][e] + before[e]);
      residual[row + i] = pack(value[j]);
    }
#pragma unroll
    for (int e = 0; e < 8; ++e) squares += value[j][e] * value[j][e];
  }
  const float scale = rsqrtf(block_sum(squares, scratch) / (8.f * n_vecs) + eps);
#pragma unroll
  for (int j = 0; j < kVecs; ++j) {
    const int i = threadIdx.x + j * blockDim.x;
    if (i >= n_vecs) break;
    float w[8];
    unpack(weight[i], w);
#pragma unroll
    for (int e = 0; e < 8; ++e) value[j][e] = rounded(rounded(value[j][e] * scale) * w[e]);
  }
  store_row(out, value, n_vecs, scratch);
}

}  // namespace stoker
