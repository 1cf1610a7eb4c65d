//! Launches of the GEMM for any number of rows (`csrc/gemm_sm90.cu`), with the norm or the addition of the residual stream inside
//! (`csrc/gemm_residual.cuh`) or without. Checks buffers; chooses nothing.

use cudarc::driver::{CudaView, DevicePtr, DevicePtrMut};
use half::bf16;
use stoker_fit::gpu::{SUM_DIGITS, block_scales_of_rows};

use crate::{
    KernelError, Kernels, check_len, check_room,
    gemm::GemmPlan,
    int4::{self, GroupSize, Int4View},
    launch::{self, GemmShape, UPDATE_ROWS_MAX, refused},
    linear::{self, Linear, Operand, Output, RowScale, Update},
    quantise::E4M3_WHOLE,
    sys::Launch,
    tensor_map::{BoxedTensor, Fetches, TensorMap},
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
        w.check(OP, "w", [n, k])?;
        check_len(OP, "residual", residual.len(), m * n)?;
        check_len(OP, "weighted", weighted.len(), m * n)?;
        check_room(OP, "squares", squares.len(), m * n.div_ceil(plan.rows))?;
        check_len(OP, "the norm's weight", norm.len(), n)?;
        let maps = self.maps(&w, &Operand::Bf16(x), shape, plan)?;
        // Written by ordinary stores; the kernel does not look at a map of y.
        let launch = maps.pass(self.functions.launch(OP, plan.config)).map(&maps.x);
        let launch = launch
            .write(&mut residual)
            .write(&mut weighted)
            .read(&norm)
            .write(&mut squares)
            .float(0.0)
            .int(n)
            .int(plan.rows);
        start(format_of(launch, &w), shape, plan)
    }

    /// A product with a norm's factor by a given plan, which must be for its shape and type.
    pub fn gemm_scaled_by(&self, op: Linear<'_>, scale: RowScale<'_>, plan: &GemmPlan) -> Result<(), KernelError> {
        check_rows(op.shape.m)?;
        linear::check_squares(OP, &scale, op.shape)?;
        if !plan.tile.scales() {
            return Err(refused(OP, "tiles of 256 rows do not scale".to_owned()));
        }
        self.gemm_by(op, Some(scale), &plan.scaling())
    }

    /// With a norm's factor if the plan has a place for it.
    fn gemm_by(&self, mut op: Linear<'_>, scale: Option<RowScale<'_>>, plan: &GemmPlan) -> Result<(), KernelError> {
        let GemmShape { m, n, k } = op.shape;
        linear::check(OP, &op)?;
        let plan = &op.w.awaited(plan);
        let maps = self.maps(&op.w, &op.x, op.shape, plan)?;
        let stream = self.device().stream();
        let y = match &mut op.y {
            Output::Bf16(y) if plan.copies_out() => matrix(y.device_ptr_mut(stream).0, [n, m], plan.boxes.y)?,
            Output::Gated(y) if plan.copies_out() => matrix(y.device_ptr_mut(stream).0, [n / 2, m], plan.boxes.y)?,
            // Written by ordinary stores; the kernel does not look at this map.
            _ => maps.x,
        };
        let launch = maps.pass(self.functions.launch(OP, plan.config)).map(&y);
        let launch = match &mut op.y {
            Output::Bf16(y) | Output::Gated(y) => launch.write(y),
            Output::Sum(_) => return Err(launch::refused(OP, "it does not add to y alone".to_owned())),
            Output::F32(y) => launch.write(y),
        };
        if let (Operand::E4m3(w), Operand::E4m3(x)) = (&op.w, &op.x) {
            if scale.is_some() {
                return Err(refused(OP, "quantised rows have no norm's factor".to_owned()));
            }
            return start(launch.read(&w.scales).read(&x.scales), op.shape, plan);
        }
        if let (Operand::E4m3Blocks(w), Operand::E4m3(x)) = (&op.w, &op.x) {
            if scale.is_some() {
                return Err(refused(OP, "quantised rows have no norm's factor".to_owned()));
            }
            let launch = launch.read(&w.scales).read(&x.scales).int(block_scales_of_rows(k));
            return start(launch, op.shape, plan);
        }
        if let (Operand::Int4(w), Operand::E4m3(x)) = (&op.w, &op.x) {
            let is_taken = scale.is_none() && w.layout.group == GroupSize::G128;
            let Some(beside) = x.beside.as_ref().filter(|beside| is_taken && m <= beside.stride) else {
                let wanted = "codes in groups of 128 want sums of all quantised rows, and no norm's factor";
                return Err(refused(OP, wanted.to_owned()));
            };
            let n_sums = k / GroupSize::G128.values();
            check_room(OP, "sums", beside.sums.len(), n_sums * beside.stride * SUM_DIGITS)?;
            let launch = launch.read(&x.scales).read(&beside.sums).int(beside.stride).int(n_sums);
            return start(w.layout.pass(launch), op.shape, plan);
        }
        // What only updates use.
        let launch = launch.read_optional::<bf16>(None).read_optional::<bf16>(None);
        let launch = launch.read_optional(scale.as_ref().map(|scale| &scale.squares));
        let (eps, tile) = scale.map_or((0.0, 0), |scale| (scale.eps, scale.tile));
        start(format_of(launch.float(eps).int(k).int(tile), &op.w), op.shape, plan)
    }

    /// Of both operands, where the chip has the product.
    fn maps(&self, w: &Operand<'_>, x: &Operand<'_>, shape: GemmShape, plan: &GemmPlan) -> Result<Maps, KernelError> {
        self.check_chip()?;
        match (w, x) {
            (Operand::Bf16(w), Operand::Bf16(x)) => self.gemm_maps((w, x), shape, plan),
            (Operand::E4m3(w), Operand::E4m3(x)) => self.e4m3_maps((&w.values, &x.values), shape, plan),
            (Operand::E4m3Blocks(w), Operand::E4m3(x)) => self.e4m3_maps((&w.values, &x.values), shape, plan),
            (Operand::Int4(w), Operand::Bf16(x)) => {
                let x_address = x.device_ptr(self.device().stream()).0;
                let x = if plan.tile.is_by_warps() {
                    panels(x_address, [shape.k, shape.m], [plan.boxes.x[1], plan.boxes.w[0]])?
                } else {
                    matrix(x_address, [shape.k, shape.m], plan.boxes.x)?
                };
                self.int4_maps(w, x, plan)
            }
            (Operand::Int4(w), Operand::E4m3(x)) => {
                let x_address = x.values.device_ptr(self.device().stream()).0;
                self.int4_maps(w, matrix(x_address, [shape.k / 2, shape.m], plan.boxes.x)?, plan)
            }
            _ => Err(refused(OP, "one operand is quantised, the other is not".to_owned())),
        }
    }

    pub(crate) fn check_chip(&self) -> Result<(), KernelError> {
        let (major, minor) = self.properties().capability;
        if (major, minor) == (9, 0) { Ok(()) } else { Err(KernelError::NotInvariant { major, minor }) }
    }

    /// Of operands in e4m3, as if each pair were one of bf16: only bytes are moved.
    fn e4m3_maps(
        &self,
        (w, x): (&CudaView<'_, u8>, &CudaView<'_, u8>),
        shape: GemmShape,
        plan: &GemmPlan,
    ) -> Result<Maps, KernelError> {
        if !shape.k.is_multiple_of(E4M3_WHOLE) {
            return Err(refused(OP, format!("depth {} of e4m3 is not a multiple of {E4M3_WHOLE}", shape.k)));
        }
        let (stream, pairs) = (self.device().stream(), shape.k / 2);
        let w = weights(w.device_ptr(stream).0, [pairs, shape.n], plan.boxes.w, shape.m)?;
        Ok(Maps { w, groups: None, x: matrix(x.device_ptr(stream).0, [pairs, shape.m], plan.boxes.x)? })
    }

    /// Of the operands w and x, where the chip has the product.
    fn gemm_maps(
        &self,
        (w, x): (&CudaView<'_, bf16>, &CudaView<'_, bf16>),
        GemmShape { m, n, k }: GemmShape,
        plan: &GemmPlan,
    ) -> Result<Maps, KernelError> {
        let stream = self.device().stream();
        let w = weights(w.device_ptr(stream).0, [k, n], plan.boxes.w, m)?;
        Ok(Maps { w, groups: None, x: matrix(x.device_ptr(stream).0, [k, m], plan.boxes.x)? })
    }

    /// Of weights of four bits: chunks of a tile's codes lie together, as groups of a tile do.
    fn int4_maps(&self, w: &Int4View<'_>, x: TensorMap, plan: &GemmPlan) -> Result<Maps, KernelError> {
        // In values of 16 bits, as which the copy engine moves them.
        const CHUNK: usize = 256;
        const GROUP: usize = 32;
        let (stream, layout) = (self.device().stream(), w.layout);
        let (tiles, [n_chunks, n_groups]) = (plan.rows / int4::TILE_ROWS, plan.boxes.w);
        let map = |address: u64, width: usize, n: usize, n_box: usize| {
            let strides = [1, width, width * n];
            let sizes = [width, n, layout.n_tiles()];
            let box_sizes = [width, n_box, tiles];
            TensorMap::in_lines(OP, &BoxedTensor { address, sizes, strides, box_sizes, fetches: Fetches::Pair })
        };
        Ok(Maps {
            w: map(w.codes.device_ptr(stream).0, CHUNK, layout.n_chunks(), n_chunks)?,
            groups: Some(map(w.groups.device_ptr(stream).0, GROUP, layout.n_groups(), n_groups)?),
            x,
        })
    }
}

