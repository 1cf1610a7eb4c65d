// Tensor-core and asynchronous-copy instructions, one wrapper each, all available from sm_80. The fragment maps are the
// PTX manual's; g = lane / 4, t = lane % 4 throughout.
#pragma once
#include <cuda_fp16.h>

#include <type_traits>

#include "common.cuh"

namespace stoker {

// c[16x8] += a[16x16] * b[16x8], bf16 in, f32 out.
//   a: {row g, k 2t..2t+1}, {row g+8, k 2t..}, {row g, k 2t+8..}, {row g+8, k 2t+8..}
//   b: {k 2t..2t+1, column g}, {k 2t+8.., column g}        c: {row g, columns 2t, 2t+1}, {row g+8, the same}
__device__ __forceinline__ void mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                    uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The same of f16.
__device__ __forceinline__ void mma_f16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                        uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// By what the numbers are.
template <typename Number>
__device__ __forceinline__ void mma_of(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<Number, __half>) {
    mma_f16(c, a0, a1, a2, a3, b0, b1);
  } else {
    mma(c, a0, a1, a2, a3, b0, b1);
  }
}

// Two of them, rounded.
template <typename Number>
__device__ __forceinline__ uint32_t pack_as(float low, float high) {
  if constexpr (std::is_same_v<Number, __half>) {
    const __half2 pair = __floats2half2_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  } else {
    return pack(low, high);
  }
}

__device__ __forceinline__ void load_shared(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void store_shared(uint32_t address, const uint4& v) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};\n" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Four 8x8 matrices of bf16; lane l gives the row l % 8 of matrix l / 8.
__device__ __forceinline__ void ldmatrix(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void ldmatrix_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// 16 bytes from global to shared memory past the registers; zeros where `present` is false, reading nothing.
__device__ __forceinline__ void copy_async(uint32_t shared, const void* global, bool present) {
  const int bytes = present ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(shared), "l"(global), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }

// Waits until at most `kPending` of the newest commit groups are unfinished.
template <int kPending>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

// Byte offset of a 16-byte piece in a tile of rows of kDim bf16. The piece index is xored with the row, so that the
// eight rows which one ldmatrix phase reads lie in eight different bank groups.
template <int kDim>
__device__ __forceinline__ uint32_t swizzled(int row, int piece) {
  return static_cast<uint32_t>(row * kDim * 2 + ((piece ^ (row & 7)) * 16));
}

}  // namespace stoker
