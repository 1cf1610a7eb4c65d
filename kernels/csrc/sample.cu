// The next token of each row that has no options: greedy, or the Gumbel-max draw. Rows with options are sample_options.cu's.
//
//   temperature 0:  argmax_i l_i
//   else:           argmax_i (l_i / T + gumbel(seed, position, i)),   gumbel = -ln(-ln(u))
//
// u is a hash of (seed, position, token) and nothing else (three rounds of SplitMix64, the upper 23 bits, centred), the
// same as the CPU sampler's: a request continues the same on any replica. No sum runs over the vocabulary, so the draw
// does not depend on how the row is cut. Equal scores: the lowest token.
// Layout: logits rows x vocab f32; rows' parameters. tokens u32 is where the next step's embedding reads. A row with a NaN
// among its logits gets the token 2^32 - 1: the host ends that request with an error, and the embedding of it is zeros.
// A row is cut into gridDim.x pieces so that few rows still fill the chip; the block that finishes last compares them.
// 4 B a logit. One row of 128256 takes 4.8 us greedy and 6.8 drawn, 256 rows 66 and 167 (the read alone would be 31): bound by
// instructions, a draw's by its hash and two logarithms for each token that may still win.
#include "sample.cuh"

extern "C" __global__ void __launch_bounds__(512) sample(uint32_t* tokens, const float* logits, const stoker::SampleRow* rows,
                                                         stoker::Best* pieces, uint32_t* tickets, int vocab) {
  stoker::wait_for_earlier_kernels();
  stoker::let_next_kernel_start();
  const stoker::SampleRow how = rows[blockIdx.y];
  if (how.options != 0) return;
  const int n_each = (vocab + gridDim.x - 1) / gridDim.x, begin = min(blockIdx.x * n_each, vocab);
  const float* row = logits + static_cast<size_t>(blockIdx.y) * vocab;
  const stoker::Best best = stoker::block_best(stoker::scan(row, how, begin, min(begin + n_each, vocab), 0));
  if (threadIdx.x >= stoker::kWarp) return;
  stoker::finish_row(best, pieces + blockIdx.y * gridDim.x, tickets + blockIdx.y, [&](stoker::Best best) {
    if (threadIdx.x == 0) tokens[blockIdx.y] = best.token;
  });
}
