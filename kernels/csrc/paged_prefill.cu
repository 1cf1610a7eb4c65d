// Causal attention of a prefill chunk over the paged KV of its sequence: the chunk's own tokens and all before them.
//
//   out[r][h] = softmax(q[r][h] . K[h/G]^T * scale, tokens up to r's own position) V[h/G]
//
// Layout: q is rows of q_stride elements (the fused QKV row), out rows x n_q x D, caches blocks x n_kv x 16 x D, the block
// table sequences x table_stride i32. D is 64 or 128. The chunk's K and V are already in the cache (rope_kv).
// The host plans tiles (plan/prefill.rs): up to 128/G neighbouring tokens of one sequence. With the G query
// heads that share a KV head they fill the 128 rows of one thread block, so KV is read once for all of them:
//
//       row of the tile = token * G + head        token i of the tile sees KV tokens 0 .. first_visible + i - 1
//
// 4 warps of 32 rows each walk the KV in tiles of 64 tokens, two stages by cp.async (K and V 16 KiB each at D = 128).
// 32 rows a warp, not 16: K and V come from shared memory once for two products, which else would be the bound.
// Only tiles that cross the diagonal are masked; tiles behind it are never loaded.
// Bound by arithmetic, 4 * D * n_q a pair of tokens: mma.sync reaches about 60 % of Hopper's dense rate, softmax takes a
// third of that again. 303 TFLOP/s at 8192 tokens on an H200, 248 at 2048; there paged_prefill_sm90.cu is used instead.
#include "attention.cuh"

namespace stoker {

constexpr int kWarps = 4, kTileRows = 128, kWarpRows = 32, kTileTokens = 64, kStages = 2;

struct PagedPrefill {
  bf16* out;
  const bf16* q;
  const bf16* k_cache;
  const bf16* v_cache;
  const int32_t* block_table;
  const PrefillTile* tiles;
  int q_stride, table_stride, n_q, n_kv;
  float scale;
};

// A lane holds four rows of its warp's 32: 16 m + g and 16 m + g + 8 for m = 0, 1, in this order.
__device__ __forceinline__ int tile_row(int r) {
  return threadIdx.x / kWarp * kWarpRows + r / 2 * 16 + r % 2 * 8 + threadIdx.x % kWarp / 4;
}

template <int kDim>
struct Softmax {
  float out[2][kDim / 8][4];
  float maximum[4], sum[4];
};

template <int kDim>
__device__ __forceinline__ void load_queries(uint32_t shared, const PagedPrefill& p, const PrefillTile& tile, int group) {
  constexpr int kPieces = kDim / 8;
  const bf16* first = p.q + static_cast<size_t>(tile.first_row) * p.q_stride + blockIdx.x * group * kDim;
  for (int at = threadIdx.x; at < kTileRows * kPieces; at += blockDim.x) {
    const int row = at / kPieces, piece = at % kPieces, token = row / group, head = row % group;
    const bool present = token < tile.n_tokens;
    const bf16* source = first + static_cast<size_t>(present ? token : 0) * p.q_stride + head * kDim + piece * 8;
    copy_async(shared + swizzled<kDim>(row, piece), source, present);
  }
}

// 64 tokens of K or V; those from n_tokens on become zeros, because 0 * NaN would reach the output.
template <int kDim>
__device__ __forceinline__ void load_tokens(uint32_t shared, const bf16* cache, const int32_t* table, int from,
                                            int n_tokens, int n_kv) {
  constexpr int kPieces = kDim / 8, kRowsAtOnce = kWarps * kWarp / kPieces;
  const int piece = threadIdx.x % kPieces, first = threadIdx.x / kPieces;
#pragma unroll
  for (int i = 0; i < kTileTokens / kRowsAtOnce; ++i) {
    const int row = first + i * kRowsAtOnce, token = from + row;
    const bool present = token < n_tokens;
    const size_t block = present ? table[token / kBlockSize] : 0;
    const bf16* source = cache + ((block * n_kv + blockIdx.x) * kBlockSize + token % kBlockSize) * kDim + piece * 8;
    copy_async(shared + swizzled<kDim>(row, piece), source, present);
  }
}

template <int kDim>
__device__ __forceinline__ void score_tile(float (&score)[2][kTileTokens / 8][4], uint32_t q_tile, uint32_t k_tile) {
  const int lane = threadIdx.x % kWarp, matrix = lane / 8, row = lane % 8, warp_row = threadIdx.x / kWarp * kWarpRows;
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    uint32_t q[2][4];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      ldmatrix(q[m], q_tile + swizzled<kDim>(warp_row + m * 16 + lane % 16, step * 2 + lane / 16));
    }
#pragma unroll
    for (int pair = 0; pair < kTileTokens / 16; ++pair) {
      uint32_t k[4];
      ldmatrix(k, k_tile + swizzled<kDim>(pair * 16 + matrix / 2 * 8 + row, step * 2 + matrix % 2));
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        mma(score[m][pair * 2], q[m][0], q[m][1], q[m][2], q[m][3], k[0], k[1]);
        mma(score[m][pair * 2 + 1], q[m][0], q[m][1], q[m][2], q[m][3], k[2], k[3]);
      }
    }
  }
}

