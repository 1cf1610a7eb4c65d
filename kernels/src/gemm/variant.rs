//! The compilations of the product for any number of rows, one for each size of a tile and each way to share out work between the
//! blocks of a cluster. Chooses none.

use crate::{
    choose::Operands,
    launch::{Entry, Epilogue},
};

/// Weight rows that a warpgroup multiplies at a time.
pub(super) const GROUP_ROWS: usize = 64;
/// Bytes of y that a warpgroup turns around at once, where the tile is large.
const STAGED_BYTES: usize = 16 << 10;

/// What the blocks of a cluster have in common.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Cluster {
    /// There is one block.
    Alone,
    /// Rows of x.
    SharesX,
    /// The tile, of which each sums half the depth.
    SplitsDepth,
}

impl Cluster {
    pub(super) fn n_blocks(self) -> usize {
        if self == Self::Alone { 1 } else { 2 }
    }

    /// Blocks with weight rows of their own.
    pub(super) fn n_tiles(self) -> usize {
        if self == Self::SharesX { 2 } else { 1 }
    }

    /// Parts of the depth.
    pub(super) fn n_parts(self) -> usize {
        if self == Self::SplitsDepth { 2 } else { 1 }
    }
}

/// One compilation of the kernel.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Variant {
    /// Warpgroups that multiply.
    pub(super) warpgroups: usize,
    /// Rows of x of a tile.
    pub(super) columns: usize,
    /// 64 values of k each, of a stage.
    pub(super) panels: usize,
    pub(super) cluster: Cluster,
    /// By what they write; not every variant has all.
    pub(super) entries: &'static [(Epilogue, Entry)],
    /// The same of e4m3.
    pub(super) e4m3: &'static [(Epilogue, Entry)],
    /// The same where weights have a scale a block.
    pub(super) blocks: &'static [(Epilogue, Entry)],
    /// The same of four bits.
    pub(super) int4: &'static [(Epilogue, Entry)],
    /// The same of four bits beside rows in e4m3.
    pub(super) beside_e4m3: &'static [(Epilogue, Entry)],
    /// Whether each warp sums spans of the depth, in place of each warpgroup all of it: of four bits and few rows.
    pub(super) by_warps: bool,
}

macro_rules! variant {
    ($groups:literal x $columns:literal, $panels:literal, $cluster:ident, $($output:ident: $entry:ident),*; $e4m3:ident, $gated:ident, $blocks:ident, $blocks_gated:ident; $($of_int4:ident: $int4:ident),* $(; $beside:ident, $beside_gated:ident)?) => {
        Variant {
            warpgroups: $groups,
            columns: $columns,
            panels: $panels,
            cluster: Cluster::$cluster,
            entries: &[$((Epilogue::$output, Entry::$entry)),*],
            e4m3: &[(Epilogue::Bf16, Entry::$e4m3), (Epilogue::Gated, Entry::$gated)],
            blocks: &[(Epilogue::Bf16, Entry::$blocks), (Epilogue::Gated, Entry::$blocks_gated)],
            int4: &[$((Epilogue::$of_int4, Entry::$int4)),*],
            beside_e4m3: &[$((Epilogue::Bf16, Entry::$beside), (Epilogue::Gated, Entry::$beside_gated))?],
            by_warps: false,
        }
    };
}

macro_rules! beside_e4m3 {
    ($groups:literal x $columns:literal, $panels:literal, $cluster:ident, $bf16:ident, $gated:ident) => {
        Variant {
            warpgroups: $groups,
            columns: $columns,
            panels: $panels,
            cluster: Cluster::$cluster,
            entries: &[],
            e4m3: &[],
            blocks: &[],
            int4: &[],
            beside_e4m3: &[(Epilogue::Bf16, Entry::$bf16), (Epilogue::Gated, Entry::$gated)],
            by_warps: false,
        }
    };
}

macro_rules! by_warps {
    ($groups:literal x $columns:literal, $cluster:ident, $bf16:ident, $gated:ident, $update:ident) => {
        Variant {
            warpgroups: $groups,
            columns: $columns,
            panels: 8,
            cluster: Cluster::$cluster,
            entries: &[],
            e4m3: &[],
            blocks: &[],
            int4: &[
                (Epilogue::Bf16, Entry::$bf16),
                (Epilogue::Gated, Entry::$gated),
                (Epilogue::Update, Entry::$update),
            ],
            beside_e4m3: &[],
            by_warps: true,
        }
    };
}

