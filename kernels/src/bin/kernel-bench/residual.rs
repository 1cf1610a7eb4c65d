//! GEMMs with the norm or the addition of the residual stream inside, by the tile that costs least by count; the same GEMMs alone
//! stand beside them in `cases::linear`.

use anyhow::Result;
use stoker_kernels::{
    CudaSlice, KernelError, bf16,
    checks::Gpu,
    gemm::{self, Depth, GemmPlan},
    launch::{Epilogue, GemmShape, norm_tiles},
    linear::{Linear, Output, RowScale, Update},
};

use crate::{
    cases::{HEADS, HIDDEN, INTERMEDIATE, turns},
    clock,
    figures::{Report, Work},
};

const EPS: f32 = 1e-5;
/// Values of a sum of squares: the weight rows of most updates' tiles.
const TILE: usize = 64;

/// Updates and what is scaled, at the row counts of decoding.
pub(crate) fn run(gpu: &mut Gpu, report: &mut Report) -> Result<()> {
    for m in [8, 16, 32, 64, 128] {
        for (layer, k) in [("o", HIDDEN), ("down", INTERMEDIATE)] {
            update(gpu, report, &format!("kernel_update_{layer}_m{m}"), GemmShape { m, n: HIDDEN, k })?;
        }
        for (layer, n, output) in
            [("qkv", HEADS.qkv_width(), Epilogue::Bf16), ("gate_up", 2 * INTERMEDIATE, Epilogue::Gated)]
        {
            let name = format!("kernel_scaled_{layer}_m{m}");
            scaled(gpu, report, &name, (GemmShape { m, n, k: HIDDEN }, output))?;
        }
    }
    Ok(())
}

fn update(gpu: &mut Gpu, report: &mut Report, name: &str, shape: GemmShape) -> Result<()> {
    let Some(plan) = plan(gpu, shape, Epilogue::Update).filter(|_| report.wants(name)) else { return Ok(()) };
    let GemmShape { m, n, k } = shape;
    let weights = weights(gpu, n * k)?;
    let (x, norm, mut squares) = (gpu.random(m * k)?, gpu.random(n)?, gpu.upload(&vec![0f32; m * norm_tiles(n)])?);
    let (mut residual, mut weighted) = (gpu.random(m * n)?, gpu.random(m * n)?);
    let mut op = |turn: usize, run: &dyn Fn(Update<'_>) -> Result<(), KernelError>| {
        run(Update {
            residual: residual.as_view_mut(),
            weighted: weighted.as_view_mut(),
            squares: squares.as_view_mut(),
            norm: norm.as_view(),
            x: x.as_view(),
            w: weights[turn].as_view().into(),
            shape,
        })
    };
    let us = clock::time(gpu, 20, |i| op(i % weights.len(), &|op| gpu.kernels.gemm_update_by(op, &plan)))?;
    report.add(name, "stoker", Work::Bytes((2 * n * k) as f64), us);
    Ok(())
}

fn scaled(gpu: &mut Gpu, report: &mut Report, name: &str, (shape, output): (GemmShape, Epilogue)) -> Result<()> {
    let Some(plan) = plan(gpu, shape, output).filter(|_| report.wants(name)) else { return Ok(()) };
    let GemmShape { m, n, k } = shape;
    let weights = weights(gpu, n * k)?;
    let (x, squares) = (gpu.random(m * k)?, gpu.upload(&vec![1f32; m * k / TILE])?);
    let is_activated = output == Epilogue::Gated;
    let mut y = gpu.random(if is_activated { m * n / 2 } else { m * n })?;
    let mut op = |turn: usize, run: &dyn Fn(Linear<'_>) -> Result<(), KernelError>| {
        let y = y.as_view_mut();
        let y = if is_activated { Output::Gated(y) } else { Output::Bf16(y) };
        run(Linear { y, x: x.as_view().into(), w: weights[turn].as_view().into(), shape })
    };
    let us = clock::time(gpu, 20, |i| {
        op(i % weights.len(), &|op| {
            gpu.kernels.gemm_scaled_by(op, RowScale { squares: squares.as_view(), tile: TILE, eps: EPS }, &plan)
        })
    })?;
    report.add(name, "stoker", Work::Bytes((2 * n * k) as f64), us);
    Ok(())
}

/// Of the tile that costs least by count, where the chip has the kernel.
fn plan(gpu: &Gpu, shape: GemmShape, epilogue: Epilogue) -> Option<GemmPlan> {
    let properties = gpu.kernels.properties();
    let tiles = gemm::candidates(shape, epilogue, Depth::MaySplit, properties.n_multiprocessors);
    let tile = tiles.into_iter().find(|tile| tile.scales()).filter(|_| properties.capability == (9, 0))?;
    Some(tile.plan(shape, epilogue, properties.n_multiprocessors))
}

/// More than the L2 cache holds.
fn weights(gpu: &mut Gpu, len: usize) -> Result<Vec<CudaSlice<bf16>>, KernelError> {
    (0..turns(2 * len)).map(|_| gpu.random(len)).collect()
}
