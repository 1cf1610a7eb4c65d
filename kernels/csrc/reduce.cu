// What ranks of a tensor-parallel group gave for the residual stream, added up; alone or with the residual addition and the norm that
// stand behind it. The protocols are in reduce.cuh.
//
//   x[r] = sum over ranks of partial[r]                        (reduce: out = x, in bf16)
//   residual[r] += x[r];  out[r] = norm(residual[r]) * weight  (reduce_norm: x is not rounded in between)
//
// Layout: rows x width bf16, width a multiple of 8. One block a row. Of `ranks` n, each sends n - 1 rows to the others (twice the bytes
// where they are pushed) and norms all of them itself: for two ranks no byte more than by halves.
//
// gather_logits: each rank has the logits of its share of the vocabulary, rows x share f32; every rank gets all of them,
// rows x vocabulary, and draws for itself: the same bits give the same tokens. kChunks blocks a row.
#include "reduce.cuh"

namespace stoker {

template <int kVecs, typename In>
__device__ __forceinline__ void reduce_row(uint4* out, In x, int n_vecs) {
  wait_for_earlier_kernels();
  let_next_kernel_start();
  x.give(n_vecs);
  float value[kVecs][8] = {};
  x.take(value, n_vecs);
  store_row(Rows{out}, value, n_vecs, nullptr);
}

// Blocks of a row; the same in ranks.rs.
constexpr int kChunks = 8;

}  // namespace stoker

using stoker::Group;
using stoker::Pulled;
using stoker::Pushed;
using stoker::Ranks;

// `vecs` as in rms_norm.cu.
#define REDUCE(vecs)                                                                                                              \
  extern "C" __global__ void __launch_bounds__(1024)                                                                              \
      reduce_pushed_v##vecs(uint4* out, const uint4* x, const __grid_constant__ Ranks inboxes, uint32_t* counts, int rank,        \
                            int n_ranks, int max_rows, int n_vecs) {                                                              \
    stoker::reduce_row<vecs>(out, Pushed<vecs>{x, inboxes, {counts, rank, n_ranks, max_rows}}, n_vecs);                           \
  }                                                                                                                               \
  extern "C" __global__ void __launch_bounds__(1024)                                                                              \
      reduce_pulled_v##vecs(uint4* out, const __grid_constant__ Ranks rows, const __grid_constant__ Ranks flags, uint32_t* counts, \
                            int rank, int n_ranks, int max_rows, int n_vecs, int have_met) { \
    stoker::reduce_row<vecs>(out, Pulled<vecs>{rows, flags, {counts, rank, n_ranks, max_rows}, have_met != 0}, n_vecs); \
  }                                                                                                                               \
  extern "C" __global__ void __launch_bounds__(1024)                                                                              \
      reduce_norm_pushed_v##vecs(uint4* out, uint4* residual, const uint4* weight, float eps, const uint4* x,                     \
                                 const __grid_constant__ Ranks inboxes, uint32_t* counts, int rank, int n_ranks, int max_rows,    \
                                 int n_vecs) {                                                                                    \
    stoker::rms_norm_row<true, vecs>(stoker::Rows{out}, residual,                                                                 \
                                     Pushed<vecs>{x, inboxes, {counts, rank, n_ranks, max_rows}}, weight, n_vecs, eps);           \
  }                                                                                                                               \
  extern "C" __global__ void __launch_bounds__(1024)                                                                              \
      reduce_norm_pulled_v##vecs(uint4* out, uint4* residual, const uint4* weight, float eps, const __grid_constant__ Ranks rows, \
                                 const __grid_constant__ Ranks flags, uint32_t* counts, int rank, int n_ranks, int max_rows,      \
                                 int n_vecs, int have_met) { \
    stoker::rms_norm_row<true, vecs>(stoker::Rows{out}, residual, Pulled<vecs>{rows, flags, {counts, rank, n_ranks, max_rows}, have_met != 0}, \
                                     weight, n_vecs, eps);                                                                        \
  }                                                                                                                               \
  extern "C" __global__ void __launch_bounds__(1024)                                                                              \
      reduce_norm_e4m3_pushed_v##vecs(uint2* out, float* scales, uint4* residual, const uint4* weight, float eps, const uint4* x, \
                                      const __grid_constant__ Ranks inboxes, uint32_t* counts, int rank, int n_ranks,             \
                                      int max_rows, int n_vecs) {                                                                 \
    stoker::rms_norm_row<true, vecs>(stoker::QuantisedRows{out, scales}, residual,                                                \
                                     Pushed<vecs>{x, inboxes, {counts, rank, n_ranks, max_rows}}, weight, n_vecs, eps);           \
  }                                                                                                                               \
  extern "C" __global__ void __launch_bounds__(1024)                                                                              \
      reduce_norm_e4m3_pulled_v##vecs(uint2* out, float* scales, uint4* residual, const uint4* weight, float eps,                 \
                                      const __grid_constant__ Ranks rows, const __grid_constant__ Ranks flags, uint32_t* counts,  \
                                      int rank, int n_ranks, int max_rows, int n_vecs, int have_met) { \
    stoker::rms_norm_row<true, vecs>(stoker::QuantisedRows{out, scales}, residual, \
                                     Pulled<vecs>{rows, flags, {counts, rank, n_ranks, max_rows}, have_met != 0}, weight, n_vecs, eps);          \
  }
REDUCE(1)
REDUCE(4)

// Ranks wait for each other; one block.
extern "C" __global__ void __launch_bounds__(32)
    meet_ranks(const __grid_constant__ Ranks flags, uint32_t* counts, int rank, int n_ranks, int max_rows) {
  stoker::wait_for_earlier_kernels();
  stoker::let_next_kernel_start();
  const Group group{counts, rank, n_ranks, max_rows};
  stoker::meet(flags, group, stoker::next_sum(group));
}

extern "C" __global__ void __launch_bounds__(256)
    gather_logits(float* out, const __grid_constant__ Ranks parts, const __grid_constant__ Ranks flags, uint32_t* counts, int rank,
                  int n_ranks, int max_blocks, int vocab, int share) {
  stoker::wait_for_earlier_kernels();
  stoker::let_next_kernel_start();
  const Group group{counts, rank, n_ranks, max_blocks};
  const size_t row = blockIdx.x / stoker::kChunks;
  const int chunk = blockIdx.x % stoker::kChunks;
  stoker::meet(flags, group, stoker::next_sum(group));
  for (int of = 0; of < n_ranks; ++of) {
    const int first = of * share, n = min(share, vocab - first);
    const volatile float* part = reinterpret_cast<const volatile float*>(parts.at[of]) + row * n;
    float* to = out + row * vocab + first;
#pragma unroll 8
    for (int i = chunk * blockDim.x + threadIdx.x; i < n; i += stoker::kChunks * blockDim.x) to[i] = part[i];
  }
}
