//! Comparisons of what is quantised to e4m3: rows, to the last bit; norms with a quantised result, to the last bit those of two
//! kernels; products of every tile and of few rows with their references.

use stoker_fit::gpu::{BLOCK_INPUTS, BLOCK_OUTPUTS, block_scales, block_scales_of_rows};

use super::{
    Gpu, Outcome, TWO_ROUNDINGS,
    fixture::widened,
    linear::{bits, skinny_kernels},
    relative_error,
    skinny::{EPS, Values, row_squares},
};
use crate::{
    KernelError, bf16,
    choose::ScaledBy,
    codes, gemm,
    gemm::{Depth, GemmPlan},
    launch::{Epilogue, GemmShape, NORM_TILE, SKINNY_ROWS_MAX, SkinnyKernel, norm_tiles},
    linear::{Linear, Operand, Output, RowScale, Update},
    pointwise::{AddRmsNorm, RmsNorm},
    quantise::{BESIDE_CODES_MAX, CodeSums, E4M3_MAX, QuantiseRows, QuantisedNorm, QuantisedRows},
    reference,
};

/// (rows, width): less than a warp, a block's threads, several vectors a thread.
const ROWS: [(usize, usize); 5] = [(1, 8), (7, 264), (130, 4096), (3, 14336), (2, 32768)];
/// The same of rows beside codes.
const ROWS_BESIDE_CODES: [(usize, usize); 6] = [(1, 128), (7, 384), (33, 4096), (130, 2176), (3, 14_336), (2, 32_768)];
/// (m, n, k): one row and few, tiles of every variant that end inside, depths that end inside a chunk.
const SHAPES: [(usize, usize, usize); 5] =
    [(1, 16, 16), (9, 48, 1040), (70, 272, 144), (300, 304, 272), (129, 1552, 1024)];
/// (n, k) of products of few rows.
const FEW: [(usize, usize); 4] = [(16, 16), (48, 1040), (304, 4096), (1552, 528)];

pub(super) fn run(gpu: &mut Gpu) -> Result<Vec<Outcome>, KernelError> {
    let mut outcomes = Vec::new();
    for (n_rows, width) in ROWS {
        outcomes.push(rows(gpu, n_rows, width)?);
        outcomes.push(norms(gpu, n_rows, width, false)?);
        outcomes.push(norms(gpu, n_rows, width, true)?);
    }
    for (n_rows, width) in ROWS_BESIDE_CODES {
        outcomes.extend(beside_codes(gpu, n_rows, width)?);
    }
    for (n, k) in FEW {
        for kernel in skinny_kernels(gpu) {
            for m in [1, 2, SKINNY_ROWS_MAX] {
                outcomes.extend(few(gpu, ScaledBy::Rows, GemmShape { m, n, k }, kernel)?);
                if kernel != SkinnyKernel::Registers {
                    outcomes.extend(few(gpu, ScaledBy::Blocks, GemmShape { m, n, k }, kernel)?);
                }
            }
        }
    }
    let properties = gpu.kernels.properties();
    if properties.capability == (9, 0) {
        for (m, n, k) in SHAPES {
            for epilogue in [Epilogue::Bf16, Epilogue::Gated] {
                for scaled in [ScaledBy::Rows, ScaledBy::Blocks] {
                    outcomes.extend(tiles(gpu, scaled, GemmShape { m, n, k }, epilogue)?);
                }
            }
        }
    }
    Ok(outcomes)
}

/// Of many sizes, one row of zeros.
fn noise(gpu: &mut Gpu, n_rows: usize, width: usize) -> Vec<f32> {
    let mut x = gpu.noise.normals(n_rows * width);
    for (idx, row) in x.chunks_mut(width).enumerate() {
        let factor = if idx == 1 { 0.0 } else { 2f32.powi(idx as i32 % 9 - 4) };
        row.iter_mut().for_each(|x| *x = reference::rounded(*x * factor));
    }
    x
}

/// What rows hold on the device: numbers, scales.
fn held(gpu: &Gpu, rows: &QuantisedRows) -> Result<(Vec<f32>, Vec<f32>), KernelError> {
    let numbers = gpu.download(rows.values())?.into_iter().map(codes::e4m3).collect();
    Ok((numbers, gpu.download(rows.scales())?))
}

fn equal_bits(a: &(Vec<f32>, Vec<f32>), b: &(Vec<f32>, Vec<f32>)) -> f64 {
    let equal = bits(&a.0) == bits(&b.0) && bits(&a.1) == bits(&b.1);
    if equal { 0.0 } else { f64::INFINITY }
}

