//! How the depth of a product with weights of four bits is shared out where a row's bits may not depend on how many rows there are. Pure.
//!
//! ```text
//! y = (C_0 + C_1 + ..) + (C_h + C_h+1 + ..)      C_w: the spans of 128 values w, w + n, w + 2n, .. in their order; h = n / 2
//! ```
//!
//! Warps that share the depth need some ways, one chain they cannot make. How many depends on the matrix alone.

use super::tile::Tile;
use crate::{int4, launch::GemmShape, sys::Launch};

/// Values of a span.
const SPAN: usize = 128;
/// Warps of a tile whose warps share the depth, and weight rows that each of them takes at a time.
pub(super) const WARPS: usize = 16;
const WARP_ROWS: usize = 2 * int4::TILE_ROWS;
/// Of an H100 and an H200; others of their kind then have the same bits.
const MULTIPROCESSORS: usize = 132;
/// Columns of the widest tile that has registers for the sums of ways.
const COLUMNS_MAX: usize = 64;

/// What a launch is told of them.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Ways {
    /// Of all, or 1 where the depth is taken as it lies; where warps share it, those of a block.
    pub n: usize,
    /// Stages of each, of a block that takes them one by one; of two blocks whose warps do, 0 where each has a half as it lies.
    pub n_steps: usize,
}

impl Ways {
    /// The depth as it lies, by one chain.
    pub(super) const NONE: Self = Self { n: 1, n_steps: 0 };

    pub(crate) fn pass<'a>(&self, launch: Launch<'a>) -> Launch<'a> {
        launch.int(self.n).int(self.n_steps)
    }
}

/// In how many ways the depth of a matrix is shared out: as many as warps may take at a time in tiles of few rows that fill the chip.
fn n_ways(GemmShape { n, k, .. }: GemmShape) -> usize {
    let rows = n.div_ceil(MULTIPROCESSORS).next_multiple_of(WARP_ROWS).min(4 * WARP_ROWS);
    // Two spans at least: a stage of many rows of x has as many of one way.
    let most = (WARPS / (rows / WARP_ROWS)).min(k.div_ceil(SPAN) / 2).max(1);
    1 << most.ilog2()
}

/// The ways of a tile whose sums may be in any order.
pub(super) fn fastest(tile: Tile) -> Ways {
    if tile.variant.by_warps { Ways { n: WARPS / n_pairs(tile), n_steps: 0 } } else { Ways::NONE }
}

/// The ways of a tile whose sums are in the order of the matrix, and the stages that its blocks take; none if it cannot.
pub(super) fn in_order(tile: Tile, shape: GemmShape) -> Option<(Ways, usize)> {
    let (n, n_parts) = (n_ways(shape), tile.variant.cluster.n_parts());
    let (own, n_spans_of_stage) = (n / n_parts, tile.variant.int4_panels() / 2);
    let n_spans_of_way = shape.k.div_ceil(SPAN).div_ceil(n);
    if own == 0 {
        return None;
    }
    if tile.variant.by_warps {
        // A stage of one of two blocks is one copy: it may not go over to the other block's ways.
        let is_whole = n_parts == 1 || own.is_multiple_of(n_spans_of_stage);
        let n_spans = if n_parts == 1 { shape.k.div_ceil(SPAN) } else { own * n_spans_of_way };
        let ways = Ways { n: own, n_steps: n_parts - 1 };
        return (is_whole && own * n_pairs(tile) <= WARPS).then_some((ways, n_spans.div_ceil(n_spans_of_stage)));
    }
    let n_steps = n_spans_of_way.div_ceil(n_spans_of_stage);
    (tile.variant.columns <= COLUMNS_MAX).then_some((Ways { n, n_steps }, own * n_steps))
}

/// Pairs of tiles of codes that warps have.
fn n_pairs(tile: Tile) -> usize {
    tile.rows.div_ceil(WARP_ROWS)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(n: usize, k: usize) -> GemmShape {
        GemmShape { m: 1, n, k }
    }

    #[test]
    fn a_matrix_has_as_many_ways_as_the_warps_of_tiles_that_fill_the_chip() {
        // qkv, o, gate and up, down of 8B; the same of 70B; rows that are few, and a depth that is.
        let sizes = [(6144, 4096), (4096, 4096), (28_672, 4096), (4096, 14_336)];
        assert_eq!(sizes.map(|(n, k)| n_ways(shape(n, k))), [8, 16, 4, 16]);
        let sizes = [(10_240, 8192), (8192, 8192), (57_344, 8192), (8192, 28_672)];
        assert_eq!(sizes.map(|(n, k)| n_ways(shape(n, k))), [4, 8, 4, 8]);
        assert_eq!([(16, 4096), (16, 1024), (16, 200), (16, 32)].map(|(n, k)| n_ways(shape(n, k))), [16, 4, 1, 1]);
    }

    #[test]
    fn tiles_of_every_kind_sum_the_same_ways() {
        let found = |text: &str, (n, k)| in_order(text.parse().unwrap(), shape(n, k));
        let down = (4096, 14_336);
        assert_eq!(found("4x8w/32", down), Some((Ways { n: 16, n_steps: 0 }, 28)));
        assert_eq!(found("4x8w/48", down), None, "two pairs of tiles leave eight warps for sixteen ways");
        assert_eq!(found("4x16ws/32", down), Some((Ways { n: 8, n_steps: 1 }, 14)));
        // Seven spans of a way are four stages of two.
        assert_eq!(found("1x32/48", down), Some((Ways { n: 16, n_steps: 4 }, 64)));
        assert_eq!(found("1x32s/48", down), Some((Ways { n: 16, n_steps: 4 }, 32)));
        assert_eq!(found("1x128/64", down), None);
        let gate_up = (28_672, 4096);
        assert_eq!(found("4x16w/128", gate_up), Some((Ways { n: 4, n_steps: 0 }, 8)));
        assert_eq!(found("4x16ws/128", gate_up), None, "a stage has four spans");
        assert_eq!(found("1x32s/16", (16, 200)), None, "one way is not for two blocks");
    }

    #[test]
    fn without_an_order_all_warps_have_a_way() {
        let ways =
            ["4x8w/16", "4x8w/48", "4x16w/96", "4x16ws/128", "1x32s/64"].map(|text| fastest(text.parse().unwrap()));
        assert_eq!(ways.map(|ways| ways.n), [16, 8, 5, 4, 1]);
    }
}
