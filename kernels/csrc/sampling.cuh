// What the two sampling kernels share: one row's parameters and the tempered logit.
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

}  // namespace stoker
