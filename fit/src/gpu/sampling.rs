//! What draws keep on the device.

/// Tokens of one sequence whose logits may have an edit. The same constant as in the kernels' `csrc/sampling.cuh`.
pub const EDITS_MAX: usize = 2047;
/// Likeliest tokens that a row may ask for.
pub const LOGPROBS_MAX: usize = 20;
/// Words of one row's log-probabilities: the drawn token's, how many follow, then pairs. The same constant as in the kernels'
/// `csrc/sample_options.cu`.
pub const LOGPROB_WORDS: usize = 2 + 2 * LOGPROBS_MAX;
/// Pieces of one row of logits at most.
pub const SAMPLE_PIECES_MAX: usize = 32;

/// Bytes of what prompt, completion and edits of running sequences mean to each token.
pub fn marks_bytes(n_slots: usize, vocab: usize) -> usize {
    n_slots * (4 * vocab + 8 * EDITS_MAX)
}

/// Bytes of floors of rows, and of pieces of rows that wait for their comparison.
pub fn sample_scratch_bytes(n_rows: usize) -> usize {
    n_rows * (4 + 8 * SAMPLE_PIECES_MAX + 4)
}

/// Words of a row's mask.
pub fn mask_words(vocab: usize) -> usize {
    vocab.div_ceil(32)
}
