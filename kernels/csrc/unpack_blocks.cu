// Weights as a file holds them, to bf16: out[i] = bf16(value i of blocks). Plain f32 and f16, and ggml's blocks of small
// integers with their scales; what the formats mean is in format.rs, which is the reference.
//
// Layout: whole blocks, one behind the other, each an even number of bytes; out one bf16 a value. One thread a value: a
// warp reads one block of 32 (or an eighth of one of 256) and writes 64 bytes. Runs while weights arrive over PCIe, which is
// some ten times slower than this; every product and sum is rounded as on the CPU (no fused multiply-add), so that a model
// has the same weights on both.
#include <cuda_fp16.h>

#include "common.cuh"

namespace {

__device__ __forceinline__ float half_at(const uint8_t* at) {
  return __half2float(*reinterpret_cast<const __half*>(at));
}

__device__ __forceinline__ float scaled(float scale, int q) { return __fmul_rn(scale, static_cast<float>(q)); }

// 32 numbers of 4 bits in 16 bytes: the low halves, then the high ones.
__device__ __forceinline__ int four_bits(const uint8_t* quants, int i) { return quants[i % 16] >> (4 * (i / 16)) & 15; }

// The same behind 32 fifth bits, the first number's lowest.
__device__ __forceinline__ int five_bits(const uint8_t* packed, int i) {
  return four_bits(packed + 4, i) | (packed[i / 8] >> (i % 8) & 1) << 4;
}

// 256 numbers of 4 bits: two groups of 32 share 32 bytes.
__device__ __forceinline__ int nibble(const uint8_t* quants, int i) {
  const int group = i / 32;
  return quants[32 * (group / 2) + i % 32] >> (4 * (group % 2)) & 15;
}

// q scaled and less the minimum of its group of 32; both have six bits, packed as format.rs draws them.
__device__ __forceinline__ float k_value(const uint8_t* block, int group, int q) {
  const uint8_t* packed = block + 4;
  const bool low = group < 4;
  const int scale = low ? packed[group] & 63 : (packed[group + 4] & 15) | (packed[group - 4] >> 2 & 48);
  const int min = low ? packed[group + 4] & 63 : packed[group + 4] >> 4 | (packed[group] >> 2 & 48);
  return __fsub_rn(scaled(scaled(half_at(block), scale), q), scaled(half_at(block + 2), min));
}

struct F32 {
  static constexpr int kValues = 1, kBytes = 4;
  __device__ static float value(const uint8_t* block, int) { return *reinterpret_cast<const float*>(block); }
};

struct F16 {
  static constexpr int kValues = 1, kBytes = 2;
  __device__ static float value(const uint8_t* block, int) { return half_at(block); }
};

struct Q8_0 {
  static constexpr int kValues = 32, kBytes = 34;
  __device__ static float value(const uint8_t* block, int i) {
    return scaled(half_at(block), static_cast<int8_t>(block[2 + i]));
  }
};

struct Q4_0 {
  static constexpr int kValues = 32, kBytes = 18;
  __device__ static float value(const uint8_t* block, int i) {
    return scaled(half_at(block), four_bits(block + 2, i) - 8);
  }
};

struct Q4_1 {
  static constexpr int kValues = 32, kBytes = 20;
  __device__ static float value(const uint8_t* block, int i) {
    return __fadd_rn(scaled(half_at(block), four_bits(block + 4, i)), half_at(block + 2));
  }
};

struct Q5_0 {
  static constexpr int kValues = 32, kBytes = 22;
  __device__ static float value(const uint8_t* block, int i) {
    return scaled(half_at(block), five_bits(block + 2, i) - 16);
  }
};

struct Q5_1 {
  static constexpr int kValues = 32, kBytes = 24;
  __device__ static float value(const uint8_t* block, int i) {
    return __fadd_rn(scaled(half_at(block), five_bits(block + 4, i)), half_at(block + 2));
  }
};

struct Q4K {
  static constexpr int kValues = 256, kBytes = 144;
  __device__ static float value(const uint8_t* block, int i) { return k_value(block, i / 32, nibble(block + 16, i)); }
};

struct Q5K {
  static constexpr int kValues = 256, kBytes = 176;
  __device__ static float value(const uint8_t* block, int i) {
    const int fifth = block[16 + i % 32] >> (i / 32) & 1;
    return k_value(block, i / 32, nibble(block + 48, i) | fifth << 4);
  }
};

struct Q6K {
  static constexpr int kValues = 256, kBytes = 210;
  __device__ static float value(const uint8_t* block, int i) {
    const int half = i / 128, run = i / 32 % 4;
    const int low = block[64 * half + 32 * (run % 2) + i % 32] >> (4 * (run / 2)) & 15;
    const int high = block[128 + 32 * half + i % 32] >> (2 * run) & 3;
    const int scale = static_cast<int8_t>(block[192 + i / 16]);
    return scaled(scaled(half_at(block + 208), scale), (low | high << 4) - 32);
  }
};

template <typename Format>
__device__ __forceinline__ void unpack(stoker::bf16* out, const uint8_t* blocks, int n_values) {
  stoker::wait_for_earlier_kernels();
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n_values) return;
  const uint8_t* block = blocks + static_cast<size_t>(i / Format::kValues) * Format::kBytes;
  out[i] = __float2bfloat16_rn(Format::value(block, i % Format::kValues));
}

}  // namespace

#define STOKER_UNPACK(name, format)                                                                               \
  extern "C" __global__ void __launch_bounds__(256) name(stoker::bf16* out, const uint8_t* blocks, int n_values) { \
    unpack<format>(out, blocks, n_values);                                                                        \
  }

STOKER_UNPACK(unpack_f32, F32)
STOKER_UNPACK(unpack_f16, F16)
STOKER_UNPACK(unpack_q8_0, Q8_0)
STOKER_UNPACK(unpack_q4_0, Q4_0)
STOKER_UNPACK(unpack_q4_1, Q4_1)
STOKER_UNPACK(unpack_q5_0, Q5_0)
STOKER_UNPACK(unpack_q5_1, Q5_1)
STOKER_UNPACK(unpack_q4_k, Q4K)
STOKER_UNPACK(unpack_q5_k, Q5K)
STOKER_UNPACK(unpack_q6_k, Q6K)
