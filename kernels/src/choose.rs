//! Which kernel multiplies: the one decision for every GEMM of a step, a pure function of the GEMM, the chip and its table. The same
//! at every start. Asks no device, launches nothing.

use std::fmt;

pub use stoker_fit::gpu::WeightFormat;
use stoker_fit::gpu::{BESIDE_E4M3_ROWS, WIDENED_ROWS_MIN};

use crate::{
    blas::{self, Algorithm},
    device::Properties,
    error::KernelError,
    gemm::{self, Depth, Tile},
    int4::GroupSize,
    launch::{
        Epilogue, GemmShape, NORM_TILE, SKINNY_INT4_ROWS_MAX, SKINNY_ROWS_MAX, SkinnyKernel, fits_quantising_ring,
    },
    quantise::E4M3_WHOLE,
    table::{ChipTable, Entry, Header},
};

/// A GEMM of a linear layer, y = x * w^T.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct GemmDesc {
    /// Sizes.
    pub shape: GemmShape,
    /// What is multiplied with what.
    pub operands: Operands,
    /// What rows of x are.
    pub prologue: Prologue,
    /// What is done with the sums.
    pub epilogue: Epilogue,
}

/// What is multiplied with what: x with w.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum Operands {
    /// Both are bf16.
    Bf16,
    /// Both are e4m3; of one row x is bf16.
    E4m3,
    /// The same with a scale a block of weights.
    E4m3Blocks,
    /// Rows of bf16 with weights of four bits.
    Int4,
    /// Rows of e4m3, as [`crate::quantise::BesideCodes`] has them, with weights of four bits in groups of 128.
    Int4BesideE4m3,
}

/// Which weights of e4m3 share a scale.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum ScaledBy {
    /// Those of a row.
    Rows,
    /// Those of a block of [`BLOCK_OUTPUTS`](stoker_fit::gpu::BLOCK_OUTPUTS) x [`BLOCK_INPUTS`](stoker_fit::gpu::BLOCK_INPUTS).
    Blocks,
}

impl From<ScaledBy> for Operands {
    fn from(scaled: ScaledBy) -> Self {
        match scaled {
            ScaledBy::Rows => Self::E4m3,
            ScaledBy::Blocks => Self::E4m3Blocks,
        }
    }
}

/// What the rows of x are.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Prologue {
    /// To be multiplied as they are.
    Plain,
    /// The weighted residual that an [`Epilogue::Update`] left: sums are scaled by the norm's factor of their row.
    NormScaled,
    /// The residual stream, of which the product finds the norm.
    Normed,
}

/// Who makes rows of e4m3 that are multiplied.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum QuantisedBy {
    /// The norm in front, as it leaves them.
    Norm,
    /// A launch of its own.
    Launch,
}

/// What the bits of a row may depend on.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum Numerics {
    /// On how many rows are multiplied together.
    #[default]
    Fastest,
    /// On the row alone: one chain over the depth at every shape.
    BatchInvariant,
}

/// A kernel that multiplies, with all that is chosen of it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum GemmKernel {
    /// Ours for few rows.
    Skinny(SkinnyKernel),
    /// Ours for one row that it quantises itself, times weights of four bits in groups of 128.
    QuantisingRing,
    /// Ours for any number of rows.
    Tiled(Tile),
    /// cuBLASLt's.
    CublasLt(Algorithm),
}

/// What a choice depends on besides the GEMM.
#[derive(Clone, Debug)]
pub struct Chip {
    properties: Properties,
    numerics: Numerics,
    table: ChipTable,
    /// The version of the library whose guesses can be named.
    cublaslt: Option<usize>,
}

/// Row counts that are treated alike.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Rows {
    One,
    /// Our own kernels multiply throughout, with norms and additions inside: launches count. Beyond, cuBLASLt gains more by splitting
    /// the depth than they cost: with 64 rows a step took 6.47 ms instead of 6.08.
    Few,
    Some,
    /// Bound by arithmetic: there is time to read and write the residual in the product.
    Many,
}

