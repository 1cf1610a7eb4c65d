//! Comparisons of matrix products: our kernels, cuBLASLt, and that a row's result does not depend on the rows beside it
//! where that is promised.

use cudarc::driver::CudaSlice;
use half::bf16;

use super::{Gpu, Outcome, TWO_ROUNDINGS, fixture::widened, relative_error};
use crate::{
    KernelError,
    blas::Algorithm,
    gemm,
    gemm::{Depth, GemmPlan},
    launch::{Epilogue, GemmShape, SKINNY_ROWS_MAX, SkinnyKernel},
    linear::{Linear, Output},
    reference,
};

/// (n, k): whole tiles, odd rows, depths that end inside a chunk, a step and a lane. None of a single value: what cancels in
/// it would count as an error.
const SIZES: [(usize, usize); 7] = [(64, 512), (17, 8), (3, 40), (33, 1032), (130, 2048), (300, 4104), (4500, 4096)];
/// Products at all row counts of which a row must be the same bits: (n, k).
const INVARIANT_SIZES: [(usize, usize); 4] = [(1, 8), (264, 72), (300, 1032), (776, 4096)];
/// Row counts on both sides of every variant's tile.
const ROW_COUNTS: [usize; 12] = [1, 2, 8, 9, 32, 33, 64, 65, 128, 129, 256, 700];

/// What multiplies.
#[derive(Clone, Copy, Debug)]
pub(super) enum By<'a> {
    Skinny(SkinnyKernel),
    Blas,
    Plan(&'a GemmPlan),
}

pub(super) fn run(gpu: &mut Gpu) -> Result<Vec<Outcome>, KernelError> {
    let mut outcomes = Vec::new();
    for kernel in skinny_kernels(gpu) {
        for (n, k) in SIZES {
            for m in [1, 2, 7, SKINNY_ROWS_MAX] {
                for output in [Epilogue::Bf16, Epilogue::F32] {
                    outcomes.push(product(gpu, GemmShape { m, n, k }, output, By::Skinny(kernel))?);
                }
            }
            outcomes.push(independence(gpu, n, k, kernel)?);
        }
    }
    for (m, n, k) in [(64, 128, 256), (100, 264, 512), (17, 512, 1032)] {
        for output in [Epilogue::Bf16, Epilogue::F32] {
            outcomes.push(product(gpu, GemmShape { m, n, k }, output, By::Blas)?);
        }
    }
    outcomes.push(sum(gpu, GemmShape { m: 200, n: 264, k: 512 })?);
    outcomes.extend(every_variant(gpu)?);
    Ok(outcomes)
}

/// A product that is added to what y holds.
fn sum(gpu: &mut Gpu, shape: GemmShape) -> Result<Outcome, KernelError> {
    let GemmShape { m, n, k } = shape;
    let (x, w, before) = (gpu.noise.normals(m * k), gpu.noise.normals(n * k), gpu.noise.normals(m * n));
    let (x_gpu, w_gpu, mut y) = (gpu.upload_bf16(&x)?, gpu.upload_bf16(&w)?, gpu.upload_bf16(&before)?);
    let op = Linear { y: Output::Sum(y.as_view_mut()), x: x_gpu.as_view().into(), w: w_gpu.as_view().into(), shape };
    gpu.blas.gemm(op, first_guess(shape))?;
    let product = reference::linear(&x, &w, shape);
    let wanted: Vec<f32> = before.iter().zip(&product).map(|(y, product)| y + product).collect();
    let error = relative_error(&widened(&gpu.download(&y)?), &wanted);
    Ok(Outcome { op: "gemm", case: format!("m {m} n {n} k {k} added to y"), error, limit: TWO_ROUNDINGS })
}

/// cuBLASLt's for the shape.
fn first_guess(shape: GemmShape) -> Algorithm {
    Algorithm { rows: shape.m, rank: 0 }
}

