//! The launch shape of the product for any number of rows (`csrc/gemm_sm90.cu`): which variant, how many weight rows a tile, how
//! deep the ring. Pure. But for variants that split the depth, which the batch-invariant mode leaves alone, nothing here changes a
//! bit of the result, so it may be chosen by speed alone.

mod variant;

use self::variant::{Cluster, VARIANTS, Variant};
use crate::{
    error::KernelError,
    launch::{Entry, GATE_UP_GROUP, GemmShape, LaunchConfig, NORM_TILE, OutputType, count, refused},
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

/// Whether the chain of products of an element is one, or may be two: another order of the same sum, other bits.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Depth {
    /// One: the same bits by every cut.
    Whole,
    /// Two where that is faster.
    MaySplit,
}

/// Everything that a launch needs.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct GemmPlan {
    /// Entry point, blocks, threads, shared memory.
    pub config: LaunchConfig,
    /// Weight rows of a block's tile.
    pub rows: usize,
    /// Rows of a box of w, of x and of y.
    pub boxes: GemmBoxes,
    /// Stages of a tile.
    pub n_steps: usize,
    /// Stages of the ring.
    pub n_stages: usize,
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
    /// Of weights.
    pub w: [usize; 2],
    /// Of x.
    pub x: [usize; 2],
    /// Of y.
    pub y: [usize; 2],
}

/// One way to cut a product.
#[derive(Clone, Copy, Debug)]
struct Cut {
    variant: Variant,
    rows: usize,
    shape: GemmShape,
}

impl GemmPlan {
    /// Whether y leaves by the copy engine.
    pub(crate) fn copies_out(&self) -> bool {
        matches!(self.config.entry, Entry::Gemm2x256Bf16 | Entry::Gemm2x256Activated)
    }

    /// With the threads that find rows' factors.
    pub(crate) fn scaling(self) -> Self {
        Self { config: LaunchConfig { threads: self.config.threads + SCALERS, ..self.config }, ..self }
    }

    /// Whether rows of x may have factors.
    pub(crate) fn scales(&self) -> bool {
        !matches!(self.config.entry, Entry::Gemm2x256Bf16 | Entry::Gemm2x256F32 | Entry::Gemm2x256Activated)
    }

    /// Of the cuts that give the same bits, the one that costs least on a chip of `n_multiprocessors`.
    pub fn new(shape: GemmShape, output: OutputType, n_multiprocessors: u32) -> Result<Self, KernelError> {
        check(shape, output)?;
        let n = n_multiprocessors as usize;
        let cheapest = cuts(shape, output, Depth::Whole).min_by(|a, b| a.cycles(n).total_cmp(&b.cycles(n)));
        Ok(cheapest.expect("the smallest variant multiplies any shape").plan(output, n))
    }

    /// Whether an element is the sum of two chains.
    pub(crate) fn splits_depth(&self) -> bool {
        self.variant().cluster == Cluster::SplitsDepth
    }

    fn variant(&self) -> Variant {
        let is_own = |variant: &Variant| variant.entries.iter().any(|(_, entry)| *entry == self.config.entry);
        VARIANTS.into_iter().find(is_own).expect("a plan is one of a variant")
    }

    /// The same cut for another row count: `shape` differs in m only.
    pub(crate) fn for_rows(self, shape: GemmShape, output: OutputType, n_multiprocessors: u32) -> Self {
        Cut { variant: self.variant(), rows: self.rows, shape }.plan(output, n_multiprocessors as usize)
    }
}

/// Plans worth timing: the cheapest by count, and those near to it. On an H200 the count's first is 2 % slower than the fastest in
/// the mean over three models and 8 to 256 rows, the fastest of these 0.1 %.
pub(crate) fn candidates(
    shape: GemmShape,
    output: OutputType,
    depth: Depth,
    n_multiprocessors: u32,
) -> Result<Vec<GemmPlan>, KernelError> {
    const NEAR: f64 = 1.2;
    const MOST: usize = 16;
    check(shape, output)?;
    let ranked = ranked_plans(shape, output, depth, n_multiprocessors);
    let most = ranked[0].1 * NEAR;
    let near = ranked.into_iter().take_while(|(_, cycles)| *cycles <= most).map(|(plan, _)| plan);
    Ok(near.take(MOST).collect())
}

