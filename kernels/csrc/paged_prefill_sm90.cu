// Causal attention of prefill chunks over their paged KV on Hopper: copy engine, warpgroup products, one persistent thread
// block a multiprocessor.
//
//   out[r][h] = softmax(q[r][h] . K[h/G]^T * scale, tokens up to r's own position) V[h/G]
//
// Layout: q is the fused QKV rows, q_stride values apart; out is rows x n_q x D; caches are blocks x n_kv x 16 x D. Two kernels
// are for heads of 64 and 128, three for any width up to 64, 128 or 256, with a window and a soft-cap if the layer has them: what lies
// behind a narrower head the copy engine fills with zeros. Each is there for a cache of bf16 and for one of e4m3. The host
// plans tiles (plan/prefill.rs): 128 rows of queries, tokens times the G heads of a KV head, longest first; surplus
// tiles, the last ones, have sequence -1: a captured graph keeps its grid. Work is
// a tile and a KV head; block b takes b, then goes back and forth over the rest, so that sums of lengths are even.
// Three producer warps ask the copy engine for queries, K and V; two warpgroups of 64 rows consume:
//
//       shared memory, D = 128:   Q 2 stages x 2 x [128 rows x 64]   K 2 stages x 2 x [128 tokens x 64]   V the same
//                      D = 256:   Q 1 stage  x 4 x [128 rows x 64]   K 2 stages x 4 x [ 64 tokens x 64]   V the same
//
// A KV block of one head is one box of the copy engine a half: eight lanes fetch a tile's eight blocks by the block table. Of e4m3
// four producer warps, two for K and two for V, load the tiles through their registers and widen them to f16 on the way; queries before
// such a cache are f16. Scales of keys and of values are multiplied into scores and results.
// Each warpgroup multiplies Q by the next K while it weighs, and the two take turns to start: while one computes
// exponentials the other has the tensor cores. KV goes from the newest tile to the oldest, so that only the first tile or two of
// a row need a mask. Tiles begin at multiples of their length: a row's sums have one order, whatever chunk it is in.
// Where tiles are fewer than multiprocessors, the plan cuts their KV into pieces; the blocks that computed them add them up in
// their order, each a share of the rows.
// Bound by arithmetic, 4 * D * n_q a pair of tokens; exponentials take half as long as products and hide behind them: 600
// to 685 TFLOP/s at 8192 tokens (a hot and a cool chip), 430 to 550 at 2048, 585 to 660 for 512 tokens over 7680; a large product
// has 710 to 745.
#include "attention.cuh"
#include "e4m3.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