#[rustfmt::skip]
pub(super) const VARIANTS: [Variant; 17] = [
    variant!(1 x 8, 2, Alone, Bf16: Gemm1x8Bf16, F32: Gemm1x8F32, Gated: Gemm1x8Activated, Update: Gemm1x8Updated;
        GemmE4m31x8Bf16, GemmE4m31x8Activated, GemmBlocks1x8Bf16, GemmBlocks1x8Activated;
        Bf16: GemmInt41x8Bf16, Gated: GemmInt41x8Activated, Update: GemmInt41x8Updated),
    variant!(2 x 8, 1, Alone, Bf16: Gemm2x8Bf16, F32: Gemm2x8F32, Gated: Gemm2x8Activated;
        GemmE4m32x8Bf16, GemmE4m32x8Activated, GemmBlocks2x8Bf16, GemmBlocks2x8Activated;
        Bf16: GemmInt42x8Bf16, Gated: GemmInt42x8Activated),
    variant!(1 x 32, 2, SharesX, Bf16: Gemm1x32Bf16, F32: Gemm1x32F32, Gated: Gemm1x32Activated, Update: Gemm1x32Updated;
        GemmE4m31x32Bf16, GemmE4m31x32Activated, GemmBlocks1x32Bf16, GemmBlocks1x32Activated;
        Bf16: GemmInt41x32Bf16, Gated: GemmInt41x32Activated, Update: GemmInt41x32Updated;
        GemmInt4E4m31x32Bf16, GemmInt4E4m31x32Activated),
    variant!(2 x 32, 1, SharesX, Bf16: Gemm2x32Bf16, F32: Gemm2x32F32, Gated: Gemm2x32Activated;
        GemmE4m32x32Bf16, GemmE4m32x32Activated, GemmBlocks2x32Bf16, GemmBlocks2x32Activated;
        Bf16: GemmInt42x32Bf16, Gated: GemmInt42x32Activated;
        GemmInt4E4m32x32Bf16, GemmInt4E4m32x32Activated),
    variant!(1 x 64, 2, SharesX, Bf16: Gemm1x64Bf16, F32: Gemm1x64F32, Gated: Gemm1x64Activated, Update: Gemm1x64Updated;
        GemmE4m31x64Bf16, GemmE4m31x64Activated, GemmBlocks1x64Bf16, GemmBlocks1x64Activated;
        Bf16: GemmInt41x64Bf16, Gated: GemmInt41x64Activated, Update: GemmInt41x64Updated;
        GemmInt4E4m31x64Bf16, GemmInt4E4m31x64Activated),
    variant!(2 x 64, 1, SharesX, Bf16: Gemm2x64Bf16, F32: Gemm2x64F32, Gated: Gemm2x64Activated;
        GemmE4m32x64Bf16, GemmE4m32x64Activated, GemmBlocks2x64Bf16, GemmBlocks2x64Activated;
        Bf16: GemmInt42x64Bf16, Gated: GemmInt42x64Activated;
        GemmInt4E4m32x64Bf16, GemmInt4E4m32x64Activated),
    variant!(1 x 128, 1, SharesX, Bf16: Gemm1x128Bf16, F32: Gemm1x128F32, Gated: Gemm1x128Activated, Update: Gemm1x128Updated;
        GemmE4m31x128Bf16, GemmE4m31x128Activated, GemmBlocks1x128Bf16, GemmBlocks1x128Activated;
        Bf16: GemmInt41x128Bf16, Gated: GemmInt41x128Activated, Update: GemmInt41x128Updated;
        GemmInt4E4m31x128Bf16, GemmInt4E4m31x128Activated),
    variant!(2 x 128, 1, SharesX, Bf16: Gemm2x128Bf16, F32: Gemm2x128F32, Gated: Gemm2x128Activated;
        GemmE4m32x128Bf16, GemmE4m32x128Activated, GemmBlocks2x128Bf16, GemmBlocks2x128Activated;
        Bf16: GemmInt42x128Bf16, Gated: GemmInt42x128Activated;
        GemmInt4E4m32x128Bf16, GemmInt4E4m32x128Activated),
    variant!(2 x 256, 1, SharesX, Bf16: Gemm2x256Bf16, F32: Gemm2x256F32, Gated: Gemm2x256Activated;
        GemmE4m32x256Bf16, GemmE4m32x256Activated, GemmBlocks2x256Bf16, GemmBlocks2x256Activated; ),
    variant!(1 x 32, 2, SplitsDepth, Bf16: Gemm1x32SplitBf16, Gated: Gemm1x32SplitActivated, Update: Gemm1x32SplitUpdated;
        GemmE4m31x32SplitBf16, GemmE4m31x32SplitActivated, GemmBlocks1x32SplitBf16, GemmBlocks1x32SplitActivated;
        Bf16: GemmInt41x32SplitBf16, Gated: GemmInt41x32SplitActivated, Update: GemmInt41x32SplitUpdated;
        GemmInt4E4m31x32SplitBf16, GemmInt4E4m31x32SplitActivated),
    variant!(1 x 64, 2, SplitsDepth, Bf16: Gemm1x64SplitBf16, Gated: Gemm1x64SplitActivated, Update: Gemm1x64SplitUpdated;
        GemmE4m31x64SplitBf16, GemmE4m31x64SplitActivated, GemmBlocks1x64SplitBf16, GemmBlocks1x64SplitActivated;
        Bf16: GemmInt41x64SplitBf16, Gated: GemmInt41x64SplitActivated, Update: GemmInt41x64SplitUpdated;
        GemmInt4E4m31x64SplitBf16, GemmInt4E4m31x64SplitActivated),
    variant!(1 x 128, 1, SplitsDepth, Bf16: Gemm1x128SplitBf16, Gated: Gemm1x128SplitActivated, Update: Gemm1x128SplitUpdated;
        GemmE4m31x128SplitBf16, GemmE4m31x128SplitActivated, GemmBlocks1x128SplitBf16, GemmBlocks1x128SplitActivated;
        Bf16: GemmInt41x128SplitBf16, Gated: GemmInt41x128SplitActivated, Update: GemmInt41x128SplitUpdated;
        GemmInt4E4m31x128SplitBf16, GemmInt4E4m31x128SplitActivated),
    variant!(2 x 128, 1, SplitsDepth, Bf16: Gemm2x128SplitBf16, Gated: Gemm2x128SplitActivated;
        GemmE4m32x128SplitBf16, GemmE4m32x128SplitActivated, GemmBlocks2x128SplitBf16, GemmBlocks2x128SplitActivated;
        Bf16: GemmInt42x128SplitBf16, Gated: GemmInt42x128SplitActivated;
        GemmInt4E4m32x128SplitBf16, GemmInt4E4m32x128SplitActivated),
    beside_e4m3!(2 x 64, 2, SplitsDepth, GemmInt4E4m32x64SplitBf16, GemmInt4E4m32x64SplitActivated),
    by_warps!(4 x 8, Alone, GemmInt44x8WarpsBf16, GemmInt44x8WarpsActivated, GemmInt44x8WarpsUpdated),
    by_warps!(4 x 16, Alone, GemmInt44x16WarpsBf16, GemmInt44x16WarpsActivated, GemmInt44x16WarpsUpdated),
    by_warps!(4 x 16, SplitsDepth, GemmInt44x16WarpsSplitBf16, GemmInt44x16WarpsSplitActivated, GemmInt44x16WarpsSplitUpdated),
];

