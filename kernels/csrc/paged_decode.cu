// Attention of one query token a sequence over its paged KV, split over the context (flash decoding).
//
//   out[b][h] = softmax(q[b][h] . K[b][h/G]^T * scale) V[b][h/G]      G = n_q / n_kv query heads share a KV head
//
// Layout: q is batch rows of q_stride elements, heads of D from the row's start (the fused QKV row); out is batch x n_q x
// D; caches are blocks x n_kv x 16 x D; the block table is batch x table_stride i32. G is at most 16. Two kernels are for heads of 64
// and 128 and nothing else; three for any width up to 64, 128 or 256, with a window and a soft-cap if the layer has them: blocks
// outside a window are not read. Each is there twice: for a cache of bf16, and for one of e4m3 with a scale for each KV head's keys and
// one for its values, which are multiplied into the scores and into the result; before that one queries are f16.
// The host plans items (plan/decode.rs): a piece [begin, end) of what one sequence reads, or several whose block tables begin
// alike: what they share, then what each reads alone, each from a block on; begin is a multiple of 16. One thread block
// takes one KV head and one item, or every gridDim.y-th. Surplus items, the last ones, have sequence -1: a captured graph
// keeps its grid.
// The G queries of a KV head, of one reader behind the other, are the rows of a 16-row tensor-core tile, so KV is read once
// for all of them; a block that one reader reads alone leaves the others' rows as they are. Each of the 4 warps (2 beyond D = 128)
// has its own ring of 3 stages in shared memory and takes every 4th KV block:
//
//       warp w: blocks w, w+4, w+8, ...     stage = one KV block of K and V (8 KiB at D = 128 in bf16), filled by cp.async
//
// so warps never wait for each other until the end, and 4 x 3 x 8 KiB = 96 KiB are in flight a thread block (two fit a
// multiprocessor). Of e4m3 there is as much to compute for half the bytes: three thread blocks of 4 stages, 64 KiB each, hide it better. Warps' results are merged through shared memory; pieces of a sequence are merged by whichever thread
// block finishes last, in the order of the pieces: the result does not depend on timing.
// Bound by memory, 4 B * D * n_kv a context token: 4.25 to 4.56 TB/s from 128 sequences of 1024 tokens (a copy moves 4.24), 3.8
// at 32; 1 x 1024 is latency, 6.7 us.
#include <climits>

#include "attention.cuh"
#include "e4m3.cuh"

namespace stoker {

constexpr int kRows = 16;
// What a row's weights are relative to rises only if a score is above it by this many powers of two: sums are scaled seldom. By the row
// itself, so that what others of its tile have changes nothing; their branch is only shared.
constexpr float kSlack = 4.f;
template <typename Cached>
constexpr int kStages = sizeof(Cached) == 1 ? 4 : 3;
// Of threads that a multiprocessor has at once.
template <typename Cached>
constexpr int kBlocks = sizeof(Cached) == 1 ? 3 : 2;
// As many as leave room for these blocks on a multiprocessor.
template <int kDim>
constexpr int kWarps = kDim > 128 ? 2 : 4;

// The same fields as `DecodeItem` in plan/decode.rs.
struct alignas(16) DecodeItem {
  int32_t sequence, begin, end;     // row of the first reader; -1: nothing to do
  int32_t n_shared;                 // tokens at the front of what is read that are all readers'; of a single one, all
  int32_t first_item, n_items;      // all pieces of these readers, this one included
  int16_t first_reader, n_readers;  // at most 16 / G
  int32_t n_settled;                // tokens at the front of what is read that no kernel of this step writes
};

// The same fields as `DecodeReader` in plan/decode.rs: a sequence, and where the tokens lie that it reads alone.
struct DecodeReader {
  int32_t sequence, begin, end;
};
static_assert(sizeof(DecodeItem) == 32 && sizeof(DecodeReader) == 12, "as the plan has them");

template <typename Cached>
struct PagedDecode {
  bf16* out;
  const bf16* q;
  const Cached* k_cache;
  const Cached* v_cache;
  const float* kv_scales;  // of e4m3: of each KV head's keys, then of its values
  const int32_t* block_table;
  const DecodeItem* items;
  const DecodeReader* readers;
  float* partial_out;   // items x n_kv x slot_rows x D, only pieces of split contexts
  float2* partial_sum;  // items x n_kv x slot_rows: maximum and sum of exponentials
  uint32_t* tickets;    // one a sequence and KV head; zero before and after
  int n_items, slot_rows, q_stride, table_stride, n_kv, group;
  float scale;
  AttentionExtras extras;
};

// Columns of a head: known to the compiler in a plain kernel.
template <typename Cached, int kDim, bool kPlain>
__device__ __forceinline__ int width(const PagedDecode<Cached>& p) {
  return kPlain ? kDim : p.extras.dim;
}

template <int kDim>
struct Softmax {
  float out[kDim / 8][4];           // rows g and g+8 of out, columns 8j + 2t and the next
  float maximum[2], sum[2];         // rows g and g+8, in units of log2; the lane's share of the sum
};

// Where a piece of 16 bytes of a row lies in a tile. Of e4m3 a row of 64 takes half a line of all banks.
template <int kDim>
__device__ __forceinline__ uint32_t place(int row, int piece, const bf16*) {
  return swizzled<kDim>(row, piece);
}

template <int kDim>
__device__ __forceinline__ uint32_t place(int row, int piece, const e4m3*) {
  return row * kDim + ((piece ^ (kDim == 64 ? row / 2 & 3 : row & 7)) * 16);
}

// What a lane copies of a block of K and of V, the same of each.
template <typename Cached, int kDim>
struct Lane {
  static constexpr int kPieceValues = 16 / sizeof(Cached), kPieces = kDim / kPieceValues, kRowsAtOnce = kWarp / kPieces;
  int row;         // the first of its rows
  bool has_piece;  // a narrower head ends before it
  uint32_t source, first_target;