/// What the copy engine knows of the operands of a product.
struct Maps {
    w: TensorMap,
    /// Of weights of four bits.
    groups: Option<TensorMap>,
    x: TensorMap,
}

impl Maps {
    fn pass<'a>(&'a self, launch: Launch<'a>) -> Launch<'a> {
        let launch = launch.map(&self.w);
        match &self.groups {
            Some(groups) => launch.map(groups),
            None => launch,
        }
        .map(&self.x)
    }
}

/// How groups of weights of four bits are stored.
fn format_of<'a>(launch: Launch<'a>, w: &Operand<'_>) -> Launch<'a> {
    match w {
        Operand::Int4(Int4View { layout, .. }) => layout.pass(launch),
        Operand::Bf16(_) | Operand::E4m3(_) | Operand::E4m3Blocks(_) => launch,
    }
}

/// Adds the arguments that every launch of the product ends with, and starts it.
fn start(launch: Launch<'_>, GemmShape { m, n, .. }: GemmShape, plan: &GemmPlan) -> Result<(), KernelError> {
    let launch = launch.int(m).int(n).int(plan.n_steps).int(plan.rows).int(plan.x_rows).int(plan.n_stages);
    launch.int(plan.n_ahead).int(plan.n_m_tiles).int(plan.n_n_tiles).int(plan.band).start()
}

