// Weights of e4m3 that share a scale by blocks. Those of checkpoints are 128 outputs x 128 inputs; kernels read one for each eight outputs,
// which rows of merged and interleaved weights keep together: [n / kBlockRows][block_scales_of_rows(k)]. The same constants as in
// stoker_fit::gpu.
#pragma once

namespace stoker {

constexpr int kBlockRows = 8, kBlockInputs = 128;

// Whole pieces of a bulk copy, so the last ones may be of no inputs.
__device__ __forceinline__ int block_scales_of_rows(int k) { return (k + 4 * kBlockInputs - 1) / (4 * kBlockInputs) * 4; }

}  // namespace stoker
