// The products of skinny.cuh on Hopper with the weights streamed through a deep ring in shared memory: what is the same for all formats of
// weights. One block a multiprocessor walks over tiles of 16 rows of w. A producer warp asks the bulk copy engine for stages of them, as
// many ahead as shared memory holds, across tiles; the other warps each multiply a part of every stage by their part of x, which they
// keep in shared memory, and wait for no other until a tile is summed. Tiles are finished by the warps in turn, while the next one is
// multiplied. (With barriers that count arrivals nobody would wait for all: 2 % slower.)
//
//       shared memory:  x, m rows | stage 0 | stage 1 | ...
//
// The producer does not wait for the kernel in front: weights are constant. Where that lets this one in early, the ring is full when it has
// drained. Two blocks must not fit a multiprocessor, others would get none (skinny.cuh).
//
// A format of weights has
//   kWarps                                                  warps that multiply
//   x_row_bytes(p), stage_bytes(), n_stages(p)              of a row of x, of a stage, of a tile
//   copy(target, first_row, stage, barrier, p)              by the producer warp
//   stage_x(shared, room, p)                                by each other warp, its part
//   multiply_tile(sum, shared, room, turn, first_row, p)    likewise; what it has read it gives back
//   leave(partial, sum)                                     of whom a lane's sums are, it knows
#pragma once
#include "skinny.cuh"
#include "tma.cuh"

namespace stoker {

constexpr int kStagesMax = 10;
// Between rows of x: lanes of two rows read different banks.
constexpr int kXPadding = 64;

#if __CUDA_ARCH__ >= 900

// The weights are read once a step: what they displace in L2 should be other weights. To an address that is no multiple of 128, a copy takes a
// fifth longer.
__device__ __forceinline__ void copy_once(uint32_t shared, const void* from, uint32_t n_bytes, uint64_t* barrier) {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;\n" : "=l"(policy));
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;\n" ::"r"(shared),
      "l"(from), "r"(n_bytes), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}

struct Ring {
  uint64_t full[kStagesMax], empty[kStagesMax];

  // By one thread, for so many warps that multiply.
  __device__ __forceinline__ void init(int n_warps) {
    for (int slot = 0; slot < kStagesMax; ++slot) init_barrier(&full[slot], 1), init_barrier(&empty[slot], n_warps);
    asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
  }
};

// Two tiles' sums: one is finished while the other is made.
template <int kWarps>
struct Shared : Ring {
  Partials<kWarps> partials[2];
  float row_squares[kColumns], x_factor[kWarps][kColumns];
};

// Behind what all its lanes did.
__device__ __forceinline__ void arrive_as_warp(uint64_t* barrier) {
  __syncwarp();
  if (threadIdx.x % kWarp == 0) arrive(barrier);
}

// What lies in dynamic shared memory.
struct Room {
  uint32_t x, x_row_bytes, stages, stage_bytes, n_stages;

  template <typename Weights>
  __device__ __forceinline__ Room(uint32_t start, const Weights& weights, const Product& p)
      : x(start), x_row_bytes(weights.x_row_bytes(p) + kXPadding), stage_bytes(weights.stage_bytes()) {
    uint32_t n_bytes;
    asm("mov.u32 %0, %%dynamic_smem_size;\n" : "=r"(n_bytes));
    const uint32_t x_bytes = (p.m * x_row_bytes + 127) / 128 * 128;
    stages = start + x_bytes, n_stages = min(static_cast<uint32_t>(kStagesMax), (n_bytes - x_bytes) / stage_bytes);
  }
};

// A position in the ring.
struct Turn {
  uint32_t slot = 0, round = 0;

