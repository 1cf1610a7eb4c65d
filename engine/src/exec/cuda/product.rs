//! The matrix products of a step, and the residual stream between them: which rows of which buffer, and whether norms and
//! additions are inside the products or launches of their own. Chooses no algorithm; `Products` does.

use stoker_kernels::{
    CudaSlice, KernelError, Kernels, bf16,
    gated::Gated,
    launch::{GemmShape, Left, OutputType, norm_tiles},
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

    /// The same for what [`Product::update`] multiplies by. Changes the residual.
    pub(super) fn tune_update(
        &self,
        stream: &mut Stream,
        x: &CudaSlice<bf16>,
        weights: &[&CudaSlice<bf16>],
        next: &CudaSlice<bf16>,
    ) -> Result<(), KernelError> {
        let [first, others @ ..] = weights else { return Ok(()) };
        let k = first.len() / next.len();
        if self.leaves(next.len(), k) != Left::Weighted {
            return self.tune(&mut stream.update, x, weights, k);
        }
        let others: Vec<_> = others.iter().map(|w| w.as_view()).collect();
        self.kernels.tune_update(self.update_operands(stream, x, first, next), &others)
    }

    /// `y = norm(residual) * w^T`.
    pub(super) fn normed(
        &self,
        y: Output<'_>,
        stream: &mut Stream,
        norm: Norm<'_>,
        w: &CudaSlice<bf16>,
    ) -> Result<(), KernelError> {
        let k = norm.weight.len();
        let shape = GemmShape { m: self.m, n: w.len() / k, k };
        let is_scaled = self.is_scaled(stream, shape, y.output_type());
        if !is_scaled {
            self.norm(stream, norm)?;
        }
        let op = Linear { y, x: stream.normed.slice(..self.m * k), w: w.as_view(), shape };
        if !is_scaled {
            return self.products.linear(self.kernels, op);
        }
        let tile = stream.squares_tile;
        let squares = stream.squares.slice(..self.m * k.div_ceil(tile));
        self.kernels.scaled(op, RowScale { squares, tile, eps: norm.eps })
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

    /// `activated = silu(gate) * up`, with gate and up of `norm(residual) * w^T`.
    pub(super) fn gated(
        &self,
        (activated, gate_up): (&mut CudaSlice<bf16>, &mut CudaSlice<bf16>),
        stream: &mut Stream,
        norm: Norm<'_>,
        w: &CudaSlice<bf16>,
    ) -> Result<(), KernelError> {
        let k = norm.weight.len();
        if self.is_scaled(stream, GemmShape { m: self.m, n: w.len() / k, k }, OutputType::Activated) {
            let out = activated.slice_mut(..self.m * w.len() / k / 2);
            return self.normed(Output::Activated(out), stream, norm, w);
        }
        self.norm(stream, norm)?;
        self.products.gated(self.kernels, self.gated_operands((activated, gate_up), &stream.normed, w, k))
    }

    /// `residual += x * w^T`, or what this product leaves of it for `next`.
    pub(super) fn update(
        &self,
        stream: &mut Stream,
        x: &CudaSlice<bf16>,
        w: &CudaSlice<bf16>,
        next: &CudaSlice<bf16>,
    ) -> Result<(), KernelError> {
        let (m, n) = (self.m, next.len());
        let shape = GemmShape { m, n, k: w.len() / n };
        stream.left = self.leaves(n, shape.k);
        let y = match stream.left {
            Left::Result => Output::Bf16(stream.update.slice_mut(..m * n)),
            Left::Residual => Output::Sum(stream.residual.slice_mut(..m * n)),
            Left::Weighted => {
                stream.squares_tile = self.kernels.update(self.update_operands(stream, x, w, next))?;
                return Ok(());
            }
        };
        let op = Linear { y, x: x.slice(..m * shape.k), w: w.as_view(), shape };
        self.products.linear(self.kernels, op)
    }

    /// What an update by weights of n x k leaves of the residual stream.
    fn leaves(&self, n: usize, k: usize) -> Left {
        self.products.leaves(self.kernels, GemmShape { m: self.m, n, k })
    }

    /// Whether a product takes the residual stream as it is and its norm's factor: logits of many rows do not.
    fn is_scaled(&self, stream: &Stream, shape: GemmShape, output: OutputType) -> bool {
        stream.left == Left::Weighted && self.kernels.scales(shape, output)
    }

    /// The norm as a launch of its own.
    fn norm(&self, stream: &mut Stream, norm: Norm<'_>) -> Result<(), KernelError> {
        let size = self.m * norm.weight.len();
        let (out, weight, eps) = (stream.normed.slice_mut(..size), norm.weight.as_view(), norm.eps);
        match stream.left {
            Left::Weighted | Left::Residual => {
                self.kernels.rms_norm(RmsNorm { out, x: stream.residual.slice(..size), weight, eps })
            }
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

    fn update_operands<'a>(
        &self,
        stream: &'a mut Stream,
        x: &'a CudaSlice<bf16>,
        w: &'a CudaSlice<bf16>,
        next: &'a CudaSlice<bf16>,
    ) -> Update<'a> {
        let (m, n) = (self.m, next.len());
        let shape = GemmShape { m, n, k: w.len() / n };
        Update {
            residual: stream.residual.slice_mut(..m * n),
            weighted: stream.normed.slice_mut(..m * n),
            squares: stream.squares.slice_mut(..m * norm_tiles(n)),
            norm: next.as_view(),
            x: x.slice(..m * shape.k),
            w: w.as_view(),
            shape,
        }
    }
}
