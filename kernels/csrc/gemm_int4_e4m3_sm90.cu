// The products of gemm_sm90.cuh of rows in e4m3 with weights of four bits in groups of 128 (int4.cuh):
//
//   y[m][n] = x_scales[m] * sum of groups (512 * scale[n][group] * (sum_k x[m][k] * e4m3(code[n][k]) + e4m3(zero[n][group]) * -x_sum[group][m]))
//
// A code in a byte is e4m3 as it is, so six instructions make fragments of 16 codes, and the tensor cores take them at twice the rate of
// bf16. Zero points are one more product of the group: a zero point in a byte is e4m3, too, and the sum of 128 numbers of x is 16 of e4m3, which
// whoever quantises rows leaves (quantise.cuh), with its numbers in the order of columns that fragments have. No weight is rounded; sums of a group are the tensor core's, some 14 bits of them, sums of groups f32. k is a multiple of 128.
#include "gemm_sm90.cuh"

#ifdef STOKER_HAS_WGMMA
#define GEMM_BODY(groups, columns, panels, cluster)                                                                                       \
  stoker::Gemm<stoker::Int4BesideE4m3, groups, columns, panels, stoker::Cluster::cluster>::run(                                           \
      stoker::GemmShape{m, n, n_steps, rows, x_rows, n_stages, n_ahead, n_m_tiles, n_n_tiles, band, {n_units, is_f16}},                   \
      stoker::WeightMaps{w, w_groups}, x, y_map, y, stoker::GemmBeside{}, stoker::Scales{nullptr, x_scales, x_sums, sums_stride, n_sums});
#else
#define GEMM_BODY(groups, columns, panels, cluster)
#endif
// Two warpgroups that make fragments ahead for so many columns take registers from a whole one beside them. Not of half a depth, whose stages are
// half as long.
#define THREADS(groups, columns, panels) ((groups) * 128 + ((groups) == 2 && (columns) * (panels) >= 256 ? 128 : 32))
#define GEMM(name, groups, columns, panels, blocks, cluster, out)                                                                         \
  extern "C" __global__ void CLUSTERED(blocks) __launch_bounds__(THREADS(groups, columns, panels), 1) gemm_int4_e4m3_sm90_##groups##x##columns##_##name( \
      const __grid_constant__ stoker::TensorMap w, const __grid_constant__ stoker::TensorMap w_groups,                                    \
      const __grid_constant__ stoker::TensorMap x, const __grid_constant__ stoker::TensorMap y_map, out* y, const float* x_scales,        \
      const uint4* x_sums, int sums_stride, int n_sums, int n_units, int is_f16, int m, int n, int n_steps, int rows, int x_rows,         \
      int n_stages, int n_ahead, int n_m_tiles, int n_n_tiles, int band) {                                                                \
    GEMM_BODY(groups, columns, panels, cluster)                                                                                           \
  }
#define GEMM_ALL(groups, columns, panels, blocks, cluster)           \
  GEMM(bf16, groups, columns, panels, blocks, cluster, stoker::bf16) \
  GEMM(activated, groups, columns, panels, blocks, cluster, stoker::Activated)
GEMM_ALL(1, 32, 4, 2, kSharesX)
GEMM_ALL(2, 32, 4, 2, kSharesX)
GEMM_ALL(1, 64, 4, 2, kSharesX)
GEMM_ALL(2, 64, 4, 2, kSharesX)
GEMM_ALL(1, 128, 2, 2, kSharesX)
GEMM_ALL(2, 128, 2, 2, kSharesX)
GEMM_SPLIT(1, 32, 2)
GEMM_SPLIT(1, 64, 2)
GEMM_SPLIT(1, 128, 1)
GEMM_SPLIT(2, 128, 1)
GEMM_SPLIT(2, 64, 2)
