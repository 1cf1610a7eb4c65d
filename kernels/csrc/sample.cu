// The next token of each row: greedy, or the Gumbel-max draw over the tokens that the filters keep.
//
//   temperature 0:  argmax_i l_i
//   else:           argmax_i (l_i / T + gumbel(seed, position, i))  over l_i / T >= floor,  gumbel = -ln(-ln(u))
//
// u is a hash of (seed, position, token) and nothing else (three rounds of SplitMix64, the upper 23 bits, centred), the
// same as the CPU sampler's: a request continues the same on any replica. No sum runs over the vocabulary, so the draw
// does not depend on how the row is cut. Equal scores: the lowest token.
// Layout: logits rows x vocab f32; rows' parameters; floors f32 (minus infinity where no filter is on) from
// sampling_floor. tokens u32 is where the next step's embedding reads. A row with a NaN among its logits gets the token
// 2^32 - 1: the host ends that request with an error, and the embedding of it is zeros.
// A row is cut into gridDim.x pieces so that few rows still fill the chip; the block that finishes last compares them.
// 4 B a logit: greedy is bound by memory (85 % of the read ceiling at 256 rows of 128256, 31 us); the draw computes two
// logarithms a kept token, about 100 us at 256 rows.
#include "sampling.cuh"

namespace stoker {

struct Best {
  float score;
  uint32_t token;
};

constexpr uint32_t kNoToken = 0xffffffffu;

// Not-a-number beats everything; then the score; then the lower token.
__device__ __forceinline__ Best better(Best a, Best b) {
  if (a.token == kNoToken || b.token == kNoToken) return {0.f, kNoToken};
  return b.score > a.score || (b.score == a.score && b.token < a.token) ? b : a;
}

__device__ __forceinline__ Best block_best(Best best) {
  __shared__ Best scratch[kWarp];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, n_warps = blockDim.x / kWarp;
  auto reduce = [](Best mine) {
#pragma unroll
    for (int distance = kWarp / 2; distance > 0; distance /= 2) {
      mine = better(mine, {__shfl_xor_sync(~0u, mine.score, distance), __shfl_xor_sync(~0u, mine.token, distance)});
    }
    return mine;
  };
  best = reduce(best);
  if (lane == 0) scratch[warp] = best;
  __syncthreads();
  best = reduce(scratch[lane < n_warps ? lane : 0]);
  __syncthreads();
  return best;
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

__device__ __forceinline__ Best scan(const float* logits, const SampleRow& row, float floor, int begin, int end) {
  const bool greedy = row.temperature == 0.f;
  const uint64_t stream = mix(mix(row.seed) + row.position);
  Best best{-INFINITY, static_cast<uint32_t>(begin)};
#pragma unroll 4
  for (int i = begin + threadIdx.x; i < end; i += blockDim.x) {
    const uint32_t token = i;
    const float logit = logits[i];
    if (isnan(logit)) return {0.f, kNoToken};
    float score = logit;
    if (!greedy) {
      const float kept = tempered(logit, row);
      score = kept >= floor ? kept + gumbel(stream, token) : -INFINITY;
    }
    best = better(best, {score, token});
  }
  return best;
}

// The last piece of a row to finish compares all of them and puts the ticket counter back.
__device__ __forceinline__ void finish_row(uint32_t* tokens, volatile Best* pieces, uint32_t* ticket) {
  __threadfence();
  if (atomicAdd(ticket, 1u) != gridDim.x - 1) return;
  __threadfence();
  Best best{pieces[0].score, pieces[0].token};
  for (int i = 1; i < gridDim.x; ++i) best = better(best, {pieces[i].score, pieces[i].token});
  tokens[blockIdx.y] = best.token;
  *ticket = 0;
}

}  // namespace stoker

extern "C" __global__ void __launch_bounds__(512) sample(uint32_t* tokens, const float* logits, const stoker::SampleRow* rows,
                                                         const float* floors, stoker::Best* pieces, uint32_t* tickets,
                                                         int vocab) {
  stoker::wait_for_earlier_kernels();
  stoker::let_next_kernel_start();
  const int n_each = (vocab + gridDim.x - 1) / gridDim.x, begin = min(blockIdx.x * n_each, vocab);
  const float* row = logits + static_cast<size_t>(blockIdx.y) * vocab;
  const stoker::Best best =
      stoker::block_best(stoker::scan(row, rows[blockIdx.y], floors[blockIdx.y], begin, min(begin + n_each, vocab)));
  if (threadIdx.x != 0) return;
  if (gridDim.x == 1) {
    tokens[blockIdx.y] = best.token;
    return;
  }
  pieces[blockIdx.y * gridDim.x + blockIdx.x] = best;
  stoker::finish_row(tokens, pieces + blockIdx.y * gridDim.x, tickets + blockIdx.y);
}
