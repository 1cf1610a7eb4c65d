//! Tiles of the product for any number of rows: which of its compilations, and how many weight rows a block takes. What a tile
//! costs, and the launch that it makes of a shape. Pure.

use std::{fmt, str::FromStr};

use stoker_fit::gpu::SUM_DIGITS;

use super::{
    BAND, Depth, FIXED_BYTES, GemmBoxes, GemmPlan, PANEL_ROW_BYTES, SHARED_BYTES, STAGES_MAX,
    variant::{VARIANTS, Variant},
};
use crate::{
    choose::{Operands, ScaledBy},
    int4::{self, GroupSize},
    launch::{Entry, Epilogue, GATE_UP_GROUP, GemmShape, LaunchConfig, NORM_TILE, count},
};

/// Bytes of 64 values of 16 outputs, and of a group of each; the same constants as in `csrc/int4.cuh`.
const INT4_PANEL_BYTES: usize = 512;
const INT4_GROUP_BYTES: usize = 64;

/// A tile, written as warpgroups x rows of x / weight rows: `2x64/112`; `1x64s/48` if two blocks sum half of the depth each.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Tile {
    pub(super) variant: Variant,
    pub(super) rows: usize,
}

/// A tile at the sizes of a product.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tiling {
    pub(super) tile: Tile,
    pub(super) shape: GemmShape,
}

/// How a product's tiles lie on a chip.
struct Spread {
    /// Tiles that the busiest block takes.
    n_rounds: f64,
    /// Blocks that take any.
    n_active: f64,
}

impl Tile {
    /// All that there are.
    fn every(depth: Depth) -> impl Iterator<Item = Self> {
        let of = |variant: Variant| variant.rows().map(move |rows| Self { variant, rows });
        let tiles = VARIANTS.into_iter().flat_map(of);
        tiles.filter(move |tile| depth == Depth::MaySplit || !tile.splits_depth())
    }

    /// All that the kernel has for a product.
    pub(super) fn all(shape: GemmShape, epilogue: Epilogue, depth: Depth) -> impl Iterator<Item = Self> {
        Self::every(depth).filter(move |tile| tile.fits(shape, epilogue))
    }

    /// The same of operands in e4m3.
    pub(super) fn all_e4m3(
        scaled: ScaledBy,
        shape: GemmShape,
        epilogue: Epilogue,
        depth: Depth,
    ) -> impl Iterator<Item = Self> {
        Self::every(depth).filter(move |tile| tile.fits_e4m3(scaled, shape, epilogue))
    }

    /// The same of weights of four bits.
    pub(super) fn all_int4(shape: GemmShape, epilogue: Epilogue, depth: Depth) -> impl Iterator<Item = Self> {
        Self::every(depth).filter(move |tile| tile.fits_int4(shape, epilogue))
    }

    /// The same beside rows in e4m3.
    pub(super) fn all_beside_e4m3(shape: GemmShape, epilogue: Epilogue, depth: Depth) -> impl Iterator<Item = Self> {
        Self::every(depth).filter(move |tile| tile.fits_beside_e4m3(shape, epilogue))
    }

    /// Whether the kernel has it for this product.
    pub fn fits(self, shape: GemmShape, epilogue: Epilogue) -> bool {
        let has_entry = self.variant.entry(Operands::Bf16, epilogue).is_some();
        has_entry && Tiling { tile: self, shape }.is_possible(epilogue)
    }

    /// Whether an element is the sum of several chains: another order of the same sum, other bits.
    pub fn splits_depth(self) -> bool {
        self.variant.splits_depth()
    }

    /// Whether warps share the depth of what a block sums; x then comes by boxes of all panels of a stage, of whole panels.
    pub(crate) fn is_by_warps(self) -> bool {
        self.variant.by_warps
    }

    /// Weight rows of a block.
    pub fn rows(self) -> usize {
        self.rows
    }

    /// Whether rows of x may have factors: the largest tiles have no place for them.
    pub fn scales(self) -> bool {
        self.variant.columns < 256
    }

    /// Whether the kernel has it for this product of operands in e4m3.
    pub fn fits_e4m3(self, scaled: ScaledBy, shape: GemmShape, epilogue: Epilogue) -> bool {
        let has_entry = self.variant.entry(scaled.into(), epilogue).is_some();
        has_entry && Tiling { tile: self, shape: in_pairs(shape) }.is_possible(epilogue)
    }

