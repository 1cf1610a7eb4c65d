//! Comparisons of the product that activates gate and up itself: with the reference, and to the last bit with the product and
//! the activation that it stands for.

use super::{
    Gpu, Outcome, TWO_ROUNDINGS,
    fixture::widened,
    linear::{By, Operands, bits, multiply},
    relative_error,
};
use crate::{
    KernelError, bf16, gemm,
    gemm::{Depth, GemmPlan},
    launch::{Epilogue, GemmShape},
    linear::{Linear, Output},
    pointwise::SiluMul,
    reference,
};

/// (m, n, k): one row and few, tiles of every variant that end inside, depths that end inside a chunk.
const SHAPES: [(usize, usize, usize); 5] =
    [(1, 16, 8), (9, 48, 1032), (70, 272, 136), (300, 304, 264), (129, 1552, 512)];

/// By every plan, where the chip has the kernel.
pub(super) fn run(gpu: &mut Gpu) -> Result<Vec<Outcome>, KernelError> {
    let properties = gpu.kernels.properties();
    if properties.capability != (9, 0) {
        return Ok(Vec::new());
    }
    let mut outcomes = Vec::new();
    for (m, n, k) in SHAPES {
        let case = Case::new(gpu, GemmShape { m, n, k })?;
        for plan in gemm::all_plans(case.shape, Epilogue::Gated, Depth::MaySplit, properties.n_multiprocessors) {
            outcomes.extend(case.check(gpu, plan)?);
        }
    }
    Ok(outcomes)
}

struct Case {
    shape: GemmShape,
    operands: Operands,
    /// By the reference.
    wanted: Vec<f32>,
    /// By a product and an activation behind it.
    apart: Vec<f32>,
}

impl Case {
    fn new(gpu: &mut Gpu, shape: GemmShape) -> Result<Self, KernelError> {
        let GemmShape { m, n, k } = shape;
        // Sums of deviation 2: on both sides of where the activation bends.
        let scale = 2.0 / (k as f32).sqrt();
        let x = gpu.noise.normals(m * k);
        let w: Vec<f32> = gpu.noise.normals(n * k).iter().map(|w| reference::rounded(w * scale)).collect();
        let sums: Vec<f32> = reference::linear(&x, &w, shape).into_iter().map(reference::rounded).collect();
        let operands = Operands::new(gpu, &x, &w)?;
        Ok(Self { shape, wanted: reference::silu_mul(&sums), apart: apart(gpu, &operands, shape)?, operands })
    }

    fn check(&self, gpu: &Gpu, plan: GemmPlan) -> Result<Vec<Outcome>, KernelError> {
        const OP: &str = "gemm_sm90 gated";
        let GemmShape { m, n, k } = self.shape;
        let found = multiply(gpu, &self.operands, self.shape, Epilogue::Gated, By::Plan(&plan))?.unwrap_or_default();
        let case = format!("m {m} n {n} k {k}, {:?} of {} rows", plan.config.entry, plan.rows);
        let mut outcomes = Vec::new();
        if !plan.tile.splits_depth() {
            let n_different = f64::from(u8::from(bits(&found) != bits(&self.apart)));
            let case = format!("{case}: the bits of two kernels");
            outcomes.push(Outcome { op: OP, case, error: n_different, limit: 0.0 });
        }
        outcomes.push(Outcome { op: OP, case, error: relative_error(&found, &self.wanted), limit: TWO_ROUNDINGS });
        Ok(outcomes)
    }
}

fn apart(gpu: &Gpu, operands: &Operands, shape: GemmShape) -> Result<Vec<f32>, KernelError> {
    let GemmShape { m, n, .. } = shape;
    let (mut gate_up, mut out) = (gpu.poisoned::<bf16>(m * n)?, gpu.poisoned::<bf16>(m * n / 2)?);
    let (x, w) = (operands.x.as_view().into(), operands.w.as_view().into());
    let plan = GemmPlan::new(shape, Epilogue::Bf16, gpu.kernels.properties().n_multiprocessors)?;
    gpu.kernels.gemm_by_plan(Linear { y: Output::Bf16(gate_up.view()), x, w, shape }, &plan)?;
    gpu.kernels.silu_mul(SiluMul { out: out.view(), gate_up: gate_up.view().as_view(), width: n / 2 })?;
    Ok(gpu.written(&out)?.map(|found| widened(&found)).unwrap_or_default())
}
