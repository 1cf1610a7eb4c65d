// y[m][n] = sum_k x[m][k] * w[n][k] on Hopper at any number of rows, where a row's result is the same bits whoever its
// neighbours are, by all variants but those that split the depth.
//
// Layout: w is n x k bf16 row-major, x is m x k bf16, y is m x n bf16 or f32. k is a multiple of 8. Or w and x are e4m3 with a scale a row
// (gemm_fp8_sm90.cu): a pair of values then stands where one of bf16 does, so all below but the instruction and the end is the same, of
// half the depth.
// The weights are the left operand of wgmma (64 of their rows), rows of x its columns. Every element of y is one chain of
// products of 16 values (32 of e4m3) in the order of k, in the tensor core's accumulator, in every variant and at every tile size: that
// is the whole of batch invariance. So small matrices spread over the chip by tiles of fewer weight rows:
//
//       a block's tile: `rows` weight rows, 64 to a warpgroup and 8 to 64 to the last one      x kColumns rows of x
//                       what that lacks of 64 multiplies what lies behind, and is dropped
//
//       a stage of the ring: w [kPanels][rows x 64 values], x [kPanels][kColumns x 64 values]
//
// Where warps share the depth (int4_mma.cuh) each of them has spans of it for 32 weight rows, and all spans of a row are added up by one.
// Rows of x may have factors, which two warps of their own find meanwhile (gemm_residual.cuh).
// One block a multiprocessor walks over tiles. One producer thread copies boxes by the copy engine as far ahead as the ring
// goes and across tiles; the weights of the first round before it waits for the kernel in front. Two blocks of a cluster
// have neighbouring weights and the same rows of x, of which each copies a half to both. Or they split: both have the same tile, each
// sums half of the depth, sends the other one its sums of half of the rows of x and finishes the other half. That is two chains
// for an element, and larger tiles for as many blocks: a multiprocessor takes in fewer bytes.
// Tiles are walked in bands along n, rows of x outside, so that both operands of a wave come from the L2 cache.
// Where y is activated, weights are gate and up, 8 rows of each in turn: a thread's accumulators of rows g and g + 8 are gate
// and up of one feature, of which it stores bf16(silu(gate)) * up, as silu_mul.cu would. y is then half as wide.
// Large m is bound by arithmetic, m to about 128 by memory (2 B * n * k). Figures: docs/benchmarks/NOTES.md.
#pragma once
#include <type_traits>

#include "activation.cuh"
#include "blocks.cuh"
#include "gemm_exchange.cuh"
#include "gemm_residual.cuh"
#include "int4_mma.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

namespace stoker {

// What `start` in linear.rs passes, but for the band in this order.
struct GemmShape {
  int m, n;
  int n_steps;    // stages of a tile
  int rows;       // weight rows of a block's tile
  int x_rows;     // rows of x of a tile, at most kColumns: what a copy has to bring
  int n_stages;   // of the ring
  int n_ahead;    // of these, whose weights come before the kernel in front is waited for
  int n_m_tiles;  // along x
  int n_n_tiles;  // along w, a cluster's together
  int band;       // of these, those that are walked together
  Int4Format int4 = {};
};

// Of quantised operands, one a row; null where they are bf16. Beside codes x has sums of each 128 of its numbers, too, as digits (quantise.cuh),
// [k / 128][stride].
struct Scales {
  const float* w;
  const float* x;
  const uint4* sums = nullptr;
  int sums_stride = 0, n_sums = 0;
  // Where weights have a scale a block (blocks.cuh): those of a row of them.
  int n_blocks = 0;
};

// Of e4m3 weights with a scale a block, whose inputs are a panel.
struct Blocks {};

// Of the weights: their values or codes, and what groups of codes have in common.
struct WeightMaps {
  const TensorMap& values;
  const TensorMap& groups;
};

// One of y where gate and up are activated: of two weight rows.
struct Activated {
  bf16 value;
};

// One of the residual stream, which the product is added to.
struct Updated {
  bf16 value;
};

template <typename Out>
constexpr bool kActivates = false;
template <>
constexpr bool kActivates<Activated> = true;
template <typename Out>
constexpr bool kUpdates = false;
template <>
constexpr bool kUpdates<Updated> = true;

#ifdef STOKER_HAS_WGMMA

constexpr int kGroupRows = 64, kPanelValues = 64, kRowBytes = 2 * kPanelValues, kMaxStages = 30;
// Of y, that a warpgroup turns around at once: 64 values each, or 32 where they are activated.
constexpr int kStoredRows = 128, kActivatedRows = 256;

// What the blocks of a cluster have in common.
enum class Cluster { kNone, kSharesX, kSplitsDepth };

template <typename Element, int kWarpgroups, int kColumns, int kPanels, Cluster kKind>
struct Gemm {
  static constexpr bool kByWarps = std::is_same_v<Element, Int4ByWarps>, kBesideE4m3 = std::is_same_v<Element, Int4BesideE4m3>;
  static constexpr bool kIsPlainInt4 = std::is_same_v<Element, Int4>, kIsInt4 = kIsPlainInt4 || kByWarps || kBesideE4m3;
  static constexpr bool kHasBlocks = std::is_same_v<Element, Blocks>, kIsFp8 = kHasBlocks || std::is_same_v<Element, uint8_t>;
  // Of wgmma on int4: two sets of sums of a group. Of int4 and of blocks: whether those that multiply take registers from the others, which
  // then are a warpgroup.
  static constexpr bool kHasTwoParts = kColumns <= 64;
  // Of codes beside rows of e4m3: whether fragments of a group are made while the one in front is multiplied. Not of half a depth, where it was
  // no faster.
  static constexpr bool kMakesAhead = kBesideE4m3 && kKind != Cluster::kSplitsDepth;
  static constexpr bool kTakesRegisters = kByWarps || (kWarpgroups == 2 && (kIsPlainInt4 ? kColumns >= 64 : kMakesAhead ? kColumns >= 64 : kHasBlocks && kColumns == 256));
  // Panels of codes, of 64 values, beside one of x.
  static constexpr int kCodePanels = kBesideE4m3 ? 2 : 1, kStageCodePanels = kPanels * kCodePanels;
  static_assert(!kIsInt4 || kBesideE4m3 || kPanels == (kByWarps ? 8 : kColumns <= 64 ? 4 : 2));
  static constexpr int kConsumers = kWarpgroups * 128, kWarps = kConsumers / kWarp;
  static constexpr bool kStaged = kColumns == 256, kShares = kKind == Cluster::kSharesX, kSplits = kKind == Cluster::kSplitsDepth;
  static constexpr int kCluster = kKind == Cluster::kNone ? 1 : 2;
  static constexpr int kTileBlocks = kShares ? 2 : 1;                  // with weights of their own
  static constexpr int kOwnColumns = kSplits ? kColumns / 2 : kColumns;  // that a block finishes

