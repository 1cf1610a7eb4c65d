//! The launch shape of the batch-invariant product (`csrc/gemm_sm90.cu`): which variant, how many weight rows a tile, how
//! deep the ring. Pure. Nothing here changes a bit of the result, so it may be chosen by speed alone.

use crate::{
    error::KernelError,
    launch::{Entry, GATE_UP_GROUP, GemmShape, LaunchConfig, OutputType, count, refused},
};

/// Bytes of a row of a stage's panel: 64 values of k.
const PANEL_ROW_BYTES: usize = 128;
/// Bytes of y that a warpgroup turns around at once, where the tile is large.
const STAGED_BYTES: usize = 16 << 10;
/// Most stages of the ring; the same constant as in the kernel.
const STAGES_MAX: usize = 32;
/// Shared memory that a block of an H100 or H200 may ask for.
pub(crate) const SHARED_BYTES: usize = 227 << 10;
/// Tiles of a cluster along w that are walked together: with as many rows of x a wave is about square.
const BAND: usize = 8;
/// Barriers, and slack up to a multiple of 1024.
const FIXED_BYTES: usize = 2048;

/// One compilation of the kernel.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct Variant {
    /// To bf16, to f32, activated.
    entries: [Entry; 3],
    /// Warpgroups that multiply.
    warpgroups: usize,
    /// Rows of x of a tile.
    columns: usize,
    /// 64 values of k each, of a stage.
    panels: usize,
    /// Blocks that share rows of x.
    cluster: usize,
}

const fn variant(entries: [Entry; 3], [warpgroups, columns, panels, cluster]: [usize; 4]) -> Variant {
    Variant { entries, warpgroups, columns, panels, cluster }
}

impl Variant {
    fn entry(self, output: OutputType) -> Entry {
        let [bf16, f32, activated] = self.entries;
        match output {
            OutputType::Bf16 => bf16,
            OutputType::F32 => f32,
            OutputType::Activated => activated,
        }
    }
}

const VARIANTS: [Variant; 6] = [
    variant([Entry::Gemm1x8Bf16, Entry::Gemm1x8F32, Entry::Gemm1x8Activated], [1, 8, 2, 1]),
    variant([Entry::Gemm1x32Bf16, Entry::Gemm1x32F32, Entry::Gemm1x32Activated], [1, 32, 2, 2]),
    variant([Entry::Gemm1x64Bf16, Entry::Gemm1x64F32, Entry::Gemm1x64Activated], [1, 64, 2, 2]),
    variant([Entry::Gemm1x128Bf16, Entry::Gemm1x128F32, Entry::Gemm1x128Activated], [1, 128, 1, 2]),
    variant([Entry::Gemm2x128Bf16, Entry::Gemm2x128F32, Entry::Gemm2x128Activated], [2, 128, 1, 2]),
    variant([Entry::Gemm2x256Bf16, Entry::Gemm2x256F32, Entry::Gemm2x256Activated], [2, 256, 1, 2]),
];

/// Everything that a launch needs.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct GemmPlan {
    /// Entry point, blocks, threads, shared memory.
    pub config: LaunchConfig,
    /// Weight rows of a warpgroup's tile.
    pub rows: usize,
    /// Rows of a box of w, of x and of y.
    pub boxes: GemmBoxes,
    /// Stages of a tile.
    pub n_steps: usize,
    /// Stages of the ring.
    pub n_stages: usize,
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

    /// The cut that costs least on a chip of `n_multiprocessors`.
    pub fn new(shape: GemmShape, output: OutputType, n_multiprocessors: u32) -> Result<Self, KernelError> {
        const OP: &str = "gemm_sm90";
        if shape.m.min(shape.n).min(shape.k) == 0 {
            return Err(refused(OP, "nothing to do: a dimension is 0".to_owned()));
        }
        if !shape.k.is_multiple_of(8) {
            return Err(refused(OP, format!("depth {} is not a multiple of 8", shape.k)));
        }
        if output == OutputType::Activated && !shape.n.is_multiple_of(2 * GATE_UP_GROUP) {
            return Err(refused(
                OP,
                format!("{} rows of gate and up are not a multiple of {}", shape.n, 2 * GATE_UP_GROUP),
            ));
        }
        let n_multiprocessors = n_multiprocessors as usize;
        let cheapest =
            cuts(shape, output).min_by(|a, b| a.cycles(n_multiprocessors).total_cmp(&b.cycles(n_multiprocessors)));
        let cut = cheapest.expect("the smallest variant multiplies any shape");
        Ok(cut.plan(output, n_multiprocessors))
    }

    /// The same cut for another row count: `shape` differs in m only.
    pub(crate) fn for_rows(self, shape: GemmShape, output: OutputType, n_multiprocessors: u32) -> Self {
        let own = VARIANTS.into_iter().find(|variant| variant.entry(output) == self.config.entry);
        let variant = own.expect("a plan is one of a variant, for its output");
        Cut { variant, rows: self.rows, shape }.plan(output, n_multiprocessors as usize)
    }
}