namespace stoker {

struct PagedPrefill {
  bf16* out;
  const float* kv_scales;  // of e4m3: of each KV head's keys, then of its values
  const int32_t* block_table;
  const PrefillTile* tiles;
  float* partial_out;   // pieces x n_kv x 128 rows x D, only of tiles in several pieces
  float2* partial_sum;  // pieces x n_kv x 128 rows: maximum and sum of exponentials
  uint32_t* tickets;    // one a piece and KV head, used at a tile's first piece: pieces done and seen; zero before and after
  int table_stride, n_tiles, n_q, n_kv;
  float scale;
  AttentionExtras extras;
};

#ifdef STOKER_HAS_WGMMA

constexpr int kConsumers = 256, kConsumerWarps = kConsumers / kWarp, kGroupThreads = 128;
constexpr int kTileRows = 128, kGroupRows = 64, kStages = 2;
// Of heads of 256 a tile of KV is half as long, and there is room for the queries of one work.
template <int kDim>
constexpr int kTileTokens = kDim > 128 ? 64 : 128;
template <int kDim>
constexpr int kTileBlocks = kTileTokens<kDim> / kBlockSize;
template <int kDim>
constexpr int kQueryStages = kDim > 128 ? 1 : kStages;
// 64 values of a row of a tile: what a swizzled tile is wide.
constexpr uint32_t kHalfRowBytes = 128;

// What is multiplied; registers of a thread after the start, which together are all of a multiprocessor; the warps that bring one tile of
// K, or of V.
template <typename Tokens>
struct Roles {
  using Number = bf16;
  static constexpr int kConsumerRegisters = 232, kProducerRegisters = 40, kTileProducers = 1;
};
// Producers that widen hold what is on its way.
template <>
struct Roles<const e4m3*> {
  using Number = __half;
  static constexpr int kConsumerRegisters = 208, kProducerRegisters = 88, kTileProducers = 2;
};

struct Pipe {
  uint64_t full[kStages], empty[kStages];
};

struct Barriers {
  Pipe q, k, v;
};

// What a thread holds of its two rows, g and g + 8 of the warp's 16.
template <int kDim>
struct Rows {
  float out[kDim / 8][4];
  float maximum[2], sum[2];
};

struct Work {
  PrefillTile tile;
  int kv_head;
  int seen_from;  // first KV token in the window of the tile's first token; below 0 too
  float score_scale, value_scale;  // to units of log2; 1 where the cache has no scales
  template <int kDim>
  __device__ __forceinline__ int first() const {
    return max(tile.begin, seen_from) / kTileTokens<kDim>;
  }
  // Before the first if the piece lies before the window.
  template <int kDim>
  __device__ __forceinline__ int last() const {
    return (tile.end - 1) / kTileTokens<kDim>;
  }
};

// Columns of a head: known to the compiler in a plain kernel.
template <int kDim, bool kPlain>
__device__ __forceinline__ int width(const PagedPrefill& p) {
  return kPlain ? kDim : p.extras.dim;
}

// The block's `round`-th work, if there is one: behind the first tile of nobody there is none.
template <bool kPlain>
__device__ __forceinline__ bool find_work(Work& work, const PagedPrefill& p, int round) {
  const int from = round % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x, at = round * gridDim.x + from;
  if (at >= p.n_tiles * p.n_kv) return false;
  work.tile = p.tiles[at / p.n_kv], work.kv_head = at % p.n_kv;
  work.seen_from = kPlain ? 0 : work.tile.first_visible - p.extras.window;
  const bool has_scales = p.kv_scales != nullptr;
  work.score_scale = p.scale * kLog2e * (has_scales ? p.kv_scales[work.kv_head] : 1.f);
  work.value_scale = has_scales ? p.kv_scales[p.n_kv + work.kv_head] : 1.f;
  return work.tile.sequence >= 0;
}

// Of the queries of one work. By one lane.
template <int kDim>
__device__ __forceinline__ void bring_queries(Pipe& pipe, const TensorMap& map, uint32_t stages, const PagedPrefill& p, const Work& work,
                                              int round) {
  const int group = p.n_q / p.n_kv, n_bytes = kTileRows / group * group * kDim * 2;
  const uint32_t stage = round % kQueryStages<kDim>;
  wait_for(&pipe.empty[stage], (round / kQueryStages<kDim> & 1) ^ 1);
  arrive_expecting(&pipe.full[stage], n_bytes);
#pragma unroll
  for (int half = 0; half < kDim / 64; ++half) {
    const uint32_t target = stages + (stage * (kDim / 64) + half) * kTileRows * kHalfRowBytes;
    copy_box(target, map, half * 64, work.kv_head * group, work.tile.first_row, &pipe.full[stage]);
  }
}

template <int kDim, bool kPlain>
__device__ __forceinline__ void produce_queries(Pipe& pipe, const TensorMap& map, uint32_t stages, const PagedPrefill& p) {
  Work work;
  for (int round = 0; find_work<kPlain>(work, p, round); ++round) bring_queries<kDim>(pipe, map, stages, p, work, round);
}

// All lanes of a warp; lane l copies block l % 8 of half l / 8. Blocks past the sequence repeat its last one.
template <int kDim, bool kPlain>
__device__ __forceinline__ void produce_tokens(Pipe& pipe, const TensorMap& map, uint32_t stages, const PagedPrefill& p) {
  const int lane = threadIdx.x % kWarp, block = lane % kTileBlocks<kDim>, half = lane / kTileBlocks<kDim>;
  const uint32_t own = half * kTileTokens<kDim> * kHalfRowBytes + block * kBlockSize * kHalfRowBytes;
  uint32_t n = 0;
  Work work;
  for (int round = 0; find_work<kPlain>(work, p, round); ++round) {
    const int32_t* table = p.block_table + static_cast<size_t>(work.tile.sequence) * p.table_stride;
    const int last_block = (work.tile.end - 1) / kBlockSize;
    for (int t = work.last<kDim>(); t >= work.first<kDim>(); --t, ++n) {
      const int row = (table[min(t * kTileBlocks<kDim> + block, last_block)] * p.n_kv + work.kv_head) * kBlockSize;
      const uint32_t stage = n % kStages;
      wait_for(&pipe.empty[stage], (n / kStages & 1) ^ 1);
      if (lane == 0) arrive_expecting(&pipe.full[stage], kTileTokens<kDim> * kDim * 2);
      __syncwarp();
      if (half < kDim / 64) copy_box(stages + stage * kTileTokens<kDim> * kDim * 2 + own, map, half * 64, row, &pipe.full[stage]);
    }
  }
}

// A warp's every second KV block of a tile: all its loads first, as registers are what is on its way. (Through shared memory, a tile
// ahead, it took a fifth longer: that is what products need most.) A quarter of a warp has four pieces of two rows: they are stored to
// eight groups of banks.
template <int kDim, bool kPlain>
__device__ __forceinline__ void bring_tokens(uint32_t tile, const e4m3* cache, const PagedPrefill& p, int blocks, int own) {
  constexpr int kRowsAtOnce = kWarp * 16 / kDim, kLoads = kBlockSize / kRowsAtOnce, kBlocksAtOnce = 8 / kLoads < 4 ? 8 / kLoads : 4;
  const int lane = threadIdx.x % kWarp, dim = width<kDim, kPlain>(p);
  const int piece = lane % 4 + lane / (4 * kRowsAtOnce) * 4, row = lane / 4 % kRowsAtOnce;
#pragma unroll
  for (int first = 0; first < kTileBlocks<kDim> / 2; first += kBlocksAtOnce) {
    uint4 codes[kBlocksAtOnce][kLoads];
#pragma unroll
    for (int b = 0; b < kBlocksAtOnce; ++b) {
      const size_t block_row = static_cast<size_t>(__shfl_sync(~0u, blocks, 2 * (first + b) + own));
      const e4m3* source = cache + (block_row + row) * dim + piece * 16;
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const bool present = kPlain || piece * 16 < dim;
        codes[b][i] = present ? *reinterpret_cast<const uint4*>(source + i * kRowsAtOnce * dim) : make_uint4(0, 0, 0, 0);
      }
    }
#pragma unroll
    for (int b = 0; b < kBlocksAtOnce; ++b) {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        uint4 values[2];
        widen(codes[b][i], values);
        const int tile_row = (2 * (first + b) + own) * kBlockSize + i * kRowsAtOnce + row;
        const uint32_t line = tile + (piece / 4 * kTileTokens<kDim> + tile_row) * kHalfRowBytes;
#pragma unroll
        for (int half = 0; half < 2; ++half) store_shared(line + ((piece % 4 * 2 + half) ^ (tile_row & 7)) * 16, values[half]);
      }
    }
  }
}

