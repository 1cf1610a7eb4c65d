//! The launch shape of the product for any number of rows (`csrc/gemm_sm90.cu`): which variant, how many weight rows a tile, how
//! deep the ring. Pure. But for variants that split the depth, which the batch-invariant mode leaves alone, nothing here changes a
//! bit of the result, so it may be chosen by speed alone.

mod tile;
mod variant;

pub use self::tile::Tile;
use self::tile::Tiling;
use crate::{
    choose::ScaledBy,
    error::KernelError,
    int4::GroupSize,
    launch::{Entry, Epilogue, GATE_UP_GROUP, GemmShape, LaunchConfig, refused},
};

/// Bytes of a row of a stage's panel: 64 values of k.
const PANEL_ROW_BYTES: usize = 128;
/// Most stages of the ring; the same constant as in the kernel.
const STAGES_MAX: usize = 30;
/// Shared memory that a block of an H100 or H200 may ask for.
pub(crate) const SHARED_BYTES: usize = 227 << 10;
/// Tiles of a cluster along w that are walked together: with as many rows of x a wave is about square.
const BAND: usize = 8;
/// Threads that find the factors of rows of x; the same constant as in `csrc/gemm_residual.cuh`.
const SCALERS: u32 = 64;
/// Barriers and factors, and slack up to a multiple of 1024.
const FIXED_BYTES: usize = 2048;

/// Whether the chain of products of an element is one, or may be several: another order of the same sum, other bits.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Depth {
    /// One: the same bits by every tile.
    Whole,
    /// Several where that is faster.
    MaySplit,
}

/// Everything that a launch needs.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct GemmPlan {
    /// Entry point, blocks, threads, shared memory.
    pub config: LaunchConfig,
    /// What it is made of.
    pub tile: Tile,
    /// Weight rows of a block's tile.
    pub rows: usize,
    /// Rows of a box of w, of x and of y.
    pub boxes: GemmBoxes,
    /// Stages of a tile.
    pub n_steps: usize,
    /// Stages of the ring.
    pub n_stages: usize,
    /// Of these, those whose weights are asked for before the kernel in front has ended.
    pub n_ahead: usize,
    /// Rows of x of a tile.
    pub x_rows: usize,
    /// Tiles along x.
    pub n_m_tiles: usize,
    /// Tiles along w, those of a cluster's blocks counted as one.
    pub n_n_tiles: usize,
    /// Of these, those that are walked together before the next rows of x.
    pub band: usize,
}

/// Values that one copy moves: of a row, rows.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct GemmBoxes {
    /// Of weights; of those of four bits 64 values each of a tile's outputs, groups of each.
    pub w: [usize; 2],
    /// Of x.
    pub x: [usize; 2],
    /// Of y.
    pub y: [usize; 2],
}

impl GemmPlan {
    /// Whether y leaves by the copy engine.
    pub(crate) fn copies_out(&self) -> bool {
        matches!(
            self.config.entry,
            Entry::Gemm2x256Bf16
                | Entry::Gemm2x256Activated
                | Entry::GemmE4m32x256Bf16
                | Entry::GemmE4m32x256Activated
                | Entry::GemmBlocks2x256Bf16
                | Entry::GemmBlocks2x256Activated
        )
    }

    /// Asking for no weights before the kernel in front has ended: it writes them.
    pub(crate) fn waiting(self) -> Self {
        Self { n_ahead: 0, ..self }
    }

    /// With the threads that find rows' factors.
    pub(crate) fn scaling(self) -> Self {
        // A whole warpgroup beside those that multiply has room for them.
        let scalers = if self.config.threads.is_multiple_of(128) { 0 } else { SCALERS };
        Self { config: LaunchConfig { threads: self.config.threads + scalers, ..self.config }, ..self }
    }

