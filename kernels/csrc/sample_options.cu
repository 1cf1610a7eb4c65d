// The next token of each row that has options, and its log-probabilities: one block a row, and the row is read once where
// that can be.
//
//   t_i = edited(l_i) / T        edited: penalties, bias, bans, mask (sampling.cuh)
//   token = argmax over t_i >= floor of t_i + gumbel(seed, position, i);  temperature 0: argmax of edited(l_i)
//   log-probabilities are those of the model's own distribution: l_i - ln sum_j exp(l_j), of the token and the likeliest
//
// The first pass takes from each thread's logits (every 1024th) what a row needs: the largest, the sum of exponentials, the
// best draw. The k-th largest of the 1024 threads' largest is at most the row's k-th largest, so what is at least as large,
// hardly more than k logits of some k threads, holds the top k: they are read again, gathered and ranked on chip. That is
// the top-k filter up to 256, top-p among them, and the likeliest tokens. A tie of more than 1024 logits and what needs more than the
// few largest (top-p alone, a large top-k) take a floor: selection.cuh's, or the one that sampling_floor_sm90.cu has
// left in `floors`, then a second pass.
// The drawn token's mark counts it, so that the next step's penalties know it before the host does.
// Layout: logits rows x vocab f32; results: tokens u32, then from `logprobs` 2 + 2 * n_top words a row that wants them: the
// token's log-probability, how many follow, then token and log-probability, likeliest first, of equals the lowest token.
// 4 B a logit, 8 with marks, plus what is read again. `is_masked` says whose turn it is: rows with a mask, or all others.
#include "logprobs.cuh"

namespace stoker {

// The key of the last candidate that top-k, and top-p among the top k, keep; `own` is this thread's candidate, 0 if none.
__device__ __forceinline__ uint32_t last_kept(Shared& s, const SampleRow& row, int n, uint32_t own, float maximum) {
  Candidates& c = s.candidates;
  const uint32_t kth = kth_largest(own, row.top_k);
  if (row.top_p >= 1.f) return kth;
  const unsigned long long own_mass = own > 0 ? mass(unordered(own), maximum) : 0;
  if (threadIdx.x < n) c.masses[threadIdx.x] = own_mass;
  if (threadIdx.x == 0) s.key = 0;
  __syncthreads();
  unsigned long long total = 0, through = 0;
  uint32_t n_above = 0;
  for (int i = 0; i < n; ++i) {
    if (c.keys[i] > kth) total += c.masses[i], n_above += 1;
    if (c.keys[i] >= own) through += c.masses[i];
  }
  // Of the tokens equal to the k-th, only as many belong to the top k as it has room for.
  if (kth > 0) total += (row.top_k - n_above) * mass(unordered(kth), maximum);
  auto target = static_cast<unsigned long long>(ceil(static_cast<double>(row.top_p) * static_cast<double>(total)));
  target = min(max(target, 1ull), total);
  if (own > 0 && through >= target) atomicMax(&s.key, own);
  __syncthreads();
  return max(kth, s.key);
}

// Draws among the top k. Without a token: more logits are as large than there is room for.
__device__ __forceinline__ Best draw_top_k(Shared& s, const RowView& view, const Kept& kept, float maximum) {
  const SampleRow& row = view.row;
  const uint32_t nothing = ordered(-INFINITY), own_largest = kept.tempered > -INFINITY ? ordered(kept.tempered) : 0;
  const uint32_t threshold = max(kth_largest(own_largest, row.top_k), nothing + 1);
  const int n = gather(s, view, own_largest, threshold, [&](float, float edited) { return ordered(tempered(edited, row)); });
  if (n > kCandidates) return {0.f, kNoToken};
  const uint32_t own = threadIdx.x < n ? s.candidates.keys[threadIdx.x] : 0;
  const uint32_t last = last_kept(s, row, n, own, maximum);
  Best best{-INFINITY, 0};
  if (own >= max(last, 1u)) {
    const float floor = maximum + row.ln_min_p;
    const uint64_t stream = mix(mix(row.seed) + row.position);
    best = consider_tempered(best, unordered(own), s.candidates.tokens[threadIdx.x], floor, stream);
  }
  return best;
}

// Draws where the first pass could not: what the filters keep depends on the row's largest.
__device__ __forceinline__ Best draw_filtered(Shared& s, const RowView& view, const Kept& kept) {
  const SampleRow& row = view.row;
  const float maximum = block_max(s, kept.tempered);
  const bool has_top_k = row.top_k > 0 && row.top_k < static_cast<uint32_t>(view.vocab), has_maximum = isfinite(maximum);
  float floor = -INFINITY;
  if (has_maximum && has_top_k && row.top_k <= kTopKMax) {
    const Best best = draw_top_k(s, view, kept, maximum);
    if (!__syncthreads_or(best.token == kNoToken)) return best;
    floor = rank_floor(s.select, view, maximum);
  } else if (has_maximum && (has_top_k || row.top_p < 1.f)) {
    floor = rank_floor(s.select, view, maximum);
  }
  floor = fmaxf(floor, maximum + row.ln_min_p);
  const uint64_t stream = mix(mix(row.seed) + row.position);
  Best best{-INFINITY, 0};
  visit_again(view, kept.tempered >= floor, [&](int token, float, float edited) {
    best = consider(best, edited, token, row, floor, stream);
  });
  return best;
}

__device__ __forceinline__ bool is_filtered(const SampleRow& row) {
  return row.temperature > 0.f && (row.top_k > 0 || row.top_p < 1.f || row.ln_min_p > -INFINITY);
}

}  // namespace stoker

