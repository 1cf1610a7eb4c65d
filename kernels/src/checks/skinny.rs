//! Comparisons of products of few rows with the residual stream: what an update leaves, what a norm's factor and an activation
//! make of a product, that one after the other is the models' own norm, and that a row does not depend on the rows beside it.

use half::bf16;

use super::{
    Gpu, Outcome, TWO_ROUNDINGS, fixture::widened, linear::skinny_kernels, relative_error, residual::in_tiles,
};
use crate::{
    CudaSlice, KernelError,
    launch::{GemmShape, NORM_TILE, SKINNY_ROWS_MAX, SkinnyKernel, norm_tiles},
    linear::{Linear, Output, RowScale, Update},
    reference,
};

const OP: &str = "skinny_gemm";
/// (n, k): whole tiles, odd rows and tiles, more squares than lanes of a warp, depths that end inside a chunk, a step and a lane,
/// more tiles than multiprocessors. None of a single value: what cancels in it would count as an error.
const SIZES: [(usize, usize); 6] = [(64, 512), (17, 8), (3, 40), (33, 1032), (300, 4104), (2200, 1032)];
/// The same where n is gate and up.
const GATED_SIZES: [(usize, usize); 4] = [(16, 8), (64, 512), (304, 1032), (2208, 1032)];
/// Of the norms: large enough that leaving it out shows.
pub(super) const EPS: f32 = 1e-2;
/// f32 sums lose 2^-24 of their size a term, which with random signs grows with the root; four times as margin. A norm's factor
/// is a root and its reciprocal by the chip's approximation, 2^-22 off at most.
pub(super) const FACTOR: f64 = 1.0 / (1 << 21) as f64;

pub(super) fn run(gpu: &mut Gpu) -> Result<Vec<Outcome>, KernelError> {
    let mut outcomes = Vec::new();
    for kernel in skinny_kernels(gpu) {
        for m in [1, 2, 7, SKINNY_ROWS_MAX] {
            for (n, k) in SIZES {
                outcomes.extend(update(gpu, GemmShape { m, n, k }, kernel)?);
                outcomes.extend(scaled(gpu, GemmShape { m, n, k }, kernel)?);
            }
            for (n, k) in GATED_SIZES {
                outcomes.extend(gated(gpu, GemmShape { m, n, k }, kernel)?);
            }
        }
        outcomes.push(independence(gpu, 304, 4104, kernel)?);
        outcomes.push(as_models_norm(gpu, kernel)?);
    }
    Ok(outcomes)
}

fn case(what: &str, shape: GemmShape, kernel: SkinnyKernel) -> String {
    format!("{what}, m {} n {} k {}, {kernel:?}", shape.m, shape.n, shape.k)
}

/// The residual, the weighted residual and its squares.
fn update(gpu: &mut Gpu, shape: GemmShape, kernel: SkinnyKernel) -> Result<[Outcome; 3], KernelError> {
    let values = Values::new(gpu, shape);
    let found = run_update(gpu, &values, shape, kernel)?;
    let product = reference::linear(&values.x, &values.w, shape);
    let wanted: Vec<f32> = values.residual.iter().zip(&product).map(|(h, product)| h + product).collect();
    // The rest against what was found: a sum of another order may round to the other neighbour.
    let (weighted, squares) = reference::weighted(found.as_ref().map_or(&[], |found| &found.residual), &values.norm);
    let error = |found: Option<&[f32]>, wanted: &[f32]| found.map_or(f64::INFINITY, |it| relative_error(it, wanted));
    let of = |part: fn(&Updated) -> &[f32]| found.as_ref().map(part);
    let outcome = |what, error, limit| Outcome { op: OP, case: case(what, shape, kernel), error, limit };
    Ok([
        outcome("residual", error(of(|it| &it.residual), &wanted), TWO_ROUNDINGS),
        outcome("weighted residual", error(of(|it| &it.weighted), &weighted), 0.0),
        outcome("squares of the residual", error(of(|it| &it.squares), &squares), FACTOR),
    ])
}