fn rows(gpu: &mut Gpu, n_rows: usize, width: usize) -> Result<Outcome, KernelError> {
    let x = noise(gpu, n_rows, width);
    let mut out = poisoned(gpu, n_rows, width)?;
    let x_gpu = gpu.upload_bf16(&x)?;
    gpu.kernels.quantise_rows(QuantiseRows { out: out.rows_mut(n_rows, width), x: x_gpu.as_view(), width })?;
    let error = equal_bits(&held(gpu, &out)?, &reference::quantise_rows(&x, width, E4M3_MAX));
    Ok(Outcome { op: "quantise_rows", case: format!("{n_rows} of {width}"), error, limit: 0.0 })
}

/// As products of codes want them, alone and behind a norm: zipped, and sums of each 128.
fn beside_codes(gpu: &mut Gpu, n_rows: usize, width: usize) -> Result<Vec<Outcome>, KernelError> {
    let device = gpu.kernels.device().clone();
    let (x, weight) = (noise(gpu, n_rows, width), gpu.noise.normals(width));
    let (x_gpu, weight) = (gpu.upload_bf16(&x)?, gpu.upload_bf16(&weight)?);
    let mut normed = gpu.poisoned::<bf16>(n_rows * width)?;
    let norm = RmsNorm { out: normed.view(), x: x_gpu.as_view(), weight: weight.as_view(), eps: EPS };
    gpu.kernels.rms_norm(norm)?;
    let normed = widened(&gpu.written(&normed)?.unwrap_or_default());
    let mut outcomes = Vec::new();
    for is_norm in [false, true] {
        let (numbers, scales) = reference::quantise_rows(if is_norm { &normed } else { &x }, width, BESIDE_CODES_MAX);
        let numbers: Vec<u8> = numbers.into_iter().map(reference::bits_of_e4m3).collect();
        let wanted = QuantisedRows::holding_beside_codes(&device, &numbers, &scales, width)?;
        let mut found = poisoned(gpu, n_rows, width)?.beside_codes(&device, CodeSums::of_rows(width, n_rows))?;
        let (out, x) = (found.rows_beside_codes_mut(n_rows, width), x_gpu.as_view());
        match is_norm {
            true => gpu.kernels.quantised_norm(QuantisedNorm {
                out,
                residual: None,
                x,
                weight: weight.as_view(),
                eps: EPS,
            })?,
            false => gpu.kernels.quantise_rows(QuantiseRows { out, x, width })?,
        }
        let sums = gpu.download(found.sums())? == gpu.download(wanted.sums())?;
        let error = equal_bits(&held(gpu, &found)?, &held(gpu, &wanted)?) + if sums { 0.0 } else { f64::INFINITY };
        let case = format!("{n_rows} of {width} beside codes{}", if is_norm { ", normed" } else { "" });
        outcomes.push(Outcome { op: "quantise_rows", case, error, limit: 0.0 });
    }
    Ok(outcomes)
}

/// Every byte not a number.
fn poisoned(gpu: &Gpu, n_rows: usize, width: usize) -> Result<QuantisedRows, KernelError> {
    QuantisedRows::holding(gpu.kernels.device(), &vec![0x7f; n_rows * width], &vec![f32::NAN; n_rows])
}

/// Quantised by the norm, and behind it.
fn norms(gpu: &mut Gpu, n_rows: usize, width: usize, adds: bool) -> Result<Outcome, KernelError> {
    let (x, before, weight) = (noise(gpu, n_rows, width), noise(gpu, n_rows, width), gpu.noise.normals(width));
    let (x, weight) = (gpu.upload_bf16(&x)?, gpu.upload_bf16(&weight)?);
    let (mut residual, mut other) = (gpu.upload_bf16(&before)?, gpu.upload_bf16(&before)?);
    let (x, weight) = (x.as_view(), weight.as_view());
    let mut normed = gpu.poisoned::<bf16>(n_rows * width)?;
    match adds {
        true => gpu.kernels.add_rms_norm(AddRmsNorm {
            out: normed.view(),
            residual: residual.as_view_mut(),
            x: x.slice(..),
            weight: weight.slice(..),
            eps: EPS,
        })?,
        false => {
            gpu.kernels.rms_norm(RmsNorm { out: normed.view(), x: x.slice(..), weight: weight.slice(..), eps: EPS })?
        }
    }
    let (mut wanted, mut found) = (poisoned(gpu, n_rows, width)?, poisoned(gpu, n_rows, width)?);
    let view = normed.view();
    gpu.kernels.quantise_rows(QuantiseRows { out: wanted.rows_mut(n_rows, width), x: view.as_view(), width })?;
    gpu.kernels.quantised_norm(QuantisedNorm {
        out: found.rows_mut(n_rows, width),
        residual: adds.then(|| other.as_view_mut()),
        x,
        weight,
        eps: EPS,
    })?;
    let is_same_residual = !adds || bits(&widened(&gpu.download(&residual)?)) == bits(&widened(&gpu.download(&other)?));
    let error =
        equal_bits(&held(gpu, &found)?, &held(gpu, &wanted)?) + if is_same_residual { 0.0 } else { f64::INFINITY };
    let case = format!("{n_rows} of {width}{}", if adds { ", added" } else { "" });
    Ok(Outcome { op: "quantised norm", case, error, limit: 0.0 })
}

