//! The matrix products of a step: which rows of which buffer, and whether the product adds to the residual itself. Chooses
//! no algorithm; `Products` does.

use stoker_kernels::{
    CudaSlice, KernelError, Kernels, bf16,
    gated::Gated,
    launch::GemmShape,
    linear::{Linear, Output, Products},
};

/// From this many rows a product adds to the residual itself: it is bound by arithmetic and has time to read and write it,
/// and the norm behind it moves half of its bytes. Below, the norm adds.
const ADDING_ROWS_MIN: usize = 512;

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
        self.products.tune(self.kernels, self.operands(y, x, first, k), &others)
    }

    /// `y = x * w^T` for the first `m` rows of the buffers, `k` wide.
    pub(super) fn launch(
        &self,
        y: &mut CudaSlice<bf16>,
        x: &CudaSlice<bf16>,
        w: &CudaSlice<bf16>,
        k: usize,
    ) -> Result<(), KernelError> {
        self.products.linear(self.kernels, self.operands(y, x, w, k))
    }

    /// `activated = silu(gate) * up`, with gate and up of `x * w^T`.
    pub(super) fn gated(
        &self,
        (activated, gate_up): (&mut CudaSlice<bf16>, &mut CudaSlice<bf16>),
        x: &CudaSlice<bf16>,
        w: &CudaSlice<bf16>,
        k: usize,
    ) -> Result<(), KernelError> {
        self.products.gated(self.kernels, self.gated_operands((activated, gate_up), x, w, k))
    }

    /// Chooses the algorithm for such a product by `weights`, all of one shape.
    pub(super) fn tune_gated(
        &self,
        (activated, gate_up): (&mut CudaSlice<bf16>, &mut CudaSlice<bf16>),
        x: &CudaSlice<bf16>,
        weights: &[&CudaSlice<bf16>],
        k: usize,
    ) -> Result<(), KernelError> {
        let [first, others @ ..] = weights else { return Ok(()) };
        let others: Vec<_> = others.iter().map(|w| w.as_view()).collect();
        self.products.tune_gated(self.kernels, self.gated_operands((activated, gate_up), x, first, k), &others)
    }

    /// `x * w^T` for the residual: added to it, or left for the norm to add.
    pub(super) fn update(
        &self,
        (residual, update): (&mut CudaSlice<bf16>, &mut CudaSlice<bf16>),
        x: &CudaSlice<bf16>,
        w: &CudaSlice<bf16>,
        k: usize,
    ) -> Result<(), KernelError> {
        if !adds_in_product(self.products, self.m) {
            return self.launch(update, x, w, k);
        }
        let shape = GemmShape { m: self.m, n: w.len() / k, k };
        let y = Output::Sum(residual.slice_mut(..shape.m * shape.n));
        self.products.linear(self.kernels, Linear { y, x: x.slice(..shape.m * shape.k), w: w.as_view(), shape })
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

    fn operands<'a>(
        &self,
        y: &'a mut CudaSlice<bf16>,
        x: &'a CudaSlice<bf16>,
        w: &'a CudaSlice<bf16>,
        k: usize,
    ) -> Linear<'a> {
        let shape = GemmShape { m: self.m, n: w.len() / k, k };
        let y = Output::Bf16(y.slice_mut(..shape.m * shape.n));
        Linear { y, x: x.slice(..shape.m * shape.k), w: w.as_view(), shape }
    }
}

/// Never where one way must serve any number of rows: the sum is rounded once instead of twice.
pub(super) fn adds_in_product(products: &Products, n_rows: usize) -> bool {
    matches!(products, Products::Fastest(_)) && n_rows >= ADDING_ROWS_MIN
}
