// The products of gemm_sm90.cuh of bf16: each tile, each cluster, each way to end.
#include "gemm_sm90.cuh"

#ifdef STOKER_HAS_WGMMA
#define GEMM_BODY(groups, columns, panels, cluster)                                                                            \
  stoker::Gemm<stoker::bf16, groups, columns, panels, stoker::Cluster::cluster>::run(                                          \
      stoker::GemmShape{m, n, n_steps, rows, x_rows, n_stages, n_ahead, n_m_tiles, n_n_tiles, band}, stoker::WeightMaps{w, w}, x, y_map, y,                    \
      stoker::GemmBeside{weighted, norm, squares, eps, k, squares_tile}, stoker::Scales{});
#else
#define GEMM_BODY(groups, columns, panels, cluster)
#endif
#define GEMM(name, groups, columns, panels, blocks, cluster, out)                                                              \
  extern "C" __global__ void CLUSTERED(blocks)                                                                                 \
      __launch_bounds__(groups * 128 + 32 + (columns < 256 ? stoker::kScalers : 0), 1) gemm_sm90_##groups##x##columns##_##name( \
          const __grid_constant__ stoker::TensorMap w, const __grid_constant__ stoker::TensorMap x,                            \
          const __grid_constant__ stoker::TensorMap y_map, out* y, stoker::bf16* weighted, const stoker::bf16* norm,           \
          float* squares, float eps, int k, int squares_tile, int m, int n, int n_steps, int rows, int x_rows, int n_stages, int n_ahead,   \
          int n_m_tiles, int n_n_tiles, int band) {                                                                            \
    GEMM_BODY(groups, columns, panels, cluster)                                                                                \
  }
#define GEMM_ALL(groups, columns, panels, blocks, cluster)                \
  GEMM(bf16, groups, columns, panels, blocks, cluster, stoker::bf16)      \
  GEMM(f32, groups, columns, panels, blocks, cluster, float)              \
  GEMM(activated, groups, columns, panels, blocks, cluster, stoker::Activated)
#define GEMM_UPDATED(groups, columns, panels, blocks, cluster) GEMM(updated, groups, columns, panels, blocks, cluster, stoker::Updated)
#define GEMM_SPLIT_UPDATED(groups, columns, panels) GEMM(split_updated, groups, columns, panels, 2, kSplitsDepth, stoker::Updated)
GEMM_UPDATED(1, 8, 2, 1, kNone)
GEMM_UPDATED(1, 32, 2, 2, kSharesX)
GEMM_UPDATED(1, 64, 2, 2, kSharesX)
GEMM_UPDATED(1, 128, 1, 2, kSharesX)
GEMM_TILES
GEMM_SPLIT_UPDATED(1, 32, 2)
GEMM_SPLIT_UPDATED(1, 64, 2)
GEMM_SPLIT_UPDATED(1, 128, 1)