/// Rows by the reference, on the device, and what they stand for.
struct Rows {
    device: QuantisedRows,
    values: Vec<f32>,
}

impl Rows {
    fn new(gpu: &Gpu, x: &[f32], width: usize) -> Result<Self, KernelError> {
        let (numbers, scales) = reference::quantise_rows(x, width, E4M3_MAX);
        let values = numbers.chunks(width).zip(&scales).flat_map(|(row, scale)| row.iter().map(move |x| x * scale));
        let values = values.collect();
        let bits: Vec<u8> = numbers.into_iter().map(reference::bits_of_e4m3).collect();
        Ok(Self { device: QuantisedRows::holding(gpu.kernels.device(), &bits, &scales)?, values })
    }

    /// Numbers near e4m3's middle with any scales, a block each.
    fn in_blocks(gpu: &mut Gpu, w: &[f32], width: usize) -> Result<Self, KernelError> {
        let n_blocks = block_scales(w.len() / width, width);
        let scales: Vec<f32> = gpu.noise.normals(n_blocks).into_iter().map(|noise| 0.02 * noise.exp()).collect();
        Self::scaled(gpu, w, (width, ScaledBy::Blocks), &scales)
    }

    /// The numbers nearest to 16 times the values, with these scales.
    fn scaled(gpu: &Gpu, w: &[f32], (width, by): (usize, ScaledBy), scales: &[f32]) -> Result<Self, KernelError> {
        let numbers: Vec<f32> = w.iter().map(|w| reference::e4m3(16.0 * w)).collect();
        let n_blocks = block_scales_of_rows(width);
        let scale = |at: usize| match by {
            ScaledBy::Rows => scales[at / width],
            ScaledBy::Blocks => scales[at / width / BLOCK_OUTPUTS * n_blocks + at % width / BLOCK_INPUTS],
        };
        let values = numbers.iter().enumerate().map(|(at, number)| number * scale(at)).collect();
        let bits: Vec<u8> = numbers.into_iter().map(reference::bits_of_e4m3).collect();
        Ok(Self { device: QuantisedRows::holding(gpu.kernels.device(), &bits, scales)?, values })
    }

    /// As weights.
    fn weights(&self, scaled: ScaledBy) -> Operand<'_> {
        match scaled {
            ScaledBy::Rows => Operand::E4m3(self.device.all()),
            ScaledBy::Blocks => Operand::E4m3Blocks(self.device.blocks()),
        }
    }
}

/// By every plan; those that leave the depth whole give the same bits.
fn tiles(gpu: &mut Gpu, scaled: ScaledBy, shape: GemmShape, epilogue: Epilogue) -> Result<Vec<Outcome>, KernelError> {
    let GemmShape { m, n, k } = shape;
    let (x, w) = (noise(gpu, m, k), gpu.noise.normals(n * k));
    let scale = 1.0 / (k as f32).sqrt();
    let x = Rows::new(gpu, &x, k)?;
    let w = match scaled {
        ScaledBy::Rows => Rows::new(gpu, &w.into_iter().map(|w| w * scale).collect::<Vec<_>>(), k)?,
        ScaledBy::Blocks => Rows::in_blocks(gpu, &w, k)?,
    };
    let sums = reference::linear(&x.values, &w.values, shape);
    let wanted = match epilogue {
        Epilogue::Gated => reference::silu_mul(&sums.into_iter().map(reference::rounded).collect::<Vec<_>>()),
        _ => sums,
    };
    let plans =
        gemm::all_plans_e4m3(scaled, shape, epilogue, Depth::MaySplit, gpu.kernels.properties().n_multiprocessors);
    let mut first: Option<Vec<u32>> = None;
    let mut outcomes = Vec::new();
    for plan in plans {
        let found = multiply(gpu, (&x, w.weights(scaled)), shape, epilogue, &plan)?.unwrap_or_default();
        let case = format!("m {m} n {n} k {k}, {:?} of {} rows", plan.config.entry, plan.rows);
        if !plan.tile.splits_depth() {
            let is_same = bits(&found) == *first.get_or_insert_with(|| bits(&found));
            let error = if is_same { 0.0 } else { f64::INFINITY };
            outcomes.push(Outcome { op: "gemm_fp8_sm90", case: format!("{case}: the same bits"), error, limit: 0.0 });
        }
        let error = relative_error(&found, &wanted);
        outcomes.push(Outcome { op: "gemm_fp8_sm90", case, error, limit: TWO_ROUNDINGS });
    }
    Ok(outcomes)
}

