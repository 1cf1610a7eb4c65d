// Weights of four bits as they go through the ring of skinny_ring.cuh:
//
//       stage: 64 panels of codes, 4096 values of 16 rows, as they lie | their groups
//
// Both lie together: two bulk copies. A warp takes two spans of 128 values of each stage.
#pragma once
#include "int4.cuh"
#include "skinny_ring.cuh"

namespace stoker {

constexpr int kInt4RingWarps = 16;

#if __CUDA_ARCH__ >= 900

constexpr int kInt4StagePanels = 64, kInt4StageValues = kInt4StagePanels * 64, kInt4Spans = kInt4StageValues / kInt4Step;
// Of a stage, that a warp has.
constexpr int kOwnSpans = kInt4Spans / kInt4RingWarps;

template <int kUnits>
struct CodeStages {
  const uint32_t* codes;
  const uint32_t* groups;

  __device__ __forceinline__ int n_stages(const Product& p) const { return (p.k + kInt4StageValues - 1) / kInt4StageValues; }
  __device__ __forceinline__ uint32_t stage_bytes() const { return kInt4StagePanels * kInt4PanelBytes + kInt4Spans * kUnits * kInt4GroupBytes; }

  __device__ __forceinline__ void copy(uint32_t target, int first, int stage, uint64_t* barrier, const Product& p) const {
    const int n_panels = (p.k + 63) / 64, n_spans = (p.k + kInt4Step - 1) / kInt4Step, tile = first / kTileRows;
    const int panel = stage * kInt4StagePanels, span = stage * kInt4Spans;
    const uint32_t code_bytes = min(kInt4StagePanels, n_panels - panel) * kInt4PanelBytes;
    const uint32_t group_bytes = min(kInt4Spans, n_spans - span) * kUnits * kInt4GroupBytes;
    if (threadIdx.x % kWarp != 0) return;
    arrive_expecting(barrier, code_bytes + group_bytes);
    const size_t first_panel = static_cast<size_t>(tile) * n_panels + panel, first_group = (static_cast<size_t>(tile) * n_spans + span) * kUnits;
    copy_once(target, codes + first_panel * (kInt4PanelBytes / 4), code_bytes, barrier);
    copy_once(target + kInt4StagePanels * kInt4PanelBytes, groups + first_group * (kInt4GroupBytes / 4), group_bytes, barrier);
  }
};

#endif

}  // namespace stoker
