// The tokens that a step embeds, some of which only the device knows: those that the step before has just drawn.
//
//   tokens[i] = sources[i] >= 0 ? sources[i] : sampled[-1 - sources[i]]
//
// So the host plans a step while the one before it runs, and never waits for a token. 8 B a row; latency, under 2 us.
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256)
    feed_tokens(uint32_t* tokens, const int32_t* sources, const uint32_t* sampled, int n) {
  stoker::wait_for_earlier_kernels();
  stoker::let_next_kernel_start();
  const int at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= n) return;
  const int32_t source = sources[at];
  tokens[at] = source >= 0 ? static_cast<uint32_t>(source) : sampled[-1 - source];
}