  __device__ __forceinline__ explicit Lane(int dim) {
    const int lane = threadIdx.x % kWarp, piece = lane % kPieces;
    row = lane / kPieces, has_piece = piece * kPieceValues < dim;
    source = row * dim + piece * kPieceValues;
    first_target = place<kDim>(row, piece, static_cast<const Cached*>(nullptr));
    // Kept, not computed again for each block: that would be a fifth of all instructions.
    asm volatile("" : "+r"(row), "+r"(source), "+r"(first_target));
  }

  // Rows i * kRowsAtOnce behind the first one: the swizzle's part of the address changes by what they are xored with.
  __device__ __forceinline__ uint32_t target(int i) const {
    return (first_target ^ place<kDim>(i * kRowsAtOnce, 0, static_cast<const Cached*>(nullptr)) % kRowBytes) + i * kRowsAtOnce * kRowBytes;
  }
  static constexpr uint32_t kRowBytes = kDim * sizeof(Cached);

  __device__ __forceinline__ void load_block(uint32_t stage, const Cached* k, const Cached* v, int n_tokens, int dim) const {
#pragma unroll
    for (int i = 0; i < kBlockSize / kRowsAtOnce; ++i) {
      // Slots past the end were never written. Zeros, because 0 * NaN would reach the output.
      const bool present = row + i * kRowsAtOnce < n_tokens && has_piece;
      copy_async(stage + target(i), k + source + i * kRowsAtOnce * dim, present);
      copy_async(stage + kBlockSize * kRowBytes + target(i), v + source + i * kRowsAtOnce * dim, present);
    }
  }
};

// Whose a row of the tile is: row / group. Both are at most 16, so this is exact, and takes a tenth of an integer division's
// time.
template <typename Cached>
__device__ __forceinline__ int reader_of(const PagedDecode<Cached>& p, int row) {
  return static_cast<int>(__fdividef(row + 0.5f, static_cast<float>(p.group)));
}

// What a lane knows of an item's readers: lane l has reader l, and whose the rows g and g+8 of its fragments are.
struct Readers {
  DecodeReader own;
  int of_row[2];
  int seen_from;         // first token in the window of reader l; below 0 too
  int row_seen_from[2];  // the same of the rows' readers
};

template <bool kPlain, typename Cached>
__device__ __forceinline__ Readers find_readers(const PagedDecode<Cached>& p, const DecodeItem& item) {
  const int lane = threadIdx.x % kWarp, g = lane / 4;
  Readers readers = {{item.sequence, 0, 0}, {reader_of(p, g), reader_of(p, g + 8)}, 0, {}};
  if (item.n_readers > 1 && lane < item.n_readers) readers.own = p.readers[item.first_reader + lane];
  if constexpr (kPlain) return readers;
  readers.seen_from = item.n_shared + readers.own.end - readers.own.begin - p.extras.window;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    readers.row_seen_from[half] = __shfl_sync(~0u, readers.seen_from, readers.of_row[half]);
  }
  return readers;
}

