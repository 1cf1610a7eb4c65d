//! Comparisons of products with weights of four bits: each weight by itself, to the last bit of its published formula in f64; products
//! of every tile with their references; that a row does not depend on its neighbours, nor on the tile; the residual stream inside. What is
//! widened to e4m3, to the bit, and products with it right behind it.

use cudarc::driver::{CudaSlice, CudaView};

use super::{
    Gpu, Outcome, TWO_ROUNDINGS,
    fixture::widened,
    linear::bits,
    relative_error,
    skinny::{EPS, FACTOR, Values, row_squares},
};
use crate::{
    KernelError, bf16,
    choose::ScaledBy,
    codes,
    gemm::{self, Depth, GemmPlan},
    int4::{GroupSize, Int4Layout, Int4Matrix, ScaleFormat},
    launch::{self, Epilogue, GemmShape, NORM_TILE, SKINNY_INT4_ROWS_MAX, SkinnyKernel, norm_tiles},
    linear::{Linear, Operand, Output, RowScale, Update},
    pointwise::AddRmsNorm,
    quantise::{
        BESIDE_CODES_MAX, CodeSums, E4M3_MAX, QuantiseRows, QuantisedMut, QuantisedNorm, QuantisedRows, WidenInt4,
    },
    ranks::NormOf,
    reference,
};

const OP: &str = "gemm_int4_sm90";
/// (m, n, k): row counts on both sides of every tile; outputs, depths and groups that end inside of one.
const SHAPES: [(usize, usize, usize); 22] = [
    (1, 64, 128),
    (1, 48, 14_336),
    (1, 8464, 256),
    (5, 304, 4096),
    (8, 96, 192),
    (12, 4096, 1024),
    (2, 17, 64),
    (3, 16, 32),
    (4, 272, 4128),
    (7, 48, 1056),
    (8, 4096, 512),
    (9, 272, 192),
    (15, 33, 4096),
    (16, 304, 1024),
    (17, 144, 416),
    (33, 1552, 640),
    (64, 80, 2048),
    (65, 272, 160),
    (128, 112, 1088),
    (200, 304, 512),
    (256, 48, 4096),
    (1000, 176, 384),
];
/// (m, n, k) of products with what was widened; outputs, depths and chunks of a block that end inside of one.
const WIDENED_SHAPES: [(usize, usize, usize); 9] = [
    (256, 16, 16),
    (256, 17, 64),
    (257, 304, 4096),
    (300, 48, 14_336),
    (384, 1, 208),
    (400, 33, 2064),
    (512, 272, 1056),
    (600, 1552, 640),
    (1000, 4096, 144),
];
/// (m, n, k) of products of rows in e4m3: on both sides of every tile, outputs and halves of the depth that end inside of one.
const BESIDE_SHAPES: [(usize, usize, usize); 14] = [
    (1, 16, 128),
    (7, 48, 384),
    (16, 4096, 1024),
    (32, 6144, 4096),
    (33, 17, 256),
    (40, 304, 4096),
    (64, 48, 14_336),
    (65, 1552, 640),
    (128, 4096, 14_336),
    (129, 272, 128),
    (200, 33, 2048),
    (256, 28_672, 512),
    (512, 272, 1152),
    (768, 1552, 640),
];
/// (n, k) of rows at all counts.
const INVARIANT_SIZES: [(usize, usize); 3] = [(16, 32), (272, 1056), (768, 2048)];
/// The same beside rows in e4m3: groups that are fewer than a product of the ring takes, that end inside of a stage, and that are stages.
const BESIDE_SIZES: [(usize, usize); 6] =
    [(16, 128), (272, 1152), (768, 2048), (4096, 4096), (48, 14_336), (2128, 8320)];
const ROW_COUNTS: [usize; 12] = [1, 2, 8, 9, 16, 32, 33, 64, 65, 128, 200, 300];
/// Rows that are multiplied one by one besides.
const ROWS_ALONE: usize = 9;

