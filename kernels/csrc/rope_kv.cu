// One pass over a fused QKV row: bias, optional RMSNorm of each query and key head, rotary embedding, KV write.
//
//   head = qkv[r][h] (+ bias[h]);  q and k heads: head = rms_norm(head) * norm_weight (only if the model has qk-norm)
//   rotary, halves i and i + n of the first 2 n:  a' = a cos - b sin,  b' = b cos + a sin,  angle of (position[r], i)
//   q' is written back in place; k' and v go to the KV cache at slot[r]; slot -1 writes nothing (padding rows).
//
// Layout: qkv is rows x (n_q + 2 n_kv) x D bf16: the q heads, then k, then v. The angle table is f32, positions x 2 n:
// n cosines, then n sines, made on the host in f64. KV cache: blocks x n_kv x 16 x D, so that one block of one head
// is one contiguous piece (4 KiB at D = 128), which is how attention reads it.
//       slot = block * 16 + offset       cache element = ((block * n_kv + head) * 16 + offset) * D + d
// Two kernels are for heads of 64 and 128 that turn as a whole; the third is for any multiple of 16 up to 256 of which any multiple
// of 16 turns, none at all included, and for norms whose weight is stored around zero.
// A thread holds eight dimensions of each half, so rotation needs no exchange and every access takes 16 bytes: 8 lanes a head
// at D = 128, 4 at D = 64. Lanes behind those that turn hold sixteen dimensions that stay:
//
//       D = 128, 2 n = 96    lane 0: 0-7, 48-55   lane 1: 8-15, 56-63   ..   lane 5: 40-47, 88-95   lane 6: 96-111   lane 7: 112-127
//
// 4 B/value plus the table row (512 B at D = 128, shared by the heads through L1).
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
  int dim, n_pairs;
  float norm_offset;  // added to the norms' weights
};

// Lanes of a head; kDim is 0 where the width is not known to the compiler. The next power of two, as sums are over all.
template <int kDim>
constexpr int kHeadLanes = kDim == 0 ? 16 : kDim / 16;