// Where an item begins that looks back a window only. Of what several share, where the first of them begins to look.
__device__ __forceinline__ int begin_of_window(const DecodeItem& item, const Readers& readers) {
  const bool is_reader = threadIdx.x % kWarp < item.n_readers;
  const int seen_from = __reduce_min_sync(~0u, is_reader ? readers.seen_from : INT_MAX);
  return max(item.begin, min(seen_from & -kBlockSize, item.n_shared & -kBlockSize));
}

// A KV block of an item: its id, and packed how many of its tokens are read, 0 if a window ends before it, and by whom.
struct Block {
  static constexpr int kEveryone = 31;
  int id, reads;
};

// The KV block that begins at token `at` of what is read; each lane asks for one of its own.
template <bool kPlain, typename Cached>
__device__ __forceinline__ Block find_block(const PagedDecode<Cached>& p, const DecodeItem& item, const Readers& readers, int at) {
  int sequence = item.sequence, token = at, end = item.end, reader = Block::kEveryone, seen_from = INT_MIN;
  if (item.n_readers > 1) {
    for (int i = 0; i < item.n_readers; ++i) {
      const int begin = __shfl_sync(~0u, readers.own.begin, i), own_end = __shfl_sync(~0u, readers.own.end, i);
      const int own_sequence = __shfl_sync(~0u, readers.own.sequence, i);
      const int own_seen_from = kPlain ? INT_MIN : __shfl_sync(~0u, readers.seen_from, i);
      if (at < begin) continue;
      reader = i, sequence = own_sequence, token = item.n_shared + at - begin, end = own_end, seen_from = own_seen_from;
    }
  }
  const bool is_seen = kPlain || token + kBlockSize > seen_from;
  Block block = {0, (is_seen ? min(end - at, kBlockSize) : 0) * 32 + reader};
  if (at < item.end) block.id = p.block_table[static_cast<size_t>(sequence) * p.table_stride + token / kBlockSize];
  return block;
}

// Columns of a lane's query values, two of which follow each other: of k 2t and of k 2t+8 of a step's products. Of keys of bf16 as
// the manual has them. Of e4m3 a lane reads 16 columns of a row of keys at once, which are its four of four steps: q follows, as
// sums over columns may have any order.
template <int kDim>
__device__ __forceinline__ int query_column(int step, int half, const bf16*) {
  return step * 16 + 2 * (threadIdx.x % 4) + 8 * half;
}

// Which 16 columns the lane reads for the `chunk`-th time: eight lanes of two rows read eight groups of banks.
template <int kDim>
__device__ __forceinline__ int key_piece(int chunk) {
  const int t = threadIdx.x % 4;
  return kDim == 64 ? t : chunk / 2 * 8 + 2 * t + chunk % 2;
}

template <int kDim>
__device__ __forceinline__ int query_column(int step, int half, const e4m3*) {
  return key_piece<kDim>(step / 4) * 16 + step % 4 * 4 + 2 * half;
}

// Query rows g and g+8 as A fragments; rows past the last reader's are zero.
template <typename Cached, int kDim, bool kPlain>
__device__ __forceinline__ void load_queries(uint32_t (&q)[kDim / 16][4], const PagedDecode<Cached>& p, const DecodeItem& item,
                                             const Readers& readers, int kv_head) {
  const int g = threadIdx.x % kWarp / 4;
  const bf16* rows[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int reader = readers.of_row[half], head = (kv_head - reader) * p.group + g + 8 * half;
    const size_t sequence = __shfl_sync(~0u, readers.own.sequence, reader);
    rows[half] = reader < item.n_readers ? p.q + sequence * p.q_stride + head * width<Cached, kDim, kPlain>(p) : nullptr;
  }
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int column = query_column<kDim>(step, i / 2, p.k_cache);
      const bool present = rows[i % 2] && column < width<Cached, kDim, kPlain>(p);
      q[step][i] = present ? *reinterpret_cast<const uint32_t*>(rows[i % 2] + column) : 0u;
    }
  }
}

