//! The inputs of a step, packed one behind the other: how many words they take. The kernels' records are as large as is said here;
//! the compiler holds them to it.

use super::sampling::{EDITS_MAX, mask_words};

/// Words between the beginnings of fields are even: kernels read 16 bytes at once.
const ALIGN_WORDS: usize = 2;
const WORD_BYTES: usize = 8;

/// Bytes of a piece of decode attention.
pub const DECODE_ITEM_BYTES: usize = 32;
/// Bytes of who reads it.
pub const DECODE_READER_BYTES: usize = 12;
/// Bytes of a tile of prefill attention.
pub const PREFILL_TILE_BYTES: usize = 36;
/// Bytes of how a row is drawn.
pub const SAMPLE_ROW_BYTES: usize = 64;
/// Bytes of a sequence that enters its slot.
pub const SLOT_ENTRY_BYTES: usize = 24;
/// Bytes of an edit of a logit.
pub const TOKEN_EDIT_BYTES: usize = 12;
/// Sequences that enter their slots in one copy at most.
pub const ENTRIES_MAX: usize = 64;
/// Sequences with as many edits as possible that one copy has room for.
pub const EDITED_MAX: usize = 8;

/// Where a field of so many bytes ends that begins at that word: the next one begins there.
pub fn end_of_field(begin_words: usize, n_bytes: usize) -> usize {
    (begin_words + n_bytes.div_ceil(WORD_BYTES)).next_multiple_of(ALIGN_WORDS)
}

fn words_of<const N: usize>(fields: [usize; N]) -> usize {
    fields.into_iter().fold(0, end_of_field)
}

/// Counts of the largest step.
pub(super) struct LargestStep {
    pub(super) n_rows: usize,
    pub(super) n_sequences: usize,
    pub(super) n_items: usize,
    pub(super) n_tiles: usize,
    pub(super) n_drawn_tiles: usize,
    pub(super) blocks_per_row: usize,
}

impl LargestStep {
    /// Words of its inputs: tokens, positions, slots, drawn rows, pieces, readers, tiles, the last layer's tiles, draws, block table.
    pub(super) fn words(&self) -> usize {
        let Self { n_rows, n_sequences, n_items, n_tiles, n_drawn_tiles, blocks_per_row } = *self;
        words_of([
            4 * n_rows,
            4 * n_rows,
            4 * n_rows,
            4 * n_sequences,
            DECODE_ITEM_BYTES * n_items,
            DECODE_READER_BYTES * n_sequences,
            PREFILL_TILE_BYTES * n_tiles,
            PREFILL_TILE_BYTES * n_drawn_tiles,
            SAMPLE_ROW_BYTES * n_sequences,
            4 * n_sequences * blocks_per_row,
        ])
    }
}

/// Words of the largest copy of sequences that enter their slots.
pub fn newcomer_words(max_tokens: usize) -> usize {
    words_of([SLOT_ENTRY_BYTES * ENTRIES_MAX, 4 * max_tokens.max(1), TOKEN_EDIT_BYTES * EDITED_MAX * EDITS_MAX, 0])
}

/// Words of the largest copy of masks.
pub fn mask_input_words(n_rows: usize, vocab: usize) -> usize {
    words_of([4 * n_rows * mask_words(vocab), 0])
}
