// The draw of a row without options, cut in pieces: each block takes the best token of its piece, and the one that finishes last the best
// of all. `first` is the token of the row's first logit: a rank has a share of the vocabulary.
#pragma once
#include "draw.cuh"

namespace stoker {

__device__ __forceinline__ Best scan(const float* logits, const SampleRow& row, int begin, int end, uint32_t first) {
  constexpr int kAtOnce = 8;  // loads in flight a thread
  const uint64_t stream = mix(mix(row.seed) + row.position);
  Best best{-INFINITY, first + begin};
  for (int base = begin + threadIdx.x; base < end; base += kAtOnce * blockDim.x) {
    float logit[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int token = base + i * blockDim.x;
      logit[i] = token < end ? logits[token] : -INFINITY;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) best = consider(best, logit[i], first + base + i * blockDim.x, row, -INFINITY, stream);
  }
  return best;
}

// The last piece of a row to finish compares all of them, puts the ticket counter back and goes on with the best one. By the first warp.
template <typename Finish>
__device__ __forceinline__ void finish_row(Best mine, Best* pieces, uint32_t* ticket, Finish finish) {
  const int lane = threadIdx.x;
  uint32_t n_before = 0;
  if (lane == 0) {
    pieces[blockIdx.x] = mine;
    __threadfence();
    n_before = atomicAdd(ticket, 1u);
    __threadfence();
  }
  if (__shfl_sync(~0u, n_before, 0) != gridDim.x - 1) return;
  const int piece = min(lane, gridDim.x - 1);
  const Best best = warp_best({__ldcg(&pieces[piece].score), __ldcg(&pieces[piece].token)});
  if (lane == 0) *ticket = 0;
  finish(best);
}

}  // namespace stoker
