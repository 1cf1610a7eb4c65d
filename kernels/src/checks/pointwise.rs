//! Comparisons of the operations between matrix products.

use half::f16;

use super::{
    Gpu, Outcome, TWO_ROUNDINGS,
    fixture::{Poisoned, widened},
    relative_error,
};
use crate::{
    KernelError, bf16,
    cache::{KvFormat, LayerCache},
    codes,
    launch::{BLOCK_SIZE, Heads, NormWeight},
    pointwise::{
        AddBias, AddRmsNorm, Embed, GeluMul, NormChain, NormPart, QkNorm, RmsNorm, RopeKv, Rotary, SiluMul, Softcap,
        angle_table,
    },
    reads::{RowSegment, SumRows},
    reference,
};

const EPS: f32 = 1e-5;

pub(super) fn run(gpu: &mut Gpu) -> Result<Vec<Outcome>, KernelError> {
    let mut outcomes = Vec::new();
    for (n_rows, width) in [(1, 8), (3, 320), (17, 4096), (2, 8192), (5, 8200), (1, 16384)] {
        outcomes.push(embed(gpu, n_rows, width, None)?);
        outcomes.push(embed(gpu, n_rows, width, Some(55.5))?);
        outcomes.push(rms_norm(gpu, n_rows, width)?);
        outcomes.extend(add_rms_norm(gpu, n_rows, width)?);
        outcomes.push(silu_mul(gpu, n_rows, width)?);
        outcomes.push(gelu_mul(gpu, n_rows, width)?);
        outcomes.push(add_bias(gpu, n_rows, width)?);
        outcomes.push(softcap(gpu, n_rows, width)?);
        outcomes.push(norm_part(gpu, n_rows, width)?);
        outcomes.push(sum_rows(gpu, n_rows, width)?);
        for weight in [NormWeight::Factor, NormWeight::OnePlusFactor] {
            for chain in [Chain::Norm, Chain::NormAdd, Chain::NormAddNorm] {
                outcomes.extend(norm_chain(gpu, (n_rows, width), chain, weight)?);
            }
        }
    }
    for (n_q, n_kv, dim) in [(32, 8, 128), (14, 2, 64), (6, 6, 64), (5, 1, 128)] {
        for n_rows in [1, 37] {
            for options in [Options::PLAIN, Options::BIAS, Options::NORM] {
                for format in KvFormat::ALL {
                    outcomes.extend(rope_kv(gpu, n_rows, Heads { n_q, n_kv, dim }, options, format)?);
                }
            }
        }
    }
    // Of 128 a part, as Phi-4-mini; none, as in SmolLM3; widths of other families, norms as Gemma's.
    for (n_q, n_kv, dim, n_pairs) in [
        (24, 8, 128, 48),
        (16, 4, 128, 0),
        (32, 32, 96, 48),
        (4, 1, 256, 128),
        (3, 3, 16, 8),
        (5, 5, 80, 24),
        (2, 1, 48, 24),
    ] {
        for n_rows in [1, 37] {
            for options in [Options::PLAIN, Options::BIAS, Options::NORM, Options::NORM_AROUND_ONE] {
                let options = Options { n_pairs: Some(n_pairs), ..options };
                for format in KvFormat::ALL {
                    outcomes.extend(rope_kv(gpu, n_rows, Heads { n_q, n_kv, dim }, options, format)?);
                }
            }
        }
    }
    Ok(outcomes)
}

fn outcome(
    gpu: &Gpu,
    op: &'static str,
    case: String,
    out: &Poisoned<bf16>,
    wanted: &[f32],
) -> Result<Outcome, KernelError> {
    let error = gpu.written(out)?.map_or(f64::INFINITY, |found| relative_error(&widened(&found), wanted));
    Ok(Outcome { op, case, error, limit: TWO_ROUNDINGS })
}

fn embed(gpu: &mut Gpu, n_rows: usize, width: usize, scale: Option<f32>) -> Result<Outcome, KernelError> {
    let vocab = 51;
    let table = gpu.noise.normals(vocab * width);
    let mut tokens: Vec<u32> = (0..n_rows).map(|_| gpu.noise.below(vocab) as u32).collect();
    if n_rows > 1 {
        tokens[n_rows - 1] = vocab as u32;
    }
    let mut out = gpu.poisoned(n_rows * width)?;
    let (on_device, ids) = (gpu.upload_bf16(&table)?, gpu.upload(&tokens)?);
    gpu.kernels.embed(Embed { out: out.view(), table: on_device.as_view(), tokens: ids.as_view(), width, scale })?;
    let rows = reference::embed(&table, &tokens, width);
    let wanted: Vec<f32> = rows.into_iter().map(|x| x * scale.unwrap_or(1.0)).collect();
    outcome(gpu, "embed", format!("{n_rows} x {width}, scale {scale:?}"), &out, &wanted)
}