    /// Of the tiles that give the same bits, the one that costs least on a chip of `n_multiprocessors`.
    pub fn new(shape: GemmShape, epilogue: Epilogue, n_multiprocessors: u32) -> Result<Self, KernelError> {
        check(shape, epilogue)?;
        let tile = candidates(shape, epilogue, Depth::Whole, n_multiprocessors)[0];
        Ok(tile.plan(shape, epilogue, n_multiprocessors))
    }
}

/// Tiles that may be the fastest, the one that costs least by count first; none if the kernel does not multiply the shape. On an
/// H200 the first is 2 % slower than the fastest in the mean over three models and 8 to 256 rows, the fastest of all these 0.05 %.
pub fn candidates(shape: GemmShape, epilogue: Epilogue, depth: Depth, n_multiprocessors: u32) -> Vec<Tile> {
    let cycles = |tile: Tile| Tiling { tile, shape }.cycles(n_multiprocessors as usize);
    let rank = || ranked(Tile::all(shape, epilogue, depth), cycles).near(1.2, 16);
    check(shape, epilogue).map_or_else(|_| Vec::new(), |()| rank())
}

/// The same for weights of four bits.
pub fn candidates_int4(shape: GemmShape, epilogue: Epilogue, depth: Depth, n_multiprocessors: u32) -> Vec<Tile> {
    let cycles = |tile: Tile| Tiling { tile, shape }.cycles_int4(n_multiprocessors as usize);
    let rank = || ranked(Tile::all_int4(shape, epilogue, depth), cycles).near_codes();
    check(shape, epilogue).map_or_else(|_| Vec::new(), |()| rank())
}

/// The same beside rows in e4m3.
pub fn candidates_beside_e4m3(shape: GemmShape, epilogue: Epilogue, depth: Depth, n_multiprocessors: u32) -> Vec<Tile> {
    let pairs = tile::in_pairs(shape);
    let cycles = |tile: Tile| Tiling { tile, shape: pairs }.cycles_beside_e4m3(n_multiprocessors as usize);
    let rank = || ranked(Tile::all_beside_e4m3(shape, epilogue, depth), cycles).near_codes();
    check(shape, epilogue).map_or_else(|_| Vec::new(), |()| rank())
}

/// Plans of every tile that the kernel has for such a product: for comparing them.
pub fn all_plans_beside_e4m3(
    shape: GemmShape,
    epilogue: Epilogue,
    depth: Depth,
    n_multiprocessors: u32,
) -> Vec<GemmPlan> {
    let tiles = Tile::all_beside_e4m3(shape, epilogue, depth);
    tiles.map(|tile| tile.plan_beside_e4m3(shape, epilogue, n_multiprocessors)).collect()
}

/// Plans of every tile that the kernel has for a product of weights of four bits: for comparing them.
pub fn all_plans_int4(
    shape: GemmShape,
    epilogue: Epilogue,
    depth: Depth,
    n_multiprocessors: u32,
    group: GroupSize,
) -> Vec<GemmPlan> {
    let tiles = Tile::all_int4(shape, epilogue, depth);
    tiles.map(|tile| tile.plan_int4(shape, epilogue, n_multiprocessors, group)).collect()
}

/// Tiles by what they cost, the least first.
struct Ranked(Vec<(Tile, f64)>);

fn ranked(tiles: impl Iterator<Item = Tile>, cycles: impl Fn(Tile) -> f64) -> Ranked {
    let mut ranked: Vec<_> = tiles.map(|tile| (tile, cycles(tile))).collect();
    ranked.sort_by(|(_, a), (_, b)| a.total_cmp(b));
    Ranked(ranked)
}

impl Ranked {
    /// Of codes, whose cycles are counted less well.
    fn near_codes(self) -> Vec<Tile> {
        self.near(1.5, 20)
    }

    /// Those that cost at most so many times the least.
    fn near(self, times: f64, most: usize) -> Vec<Tile> {
        let limit = self.0.first().map_or(0.0, |(_, least)| times * least);
        self.0.into_iter().take_while(|(_, cycles)| *cycles <= limit).map(|(tile, _)| tile).take(most).collect()
    }
}

