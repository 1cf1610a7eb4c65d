// The same attention as paged_prefill.cu, with the same tiles and plan, on Hopper's warpgroup products.
//
//   out[r][h] = softmax(q[r][h] . K[h/G]^T * scale, tokens up to r's own position) V[h/G]
//
// 2 warpgroups of 64 rows; K and V walk through shared memory in tiles of 64 tokens, two stages by cp.async. The products
// read Q, K and V from shared memory by descriptor, weights go from the softmax's registers straight into the second
// product: no ldmatrix, which is what bounds the mma.sync version.
//
//       shared memory, D = 128:   Q 2 x [128 rows x 64]   K 2 stages x 2 x [64 tokens x 64]   V the same     = 96 KiB
//
// so two thread blocks fit a multiprocessor, and while one warpgroup of the four computes exponentials the others keep
// the tensor cores busy. KV blocks of 16 tokens are gathered by the copies; a tile needs four table entries.
// Bound by arithmetic, 4 * D * n_q a pair of tokens: 500 TFLOP/s at 8192 tokens, 405 at 2048 (70 and 57 % of a large product's
// rate). A chunk of 512 over 8192 has 128 tiles for 264 places and stays at 350.
#include "attention.cuh"
#include "wgmma.cuh"

namespace stoker {

constexpr int kThreads = 256, kTileRows = 128, kGroupRows = 64, kTileTokens = 64, kStages = 2;

// The same fields as `PrefillTile` in plan.rs.
struct PrefillTile {
  int32_t sequence;       // row of the block table; -1: nothing to do
  int32_t first_row;      // first token's row in q and out
  int32_t n_tokens;       // tokens in this tile
  int32_t first_visible;  // KV tokens that the first token sees, itself included
};

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

#ifdef STOKER_HAS_WGMMA

template <int kDim>
struct Softmax {
  float out[kDim / 8][4];
  float maximum[2], sum[2];  // rows g and g + 8 of the warp's 16
};

// Byte offset of a 16-byte piece in a tile of n_rows, stored as halves of 64 values.
__device__ __forceinline__ uint32_t tile_offset(int row, int piece, int n_rows) {
  return static_cast<uint32_t>((piece / 8) * n_rows * 128 + row * 128 + ((piece % 8) ^ (row & 7)) * 16);
}

__device__ __forceinline__ int tile_row(int r) { return threadIdx.x / kWarp * 16 + r * 8 + threadIdx.x % kWarp / 4; }

template <int kDim>
__device__ __forceinline__ void load_queries(uint32_t shared, const PagedPrefill& p, const PrefillTile& tile, int group) {
  constexpr int kPieces = kDim / 8;
  const bf16* first = p.q + static_cast<size_t>(tile.first_row) * p.q_stride + blockIdx.x * group * kDim;
  for (int at = threadIdx.x; at < kTileRows * kPieces; at += kThreads) {
    const int row = at / kPieces, piece = at % kPieces, token = row / group, head = row % group;
    const bool present = token < tile.n_tokens;
    const bf16* source = first + static_cast<size_t>(present ? token : 0) * p.q_stride + head * kDim + piece * 8;
    copy_async(shared + tile_offset(row, piece, kTileRows), source, present);
  }
}

// 64 tokens of K and V; those from n_tokens on become zeros, because 0 * NaN would reach the output.
template <int kDim>
__device__ __forceinline__ void load_tokens(uint32_t k_tile, uint32_t v_tile, const PagedPrefill& p, const int32_t* table,
                                            int from, int n_tokens) {
  constexpr int kPieces = kDim / 8, kRowsAtOnce = kThreads / kPieces;
  const int piece = threadIdx.x % kPieces, first = threadIdx.x / kPieces;
#pragma unroll
  for (int i = 0; i < kTileTokens / kRowsAtOnce; ++i) {
    const int row = first + i * kRowsAtOnce, token = from + row;
    const bool present = token < n_tokens;
    const size_t block = present ? table[token / kBlockSize] : 0;
    const size_t at = ((block * p.n_kv + blockIdx.x) * kBlockSize + token % kBlockSize) * kDim + piece * 8;
    copy_async(k_tile + tile_offset(row, piece, kTileTokens), p.k_cache + at, present);
    copy_async(v_tile + tile_offset(row, piece, kTileTokens), p.v_cache + at, present);
  }
}

template <int kDim>
__device__ __forceinline__ void score_tile(float (&score)[8][4], uint32_t q_rows, uint32_t k_tile) {
  begin_products();
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    // A step of 16 values is 32 bytes along the 128-byte row of its half.
    const uint32_t q = q_rows + step / 4 * kTileRows * 128 + step % 4 * 32;
    const uint32_t k = k_tile + step / 4 * kTileTokens * 128 + step % 4 * 32;
    wgmma_rows(score, tile_descriptor(q, 0, 1024), tile_descriptor(k, 0, 1024), step > 0);
  }
  finish_products();
}

__device__ __forceinline__ void mask_tile(float (&score)[8][4], const PrefillTile& tile, int group, int from) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int n_visible = tile.first_visible + min(tile_row(r) / group, tile.n_tokens - 1);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (from + 8 * j + 2 * t + i >= n_visible) score[j][2 * r + i] = -INFINITY;
      }
    }
  }
}

