// A cache of e4m3 on its way to tensor cores: all its numbers are numbers of f16, exactly, and one instruction makes two of two. So
// what they are multiplied with is f16, too: queries, as rope_kv.cu leaves them, and weights of values. What is not a number stays none.
#pragma once
#include <cuda_fp8.h>

#include "mma.cuh"

namespace stoker {

using e4m3 = uint8_t;

// Numbers as products read them.
template <typename Cached>
using Multiplied = std::conditional_t<sizeof(Cached) == 1, __half, bf16>;

__device__ __forceinline__ uint32_t pair_of_f16(uint32_t two) {
  const __half2_raw pair = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(two), __NV_E4M3);
  return static_cast<uint32_t>(pair.y) << 16 | pair.x;
}

// Sixteen, eight and eight.
__device__ __forceinline__ void widen(const uint4& codes, uint4 (&values)[2]) {
  values[0] = make_uint4(pair_of_f16(codes.x), pair_of_f16(codes.x >> 16), pair_of_f16(codes.y), pair_of_f16(codes.y >> 16));
  values[1] = make_uint4(pair_of_f16(codes.z), pair_of_f16(codes.z >> 16), pair_of_f16(codes.w), pair_of_f16(codes.w >> 16));
}

}  // namespace stoker
