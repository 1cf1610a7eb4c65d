// The products of gemm_sm90.cuh of e4m3 whose weights have a scale for each block of 8 outputs and 128 inputs: those of 128 x 128 that
// DeepSeek-V3 (arXiv 2412.19437, 3.3.2) and Qwen publish, cut where kernels read them.
//
//   y[m][n] = x_scales[m] * sum_b w_scales[n / 8][b] * sum_{k in block b} x[m][k] * w[n][k]
//
// Each inner sum is the tensor core's, the outer one of f32. x has a scale a row, as beside weights with a scale a row: a number of e4m3
// keeps its digits over 2^15, so groups of a row of their own gain nothing but where a row is wider than that.
#include "gemm_sm90.cuh"

#ifdef STOKER_HAS_WGMMA
#define GEMM_BODY(groups, columns, panels, cluster)                                                                                 \
  stoker::Gemm<stoker::Blocks, groups, columns, panels, stoker::Cluster::cluster>::run(                                                    \
      stoker::GemmShape{m, n, n_steps, rows, x_rows, n_stages, n_ahead, n_m_tiles, n_n_tiles, band}, stoker::WeightMaps{w, w}, x, y_map, y, stoker::GemmBeside{},   \
      stoker::Scales{w_scales, x_scales, nullptr, 0, 0, n_blocks});
#else
#define GEMM_BODY(groups, columns, panels, cluster)
#endif
#define GEMM(name, groups, columns, panels, blocks, cluster, out)                                                                   \
  extern "C" __global__ void CLUSTERED(blocks) __launch_bounds__(groups * 128 + (columns == 256 ? 128 : 32), 1) gemm_fp8_blocks_sm90_##groups##x##columns##_##name( \
      const __grid_constant__ stoker::TensorMap w, const __grid_constant__ stoker::TensorMap x,                                     \
      const __grid_constant__ stoker::TensorMap y_map, out* y, const float* w_scales, const float* x_scales, int n_blocks, int m, int n,          \
      int n_steps, int rows, int x_rows, int n_stages, int n_ahead, int n_m_tiles, int n_n_tiles, int band) {                                    \
    GEMM_BODY(groups, columns, panels, cluster)                                                                                     \
  }
#define GEMM_ALL(groups, columns, panels, blocks, cluster)           \
  GEMM(bf16, groups, columns, panels, blocks, cluster, stoker::bf16) \
  GEMM(activated, groups, columns, panels, blocks, cluster, stoker::Activated)
GEMM_TILES
