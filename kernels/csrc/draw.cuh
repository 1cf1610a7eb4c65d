// The draw of a token: which of two candidates wins, and the noise that is added to a tempered logit. The one definition on
// the device; `draw.rs` is the host's.
#pragma once
#include "sampling.cuh"

namespace stoker {

struct Best {
  float score;
  uint32_t token;
};

// Not-a-number beats everything; then the score; then the lower token.
__device__ __forceinline__ Best better(Best a, Best b) {
  if (a.token == kNoToken || b.token == kNoToken) return {0.f, kNoToken};
  return b.score > a.score || (b.score == a.score && b.token < a.token) ? b : a;
}

__device__ __forceinline__ Best warp_best(Best best) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    best = better(best, {__shfl_xor_sync(~0u, best.score, distance), __shfl_xor_sync(~0u, best.token, distance)});
  }
  return best;
}

// The first warp gets the best of all.
__device__ __forceinline__ Best block_best(Best best) {
  __shared__ Best scratch[kWarp];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, n_warps = blockDim.x / kWarp;
  best = warp_best(best);
  if (lane == 0) scratch[warp] = best;
  __syncthreads();
  return warp == 0 ? warp_best(scratch[lane < n_warps ? lane : 0]) : best;
}

__device__ __forceinline__ uint64_t mix(uint64_t state) {
  uint64_t z = state + 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

// `stream` is mix(mix(seed) + position): the part of the hash that a row shares.
__device__ __forceinline__ float gumbel(uint64_t stream, uint32_t token) {
  const uint64_t bits = mix(stream + token) >> 41;
  const float u = (static_cast<float>(bits) + 0.5f) / 8388608.f;
  return -logf(-logf(u));
}

// What a token with this tempered logit can score at most: u is at most 1 - 2^-24, and -ln(-ln(u)) below 16.64.
constexpr float kGumbelMax = 16.64f;

__device__ __forceinline__ Best consider_tempered(Best best, float kept, uint32_t token, float floor, uint64_t stream) {
  // Most tokens cannot win whatever their noise: two comparisons instead of a hash and two logarithms.
  if (!(kept >= floor) || kept + kGumbelMax < best.score) return best;
  return better(best, {kept + gumbel(stream, token), token});
}

__device__ __forceinline__ Best consider(Best best, float logit, uint32_t token, const SampleRow& row, float floor,
                                         uint64_t stream) {
  if (isnan(logit)) return {0.f, kNoToken};
  if (row.temperature == 0.f) return better(best, {logit, token});
  return consider_tempered(best, tempered(logit, row), token, floor, stream);
}

}  // namespace stoker
