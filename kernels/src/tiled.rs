//! Launches of the GEMM for any number of rows (`csrc/gemm_sm90.cu`), with the norm or the addition of the residual stream inside
//! (`csrc/gemm_residual.cuh`) or without. Checks buffers; chooses nothing.

use cudarc::driver::{CudaView, DevicePtr, DevicePtrMut};
use half::bf16;

use crate::{
    KernelError, Kernels, check_len, check_room,
    gemm::GemmPlan,
    launch::{self, GemmShape, UPDATE_ROWS_MAX, refused},
    linear::{self, Linear, Output, RowScale, Update},
    sys::Launch,
    tensor_map::{BoxedTensor, TensorMap},
};

const OP: &str = "gemm_sm90";

impl Kernels {
    /// A product by a given plan, which must be for the shape and epilogue of `op`: the same bits by every plan that leaves the depth
    /// whole.
    pub fn gemm_by_plan(&self, op: Linear<'_>, plan: &GemmPlan) -> Result<(), KernelError> {
        self.gemm_by(op, None, plan)
    }

    /// An update by a given plan, which must be for its shape: the same bits by every plan that leaves the depth whole.
    pub fn gemm_update_by(&self, op: Update<'_>, plan: &GemmPlan) -> Result<(), KernelError> {
        let Update { mut residual, mut weighted, mut squares, norm, x, w, shape } = op;
        let GemmShape { m, n, k } = shape;
        check_rows(m)?;
        check_len(OP, "x", x.len(), m * k)?;
        check_len(OP, "w", w.len(), n * k)?;
        check_len(OP, "residual", residual.len(), m * n)?;
        check_len(OP, "weighted", weighted.len(), m * n)?;
        check_room(OP, "squares", squares.len(), m * n.div_ceil(plan.rows))?;
        check_len(OP, "the norm's weight", norm.len(), n)?;
        let [w_map, x_map] = self.gemm_maps((&w, &x), shape, plan)?;
        // Written by ordinary stores; the kernel does not look at a map of y.
        let launch = self.functions.launch(OP, plan.config).map(&w_map).map(&x_map).map(&w_map);
        let launch = launch
            .write(&mut residual)
            .write(&mut weighted)
            .read(&norm)
            .write(&mut squares)
            .float(0.0)
            .int(n)
            .int(plan.rows);
        start(launch, shape, plan)
    }

    /// A product with a norm's factor by a given plan, which must be for its shape and type.
    pub fn gemm_scaled_by(&self, op: Linear<'_>, scale: RowScale<'_>, plan: &GemmPlan) -> Result<(), KernelError> {
        let GemmShape { m, k, .. } = op.shape;
        check_rows(m)?;
        check_len(OP, "squares", scale.squares.len(), m * k.div_ceil(scale.tile))?;
        if !matches!(scale.tile, 16 | 32 | 64) {
            return Err(refused(OP, format!("a sum of {} squares is not of 16, 32 or 64", scale.tile)));
        }
        if !plan.tile.scales() {
            return Err(refused(OP, "tiles of 256 rows do not scale".to_owned()));
        }
        self.gemm_by(op, Some(scale), &plan.scaling())
    }

    /// With a norm's factor if the plan has a place for it.
    fn gemm_by(&self, mut op: Linear<'_>, scale: Option<RowScale<'_>>, plan: &GemmPlan) -> Result<(), KernelError> {
        let GemmShape { m, n, k } = op.shape;
        linear::check(OP, &op)?;
        let [w, x] = self.gemm_maps((&op.w, &op.x), op.shape, plan)?;
        let stream = self.device().stream();
        let y = match &mut op.y {
            Output::Bf16(y) if plan.copies_out() => matrix(y.device_ptr_mut(stream).0, [n, m], plan.boxes.y)?,
            Output::Gated(y) if plan.copies_out() => matrix(y.device_ptr_mut(stream).0, [n / 2, m], plan.boxes.y)?,
            // Written by ordinary stores; the kernel does not look at this map.
            _ => w,
        };
        let launch = self.functions.launch(OP, plan.config).map(&w).map(&x).map(&y);
        let launch = match &mut op.y {
            Output::Bf16(y) | Output::Gated(y) => launch.write(y),
            Output::Sum(_) => return Err(launch::refused(OP, "it does not add to y alone".to_owned())),
            Output::F32(y) => launch.write(y),
        };
        // What only updates use.
        let launch = launch.read_optional::<bf16>(None).read_optional::<bf16>(None);
        let launch = launch.read_optional(scale.as_ref().map(|scale| &scale.squares));
        let (eps, tile) = scale.map_or((0.0, 0), |scale| (scale.eps, scale.tile));
        start(launch.float(eps).int(k).int(tile), op.shape, plan)
    }

    /// Of the operands w and x, where the chip has the product.
    fn gemm_maps(
        &self,
        (w, x): (&CudaView<'_, bf16>, &CudaView<'_, bf16>),
        GemmShape { m, n, k }: GemmShape,
        plan: &GemmPlan,
    ) -> Result<[TensorMap; 2], KernelError> {
        let (major, minor) = self.properties().capability;
        if (major, minor) != (9, 0) {
            return Err(KernelError::NotInvariant { major, minor });
        }
        let stream = self.device().stream();
        let w = matrix(w.device_ptr(stream).0, [k, n], plan.boxes.w)?;
        Ok([w, matrix(x.device_ptr(stream).0, [k, m], plan.boxes.x)?])
    }
}

/// Adds the arguments that every launch of the product ends with, and starts it.
fn start(launch: Launch<'_>, GemmShape { m, n, .. }: GemmShape, plan: &GemmPlan) -> Result<(), KernelError> {
    let launch = launch.int(m).int(n).int(plan.n_steps).int(plan.rows).int(plan.x_rows).int(plan.n_stages);
    launch.int(plan.n_m_tiles).int(plan.n_n_tiles).int(plan.band).start()
}

/// A row-major matrix of which a copy moves a box; sizes are those of a row, then rows.
fn matrix(address: u64, sizes: [usize; 2], box_sizes: [usize; 2]) -> Result<TensorMap, KernelError> {
    TensorMap::new(OP, &BoxedTensor { address, sizes, strides: [1, sizes[0]], box_sizes })
}

/// Factors of so many rows have room in shared memory.
fn check_rows(m: usize) -> Result<(), KernelError> {
    if m > UPDATE_ROWS_MAX {
        return Err(refused(
            OP,
            format!("{m} rows are more than {UPDATE_ROWS_MAX}, which updates and factors are for"),
        ));
    }
    Ok(())
}