const FEW_ROWS_MAX: usize = 32;
const MANY_ROWS_MIN: usize = 512;
/// As [`WIDENED_ROWS_MIN`], where rows of x are quantised by a launch of its own.
const WIDENED_APART_ROWS_MIN: usize = 384;

impl Rows {
    fn of(m: usize) -> Self {
        match m {
            0..=1 => Self::One,
            2..=FEW_ROWS_MAX => Self::Few,
            _ if m < MANY_ROWS_MIN => Self::Some,
            _ => Self::Many,
        }
    }
}

impl Chip {
    /// A chip with the table that was measured on it, if there is one; `cublaslt` is the version of the library that is there.
    pub fn new(
        name: &str,
        properties: Properties,
        numerics: Numerics,
        cublaslt: Option<usize>,
    ) -> Result<Self, KernelError> {
        let (major, minor) = properties.capability;
        if numerics == Numerics::BatchInvariant && (major, minor) != (9, 0) {
            return Err(KernelError::NotInvariant { major, minor });
        }
        let unmeasured = || {
            let Properties { n_multiprocessors, capability, .. } = properties;
            ChipTable::new(Header {
                chip: name.to_owned(),
                capability,
                n_multiprocessors,
                cublaslt: cublaslt.unwrap_or(0),
            })
        };
        let table = ChipTable::built_in(name, properties).unwrap_or_else(unmeasured);
        Ok(Self { properties, numerics, table, cublaslt })
    }

    /// A chip that is not here, of which there is a table.
    pub fn of_table(name: &str, numerics: Numerics) -> Option<Self> {
        let table = ChipTable::all_built_in().find(|table| table.header().chip == name)?;
        let &Header { capability, n_multiprocessors, cublaslt, .. } = table.header();
        let properties = Properties { capability, n_multiprocessors, l2_bytes: 0, shared_bytes_max: 0 };
        Some(Self { properties, numerics, table, cublaslt: Some(cublaslt) })
    }

    /// The names of chips that there is a table of.
    pub fn with_tables() -> String {
        ChipTable::all_built_in().map(|table| table.header().chip.clone()).collect::<Vec<_>>().join(", ")
    }

    /// What launch shapes depend on.
    pub fn properties(&self) -> Properties {
        self.properties
    }

    /// What was measured on it.
    pub fn table(&self) -> &ChipTable {
        &self.table
    }

    /// Chooses by rule from now on.
    pub fn forget_measured(&mut self) {
        let cublaslt = self.cublaslt.unwrap_or(0);
        self.table = ChipTable::new(Header { cublaslt, ..self.table.header().clone() });
    }

    /// Chooses this for the GEMM from now on.
    pub fn set_measured(&mut self, desc: GemmDesc, entry: Entry) {
        self.table.set(self.numerics, desc, entry);
    }

    /// As what weights that are stored so are multiplied. Those of four bits are beside rows in e4m3, where rows are some and groups are of
    /// 128 and a model is not shared by ranks, or become e4m3 themselves, where rows are so many that products are bound by arithmetic. Where a row's
    /// bits may not depend on how many there are, all rows are beside codes or none. Figures: decisions 0015, 0025 and 0042.
    pub fn multiplied_as(
        &self,
        (stored, is_shared): (WeightFormat, bool),
        shape: GemmShape,
        by: QuantisedBy,
    ) -> Operands {
        let is_whole = !is_shared && shape.k.is_multiple_of(GroupSize::G128.values());
        let are_beside = match self.numerics {
            Numerics::Fastest => BESIDE_E4M3_ROWS.contains(&shape.m),
            Numerics::BatchInvariant => true,
        };
        let widened_rows_min = match by {
            QuantisedBy::Norm => WIDENED_ROWS_MIN,
            QuantisedBy::Launch => WIDENED_APART_ROWS_MIN,
        };
        match stored {
            WeightFormat::Bf16 => Operands::Bf16,
            WeightFormat::E4m3 => Operands::E4m3,
            WeightFormat::E4m3Blocks => Operands::E4m3Blocks,
            WeightFormat::Int4(_) if !self.is_hopper() => Operands::Int4,
            WeightFormat::Int4(GroupSize::G128) if is_whole && are_beside => Operands::Int4BesideE4m3,
            WeightFormat::Int4(_) if self.numerics == Numerics::BatchInvariant => Operands::Int4,
            WeightFormat::Int4(_) if shape.m >= widened_rows_min && shape.k.is_multiple_of(E4M3_WHOLE) => {
                Operands::E4m3
            }
            WeightFormat::Int4(_) => Operands::Int4,
        }
    }