    /// The launch for a product of operands in e4m3 that the tile fits. A pair of them stands where one of bf16 does.
    pub fn plan_e4m3(self, scaled: ScaledBy, shape: GemmShape, epilogue: Epilogue, n_multiprocessors: u32) -> GemmPlan {
        let entry = self.entry(scaled.into(), epilogue);
        let plan = Tiling { tile: self, shape: in_pairs(shape) }.plan(entry, epilogue, n_multiprocessors as usize);
        // With so many columns two warpgroups take registers from a whole one beside them: for two sets of sums.
        let threads = match scaled {
            ScaledBy::Blocks if self.variant.columns == 256 => 384,
            _ => plan.config.threads,
        };
        GemmPlan { config: LaunchConfig { threads, ..plan.config }, ..plan }
    }

    /// Whether the kernel has it for this product of weights of four bits: its rows are whole tiles of codes, and panels whole where one
    /// copy brings several.
    pub fn fits_int4(self, shape: GemmShape, epilogue: Epilogue) -> bool {
        let has_entry = self.variant.entry(Operands::Int4, epilogue).is_some();
        let is_whole =
            self.rows.is_multiple_of(int4::TILE_ROWS) && (!self.variant.by_warps || shape.k.is_multiple_of(64));
        has_entry && is_whole && Tiling { tile: self, shape }.is_possible(epilogue)
    }

    /// The launch for a product of weights of four bits that the tile fits.
    pub fn plan_int4(self, shape: GemmShape, epilogue: Epilogue, n_multiprocessors: u32, group: GroupSize) -> GemmPlan {
        let entry = self.entry(Operands::Int4, epilogue);
        let plan = Tiling { tile: self, shape }.plan(entry, epilogue, n_multiprocessors as usize);
        let Variant { warpgroups, columns, cluster, by_warps, .. } = self.variant;
        let (n_tiles, panels) = (self.rows / int4::TILE_ROWS, self.variant.int4_panels());
        let n_groups = panels / 2 * group.n_units();
        let w_bytes = (n_tiles * (panels * INT4_PANEL_BYTES + n_groups * INT4_GROUP_BYTES)).next_multiple_of(1024);
        let x_rows = if by_warps { plan.x_rows } else { columns };
        let stage_bytes = w_bytes + panels * x_rows * PANEL_ROW_BYTES;
        // Warps that share the depth, and two warpgroups with many columns, take registers from a whole one beside them.
        let takes_registers = by_warps || (warpgroups == 2 && columns >= 64);
        let threads = if takes_registers { count(warpgroups * 128 + 128) } else { plan.config.threads };
        let fixed_bytes = FIXED_BYTES + self.variant.staging_bytes();
        let n_stages = ((SHARED_BYTES - fixed_bytes) / stage_bytes).min(STAGES_MAX);
        // The first rows of x come behind all that was asked for before. Of weights this small that is most of them: measured at 1 to 64
        // rows, two were the fastest of 1, 2, 3, 4, 6, 8 and all.
        let n_ahead = n_stages.min(2);
        GemmPlan {
            config: LaunchConfig { threads, shared_bytes: count(fixed_bytes + n_stages * stage_bytes), ..plan.config },
            n_steps: shape.k.div_ceil(64 * panels).div_ceil(cluster.n_parts()),
            n_stages,
            n_ahead,
            boxes: GemmBoxes { w: [panels, n_groups], ..plan.boxes },
            ..plan
        }
    }

    /// Whether the kernel has it for this product of weights of four bits in groups of 128 with rows in e4m3: its rows are whole tiles of
    /// codes, the depth is whole groups.
    pub fn fits_beside_e4m3(self, shape: GemmShape, epilogue: Epilogue) -> bool {
        let has_entry = self.variant.entry(Operands::Int4BesideE4m3, epilogue).is_some();
        let is_whole = self.rows.is_multiple_of(int4::TILE_ROWS) && shape.k.is_multiple_of(GroupSize::G128.values());
        has_entry && is_whole && Tiling { tile: self, shape: in_pairs(shape) }.is_possible(epilogue)
    }

