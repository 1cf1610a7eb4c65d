// What ranks of a tensor-parallel group gave for the residual stream, added up; alone or with the residual addition and the norm that
// stand behind it. The protocols are in reduce.cuh.
//
//   x[r] = sum over ranks of partial[r]                        (reduce: out = x, in bf16)
//   residual[r] += x[r];  out[r] = norm(residual[r]) * weight  (reduce_norm: x is not rounded in between)
//
// Layout: rows x width bf16, width a multiple of 8. One block a row. Of n ranks, each sends n - 1 rows to the others (twice the bytes
// where they are pushed in words) and norms all of them itself: for two ranks no byte more than by halves.
// One row of 4096 of two H200s takes 3.3 us, of which the link's way is one. Bound by the link from some 64 rows on.
//
// reduce_norm_shares: the same of a rank's share of the rows, in 16-byte vectors from the first of it, with norms to all ranks; between two
// launches of meet_ranks.
//
// gather_logits: each rank has the logits of its share of the vocabulary, rows x share f32; every rank gets all of them,
// rows x vocabulary. kChunks blocks a row. For draws that look at all of a row: others are sample_shared.cu's.
#include "reduce.cuh"

namespace stoker {

template <int kVecs, typename Map, typename In>
__device__ __forceinline__ void reduce_row(uint4* out, In x, const Map& map) {
  wait_for_earlier_kernels();
  let_next_kernel_start();
  x.give(map);
  float value[kVecs][8] = {};
  x.take(value, map);
  store_row(Rows{out}, value, map, nullptr);
}

// Blocks of a row; the same in launch/reduce.rs.
constexpr int kChunks = 8;

}  // namespace stoker

using stoker::Group;
using stoker::Ranks;

#define PUSH_ARGUMENTS                                                                                                       \
  const uint4 *x, const __grid_constant__ Ranks inboxes, uint32_t *counts, int rank, int n_ranks, int max_rows, int n_vecs
#define PULL_ARGUMENTS                                                                                                             \
  const __grid_constant__ Ranks rows, const __grid_constant__ Ranks flags, uint32_t *counts, int rank, int n_ranks, int max_rows, \
      int n_vecs, int have_met
#define WORDS(vecs) (stoker::PushedWords<vecs>{x, inboxes, {counts, rank, n_ranks, max_rows}}), stoker::Vectors{n_vecs}
#define LINES(vecs) (stoker::PushedLines<vecs>{x, inboxes, {counts, rank, n_ranks, max_rows}}), stoker::Lines{2 * n_vecs}
#define PULLED(vecs) \
  (stoker::Pulled<vecs>{{rows, n_ranks}, flags, {counts, rank, n_ranks, max_rows}, have_met != 0}), stoker::Vectors{n_vecs}

namespace stoker {
template <int kVecs, typename Out, typename In, typename Map>
__device__ __forceinline__ void normed(const Out& out, uint4* residual, const uint4* weight, float eps, In x, const Map& map) {
  rms_norm_row<true, kVecs>(out, Residual{residual}, x, weight, map, eps);
}
struct Share {
  uint4* residual;
  bool is_copied;
  const uint4* weight;
  float eps;
  const Ranks& rows;
  int rank, n_ranks, n_vecs;

  __device__ __forceinline__ Everywhere everywhere(const Ranks& ranks) const { return {ranks, rank, n_ranks}; }
};
template <int kVecs, typename Out>
__device__ __forceinline__ void normed_share(const Out& out, const Share& s) {
  const SharedResidual residual{{s.residual}, s.everywhere(s.rows), s.is_copied};
  rms_norm_row<true, kVecs>(out, residual, Given<kVecs>{s.rows, s.n_ranks}, s.weight, Vectors{s.n_vecs}, s.eps);
}
template <int kVecs, typename In, typename Map>
__device__ __forceinline__ void summed(uint4* out, In x, const Map& map) {
  reduce_row<kVecs>(out, x, map);
}
}  // namespace stoker