// Scores become weights relative to the new maximum; what was summed before is scaled to it.
template <int kDim>
__device__ __forceinline__ void weigh_tile(Softmax<kDim>& state, float (&score)[8][4], float scale) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float highest = -INFINITY;
#pragma unroll
    for (int j = 0; j < 8; ++j) highest = fmaxf(highest, fmaxf(score[j][2 * r], score[j][2 * r + 1]));
    const float maximum = fmaxf(state.maximum[r], quad_max(highest) * scale);
    const float keep = weight_of(state.maximum[r], maximum), offset = maximum == -INFINITY ? 0.f : maximum;
    float sum = 0.f;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int i = 2 * r; i < 2 * r + 2; ++i) sum += score[j][i] = power_of_two(score[j][i] * scale - offset);
    }
    state.maximum[r] = maximum, state.sum[r] = state.sum[r] * keep + sum;
#pragma unroll
    for (int j = 0; j < kDim / 8; ++j) state.out[j][2 * r] *= keep, state.out[j][2 * r + 1] *= keep;
  }
}

template <int kDim>
__device__ __forceinline__ void add_values(Softmax<kDim>& state, const float (&p)[8][4], uint32_t v_tile) {
  uint32_t weights[4][4];
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    weights[step][0] = pack(p[2 * step][0], p[2 * step][1]), weights[step][1] = pack(p[2 * step][2], p[2 * step][3]);
    weights[step][2] = pack(p[2 * step + 1][0], p[2 * step + 1][1]);
    weights[step][3] = pack(p[2 * step + 1][2], p[2 * step + 1][3]);
  }
  begin_products();
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    // 16 tokens are two groups of 8 rows.
    wgmma_columns(state.out, weights[step], tile_descriptor(v_tile + step * 2048, kTileTokens * 128, 1024));
  }
  finish_products();
}

template <int kDim>
__device__ __forceinline__ void store(const Softmax<kDim>& state, const PagedPrefill& p, const PrefillTile& tile, int group) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int token = tile_row(r) / group, head = tile_row(r) % group;
    const float inverse = 1.f / quad_sum(state.sum[r]);
    if (token >= tile.n_tokens) continue;
    bf16* out = p.out + (static_cast<size_t>(tile.first_row + token) * p.n_q + blockIdx.x * group + head) * kDim;
#pragma unroll
    for (int j = 0; j < kDim / 8; ++j) {
      const uint32_t pair = pack(state.out[j][2 * r] * inverse, state.out[j][2 * r + 1] * inverse);
      *reinterpret_cast<uint32_t*>(out + 8 * j + 2 * t) = pair;
    }
  }
}

template <int kDim>
__device__ __forceinline__ void paged_prefill(const PagedPrefill& p) {
  extern __shared__ uint8_t shared[];
  constexpr uint32_t kTileBytes = kTileTokens * kDim * 2;
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const PrefillTile tile = p.tiles[blockIdx.y];
  if (tile.sequence < 0) return;
  const int group = p.n_q / p.n_kv;
  const int32_t* table = p.block_table + static_cast<size_t>(tile.sequence) * p.table_stride;
  // The swizzle is a function of the address: tiles begin at multiples of 1024 (the launch asks for the slack).
  const uint32_t q_tile = (shared_address(shared) + 1023) & ~1023u, k_tiles = q_tile + kTileRows * kDim * 2;
  const uint32_t v_tiles = k_tiles + kStages * kTileBytes;
  const uint32_t q_rows = q_tile + threadIdx.x / 128 * kGroupRows * 128;
  const int n_visible = tile.first_visible + tile.n_tokens - 1, n_tiles = (n_visible + kTileTokens - 1) / kTileTokens;
  auto request = [&](int i) {
    const uint32_t offset = i % kStages * kTileBytes;
    if (i < n_tiles) load_tokens<kDim>(k_tiles + offset, v_tiles + offset, p, table, i * kTileTokens, n_visible);
    commit_copies();
  };
  load_queries<kDim>(q_tile, p, tile, group);
  request(0);
  Softmax<kDim> state = {{}, {-INFINITY, -INFINITY}, {}};
  for (int i = 0; i < n_tiles; ++i) {
    wait_for_copies<0>();
    publish_to_tensor_cores();
    __syncthreads();
    request(i + 1);
    float score[8][4];
    score_tile<kDim>(score, q_rows, k_tiles + i % kStages * kTileBytes);
    if ((i + 1) * kTileTokens > tile.first_visible) mask_tile(score, tile, group, i * kTileTokens);
    weigh_tile<kDim>(state, score, p.scale * kLog2e);
    add_values<kDim>(state, score, v_tiles + i % kStages * kTileBytes);
  }
  store<kDim>(state, p, tile, group);
}

#else

template <int kDim>
__device__ __forceinline__ void paged_prefill(const PagedPrefill&) {}

#endif

}  // namespace stoker

#define PAGED_PREFILL_SM90(dim)                                                                                        \
  extern "C" __global__ void __launch_bounds__(256, 2) paged_prefill_sm90_d##dim(                                      \
      stoker::bf16* out, const stoker::bf16* q, const stoker::bf16* k_cache, const stoker::bf16* v_cache,              \
      const int32_t* block_table, const stoker::PrefillTile* tiles, int q_stride, int table_stride, int n_q, int n_kv, \
      float scale) {                                                                                                   \
    stoker::paged_prefill<dim>(                                                                                        \
        {out, q, k_cache, v_cache, block_table, tiles, q_stride, table_stride, n_q, n_kv, scale});                     \
  }
PAGED_PREFILL_SM90(64)
PAGED_PREFILL_SM90(128)
