// The same products as skinny_gemm.cu on Hopper, m = 1..4, with weights of four bits (int4.cuh) streamed through a ring (skinny_ring.cuh).
//
// A warp takes two spans of 128 values of each stage (int4_ring.cuh). Codes are multiplied as integers: a word's codes of row g
// are its even nibbles, those of row g + 8 the odd ones, so a shift and two masks make eight of them, where f16 wants nearly twice that and
// subtractions. x is an integer of 14 binary digits and a sign, times a power of two that the largest value of its span allows, in two columns:
// its upper and its lower eight digits. Sums of a group are exact; then
//
//       sum (code - zero) x  =  2^-e (256 upper + lower - zero sum x)
//
// and the scale is multiplied with it, in f32: no weight is rounded. A value of x below 2^-6 of the largest of its
// 128 loses digits, at most 2^-14 of the largest, of which bf16 itself had lost up to 2^-9.
//
//       x of a span:  upper digits, lower digits: [4 steps][lane t][4 words: of a step each, values 2t, 2t + 8, 2t + 1, 2t + 9]
//
// Bound by memory, n * k / 2 B and groups.
#include "int4_ring.cuh"

namespace stoker {

#if __CUDA_ARCH__ >= 900

// Of a span of x: digits, then for each quarter the sum of its integers, then what they are multiplied by.
constexpr int kXDigits = 2 * kInt4Step, kXSpanBytes = kXDigits + 32;

// c[16x8] += a[16x32] * b[32x8], integers of eight bits: a without, b with a sign. As mma of bf16, with four values where that has two.
__device__ __forceinline__ void mma_u8(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ int load_int(uint32_t shared) {
  int v;
  asm volatile("ld.shared.s32 %0, [%1];\n" : "=r"(v) : "r"(shared) : "memory");
  return v;
}

__device__ __forceinline__ void store_word(uint32_t shared, uint32_t v) { asm volatile("st.shared.u32 [%0], %1;\n" ::"r"(shared), "r"(v) : "memory"); }

template <int kUnits>
struct FourBits : CodeStages<kUnits> {
  static constexpr int kWarps = kInt4RingWarps, kUnitPairs = 4 / kUnits;
  bool is_f16;

  using CodeStages<kUnits>::n_stages;

  __device__ __forceinline__ uint32_t x_row_bytes(const Product& p) const { return n_stages(p) * kInt4Spans * kXSpanBytes; }

  // Half a warp has a span, a lane eight values of it: half of a step.
  __device__ __forceinline__ void stage_x(Shared<kWarps>&, const Room& room, const Product& p) const {
    const int lane = threadIdx.x % kWarp, n_values = n_stages(p) * kInt4StageValues;
    for (int m = 0; m < p.m; ++m) {
      each_of_x<kInt4StageValues, kWarps>(p, m, [&](const uint4& v, int at) {
        float f[8], largest = largest_of(v), nothing = 0.f;
        unpack(v, f);
        // An integer has no NaN: a span with a value that is not finite says so by its factor.
#pragma unroll
        for (int i = 0; i < 8; ++i) nothing += f[i] * 0.f;
        const bool is_finite = (__ballot_sync(~0u, nothing != 0.f) >> (lane & 16) & 0xffff) == 0;
#pragma unroll
        for (int distance = 8; distance > 0; distance /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, distance));
        const float factor = factor_to(14, largest);
        int sum = 0;
        // Upper and lower digits of this lane's pairs (2i, 2i + 1); the other half of the step is the neighbour's.
        uint32_t digits[2][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int first = __float2int_rn(f[2 * i] * factor), second = __float2int_rn(f[2 * i + 1] * factor);
          const int first_upper = (first + 128) >> 8, second_upper = (second + 128) >> 8;
          sum += first + second;
          digits[0][i] = (first_upper & 0xff) | (second_upper & 0xff) << 16;
          digits[1][i] = ((first - first_upper * 256) & 0xff) | ((second - second_upper * 256) & 0xff) << 16;
        }
        const uint32_t span = room.x + m * room.x_row_bytes + at / kInt4Step * kXSpanBytes, step = at % kInt4Step / 16;
        const bool present = at < n_values;
#pragma unroll
        for (int piece = 0; piece < 2; ++piece) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            // The even lane has values 2i and 2i + 1, the odd one those eight further on.
            const uint32_t other = __shfl_xor_sync(~0u, digits[piece][i], 1), word = lane % 2 == 0 ? digits[piece][i] | other << 8 : other | digits[piece][i] << 8;
            if (present && lane % 2 == i / 2) store_word(span + piece * kInt4Step + step / 4 * 64 + i * 16 + step % 4 * 4, word);
          }
        }
        sum += __shfl_xor_sync(~0u, sum, 1), sum += __shfl_xor_sync(~0u, sum, 2);
        if (present && lane % 4 == 0) store_word(span + kXDigits + at % kInt4Step / 32 * 4, sum);
        if (present && lane % 16 == 0) store_word(span + kXDigits + 16, __float_as_uint(is_finite ? 1.f / factor : __int_as_float(0x7fffffff)));
      });
    }
  }

  // What a lane reads of a span: all before the first product.
  struct Span {
    uint32_t words[8], x[8];
    Int4Group groups[kUnits];
    int sums[4];  // of x, of row t
    float factor;
  };

  // Columns 2r and 2r + 1 are row r of x. What is of rows that are not there nobody looks at; it is read of the last one.
  __device__ __forceinline__ static void load(Span& span, uint32_t stage, const Room& room, int own, int nth, const Product& p) {
    const int lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
    load_words(span.words, stage + own * 2 * kInt4PanelBytes + lane * 16, 0);
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      // Behind the last span lie no groups.
      const uint32_t at = stage + kInt4StagePanels * kInt4PanelBytes + (own * kUnits + unit) * kInt4GroupBytes + g * 8;
      span.groups[unit] = nth * kInt4Step < p.k ? load_group(at) : Int4Group{0, 0};
    }
    const uint32_t spans = room.x + nth * kXSpanBytes, digits = spans + g / 2 * room.x_row_bytes + g % 2 * kInt4Step + t * 16;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 v = g < 2 * p.m ? load_shared(digits + half * 64) : make_uint4(0, 0, 0, 0);
      span.x[4 * half] = v.x, span.x[4 * half + 1] = v.y, span.x[4 * half + 2] = v.z, span.x[4 * half + 3] = v.w;
    }
    const uint32_t beside = spans + min(t, p.m - 1) * room.x_row_bytes + kXDigits;
    const uint4 sums = load_shared(beside);
    span.sums[0] = sums.x, span.sums[1] = sums.y, span.sums[2] = sums.z, span.sums[3] = sums.w;
    span.factor = __int_as_float(load_int(beside + 16));
  }

  __device__ __forceinline__ void multiply(float (&sum)[4], const Span& span) const {
    constexpr uint32_t kEven = 0x0f0f0f0f;
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      int c[4] = {};
#pragma unroll
      for (int i = 0; i < kUnitPairs; ++i) {
        const int step = (unit * kUnitPairs + i) * 2;
        const uint32_t first = span.words[step], second = span.words[step + 1];
        mma_u8(c, first & kEven, first >> 4 & kEven, second & kEven, second >> 4 & kEven, span.x[step], span.x[step + 1]);
      }
      int x_sum = 0;
#pragma unroll
      for (int i = 0; i < kUnitPairs; ++i) x_sum += span.sums[unit * kUnitPairs + i];
      const Int4Group& group = span.groups[unit];
      // The zero point stands below 128 as bf16: its last four digits.
      const int upper = c[0] * 256 + c[1] - static_cast<int>(group.upper >> 16 & 15) * x_sum, lower = c[2] * 256 + c[3] - static_cast<int>(group.lower >> 16 & 15) * x_sum;
      sum[0] = fmaf(group.scale(group.upper, is_f16) * span.factor, static_cast<float>(upper), sum[0]);
      sum[1] = fmaf(group.scale(group.lower, is_f16) * span.factor, static_cast<float>(lower), sum[1]);
    }
  }

  // Row t of x by weight rows g and g + 8, in the first two sums.
  __device__ __forceinline__ void multiply_tile(float (&sum)[4], Shared<kWarps>& shared, const Room& room, Turn& turn, int, const Product& p) const {
    const int warp = threadIdx.x / kWarp, n = n_stages(p);
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] = 0.f;
    for (int stage = 0; stage < n; ++stage, turn.next(room)) {
      Span spans[kOwnSpans];
      turn.wait(shared);
#pragma unroll
      for (int i = 0; i < kOwnSpans; ++i) {
        const int own = warp * kOwnSpans + i;
        load(spans[i], turn.stage(room), room, own, stage * kInt4Spans + own, p);
      }
#pragma unroll
      for (int i = 0; i < kOwnSpans; ++i) multiply(sum, spans[i]);
      turn.give_back(shared);
    }
  }

  __device__ __forceinline__ static void leave(Partials<kWarps>& partial, const float (&sum)[4]) {
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
    partial.products[warp][t][g] = sum[0], partial.products[warp][t][g + 8] = sum[1];
  }
};