// `vecs` as in rms_norm.cu; in lines a thread has as many slots.
#define REDUCE(vecs, way, arguments, from)                                                                                    \
  extern "C" __global__ void __launch_bounds__(1024) reduce_##way##_v##vecs(uint4* out, arguments) {                          \
    stoker::summed<vecs>(out, from(vecs));                                                                                    \
  }                                                                                                                           \
  extern "C" __global__ void __launch_bounds__(1024)                                                                          \
      reduce_norm_##way##_v##vecs(uint4* out, uint4* residual, const uint4* weight, float eps, arguments) {                   \
    stoker::normed<vecs>(stoker::Rows{out}, residual, weight, eps, from(vecs));                                               \
  }                                                                                                                           \
  extern "C" __global__ void __launch_bounds__(1024)                                                                          \
      reduce_norm_e4m3_##way##_v##vecs(uint2* out, float* scales, uint4* residual, const uint4* weight, float eps, arguments) { \
    stoker::normed<vecs>(stoker::QuantisedRows{out, scales}, residual, weight, eps, from(vecs));                              \
  }
REDUCE(1, words, PUSH_ARGUMENTS, WORDS)
REDUCE(4, words, PUSH_ARGUMENTS, WORDS)
REDUCE(1, lines, PUSH_ARGUMENTS, LINES)
REDUCE(2, lines, PUSH_ARGUMENTS, LINES)
REDUCE(4, lines, PUSH_ARGUMENTS, LINES)
REDUCE(1, pulled, PULL_ARGUMENTS, PULLED)
REDUCE(4, pulled, PULL_ARGUMENTS, PULLED)

#define SHARE_ARGUMENTS \
  uint4 *residual, int is_copied, const uint4 *weight, float eps, const __grid_constant__ Ranks rows, int rank, int n_ranks, int n_vecs
#define SHARE stoker::Share{residual, is_copied != 0, weight, eps, rows, rank, n_ranks, n_vecs}
#define REDUCE_SHARES(vecs)                                                                                                        \
  extern "C" __global__ void __launch_bounds__(1024)                                                                               \
      reduce_norm_shares_v##vecs(const __grid_constant__ Ranks out, SHARE_ARGUMENTS) {                                             \
    const auto share = SHARE;                                                                                                      \
    stoker::normed_share<vecs>(stoker::RowsEverywhere{share.everywhere(out)}, share);                                              \
  }                                                                                                                                \
  extern "C" __global__ void __launch_bounds__(1024) reduce_norm_e4m3_shares_v##vecs(                                              \
      const __grid_constant__ Ranks codes, const __grid_constant__ Ranks scales, SHARE_ARGUMENTS) {                                \
    const auto share = SHARE;                                                                                                      \
    stoker::normed_share<vecs>(stoker::CodesEverywhere{share.everywhere(codes), share.everywhere(scales)}, share);                 \
  }
REDUCE_SHARES(1)
REDUCE_SHARES(4)

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
  constexpr int kAtOnce = 8;  // loads in flight a thread
  stoker::wait_for_earlier_kernels();
  stoker::let_next_kernel_start();
  const Group group{counts, rank, n_ranks, max_blocks};
  const size_t row = blockIdx.x / stoker::kChunks;
  const int chunk = blockIdx.x % stoker::kChunks, stride = stoker::kChunks * blockDim.x;
  stoker::meet(flags, group, stoker::next_sum(group));
  for (int of = 0; of < n_ranks; ++of) {
    const int first = of * share, n = min(share, vocab - first);
    const uint32_t* part = reinterpret_cast<const uint32_t*>(parts.at[of]) + row * n;
    float* to = out + row * vocab + first;
    for (int base = chunk * blockDim.x + threadIdx.x; base < n; base += kAtOnce * stride) {
      uint32_t logit[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (base + i * stride < n) asm volatile("ld.volatile.global.u32 %0, [%1];" : "=r"(logit[i]) : "l"(part + base + i * stride));
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (base + i * stride < n) to[base + i * stride] = __uint_as_float(logit[i]);
      }
    }
  }
}