/// Those that this chip has.
pub(super) fn skinny_kernels(gpu: &Gpu) -> Vec<SkinnyKernel> {
    let best = SkinnyKernel::for_device(gpu.kernels.properties());
    if best == SkinnyKernel::Registers { vec![best] } else { vec![SkinnyKernel::Registers, best] }
}

/// The batch-invariant product, where the chip has it: the plans of several shapes, and each compilation of the kernel.
fn every_variant(gpu: &mut Gpu) -> Result<Vec<Outcome>, KernelError> {
    let Some(n_multiprocessors) = multiprocessors_of_hopper(gpu) else { return Ok(Vec::new()) };
    let mut outcomes = Vec::new();
    for output in [Epilogue::Bf16, Epilogue::F32] {
        for (m, n, k) in [(1, 17, 8), (9, 33, 1032), (100, 264, 512), (300, 130, 2048)] {
            let shape = GemmShape { m, n, k };
            let plan = GemmPlan::new(shape, output, n_multiprocessors)?;
            outcomes.push(product(gpu, shape, output, By::Plan(&plan))?);
        }
        let shape = GemmShape { m: 300, n: 264, k: 1032 };
        let mut plans = gemm::all_plans(shape, output, Depth::MaySplit, n_multiprocessors);
        plans.dedup_by_key(|plan| plan.config.entry);
        for plan in plans {
            outcomes.push(product(gpu, shape, output, By::Plan(&plan))?);
        }
    }
    Ok(outcomes)
}

/// The same bits at every row count and by every plan, some thousand products.
pub(super) fn run_invariance(gpu: &mut Gpu) -> Result<Vec<Outcome>, KernelError> {
    let Some(n_multiprocessors) = multiprocessors_of_hopper(gpu) else { return Ok(Vec::new()) };
    let mut outcomes = Vec::new();
    for output in [Epilogue::Bf16, Epilogue::F32] {
        for (n, k) in INVARIANT_SIZES {
            outcomes.push(same_bits(gpu, (n, k), output, n_multiprocessors)?);
        }
    }
    Ok(outcomes)
}

fn multiprocessors_of_hopper(gpu: &Gpu) -> Option<u32> {
    let properties = gpu.kernels.properties();
    (properties.capability == (9, 0)).then_some(properties.n_multiprocessors)
}

fn product(gpu: &mut Gpu, shape: GemmShape, output: Epilogue, by: By<'_>) -> Result<Outcome, KernelError> {
    let (x, w) = (gpu.noise.normals(shape.m * shape.k), gpu.noise.normals(shape.n * shape.k));
    let found = multiply(gpu, &Operands::new(gpu, &x, &w)?, shape, output, by)?;
    let error = found.map_or(f64::INFINITY, |found| relative_error(&found, &reference::linear(&x, &w, shape)));
    let (op, how) = match by {
        By::Skinny(kernel) => ("skinny_gemm", format!("{kernel:?}")),
        By::Blas => ("gemm", "cuBLASLt".to_owned()),
        By::Plan(plan) => ("gemm_sm90", format!("{:?} of {} rows", plan.config.entry, plan.rows)),
    };
    let case = format!("m {} n {} k {} to {output:?}, {how}", shape.m, shape.n, shape.k);
    // f32 sums lose 2^-24 of their size a term; random signs make that grow with the root. Four times as margin.
    let limit = match output {
        Epilogue::Bf16 | Epilogue::Sum | Epilogue::Gated | Epilogue::Update => TWO_ROUNDINGS,
        Epilogue::F32 => 4.0 * 2f64.powi(-24) * (shape.k as f64).sqrt(),
    };
    Ok(Outcome { op, case, error, limit })
}

