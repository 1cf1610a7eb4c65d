// Rows of bf16 to e4m3 with a scale each (quantise.cuh): what stands in front of a product of gemm_fp8_sm90.cu, and weights on arrival.
//
// Layout: rows x width bf16 and e4m3, row-major, one scale a row; width is a multiple of 8. One block a row, which stays in registers:
// 3 B a value. Bound by memory; few rows by latency.
#include "quantise.cuh"

namespace stoker {

template <int kVecs>
__device__ __forceinline__ void quantise_rows(uint2* out, float* scales, const GroupSums& groups, const uint4* x, int n_vecs) {
  __shared__ float scratch[kWarp];
  wait_between_products();
  const Vectors map{n_vecs};
  float value[kVecs][8] = {};
#pragma unroll
  for (int j = 0; j < kVecs; ++j) {
    if (map.has(j)) unpack(map.load(map.own_row(x), j), value[j]);
  }
  quantise_row(CodesOfRow{map.own_row(out), scales + blockIdx.x}, value, map, scratch, groups);
}

}  // namespace stoker

// `vecs` is how many 16-byte vectors a thread holds: 1 up to width 8192, 2 up to 16384, 4 up to 32768.
#define QUANTISE_ROWS(vecs)                                                                                              \
  extern "C" __global__ void __launch_bounds__(1024)                                                                     \
      quantise_rows_v##vecs(uint2* out, float* scales, uint4* sums, int sums_stride, const uint4* x, int n_vecs) {       \
    stoker::quantise_rows<vecs>(out, scales, {sums, sums_stride}, x, n_vecs);                                            \
  }
QUANTISE_ROWS(1)
QUANTISE_ROWS(2)
QUANTISE_ROWS(4)
