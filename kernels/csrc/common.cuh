// What every kernel shares: 16-byte vectors of bf16, warp and block reductions, and the two halves of programmatic
// dependent launch. Arithmetic is f32; bf16 is a storage format.
#pragma once
#include <cuda_bf16.h>

#include <cstdint>

namespace stoker {

using bf16 = __nv_bfloat16;

constexpr int kWarp = 32;
// Tokens of one KV block; design decision D11, the same constant as `BLOCK_SIZE` in launch.rs.
constexpr int kBlockSize = 16;

// NOTES: with programmatic dependent launch a kernel starts while the one before it still runs. Nothing that an earlier
// kernel writes may be read, and nothing that it reads may be written, before this call. It returns when every kernel
// before this one has ended and its writes are visible. Below sm_90 kernels never overlap and this is nothing.
// For the same reason activations are never `__restrict__ const` nor read by `__ldg`: the compiler takes such memory for
// constant over the kernel's life and may read it ahead of this call, or behind it. Weights are constant, and may be, unless they
// are to be requested before it: see skinny_gemm.cu.
__device__ __forceinline__ void wait_for_earlier_kernels() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel's blocks be placed as soon as all of ours are: they take free slots, they never push ours out.
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Both, of a small kernel between products. Of few blocks the next product's may be placed as the last one's end, and their weights come
// meanwhile; many would take its places (NOTES.md). Who waits for this kernel has waited for all before it, which it waits for itself.
__device__ __forceinline__ void wait_between_products() {
  constexpr int kFewBlocks = 64;
  const bool few = gridDim.x <= kFewBlocks;
  if (few) let_next_kernel_start();
  wait_for_earlier_kernels();
  if (!few) let_next_kernel_start();
}

// bf16 is the upper half of an f32: a shift or a mask widens it exactly.
__device__ __forceinline__ float low_half(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_half(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

__device__ __forceinline__ void unpack(const uint4& v, float (&f)[8]) {
  f[0] = low_half(v.x), f[1] = high_half(v.x), f[2] = low_half(v.y), f[3] = high_half(v.y);
  f[4] = low_half(v.z), f[5] = high_half(v.z), f[6] = low_half(v.w), f[7] = high_half(v.w);
}

__device__ __forceinline__ uint32_t pack(float low, float high) {
  __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<uint32_t*>(&pair);
}

__device__ __forceinline__ uint4 pack(const float (&f)[8]) {
  return make_uint4(pack(f[0], f[1]), pack(f[2], f[3]), pack(f[4], f[5]), pack(f[6], f[7]));
}

// Rounds to bf16 and back: where the model's definition stores an intermediate in bf16, so do we.
__device__ __forceinline__ float rounded(float x) { return __bfloat162float(__float2bfloat16_rn(x)); }

// One value of a norm before its last rounding. Families that store the weight itself round what it multiplies, families that store it
// less one multiply in f32: each as its reference code does.
__device__ __forceinline__ float normed(float x, float scale, float weight, float offset) {
  return offset == 0.f ? rounded(x * scale) * weight : x * scale * (weight + offset);
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(~0u, x, distance);
  return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, distance));
  return x;
}

// Every thread of the block gets the sum. `scratch` holds 32 floats. Summed in a fixed order: same input, same bits.
__device__ __forceinline__ float block_sum(float x, float* scratch) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, n_warps = (blockDim.x + kWarp - 1) / kWarp;
  x = warp_sum(x);
  if (lane == 0) scratch[warp] = x;
  __syncthreads();
  x = warp_sum(lane < n_warps ? scratch[lane] : 0.f);
  __syncthreads();
  return x;
}

}  // namespace stoker
