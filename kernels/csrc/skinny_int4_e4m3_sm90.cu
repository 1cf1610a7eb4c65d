// The products of gemm_int4_e4m3_sm90.cu of one row, to the bit, with the weights streamed through the ring of skinny_ring.cuh: what a row alone
// takes where its bits may not depend on how many go with it. The row comes in bf16, and every block quantises it by itself, as quantise.cuh
// does, while its first weights are on their way; or the residual stream comes, of which every block finds the norm first, as rms_norm.cu does.
// What is added to the residual stream is rounded before, as if a norm behind added it.
//
// In the tiles a warpgroup sums a group of 128 values and adds it to those in front: one chain, by few warpgroups, of few large tiles. Here warps
// share the depth, 16 weight rows at a time. A column of a product is not a row of x but 128 values of the only one:
//
//       products of a warpgroup:  16 rows of codes a warp, of the group that is the warp's own
//                                 x, eight groups one below the other, which is how a row lies:  [8 groups][128 numbers], swizzled
//                                 zero points by the digits of the same groups' sums:            [8 groups][16]
//
// so each warp finds its group's sum in one column of eight, and drops seven: the least that a product has. What it finds is the same bits, for
// a column's do not depend on its place or on the others. With its group's scale it waits in shared memory until all groups of a tile are
// there; then they are added up in the order of the depth, as the tiles do it.
//
//       shared memory:  numbers | digits | two tiles' {scale, sum}, [groups][16 rows] | stage 0 | stage 1 | ...
//
// Bound by memory, n * k / 2 B and groups.
#include "int4_ring.cuh"
#include "quantise.cuh"
#include "wgmma.cuh"

namespace stoker {

#ifdef STOKER_HAS_WGMMA

constexpr int kGroupsAtOnce = 8, kDigitBytes = sizeof(uint4), kFoundBytes = sizeof(float2), kAtomBytes = 1024;

__device__ __forceinline__ void store_shared(uint32_t shared, uint2 v) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};\n" ::"r"(shared), "r"(v.x), "r"(v.y) : "memory");
}

__device__ __forceinline__ void store_float2(uint32_t shared, float2 v) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};\n" ::"r"(shared), "f"(v.x), "f"(v.y) : "memory");
}

struct OneRow : CodeStages<1> {
  static constexpr int kWarps = kInt4RingWarps;
  bool is_f16;

  struct Shared : Ring {
    float largest[kWarps], squares[kWarps];
  };

  // Behind a row's numbers; sums of a tile; all of it, with what the first is moved by.
  __device__ __forceinline__ uint32_t n_spans(const Product& p) const { return n_stages(p) * kInt4Spans; }
  __device__ __forceinline__ uint32_t tile_bytes(const Product& p) const { return n_spans(p) * kTileRows * kFoundBytes; }
  __device__ __forceinline__ uint32_t x_row_bytes(const Product& p) const {
    return n_spans(p) * (kInt4Step + kDigitBytes) + 2 * tile_bytes(p) + kAtomBytes;
  }
};

// Where what is of the row lies.
struct RowRoom {
  uint32_t numbers, digits, found, tile_bytes;

  __device__ __forceinline__ RowRoom(const Room& room, const OneRow& weights, const Product& p)
      : numbers((room.x + kAtomBytes - 1) / kAtomBytes * kAtomBytes), digits(numbers + weights.n_spans(p) * kInt4Step),
        found(digits + weights.n_spans(p) * kDigitBytes), tile_bytes(weights.tile_bytes(p)) {}

  // In the order that a product wants of the eight groups that it multiplies; `at` is the first of eight values.
  __device__ __forceinline__ uint32_t place_of(int at) const {
    const int group = at / kInt4Step, piece = at % kInt4Step / 16;
    return numbers + group * kInt4Step + (piece ^ group % kGroupsAtOnce) * 16 + at % 16;
  }
};

// Of a norm in front, which is of the row then; null where there is none.
struct NormInFront {
  const bf16* weight;
  float eps;
};

// By all warps that multiply: what each of their warps has, to each thread.
template <typename Join>
__device__ __forceinline__ float of_all_warps(float (&scratch)[OneRow::kWarps], float own, Join join) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  own = join(own);
  if (lane == 0) scratch[warp] = own;
  sync_consumers<OneRow::kWarps>();
  return join(lane < OneRow::kWarps ? scratch[lane] : 0.f);
}

