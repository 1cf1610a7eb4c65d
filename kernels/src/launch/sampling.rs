//! Launches over rows of logits: the draw, and what it needs before.

use super::{Entry, LaunchConfig, Rows, SAMPLE_PIECES_MAX, config, count, not_empty, tiles};
use crate::error::KernelError;

/// Sequences that enter their slots, a block each.
pub fn mark_tokens(n_entries: usize) -> Result<LaunchConfig, KernelError> {
    not_empty("mark_tokens", n_entries)?;
    Ok(config(Entry::MarkTokens, [count(n_entries), 1, 1], 1024))
}

/// Floors of rows of logits that need a selection: a cluster of 8 blocks a row. `None` where the chip has no clusters or a
/// row does not fit their registers: then the draw itself selects.
pub fn sampling_floor(rows: Rows, capability: (i32, i32)) -> Result<Option<LaunchConfig>, KernelError> {
    const CLUSTER: usize = 8;
    not_empty("sampling_floor", rows.width)?;
    tiles("sampling_floor", rows.n_rows)?;
    let entry = match rows.width.div_ceil(CLUSTER * 1024) {
        _ if capability < (9, 0) => return Ok(None),
        0..=16 => Entry::SamplingFloorSm90E16,
        17..=32 => Entry::SamplingFloorSm90E32,
        _ => return Ok(None),
    };
    Ok(Some(config(entry, [count(rows.n_rows * CLUSTER), 1, 1], 1024)))
}

/// The draw of rows with options: a block a row.
pub fn sample_options(rows: Rows) -> Result<LaunchConfig, KernelError> {
    not_empty("sample_options", rows.width)?;
    tiles("sample_options", rows.n_rows)?;
    Ok(config(Entry::SampleOptions, [count(rows.n_rows), 1, 1], 1024))
}

/// Given tokens after rows of logits: a block a row.
pub fn score_tokens(rows: Rows) -> Result<LaunchConfig, KernelError> {
    not_empty("score_tokens", rows.width)?;
    tiles("score_tokens", rows.n_rows)?;
    Ok(config(Entry::ScoreTokens, [count(rows.n_rows), 1, 1], 1024))
}

/// Sums of segments of rows: a block has 256 columns of one.
pub fn sum_rows(n_segments: usize, width: usize) -> Result<LaunchConfig, KernelError> {
    not_empty("sum_rows", width)?;
    not_empty("sum_rows", n_segments)?;
    tiles("sum_rows", n_segments)?;
    Ok(config(Entry::SumRows, [count(width.div_ceil(256)), count(n_segments), 1], 256))
}

/// The draw over rows of logits: pieces of 4096 logits, but no more than two rounds of blocks for the chip.
pub fn sample(rows: Rows) -> Result<LaunchConfig, KernelError> {
    not_empty("sample", rows.width)?;
    tiles("sample", rows.n_rows)?;
    let n_pieces = rows.width.div_ceil(4096).min(512 / rows.n_rows.min(512)).clamp(1, SAMPLE_PIECES_MAX);
    Ok(config(Entry::Sample, [count(n_pieces), count(rows.n_rows), 1], 512))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(n_rows: usize, width: usize) -> Rows {
        Rows { n_rows, width }
    }

    #[test]
    fn a_row_of_logits_takes_a_cluster_where_it_fits_one() {
        let config = |width, capability| sampling_floor(rows(2, width), capability).unwrap();
        let entry = |width, capability| config(width, capability).map(|config| config.entry);
        assert_eq!(entry(128_256, (9, 0)), Some(Entry::SamplingFloorSm90E16));
        assert_eq!(config(128_256, (9, 0)).unwrap().grid, [16, 1, 1]);
        assert_eq!(entry(151_936, (10, 0)), Some(Entry::SamplingFloorSm90E32));
        assert_eq!([entry(300_000, (9, 0)), entry(128_256, (8, 9))], [None, None]);
    }

    #[test]
    fn few_rows_of_logits_are_cut_finer_than_many() {
        let pieces = |n_rows| sample(rows(n_rows, 128_256)).unwrap().grid[0];
        assert_eq!([1, 16, 64, 256, 4096].map(pieces), [32, 32, 8, 2, 1]);
        assert_eq!(sample(rows(1, 100)).unwrap().grid, [1, 1, 1]);
    }
}
