// What the sampling kernels share: one row's options, its logits as the options change them, the order of floats as
// integers.
//
//   penalties   seen in prompt or completion:  l = l > 0 ? l / repetition : l * repetition
//               n times in the completion:     l -= presence + frequency * n
//   edits       l += bias, or minus infinity while the position is below `banned_until`
//   mask        minus infinity where the token's bit is not set
//   temperature l / T
//
// Nothing is changed in place: what changes a token's logit is its mark, one word a token and slot of a running
// sequence, so any kernel reads the row as the model gave it, or as the options change it.
//
//   mark, by bits:  31 in the prompt | 30..20 its edit, counted from 1, or 0 | 19..0 times in the completion
//
// Multiplications and additions are kept apart (no fused multiply-add): the CPU sampler rounds between them.
#pragma once
#include "common.cuh"

namespace stoker {

constexpr uint32_t kInPrompt = 1u << 31, kEditShift = 20, kEditsMax = 0x7ff, kCountMask = 0xfffff;
constexpr uint32_t kNoToken = 0xffffffffu;
// Larger top-k are found by histograms: see sample_options.cu.
constexpr uint32_t kTopKMax = 256;

// The same fields as `SampleRow` in sampling.rs.
struct SampleRow {
  uint64_t seed, position;
  float temperature;  // 0: greedy
  float top_p;        // 1: off
  float ln_min_p;     // minus infinity: off
  uint32_t top_k;     // 0: off
  float presence, frequency, repetition;
  int32_t slot;      // whose marks, -1: none
  int32_t mask;      // which mask, -1: none
  int32_t logprobs;  // where its log-probabilities go, -1: not wanted
  uint32_t n_top;    // how many tokens beside the chosen one
  uint32_t options;  // 0: nothing but seed and temperature
};

// The same fields as `LogitEdit` in sampling.rs.
struct LogitEdit {
  float bias;
  uint32_t banned_until;  // position
};

// One row of logits, and what changes them. Pointers are null where nothing of the kind does.
struct RowView {
  const float* logits;
  const uint32_t* marks;
  const LogitEdit* edits;
  const uint32_t* mask;
  const SampleRow& row;  // where it lies: few fields are needed at a time
  int vocab;
};

// What all rows share.
struct SampleInputs {
  const float* logits;     // rows x vocab
  const SampleRow* rows;
  const uint32_t* marks;   // slots x vocab
  const LogitEdit* edits;  // slots x kEditsMax
  const uint32_t* masks;   // masks x words of a mask
};

__device__ __forceinline__ RowView view_of(const SampleInputs& in, int at, int vocab) {
  const SampleRow& row = in.rows[at];
  const bool is_marked = row.slot >= 0, is_masked = row.mask >= 0;
  return {in.logits + static_cast<size_t>(at) * vocab,
          is_marked ? in.marks + static_cast<size_t>(row.slot) * vocab : nullptr,
          is_marked ? in.edits + static_cast<size_t>(row.slot) * kEditsMax : nullptr,
          is_masked ? in.masks + static_cast<size_t>(row.mask) * ((vocab + 31) / 32) : nullptr,
          row,
          vocab};
}

// Not inlined: few tokens of a row have a mark, and the loops over all are unrolled.
__device__ __noinline__ float marked(float logit, uint32_t mark, float presence, float frequency, float repetition,
                                     const LogitEdit* edits, uint64_t position) {
  const uint32_t n_generated = mark & kCountMask, edit = mark >> kEditShift & kEditsMax;
  if ((mark & kInPrompt) || n_generated > 0) {
    logit = logit > 0.f ? __fdiv_rn(logit, repetition) : __fmul_rn(logit, repetition);
    if (n_generated > 0) {
      logit = __fsub_rn(logit, __fadd_rn(__fmul_rn(frequency, static_cast<float>(n_generated)), presence));
    }
  }
  if (edit == 0) return logit;
  const LogitEdit e = edits[edit - 1];
  return position < e.banned_until ? -INFINITY : __fadd_rn(logit, e.bias);
}

// A token's logit as the row's options change it.
__device__ __forceinline__ float edited(const RowView& view, float logit, uint32_t mark, bool is_allowed) {
  if (!is_allowed) return -INFINITY;
  if (mark == 0) return logit;
  const SampleRow& row = view.row;
  return marked(logit, mark, row.presence, row.frequency, row.repetition, view.edits, row.position);
}

__device__ __forceinline__ bool is_allowed(const RowView& view, int token) {
  return view.mask == nullptr || (view.mask[token / 32] >> (token % 32) & 1u);
}

__device__ __forceinline__ float edited(const RowView& view, int token) {
  return edited(view, view.logits[token], view.marks == nullptr ? 0u : view.marks[token], is_allowed(view, token));
}

// Divided, not multiplied by an inverse: the CPU sampler divides, and a floor must meet the very same values.
__device__ __forceinline__ float tempered(float logit, const SampleRow& row) { return __fdiv_rn(logit, row.temperature); }

// Whether a filter by rank is on that needs more than the few largest logits.
__device__ __forceinline__ bool needs_selection(const SampleRow& row, int vocab) {
  const bool has_top_k = row.top_k > 0 && row.top_k < static_cast<uint32_t>(vocab);
  return row.temperature > 0.f && (has_top_k ? row.top_k > kTopKMax : row.top_p < 1.f);
}

// Integers in the order of the floats.
__device__ __forceinline__ uint32_t ordered(float x) {
  const uint32_t bits = __float_as_uint(x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float unordered(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// Sum over the warp's lanes before and including this one.
__device__ __forceinline__ unsigned long long warp_scan(unsigned long long x) {
#pragma unroll
  for (int distance = 1; distance < kWarp; distance *= 2) {
    const unsigned long long other = __shfl_up_sync(~0u, x, distance);
    if (threadIdx.x % kWarp >= distance) x += other;
  }
  return x;
}

}  // namespace stoker
