// Weights of four bits in groups along k, as they lie on the device (`int4.rs` packs them):
//
//   w[n][k] = scale * (code - zero)      of each output and group: scale as published, in 16 bits; zero 0 to 15
//
//   codes   [n / 16][k / 64][32 lanes][4 words]    a word is what a lane holds of 16 outputs x 16 values for `mma` or wgmma: eight codes
//   groups  [n / 16][k / group][8 rows][2]         words of rows g and g + 8: the scale's bits low, 128 + zero as bf16 high
//
//           word of lane (g, t), step s of 16:   bits   0..15: (g, 2t) (g+8, 2t) (g, 2t+8) (g+8, 2t+8)
//                                                bits 16..31: the neighbours at 2t+1
//
// Codes become bf16 in pairs, exactly: 0x4300 | code is 128 + code, less 128 + zero it is code - zero. The scale is multiplied with the
// sum of a group, in f32: no weight is ever rounded. A group on the device has 32 or 128 values; larger ones are repeated, those of 64
// too, as two of 32. What lies behind n or k is code 0, scale 0.
#pragma once
#include <cuda_fp16.h>

#include "common.cuh"

namespace stoker {

// Marks weights of this format in what is compiled for several: multiplied by wgmma, by `mma` with the depth shared by warps, or with rows
// of e4m3.
struct Int4 {};
struct Int4ByWarps {};
struct Int4BesideE4m3 {};

// Outputs of a tile; values of the larger groups; bytes of 64 values of a tile, and of a group of it.
constexpr int kInt4Rows = 16, kInt4Step = 128, kInt4PanelBytes = 512, kInt4GroupBytes = 64;

// What `int4.rs` passes.
struct Int4Format {
  int n_units;      // groups of 128 values: 1 of 128, 4 of 32
  int is_f16;       // how scales are stored: f16, else bf16
};

// The words of a group of a lane's two rows.
struct Int4Group {
  uint32_t upper, lower;

  __device__ __forceinline__ static float scale(uint32_t word, bool is_f16) {
    const __half_raw half{static_cast<unsigned short>(word)};
    return is_f16 ? __half2float(__half(half)) : low_half(word);
  }
  // In both halves of a pair.
  __device__ __forceinline__ static uint32_t zero(uint32_t word) { return __byte_perm(word, 0, 0x3232); }
  // In each byte, where it is a number of e4m3 as codes are.
  __device__ __forceinline__ static uint32_t zeros(uint32_t word) { return __byte_perm(word, 0, 0x2222); }
};

// (128 + code) - (128 + zero) of both halves: both are integers that bf16 holds.
__device__ __forceinline__ uint32_t less_zero(uint32_t pair, uint32_t zero) {
  const __nv_bfloat162 value = __hsub2(reinterpret_cast<const __nv_bfloat162&>(pair), reinterpret_cast<const __nv_bfloat162&>(zero));
  return reinterpret_cast<const uint32_t&>(value);
}

// A word to the fragment of a that `mma` and wgmma have for 16 x 16 values.
__device__ __forceinline__ void to_fragment(uint32_t (&a)[4], uint32_t word, uint32_t upper_zero, uint32_t lower_zero) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    uint32_t pair;
    asm("lop3.b32 %0, %1, 0x000f000f, %2, 0xea;\n" : "=r"(pair) : "r"(word >> 4 * j), "r"(0x43004300u));
    a[j] = less_zero(pair, j % 2 ? lower_zero : upper_zero);
  }
}

// Two words to the fragment of a that wgmma has for 16 x 32 values of e4m3. A code as it is, in a byte, is e4m3 already: numbers of it up to
// 15 / 512 are evenly spaced, so it stands for code / 512. A quad's four values are then those of columns 2t, 2t + 8, 2t + 1, 2t + 9: x has to
// lie in that order, too (zipped in quantise.cuh).
__device__ __forceinline__ void to_e4m3_fragment(uint32_t (&a)[4], uint32_t first, uint32_t second) {
  constexpr uint32_t kCodes = 0x0f0f0f0f;
  a[0] = first & kCodes, a[1] = first >> 4 & kCodes, a[2] = second & kCodes, a[3] = second >> 4 & kCodes;
}

// A lane's codes of a group of eight steps of 16 values, or of two, of which a panel has four; from where its words of a stage begin in
// shared memory.
__device__ __forceinline__ void load_words(uint32_t (&words)[8], uint32_t shared, int group) {
#pragma unroll
  for (int panel = 0; panel < 2; ++panel) {
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(words[4 * panel]), "=r"(words[4 * panel + 1]), "=r"(words[4 * panel + 2]), "=r"(words[4 * panel + 3])
                 : "r"(shared + (2 * group + panel) * kInt4PanelBytes)
                 : "memory");
  }
}

__device__ __forceinline__ void load_words(uint32_t (&words)[2], uint32_t shared, int group) {
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];\n"
               : "=r"(words[0]), "=r"(words[1])
               : "r"(shared + group / 2 * kInt4PanelBytes + group % 2 * 8)
               : "memory");
}

__device__ __forceinline__ Int4Group load_group(uint32_t shared) {
  Int4Group group;
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];\n" : "=r"(group.upper), "=r"(group.lower) : "r"(shared) : "memory");
  return group;
}

}  // namespace stoker