extern "C" __global__ void __launch_bounds__(1024)
    sample_options(uint32_t* tokens, uint32_t* logprobs, const float* logits, const stoker::SampleRow* rows, uint32_t* marks,
                   const stoker::LogitEdit* edits, const uint32_t* masks, const float* floors, int vocab, int is_masked) {
  using namespace stoker;
  __shared__ Shared s;
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int at = blockIdx.x;
  const RowView view = view_of({logits, rows, marks, edits, masks}, at, vocab);
  const SampleRow& row = view.row;
  if (row.options == 0 || (row.mask >= 0) != (is_masked != 0)) return;

  const bool has_floor = floors != nullptr && needs_selection(row, vocab), wants_logprobs = row.logprobs >= 0;
  const bool is_later = is_filtered(row) && !has_floor;
  const float floor = has_floor ? floors[at] : -INFINITY;
  const uint64_t stream = mix(mix(row.seed) + row.position);
  Kept kept;
  visit_all(view, [&](int token, float logit, float edited) {
    kept.is_broken |= isnan(logit);
    if (wants_logprobs) add_exponential(kept, logit);
    if (is_later) {
      kept.tempered = fmaxf(kept.tempered, tempered(edited, row));
    } else {
      kept.best = consider(kept.best, edited, token, row, floor, stream);
    }
  });
  if (__syncthreads_or(kept.is_broken)) {
    if (threadIdx.x == 0) tokens[at] = kNoToken;
    return;
  }
  uint32_t* out = logprobs + static_cast<size_t>(max(row.logprobs, 0)) * kLogprobWords;
  float log_total = 0.f;
  if (wants_logprobs) {
    log_total = log_sum(s, kept);
    put_likeliest(s, view, kept, log_total, out);
  }
  const Best best = block_best(is_later ? draw_filtered(s, view, kept) : kept.best);
  if (threadIdx.x != 0) return;
  tokens[at] = best.token;
  if (wants_logprobs) out[0] = __float_as_uint(view.logits[best.token] - log_total);
  if (row.slot >= 0) marks[static_cast<size_t>(row.slot) * vocab + best.token] += 1;
}