    /// Who multiplies. None: no kernel of this chip does that in one launch, or the parts of it in launches of their own are faster.
    ///
    /// What was measured at the shape for the next larger row count decides, else a rule:
    /// - one row is the skinny kernel's, logits of up to 8 too if their weights are small;
    /// - on Hopper 2 to 32 rows are ours by the tile that costs least by count, but for logits; beyond, whoever multiplies the
    ///   nearest shape of the table, cuBLASLt's best guess where there is none; gate and up are ours at any number of rows;
    /// - all else is cuBLASLt's best guess, which from 512 rows on adds to the residual.
    pub fn choose(&self, desc: GemmDesc) -> Option<GemmKernel> {
        let found = match self.numerics {
            _ if desc.prologue == Prologue::Normed && desc.operands != Operands::Int4BesideE4m3 => None,
            _ if matches!(desc.operands, Operands::E4m3 | Operands::E4m3Blocks | Operands::Int4BesideE4m3) => {
                self.quantised(desc)
            }
            Numerics::Fastest if desc.operands == Operands::Int4 => self.four_bits(desc),
            Numerics::BatchInvariant => self.batch_invariant(desc),
            Numerics::Fastest => match desc.prologue {
                Prologue::NormScaled => self.norm_scaled(desc),
                Prologue::Plain | Prologue::Normed => self.plain(desc),
            },
        };
        found.filter(|kernel| kernel.fits(desc))
    }

    /// What may be the fastest way, in the order in which equals are preferred: for measuring.
    pub fn candidates(&self, desc: GemmDesc) -> Vec<Entry> {
        let depth = match self.numerics {
            Numerics::Fastest => Depth::MaySplit,
            Numerics::BatchInvariant => Depth::Whole,
        };
        let rows = Rows::of(desc.shape.m);
        // Weights of logits are a gigabyte: any tile reads them as fast.
        let is_ours = self.is_hopper() && rows != Rows::One && desc.epilogue != Epilogue::F32;
        let tiles = self
            .tiles(desc, depth)
            .into_iter()
            .filter(|tile| is_ours && GemmKernel::Tiled(*tile).fits(desc))
            .map(Entry::Tile);
        let is_theirs = self.numerics == Numerics::Fastest
            && desc.operands == Operands::Bf16
            && match desc.epilogue {
                Epilogue::Bf16 => matches!(rows, Rows::Some | Rows::Many),
                Epilogue::F32 | Epilogue::Sum => rows != Rows::One,
                Epilogue::Gated | Epilogue::Update => false,
            };
        let guesses = (0..blas::GUESSES).filter(|_| is_theirs).map(Entry::CublasLt);
        let is_apart_possible = self.numerics == Numerics::Fastest
            && desc.operands == Operands::Bf16
            && matches!(rows, Rows::Some | Rows::Many);
        let apart = (desc.epilogue == Epilogue::Gated && is_apart_possible).then_some(Entry::Apart);
        tiles.chain(guesses).chain(apart).collect()
    }

    fn batch_invariant(&self, desc: GemmDesc) -> Option<GemmKernel> {
        let is_one_launch = matches!(desc.epilogue, Epilogue::Bf16 | Epilogue::F32 | Epilogue::Gated);
        if desc.prologue != Prologue::Plain || !is_one_launch {
            return None;
        }
        match self.measured(desc) {
            Some(Entry::Tile(tile)) if !tile.splits_depth() => Some(GemmKernel::Tiled(tile)),
            _ => self.cheapest(desc, Depth::Whole),
        }
    }