/// What no cut multiplies.
fn check(shape: GemmShape, output: OutputType) -> Result<(), KernelError> {
    const OP: &str = "gemm_sm90";
    const WHOLE: usize = 2 * GATE_UP_GROUP;
    if shape.m.min(shape.n).min(shape.k) == 0 {
        return Err(refused(OP, "nothing to do: a dimension is 0".to_owned()));
    }
    if !shape.k.is_multiple_of(8) {
        return Err(refused(OP, format!("depth {} is not a multiple of 8", shape.k)));
    }
    if output == OutputType::Updated && !shape.n.is_multiple_of(8) {
        return Err(refused(OP, format!("a residual of width {} is not a multiple of 8", shape.n)));
    }
    if output == OutputType::Activated && !shape.n.is_multiple_of(WHOLE) {
        return Err(refused(OP, format!("{} rows of gate and up are not a multiple of {WHOLE}", shape.n)));
    }
    Ok(())
}

/// Plans of every way to cut a product, the cheapest or not: for comparing them.
pub fn all_plans(shape: GemmShape, output: OutputType, depth: Depth, n_multiprocessors: u32) -> Vec<GemmPlan> {
    cuts(shape, output, depth).map(|cut| cut.plan(output, n_multiprocessors as usize)).collect()
}

/// The same, the cheapest first, each with the cycles that are counted.
pub fn ranked_plans(
    shape: GemmShape,
    output: OutputType,
    depth: Depth,
    n_multiprocessors: u32,
) -> Vec<(GemmPlan, f64)> {
    let n = n_multiprocessors as usize;
    let mut plans: Vec<_> = cuts(shape, output, depth).map(|cut| (cut.plan(output, n), cut.cycles(n))).collect();
    plans.sort_by(|(_, a), (_, b)| a.total_cmp(b));
    plans
}

/// All ways to cut a product that the kernel has.
fn cuts(shape: GemmShape, output: OutputType, depth: Depth) -> impl Iterator<Item = Cut> {
    let of = move |variant: Variant| variant.rows().map(move |rows| Cut { variant, rows, shape });
    let fits = move |variant: &Variant| depth == Depth::MaySplit || variant.cluster != Cluster::SplitsDepth;
    VARIANTS.into_iter().filter(fits).flat_map(of).filter(move |cut| cut.is_possible(output))
}

impl Cut {
    /// Large tiles of bf16 leave by the copy engine, which wants whole tiles and rows of y that are multiples of 16 bytes. A tile
    /// has as many rows of gate as of up, and of an update so many that their squares are added up in pairs.
    fn is_possible(self, output: OutputType) -> bool {
        let leaves_by_copy = self.variant.columns == 256 && output != OutputType::F32;
        let has_whole = match output {
            OutputType::Bf16 | OutputType::F32 => true,
            OutputType::Activated => self.rows.is_multiple_of(2 * GATE_UP_GROUP),
            OutputType::Updated => matches!(self.rows, NORM_TILE | 32 | 64),
        };
        let is_whole = has_whole && self.variant.entry(output).is_some();
        is_whole && (!leaves_by_copy || (self.rows == self.variant.rows_max() && self.shape.n.is_multiple_of(8)))
    }

    fn n_m_tiles(self) -> usize {
        self.shape.m.div_ceil(self.variant.columns)
    }

    fn n_n_tiles(self) -> usize {
        self.shape.n.div_ceil(self.rows * self.variant.cluster.n_tiles())
    }

    /// Depth is counted in 128 values in every variant: what lies behind the end is a product with zeros, and all variants
    /// add as many of them.
    fn n_steps(self) -> usize {
        (self.shape.k.div_ceil(128) * 2 / self.variant.panels).div_ceil(self.variant.cluster.n_parts())
    }

    /// Rows of x of a tile. Tiles are alike and no taller than they must be: to bring rows that are not there takes as long as any. Those
    /// that leave by the copy engine lie where its boxes do.
    fn x_rows(self) -> usize {
        let Variant { columns, cluster, .. } = self.variant;
        let n_m_tiles = self.n_m_tiles();
        if columns == 256 && n_m_tiles > 1 {
            return columns;
        }
        self.shape.m.div_ceil(n_m_tiles).next_multiple_of(8 * cluster.n_tiles())
    }

