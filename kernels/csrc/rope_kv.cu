// One pass over a fused QKV row: bias, optional RMSNorm of each query and key head, rotary embedding, KV write.
//
//   head = qkv[r][h] (+ bias[h]);  q and k heads: head = rms_norm(head) * norm_weight (only if the model has qk-norm)
//   rotary, halves i and i + D/2:  a' = a cos - b sin,  b' = b cos + a sin,  angle of (position[r], i)
//   q' is written back in place; k' and v go to the KV cache at slot[r]; slot -1 writes nothing (padding rows).
//
// Layout: qkv is rows x (n_q + 2 n_kv) x D bf16: the q heads, then k, then v. The angle table is f32, positions x D:
// D/2 cosines, then D/2 sines, made on the host in f64. KV cache: blocks x n_kv x 16 x D, so that one block of one head
// is one contiguous piece (4 KiB at D = 128), which is how attention reads it.
//       slot = block * 16 + offset       cache element = ((block * n_kv + head) * 16 + offset) * D + d
// One warp a head; lane l holds dimensions l*E.. of both halves (E = D/64), so rotation needs no exchange.
// 4 B/value plus the table row (512 B at D = 128, shared by the heads through L1). Latency-bound when decoding: 1.7 us up
// to 32 rows of 48 heads, 4.1 us at 256. Above, 4-byte accesses keep it at 40 % of the copy ceiling (30 us at 2048 rows).
#include "common.cuh"

namespace stoker {

struct RopeKv {
  bf16* qkv;
  bf16* k_cache;
  bf16* v_cache;
  const bf16* bias;      // null: no bias
  const bf16* q_weight;  // null: no qk-norm
  const bf16* k_weight;
  const float* angles;
  const int32_t* positions;
  const int32_t* slots;
  int n_q, n_kv;
  float eps;
};

template <int kDim>
__device__ __forceinline__ void normalise(float (&low)[kDim / 64], float (&high)[kDim / 64], const bf16* weight,
                                          float eps, int first) {
  float squares = 0.f;
#pragma unroll
  for (int e = 0; e < kDim / 64; ++e) squares += low[e] * low[e] + high[e] * high[e];
  const float scale = rsqrtf(warp_sum(squares) / kDim + eps);
#pragma unroll
  for (int e = 0; e < kDim / 64; ++e) {
    low[e] = rounded(rounded(low[e] * scale) * __bfloat162float(weight[first + e]));
    high[e] = rounded(rounded(high[e] * scale) * __bfloat162float(weight[kDim / 2 + first + e]));
  }
}

template <int kDim>
__device__ __forceinline__ void rope_kv_head(const RopeKv& p, int row, int head) {
  constexpr int kEach = kDim / 64, kHalf = kDim / 2;
  const int first = (threadIdx.x % kWarp) * kEach;
  const bool is_q = head < p.n_q, is_k = !is_q && head < p.n_q + p.n_kv;
  bf16* source = p.qkv + (static_cast<size_t>(row) * (p.n_q + 2 * p.n_kv) + head) * kDim;
  float low[kEach], high[kEach];
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    low[e] = __bfloat162float(source[first + e]), high[e] = __bfloat162float(source[kHalf + first + e]);
    if (p.bias != nullptr) {
      const bf16* bias = p.bias + static_cast<size_t>(head) * kDim;
      low[e] = rounded(low[e] + __bfloat162float(bias[first + e]));
      high[e] = rounded(high[e] + __bfloat162float(bias[kHalf + first + e]));
    }
  }
  if (is_q && p.q_weight != nullptr) normalise<kDim>(low, high, p.q_weight, p.eps, first);
  if (is_k && p.k_weight != nullptr) normalise<kDim>(low, high, p.k_weight, p.eps, first);
  if (is_q || is_k) {
    const float* angle = p.angles + static_cast<size_t>(p.positions[row]) * kDim + first;
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const float c = angle[e], s = angle[kHalf + e], a = low[e], b = high[e];
      low[e] = a * c - b * s, high[e] = b * c + a * s;
    }
  }
  bf16* target = source;
  if (!is_q) {
    const int slot = p.slots[row];
    if (slot < 0) return;
    const int kv_head = head - p.n_q - (is_k ? 0 : p.n_kv);
    const size_t block = static_cast<size_t>(slot / kBlockSize) * p.n_kv + kv_head;
    target = (is_k ? p.k_cache : p.v_cache) + (block * kBlockSize + slot % kBlockSize) * kDim;
  }
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    target[first + e] = __float2bfloat16_rn(low[e]), target[kHalf + first + e] = __float2bfloat16_rn(high[e]);
  }
}

}  // namespace stoker

#define ROPE_KV(dim)                                                                                                  \
  extern "C" __global__ void __launch_bounds__(256)                                                                   \
      rope_kv_d##dim(stoker::bf16* qkv, stoker::bf16* k_cache, stoker::bf16* v_cache, const stoker::bf16* bias,       \
                     const stoker::bf16* q_weight, const stoker::bf16* k_weight, const float* angles,                 \
                     const int32_t* positions, const int32_t* slots, int n_q, int n_kv, float eps) {                  \
    stoker::wait_for_earlier_kernels();                                                                               \
    stoker::let_next_kernel_start();                                                                                  \
    const int head = blockIdx.y * (blockDim.x / stoker::kWarp) + threadIdx.x / stoker::kWarp;                         \
    if (head >= n_q + 2 * n_kv) return;                                                                               \
    const stoker::RopeKv p{qkv,    k_cache,   v_cache, bias, q_weight, k_weight,                                      \
                           angles, positions, slots,   n_q,  n_kv,     eps};                                          \
    stoker::rope_kv_head<dim>(p, blockIdx.x, head);                                                                   \
  }
ROPE_KV(64)
ROPE_KV(128)
