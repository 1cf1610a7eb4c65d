//! The first half of a gated MLP: the product of gate and up, and its activation. In one kernel where that is faster, or where
//! one way must serve any number of rows; else one behind the other.

use cudarc::driver::{CudaView, CudaViewMut};
use half::bf16;

use crate::{
    KernelError, Kernels,
    blas::Blas,
    device::Properties,
    gemm::Depth,
    launch::{GemmShape, LinearKernel, OutputType},
    linear::{Linear, Output, Products, TIMED_ROWS_MAX},
    pointwise::SiluMul,
    timing::{Contest, is_no_slower},
};

/// `out = silu(gate) * up` of `x * w^T`, which is rounded to bf16 first.
#[derive(Debug)]
pub struct Gated<'a> {
    /// m x n / 2.
    pub out: CudaViewMut<'a, bf16>,
    /// m x n, for gate and up where they are activated by a kernel of its own.
    pub gate_up: CudaViewMut<'a, bf16>,
    /// m x k.
    pub x: CudaView<'a, bf16>,
    /// n x k: [`crate::launch::GATE_UP_GROUP`] rows of gate and as many of up in turn.
    pub w: CudaView<'a, bf16>,
    /// Sizes.
    pub shape: GemmShape,
}

/// Who activates.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Activator {
    /// The product, with the sums in its hands.
    Product,
    /// A kernel behind it.
    Kernel,
}

impl Activator {
    /// The faster one where both were not timed, on an H200 with Llama-3.1-8B's weights: 58.4 us at 32 rows against 63.8 of cuBLASLt
    /// and a kernel, 65.3 against 66.9 at 128, 92.8 against 98.1 at 256.
    fn untimed(properties: Properties) -> Self {
        if properties.capability == (9, 0) { Self::Product } else { Self::Kernel }
    }
}

impl<'a> Gated<'a> {
    /// The product that activates.
    fn activated(self) -> Linear<'a> {
        Linear { y: Output::Activated(self.out), x: self.x, w: self.w, shape: self.shape }
    }

    /// The product alone.
    fn alone(self) -> Linear<'a> {
        Linear { y: Output::Bf16(self.gate_up), x: self.x, w: self.w, shape: self.shape }
    }

    /// The same with other weights of the shape.
    fn with<'b>(&'b mut self, w: &'b CudaView<'_, bf16>) -> Gated<'b> {
        let (out, gate_up) = (self.out.slice_mut(..), self.gate_up.slice_mut(..));
        Gated { out, gate_up, x: self.x.slice(..), w: w.slice(..), shape: self.shape }
    }
}

impl Products {
    /// Multiplies and activates.
    pub fn gated(&self, kernels: &Kernels, op: Gated<'_>) -> Result<(), KernelError> {
        match self {
            Self::Fastest(blas) => kernels.gated(blas, op),
            Self::BatchInvariant => kernels.gemm(op.activated()),
        }
    }

    /// Chooses the way for a shape by timing, where there is a choice: see [`Kernels::tune_linear`].
    pub fn tune_gated(
        &self,
        kernels: &Kernels,
        op: Gated<'_>,
        others: &[CudaView<'_, bf16>],
    ) -> Result<(), KernelError> {
        match self {
            Self::Fastest(blas) => kernels.tune_gated(blas, op, others),
            Self::BatchInvariant => self.tune(kernels, op.activated(), others),
        }
    }
}

impl Kernels {
    /// Multiplies and activates with whichever is faster for the shape.
    pub fn gated(&self, blas: &Blas, op: Gated<'_>) -> Result<(), KernelError> {
        match self.activator(op.shape) {
            Activator::Product => self.gemm(op.activated()),
            Activator::Kernel => self.gated_apart(blas, op),
        }
    }

    fn activator(&self, shape: GemmShape) -> Activator {
        match self.tuned.is_faster((shape, OutputType::Activated)) {
            Some(true) => Activator::Product,
            Some(false) => Activator::Kernel,
            None => Activator::untimed(self.properties()),
        }
    }

    fn gated_apart(&self, blas: &Blas, op: Gated<'_>) -> Result<(), KernelError> {
        let Gated { out, mut gate_up, x, w, shape } = op;
        self.linear(blas, Linear { y: Output::Bf16(gate_up.slice_mut(..)), x, w, shape })?;
        self.silu_mul(SiluMul { out, gate_up: gate_up.as_view(), width: shape.n / 2 })
    }

    /// Chooses the way for a shape by timing, where there is a choice: see [`Kernels::tune_linear`].
    pub fn tune_gated(&self, blas: &Blas, op: Gated<'_>, others: &[CudaView<'_, bf16>]) -> Result<(), KernelError> {
        match LinearKernel::for_shape(op.shape, OutputType::Activated, self.properties()) {
            LinearKernel::Skinny(_) => Ok(()),
            LinearKernel::Gemm => self.tune_gemm(op.activated(), others, Depth::MaySplit).map(drop),
            LinearKernel::Blas => self.compare_gated(blas, op, others),
        }
    }

    fn compare_gated(&self, blas: &Blas, mut op: Gated<'_>, others: &[CudaView<'_, bf16>]) -> Result<(), KernelError> {
        let key = (op.shape, OutputType::Activated);
        let is_timed = self.has_gemm() && op.shape.m <= TIMED_ROWS_MAX;
        let weights: Vec<_> = std::iter::once(op.w.slice(..)).chain(others.iter().map(|w| w.slice(..))).collect();
        if is_timed || self.activator(op.shape) == Activator::Kernel {
            self.tune_linear(blas, op.with(&weights[0]).alone(), others)?;
        }
        if !is_timed || self.tuned.was_compared(key) {
            return Ok(());
        }
        let contest = Contest { n_ways: 1, n_launches: weights.len() };
        let apart = contest.run(self.device(), |_, idx| self.gated_apart(blas, op.with(&weights[idx])))?;
        let us = self.tune_gemm(op.activated(), others, Depth::MaySplit)?;
        self.tuned.compared(key, is_no_slower(us, apart.us));
        Ok(())
    }
}
