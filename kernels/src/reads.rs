//! What is read of prompts: how likely their own tokens were, and sums of rows, which embeddings are the mean of. Checks buffers, launches.

use cudarc::driver::{CudaView, CudaViewMut};
use half::bf16;

use crate::{
    KernelError, Kernels, check_len,
    launch::{self, Rows},
    sampling::{LOGPROB_WORDS, LOGPROBS_MAX},
};

/// Words of one token's score: its log-probabilities, and its rank behind them.
pub const SCORE_WORDS: usize = LOGPROB_WORDS + 1;

/// Scores of given tokens, one after each row of logits.
#[derive(Debug)]
pub struct ScoreTokens<'a> {
    /// [`SCORE_WORDS`] a row.
    pub out: CudaViewMut<'a, u32>,
    /// Rows of `vocab`.
    pub logits: CudaView<'a, f32>,
    /// One a row, below `vocab`.
    pub tokens: CudaView<'a, u32>,
    /// Logits of a row.
    pub vocab: usize,
    /// Likeliest tokens beside, at most [`LOGPROBS_MAX`].
    pub n_top: usize,
}

/// What the device says of one token.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenScore {
    /// Natural logarithm of its probability; NaN of a row with a NaN.
    pub logprob: f32,
    /// Tokens that are likelier, and one.
    pub rank: u32,
    /// The likeliest with their log-probabilities, of equals the lowest first.
    pub top: Vec<(u32, f32)>,
}

impl TokenScore {
    /// Of its words.
    pub fn of(words: &[u32]) -> Self {
        let top = words[2..].chunks_exact(2).take(words[1] as usize);
        Self {
            logprob: f32::from_bits(words[0]),
            rank: words[LOGPROB_WORDS],
            top: top.map(|pair| (pair[0], f32::from_bits(pair[1]))).collect(),
        }
    }
}

/// Consecutive rows that are added to one sum. The same fields as in `csrc/sum_rows.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct RowSegment {
    /// Which sum.
    pub slot: u32,
    /// The first row.
    pub first_row: u32,
    /// How many.
    pub n_rows: u32,
}

records!(RowSegment);

/// Sums of rows.
#[derive(Debug)]
pub struct SumRows<'a> {
    /// Rows of `width`: what is added to.
    pub sums: CudaViewMut<'a, f64>,
    /// Rows of `width`.
    pub rows: CudaView<'a, bf16>,
    /// No two of the same slot; slots and rows lie inside.
    pub segments: CudaView<'a, RowSegment>,
    /// Values of a row.
    pub width: usize,
}

impl Kernels {
    /// Adds rows up.
    pub fn sum_rows(&self, mut op: SumRows<'_>) -> Result<(), KernelError> {
        const OP: &str = "sum_rows";
        let config = launch::sum_rows(op.segments.len(), op.width)?;
        check_len(OP, "sums", op.sums.len() % op.width, 0)?;
        check_len(OP, "rows", op.rows.len() % op.width, 0)?;
        let launch = self.functions.launch(OP, config).write(&mut op.sums).read(&op.rows).read(&op.segments);
        launch.int(op.width).start()
    }

    /// Scores tokens.
    pub fn score_tokens(&self, mut op: ScoreTokens<'_>) -> Result<(), KernelError> {
        const OP: &str = "score_tokens";
        let rows = Rows { n_rows: op.tokens.len(), width: op.vocab };
        let config = launch::score_tokens(rows)?;
        assert!(op.n_top <= LOGPROBS_MAX, "requests for more are refused");
        check_len(OP, "logits", op.logits.len(), rows.n_rows * rows.width)?;
        check_len(OP, "out", op.out.len(), rows.n_rows * SCORE_WORDS)?;
        let launch = self.functions.launch(OP, config).write(&mut op.out).read(&op.logits).read(&op.tokens);
        launch.int(op.vocab).int(op.n_top).start()
    }
}
