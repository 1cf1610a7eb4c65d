//! How much GPU memory an executor takes besides weights and KV cache, before it takes any. Pure arithmetic over the same
//! sizes that `Forward` allocates by.

use stoker_kernels::{
    attention::{PrefillScratch, ScratchSize},
    blas,
    choose::WeightFormat,
    launch::{Heads, UPDATE_ROWS_MAX, norm_tiles},
    plan::{SplitPolicy, prefill_pieces_max},
    ranks::ExchangeSize,
    sampling::{COUNT_MAX, LOGPROB_WORDS, Marks, SampleRow, SampleScratch},
};

use super::{batch::BatchLimits, forward::Others, layout::StepLayout, masks, shape::ModelShape, slots};
use crate::{
    exec::cuda::{batch::decode_shape, layout::StepShape},
    sched::SchedLimits,
};

/// Recorded graphs, the driver's own buffers for them and for launches: measured once, taken generously.
const GRAPHS_BYTES: u64 = 512 << 20;

/// Tiles of attention, and rows, that one launch takes.
const TILES_MAX: usize = 65_535;

/// The largest step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Capacity {
    /// Tokens of a step.
    pub(super) max_rows: usize,
    /// Rows drawn in a step.
    pub(super) max_sampled: usize,
    /// Pieces of decode attention.
    pub(super) max_items: usize,
    /// How decode attention is cut.
    pub(super) policy: SplitPolicy,
    /// Pieces of cut prefill tiles.
    pub(super) max_pieces: usize,
    /// 8-byte words of packed inputs.
    pub(super) input_words: usize,
    /// Tokens of sequences that enter their slots in one copy.
    pub(super) max_history: usize,
}

impl Capacity {
    /// Of steps within the scheduler's bounds.
    pub(super) fn new(sched: &SchedLimits, limits: &BatchLimits) -> Self {
        let max_sampled = sched.max_num_seqs;
        // A step that decodes and prefills at once has as many pieces as its decodes.
        let max_items = limits.items_max(max_sampled);
        let max_pieces = prefill_pieces_max(limits.heads, limits.prefill_split);
        let largest = StepShape {
            n_rows: sched.max_batched_tokens,
            // Every sequence may end in a tile of its own; a tile holds at least one token of one group.
            n_tiles: sched.max_batched_tokens + max_pieces,
            n_drawn_tiles: max_sampled + max_pieces,
            sampled: super::layout::Sampled::Listed,
            ..decode_shape(max_sampled, limits)
        };
        let input_words = StepLayout::new(&largest).whole.n_words();
        Self {
            max_rows: sched.max_batched_tokens,
            max_sampled,
            max_items,
            policy: limits.policy,
            max_pieces,
            input_words,
            // As many prompts as one step computes, or one sequence that was preempted at its full length.
            max_history: sched.max_batched_tokens.max(sched.max_model_len),
        }
    }

    /// Refuses sizes of which a launch would refuse some step, or a draw could not count a token. Now, before anything is
    /// uploaded.
    pub(super) fn check(&self, sched: &SchedLimits) -> Result<(), String> {
        let n_tiles = self.max_rows + self.max_pieces;
        if n_tiles > TILES_MAX {
            let most = TILES_MAX.saturating_sub(self.max_pieces);
            return Err(format!(
                "{} tokens a step are more than the GPU's kernels take: set max_batched_tokens to at most {most}",
                self.max_rows
            ));
        }
        if sched.max_model_len > COUNT_MAX {
            return Err(format!(
                "a context of {} tokens is more than draws count: set max_model_len to at most {COUNT_MAX}",
                sched.max_model_len
            ));
        }
        Ok(())
    }

    /// Device bytes of everything that a step writes or reads besides weights and cache.
    pub(super) fn workspace_bytes(&self, shape: &ModelShape, max_model_len: usize) -> u64 {
        let row_values = 3 * shape.hidden + shape.heads.qkv_width() + shape.attended_width() + 3 * shape.inner;
        let sampled = self.max_sampled * (2 * shape.attended_width() + 4 * shape.vocab + size_of::<SampleRow>());
        let scratch = self.decode_scratch(shape.heads).bytes()
            + PrefillScratch::bytes(self.max_pieces, shape.heads)
            + SampleScratch::bytes(self.max_sampled)
            + Marks::bytes(self.max_sampled, shape.vocab)
            + 4 * self.result_words();
        let inputs =
            self.input_words + slots::input_words(self.max_history) + masks::input_words(self.max_sampled, shape.vocab);
        let angles = 4 * shape.n_rope_sets() * max_model_len * shape.heads.dim;
        let squares = 4 * UPDATE_ROWS_MAX * norm_tiles(shape.hidden);
        let (quantised, scales) = self.quantised_rows(shape);
        let shared = self.exchange(shape, Others::There).map_or(0, |size| size.bytes());
        let bytes = self.max_rows * (2 * row_values + 4)
            + quantised
            + 4 * scales
            + squares
            + sampled
            + scratch
            + angles
            + shared
            + 8 * inputs;
        bytes as u64 + blas::WORKSPACE_BYTES as u64 + GRAPHS_BYTES
    }

    /// What ranks of a model share, if there are some.
    pub(super) fn exchange(&self, shape: &ModelShape, others: Others) -> Option<ExchangeSize> {
        shape.is_shared().then(|| ExchangeSize {
            n_ranks: if others == Others::There { shape.rank.of } else { 1 },
            push: shape.push,
            max_rows: self.max_rows,
            width: shape.hidden,
            max_logit_rows: self.max_sampled,
            logit_share: shape.rank.vocabulary_share(shape.vocab),
        })
    }

    /// Values and rows that are quantised at once, at the most.
    pub(super) fn quantised_rows(&self, shape: &ModelShape) -> (usize, usize) {
        match shape.projections {
            WeightFormat::Bf16 | WeightFormat::Int4 => (0, 0),
            WeightFormat::E4m3 => (self.max_rows * shape.widest_input(), self.max_rows),
        }
    }

    /// Words that a step's results take: tokens, then log-probabilities.
    pub(super) fn result_words(&self) -> usize {
        self.max_sampled * (1 + LOGPROB_WORDS)
    }

    /// What decode attention's scratch is made for.
    pub(super) fn decode_scratch(&self, heads: Heads) -> ScratchSize {
        ScratchSize { n_sequences: self.max_sampled, n_items: self.max_items, policy: self.policy, heads }
    }
}