    /// Cycles until the last block is through: those of a tile's slowest resource and a share of the others', which overlap
    /// it imperfectly, times the tiles that a block takes.
    fn cycles(self, n_multiprocessors: usize) -> f64 {
        // Bytes a cycle out of the L2 cache and out of memory; cycles of a tile's beginning and end, and of an exchange. Fitted to what
        // some 2600 cuts take on an H200 (`kernel-bench --cuts`): only their ratios count.
        const L2: f64 = 5500.0;
        const MEMORY: f64 = 2900.0;
        const ENDS: f64 = 400.0;
        const EXCHANGE: f64 = 80.0;
        const OVERLAP: f64 = 0.43;
        let Variant { warpgroups, columns, cluster, .. } = self.variant;
        let places = n_multiprocessors / cluster.n_blocks();
        let n_tiles = self.n_m_tiles() * self.n_n_tiles();
        let n_active = (n_tiles.min(places) * cluster.n_blocks()) as f64;
        // For 16 values of k, of which a row has 32 bytes.
        let bytes = |rows: f64| 32.0 * rows;
        let (w_rows, x_rows) = (self.rows as f64, self.x_rows() as f64);
        let products = (warpgroups * (columns / 2).max(16)) as f64;
        let l2 = bytes(w_rows + x_rows / cluster.n_tiles() as f64) * n_active / L2;
        // A box takes as long as six rows more would.
        let memory = bytes(w_rows + 6.0) * n_active / self.n_m_tiles() as f64 / MEMORY;
        let costs = [products, l2, memory];
        let slowest = costs.into_iter().fold(0.0, f64::max);
        let step = OVERLAP * slowest + (1.0 - OVERLAP) * costs.iter().sum::<f64>();
        let n_parts = cluster.n_parts();
        let ends = ENDS + (n_parts - 1) as f64 * EXCHANGE + (4 * columns / n_parts) as f64;
        n_tiles.div_ceil(places) as f64 * (self.shape.k.div_ceil(16 * n_parts) as f64 * step + ends)
    }

