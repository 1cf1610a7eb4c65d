// The next token of each row that has no options, where ranks have the logits of a share of the vocabulary each: the best of every rank's
// best, by the rule of sample.cu, whose bits it has. A rank sends its best to the others, 16 bytes a row, and waits for theirs, as
// rows of reduce.cuh are pushed: 4 us more than the draw, and no logits on the link.
// Layout: logits rows x own f32, of the tokens from `first` on.
#include "reduce.cuh"
#include "sample.cuh"

namespace stoker {

// Every rank's best to every rank. By the first warp: a lane a rank.
__device__ __forceinline__ Best best_of_ranks(Best own, const Ranks& inboxes, const Group& group) {
  const int row = blockIdx.y, lane = threadIdx.x;
  const uint32_t number = group.counts[row] + 1;
  const auto slot = [&](int of, int from) {
    return inboxes.at[of] + (static_cast<size_t>(number & 1) * group.n_ranks + from) * group.max_rows + row;
  };
  Best best = own;
  if (lane < group.n_ranks && lane != group.rank) {
    store_fresh(slot(lane, group.rank), __float_as_uint(own.score), number, own.token, number);
    Patience patience;
    while (true) {
      const uint4 given = load_fresh(slot(group.rank, lane));
      if (given.y == number && given.w == number) {
        best = {__uint_as_float(given.x), given.z};
        break;
      }
      patience.spin();
    }
  }
  __syncwarp();
  if (lane == 0) group.counts[row] = number;
  return warp_best(best);
}

}  // namespace stoker

extern "C" __global__ void __launch_bounds__(512)
    sample_shared(uint32_t* tokens, const float* logits, const stoker::SampleRow* rows, stoker::Best* pieces, uint32_t* tickets, int own,
                  int first, const __grid_constant__ stoker::Ranks inboxes, uint32_t* counts, int rank, int n_ranks, int max_rows) {
  stoker::wait_for_earlier_kernels();
  stoker::let_next_kernel_start();
  const stoker::SampleRow how = rows[blockIdx.y];
  if (how.options != 0) return;
  const int n_each = (own + gridDim.x - 1) / gridDim.x, begin = min(blockIdx.x * n_each, own);
  const float* row = logits + static_cast<size_t>(blockIdx.y) * own;
  const stoker::Best best = stoker::block_best(stoker::scan(row, how, begin, min(begin + n_each, own), first));
  if (threadIdx.x >= stoker::kWarp) return;
  stoker::finish_row(best, pieces + blockIdx.y * gridDim.x, tickets + blockIdx.y, [&](stoker::Best best) {
    best = stoker::best_of_ranks(best, inboxes, {counts, rank, n_ranks, max_rows});
    if (threadIdx.x == 0) tokens[blockIdx.y] = best.token;
  });
}