fn rms_norm(gpu: &mut Gpu, n_rows: usize, width: usize) -> Result<Outcome, KernelError> {
    let (x, weight) = (gpu.noise.normals(n_rows * width), gpu.noise.normals(width));
    let mut out = gpu.poisoned(n_rows * width)?;
    let (input, weights) = (gpu.upload_bf16(&x)?, gpu.upload_bf16(&weight)?);
    gpu.kernels.rms_norm(RmsNorm { out: out.view(), x: input.as_view(), weight: weights.as_view(), eps: EPS })?;
    outcome(gpu, "rms_norm", format!("{n_rows} x {width}"), &out, &reference::rms_norm(&x, &weight, EPS))
}

fn add_rms_norm(gpu: &mut Gpu, n_rows: usize, width: usize) -> Result<Vec<Outcome>, KernelError> {
    let (x, residual, weight) =
        (gpu.noise.normals(n_rows * width), gpu.noise.normals(n_rows * width), gpu.noise.normals(width));
    let mut out = gpu.poisoned(n_rows * width)?;
    let (input, mut carried, weights) = (gpu.upload_bf16(&x)?, gpu.upload_bf16(&residual)?, gpu.upload_bf16(&weight)?);
    let (x_view, weight_view) = (input.as_view(), weights.as_view());
    gpu.kernels.add_rms_norm(AddRmsNorm {
        out: out.view(),
        residual: carried.as_view_mut(),
        x: x_view,
        weight: weight_view,
        eps: EPS,
    })?;
    let sum = reference::add(&x, &residual);
    let case = format!("{n_rows} x {width}");
    let normed = outcome(gpu, "add_rms_norm", case.clone(), &out, &reference::rms_norm(&sum, &weight, EPS))?;
    let error = relative_error(&widened(&gpu.download(&carried)?), &sum);
    Ok(vec![normed, Outcome { op: "add_rms_norm", case: format!("{case} residual"), error, limit: 0.0 }])
}

fn silu_mul(gpu: &mut Gpu, n_rows: usize, width: usize) -> Result<Outcome, KernelError> {
    let gate_up = gpu.noise.normals(2 * n_rows * width);
    let mut out = gpu.poisoned(n_rows * width)?;
    let input = gpu.upload_bf16(&gate_up)?;
    gpu.kernels.silu_mul(SiluMul { out: out.view(), gate_up: input.as_view(), width })?;
    outcome(gpu, "silu_mul", format!("{n_rows} x {width}"), &out, &reference::silu_mul(&gate_up))
}

fn gelu_mul(gpu: &mut Gpu, n_rows: usize, width: usize) -> Result<Outcome, KernelError> {
    let gate_up = gpu.noise.normals(2 * n_rows * width);
    let mut out = gpu.poisoned(n_rows * width)?;
    let input = gpu.upload_bf16(&gate_up)?;
    gpu.kernels.gelu_mul(GeluMul { out: out.view(), gate_up: input.as_view(), width })?;
    outcome(gpu, "gelu_mul", format!("{n_rows} x {width}"), &out, &reference::gelu_mul(&gate_up))
}

fn add_bias(gpu: &mut Gpu, n_rows: usize, width: usize) -> Result<Outcome, KernelError> {
    let (x, bias) = (gpu.noise.normals(n_rows * width), gpu.noise.normals(width));
    let mut out = gpu.guarded(x.iter().map(|x| bf16::from_f32(*x)).collect())?;
    let bias_gpu = gpu.upload_bf16(&bias)?;
    gpu.kernels.add_bias(AddBias { x: out.view(), bias: bias_gpu.as_view() })?;
    let wanted: Vec<f32> = x.chunks(width).flat_map(|row| row.iter().zip(&bias).map(|(x, b)| x + b)).collect();
    outcome(gpu, "add_bias", format!("{n_rows} x {width}"), &out, &wanted)
}

