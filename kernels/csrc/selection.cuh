// The smallest tempered logit that top-k and top-p both keep, by selection instead of sorting, by one block.
//
//   floor = max(k-th largest,  last of the smallest set of the top k whose mass reaches top_p of theirs)
//
// m is the row's maximum, mass of t is exp(t - m). Equal logits are kept or dropped together.
// Floats become integers of the same order; the wanted one is found by its digits (11, 11 and 10 bits), highest first:
// a histogram of what lies in each bin of a digit, a scan from the top until the target is reached, then the next digit
// among those that share the digits found. Counting finds the k-th largest; adding up mass finds top-p's. Mass is added
// as integers of 2^-40: any order gives the same sum, so the floor has no run-to-run noise (D9).
// 4 passes over the row for top-k, 5 for top-p, 8 for both, from L2 after the first: 0.7 ms for one row of 128256, 1.4 ms for
// 256 (H200): shared 64-bit atomics are retry loops and one block reads a row slowly. sampling_floor_sm90.cu does better where
// blocks can share memory, sample_options.cu where k is small; this runs everywhere and takes any row.
#pragma once
#include "sampling.cuh"

namespace stoker {

constexpr int kThreads = 1024, kBins = 2048;
constexpr float kMassUnit = 1099511627776.f;  // 2^40

struct Select {
  unsigned long long bins[kBins];
  unsigned long long warp_sums[kWarp];
  uint32_t bin;               // where the target was reached
  unsigned long long before;  // what lies above that bin
};

__device__ __forceinline__ unsigned long long mass(float t, float maximum) {
  return isnan(t) ? 0 : __float2ull_rn(expf(t - maximum) * kMassUnit);
}

// Sum over all threads before and including this one.
__device__ __forceinline__ unsigned long long block_scan(Select& s, unsigned long long x) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  x = warp_scan(x);
  if (lane == kWarp - 1) s.warp_sums[warp] = x;
  __syncthreads();
  if (warp == 0) s.warp_sums[lane] = warp_scan(s.warp_sums[lane]);
  __syncthreads();
  if (warp > 0) x += s.warp_sums[warp - 1];
  __syncthreads();
  return x;
}

// Finds the bin, from the top, in which the running sum reaches `target`.
__device__ __forceinline__ void find_bin(Select& s, unsigned long long target) {
  const int high = kBins - 1 - 2 * threadIdx.x;
  const unsigned long long first = s.bins[high], second = s.bins[high - 1];
  const unsigned long long through = block_scan(s, first + second), before = through - first - second;
  if (before < target && target <= through) {
    const bool in_first = target <= before + first;
    s.bin = in_first ? high : high - 1, s.before = in_first ? before : before + first;
  }
  __syncthreads();
}

// The largest key such that the weights of keys at or above it reach `target`; `target` becomes what of it the keys
// above do not cover. The total weight must reach the target.
template <typename Weight>
__device__ __forceinline__ uint32_t select(Select& s, const RowView& view, unsigned long long& target,
                                           Weight weight) {
  uint32_t found = 0;
#pragma unroll 1
  for (int digit = 0; digit < 3; ++digit) {
    const int shift = digit == 0 ? 21 : digit == 1 ? 10 : 0, n_bits = digit == 2 ? 10 : 11;
    const uint32_t known = digit == 0 ? 0u : ~0u << (shift + n_bits);
    for (int b = threadIdx.x; b < kBins; b += kThreads) s.bins[b] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < view.vocab; i += kThreads) {
      const float t = tempered(edited(view, i), view.row);
      const uint32_t key = ordered(t);
      if ((key & known) != found) continue;
      const unsigned long long w = weight(t);
      if (w != 0) atomicAdd(&s.bins[key >> shift & ((1u << n_bits) - 1)], w);
    }
    __syncthreads();
    find_bin(s, target);
    found |= s.bin << shift, target -= s.before;
    __syncthreads();
  }
  return found;
}

// Mass of the keys above `key`, and of `n_equal` of those equal to it.
__device__ __forceinline__ unsigned long long mass_of_top(Select& s, const RowView& view, float maximum, uint32_t key,
                                                          unsigned long long n_equal) {
  unsigned long long sum = 0;
  for (int i = threadIdx.x; i < view.vocab; i += kThreads) {
    const float t = tempered(edited(view, i), view.row);
    if (ordered(t) > key) sum += mass(t, maximum);
  }
  if (threadIdx.x == 0) sum += n_equal * mass(unordered(key), maximum);
  block_scan(s, sum);
  const unsigned long long total = s.warp_sums[kWarp - 1];
  __syncthreads();
  return total;
}

__device__ __forceinline__ float rank_floor(Select& s, const RowView& view, float maximum) {
  const SampleRow& row = view.row;
  uint32_t key = 0;
  unsigned long long n_equal = 0;
  if (row.top_k > 0 && row.top_k < static_cast<uint32_t>(view.vocab)) {
    n_equal = row.top_k;
    key = select(s, view, n_equal, [](float) { return 1ull; });
  }
  if (row.top_p < 1.f) {
    const unsigned long long total = mass_of_top(s, view, maximum, key, n_equal);
    auto target = static_cast<unsigned long long>(ceil(static_cast<double>(row.top_p) * static_cast<double>(total)));
    target = min(max(target, 1ull), total);
    key = max(key, select(s, view, target, [maximum](float t) { return mass(t, maximum); }));
  }
  return key == 0 ? -INFINITY : unordered(key);
}

}  // namespace stoker
