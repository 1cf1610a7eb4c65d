// The bound that Gemma 2 sets its logits, in place: x = cap * tanh(x / cap), f32. 8 B/value; bound by memory.
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256) softcap(float* x, int n, float cap) {
  stoker::wait_for_earlier_kernels();
  stoker::let_next_kernel_start();
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) x[i] = cap * tanhf(x[i] / cap);
}