// Minus infinity where a row must not look: KV token `from + column` at or past what the row sees.
__device__ __forceinline__ void mask_tile(float (&score)[2][kTileTokens / 8][4], const PrefillTile& tile, int group,
                                          int from) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const int token = min(tile_row(r) / group, tile.n_tokens - 1), n_visible = tile.first_visible + token;
#pragma unroll
    for (int j = 0; j < kTileTokens / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (from + 8 * j + 2 * t + i >= n_visible) score[r / 2][j][2 * (r % 2) + i] = -INFINITY;
      }
    }
  }
}

// Scores become weights relative to the new maximum; what was summed before is scaled to it. `scale` is positive, so
// the maximum is taken of the unscaled scores and the scaling costs nothing (one fused multiply-add a score).
template <int kDim>
__device__ __forceinline__ void weigh_tile(Softmax<kDim>& state, float (&score)[2][kTileTokens / 8][4], float scale) {
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const int m = r / 2, i0 = 2 * (r % 2);
    float highest = -INFINITY;
#pragma unroll
    for (int j = 0; j < kTileTokens / 8; ++j) highest = fmaxf(highest, fmaxf(score[m][j][i0], score[m][j][i0 + 1]));
    const float maximum = fmaxf(state.maximum[r], quad_max(highest) * scale);
    const float keep = weight_of(state.maximum[r], maximum), offset = maximum == -INFINITY ? 0.f : maximum;
    float sum = 0.f;
#pragma unroll
    for (int j = 0; j < kTileTokens / 8; ++j) {
#pragma unroll
      for (int i = i0; i < i0 + 2; ++i) sum += score[m][j][i] = power_of_two(score[m][j][i] * scale - offset);
    }
    state.maximum[r] = maximum, state.sum[r] = state.sum[r] * keep + sum;
#pragma unroll
    for (int j = 0; j < kDim / 8; ++j) state.out[m][j][i0] *= keep, state.out[m][j][i0 + 1] *= keep;
  }
}

template <int kDim>
__device__ __forceinline__ void add_values(Softmax<kDim>& state, const float (&p)[2][kTileTokens / 8][4], uint32_t v_tile) {
  const int lane = threadIdx.x % kWarp, matrix = lane / 8, row = lane % 8;
#pragma unroll
  for (int step = 0; step < kTileTokens / 16; ++step) {
    uint32_t a[2][4];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      a[m][0] = pack(p[m][2 * step][0], p[m][2 * step][1]), a[m][1] = pack(p[m][2 * step][2], p[m][2 * step][3]);
      a[m][2] = pack(p[m][2 * step + 1][0], p[m][2 * step + 1][1]);
      a[m][3] = pack(p[m][2 * step + 1][2], p[m][2 * step + 1][3]);
    }
#pragma unroll
    for (int pair = 0; pair < kDim / 16; ++pair) {
      uint32_t v[4];
      ldmatrix_transposed(v, v_tile + swizzled<kDim>(step * 16 + matrix % 2 * 8 + row, pair * 2 + matrix / 2));
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        mma(state.out[m][pair * 2], a[m][0], a[m][1], a[m][2], a[m][3], v[0], v[1]);
        mma(state.out[m][pair * 2 + 1], a[m][0], a[m][1], a[m][2], a[m][3], v[2], v[3]);
      }
    }
  }
}

