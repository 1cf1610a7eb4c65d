//! The matrix product of a linear layer, y = x * w^T: our own kernel for few rows, cuBLASLt above. Which one is a function
//! of the shape alone.

use cudarc::driver::{CudaView, CudaViewMut};
use half::bf16;

use crate::{
    KernelError, Kernels,
    blas::Blas,
    check_len,
    launch::{self, GemmShape, LinearKernel, OutputType, SkinnyKernel},
};

/// Products of more rows keep cuBLASLt's first guess: timing gained nothing at 2048 and 8192.
const TIMED_ROWS_MAX: usize = 512;

/// y = x * w^T.
#[derive(Debug)]
pub struct Linear<'a> {
    /// m x n.
    pub y: Output<'a>,
    /// m x k.
    pub x: CudaView<'a, bf16>,
    /// n x k, as checkpoints store it.
    pub w: CudaView<'a, bf16>,
    /// Sizes.
    pub shape: GemmShape,
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
}

impl Output<'_> {
    /// Its number format.
    pub fn output_type(&self) -> OutputType {
        match self {
            Self::Bf16(_) | Self::Sum(_) => OutputType::Bf16,
            Self::F32(_) => OutputType::F32,
        }
    }

    fn len(&self) -> usize {
        match self {
            Self::Bf16(y) | Self::Sum(y) => y.len(),
            Self::F32(y) => y.len(),
        }
    }
}

impl Kernels {
    /// Multiplies with whichever is faster for the shape.
    pub fn linear(&self, blas: &Blas, op: Linear<'_>) -> Result<(), KernelError> {
        match LinearKernel::for_shape(op.shape, self.properties()) {
            LinearKernel::Skinny(kernel) => self.skinny_gemm_by(op, kernel),
            LinearKernel::Blas => blas.gemm(op),
        }
    }

    /// Chooses the algorithm for a shape that cuBLASLt multiplies, by timing where that gains something: see [`Blas::tune`] and
    /// [`Blas::prepare`]. Nothing to choose elsewhere.
    pub fn tune_linear(&self, blas: &Blas, op: Linear<'_>, others: &[CudaView<'_, bf16>]) -> Result<(), KernelError> {
        match LinearKernel::for_shape(op.shape, self.properties()) {
            LinearKernel::Skinny(_) => Ok(()),
            LinearKernel::Blas if blas.has_chosen(&op) => Ok(()),
            LinearKernel::Blas if op.shape.m > TIMED_ROWS_MAX => blas.prepare(op),
            LinearKernel::Blas => blas.tune(op, others).map(drop),
        }
    }

    /// Multiplies up to 16 rows by our kernel, which the chip must have. A row's result does not depend on the others: what
    /// batch-invariant decoding uses at every batch size that it fits.
    pub fn skinny_gemm_by(&self, op: Linear<'_>, kernel: SkinnyKernel) -> Result<(), KernelError> {
        if matches!(kernel, SkinnyKernel::Ring { .. }) && self.properties().capability < (9, 0) {
            return Err(launch::refused("skinny_gemm", "bulk copies need compute capability 9.0".to_owned()));
        }
        let GemmShape { m, n, k } = op.shape;
        let config = launch::skinny_gemm(op.shape, op.y.output_type(), kernel)?;
        check("skinny_gemm", &op)?;
        let launch = self.functions.launch("skinny_gemm", config);
        let launch = match op.y {
            Output::Bf16(mut y) => launch.write(&mut y),
            Output::Sum(_) => return Err(launch::refused("skinny_gemm", "it does not add to y".to_owned())),
            Output::F32(mut y) => launch.write(&mut y),
        };
        launch.read(&op.w).read(&op.x).int(m).int(n).int(k).start()
    }
}

/// Every buffer holds exactly what the shape says.
pub(crate) fn check(op: &'static str, linear: &Linear<'_>) -> Result<(), KernelError> {
    let GemmShape { m, n, k } = linear.shape;
    check_len(op, "y", linear.y.len(), m * n)?;
    check_len(op, "x", linear.x.len(), m * k)?;
    check_len(op, "w", linear.w.len(), n * k)
}