/// A row-major matrix of which a copy moves a box; sizes are those of a row, then rows.
fn matrix(address: u64, sizes: [usize; 2], box_sizes: [usize; 2]) -> Result<TensorMap, KernelError> {
    TensorMap::new(OP, &BoxedTensor { address, sizes, strides: [1, sizes[0]], box_sizes, fetches: Fetches::Pair })
}

/// The same of weights that `m` rows of x are multiplied with. Few rows are bound by memory, which gives more line by line; with more, pairs
/// are 0.4 % faster.
fn weights(address: u64, sizes: [usize; 2], box_sizes: [usize; 2], m: usize) -> Result<TensorMap, KernelError> {
    const LINES_ROWS_MAX: usize = 64;
    let fetches = if m <= LINES_ROWS_MAX { Fetches::Line } else { Fetches::Pair };
    TensorMap::new(OP, &BoxedTensor { address, sizes, strides: [1, sizes[0]], box_sizes, fetches })
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

/// A row-major matrix of whole panels of 64 values, of which a copy moves several of some rows; box sizes are rows, panels.
fn panels(address: u64, [k, m]: [usize; 2], [n_rows, n_panels]: [usize; 2]) -> Result<TensorMap, KernelError> {
    const PANEL: usize = 64;
    let sizes = [PANEL, m, k / PANEL];
    let box_sizes = [PANEL, n_rows, n_panels];
    TensorMap::new(OP, &BoxedTensor { address, sizes, strides: [1, k, PANEL], box_sizes, fetches: Fetches::Pair })
}
