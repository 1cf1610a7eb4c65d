// The products of skinny.cuh of weights of four bits (int4.cuh): y[m][n] for m = 1..8 rows of x, as many as shared memory holds.
//
// Two or three blocks a multiprocessor walk over tiles of 16 outputs. Of each a warp takes spans of 128 values of k in turn: 1 KiB of
// codes in the order of fragments and one group, or four, by copies of its own five spans ahead and across tiles, the first before the
// wait for the kernel in front. x is put into shared memory once, so that a lane reads 16 bytes for two steps of 16 values:
//
//       codes   step s of 16 of a chunk of 64:   lane (g, t) has values 2t, 2t+1, 2t+8, 2t+9 of rows g and g + 8
//       x       [k / 64][2 halves][m][t]         16 bytes: pairs 2t of pieces 4h .. 4h+3 of 8 values
//
// Sums of a group are multiplied with its scale in f32. 0.53 B * n * k for groups of 128; what binds is the integer pipe, 61 % of a copy's
// rate for 28672 x 4096: half of its instructions make fragments, half find addresses.
#include "int4.cuh"
#include "skinny.cuh"

namespace stoker {

#if __CUDA_ARCH__ >= 900

// Spans in flight of a warp: what their copies need of shared memory. A lane copies what it will read itself, so nobody waits for
// another. Loads straight into registers were as fast.
template <int kUnits>
constexpr int kAhead = kUnits == 1 ? 5 : 3;
template <int kUnits>
constexpr int kSlotBytes = 2 * kInt4PanelBytes + kUnits * kWarp * sizeof(Int4Group);
template <int kUnits>
constexpr int kRingBytes = kProductWarps * kAhead<kUnits> * kSlotBytes<kUnits>;

struct Int4Weights {
  const uint8_t* codes;
  const uint8_t* groups;
  bool is_f16;
};

// Zeros where `present` is false, reading nothing.
__device__ __forceinline__ void copy_group(uint32_t shared, const uint8_t* global, bool present) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;\n" ::"r"(shared), "l"(global), "r"(present ? 8 : 0) : "memory");
}

// A warp's spans of a block's tiles, one after the other, on their way to its slots.
template <int kUnits>
struct Spans {
  const Int4Weights& w;
  int n_tiles, n_chunks, n_spans;
  int tile, span;     // the next one
  uint32_t own;       // where a lane's parts of the first slot begin
  uint32_t slot = 0;  // of the next one

  // What does not exist, a copy too: groups of copies are counted.
  __device__ __forceinline__ void request_next() {
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    const bool present = tile < n_tiles && span < n_spans;
    const int at = present ? tile : 0, of = present ? span : 0;
    const uint8_t* codes = w.codes + (static_cast<size_t>(at) * n_chunks + 2 * of) * kInt4PanelBytes + lane * 16;
    const uint32_t target = own + slot * kSlotBytes<kUnits>;
    copy_async(target, codes, present);
    copy_async(target + kInt4PanelBytes, codes + kInt4PanelBytes, present && 2 * of + 1 < n_chunks);
    const uint8_t* groups = w.groups + (static_cast<size_t>(at) * n_spans + of) * kUnits * kInt4GroupBytes + lane / 4 * 8;
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      copy_group(target + 2 * kInt4PanelBytes - lane * 8 + unit * kWarp * 8, groups + unit * kInt4GroupBytes, present);
    }
    commit_copies();
    slot = slot + 1 == kAhead<kUnits> ? 0 : slot + 1;
    span += kProductWarps;
    if (span >= (n_spans + kProductWarps - 1) / kProductWarps * kProductWarps) span = warp, tile += gridDim.x;
  }
};

// x to shared memory, zeros behind its end.
__device__ __forceinline__ void stage_x(uint8_t* staged, const Product& p, int n_spans) {
  const int n_pieces = n_spans * 16;
  for (int i = threadIdx.x; i < p.m * n_pieces; i += blockDim.x) {
    const int column = i / n_pieces, piece = i % n_pieces, chunk = piece / 8, place = piece % 8;
    const bool present = piece * 8 < p.k;
    const uint4 v = present ? *reinterpret_cast<const uint4*>(p.x + static_cast<size_t>(column) * p.k + piece * 8) : make_uint4(0, 0, 0, 0);
    uint32_t* target = reinterpret_cast<uint32_t*>(staged + ((chunk * 2 + place / 4) * p.m + column) * 64 + place % 4 * 4);
    target[0] = v.x, target[4] = v.y, target[8] = v.z, target[12] = v.w;
  }
}

// A lane's parts of a span begin at `slot`.
template <int kUnits>
__device__ __forceinline__ void multiply_span(float (&sum)[4], uint32_t slot, const uint8_t* x, int m, bool is_f16) {
  constexpr int kSteps = 8 / kUnits;
  const int lane = threadIdx.x % kWarp;
  uint32_t words[8];
  load_words(words, slot, 0);
  uint4 pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) pairs[i] = x ? *reinterpret_cast<const uint4*>(x + i * m * 64) : make_uint4(0, 0, 0, 0);