// Scores of 16 tokens against 16 query rows: tokens 8j + 2t and the next in score[j].
template <int kDim>
__device__ __forceinline__ void score_block(float (&score)[2][4], const uint32_t (&q)[kDim / 16][4], uint32_t k_tile, const bf16*) {
  const int lane = threadIdx.x % kWarp, matrix = lane / 8, row = lane % 8;
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    uint32_t k[4];
    ldmatrix(k, k_tile + swizzled<kDim>(matrix / 2 * 8 + row, step * 2 + matrix % 2));
    mma(score[0], q[step][0], q[step][1], q[step][2], q[step][3], k[0], k[1]);
    mma(score[1], q[step][0], q[step][1], q[step][2], q[step][3], k[2], k[3]);
  }
}

template <int kDim>
__device__ __forceinline__ void score_block(float (&score)[2][4], const uint32_t (&q)[kDim / 16][4], uint32_t k_tile, const e4m3* cache) {
  const int g = threadIdx.x % kWarp / 4;
#pragma unroll
  for (int chunk = 0; chunk < kDim / 64; ++chunk) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      uint32_t k[4];
      load_shared(k, k_tile + place<kDim>(8 * j + g, key_piece<kDim>(chunk), cache));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t(&a)[4] = q[4 * chunk + i];
        mma_f16(score[j], a[0], a[1], a[2], a[3], pair_of_f16(k[i]), pair_of_f16(k[i] >> 16));
      }
    }
  }
}

// What rows g and g+8 read of a KV block: tokens from..end. A block that nobody else reads changes no row but its reader's.
struct Seen {
  int from[2], end[2];
  bool is_owned;
};

// Adds a product to columns of the result. `kOwned`: rows that read nothing keep what they have. Their weights are 0, but 0 * NaN is
// NaN, and the values are another sequence's.
template <bool kOwned, typename Product>
__device__ __forceinline__ void add_product(float (&target)[4], const Seen& seen, const Product& product) {
  float sum[4] = {target[0], target[1], target[2], target[3]};
  product(sum);
#pragma unroll
  for (int i = 0; i < 4; ++i) target[i] = !kOwned || seen.end[i / 2] > 0 ? sum[i] : target[i];
}

template <int kDim, bool kOwned>
__device__ __forceinline__ void add_values(float (&out)[kDim / 8][4], const float (&p)[2][4], uint32_t v_tile,
                                           const Seen& seen, const bf16*) {
  const int lane = threadIdx.x % kWarp, matrix = lane / 8, row = lane % 8;
  const uint32_t a0 = pack(p[0][0], p[0][1]), a1 = pack(p[0][2], p[0][3]);
  const uint32_t a2 = pack(p[1][0], p[1][1]), a3 = pack(p[1][2], p[1][3]);
#pragma unroll
  for (int pair = 0; pair < kDim / 16; ++pair) {
    uint32_t v[4];
    ldmatrix_transposed(v, v_tile + swizzled<kDim>(matrix % 2 * 8 + row, pair * 2 + matrix / 2));
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      add_product<kOwned>(out[pair * 2 + j], seen, [&](float(&sum)[4]) { mma(sum, a0, a1, a2, a3, v[2 * j], v[2 * j + 1]); });
    }
  }
}

// Transposed by pairs of bytes: a lane has columns 2g and 2g+1 of tokens 2t and 2t+1, and 8 tokens further. Even columns are a
// product, odd ones another.
template <int kDim, bool kOwned>
__device__ __forceinline__ void add_values(float (&out)[kDim / 8][4], const float (&p)[2][4], uint32_t v_tile,
                                           const Seen& seen, const e4m3* cache) {
  const int lane = threadIdx.x % kWarp, matrix = lane / 8, row = lane % 8;
  const uint32_t a0 = pack_as<__half>(p[0][0], p[0][1]), a1 = pack_as<__half>(p[0][2], p[0][3]);
  const uint32_t a2 = pack_as<__half>(p[1][0], p[1][1]), a3 = pack_as<__half>(p[1][2], p[1][3]);
#pragma unroll
  for (int pieces = 0; pieces < kDim / 16; pieces += 2) {
    uint32_t v[4];
    ldmatrix_transposed(v, v_tile + place<kDim>(matrix % 2 * 8 + row, pieces + matrix / 2, cache));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      // By column: even of both tokens, then odd.
      const uint32_t first = __byte_perm(v[2 * i], 0, 0x3120), second = __byte_perm(v[2 * i + 1], 0, 0x3120);
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const uint32_t b0 = pair_of_f16(first >> 16 * odd), b1 = pair_of_f16(second >> 16 * odd);
        add_product<kOwned>(out[2 * (pieces + i) + odd], seen, [&](float(&sum)[4]) { mma_f16(sum, a0, a1, a2, a3, b0, b1); });
      }
    }
  }
}

