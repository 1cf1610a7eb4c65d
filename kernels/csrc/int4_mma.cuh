// A warp's products of 32 weight rows of four bits (int4.cuh) with rows of x in shared memory, by `mma`: for few rows of x, of which wgmma
// takes as long for eight as for 32.
//
//   x   [block that brought them][panel][row]   64 values a row, its 16-byte pieces xored with the row modulo 8
//
// A fragment of x serves both halves of the weight rows. All that a span needs is asked for before its first product, as no other warp of
// a scheduler may have anything to do meanwhile.
#pragma once
#include "int4.cuh"
#include "mma.cuh"

namespace stoker {

// Where a span of 128 values of x lies.
struct XPanels {
  uint32_t first;         // of the rows that the first block brought
  uint32_t brought_rows;  // by each block, a multiple of 8
  int n_panels;           // of a stage

  // Two steps of 16 values for rows 8 * j .. 8 * j + 7, as fragments of b: lane l asks for piece l / 8 of row l % 8.
  __device__ __forceinline__ void load(uint32_t (&b)[4], int j, int pair) const {
    const uint32_t lane = threadIdx.x % kWarp, block = 8 * j >= brought_rows ? 1 : 0, row = 8 * j - block * brought_rows + lane % 8;
    const uint32_t panel = first + (block * n_panels + pair / 2) * brought_rows * 128;
    ldmatrix(b, panel + row * 128 + ((pair % 2 * 4 + lane / 8) ^ (lane % 8)) * 16);
  }
};

// Where the codes and the groups of a span lie of 16 weight rows.
struct SpanPlace {
  uint32_t codes, groups;
};

// A span of 16 weight rows in registers.
template <int kUnits>
struct Span {
  uint32_t words[8];
  Int4Group groups[kUnits];

  __device__ __forceinline__ void load(SpanPlace place) {
    const uint32_t lane = threadIdx.x % kWarp;
    load_words(words, place.codes + lane * 16, 0);
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) groups[unit] = load_group(place.groups + unit * kInt4GroupBytes + lane / 4 * 8);
  }
  __device__ __forceinline__ void to_fragment_at(uint32_t (&a)[4], int step) const {
    const Int4Group& group = groups[step * kUnits / 8];
    to_fragment(a, words[step], group.zero(group.upper), group.zero(group.lower));
  }
};

// Adds a span of 128 values, of `kUnits` groups, to c[half][j]: rows 8 * j + 2t of x by weight rows g and g + 8 of either half.
template <int kUnits, int kTiles>
__device__ __forceinline__ void add_span(float (&c)[2][kTiles][4], const SpanPlace (&places)[2], const XPanels& x, bool is_f16) {
  // Pairs of steps: of a span, and of a group. Few sums are two chains each, since a product waits for the one before it.
  constexpr int kPairs = kInt4Step / 32, kGroupPairs = kPairs / kUnits, kChains = kTiles == 1 ? 2 : 1;
  Span<kUnits> spans[2];
  uint32_t b[2][kTiles][4];
  auto load_x = [&](int pair) {
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      x.load(b[pair % 2][j], j, pair);
    }
  };
  spans[0].load(places[0]), spans[1].load(places[1]), load_x(0);
  float part[2][kChains][kTiles][4];
#pragma unroll
  for (int pair = 0; pair < kPairs; ++pair) {
    if (pair + 1 < kPairs) load_x(pair + 1);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (pair % kGroupPairs == 0) {
#pragma unroll
        for (int i = 0; i < kChains * kTiles; ++i) {
#pragma unroll
          for (int v = 0; v < 4; ++v) part[half][i / kTiles][i % kTiles][v] = 0.f;
        }
      }
      uint32_t a[2][4];
      spans[half].to_fragment_at(a[0], 2 * pair), spans[half].to_fragment_at(a[1], 2 * pair + 1);
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        const uint32_t(&own)[4] = b[pair % 2][j];
        mma(part[half][0][j], a[0][0], a[0][1], a[0][2], a[0][3], own[0], own[1]);
        mma(part[half][kChains - 1][j], a[1][0], a[1][1], a[1][2], a[1][3], own[2], own[3]);
      }
      if ((pair + 1) % kGroupPairs != 0) continue;
      const Int4Group& group = spans[half].groups[pair / kGroupPairs];
      const float upper = group.scale(group.upper, is_f16), lower = group.scale(group.lower, is_f16);
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        const float(&sums)[4] = part[half][0][j];
        const float(&others)[4] = part[half][kChains - 1][j];
        auto sum = [&](int i) { return kChains == 2 ? sums[i] + others[i] : sums[i]; };
        c[half][j][0] = fmaf(upper, sum(0), c[half][j][0]), c[half][j][1] = fmaf(upper, sum(1), c[half][j][1]);
        c[half][j][2] = fmaf(lower, sum(2), c[half][j][2]), c[half][j][3] = fmaf(lower, sum(3), c[half][j][3]);
      }
    }
  }
}

}  // namespace stoker