  // Shared memory, from a multiple of 1024: barriers and factors of rows, where y is turned around or the other block's sums come in,
  // stages, room that the last tile's unused rows are read from.
  struct Barriers {
    uint64_t full[kMaxStages], empty[kMaxStages];
    Exchange exchange;
    float scales[kScaledRows];  // factors of rows; of an update, its warps' sums
  };
  static_assert(sizeof(Barriers) <= 1024);

  struct Tile {
    int n, m;  // first weight row of the block, first row of x
  };

  struct Slot {
    int at = 0;
    uint32_t parity = 0;

    __device__ __forceinline__ void advance(int n_stages) {
      if (++at == n_stages) at = 0, parity ^= 1;
    }
  };

  static __device__ __forceinline__ Tile tile_at(const GemmShape& s, int idx) {
    const int first = idx / (s.band * s.n_m_tiles) * s.band, width = min(s.band, s.n_n_tiles - first);
    const int rest = idx - first * s.n_m_tiles;
    const int n_tile = (first + rest % width) * kTileBlocks + (kShares ? cluster_rank() : 0);
    return {n_tile * s.rows, rest / width * s.x_rows};
  }

  static __device__ __forceinline__ uint32_t w_panel_bytes(const GemmShape& s) { return s.rows * kRowBytes; }
  static __device__ __forceinline__ uint32_t codes_bytes(const GemmShape& s) { return s.rows / kInt4Rows * kStageCodePanels * kInt4PanelBytes; }
  static __device__ __forceinline__ uint32_t groups_bytes(const GemmShape& s) {
    return s.rows / kInt4Rows * (kStageCodePanels / 2 * s.int4.n_units) * kInt4GroupBytes;
  }
  // Of rows of x that lie beside codes, a panel each.
  static __device__ __forceinline__ uint32_t sums_bytes(const GemmShape& s) { return kBesideE4m3 ? kPanels * s.x_rows * sizeof(uint4) : 0; }
  // Where x begins in a stage.
  static __device__ __forceinline__ uint32_t w_bytes(const GemmShape& s) {
    if constexpr (kIsInt4) return (codes_bytes(s) + groups_bytes(s) + sums_bytes(s) + 1023) / 1024 * 1024;
    return kPanels * w_panel_bytes(s);
  }
  // Rows of x that a panel has room for, and of these, those that one block of the cluster brings.
  static __device__ __forceinline__ uint32_t panel_rows(const GemmShape& s) { return kByWarps ? s.x_rows : kColumns; }
  static __device__ __forceinline__ uint32_t brought_rows(const GemmShape& s) { return s.x_rows / kTileBlocks; }
  static __device__ __forceinline__ uint32_t stage_bytes(const GemmShape& s) { return w_bytes(s) + kPanels * panel_rows(s) * kRowBytes; }

  static __device__ __forceinline__ void expect(const GemmShape& s, uint64_t* full) {
    const uint32_t w = kIsInt4 ? codes_bytes(s) + groups_bytes(s) : kPanels * w_panel_bytes(s);
    arrive_expecting(full, w + sums_bytes(s) + kPanels * s.x_rows * kRowBytes);
  }

  // Of a panel of a step, in the whole depth.
  static __device__ __forceinline__ int first_value(const GemmShape& s, int step, int panel) {
    const int first_step = kSplits ? cluster_rank() * s.n_steps : 0;
    return ((first_step + step) * kPanels + panel) * kPanelValues;
  }

  static __device__ __forceinline__ void load_w(const GemmShape& s, const WeightMaps& maps, uint32_t stage, Tile tile, int step,
                                                uint64_t* full) {
    if constexpr (kIsInt4) {
      const int first = first_value(s, step, 0), tile_row = tile.n / kInt4Rows;
      copy_box(stage, maps.values, 0, first * kCodePanels / kPanelValues, tile_row, full);
      copy_box(stage + codes_bytes(s) + sums_bytes(s), maps.groups, 0, first * kCodePanels / kInt4Step * s.int4.n_units, tile_row, full);
    } else {
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
        copy_box(stage + panel * w_panel_bytes(s), maps.values, first_value(s, step, panel), tile.n, full);
      }
    }
  }

