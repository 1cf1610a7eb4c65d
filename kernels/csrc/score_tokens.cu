// How likely tokens were that are given, not drawn: one block a row of logits. 4 B a logit, and again for those of the threads that hold
// the likeliest.
//
//   out: of each row the words of logprobs.cuh, with room for the most likeliest tokens there may be, then the token's rank: how many
//   logits are larger, and one
//
// A row with a NaN has no log-probabilities: its first word is one, and none follow.
#include "logprobs.cuh"

extern "C" __global__ void __launch_bounds__(1024)
    score_tokens(uint32_t* out, const float* logits, const uint32_t* tokens, int vocab, int n_top) {
  using namespace stoker;
  __shared__ Shared s;
  wait_for_earlier_kernels();
  let_next_kernel_start();
  SampleRow row{};
  row.n_top = n_top;
  const RowView view{logits + static_cast<size_t>(blockIdx.x) * vocab, nullptr, nullptr, nullptr, row, vocab};
  const float own = view.logits[tokens[blockIdx.x]];
  Kept kept;
  float n_larger = 0.f;  // a vocabulary is below 2^24
  visit_all(view, [&](int, float logit, float) {
    kept.is_broken |= isnan(logit);
    add_exponential(kept, logit);
    n_larger += logit > own ? 1.f : 0.f;
  });
  uint32_t* words = out + static_cast<size_t>(blockIdx.x) * (kLogprobWords + 1);
  if (__syncthreads_or(kept.is_broken)) {
    if (threadIdx.x == 0) words[0] = __float_as_uint(NAN), words[1] = 0, words[kLogprobWords] = 1;
    return;
  }
  const float log_total = log_sum(s, kept);
  put_likeliest(s, view, kept, log_total, words);
  n_larger = block_sum(n_larger, s.floats);
  if (threadIdx.x != 0) return;
  words[0] = __float_as_uint(own - log_total);
  words[kLogprobWords] = static_cast<uint32_t>(n_larger) + 1;
}
