// The gated activation of the MLP, one definition: what a product activates itself are the bits of a product and silu_mul
// behind it.
#pragma once
#include "common.cuh"

namespace stoker {

// bf16(silu(gate)) * up, silu(x) = x / (1 + exp(-x)), of values that bf16 holds. By the chip's approximations of exponential
// and reciprocal: 2^-21 off, where rounding to bf16 is 2^-9. Infinities and NaN come out as the formula says.
__device__ __forceinline__ float silu_mul(float gate, float up) { return rounded(__fdividef(gate, 1.f + __expf(-gate))) * up; }

// bf16(gelu(gate)) * up by the tanh approximation: x / 2 (1 + tanh(u)) is x / (1 + exp(-2 u)), u = sqrt(2 / pi) (x + 0.044715 x^3).
__device__ __forceinline__ float gelu_mul(float gate, float up) {
  const float twice = 1.5957691216f * (gate + 0.044715f * gate * gate * gate);
  return rounded(__fdividef(gate, 1.f + __expf(-twice))) * up;
}

// silu_mul of sums, which the model's definition stores in bf16 first.
__device__ __forceinline__ float silu_mul_of_sums(float gate, float up) {
  const uint32_t pair = pack(gate, up);
  return silu_mul(low_half(pair), high_half(pair));
}

}  // namespace stoker
