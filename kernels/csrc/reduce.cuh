// Sums over the ranks of a tensor-parallel group, row by row, in memory that all of them read and write. A block has a row; the same
// launches run on every rank in the same order. Ranks are added in their order in f32, so all of them get the same bits.
//
// Few rows are pushed: a rank writes its row into an inbox of every other one, with the number of the sum beside the values, and waits
// for the others' in its own. One way over the link, no fence. Beside every four bytes (words, the "LL" protocol of NCCL: a store of
// eight bytes is seen whole), or at the end of every 120 (lines, "LL128": NVLink hands over what a warp stores to a line of 128 bytes
// whole). There are two inboxes, taken in turn: who writes into one for the sum e + 2 has got everybody's row for e + 1, which they
// gave after they were done with e.
//
// More rows are pulled: a rank says that its rows are there, and reads the others' where they lie: half as many bytes. It does not
// overwrite them before the next sum is over, for which it has other memory. Where rows are many, ranks meet once, in a launch of
// their own: a fence for each row would cost as much as its bytes.
//
// Where nothing but a norm reads the residual stream, many rows are shared out (sequence parallelism, Korthikanti et al. 2022): a rank
// pulls its share of the rows, keeps their residual, and writes their norms to all ranks, who meet behind it. Of n ranks each takes in
// 2 (n - 1) / n of the rows in place of n - 1, or less where norms leave in e4m3.
//
// The number of a sum is counted on the device, a count for each row: recorded launches are replayed with the same arguments.
#pragma once
#include "norm.cuh"

namespace stoker {

constexpr int kRanksMax = 8;
// A rank that has not come by then is taken for lost: the kernel fails, and with it the engine.
constexpr uint64_t kPatienceNs = 5'000'000'000;
constexpr uint32_t kSpins = 4096;  // between two looks at the clock

// The same memory of each rank, by its address.
struct Ranks {
  uint4* at[kRanksMax];
};

struct Group {
  uint32_t* counts;  // sums so far, by row
  int rank, n_ranks;
  int max_rows;  // rows that the memory of a rank has room for

  // The place of a row in an inbox: two inboxes, in each the ranks that gave, of each its rows.
  __device__ __forceinline__ size_t place(uint32_t number, int from, uint32_t row) const {
    return (static_cast<size_t>(number & 1) * n_ranks + from) * max_rows + row;
  }
};

class Patience {
  uint64_t began_ = 0;
  uint32_t spins_ = 0;

 public:
  __device__ __forceinline__ void spin() {
    if (++spins_ % kSpins != 0) return;
    uint64_t now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    if (began_ == 0) began_ = now;
    if (now - began_ > kPatienceNs) __trap();
  }
};

// Past every cache that another rank's stores do not reach.
__device__ __forceinline__ uint4 load_fresh(const uint4* at) {
  uint4 v;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
  return v;
}

__device__ __forceinline__ void store_fresh(uint4* at, uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}

__device__ __forceinline__ void add_to(float (&sum)[8], const uint4& values) {
  float x[8];
  unpack(values, x);
#pragma unroll
  for (int e = 0; e < 8; ++e) sum[e] += x[e];
}

// The number of the sum that this block is for.
__device__ __forceinline__ uint32_t next_sum(const Group& group) { return group.counts[blockIdx.x] + 1; }

// By every thread of the block, when all of them know the number.
__device__ __forceinline__ void count_sum(const Group& group, uint32_t number) {
  __syncthreads();
  if (threadIdx.x == 0) group.counts[blockIdx.x] = number;
}

// Rows that are pushed in words. kVecs is of the block: vectors of 8 values that a thread has.
template <int kVecs>
struct PushedWords {
  const uint4* x;  // what this rank gives
  const Ranks& inboxes;
  Group group;
  uint4 own[kVecs];
  uint32_t number;

  // Two words of 16 bytes a vector.
  __device__ __forceinline__ uint4* slot(int of, int from, const Vectors& map) const {
    return inboxes.at[of] + group.place(number, from, blockIdx.x) * 2 * map.n_vecs;
  }

  __device__ __forceinline__ void give(const Vectors& map) {
    number = next_sum(group);
#pragma unroll
    for (int j = 0; j < kVecs; ++j) {
      if (map.has(j)) own[j] = map.load(map.own_row(x), j);
    }
    for (int p = 1; p < group.n_ranks; ++p) {
      uint4* to = slot((group.rank + p) % group.n_ranks, group.rank, map);
#pragma unroll
      for (int j = 0; j < kVecs; ++j) {
        if (!map.has(j)) break;
        store_fresh(to + 2 * map.at(j), own[j].x, number, own[j].y, number);
        store_fresh(to + 2 * map.at(j) + 1, own[j].z, number, own[j].w, number);
      }
    }
  }