    /// One row is the skinny kernel's, which widens weights on their way; more are ours on Hopper, by the tile that costs least. Where bits count one
    /// is the tiles', too, or with codes that of the ring that gives their bits.
    fn quantised(&self, desc: GemmDesc) -> Option<GemmKernel> {
        if self.numerics == Numerics::BatchInvariant && GemmKernel::QuantisingRing.fits(desc) {
            return Some(GemmKernel::QuantisingRing);
        }
        let has_skinny = desc.operands != Operands::E4m3Blocks || self.has_ring(desc.shape);
        if self.numerics == Numerics::Fastest && Rows::of(desc.shape.m) == Rows::One && has_skinny {
            return (desc.epilogue != Epilogue::Sum).then(|| self.one_row(desc.shape));
        }
        let depth = if self.numerics == Numerics::Fastest { Depth::MaySplit } else { Depth::Whole };
        match self.measured(desc) {
            _ if !self.is_hopper() || desc.prologue != Prologue::Plain => None,
            Some(Entry::Tile(tile)) => Some(GemmKernel::Tiled(tile)),
            _ => self.cheapest(desc, depth),
        }
    }

    /// One row is the skinny kernel's; more are ours by the tile that costs least, of few with norms and additions inside.
    fn four_bits(&self, desc: GemmDesc) -> Option<GemmKernel> {
        let are_few = matches!(Rows::of(desc.shape.m), Rows::One | Rows::Few);
        match (desc.prologue, desc.epilogue) {
            (_, Epilogue::F32 | Epilogue::Sum) => None,
            _ if desc.shape.m == 1 && self.is_hopper() && self.has_ring(desc.shape) => Some(self.one_row(desc.shape)),
            (Prologue::NormScaled, _) | (_, Epilogue::Update) if !are_few => None,
            _ => self.ours(desc),
        }
    }

    fn norm_scaled(&self, desc: GemmDesc) -> Option<GemmKernel> {
        match (desc.epilogue, Rows::of(desc.shape.m)) {
            (Epilogue::Bf16 | Epilogue::F32 | Epilogue::Gated, Rows::One) => Some(self.one_row(desc.shape)),
            (Epilogue::Bf16 | Epilogue::Gated, Rows::Few) => self.ours(desc),
            // Logits of some rows are cuBLASLt's.
            (Epilogue::F32, _) | (Epilogue::Bf16 | Epilogue::Gated, Rows::Some | Rows::Many) => None,
            (Epilogue::Sum | Epilogue::Update, _) => None,
        }
    }

    fn plain(&self, desc: GemmDesc) -> Option<GemmKernel> {
        let GemmShape { m, n, k } = desc.shape;
        match (desc.epilogue, Rows::of(m)) {
            (Epilogue::Bf16 | Epilogue::F32, _) if !k.is_multiple_of(8) => Some(self.guess(desc, 0)),
            (Epilogue::Bf16 | Epilogue::F32 | Epilogue::Update | Epilogue::Gated, Rows::One) => {
                Some(self.one_row(desc.shape))
            }
            (Epilogue::Bf16, Rows::Few) if self.is_hopper() => self.ours(desc),
            (Epilogue::Bf16 | Epilogue::F32, Rows::Few) if self.has_ring(desc.shape) && is_small(n, k) => {
                Some(GemmKernel::Skinny(SkinnyKernel::for_device(self.properties)))
            }
            (Epilogue::Bf16 | Epilogue::F32, _) => Some(self.best(desc)),
            (Epilogue::Update, Rows::Few) => self.ours(desc),
            (Epilogue::Update, Rows::Some | Rows::Many) => None,
            (Epilogue::Sum, Rows::Many) => Some(self.guess(desc, 0)),
            (Epilogue::Sum, _) => None,
            (Epilogue::Gated, _) => match self.measured(desc).or(self.nearest(desc)) {
                Some(Entry::Apart) => None,
                _ => self.ours(desc),
            },
        }
    }

