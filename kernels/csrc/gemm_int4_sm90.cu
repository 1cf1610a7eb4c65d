// The products of gemm_sm90.cuh of rows of bf16 with weights of four bits in groups (int4.cuh):
//
//   y[m][n] = sum of groups (scale[n][group] * sum_k x[m][k] * (code[n][k] - zero[n][group]))
//
// Codes become bf16, exactly, on their way from shared memory to the tensor cores: they are the operand that wgmma takes from registers,
// or, where warps share the depth, `mma` (int4_mma.cuh).
// Sums of groups are the tensor cores', sums of these fused products of f32 in the order of k: no weight is rounded. Two sets of sums
// have room up to 128 rows of x. k is a multiple of 8.
// 0.53 B * n * k for groups of 128: 72 % of a copy's rate for 28672 x 4096 and up to 8 rows, 55 % for 16. Beyond, bound by the tensor cores
// or by what makes fragments: 11 instructions for 8 codes. Figures: docs/benchmarks/NOTES.md.
#include "gemm_sm90.cuh"

#ifdef STOKER_HAS_WGMMA
#define GEMM_BODY(element, groups, columns, panels, cluster)                                                                             \
  stoker::Gemm<stoker::element, groups, columns, panels, stoker::Cluster::cluster>::run(                                                 \
      stoker::GemmShape{m, n, n_steps, rows, x_rows, n_stages, n_ahead, n_m_tiles, n_n_tiles, band, {n_units, is_f16}},                   \
      stoker::WeightMaps{w, w_groups}, x, y_map, y, stoker::GemmBeside{weighted, norm, squares, eps, k, squares_tile}, stoker::Scales{});
#else
#define GEMM_BODY(element, groups, columns, panels, cluster)
#endif
// A whole warpgroup beside those that take registers from it.
#define THREADS(groups, columns) (groups * 128 + (groups == 4 || (groups == 2 && columns >= 64) ? 128 : 32 + stoker::kScalers))
#define GEMM_OF(element, name, groups, columns, panels, blocks, cluster, out)                                                       \
  extern "C" __global__ void CLUSTERED(blocks)                                                                                      \
      __launch_bounds__(THREADS(groups, columns), 1) gemm_int4_sm90_##groups##x##columns##_##name(                      \
          const __grid_constant__ stoker::TensorMap w, const __grid_constant__ stoker::TensorMap w_groups,                          \
          const __grid_constant__ stoker::TensorMap x, const __grid_constant__ stoker::TensorMap y_map, out* y,                     \
          stoker::bf16* weighted, const stoker::bf16* norm, float* squares, float eps, int k, int squares_tile, int n_units,        \
          int is_f16, int m, int n, int n_steps, int rows, int x_rows, int n_stages, int n_ahead, int n_m_tiles, int n_n_tiles, int band) {      \
    GEMM_BODY(element, groups, columns, panels, cluster)                                                                            \
  }
#define GEMM(name, groups, columns, panels, blocks, cluster, out) GEMM_OF(Int4, name, groups, columns, panels, blocks, cluster, out)
#define GEMM_ALL(groups, columns, panels, blocks, cluster)           \
  GEMM(bf16, groups, columns, panels, blocks, cluster, stoker::bf16) \
  GEMM(activated, groups, columns, panels, blocks, cluster, stoker::Activated)
#define GEMM_UPDATED(groups, columns, panels, blocks, cluster) GEMM(updated, groups, columns, panels, blocks, cluster, stoker::Updated)
#define GEMM_SPLIT_UPDATED(groups, columns, panels) GEMM(split_updated, groups, columns, panels, 2, kSplitsDepth, stoker::Updated)
GEMM_ALL(1, 8, 4, 1, kNone)
GEMM_ALL(2, 8, 4, 1, kNone)
GEMM_ALL(1, 32, 4, 2, kSharesX)
GEMM_ALL(2, 32, 4, 2, kSharesX)
GEMM_ALL(1, 64, 4, 2, kSharesX)
GEMM_ALL(2, 64, 4, 2, kSharesX)
GEMM_ALL(1, 128, 2, 2, kSharesX)
GEMM_ALL(2, 128, 2, 2, kSharesX)
GEMM_SPLIT(1, 32, 4)
GEMM_SPLIT(1, 64, 4)
GEMM_SPLIT(1, 128, 2)
GEMM_SPLIT(2, 128, 2)
GEMM_UPDATED(1, 8, 4, 1, kNone)
GEMM_UPDATED(1, 32, 4, 2, kSharesX)
GEMM_UPDATED(1, 64, 4, 2, kSharesX)
GEMM_UPDATED(1, 128, 2, 2, kSharesX)
GEMM_SPLIT_UPDATED(1, 32, 4)
GEMM_SPLIT_UPDATED(1, 64, 4)
GEMM_SPLIT_UPDATED(1, 128, 2)
// With the depth shared by warps.
#define GEMM_WARPS(name, columns, panels, blocks, cluster)                                          \
  GEMM_OF(Int4ByWarps, name##_bf16, 4, columns, panels, blocks, cluster, stoker::bf16)             \
  GEMM_OF(Int4ByWarps, name##_activated, 4, columns, panels, blocks, cluster, stoker::Activated)   \
  GEMM_OF(Int4ByWarps, name##_updated, 4, columns, panels, blocks, cluster, stoker::Updated)
GEMM_WARPS(warps, 8, 8, 1, kNone)
GEMM_WARPS(warps, 16, 8, 1, kNone)
GEMM_WARPS(warps_split, 16, 8, 2, kSplitsDepth)