/// A product with a norm's factor, to logits and to activations.
fn scaled(gpu: &mut Gpu, shape: GemmShape, kernel: SkinnyKernel) -> Result<[Outcome; 3], KernelError> {
    let GemmShape { m, n, k } = shape;
    let values = Values::new(gpu, shape);
    let squares = row_squares(&values.x, k);
    let (operands, squares_gpu) = (Operands::new(gpu, &values)?, gpu.upload(&squares)?);
    let wanted = reference::scaled_linear(&values.x, &squares, EPS, &values.w, shape);
    // As an update by a tile of 64 weight rows leaves them.
    let of_tiles = gpu.upload(&in_tiles(&squares, k, 64))?;
    let launch = |y, (squares, tile)| {
        let scale = RowScale { squares, tile, eps: EPS };
        gpu.kernels.skinny_scaled_by(operands.linear(y, shape), scale, kernel)
    };
    let (mut few, mut many) = (gpu.poisoned::<f32>(m * n)?, gpu.poisoned::<f32>(m * n)?);
    let mut activations = gpu.poisoned::<bf16>(m * n)?;
    launch(Output::F32(few.view()), (squares_gpu.as_view(), NORM_TILE))?;
    launch(Output::F32(many.view()), (of_tiles.as_view(), 64))?;
    launch(Output::Bf16(activations.view()), (squares_gpu.as_view(), NORM_TILE))?;
    let found = [gpu.written(&few)?, gpu.written(&many)?, gpu.written(&activations)?.map(|found| widened(&found))];
    let [few, many, activations] = found.map(|it| it.map_or(f64::INFINITY, |it| relative_error(&it, &wanted)));
    let outcome = |what, error, limit| Outcome { op: OP, case: case(what, shape, kernel), error, limit };
    let limit = 4.0 * 2f64.powi(-24) * (k as f64).sqrt() + FACTOR;
    Ok([
        outcome("scaled to f32", few, limit),
        outcome("scaled to f32 by sums of 64 squares", many, limit),
        outcome("scaled to bf16", activations, TWO_ROUNDINGS),
    ])
}

/// Gate and up of a norm, and of rows as they are, activated: the same as the product of its own and the activation behind it, but for sums that round
/// to the other neighbour.
fn gated(gpu: &mut Gpu, shape: GemmShape, kernel: SkinnyKernel) -> Result<[Outcome; 2], KernelError> {
    let GemmShape { m, n, k } = shape;
    let mut values = Values::new(gpu, shape);
    // Sums of the size of one: where the activation bends.
    values.w.iter_mut().for_each(|w| *w = reference::rounded(*w / (k as f32).sqrt()));
    let squares = row_squares(&values.x, k);
    let (operands, squares_gpu) = (Operands::new(gpu, &values)?, gpu.upload(&squares)?);
    let (mut out, mut plain) = (gpu.poisoned(m * n / 2)?, gpu.poisoned(m * n / 2)?);
    let scale = RowScale { squares: squares_gpu.as_view(), tile: NORM_TILE, eps: EPS };
    gpu.kernels.skinny_scaled_by(operands.linear(Output::Gated(out.view()), shape), scale, kernel)?;
    gpu.kernels.skinny_gemm_by(operands.linear(Output::Gated(plain.view()), shape), kernel)?;
    let outcome = |what, out, sums: Vec<f32>| {
        let wanted = reference::silu_mul(&sums.into_iter().map(reference::rounded).collect::<Vec<_>>());
        let error = gpu.written(out)?.map_or(f64::INFINITY, |found| relative_error(&widened(&found), &wanted));
        Ok(Outcome { op: OP, case: case(what, shape, kernel), error, limit: TWO_ROUNDINGS })
    };
    Ok([
        outcome("scaled and gated", &out, reference::scaled_linear(&values.x, &squares, EPS, &values.w, shape))?,
        outcome("gated", &plain, reference::linear(&values.x, &values.w, shape))?,
    ])
}

/// An update and the product behind it, of the first row of many and of the row alone: the same bits.
fn independence(gpu: &mut Gpu, n: usize, k: usize, kernel: SkinnyKernel) -> Result<Outcome, KernelError> {
    let shape = GemmShape { m: SKINNY_ROWS_MAX, n, k };
    let values = Values::new(gpu, shape);
    let together = update_and_scale(gpu, &values, shape, kernel)?;
    let alone = update_and_scale(gpu, &values.first_row(shape), GemmShape { m: 1, ..shape }, kernel)?;
    let equal = matches!((together, alone), (Some(together), Some(alone)) if together[..k] == alone[..]);
    let error = if equal { 0.0 } else { f64::INFINITY };
    Ok(Outcome { op: OP, case: case("update and scaled: a row alone", shape, kernel), error, limit: 0.0 })
}

/// An update and the product behind it against the models' own order: norm, rounded twice, then product. Roundings to bf16 of
/// other numbers in both, two of each, most of which cancel over the depth.
fn as_models_norm(gpu: &mut Gpu, kernel: SkinnyKernel) -> Result<Outcome, KernelError> {
    let shape = GemmShape { m: SKINNY_ROWS_MAX, n: 2048, k: 512 };
    let values = Values::new(gpu, shape);
    let updated = run_update(gpu, &values, shape, kernel)?;
    let found = update_and_scale(gpu, &values, shape, kernel)?;
    let residual = updated.map(|updated| updated.residual).unwrap_or_default();
    let normed = reference::rms_norm(&residual, &values.norm, EPS).into_iter().map(reference::rounded);
    let back = GemmShape { n: shape.k, k: shape.n, ..shape };
    let wanted = reference::linear(&normed.collect::<Vec<_>>(), &values.w, back);
    let error = found.map_or(f64::INFINITY, |found| relative_error(&found, &wanted));
    Ok(Outcome { op: OP, case: case("update and scaled as models round", shape, kernel), error, limit: TWO_ROUNDINGS })
}