/// The same for operands in e4m3, whose depth is a multiple of 16.
pub fn candidates_e4m3(
    scaled: ScaledBy,
    shape: GemmShape,
    epilogue: Epilogue,
    depth: Depth,
    n_multiprocessors: u32,
) -> Vec<Tile> {
    let tiles = candidates(tile::in_pairs(shape), epilogue, depth, n_multiprocessors);
    tiles.into_iter().filter(|tile| tile.fits_e4m3(scaled, shape, epilogue)).collect()
}

/// Plans of every tile that the kernel has for a product of operands in e4m3: for comparing them.
pub fn all_plans_e4m3(
    scaled: ScaledBy,
    shape: GemmShape,
    epilogue: Epilogue,
    depth: Depth,
    n_multiprocessors: u32,
) -> Vec<GemmPlan> {
    let tiles = Tile::all_e4m3(scaled, shape, epilogue, depth);
    tiles.map(|tile| tile.plan_e4m3(scaled, shape, epilogue, n_multiprocessors)).collect()
}

/// What no tile multiplies.
fn check(shape: GemmShape, epilogue: Epilogue) -> Result<(), KernelError> {
    const OP: &str = "gemm_sm90";
    const WHOLE: usize = 2 * GATE_UP_GROUP;
    if shape.m.min(shape.n).min(shape.k) == 0 {
        return Err(refused(OP, "nothing to do: a dimension is 0".to_owned()));
    }
    if !shape.k.is_multiple_of(8) {
        return Err(refused(OP, format!("depth {} is not a multiple of 8", shape.k)));
    }
    if epilogue == Epilogue::Sum {
        return Err(refused(OP, "it does not add to y alone".to_owned()));
    }
    if epilogue == Epilogue::Update && !shape.n.is_multiple_of(8) {
        return Err(refused(OP, format!("a residual of width {} is not a multiple of 8", shape.n)));
    }
    if epilogue == Epilogue::Gated && !shape.n.is_multiple_of(WHOLE) {
        return Err(refused(OP, format!("{} rows of gate and up are not a multiple of {WHOLE}", shape.n)));
    }
    Ok(())
}

/// Plans of every tile that the kernel has for a product, fast or not: for comparing them.
pub fn all_plans(shape: GemmShape, epilogue: Epilogue, depth: Depth, n_multiprocessors: u32) -> Vec<GemmPlan> {
    Tile::all(shape, epilogue, depth).map(|tile| tile.plan(shape, epilogue, n_multiprocessors)).collect()
}

#[cfg(test)]
mod tests {
    use super::{variant::GROUP_ROWS, *};
    use crate::launch::UPDATE_ROWS_MAX;

    fn plan(m: usize, n: usize, k: usize) -> GemmPlan {
        GemmPlan::new(GemmShape { m, n, k }, Epilogue::Bf16, 132).unwrap()
    }

    #[test]
    fn a_tile_serves_another_row_count_with_as_many_tiles_as_that_needs() {
        let shape = GemmShape { m: 300, n: 4096, k: 4096 };
        for found in all_plans(shape, Epilogue::Bf16, Depth::MaySplit, 132) {
            let fewer = found.tile.plan(GemmShape { m: 8, ..shape }, Epilogue::Bf16, 132);
            assert_eq!((fewer.n_m_tiles, fewer.rows, fewer.config.entry), (1, found.rows, found.config.entry));
        }
    }

    #[test]
    fn one_row_of_x_spreads_small_weights_over_the_chip() {
        let qkv = plan(1, 6144, 4096);
        assert_eq!(qkv.config.entry, Entry::Gemm1x8Bf16);
        assert!(qkv.config.grid[0] >= 96, "{qkv:?}");
    }

