// Gated activation of the MLP: out[r][i] = bf16(silu(gate[r][i])) * up[r][i], silu(x) = x / (1 + exp(-x)); or with GELU by its tanh
// approximation instead of SiLU.
//
// Layout: gate_up is rows x (2 * width) bf16, 8 values of gate and the 8 of up of the same features in turn, as one fused
// product writes them (`GATE_UP_GROUP` in launch/pointwise.rs says why); out is rows x width; width is a multiple of 8.
// 6 B per output value, one 16-byte vector a thread.
// Bound by memory: the copy ceiling at 2048 rows of 14336, 76 % of it at 256 (6.8 us); one row is 1.3 us of latency.
#include "activation.cuh"

namespace stoker {

template <bool kGelu>
__device__ __forceinline__ void gated(uint4* out, const uint4* gate_up, int n_vecs) {
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n_vecs) return;
  const size_t row = blockIdx.y;
  const uint4* gate_row = gate_up + row * 2 * n_vecs;
  float gate[8], up[8], y[8];
  unpack(gate_row[2 * i], gate);
  unpack(gate_row[2 * i + 1], up);
#pragma unroll
  for (int e = 0; e < 8; ++e) y[e] = kGelu ? gelu_mul(gate[e], up[e]) : silu_mul(gate[e], up[e]);
  out[row * n_vecs + i] = pack(y);
}

}  // namespace stoker

extern "C" __global__ void __launch_bounds__(256) silu_mul(uint4* out, const uint4* gate_up, int n_vecs) {
  stoker::gated<false>(out, gate_up, n_vecs);
}

extern "C" __global__ void __launch_bounds__(256) gelu_mul(uint4* out, const uint4* gate_up, int n_vecs) {
  stoker::gated<true>(out, gate_up, n_vecs);
}