  __device__ __forceinline__ void next(const Room& room) {
    if (++slot == room.n_stages) slot = 0, round ^= 1;
  }
  __device__ __forceinline__ uint32_t stage(const Room& room) const { return room.stages + slot * room.stage_bytes; }
  __device__ __forceinline__ void wait(Ring& ring) const { wait_for(&ring.full[slot], round); }
  // Behind the products of what was read: reads that were only issued may still be on their way when this arrives.
  __device__ __forceinline__ void give_back(Ring& ring) const { arrive_as_warp(&ring.empty[slot]); }
};

template <typename Weights>
__device__ __forceinline__ void produce(Ring& ring, const Room& room, const Weights& weights, const Product& p) {
  Turn turn;
  for (int first = blockIdx.x * kTileRows; first < p.n; first += gridDim.x * kTileRows) {
    for (int stage = 0; stage < weights.n_stages(p); ++stage, turn.next(room)) {
      wait_for(&ring.empty[turn.slot], turn.round ^ 1);
      weights.copy(turn.stage(room), first, stage, &ring.full[turn.slot], p);
    }
  }
}

template <int kWarps>
__device__ __forceinline__ void sync_consumers() {
  asm volatile("bar.sync 1, %0;\n" ::"n"(kWarps * kWarp) : "memory");
}

__device__ __forceinline__ uint4 load_shared(uint32_t address) {
  uint32_t r[4];
  load_shared(r, address);
  return make_uint4(r[0], r[1], r[2], r[3]);
}

// A power of two, behind which `largest` is below that of `exponent`: one that f32 has, with its reciprocal.
__device__ __forceinline__ float factor_to(int exponent, float largest) {
  const int found = static_cast<int>(__float_as_uint(largest) >> 23) - 127;
  return largest > 0.f ? exp2f(static_cast<float>(max(-100, min(exponent - 1 - found, 100)))) : 1.f;
}

__device__ __forceinline__ float largest_of(const uint4& v) {
  float f[8], largest = 0.f;
  unpack(v, f);
#pragma unroll
  for (int i = 0; i < 8; ++i) largest = fmaxf(largest, fabsf(f[i]));
  return largest;
}

// Hands a warp's part of a row of x, eight values a lane, to `take(vector, first value)`, with zeros up to a whole stage of `kValues`, of which
// each warp has `kValues / kWarps`. Some are asked for ahead of the first that is taken. All lanes take as often; what is behind the last
// stage has no place.
template <int kValues, int kWarps, typename Take>
__device__ __forceinline__ void each_of_x(const Product& p, int m, Take take) {
  constexpr int kOwn = kValues / kWarps, kLanes = kOwn / 8, kPerRound = kWarp / kLanes, kAhead = 4;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, n_stages = (p.k + kValues - 1) / kValues;
  const int from = lane / kLanes * kValues + warp * kOwn + lane % kLanes * 8;
  const bf16* row = p.x + static_cast<size_t>(m) * p.k;
  for (int first = 0; first < n_stages; first += kAhead * kPerRound) {
    uint4 v[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int at = from + (first + i * kPerRound) * kValues;
      v[i] = at < p.k ? *reinterpret_cast<const uint4*>(row + at) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (first + i * kPerRound < n_stages) take(v[i], from + (first + i * kPerRound) * kValues);
    }
  }
}

template <Form kForm, typename Out, typename Weights, int kWarps>
__device__ __forceinline__ void consume(Shared<kWarps>& shared, const Room& room, Out* y, const Weights& weights, const Product& p,
                                        const Beside& beside) {
  weights.stage_x(shared, room, p);
  __syncwarp();
  // Seen behind the first tile's sums.
  add_up_squares<kForm>(shared.row_squares, beside, p);
  Turn turn;
  // The thread's turn among those that finish a tile: few rows of x are a warp's work, each time another one's.
  int nth = threadIdx.x, tile = 0;
  for (int first = blockIdx.x * kTileRows; first < p.n; first += gridDim.x * kTileRows, ++tile) {
    const Addend addend = load_addend<kForm>(nth, y, first, beside, p);
    float sum[4];
    weights.multiply_tile(sum, shared, room, turn, first, p);
    Partials<kWarps>& partial = shared.partials[tile % 2];
    Weights::leave(partial, sum);
    sync_consumers<kWarps>();
    finish_tile<kForm>(nth, partial, shared.row_squares, addend, y, first, beside, p);
    nth = nth < kWarp ? nth + (kWarps - 1) * kWarp : nth - kWarp;
  }
}

template <Form kForm, typename Out, typename Weights, int kWarps>
__device__ __forceinline__ void multiply_through_ring(Shared<kWarps>& shared, Out* y, const Weights& weights, const Product& p,
                                                      const Beside& beside) {
  extern __shared__ __align__(128) uint8_t dynamic[];
  const Room room(shared_address(dynamic), weights, p);
  if (threadIdx.x == 0) shared.init(kWarps);
  __syncthreads();
  let_next_kernel_start();
  if (threadIdx.x >= kWarps * kWarp) {
    produce(shared, room, weights, p);
    // Every warp waits: this kernel has not ended before the earlier ones have.
    wait_for_earlier_kernels();
  } else {
    wait_for_earlier_kernels();
    consume<kForm>(shared, room, y, weights, p, beside);
  }
}

#endif

}  // namespace stoker