pub(super) fn run(gpu: &mut Gpu) -> Result<Vec<Outcome>, KernelError> {
    if gpu.kernels.properties().capability != (9, 0) {
        return Ok(Vec::new());
    }
    let mut outcomes = Vec::new();
    for (idx, (m, n, k)) in SHAPES.into_iter().enumerate() {
        let shape = GemmShape { m, n, k };
        for group in [GroupSize::G32, GroupSize::G128] {
            let scales = [ScaleFormat::F16, ScaleFormat::Bf16][idx % 2];
            let weights = Weights::drawn(gpu, Int4Layout { n, k, group, scales })?;
            if m <= SKINNY_INT4_ROWS_MAX {
                let ring = SkinnyKernel::for_device(gpu.kernels.properties());
                outcomes.extend(few(gpu, &weights, shape, ring)?);
            }
            outcomes.extend(products(gpu, &weights, shape, Epilogue::Bf16)?);
            if n.is_multiple_of(16) {
                outcomes.extend(products(gpu, &weights, shape, Epilogue::Gated)?);
                outcomes.extend(chained(gpu, &weights, shape)?);
            }
        }
    }
    for (m, n, k) in WIDENED_SHAPES {
        for group in [GroupSize::G32, GroupSize::G128] {
            for scales in [ScaleFormat::F16, ScaleFormat::Bf16] {
                let weights = Weights::drawn(gpu, Int4Layout { n, k, group, scales })?;
                outcomes.extend(widened_weights(gpu, &weights, GemmShape { m, n, k })?);
            }
        }
    }
    for (idx, (m, n, k)) in BESIDE_SHAPES.into_iter().enumerate() {
        let scales = [ScaleFormat::F16, ScaleFormat::Bf16][idx % 2];
        let weights = Weights::drawn(gpu, Int4Layout { n, k, group: GroupSize::G128, scales })?;
        outcomes.extend(beside_e4m3(gpu, &weights, GemmShape { m, n, k })?);
    }
    for group in [GroupSize::G32, GroupSize::G128] {
        for scales in [ScaleFormat::F16, ScaleFormat::Bf16] {
            outcomes.push(each_weight(gpu, Int4Layout { n: 80, k: 416, group, scales })?);
        }
        for (n, k) in INVARIANT_SIZES {
            outcomes.push(same_bits(gpu, Int4Layout { n, k, group, scales: ScaleFormat::Bf16 })?);
        }
    }
    for (idx, (n, k)) in BESIDE_SIZES.into_iter().enumerate() {
        let scales = [ScaleFormat::F16, ScaleFormat::Bf16][idx % 2];
        let weights = Weights::drawn(gpu, Int4Layout { n, k, group: GroupSize::G128, scales })?;
        for epilogue in [Epilogue::Bf16, Epilogue::Gated] {
            outcomes.push(same_bits_beside_e4m3(gpu, &weights, epilogue)?);
        }
        outcomes.push(in_stream(gpu, &weights)?);
    }
    Ok(outcomes)
}

/// A matrix on the device, and what it stands for.
struct Weights {
    device: Int4Matrix,
    values: Vec<f32>,
    /// The same in f64, by codes, zero points and scales.
    exact: Vec<f64>,
    codes: Vec<u8>,
    groups: Vec<(f32, u8)>,
}

impl Weights {
    fn drawn(gpu: &mut Gpu, layout: Int4Layout) -> Result<Self, KernelError> {
        let Int4Layout { n, k, group, .. } = layout;
        let n_groups = k.div_ceil(group.values());
        let codes: Vec<u8> = (0..n * k).map(|_| gpu.noise.below(16) as u8).collect();
        let unit = 1.0 / (5.0 * (k as f32).sqrt());
        let scale = |gpu: &mut Gpu| bf16::from_f32(unit * (0.5 + gpu.noise.below(64) as f32 / 64.0)).to_f32();
        let mut groups: Vec<(f32, u8)> = (0..n * n_groups).map(|_| (scale(gpu), gpu.noise.below(16) as u8)).collect();
        // Of zeros, and of scales below zero.
        groups[..n_groups].fill((0.0, 3));
        groups.iter_mut().skip(n_groups).step_by(7).for_each(|(scale, _)| *scale = -*scale);
        let exact: Vec<f64> = (0..n * k)
            .map(|at| {
                let (scale, zero) = groups[at / k * n_groups + at % k / group.values()];
                f64::from(scale) * (f64::from(codes[at]) - f64::from(zero))
            })
            .collect();
        let device = Int4Matrix::holding(gpu.kernels.device(), layout, &layout.pack(&codes, &groups))?;
        Ok(Self { device, values: exact.iter().map(|w| *w as f32).collect(), exact, codes, groups })
    }
}

fn plans(gpu: &Gpu, weights: &Weights, shape: GemmShape, epilogue: Epilogue, depth: Depth) -> Vec<GemmPlan> {
    let n_multiprocessors = gpu.kernels.properties().n_multiprocessors;
    gemm::all_plans_int4(shape, epilogue, depth, n_multiprocessors, weights.device.layout().group)
}

