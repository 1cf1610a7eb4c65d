// Causal attention of a prefill chunk over the paged KV of its sequence: the chunk's own tokens and all before them.
//
//   out[r][h] = softmax(q[r][h] . K[h/G]^T * scale, tokens up to r's own position) V[h/G]
//
// Layout: q is rows of q_stride elements (the fused QKV row), out rows x n_q x D, caches blocks x n_kv x 16 x D, the block
// table sequences x table_stride i32. The chunk's K and V are already in the cache (rope_kv). As in paged_decode.cu, two kernels are for
// heads of 64 and 128, and three for any width up to 64, 128 or 256, with a window and a soft-cap if the layer has them. Each is
// there for a cache of bf16 and for one of e4m3, which becomes f16 on its way to shared memory; queries before it are f16.
// The host plans tiles (plan/prefill.rs): up to 128/G neighbouring tokens of one sequence. With the G query
// heads that share a KV head they fill the 128 rows of one thread block, so KV is read once for all of them:
//
//       row of the tile = token * G + head        token i of the tile sees KV tokens 0 .. first_visible + i - 1
//
// 4 warps of 32 rows each walk the KV in tiles of 64 tokens, two stages by cp.async (K and V 16 KiB each at D = 128).
// 32 rows a warp, not 16: K and V come from shared memory once for two products, which else would be the bound. Beyond D = 128 a
// warp's registers hold 16 rows: two thread blocks share a tile, and a tile of KV is 32 tokens, so that what they need fits every chip.
// Only tiles that cross the diagonal or a window's edge are masked; tiles behind those are never loaded.
// Bound by arithmetic, 4 * D * n_q a pair of tokens: mma.sync reaches about 60 % of Hopper's dense rate, softmax takes a
// third of that again. 303 TFLOP/s at 8192 tokens on an H200, 248 at 2048; there paged_prefill_sm90.cu is used instead.
#include "attention.cuh"
#include "e4m3.cuh"