/// Plans worth timing: the cheapest by count, then others of its kernel. Fewer than 32 weight rows a tile were never the fastest.
pub(crate) fn candidates(
    shape: GemmShape,
    output: OutputType,
    n_multiprocessors: u32,
) -> Result<Vec<GemmPlan>, KernelError> {
    let first = GemmPlan::new(shape, output, n_multiprocessors)?;
    let others = all_plans(shape, output, n_multiprocessors).into_iter();
    let others = others.filter(|plan| plan.config.entry == first.config.entry && plan.rows >= 32 && *plan != first);
    Ok(std::iter::once(first).chain(others).collect())
}

/// Plans of every way to cut a product, the cheapest or not: for comparing and timing them.
pub fn all_plans(shape: GemmShape, output: OutputType, n_multiprocessors: u32) -> Vec<GemmPlan> {
    cuts(shape, output).map(|cut| cut.plan(output, n_multiprocessors as usize)).collect()
}

/// All ways to cut a product that the kernel has.
fn cuts(shape: GemmShape, output: OutputType) -> impl Iterator<Item = Cut> {
    let of = move |variant: Variant| (8..=64).step_by(8).map(move |rows| Cut { variant, rows, shape });
    VARIANTS.into_iter().flat_map(of).filter(move |cut| cut.is_possible(output))
}

impl Cut {
    /// Large tiles of bf16 leave by the copy engine, which wants whole tiles and rows of y that are multiples of 16 bytes. A tile
    /// has as many rows of gate as of up.
    fn is_possible(self, output: OutputType) -> bool {
        let leaves_by_copy = self.variant.columns == 256 && output != OutputType::F32;
        let has_pairs = output != OutputType::Activated || self.rows.is_multiple_of(2 * GATE_UP_GROUP);
        has_pairs && (!leaves_by_copy || (self.rows == 64 && self.shape.n.is_multiple_of(8)))
    }

    fn w_rows(self) -> usize {
        self.variant.warpgroups * self.rows
    }

    fn n_m_tiles(self) -> usize {
        self.shape.m.div_ceil(self.variant.columns)
    }

    fn n_n_tiles(self) -> usize {
        self.shape.n.div_ceil(self.w_rows() * self.variant.cluster)
    }

    /// Depth is counted in 128 values in every variant: what lies behind the end is a product with zeros, and all variants
    /// add as many of them.
    fn n_steps(self) -> usize {
        self.shape.k.div_ceil(128) * 2 / self.variant.panels
    }

    /// Cycles until the last block is through: those of a tile's slowest resource and a share of the others', which overlap
    /// it imperfectly, times the tiles that a block takes.
    fn cycles(self, n_multiprocessors: usize) -> f64 {
        // Bytes a cycle: into one multiprocessor, out of the L2 cache, out of memory. Cycles of a tile's beginning and end.
        // Measured on an H200 where each was the limit.
        const PORT: f64 = 53.0;
        const L2: f64 = 4800.0;
        const MEMORY: f64 = 2400.0;
        const ENDS: f64 = 400.0;
        const OVERLAP: f64 = 0.75;
        let Variant { warpgroups, columns, cluster, .. } = self.variant;
        let places = n_multiprocessors / cluster;
        let n_tiles = self.n_m_tiles() * self.n_n_tiles();
        let n_active = (n_tiles.min(places) * cluster) as f64;
        // For 16 values of k, of which a row has 32 bytes.
        let bytes = |rows: usize| 32.0 * rows as f64;
        let products = (warpgroups * (columns / 2).max(16)) as f64;
        let port = bytes(self.w_rows() + columns) / PORT;
        let l2 = bytes(self.w_rows() + columns / cluster) * n_active / L2;
        // Small boxes come in more slowly.
        let memory = bytes(self.w_rows() + 6 * warpgroups) * n_active / self.n_m_tiles() as f64 / MEMORY;
        let costs = [products, port, l2, memory];
        let slowest = costs.into_iter().fold(0.0, f64::max);
        let step = OVERLAP * slowest + (1.0 - OVERLAP) * costs.iter().sum::<f64>();
        let tile = self.shape.k.div_ceil(16) as f64 * step + ENDS + 4.0 * columns as f64;
        n_tiles.div_ceil(places) as f64 * tile
    }