/// By every plan; those that leave the depth whole give the same bits.
fn products(
    gpu: &mut Gpu,
    weights: &Weights,
    shape: GemmShape,
    epilogue: Epilogue,
) -> Result<Vec<Outcome>, KernelError> {
    let GemmShape { m, n, k } = shape;
    let x = gpu.noise.normals(m * k);
    let x_gpu = gpu.upload_bf16(&x)?;
    let sums = reference::linear(&x, &weights.values, shape);
    let wanted = match epilogue {
        Epilogue::Gated => reference::silu_mul(&sums.into_iter().map(reference::rounded).collect::<Vec<_>>()),
        _ => sums,
    };
    let mut first: Option<Vec<u32>> = None;
    let mut outcomes = Vec::new();
    for plan in plans(gpu, weights, shape, epilogue, Depth::MaySplit) {
        let found = multiply(gpu, Operand::Bf16(x_gpu.as_view()), weights, shape, epilogue, &plan)?.unwrap_or_default();
        let group = weights.device.layout().group;
        let case = format!("m {m} n {n} k {k} {group:?}, {:?} of {} rows", plan.config.entry, plan.rows);
        if !plan.tile.splits_depth() {
            let is_same = bits(&found) == *first.get_or_insert_with(|| bits(&found));
            let error = if is_same { 0.0 } else { f64::INFINITY };
            outcomes.push(Outcome { op: OP, case: format!("{case}: the same bits"), error, limit: 0.0 });
        }
        outcomes.push(Outcome { op: OP, case, error: relative_error(&found, &wanted), limit: TWO_ROUNDINGS });
    }
    Ok(outcomes)
}

fn multiply(
    gpu: &Gpu,
    x: Operand<'_>,
    weights: &Weights,
    shape: GemmShape,
    epilogue: Epilogue,
    plan: &GemmPlan,
) -> Result<Option<Vec<f32>>, KernelError> {
    let size = shape.m * shape.n;
    let mut y = gpu.poisoned::<bf16>(if epilogue == Epilogue::Gated { size / 2 } else { size })?;
    let out = if epilogue == Epilogue::Gated { Output::Gated(y.view()) } else { Output::Bf16(y.view()) };
    let w = Operand::Int4(weights.device.view());
    gpu.kernels.gemm_by_plan(Linear { y: out, x, w, shape }, plan)?;
    Ok(gpu.written(&y)?.map(|found| widened(&found)))
}

/// Rows of one 1 each: every weight leaves alone, rounded once to bf16. The error is the number of weights that differ.
fn each_weight(gpu: &mut Gpu, layout: Int4Layout) -> Result<Outcome, KernelError> {
    let Int4Layout { n, k, .. } = layout;
    let weights = Weights::drawn(gpu, layout)?;
    let x: Vec<f32> = (0..k * k).map(|at| if at / k == at % k { 1.0 } else { 0.0 }).collect();
    let (x, shape) = (gpu.upload_bf16(&x)?, GemmShape { m: k, n, k });
    let wanted = (0..k * n).map(|at| bf16::from_f64(weights.exact[at % n * k + at / n]).to_f32());
    let wanted = bits(&wanted.collect::<Vec<_>>());
    let mut n_different = 0;
    for plan in plans(gpu, &weights, shape, Epilogue::Bf16, Depth::MaySplit) {
        let found = multiply(gpu, Operand::Bf16(x.as_view()), &weights, shape, Epilogue::Bf16, &plan)?;
        let found = bits(&found.unwrap_or_else(|| vec![f32::NAN; k * n]));
        // Zeros of other groups may leave the sign of a zero open.
        n_different +=
            found.iter().zip(&wanted).filter(|(found, wanted)| found != wanted && (*found | *wanted) << 1 != 0).count();
    }
    Ok(Outcome { op: OP, case: format!("{layout:?}: each weight"), error: n_different as f64, limit: 0.0 })
}

