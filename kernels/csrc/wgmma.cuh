// Hopper's warpgroup products (sm_90a): 128 threads multiply a 64-row tile with operands that the hardware reads from
// shared memory by descriptor. One wrapper an instruction. Shared tiles are rows of 64 bf16 (128 bytes), 1024-byte aligned, with
// the 16-byte piece index xored with the row modulo 8: the layout that the instruction calls 128-byte swizzle.
#pragma once
#include "mma.cuh"

// A kernel that is empty for want of the `a` would be chosen on the chip and write nothing.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900 && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "build for 90a, not 90: wgmma is not part of plain sm_90"
#endif

// Set only in the pass that compiles for sm_90a; the kernels are empty elsewhere and never chosen there.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define STOKER_HAS_WGMMA 1

namespace stoker {

#define STOKER_FOUR(c, j) "+f"(c[j][0]), "+f"(c[j][1]), "+f"(c[j][2]), "+f"(c[j][3])

// Shared-memory descriptor of a swizzled tile. `group` is the distance of 8-row groups; `half` that of the two 64-value
// halves of a 128-wide operand that is read across its rows (V), not used when it is read along them (Q, K).
__device__ __forceinline__ uint64_t tile_descriptor(uint32_t address, uint32_t half, uint32_t group) {
  constexpr uint64_t kSwizzle128 = 1ull << 62;
  auto field = [](uint32_t bytes) { return static_cast<uint64_t>((bytes & 0x3ffff) >> 4); };
  return field(address) | field(half) << 16 | field(group) << 32 | kSwizzle128;
}

// The same of 16-byte rows of eight, 128 bytes a group and one behind the other, not swizzled: both halves of a depth of 32 bytes are the same.
__device__ __forceinline__ uint64_t narrow_descriptor(uint32_t address) {
  return static_cast<uint64_t>((address & 0x3ffff) >> 4) | static_cast<uint64_t>(128 >> 4) << 32;
}

// Accumulators may have been written by ordinary instructions before this.
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }

// The products since the last call are one group.
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }

// Until at most `kPending` of the newest groups are unfinished.
template <int kPending>
__device__ __forceinline__ void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving what it does with an accumulator ahead of the wait for it.
template <int kColumns>
__device__ __forceinline__ void pin(float (&c)[kColumns][4]) {
#pragma unroll
  for (int j = 0; j < kColumns; ++j) {
    asm volatile("" : STOKER_FOUR(c, j)::"memory");
  }
}

