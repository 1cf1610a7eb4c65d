// Codes of four bits in words as checkpoints hold them, to words of tiles (int4.cuh): on arrival, some lines of words at a time.
//
//   a line of words       an output, eight inputs a word (Packed); eight inputs, a word an output (Gptq); an input, eight outputs a word,
//                         of which 0 2 4 6 1 3 5 7 are lowest first (Awq). What they hold is in code_words.rs, which is the reference.
//
// Layout: `words` n_lines x line_words, those in front of the first line came or come by other launches; `codes` as int4.cuh draws them.
// A thread takes 16 inputs of one output, which are a quarter of four words: rows g and g + 8 of a tile share words, and may be of two
// projections, in two launches at a time. So codes are zeros at first and each launch adds its bits, in any order: the same words.
// 1 B a code read and written by turns in the L2 cache. Runs while words arrive over PCIe, which is slower: 0.5 B a code at some 40 GB/s.
#include "common.cuh"

namespace {

constexpr int kThreads = 256, kStep = 16, kStepsOfChunk = 4, kTileRows = 16;

// What `upload.rs` passes.
struct Lines {
  int first, n_lines;   // of the share's lines
  int line_words;
  int n_skipped;        // codes of the first word, or of the first line (Gptq), that are not the share's
  int n_outputs, k;     // of the share

  __device__ __forceinline__ static uint32_t code(uint32_t word, int place) { return word >> 4 * place & 15; }
};

// Which row of the matrix an output is: `turn` of a projection, then as many of the others.
struct Rows {
  int first, turn, period;

  __device__ __forceinline__ int of(int output) const { return first + output / turn * period + output % turn; }
};

struct Range {
  int begin, end;

  __device__ __forceinline__ int size() const { return end - begin; }
  __device__ __forceinline__ bool has(int at) const { return begin <= at && at < end; }
};

struct Packed {
  static constexpr bool kHasLinesOfOutputs = true;
  __device__ static Range outputs(const Lines& l) { return {l.first, l.first + l.n_lines}; }
  __device__ static Range inputs(const Lines& l) { return {0, l.k}; }
  __device__ static uint32_t code(const uint32_t* words, const Lines& l, int output, int input) {
    const int at = l.n_skipped + input;
    return l.code(words[(output - l.first) * l.line_words + at / 8], at % 8);
  }
};

struct Gptq {
  static constexpr bool kHasLinesOfOutputs = false;
  __device__ static Range outputs(const Lines& l) { return {0, l.n_outputs}; }
  __device__ static Range inputs(const Lines& l) {
    return {max(8 * l.first - l.n_skipped, 0), min(8 * (l.first + l.n_lines) - l.n_skipped, l.k)};
  }
  __device__ static uint32_t code(const uint32_t* words, const Lines& l, int output, int input) {
    const int at = l.n_skipped + input;
    return l.code(words[(at / 8 - l.first) * l.line_words + output], at % 8);
  }
};

struct Awq {
  static constexpr bool kHasLinesOfOutputs = false;
  __device__ static Range outputs(const Lines& l) { return {0, l.n_outputs}; }
  __device__ static Range inputs(const Lines& l) { return {l.first, l.first + l.n_lines}; }
  __device__ static uint32_t code(const uint32_t* words, const Lines& l, int output, int input) {
    const int at = l.n_skipped + output;
    return l.code(words[(input - l.first) * l.line_words + at / 8], at % 8 / 2 + at % 2 * 4);
  }
};

template <typename Order>
__device__ __forceinline__ void repack(uint32_t* codes, const uint32_t* words, const Lines& lines, const Rows& rows, int n_chunks) {
  stoker::wait_for_earlier_kernels();
  const Range outputs = Order::outputs(lines), inputs = Order::inputs(lines);
  const int first_step = inputs.begin / kStep, n_steps = (inputs.end + kStep - 1) / kStep - first_step;
  const int idx = blockIdx.x * kThreads + threadIdx.x;
  if (idx >= outputs.size() * n_steps) return;
  // Neighbouring threads read neighbouring words.
  const bool by_inputs = Order::kHasLinesOfOutputs;
  const int output = outputs.begin + (by_inputs ? idx / n_steps : idx % outputs.size());
  const int step = first_step + (by_inputs ? idx % n_steps : idx / outputs.size());
  const int row = rows.of(output), in_tile = row % kTileRows;
  uint32_t bits[4] = {};
#pragma unroll
  for (int i = 0; i < kStep; ++i) {
    const int input = kStep * step + i;
    if (!inputs.has(input)) continue;
    bits[i % 8 / 2] |= Order::code(words, lines, output, input) << (4 * (in_tile / 8 + i / 8 * 2) + 16 * (i % 2));
  }
  const size_t chunk = static_cast<size_t>(row / kTileRows) * n_chunks + step / kStepsOfChunk;
  uint32_t* own = codes + (chunk * stoker::kWarp + in_tile % 8 * 4) * kStepsOfChunk + step % kStepsOfChunk;
#pragma unroll
  for (int t = 0; t < 4; ++t) atomicOr(own + t * kStepsOfChunk, bits[t]);
}

}  // namespace

#define REPACK(name, order)                                                                                                        \
  extern "C" __global__ void __launch_bounds__(kThreads)                                                                           \
      name(uint32_t* codes, const uint32_t* words, int first, int n_lines, int line_words, int n_skipped, int n_outputs, int k,    \
           int first_row, int turn, int period, int n_chunks) {                                                                   \
    repack<order>(codes, words, Lines{first, n_lines, line_words, n_skipped, n_outputs, k}, Rows{first_row, turn, period}, n_chunks); \
  }
REPACK(repack_packed, Packed)
REPACK(repack_gptq, Gptq)
REPACK(repack_awq, Awq)