    fn plan(self, output: OutputType, n_multiprocessors: usize) -> GemmPlan {
        let Variant { warpgroups, columns, panels, cluster, .. } = self.variant;
        let staging_bytes = if columns == 256 { warpgroups * STAGED_BYTES } else { 0 };
        // The unused rows of a tile are read from what lies behind it.
        let unused_bytes = (64 - self.rows) * PANEL_ROW_BYTES;
        let stage_bytes = panels * (self.w_rows() + columns) * PANEL_ROW_BYTES;
        let room = SHARED_BYTES - FIXED_BYTES - staging_bytes - unused_bytes;
        let n_stages = (room / stage_bytes).min(STAGES_MAX);
        let n_clusters = (self.n_m_tiles() * self.n_n_tiles()).min(n_multiprocessors / cluster);
        GemmPlan {
            config: LaunchConfig {
                entry: self.variant.entry(output),
                grid: [count(n_clusters * cluster), 1, 1],
                threads: count(warpgroups * 128 + 32),
                shared_bytes: count(FIXED_BYTES + staging_bytes + unused_bytes + n_stages * stage_bytes),
            },
            rows: self.rows,
            boxes: GemmBoxes {
                w: [PANEL_ROW_BYTES / 2, self.w_rows()],
                x: [PANEL_ROW_BYTES / 2, columns / cluster],
                y: if output == OutputType::Activated { [32, 256] } else { [64, 128] },
            },
            n_steps: self.n_steps(),
            n_stages,
            n_m_tiles: self.n_m_tiles(),
            n_n_tiles: self.n_n_tiles(),
            band: BAND,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(m: usize, n: usize, k: usize) -> GemmPlan {
        GemmPlan::new(GemmShape { m, n, k }, OutputType::Bf16, 132).unwrap()
    }

    #[test]
    fn a_cut_serves_another_row_count_with_as_many_tiles_as_that_needs() {
        let shape = GemmShape { m: 300, n: 4096, k: 4096 };
        for found in all_plans(shape, OutputType::Bf16, 132) {
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
        // Microseconds on an H200, beside the next best: 58.4 (60.2), 61.3 (92.8), 20.6 (24.3), 101 (109).
        let chosen = [plan(32, 28672, 4096), plan(64, 28672, 4096), plan(256, 4096, 4096), plan(256, 28672, 4096)];
        let expected = [
            (Entry::Gemm1x32Bf16, 56),
            (Entry::Gemm1x64Bf16, 56),
            (Entry::Gemm1x128Bf16, 64),
            (Entry::Gemm2x256Bf16, 64),
        ];
        assert_eq!(chosen.map(|plan| (plan.config.entry, plan.rows)), expected);
    }

    #[test]
    fn many_rows_of_x_take_the_largest_tiles() {
        for (n, k) in [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)] {
            let plan = plan(8192, n, k);
            assert_eq!((plan.config.entry, plan.rows, plan.config.grid[0]), (Entry::Gemm2x256Bf16, 64, 132), "{n} {k}");
        }
    }

    #[test]
    fn every_cut_fits_shared_memory_with_a_ring_of_three_or_more() {
        for output in [OutputType::Bf16, OutputType::F32, OutputType::Activated] {
            for cut in cuts(GemmShape { m: 300, n: 4096, k: 4096 }, output) {
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
        for plan in all_plans(GemmShape { m: 700, n: 28672, k: 4096 }, OutputType::Activated, 132) {
            assert!(plan.rows.is_multiple_of(2 * GATE_UP_GROUP), "{plan:?}");
        }
        let refusal = GemmPlan::new(GemmShape { m: 1, n: 24, k: 8 }, OutputType::Activated, 132).unwrap_err();
        assert_eq!(refusal.to_string(), "gemm_sm90: 24 rows of gate and up are not a multiple of 16");
    }

    #[test]
    fn the_cheapest_cut_is_the_first_to_be_timed() {
        let shape = GemmShape { m: 32, n: 6144, k: 4096 };
        let plans = candidates(shape, OutputType::Bf16, 132).unwrap();
        assert_eq!(plans[0], plan(32, 6144, 4096));
        let mut rows: Vec<usize> = plans.iter().map(|plan| plan.rows).collect();
        rows.sort_unstable();
        assert_eq!(rows, [32, 40, 48, 56, 64]);
    }

    #[test]
    fn depth_is_counted_alike_in_every_variant() {
        for k in [8, 64, 72, 4096, 4104] {
            let depths =
                cuts(GemmShape { m: 1, n: 64, k }, OutputType::F32).map(|cut| cut.n_steps() * cut.variant.panels);
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