/// Of three segments, the first of which goes on where another left off, with the rows between two of them left out.
fn sum_rows(gpu: &mut Gpu, n_rows: usize, width: usize) -> Result<Outcome, KernelError> {
    let n_rows = 3 * n_rows;
    let rows = gpu.noise.normals(n_rows * width);
    let before: Vec<f64> = (0..3 * width).map(|i| i as f64).collect();
    let segment =
        |slot, first: usize, end: usize| RowSegment { slot, first_row: first as u32, n_rows: (end - first) as u32 };
    let segments = [segment(2, 0, n_rows / 3), segment(0, n_rows / 3 + 1, n_rows)];
    let (on_device, chosen, mut sums) = (gpu.upload_bf16(&rows)?, gpu.upload(&segments)?, gpu.upload(&before)?);
    gpu.kernels.sum_rows(SumRows {
        sums: sums.as_view_mut(),
        rows: on_device.as_view(),
        segments: chosen.as_view(),
        width,
    })?;
    let mut wanted = before;
    for RowSegment { slot, first_row, n_rows } in segments {
        for row in rows.chunks(width).skip(first_row as usize).take(n_rows as usize) {
            let sum = &mut wanted[slot as usize * width..][..width];
            sum.iter_mut().zip(row).for_each(|(sum, value)| *sum += f64::from(*value));
        }
    }
    let differ = gpu.download(&sums)?.iter().zip(&wanted).filter(|(found, wanted)| found != wanted).count();
    Ok(Outcome { op: "sum_rows", case: format!("{n_rows} x {width}"), error: differ as f64, limit: 0.0 })
}

fn softcap(gpu: &mut Gpu, n_rows: usize, width: usize) -> Result<Outcome, KernelError> {
    let logits: Vec<f32> = gpu.noise.normals(n_rows * width).iter().map(|x| 40.0 * x).collect();
    let mut out = gpu.guarded(logits.clone())?;
    gpu.kernels.softcap(Softcap { logits: out.view(), cap: 30.0 })?;
    let wanted: Vec<f32> = logits.iter().map(|x| reference::softcap(*x, 30.0)).collect();
    let error = gpu.written(&out)?.map_or(f64::INFINITY, |found| relative_error(&found, &wanted));
    // Some roundings of f32.
    Ok(Outcome { op: "softcap", case: format!("{n_rows} x {width}"), error, limit: 1e-6 })
}

/// A part in the middle of rows twice as wide, whose other values must stay.
fn norm_part(gpu: &mut Gpu, n_rows: usize, width: usize) -> Result<Outcome, KernelError> {
    let (stride, first) = (2 * width + 8, 8);
    let (x, weight) = (gpu.noise.normals(n_rows * stride), gpu.noise.normals(width));
    let mut out = gpu.guarded(x.iter().map(|x| bf16::from_f32(*x)).collect())?;
    let weight_gpu = gpu.upload_bf16(&weight)?;
    gpu.kernels.norm_part(NormPart { rows: out.view(), stride, first, weight: weight_gpu.as_view(), eps: EPS })?;
    let normed = |row: &[f32]| {
        let mut row = row.to_vec();
        let part = reference::rms_norm(&row[first..first + width], &weight, EPS);
        row[first..first + width].copy_from_slice(&part);
        row
    };
    let wanted: Vec<f32> = x.chunks(stride).flat_map(normed).collect();
    outcome(gpu, "norm_part", format!("{n_rows} x {width} of {stride}"), &out, &wanted)
}

/// What of a chain is asked for.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Chain {
    Norm,
    NormAdd,
    NormAddNorm,
}