/// What an update left, as f32.
#[derive(Clone)]
pub(super) struct Updated {
    pub(super) residual: Vec<f32>,
    pub(super) weighted: Vec<f32>,
    pub(super) squares: Vec<f32>,
}

fn run_update(
    gpu: &Gpu,
    values: &Values,
    shape: GemmShape,
    kernel: SkinnyKernel,
) -> Result<Option<Updated>, KernelError> {
    updated(gpu, values, shape, norm_tiles(shape.n), |update| gpu.kernels.skinny_update_by(update, kernel))
}

/// What `launch` writes, with `n_sums` sums of squares a row; none if it leaves a hole or writes out of place.
pub(super) fn updated(
    gpu: &Gpu,
    values: &Values,
    shape: GemmShape,
    n_sums: usize,
    launch: impl FnOnce(Update<'_>) -> Result<(), KernelError>,
) -> Result<Option<Updated>, KernelError> {
    let GemmShape { m, n, .. } = shape;
    let operands = Operands::new(gpu, values)?;
    let mut residual = gpu.guarded(values.residual.iter().map(|h| bf16::from_f32(*h)).collect())?;
    let (mut weighted, mut squares) = (gpu.poisoned(m * n)?, gpu.poisoned(m * n_sums)?);
    launch(Update {
        residual: residual.view(),
        weighted: weighted.view(),
        squares: squares.view(),
        norm: operands.norm.as_view(),
        x: operands.x.as_view(),
        w: operands.w.as_view().into(),
        shape,
    })?;
    let written = (gpu.written(&residual)?, gpu.written(&weighted)?, gpu.written(&squares)?);
    let (Some(residual), Some(weighted), Some(squares)) = written else { return Ok(None) };
    Ok(Some(Updated { residual: widened(&residual), weighted: widened(&weighted), squares }))
}

/// The update, then its weighted residual times the same weights the other way round, as logits.
fn update_and_scale(
    gpu: &Gpu,
    values: &Values,
    shape: GemmShape,
    kernel: SkinnyKernel,
) -> Result<Option<Vec<f32>>, KernelError> {
    let Some(updated) = run_update(gpu, values, shape, kernel)? else { return Ok(None) };
    let back = GemmShape { n: shape.k, k: shape.n, ..shape };
    let (x, w) = (gpu.upload_bf16(&updated.weighted)?, gpu.upload_bf16(&values.w)?);
    let squares = gpu.upload(&updated.squares)?;
    let mut y = gpu.poisoned(back.m * back.n)?;
    let linear = Linear { y: Output::F32(y.view()), x: x.as_view().into(), w: w.as_view().into(), shape: back };
    gpu.kernels.skinny_scaled_by(linear, RowScale { squares: squares.as_view(), tile: NORM_TILE, eps: EPS }, kernel)?;
    gpu.written(&y)
}

/// A product's operands.
pub(super) struct Values {
    pub(super) x: Vec<f32>,
    pub(super) w: Vec<f32>,
    pub(super) residual: Vec<f32>,
    pub(super) norm: Vec<f32>,
}

impl Values {
    /// Rows of four sizes, so that one's norm is not another's.
    pub(super) fn new(gpu: &mut Gpu, GemmShape { m, n, k }: GemmShape) -> Self {
        let mut rows = |width: usize| {
            let mut rows = gpu.noise.normals(m * width);
            for (idx, row) in rows.chunks_mut(width).enumerate() {
                row.iter_mut().for_each(|x| *x *= 2f32.powi(idx as i32 % 4 - 2));
            }
            rows
        };
        Self { x: rows(k), residual: rows(n), w: gpu.noise.normals(n * k), norm: gpu.noise.normals(n) }
    }

    fn first_row(&self, GemmShape { n, k, .. }: GemmShape) -> Self {
        let Self { x, w, residual, norm } = self;
        Self { x: x[..k].to_vec(), w: w.clone(), residual: residual[..n].to_vec(), norm: norm.clone() }
    }
}

/// Sums of squares as an update leaves them.
pub(super) fn row_squares(x: &[f32], k: usize) -> Vec<f32> {
    reference::weighted(x, &vec![1.0; k]).1
}

/// The same on the device.
pub(super) struct Operands {
    pub(super) x: CudaSlice<bf16>,
    pub(super) w: CudaSlice<bf16>,
    pub(super) norm: CudaSlice<bf16>,
}

impl Operands {
    pub(super) fn new(gpu: &Gpu, values: &Values) -> Result<Self, KernelError> {
        let Values { x, w, norm, .. } = values;
        Ok(Self { x: gpu.upload_bf16(x)?, w: gpu.upload_bf16(w)?, norm: gpu.upload_bf16(norm)? })
    }

    pub(super) fn linear<'a>(&'a self, y: Output<'a>, shape: GemmShape) -> Linear<'a> {
        Linear { y, x: self.x.as_view().into(), w: self.w.as_view().into(), shape }
    }
}