__device__ __forceinline__ float scale_of_row(OneRow::Shared& shared, float largest) {
  largest = of_all_warps(shared.largest, largest, [](float x) { return warp_max(x); });
  return largest > 0.f ? largest / kBesideCodesMax : 1.f;
}

// What many numbers are divided by: correctly rounded as by __fdiv_rn, of which each would find the reciprocal anew. With the reciprocal correctly
// rounded, a second step from a quotient that is off by less than its last digit is too (Markstein). Not where what is left of a number
// would be too small to be exact: quotients below 2^-11 do not count, they become 0 of their sign.
struct Divisor {
  float by, inverse;
  bool is_near_one;

  __device__ __forceinline__ explicit Divisor(float by) : by(by), inverse(__frcp_rn(by)), is_near_one(by >= 0x1p-80f && by <= 0x1p80f) {}

  __device__ __forceinline__ float quotient(float x) const {
    if (!is_near_one) return __fdiv_rn(x, by);
    float q = x * inverse;
    q = fmaf(fmaf(-by, q, x), inverse, q);
    return copysignf(fmaf(fmaf(-by, q, x), inverse, q), x);
  }
};

// Eight values of each of some stages, which a thread has at the same place of all: the first of them is `at`. Half a warp has a group. In
// lockstep: one by one each waits for its own shuffles.
template <int kVecs>
__device__ __forceinline__ void put_numbers(const RowRoom& room, const uint4 (&v)[kVecs], const Divisor& scale, int at, int n_present) {
  uint2 codes[kVecs];
  float sums[kVecs];
#pragma unroll
  for (int j = 0; j < kVecs; ++j) {
    float x[8];
    unpack(v[j], x);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = scale.quotient(x[i]);
    codes[j] = make_uint2(four_e4m3(x), four_e4m3(x + 4));
    sums[j] = sum_of_e4m3(codes[j].x) + sum_of_e4m3(codes[j].y);
  }
#pragma unroll
  for (int distance = 8; distance > 0; distance /= 2) {
#pragma unroll
    for (int j = 0; j < kVecs; ++j) sums[j] += __shfl_xor_sync(~0u, sums[j], distance);
  }
#pragma unroll
  for (int j = 0; j < kVecs; ++j) {
    const int value = at + j * kInt4StageValues;
    const uint2 numbers = zipped(codes[j], ~0u);
    if (j >= n_present) break;
    store_shared(room.place_of(value), numbers);
    if (threadIdx.x % 16 == j) store_shared(room.digits + value / kInt4Step * kDigitBytes, sum_digits(sums[j]));
  }
}

// Zeros behind the row.
__device__ __forceinline__ uint4 load_values(const bf16* row, int at, const Product& p) {
  return at < p.k ? *reinterpret_cast<const uint4*>(row + at) : make_uint4(0, 0, 0, 0);
}

// A thread's eight values of the row's norm, as rms_norm.cu finds it for a row that is no wider than a stage: a vector a thread.
__device__ __forceinline__ uint4 norm_row(OneRow::Shared& shared, const NormInFront& norm, const Product& p) {
  const int at = threadIdx.x * 8;
  float x[8], w[8], squares = 0.f;
  unpack(load_values(norm.weight, at, p), w);
  unpack(load_values(p.x, at, p), x);
#pragma unroll
  for (int i = 0; i < 8; ++i) squares += x[i] * x[i];
  const float scale = rsqrtf(of_all_warps(shared.squares, squares, [](float sum) { return warp_sum(sum); }) / static_cast<float>(p.k) + norm.eps);
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = rounded(rounded(x[i] * scale) * w[i]);
  return pack(x);
}

// A row of up to a stage, and of more. Its scale, which all threads get.
__device__ __forceinline__ float quantise_stage(OneRow::Shared& shared, const RowRoom& room, const NormInFront& norm, const Product& p) {
  const uint4 v[1] = {norm.weight != nullptr ? norm_row(shared, norm, p) : load_values(p.x, threadIdx.x * 8, p)};
  const float scale = scale_of_row(shared, largest_of(v[0]));
  put_numbers(room, v, Divisor(scale), threadIdx.x * 8, 1);
  return scale;
}