// By two warps. The first one of keys asks for the queries, too: what it has to wait for there is long read when all keys of the work
// before are on their way.
template <int kDim, bool kPlain, typename BeginWork>
__device__ __forceinline__ void produce_tokens(Pipe& pipe, const e4m3* cache, uint32_t stages, const PagedPrefill& p, int own,
                                               const BeginWork& begin_work) {
  const int lane = threadIdx.x % kWarp;
  uint32_t n = 0;
  Work work;
  for (int round = 0; find_work<kPlain>(work, p, round); ++round) {
    begin_work(work, round);
    const int32_t* table = p.block_table + static_cast<size_t>(work.tile.sequence) * p.table_stride;
    // Blocks past the sequence repeat its last one.
    const int last_block = (work.tile.end - 1) / kBlockSize;
    for (int t = work.last<kDim>(); t >= work.first<kDim>(); --t, ++n) {
      const int blocks = (table[min(t * kTileBlocks<kDim> + lane % kTileBlocks<kDim>, last_block)] * p.n_kv + work.kv_head) * kBlockSize;
      const uint32_t stage = n % kStages;
      wait_for(&pipe.empty[stage], (n / kStages & 1) ^ 1);
      bring_tokens<kDim, kPlain>(stages + stage * kTileTokens<kDim> * kDim * 2, cache, p, blocks, own);
      publish_to_tensor_cores();
      __syncwarp();
      if (lane == 0) arrive(&pipe.full[stage]);
    }
  }
}

__device__ __forceinline__ int consumer_group() { return threadIdx.x / kGroupThreads; }
__device__ __forceinline__ int tile_row(int r) { return threadIdx.x / kWarp * 16 + r * 8 + threadIdx.x % kWarp / 4; }

__device__ __forceinline__ void sync_consumers() { asm volatile("bar.sync 1, %0;\n" ::"n"(kConsumers) : "memory"); }
// A turn is this warpgroup's 128 threads and the other's leave.
__device__ __forceinline__ void take_turn() {
  asm volatile("bar.sync %0, %1;\n" ::"r"(2 + consumer_group()), "n"(kConsumers) : "memory");
}
__device__ __forceinline__ void give_turn_to(int group) {
  asm volatile("bar.arrive %0, %1;\n" ::"r"(2 + group), "n"(kConsumers) : "memory");
}

__device__ __forceinline__ void release(uint64_t* barrier) {
  if (threadIdx.x % kWarp == 0) arrive(barrier);
}

// A thread's scores of its two rows by a tile's tokens, eight by eight; the same rounded, as the left operand of the second product.
template <int kDim>
using Scores = float[kTileTokens<kDim> / 8][4];
template <int kDim>
using Weights = uint32_t[kTileTokens<kDim> / 16][4];

template <typename Number, int kDim>
__device__ __forceinline__ void score_tile(Scores<kDim>& score, uint64_t q_rows, uint64_t k_tile) {
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    // A step of 16 values is 32 bytes along the 128-byte row of its half.
    const uint64_t q = moved(q_rows, step / 4 * kTileRows * kHalfRowBytes + step % 4 * 32);
    const uint64_t k = moved(k_tile, step / 4 * kTileTokens<kDim> * kHalfRowBytes + step % 4 * 32);
    if constexpr (std::is_same_v<Number, __half>) {
      wgmma_rows_f16(score, q, k, step > 0);
    } else {
      wgmma_rows(score, q, k, step > 0);
    }
  }
}

