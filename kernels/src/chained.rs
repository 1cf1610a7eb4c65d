//! The products of a step whose rows hand the residual stream on weighted ([`Left::Weighted`]): each adds to it or is scaled by
//! its norm, so that no norm and no addition is a launch of its own. One row is multiplied by the kernels for few rows, more by
//! the product for any number of rows, which leaves fewer sums of squares (`csrc/gemm_residual.cuh`).
//!
//! [`Left::Weighted`]: crate::launch::Left::Weighted

use cudarc::driver::CudaView;
use half::bf16;

use crate::{
    KernelError, Kernels, check_len, check_room,
    gemm::{Depth, GemmPlan},
    launch::{CHAINED_ROWS_MAX, GemmShape, LinearKernel, NORM_TILE, OutputType, SkinnyKernel, refused},
    linear::{self, Linear},
    skinny::{RowScale, Update},
};

const OP: &str = "gemm_sm90";

impl<'a> Update<'a> {
    /// The same with other weights of the shape.
    fn with<'b>(&'b mut self, w: &'b CudaView<'_, bf16>) -> Update<'b> {
        Update {
            residual: self.residual.slice_mut(..),
            weighted: self.weighted.slice_mut(..),
            squares: self.squares.slice_mut(..),
            norm: self.norm.slice(..),
            x: self.x.slice(..),
            w: w.slice(..),
            shape: self.shape,
        }
    }
}

impl Kernels {
    /// `residual += x * w^T`, and what the product of the next norm needs. Returns how many values a sum of squares is of.
    pub fn update(&self, op: Update<'_>) -> Result<usize, KernelError> {
        match self.chained_kernel(op.shape, OutputType::Updated)? {
            Some(kernel) => self.skinny_update_by(op, kernel).map(|()| NORM_TILE),
            None => {
                let plan = self.gemm_plan(op.shape, OutputType::Updated)?;
                self.gemm_update_by(op, &plan).map(|()| plan.rows)
            }
        }
    }

    /// Whether a product of a norm may be [`Kernels::scaled`]; else the norm is a launch in front of it.
    pub fn scales(&self, shape: GemmShape, output: OutputType) -> bool {
        self.chained_kernel(shape, output).is_ok()
    }

    /// The product of a norm: x is what an update left weighted.
    pub fn scaled(&self, op: Linear<'_>, scale: RowScale<'_>) -> Result<(), KernelError> {
        let output = op.y.output_type();
        if let Some(kernel) = self.chained_kernel(op.shape, output)? {
            return self.skinny_scaled_by(op, scale, kernel);
        }
        let found = self.gemm_plan(op.shape, output)?;
        // A cut that was found for more rows may be of the largest tiles, which do not scale.
        let plan = match found.scales() {
            true => found,
            false => GemmPlan::new(op.shape, output, self.properties().n_multiprocessors)?,
        };
        self.gemm_scaled_by(op, scale, &plan)
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
        linear::start(launch, shape, plan)
    }

    /// A product with a norm's factor by a given plan, which must be for its shape and type.
    pub fn gemm_scaled_by(&self, op: Linear<'_>, scale: RowScale<'_>, plan: &GemmPlan) -> Result<(), KernelError> {
        let GemmShape { m, k, .. } = op.shape;
        check_rows(m)?;
        check_len(OP, "squares", scale.squares.len(), m * k.div_ceil(scale.tile))?;
        if !matches!(scale.tile, 16 | 32 | 64) {
            return Err(refused(OP, format!("a sum of {} squares is not of 16, 32 or 64", scale.tile)));
        }
        if !plan.scales() {
            return Err(refused(OP, "tiles of 256 rows do not scale".to_owned()));
        }
        self.gemm_by(op, Some(scale), &plan.scaling())
    }

    /// Chooses the cut of an update by timing over its weights and `others` in turn, where there is a choice. Changes the residual.
    pub fn tune_update(&self, mut op: Update<'_>, others: &[CudaView<'_, bf16>]) -> Result<(), KernelError> {
        let key = (op.shape, OutputType::Updated);
        if self.chained_kernel(key.0, key.1)?.is_some() {
            return Ok(());
        }
        let weights: Vec<_> = std::iter::once(op.w.slice(..)).chain(others.iter().map(|w| w.slice(..))).collect();
        self.fastest_cut((key, Depth::MaySplit), weights.len(), |idx, plan| {
            self.gemm_update_by(op.with(&weights[idx]), plan)
        })
        .map(drop)
    }

    /// The kernel for few rows, or none: the product for any number of rows.
    fn chained_kernel(&self, shape: GemmShape, output: OutputType) -> Result<Option<SkinnyKernel>, KernelError> {
        match LinearKernel::for_shape(shape, output, self.properties()) {
            LinearKernel::Skinny(kernel) if shape.m == 1 => Ok(Some(kernel)),
            LinearKernel::Gemm => Ok(None),
            // Logits of some rows, whose update left sums that the kernels for few rows do not read.
            LinearKernel::Skinny(_) | LinearKernel::Blas => {
                Err(refused(OP, format!("{} rows to {output:?} are neither added nor scaled", shape.m)))
            }
        }
    }
}

/// Factors of so many rows have room in shared memory.
fn check_rows(m: usize) -> Result<(), KernelError> {
    if m > CHAINED_ROWS_MAX {
        return Err(refused(
            OP,
            format!("{m} rows are more than {CHAINED_ROWS_MAX}, which updates and factors are for"),
        ));
    }
    Ok(())
}
