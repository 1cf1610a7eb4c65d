// The marks of sequences that enter their slots: which tokens the prompt holds, how often the completion holds them, which
// have edits (sampling.cuh). From then on every draw of the slot counts its token itself.
//
// One block a slot: clears its row of marks, then one atomic a token. 4 B a token of the vocabulary to clear, some 10 us,
// once a sequence (again after preemption).
#include "sampling.cuh"

namespace stoker {

// The same fields as `SlotEntry` in sampling.rs.
struct SlotEntry {
  uint32_t slot;
  uint32_t first_token, n_prompt, n_tokens;  // of the history
  uint32_t first_edit, n_edits;
};

// The same fields as `TokenEdit` in sampling.rs.
struct TokenEdit {
  uint32_t token;
  LogitEdit edit;
};

}  // namespace stoker

extern "C" __global__ void __launch_bounds__(1024)
    mark_tokens(uint32_t* marks, stoker::LogitEdit* edits, const stoker::SlotEntry* entries, const uint32_t* histories,
                const stoker::TokenEdit* token_edits, int vocab) {
  using namespace stoker;
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const SlotEntry entry = entries[blockIdx.x];
  uint32_t* row = marks + static_cast<size_t>(entry.slot) * vocab;
  for (int token = threadIdx.x; token < vocab; token += blockDim.x) row[token] = 0;
  __syncthreads();
  const uint32_t* history = histories + entry.first_token;
  for (uint32_t i = threadIdx.x; i < entry.n_tokens; i += blockDim.x) {
    if (history[i] >= static_cast<uint32_t>(vocab)) continue;
    if (i < entry.n_prompt) {
      atomicOr(&row[history[i]], kInPrompt);
    } else {
      atomicAdd(&row[history[i]], 1u);
    }
  }
  for (uint32_t i = threadIdx.x; i < entry.n_edits; i += blockDim.x) {
    const TokenEdit edit = token_edits[entry.first_edit + i];
    edits[static_cast<size_t>(entry.slot) * kEditsMax + i] = edit.edit;
    if (edit.token < static_cast<uint32_t>(vocab)) atomicOr(&row[edit.token], (i + 1) << kEditShift);
  }
}