namespace stoker {

constexpr int kWarps = 4, kStages = 2;

// Groups of 16 rows that a warp has, and tokens of a tile of KV.
template <int kDim>
constexpr int kGroups = kDim > 128 ? 1 : 2;
template <int kDim>
constexpr int kTileTokens = kDim > 128 ? 32 : 64;
template <int kDim>
constexpr int kBlockRows = kWarps * 16 * kGroups<kDim>;

template <typename Cached>
struct PagedPrefill {
  bf16* out;
  const bf16* q;
  const Cached* k_cache;
  const Cached* v_cache;
  const float* kv_scales;  // of e4m3: of each KV head's keys, then of its values
  const int32_t* block_table;
  const PrefillTile* tiles;
  int q_stride, table_stride, n_q, n_kv;
  float scale;
  AttentionExtras extras;
};

// Columns of a head: known to the compiler in a plain kernel.
template <typename Cached, int kDim, bool kPlain>
__device__ __forceinline__ int width(const PagedPrefill<Cached>& p) {
  return kPlain ? kDim : p.extras.dim;
}

// A lane holds of each 16 rows of its warp two: 16 m + g and 16 m + g + 8, for all m, in this order. Rows of the block.
template <int kDim>
__device__ __forceinline__ int block_row(int r) {
  return threadIdx.x / kWarp * 16 * kGroups<kDim> + r / 2 * 16 + r % 2 * 8 + threadIdx.x % kWarp / 4;
}

// The same as rows of the tile.
template <int kDim>
__device__ __forceinline__ int tile_row(int r) {
  return blockIdx.z * kBlockRows<kDim> + block_row<kDim>(r);
}

template <int kDim>
using Scores = float[kGroups<kDim>][kTileTokens<kDim> / 8][4];

template <int kDim>
struct Softmax {
  float out[kGroups<kDim>][kDim / 8][4];
  float maximum[2 * kGroups<kDim>], sum[2 * kGroups<kDim>];
};

template <typename Cached, int kDim, bool kPlain>
__device__ __forceinline__ void load_queries(uint32_t shared, const PagedPrefill<Cached>& p, const PrefillTile& tile, int group) {
  constexpr int kPieces = kDim / 8;
  const int dim = width<Cached, kDim, kPlain>(p), first_row = blockIdx.z * kBlockRows<kDim>;
  const bf16* first = p.q + static_cast<size_t>(tile.first_row) * p.q_stride + blockIdx.x * group * dim;
  for (int at = threadIdx.x; at < kBlockRows<kDim> * kPieces; at += blockDim.x) {
    const int row = at / kPieces, piece = at % kPieces, token = (first_row + row) / group, head = (first_row + row) % group;
    const bool present = token < tile.n_tokens && piece * 8 < dim;
    const bf16* source = first + static_cast<size_t>(present ? token : 0) * p.q_stride + head * dim + piece * 8;
    copy_async(shared + swizzled<kDim>(row, piece), source, present);
  }
}

// A piece of 8 values, or of 16 that are two such. Zeros where `present` is false.
template <int kDim>
__device__ __forceinline__ void load_piece(uint32_t shared, int row, int piece, const bf16* source, bool present) {
  copy_async(shared + swizzled<kDim>(row, piece), source, present);
}

template <int kDim>
__device__ __forceinline__ void load_piece(uint32_t shared, int row, int piece, const e4m3* source, bool present) {
  const uint4 codes = present ? *reinterpret_cast<const uint4*>(source) : make_uint4(0, 0, 0, 0);
  uint4 values[2];
  widen(codes, values);
#pragma unroll
  for (int half = 0; half < 2; ++half) store_shared(shared + swizzled<kDim>(row, 2 * piece + half), values[half]);
}

// A tile of K or V; tokens from n_tokens on become zeros, because 0 * NaN would reach the output.
template <int kDim, typename Cached>
__device__ __forceinline__ void load_tokens(uint32_t shared, const Cached* cache, const int32_t* table, int from,
                                            int n_tokens, int n_kv, int dim) {
  constexpr int kPieceValues = 16 / sizeof(Cached), kPieces = kDim / kPieceValues, kRowsAtOnce = kWarps * kWarp / kPieces;
  const int piece = threadIdx.x % kPieces, first = threadIdx.x / kPieces;
#pragma unroll
  for (int i = 0; i < kTileTokens<kDim> / kRowsAtOnce; ++i) {
    const int row = first + i * kRowsAtOnce, token = from + row;
    const bool present = token < n_tokens && piece * kPieceValues < dim;
    const size_t block = present ? table[token / kBlockSize] : 0;
    const Cached* source = cache + ((block * n_kv + blockIdx.x) * kBlockSize + token % kBlockSize) * dim + piece * kPieceValues;
    load_piece<kDim>(shared, row, piece, source, present);
  }
}

template <typename Number, int kDim>
__device__ __forceinline__ void score_tile(Scores<kDim>& score, uint32_t q_tile, uint32_t k_tile) {
  const int lane = threadIdx.x % kWarp, matrix = lane / 8, row = lane % 8;
  const int warp_row = threadIdx.x / kWarp * 16 * kGroups<kDim>;
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    uint32_t q[kGroups<kDim>][4];
#pragma unroll
    for (int m = 0; m < kGroups<kDim>; ++m) {
      ldmatrix(q[m], q_tile + swizzled<kDim>(warp_row + m * 16 + lane % 16, step * 2 + lane / 16));
    }
#pragma unroll
    for (int pair = 0; pair < kTileTokens<kDim> / 16; ++pair) {
      uint32_t k[4];
      ldmatrix(k, k_tile + swizzled<kDim>(pair * 16 + matrix / 2 * 8 + row, step * 2 + matrix % 2));
#pragma unroll
      for (int m = 0; m < kGroups<kDim>; ++m) {
        mma_of<Number>(score[m][pair * 2], q[m][0], q[m][1], q[m][2], q[m][3], k[0], k[1]);
        mma_of<Number>(score[m][pair * 2 + 1], q[m][0], q[m][1], q[m][2], q[m][3], k[2], k[3]);
      }
    }
  }
}

// Minus infinity where a row must not look: KV token `from + column` at or past what the row sees, or before its window.
template <int kDim, bool kPlain>
__device__ __forceinline__ void mask_tile(Scores<kDim>& score, const PrefillTile& tile, int group, int from, int window) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int r = 0; r < 2 * kGroups<kDim>; ++r) {
    const int token = min(tile_row<kDim>(r) / group, tile.n_tokens - 1), n_visible = tile.first_visible + token;
#pragma unroll
    for (int j = 0; j < kTileTokens<kDim> / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int column = from + 8 * j + 2 * t + i;
        const bool is_seen = column < n_visible && (kPlain || column >= n_visible - window);
        if (!is_seen) score[r / 2][j][2 * (r % 2) + i] = -INFINITY;
      }
    }
  }
}