    /// The launch for such a product that the tile fits.
    pub fn plan_beside_e4m3(self, shape: GemmShape, epilogue: Epilogue, n_multiprocessors: u32) -> GemmPlan {
        let entry = self.entry(Operands::Int4BesideE4m3, epilogue);
        let plan = Tiling { tile: self, shape: in_pairs(shape) }.plan(entry, epilogue, n_multiprocessors as usize);
        let Variant { warpgroups, columns, cluster, .. } = self.variant;
        // Of x, of 128 values each, beside which are a group and two panels of codes.
        let (n_tiles, panels) = (self.rows / int4::TILE_ROWS, self.variant.beside_e4m3_panels());
        // With so many columns two warpgroups that make fragments ahead take registers from a whole one beside them.
        let takes_registers = warpgroups == 2 && columns >= 64 && cluster.n_parts() == 1;
        let threads = if takes_registers { 384 } else { plan.config.threads };
        let w_bytes = n_tiles * panels * (2 * INT4_PANEL_BYTES + INT4_GROUP_BYTES);
        let sums_bytes = panels * plan.x_rows * SUM_DIGITS;
        let stage_bytes = (w_bytes + sums_bytes).next_multiple_of(1024) + panels * columns * PANEL_ROW_BYTES;
        let fixed_bytes = FIXED_BYTES + self.variant.staging_bytes();
        let n_stages = ((SHARED_BYTES - fixed_bytes) / stage_bytes).min(STAGES_MAX);
        GemmPlan {
            config: LaunchConfig { threads, shared_bytes: count(fixed_bytes + n_stages * stage_bytes), ..plan.config },
            n_steps: shape.k.div_ceil(128 * panels).div_ceil(cluster.n_parts()),
            n_stages,
            // As with rows of bf16.
            n_ahead: n_stages.min(2),
            boxes: GemmBoxes { w: [2 * panels, panels], ..plan.boxes },
            ..plan
        }
    }

    /// The launch for a product that the tile fits.
    pub fn plan(self, shape: GemmShape, epilogue: Epilogue, n_multiprocessors: u32) -> GemmPlan {
        let entry = self.entry(Operands::Bf16, epilogue);
        Tiling { tile: self, shape }.plan(entry, epilogue, n_multiprocessors as usize)
    }

    fn entry(self, operands: Operands, epilogue: Epilogue) -> Entry {
        self.variant.entry(operands, epilogue).expect("no tile without an entry for its output fits")
    }
}

/// The product of bf16 whose operands are as many bytes as those of this one in e4m3.
pub(super) fn in_pairs(shape: GemmShape) -> GemmShape {
    GemmShape { k: shape.k / 2, ..shape }
}

impl fmt::Display for Tile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.variant.name(), self.rows)
    }
}

impl FromStr for Tile {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let unknown = || format!("no tile of the kernel is written {text:?}");
        let (name, rows) = text.split_once('/').ok_or_else(unknown)?;
        let rows = rows.parse().map_err(|_| unknown())?;
        let variant = VARIANTS.into_iter().find(|variant| variant.name() == name).ok_or_else(unknown)?;
        variant.rows().any(|own| own == rows).then_some(Self { variant, rows }).ok_or_else(unknown)
    }
}

impl Tiling {
    /// Large tiles of bf16 leave by the copy engine, which wants whole tiles and rows of y that are multiples of 16 bytes. A tile
    /// has as many rows of gate as of up, and of an update so many that their squares are added up in pairs.
    pub(super) fn is_possible(self, epilogue: Epilogue) -> bool {
        let leaves_by_copy = self.tile.variant.columns == 256 && epilogue != Epilogue::F32;
        let has_whole = match epilogue {
            Epilogue::Bf16 | Epilogue::F32 => true,
            Epilogue::Sum => false,
            Epilogue::Gated => self.tile.rows.is_multiple_of(2 * GATE_UP_GROUP),
            Epilogue::Update => matches!(self.tile.rows, NORM_TILE | 32 | 64),
        };
        has_whole
            && (!leaves_by_copy || (self.tile.rows == self.tile.variant.rows_max() && self.shape.n.is_multiple_of(8)))
    }

    fn n_m_tiles(self) -> usize {
        self.shape.m.div_ceil(self.tile.variant.columns)
    }

    fn n_n_tiles(self) -> usize {
        self.shape.n.div_ceil(self.tile.rows * self.tile.variant.cluster.n_tiles())
    }

    /// Depth is counted in 128 values in every variant: what lies behind the end is a product with zeros, and all variants
    /// add as many of them.
    pub(super) fn n_steps(self) -> usize {
        (self.shape.k.div_ceil(128) * 2 / self.tile.variant.panels).div_ceil(self.tile.variant.cluster.n_parts())
    }

