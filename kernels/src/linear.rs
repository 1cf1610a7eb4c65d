//! The matrix product of a linear layer, y = x * w^T: whichever kernel is fastest for the shape, or always the one whose
//! result for a row does not depend on the other rows.

use cudarc::driver::{CudaView, CudaViewMut, DevicePtr, DevicePtrMut};
use half::bf16;

use crate::{
    KernelError, Kernels,
    blas::Blas,
    check_len,
    gemm::{Depth, GemmPlan},
    launch::{self, GemmShape, Left, LinearKernel, OutputType},
    skinny::RowScale,
    sys::Launch,
    tensor_map::{BoxedTensor, TensorMap},
    timing::is_no_slower,
};

/// Products of more rows keep cuBLASLt's first guess: timing gained nothing at 2048 and 8192.
pub(crate) const TIMED_ROWS_MAX: usize = 512;

const OP: &str = "gemm_sm90";

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
    /// Gate and up, activated: m x n / 2. Only the product of [`crate::gemm`] does, and [`Kernels::scaled`].
    Activated(CudaViewMut<'a, bf16>),
}

impl Linear<'_> {
    /// The same product with other weights of the shape.
    pub(crate) fn with<'b>(&'b mut self, w: &'b CudaView<'_, bf16>) -> Linear<'b> {
        Linear { y: self.y.again(), x: self.x.slice(..), w: w.slice(..), shape: self.shape }
    }
}

impl Output<'_> {
    /// Its number format.
    pub fn output_type(&self) -> OutputType {
        match self {
            Self::Bf16(_) | Self::Sum(_) => OutputType::Bf16,
            Self::F32(_) => OutputType::F32,
            Self::Activated(_) => OutputType::Activated,
        }
    }

    /// To be written once more.
    fn again(&mut self) -> Output<'_> {
        match self {
            Self::Bf16(y) => Output::Bf16(y.slice_mut(..)),
            Self::Sum(y) => Output::Sum(y.slice_mut(..)),
            Self::F32(y) => Output::F32(y.slice_mut(..)),
            Self::Activated(y) => Output::Activated(y.slice_mut(..)),
        }
    }

    fn len(&self) -> usize {
        match self {
            Self::Bf16(y) | Self::Sum(y) | Self::Activated(y) => y.len(),
            Self::F32(y) => y.len(),
        }
    }
}

/// What multiplies.
#[derive(Debug)]
pub enum Products {
    /// Whichever is fastest for the shape: a row's last bits depend on how many rows are multiplied together.
    Fastest(Box<Blas>),
    /// One kernel at every shape: a row's bits are the same whoever its neighbours are.
    BatchInvariant,
}

impl Products {
    /// Batch-invariant ones, if the loaded kernels have them.
    pub fn batch_invariant(kernels: &Kernels) -> Result<Self, KernelError> {
        match kernels.properties().capability {
            (9, 0) => Ok(Self::BatchInvariant),
            (major, minor) => Err(KernelError::NotInvariant { major, minor }),
        }
    }

    /// Multiplies.
    pub fn linear(&self, kernels: &Kernels, op: Linear<'_>) -> Result<(), KernelError> {
        match self {
            Self::Fastest(blas) => kernels.linear(blas, op),
            Self::BatchInvariant => kernels.gemm(op),
        }
    }

    /// What a product of this shape leaves of the residual stream. Where one way must serve any number of rows, its result alone:
    /// who adds it himself rounds the sum once, the norm rounds it twice.
    pub fn leaves(&self, kernels: &Kernels, shape: GemmShape) -> Left {
        match self {
            Self::Fastest(_) => Left::of_update(shape, kernels.properties()),
            Self::BatchInvariant => Left::Result,
        }
    }

