// The arithmetic of an online softmax that decode and prefill attention share. Maxima and scores are in units of log2:
// 2^x is one instruction.
#pragma once
#include "mma.cuh"

namespace stoker {

constexpr float kLog2e = 1.44269504f;

__device__ __forceinline__ float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 2^(x - maximum), where both may be minus infinity: a row that has seen nothing has no weight, not NaN.
__device__ __forceinline__ float weight_of(float x, float maximum) {
  return maximum == -INFINITY ? 0.f : power_of_two(x - maximum);
}

// Over the four lanes that hold a row of an accumulator fragment.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

}  // namespace stoker
