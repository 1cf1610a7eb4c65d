// RMSNorm of a row by a block, over where its values come from (Stored; the ranks' sums of reduce.cuh), how they are shared out
// over threads (Vectors; the lines of reduce.cuh) and how they leave (Rows, QuantisedRows). The row stays in registers between the
// two passes.
#pragma once
#include "quantise.cuh"

namespace stoker {

// Values as they lie in memory.
struct Stored {
  const uint4* x;

  __device__ __forceinline__ void give(const Vectors&) {}

  template <int kVecs>
  __device__ __forceinline__ void take(float (&value)[kVecs][8], const Vectors& map) const {
#pragma unroll
    for (int j = 0; j < kVecs; ++j) {
      if (map.has(j)) unpack(map.load(map.own_row(x), j), value[j]);
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
  GroupSums groups = {};
};

template <int kVecs, typename Map>
__device__ __forceinline__ void store_row(const Rows& rows, const float (&y)[kVecs][8], const Map& map, float*) {
#pragma unroll
  for (int j = 0; j < kVecs; ++j) {
    if (map.has(j)) map.store(map.own_row(rows.out), j, pack(y[j]));
  }
}

template <int kVecs, typename Map>
__device__ __forceinline__ void store_row(const QuantisedRows& rows, const float (&y)[kVecs][8], const Map& map, float* scratch) {
  quantise_row(CodesOfRow{map.own_row(rows.out), rows.scales + blockIdx.x}, y, map, scratch, rows.groups);
}

// The residual stream, where all of it is this device's.
struct Residual {
  uint4* rows;

  template <typename Map>
  __device__ __forceinline__ uint4 load(const Map& map, int j) const {
    return map.load(map.own_row(rows), j);
  }
  template <typename Map>
  __device__ __forceinline__ void store(const Map& map, int j, const uint4& values) const {
    map.store(map.own_row(rows), j, values);
  }
};

template <bool kAdd, int kVecs, typename Map, typename In, typename Out, typename Carried = Residual>
__device__ __forceinline__ void rms_norm_row(const Out& out, const Carried& residual, In x, const uint4* weight, const Map& map, float eps) {
  __shared__ float scratch[kWarp];
  wait_between_products();
  x.give(map);
  uint4 carried[kVecs];
  if constexpr (kAdd) {
#pragma unroll
    for (int j = 0; j < kVecs; ++j) {
      if (map.has(j)) carried[j] = residual.load(map, j);
    }
  }
  float value[kVecs][8] = {};
  x.take(value, map);
  float squares = 0.f;
#pragma unroll
  for (int j = 0; j < kVecs; ++j) {
    if (!map.has(j)) break;
    if constexpr (kAdd) {
      float before[8];
      unpack(carried[j], before);
#pragma unroll
      for (int e = 0; e < 8; ++e) value[j][e] = rounded(value[j][e] + before[e]);
      residual.store(map, j, pack(value[j]));
    }
#pragma unroll
    for (int e = 0; e < 8; ++e) squares += value[j][e] * value[j][e];
  }
  const float scale = rsqrtf(block_sum(squares, scratch) / map.width() + eps);
#pragma unroll
  for (int j = 0; j < kVecs; ++j) {
    if (!map.has(j)) break;
    float w[8];
    unpack(map.load(weight, j), w);
#pragma unroll
    for (int e = 0; e < 8; ++e) value[j][e] = rounded(rounded(value[j][e] * scale) * w[e]);
  }
  store_row(out, value, map, scratch);
}

}  // namespace stoker