    /// Chooses the algorithm for a shape by timing, where there is a choice: see [`Kernels::tune_linear`].
    pub fn tune(&self, kernels: &Kernels, op: Linear<'_>, others: &[CudaView<'_, bf16>]) -> Result<(), KernelError> {
        match self {
            Self::Fastest(blas) => kernels.tune_linear(blas, op, others),
            Self::BatchInvariant if is_timed(&op) => kernels.tune_gemm(op, others, Depth::Whole).map(drop),
            Self::BatchInvariant => Ok(()),
        }
    }
}

impl Kernels {
    /// Multiplies with whichever is faster for the shape.
    pub fn linear(&self, blas: &Blas, op: Linear<'_>) -> Result<(), KernelError> {
        match LinearKernel::for_shape(op.shape, op.y.output_type(), self.properties()) {
            LinearKernel::Skinny(kernel) => self.skinny_gemm_by(op, kernel),
            LinearKernel::Gemm => self.gemm(op),
            LinearKernel::Blas if self.gemm_is_faster(&op) => self.gemm(op),
            LinearKernel::Blas => blas.gemm(op),
        }
    }

    fn gemm_is_faster(&self, op: &Linear<'_>) -> bool {
        let is_plain = !matches!(op.y, Output::Sum(_));
        is_plain && self.tuned.is_faster((op.shape, op.y.output_type())) == Some(true)
    }

    /// Chooses between cuBLASLt's algorithms and cuts of our product for a shape, by timing where that gains something: see
    /// [`Blas::tune`] and [`Blas::prepare`]. Nothing to choose elsewhere.
    pub fn tune_linear(&self, blas: &Blas, op: Linear<'_>, others: &[CudaView<'_, bf16>]) -> Result<(), KernelError> {
        match LinearKernel::for_shape(op.shape, op.y.output_type(), self.properties()) {
            LinearKernel::Skinny(_) => Ok(()),
            LinearKernel::Gemm => self.tune_gemm(op, others, Depth::MaySplit).map(drop),
            LinearKernel::Blas if blas.has_chosen(&op) => Ok(()),
            LinearKernel::Blas if op.shape.m > TIMED_ROWS_MAX => blas.prepare(op),
            LinearKernel::Blas => self.compare(blas, op, others),
        }
    }

    fn compare(&self, blas: &Blas, mut op: Linear<'_>, others: &[CudaView<'_, bf16>]) -> Result<(), KernelError> {
        let (key, w) = ((op.shape, op.y.output_type()), op.w.slice(..));
        let blas_us = blas.tune(op.with(&w), others)?;
        if self.has_gemm() && is_timed(&op) {
            let us = self.tune_gemm(op, others, Depth::MaySplit)?;
            self.tuned.compared(key, is_no_slower(us, blas_us));
        }
        Ok(())
    }
}

impl Kernels {
    /// Multiplies any number of rows on Hopper. A row's bits do not depend on the other rows, unless cuts that split the depth were
    /// timed: see [`Depth`].
    pub fn gemm(&self, op: Linear<'_>) -> Result<(), KernelError> {
        let plan = self.gemm_plan(op.shape, op.y.output_type())?;
        self.gemm_by_plan(op, &plan)
    }

    /// The same by a given plan, which must be for the shape and type of `op`: the same bits by every plan that leaves the depth whole.
    pub fn gemm_by_plan(&self, op: Linear<'_>, plan: &GemmPlan) -> Result<(), KernelError> {
        self.gemm_by(op, None, plan)
    }

    /// The cut that was found to be the fastest, or else is by count.
    pub(crate) fn gemm_plan(&self, shape: GemmShape, output: OutputType) -> Result<GemmPlan, KernelError> {
        let n_multiprocessors = self.properties().n_multiprocessors;
        match self.tuned.plan((shape, output)) {
            Some(found) => Ok(found.for_rows(shape, output, n_multiprocessors)),
            None => GemmPlan::new(shape, output, n_multiprocessors),
        }
    }