fn norm_chain(
    gpu: &mut Gpu,
    (n_rows, width): (usize, usize),
    chain: Chain,
    weight: NormWeight,
) -> Result<Vec<Outcome>, KernelError> {
    let size = n_rows * width;
    let (x, residual) = (gpu.noise.normals(size), gpu.noise.normals(size));
    let (after, next) = (gpu.noise.normals(width), gpu.noise.normals(width));
    let (x_gpu, after_gpu, next_gpu) = (gpu.upload_bf16(&x)?, gpu.upload_bf16(&after)?, gpu.upload_bf16(&next)?);
    let mut out = gpu.poisoned(size)?;
    let mut carried = gpu.guarded(residual.iter().map(|x| bf16::from_f32(*x)).collect())?;
    gpu.kernels.norm_chain(NormChain {
        x: x_gpu.as_view(),
        after: (chain != Chain::Norm).then(|| after_gpu.as_view()),
        residual: (chain != Chain::Norm).then(|| carried.view()),
        norm: (chain != Chain::NormAdd).then(|| (out.view(), next_gpu.as_view())),
        width,
        weight,
        eps: EPS,
    })?;
    let normed: Vec<f32> = reference::norm(&x, &after, weight, EPS).into_iter().map(reference::rounded).collect();
    let sum = reference::add(&normed, &residual);
    let case = format!("{n_rows} x {width}, {chain:?}, {weight:?}");
    let mut outcomes = Vec::new();
    if chain != Chain::NormAdd {
        let from = if chain == Chain::Norm { &x } else { &sum };
        outcomes.push(outcome(gpu, "norm_chain", case.clone(), &out, &reference::norm(from, &next, weight, EPS))?);
    }
    if chain != Chain::Norm {
        outcomes.push(outcome(gpu, "norm_chain", format!("{case}: residual"), &carried, &sum)?);
    }
    Ok(outcomes)
}

/// What is done to queries and keys.
#[derive(Clone, Copy, Debug)]
struct Options {
    has_bias: bool,
    norm: Option<NormWeight>,
    /// Pairs that turn, if not all.
    n_pairs: Option<usize>,
}

impl Options {
    const PLAIN: Self = Self { has_bias: false, norm: None, n_pairs: None };
    const BIAS: Self = Self { has_bias: true, ..Self::PLAIN };
    const NORM: Self = Self { norm: Some(NormWeight::Factor), ..Self::PLAIN };
    const NORM_AROUND_ONE: Self = Self { norm: Some(NormWeight::OnePlusFactor), ..Self::BIAS };
}

fn rope_kv(
    gpu: &mut Gpu,
    n_rows: usize,
    heads: Heads,
    options: Options,
    format: KvFormat,
) -> Result<Vec<Outcome>, KernelError> {
    let (n_blocks, n_positions, width) = (n_rows.div_ceil(4) + 3, 5000, heads.qkv_width());
    let qkv = gpu.noise.normals(n_rows * width);
    let n_pairs = options.n_pairs.unwrap_or(heads.dim / 2);
    let inv_freq: Vec<f64> = (0..n_pairs).map(|i| 5e5f64.powf(-(i as f64) / n_pairs as f64)).collect();
    let angles = angle_table(n_positions, &inv_freq, 1.0);
    let positions: Vec<i32> = (0..n_rows).map(|_| gpu.noise.below(n_positions) as i32).collect();
    let mut slots = gpu.noise.permutation(n_blocks * BLOCK_SIZE);
    slots.truncate(n_rows);
    if n_rows > 1 {
        slots[n_rows / 2] = -1;
    }
    let (bias, q_weight, k_weight) =
        (gpu.noise.normals(width), gpu.noise.normals(heads.dim), gpu.noise.normals(heads.dim));
    let (bias_gpu, q_gpu, k_gpu) = (gpu.upload_bf16(&bias)?, gpu.upload_bf16(&q_weight)?, gpu.upload_bf16(&k_weight)?);
    let mut rows = gpu.upload_bf16(&qkv)?;
    let scales = cache_scales(heads, format);
    let mut cache = poisoned_cache(gpu, n_blocks * heads.block_values(), &scales, format)?;
    let (angles_gpu, positions_gpu, slots_gpu) = (gpu.upload(&angles)?, gpu.upload(&positions)?, gpu.upload(&slots)?);
    let norm = |weight| QkNorm { q_weight: q_gpu.as_view(), k_weight: k_gpu.as_view(), weight, eps: EPS };
    gpu.kernels.rope_kv(RopeKv {
        qkv: rows.as_view_mut(),
        cache: &mut cache,
        bias: options.has_bias.then(|| bias_gpu.as_view()),
        norm: options.norm.map(norm),
        rotary: (n_pairs > 0).then(|| Rotary { angles: angles_gpu.as_view(), n_pairs }),
        positions: positions_gpu.as_view(),
        slots: slots_gpu.as_view(),
        heads,
    })?;
    let wanted: Vec<Vec<f32>> = (0..n_rows)
        .map(|row| {
            reference::rope(&reference::RopeRow {
                qkv: &qkv[row * width..][..width],
                bias: options.has_bias.then_some(&bias[..]),
                norm: options.norm.map(|_| (&q_weight[..], &k_weight[..], EPS)),
                norm_weight: options.norm.unwrap_or(NormWeight::Factor),
                angles: &angles[positions[row] as usize * 2 * n_pairs..][..2 * n_pairs],
                heads,
            })
        })
        .collect();
    let case = format!("{n_rows} rows, {} / {} heads of {}, {options:?}, {format:?}", heads.n_q, heads.n_kv, heads.dim);
    let rows = gpu.download(&rows)?;
    let found: Vec<f32> = match format {
        KvFormat::Bf16 => widened(&rows),
        KvFormat::E4m3 => rows.iter().map(|x| f16::from_bits(x.to_bits()).to_f32()).collect(),
    };
    let n_query = heads.n_q * heads.dim;
    let queries = |all: &[f32]| all.chunks(width).flat_map(|row| row[..n_query].to_vec()).collect::<Vec<_>>();
    let error = relative_error(&queries(&found), &queries(&wanted.concat()));
    let kv_error = cache_error(&stored(gpu, &cache)?, &wanted, &slots, (heads, &scales, format));
    let limit = TWO_ROUNDINGS;
    Ok(vec![
        Outcome { op: "rope_kv", case: format!("{case}: q"), error, limit },
        Outcome { op: "rope_kv", case: format!("{case}: kv"), error: kv_error, limit },
    ])
}

