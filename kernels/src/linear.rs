//! The operands of a GEMM of a linear layer, y = x * w^T, and its launch by whichever kernel was chosen for it. Chooses nothing:
//! [`crate::choose`] does.

use cudarc::driver::{CudaView, CudaViewMut};
use half::bf16;
use stoker_fit::gpu::block_scales;

use crate::{
    KernelError, Kernels,
    blas::Blas,
    check_len,
    choose::{GemmKernel, ScaledBy},
    gemm::{GemmPlan, Tile},
    int4::Int4View,
    launch::{Epilogue, GemmShape, refused},
    quantise::BesideCodes,
};

/// y = x * w^T.
#[derive(Debug)]
pub struct Linear<'a> {
    /// m x n.
    pub y: Output<'a>,
    /// m x k.
    pub x: Operand<'a>,
    /// n x k, as checkpoints store it.
    pub w: Operand<'a>,
    /// Sizes.
    pub shape: GemmShape,
}

/// One of the two that are multiplied, row-major.
#[derive(Debug)]
pub enum Operand<'a> {
    /// As it is.
    Bf16(CudaView<'a, bf16>),
    /// In e4m3.
    E4m3(Quantised<'a>),
    /// In e4m3 with a scale a block; only weights are.
    E4m3Blocks(Blocks<'a>),
    /// In four bits; only weights are.
    Int4(Int4View<'a>),
}

/// Rows in e4m3; a value is its scale times its number.
#[derive(Debug)]
pub struct Quantised<'a> {
    /// The numbers.
    pub values: CudaView<'a, u8>,
    /// One a row.
    pub scales: CudaView<'a, f32>,
    /// Where codes are what they are multiplied with.
    pub beside: Option<BesideCodes<CudaView<'a, u8>>>,
    /// When.
    pub written: Written,
}

/// Weights in e4m3; a value is the scale of its block times its number.
#[derive(Debug)]
pub struct Blocks<'a> {
    /// The numbers, row-major.
    pub values: CudaView<'a, u8>,
    /// n / [`BLOCK_OUTPUTS`](stoker_fit::gpu::BLOCK_OUTPUTS), rounded up, times [`block_scales_of_rows`](stoker_fit::gpu::block_scales_of_rows).
    pub scales: CudaView<'a, f32>,
}

/// When rows were written: weights that are constant a product asks for before the kernels in front of it have ended.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Written {
    /// Before the first step.
    AtStart,
    /// By a kernel of the step.
    Lately,
}

impl<'a> From<CudaView<'a, bf16>> for Operand<'a> {
    fn from(values: CudaView<'a, bf16>) -> Self {
        Self::Bf16(values)
    }
}

impl Operand<'_> {
    /// Of a product of rows with these weights by a tile that fits it.
    fn plan(&self, x: &Self, tile: Tile, shape: GemmShape, epilogue: Epilogue, n_multiprocessors: u32) -> GemmPlan {
        match (self, x) {
            (Self::Bf16(_), _) => tile.plan(shape, epilogue, n_multiprocessors),
            (Self::E4m3(_), _) => tile.plan_e4m3(ScaledBy::Rows, shape, epilogue, n_multiprocessors),
            (Self::E4m3Blocks(_), _) => tile.plan_e4m3(ScaledBy::Blocks, shape, epilogue, n_multiprocessors),
            (Self::Int4(_), Self::E4m3(_)) => tile.plan_beside_e4m3(shape, epilogue, n_multiprocessors),
            (Self::Int4(w), _) => tile.plan_int4(shape, epilogue, n_multiprocessors, w.layout.group),
        }
    }

    /// The plan, changed where weights are not to be asked for ahead.
    pub(crate) fn awaited(&self, plan: &GemmPlan) -> GemmPlan {
        match self {
            Self::E4m3(Quantised { written: Written::Lately, .. }) => plan.waiting(),
            Self::Bf16(_) | Self::E4m3(_) | Self::E4m3Blocks(_) | Self::Int4(_) => *plan,
        }
    }

    /// Exactly so many rows and columns.
    pub(crate) fn check(
        &self,
        op: &'static str,
        what: &'static str,
        [rows, width]: [usize; 2],
    ) -> Result<(), KernelError> {
        match self {
            Self::Bf16(values) => check_len(op, what, values.len(), rows * width),
            Self::E4m3(Quantised { values, scales, .. }) => {
                check_len(op, what, values.len(), rows * width)?;
                check_len(op, "scales", scales.len(), rows)
            }
            Self::E4m3Blocks(Blocks { values, scales }) => {
                check_len(op, what, values.len(), rows * width)?;
                check_len(op, "scales", scales.len(), block_scales(rows, width))
            }
            Self::Int4(Int4View { layout, codes, groups }) => {
                check_len(op, what, layout.n * layout.k, rows * width)?;
                check_len(op, "outputs", layout.n, rows)?;
                check_len(op, "codes", codes.len(), layout.n_code_words())?;
                check_len(op, "groups", groups.len(), layout.n_group_words())
            }
        }
    }
}