  static __device__ __forceinline__ void load_sums(const GemmShape& s, const Scales& dequantise, uint32_t target, Tile tile, int step,
                                                   uint64_t* full) {
    const uint32_t n_bytes = s.x_rows * sizeof(uint4);
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      // Behind the depth weights have scales of 0, so any sums will do there.
      const int at = min(first_value(s, step, panel) / kPanelValues, dequantise.n_sums - 1);
      copy_bytes(target + panel * n_bytes, dequantise.sums + static_cast<size_t>(at) * dequantise.sums_stride + tile.m, n_bytes, full);
    }
  }

  // Where rows are shared, this block's half of them to both.
  static __device__ __forceinline__ void load_x(const GemmShape& s, const TensorMap& map, const Scales& dequantise, uint32_t stage,
                                                Tile tile, int step, uint64_t* full) {
    const uint32_t target = stage + w_bytes(s);
    const int first = kShares ? cluster_rank() * brought_rows(s) : 0;
    if constexpr (kByWarps) {
      // All panels of these rows at once: [block][panel][row].
      const int panel = first_value(s, step, 0) / kPanelValues;
      if constexpr (kShares) {
        copy_box_to_all(target + first * kPanels * kRowBytes, map, 0, tile.m + first, panel, full, 3);
      } else {
        copy_box(target, map, 0, tile.m, panel, full);
      }
      return;
    }
    if constexpr (kBesideE4m3) load_sums(s, dequantise, stage + codes_bytes(s), tile, step, full);
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      const uint32_t rows = target + (panel * kColumns + first) * kRowBytes;
      if constexpr (kShares) {
        copy_box_to_all(rows, map, first_value(s, step, panel), tile.m + first, full, 3);
      } else {
        copy_box(rows, map, first_value(s, step, panel), tile.m, full);
      }
    }
  }

  // Calls `f(tile, step, slot)` for this block's steps in order until it says no.
  template <typename F>
  static __device__ __forceinline__ void walk(const GemmShape& s, F f) {
    Slot slot;
    const int n_tiles = s.n_m_tiles * s.n_n_tiles;
    for (int idx = blockIdx.x / kCluster; idx < n_tiles; idx += gridDim.x / kCluster) {
      const Tile tile = tile_at(s, idx);
      for (int step = 0; step < s.n_steps; ++step, slot.advance(s.n_stages)) {
        if (!f(tile, step, slot)) return;
      }
    }
  }

  static __device__ __forceinline__ void produce(const GemmShape& s, const WeightMaps& w, const TensorMap& x, const Scales& dequantise,
                                                 Barriers& barriers, uint32_t stages) {
    int n_ahead = 0;
    walk(s, [&](Tile tile, int step, Slot slot) {
      if (n_ahead == s.n_ahead) return false;
      expect(s, &barriers.full[slot.at]);
      load_w(s, w, stages + slot.at * stage_bytes(s), tile, step, &barriers.full[slot.at]);
      ++n_ahead;
      return true;
    });
    wait_for_earlier_kernels();
    walk(s, [&](Tile tile, int step, Slot slot) {
      uint64_t* full = &barriers.full[slot.at];
      const uint32_t stage = stages + slot.at * stage_bytes(s);
      if (n_ahead > 0) {
        --n_ahead;
      } else {
        wait_for(&barriers.empty[slot.at], slot.parity ^ 1);
        expect(s, full);
        load_w(s, w, stage, tile, step, full);
      }
      load_x(s, x, dequantise, stage, tile, step, full);
      return true;
    });
  }

  static __device__ __forceinline__ void multiply_stage(float (&c)[kColumns / 8][4], const GemmShape& s, uint32_t stage, bool first) {
    const uint32_t w = stage + threadIdx.x / 128 * kGroupRows * kRowBytes, x = stage + kPanels * w_panel_bytes(s);
    begin_products();
#pragma unroll
    for (int i = 0; i < 4 * kPanels; ++i) {
      const uint64_t a = tile_descriptor(w + i / 4 * w_panel_bytes(s) + i % 4 * 32, 0, 1024);
      const uint64_t b = tile_descriptor(x + i / 4 * kColumns * kRowBytes + i % 4 * 32, 0, 1024);
      if constexpr (kIsFp8) {
        wgmma_rows_e4m3(c, a, b, i > 0 || !first);
      } else {
        wgmma_rows(c, a, b, i > 0 || !first);
      }
    }
    commit_products();
  }

  static __device__ __forceinline__ void clear(float (&c)[kColumns / 8][4]) {
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) c[j][0] = c[j][1] = c[j][2] = c[j][3] = 0.f;
  }

  // The sums of a tile of codes, group by group: while the tensor cores sum one, the next one becomes fragments. Of 128 values there are
  // `kUnits` groups. Where there is room for two sets of sums, products follow each other without a gap, and the sums of the last group
  // are added while those of this one are on their way; else in between. A warp without rows takes another's; what it finds is dropped.
  template <int kUnits>
  static __device__ __forceinline__ void sum_codes(float (&c)[kColumns / 8][4], const GemmShape& s, Barriers& barriers, uint32_t stages,
                                                   Slot& slot) {
    constexpr int kSteps = kInt4Step / 16 / kUnits, kParts = kHasTwoParts ? 2 : 1, kAtOnce = kParts == 2 || kSteps < 4 ? kSteps : 4;
    constexpr int kStageUnits = kPanels / 2 * kUnits, kStageWords = kPanels * kPanelValues / 16;
    const int lane = threadIdx.x % kWarp, tile = min(static_cast<int>(threadIdx.x) / kWarp, s.rows / kInt4Rows - 1);
    const uint32_t own_codes = tile * kStageWords * kWarp * 4 + lane * 16;
    const uint32_t own_groups = codes_bytes(s) + tile * kStageUnits * kInt4GroupBytes + lane / 4 * 8;
    float part[kParts][kColumns / 8][4], upper[kParts], lower[kParts];
    clear(c);
#pragma unroll
    for (int i = 0; i < kParts; ++i) clear(part[i]), upper[i] = lower[i] = 0.f;
    int last = 0;
    for (int step = 0; step < s.n_steps; ++step, slot.advance(s.n_stages)) {
      const uint32_t stage = stages + slot.at * stage_bytes(s), x = stage + w_bytes(s);
      wait_for(&barriers.full[slot.at], slot.parity);
#pragma unroll
      for (int unit = 0; unit < kStageUnits; ++unit) {
        constexpr int kBehind = kSteps / kAtOnce;
        const int own = unit % kParts, other = (unit + 1) % kParts;
        uint32_t words[kSteps];
        load_words(words, stage + own_codes, unit);
        const Int4Group group = load_group(stage + own_groups + unit * kInt4GroupBytes);
        const uint32_t upper_zero = group.zero(group.upper), lower_zero = group.zero(group.lower);
#pragma unroll
        for (int first = 0; first < kSteps; first += kAtOnce) {
          // The registers that this writes were read by the products before the last ones.
          if (kBehind > 1 && first == 0) wait_for_products<1>();
          uint32_t a[kAtOnce][4];
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i) to_fragment(a[i], words[first + i], upper_zero, lower_zero);
          // What is on its way from one step to the next has to be waited for as a whole: the compiler follows no single group there.
          if (first == 0 && (kParts == 1 || unit == 0)) {
            wait_for_products<0>();
            pin(part[other]);
            add_group(c, part[other], upper[other], lower[other]);
            if (unit == 0 && step > 0) release(barriers, last);
          }
          if (first == 0) upper[own] = group.scale(group.upper, s.int4.is_f16), lower[own] = group.scale(group.lower, s.int4.is_f16);
          begin_products();
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i) {
            const int at = unit * kSteps + first + i;
            const uint64_t b = tile_descriptor(x + at / 4 * kColumns * kRowBytes + at % 4 * 32, 0, 1024);
            wgmma_registers(part[own], a[i], b, first + i > 0);
          }
          commit_products();
        }
        if (kParts == 2 && unit > 0) {
          wait_for_products<kBehind>();
          pin(part[other]);
          add_group(c, part[other], upper[other], lower[other]);
        }
      }
      last = slot.at;
    }
    wait_for_products<0>();
    pin(part[kParts - 1]);
    add_group(c, part[kParts - 1], upper[kParts - 1], lower[kParts - 1]);
    release(barriers, last);
  }

  // What a warpgroup multiplies of a group beside rows of e4m3. Zero points are of half of a product's depth: the other half is the same sums.
  struct BesideGroup {
    uint32_t codes[kInt4Step / 32][4], zeros[4];
    float upper, lower;
  };

  // Of a stage's panel.
  static __device__ __forceinline__ void make_group(BesideGroup& made, const GemmShape& s, uint32_t stage, int panel) {
    constexpr int kStageWords = kStageCodePanels * kPanelValues / 16;
    const int lane = threadIdx.x % kWarp, tile = min(static_cast<int>(threadIdx.x) / kWarp, s.rows / kInt4Rows - 1);
    uint32_t words[8];
    load_words(words, stage + tile * kStageWords * kWarp * 4 + lane * 16, panel);
#pragma unroll
    for (int i = 0; i < kInt4Step / 32; ++i) {
      to_e4m3_fragment(made.codes[i], words[2 * i], words[2 * i + 1]);
      pin(made.codes[i]);
    }
    const Int4Group group = load_group(stage + codes_bytes(s) + sums_bytes(s) + (tile * kPanels + panel) * kInt4GroupBytes + lane / 4 * 8);
    made.zeros[0] = group.zeros(group.upper), made.zeros[1] = group.zeros(group.lower);
    made.upper = group.scale(group.upper, s.int4.is_f16), made.lower = group.scale(group.lower, s.int4.is_f16);
  }

  // Until its products have been waited for it stays where it is.
  static __device__ __forceinline__ void stay(BesideGroup& group) {
    pin(group.zeros);
#pragma unroll
    for (int i = 0; i < kInt4Step / 32; ++i) pin(group.codes[i]);
  }

  static __device__ __forceinline__ void multiply_group(float (&part)[kColumns / 8][4], BesideGroup& group, const GemmShape& s, uint32_t stage,
                                                        int panel) {
    // Here, not where the others are made: carried around the loop they were not set before its first turn (ptxas 13.0).
    group.zeros[2] = group.zeros[3] = 0;
    pin(group.zeros);
    const uint64_t x = tile_descriptor(stage + w_bytes(s), 0, 1024), sums = narrow_descriptor(stage + codes_bytes(s));
    begin_products();
#pragma unroll
    for (int i = 0; i < kInt4Step / 32; ++i) {
      wgmma_registers_e4m3(part, group.codes[i], moved(x, panel * kColumns * kRowBytes + i * 32), i > 0);
    }
    wgmma_registers_e4m3(part, group.zeros, moved(sums, panel * s.x_rows * sizeof(uint4)), true);
    commit_products();
  }

  // The sums of a tile of codes beside rows of e4m3, whose groups are of 128 values, one a panel: scale * (products of the codes' numbers,
  // and of the zero point's with those that add up to the negative sum of x), 512 times too small. While the tensor cores sum a group the next one
  // becomes fragments. Where there is room for two sets of sums, they sum that one as well while the group in front is added.
  static __device__ __forceinline__ void sum_beside_e4m3(float (&c)[kColumns / 8][4], const GemmShape& s, Barriers& barriers, uint32_t stages,
                                                         Slot& slot) {
    constexpr int kParts = kMakesAhead && kHasTwoParts ? 2 : 1;
    static_assert(!kMakesAhead || kPanels % 2 == 0);
    float part[kParts][kColumns / 8][4];
    clear(c);
#pragma unroll
    for (int i = 0; i < kParts; ++i) clear(part[i]);
    const auto stage_at = [&](const Slot& at) {
      wait_for(&barriers.full[at.at], at.parity);
      return stages + at.at * stage_bytes(s);
    };
    const auto add = [&](int panel, BesideGroup& group) {
      if constexpr (kMakesAhead) stay(group);
      pin(part[panel % kParts]);
      add_group(c, part[panel % kParts], group.upper, group.lower);
    };
    BesideGroup groups[2];
    if constexpr (kMakesAhead) make_group(groups[0], s, stage_at(slot), 0);
    for (int step = 0; step < s.n_steps; ++step) {
      const int own = slot.at;
      const uint32_t stage = kMakesAhead ? stages + own * stage_bytes(s) : stage_at(slot);
      slot.advance(s.n_stages);
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
        BesideGroup &group = groups[panel % 2], &other = groups[(panel + 1) % 2];
        if constexpr (!kMakesAhead) make_group(group, s, stage, panel);
        multiply_group(part[panel % kParts], group, s, stage, panel);
        if (kParts == 2 && panel > 0) {
          wait_for_products<1>();
          add(panel - 1, other);
        }
        if constexpr (kMakesAhead) {
          if (panel + 1 < kPanels) {
            make_group(other, s, stage, panel + 1);
          } else if (step + 1 < s.n_steps) {
            make_group(other, s, stage_at(slot), 0);
          }
        }
        // What is on its way from one step to the next would have to be waited for as a whole there.
        if (kParts == 1 || panel + 1 == kPanels) {
          wait_for_products<0>();
          if (panel + 1 == kPanels) release(barriers, own);
          add(panel, group);
        }
      }
    }
  }

  // The sums of a tile of codes where warps share the depth: of each 32 weight rows as many warps as there are take spans of 128 values in
  // turn, by `mma`, and add up what they have found.
  template <int kUnits>
  static __device__ __forceinline__ void sum_by_warps(float (&c)[kColumns / 8][4], const GemmShape& s, Barriers& barriers, uint32_t stages,
                                                      uint32_t scratch, Slot& slot) {
    constexpr int kSpans = kPanels / 2;
    const int warp = threadIdx.x / kWarp, n_tiles = s.rows / kInt4Rows, n_pairs = (n_tiles + 1) / 2, n_ways = kWarps / n_pairs;
    const int way = warp / n_pairs, tiles[2] = {warp % n_pairs * 2, min(warp % n_pairs * 2 + 1, n_tiles - 1)};
    const uint32_t groups = codes_bytes(s), row_bytes = brought_rows(s) * kRowBytes;
    const uint32_t full = kept(shared_address(barriers.full)), empty = kept(shared_address(barriers.empty)), lane = kept(threadIdx.x % kWarp);
    float sums[2][kColumns / 8][4] = {};
    // Spans until this warp's next one; of a warp too many, more than there are.
    int until = way < n_ways ? way : 1 << 30;
    for (int step = 0; step < s.n_steps; ++step, slot.advance(s.n_stages)) {
      const uint32_t stage = stages + slot.at * stage_bytes(s), x = stage + w_bytes(s);
      wait_at(full + slot.at * sizeof(uint64_t), slot.parity);
#pragma unroll 1
      for (; until < kSpans; until += n_ways) {
        auto place = [&](int tile) {
          return SpanPlace{stage + (tile * kPanels + 2 * until) * kInt4PanelBytes,
                           stage + groups + (tile * kSpans + until) * kUnits * kInt4GroupBytes};
        };
        const XPanels panels{x + 2 * until * row_bytes, brought_rows(s), kPanels};
        add_span<kUnits>(sums, {place(tiles[0]), place(tiles[1])}, panels, s.int4.is_f16);
      }
      until -= kSpans;
      if (lane == 0) arrive_at(empty + slot.at * sizeof(uint64_t));
    }
    gather(c, sums, n_tiles, n_pairs, n_ways, scratch);
  }

  // To each warp that has 16 weight rows to finish, the sums that all ways have found, in their order.
  static __device__ __forceinline__ void gather(float (&c)[kColumns / 8][4], const float (&sums)[2][kColumns / 8][4], int n_tiles, int n_pairs,
                                                int n_ways, uint32_t scratch) {
    constexpr int kTileBytes = kColumns / 8 * kWarp * 16;
    const int warp = threadIdx.x / kWarp;
    const uint32_t own = scratch + threadIdx.x % kWarp * 16;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j) {
        const float(&v)[4] = sums[half][j];
        store_float4(own + (2 * warp + half) * kTileBytes + j * kWarp * 16, make_float4(v[0], v[1], v[2], v[3]));
      }
    }
    sync_consumers();
    clear(c);
    for (int way = 0; warp < n_tiles && way < n_ways; ++way) {
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j) {
        const float4 v = load_float4(own + (2 * way * n_pairs + warp) * kTileBytes + j * kWarp * 16);
        c[j][0] += v.x, c[j][1] += v.y, c[j][2] += v.z, c[j][3] += v.w;
      }
    }
    // The next tile's sums may come.
    sync_consumers();
  }

  static __device__ __forceinline__ void sync_consumers() {
    asm volatile("bar.sync %0, %1;\n" ::"n"(kWarpgroups + 2), "n"(kConsumers) : "memory");
  }

  // To the columns from `first` on.
  template <int kEights>
  static __device__ __forceinline__ void add_group(float (&c)[kColumns / 8][4], const float (&part)[kEights][4], float upper, float lower,
                                                   int first = 0) {
#pragma unroll
    for (int j = 0; j < kEights; ++j) {
      float(&sums)[4] = c[first / 8 + j];
      sums[0] = fmaf(upper, part[j][0], sums[0]), sums[1] = fmaf(upper, part[j][1], sums[1]);
      sums[2] = fmaf(lower, part[j][2], sums[2]), sums[3] = fmaf(lower, part[j][3], sums[3]);
    }
  }

  // By each warp, in every block that copies into this stage.
  static __device__ __forceinline__ void release(Barriers& barriers, int slot) {
    const int lane = threadIdx.x % kWarp;
    if constexpr (kShares) {
      if (lane < kCluster) arrive_at_peer(&barriers.empty[slot], lane);
    } else {
      if (lane == 0) arrive(&barriers.empty[slot]);
    }
  }

  // The sums of a tile.
  static __device__ __forceinline__ void sum(float (&c)[kColumns / 8][4], const GemmShape& s, Barriers& barriers, uint32_t stages, Slot& slot) {
    int last = 0;
    for (int step = 0; step < s.n_steps; ++step, slot.advance(s.n_stages)) {
      wait_for(&barriers.full[slot.at], slot.parity);
      multiply_stage(c, s, stages + slot.at * stage_bytes(s), step == 0);
      // The stage before this one has been read.
      wait_for_products<1>();
      if (step > 0) release(barriers, last);
      last = slot.at;
    }
    wait_for_products<0>();
    pin(c);
    release(barriers, last);
  }

  // Of both weight rows of a thread, of a stage's panels. Behind the depth the products are 0, so any will do there.
  static __device__ __forceinline__ void load_scales(float (&upper)[kPanels], float (&lower)[kPanels], const GemmShape& s, const Scales& scales,
                                                     Tile tile, int step) {
    const int last = (s.n - 1) / kBlockRows, row = tile.n + threadIdx.x / 128 * kGroupRows + threadIdx.x % 128 / kWarp * 16;
    const int first_panel = first_value(s, step, 0) / kPanelValues;
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      const int at = min(first_panel + panel, scales.n_blocks - 1);
      upper[panel] = scales.w[static_cast<size_t>(min(row / kBlockRows, last)) * scales.n_blocks + at];
      lower[panel] = scales.w[static_cast<size_t>(min(row / kBlockRows + 1, last)) * scales.n_blocks + at];
    }
  }

  // The sums of a tile whose weights have scales by blocks: panels are summed one by one, some columns at a time, and added times their
  // scales while the next ones are multiplied.
  static __device__ __forceinline__ void sum_blocks(float (&c)[kColumns / 8][4], const GemmShape& s, const Scales& scales, Barriers& barriers,
                                                    uint32_t stages, Tile tile, Slot& slot) {
    constexpr int kAtOnce = kColumns < 64 ? kColumns : 64, kOfPanel = kColumns / kAtOnce, kParts = kPanels * kOfPanel;
    float part[2][kAtOnce / 8][4] = {}, upper[kPanels], lower[kPanels];
    clear(c);
    load_scales(upper, lower, s, scales, tile, 0);
    const auto add = [&](int nth) {
      pin(part[nth % 2]);
      add_group(c, part[nth % 2], upper[nth / kOfPanel], lower[nth / kOfPanel], nth % kOfPanel * kAtOnce);
    };
    for (int step = 0; step < s.n_steps; ++step, slot.advance(s.n_stages)) {
      const uint32_t stage = stages + slot.at * stage_bytes(s), x = stage + w_bytes(s);
      const uint32_t w = stage + threadIdx.x / 128 * kGroupRows * kRowBytes;
      float next_upper[kPanels], next_lower[kPanels];
      load_scales(next_upper, next_lower, s, scales, tile, step + 1);
      wait_for(&barriers.full[slot.at], slot.parity);
#pragma unroll
      for (int nth = 0; nth < kParts; ++nth) {
        const int panel = nth / kOfPanel, first = nth % kOfPanel * kAtOnce;
        const uint64_t a = tile_descriptor(w + panel * w_panel_bytes(s), 0, 1024);
        const uint64_t b = tile_descriptor(x + (panel * kColumns + first) * kRowBytes, 0, 1024);
        begin_products();
#pragma unroll
        for (int i = 0; i < 4; ++i) wgmma_rows_e4m3(part[nth % 2], moved(a, i * 32), moved(b, i * 32), i > 0);
        commit_products();
        if (nth == 0) continue;
        wait_for_products<1>();
        add(nth - 1);
      }
      wait_for_products<0>();
      release(barriers, slot.at);
      add(kParts - 1);
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) upper[panel] = next_upper[panel], lower[panel] = next_lower[panel];
    }
  }

  template <typename Out>
  static __device__ __forceinline__ void consume(const GemmShape& s, const TensorMap& y_map, Out* y, const GemmBeside& beside,
                                                 const Scales& dequantise, Barriers& barriers, uint32_t stages, uint32_t staging) {
    const float* scales = is_scaled<Out>(beside) ? barriers.scales : nullptr;
    Slot slot;
    uint32_t parity = 0;
    const int n_tiles = s.n_m_tiles * s.n_n_tiles;
    for (int idx = blockIdx.x / kCluster; idx < n_tiles; idx += gridDim.x / kCluster) {
      Tile tile = tile_at(s, idx);
      const int end = min(s.m, tile.m + s.x_rows);
      if constexpr (kSplits) tile.m += cluster_rank() * kOwnColumns;
      Addends<kUpdates<Out> ? kOwnColumns : 8> addends;  // used by updates only
      if constexpr (kUpdates<Out>) {
        static_assert(kWarpgroups == 1 || kByWarps);
        const int row = threadIdx.x / kWarp * 16;
        if (row < s.rows) addends.load(&y->value, beside.norm, {tile.n + row, tile.m}, end, s.n);
      }
      float c[kColumns / 8][4];
      if constexpr (kByWarps) {
        const uint32_t scratch = staging + (kSplits ? kExchangeBytes<kConsumers, kColumns> : 0);
        s.int4.n_units == 1 ? sum_by_warps<1>(c, s, barriers, stages, scratch, slot) : sum_by_warps<4>(c, s, barriers, stages, scratch, slot);
      } else if constexpr (kBesideE4m3) {
        sum_beside_e4m3(c, s, barriers, stages, slot);
      } else if constexpr (kIsInt4) {
        s.int4.n_units == 1 ? sum_codes<1>(c, s, barriers, stages, slot) : sum_codes<4>(c, s, barriers, stages, slot);
      } else if constexpr (kHasBlocks) {
        sum_blocks(c, s, dequantise, barriers, stages, tile, slot);
      } else {
        sum(c, s, barriers, stages, slot);
      }
      if constexpr (kSplits) {
        float sums[kOwnColumns / 8][4];
        exchange_halves<kConsumers>(sums, c, barriers.exchange, staging, parity);
        parity ^= 1;
        if constexpr (kIsFp8 || kBesideE4m3) scale_sums(sums, s, dequantise, tile, end);
        if (scales && idx == blockIdx.x / kCluster) wait_for_scales();
        finish(sums, s, y_map, y, beside, tile, end, addends, scales, barriers.scales, staging);
      } else {
        if constexpr (kIsFp8 || kBesideE4m3) scale_sums(c, s, dequantise, tile, end);
        if (scales && idx == blockIdx.x / kCluster) wait_for_scales();
        finish(c, s, y_map, y, beside, tile, end, addends, scales, barriers.scales, staging);
      }
    }
    if (kStaged && threadIdx.x % 128 == 0) wait_for_stores_to_read();
  }

  // Sums of quantised values, times the scales of their rows.
  static __device__ __forceinline__ void scale_sums(float (&c)[kOwnColumns / 8][4], const GemmShape& s, const Scales& scales, Tile tile, int end) {
    const int warp = threadIdx.x % 128 / kWarp, lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
    const int row = threadIdx.x / 128 * kGroupRows + warp * 16 + g, n = tile.n + row;
    // Those of blocks are in the sums; those of codes are in their groups, as of numbers that are 512 times as large.
    constexpr bool kHasRows = !kBesideE4m3 && !kHasBlocks;
    constexpr float kAll = kBesideE4m3 ? 512.f : 1.f;
    const float upper = !kHasRows ? kAll : n < s.n ? scales.w[n] : 0.f, lower = !kHasRows ? kAll : n + 8 < s.n ? scales.w[n + 8] : 0.f;
#pragma unroll
    for (int j = 0; j < kOwnColumns / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        // Of rows that are not there what the last one has: nobody looks.
        const float scale = scales.x[min(tile.m + 8 * j + 2 * t + i, end - 1)];
        c[j][i] = c[j][i] * scale * upper, c[j][i + 2] = c[j][i + 2] * scale * lower;
      }
    }
  }

  // Rows of y up to `end`, of the sums of a tile.
  template <typename Out, typename Added>
  static __device__ __forceinline__ void finish(const float (&c)[kOwnColumns / 8][4], const GemmShape& s, const TensorMap& y_map, Out* y,
                                                const GemmBeside& beside, Tile tile, int end, const Added& addends, const float* scales, float* scratch,
                                                uint32_t staging) {
    if constexpr (kUpdates<Out>) {
      // Of more warpgroups the first one has all rows.
      if (kWarpgroups > 1 && threadIdx.x >= 128) return;
      update_residual<kOwnColumns>(c, addends, &y->value, beside, {tile.n, tile.m}, s.rows, end, s.n, scratch);
    } else if constexpr (kStaged && kActivates<Out>) {
      store_activated_staged(c, s, y_map, tile, staging);
    } else if constexpr (kStaged && sizeof(Out) == 2) {
      store_staged(c, s, y_map, tile, staging);
    } else if constexpr (kActivates<Out>) {
      if (kMakesAhead && s.n % 16 == 0) return store_activated_in_pairs(c, s, &y->value, tile, end);
      store_activated(c, s, y, tile, end, scales);
    } else {
      if constexpr (kMakesAhead && sizeof(Out) == 2) {
        if (s.n % 8 == 0) return store_in_sectors(c, s, y, tile, end);
      }
      store(c, s, y, tile, end, scales);
    }
  }

  // A matrix of 8 x 8, a pair of a row in each lane, to pairs of its columns.
  static __device__ __forceinline__ uint32_t turned(uint32_t pair) {
    uint32_t found;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;\n" : "=r"(found) : "r"(pair));
    return found;
  }

  // As `store`, with 16 values of a row of y from four lanes: a store writes whole sectors of eight rows.
  static __device__ __forceinline__ void store_in_sectors(const float (&c)[kOwnColumns / 8][4], const GemmShape& s, bf16* y, Tile tile, int end) {
    const int warp = threadIdx.x % 128 / kWarp, lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
    const int row = threadIdx.x / 128 * kGroupRows + warp * 16 + t % 2 * 8 + t / 2 * 4, n = tile.n + row;
    const bool present = row < s.rows && n < s.n;
#pragma unroll
    for (int j = 0; j < kOwnColumns / 8; ++j) {
      const uint32_t upper = turned(pack(c[j][0], c[j][1])), lower = turned(pack(c[j][2], c[j][3]));
      // A lane has two values of both eights; with its neighbour's it has four of one.
      const uint32_t other = __shfl_xor_sync(~0u, t % 2 ? upper : lower, 1);
      const int m = tile.m + 8 * j + g;
      if (present && m < end) *reinterpret_cast<uint2*>(y + static_cast<size_t>(m) * s.n + n) = t % 2 ? make_uint2(other, lower) : make_uint2(upper, other);
    }
  }

  // The same of eight features of a row of y.
  static __device__ __forceinline__ void store_activated_in_pairs(const float (&c)[kOwnColumns / 8][4], const GemmShape& s, bf16* y, Tile tile, int end) {
    const int warp = threadIdx.x % 128 / kWarp, lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
    const int row = threadIdx.x / 128 * kGroupRows + warp * 16, width = s.n / 2, feature = (tile.n + row) / 2 + 2 * t;
    const bool present = row < s.rows && feature < width;
#pragma unroll
    for (int j = 0; j < kOwnColumns / 8; ++j) {
      const uint32_t pair = turned(pack(silu_mul_of_sums(c[j][0], c[j][2]), silu_mul_of_sums(c[j][1], c[j][3])));
      const int m = tile.m + 8 * j + g;
      if (present && m < end) *reinterpret_cast<uint32_t*>(y + static_cast<size_t>(m) * width + feature) = pair;
    }
  }

  static __device__ __forceinline__ void put(float* y, float value) { *y = value; }
  static __device__ __forceinline__ void put(bf16* y, float value) { *y = __float2bfloat16_rn(value); }

  // Eight lanes hold neighbouring values of a row of y.
  template <typename Out>
  static __device__ __forceinline__ void store(const float (&c)[kOwnColumns / 8][4], const GemmShape& s, Out* y, Tile tile, int end,
                                               const float* scales) {
    const int warp = threadIdx.x % 128 / kWarp, lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = threadIdx.x / 128 * kGroupRows + warp * 16 + g + i / 2 * 8, n = tile.n + row;
      if (row >= s.rows || n >= s.n) continue;
#pragma unroll
      for (int j = 0; j < kOwnColumns / 8; ++j) {
        const int m = tile.m + 8 * j + 2 * t + i % 2;
        if (m < end) put(y + static_cast<size_t>(m) * s.n + n, scales ? c[j][i] * scales[m] : c[j][i]);
      }
    }
  }

  // Eight lanes hold neighbouring values of a row of y; `s.rows` is a multiple of 16.
  static __device__ __forceinline__ void store_activated(const float (&c)[kOwnColumns / 8][4], const GemmShape& s, Activated* y,
                                                         Tile tile, int end, const float* scales) {
    const int warp = threadIdx.x % 128 / kWarp, lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
    const int row = threadIdx.x / 128 * kGroupRows + warp * 16, width = s.n / 2, feature = (tile.n + row) / 2 + g;
    if (row >= s.rows || feature >= width) return;
#pragma unroll
    for (int j = 0; j < kOwnColumns / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int m = tile.m + 8 * j + 2 * t + i;
        if (m >= end) continue;
        const float scale = scales ? scales[m] : 1.f;
        put(&y[static_cast<size_t>(m) * width + feature].value, silu_mul_of_sums(c[j][i] * scale, c[j][i + 2] * scale));
      }
    }
  }

  // Four 8x8 matrices, turned around; lane l gives where row l % 8 of matrix l / 8 goes.
  static __device__ __forceinline__ void store_turned(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};\n" ::"r"(address), "r"(a), "r"(b), "r"(c),
                 "r"(d)
                 : "memory");
  }

  // Through shared memory, where it becomes rows of y, 64 values of kStoredRows rows at a time; needs whole tiles.
  static __device__ __forceinline__ void store_staged(const float (&c)[kColumns / 8][4], const GemmShape& s, const TensorMap& y,
                                                      Tile tile, uint32_t staging) {
    const int group = threadIdx.x / 128, warp = threadIdx.x % 128 / kWarp, lane = threadIdx.x % kWarp;
    const uint32_t buffer = staging + group * kStoredRows * kRowBytes;
    const int row = lane / 16 * 8 + lane % 8, piece = 2 * warp + lane / 8 % 2;
    const uint32_t target = buffer + row * kRowBytes + (piece ^ (row & 7)) * 16;
    const bool stores = threadIdx.x % 128 == 0;
#pragma unroll
    for (int part = 0; part < kColumns / kStoredRows; ++part) {
      if (stores) wait_for_stores_to_read();
      sync_group(group);
#pragma unroll
      for (int pair = 0; pair < kStoredRows / 16; ++pair) {
        const float(&a)[4] = c[part * kStoredRows / 8 + 2 * pair], (&b)[4] = c[part * kStoredRows / 8 + 2 * pair + 1];
        store_turned(target + pair * 16 * kRowBytes, pack(a[0], a[1]), pack(a[2], a[3]), pack(b[0], b[1]), pack(b[2], b[3]));
      }
      publish_to_tensor_cores();
      sync_group(group);
      if (stores) store_box(y, tile.n + group * kGroupRows, tile.m + part * kStoredRows, buffer);
    }
  }

  // The same where 64 weight rows are 32 values of y: rows of 64 bytes, whose 16-byte pieces are xored with half the row.
  static __device__ __forceinline__ void store_activated_staged(const float (&c)[kColumns / 8][4], const GemmShape& s,
                                                                const TensorMap& y, Tile tile, uint32_t staging) {
    static_assert(kColumns == kActivatedRows);
    const int group = threadIdx.x / 128, warp = threadIdx.x % 128 / kWarp, lane = threadIdx.x % kWarp;
    const uint32_t buffer = staging + group * kActivatedRows * kRowBytes / 2;
    const uint32_t target = buffer + lane * kRowBytes / 2 + (warp ^ (lane / 2 & 3)) * 16;
    const bool stores = threadIdx.x % 128 == 0;
    if (stores) wait_for_stores_to_read();
    sync_group(group);
#pragma unroll
    for (int four = 0; four < kColumns / 32; ++four) {
      uint32_t pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float(&sums)[4] = c[4 * four + i];
        pairs[i] = pack(silu_mul_of_sums(sums[0], sums[2]), silu_mul_of_sums(sums[1], sums[3]));
      }
      store_turned(target + four * 32 * kRowBytes / 2, pairs[0], pairs[1], pairs[2], pairs[3]);
    }
    publish_to_tensor_cores();
    sync_group(group);
    if (stores) store_box(y, (tile.n + group * kGroupRows) / 2, tile.m, buffer);
  }

  template <typename Out>
  static __device__ __forceinline__ bool is_scaled(const GemmBeside& beside) {
    return !kStaged && !kUpdates<Out> && beside.squares != nullptr;
  }

  // By those that multiply, of what the scaling warps hand over.
  static __device__ __forceinline__ void wait_for_scales() {
    asm volatile("bar.sync %0, %1;\n" ::"n"(kWarpgroups + 1), "n"(kConsumers + kScalers) : "memory");
  }

  static __device__ __forceinline__ void hand_over_scales() {
    asm volatile("bar.arrive %0, %1;\n" ::"n"(kWarpgroups + 1), "n"(kConsumers + kScalers) : "memory");
  }

  static __device__ __forceinline__ void sync_group(int group) { asm volatile("bar.sync %0, 128;\n" ::"r"(group + 1) : "memory"); }

  static __device__ __forceinline__ void init(Barriers& barriers, int n_stages) {
    for (int slot = 0; slot < n_stages; ++slot) {
      init_barrier(&barriers.full[slot], 1), init_barrier(&barriers.empty[slot], kTileBlocks * kWarpgroups * 4);
    }
    if (kSplits) init_exchange(barriers.exchange, kWarpgroups * 4);
    publish_barriers();
  }

  template <typename Out>
  static __device__ __forceinline__ void run(const GemmShape& s, const WeightMaps& w, const TensorMap& x, const TensorMap& y_map, Out* y,
                                             const GemmBeside& beside, const Scales& dequantise) {
    extern __shared__ uint8_t shared[];
    const uint32_t offset = (1024 - shared_address(shared) % 1024) % 1024;
    auto& barriers = *reinterpret_cast<Barriers*>(shared + offset);
    const uint32_t staging = shared_address(shared) + offset + 1024;
    const uint32_t stages = staging + (kSplits ? kExchangeBytes<kConsumers, kColumns> : kStaged ? kWarpgroups * kStoredRows * kRowBytes : 0) +
                            (kByWarps ? 2 * kConsumers * kColumns / 8 * 16 : 0);
    if (threadIdx.x == kConsumers) init(barriers, s.n_stages);
    __syncthreads();
    if constexpr (kCluster > 1) sync_cluster();
    if constexpr (kTakesRegisters) {
      // Of what the block was started with: more than that would be waited for without end.
      if (threadIdx.x < kConsumers) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(kByWarps ? 112 : 232));
      } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(kByWarps ? 32 : 40));
      }
    }
    if (threadIdx.x < kConsumers) {
      wait_for_earlier_kernels();
      consume(s, y_map, y, beside, dequantise, barriers, stages, staging);
    } else if (threadIdx.x == kConsumers) {
      // Nothing but small kernels fits beside a block of this one; the next product's blocks take the places that come free first.
      let_next_kernel_start();
      produce(s, w, x, dequantise, barriers, stages);
    } else {
      wait_for_earlier_kernels();
      const bool scales = threadIdx.x >= kConsumers + kWarp && threadIdx.x < kConsumers + kWarp + kScalers;
      if (scales && is_scaled<Out>(beside)) {
        add_up_squares(barriers.scales, beside, s.m, threadIdx.x - kConsumers - kWarp);
        hand_over_scales();
      }
    }
    // No block may end while another still copies into it or arrives at its barriers.
    __syncwarp();
    if constexpr (kCluster > 1) sync_cluster();
  }
};

