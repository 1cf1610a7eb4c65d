//! How much GPU memory an executor takes besides weights and KV cache, before it takes any: the largest step, and the sizes that
//! all its buffers are allocated by.

use std::ops::Range;

use super::{
    DecoderSizes, ExchangeSize, GroupSize, Heads, PrefillSplit, ScratchSize, SplitPolicy, WeightFormat,
    attention::{decode_items_max, prefill_pieces_max, prefill_scratch_bytes},
    inputs::{LargestStep, SAMPLE_ROW_BYTES, mask_input_words, newcomer_words},
    sampling::{LOGPROB_WORDS, marks_bytes, sample_scratch_bytes},
};
use crate::blocks_for;

/// Recorded graphs of a layer, and the driver's own buffers for them and for launches: what is left of a measured peak (`make bench-memory-gpu`).
const GRAPHS_OF_LAYER_BYTES: u64 = 1 << 20;
/// Packed weights on their way, where the GPU puts them in another order: buffers of the kernels' `upload`, two for each of its threads.
const STAGING_BYTES: u64 = 48 << 20;
/// What cuBLASLt may use beside its operands.
pub const WORKSPACE_BYTES: usize = 32 << 20;
/// Tiles of attention, and rows, that one launch takes.
pub const TILES_MAX: usize = 65_535;
/// Times that a token may occur in a completion: what the bits of a mark count.
pub const COUNT_MAX: usize = (1 << 20) - 1;
/// Rows from which weights of four bits are widened to e4m3 for a product.
pub const WIDENED_ROWS_MIN: usize = 256;
/// Rows of e4m3 that weights of four bits in groups of 128 are multiplied beside as they are.
pub const BESIDE_E4M3_ROWS: Range<usize> = 17..641;
/// Sums of a group of 128 values that such rows have room for; a product may read those of rows that are not there.
const BESIDE_CODES_STRIDE: usize = 1024;
/// Rows of x of the tallest tile beside such rows.
const BESIDE_TILE_ROWS: usize = 128;
/// Bytes of such a sum, which is a few numbers of e4m3; a `uint4` in the kernels' `csrc/quantise.cuh`.
pub const SUM_DIGITS: usize = 16;
/// Most rows of an update of some rows; the same constant as `kScaledRows` in the kernels' `csrc/gemm_residual.cuh`.
pub const UPDATE_ROWS_MAX: usize = 128;
/// Values of the residual stream whose squares an update adds up at the least.
pub const NORM_TILE: usize = 16;

/// Sums of squares that an update leaves of a row for a norm over `width` values, at the most.
pub fn norm_tiles(width: usize) -> usize {
    width.div_ceil(NORM_TILE)
}

/// Room for sums of each 128 values of rows that lie beside codes: [groups][stride], [`SUM_DIGITS`] bytes each.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct CodeSums {
    /// Groups of 128 values of a row.
    pub n_groups: usize,
    /// Rows that a group has room for: with those that the last tile reads and that are not there.
    pub stride: usize,
}

impl CodeSums {
    /// Of rows of so many values, as many rows as are multiplied beside codes where speed decides.
    pub fn of_some_rows(width: usize) -> Self {
        Self { n_groups: width / GroupSize::G128.values(), stride: BESIDE_CODES_STRIDE }
    }

    /// The same of up to so many rows.
    pub fn of_rows(width: usize, max_rows: usize) -> Self {
        Self { stride: max_rows.next_multiple_of(BESIDE_TILE_ROWS), ..Self::of_some_rows(width) }
    }

    /// Of rows of another width in the same room.
    pub fn of_width(self, width: usize) -> Self {
        Self { n_groups: width / GroupSize::G128.values(), ..self }
    }

    /// Of device memory.
    pub fn bytes(self) -> usize {
        self.n_groups * self.stride * SUM_DIGITS
    }
}

