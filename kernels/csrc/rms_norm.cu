// RMSNorm, alone or with the residual addition in front of it, and with what other families have around it.
//
//   residual[r] += x[r]                                        (add_rms_norm only, stored in bf16)
//   out[r] = bf16(x[r] / sqrt(mean(x[r]^2) + eps)) * weight    over rows r; x is the residual in add_rms_norm
//
// Layout: rows x width bf16, row-major; width is a multiple of 8. The row stays in registers between the two passes, so
// each value is read once: 4 B/value (rms_norm: in, out) or 8 B/value (add: x, residual in and out, out). One block a
// row, one 16-byte vector or a few a thread.
// Bound by memory: 87 % of the copy ceiling at 2048 rows of 4096, 52 % at 256 (3.8 us); one row is 1.8 us of latency, and the
// point of fusing is one launch less.
// The normalised value is rounded to bf16 before the weight multiplies it, as the models' reference code does.
//
// Where a product of e4m3 is next, the row leaves quantised, with its scale, and as products of codes want it (quantise.cuh): 5 or 7 B/value.
//
// `rms_norm_any` is for families whose norms stand behind attention and feed-forward, have a weight around zero, or run over a part
// of a row. Each step only where its pointer is not null, rows `stride` vectors apart:
//
//   x = rms_norm(x) * after;   x = residual += x;   out = rms_norm(x) * weight
#include "norm.cuh"

namespace stoker {

struct AnyNorm {
  uint4* out;
  uint4* residual;
  const uint4* x;
  const uint4* after;
  const uint4* weight;
  int n_vecs, x_stride, out_stride;
  float eps, offset;  // of the weights
};

// A row's part of a thread, and its norm times a weight.
template <int kVecs>
struct Part {
  float value[kVecs][8];

  __device__ __forceinline__ void norm(const AnyNorm& p, const uint4* weight, float* scratch) {
    float squares = 0.f;
#pragma unroll
    for (int j = 0; j < kVecs; ++j) {
#pragma unroll
      for (int e = 0; e < 8; ++e) squares += value[j][e] * value[j][e];
    }
    const float scale = rsqrtf(block_sum(squares, scratch) / (8.f * p.n_vecs) + p.eps);
#pragma unroll
    for (int j = 0; j < kVecs; ++j) {
      const int i = threadIdx.x + j * blockDim.x;
      if (i >= p.n_vecs) break;
      float w[8];
      unpack(weight[i], w);
#pragma unroll
      for (int e = 0; e < 8; ++e) value[j][e] = rounded(normed(value[j][e], scale, w[e], p.offset));
    }
  }
};

template <int kVecs>
__device__ __forceinline__ void any_norm_row(const AnyNorm& p) {
  __shared__ float scratch[kWarp];
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const size_t row = blockIdx.x;
  Part<kVecs> part = {};
#pragma unroll
  for (int j = 0; j < kVecs; ++j) {
    const int i = threadIdx.x + j * blockDim.x;
    if (i < p.n_vecs) unpack(p.x[row * p.x_stride + i], part.value[j]);
  }
  if (p.after != nullptr) part.norm(p, p.after, scratch);
  if (p.residual != nullptr) {
#pragma unroll
    for (int j = 0; j < kVecs; ++j) {
      const int i = threadIdx.x + j * blockDim.x;
      if (i >= p.n_vecs) break;
      uint4& carried = p.residual[row * p.n_vecs + i];
      float before[8];
      unpack(carried, before);
#pragma unroll
      for (int e = 0; e < 8; ++e) part.value[j][e] = rounded(part.value[j][e] + before[e]);
      carried = pack(part.value[j]);
    }
  }
  if (p.weight == nullptr) return;
  part.norm(p, p.weight, scratch);
#pragma unroll
  for (int j = 0; j < kVecs; ++j) {
    const int i = threadIdx.x + j * blockDim.x;
    if (i < p.n_vecs) p.out[row * p.out_stride + i] = pack(part.value[j]);
  }
}

}  // namespace stoker

// `vecs` is how many 16-byte vectors a thread holds: 1 up to width 8192, 4 up to 32768.
#define RMS_NORM(vecs)                                                                                                \
  extern "C" __global__ void __launch_bounds__(1024)                                                                  \
      rms_norm_v##vecs(uint4* out, const uint4* x, const uint4* weight, int n_vecs, float eps) {                      \
    stoker::rms_norm_row<false, vecs>(stoker::Rows{out}, stoker::Residual{}, stoker::Stored{x}, weight, stoker::Vectors{n_vecs}, eps); \
  }                                                                                                                   \
  extern "C" __global__ void __launch_bounds__(1024)                                                                  \
      add_rms_norm_v##vecs(uint4* out, uint4* residual, const uint4* x, const uint4* weight, int n_vecs, float eps) { \
    stoker::rms_norm_row<true, vecs>(stoker::Rows{out}, stoker::Residual{residual}, stoker::Stored{x}, weight, stoker::Vectors{n_vecs}, eps); \
  }                                                                                                                   \
  extern "C" __global__ void __launch_bounds__(1024)                                                                  \
      rms_norm_e4m3_v##vecs(uint2* out, float* scales, uint4* sums, int sums_stride, const uint4* x,                  \
                            const uint4* weight, int n_vecs, float eps) {                                             \
    stoker::rms_norm_row<false, vecs>(stoker::QuantisedRows{out, scales, {sums, sums_stride}}, stoker::Residual{},    \
                                      stoker::Stored{x}, weight, stoker::Vectors{n_vecs}, eps);                       \
  }                                                                                                                   \
  extern "C" __global__ void __launch_bounds__(1024)                                                                  \
      add_rms_norm_e4m3_v##vecs(uint2* out, float* scales, uint4* sums, int sums_stride, uint4* residual,             \
                                const uint4* x, const uint4* weight, int n_vecs, float eps) {                         \
    stoker::rms_norm_row<true, vecs>(stoker::QuantisedRows{out, scales, {sums, sums_stride}}, stoker::Residual{residual}, \
                                     stoker::Stored{x}, weight, stoker::Vectors{n_vecs}, eps);                        \
  }                                                                                                                   \
  extern "C" __global__ void __launch_bounds__(1024)                                                                  \
      rms_norm_any_v##vecs(uint4* out, uint4* residual, const uint4* x, const uint4* after, const uint4* weight,      \
                           int n_vecs, int x_stride, int out_stride, float eps, float offset) {                       \
    stoker::any_norm_row<vecs>({out, residual, x, after, weight, n_vecs, x_stride, out_stride, eps, offset});         \
  }
RMS_NORM(1)
RMS_NORM(4)