// The column of a value of out.
__device__ __forceinline__ int out_column(int j, int i, const bf16*) { return 8 * j + 2 * (threadIdx.x % 4) + i % 2; }
__device__ __forceinline__ int out_column(int j, int i, const e4m3*) {
  return j / 2 * 16 + 4 * (threadIdx.x % 4) + 2 * (i % 2) + j % 2;
}

// One KV block into the running softmax. Tokens that rows g and g+8 do not see get no weight.
template <typename Cached, int kDim, bool kPlain>
__device__ __forceinline__ void attend_block(Softmax<kDim>& state, const uint32_t (&q)[kDim / 16][4], uint32_t stage,
                                             const Seen& seen, float scale, float softcap) {
  const int t = threadIdx.x % 4;
  float score[2][4] = {};
  constexpr const Cached* kCache = nullptr;
  score_block<kDim>(score, q, stage, kCache);
  float highest[2] = {-INFINITY, -INFINITY};
#pragma unroll
  for (int j = 0; j < 2; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = 8 * j + 2 * t + i % 2;
      const bool present = token < seen.end[i / 2] && (kPlain || token >= seen.from[i / 2]);
      if (!kPlain && softcap > 0.f) score[j][i] = soft_capped(score[j][i] * scale, softcap);
      score[j][i] = present ? score[j][i] : -INFINITY;
      highest[i / 2] = fmaxf(highest[i / 2], score[j][i]);
    }
  }
  const float factor = !kPlain && softcap > 0.f ? 1.f : scale;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float seen_highest = quad_max(highest[half]) * factor;
    const bool rises = seen_highest > state.maximum[half] + kSlack;
    const float maximum = rises ? seen_highest : state.maximum[half];
    if (__any_sync(~0u, rises)) {
      const float keep = rises ? weight_of(state.maximum[half], maximum) : 1.f;
      state.maximum[half] = maximum, state.sum[half] *= keep;
#pragma unroll
      for (int j = 0; j < kDim / 8; ++j) state.out[j][2 * half] *= keep, state.out[j][2 * half + 1] *= keep;
    }
    // Of a row that has seen nothing yet: no weights, not NaN.
    const float offset = maximum == -INFINITY ? 0.f : maximum;
    float sum = 0.f;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int i = 2 * half; i < 2 * half + 2; ++i) sum += score[j][i] = power_of_two(score[j][i] * factor - offset);
    }
    state.sum[half] += sum;
  }
  const uint32_t v_tile = stage + kBlockSize * kDim * sizeof(Cached);
  if (seen.is_owned) {
    add_values<kDim, true>(state.out, score, v_tile, seen, kCache);
  } else {
    add_values<kDim, false>(state.out, score, v_tile, seen, kCache);
  }
}

// What the lane's rows see of the block that begins at token `at` of what is read.
template <bool kPlain>
__device__ __forceinline__ Seen find_seen(const DecodeItem& item, const Readers& readers, int reads, int at) {
  const int reader = reads & 31;
  Seen seen = {{0, 0}, {}, reader != Block::kEveryone};
  int token = at;
  if (!kPlain && seen.is_owned) token += item.n_shared - __shfl_sync(~0u, readers.own.begin, reader);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    seen.end[half] = !seen.is_owned || reader == readers.of_row[half] ? reads >> 5 : 0;
    if (!kPlain) seen.from[half] = readers.row_seen_from[half] - token;
  }
  return seen;
}