template <typename Number, int kDim>
__device__ __forceinline__ void add_values(float (&out)[kDim / 8][4], const Weights<kDim>& weights, uint64_t v_tile) {
#pragma unroll
  for (int step = 0; step < kTileTokens<kDim> / 16; ++step) {
    // 16 tokens are two groups of 8 rows.
    const uint64_t rows = moved(v_tile, step * 16 * kHalfRowBytes);
    if constexpr (std::is_same_v<Number, __half>) {
      wgmma_columns_f16(out, weights[step], rows);
    } else {
      wgmma_columns(out, weights[step], rows);
    }
  }
}

template <int kDim, bool kPlain>
__device__ __forceinline__ void mask_tile(Scores<kDim>& score, const PrefillTile& tile, int group, int from, int window) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int n_seen = tile.first_visible + min(tile_row(r) / group, tile.n_tokens - 1);
    const int n_visible = min(n_seen, tile.end) - from, first = n_seen - window - from;
#pragma unroll
    for (int j = 0; j < kTileTokens<kDim> / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int column = 8 * j + 2 * t + i;
        if (column >= n_visible || (!kPlain && column < first)) score[j][2 * r + i] = -INFINITY;
      }
    }
  }
}

// Bounds scores, where the layer does, and says what they are to be multiplied by: to units of log2.
template <int kDim, bool kPlain>
__device__ __forceinline__ float cap_tile(Scores<kDim>& score, const PagedPrefill& p, float scale) {
  const float softcap = kPlain ? 0.f : p.extras.softcap * kLog2e;
  if (softcap > 0.f) {
#pragma unroll
    for (int j = 0; j < kTileTokens<kDim> / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) score[j][i] = soft_capped(score[j][i] * scale, softcap);
    }
  }
  return softcap > 0.f ? 1.f : scale;
}

// Scores become weights relative to the new maximum; `keep` is what sums so far have to be multiplied by.
template <int kDim>
__device__ __forceinline__ void weigh_tile(Rows<kDim>& rows, float (&keep)[2], Scores<kDim>& score, float scale) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float highest[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int j = 0; j < kTileTokens<kDim> / 8; ++j) {
      highest[j % 2] = fmaxf(highest[j % 2], fmaxf(score[j][2 * r], score[j][2 * r + 1]));
    }
    const float maximum = fmaxf(rows.maximum[r], quad_max(fmaxf(highest[0], highest[1])) * scale);
    const float offset = maximum == -INFINITY ? 0.f : maximum;
    keep[r] = power_of_two(rows.maximum[r] - offset);
    float sum[2] = {};
#pragma unroll
    for (int j = 0; j < kTileTokens<kDim> / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) sum[i] += score[j][2 * r + i] = power_of_two(score[j][2 * r + i] * scale - offset);
    }
    rows.maximum[r] = maximum, rows.sum[r] = rows.sum[r] * keep[r] + (sum[0] + sum[1]);
  }
}

template <int kDim>
__device__ __forceinline__ void scale_sums(Rows<kDim>& rows, const float (&keep)[2]) {
#pragma unroll
  for (int j = 0; j < kDim / 8; ++j) {
    rows.out[j][0] *= keep[0], rows.out[j][1] *= keep[0], rows.out[j][2] *= keep[1], rows.out[j][3] *= keep[1];
  }
}

template <typename Number, int kDim>
__device__ __forceinline__ void round_weights(Weights<kDim>& weights, const Scores<kDim>& p) {
#pragma unroll
  for (int step = 0; step < kTileTokens<kDim> / 16; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* pair = &p[2 * step + i / 2][i % 2 * 2];
      weights[step][i] = pack_as<Number>(pair[0], pair[1]);
    }
  }
}

// Slots past the end were never written: zeros, because 0 * NaN would reach the output. By both warpgroups together.
template <int kDim>
__device__ __forceinline__ void clear_values(uint32_t v_tile, int n_present) {
  constexpr int kPieces = kHalfRowBytes / 16;
  for (int at = threadIdx.x; at < (kTileTokens<kDim> - n_present) * kPieces * (kDim / 64); at += kConsumers) {
    const int half = at / kPieces % (kDim / 64), row = n_present + at / kPieces / (kDim / 64);
    const uint32_t target = v_tile + (half * kTileTokens<kDim> + row) * kHalfRowBytes + at % kPieces * 16;
    asm volatile("st.shared.v4.u32 [%0], {%1,%1,%1,%1};\n" ::"r"(target), "r"(0) : "memory");
  }
  publish_to_tensor_cores();
  sync_consumers();
}