    /// Rows of x of a tile. Tiles are alike and no taller than they must be: to bring rows that are not there takes as long as any. Those
    /// that leave by the copy engine lie where its boxes do.
    fn x_rows(self) -> usize {
        let Variant { columns, cluster, .. } = self.tile.variant;
        let n_m_tiles = self.n_m_tiles();
        if columns == 256 && n_m_tiles > 1 || self.tile.variant.by_warps {
            return columns;
        }
        self.shape.m.div_ceil(n_m_tiles).next_multiple_of(8 * cluster.n_tiles())
    }

    fn spread(self, n_multiprocessors: usize) -> Spread {
        let n_blocks = self.tile.variant.cluster.n_blocks();
        let (places, n_tiles) = (n_multiprocessors / n_blocks, self.n_m_tiles() * self.n_n_tiles());
        Spread { n_rounds: n_tiles.div_ceil(places) as f64, n_active: (n_tiles.min(places) * n_blocks) as f64 }
    }

    /// Cycles until the last block is through: those of a tile's slowest resource and a share of the others', which overlap
    /// it imperfectly, times the tiles that a block takes.
    pub(super) fn cycles(self, n_multiprocessors: usize) -> f64 {
        // Bytes a cycle out of the L2 cache and out of memory; cycles of a tile's beginning and end, and of an exchange. Fitted to what
        // some 2600 tilings take on an H200: only their ratios count.
        const L2: f64 = 5500.0;
        const MEMORY: f64 = 2900.0;
        const ENDS: f64 = 400.0;
        const EXCHANGE: f64 = 80.0;
        const OVERLAP: f64 = 0.43;
        let Variant { columns, cluster, .. } = self.tile.variant;
        let Spread { n_rounds, n_active } = self.spread(n_multiprocessors);
        // For 16 values of k, of which a row has 32 bytes.
        let bytes = |rows: f64| 32.0 * rows;
        let (w_rows, x_rows) = (self.tile.rows as f64, self.x_rows() as f64);
        let products = self.tile.variant.product_cycles();
        let l2 = bytes(w_rows + x_rows / cluster.n_tiles() as f64) * n_active / L2;
        // A box takes as long as six rows more would.
        let memory = bytes(w_rows + 6.0) * n_active / self.n_m_tiles() as f64 / MEMORY;
        let costs = [products, l2, memory];
        let slowest = costs.into_iter().fold(0.0, f64::max);
        let step = OVERLAP * slowest + (1.0 - OVERLAP) * costs.iter().sum::<f64>();
        let n_parts = cluster.n_parts();
        let ends = ENDS + (n_parts - 1) as f64 * EXCHANGE + (4 * columns / n_parts) as f64;
        n_rounds * (self.shape.k.div_ceil(16 * n_parts) as f64 * step + ends)
    }

    /// The same of weights of four bits where warps share the depth. Two tiles of codes share fragments of x; fitted to some 40 tilings, as against what
    /// is counted for the others.
    fn cycles_by_warps(self, n_multiprocessors: usize) -> f64 {
        const MEMORY: f64 = 2600.0;
        const ENDS: f64 = 1500.0;
        let Variant { columns, cluster, .. } = self.tile.variant;
        let Spread { n_rounds, n_active } = self.spread(n_multiprocessors);
        // For 16 values of k.
        let n_code_tiles = (self.tile.rows / int4::TILE_ROWS).next_multiple_of(2) as f64;
        let multiplied = if columns == 8 { 4.0 + 8.2 * n_code_tiles } else { 18.0 + 7.0 * n_code_tiles };
        let memory = 8.5 * self.tile.rows as f64 * n_active / self.n_m_tiles() as f64 / MEMORY;
        let step = multiplied.max(memory);
        n_rounds * (self.shape.k.div_ceil(16 * cluster.n_parts()) as f64 * step + ENDS)
    }

    /// The same of weights of four bits, for 16 values of k: fewer bytes of them, and what makes fragments of codes, by warps that share four
    /// schedulers.
    pub(super) fn cycles_int4(self, n_multiprocessors: usize) -> f64 {
        if self.tile.variant.by_warps {
            return self.cycles_by_warps(n_multiprocessors);
        }
        let Variant { warpgroups, columns, .. } = self.tile.variant;
        // One warpgroup alone waits for its own products in between.
        let fragments = if warpgroups == 1 { 30.0 } else { 36.0 } + (warpgroups * columns) as f64 / 16.0;
        self.cycles_of_codes(n_multiprocessors, 8.5, fragments)
    }