  __device__ __forceinline__ uint4 received(const uint4* at) const {
    Patience patience;
    while (true) {
      const uint4 low = load_fresh(at), high = load_fresh(at + 1);
      if (low.y == number && low.w == number && high.y == number && high.w == number) return make_uint4(low.x, low.z, high.x, high.z);
      patience.spin();
    }
  }

  __device__ __forceinline__ void take(float (&value)[kVecs][8], const Vectors& map) {
    for (int rank = 0; rank < group.n_ranks; ++rank) {
      const uint4* from = slot(group.rank, rank, map);
#pragma unroll
      for (int j = 0; j < kVecs; ++j) {
        if (map.has(j)) add_to(value[j], rank == group.rank ? own[j] : received(from + 2 * map.at(j)));
      }
    }
    count_sum(group, number);
  }
};

// How lines share a row out: of each 8 neighbours, 7 have two units of 4 values, the last one has one and the number behind it.
struct Lines {
  static constexpr int kThreads = 8, kUnits = 15;
  int n_units;  // of the row

  __device__ __forceinline__ int slot(int j) const { return threadIdx.x + j * blockDim.x; }
  __device__ __forceinline__ int n_lines() const { return (n_units + kUnits - 1) / kUnits; }
  __device__ __forceinline__ bool in_line(int j) const { return slot(j) < n_lines() * kThreads; }
  __device__ __forceinline__ bool is_last(int j) const { return slot(j) % kThreads == kThreads - 1; }
  __device__ __forceinline__ int first(int j) const { return slot(j) / kThreads * kUnits + slot(j) % kThreads * 2; }
  __device__ __forceinline__ bool has(int j) const { return first(j) < n_units; }
  __device__ __forceinline__ bool has_both(int j) const { return !is_last(j) && first(j) + 1 < n_units; }
  __device__ __forceinline__ float width() const { return 4.f * n_units; }

  __device__ __forceinline__ uint4 load(const uint4* row, int j) const {
    const uint2* units = reinterpret_cast<const uint2*>(row) + first(j);
    const uint2 low = units[0], high = has_both(j) ? units[1] : make_uint2(0, 0);
    return make_uint4(low.x, low.y, high.x, high.y);
  }
  __device__ __forceinline__ void store(uint4* row, int j, const uint4& values) const {
    uint2* units = reinterpret_cast<uint2*>(row) + first(j);
    units[0] = make_uint2(values.x, values.y);
    if (has_both(j)) units[1] = make_uint2(values.z, values.w);
  }
  __device__ __forceinline__ void store_codes(uint2* row, int j, uint2 codes) const {
    uint32_t* units = reinterpret_cast<uint32_t*>(row) + first(j);
    units[0] = codes.x;
    if (has_both(j)) units[1] = codes.y;
  }
  template <typename T>
  __device__ __forceinline__ T* own_row(T* rows) const {
    return rows + static_cast<size_t>(blockIdx.x) * (n_units / 2);
  }
};

// Rows that are pushed in lines. Whole warps have slots.
template <int kSlots>
struct PushedLines {
  const uint4* x;
  const Ranks& inboxes;
  Group group;
  uint4 own[kSlots];
  uint32_t number;

  __device__ __forceinline__ uint4* lines(int of, int from, const Lines& map) const {
    return inboxes.at[of] + group.place(number, from, blockIdx.x) * map.n_lines() * Lines::kThreads;
  }

  __device__ __forceinline__ void give(const Lines& map) {
    number = next_sum(group);
#pragma unroll
    for (int j = 0; j < kSlots; ++j) own[j] = map.has(j) ? map.load(map.own_row(x), j) : make_uint4(0, 0, 0, 0);
    for (int p = 1; p < group.n_ranks; ++p) {
      uint4* to = lines((group.rank + p) % group.n_ranks, group.rank, map);
#pragma unroll
      for (int j = 0; j < kSlots; ++j) {
        const bool is_last = map.is_last(j);
        if (map.in_line(j)) store_fresh(to + map.slot(j), own[j].x, own[j].y, is_last ? number : own[j].z, is_last ? number : own[j].w);
      }
    }
  }

  __device__ __forceinline__ uint4 received(const uint4* from, const Lines& map, int j) const {
    Patience patience;
    while (true) {
      uint4 values = make_uint4(0, 0, 0, 0);
      bool is_missing = false;
      if (map.in_line(j)) {
        values = load_fresh(from + map.slot(j));
        is_missing = map.is_last(j) && values.z != number;
      }
      if (!__any_sync(~0u, is_missing)) {
        if (map.is_last(j)) values.z = values.w = 0;
        return values;
      }
      patience.spin();
    }
  }