// Four lanes of a row hold two columns of each of four groups of eight; afterwards lane t holds all of group t.
__device__ __forceinline__ uint4 gathered(uint32_t w0, uint32_t w1, uint32_t w2, uint32_t w3) {
  const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
  const uint32_t a = __shfl_xor_sync(~0u, odd ? w0 : w1, 1), b = __shfl_xor_sync(~0u, odd ? w2 : w3, 1);
  odd ? (w0 = a, w2 = b) : (w1 = a, w3 = b);
  const uint32_t c = __shfl_xor_sync(~0u, upper ? w0 : w2, 2), d = __shfl_xor_sync(~0u, upper ? w1 : w3, 2);
  upper ? (w0 = c, w1 = d) : (w2 = c, w3 = d);
  return make_uint4(w0, w1, w2, w3);
}

template <int kDim, bool kPlain>
__device__ __forceinline__ void store(const Rows<kDim>& rows, const PagedPrefill& p, const Work& work, int group) {
  const int t = threadIdx.x % 4, dim = width<kDim, kPlain>(p);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int token = tile_row(r) / group, head = tile_row(r) % group;
    const float inverse = work.value_scale / quad_sum(rows.sum[r]);
    bf16* out = p.out + (static_cast<size_t>(work.tile.first_row + token) * p.n_q + work.kv_head * group + head) * dim;
    auto pair = [&](int j) { return pack(rows.out[j][2 * r] * inverse, rows.out[j][2 * r + 1] * inverse); };
#pragma unroll
    for (int j = 0; j < kDim / 8; j += 4) {
      const uint4 values = gathered(pair(j), pair(j + 1), pair(j + 2), pair(j + 3));
      if (token < work.tile.n_tokens && 8 * (j + t) < dim) *reinterpret_cast<uint4*>(out + 8 * (j + t)) = values;
    }
  }
}

// First row of a piece in the scratch.
__device__ __forceinline__ size_t scratch_row(const PagedPrefill& p, int piece, int kv_head) {
  return (static_cast<size_t>(piece) * p.n_kv + kv_head) * kTileRows;
}

template <int kDim, bool kPlain>
__device__ __forceinline__ void leave_piece(const Rows<kDim>& rows, const PagedPrefill& p, const Work& work) {
  const int t = threadIdx.x % 4, dim = width<kDim, kPlain>(p);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const size_t row = scratch_row(p, work.tile.piece, work.kv_head) + tile_row(r);
    const float sum = quad_sum(rows.sum[r]);
    if (t == 0) p.partial_sum[row] = make_float2(rows.maximum[r], sum);
#pragma unroll
    for (int j = 0; j < kDim / 8; ++j) {
      if (!kPlain && 8 * j >= dim) break;
      float2* target = reinterpret_cast<float2*>(p.partial_out + row * dim + 8 * j + 2 * t);
      *target = make_float2(rows.out[j][2 * r] * work.value_scale, rows.out[j][2 * r + 1] * work.value_scale);
    }
  }
}

__device__ __forceinline__ uint32_t* ticket_of(const PagedPrefill& p, const Work& work) {
  return p.tickets + static_cast<size_t>(work.tile.first_piece) * p.n_kv + work.kv_head;
}

__device__ __forceinline__ void announce_piece(uint32_t* ticket) {
  __threadfence();
  sync_consumers();
  if (threadIdx.x == 0) atomicAdd(ticket, 1u);
}

// Until all pieces of a tile are in the scratch. The last block to have seen it puts the counter back to zero.
__device__ __forceinline__ void wait_for_pieces(uint32_t* ticket, uint32_t n_pieces) {
  if (threadIdx.x == 0) {
    uint32_t n_done;
    do {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];\n" : "=r"(n_done) : "l"(ticket) : "memory");
    } while (n_done < n_pieces);
    if (atomicAdd(ticket, 1u) == 2 * n_pieces - 1) *ticket = 0;
  }
  sync_consumers();
}

