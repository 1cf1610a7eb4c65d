// Two blocks of a cluster have each summed half of the depth of the same tile (gemm_sm90.cu): each sends the other one its sums of
// half of the columns, and adds what it gets to its own. The stores themselves report to a barrier of the block that gets them, so
// nobody waits for the whole cluster:
//
//   received    of every tile, once: all bytes of the other block have come in
//   peer_read   of every tile, by each of the other block's warps: it has read what came, the next tile's may follow
#pragma once
#include "tma.cuh"

namespace stoker {

struct Exchange {
  uint64_t received, peer_read;
};

// Shared memory that the other block's sums need.
template <int kThreads, int kColumns>
constexpr uint32_t kExchangeBytes = kThreads * kColumns / 16 * sizeof(float4);

#if __CUDA_ARCH__ >= 900

__device__ __forceinline__ void init_exchange(Exchange& exchange, int n_warps) {
  init_barrier(&exchange.received, 1), init_barrier(&exchange.peer_read, n_warps);
}

// Columns of rank 0 are the first half. Both blocks add the same two numbers, so a sum does not depend on who finishes it.
// By all kThreads threads, of the same place in both blocks; `parity` is that of the tile's number.
template <int kThreads, int kHalf>
__device__ __forceinline__ void exchange_halves(float (&sums)[kHalf][4], const float (&c)[2 * kHalf][4], Exchange& exchange, uint32_t buffer,
                                                uint32_t parity) {
  const uint32_t rank = cluster_rank(), peer = rank ^ 1, place = buffer + threadIdx.x * sizeof(float4);
  const uint32_t there = address_at(place, peer), received_there = address_at(shared_address(&exchange.received), peer);
  if (threadIdx.x == 0) arrive_expecting(&exchange.received, kThreads * kHalf * sizeof(float4));
  wait_for(&exchange.peer_read, parity ^ 1);
#pragma unroll
  for (int j = 0; j < kHalf; ++j) {
    float sent[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[j][i] = rank ? c[j + kHalf][i] : c[j][i], sent[i] = rank ? c[j][i] : c[j + kHalf][i];
    send(there + j * kThreads * sizeof(float4), make_float4(sent[0], sent[1], sent[2], sent[3]), received_there);
  }
  wait_for(&exchange.received, parity);
#pragma unroll
  for (int j = 0; j < kHalf; ++j) {
    const float4 other = load_float4(place + j * kThreads * sizeof(float4));
    sums[j][0] += other.x, sums[j][1] += other.y, sums[j][2] += other.z, sums[j][3] += other.w;
  }
  __syncwarp();
  if (threadIdx.x % kWarp == 0) arrive_at_peer(&exchange.peer_read, peer);
}

#endif

}  // namespace stoker
