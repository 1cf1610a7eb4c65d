//! The shape of one step on the GPU, and where its inputs lie in the packed buffer. Pure.

use stoker_kernels::{
    packed::{Field, Layout},
    plan::{DecodeItem, DecodeReader, PrefillTile},
    sampling::SampleRow,
};

/// Decode batches are padded, so that few graphs serve all and kernels are chosen for few sizes: up to a batch size to
/// multiples of a step. Products compute 16 rows at once at the least, so padding costs little.
const BUCKET_STEPS: [(usize, usize); 3] = [(64, 8), (256, 16), (usize::MAX, 64)];

/// Rows of the recorded steps that compute the end of one prompt. Beyond the last one a step is so long that its launches
/// hide behind it: one of 512 rows gains nothing from a graph.
const PROMPT_BUCKETS: [usize; 9] = [16, 32, 64, 96, 128, 160, 192, 224, 256];

/// Everything that fixes the launches of a step.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) struct StepShape {
    /// Tokens, padding included.
    pub(super) n_rows: usize,
    /// Rows at the front that decode, padding included: one token of one sequence each.
    pub(super) n_decode: usize,
    /// Pieces of decode attention, padding included.
    pub(super) n_items: usize,
    /// Tiles of prefill attention.
    pub(super) n_tiles: usize,
    /// Tiles of it in the last layer.
    pub(super) n_drawn_tiles: usize,
    /// Rows of the block table.
    pub(super) n_sequences: usize,
    /// Rows whose next token is drawn.
    pub(super) n_sampled: usize,
    /// Which they are.
    pub(super) sampled: Sampled,
    /// Blocks of a row of the block table.
    pub(super) blocks_per_row: usize,
}

/// Which rows are drawn.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) enum Sampled {
    /// All, in order.
    Every,
    /// Those that are listed.
    Listed,
}

/// Where the inputs lie.
#[derive(Clone, Copy, Debug)]
pub(super) struct StepLayout {
    /// Per row: its token, or which of the last step's draws it is.
    pub(super) sources: Field<i32>,
    /// Per row: position in the sequence.
    pub(super) positions: Field<i32>,
    /// Per row: where its keys and values go.
    pub(super) slots: Field<i32>,
    /// Rows that are drawn, if listed.
    pub(super) listed: Field<u32>,
    /// Pieces of decode attention.
    pub(super) items: Field<DecodeItem>,
    /// Who reads them: one a row that decodes.
    pub(super) readers: Field<DecodeReader>,
    /// Tiles of prefill attention.
    pub(super) tiles: Field<PrefillTile>,
    /// Those of the last layer: only drawn rows attend there.
    pub(super) drawn_tiles: Field<PrefillTile>,
    /// How each drawn row is drawn.
    pub(super) rows: Field<SampleRow>,
    /// Block ids, `n_sequences x blocks_per_row`.
    pub(super) table: Field<i32>,
    /// All of them.
    pub(super) whole: Layout,
}

impl StepLayout {
    /// One field behind the other.
    pub(super) fn new(shape: &StepShape) -> Self {
        let mut whole = Layout::default();
        let n_listed = if shape.sampled == Sampled::Listed { shape.n_sampled } else { 0 };
        Self {
            sources: whole.field(shape.n_rows),
            positions: whole.field(shape.n_rows),
            slots: whole.field(shape.n_rows),
            listed: whole.field(n_listed),
            items: whole.field(shape.n_items),
            readers: whole.field(shape.n_decode),
            tiles: whole.field(shape.n_tiles),
            drawn_tiles: whole.field(shape.n_drawn_tiles),
            rows: whole.field(shape.n_sampled),
            table: whole.field(shape.n_sequences * shape.blocks_per_row),
            whole,
        }
    }
}

/// The batch size whose graph serves `n` decoding sequences of at most `largest`.
pub(super) fn bucket(n: usize, largest: usize) -> usize {
    let (_, step) = BUCKET_STEPS.into_iter().find(|(end, _)| n <= *end).expect("the last step has no end");
    let padded = if n <= BUCKET_STEPS[0].1 { n.next_power_of_two() } else { n.next_multiple_of(step) };
    padded.min(largest)
}

/// All of them.
pub(super) fn buckets(largest: usize) -> impl Iterator<Item = usize> {
    std::iter::successors(Some(1), move |n| (*n < largest).then(|| bucket(n + 1, largest)))
}

/// The rows of the graph that serves a prompt's end of `n` rows in steps of at most `largest`, if one does.
pub(super) fn prompt_bucket(n: usize, largest: usize) -> Option<usize> {
    prompt_buckets(largest).find(|bucket| n <= *bucket)
}

/// All of them.
pub(super) fn prompt_buckets(largest: usize) -> impl Iterator<Item = usize> {
    PROMPT_BUCKETS.into_iter().filter(move |n| *n <= largest)
}

/// Row counts of steps with prompts in them that products are prepared for, above `decodes` and up to `largest`: four to an
/// octave, so that the algorithm of the next larger one is a good one for all between.
pub(super) fn prefill_sizes(decodes: usize, largest: usize) -> impl Iterator<Item = usize> {
    // An eighth of the octave's end is a quarter of its beginning.
    let next = move |n: &usize| (*n < largest).then(|| (n + ((n + 1).next_power_of_two() / 8).max(16)).min(largest));
    std::iter::successors(Some(decodes), next).skip(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_hold_the_batch_and_never_more_than_the_largest() {
        let buckets = [1, 3, 8, 9, 17, 65, 250, 256].map(|n| bucket(n, 256));
        assert_eq!(buckets, [1, 4, 8, 16, 24, 80, 256, 256]);
        assert_eq!((bucket(5, 6), bucket(300, 512)), (6, 320));
    }

    #[test]
    fn every_batch_has_its_bucket_in_the_list() {
        for largest in [1, 6, 64, 100, 256, 1000] {
            let all: Vec<usize> = buckets(largest).collect();
            assert!((1..=largest).all(|n| all.contains(&bucket(n, largest))), "{largest}");
            assert!(all.is_sorted_by(|a, b| a < b) && all.last() == Some(&largest), "{largest}");
        }
    }

    #[test]
    fn a_prompts_end_has_a_bucket_where_the_step_has_room_for_its_padding() {
        let found = [(1, 8192), (16, 8192), (100, 8192), (257, 8192), (97, 100), (96, 100)]
            .map(|(n, largest)| prompt_bucket(n, largest));
        assert_eq!(found, [Some(16), Some(16), Some(128), None, None, Some(96)]);
    }

    #[test]
    fn prefills_are_prepared_for_up_to_the_largest_step_in_steps_of_a_quarter_at_most() {
        for (decodes, largest) in [(256, 8192), (1, 512), (64, 64), (100, 5000)] {
            let all: Vec<usize> = prefill_sizes(decodes, largest).collect();
            assert!(all.last().is_none_or(|last| *last == largest), "{largest}");
            let from: Vec<usize> = std::iter::once(decodes).chain(all.clone()).collect();
            assert!(
                from.windows(2).all(|pair| pair[0] < pair[1] && pair[1] - pair[0] <= (pair[0] / 4).max(16)),
                "{all:?}"
            );
        }
        assert_eq!(prefill_sizes(256, 8192).count(), 20);
    }
}
