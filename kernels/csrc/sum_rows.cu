// Sums of consecutive rows in f64, a column a thread: what embeddings are the mean of. Numbers of 8 bits are added without loss as long as
// none is 2^28 times another of its column, so it does not matter how a prompt was cut. A block has 256 columns of one segment.
//
//   sums[slot] += rows[first] + rows[first + 1] + ...      segments: slot, first row, rows; none has the slot of another
//
// 2 B a value.
#include "common.cuh"

namespace stoker {

// The same fields as `RowSegment` in reads.rs.
struct RowSegment {
  uint32_t slot, first_row, n_rows;
};

}  // namespace stoker

extern "C" __global__ void __launch_bounds__(256)
    sum_rows(double* sums, const stoker::bf16* rows, const stoker::RowSegment* segments, int width) {
  stoker::wait_for_earlier_kernels();
  stoker::let_next_kernel_start();
  const int column = blockIdx.x * blockDim.x + threadIdx.x;
  if (column >= width) return;
  const stoker::RowSegment segment = segments[blockIdx.y];
  const stoker::bf16* row = rows + static_cast<size_t>(segment.first_row) * width + column;
  double& target = sums[static_cast<size_t>(segment.slot) * width + column];
  double sum = target;
#pragma unroll 8
  for (uint32_t i = 0; i < segment.n_rows; ++i) sum += static_cast<double>(__bfloat162float(row[static_cast<size_t>(i) * width]));
  target = sum;
}