/// Numbers and scales to the last bit; then by every plan the product that is launched right behind what widens, again and again.
fn widened_weights(gpu: &mut Gpu, weights: &Weights, shape: GemmShape) -> Result<Vec<Outcome>, KernelError> {
    let GemmShape { m, n, k } = shape;
    let layout = weights.device.layout();
    let (numbers, scales) = reference::widened_int4(&weights.codes, &weights.groups, (k, layout.group.values()));
    let (mut values, mut found_scales) = (gpu.poisoned::<u8>(n * k)?, gpu.poisoned::<f32>(n)?);
    let out = QuantisedMut { values: values.view(), scales: found_scales.view(), beside: None };
    gpu.kernels.widen_int4(WidenInt4 { out, w: weights.device.view() })?;
    let found = gpu.written(&values)?.map(|codes| codes.into_iter().map(codes::e4m3).collect::<Vec<_>>());
    let is_same = found.as_ref().is_some_and(|found| *found == numbers)
        && gpu.written(&found_scales)?.is_some_and(|found| bits(&found) == bits(&scales));
    let case = format!("m {m} n {n} k {k} {:?} {:?}", layout.group, layout.scales);
    let error = if is_same { 0.0 } else { f64::INFINITY };
    let mut outcomes = vec![Outcome { op: "widen_int4", case: format!("{case}: to the bit"), error, limit: 0.0 }];

    let (x_numbers, x_scales) = reference::quantise_rows(&gpu.noise.normals(m * k), k, E4M3_MAX);
    let of = |numbers: &[f32], scales: &[f32]| -> Vec<f32> {
        numbers.chunks(k).zip(scales).flat_map(|(row, scale)| row.iter().map(move |x| x * scale)).collect()
    };
    let wanted = reference::linear(&of(&x_numbers, &x_scales), &of(&numbers, &scales), shape);
    let x_bits: Vec<u8> = x_numbers.into_iter().map(reference::bits_of_e4m3).collect();
    let x = QuantisedRows::holding(gpu.kernels.device(), &x_bits, &x_scales)?;
    let mut w = QuantisedRows::zeros(gpu.kernels.device(), n * k, n)?;
    let n_multiprocessors = gpu.kernels.properties().n_multiprocessors;
    for plan in gemm::all_plans_e4m3(ScaledBy::Rows, shape, Epilogue::Bf16, Depth::MaySplit, n_multiprocessors) {
        let mut y = gpu.poisoned::<bf16>(m * n)?;
        gpu.kernels.widen_int4(WidenInt4 { out: w.rows_mut(n, k), w: weights.device.view() })?;
        let (y_view, x, w_view) = (Output::Bf16(y.view()), Operand::E4m3(x.all()), Operand::E4m3(w.rows(n, k)));
        gpu.kernels.gemm_by_plan(Linear { y: y_view, x, w: w_view, shape }, &plan)?;
        // What the next product must not find already.
        w = QuantisedRows::zeros(gpu.kernels.device(), n * k, n)?;
        let found = gpu.written(&y)?.map(|it| widened(&it)).unwrap_or_default();
        let case = format!("{case}, {:?} of {} rows", plan.config.entry, plan.rows);
        outcomes.push(Outcome { op: "widen_int4", case, error: relative_error(&found, &wanted), limit: TWO_ROUNDINGS });
    }
    Ok(outcomes)
}

/// Rows in e4m3 with the codes as they are, by every plan. The sums of a group are the tensor cores', of codes that have not lost their zero
/// point yet: some 14 bits of what is several times as large as what is left.
fn beside_e4m3(gpu: &mut Gpu, weights: &Weights, shape: GemmShape) -> Result<Vec<Outcome>, KernelError> {
    const LIMIT: f64 = 2.0 * TWO_ROUNDINGS;
    let GemmShape { m, n, k } = shape;
    let (numbers, scales) = reference::quantise_rows(&gpu.noise.normals(m * k), k, BESIDE_CODES_MAX);
    let x: Vec<f32> =
        numbers.chunks(k).zip(&scales).flat_map(|(row, scale)| row.iter().map(move |x| x * scale)).collect();
    let sums = reference::linear(&x, &weights.values, shape);
    let bits: Vec<u8> = numbers.into_iter().map(reference::bits_of_e4m3).collect();
    let rows = QuantisedRows::holding_beside_codes(gpu.kernels.device(), &bits, &scales, k)?;
    let mut outcomes = Vec::new();
    let n_multiprocessors = gpu.kernels.properties().n_multiprocessors;
    for epilogue in [Epilogue::Bf16, Epilogue::Gated] {
        if epilogue == Epilogue::Gated && !n.is_multiple_of(16) {
            continue;
        }
        let wanted = match epilogue {
            Epilogue::Gated => {
                reference::silu_mul(&sums.iter().map(|sum| reference::rounded(*sum)).collect::<Vec<_>>())
            }
            _ => sums.clone(),
        };
        let plans = gemm::all_plans_beside_e4m3(shape, epilogue, Depth::MaySplit, n_multiprocessors);
        for plan in plans {
            let x = Operand::E4m3(rows.rows_beside_codes(m, k));
            let found = multiply(gpu, x, weights, shape, epilogue, &plan)?.unwrap_or_default();
            let case = format!("m {m} n {n} k {k} {epilogue:?}, {:?} of {} rows", plan.config.entry, plan.rows);
            let error = relative_error(&found, &wanted);
            outcomes.push(Outcome { op: "gemm_int4_e4m3_sm90", case, error, limit: LIMIT });
        }
    }
    Ok(outcomes)
}

