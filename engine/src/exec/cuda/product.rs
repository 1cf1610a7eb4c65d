//! The matrix products of a step, and the residual stream between them: which rows of which buffer, and whether norms and
//! additions are inside the products or launches of their own. Chooses no algorithm; `Products` does.

use stoker_kernels::{
    CudaSlice, KernelError, Kernels, bf16,
    gated::Gated,
    launch::{GemmShape, Left, SkinnyKernel, norm_tiles},
    linear::{Linear, Output, Products},
    pointwise::{AddRmsNorm, RmsNorm},
    skinny::{RowScale, Update},
};

use super::buffers::Stream;

/// A norm of the residual stream.
#[derive(Clone, Copy, Debug)]
pub(super) struct Norm<'a> {
    pub(super) weight: &'a CudaSlice<bf16>,
    pub(super) eps: f32,
}

/// The matrix products of a step of `m` rows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Product<'a> {
    pub(super) kernels: &'a Kernels,
    pub(super) products: &'a Products,
    pub(super) m: usize,
}

impl Product<'_> {
    /// Chooses the algorithm for the product by `weights`, all of one shape.
    pub(super) fn tune(
        &self,
        y: &mut CudaSlice<bf16>,
        x: &CudaSlice<bf16>,
        weights: &[&CudaSlice<bf16>],
        k: usize,
    ) -> Result<(), KernelError> {
        let [first, others @ ..] = weights else { return Ok(()) };
        let others: Vec<_> = others.iter().map(|w| w.as_view()).collect();
        let shape = GemmShape { m: self.m, n: first.len() / k, k };
        let y = Output::Bf16(y.slice_mut(..shape.m * shape.n));
        let op = Linear { y, x: x.slice(..shape.m * shape.k), w: first.as_view(), shape };
        self.products.tune(self.kernels, op, &others)
    }

    /// What [`Product::update`] leaves of the residual stream.
    pub(super) fn leaves(&self) -> Left {
        self.products.leaves(self.m)
    }

    /// `y = norm(residual) * w^T`, the residual as `left`.
    pub(super) fn normed(
        &self,
        y: Output<'_>,
        (stream, left): (&mut Stream, Left),
        norm: Norm<'_>,
        w: &CudaSlice<bf16>,
    ) -> Result<(), KernelError> {
        let k = norm.weight.len();
        let shape = GemmShape { m: self.m, n: w.len() / k, k };
        self.norm(stream, left, norm)?;
        let op = Linear { y, x: stream.normed.slice(..self.m * k), w: w.as_view(), shape };
        if left != Left::Weighted {
            return self.products.linear(self.kernels, op);
        }
        let squares = stream.squares.slice(..self.m * norm_tiles(k));
        self.kernels.skinny_scaled_by(op, RowScale { squares, eps: norm.eps }, self.skinny(shape))
    }

    /// Chooses the algorithm for a product of gate and up by `weights`, all of one shape.
    pub(super) fn tune_gated(
        &self,
        buffers: (&mut CudaSlice<bf16>, &mut CudaSlice<bf16>),
        x: &CudaSlice<bf16>,
        weights: &[&CudaSlice<bf16>],
        k: usize,
    ) -> Result<(), KernelError> {
        let [first, others @ ..] = weights else { return Ok(()) };
        let others: Vec<_> = others.iter().map(|w| w.as_view()).collect();
        self.products.tune_gated(self.kernels, self.gated_operands(buffers, x, first, k), &others)
    }

    /// `activated = silu(gate) * up`, with gate and up of `norm(residual) * w^T`, the residual as this step leaves it.
    pub(super) fn gated(
        &self,
        (activated, gate_up): (&mut CudaSlice<bf16>, &mut CudaSlice<bf16>),
        stream: &mut Stream,
        norm: Norm<'_>,
        w: &CudaSlice<bf16>,
    ) -> Result<(), KernelError> {
        let (left, k) = (self.leaves(), norm.weight.len());
        if left == Left::Weighted {
            let out = activated.slice_mut(..self.m * w.len() / k / 2);
            return self.normed(Output::Activated(out), (stream, left), norm, w);
        }
        self.norm(stream, left, norm)?;
        self.products.gated(self.kernels, self.gated_operands((activated, gate_up), &stream.normed, w, k))
    }

    /// `residual += x * w^T`, or what this step leaves of it for `next`.
    pub(super) fn update(
        &self,
        stream: &mut Stream,
        x: &CudaSlice<bf16>,
        w: &CudaSlice<bf16>,
        next: &CudaSlice<bf16>,
    ) -> Result<(), KernelError> {
        let (m, n) = (self.m, next.len());
        let shape = GemmShape { m, n, k: w.len() / n };
        let (x, w) = (x.slice(..m * shape.k), w.as_view());
        let residual = stream.residual.slice_mut(..m * n);
        let y = match self.leaves() {
            Left::Result => Output::Bf16(stream.update.slice_mut(..m * n)),
            Left::Residual => Output::Sum(residual),
            Left::Weighted => {
                let weighted = stream.normed.slice_mut(..m * n);
                let (squares, norm) = (stream.squares.slice_mut(..m * norm_tiles(n)), next.as_view());
                let op = Update { residual, weighted, squares, norm, x, w, shape };
                return self.kernels.skinny_update_by(op, self.skinny(shape));
            }
        };
        self.products.linear(self.kernels, Linear { y, x, w, shape })
    }

    /// The norm as a launch of its own, where the product behind it needs one.
    fn norm(&self, stream: &mut Stream, left: Left, norm: Norm<'_>) -> Result<(), KernelError> {
        let size = self.m * norm.weight.len();
        let (out, weight, eps) = (stream.normed.slice_mut(..size), norm.weight.as_view(), norm.eps);
        match left {
            Left::Weighted => Ok(()),
            Left::Residual => self.kernels.rms_norm(RmsNorm { out, x: stream.residual.slice(..size), weight, eps }),
            Left::Result => {
                let (residual, x) = (stream.residual.slice_mut(..size), stream.update.slice(..size));
                self.kernels.add_rms_norm(AddRmsNorm { out, residual, x, weight, eps })
            }
        }
    }

    fn gated_operands<'a>(
        &self,
        (activated, gate_up): (&'a mut CudaSlice<bf16>, &'a mut CudaSlice<bf16>),
        x: &'a CudaSlice<bf16>,
        w: &'a CudaSlice<bf16>,
        k: usize,
    ) -> Gated<'a> {
        let shape = GemmShape { m: self.m, n: w.len() / k, k };
        let size = shape.m * shape.n;
        let (out, gate_up) = (activated.slice_mut(..size / 2), gate_up.slice_mut(..size));
        Gated { out, gate_up, x: x.slice(..shape.m * shape.k), w: w.as_view(), shape }
    }

    fn skinny(&self, shape: GemmShape) -> SkinnyKernel {
        SkinnyKernel::for_one_row(shape.n, self.kernels.properties())
    }
}
