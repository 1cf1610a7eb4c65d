// The bias of a projection, in place: x[r][i] = bf16(x[r][i] + bias[i]). Few families have one outside of QKV, where rope_kv.cu adds
// it.
//
// Layout: x is rows x width bf16, width a multiple of 8; one 16-byte vector a thread. 4 B/value; bound by memory.
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256) add_bias(uint4* x, const uint4* bias, int n_vecs) {
  stoker::wait_for_earlier_kernels();
  stoker::let_next_kernel_start();
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n_vecs) return;
  uint4& values = x[static_cast<size_t>(blockIdx.y) * n_vecs + i];
  float y[8], b[8];
  stoker::unpack(values, y), stoker::unpack(bias[i], b);
#pragma unroll
  for (int e = 0; e < 8; ++e) y[e] += b[e];
  values = stoker::pack(y);
}
