//! Launches of sums over the ranks of a group.

use stoker_fit::gpu::LINE_THREADS;

use super::{
    Entry, LOGIT_CHUNKS, LaunchConfig, Push, Residual, Rows, config, count, not_empty, refused, rms_norm, vectors,
};
use crate::error::KernelError;

/// Rows from which on ranks meet in a launch of their own.
const MEETING_ROWS_MIN: usize = 256;

/// Whether ranks share rows out, where they may, when norms leave in bf16 or in e4m3. Two meetings are paid for, and of two ranks each
/// takes in as many rows of bf16 either way.
pub fn shares_rows(n_rows: usize, n_ranks: usize, quantises: bool) -> bool {
    match (n_ranks, quantises) {
        (0..2, _) | (2, false) => false,
        (2, true) => n_rows >= 1024,
        _ => n_rows > MEETING_ROWS_MIN,
    }
}

/// How the ranks' rows come together.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Way {
    /// Each sends its own to the others.
    Pushed(Push),
    /// Each reads the others' where they lie, when these have said that they are there, row by row.
    Pulled,
    /// The same behind a launch in which they say so for all rows.
    PulledBehindMeeting,
}

impl Way {
    /// For so many rows.
    pub fn of(n_rows: usize, push: Push) -> Self {
        match n_rows {
            n if n <= push.max_rows() => Self::Pushed(push),
            n if n < MEETING_ROWS_MIN => Self::Pulled,
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

/// Sums of `rows`: a block a row, one 16-byte vector or several a thread.
pub fn reduce(rows: Rows, way: Way, gives: Reduced) -> Result<LaunchConfig, KernelError> {
    if way == Way::Pushed(Push::Lines) {
        return reduce_lines(rows, gives);
    }
    let config = rms_norm(rows, Residual::Added)?;
    let [one, four] = match (gives, way) {
        (Reduced::Sum, Way::Pushed(_)) => [Entry::ReduceWordsV1, Entry::ReduceWordsV4],
        (Reduced::Sum, _) => [Entry::ReducePulledV1, Entry::ReducePulledV4],
        (Reduced::Norm, Way::Pushed(_)) => [Entry::ReduceNormWordsV1, Entry::ReduceNormWordsV4],
        (Reduced::Norm, _) => [Entry::ReduceNormPulledV1, Entry::ReduceNormPulledV4],
        (Reduced::QuantisedNorm, Way::Pushed(_)) => [Entry::ReduceNormE4m3WordsV1, Entry::ReduceNormE4m3WordsV4],
        (Reduced::QuantisedNorm, _) => [Entry::ReduceNormE4m3PulledV1, Entry::ReduceNormE4m3PulledV4],
    };
    Ok(LaunchConfig { entry: if config.entry == Entry::AddRmsNormV1 { one } else { four }, ..config })
}

/// Norms of a rank's share of the rows, for all ranks, in bf16 or in e4m3.
pub fn reduce_shares(own: Rows, quantises: bool) -> Result<LaunchConfig, KernelError> {
    let config = rms_norm(own, Residual::Added)?;
    let [one, four] = match quantises {
        false => [Entry::ReduceNormSharesV1, Entry::ReduceNormSharesV4],
        true => [Entry::ReduceNormE4m3SharesV1, Entry::ReduceNormE4m3SharesV4],
    };
    Ok(LaunchConfig { entry: if config.entry == Entry::AddRmsNormV1 { one } else { four }, ..config })
}

fn reduce_lines(rows: Rows, gives: Reduced) -> Result<LaunchConfig, KernelError> {
    vectors("reduce", rows)?;
    let [one, two, four] = match gives {
        Reduced::Sum => [Entry::ReduceLinesV1, Entry::ReduceLinesV2, Entry::ReduceLinesV4],
        Reduced::Norm => [Entry::ReduceNormLinesV1, Entry::ReduceNormLinesV2, Entry::ReduceNormLinesV4],
        Reduced::QuantisedNorm => {
            [Entry::ReduceNormE4m3LinesV1, Entry::ReduceNormE4m3LinesV2, Entry::ReduceNormE4m3LinesV4]
        }
    };
    let n_slots = Push::n_lines(rows.width) * LINE_THREADS;
    let (entry, per_thread) = match n_slots {
        0..=1024 => (one, 1),
        1025..=2048 => (two, 2),
        2049..=4096 => (four, 4),
        _ => return Err(refused("reduce", format!("width {} is more than 30720", rows.width))),
    };
    Ok(config(entry, [count(rows.n_rows), 1, 1], count(n_slots.div_ceil(per_thread).next_multiple_of(32))))
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
        let ways = |push| [32, 33, 255, 256, 257].map(|n| Way::of(n, push));
        let (words, lines, late) = (Way::Pushed(Push::Words), Way::Pushed(Push::Lines), Way::PulledBehindMeeting);
        assert_eq!(ways(Push::Words), [words, Way::Pulled, Way::Pulled, late, late]);
        assert_eq!(ways(Push::Lines), [lines, lines, lines, lines, late]);
        let narrow = reduce(Rows { n_rows: 7, width: 4096 }, words, Reduced::Norm).unwrap();
        assert_eq!((narrow.entry, narrow.grid, narrow.threads), (Entry::ReduceNormWordsV1, [7, 1, 1], 512));
        let wide = reduce(Rows { n_rows: 1, width: 16384 }, Way::Pulled, Reduced::QuantisedNorm).unwrap();
        assert_eq!((wide.entry, wide.threads), (Entry::ReduceNormE4m3PulledV4, 512));
        assert_eq!(gather_logits(3).unwrap().grid, [24, 1, 1]);
        let share =
            |rows: usize| [(2, false), (2, true), (4, false), (8, true)].map(|(n, e4m3)| shares_rows(rows, n, e4m3));
        assert_eq!([256, 257, 1024].map(share), [[false; 4], [false, false, true, true], [false, true, true, true]]);
        let share = |width, quantises| reduce_shares(Rows { n_rows: 65, width }, quantises).unwrap();
        assert_eq!((share(4096, false).entry, share(4096, false).grid), (Entry::ReduceNormSharesV1, [65, 1, 1]));
        assert_eq!((share(16384, true).entry, share(16384, true).threads), (Entry::ReduceNormE4m3SharesV4, 512));
    }

    #[test]
    fn a_line_has_120_bytes_of_a_row_and_eight_threads() {
        let threads = |width| {
            let config = reduce(Rows { n_rows: 1, width }, Way::Pushed(Push::Lines), Reduced::Sum).unwrap();
            (config.entry, config.threads)
        };
        // 8192 bytes are 68 lines and a part of one more.
        assert_eq!(threads(4096), (Entry::ReduceLinesV1, 576));
        assert_eq!(threads(8192), (Entry::ReduceLinesV2, 576));
        assert_eq!(threads(16384), (Entry::ReduceLinesV4, 576));
        assert_eq!(Push::Lines.row_bytes(4096), 69 * 128);
    }
}
