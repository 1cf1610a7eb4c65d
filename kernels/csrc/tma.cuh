// Barriers in shared memory that count arrivals and bytes, and the copy engine that reports to them (Hopper and later). One
// wrapper an instruction. Tensor maps are made on the host (`tensor_map.rs`) and are kernel parameters.
#pragma once
#include "mma.cuh"

namespace stoker {

// As the driver lays it out; only the copy engine looks inside.
struct alignas(128) TensorMap {
  uint64_t words[16];
};

#if __CUDA_ARCH__ >= 900

__device__ __forceinline__ void init_barrier(uint64_t* barrier, int n_arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;\n" ::"r"(shared_address(barrier)), "r"(n_arrivals) : "memory");
}

// The copy engine sees the barriers that were initialised before. By the initialising thread, before the block's barrier.
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;\n" ::: "memory");
}

__device__ __forceinline__ void arrive_at(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];\n" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void arrive(uint64_t* barrier) { arrive_at(shared_address(barrier)); }

// At the barrier in the same place of another block of the cluster. No scope of the cluster: nothing that ordinary
// instructions wrote is handed over, and a release of that scope is a fence of 0.7 us.
__device__ __forceinline__ void arrive_at_peer(uint64_t* barrier, uint32_t rank) {
  asm volatile(
      "{ .reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there]; }\n" ::"r"(shared_address(barrier)),
      "r"(rank)
      : "memory");
}

// Arrives, and the barrier also waits until this many bytes were copied.
__device__ __forceinline__ void arrive_expecting(uint64_t* barrier, uint32_t n_bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;\n" ::"r"(shared_address(barrier)), "r"(n_bytes)
               : "memory");
}

// Until the phase of this parity is over. The parity before the first phase counts as over.
__device__ __forceinline__ void wait_at(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{ .reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
      "@!done bra again; }\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

__device__ __forceinline__ void wait_for(uint64_t* barrier, uint32_t parity) { wait_at(shared_address(barrier), parity); }

// A number in a register from here on: what the compiler finds anew at each use, of a special register, takes as long as a load.
__device__ __forceinline__ uint32_t kept(uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}

// A box of a tensor to shared memory; what of it lies outside the tensor becomes zeros. `x` runs along memory.
__device__ __forceinline__ void copy_box(uint32_t shared, const TensorMap& map, int x, int y, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];\n" ::"r"(
          shared),
      "l"(&map), "r"(x), "r"(y), "r"(shared_address(barrier))
      : "memory");
}

// Bytes that lie together; a multiple of 16, as both addresses are.
__device__ __forceinline__ void copy_bytes(uint32_t shared, const void* from, uint32_t n_bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::"r"(shared), "l"(from),
               "r"(n_bytes), "r"(shared_address(barrier))
               : "memory");
}

__device__ __forceinline__ void copy_box(uint32_t shared, const TensorMap& map, int x, int y, int z, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];\n" ::
          "r"(shared),
      "l"(&map), "r"(x), "r"(y), "r"(z), "r"(shared_address(barrier))
      : "memory");
}

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;\n" : "=r"(rank));
  return rank;
}

// The same place of another block's shared memory.
__device__ __forceinline__ uint32_t address_at(uint32_t shared, uint32_t rank) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;\n" : "=r"(there) : "r"(shared), "r"(rank));
  return there;
}

// To another block's shared memory, where it arrives at a barrier with its 16 bytes. Both addresses are of `address_at`.
__device__ __forceinline__ void send(uint32_t there, float4 v, uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];\n" ::"r"(there), "f"(v.x), "f"(v.y),
               "f"(v.z), "f"(v.w), "r"(barrier)
               : "memory");
}

__device__ __forceinline__ float2 load_float2(uint32_t shared) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];\n" : "=f"(v.x), "=f"(v.y) : "r"(shared) : "memory");
  return v;
}

__device__ __forceinline__ float4 load_float4(uint32_t shared) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];\n" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(shared) : "memory");
  return v;
}

__device__ __forceinline__ void store_float4(uint32_t shared, float4 v) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};\n" ::"r"(shared), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}

// All threads of all blocks of the cluster.
__device__ __forceinline__ void sync_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;\n" ::: "memory");
}

// A box to the same place of all blocks of the cluster whose bit is set, which arrives at the barrier of each.
__device__ __forceinline__ void copy_box_to_all(uint32_t shared, const TensorMap& map, int x, int y,
                                                uint64_t* barrier, uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], "
      "[%4], %5;\n" ::"r"(shared),
      "l"(&map), "r"(x), "r"(y), "r"(shared_address(barrier)), "h"(blocks)
      : "memory");
}

__device__ __forceinline__ void copy_box_to_all(uint32_t shared, const TensorMap& map, int x, int y, int z, uint64_t* barrier,
                                                uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3, %4}], "
      "[%5], %6;\n" ::"r"(shared),
      "l"(&map), "r"(x), "r"(y), "r"(z), "r"(shared_address(barrier)), "h"(blocks)
      : "memory");
}

// From shared memory to a box of a tensor; what of it lies outside the tensor is left out.
__device__ __forceinline__ void store_box(const TensorMap& map, int x, int y, uint32_t shared) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];\n" ::"l"(&map), "r"(x),
               "r"(y), "r"(shared)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;\n" ::: "memory");
}

// Until this thread's stores have read shared memory.
__device__ __forceinline__ void wait_for_stores_to_read() { asm volatile("cp.async.bulk.wait_group.read 0;\n" ::: "memory"); }

#endif

}  // namespace stoker
