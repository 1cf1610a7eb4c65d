// Penalties, bias and bans: everything that changes single logits before a token is drawn.
//
//   seen in prompt or completion:  l = l > 0 ? l / repetition : l * repetition
//   n times in the completion:     l -= presence + frequency * n
//   then l += bias; a ban is a bias of minus infinity
//
// Layout: logits rows x vocab f32, changed in place. One edit a thread, at most one edit for a (row, token): no order
// matters. 28 B an edit; latency-bound, under 3 us for what requests ask. Rows without edits cost nothing.
// Multiplications and additions are kept apart (no fused multiply-add): the CPU sampler rounds between them.
#include "common.cuh"

namespace stoker {

// The same fields as `LogitEdit` in sampling.rs.
struct LogitEdit {
  uint32_t row, token;
  int32_t n_generated;  // -1: the token is not in the history
  float bias;
};

// The same fields as `Penalties` in sampling.rs.
struct Penalties {
  float presence, frequency, repetition;
};

}  // namespace stoker

extern "C" __global__ void __launch_bounds__(128)
    edit_logits(float* logits, const stoker::LogitEdit* edits, const stoker::Penalties* penalties, int n_edits, int vocab) {
  stoker::wait_for_earlier_kernels();
  stoker::let_next_kernel_start();
  const int at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= n_edits) return;
  const stoker::LogitEdit edit = edits[at];
  if (edit.token >= static_cast<uint32_t>(vocab)) return;
  float* target = logits + static_cast<size_t>(edit.row) * vocab + edit.token;
  float logit = *target;
  if (edit.n_generated >= 0) {
    const stoker::Penalties p = penalties[edit.row];
    logit = logit > 0.f ? __fdiv_rn(logit, p.repetition) : __fmul_rn(logit, p.repetition);
    if (edit.n_generated > 0) logit -= __fadd_rn(p.presence, __fmul_rn(p.frequency, static_cast<float>(edit.n_generated)));
  }
  *target = __fadd_rn(logit, edit.bias);
}