// Scores times their scale, bounded: in units of log2 from here on.
template <int kDim>
__device__ __forceinline__ void cap_tile(Scores<kDim>& score, float scale, float softcap) {
#pragma unroll
  for (int m = 0; m < kGroups<kDim>; ++m) {
#pragma unroll
    for (int j = 0; j < kTileTokens<kDim> / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) score[m][j][i] = soft_capped(score[m][j][i] * scale, softcap);
    }
  }
}

// Scores become weights relative to the new maximum; what was summed before is scaled to it. `scale` is positive, so
// the maximum is taken of the unscaled scores and the scaling costs nothing (one fused multiply-add a score).
template <int kDim>
__device__ __forceinline__ void weigh_tile(Softmax<kDim>& state, Scores<kDim>& score, float scale) {
#pragma unroll
  for (int r = 0; r < 2 * kGroups<kDim>; ++r) {
    const int m = r / 2, i0 = 2 * (r % 2);
    float highest = -INFINITY;
#pragma unroll
    for (int j = 0; j < kTileTokens<kDim> / 8; ++j) highest = fmaxf(highest, fmaxf(score[m][j][i0], score[m][j][i0 + 1]));
    const float maximum = fmaxf(state.maximum[r], quad_max(highest) * scale);
    const float keep = weight_of(state.maximum[r], maximum), offset = maximum == -INFINITY ? 0.f : maximum;
    float sum = 0.f;
#pragma unroll
    for (int j = 0; j < kTileTokens<kDim> / 8; ++j) {
#pragma unroll
      for (int i = i0; i < i0 + 2; ++i) sum += score[m][j][i] = power_of_two(score[m][j][i] * scale - offset);
    }
    state.maximum[r] = maximum, state.sum[r] = state.sum[r] * keep + sum;
#pragma unroll
    for (int j = 0; j < kDim / 8; ++j) state.out[m][j][i0] *= keep, state.out[m][j][i0 + 1] *= keep;
  }
}

template <typename Number, int kDim>
__device__ __forceinline__ void add_values(Softmax<kDim>& state, const Scores<kDim>& p, uint32_t v_tile) {
  const int lane = threadIdx.x % kWarp, matrix = lane / 8, row = lane % 8;
#pragma unroll
  for (int step = 0; step < kTileTokens<kDim> / 16; ++step) {
    uint32_t a[kGroups<kDim>][4];
#pragma unroll
    for (int m = 0; m < kGroups<kDim>; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* pair = &p[m][2 * step + i / 2][i % 2 * 2];
        a[m][i] = pack_as<Number>(pair[0], pair[1]);
      }
    }
#pragma unroll
    for (int pair = 0; pair < kDim / 16; ++pair) {
      uint32_t v[4];
      ldmatrix_transposed(v, v_tile + swizzled<kDim>(step * 16 + matrix % 2 * 8 + row, pair * 2 + matrix / 2));
#pragma unroll
      for (int m = 0; m < kGroups<kDim>; ++m) {
        mma_of<Number>(state.out[m][pair * 2], a[m][0], a[m][1], a[m][2], a[m][3], v[0], v[1]);
        mma_of<Number>(state.out[m][pair * 2 + 1], a[m][0], a[m][1], a[m][2], a[m][3], v[2], v[3]);
      }
    }
  }
}

template <typename Cached, int kDim, bool kPlain>
__device__ __forceinline__ void store(const Softmax<kDim>& state, const PagedPrefill<Cached>& p, const PrefillTile& tile, int group) {
  const float value_scale = sizeof(Cached) == 1 ? p.kv_scales[p.n_kv + blockIdx.x] : 1.f;
  const int t = threadIdx.x % 4, dim = width<Cached, kDim, kPlain>(p);
#pragma unroll
  for (int r = 0; r < 2 * kGroups<kDim>; ++r) {
    const int token = tile_row<kDim>(r) / group, head = tile_row<kDim>(r) % group;
    const float total = quad_sum(state.sum[r]) / value_scale;
    if (token >= tile.n_tokens) continue;
    bf16* out = p.out + (static_cast<size_t>(tile.first_row + token) * p.n_q + blockIdx.x * group + head) * dim;
#pragma unroll
    for (int j = 0; j < kDim / 8; ++j) {
      if (!kPlain && 8 * j >= dim) break;
      const float* pair = &state.out[r / 2][j][2 * (r % 2)];
      *reinterpret_cast<uint32_t*>(out + 8 * j + 2 * t) = pack(pair[0] / total, pair[1] / total);
    }
  }
}

