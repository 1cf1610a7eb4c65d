//! GPU memory that a model takes: weights as they lie there, keys and values, and everything that a step writes. The kernels' and
//! the engine's buffers are made by these sizes.

mod attention;
mod capacity;
mod cards;
mod decoder;
mod exchange;
mod formats;
mod four_bits;
mod inputs;
mod sampling;

pub use self::{
    attention::{
        BLOCK_SIZE, DECODE_TILE_ROWS, Heads, PIECE_TOKENS_MIN, PREFILL_TILE_ROWS, PrefillSplit, ScratchSize,
        SplitPolicy, decode_items_max, prefill_pieces_max, prefill_split,
    },
    capacity::{
        BESIDE_E4M3_ROWS, COUNT_MAX, Capacity, CodeSums, NORM_TILE, SUM_DIGITS, StepBounds, TILES_MAX, UPDATE_ROWS_MAX,
        WIDENED_ROWS_MIN, WORKSPACE_BYTES, norm_tiles,
    },
    cards::{CARDS, Card, Chip},
    decoder::DecoderSizes,
    exchange::{Counted, ExchangeSize, LINE_THREADS, LINE_UNITS, LOGIT_CHUNKS, Push},
    formats::{LayerFormats, WeightFormat, layer_formats},
    four_bits::{CHUNK, CHUNK_WORDS, GroupSize, Int4Size, STEP, TILE_ROWS},
    inputs::{
        DECODE_ITEM_BYTES, DECODE_READER_BYTES, EDITED_MAX, ENTRIES_MAX, PREFILL_TILE_BYTES, SAMPLE_ROW_BYTES,
        SLOT_ENTRY_BYTES, TOKEN_EDIT_BYTES, end_of_field, mask_input_words, newcomer_words,
    },
    sampling::{
        EDITS_MAX, LOGPROB_WORDS, LOGPROBS_MAX, SAMPLE_PIECES_MAX, marks_bytes, mask_words, sample_scratch_bytes,
    },
};

/// Number format of keys and values.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
pub enum KvFormat {
    /// As they are computed.
    #[default]
    Bf16,
    /// Half the bytes: a byte each, and two scales a KV head, one for its keys and one for its values.
    E4m3,
}

impl KvFormat {
    /// All.
    pub const ALL: [Self; 2] = [Self::Bf16, Self::E4m3];

    /// Bytes of a number.
    pub fn bytes(self) -> usize {
        match self {
            Self::Bf16 => 2,
            Self::E4m3 => 1,
        }
    }
}

/// Outputs of a block of e4m3, as kernels read its scale. Those of checkpoints are taller: 128, of which these are parts.
pub const BLOCK_OUTPUTS: usize = 8;
/// Its inputs.
pub const BLOCK_INPUTS: usize = 128;

/// Scales of each [`BLOCK_OUTPUTS`] rows of a matrix in blocks: whole pieces of what a bulk copy moves, so the last ones may be of no inputs.
pub fn block_scales_of_rows(k: usize) -> usize {
    k.div_ceil(BLOCK_INPUTS).next_multiple_of(4)
}

/// All scales of such a matrix.
pub fn block_scales(n: usize, k: usize) -> usize {
    n.div_ceil(BLOCK_OUTPUTS) * block_scales_of_rows(k)
}