template <int kDim>
__device__ __forceinline__ void store(const Softmax<kDim>& state, const PagedPrefill& p, const PrefillTile& tile, int group) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const int token = tile_row(r) / group, head = tile_row(r) % group;
    const float total = quad_sum(state.sum[r]);
    if (token >= tile.n_tokens) continue;
    bf16* out = p.out + (static_cast<size_t>(tile.first_row + token) * p.n_q + blockIdx.x * group + head) * kDim;
#pragma unroll
    for (int j = 0; j < kDim / 8; ++j) {
      const float* pair = &state.out[r / 2][j][2 * (r % 2)];
      *reinterpret_cast<uint32_t*>(out + 8 * j + 2 * t) = pack(pair[0] / total, pair[1] / total);
    }
  }
}

template <int kDim>
__device__ __forceinline__ void paged_prefill(const PagedPrefill& p) {
  extern __shared__ __align__(128) uint8_t shared[];
  constexpr uint32_t kTileBytes = kTileTokens * kDim * 2;
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const PrefillTile tile = p.tiles[blockIdx.y];
  if (tile.sequence < 0) return;
  const int group = p.n_q / p.n_kv;
  const int32_t* table = p.block_table + static_cast<size_t>(tile.sequence) * p.table_stride;
  const uint32_t q_tile = shared_address(shared), k_tiles = q_tile + kTileRows * kDim * 2;
  const uint32_t v_tiles = k_tiles + kStages * kTileBytes;
  const int n_visible = tile.first_visible + tile.n_tokens - 1, n_tiles = (n_visible + kTileTokens - 1) / kTileTokens;
  auto request = [&](int i) {
    if (i < n_tiles) {
      const uint32_t offset = i % kStages * kTileBytes;
      load_tokens<kDim>(k_tiles + offset, p.k_cache, table, i * kTileTokens, n_visible, p.n_kv);
      load_tokens<kDim>(v_tiles + offset, p.v_cache, table, i * kTileTokens, n_visible, p.n_kv);
    }
    commit_copies();
  };
  load_queries<kDim>(q_tile, p, tile, group);
  request(0);
  Softmax<kDim> state = {{}, {-INFINITY, -INFINITY, -INFINITY, -INFINITY}, {}};
  for (int i = 0; i < n_tiles; ++i) {
    wait_for_copies<0>();
    __syncthreads();
    request(i + 1);
    float score[2][kTileTokens / 8][4] = {};
    score_tile<kDim>(score, q_tile, k_tiles + i % kStages * kTileBytes);
    if ((i + 1) * kTileTokens > tile.first_visible) mask_tile(score, tile, group, i * kTileTokens);
    weigh_tile<kDim>(state, score, p.scale * kLog2e);
    add_values<kDim>(state, score, v_tiles + i % kStages * kTileBytes);
  }
  store<kDim>(state, p, tile, group);
}

}  // namespace stoker

#define PAGED_PREFILL(dim)                                                                                           \
  extern "C" __global__ void __launch_bounds__(128, 2) paged_prefill_d##dim(                                         \
      stoker::bf16* out, const stoker::bf16* q, const stoker::bf16* k_cache, const stoker::bf16* v_cache,            \
      const int32_t* block_table, const stoker::PrefillTile* tiles, int q_stride, int table_stride, int n_q, int n_kv, \
      float scale) {                                                                                                 \
    stoker::paged_prefill<dim>(                                                                                      \
        {out, q, k_cache, v_cache, block_table, tiles, q_stride, table_stride, n_q, n_kv, scale});                   \
  }
PAGED_PREFILL(64)
PAGED_PREFILL(128)
