//! Products with weights of four bits in groups of 128 at the shapes of a step of Llama-3.1-8B: by the tile that costs least by count,
//! or by every tile; and widened to e4m3 first, with rows that are so already. Weights are rotated so that none is found in the L2 cache.

use anyhow::Result;
use stoker_kernels::{
    checks::Gpu,
    choose::{GemmKernel, ScaledBy},
    gemm::{self, Depth, GemmPlan},
    int4::{GroupSize, Int4Layout, Int4Matrix, ScaleFormat},
    launch::{Epilogue, GemmShape, SkinnyKernel},
    linear::{Linear, Operand, Output},
    quantise::{CodeSums, QuantiseRows, QuantisedRows, WidenInt4},
};

use crate::{
    cases::{HEADS, HIDDEN, INTERMEDIATE, turns},
    clock,
    figures::{Report, Work},
};

pub(crate) fn run(gpu: &mut Gpu, report: &mut Report, every_tile: bool) -> Result<()> {
    let layers = [
        ("qkv", HEADS.qkv_width(), HIDDEN, Epilogue::Bf16),
        ("o", HIDDEN, HIDDEN, Epilogue::Bf16),
        ("gate_up", 2 * INTERMEDIATE, HIDDEN, Epilogue::Gated),
        ("down", HIDDEN, INTERMEDIATE, Epilogue::Bf16),
    ];
    if gpu.kernels.properties().capability != (9, 0) {
        return Ok(());
    }
    for (layer, n, k, epilogue) in layers {
        for m in [256, 384, 512, 2048, 8192] {
            let name = format!("kernel_widened_{layer}_m{m}");
            if report.wants(&name) {
                widened_product(gpu, report, &name, GemmShape { m, n, k }, epilogue)?;
            }
        }
        for m in [1, 8, 16, 32, 64, 128, 256, 512, 2048, 8192] {
            let name = format!("kernel_int4_e4m3_{layer}_m{m}");
            if report.wants(&name) {
                beside_e4m3(gpu, report, &Case { name: &name, shape: GemmShape { m, n, k }, epilogue, every_tile })?;
            }
        }
        let ring = GemmKernel::Skinny(SkinnyKernel::for_device(gpu.kernels.properties()));
        for (what, kernel) in [("", ring), ("_e4m3", GemmKernel::QuantisingRing)] {
            let name = format!("kernel_int4{what}_ring_{layer}");
            if report.wants(&name) {
                one_row(gpu, report, &name, (GemmShape { m: 1, n, k }, epilogue), kernel)?;
            }
        }
        for m in [1, 8, 16, 32, 64, 128, 256, 384, 512, 2048, 8192] {
            let name = format!("kernel_int4_{layer}_m{m}");
            if report.wants(&name) {
                product(gpu, report, &Case { name: &name, shape: GemmShape { m, n, k }, epilogue, every_tile })?;
            }
        }
    }
    Ok(())
}

/// As many random matrices as do not fit the cache together.
fn rotated(gpu: &mut Gpu, n: usize, k: usize) -> Result<Vec<Int4Matrix>> {
    let layout = Int4Layout { n, k, group: GroupSize::G128, scales: ScaleFormat::F16 };
    let device = gpu.kernels.device().clone();
    let matrix = |_| Int4Matrix::random(&device, layout, &mut gpu.noise, 0.02);
    Ok((0..turns(layout.n_bytes())).map(matrix).collect::<Result<_, _>>()?)
}

/// What is timed.
struct Case<'a> {
    name: &'a str,
    shape: GemmShape,
    epilogue: Epilogue,
    every_tile: bool,
}

/// With rows in bf16.
fn product(gpu: &mut Gpu, report: &mut Report, case: &Case<'_>) -> Result<()> {
    let &Case { shape, epilogue, every_tile, .. } = case;
    let x = gpu.random(shape.m * shape.k)?;
    let (n, group) = (gpu.kernels.properties().n_multiprocessors, GroupSize::G128);
    let plans = match every_tile {
        true => gemm::all_plans_int4(shape, epilogue, Depth::MaySplit, n, group),
        false => {
            let tile = gemm::candidates_int4(shape, epilogue, Depth::MaySplit, n)[0];
            vec![tile.plan_int4(shape, epilogue, n, group)]
        }
    };
    // Those of few columns read the weights anew for each of theirs.
    let plans = plans.into_iter().filter(|plan| !every_tile || plan.n_m_tiles <= shape.m.div_ceil(128));
    time_plans(gpu, report, case, || x.as_view().into(), plans)
}

