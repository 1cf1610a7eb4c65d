//! Launches over rows of logits: edits, floors of filters, the draw.

use super::{Entry, LaunchConfig, Rows, config, count, not_empty, tiles};
use crate::error::KernelError;

/// Pieces of one row of logits at most.
pub const SAMPLE_PIECES_MAX: usize = 32;

/// Edits of single logits, one a thread.
pub fn edit_logits(n_edits: usize) -> Result<LaunchConfig, KernelError> {
    not_empty("edit_logits", n_edits)?;
    Ok(config(Entry::EditLogits, [count(n_edits.div_ceil(128)), 1, 1], 128))
}

/// Floors of filtered rows of logits: a cluster of 8 blocks a row where the chip has clusters and the row fits their
/// registers, else one block a row.
pub fn sampling_floor(rows: Rows, capability: (i32, i32)) -> Result<LaunchConfig, KernelError> {
    const CLUSTER: usize = 8;
    not_empty("sampling_floor", rows.width)?;
    tiles("sampling_floor", rows.n_rows)?;
    let has_clusters = capability >= (9, 0);
    let (entry, n_blocks) = match rows.width.div_ceil(CLUSTER * 1024) {
        0..=16 if has_clusters => (Entry::SamplingFloorSm90E16, CLUSTER),
        17..=32 if has_clusters => (Entry::SamplingFloorSm90E32, CLUSTER),
        _ => (Entry::SamplingFloor, 1),
    };
    Ok(config(entry, [count(rows.n_rows * n_blocks), 1, 1], 1024))
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
        let entry = |width, capability| sampling_floor(rows(2, width), capability).unwrap();
        assert_eq!(entry(128_256, (9, 0)).entry, Entry::SamplingFloorSm90E16);
        assert_eq!(entry(128_256, (9, 0)).grid, [16, 1, 1]);
        assert_eq!(entry(151_936, (10, 0)).entry, Entry::SamplingFloorSm90E32);
        assert_eq!(entry(300_000, (9, 0)).entry, Entry::SamplingFloor);
        assert_eq!(entry(128_256, (8, 9)).grid, [2, 1, 1]);
    }

    #[test]
    fn few_rows_of_logits_are_cut_finer_than_many() {
        let pieces = |n_rows| sample(rows(n_rows, 128_256)).unwrap().grid[0];
        assert_eq!([1, 16, 64, 256, 4096].map(pieces), [32, 32, 8, 2, 1]);
        assert_eq!(sample(rows(1, 100)).unwrap().grid, [1, 1, 1]);
    }
}
