//! Launches of sums over the ranks of a group.

use super::{Entry, LaunchConfig, Residual, Rows, config, count, not_empty, rms_norm};
use crate::error::KernelError;

/// Rows up to which a sum pushes them to the other ranks: above, bytes cost more than waiting.
pub const PUSHED_ROWS_MAX: usize = 32;
/// Rows from which on ranks meet in a launch of their own.
pub const MEETING_ROWS_MIN: usize = 256;
/// Blocks of a row of logits; the same constant as in `csrc/reduce.cu`.
pub const LOGIT_CHUNKS: usize = 8;

/// How the ranks' rows come together.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Way {
    /// Each sends its own to the others.
    Pushed,
    /// Each reads the others' where they lie, when these have said that they are there, row by row.
    Pulled,
    /// The same behind a launch in which they say so for all rows.
    PulledBehindMeeting,
}

impl Way {
    /// For so many rows.
    pub fn of(n_rows: usize) -> Self {
        match n_rows {
            ..=PUSHED_ROWS_MAX => Self::Pushed,
            ..MEETING_ROWS_MIN => Self::Pulled,
            _ => Self::PulledBehindMeeting,
        }
    }
}

/// What leaves a sum.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Reduced {
    /// The sum.
    Sum,
    /// The norm of the residual with the sum added.
    Norm,
    /// The same in e4m3.
    QuantisedNorm,
}

/// Sums of `rows`: a block a row, a 16-byte vector or four a thread.
pub fn reduce(rows: Rows, way: Way, gives: Reduced) -> Result<LaunchConfig, KernelError> {
    let config = rms_norm(rows, Residual::Added)?;
    let is_narrow = config.entry == Entry::AddRmsNormV1;
    let entry = match (gives, way) {
        (Reduced::Sum, Way::Pushed) => [Entry::ReducePushedV1, Entry::ReducePushedV4],
        (Reduced::Sum, _) => [Entry::ReducePulledV1, Entry::ReducePulledV4],
        (Reduced::Norm, Way::Pushed) => [Entry::ReduceNormPushedV1, Entry::ReduceNormPushedV4],
        (Reduced::Norm, _) => [Entry::ReduceNormPulledV1, Entry::ReduceNormPulledV4],
        (Reduced::QuantisedNorm, Way::Pushed) => [Entry::ReduceNormE4m3PushedV1, Entry::ReduceNormE4m3PushedV4],
        (Reduced::QuantisedNorm, _) => [Entry::ReduceNormE4m3PulledV1, Entry::ReduceNormE4m3PulledV4],
    };
    Ok(LaunchConfig { entry: entry[usize::from(!is_narrow)], ..config })
}

/// Ranks wait for each other.
pub fn meet_ranks() -> LaunchConfig {
    config(Entry::MeetRanks, [1, 1, 1], 32)
}

/// Logits of `n_rows` from all ranks.
pub fn gather_logits(n_rows: usize) -> Result<LaunchConfig, KernelError> {
    not_empty("gather_logits", n_rows)?;
    Ok(config(Entry::GatherLogits, [count(n_rows * LOGIT_CHUNKS), 1, 1], 256))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_rows_are_pushed_and_many_pulled_by_a_block_each() {
        assert_eq!([32, 33, 255, 256].map(Way::of), [Way::Pushed, Way::Pulled, Way::Pulled, Way::PulledBehindMeeting]);
        let narrow = reduce(Rows { n_rows: 7, width: 4096 }, Way::Pushed, Reduced::Norm).unwrap();
        assert_eq!((narrow.entry, narrow.grid, narrow.threads), (Entry::ReduceNormPushedV1, [7, 1, 1], 512));
        let wide = reduce(Rows { n_rows: 1, width: 16384 }, Way::Pulled, Reduced::QuantisedNorm).unwrap();
        assert_eq!((wide.entry, wide.threads), (Entry::ReduceNormE4m3PulledV4, 512));
        assert_eq!(gather_logits(3).unwrap().grid, [24, 1, 1]);
    }
}