    /// With a norm's factor if the plan has a place for it.
    pub(crate) fn gemm_by(
        &self,
        mut op: Linear<'_>,
        scale: Option<RowScale<'_>>,
        plan: &GemmPlan,
    ) -> Result<(), KernelError> {
        let GemmShape { m, n, k } = op.shape;
        check(OP, &op)?;
        let [w, x] = self.gemm_maps((&op.w, &op.x), op.shape, plan)?;
        let stream = self.device().stream();
        let y = match &mut op.y {
            Output::Bf16(y) if plan.copies_out() => matrix(y.device_ptr_mut(stream).0, [n, m], plan.boxes.y)?,
            Output::Activated(y) if plan.copies_out() => matrix(y.device_ptr_mut(stream).0, [n / 2, m], plan.boxes.y)?,
            // Written by ordinary stores; the kernel does not look at this map.
            _ => w,
        };
        let launch = self.functions.launch(OP, plan.config).map(&w).map(&x).map(&y);
        let launch = match &mut op.y {
            Output::Bf16(y) | Output::Activated(y) => launch.write(y),
            Output::Sum(_) => return Err(launch::refused(OP, "it does not add to y".to_owned())),
            Output::F32(y) => launch.write(y),
        };
        // What only updates use.
        let launch = launch.read_optional::<bf16>(None).read_optional::<bf16>(None);
        let launch = launch.read_optional(scale.as_ref().map(|scale| &scale.squares));
        let (eps, tile) = scale.map_or((0.0, 0), |scale| (scale.eps, scale.tile));
        start(launch.float(eps).int(k).int(tile), op.shape, plan)
    }

    /// Of the operands w and x, where the chip has the product.
    pub(crate) fn gemm_maps(
        &self,
        (w, x): (&CudaView<'_, bf16>, &CudaView<'_, bf16>),
        GemmShape { m, n, k }: GemmShape,
        plan: &GemmPlan,
    ) -> Result<[TensorMap; 2], KernelError> {
        let (major, minor) = self.properties().capability;
        if !self.has_gemm() {
            return Err(KernelError::NotInvariant { major, minor });
        }
        let stream = self.device().stream();
        let w = matrix(w.device_ptr(stream).0, [k, n], plan.boxes.w)?;
        Ok([w, matrix(x.device_ptr(stream).0, [k, m], plan.boxes.x)?])
    }
}

/// Adds the arguments that every launch of the product ends with, and starts it.
pub(crate) fn start(launch: Launch<'_>, GemmShape { m, n, .. }: GemmShape, plan: &GemmPlan) -> Result<(), KernelError> {
    let launch = launch.int(m).int(n).int(plan.n_steps).int(plan.rows).int(plan.x_rows).int(plan.n_stages);
    launch.int(plan.n_m_tiles).int(plan.n_n_tiles).int(plan.band).start()
}

/// Whether cuts of our product are timed. Not for logits: their weights are a gigabyte, any cut reads them as fast.
fn is_timed(op: &Linear<'_>) -> bool {
    op.shape.m <= TIMED_ROWS_MAX && op.shape.k.is_multiple_of(8) && !matches!(op.y, Output::F32(_))
}

/// A row-major matrix of which a copy moves a box; sizes are those of a row, then rows.
fn matrix(address: u64, sizes: [usize; 2], box_sizes: [usize; 2]) -> Result<TensorMap, KernelError> {
    TensorMap::new(OP, &BoxedTensor { address, sizes, strides: [1, sizes[0]], box_sizes })
}

/// Every buffer holds exactly what the shape says.
pub(crate) fn check(op: &'static str, linear: &Linear<'_>) -> Result<(), KernelError> {
    let GemmShape { m, n, k } = linear.shape;
    let width = if matches!(linear.y, Output::Activated(_)) { n / 2 } else { n };
    check_len(op, "y", linear.y.len(), m * width)?;
    check_len(op, "x", linear.x.len(), m * k)?;
    check_len(op, "w", linear.w.len(), n * k)
}