/// The first row of many must equal the row alone, to the last bit.
fn independence(gpu: &mut Gpu, n: usize, k: usize, kernel: SkinnyKernel) -> Result<Outcome, KernelError> {
    let (x, w) = (gpu.noise.normals(SKINNY_ROWS_MAX * k), gpu.noise.normals(n * k));
    let (operands, by) = (Operands::new(gpu, &x, &w)?, By::Skinny(kernel));
    let together = multiply(gpu, &operands, GemmShape { m: SKINNY_ROWS_MAX, n, k }, Epilogue::F32, by)?;
    let alone = multiply(gpu, &operands, GemmShape { m: 1, n, k }, Epilogue::F32, by)?;
    let equal = matches!((together, alone), (Some(together), Some(alone)) if together[..n] == alone[..]);
    let error = if equal { 0.0 } else { f64::INFINITY };
    Ok(Outcome { op: "skinny_gemm", case: format!("n {n} k {k}, {kernel:?}: a row alone"), error, limit: 0.0 })
}

/// Rows of every count, by every plan, must equal the same rows of the largest product. The error is the number of products
/// that differ.
fn same_bits(
    gpu: &mut Gpu,
    (n, k): (usize, usize),
    output: Epilogue,
    n_multiprocessors: u32,
) -> Result<Outcome, KernelError> {
    let most = ROW_COUNTS[ROW_COUNTS.len() - 1];
    let (x, w) = (gpu.noise.normals(most * k), gpu.noise.normals(n * k));
    let operands = Operands::new(gpu, &x, &w)?;
    let plans_of = |m| gemm::all_plans(GemmShape { m, n, k }, output, Depth::Whole, n_multiprocessors);
    let whole = multiply(gpu, &operands, GemmShape { m: most, n, k }, output, By::Plan(&plans_of(most)[0]))?;
    let (mut n_different, mut n_products) = (0, 0);
    for m in ROW_COUNTS {
        for plan in plans_of(m) {
            let part = multiply(gpu, &operands, GemmShape { m, n, k }, output, By::Plan(&plan))?;
            let equal = matches!((&whole, &part), (Some(whole), Some(part)) if bits(&whole[..m * n]) == bits(part));
            n_different += usize::from(!equal);
            n_products += 1;
        }
    }
    let case = format!("n {n} k {k} to {output:?}: the same rows in {n_products} products");
    Ok(Outcome { op: "gemm_sm90", case, error: n_different as f64, limit: 0.0 })
}

pub(super) fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// A product's operands on the device; the first rows of x are multiplied.
pub(super) struct Operands {
    pub(super) x: CudaSlice<bf16>,
    pub(super) w: CudaSlice<bf16>,
}

impl Operands {
    pub(super) fn new(gpu: &Gpu, x: &[f32], w: &[f32]) -> Result<Self, KernelError> {
        Ok(Self { x: gpu.upload_bf16(x)?, w: gpu.upload_bf16(w)? })
    }
}

pub(super) fn multiply(
    gpu: &Gpu,
    operands: &Operands,
    shape: GemmShape,
    output: Epilogue,
    by: By<'_>,
) -> Result<Option<Vec<f32>>, KernelError> {
    let size = shape.m * shape.n;
    let run = |y| {
        let op = Linear { y, x: operands.x.slice(..shape.m * shape.k).into(), w: operands.w.as_view().into(), shape };
        match by {
            By::Skinny(kernel) => gpu.kernels.skinny_gemm_by(op, kernel),
            By::Blas => gpu.blas.gemm(op, first_guess(shape)),
            By::Plan(plan) => gpu.kernels.gemm_by_plan(op, plan),
        }
    };
    match output {
        Epilogue::Bf16 => {
            let mut y = gpu.poisoned(size)?;
            run(Output::Bf16(y.view()))?;
            Ok(gpu.written(&y)?.map(|found| widened(&found)))
        }
        Epilogue::F32 => {
            let mut y = gpu.poisoned(size)?;
            run(Output::F32(y.view()))?;
            gpu.written(&y)
        }
        Epilogue::Gated => {
            let mut y = gpu.poisoned(size / 2)?;
            run(Output::Gated(y.view()))?;
            Ok(gpu.written(&y)?.map(|found| widened(&found)))
        }
        Epilogue::Sum | Epilogue::Update => unreachable!("compared where the residual is"),
    }
}
