//! Rows of a step that are read: those of all requests together, so that a step of many short texts reads them at once, and back to who
//! wanted which. Pure.

use std::{iter, ops::Range};

use stoker_kernels::reads::{RowSegment, TokenScore};

use crate::{
    exec::{RowsRead, RowsSpec, RowsWanted, Score},
    request::TokenId,
    sched::RawLogprobs,
};

/// Rows of all that are wanted, by what is wanted of them, in the order of who wants it.
#[derive(Debug, Default, PartialEq)]
pub(super) struct RowReads {
    /// Rows whose last norm is wanted.
    pub(super) outputs: Vec<u32>,
    /// Where those end of each who wants some.
    pub(super) output_ends: Vec<usize>,
    /// Rows that tokens are scored after.
    pub(super) scored: Vec<u32>,
    /// These tokens.
    pub(super) tokens: Vec<TokenId>,
    /// Likeliest tokens beside: as many as who wants most.
    pub(super) n_top: usize,
}

/// What they hold, in the same order.
#[derive(Debug, Default)]
pub(super) struct Read {
    /// Sums of rows, those of one who wants some behind those of another.
    pub(super) sums: Vec<f64>,
    /// One a row.
    pub(super) scores: Vec<TokenScore>,
}

impl RowReads {
    /// `first_row` says where a chunk of the step begins.
    pub(super) fn new(wanted: &[RowsSpec], first_row: impl Fn(usize) -> u32) -> Self {
        let mut all = Self::default();
        for spec in wanted {
            let rows = first_row(spec.chunk_idx) + spec.first_row as u32..;
            match &spec.wanted {
                RowsWanted::Scores { tokens, k } => {
                    all.scored.extend(rows.take(tokens.len()));
                    all.tokens.extend(tokens);
                    all.n_top = all.n_top.max(usize::from(*k));
                }
                RowsWanted::Outputs { n_rows } => {
                    all.outputs.extend(rows.take(*n_rows));
                    all.output_ends.push(all.outputs.len());
                }
            }
        }
        all
    }

    /// Whose those of `outputs` in this range are, as rows of their own.
    pub(super) fn segments(&self, of: Range<usize>) -> Vec<RowSegment> {
        let begins = iter::once(0).chain(self.output_ends.iter().copied());
        let segment = |(slot, (begin, end)): (usize, (usize, &usize))| {
            let (first, end) = (begin.max(of.start), of.end.min(*end));
            let segment = || {
                let [slot, first_row, n_rows] = [slot, first - of.start, end - first].map(|n| n as u32);
                RowSegment { slot, first_row, n_rows }
            };
            (first < end).then(segment)
        };
        begins.zip(&self.output_ends).enumerate().filter_map(segment).collect()
    }
}

impl Read {
    /// To each who wanted some, of outputs `width` wide.
    pub(super) fn shared_out(self, wanted: &[RowsSpec], width: usize) -> Vec<RowsRead> {
        let (mut sums, mut scores) = (self.sums.into_iter(), self.scores.into_iter());
        let mut of_one = |spec: &RowsSpec| match &spec.wanted {
            RowsWanted::Scores { tokens, k } => {
                let scores = scores.by_ref().zip(tokens).map(|(score, token)| scored(score, *token, *k));
                RowsRead::Scores(scores.collect())
            }
            RowsWanted::Outputs { n_rows } => {
                RowsRead::Sum { sums: sums.by_ref().take(width).collect(), n_rows: *n_rows }
            }
        };
        wanted.iter().map(&mut of_one).collect()
    }
}

fn scored(TokenScore { logprob, rank, mut top }: TokenScore, token: TokenId, k: u8) -> Score {
    top.truncate(usize::from(k));
    Score { token, rank, logprobs: RawLogprobs { chosen: logprob, top } }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outputs(chunk_idx: usize, first_row: usize, n_rows: usize) -> RowsSpec {
        RowsSpec { chunk_idx, first_row, wanted: RowsWanted::Outputs { n_rows } }
    }

    fn scores(chunk_idx: usize, first_row: usize, tokens: &[TokenId], k: u8) -> RowsSpec {
        RowsSpec { chunk_idx, first_row, wanted: RowsWanted::Scores { tokens: tokens.to_vec(), k } }
    }

    #[test]
    fn rows_of_all_are_read_together_and_given_back_to_each() {
        let wanted = [outputs(0, 3, 2), scores(1, 0, &[7, 8], 1), outputs(2, 0, 1), scores(3, 5, &[9], 3)];
        let reads = RowReads::new(&wanted, |chunk_idx| 100 * chunk_idx as u32);
        let (scored, tokens, output_ends) = (vec![100, 101, 305], vec![7, 8, 9], vec![2, 3]);
        assert_eq!(reads, RowReads { outputs: vec![3, 4, 200], output_ends, scored, tokens, n_top: 3 });

        let score = |rank| TokenScore { logprob: -1.0, rank, top: vec![(1, -0.5), (2, -0.6), (3, -0.7)] };
        let read = Read { sums: vec![0.0, 1.0, 2.0, 3.0], scores: vec![score(4), score(5), score(6)] };
        let back = read.shared_out(&wanted, 2);
        let of = |sums: [f64; 2], n_rows| RowsRead::Sum { sums: sums.to_vec(), n_rows };
        assert_eq!((&back[0], &back[2]), (&of([0.0, 1.0], 2), &of([2.0, 3.0], 1)));
        let ranks = |read: &RowsRead| match read {
            RowsRead::Scores(scores) => {
                scores.iter().map(|score| (score.token, score.rank, score.logprobs.top.len())).collect::<Vec<_>>()
            }
            RowsRead::Outputs { .. } | RowsRead::Sum { .. } => panic!("scores were wanted"),
        };
        assert_eq!((ranks(&back[1]), ranks(&back[3])), (vec![(7, 4, 1), (8, 5, 1)], vec![(9, 6, 3)]));
    }

    #[test]
    fn rows_of_one_that_passes_share_are_segments_of_each() {
        let wanted = [outputs(0, 0, 3), outputs(1, 0, 1), outputs(2, 0, 6)];
        let reads = RowReads::new(&wanted, |_| 0);
        let of = |range| -> Vec<[u32; 3]> {
            reads.segments(range).iter().map(|of| [of.slot, of.first_row, of.n_rows]).collect()
        };
        assert_eq!(of(0..4), [[0, 0, 3], [1, 3, 1]]);
        assert_eq!(of(4..8), [[2, 0, 4]]);
        assert_eq!((of(8..10), of(2..10)), (vec![[2, 0, 2]], vec![[0, 0, 1], [1, 1, 1], [2, 2, 6]]));
    }
}