fn multiply(
    gpu: &Gpu,
    (x, w): (&Rows, Operand<'_>),
    shape: GemmShape,
    epilogue: Epilogue,
    plan: &GemmPlan,
) -> Result<Option<Vec<f32>>, KernelError> {
    let size = shape.m * shape.n;
    let mut y = gpu.poisoned::<bf16>(if epilogue == Epilogue::Gated { size / 2 } else { size })?;
    let out = if epilogue == Epilogue::Gated { Output::Gated(y.view()) } else { Output::Bf16(y.view()) };
    let x = Operand::E4m3(x.device.all());
    gpu.kernels.gemm_by_plan(Linear { y: out, x, w, shape }, plan)?;
    Ok(gpu.written(&y)?.map(|found| widened(&found)))
}

/// Products of rows of bf16 with weights in e4m3 whose scales are powers of two: beside those of the same weights in bf16, which are
/// compared with their references elsewhere. Sums in another order.
fn few(gpu: &mut Gpu, scaled: ScaledBy, shape: GemmShape, kernel: SkinnyKernel) -> Result<Vec<Outcome>, KernelError> {
    let GemmShape { m, n, k } = shape;
    let mut values = Values::new(gpu, shape);
    let n_scales = if scaled == ScaledBy::Rows { n } else { block_scales(n, k) };
    let powers: Vec<f32> = (0..n_scales).map(|at| 2f32.powi(at as i32 % 5 - 6)).collect();
    let quantised = Rows::scaled(gpu, &values.w, (k, scaled), &powers)?;
    values.w = quantised.values.clone();
    let plain = gpu.upload_bf16(&values.w)?;
    let both = |is_quantised: bool| match is_quantised {
        true => quantised.weights(scaled),
        false => Operand::Bf16(plain.as_view()),
    };
    let (x, norm) = (gpu.upload_bf16(&values.x)?, gpu.upload_bf16(&values.norm)?);
    let squares = gpu.upload(&row_squares(&values.x, k))?;
    let mut found: [Vec<Vec<f32>>; 2] = Default::default();
    for (found, is_quantised) in found.iter_mut().zip([true, false]) {
        for form in ["plain", "scaled", "gated"] {
            let mut y = gpu.poisoned::<bf16>(if form == "gated" { m * n / 2 } else { m * n })?;
            let out = if form == "gated" { Output::Gated(y.view()) } else { Output::Bf16(y.view()) };
            let op = Linear { y: out, x: x.as_view().into(), w: both(is_quantised), shape };
            match form {
                "plain" => gpu.kernels.skinny_gemm_by(op, kernel)?,
                _ => {
                    let scale = RowScale { squares: squares.as_view(), tile: NORM_TILE, eps: EPS };
                    gpu.kernels.skinny_scaled_by(op, scale, kernel)?;
                }
            }
            found.push(gpu.written(&y)?.map(|y| widened(&y)).unwrap_or_default());
        }
        let mut residual = gpu.guarded(values.residual.iter().map(|h| bf16::from_f32(*h)).collect())?;
        let (mut weighted, mut sums) = (gpu.poisoned::<bf16>(m * n)?, gpu.poisoned::<f32>(m * norm_tiles(n))?);
        let op = Update {
            residual: residual.view(),
            weighted: weighted.view(),
            squares: sums.view(),
            norm: norm.as_view(),
            x: x.as_view(),
            w: both(is_quantised),
            shape,
        };
        gpu.kernels.skinny_update_by(op, kernel)?;
        found.push(gpu.written(&residual)?.map(|y| widened(&y)).unwrap_or_default());
        found.push(gpu.written(&weighted)?.map(|y| widened(&y)).unwrap_or_default());
        found.push(gpu.written(&sums)?.unwrap_or_default());
    }
    let [quantised, plain] = found;
    let names = ["plain", "scaled", "gated", "residual", "weighted", "squares"];
    let outcome = |(name, (found, wanted)): (&str, (Vec<f32>, Vec<f32>))| {
        let error = if wanted.is_empty() { f64::INFINITY } else { relative_error(&found, &wanted) };
        Outcome {
            op: "skinny_gemm e4m3",
            case: format!("{name} by {scaled:?}, m {m} n {n} k {k}, {kernel:?}"),
            error,
            limit: TWO_ROUNDINGS,
        }
    };
    Ok(names.into_iter().zip(quantised.into_iter().zip(plain)).map(outcome).collect())
}
