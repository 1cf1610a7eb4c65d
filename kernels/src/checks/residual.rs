//! Comparisons of the product for any number of rows where it updates the residual stream or is scaled by its norm: every tile
//! against the reference and, where it does not split the depth, to the last bit against the first one; and one after the other
//! against the models' own norm.

use super::{
    Gpu, Outcome, TWO_ROUNDINGS,
    fixture::widened,
    linear::bits,
    relative_error,
    skinny::{EPS, FACTOR, Operands, Updated, Values, row_squares, updated},
};
use crate::{
    KernelError, gemm,
    gemm::{Depth, GemmPlan},
    launch::{Epilogue, GemmShape, NORM_TILE, UPDATE_ROWS_MAX, norm_tiles},
    linear::{Linear, Output, RowScale, Update},
    reference,
};

const OP: &str = "gemm_sm90 residual";
/// (m, n, k) of updates: few values, tiles of weights, of rows and of squares that end inside, depths that end inside a chunk,
/// all rows that there may be.
const UPDATES: [(usize, usize, usize); 5] =
    [(2, 24, 8), (9, 264, 136), (33, 312, 1032), (70, 136, 264), (UPDATE_ROWS_MAX, 520, 72)];
/// The same of what is scaled: n need not be a multiple of anything.
const SCALED: [(usize, usize, usize); 4] = [(2, 17, 8), (9, 33, 1032), (70, 301, 264), (UPDATE_ROWS_MAX, 130, 4104)];
/// The same where n is gate and up.
const GATED: [(usize, usize, usize); 3] = [(3, 16, 8), (33, 304, 1032), (UPDATE_ROWS_MAX, 272, 136)];

/// By every tile, where the chip has the kernel.
pub(super) fn run(gpu: &mut Gpu) -> Result<Vec<Outcome>, KernelError> {
    if gpu.kernels.properties().capability != (9, 0) {
        return Ok(Vec::new());
    }
    let mut outcomes = Vec::new();
    for (m, n, k) in UPDATES {
        outcomes.extend(updates(gpu, GemmShape { m, n, k })?);
    }
    for (m, n, k) in SCALED {
        for output in [Epilogue::Bf16, Epilogue::F32] {
            outcomes.extend(scaled(gpu, GemmShape { m, n, k }, output)?);
        }
    }
    for (m, n, k) in GATED {
        outcomes.extend(scaled(gpu, GemmShape { m, n, k }, Epilogue::Gated)?);
    }
    for m in [2, 17, 32] {
        outcomes.push(as_models_norm(gpu, m)?);
    }
    Ok(outcomes)
}

fn plans(gpu: &Gpu, shape: GemmShape, output: Epilogue) -> Vec<GemmPlan> {
    let all = gemm::all_plans(shape, output, Depth::MaySplit, gpu.kernels.properties().n_multiprocessors);
    all.into_iter().filter(|plan| plan.tile.scales()).collect()
}

fn case(what: &str, GemmShape { m, n, k }: GemmShape, plan: &GemmPlan) -> String {
    format!("{what}, m {m} n {n} k {k}, {:?} of {} rows", plan.config.entry, plan.rows)
}

/// The residual, the weighted residual, its squares, and the bits of all three, which are those of the first tile.
fn updates(gpu: &mut Gpu, shape: GemmShape) -> Result<Vec<Outcome>, KernelError> {
    let values = Values::new(gpu, shape);
    let product = reference::linear(&values.x, &values.w, shape);
    let wanted: Vec<f32> = values.residual.iter().zip(&product).map(|(h, product)| h + product).collect();
    // The first tile's tiles are the smallest: its sums of squares add up to any other's.
    let (mut outcomes, mut first) = (Vec::new(), None::<Updated>);
    for plan in plans(gpu, shape, Epilogue::Update) {
        let found = updated(gpu, &values, shape, shape.n.div_ceil(plan.rows), |update| {
            gpu.kernels.gemm_update_by(update, &plan)
        })?;
        let outcome = |what, error, limit| Outcome { op: OP, case: case(what, shape, &plan), error, limit };
        let Some(found) = found else {
            outcomes.push(outcome("a hole or a value out of place", f64::INFINITY, 0.0));
            continue;
        };
        // The rest against what was found: a sum of another order may round to the other neighbour.
        let (weighted, squares) = reference::weighted(&found.residual, &values.norm);
        let squares = in_tiles(&squares, shape.n, plan.rows);
        outcomes.push(outcome("residual", relative_error(&found.residual, &wanted), TWO_ROUNDINGS));
        outcomes.push(outcome("weighted residual", relative_error(&found.weighted, &weighted), 0.0));
        outcomes.push(outcome("squares of the residual", relative_error(&found.squares, &squares), FACTOR));
        if plan.tile.splits_depth() {
            continue;
        }
        let first = first.get_or_insert_with(|| found.clone());
        let wanted = [&first.residual[..], &first.weighted, &in_tiles(&first.squares, shape.n, plan.rows)].concat();
        let all = [found.residual, found.weighted, found.squares].concat();
        let n_different = bits(&all).iter().zip(bits(&wanted)).filter(|(a, b)| **a != *b).count();
        outcomes.push(outcome("update: the bits of the first tile", n_different as f64, 0.0));
    }
    Ok(outcomes)
}