fn as_stored(x: f32, format: KvFormat) -> f32 {
    if format == KvFormat::E4m3 { reference::e4m3(x) } else { x }
}

/// Of each head's keys, then of each one's values; by those of every other head some numbers are larger than e4m3 has.
fn cache_scales(heads: Heads, format: KvFormat) -> Vec<f32> {
    match format {
        KvFormat::Bf16 => vec![1.0; 2 * heads.n_kv],
        KvFormat::E4m3 => (0..2 * heads.n_kv).map(|at| if at % 2 == 0 { 0.005 } else { 0.3 }).collect(),
    }
}

/// A cache that nobody has written.
fn poisoned_cache(gpu: &Gpu, n: usize, scales: &[f32], format: KvFormat) -> Result<LayerCache, KernelError> {
    Ok(match format {
        KvFormat::Bf16 => LayerCache::Bf16 { k: gpu.upload(&vec![bf16::NAN; n])?, v: gpu.upload(&vec![bf16::NAN; n])? },
        KvFormat::E4m3 => {
            let codes = vec![0x7f; n];
            LayerCache::E4m3 { k: gpu.upload(&codes)?, v: gpu.upload(&codes)?, scales: gpu.upload(scales)? }
        }
    })
}

/// Keys and values without their scales.
fn stored(gpu: &Gpu, cache: &LayerCache) -> Result<[Vec<f32>; 2], KernelError> {
    let numbers = |codes: Vec<u8>| codes.into_iter().map(codes::e4m3).collect();
    Ok(match cache {
        LayerCache::Bf16 { k, v } => [widened(&gpu.download(k)?), widened(&gpu.download(v)?)],
        LayerCache::E4m3 { k, v, .. } => [numbers(gpu.download(k)?), numbers(gpu.download(v)?)],
    })
}

/// Compares the slots that were to be written; infinite if any other slot was touched.
fn cache_error(
    caches: &[Vec<f32>; 2],
    wanted: &[Vec<f32>],
    slots: &[i32],
    (heads, scales, format): (Heads, &[f32], KvFormat),
) -> f64 {
    let Heads { n_q, n_kv, dim } = heads;
    let mut expected = [vec![f32::NAN; caches[0].len()], vec![f32::NAN; caches[1].len()]];
    for (row, &slot) in wanted.iter().zip(slots) {
        let Ok(slot) = usize::try_from(slot) else { continue };
        for (kind, cache) in expected.iter_mut().enumerate() {
            for head in 0..n_kv {
                let source = &row[(n_q + kind * n_kv + head) * dim..][..dim];
                let target = &mut cache[reference::cache_offset(slot, head, heads)..][..dim];
                let scale = scales[kind * n_kv + head];
                target.iter_mut().zip(source).for_each(|(stored, x)| *stored = as_stored(x / scale, format));
            }
        }
    }
    let (found, expected) = (caches.concat(), expected.concat());
    if found.iter().zip(&expected).any(|(f, e)| f.is_nan() != e.is_nan()) {
        return f64::INFINITY;
    }
    let written = |all: &[f32]| all.iter().copied().filter(|x| !x.is_nan()).collect::<Vec<_>>();
    relative_error(&written(&found), &written(&expected))
}