__device__ __forceinline__ float quantise_stages(OneRow::Shared& shared, const RowRoom& room, int n_stages, const Product& p) {
  constexpr int kHeld = 4;
  const int at = threadIdx.x * 8;
  uint4 v[kHeld];
  const auto load = [&](int stage) {
#pragma unroll
    for (int j = 0; j < kHeld; ++j) v[j] = load_values(p.x, at + (stage + j) * kInt4StageValues, p);
  };
  float largest = 0.f;
  // The first ones last: they are still held then.
  for (int stage = (n_stages - 1) / kHeld * kHeld; stage >= 0; stage -= kHeld) {
    load(stage);
#pragma unroll
    for (int j = 0; j < kHeld; ++j) largest = fmaxf(largest, largest_of(v[j]));
  }
  const float scale = scale_of_row(shared, largest);
  for (int stage = 0; stage < n_stages; stage += kHeld) {
    if (stage > 0) load(stage);
    put_numbers(room, v, Divisor(scale), at + stage * kInt4StageValues, n_stages - stage);
  }
  return scale;
}

__device__ __forceinline__ float quantise_row_here(OneRow::Shared& shared, const RowRoom& room, int n_stages, const NormInFront& norm, const Product& p) {
  const float scale = n_stages == 1 ? quantise_stage(shared, room, norm, p) : quantise_stages(shared, room, n_stages, p);
  publish_to_tensor_cores();
  sync_consumers<OneRow::kWarps>();
  return scale;
}

// A stage's groups of a warp: every fourth of its warpgroup's eight. All that is read of the stage has been before the products begin.
__device__ __forceinline__ void multiply_stage(OneRow::Shared& shared, const Room& room, const RowRoom& row, const OneRow& weights, const Turn& turn,
                                               int stage, uint32_t found, const Product& p) {
  constexpr int kSteps = kInt4Step / 32;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4, quarter = warp % 4;
  const int first = warp / 4 * kGroupsAtOnce, first_of_row = stage * kInt4Spans + first;
  const uint64_t x = tile_descriptor(row.numbers + first_of_row * kInt4Step, 0, kAtomBytes), sums = narrow_descriptor(row.digits + first_of_row * kDigitBytes);
  const uint32_t codes = turn.stage(room), groups = codes + kInt4StagePanels * kInt4PanelBytes;
  uint32_t a[kOwnSpans][kSteps][4], zeros[kOwnSpans][4];
  float upper[kOwnSpans], lower[kOwnSpans], part[kOwnSpans][1][4];
  turn.wait(shared);
#pragma unroll
  for (int i = 0; i < kOwnSpans; ++i) {
    const int own = first + 4 * i + quarter;
    uint32_t words[8];
    load_words(words, codes + own * 2 * kInt4PanelBytes + lane * 16, 0);
    const Int4Group group = load_group(groups + own * kInt4GroupBytes + g * 8);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) to_e4m3_fragment(a[i][step], words[2 * step], words[2 * step + 1]), pin(a[i][step]);
    zeros[i][0] = group.zeros(group.upper), zeros[i][1] = group.zeros(group.lower), zeros[i][2] = zeros[i][3] = 0;
    pin(zeros[i]);
    upper[i] = group.scale(group.upper, weights.is_f16), lower[i] = group.scale(group.lower, weights.is_f16);
    part[i][0][0] = part[i][0][1] = part[i][0][2] = part[i][0][3] = 0.f;
  }
  turn.give_back(shared);
  begin_products();
#pragma unroll
  for (int i = 0; i < kOwnSpans; ++i) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) wgmma_registers_e4m3(part[i], a[i][step], moved(x, step * 32), step > 0);
    wgmma_registers_e4m3(part[i], zeros[i], sums, true);
  }
  commit_products();
  wait_for_products<0>();
#pragma unroll
  for (int i = 0; i < kOwnSpans; ++i) {
    pin(part[i]);
    const int column = 4 * i + quarter, nth = first_of_row + column;
    if (t != column / 2 || nth * kInt4Step >= p.k) continue;
    const float(&c)[4] = part[i][0];
    const bool is_odd = column % 2;
    const uint32_t place = found + (nth * kTileRows + g) * kFoundBytes;
    store_float2(place, make_float2(upper[i], is_odd ? c[1] : c[0]));
    store_float2(place + 8 * kFoundBytes, make_float2(lower[i], is_odd ? c[3] : c[2]));
  }
}