/// Rows of every count, by every plan, must equal the same rows of the largest product. The error is the number of products that
/// differ.
fn same_bits(gpu: &mut Gpu, layout: Int4Layout) -> Result<Outcome, KernelError> {
    let (Int4Layout { n, k, group, .. }, most) = (layout, ROW_COUNTS[ROW_COUNTS.len() - 1]);
    let weights = Weights::drawn(gpu, layout)?;
    let x = gpu.noise.normals(most * k);
    let x = gpu.upload_bf16(&x)?;
    let of = |m: usize, plan: &GemmPlan| {
        multiply(gpu, Operand::Bf16(x.slice(..m * k)), &weights, GemmShape { m, n, k }, Epilogue::Bf16, plan)
    };
    let plans_of = |m| gemm::all_plans_int4(GemmShape { m, n, k }, Epilogue::Bf16, Depth::Whole, 132, group);
    let whole = of(most, &plans_of(most)[0])?;
    let (mut n_different, mut n_products) = (0, 0);
    for m in ROW_COUNTS {
        for plan in plans_of(m) {
            let part = of(m, &plan)?;
            let equal = matches!((&whole, &part), (Some(whole), Some(part)) if bits(&whole[..m * n]) == bits(part));
            n_different += usize::from(!equal);
            n_products += 1;
        }
    }
    let case = format!("n {n} k {k} {group:?}: the same rows in {n_products} products");
    Ok(Outcome { op: OP, case, error: n_different as f64, limit: 0.0 })
}

/// Rows in e4m3 of every count, by every plan, must equal the same rows of the largest product; so must rows in bf16 one by one, which the
/// ring quantises itself. The error is the number of products that differ.
fn same_bits_beside_e4m3(gpu: &mut Gpu, weights: &Weights, epilogue: Epilogue) -> Result<Outcome, KernelError> {
    let (Int4Layout { n, k, .. }, most) = (weights.device.layout(), ROW_COUNTS[ROW_COUNTS.len() - 1]);
    let (rows, device) = (odd_rows(gpu, most, k)?, gpu.kernels.device().clone());
    let mut x = QuantisedRows::zeros(&device, most * k, most)?.beside_codes(&device, CodeSums::of_rows(k, most))?;
    let out = x.rows_beside_codes_mut(most, k);
    gpu.kernels.quantise_rows(QuantiseRows { out, x: rows.as_view(), width: k })?;
    let of = |m: usize, plan: &GemmPlan| {
        let x = Operand::E4m3(x.rows_beside_codes(m, k));
        multiply(gpu, x, weights, GemmShape { m, n, k }, epilogue, plan)
    };
    let n_multiprocessors = gpu.kernels.properties().n_multiprocessors;
    let plans_of = |m| gemm::all_plans_beside_e4m3(GemmShape { m, n, k }, epilogue, Depth::Whole, n_multiprocessors);
    let width = if epilogue == Epilogue::Gated { n / 2 } else { n };
    let whole = of(most, &plans_of(most)[0])?.map(|whole| bits(&whole)).unwrap_or_default();
    let (mut n_different, mut n_products) = (0, 0);
    let mut compare = |first: usize, found: Option<Vec<f32>>| {
        let found = found.map(|found| bits(&found)).unwrap_or_default();
        let is_same = !found.is_empty() && whole[first * width..].starts_with(&found);
        n_different += usize::from(!is_same);
        n_products += 1;
    };
    for m in ROW_COUNTS {
        for plan in plans_of(m) {
            compare(0, of(m, &plan)?);
        }
    }
    for row in 0..ROWS_ALONE {
        compare(row, alone(gpu, rows.slice(row * k..(row + 1) * k), weights, epilogue)?);
    }
    let case = format!("n {n} k {k} {epilogue:?} beside e4m3: the same rows in {n_products} products");
    Ok(Outcome { op: "gemm_int4_e4m3_sm90", case, error: n_different as f64, limit: 0.0 })
}