#pragma unroll
  for (int unit = 0; unit < kUnits; ++unit) {
    const Int4Group group = load_group(slot + 2 * kInt4PanelBytes - lane * 8 + unit * kWarp * 8);
    const uint32_t upper_zero = group.zero(group.upper), lower_zero = group.zero(group.lower);
    // Two chains: a product waits for the one before the last.
    float part[2][4] = {};
#pragma unroll
    for (int step = unit * kSteps; step < (unit + 1) * kSteps; ++step) {
      uint32_t a[4];
      to_fragment(a, words[step], upper_zero, lower_zero);
      const uint4& b = pairs[step / 2];
      mma(part[step % 2], a[0], a[1], a[2], a[3], step % 2 ? b.z : b.x, step % 2 ? b.w : b.y);
    }
    const float upper = group.scale(group.upper, is_f16), lower = group.scale(group.lower, is_f16);
    sum[0] = fmaf(upper, part[0][0] + part[1][0], sum[0]), sum[1] = fmaf(upper, part[0][1] + part[1][1], sum[1]);
    sum[2] = fmaf(lower, part[0][2] + part[1][2], sum[2]), sum[3] = fmaf(lower, part[0][3] + part[1][3], sum[3]);
  }
}

template <Form kForm, int kUnits>
__device__ __forceinline__ void walk(bf16* y, const Int4Weights& w, const Product& p, const Beside& beside, uint8_t* shared, Partials& partial) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
  const int n_tiles = (p.n + kTileRows - 1) / kTileRows, n_spans = (p.k + kInt4Step - 1) / kInt4Step;
  const int n_own = (n_spans + kProductWarps - 1) / kProductWarps;
  const uint32_t slots = shared_address(shared) + warp * kAhead<kUnits> * kSlotBytes<kUnits> + lane * 16;
  Spans<kUnits> spans{w, n_tiles, (p.k + 63) / 64, n_spans, static_cast<int>(blockIdx.x), warp, slots};
#pragma unroll
  for (int i = 0; i < kAhead<kUnits>; ++i) spans.request_next();
  wait_for_earlier_kernels();
  let_next_kernel_start();
  uint8_t* staged = shared + kRingBytes<kUnits>;
  stage_x(staged, p, n_spans);
  add_up_squares<kForm>(partial, beside, p);
  uint32_t slot = 0;
  __syncthreads();
  const uint8_t* column = g < p.m ? staged + g * 64 + t * 16 : nullptr;
  for (int first = blockIdx.x * kTileRows; first < p.n; first += gridDim.x * kTileRows) {
    const Addend addend = load_addend<kForm>(y, first, beside, p);
    float sum[4] = {};
#pragma unroll 2
    for (int own = 0; own < n_own; ++own) {
      const int span = warp + own * kProductWarps;
      wait_for_copies<kAhead<kUnits> - 1>();
      const uint8_t* x = column != nullptr && span < n_spans ? column + span * 256 * p.m : nullptr;
      multiply_span<kUnits>(sum, slots + slot * kSlotBytes<kUnits>, x, p.m, w.is_f16);
      spans.request_next();
      slot = slot + 1 == kAhead<kUnits> ? 0 : slot + 1;
    }
    leave_partial(partial, sum);
    __syncthreads();
    finish_tile<kForm>(partial, addend, y, first, beside, p);
    __syncthreads();
  }
}

#endif

template <Form kForm>
__device__ __forceinline__ void skinny_int4(bf16* y, const uint8_t* codes, const uint8_t* groups, int n_units, int is_f16, const Product& p,
                                            const Beside& beside) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ Partials partial;
  const Int4Weights w{codes, groups, is_f16 != 0};
  n_units == 1 ? walk<kForm, 1>(y, w, p, beside, shared, partial) : walk<kForm, 4>(y, w, p, beside, shared, partial);
#endif
}

}  // namespace stoker

#define SKINNY_INT4(name, form)                                                                                                      \
  extern "C" __global__ void __launch_bounds__(256, 3)                                                                               \
      name(stoker::bf16* y, const uint8_t* codes, const uint8_t* groups, int n_units, int is_f16, const stoker::bf16* x,             \
           stoker::bf16* weighted, const stoker::bf16* norm, float* squares, float eps, int m, int n, int k) {                       \
    stoker::skinny_int4<stoker::Form::form>(y, codes, groups, n_units, is_f16, stoker::Product{x, m, n, k},                          \
                                            stoker::Beside{weighted, norm, squares, eps});                                           \
  }
SKINNY_INT4(skinny_int4_bf16, kPlain)
SKINNY_INT4(skinny_int4_update, kUpdate)
SKINNY_INT4(skinny_int4_scaled, kScaled)
SKINNY_INT4(skinny_int4_gated, kGated)