// The sum of a weight row's groups, in their order.
__device__ __forceinline__ float add_up(uint32_t found, int row, const Product& p) {
  float sum = 0.f;
#pragma unroll 16
  for (int group = 0; group < p.k / kInt4Step; ++group) {
    const float2 v = load_float2(found + (group * kTileRows + row) * kFoundBytes);
    sum = fmaf(v.x, v.y, sum);
  }
  return sum;
}

// What becomes of a row's sums: they are stored; gate and up are activated; or they are rounded and added to the residual stream, as a norm of
// its own adds what a product has left.
enum class Ending { kStored, kActivated, kAdded };

// By a warp: a lane a weight row, and the other half of the warp the same again.
template <Ending kEnding>
__device__ __forceinline__ void finish_row(bf16* y, uint32_t found, float scale, int first, const Product& p) {
  const int row = threadIdx.x % kTileRows;
  const float sum = add_up(found, row, p) * scale * 512.f;
  const float other = __shfl_down_sync(~0u, sum, kTileRows / 2);
  if (threadIdx.x % kWarp >= kTileRows || first + row >= p.n) return;
  if constexpr (kEnding == Ending::kStored) {
    y[first + row] = __float2bfloat16_rn(sum);
  } else if constexpr (kEnding == Ending::kAdded) {
    y[first + row] = __float2bfloat16_rn(rounded(sum) + __bfloat162float(y[first + row]));
  } else if (row < kTileRows / 2) {
    y[first / 2 + row] = __float2bfloat16_rn(silu_mul_of_sums(sum, other));
  }
}

template <Ending kEnding>
__device__ __forceinline__ void consume_row(OneRow::Shared& shared, const Room& room, bf16* y, const OneRow& weights, const NormInFront& norm,
                                            const Product& p) {
  const RowRoom row(room, weights, p);
  const float scale = quantise_row_here(shared, row, weights.n_stages(p), norm, p);
  Turn turn;
  int tile = 0;
  for (int first = blockIdx.x * kTileRows; first < p.n; first += gridDim.x * kTileRows, ++tile) {
    const uint32_t found = row.found + tile % 2 * row.tile_bytes;
    for (int stage = 0; stage < weights.n_stages(p); ++stage, turn.next(room)) multiply_stage(shared, room, row, weights, turn, stage, found, p);
    sync_consumers<OneRow::kWarps>();
    // Another warp's turn each time, while the others are at the next tile.
    if (threadIdx.x / kWarp == tile % OneRow::kWarps) finish_row<kEnding>(y, found, scale, first, p);
    __syncwarp();
  }
}

template <Ending kEnding>
__device__ __forceinline__ void skinny_int4_e4m3(bf16* y, const OneRow& weights, const NormInFront& norm, const Product& p) {
  extern __shared__ __align__(128) uint8_t dynamic[];
  __shared__ OneRow::Shared shared;
  const Room room(shared_address(dynamic), weights, p);
  if (threadIdx.x == 0) shared.init(OneRow::kWarps);
  __syncthreads();
  let_next_kernel_start();
  if (threadIdx.x >= OneRow::kWarps * kWarp) {
    produce(shared, room, weights, p);
    // Every warp waits: this kernel has not ended before the earlier ones have.
    wait_for_earlier_kernels();
  } else {
    wait_for_earlier_kernels();
    consume_row<kEnding>(shared, room, y, weights, norm, p);
  }
}

#define SKINNY_BODY(ending)                                                                                                              \
  stoker::skinny_int4_e4m3<stoker::Ending::ending>(y, stoker::OneRow{{codes, groups}, is_f16 != 0}, stoker::NormInFront{norm, eps}, \
                                                   stoker::Product{x, 1, n, k});
#else
#define SKINNY_BODY(ending)
#endif

}  // namespace stoker

#define SKINNY_INT4_E4M3(name, ending)                                                                                             \
  extern "C" __global__ void __launch_bounds__((stoker::kInt4RingWarps + 1) * 32, 1) name(                                         \
      stoker::bf16* y, const uint32_t* codes, const uint32_t* groups, const stoker::bf16* x, const stoker::bf16* norm, float eps,  \
      int n, int k, int n_units, int is_f16) {                                                                                     \
    SKINNY_BODY(ending)                                                                                                            \
  }
SKINNY_INT4_E4M3(skinny_int4_e4m3_sm90_bf16, kStored)
SKINNY_INT4_E4M3(skinny_int4_e4m3_sm90_gated, kActivated)
SKINNY_INT4_E4M3(skinny_int4_e4m3_sm90_sum, kAdded)