template <typename Cached, int kDim, bool kPlain>
__device__ __forceinline__ void paged_prefill(const PagedPrefill<Cached>& p) {
  extern __shared__ __align__(128) uint8_t shared[];
  constexpr int kTokens = kTileTokens<kDim>;
  constexpr uint32_t kTileBytes = kTokens * kDim * 2;
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const PrefillTile tile = p.tiles[blockIdx.y];
  const int group = p.n_q / p.n_kv, dim = width<Cached, kDim, kPlain>(p), window = p.extras.window;
  if (tile.sequence < 0) return;
  // The second half of a tile may be of nobody.
  if (kGroups<kDim> == 1 && blockIdx.z * kBlockRows<kDim> >= tile.n_tokens * group) return;
  const int32_t* table = p.block_table + static_cast<size_t>(tile.sequence) * p.table_stride;
  const uint32_t q_tile = shared_address(shared), k_tiles = q_tile + kBlockRows<kDim> * kDim * 2;
  const uint32_t v_tiles = k_tiles + kStages * kTileBytes;
  const int n_visible = tile.first_visible + tile.n_tokens - 1, end = (n_visible + kTokens - 1) / kTokens;
  const int begin = kPlain ? 0 : max(tile.first_visible - window, 0) / kTokens;
  auto request = [&](int i) {
    if (i < end) {
      const uint32_t offset = i % kStages * kTileBytes;
      load_tokens<kDim>(k_tiles + offset, p.k_cache, table, i * kTokens, n_visible, p.n_kv, dim);
      load_tokens<kDim>(v_tiles + offset, p.v_cache, table, i * kTokens, n_visible, p.n_kv, dim);
    }
    commit_copies();
  };
  load_queries<Cached, kDim, kPlain>(q_tile, p, tile, group);
  request(begin);
  const bool is_capped = !kPlain && p.extras.softcap > 0.f;
  const float scale = p.scale * kLog2e * (sizeof(Cached) == 1 ? p.kv_scales[blockIdx.x] : 1.f);
  Softmax<kDim> state = {};
#pragma unroll
  for (int r = 0; r < 2 * kGroups<kDim>; ++r) state.maximum[r] = -INFINITY;
  for (int i = begin; i < end; ++i) {
    wait_for_copies<0>();
    __syncthreads();
    request(i + 1);
    Scores<kDim> score = {};
    score_tile<Multiplied<Cached>, kDim>(score, q_tile, k_tiles + i % kStages * kTileBytes);
    if (is_capped) cap_tile<kDim>(score, scale, p.extras.softcap * kLog2e);
    const bool crosses_window = !kPlain && i * kTokens < n_visible - window;
    if ((i + 1) * kTokens > tile.first_visible || crosses_window) {
      mask_tile<kDim, kPlain>(score, tile, group, i * kTokens, window);
    }
    weigh_tile<kDim>(state, score, is_capped ? 1.f : scale);
    add_values<Multiplied<Cached>, kDim>(state, score, v_tiles + i % kStages * kTileBytes);
  }
  store<Cached, kDim, kPlain>(state, p, tile, group);
}

}  // namespace stoker

#define PAGED_PREFILL(name, Cached, tile_dim, plain)                                                                 \
  extern "C" __global__ void __launch_bounds__(128, 2) name(                                                         \
      stoker::bf16* out, const stoker::bf16* q, const stoker::Cached* k_cache, const stoker::Cached* v_cache,        \
      const float* kv_scales, const int32_t* block_table, const stoker::PrefillTile* tiles, int q_stride,            \
      int table_stride, int n_q, int n_kv, float scale, int dim, int window, float softcap) {                        \
    stoker::paged_prefill<stoker::Cached, tile_dim, plain>({out, q, k_cache, v_cache, kv_scales, block_table, tiles, \
                                                            q_stride, table_stride, n_q, n_kv, scale,                \
                                                            {dim, window, softcap}});                                \
  }
PAGED_PREFILL(paged_prefill_d64, bf16, 64, true)
PAGED_PREFILL(paged_prefill_d128, bf16, 128, true)
PAGED_PREFILL(paged_prefill_any64, bf16, 64, false)
PAGED_PREFILL(paged_prefill_any128, bf16, 128, false)
PAGED_PREFILL(paged_prefill_any256, bf16, 256, false)
PAGED_PREFILL(paged_prefill_e4m3_d64, e4m3, 64, true)
PAGED_PREFILL(paged_prefill_e4m3_d128, e4m3, 128, true)
PAGED_PREFILL(paged_prefill_e4m3_any64, e4m3, 64, false)
PAGED_PREFILL(paged_prefill_e4m3_any128, e4m3, 128, false)
PAGED_PREFILL(paged_prefill_e4m3_any256, e4m3, 256, false)