/// What bounds every step.
#[derive(Clone, Copy, Debug)]
pub struct StepBounds {
    /// The rank's heads.
    pub heads: Heads,
    /// How decode attention is cut.
    pub policy: SplitPolicy,
    /// How prefill attention is cut.
    pub prefill_split: PrefillSplit,
    /// Sequences that run together.
    pub max_num_seqs: usize,
    /// Tokens of a step.
    pub max_rows: usize,
    /// Tokens of a sequence.
    pub max_model_len: usize,
}

/// The largest step.
#[derive(Clone, Copy, Debug)]
pub struct Capacity {
    /// Tokens of a step.
    pub max_rows: usize,
    /// Rows drawn in a step.
    pub max_sampled: usize,
    /// Pieces of decode attention.
    pub max_items: usize,
    /// How decode attention is cut.
    pub policy: SplitPolicy,
    /// Pieces of cut prefill tiles.
    pub max_pieces: usize,
    /// 8-byte words of packed inputs.
    pub input_words: usize,
    /// Tokens of sequences that enter their slots in one copy.
    pub max_history: usize,
    /// Tokens of a sequence.
    pub max_model_len: usize,
}

impl Capacity {
    /// Of steps within these bounds.
    pub fn new(bounds: &StepBounds) -> Self {
        let StepBounds { heads, policy, prefill_split, max_num_seqs, max_rows, max_model_len } = *bounds;
        // A step that decodes and prefills at once has as many pieces as its decodes.
        let max_items = decode_items_max(max_num_seqs, max_model_len, heads, policy);
        let max_pieces = prefill_pieces_max(heads, prefill_split);
        let largest = LargestStep {
            n_rows: max_rows,
            n_sequences: max_num_seqs,
            n_items: max_items,
            // Every sequence may end in a tile of its own; a tile holds at least one token of one group.
            n_tiles: max_rows + max_pieces,
            n_drawn_tiles: max_num_seqs + max_pieces,
            blocks_per_row: blocks_for(max_model_len),
        };
        Self {
            max_rows,
            max_sampled: max_num_seqs,
            max_items,
            policy,
            max_pieces,
            input_words: largest.words(),
            // As many prompts as one step computes, or one sequence that was preempted at its full length.
            max_history: max_rows.max(max_model_len),
            max_model_len,
        }
    }

    /// Refuses sizes of which a launch would refuse some step, or a draw could not count a token. Now, before anything is
    /// uploaded.
    pub fn check(&self) -> Result<(), String> {
        let n_tiles = self.max_rows + self.max_pieces;
        if n_tiles > TILES_MAX {
            let most = TILES_MAX.saturating_sub(self.max_pieces);
            return Err(format!(
                "{} tokens a step are more than the GPU's kernels take: set max_batched_tokens to at most {most}",
                self.max_rows
            ));
        }
        if self.max_model_len > COUNT_MAX {
            return Err(format!(
                "a context of {} tokens is more than draws count: set max_model_len to at most {COUNT_MAX}",
                self.max_model_len
            ));
        }
        Ok(())
    }

    /// Device bytes of everything that a step writes or reads besides weights and cache.
    pub fn workspace_bytes(&self, sizes: &DecoderSizes) -> u64 {
        let &DecoderSizes { hidden, inner, vocab, heads, .. } = sizes;
        let row_values = 3 * hidden + heads.qkv_width() + sizes.attended_width() + 3 * inner;
        let sampled = self.max_sampled * (2 * sizes.attended_width() + 4 * vocab + SAMPLE_ROW_BYTES);
        let scratch = self.decode_scratch(heads).bytes()
            + prefill_scratch_bytes(self.max_pieces, heads)
            + sample_scratch_bytes(self.max_sampled)
            + marks_bytes(self.max_sampled, vocab)
            + 4 * self.result_words();
        let inputs = self.input_words + newcomer_words(self.max_history) + mask_input_words(self.max_sampled, vocab);
        let angles = 4 * sizes.n_rope_sets * self.max_model_len * heads.dim;
        let squares = 4 * UPDATE_ROWS_MAX * norm_tiles(hidden);
        let (rows, widened) = (self.quantised_rows(sizes), self.widened(sizes));
        let (quantised, scales) = (rows.0 + widened.0, rows.1 + widened.1);
        let shared = self.exchange(sizes, sizes.rank.of).map_or(0, |size| size.bytes());
        let arriving = 2 * self.arriving_values(sizes);
        let bytes = self.max_rows * (2 * row_values + 4)
            + quantised
            + 4 * scales
            + self.code_sums(sizes).bytes()
            + squares
            + sampled
            + scratch
            + angles
            + shared
            + arriving
            + 8 * inputs;
        let graphs = sizes.layers.len() as u64 * GRAPHS_OF_LAYER_BYTES;
        let staging = if has_int4(sizes) { STAGING_BYTES } else { 0 };
        bytes as u64 + WORKSPACE_BYTES as u64 + graphs + staging
    }