    fn plan(self, output: OutputType, n_multiprocessors: usize) -> GemmPlan {
        let Variant { warpgroups, columns, panels, cluster, .. } = self.variant;
        let staging_bytes = self.variant.staging_bytes();
        // The unused rows of a tile are read from what lies behind it.
        let unused_bytes = (self.variant.rows_max() - self.rows) * PANEL_ROW_BYTES;
        let stage_bytes = panels * (self.rows + columns) * PANEL_ROW_BYTES;
        let room = SHARED_BYTES - FIXED_BYTES - staging_bytes - unused_bytes;
        let n_stages = (room / stage_bytes).min(STAGES_MAX);
        let n_clusters = (self.n_m_tiles() * self.n_n_tiles()).min(n_multiprocessors / cluster.n_blocks());
        GemmPlan {
            config: LaunchConfig {
                entry: self.variant.entry(output).expect("no cut without an entry for its output is possible"),
                grid: [count(n_clusters * cluster.n_blocks()), 1, 1],
                threads: count(warpgroups * 128 + 32),
                shared_bytes: count(FIXED_BYTES + staging_bytes + unused_bytes + n_stages * stage_bytes),
            },
            rows: self.rows,
            boxes: GemmBoxes {
                w: [PANEL_ROW_BYTES / 2, self.rows],
                x: [PANEL_ROW_BYTES / 2, self.x_rows() / cluster.n_tiles()],
                y: if output == OutputType::Activated { [32, 256] } else { [64, 128] },
            },
            n_steps: self.n_steps(),
            n_stages,
            x_rows: self.x_rows(),
            n_m_tiles: self.n_m_tiles(),
            n_n_tiles: self.n_n_tiles(),
            band: BAND,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{variant::GROUP_ROWS, *};
    use crate::launch::CHAINED_ROWS_MAX;

    fn plan(m: usize, n: usize, k: usize) -> GemmPlan {
        GemmPlan::new(GemmShape { m, n, k }, OutputType::Bf16, 132).unwrap()
    }

    #[test]
    fn a_cut_serves_another_row_count_with_as_many_tiles_as_that_needs() {
        let shape = GemmShape { m: 300, n: 4096, k: 4096 };
        for found in all_plans(shape, OutputType::Bf16, Depth::MaySplit, 132) {
            assert_eq!(found.for_rows(shape, OutputType::Bf16, 132), found);
            let fewer = found.for_rows(GemmShape { m: 8, ..shape }, OutputType::Bf16, 132);
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
        let gated = |m| GemmPlan::new(GemmShape { m, n: 28672, k: 4096 }, OutputType::Activated, 132).unwrap();
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
    fn every_cut_fits_shared_memory_with_a_ring_of_three_or_more() {
        for output in [OutputType::Bf16, OutputType::F32, OutputType::Activated] {
            for cut in cuts(GemmShape { m: 300, n: 4096, k: 4096 }, output, Depth::MaySplit) {
                let plan = cut.plan(output, 132);
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
    fn a_tile_that_is_activated_has_as_many_rows_of_gate_as_of_up() {
        for plan in all_plans(GemmShape { m: 700, n: 28672, k: 4096 }, OutputType::Activated, Depth::MaySplit, 132) {
            assert!(plan.rows.is_multiple_of(2 * GATE_UP_GROUP), "{plan:?}");
        }
        let refusal = GemmPlan::new(GemmShape { m: 1, n: 24, k: 8 }, OutputType::Activated, 132).unwrap_err();
        assert_eq!(refusal.to_string(), "gemm_sm90: 24 rows of gate and up are not a multiple of 16");
    }

    #[test]
    fn what_is_timed_are_the_cheapest_cuts_in_their_order_and_those_measured_to_be_fastest_among_them() {
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
            let plans = candidates(shape, OutputType::Bf16, Depth::Whole, 132).unwrap();
            assert_eq!(plans[0], plan(m, n, k));
            assert!(plans.iter().any(|plan| (plan.config.entry, plan.rows) == (entry, rows)), "{shape:?}: {plans:#?}");
            assert!(plans.len() <= 16);
        }
    }

    #[test]
    fn cuts_that_split_the_depth_are_timed_where_they_were_measured_to_be_fastest_but_not_for_equal_bits() {
        use Entry::{Gemm1x32SplitActivated, Gemm1x32SplitBf16, Gemm1x64SplitUpdated, Gemm1x128SplitUpdated};
        use OutputType::{Activated, Bf16, Updated};
        let fastest = [
            (32, 6144, 4096, Bf16, Gemm1x32SplitBf16, 48),
            (32, 28672, 4096, Activated, Gemm1x32SplitActivated, 64),
            (64, 4096, 4096, Updated, Gemm1x64SplitUpdated, 64),
            (64, 4096, 14336, Updated, Gemm1x64SplitUpdated, 64),
            (128, 4096, 14336, Updated, Gemm1x128SplitUpdated, 64),
        ];
        for (m, n, k, output, entry, rows) in fastest {
            let plans = |depth| candidates(GemmShape { m, n, k }, output, depth, 132).unwrap();
            let found = plans(Depth::MaySplit);
            assert!(found.iter().any(|plan| (plan.config.entry, plan.rows) == (entry, rows)), "{m} {n}: {found:#?}");
            assert!(plans(Depth::Whole).iter().all(|plan| !plan.splits_depth()));
        }
    }

    #[test]
    fn tiles_along_x_are_alike_and_no_taller_than_they_must_be() {
        let rows = |m, entry| {
            let all = all_plans(GemmShape { m, n: 4096, k: 4096 }, OutputType::Bf16, Depth::MaySplit, 132);
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
        for cut in cuts(GemmShape { m: 300, n: 4096, k: 4096 }, OutputType::F32, Depth::Whole) {
            let needed = cut.rows.div_ceil(GROUP_ROWS);
            assert_eq!(needed, cut.variant.warpgroups, "{cut:?}");
        }
    }

    #[test]
    fn an_update_has_tiles_whose_squares_add_up_in_pairs_and_never_the_largest() {
        let plans = all_plans(GemmShape { m: 100, n: 4096, k: 4096 }, OutputType::Updated, Depth::MaySplit, 132);
        assert!(plans.iter().all(|plan| [16, 32, 64].contains(&plan.rows) && plan.scales()));
        let refusal = GemmPlan::new(GemmShape { m: 2, n: 4097, k: 8 }, OutputType::Updated, 132).unwrap_err();
        assert_eq!(refusal.to_string(), "gemm_sm90: a residual of width 4097 is not a multiple of 8");
    }

    #[test]
    fn rows_that_may_have_factors_never_take_the_largest_tiles() {
        for m in 1..=CHAINED_ROWS_MAX {
            for (n, k) in [(6144, 4096), (28672, 4096), (128, 8192)] {
                assert!(plan(m, n, k).scales(), "{m} {n} {k}");
            }
        }
    }

    #[test]
    fn depth_is_counted_alike_in_every_variant() {
        for k in [8, 64, 72, 4096, 4104] {
            let depths = cuts(GemmShape { m: 1, n: 64, k }, OutputType::F32, Depth::Whole)
                .map(|cut| cut.n_steps() * cut.variant.panels);
            assert!(depths.into_iter().all(|panels| panels == k.div_ceil(128) * 2), "{k}");
        }
    }

    #[test]
    fn odd_rows_of_y_do_not_leave_by_the_copy_engine() {
        let plan = plan(4096, 4097, 512);
        assert_ne!(plan.config.entry, Entry::Gemm2x256Bf16);
    }

    #[test]
    fn a_refusal_names_the_depth() {
        let refusal = GemmPlan::new(GemmShape { m: 1, n: 1, k: 9 }, OutputType::F32, 132).unwrap_err();
        assert_eq!(refusal.to_string(), "gemm_sm90: depth 9 is not a multiple of 8");
    }
}