// What scores are multiplied by, in units of log2, and what the sums of values are.
template <typename Cached>
__device__ __forceinline__ float score_scale(const PagedDecode<Cached>& p, int kv_head) {
  return p.scale * kLog2e * (sizeof(Cached) == 1 ? p.kv_scales[kv_head] : 1.f);
}

template <typename Cached>
__device__ __forceinline__ float value_scale(const PagedDecode<Cached>& p, int kv_head) {
  return sizeof(Cached) == 1 ? p.kv_scales[p.n_kv + kv_head] : 1.f;
}

// All KV blocks of this warp, prefetching kStages - 1 ahead.
template <typename Cached, int kDim, bool kPlain>
__device__ __forceinline__ void attend_piece(Softmax<kDim>& state, const PagedDecode<Cached>& p, const DecodeItem& item,
                                             int kv_head, uint32_t ring) {
  constexpr uint32_t kStageBytes = 2 * kBlockSize * kDim * sizeof(Cached);
  constexpr int kRing = kStages<Cached>;
  const float scale = score_scale(p, kv_head);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const Readers readers = find_readers<kPlain>(p, item);
  const int begin = kPlain ? item.begin : begin_of_window(item, readers);
  const int n_blocks = (item.end - begin + kBlockSize - 1) / kBlockSize;
  const int n_mine = (n_blocks - warp + kWarps<kDim> - 1) / kWarps<kDim>, dim = width<Cached, kDim, kPlain>(p);
  const Lane<Cached, kDim> own(dim);
  auto block_begin = [&](int i) { return begin + (i * kWarps<kDim> + warp) * kBlockSize; };
  // Lane l holds this warp's l-th block of the next 32: the copies never wait for the table.
  Block blocks = {};
  auto request = [&](int i) {
    if (i % kWarp == 0) blocks = find_block<kPlain>(p, item, readers, block_begin(i + lane));
    const Block block = {__shfl_sync(~0u, blocks.id, i % kWarp), __shfl_sync(~0u, blocks.reads, i % kWarp)};
    if (i < n_mine) {
      const size_t at = (static_cast<size_t>(block.id) * p.n_kv + kv_head) * kBlockSize * dim;
      own.load_block(ring + i % kRing * kStageBytes, p.k_cache + at, p.v_cache + at, block.reads >> 5, dim);
    }
    commit_copies();
    return block.reads;
  };
  // What is read of those that are on their way, oldest first. What earlier steps wrote comes while the kernel in front still runs.
  int next[kRing - 1];
#pragma unroll
  for (int i = 0; i < kRing - 1; ++i) {
    if (block_begin(i) + kBlockSize > item.n_settled) wait_for_earlier_kernels();
    next[i] = request(i);
  }
  wait_for_earlier_kernels();
  uint32_t q[kDim / 16][4];
  load_queries<Cached, kDim, kPlain>(q, p, item, readers, kv_head);
  for (int i = 0; i < n_mine; ++i) {
    wait_for_copies<kRing - 2>();
    __syncwarp();
    const int reads = next[0];
#pragma unroll
    for (int stage = 1; stage < kRing - 1; ++stage) next[stage - 1] = next[stage];
    // Fills the stage that the previous round has read; all lanes are past it.
    next[kRing - 2] = request(i + kRing - 1);
    if (!kPlain && reads >> 5 == 0) continue;
    const Seen seen = find_seen<kPlain>(item, readers, reads, block_begin(i));
    const uint32_t stage = ring + i % kRing * kStageBytes;
    attend_block<Cached, kDim, kPlain>(state, q, stage, seen, scale, p.extras.softcap * kLog2e);
  }
  wait_for_copies<0>();
}

// What the warps leave for the merge; it lies over the rings once all of them are read.
template <int kDim>
struct WarpResults {
  float out[kWarps<kDim>][kRows][kDim];
  float maximum[kWarps<kDim>][kRows], sum[kWarps<kDim>][kRows];
};

template <typename Cached, int kDim>
__device__ __forceinline__ void leave_result(WarpResults<kDim>& results, const Softmax<kDim>& state, float value_scale) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int j = 0; j < kDim / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      results.out[warp][g + 8 * (i / 2)][out_column(j, i, static_cast<const Cached*>(nullptr))] = state.out[j][i] * value_scale;
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float sum = quad_sum(state.sum[half]);
    if (t == 0) results.maximum[warp][g + 8 * half] = state.maximum[half], results.sum[warp][g + 8 * half] = sum;
  }
}