/// A row through the ring as it reads and writes the residual stream: its norm as a norm in front leaves it quantised, and its sums as a norm
/// behind adds them. The error is the number of products that differ from those of a tile between such norms.
fn in_stream(gpu: &mut Gpu, weights: &Weights) -> Result<Outcome, KernelError> {
    let Int4Layout { n, k, .. } = weights.device.layout();
    let rows = odd_rows(gpu, ROWS_ALONE, k)?;
    let residual: Vec<bf16> = gpu.noise.normals(n).into_iter().map(bf16::from_f32).collect();
    let [before, behind] = [k, n].map(|width| gpu.noise.normals(width));
    let norms = [gpu.upload_bf16(&before)?, gpu.upload_bf16(&behind)?];
    let may_norm = launch::fits_quantising_ring(GemmShape { m: 1, n, k }, Epilogue::Sum, true);
    let (mut n_different, mut n_products) = (0, 0);
    for is_normed in if may_norm { vec![false, true] } else { vec![false] } {
        for row in 0..ROWS_ALONE {
            let x = || rows.slice(row * k..(row + 1) * k);
            let wanted = between_norms(gpu, (x(), is_normed), weights, &residual, &norms)?;
            let mut found = gpu.guarded(residual.clone())?;
            let norm = is_normed.then(|| NormOf { weight: norms[0].as_view(), eps: EPS });
            let (y, w) = (Output::Sum(found.view()), Operand::Int4(weights.device.view()));
            let op = Linear { y, x: x().into(), w, shape: GemmShape { m: 1, n, k } };
            gpu.kernels.gemm_quantising(op, norm)?;
            let found = gpu.written(&found)?;
            n_different += usize::from(found.is_none() || found != wanted);
            n_products += 1;
        }
    }
    let case = format!("n {n} k {k}: a row between norms, {n_products} products");
    Ok(Outcome { op: "skinny_int4_e4m3", case, error: n_different as f64, limit: 0.0 })
}