/// A product with a norm's factor by every tile, against the reference and the first tile's bits.
fn scaled(gpu: &mut Gpu, shape: GemmShape, output: Epilogue) -> Result<Vec<Outcome>, KernelError> {
    let mut values = Values::new(gpu, shape);
    // Sums of the size of one: where the activation bends.
    values.w.iter_mut().for_each(|w| *w = reference::rounded(*w / (shape.k as f32).sqrt()));
    let squares = row_squares(&values.x, shape.k);
    let sums = reference::scaled_linear(&values.x, &squares, EPS, &values.w, shape);
    let (wanted, limit) = match output {
        Epilogue::F32 => (sums, 4.0 * 2f64.powi(-24) * (shape.k as f64).sqrt() + FACTOR),
        Epilogue::Gated => {
            let sums: Vec<f32> = sums.into_iter().map(reference::rounded).collect();
            (reference::silu_mul(&sums), TWO_ROUNDINGS)
        }
        Epilogue::Bf16 | Epilogue::Sum | Epilogue::Update => (sums, TWO_ROUNDINGS),
    };
    let (mut outcomes, mut first) = (Vec::new(), None);
    for (idx, plan) in plans(gpu, shape, output).into_iter().enumerate() {
        let tile = [16, 32, 64][idx % 3];
        let squares = in_tiles(&squares, shape.k, tile);
        let found = scaled_by(gpu, &values, (&squares, tile), (shape, output), &plan)?.unwrap_or_default();
        let outcome = |what, error, limit| Outcome { op: OP, case: case(what, shape, &plan), error, limit };
        outcomes.push(outcome("scaled", relative_error(&found, &wanted), limit));
        let found = bits(&found);
        if !plan.tile.splits_depth() {
            let n_different = f64::from(u8::from(*first.get_or_insert_with(|| found.clone()) != found));
            outcomes.push(outcome("scaled: the bits of the first tile", n_different, 0.0));
        }
    }
    Ok(outcomes)
}

/// Sums of 16 squares each of rows of `width` values, as sums of `tile` squares each, in the kernels' order.
pub(super) fn in_tiles(squares: &[f32], width: usize, tile: usize) -> Vec<f32> {
    let sum = |tiles: &[f32]| {
        let at = |idx: usize| tiles.get(idx).copied().unwrap_or(0.0);
        (at(0) + at(1)) + (at(2) + at(3))
    };
    squares.chunks(norm_tiles(width)).flat_map(|row| row.chunks(tile / NORM_TILE).map(sum)).collect()
}

/// An update and the product behind it, as an executor launches them, against the models' own order: norm, rounded twice, then
/// product. Roundings to bf16 of other numbers in both, two of each, most of which cancel over the depth.
fn as_models_norm(gpu: &mut Gpu, m: usize) -> Result<Outcome, KernelError> {
    let shape = GemmShape { m, n: 2048, k: 512 };
    let values = Values::new(gpu, shape);
    let operands = Operands::new(gpu, &values)?;
    let mut residual = gpu.upload_bf16(&values.residual)?;
    let (mut weighted, mut squares) = (gpu.random(m * shape.n)?, gpu.upload(&vec![0f32; m * norm_tiles(shape.n)])?);
    let update = plans(gpu, shape, Epilogue::Update)[0];
    let op = Update {
        residual: residual.as_view_mut(),
        weighted: weighted.as_view_mut(),
        squares: squares.as_view_mut(),
        norm: operands.norm.as_view(),
        x: operands.x.as_view(),
        w: operands.w.as_view().into(),
        shape,
    };
    gpu.kernels.gemm_update_by(op, &update)?;
    let back = GemmShape { n: shape.k, k: shape.n, ..shape };
    let mut y = gpu.poisoned(m * back.n)?;
    let linear =
        Linear { y: Output::Bf16(y.view()), x: weighted.as_view().into(), w: operands.w.as_view().into(), shape: back };
    let squares = squares.slice(..m * shape.n / update.rows);
    let scaled = plans(gpu, back, Epilogue::Bf16)[0];
    gpu.kernels.gemm_scaled_by(linear, RowScale { squares, tile: update.rows, eps: EPS }, &scaled)?;
    let residual = widened(&gpu.download(&residual)?);
    let normed = reference::rms_norm(&residual, &values.norm, EPS).into_iter().map(reference::rounded);
    let wanted = reference::linear(&normed.collect::<Vec<_>>(), &values.w, back);
    let error = gpu.written(&y)?.map_or(f64::INFINITY, |found| relative_error(&widened(&found), &wanted));
    let case = format!("update and scaled as models round, m {m}");
    Ok(Outcome { op: OP, case, error, limit: TWO_ROUNDINGS })
}

fn scaled_by(
    gpu: &Gpu,
    values: &Values,
    (squares, tile): (&[f32], usize),
    (shape, output): (GemmShape, Epilogue),
    plan: &GemmPlan,
) -> Result<Option<Vec<f32>>, KernelError> {
    let (operands, squares) = (Operands::new(gpu, values)?, gpu.upload(squares)?);
    let launch = |y| {
        let scale = RowScale { squares: squares.as_view(), tile, eps: EPS };
        gpu.kernels.gemm_scaled_by(operands.linear(y, shape), scale, plan)
    };
    let size = shape.m * shape.n;
    if output == Epilogue::F32 {
        let mut y = gpu.poisoned(size)?;
        launch(Output::F32(y.view()))?;
        return gpu.written(&y);
    }
    let is_activated = output == Epilogue::Gated;
    let mut y = gpu.poisoned(if is_activated { size / 2 } else { size })?;
    launch(if is_activated { Output::Gated(y.view()) } else { Output::Bf16(y.view()) })?;
    Ok(gpu.written(&y)?.map(|found| widened(&found)))
}