// Where a row of the tile goes, its first reader's head 0 being row 0.
template <typename Cached>
__device__ __forceinline__ bf16* output_row(const PagedDecode<Cached>& p, const DecodeItem& item, int kv_head, int row, int dim) {
  int sequence = item.sequence, reader = 0;
  if (item.n_readers > 1) reader = reader_of(p, row), sequence = p.readers[item.first_reader + reader].sequence;
  return p.out + (static_cast<size_t>(sequence) * p.n_kv * p.group + (kv_head - reader) * p.group + row) * dim;
}

// The last thread block of a split context adds up the pieces, first to last. Four columns a thread and eight pieces at a
// time: what a merge costs is the number of loads that wait for each other.
template <typename Cached, int kDim, bool kPlain>
__device__ __forceinline__ void merge_pieces(const PagedDecode<Cached>& p, const DecodeItem& item, int kv_head) {
  constexpr int kAtOnce = 8;
  const int n_rows = item.n_readers * p.group, dim = width<Cached, kDim, kPlain>(p);
  const size_t first = (static_cast<size_t>(item.first_item) * p.n_kv + kv_head) * p.slot_rows;
  const size_t next = static_cast<size_t>(p.n_kv) * p.slot_rows;
  for (int at = 4 * threadIdx.x; at < n_rows * dim; at += 4 * blockDim.x) {
    bf16* out = output_row(p, item, kv_head, at / dim, dim);
    const float2* sums = p.partial_sum + first + at / dim;
    const float* outs = p.partial_out + first * dim + at;
    float maximum = -INFINITY, sum = 0.f;
    float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
    for (int base = 0; base < item.n_items; base += kAtOnce) {
      float2 piece[kAtOnce];
      float4 value[kAtOnce];
      float highest = maximum;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const bool present = base + i < item.n_items;
        const size_t offset = (base + i) * next;
        piece[i] = present ? __ldcg(sums + offset) : make_float2(-INFINITY, 0.f);
        value[i] = present ? __ldcg(reinterpret_cast<const float4*>(outs + offset * dim)) : total;
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) highest = fmaxf(highest, piece[i].x);
      const float keep = weight_of(maximum, highest);
      maximum = highest, sum *= keep;
      total.x *= keep, total.y *= keep, total.z *= keep, total.w *= keep;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const float share = weight_of(piece[i].x, maximum);
        sum += share * piece[i].y;
        total.x += share * value[i].x, total.y += share * value[i].y;
        total.z += share * value[i].z, total.w += share * value[i].w;
      }
    }
    *reinterpret_cast<uint2*>(out + at % dim) = make_uint2(pack(total.x / sum, total.y / sum), pack(total.z / sum, total.w / sum));
  }
}

template <typename Cached, int kDim, bool kPlain>
__device__ __forceinline__ void merge_warps(const PagedDecode<Cached>& p, const DecodeItem& item, int item_idx, int kv_head,
                                            const WarpResults<kDim>& results) {
  const int n_rows = item.n_readers * p.group, dim = width<Cached, kDim, kPlain>(p);
  const size_t slot = (static_cast<size_t>(item_idx) * p.n_kv + kv_head) * p.slot_rows;
  for (int at = threadIdx.x; at < n_rows * dim; at += blockDim.x) {
    const int row = at / dim, column = at % dim;
    float maximum = -INFINITY, total = 0.f, sum = 0.f;
#pragma unroll
    for (int w = 0; w < kWarps<kDim>; ++w) maximum = fmaxf(maximum, results.maximum[w][row]);
#pragma unroll
    for (int w = 0; w < kWarps<kDim>; ++w) {
      const float share = weight_of(results.maximum[w][row], maximum);
      total += share * results.out[w][row][column], sum += share * results.sum[w][row];
    }
    if (item.n_items == 1) {
      output_row(p, item, kv_head, row, dim)[column] = __float2bfloat16_rn(total / sum);
    } else {
      p.partial_out[slot * dim + at] = total;
      if (column == 0) p.partial_sum[slot + row] = make_float2(maximum, sum);
    }
  }
}

