// What kernels that look at whole rows of logits share, by one block a row: visits of all logits, the few largest, and log-probabilities.
//
//   log-probabilities are those of the model's own distribution: l_i - ln sum_j exp(l_j), of a token and of the likeliest
//
// Layout of one row's: 2 + 2 * n_top words: the token's log-probability, how many follow, then token and log-probability, likeliest
// first, of equals the lowest token.
#pragma once
#include "draw.cuh"
#include "selection.cuh"

namespace stoker {

constexpr int kCandidates = 1024;
// A second pass reads single threads' logits only where no more threads than this want it: each such read is a sector.
constexpr int kFewThreads = 128;
// Words of one row's log-probabilities: the same as `LOGPROB_WORDS` in sampling.rs.
constexpr int kTopMax = 20, kLogprobWords = 2 + 2 * kTopMax;

struct Candidates {
  uint32_t keys[kCandidates], tokens[kCandidates];
  unsigned long long masses[kCandidates];
};

struct Shared {
  union {
    Candidates candidates;
    Select select;
  };
  float floats[kWarp];
  int n_candidates;
  uint32_t key;
  unsigned long long best;
};

// What a thread keeps of its logits.
struct Kept {
  float highest = -INFINITY, sum = 0.f;  // of the model's own
  float tempered = -INFINITY;            // the largest
  Best best{-INFINITY, 0};
  bool is_broken = false;
};

// visit(token, logit, edited logit), all of the row, coalesced.
template <typename Visit>
__device__ __forceinline__ void visit_all(const RowView& view, Visit visit) {
  constexpr int kAtOnce = 4;  // loads in flight a thread; 8 would not leave enough registers
  for (int base = threadIdx.x; base < view.vocab; base += kAtOnce * kThreads) {
    float logit[kAtOnce];
    uint32_t mark[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int token = min(base + i * kThreads, view.vocab - 1);
      logit[i] = view.logits[token];
      mark[i] = view.marks == nullptr ? 0u : view.marks[token];
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int token = base + i * kThreads;
      if (token < view.vocab) visit(token, logit[i], edited(view, logit[i], mark[i], is_allowed(view, token)));
    }
  }
}

// visit(token, logit, edited logit) of the logits of those threads that want it, and maybe of others.
template <typename Visit>
__device__ __forceinline__ void visit_again(const RowView& view, bool wants, Visit visit) {
  if (__syncthreads_count(wants) > kFewThreads) return visit_all(view, visit);
  const int lane = threadIdx.x % kWarp, first_of_warp = threadIdx.x - lane;
  for (uint32_t left = __ballot_sync(~0u, wants); left != 0; left &= left - 1) {
    const int first = first_of_warp + __ffs(left) - 1;
#pragma unroll 4
    for (int token = first + lane * kThreads; token < view.vocab; token += kWarp * kThreads) {
      visit(token, view.logits[token], edited(view, token));
    }
  }
}

// In every thread.
__device__ __forceinline__ float block_max(Shared& s, float x) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, distance));
  __syncthreads();
  if (lane == 0) s.floats[threadIdx.x / kWarp] = x;
  __syncthreads();
  x = s.floats[lane];
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, distance));
  __syncthreads();
  return x;
}

// The k-th largest of the threads' keys; 0 if fewer than k are above 0.
__device__ __forceinline__ uint32_t kth_largest(uint32_t key, int k) {
  uint32_t found = 0;
#pragma unroll 1
  for (int bit = 31; bit >= 0; --bit) {
    const uint32_t tried = found | 1u << bit;
    if (__syncthreads_count(key >= tried) >= k) found = tried;
  }
  return found;
}

// Gathers the tokens whose key is at least `threshold`, in any order. More than kCandidates: what was gathered is useless.
template <typename KeyOf>
__device__ __forceinline__ int gather(Shared& s, const RowView& view, uint32_t own_largest, uint32_t threshold, KeyOf key_of) {
  if (threadIdx.x == 0) s.n_candidates = 0;
  __syncthreads();
  visit_again(view, own_largest >= threshold, [&](int token, float logit, float edited) {
    const uint32_t key = key_of(logit, edited);
    if (key < threshold) return;
    const int at = atomicAdd(&s.n_candidates, 1);
    if (at < kCandidates) s.candidates.keys[at] = key, s.candidates.tokens[at] = token;
  });
  __syncthreads();
  return s.n_candidates;
}

// Adds exp(logit) to the sum of a thread, in units of its largest.
__device__ __forceinline__ void add_exponential(Kept& kept, float logit) {
  if (logit > kept.highest) {
    kept.sum = kept.sum * expf(kept.highest - logit) + 1.f;
    kept.highest = logit;
  } else if (logit > -INFINITY) {
    kept.sum += expf(logit - kept.highest);
  }
}

// ln of the sum of all exponentials. Added up in a fixed order: the same bits every time.
__device__ __forceinline__ float log_sum(Shared& s, const Kept& kept) {
  const float highest = block_max(s, kept.highest);
  const float own = kept.sum > 0.f ? kept.sum * expf(kept.highest - highest) : 0.f;
  return highest + logf(block_sum(own, s.floats));
}

__device__ __forceinline__ void put_logprob(uint32_t* out, int rank, uint32_t token, float logprob) {
  out[2 + 2 * rank] = token, out[3 + 2 * rank] = __float_as_uint(logprob);
}

// The likeliest tokens one after the other: for rows with a great many equal logits.
__device__ __noinline__ void put_likeliest_one_by_one(Shared& s, const RowView& view, int n_top, float log_total, uint32_t* out) {
  unsigned long long below = ~0ull;
  for (int rank = 0; rank < n_top; ++rank) {
    unsigned long long best = 0;
    for (int token = threadIdx.x; token < view.vocab; token += kThreads) {
      const unsigned long long key = static_cast<unsigned long long>(ordered(view.logits[token])) << 32 | ~static_cast<uint32_t>(token);
      if (key < below) best = max(best, key);
    }
    if (threadIdx.x == 0) s.best = 0;
    __syncthreads();
    atomicMax(&s.best, best);
    __syncthreads();
    below = s.best;
    __syncthreads();
    if (threadIdx.x == 0) put_logprob(out, rank, ~static_cast<uint32_t>(below), unordered(below >> 32) - log_total);
  }
}

__device__ __forceinline__ void put_likeliest(Shared& s, const RowView& view, const Kept& kept, float log_total, uint32_t* out) {
  const int n_top = min(static_cast<int>(view.row.n_top), view.vocab);
  if (threadIdx.x == 0) out[1] = n_top;
  if (n_top == 0) return;
  const uint32_t own = threadIdx.x < view.vocab ? ordered(kept.highest) : 0;
  const uint32_t threshold = kth_largest(own, min(n_top, kThreads));
  const int n = gather(s, view, own, threshold, [](float logit, float) { return ordered(logit); });
  if (n > kCandidates) return put_likeliest_one_by_one(s, view, n_top, log_total, out);
  const Candidates& c = s.candidates;
  if (threadIdx.x < n) {
    const uint32_t key = c.keys[threadIdx.x], token = c.tokens[threadIdx.x];
    int rank = 0;
    for (int i = 0; i < n; ++i) rank += c.keys[i] > key || (c.keys[i] == key && c.tokens[i] < token);
    if (rank < n_top) put_logprob(out, rank, token, unordered(key) - log_total);
  }
  __syncthreads();
}

}  // namespace stoker
