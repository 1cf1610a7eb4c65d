// What the sampling kernels share: one row's parameters, the tempered logit, the order of floats as integers.
#pragma once
#include "common.cuh"

namespace stoker {

// The same fields as `SampleRow` in sampling.rs.
struct SampleRow {
  uint64_t seed, position;
  float temperature;  // 0: greedy
  float top_p;        // 1: off
  float ln_min_p;     // minus infinity: off
  uint32_t top_k;     // 0: off
};

// Divided, not multiplied by an inverse: the CPU sampler divides, and a floor must meet the very same values.
__device__ __forceinline__ float tempered(float logit, const SampleRow& row) { return __fdiv_rn(logit, row.temperature); }

// Integers in the order of the floats.
__device__ __forceinline__ uint32_t ordered(float x) {
  const uint32_t bits = __float_as_uint(x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float unordered(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// Sum over the warp's lanes before and including this one.
__device__ __forceinline__ unsigned long long warp_scan(unsigned long long x) {
#pragma unroll
  for (int distance = 1; distance < kWarp; distance *= 2) {
    const unsigned long long other = __shfl_up_sync(~0u, x, distance);
    if (threadIdx.x % kWarp >= distance) x += other;
  }
  return x;
}

}  // namespace stoker