    fn one_row(&self, shape: GemmShape) -> GemmKernel {
        let has_ring = self.has_ring(shape);
        GemmKernel::Skinny(if has_ring { SkinnyKernel::for_device(self.properties) } else { SkinnyKernel::Registers })
    }

    /// Our tiles where the chip has them: the measured one, else the cheapest by count.
    fn ours(&self, desc: GemmDesc) -> Option<GemmKernel> {
        match self.measured(desc) {
            _ if !self.is_hopper() => None,
            Some(Entry::Tile(tile)) => Some(GemmKernel::Tiled(tile)),
            _ => self.cheapest(desc, Depth::MaySplit),
        }
    }

    /// Ours or cuBLASLt's.
    fn best(&self, desc: GemmDesc) -> GemmKernel {
        match self.measured(desc) {
            Some(Entry::Tile(tile)) => return GemmKernel::Tiled(tile),
            Some(Entry::CublasLt(rank)) => return self.guess(desc, rank),
            Some(Entry::Apart) | None => {}
        }
        let ours = match self.nearest(desc) {
            Some(Entry::Tile(_)) => self.cheapest(desc, Depth::MaySplit),
            _ => None,
        };
        ours.unwrap_or(self.guess(desc, 0))
    }

    /// Of ours, the cheapest by count first.
    fn tiles(&self, desc: GemmDesc, depth: Depth) -> Vec<Tile> {
        let GemmDesc { shape, epilogue, .. } = desc;
        let n = self.properties.n_multiprocessors;
        match desc.operands {
            Operands::Bf16 => gemm::candidates(shape, epilogue, depth, n),
            Operands::E4m3 => gemm::candidates_e4m3(ScaledBy::Rows, shape, epilogue, depth, n),
            Operands::E4m3Blocks => gemm::candidates_e4m3(ScaledBy::Blocks, shape, epilogue, depth, n),
            Operands::Int4 => gemm::candidates_int4(shape, epilogue, depth, n),
            Operands::Int4BesideE4m3 => gemm::candidates_beside_e4m3(shape, epilogue, depth, n),
        }
    }

    fn cheapest(&self, desc: GemmDesc, depth: Depth) -> Option<GemmKernel> {
        let tiles = self.tiles(desc, depth);
        tiles.into_iter().map(GemmKernel::Tiled).find(|kernel| kernel.fits(desc))
    }

    /// Guesses behind the first are those of the version that was measured.
    fn guess(&self, desc: GemmDesc, rank: usize) -> GemmKernel {
        let rank = if self.table.is_of_cublaslt(self.cublaslt) { rank } else { 0 };
        GemmKernel::CublasLt(Algorithm { rows: desc.shape.m, rank })
    }

    fn measured(&self, desc: GemmDesc) -> Option<Entry> {
        self.table.get(self.numerics, desc).filter(|entry| match entry {
            Entry::Tile(tile) => self.is_hopper() && GemmKernel::Tiled(*tile).fits(desc),
            Entry::CublasLt(_) | Entry::Apart => true,
        })
    }

    fn nearest(&self, desc: GemmDesc) -> Option<Entry> {
        self.table.nearest(self.numerics, desc)
    }

    fn is_hopper(&self) -> bool {
        self.properties.capability == (9, 0)
    }

    fn has_ring(&self, shape: GemmShape) -> bool {
        let kernel = SkinnyKernel::for_device(self.properties);
        matches!(kernel, SkinnyKernel::Ring { .. }) && shape.m <= SKINNY_ROWS_MAX && kernel.has_room(shape)
    }
}

/// Whether weights are read so fast that start-up counts.
fn is_small(n: usize, k: usize) -> bool {
    const SMALL_BYTES: usize = 64 << 20;
    2 * n * k <= SMALL_BYTES
}