/// The residual stream behind a row's product by a tile, whose norms are launches of their own.
fn between_norms(
    gpu: &Gpu,
    (x, is_normed): (CudaView<'_, bf16>, bool),
    weights: &Weights,
    residual: &[bf16],
    [before, behind]: &[CudaSlice<bf16>; 2],
) -> Result<Option<Vec<bf16>>, KernelError> {
    let Int4Layout { n, k, .. } = weights.device.layout();
    let (device, shape) = (gpu.kernels.device(), GemmShape { m: 1, n, k });
    let mut row = QuantisedRows::zeros(device, k, 1)?.beside_codes(device, CodeSums::of_rows(k, 1))?;
    let out = row.rows_beside_codes_mut(1, k);
    match is_normed {
        true => {
            let weight = before.as_view();
            gpu.kernels.quantised_norm(QuantisedNorm { out, residual: None, x, weight, eps: EPS })?;
        }
        false => gpu.kernels.quantise_rows(QuantiseRows { out, x, width: k })?,
    }
    let plan = gemm::all_plans_beside_e4m3(shape, Epilogue::Bf16, Depth::Whole, 132)[0];
    let mut y = gpu.upload(&vec![bf16::ZERO; n])?;
    let (x, w) = (Operand::E4m3(row.rows_beside_codes(1, k)), Operand::Int4(weights.device.view()));
    gpu.kernels.gemm_by_plan(Linear { y: Output::Bf16(y.as_view_mut()), x, w, shape }, &plan)?;
    let (mut residual, mut normed) = (gpu.guarded(residual.to_vec())?, gpu.upload(&vec![bf16::ZERO; n])?);
    gpu.kernels.add_rms_norm(AddRmsNorm {
        out: normed.as_view_mut(),
        residual: residual.view(),
        x: y.as_view(),
        weight: behind.as_view(),
        eps: EPS,
    })?;
    gpu.written(&residual)
}

/// Of which one is zeros, one has a value beside which all others are small, and one is small as a whole.
fn odd_rows(gpu: &mut Gpu, n_rows: usize, k: usize) -> Result<CudaSlice<bf16>, KernelError> {
    let mut x = gpu.noise.normals(n_rows * k);
    x[k..2 * k].fill(0.0);
    x[2 * k + 77] = 3e4;
    x[3 * k..4 * k].iter_mut().for_each(|x| *x *= 1e-30);
    gpu.upload_bf16(&x)
}

/// A row of bf16 through the ring that quantises.
fn alone(
    gpu: &Gpu,
    x: CudaView<'_, bf16>,
    weights: &Weights,
    epilogue: Epilogue,
) -> Result<Option<Vec<f32>>, KernelError> {
    let Int4Layout { n, k, .. } = weights.device.layout();
    let mut y = gpu.poisoned::<bf16>(if epilogue == Epilogue::Gated { n / 2 } else { n })?;
    let out = if epilogue == Epilogue::Gated { Output::Gated(y.view()) } else { Output::Bf16(y.view()) };
    let w = Operand::Int4(weights.device.view());
    gpu.kernels.gemm_quantising(Linear { y: out, x: x.into(), w, shape: GemmShape { m: 1, n, k } }, None)?;
    Ok(gpu.written(&y)?.map(|found| widened(&found)))
}

/// Added to the residual stream, and scaled by a norm's factor, by every plan that does.
fn chained(gpu: &mut Gpu, weights: &Weights, shape: GemmShape) -> Result<Vec<Outcome>, KernelError> {
    let GemmShape { m, n, k } = shape;
    let values = Values { w: weights.values.clone(), ..Values::new(gpu, shape) };
    let (x, norm) = (gpu.upload_bf16(&values.x)?, gpu.upload_bf16(&values.norm)?);
    let squares = row_squares(&values.x, k);
    let squares_gpu = gpu.upload(&squares)?;
    let product = reference::linear(&values.x, &values.w, shape);
    let wanted: Vec<f32> = values.residual.iter().zip(&product).map(|(h, product)| h + product).collect();
    let scaled = reference::scaled_linear(&values.x, &squares, EPS, &values.w, shape);
    let mut outcomes = Vec::new();
    let case = |what: &str, plan: &GemmPlan| {
        format!("{what}, m {m} n {n} k {k}, {:?} of {} rows", plan.config.entry, plan.rows)
    };
    let is_few = |plan: &GemmPlan| m <= crate::launch::UPDATE_ROWS_MAX && plan.tile.scales();
    for plan in plans(gpu, weights, shape, Epilogue::Update, Depth::MaySplit).into_iter().filter(is_few) {
        let n_sums = n.div_ceil(plan.rows);
        let mut residual = gpu.guarded(values.residual.iter().map(|h| bf16::from_f32(*h)).collect())?;
        let (mut weighted, mut sums) = (gpu.poisoned::<bf16>(m * n)?, gpu.poisoned::<f32>(m * n_sums)?);
        gpu.kernels.gemm_update_by(
            Update {
                residual: residual.view(),
                weighted: weighted.view(),
                squares: sums.view(),
                norm: norm.as_view(),
                x: x.as_view(),
                w: Operand::Int4(weights.device.view()),
                shape,
            },
            &plan,
        )?;
        let found = gpu.written(&residual)?.map(|it| widened(&it)).unwrap_or_default();
        let weighted = gpu.written(&weighted)?.map(|it| widened(&it)).unwrap_or_default();
        let (wanted_weighted, _) = reference::weighted(&found, &values.norm);
        let sum = |row: &[f32]| row.iter().map(|value| f64::from(*value)).sum::<f64>() as f32;
        let total = |values: &[f32]| values.chunks(values.len() / m).map(sum).collect::<Vec<f32>>();
        let squared: Vec<f32> = found.iter().map(|h| h * h).collect();
        let sums = gpu.written(&sums)?.map(|sums| total(&sums)).unwrap_or_default();
        let outcome = |what, error, limit| Outcome { op: OP, case: case(what, &plan), error, limit };
        outcomes.push(outcome("residual", relative_error(&found, &wanted), TWO_ROUNDINGS));
        outcomes.push(outcome("weighted residual", relative_error(&weighted, &wanted_weighted), 0.0));
        let squares_error = if squared.is_empty() { f64::INFINITY } else { relative_error(&sums, &total(&squared)) };
        outcomes.push(outcome("squares of the residual", squares_error, FACTOR));
    }
    for plan in plans(gpu, weights, shape, Epilogue::Bf16, Depth::MaySplit).into_iter().filter(is_few) {
        let mut y = gpu.poisoned::<bf16>(m * n)?;
        let op =
            Linear { y: Output::Bf16(y.view()), x: x.as_view().into(), w: Operand::Int4(weights.device.view()), shape };
        let scale = RowScale { squares: squares_gpu.as_view(), tile: NORM_TILE, eps: EPS };
        gpu.kernels.gemm_scaled_by(op, scale, &plan)?;
        let found = gpu.written(&y)?.map(|it| widened(&it)).unwrap_or_default();
        let error = relative_error(&found, &scaled);
        outcomes.push(Outcome { op: OP, case: case("scaled", &plan), error, limit: TWO_ROUNDINGS });
    }
    Ok(outcomes)
}

/// Products of few rows through the ring, beside their references: plain, of a norm, activated, added to the residual stream. A row alone gives
/// the bits that it has among others.
fn few(gpu: &mut Gpu, weights: &Weights, shape: GemmShape, kernel: SkinnyKernel) -> Result<Vec<Outcome>, KernelError> {
    let GemmShape { m, n, k } = shape;
    let values = Values { w: weights.values.clone(), ..Values::new(gpu, shape) };
    let (x, norm) = (gpu.upload_bf16(&values.x)?, gpu.upload_bf16(&values.norm)?);
    let squares = row_squares(&values.x, k);
    let squares_gpu = gpu.upload(&squares)?;
    let product = reference::linear(&values.x, &values.w, shape);
    let scaled = reference::scaled_linear(&values.x, &squares, EPS, &values.w, shape);
    let updated: Vec<f32> = values.residual.iter().zip(&product).map(|(h, product)| h + product).collect();
    let group = weights.device.layout().group;
    let outcome = |what: &str, found: Option<Vec<bf16>>, wanted: &[f32]| {
        let error = found.map_or(f64::INFINITY, |found| relative_error(&widened(&found), wanted));
        Outcome { op: "skinny_int4", case: format!("{what}, m {m} n {n} k {k} {group:?}"), error, limit: TWO_ROUNDINGS }
    };
    let w = || Operand::Int4(weights.device.view());
    let scale = || RowScale { squares: squares_gpu.as_view(), tile: NORM_TILE, eps: EPS };
    let mut y = gpu.poisoned::<bf16>(m * n)?;
    let op = Linear { y: Output::Bf16(y.view()), x: x.as_view().into(), w: w(), shape };
    gpu.kernels.skinny_gemm_by(op, kernel)?;
    let plain = gpu.written(&y)?;
    let mut first = gpu.poisoned::<bf16>(n)?;
    let alone = GemmShape { m: 1, ..shape };
    let op = Linear { y: Output::Bf16(first.view()), x: x.slice(..k).into(), w: w(), shape: alone };
    gpu.kernels.skinny_gemm_by(op, kernel)?;
    let is_same = matches!((&plain, gpu.written(&first)?), (Some(all), Some(first)) if all[..n] == first[..]);
    let mut outcomes = vec![outcome("plain", plain, &product)];
    let error = if is_same { 0.0 } else { f64::INFINITY };
    let case = format!("a row alone, m {m} n {n} k {k} {group:?}");
    outcomes.push(Outcome { op: "skinny_int4", case, error, limit: 0.0 });
    let mut y = gpu.poisoned::<bf16>(m * n)?;
    let op = Linear { y: Output::Bf16(y.view()), x: x.as_view().into(), w: w(), shape };
    gpu.kernels.skinny_scaled_by(op, scale(), kernel)?;
    outcomes.push(outcome("scaled", gpu.written(&y)?, &scaled));
    if n.is_multiple_of(16) {
        let mut y = gpu.poisoned::<bf16>(m * n / 2)?;
        let op = Linear { y: Output::Gated(y.view()), x: x.as_view().into(), w: w(), shape };
        gpu.kernels.skinny_scaled_by(op, scale(), kernel)?;
        let gated = reference::silu_mul(&scaled.iter().map(|sum| reference::rounded(*sum)).collect::<Vec<_>>());
        outcomes.push(outcome("scaled and gated", gpu.written(&y)?, &gated));
    }
    let mut residual = gpu.guarded(values.residual.iter().map(|h| bf16::from_f32(*h)).collect())?;
    let (mut weighted, mut sums) = (gpu.poisoned::<bf16>(m * n)?, gpu.poisoned::<f32>(m * norm_tiles(n))?);
    let (weighted_view, squares) = (weighted.view(), sums.view());
    let op = Update {
        residual: residual.view(),
        weighted: weighted_view,
        squares,
        norm: norm.as_view(),
        x: x.as_view(),
        w: w(),
        shape,
    };
    gpu.kernels.skinny_update_by(op, kernel)?;
    outcomes.push(outcome("residual", gpu.written(&residual)?, &updated));
    Ok(outcomes)
}
