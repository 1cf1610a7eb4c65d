// The products of gemm_sm90.cuh of e4m3, with a scale for each row of w and of x:
//
//   y[m][n] = x_scales[m] * w_scales[n] * sum_k x[m][k] * w[n][k]
//
// The sum is the tensor core's: it keeps some 14 bits of what it adds to, as all fast FP8 products of Hopper do. k is a multiple of 16.
// Half the bytes of bf16 and twice its rate: bound by memory, n * k bytes, up to some 128 rows.
#include "gemm_sm90.cuh"

#ifdef STOKER_HAS_WGMMA
#define GEMM_BODY(groups, columns, panels, cluster)                                                                                 \
  stoker::Gemm<uint8_t, groups, columns, panels, stoker::Cluster::cluster>::run(                                                    \
      stoker::GemmShape{m, n, n_steps, rows, x_rows, n_stages, n_ahead, n_m_tiles, n_n_tiles, band}, stoker::WeightMaps{w, w}, x, y_map, y, stoker::GemmBeside{},   \
      stoker::Scales{w_scales, x_scales});
#else
#define GEMM_BODY(groups, columns, panels, cluster)
#endif
#define GEMM(name, groups, columns, panels, blocks, cluster, out)                                                                   \
  extern "C" __global__ void CLUSTERED(blocks) __launch_bounds__(groups * 128 + 32, 1) gemm_fp8_sm90_##groups##x##columns##_##name( \
      const __grid_constant__ stoker::TensorMap w, const __grid_constant__ stoker::TensorMap x,                                     \
      const __grid_constant__ stoker::TensorMap y_map, out* y, const float* w_scales, const float* x_scales, int m, int n,          \
      int n_steps, int rows, int x_rows, int n_stages, int n_ahead, int n_m_tiles, int n_n_tiles, int band) {                                    \
    GEMM_BODY(groups, columns, panels, cluster)                                                                                     \
  }
#define GEMM_ALL(groups, columns, panels, blocks, cluster)           \
  GEMM(bf16, groups, columns, panels, blocks, cluster, stoker::bf16) \
  GEMM(activated, groups, columns, panels, blocks, cluster, stoker::Activated)
GEMM_TILES