// Adds up a tile's pieces, first to last, for this piece's share of the rows: a warp a row and four rows at a time, four
// columns a lane. What a merge costs is the number of loads that wait for each other.
template <int kDim, bool kPlain>
__device__ __forceinline__ void merge_pieces(const PagedPrefill& p, const Work& work, int group) {
  constexpr int kRowLanes = kDim / 4, kRowsAtOnce = kConsumers / kRowLanes, kUnrolled = 4;
  const size_t first = scratch_row(p, work.tile.first_piece, work.kv_head), next = static_cast<size_t>(p.n_kv) * kTileRows;
  const int column = threadIdx.x % kRowLanes * 4, n_rows = work.tile.n_tokens * group, dim = width<kDim, kPlain>(p);
  if (!kPlain && column >= dim) return;
  const int share = (n_rows + work.tile.n_pieces - 1) / work.tile.n_pieces;
  const int begin = (work.tile.piece - work.tile.first_piece) * share, end = min(n_rows, begin + share);
  for (int from = begin + threadIdx.x / kRowLanes; from < end; from += kRowsAtOnce * kUnrolled) {
    float maximum[kUnrolled], sum[kUnrolled] = {}, total[kUnrolled][4] = {};
#pragma unroll
    for (int u = 0; u < kUnrolled; ++u) maximum[u] = -INFINITY;
#pragma unroll 4
    for (int i = 0; i < work.tile.n_pieces; ++i) {
#pragma unroll
      for (int u = 0; u < kUnrolled; ++u) {
        // Rows past the end lie in the scratch, too.
        const size_t row = first + i * next + min(from + u * kRowsAtOnce, kTileRows - 1);
        const float2 piece = __ldcg(p.partial_sum + row);
        const float4 value = __ldcg(reinterpret_cast<const float4*>(p.partial_out + row * dim + column));
        const float highest = fmaxf(maximum[u], piece.x);
        const float keep = weight_of(maximum[u], highest), share = weight_of(piece.x, highest);
        maximum[u] = highest, sum[u] = sum[u] * keep + share * piece.y;
        total[u][0] = total[u][0] * keep + share * value.x, total[u][1] = total[u][1] * keep + share * value.y;
        total[u][2] = total[u][2] * keep + share * value.z, total[u][3] = total[u][3] * keep + share * value.w;
      }
    }
#pragma unroll
    for (int u = 0; u < kUnrolled; ++u) {
      const int row = from + u * kRowsAtOnce;
      if (row >= end) break;
      const size_t token = work.tile.first_row + row / group, head = work.kv_head * group + row % group;
      const uint2 values = make_uint2(pack(total[u][0] / sum[u], total[u][1] / sum[u]),
                                      pack(total[u][2] / sum[u], total[u][3] / sum[u]));
      *reinterpret_cast<uint2*>(p.out + (token * p.n_q + head) * dim + column) = values;
    }
  }
}

// Where the consumers are in the rings, and what they read.
struct Consumer {
  Barriers& barriers;
  uint64_t q_rows, k_tiles, v_tiles;  // of the first stages
  uint32_t v_address, stage_bytes;
  uint32_t n;  // tiles of K begun before

  __device__ __forceinline__ uint32_t stage(uint32_t i) const { return i % kStages; }
  __device__ __forceinline__ void wait(Pipe& pipe, uint32_t i) const { wait_for(&pipe.full[stage(i)], i / kStages & 1); }
  __device__ __forceinline__ uint64_t tile(uint64_t tiles, uint32_t i) const { return moved(tiles, stage(i) * stage_bytes); }
};

// The products of one tile of K and of the tile of V before it, and the weights of this one.
template <typename Number, int kDim, bool kPlain, bool kMasked>
__device__ __forceinline__ void attend_tile(Rows<kDim>& rows, Weights<kDim>& weights, Consumer& at, uint64_t q_rows,
                                            const PagedPrefill& p, const Work& work, int group, int from) {
  const PrefillTile& tile = work.tile;
  Scores<kDim> score;
  float keep[2];
  take_turn();
  at.wait(at.barriers.k, at.n);
  begin_products();
  score_tile<Number, kDim>(score, q_rows, at.tile(at.k_tiles, at.n));
  commit_products();
  at.wait(at.barriers.v, at.n - 1);
  begin_products();
  add_values<Number, kDim>(rows.out, weights, at.tile(at.v_tiles, at.n - 1));
  commit_products();
  give_turn_to(1 - consumer_group());
  wait_for_products<1>();
  pin(score);
  release(&at.barriers.k.empty[at.stage(at.n)]);
  const float scale = cap_tile<kDim, kPlain>(score, p, work.score_scale);
  if (kMasked) mask_tile<kDim, kPlain>(score, tile, group, from, p.extras.window);
  weigh_tile<kDim>(rows, keep, score, scale);
  wait_for_products<0>();
  pin(rows.out);
  release(&at.barriers.v.empty[at.stage(at.n - 1)]);
  scale_sums<kDim>(rows, keep);
  round_weights<Number, kDim>(weights, score);
  ++at.n;
}

// The newest tile: nothing to add to yet, and it may end early.
template <typename Number, int kDim, bool kPlain>
__device__ __forceinline__ void attend_newest(Rows<kDim>& rows, Weights<kDim>& weights, Consumer& at, uint64_t q_rows,
                                              const PagedPrefill& p, const Work& work, int group) {
  Scores<kDim> score;
  float keep[2];
  at.wait(at.barriers.k, at.n);
  begin_products();
  score_tile<Number, kDim>(score, q_rows, at.tile(at.k_tiles, at.n));
  commit_products();
  const int from = work.last<kDim>() * kTileTokens<kDim>, n_present = work.tile.end - from;
  if (n_present < kTileTokens<kDim>) {
    at.wait(at.barriers.v, at.n);
    clear_values<kDim>(at.v_address + at.stage(at.n) * at.stage_bytes, n_present);
  }
  wait_for_products<0>();
  pin(score);
  release(&at.barriers.k.empty[at.stage(at.n)]);
  const float scale = cap_tile<kDim, kPlain>(score, p, work.score_scale);
  mask_tile<kDim, kPlain>(score, work.tile, group, from, p.extras.window);
  weigh_tile<kDim>(rows, keep, score, scale);
  round_weights<Number, kDim>(weights, score);
  ++at.n;
}