  __device__ __forceinline__ void take(float (&value)[kSlots][8], const Lines& map) {
    for (int rank = 0; rank < group.n_ranks; ++rank) {
      const uint4* from = lines(group.rank, rank, map);
#pragma unroll
      for (int j = 0; j < kSlots; ++j) add_to(value[j], rank == group.rank ? own[j] : received(from, map, j));
    }
    count_sum(group, number);
  }
};

// Says to the others that what earlier kernels of this rank wrote is there, and waits until they have said so: by the block, for its
// own number among flags that lie rank by rank.
__device__ __forceinline__ void meet(const Ranks& flags, const Group& group, uint32_t number) {
  const int peer = threadIdx.x;
  if (peer < group.n_ranks && peer != group.rank) {
    uint32_t* theirs = reinterpret_cast<uint32_t*>(flags.at[peer]) + static_cast<size_t>(group.rank) * group.max_rows + blockIdx.x;
    const uint32_t* ours = reinterpret_cast<uint32_t*>(flags.at[group.rank]) + static_cast<size_t>(peer) * group.max_rows + blockIdx.x;
    __threadfence_system();
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(theirs), "r"(number) : "memory");
    Patience patience;
    while (true) {
      uint32_t said;
      asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(said) : "l"(ours) : "memory");
      // It may have gone on to the next one.
      if (static_cast<int32_t>(said - number) >= 0) break;
      patience.spin();
    }
  }
  count_sum(group, number);
}

// Rows that all ranks have said are there.
template <int kVecs>
struct Given {
  const Ranks& rows;
  int n_ranks;

  __device__ __forceinline__ void give(const Vectors&) {}

  __device__ __forceinline__ void take(float (&value)[kVecs][8], const Vectors& map) const {
    for (int rank = 0; rank < n_ranks; ++rank) {
      const uint4* row = map.own_row(rows.at[rank]);
#pragma unroll
      for (int j = 0; j < kVecs; ++j) {
        if (map.has(j)) add_to(value[j], load_fresh(row + map.at(j)));
      }
    }
  }
};

// Rows that are pulled.
template <int kVecs>
struct Pulled {
  Given<kVecs> rows;
  const Ranks& flags;
  Group group;
  bool have_met;

  __device__ __forceinline__ void give(const Vectors&) {}

  __device__ __forceinline__ void take(float (&value)[kVecs][8], const Vectors& map) {
    if (!have_met) meet(flags, group, next_sum(group));
    rows.take(value, map);
  }
};

// The same memory of all ranks, those behind this one first: so all links are busy.
struct Everywhere {
  const Ranks& ranks;
  int rank, n_ranks;

  template <typename F>
  __device__ __forceinline__ void each(F f) const {
    for (int p = 0; p < n_ranks; ++p) f(ranks.at[(rank + 1 + p) % n_ranks]);
  }
};

// Where norms of this rank's share of the rows leave.
struct RowsEverywhere {
  Everywhere out;
};
struct CodesEverywhere {
  Everywhere codes, scales;

  __device__ __forceinline__ void put_scale(float scale) const {
    scales.each([&](uint4* to) { reinterpret_cast<float*>(to)[blockIdx.x] = scale; });
  }
  template <typename Map>
  __device__ __forceinline__ void put(const Map& map, int j, uint2 values) const {
    codes.each([&](uint4* to) { map.store_codes(map.own_row(reinterpret_cast<uint2*>(to)), j, values); });
  }
};

template <int kVecs, typename Map>
__device__ __forceinline__ void store_row(const RowsEverywhere& rows, const float (&y)[kVecs][8], const Map& map, float*) {
  rows.out.each([&](uint4* to) {
#pragma unroll
    for (int j = 0; j < kVecs; ++j) {
      if (map.has(j)) map.store(map.own_row(to), j, pack(y[j]));
    }
  });
}

template <int kVecs, typename Map>
__device__ __forceinline__ void store_row(const CodesEverywhere& rows, const float (&y)[kVecs][8], const Map& map, float* scratch) {
  quantise_row(rows, y, map, scratch);
}

// The residual of this rank's share of the rows; copied to where what was added up had lain, on all ranks, if they want it.
struct SharedResidual : Residual {
  Everywhere copies;
  bool is_copied;

  template <typename Map>
  __device__ __forceinline__ void store(const Map& map, int j, const uint4& values) const {
    Residual::store(map, j, values);
    if (is_copied) copies.each([&](uint4* to) { map.store(map.own_row(to), j, values); });
  }
};

}  // namespace stoker
