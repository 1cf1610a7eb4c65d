// The arithmetic of an online softmax that decode and prefill attention share. Maxima and scores are in units of log2:
// 2^x is one instruction.
#pragma once
#include "mma.cuh"

namespace stoker {

// Some tokens of one prefill chunk and the piece of their KV to attend. The same fields as `PrefillTile` in plan/prefill.rs.
struct PrefillTile {
  int32_t sequence;       // row of the block table
  int32_t first_row;      // first token's row in q and out
  int32_t n_tokens;       // tokens in this tile
  int32_t first_visible;  // KV tokens that the first token sees, itself included
  int32_t begin, end;     // the piece: KV tokens, of all that the last token sees
  int32_t piece, first_piece, n_pieces;  // this one, the first one and all of this tile, in the scratch
};

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

// What some families have in their attention and others not, beside the width of a head. A kernel for "any" head is compiled for
// tiles of kDim columns: what lies behind a narrower head is zeros in shared memory and never stored.
struct AttentionExtras {
  int dim;        // of a head, a multiple of 8 up to kDim
  int window;     // tokens that a query sees, itself included
  float softcap;  // bound of the scores; 0: none
};

// cap * tanh(x / cap), to 1e-6 of the cap. By the exponential: tanh.approx is off by 5e-4, a percent of a weight at Gemma's cap of 50.
__device__ __forceinline__ float soft_capped(float x, float cap) {
  return cap - __fdividef(2.f * cap, 1.f + power_of_two(x * (2.f * kLog2e / cap)));
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
