//! How prefill chunks are cut into tiles, and the contexts of tiles into pieces where tiles do not fill the chip.

use stoker_fit::gpu::PREFILL_TILE_BYTES;
pub use stoker_fit::gpu::{PrefillSplit, prefill_pieces_max};

use super::index;
use crate::launch::{Heads, PREFILL_TILE_ROWS};

/// KV tokens that prefill attention on Hopper takes at once.
const PREFILL_KV_TOKENS: usize = 128;
/// Smallest piece of a prefill tile's context worth its merge, which takes as long as two or three times
/// [`PREFILL_KV_TOKENS`].
const PREFILL_PIECE_TOKENS_MIN: usize = 4 * PREFILL_KV_TOKENS;

/// Neighbouring tokens of one prefill chunk, and the piece of their context to attend. The same fields as in
/// `csrc/attention.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct PrefillTile {
    /// Row of the block table, or -1: nothing to do.
    pub sequence: i32,
    /// The first token's row in q and out.
    pub first_row: i32,
    /// Tokens of the tile.
    pub n_tokens: i32,
    /// KV tokens that the first token sees, itself included.
    pub first_visible: i32,
    /// First token of the piece, a multiple of `PREFILL_KV_TOKENS`.
    pub begin: i32,
    /// One past its last token.
    pub end: i32,
    /// Index of the piece in the scratch.
    pub piece: i32,
    /// Index of the tile's first piece.
    pub first_piece: i32,
    /// Pieces of the tile.
    pub n_pieces: i32,
}

// The memory plan counts by it.
const _: () = assert!(size_of::<PrefillTile>() == PREFILL_TILE_BYTES);

// SAFETY: nine i32 without padding, as the kernels read them.
unsafe impl cudarc::driver::DeviceRepr for PrefillTile {}
// SAFETY: as above: any bits are a value.
unsafe impl bytemuck::Zeroable for PrefillTile {}
// SAFETY: as above.
unsafe impl bytemuck::Pod for PrefillTile {}

impl PrefillTile {
    /// A tile of nobody, behind all others: pads a plan, so that a captured graph keeps its grid.
    pub const NONE: Self = Self {
        sequence: -1,
        first_row: 0,
        n_tokens: 0,
        first_visible: 0,
        begin: 0,
        end: 0,
        piece: 0,
        first_piece: 0,
        n_pieces: 1,
    };
}

/// A chunk of one sequence's prompt.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct PrefillChunk {
    /// Row of the block table.
    pub sequence: usize,
    /// The first token's row in q and out.
    pub first_row: usize,
    /// Tokens computed before this chunk.
    pub n_computed: usize,
    /// Tokens of the chunk.
    pub n_tokens: usize,
}

/// Cuts prefill chunks into tiles and the contexts of tiles into pieces, the longest first.
pub fn plan_prefill(chunks: &[PrefillChunk], heads: Heads, split: PrefillSplit) -> Vec<PrefillTile> {
    let tokens = PREFILL_TILE_ROWS / heads.group();
    let whole: Vec<PrefillTile> = chunks.iter().flat_map(|chunk| tiles_of(*chunk, tokens)).collect();
    let share = prefill_share(&whole, heads, split);
    let mut tiles = Vec::with_capacity(whole.len());
    for tile in whole {
        cut_tile(&mut tiles, tile, share);
    }
    tiles.sort_by_key(|tile| std::cmp::Reverse(tile.end - tile.begin));
    tiles
}

/// Tiles at most, for `n_tokens` of one sequence: what a captured graph is made for.
pub fn prefill_tiles_max(n_tokens: usize, heads: Heads, split: PrefillSplit) -> usize {
    n_tokens.div_ceil(PREFILL_TILE_ROWS / heads.group()) + prefill_pieces_max(heads, split)
}

/// KV tokens that each slot gets if all tiles are spread evenly over the slots; none where tiles are not cut.
fn prefill_share(tiles: &[PrefillTile], heads: Heads, split: PrefillSplit) -> Option<usize> {
    match split {
        PrefillSplit::Never => None,
        PrefillSplit::Fill { n_slots } => {
            let total: usize = tiles.iter().map(|tile| tile.end.unsigned_abs() as usize).sum();
            Some((total * heads.n_kv).div_ceil(n_slots).max(PREFILL_PIECE_TOKENS_MIN))
        }
    }
}

/// Even pieces, as near to the share as their number allows.
fn cut_tile(tiles: &mut Vec<PrefillTile>, tile: PrefillTile, share: Option<usize>) {
    let len = tile.end.unsigned_abs() as usize;
    let n_wanted = share.map_or(1, |share| ((len + share / 2) / share).max(1));
    let tokens = len.div_ceil(n_wanted).next_multiple_of(PREFILL_KV_TOKENS);
    let n_pieces = len.div_ceil(tokens);
    let first_piece = if n_pieces > 1 { tiles.iter().filter(|tile| tile.n_pieces > 1).count() } else { 0 };
    tiles.extend((0..n_pieces).map(|number| PrefillTile {
        begin: index(number * tokens),
        end: index(((number + 1) * tokens).min(len)),
        piece: index(first_piece + number),
        first_piece: index(first_piece),
        n_pieces: index(n_pieces),
        ..tile
    }));
}