impl Variant {
    /// As in the kernels' symbols; `w` for a depth that warps share, `s` for one that blocks do.
    pub(super) fn name(self) -> String {
        let warps = if self.by_warps { "w" } else { "" };
        let split = if self.cluster == Cluster::SplitsDepth { "s" } else { "" };
        format!("{}x{}{warps}{split}", self.warpgroups, self.columns)
    }

    /// Cycles that the tensor cores need for 32 bytes of each row of x.
    pub(super) fn product_cycles(self) -> f64 {
        (self.warpgroups * (self.columns / 2).max(16)) as f64
    }

    /// Most weight rows of a tile.
    pub(super) fn rows_max(self) -> usize {
        if self.by_warps { 2 * GROUP_ROWS } else { self.warpgroups * GROUP_ROWS }
    }

    /// Weight rows that a tile may have: fewer would leave a warpgroup without any, or be no whole tile of codes.
    pub(super) fn rows(self) -> impl Iterator<Item = usize> {
        let (least, step) = if self.by_warps { (16, 16) } else { (self.rows_max() - GROUP_ROWS + 8, 8) };
        (least..=self.rows_max()).step_by(step)
    }

    /// Whether an element is the sum of several chains.
    pub(super) fn splits_depth(self) -> bool {
        self.by_warps || self.cluster == Cluster::SplitsDepth
    }

    /// The entry point for these operands, if it has one.
    pub(super) fn entry(self, operands: Operands, output: Epilogue) -> Option<Entry> {
        let entries = match operands {
            Operands::Bf16 => self.entries,
            Operands::E4m3 => self.e4m3,
            Operands::E4m3Blocks => self.blocks,
            Operands::Int4 => self.int4,
            Operands::Int4BesideE4m3 => self.beside_e4m3,
        };
        entries.iter().find(|(of, _)| *of == output).map(|(_, entry)| *entry)
    }

    /// 128 values of k each, of a stage of weights of four bits beside rows in e4m3. Of blocks that split the depth fewer, which says where
    /// their halves meet.
    pub(super) fn beside_e4m3_panels(self) -> usize {
        let halves = self.cluster.n_parts();
        if self.columns <= 64 { 4 / halves } else { 2 / halves }
    }

    /// 64 values of k each, of a stage of weights of four bits.
    pub(super) fn int4_panels(self) -> usize {
        match self.columns {
            _ if self.by_warps => self.panels,
            ..=64 => 4,
            _ => 2,
        }
    }

    /// Bytes where y is turned around, or the sums of other blocks and warps come in.
    pub(super) fn staging_bytes(self) -> usize {
        let threads = self.warpgroups * 128;
        let of_warps = if self.by_warps { 4 * threads * self.columns } else { 0 };
        let of_blocks = match self.cluster {
            Cluster::SplitsDepth => threads * self.columns,
            _ if self.columns == 256 => self.warpgroups * STAGED_BYTES,
            _ => 0,
        };
        of_warps + of_blocks
    }
}