template <typename Number, int kDim, bool kPlain>
__device__ __forceinline__ void attend(Rows<kDim>& rows, Consumer& at, int round, const PagedPrefill& p, const Work& work,
                                       int group) {
  Weights<kDim> weights;
  const int q_stage = round % kQueryStages<kDim>;
  const uint64_t q_rows = moved(at.q_rows, q_stage * kTileRows * kDim * 2);
  wait_for(&at.barriers.q.full[q_stage], round / kQueryStages<kDim> & 1);
  // A piece before the window: nothing to see.
  if (!kPlain && work.first<kDim>() > work.last<kDim>()) return release(&at.barriers.q.empty[q_stage]);
  attend_newest<Number, kDim, kPlain>(rows, weights, at, q_rows, p, work, group);
  // From here on rows see all of a tile, down to where the last row's window begins.
  const int edge = kPlain ? work.first<kDim>() : max(work.first<kDim>(), (work.seen_from + work.tile.n_tokens - 2 + kTileTokens<kDim>) / kTileTokens<kDim>);
  int t = work.last<kDim>() - 1;
  for (; t >= work.first<kDim>() && (t + 1) * kTileTokens<kDim> > work.tile.first_visible; --t) {
    attend_tile<Number, kDim, kPlain, true>(rows, weights, at, q_rows, p, work, group, t * kTileTokens<kDim>);
  }
  for (; t >= edge; --t) {
    attend_tile<Number, kDim, kPlain, false>(rows, weights, at, q_rows, p, work, group, t * kTileTokens<kDim>);
  }
  if constexpr (!kPlain) {
    for (; t >= work.first<kDim>(); --t) {
      attend_tile<Number, kDim, kPlain, true>(rows, weights, at, q_rows, p, work, group, t * kTileTokens<kDim>);
    }
  }
  release(&at.barriers.q.empty[q_stage]);
  at.wait(at.barriers.v, at.n - 1);
  begin_products();
  add_values<Number, kDim>(rows.out, weights, at.tile(at.v_tiles, at.n - 1));
  commit_products();
  wait_for_products<0>();
  pin(rows.out);
  release(&at.barriers.v.empty[at.stage(at.n - 1)]);
}

// True if a tile that others have pieces of was among the work.
template <typename Number, int kDim, bool kPlain>
__device__ __forceinline__ bool consume(Consumer& at, const PagedPrefill& p) {
  const int group = p.n_q / p.n_kv;
  bool has_pieces = false;
  // Someone has to begin.
  if (consumer_group() == 1) give_turn_to(0);
  Work work, next;
  bool has_work = find_work<kPlain>(work, p, 0), has_next;
  for (int round = 0; has_work; ++round, work = next, has_work = has_next) {
    // Read ahead: nobody waits for it then.
    has_next = find_work<kPlain>(next, p, round + 1);
    Rows<kDim> rows = {{}, {-INFINITY, -INFINITY}, {}};
    attend<Number, kDim, kPlain>(rows, at, round, p, work, group);
    if (work.tile.n_pieces == 1) {
      store<kDim, kPlain>(rows, p, work, group);
    } else {
      leave_piece<kDim, kPlain>(rows, p, work);
      announce_piece(ticket_of(p, work));
      has_pieces = true;
    }
  }
  return has_pieces;
}

// After all own work. Waiting is safe: every block of the grid has a multiprocessor, and none waits before its work is done.
template <int kDim, bool kPlain>
__device__ __forceinline__ void merge(const PagedPrefill& p) {
  Work work;
  for (int round = 0; find_work<kPlain>(work, p, round); ++round) {
    if (work.tile.n_pieces == 1) continue;
    wait_for_pieces(ticket_of(p, work), work.tile.n_pieces);
    merge_pieces<kDim, kPlain>(p, work, p.n_q / p.n_kv);
  }
}

struct Tiles {
  uint32_t q, k, v;  // their first stages
};

// The copy engine fetches all.
template <int kDim, bool kPlain>
__device__ __forceinline__ void produce(int producer, Barriers& barriers, const Tiles& tiles, const PagedPrefill& p, const TensorMap& q,
                                        const TensorMap& k, const TensorMap& v) {
  if (producer == 0) produce_tokens<kDim, kPlain>(barriers.k, k, tiles.k, p);
  if (producer == 1) produce_tokens<kDim, kPlain>(barriers.v, v, tiles.v, p);
  if (producer == 2 && threadIdx.x % kWarp == 0) produce_queries<kDim, kPlain>(barriers.q, q, tiles.q, p);
}