    /// The same beside rows in e4m3, of which `shape` counts pairs, for 32 values of k: codes become fragments by fewer instructions, sums are
    /// added group by group.
    pub(super) fn cycles_beside_e4m3(self, n_multiprocessors: usize) -> f64 {
        let Variant { warpgroups, columns, .. } = self.tile.variant;
        let waits = if warpgroups == 1 { self.tile.variant.product_cycles() } else { 0.0 };
        let fragments = warpgroups as f64 * (24.0 + columns as f64 / 3.0) + waits;
        self.cycles_of_codes(n_multiprocessors, 17.0, fragments)
    }

    /// Where a step has so many bytes of a weight row, its share of a group among them, and 32 of a row of x, and making fragments takes so
    /// many cycles.
    fn cycles_of_codes(self, n_multiprocessors: usize, row_bytes: f64, fragments: f64) -> f64 {
        const L2: f64 = 5500.0;
        const MEMORY: f64 = 2900.0;
        const ENDS: f64 = 500.0;
        const OVERLAP: f64 = 0.5;
        let Variant { columns, cluster, .. } = self.tile.variant;
        let Spread { n_rounds, n_active } = self.spread(n_multiprocessors);
        let (w_bytes, x_bytes) = (row_bytes * self.tile.rows as f64, 32.0 * self.x_rows() as f64);
        let products = self.tile.variant.product_cycles();
        let l2 = (w_bytes + x_bytes / cluster.n_tiles() as f64) * n_active / L2;
        let memory = w_bytes * n_active / self.n_m_tiles() as f64 / MEMORY;
        let costs = [products, fragments, l2, memory];
        let slowest = costs.into_iter().fold(0.0, f64::max);
        let step = OVERLAP * slowest + (1.0 - OVERLAP) * (costs.iter().sum::<f64>() - products.min(fragments));
        let n_parts = cluster.n_parts();
        let ends = ENDS + (4 * columns / n_parts) as f64;
        n_rounds * (self.shape.k.div_ceil(16 * n_parts) as f64 * step + ends)
    }

    pub(super) fn plan(self, entry: Entry, epilogue: Epilogue, n_multiprocessors: usize) -> GemmPlan {
        let Variant { warpgroups, columns, panels, cluster, .. } = self.tile.variant;
        let staging_bytes = self.tile.variant.staging_bytes();
        // The unused rows of a tile are read from what lies behind it.
        let unused_bytes = (self.tile.variant.rows_max() - self.tile.rows) * PANEL_ROW_BYTES;
        let stage_bytes = panels * (self.tile.rows + columns) * PANEL_ROW_BYTES;
        let room = SHARED_BYTES - FIXED_BYTES - staging_bytes - unused_bytes;
        let n_stages = (room / stage_bytes).min(STAGES_MAX);
        let n_clusters = (self.n_m_tiles() * self.n_n_tiles()).min(n_multiprocessors / cluster.n_blocks());
        GemmPlan {
            config: LaunchConfig {
                entry,
                grid: [count(n_clusters * cluster.n_blocks()), 1, 1],
                threads: count(warpgroups * 128 + 32),
                shared_bytes: count(FIXED_BYTES + staging_bytes + unused_bytes + n_stages * stage_bytes),
            },
            tile: self.tile,
            rows: self.tile.rows,
            boxes: GemmBoxes {
                w: [PANEL_ROW_BYTES / 2, self.tile.rows],
                x: [PANEL_ROW_BYTES / 2, self.x_rows() / cluster.n_tiles()],
                y: if epilogue == Epilogue::Gated { [32, 256] } else { [64, 128] },
            },
            n_steps: self.n_steps(),
            n_stages,
            n_ahead: n_stages,
            x_rows: self.x_rows(),
            n_m_tiles: self.n_m_tiles(),
            n_n_tiles: self.n_n_tiles(),
            band: BAND,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tile_is_what_is_written() {
        for text in ["1x8/48", "2x64/112", "1x64s/48", "2x256/128"] {
            assert_eq!(text.parse::<Tile>().unwrap().to_string(), text);
        }
        let refusals = ["", "1x64", "1x64/7", "9x64/48", "1x64s/x", "2x64/56"].map(str::parse::<Tile>);
        assert!(refusals.iter().all(Result::is_err), "{refusals:?}");
        assert_eq!("1x64/7".parse::<Tile>().unwrap_err(), "no tile of the kernel is written \"1x64/7\"");
    }
}
