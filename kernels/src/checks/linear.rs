//! Comparisons of matrix products: our kernel for few rows, cuBLASLt above, and that a row's result does not depend on the
//! rows beside it.

use super::{Gpu, Outcome, TWO_ROUNDINGS, fixture::widened, relative_error};
use crate::{
    KernelError,
    launch::{GemmShape, OutputType, SKINNY_ROWS_MAX, SkinnyKernel},
    linear::{Linear, Output},
    reference,
};

/// (n, k): whole tiles, odd rows, depths that end inside a chunk, a step and a lane.
const SIZES: [(usize, usize); 7] = [(64, 512), (17, 8), (1, 40), (33, 1032), (130, 2048), (300, 4104), (4500, 4096)];

pub(super) fn run(gpu: &mut Gpu) -> Result<Vec<Outcome>, KernelError> {
    let mut outcomes = Vec::new();
    for kernel in skinny_kernels(gpu) {
        for (n, k) in SIZES {
            for m in [1, 2, 7, 8, 9, 16] {
                for output in [OutputType::Bf16, OutputType::F32] {
                    outcomes.push(product(gpu, GemmShape { m, n, k }, output, Some(kernel))?);
                }
            }
            outcomes.push(independence(gpu, n, k, kernel)?);
        }
    }
    for (m, n, k) in [(64, 128, 256), (100, 264, 512), (17, 512, 1032)] {
        for output in [OutputType::Bf16, OutputType::F32] {
            outcomes.push(product(gpu, GemmShape { m, n, k }, output, None)?);
        }
    }
    outcomes.push(sum(gpu, GemmShape { m: 200, n: 264, k: 512 })?);
    Ok(outcomes)
}

/// A product that is added to what y holds.
fn sum(gpu: &mut Gpu, shape: GemmShape) -> Result<Outcome, KernelError> {
    let GemmShape { m, n, k } = shape;
    let (x, w, before) = (gpu.noise.normals(m * k), gpu.noise.normals(n * k), gpu.noise.normals(m * n));
    let (x_gpu, w_gpu, mut y) = (gpu.upload_bf16(&x)?, gpu.upload_bf16(&w)?, gpu.upload_bf16(&before)?);
    let op = Linear { y: Output::Sum(y.as_view_mut()), x: x_gpu.as_view(), w: w_gpu.as_view(), shape };
    gpu.blas.gemm(op)?;
    let product = reference::linear(&x, &w, shape);
    let wanted: Vec<f32> = before.iter().zip(&product).map(|(y, product)| y + product).collect();
    let error = relative_error(&widened(&gpu.download(&y)?), &wanted);
    Ok(Outcome { op: "gemm", case: format!("m {m} n {n} k {k} added to y"), error, limit: TWO_ROUNDINGS })
}

/// Those that this chip has.
fn skinny_kernels(gpu: &Gpu) -> Vec<SkinnyKernel> {
    let best = SkinnyKernel::for_device(gpu.kernels.properties());
    if best == SkinnyKernel::Registers { vec![best] } else { vec![SkinnyKernel::Registers, best] }
}

/// By our kernel, or by cuBLASLt where none is given.
fn product(
    gpu: &mut Gpu,
    shape: GemmShape,
    output: OutputType,
    kernel: Option<SkinnyKernel>,
) -> Result<Outcome, KernelError> {
    let (x, w) = (gpu.noise.normals(shape.m * shape.k), gpu.noise.normals(shape.n * shape.k));
    let found = multiply(gpu, (&x, &w), shape, output, kernel)?;
    let error = found.map_or(f64::INFINITY, |found| relative_error(&found, &reference::linear(&x, &w, shape)));
    let op = if kernel.is_some() { "skinny_gemm" } else { "gemm" };
    let case = format!("m {} n {} k {} to {output:?}, {kernel:?}", shape.m, shape.n, shape.k);
    // f32 sums lose 2^-24 of their size a term; random signs make that grow with the root. Four times as margin.
    let limit = match output {
        OutputType::Bf16 => TWO_ROUNDINGS,
        OutputType::F32 => 4.0 * 2f64.powi(-24) * (shape.k as f64).sqrt(),
    };
    Ok(Outcome { op, case, error, limit })
}

/// The first row of 16 must equal the row alone, to the last bit.
fn independence(gpu: &mut Gpu, n: usize, k: usize, kernel: SkinnyKernel) -> Result<Outcome, KernelError> {
    let (x, w) = (gpu.noise.normals(SKINNY_ROWS_MAX * k), gpu.noise.normals(n * k));
    let together = multiply(gpu, (&x, &w), GemmShape { m: SKINNY_ROWS_MAX, n, k }, OutputType::F32, Some(kernel))?;
    let alone = multiply(gpu, (&x[..k], &w), GemmShape { m: 1, n, k }, OutputType::F32, Some(kernel))?;
    let equal = matches!((together, alone), (Some(together), Some(alone)) if together[..n] == alone[..]);
    let error = if equal { 0.0 } else { f64::INFINITY };
    Ok(Outcome { op: "skinny_gemm", case: format!("n {n} k {k}, {kernel:?}: a row alone"), error, limit: 0.0 })
}

fn multiply(
    gpu: &Gpu,
    (x, w): (&[f32], &[f32]),
    shape: GemmShape,
    output: OutputType,
    kernel: Option<SkinnyKernel>,
) -> Result<Option<Vec<f32>>, KernelError> {
    let (x, w) = (gpu.upload_bf16(x)?, gpu.upload_bf16(w)?);
    let size = shape.m * shape.n;
    let run = |y| {
        let op = Linear { y, x: x.as_view(), w: w.as_view(), shape };
        match kernel {
            Some(kernel) => gpu.kernels.skinny_gemm_by(op, kernel),
            None => gpu.blas.gemm(op),
        }
    };
    match output {
        OutputType::Bf16 => {
            let mut y = gpu.poisoned(size)?;
            run(Output::Bf16(y.view()))?;
            Ok(gpu.written(&y)?.map(|found| widened(&found)))
        }
        OutputType::F32 => {
            let mut y = gpu.poisoned(size)?;
            run(Output::F32(y.view()))?;
            gpu.written(&y)
        }
    }
}