    #[test]
    fn plans_are_those_that_were_measured_to_be_fast() {
        // Gate and up; microseconds on an H200, beside the next best: 58.4 (59.1), 60.1 (62.1), 65.3 (66.2), 92.8 (107.5).
        let gated = |m| GemmPlan::new(GemmShape { m, n: 28672, k: 4096 }, Epilogue::Gated, 132).unwrap();
        let chosen = [32, 64, 128, 256].map(gated);
        let expected = [
            (Entry::Gemm2x32Activated, 112),
            (Entry::Gemm2x64Activated, 112),
            (Entry::Gemm2x128Activated, 112),
            (Entry::Gemm2x256Activated, 128),
        ];
        assert_eq!(chosen.map(|plan| (plan.config.entry, plan.rows)), expected);
    }

    #[test]
    fn many_rows_of_x_take_the_largest_tiles() {
        for (n, k) in [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)] {
            let plan = plan(8192, n, k);
            assert_eq!(
                (plan.config.entry, plan.rows, plan.config.grid[0]),
                (Entry::Gemm2x256Bf16, 128, 132),
                "{n} {k}"
            );
        }
    }

    #[test]
    fn every_tile_fits_shared_memory_with_a_ring_of_three_or_more() {
        for output in [Epilogue::Bf16, Epilogue::F32, Epilogue::Gated] {
            for plan in all_plans(GemmShape { m: 300, n: 4096, k: 4096 }, output, Depth::MaySplit, 132) {
                assert!(plan.config.shared_bytes as usize <= SHARED_BYTES, "{plan:?}");
                assert!((3..=STAGES_MAX).contains(&plan.n_stages), "{plan:?}");
            }
        }
    }

    #[test]
    fn tiles_cover_all_rows_of_w_and_x() {
        for (m, n) in [(1, 1), (9, 4097), (257, 6144), (8192, 100)] {
            let GemmPlan { rows, n_m_tiles, n_n_tiles, boxes, .. } = plan(m, n, 64);
            let (w, x) = (boxes.w[1], boxes.x[1]);
            assert!(rows <= w && n_n_tiles * 2 * w >= n && n_m_tiles * 2 * x >= m, "{m} {n}");
        }
    }

    #[test]
    fn a_product_of_e4m3_is_tiled_as_one_of_as_many_bytes() {
        let (shape, half) = (GemmShape { m: 64, n: 28672, k: 4096 }, GemmShape { m: 64, n: 28672, k: 2048 });
        let (quantised, plain) = (
            all_plans_e4m3(ScaledBy::Rows, shape, Epilogue::Gated, Depth::MaySplit, 132),
            all_plans(half, Epilogue::Gated, Depth::MaySplit, 132),
        );
        assert_eq!(quantised.len(), plain.len());
        for (quantised, plain) in quantised.into_iter().zip(plain) {
            assert!(quantised.config.entry.name().starts_with("gemm_fp8_sm90_"), "{quantised:?}");
            let config = LaunchConfig { entry: plain.config.entry, ..quantised.config };
            assert_eq!(GemmPlan { config, ..quantised }, plain);
        }
        assert!(all_plans_e4m3(ScaledBy::Rows, shape, Epilogue::Update, Depth::MaySplit, 132).is_empty());
    }

    #[test]
    fn tiles_of_four_bits_are_whole_tiles_of_codes_and_fit_shared_memory_with_a_ring_of_three_or_more() {
        let shape = GemmShape { m: 300, n: 4096, k: 4100 * 4 };
        for group in [GroupSize::G32, GroupSize::G128] {
            for epilogue in [Epilogue::Bf16, Epilogue::Gated, Epilogue::Update] {
                let plans = all_plans_int4(shape, epilogue, Depth::MaySplit, 132, group);
                assert!(!plans.is_empty());
                for plan in plans {
                    assert!(plan.rows.is_multiple_of(16) && plan.tile.scales(), "{plan:?}");
                    assert!(plan.config.entry.name().starts_with("gemm_int4_sm90_"), "{plan:?}");
                    assert!(plan.config.shared_bytes as usize <= SHARED_BYTES, "{plan:?}");
                    assert!((3..=STAGES_MAX).contains(&plan.n_stages), "{plan:?}");
                    let depth = plan.n_steps * 64 * plan.boxes.w[0] * if plan.tile.splits_depth() { 2 } else { 1 };
                    assert!(depth >= shape.k, "{plan:?}");
                }
            }
        }
    }

    #[test]
    fn tiles_beside_rows_of_e4m3_fit_shared_memory_with_a_ring_of_three_or_more_and_halves_meet_where_they_did() {
        // Groups of 128 that the first of two halves has: tiles that split the depth are no part of the batch-invariant mode, and have their bits.
        let halves = [(3584, [14, 14]), (4096, [16, 16]), (4864, [20, 19])];
        for (k, [of_few_columns, of_many]) in halves {
            let shape = GemmShape { m: 300, n: 4096, k };
            for plan in all_plans_beside_e4m3(shape, Epilogue::Bf16, Depth::MaySplit, 132) {
                assert!(plan.config.shared_bytes as usize <= SHARED_BYTES, "{plan:?}");
                assert!((3..=STAGES_MAX).contains(&plan.n_stages), "{plan:?}");
                let groups = plan.n_steps * plan.boxes.w[1];
                match plan.tile.splits_depth() {
                    true => assert!([of_few_columns, of_many].contains(&groups), "{groups}: {plan:?}"),
                    false => assert!(groups * 128 >= k, "{plan:?}"),
                }
            }
        }
    }

    #[test]
    fn a_tile_that_is_activated_has_as_many_rows_of_gate_as_of_up() {
        for plan in all_plans(GemmShape { m: 700, n: 28672, k: 4096 }, Epilogue::Gated, Depth::MaySplit, 132) {
            assert!(plan.rows.is_multiple_of(2 * GATE_UP_GROUP), "{plan:?}");
        }
        let refusal = GemmPlan::new(GemmShape { m: 1, n: 24, k: 8 }, Epilogue::Gated, 132).unwrap_err();
        assert_eq!(refusal.to_string(), "gemm_sm90: 24 rows of gate and up are not a multiple of 16");
    }

    #[test]
    fn candidates_are_the_cheapest_tiles_in_their_order_and_those_measured_to_be_fastest_among_them() {
        // Rows of x, weight rows, depth; the fastest on an H200.
        let fastest = [
            (8, 6144, 4096, Entry::Gemm1x8Bf16, 48),
            (32, 6144, 4096, Entry::Gemm1x32Bf16, 48),
            (64, 4096, 14336, Entry::Gemm1x64Bf16, 32),
            (128, 4096, 4096, Entry::Gemm1x64Bf16, 64),
            (256, 4096, 14336, Entry::Gemm1x128Bf16, 64),
        ];
        for (m, n, k, entry, rows) in fastest {
            let shape = GemmShape { m, n, k };
            let tiles = candidates(shape, Epilogue::Bf16, Depth::Whole, 132);
            assert_eq!(tiles[0], plan(m, n, k).tile);
            let entry_of = |tile: &Tile| tile.plan(shape, Epilogue::Bf16, 132).config.entry;
            assert!(tiles.iter().any(|tile| (entry_of(tile), tile.rows) == (entry, rows)), "{shape:?}: {tiles:#?}");
            assert!(tiles.len() <= 16);
        }
    }

    #[test]
    fn tiles_that_split_the_depth_are_candidates_where_they_were_measured_to_be_fastest_but_not_for_equal_bits() {
        use Epilogue::{Bf16, Gated, Update};
        let fastest = [
            (32, 6144, 4096, Bf16, "1x32s/48"),
            (32, 28672, 4096, Gated, "1x32s/64"),
            (64, 4096, 4096, Update, "1x64s/64"),
            (64, 4096, 14336, Update, "1x64s/64"),
            (128, 4096, 14336, Update, "1x128s/64"),
        ];
        for (m, n, k, epilogue, tile) in fastest {
            let tiles = |depth| candidates(GemmShape { m, n, k }, epilogue, depth, 132);
            assert!(tiles(Depth::MaySplit).contains(&tile.parse().unwrap()), "{m} {n}");
            assert!(tiles(Depth::Whole).iter().all(|tile| !tile.splits_depth()));
        }
    }

    #[test]
    fn tiles_along_x_are_alike_and_no_taller_than_they_must_be() {
        let rows = |m, entry| {
            let all = all_plans(GemmShape { m, n: 4096, k: 4096 }, Epilogue::Bf16, Depth::MaySplit, 132);
            let plan = all.into_iter().find(|plan| plan.config.entry == entry).expect("has this variant");
            (plan.n_m_tiles, plan.x_rows, plan.boxes.x[1])
        };
        assert_eq!(rows(96, Entry::Gemm1x128SplitBf16), (1, 96, 96));
        assert_eq!(rows(96, Entry::Gemm1x128Bf16), (1, 96, 48));
        assert_eq!(rows(160, Entry::Gemm2x128SplitBf16), (2, 80, 80));
        assert_eq!(rows(9, Entry::Gemm1x32Bf16), (1, 16, 8));
        assert_eq!([rows(200, Entry::Gemm2x256Bf16), rows(300, Entry::Gemm2x256Bf16)], [(1, 208, 104), (2, 256, 128)]);
    }

    #[test]
    fn a_tile_gives_every_warpgroup_rows() {
        for tile in Tile::all(GemmShape { m: 300, n: 4096, k: 4096 }, Epilogue::F32, Depth::Whole) {
            assert_eq!(tile.rows.div_ceil(GROUP_ROWS), tile.variant.warpgroups, "{tile}");
        }
    }

    #[test]
    fn an_update_has_tiles_whose_squares_add_up_in_pairs_and_never_the_largest() {
        let plans = all_plans(GemmShape { m: 100, n: 4096, k: 4096 }, Epilogue::Update, Depth::MaySplit, 132);
        assert!(plans.iter().all(|plan| [16, 32, 64].contains(&plan.rows) && plan.tile.scales()));
        let refusal = GemmPlan::new(GemmShape { m: 2, n: 4097, k: 8 }, Epilogue::Update, 132).unwrap_err();
        assert_eq!(refusal.to_string(), "gemm_sm90: a residual of width 4097 is not a multiple of 8");
    }

    #[test]
    fn rows_that_may_have_factors_never_take_the_largest_tiles() {
        for m in 1..=UPDATE_ROWS_MAX {
            for (n, k) in [(6144, 4096), (28672, 4096), (128, 8192)] {
                assert!(plan(m, n, k).tile.scales(), "{m} {n} {k}");
            }
        }
    }

    #[test]
    fn depth_is_counted_alike_in_every_variant() {
        for k in [8, 64, 72, 4096, 4104] {
            let shape = GemmShape { m: 1, n: 64, k };
            let mut depths = Tile::all(shape, Epilogue::F32, Depth::Whole)
                .map(|tile| Tiling { tile, shape }.n_steps() * tile.variant.panels);
            assert!(depths.all(|panels| panels == k.div_ceil(128) * 2), "{k}");
        }
    }

    #[test]
    fn odd_rows_of_y_do_not_leave_by_the_copy_engine() {
        let plan = plan(4096, 4097, 512);
        assert_ne!(plan.config.entry, Entry::Gemm2x256Bf16);
    }

    #[test]
    fn a_refusal_names_the_depth() {
        let refusal = GemmPlan::new(GemmShape { m: 1, n: 1, k: 9 }, Epilogue::F32, 132).unwrap_err();
        assert_eq!(refusal.to_string(), "gemm_sm90: depth 9 is not a multiple of 8");
    }
}