#endif

}  // namespace stoker

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define CLUSTERED(blocks) __cluster_dims__(blocks, 1, 1)
#else
#define CLUSTERED(blocks)
#endif

// The tiles that products of every format have: `GEMM_ALL` is what each writes, `GEMM` one kernel. Warpgroups, columns, panels of a
// stage; of a cluster how many blocks, and what they have in common.
#define GEMM_SPLIT(groups, columns, panels)                                \
  GEMM(split_bf16, groups, columns, panels, 2, kSplitsDepth, stoker::bf16) \
  GEMM(split_activated, groups, columns, panels, 2, kSplitsDepth, stoker::Activated)
#define GEMM_TILES                \
  GEMM_ALL(1, 8, 2, 1, kNone)     \
  GEMM_ALL(2, 8, 1, 1, kNone)     \
  GEMM_ALL(1, 32, 2, 2, kSharesX) \
  GEMM_ALL(2, 32, 1, 2, kSharesX) \
  GEMM_ALL(1, 64, 2, 2, kSharesX) \
  GEMM_ALL(2, 64, 1, 2, kSharesX) \
  GEMM_ALL(1, 128, 1, 2, kSharesX) \
  GEMM_ALL(2, 128, 1, 2, kSharesX) \
  GEMM_ALL(2, 256, 1, 2, kSharesX) \
  GEMM_SPLIT(1, 32, 2)            \
  GEMM_SPLIT(1, 64, 2)            \
  GEMM_SPLIT(1, 128, 1)           \
  GEMM_SPLIT(2, 128, 1)