template <int kDim, bool kPlain>
__device__ __forceinline__ void produce(int producer, Barriers& barriers, const Tiles& tiles, const PagedPrefill& p, const TensorMap& q,
                                        const e4m3* k, const e4m3* v) {
  const bool is_k = producer < 2;
  auto begin_work = [&](const Work& work, int round) {
    if (threadIdx.x == kConsumers) bring_queries<kDim>(barriers.q, q, tiles.q, p, work, round);
    __syncwarp();
  };
  produce_tokens<kDim, kPlain>(is_k ? barriers.k : barriers.v, is_k ? k : v, is_k ? tiles.k : tiles.v, p, producer % 2, begin_work);
}

template <int kDim, bool kPlain, typename Tokens>
__device__ __forceinline__ void paged_prefill(const PagedPrefill& p, const TensorMap& q, const Tokens& k, const Tokens& v) {
  extern __shared__ uint8_t shared[];
  __shared__ Barriers barriers;
  constexpr uint32_t kStageBytes = kTileTokens<kDim> * kDim * 2;
  if (threadIdx.x == 0) {
    for (Pipe* pipe : {&barriers.q, &barriers.k, &barriers.v}) {
      const int n_producers = pipe == &barriers.q ? 1 : Roles<Tokens>::kTileProducers;
      for (int i = 0; i < kStages; ++i) init_barrier(&pipe->full[i], n_producers), init_barrier(&pipe->empty[i], kConsumerWarps);
    }
    publish_barriers();
  }
  __syncthreads();
  wait_for_earlier_kernels();
  let_next_kernel_start();
  // The swizzle is a function of the address: tiles begin at multiples of 1024 (the launch asks for the slack).
  const uint32_t q_tiles = (shared_address(shared) + 1023) & ~1023u, k_tiles = q_tiles + kQueryStages<kDim> * kTileRows * kDim * 2;
  const uint32_t v_tiles = k_tiles + kStages * kStageBytes;
  // From a lane, so that the compiler knows it for the same in the whole warp: products in a branch that might diverge
  // would be waited for one by one.
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarp, 0);
  if (warp >= kConsumerWarps) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(Roles<Tokens>::kProducerRegisters));
    produce<kDim, kPlain>(warp - kConsumerWarps, barriers, {q_tiles, k_tiles, v_tiles}, p, q, k, v);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(Roles<Tokens>::kConsumerRegisters));
    const uint64_t q_rows = tile_descriptor(q_tiles + consumer_group() * kGroupRows * kHalfRowBytes, 0, 1024);
    const uint64_t v_descriptor = tile_descriptor(v_tiles, kTileTokens<kDim> * kHalfRowBytes, 1024);
    Consumer at{barriers, q_rows, tile_descriptor(k_tiles, 0, 1024), v_descriptor, v_tiles, kStageBytes, 0};
    if (consume<typename Roles<Tokens>::Number, kDim, kPlain>(at, p)) merge<kDim, kPlain>(p);
  }
}

#else

template <int kDim, bool kPlain, typename Tokens>
__device__ __forceinline__ void paged_prefill(const PagedPrefill&, const TensorMap&, const Tokens&, const Tokens&) {}

#endif

}  // namespace stoker

#define PAGED_PREFILL_SM90(name, tokens_argument, tile_dim, plain)                                                    \
  extern "C" __global__ void __launch_bounds__(384, 1) name(                                                          \
      const __grid_constant__ stoker::TensorMap q, tokens_argument k, tokens_argument v, const float* kv_scales,      \
      stoker::bf16* out, const int32_t* block_table, const stoker::PrefillTile* tiles, float* partial_out,            \
      float2* partial_sum, uint32_t* tickets, int table_stride, int n_tiles, int n_q, int n_kv, float scale, int dim, \
      int window, float softcap) {                                                                                    \
    stoker::paged_prefill<tile_dim, plain>({out, kv_scales, block_table, tiles, partial_out, partial_sum, tickets,    \
                                            table_stride, n_tiles, n_q, n_kv, scale, {dim, window, softcap}},         \
                                           q, k, v);                                                                  \
  }
#define BOXES const __grid_constant__ stoker::TensorMap
#define CODES const stoker::e4m3*
PAGED_PREFILL_SM90(paged_prefill_sm90_d64, BOXES, 64, true)
PAGED_PREFILL_SM90(paged_prefill_sm90_d128, BOXES, 128, true)
PAGED_PREFILL_SM90(paged_prefill_sm90_any64, BOXES, 64, false)
PAGED_PREFILL_SM90(paged_prefill_sm90_any128, BOXES, 128, false)
PAGED_PREFILL_SM90(paged_prefill_sm90_any256, BOXES, 256, false)
PAGED_PREFILL_SM90(paged_prefill_sm90_e4m3_d64, CODES, 64, true)
PAGED_PREFILL_SM90(paged_prefill_sm90_e4m3_d128, CODES, 128, true)
PAGED_PREFILL_SM90(paged_prefill_sm90_e4m3_any64, CODES, 64, false)
PAGED_PREFILL_SM90(paged_prefill_sm90_e4m3_any128, CODES, 128, false)
PAGED_PREFILL_SM90(paged_prefill_sm90_e4m3_any256, CODES, 256, false)