impl GemmKernel {
    /// Whether it can.
    fn fits(self, desc: GemmDesc) -> bool {
        let GemmShape { m, n, k } = desc.shape;
        match desc.operands {
            Operands::Bf16 => {}
            Operands::E4m3 => return self.fits_e4m3(ScaledBy::Rows, desc),
            Operands::E4m3Blocks => return self.fits_e4m3(ScaledBy::Blocks, desc),
            Operands::Int4 => return self.fits_int4(desc),
            Operands::Int4BesideE4m3 => return self.fits_beside_e4m3(desc),
        }
        let needs_scale = desc.prologue == Prologue::NormScaled || desc.epilogue == Epilogue::Update;
        match self {
            Self::Skinny(kernel) => m <= SKINNY_ROWS_MAX && k.is_multiple_of(8) && kernel.has_room(desc.shape),
            Self::Tiled(tile) => {
                let is_whole = k.is_multiple_of(8) && (desc.epilogue != Epilogue::Update || n.is_multiple_of(8));
                is_whole && tile.fits(desc.shape, desc.epilogue) && (!needs_scale || tile.scales())
            }
            Self::CublasLt(_) => desc.prologue == Prologue::Plain,
            Self::QuantisingRing => false,
        }
    }

    fn fits_e4m3(self, scaled: ScaledBy, desc: GemmDesc) -> bool {
        let is_whole = desc.shape.k.is_multiple_of(E4M3_WHOLE);
        match self {
            Self::Skinny(SkinnyKernel::Registers) if scaled == ScaledBy::Blocks => false,
            Self::Skinny(kernel) => {
                let is_few = desc.shape.m <= SKINNY_ROWS_MAX && kernel.has_room(desc.shape);
                is_whole && is_few && desc.epilogue != Epilogue::F32
            }
            Self::Tiled(tile) => {
                is_whole && desc.prologue == Prologue::Plain && tile.fits_e4m3(scaled, desc.shape, desc.epilogue)
            }
            Self::CublasLt(_) | Self::QuantisingRing => false,
        }
    }

    fn fits_beside_e4m3(self, desc: GemmDesc) -> bool {
        match self {
            Self::Tiled(tile) => desc.prologue == Prologue::Plain && tile.fits_beside_e4m3(desc.shape, desc.epilogue),
            Self::QuantisingRing => {
                let is_normed = desc.prologue == Prologue::Normed;
                desc.prologue != Prologue::NormScaled && fits_quantising_ring(desc.shape, desc.epilogue, is_normed)
            }
            Self::Skinny(_) | Self::CublasLt(_) => false,
        }
    }

    fn fits_int4(self, desc: GemmDesc) -> bool {
        match self {
            Self::Tiled(tile) => desc.shape.k.is_multiple_of(8) && tile.fits_int4(desc.shape, desc.epilogue),
            Self::Skinny(SkinnyKernel::Ring { .. }) => {
                desc.shape.m <= SKINNY_INT4_ROWS_MAX && desc.shape.k.is_multiple_of(8)
            }
            Self::Skinny(_) | Self::QuantisingRing | Self::CublasLt(_) => false,
        }
    }

    /// Values that each sum of squares is of that it leaves as an update.
    pub fn squares_tile(self) -> usize {
        match self {
            Self::Tiled(tile) => tile.rows(),
            Self::Skinny(_) | Self::QuantisingRing | Self::CublasLt(_) => NORM_TILE,
        }
    }
}

impl fmt::Display for GemmKernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Skinny(SkinnyKernel::Registers) => write!(f, "skinny"),
            Self::Skinny(SkinnyKernel::Ring { .. }) => write!(f, "skinny ring"),
            Self::QuantisingRing => write!(f, "quantising ring"),
            Self::Tiled(tile) => write!(f, "{tile}"),
            Self::CublasLt(Algorithm { rows, rank }) => write!(f, "cublaslt {rank} of {rows}"),
        }
    }
}

#[cfg(test)]
mod tests;