// Keeps it from making fragments behind `begin_products`, where it could not tell that they are left alone.
__device__ __forceinline__ void pin(uint32_t (&a)[4]) { asm volatile("" : "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3])::"memory"); }

// The same tile, `bytes` further on. Addresses inside a descriptor do not carry out of their field.
__device__ __forceinline__ uint64_t moved(uint64_t descriptor, uint32_t bytes) { return descriptor + (bytes >> 4); }

// What cp.async or ordinary stores wrote to shared memory becomes visible to the tensor cores' own path to it. By each
// writing thread, before the barrier.
__device__ __forceinline__ void publish_to_tensor_cores() { asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory"); }

#define STOKER_32(c, j)                                                                                             \
  STOKER_FOUR(c, j), STOKER_FOUR(c, j + 1), STOKER_FOUR(c, j + 2), STOKER_FOUR(c, j + 3), STOKER_FOUR(c, j + 4),    \
      STOKER_FOUR(c, j + 5), STOKER_FOUR(c, j + 6), STOKER_FOUR(c, j + 7)
#define STOKER_NAMES_32                                                                                             \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,"  \
  "%30,%31"
#define STOKER_NAMES_64                                                                                             \
  STOKER_NAMES_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,"   \
  "%55,%56,%57,%58,%59,%60,%61,%62,%63"

#define STOKER_NAMES_128                                                                                            \
  STOKER_NAMES_64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,"  \
  "%87,%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,"    \
  "%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

// c[64 x columns] = a[64x16] * b[columns x 16]^T, or added to c if `accumulate`; a and b in shared memory, read along their
// rows. A thread's share of c is that of `mma` for the 16 rows of its warp: c[j] are columns 8j + 2t. Of e4m3 the depth is 32.
#define STOKER_WGMMA(name, columns, type, options, names, a_name, b_name, accumulate_name, ...)                         \
  __device__ __forceinline__ void name(float (&c)[columns / 8][4], uint64_t a, uint64_t b, bool accumulate) {          \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, " accumulate_name ", 0;\n"                                             \
                 "wgmma.mma_async.sync.aligned.m64n" #columns type " {" names "}, " a_name ", " b_name                  \
                 ", p, 1, 1" options "; }\n"                                                                           \
                 : __VA_ARGS__                                                                                         \
                 : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));                                                 \
  }
#define STOKER_WGMMA_ROWS(columns, ...)                                         \
  STOKER_WGMMA(wgmma_rows, columns, "k16.f32.bf16.bf16", ", 0, 0", __VA_ARGS__) \
  STOKER_WGMMA(wgmma_rows_f16, columns, "k16.f32.f16.f16", ", 0, 0", __VA_ARGS__) \
  STOKER_WGMMA(wgmma_rows_e4m3, columns, "k32.f32.e4m3.e4m3", "", __VA_ARGS__)
STOKER_WGMMA_ROWS(8, "%0,%1,%2,%3", "%4", "%5", "%6", STOKER_FOUR(c, 0))
STOKER_WGMMA_ROWS(32, "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15", "%16", "%17", "%18", STOKER_FOUR(c, 0),
                  STOKER_FOUR(c, 1), STOKER_FOUR(c, 2), STOKER_FOUR(c, 3))
STOKER_WGMMA_ROWS(64, STOKER_NAMES_32, "%32", "%33", "%34", STOKER_32(c, 0))
STOKER_WGMMA_ROWS(128, STOKER_NAMES_64, "%64", "%65", "%66", STOKER_32(c, 0), STOKER_32(c, 8))
STOKER_WGMMA_ROWS(256, STOKER_NAMES_128, "%128", "%129", "%130", STOKER_32(c, 0), STOKER_32(c, 8), STOKER_32(c, 16),
                  STOKER_32(c, 24))
#undef STOKER_WGMMA_ROWS
#undef STOKER_WGMMA

// The same with a from registers, as fragments of `mma` for the 16 rows of each warp; they must stay as they are until the products
// have been waited for.
#define STOKER_WGMMA_REGISTERS(name, columns, type, options, names, a_names, b_name, accumulate_name, ...)                   \
  __device__ __forceinline__ void name(float (&c)[columns / 8][4], const uint32_t (&a)[4], uint64_t b, bool accumulate) {   \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, " accumulate_name ", 0;\n"                                                 \
                 "wgmma.mma_async.sync.aligned.m64n" #columns type " {" names "}, {" a_names "}, " b_name                    \
                 ", p, 1, 1" options "; }\n"                                                                                \
                 : __VA_ARGS__                                                                                              \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)));                  \
  }
#define STOKER_WGMMA_REGISTERS_OF(columns, ...)                                              \
  STOKER_WGMMA_REGISTERS(wgmma_registers, columns, "k16.f32.bf16.bf16", ", 0", __VA_ARGS__)  \
  STOKER_WGMMA_REGISTERS(wgmma_registers_e4m3, columns, "k32.f32.e4m3.e4m3", "", __VA_ARGS__)
STOKER_WGMMA_REGISTERS_OF(8, "%0,%1,%2,%3", "%4,%5,%6,%7", "%8", "%9", STOKER_FOUR(c, 0))
STOKER_WGMMA_REGISTERS_OF(32, "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15", "%16,%17,%18,%19", "%20", "%21", STOKER_FOUR(c, 0),
                          STOKER_FOUR(c, 1), STOKER_FOUR(c, 2), STOKER_FOUR(c, 3))
STOKER_WGMMA_REGISTERS_OF(64, STOKER_NAMES_32, "%32,%33,%34,%35", "%36", "%37", STOKER_32(c, 0))
STOKER_WGMMA_REGISTERS_OF(128, STOKER_NAMES_64, "%64,%65,%66,%67", "%68", "%69", STOKER_32(c, 0), STOKER_32(c, 8))
#undef STOKER_WGMMA_REGISTERS_OF
#undef STOKER_WGMMA_REGISTERS

// c += a * b; a as fragments of `mma`, b[16 x columns] in shared memory read across its rows.
#define STOKER_WGMMA_COLUMNS(name, type)                                                                                             \
  __device__ __forceinline__ void name(float (&c)[8][4], const uint32_t (&a)[4], uint64_t b) {                                      \
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." type " {" STOKER_NAMES_32 "}, {%32,%33,%34,%35}, %36, 1, 1, 1, 1;\n" \
                 : STOKER_32(c, 0)                                                                                                  \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                                             \
  }                                                                                                                                 \
  __device__ __forceinline__ void name(float (&c)[16][4], const uint32_t (&a)[4], uint64_t b) {                                     \
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." type " {" STOKER_NAMES_64                                            \
                 "}, {%64,%65,%66,%67}, %68, 1, 1, 1, 1;\n"                                                                         \
                 : STOKER_32(c, 0), STOKER_32(c, 8)                                                                                 \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                                             \
  }                                                                                                                                 \
  __device__ __forceinline__ void name(float (&c)[32][4], const uint32_t (&a)[4], uint64_t b) {                                     \
    asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32." type " {" STOKER_NAMES_128                                           \
                 "}, {%128,%129,%130,%131}, %132, 1, 1, 1, 1;\n"                                                                    \
                 : STOKER_32(c, 0), STOKER_32(c, 8), STOKER_32(c, 16), STOKER_32(c, 24)                                             \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                                             \
  }
STOKER_WGMMA_COLUMNS(wgmma_columns, "bf16.bf16")
STOKER_WGMMA_COLUMNS(wgmma_columns_f16, "f16.f16")
#undef STOKER_WGMMA_COLUMNS

}  // namespace stoker
#endif
