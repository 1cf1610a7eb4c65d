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

__device__ __forceinline__ void arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];\n" ::"r"(shared_address(barrier)) : "memory");
}

// Arrives, and the barrier also waits until this many bytes were copied.
__device__ __forceinline__ void arrive_expecting(uint64_t* barrier, uint32_t n_bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;\n" ::"r"(shared_address(barrier)), "r"(n_bytes)
               : "memory");
}

// Until the phase of this parity is over. The parity before the first phase counts as over.
__device__ __forceinline__ void wait_for(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{ .reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
      "@!done bra again; }\n" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// A box of a tensor to shared memory; what of it lies outside the tensor becomes zeros. `x` runs along memory.
__device__ __forceinline__ void copy_box(uint32_t shared, const TensorMap& map, int x, int y, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];\n" ::"r"(
          shared),
      "l"(&map), "r"(x), "r"(y), "r"(shared_address(barrier))
      : "memory");
}

__device__ __forceinline__ void copy_box(uint32_t shared, const TensorMap& map, int x, int y, int z, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];\n" ::
          "r"(shared),
      "l"(&map), "r"(x), "r"(y), "r"(z), "r"(shared_address(barrier))
      : "memory");
}

#endif

}  // namespace stoker
