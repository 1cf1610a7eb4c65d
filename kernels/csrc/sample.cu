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
// 4 B a logit. One row of 128256 takes 4.8 us greedy and 6.8 drawn, 256 rows 66 and 167 (the read alone would be 31): bound by
// instructions, a draw's by its hash and two logarithms for each token that may still win.
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

__device__ __forceinline__ Best consider(Best best, float logit, uint32_t token, const SampleRow& row, float floor,
                                         uint64_t stream) {
  if (isnan(logit)) return {0.f, kNoToken};
  if (row.temperature == 0.f) return better(best, {logit, token});
  const float kept = tempered(logit, row);
  // Most tokens cannot win whatever their noise: two comparisons instead of a hash and two logarithms.
  if (!(kept >= floor) || kept + kGumbelMax < best.score) return best;
  return better(best, {kept + gumbel(stream, token), token});
}

__device__ __forceinline__ Best scan(const float* logits, const SampleRow& row, float floor, int begin, int end) {
  constexpr int kAtOnce = 8;  // loads in flight a thread
  const uint64_t stream = mix(mix(row.seed) + row.position);
  Best best{-INFINITY, static_cast<uint32_t>(begin)};
  for (int base = begin + threadIdx.x; base < end; base += kAtOnce * blockDim.x) {
    float logit[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int token = base + i * blockDim.x;
      logit[i] = token < end ? logits[token] : -INFINITY;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) best = consider(best, logit[i], base + i * blockDim.x, row, floor, stream);
  }
  return best;
}

// The last piece of a row to finish compares all of them and puts the ticket counter back. By the first warp.
__device__ __forceinline__ void finish_row(uint32_t* tokens, Best mine, Best* pieces, uint32_t* ticket) {
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
  if (lane == 0) tokens[blockIdx.y] = best.token, *ticket = 0;
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
  if (threadIdx.x >= stoker::kWarp) return;
  stoker::finish_row(tokens, best, pieces + blockIdx.y * gridDim.x, tickets + blockIdx.y);
}