fn tiles_of(chunk: PrefillChunk, tokens: usize) -> impl Iterator<Item = PrefillTile> {
    (0..chunk.n_tokens).step_by(tokens).map(move |offset| {
        let n_tokens = tokens.min(chunk.n_tokens - offset);
        PrefillTile {
            sequence: index(chunk.sequence),
            first_row: index(chunk.first_row + offset),
            n_tokens: index(n_tokens),
            first_visible: index(chunk.n_computed + offset + 1),
            begin: 0,
            end: index(chunk.n_computed + offset + n_tokens),
            piece: 0,
            first_piece: 0,
            n_pieces: 1,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADS: Heads = Heads { n_q: 32, n_kv: 8, dim: 128 };

    #[test]
    fn prefill_tiles_cover_the_chunk_and_see_their_past() {
        let chunk = PrefillChunk { sequence: 2, first_row: 10, n_computed: 100, n_tokens: 70 };
        let mut tiles = plan_prefill(&[chunk], HEADS, PrefillSplit::Never);
        tiles.sort_by_key(|tile| tile.first_row);
        let found: Vec<_> = tiles.iter().map(|tile| (tile.first_row, tile.n_tokens, tile.first_visible)).collect();
        assert_eq!(found, [(10, 32, 101), (42, 32, 133), (74, 6, 165)]);
    }

    #[test]
    fn the_tile_that_sees_most_runs_first() {
        let chunks = [
            PrefillChunk { sequence: 0, first_row: 0, n_computed: 0, n_tokens: 64 },
            PrefillChunk { sequence: 1, first_row: 64, n_computed: 8000, n_tokens: 1 },
        ];
        assert_eq!(plan_prefill(&chunks, HEADS, PrefillSplit::Never)[0].sequence, 1);
    }

    const FILL: PrefillSplit = PrefillSplit::Fill { n_slots: 132 };

    #[test]
    fn a_chunk_over_a_long_past_fills_the_chip_with_pieces_that_cover_it() {
        let chunk = PrefillChunk { sequence: 0, first_row: 0, n_computed: 2048, n_tokens: 128 };
        let tiles = plan_prefill(&[chunk], HEADS, FILL);
        assert_eq!(tiles.len(), 16);
        for row in [0, 32, 64, 96] {
            let mut own: Vec<_> = tiles.iter().filter(|tile| tile.first_row == row).collect();
            own.sort_by_key(|tile| tile.begin);
            assert!(own.iter().zip(0..).all(|(tile, at)| (tile.piece, tile.n_pieces) == (tile.first_piece + at, 4)));
            assert!(own.windows(2).all(|pair| pair[0].end == pair[1].begin && pair[1].begin % 128 == 0));
            assert_eq!((own[0].begin, own[3].end), (0, 2048 + row + 32));
        }
    }

    #[test]
    fn a_chunk_has_no_more_tiles_than_its_graph_has_room_for() {
        for (n_tokens, n_computed) in [(1, 0), (1, 100_000), (33, 700), (128, 2048), (256, 9000)] {
            let chunk = PrefillChunk { sequence: 0, first_row: 0, n_computed, n_tokens };
            for split in [FILL, PrefillSplit::Never] {
                let n_tiles = plan_prefill(&[chunk], HEADS, split).len();
                assert!(
                    n_tiles <= prefill_tiles_max(n_tokens, HEADS, split),
                    "{n_tokens} over {n_computed}: {n_tiles}"
                );
            }
        }
    }

    #[test]
    fn tiles_that_fill_the_chip_are_not_cut() {
        let chunk = PrefillChunk { sequence: 0, first_row: 0, n_computed: 0, n_tokens: 8192 };
        assert!(plan_prefill(&[chunk], HEADS, FILL).iter().all(|tile| tile.n_pieces == 1));
    }

    #[test]
    fn pieces_of_a_prefill_have_places_of_their_own_in_the_scratch() {
        for (n_chunks, n_tokens, n_computed) in [(1, 40, 100_000), (3, 200, 3000), (1, 512, 8192), (20, 17, 900)] {
            let chunk = |sequence| PrefillChunk { sequence, first_row: sequence * n_tokens, n_computed, n_tokens };
            let tiles = plan_prefill(&(0..n_chunks).map(chunk).collect::<Vec<_>>(), HEADS, FILL);
            let mut places: Vec<_> = tiles.iter().filter(|tile| tile.n_pieces > 1).map(|tile| tile.piece).collect();
            places.sort_unstable();
            assert!(places.iter().zip(0..).all(|(place, at)| *place == at), "{places:?}");
            assert!(places.len() <= prefill_pieces_max(HEADS, FILL), "{} pieces", places.len());
        }
    }
}
