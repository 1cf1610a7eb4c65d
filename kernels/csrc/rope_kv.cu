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
// of 16 turns, none at all included, and for norms whose weight is stored around zero. Each is there for a cache of bf16 and for one
// of e4m3: code = e4m3(value / scale), to nearest, at most the largest number, with a scale for each KV head's keys and one for its
// values. What is not a number stays none. Before such a cache queries are left as f16, in place of bf16, as products with codes want
// them: of the same size and with more digits, and what would be infinite is the largest number.
// A thread holds eight dimensions of each half, so rotation needs no exchange and every access takes 16 bytes: 8 lanes a head
// at D = 128, 4 at D = 64. Lanes behind those that turn hold sixteen dimensions that stay:
//
//       D = 128, 2 n = 96    lane 0: 0-7, 48-55   lane 1: 8-15, 56-63   ..   lane 5: 40-47, 88-95   lane 6: 96-111   lane 7: 112-127
//
// 4 B/value plus the table row (512 B at D = 128, shared by the heads through L1).
#include "common.cuh"
#include "e4m3.cuh"
#include "quantise.cuh"

namespace stoker {

template <typename Cached>
struct RopeKv {
  bf16* qkv;
  Cached* k_cache;
  Cached* v_cache;
  const float* kv_scales;  // of e4m3: of each KV head's keys, then of its values
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
template <int kDim, typename Cached>
__device__ __forceinline__ Cached* cached(const RopeKv<Cached>& p, bool is_k, int kv_head, int slot) {
  const size_t block = static_cast<size_t>(slot / kBlockSize) * p.n_kv + kv_head;
  return (is_k ? p.k_cache : p.v_cache) + (block * kBlockSize + slot % kBlockSize) * (kDim == 0 ? p.dim : kDim);
}

// Eight values.
__device__ __forceinline__ void store(bf16* target, const float (&values)[8], float) { *reinterpret_cast<uint4*>(target) = pack(values); }

template <typename Cached>
__device__ __forceinline__ void store_query(bf16* target, const float (&values)[8]) {
  if constexpr (sizeof(Cached) == 2) return store(target, values, 1.f);
  constexpr float kLargest = 65504.f;
  float x[8];
#pragma unroll
  for (int e = 0; e < 8; ++e) x[e] = fabsf(values[e]) > kLargest ? copysignf(kLargest, values[e]) : values[e];
  *reinterpret_cast<uint4*>(target) =
      make_uint4(pack_as<__half>(x[0], x[1]), pack_as<__half>(x[2], x[3]), pack_as<__half>(x[4], x[5]), pack_as<__half>(x[6], x[7]));
}

__device__ __forceinline__ void store(e4m3* target, const float (&values)[8], float scale) {
  float scaled[8];
#pragma unroll
  for (int e = 0; e < 8; ++e) scaled[e] = __fdiv_rn(values[e], scale);
  *reinterpret_cast<uint2*>(target) = make_uint2(four_e4m3(scaled), four_e4m3(scaled + 4));
}

// All lanes of a warp come here together, those past the last head or behind a head's end with what others have: the sum needs
// every lane, and takes nothing from those.
template <int kDim, typename Cached>
__device__ __forceinline__ void rope_kv_head(const RopeKv<Cached>& p, int row, int head, int lane, bool present) {
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
  present = present && has_dims;
  if (is_q) {
    if (present) store_query<Cached>(source + first, low), store_query<Cached>(source + second, high);
    return;
  }
  const int slot = p.slots[row], kv_head = head - p.n_q - (is_k ? 0 : p.n_kv);
  if (!present || slot < 0) return;
  Cached* target = cached<kDim>(p, is_k, kv_head, slot);
  // Keys' scales lie before values', as their heads do.
  const float scale = sizeof(Cached) == 1 ? p.kv_scales[head - p.n_q] : 1.f;
  store(target + first, low, scale), store(target + second, high, scale);
}

}  // namespace stoker

#define ROPE_KV(name, Cached, dim)                                                                                    \
  extern "C" __global__ void __launch_bounds__(256)                                                                   \
      name(stoker::bf16* qkv, stoker::Cached* k_cache, stoker::Cached* v_cache, const float* kv_scales,               \
           const stoker::bf16* bias, const stoker::bf16* q_weight, const stoker::bf16* k_weight, const float* angles, \
           const int32_t* positions, const int32_t* slots, int n_q, int n_kv, float eps, int head_dim, int n_pairs,   \
           float norm_offset) {                                                                                       \
    stoker::wait_for_earlier_kernels();                                                                               \
    stoker::let_next_kernel_start();                                                                                  \
    constexpr int lanes = stoker::kHeadLanes<dim>;                                                                    \
    const int head = blockIdx.y * (blockDim.x / lanes) + threadIdx.x / lanes, n_heads = n_q + 2 * n_kv;               \
    const stoker::RopeKv<stoker::Cached> p{qkv,       k_cache, v_cache, kv_scales, bias, q_weight, k_weight, angles,  \
                                           positions, slots,   n_q,     n_kv,      eps,  head_dim, n_pairs,  norm_offset}; \
    stoker::rope_kv_head<dim>(p, blockIdx.x, min(head, n_heads - 1), threadIdx.x % lanes, head < n_heads);            \
  }
ROPE_KV(rope_kv_d64, bf16, 64)
ROPE_KV(rope_kv_d128, bf16, 128)
ROPE_KV(rope_kv_any, bf16, 0)
ROPE_KV(rope_kv_e4m3_d64, e4m3, 64)
ROPE_KV(rope_kv_e4m3_d128, e4m3, 128)
ROPE_KV(rope_kv_e4m3_any, e4m3, 0)