    /// What ranks of a model share, if there are some; so many of them are there.
    pub fn exchange(&self, sizes: &DecoderSizes, n_ranks: usize) -> Option<ExchangeSize> {
        (sizes.rank.of > 1).then(|| ExchangeSize {
            n_ranks,
            push: sizes.push,
            max_rows: self.max_rows,
            width: sizes.hidden,
            max_logit_rows: self.max_sampled,
            logit_share: sizes.rank.vocabulary_share(sizes.vocab),
        })
    }

    /// Values of rows that the stage before leaves for this one; 0 where there is none.
    pub fn arriving_values(&self, sizes: &DecoderSizes) -> usize {
        if sizes.stage.is_first() { 0 } else { self.max_rows * sizes.hidden }
    }

    /// Values and rows that are quantised at once, at the most.
    pub fn quantised_rows(&self, sizes: &DecoderSizes) -> (usize, usize) {
        let quantises = |format: &WeightFormat| match format {
            WeightFormat::Bf16 => false,
            WeightFormat::Int4(group) => self.only_speed_counts() || is_always_beside(*group, sizes),
            WeightFormat::E4m3 | WeightFormat::E4m3Blocks => true,
        };
        match sizes.formats().iter().any(quantises) {
            true => (self.max_rows * sizes.widest_input(), self.max_rows),
            false => (0, 0),
        }
    }

    /// The sums of what is quantised beside codes.
    pub fn code_sums(&self, sizes: &DecoderSizes) -> CodeSums {
        let width = sizes.widest_input();
        let is_beside =
            |format: &WeightFormat| matches!(format, WeightFormat::Int4(group) if is_always_beside(*group, sizes));
        match self.only_speed_counts() {
            true if has_int4(sizes) => CodeSums::of_some_rows(width),
            false if sizes.formats().iter().any(is_beside) => CodeSums::of_rows(width, self.max_rows),
            _ => CodeSums::default(),
        }
    }

    /// Values and outputs of the projection that is widened from four bits to e4m3 for a product, at the most.
    pub fn widened(&self, sizes: &DecoderSizes) -> (usize, usize) {
        let widens = self.only_speed_counts() && self.max_rows >= WIDENED_ROWS_MIN;
        if widens { sizes.largest_int4() } else { (0, 0) }
    }

    /// Where bits count every number of rows is multiplied by codes in one way; a policy of fixed pieces says so.
    fn only_speed_counts(&self) -> bool {
        matches!(self.policy, SplitPolicy::Balanced { .. })
    }

    /// Words that a step's results take: tokens, then log-probabilities.
    pub fn result_words(&self) -> usize {
        self.max_sampled * (1 + LOGPROB_WORDS)
    }

    /// What decode attention's scratch is made for.
    pub fn decode_scratch(&self, heads: Heads) -> ScratchSize {
        ScratchSize { n_sequences: self.max_sampled, n_items: self.max_items, policy: self.policy, heads }
    }
}

/// Whether rows are quantised beside such codes however many they are, where bits count.
fn is_always_beside(group: GroupSize, sizes: &DecoderSizes) -> bool {
    group == GroupSize::G128 && sizes.rank.of == 1
}

fn has_int4(sizes: &DecoderSizes) -> bool {
    sizes.formats().iter().any(|format| format.is_int4())
}