template <Form kForm, typename Out>
__device__ __forceinline__ void skinny_int4(Out* y, const uint32_t* codes, const uint32_t* groups, const Int4Format& format, const Product& p,
                                            const Beside& beside) {
  __shared__ Shared<kInt4RingWarps> shared;
  if (format.n_units == 1) multiply_through_ring<kForm>(shared, y, FourBits<1>{{codes, groups}, format.is_f16 != 0}, p, beside);
  else multiply_through_ring<kForm>(shared, y, FourBits<4>{{codes, groups}, format.is_f16 != 0}, p, beside);
}

#else

template <Form kForm, typename Out>
__device__ __forceinline__ void skinny_int4(Out*, const uint32_t*, const uint32_t*, const Int4Format&, const Product&, const Beside&) {}

#endif

}  // namespace stoker

#define SKINNY_INT4_SM90(name, form)                                                                                         \
  extern "C" __global__ void __launch_bounds__((stoker::kInt4RingWarps + 1) * 32, 1)                                         \
      name(stoker::bf16* y, const uint32_t* codes, const uint32_t* groups, const stoker::bf16* x, stoker::bf16* weighted,    \
           const stoker::bf16* norm, float* squares, float eps, int m, int n, int k, int squares_tile, int n_units, int is_f16) { \
    stoker::skinny_int4<stoker::Form::form>(y, codes, groups, stoker::Int4Format{n_units, is_f16}, stoker::Product{x, m, n, k}, \
                                            stoker::Beside{weighted, norm, squares, eps, squares_tile});                     \
  }
SKINNY_INT4_SM90(skinny_int4_sm90_bf16, kPlain)
SKINNY_INT4_SM90(skinny_int4_sm90_update, kUpdate)
SKINNY_INT4_SM90(skinny_int4_sm90_scaled, kScaled)
SKINNY_INT4_SM90(skinny_int4_sm90_gated, kGated)
