// The same floor as selection.cuh, with a row held in the registers of a cluster of 8 thread blocks (sm_90 and later), for
// rows whose filters need more than the few largest logits: top-p alone, or with a large top-k.
//
//   floor = max(m + ln min_p,  k-th largest,  last of the smallest set of the top k whose mass reaches top_p of theirs)
//
// Every logit is read once, as an integer of the same order. Selection by digits (11, 11, 10 bits) then runs on chip:
//
//   each block: its own histogram in shared memory      all blocks: add the 8 histograms through the cluster's shared
//   memory, scan from the top, take the bin that reaches the target      next digit: only what shares the digits found
//
// Shared memory adds 32-bit integers natively, 64-bit ones by retrying. Mass, in units of 2^-32 of the largest token's, is
// therefore added as two halves of 16 bits: 32768 values of a block cannot overflow them. A token 23 below the maximum
// counts as nothing. Integer sums have no order: the floor has no run-to-run noise (D9).
// Layout: logits rows x vocab f32, vocab up to 8 * 1024 * 32. 4 B a logit. With top-k and top-p one row of 128256 takes 41 us,
// 32 rows 126, 256 rows 740: atomics of the first digit meet in few bins, and 16 clusters fill the chip. Other rows cost
// one look at their parameters. `is_masked` says whose turn it is: rows with a mask of allowed tokens, or all others.
#include <cooperative_groups.h>

#include "sampling.cuh"

namespace stoker {

#if __CUDA_ARCH__ >= 900

namespace cg = cooperative_groups;

constexpr int kCluster = 8, kThreads = 1024, kBins = 2048;
constexpr float kMassUnit = 4294967296.f;  // 2^32

struct Shared {
  uint32_t low[kBins], high[kBins];  // counts, or the lower and upper 16 bits of masses
  uint64_t warp_sums[kWarp];
  uint32_t warp_maxima[kWarp];
  uint32_t maximum;  // this block's largest key
  uint32_t bin;      // where the target was reached
  uint64_t before;   // what lies above that bin
};

__device__ __forceinline__ uint64_t mass(uint32_t key, float maximum) {
  return __float2ull_rn(expf(unordered(key) - maximum) * kMassUnit);
}

template <int kEach>
struct Row {
  uint32_t keys[kEach];  // 0: past the end, or not a number
};

template <int kEach>
__device__ __forceinline__ Row<kEach> load_row(const RowView& view) {
  Row<kEach> own;
  const int first = cg::this_cluster().block_rank() * kEach * kThreads + threadIdx.x;
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    const int token = first + e * kThreads;
    const float t = token < view.vocab ? tempered(edited(view, token), view.row) : NAN;
    own.keys[e] = isnan(t) ? 0 : ordered(t);
  }
  return own;
}

// The largest key of the whole row, in every thread.
template <int kEach>
__device__ __forceinline__ uint32_t largest_key(Shared& s, const Row<kEach>& row) {
  uint32_t largest = 0;
#pragma unroll
  for (int e = 0; e < kEach; ++e) largest = max(largest, row.keys[e]);
  largest = __reduce_max_sync(~0u, largest);
  if (threadIdx.x % kWarp == 0) s.warp_maxima[threadIdx.x / kWarp] = largest;
  __syncthreads();
  if (threadIdx.x < kWarp) {
    largest = __reduce_max_sync(~0u, s.warp_maxima[threadIdx.x]);
    if (threadIdx.x == 0) s.maximum = largest;
  }
  auto cluster = cg::this_cluster();
  cluster.sync();
  largest = *cluster.map_shared_rank(&s.maximum, threadIdx.x % kCluster);
  return __reduce_max_sync(~0u, largest);
}

// Sum over all threads before and including this one; warp_sums[31] holds the total after it.
__device__ __forceinline__ uint64_t block_scan(Shared& s, uint64_t x) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  x = warp_scan(x);
  if (lane == kWarp - 1) s.warp_sums[warp] = x;
  __syncthreads();
  if (warp == 0) s.warp_sums[lane] = warp_scan(s.warp_sums[lane]);
  __syncthreads();
  return warp > 0 ? x + s.warp_sums[warp - 1] : x;
}

enum class Weight { kCount, kMass };

template <Weight kWeight>
__device__ __forceinline__ void add_to_histogram(Shared& s, uint32_t key, int bin, float maximum) {
  if constexpr (kWeight == Weight::kCount) {
    atomicAdd(&s.low[bin], 1u);
  } else {
    const uint64_t weight = mass(key, maximum);
    if (weight == 0) return;
    atomicAdd(&s.low[bin], static_cast<uint32_t>(weight & 0xffff));
    atomicAdd(&s.high[bin], static_cast<uint32_t>(weight >> 16));
  }
}

// The cluster's total of the two bins at `bin` and `bin + 1`.
template <Weight kWeight>
__device__ __forceinline__ ulonglong2 cluster_bins(Shared& s, int bin) {
  auto cluster = cg::this_cluster();
  ulonglong2 sum = make_ulonglong2(0, 0);
#pragma unroll
  for (int rank = 0; rank < kCluster; ++rank) {
    const Shared* other = cluster.map_shared_rank(&s, rank);
    const uint2 low = *reinterpret_cast<const uint2*>(&other->low[bin]);
    sum.x += low.x, sum.y += low.y;
    if constexpr (kWeight == Weight::kMass) {
      const uint2 high = *reinterpret_cast<const uint2*>(&other->high[bin]);
      sum.x += static_cast<uint64_t>(high.x) << 16, sum.y += static_cast<uint64_t>(high.y) << 16;
    }
  }
  return sum;
}