// True in the thread block that took the last of a context's tickets; it also puts the counter back to zero.
__device__ __forceinline__ bool is_last_piece(uint32_t* ticket, int n_items) {
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(ticket, 1u) == static_cast<uint32_t>(n_items) - 1;
    if (last) *ticket = 0;
  }
  __syncthreads();
  __threadfence();
  return last;
}

template <typename Cached, int kDim, bool kPlain>
__device__ __forceinline__ void attend_item(const PagedDecode<Cached>& p, const DecodeItem& item, int item_idx) {
  extern __shared__ __align__(128) uint8_t shared[];
  constexpr uint32_t kRingBytes = kStages<Cached> * 2 * kBlockSize * kDim * sizeof(Cached);
  static_assert(sizeof(WarpResults<kDim>) <= kWarps<kDim> * kRingBytes, "the merge must fit over the rings");
  const int kv_head = blockIdx.x;
  Softmax<kDim> state = {{}, {-INFINITY, -INFINITY}, {0.f, 0.f}};
  attend_piece<Cached, kDim, kPlain>(state, p, item, kv_head, shared_address(shared) + threadIdx.x / kWarp * kRingBytes);
  __syncthreads();
  auto& results = *reinterpret_cast<WarpResults<kDim>*>(shared);
  leave_result<Cached, kDim>(results, state, value_scale(p, kv_head));
  __syncthreads();
  merge_warps<Cached, kDim, kPlain>(p, item, item_idx, kv_head, results);
  if (item.n_items == 1) return;
  if (is_last_piece(p.tickets + static_cast<size_t>(item.sequence) * p.n_kv + kv_head, item.n_items)) {
    merge_pieces<Cached, kDim, kPlain>(p, item, kv_head);
  }
}

template <typename Cached, int kDim, bool kPlain>
__device__ __forceinline__ void paged_decode(const PagedDecode<Cached>& p) {
  let_next_kernel_start();
  for (int at = blockIdx.y; at < p.n_items; at += gridDim.y) {
    // Items, readers and block table came with the step's inputs, before its first kernel.
    const DecodeItem item = p.items[at];
    // Surplus items are the last ones.
    if (item.sequence < 0) break;
    attend_item<Cached, kDim, kPlain>(p, item, at);
    // The next item's copies go over this one's results.
    __syncthreads();
  }
  // Of a block without items, too: this kernel has not ended before the earlier ones have.
  wait_for_earlier_kernels();
}

}  // namespace stoker

#define PAGED_DECODE(name, Cached, tile_dim, plain)                                                                  \
  extern "C" __global__ void __launch_bounds__(stoker::kWarps<tile_dim> * stoker::kWarp, stoker::kBlocks<stoker::Cached>) name( \
      stoker::bf16* out, const stoker::bf16* q, const stoker::Cached* k_cache, const stoker::Cached* v_cache,       \
      const float* kv_scales, const int32_t* block_table, const stoker::DecodeItem* items,                          \
      const stoker::DecodeReader* readers, float* partial_out, float2* partial_sum, uint32_t* tickets, int n_items, \
      int slot_rows, int q_stride, int table_stride, int n_kv, int group, float scale, int dim, int window,         \
      float softcap) {                                                                                              \
    stoker::paged_decode<stoker::Cached, tile_dim, plain>(                                                          \
        {out, q, k_cache, v_cache, kv_scales, block_table, items, readers, partial_out, partial_sum, tickets,       \
         n_items, slot_rows, q_stride, table_stride, n_kv, group, scale, {dim, window, softcap}});                  \
  }
PAGED_DECODE(paged_decode_d64, bf16, 64, true)
PAGED_DECODE(paged_decode_d128, bf16, 128, true)
PAGED_DECODE(paged_decode_any64, bf16, 64, false)
PAGED_DECODE(paged_decode_any128, bf16, 128, false)
PAGED_DECODE(paged_decode_any256, bf16, 256, false)
PAGED_DECODE(paged_decode_e4m3_d64, e4m3, 64, true)
PAGED_DECODE(paged_decode_e4m3_d128, e4m3, 128, true)
PAGED_DECODE(paged_decode_e4m3_any64, e4m3, 64, false)
PAGED_DECODE(paged_decode_e4m3_any128, e4m3, 128, false)
PAGED_DECODE(paged_decode_e4m3_any256, e4m3, 256, false)