/// Where y goes.
#[derive(Debug)]
pub enum Output<'a> {
    /// Activations.
    Bf16(CudaViewMut<'a, bf16>),
    /// Activations that the product is added to, before it is rounded. Only cuBLASLt does.
    Sum(CudaViewMut<'a, bf16>),
    /// Logits.
    F32(CudaViewMut<'a, f32>),
    /// Gate and up, activated: m x n / 2. Only ours do.
    Gated(CudaViewMut<'a, bf16>),
}

/// `residual += x * w^T`, rounded once, and what the product of the next norm needs.
#[derive(Debug)]
pub struct Update<'a> {
    /// m x n.
    pub residual: CudaViewMut<'a, bf16>,
    /// m x n, written: the new residual times the norm's weight.
    pub weighted: CudaViewMut<'a, bf16>,
    /// m x [`crate::launch::norm_tiles`] of n, of which the beginning is written: sums of squares of the new residual.
    pub squares: CudaViewMut<'a, f32>,
    /// n values: the norm's weight.
    pub norm: CudaView<'a, bf16>,
    /// m x k.
    pub x: CudaView<'a, bf16>,
    /// n x k.
    pub w: Operand<'a>,
    /// Sizes.
    pub shape: GemmShape,
}

/// The norm's factor of each row, as an [`Update`] left it.
#[derive(Debug)]
pub struct RowScale<'a> {
    /// Sums of each row, of `tile` values each.
    pub squares: CudaView<'a, f32>,
    /// As the update said.
    pub tile: usize,
    /// Added to the mean square.
    pub eps: f32,
}

/// Whether there are as many sums of squares as rows of the shape's depth have, of 16, 32 or 64 values each.
pub(crate) fn check_squares(
    op: &'static str,
    scale: &RowScale<'_>,
    GemmShape { m, k, .. }: GemmShape,
) -> Result<(), KernelError> {
    if !matches!(scale.tile, 16 | 32 | 64) {
        return Err(refused(op, format!("a sum of {} squares is not of 16, 32 or 64", scale.tile)));
    }
    check_len(op, "squares", scale.squares.len(), m * k.div_ceil(scale.tile))
}

impl Output<'_> {
    /// What the GEMM does at its end.
    pub fn epilogue(&self) -> Epilogue {
        match self {
            Self::Bf16(_) => Epilogue::Bf16,
            Self::Sum(_) => Epilogue::Sum,
            Self::F32(_) => Epilogue::F32,
            Self::Gated(_) => Epilogue::Gated,
        }
    }

    fn len(&self) -> usize {
        match self {
            Self::Bf16(y) | Self::Sum(y) | Self::Gated(y) => y.len(),
            Self::F32(y) => y.len(),
        }
    }
}

impl Kernels {
    /// Multiplies; with `scale` x is what an [`Update`] left weighted. `blas` is needed where the kernel is cuBLASLt's.
    pub fn linear(
        &self,
        blas: Option<&Blas>,
        op: Linear<'_>,
        scale: Option<RowScale<'_>>,
        kernel: GemmKernel,
    ) -> Result<(), KernelError> {
        let (shape, epilogue) = (op.shape, op.y.epilogue());
        let plan = |tile: Tile| op.w.plan(&op.x, tile, shape, epilogue, self.properties().n_multiprocessors);
        match (kernel, scale) {
            (GemmKernel::Skinny(kernel), None) => self.skinny_gemm_by(op, kernel),
            (GemmKernel::Skinny(kernel), Some(scale)) => self.skinny_scaled_by(op, scale, kernel),
            (GemmKernel::QuantisingRing, None) => self.gemm_quantising(op, None),
            (GemmKernel::QuantisingRing, Some(_)) => {
                Err(refused("gemm", "a row that is quantised is not scaled".to_owned()))
            }
            (GemmKernel::Tiled(tile), None) => {
                let plan = plan(tile);
                self.gemm_by_plan(op, &plan)
            }
            (GemmKernel::Tiled(tile), Some(scale)) => {
                let plan = plan(tile);
                self.gemm_scaled_by(op, scale, &plan)
            }
            (GemmKernel::CublasLt(algorithm), None) => blas.ok_or(KernelError::NoBlas)?.gemm(op, algorithm),
            (GemmKernel::CublasLt(_), Some(_)) => Err(refused("gemm", "cuBLASLt does not scale by a norm".to_owned())),
        }
    }

    /// Adds to the residual stream, and leaves what the product of the next norm needs.
    pub fn update(&self, op: Update<'_>, kernel: GemmKernel) -> Result<(), KernelError> {
        match kernel {
            GemmKernel::Skinny(kernel) => self.skinny_update_by(op, kernel),
            GemmKernel::Tiled(tile) => {
                let (x, n_multiprocessors) = (Operand::Bf16(op.x.slice(..)), self.properties().n_multiprocessors);
                let plan = op.w.plan(&x, tile, op.shape, Epilogue::Update, n_multiprocessors);
                self.gemm_update_by(op, &plan)
            }
            GemmKernel::QuantisingRing => {
                Err(refused("gemm", "a row that is quantised leaves nothing for the next norm".to_owned()))
            }
            GemmKernel::CublasLt(_) => Err(refused("gemm", "cuBLASLt leaves nothing for the next norm".to_owned())),
        }
    }
}

/// Every buffer holds exactly what the shape says.
pub(crate) fn check(op: &'static str, linear: &Linear<'_>) -> Result<(), KernelError> {
    let GemmShape { m, n, k } = linear.shape;
    let width = if matches!(linear.y, Output::Gated(_)) { n / 2 } else { n };
    check_len(op, "y", linear.y.len(), m * width)?;
    linear.x.check(op, "x", [m, k])?;
    linear.w.check(op, "w", [n, k])
}