// A selection's question and, afterwards, its answer.
struct Search {
  uint32_t above;   // only keys larger than this take part
  uint64_t target;  // in: what is to be reached; out: what of it the keys above the answer do not cover
  float top_p;      // mass: the target is this share of the total
  uint64_t extra;   // mass: belongs to the total but to none of the keys
};

// The largest key such that the weights at or above it reach the target; `above` if all of them do not.
template <Weight kWeight, int kEach>
__device__ __forceinline__ uint32_t select(Shared& s, const Row<kEach>& row, Search& search, float maximum) {
  uint32_t found = 0;
#pragma unroll 1
  for (int digit = 0; digit < 3; ++digit) {
    const int shift = digit == 0 ? 21 : digit == 1 ? 10 : 0, n_bits = digit == 2 ? 10 : 11;
    const uint32_t known = digit == 0 ? 0u : ~0u << (shift + n_bits);
    for (int b = threadIdx.x; b < kBins; b += kThreads) s.low[b] = 0, s.high[b] = 0;
    __syncthreads();
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const uint32_t key = row.keys[e];
      if (key <= search.above || (key & known) != found) continue;
      add_to_histogram<kWeight>(s, key, key >> shift & ((1u << n_bits) - 1), maximum);
    }
    cg::this_cluster().sync();
    const int bin = kBins - 2 - 2 * threadIdx.x;
    const ulonglong2 own = cluster_bins<kWeight>(s, bin);
    const uint64_t through = block_scan(s, own.x + own.y), before = through - own.x - own.y;
    if (digit == 0) {
      const uint64_t total = s.warp_sums[kWarp - 1];
      if (kWeight == Weight::kMass) {
        const double share = static_cast<double>(search.top_p) * static_cast<double>(total + search.extra);
        search.target = max(static_cast<uint64_t>(ceil(share)), static_cast<uint64_t>(1));
      }
      // Every thread of the cluster sees the same total.
      if (search.target > total) return search.above;
    }
    if (before < search.target && search.target <= through) {
      const bool in_upper = search.target <= before + own.y;
      s.bin = in_upper ? bin + 1 : bin, s.before = in_upper ? before : before + own.y;
    }
    __syncthreads();
    found |= s.bin << shift, search.target -= s.before;
    cg::this_cluster().sync();
  }
  return found;
}

template <int kEach>
__device__ __forceinline__ float rank_floor(Shared& s, const Row<kEach>& keys, const SampleRow& row, int vocab, float maximum) {
  Search search{0, row.top_k, row.top_p, 0};
  uint32_t floor = 0;
  if (row.top_k > 0 && row.top_k < vocab) {
    floor = select<Weight::kCount>(s, keys, search, maximum);
    // Of the tokens equal to the k-th, only as many belong to the top k as the target left.
    if (floor > 0) search.extra = search.target * mass(floor, maximum);
    search.above = floor;
    cg::this_cluster().sync();
  }
  if (row.top_p < 1.f) floor = select<Weight::kMass>(s, keys, search, maximum);
  return floor == 0 ? -INFINITY : unordered(floor);
}

template <int kEach>
__device__ __forceinline__ void sampling_floor(float* floors, const SampleInputs& in, int vocab, int is_masked) {
  __shared__ Shared s;
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int at = blockIdx.x / kCluster;
  const RowView view = view_of(in, at, vocab);
  const SampleRow& row = view.row;
  if (!needs_selection(row, vocab) || (row.mask >= 0) != (is_masked != 0)) return;
  const Row<kEach> own = load_row<kEach>(view);
  const uint32_t largest = largest_key(s, own);
  const float maximum = unordered(largest);
  // A row of NaN or without a finite maximum has nothing to select from.
  const bool is_finite = largest > 0 && isfinite(maximum);
  const float floor = is_finite ? rank_floor(s, own, row, vocab, maximum) : -INFINITY;
  // No block may end while another reads its shared memory.
  cg::this_cluster().sync();
  if (blockIdx.x % kCluster == 0 && threadIdx.x == 0) floors[at] = fmaxf(floor, maximum + row.ln_min_p);
}

#else

template <int kEach>
__device__ __forceinline__ void sampling_floor(float*, const SampleInputs&, int, int) {}

#endif

}  // namespace stoker

// `each` is how many logits a thread holds: 16 up to a vocabulary of 131072, 32 up to 262144.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define CLUSTERED __cluster_dims__(8, 1, 1)
#else
#define CLUSTERED
#endif
#define SAMPLING_FLOOR_SM90(each)                                                                                       \
  extern "C" __global__ void CLUSTERED __launch_bounds__(1024) sampling_floor_sm90_e##each(                             \
      float* floors, const float* logits, const stoker::SampleRow* rows, const uint32_t* marks,                         \
      const stoker::LogitEdit* edits, const uint32_t* masks, int vocab, int is_masked) {                                \
    stoker::sampling_floor<each>(floors, {logits, rows, marks, edits, masks}, vocab, is_masked);                        \
  }
SAMPLING_FLOOR_SM90(16)
SAMPLING_FLOOR_SM90(32)