template <int kDim>
__device__ __forceinline__ float head_sum(float x) {
#pragma unroll
  for (int distance = kHeadLanes<kDim> / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(~0u, x, distance);
  return x;
}

__device__ __forceinline__ void load(const bf16* source, float (&f)[8]) {
  unpack(*reinterpret_cast<const uint4*>(source), f);
}

__device__ __forceinline__ void load(const float* source, float (&f)[8]) {
  const float4 a = reinterpret_cast<const float4*>(source)[0], b = reinterpret_cast<const float4*>(source)[1];
  f[0] = a.x, f[1] = a.y, f[2] = a.z, f[3] = a.w, f[4] = b.x, f[5] = b.y, f[6] = b.z, f[7] = b.w;
}

__device__ __forceinline__ void add_bias(float (&x)[8], const bf16* bias) {
  float b[8];
  load(bias, b);
#pragma unroll
  for (int e = 0; e < 8; ++e) x[e] = rounded(x[e] + b[e]);
}

__device__ __forceinline__ void scale_by(float (&x)[8], float scale, const bf16* weight, float offset) {
  float w[8];
  load(weight, w);
#pragma unroll
  for (int e = 0; e < 8; ++e) x[e] = rounded(normed(x[e], scale, w[e], offset));
}

// Where a key or a value goes.
template <int kDim>
__device__ __forceinline__ bf16* cached(const RopeKv& p, bool is_k, int kv_head, int slot) {
  const size_t block = static_cast<size_t>(slot / kBlockSize) * p.n_kv + kv_head;
  return (is_k ? p.k_cache : p.v_cache) + (block * kBlockSize + slot % kBlockSize) * (kDim == 0 ? p.dim : kDim);
}

// All lanes of a warp come here together, those past the last head or behind a head's end with what others have: the sum needs
// every lane, and takes nothing from those.
template <int kDim>
__device__ __forceinline__ void rope_kv_head(const RopeKv& p, int row, int head, int lane, bool present) {
  const int dim = kDim == 0 ? p.dim : kDim, n_pairs = kDim == 0 ? p.n_pairs : kDim / 2;
  const bool has_dims = kDim != 0 || lane < dim / 16, turns = kDim != 0 || lane * 8 < n_pairs;
  if (!has_dims) lane = 0;
  // First dimensions of the lane's two groups of eight.
  const int first = turns ? lane * 8 : lane * 16, second = first + (turns ? n_pairs : 8);
  const bool is_q = head < p.n_q, is_k = !is_q && head < p.n_q + p.n_kv;
  bf16* source = p.qkv + (static_cast<size_t>(row) * (p.n_q + 2 * p.n_kv) + head) * dim;
  float low[8], high[8];
  load(source + first, low), load(source + second, high);
  if (p.bias != nullptr) {
    const bf16* bias = p.bias + static_cast<size_t>(head) * dim;
    add_bias(low, bias + first), add_bias(high, bias + second);
  }
  if (p.q_weight != nullptr) {
    float squares = 0.f;
#pragma unroll
    for (int e = 0; e < 8; ++e) squares += low[e] * low[e] + high[e] * high[e];
    const float scale = rsqrtf(head_sum<kDim>(has_dims ? squares : 0.f) / dim + p.eps);
    if (is_q || is_k) {
      const bf16* weight = is_q ? p.q_weight : p.k_weight;
      const float offset = kDim == 0 ? p.norm_offset : 0.f;
      scale_by(low, scale, weight + first, offset), scale_by(high, scale, weight + second, offset);
    }
  }
  if ((is_q || is_k) && turns) {
    const float* angle = p.angles + static_cast<size_t>(p.positions[row]) * 2 * n_pairs + first;
    float cosine[8], sine[8];
    load(angle, cosine), load(angle + n_pairs, sine);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const float a = low[e], b = high[e];
      low[e] = a * cosine[e] - b * sine[e], high[e] = b * cosine[e] + a * sine[e];
    }
  }
  bf16* target = source;
  present = present && has_dims;
  if (!is_q) {
    const int slot = p.slots[row];
    present = present && slot >= 0;
    target = cached<kDim>(p, is_k, head - p.n_q - (is_k ? 0 : p.n_kv), max(slot, 0));
  }
  if (!present) return;
  *reinterpret_cast<uint4*>(target + first) = pack(low);
  *reinterpret_cast<uint4*>(target + second) = pack(high);
}

}  // namespace stoker

#define ROPE_KV(name, dim)                                                                                            \
  extern "C" __global__ void __launch_bounds__(256)                                                                   \
      name(stoker::bf16* qkv, stoker::bf16* k_cache, stoker::bf16* v_cache, const stoker::bf16* bias,                 \
           const stoker::bf16* q_weight, const stoker::bf16* k_weight, const float* angles, const int32_t* positions, \
           const int32_t* slots, int n_q, int n_kv, float eps, int head_dim, int n_pairs, float norm_offset) {        \
    stoker::wait_for_earlier_kernels();                                                                               \
    stoker::let_next_kernel_start();                                                                                  \
    constexpr int lanes = stoker::kHeadLanes<dim>;                                                                    \
    const int head = blockIdx.y * (blockDim.x / lanes) + threadIdx.x / lanes, n_heads = n_q + 2 * n_kv;               \
    const stoker::RopeKv p{qkv,       k_cache, v_cache, bias, q_weight, k_weight, angles,     positions,              \
                           slots,     n_q,     n_kv,    eps,  head_dim, n_pairs,  norm_offset};                       \
    stoker::rope_kv_head<dim>(p, blockIdx.x, min(head, n_heads - 1), threadIdx.x % lanes, head < n_heads);            \
  }
ROPE_KV(rope_kv_d64, 64)
ROPE_KV(rope_kv_d128, 128)
ROPE_KV(rope_kv_any, 0)
