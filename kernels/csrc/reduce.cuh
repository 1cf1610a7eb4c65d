// Sums over the ranks of a tensor-parallel group, row by row, in memory that all of them read and write. A block has a row; the same
// launches run on every rank in the same order. Ranks are added in their order in f32, so all of them get the same bits.
//
// Few rows are pushed: a rank writes its row into an inbox of every other one, each eight bytes of values with the number of the sum
// beside them (the "LL" protocol of NCCL: a store of 8 bytes is seen whole), and waits for the others' in its own. One way over the
// link, no fence. There are two inboxes, taken in turn: who writes into one for the sum e + 2 has got everybody's row for e + 1, which
// they gave after they were done with e.
//
// More rows are pulled: a rank says that its rows are there, and reads the others' where they lie: half as many bytes. It does not
// overwrite them before the next sum is over, for which it has other memory. Where rows are many, ranks meet once, in a launch of
// their own: a fence for each row would cost as much as its bytes.
//
// The number of a sum is counted on the device, a count for each row: recorded launches are replayed with the same arguments.
#pragma once
#include "norm.cuh"

namespace stoker {

constexpr int kRanksMax = 8;
// A rank that has not come by then is taken for lost: the kernel fails, and with it the engine. The host asks for no less.
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

// Rows that are pushed. kVecs is of the block: vectors of 8 values that a thread has.
template <int kVecs>
struct Pushed {
  const uint4* x;  // what this rank gives
  const Ranks& inboxes;
  Group group;
  uint4 own[kVecs];
  uint32_t number;

  // Inboxes, ranks that gave, rows: two words of 16 bytes a vector.
  __device__ __forceinline__ uint4* slot(int of, int from, int n_vecs) const {
    const size_t row = (static_cast<size_t>(number & 1) * group.n_ranks + from) * group.max_rows + blockIdx.x;
    return inboxes.at[of] + row * 2 * n_vecs;
  }

  __device__ __forceinline__ void give(int n_vecs) {
    number = next_sum(group);
#pragma unroll
    for (int j = 0; j < kVecs; ++j) {
      const int i = threadIdx.x + j * blockDim.x;
      if (i < n_vecs) own[j] = x[static_cast<size_t>(blockIdx.x) * n_vecs + i];
    }
    for (int p = 1; p < group.n_ranks; ++p) {
      uint4* to = slot((group.rank + p) % group.n_ranks, group.rank, n_vecs);
#pragma unroll
      for (int j = 0; j < kVecs; ++j) {
        const int i = threadIdx.x + j * blockDim.x;
        if (i >= n_vecs) break;
        store_fresh(to + 2 * i, own[j].x, number, own[j].y, number);
        store_fresh(to + 2 * i + 1, own[j].z, number, own[j].w, number);
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

  __device__ __forceinline__ void take(float (&value)[kVecs][8], int n_vecs) {
    for (int rank = 0; rank < group.n_ranks; ++rank) {
      const uint4* from = slot(group.rank, rank, n_vecs);
#pragma unroll
      for (int j = 0; j < kVecs; ++j) {
        const int i = threadIdx.x + j * blockDim.x;
        if (i < n_vecs) add_to(value[j], rank == group.rank ? own[j] : received(from + 2 * i));
      }
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

// Rows that are pulled.
template <int kVecs>
struct Pulled {
  const Ranks& rows;
  const Ranks& flags;
  Group group;
  bool have_met;

  __device__ __forceinline__ void give(int) {}

  template <int kCount>
  __device__ __forceinline__ void take(float (&value)[kCount][8], int n_vecs) {
    if (!have_met) meet(flags, group, next_sum(group));
    for (int rank = 0; rank < group.n_ranks; ++rank) {
      const uint4* row = rows.at[rank] + static_cast<size_t>(blockIdx.x) * n_vecs;
#pragma unroll
      for (int j = 0; j < kVecs; ++j) {
        const int i = threadIdx.x + j * blockDim.x;
        if (i < n_vecs) add_to(value[j], load_fresh(row + i));
      }
    }
  }
};

}  // namespace stoker