/// With rows in e4m3.
fn beside_e4m3(gpu: &mut Gpu, report: &mut Report, case: &Case<'_>) -> Result<()> {
    let &Case { shape, epilogue, every_tile, .. } = case;
    let GemmShape { m, k, .. } = shape;
    let (rows, device) = (gpu.random(m * k)?, gpu.kernels.device().clone());
    let mut x = QuantisedRows::zeros(&device, m * k, m)?.beside_codes(&device, CodeSums::of_rows(k, m))?;
    let out = x.rows_beside_codes_mut(m, k);
    gpu.kernels.quantise_rows(QuantiseRows { out, x: rows.as_view(), width: k })?;
    let n = gpu.kernels.properties().n_multiprocessors;
    let plans = match every_tile {
        true => gemm::all_plans_beside_e4m3(shape, epilogue, Depth::MaySplit, n),
        false => {
            let tile = gemm::candidates_beside_e4m3(shape, epilogue, Depth::MaySplit, n)[0];
            vec![tile.plan_beside_e4m3(shape, epilogue, n)]
        }
    };
    let plans = plans.into_iter().filter(|plan| !every_tile || plan.n_m_tiles <= m.div_ceil(64));
    time_plans(gpu, report, case, || Operand::E4m3(x.rows_beside_codes(m, k)), plans)
}

/// One row in bf16, through a ring.
fn one_row(
    gpu: &mut Gpu,
    report: &mut Report,
    name: &str,
    (shape, epilogue): (GemmShape, Epilogue),
    kernel: GemmKernel,
) -> Result<()> {
    let GemmShape { n, k, .. } = shape;
    let (w, x, mut y) = (rotated(gpu, n, k)?, gpu.random(k)?, gpu.random(n)?);
    let us = clock::time(gpu, 24, |i| {
        let y = match epilogue {
            Epilogue::Gated => Output::Gated(y.slice_mut(..n / 2)),
            _ => Output::Bf16(y.slice_mut(..)),
        };
        let w = Operand::Int4(w[i % w.len()].view());
        gpu.kernels.linear(None, Linear { y, x: x.as_view().into(), w, shape }, None, kernel)
    })?;
    report.add(name, "stoker", Work::Bytes(w[0].layout().n_bytes() as f64), us);
    Ok(())
}

fn time_plans<'x>(
    gpu: &mut Gpu,
    report: &mut Report,
    case: &Case<'_>,
    x: impl Fn() -> Operand<'x>,
    plans: impl Iterator<Item = GemmPlan>,
) -> Result<()> {
    let &Case { name, shape, epilogue, every_tile } = case;
    let GemmShape { m, n, k } = shape;
    let (w, mut y) = (rotated(gpu, n, k)?, gpu.random(m * n)?);
    let bytes = w[0].layout().n_bytes() as f64;
    let work = if m < 64 { Work::Bytes(bytes) } else { Work::Flops(2.0 * (m * n * k) as f64) };
    let size = if epilogue == Epilogue::Gated { m * n / 2 } else { m * n };
    for plan in plans {
        let us = clock::time(gpu, if m < 256 { 24 } else { 4 }, |i| {
            let y = y.slice_mut(..size);
            let y = if epilogue == Epilogue::Gated { Output::Gated(y) } else { Output::Bf16(y) };
            let op = Linear { y, x: x(), w: Operand::Int4(w[i % w.len()].view()), shape };
            gpu.kernels.gemm_by_plan(op, &plan)
        })?;
        let name = if every_tile { format!("{name}_{}", plan.tile) } else { name.to_owned() };
        report.add(&name, "stoker", work, us);
    }
    Ok(())
}

/// Widening alone, and with the product behind it.
fn widened_product(gpu: &mut Gpu, report: &mut Report, name: &str, shape: GemmShape, epilogue: Epilogue) -> Result<()> {
    let GemmShape { m, n, k } = shape;
    let w = rotated(gpu, n, k)?;
    let (layout, device) = (w[0].layout(), gpu.kernels.device().clone());
    let (rows, mut y) = (gpu.random(m * k)?, gpu.random(m * n)?);
    let (mut x, mut wide) = (QuantisedRows::zeros(&device, m * k, m)?, QuantisedRows::zeros(&device, n * k, n)?);
    gpu.kernels.quantise_rows(QuantiseRows { out: x.rows_mut(m, k), x: rows.as_view(), width: k })?;
    let n_multiprocessors = gpu.kernels.properties().n_multiprocessors;
    let plan = gemm::candidates_e4m3(ScaledBy::Rows, shape, epilogue, Depth::MaySplit, n_multiprocessors)[0].plan_e4m3(
        ScaledBy::Rows,
        shape,
        epilogue,
        n_multiprocessors,
    );
    let size = if epilogue == Epilogue::Gated { m * n / 2 } else { m * n };
    let us = clock::time(gpu, 8, |i| {
        gpu.kernels.widen_int4(WidenInt4 { out: wide.rows_mut(n, k), w: w[i % w.len()].view() })?;
        let y = y.slice_mut(..size);
        let y = if epilogue == Epilogue::Gated { Output::Gated(y) } else { Output::Bf16(y) };
        let op = Linear { y, x: Operand::E4m3(x.all()), w: Operand::E4m3(wide.rows(n, k)), shape };
        gpu.kernels.gemm_by_plan(op, &plan)
    })?;
    report.add(name, "stoker", Work::Flops(2.0 * (m * n * k) as f64), us);
    let alone = clock::time(gpu, 8, |i| {
        gpu.kernels.widen_int4(WidenInt4 { out: wide.rows_mut(n, k), w: w[i % w.len()].view() })
    })?;
    report.add(&format!("{name}_alone"), "stoker", Work::Bytes((layout.n_bytes() + n * k) as f64), alone);
    Ok(())
}
