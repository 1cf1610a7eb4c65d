//! Comparisons of the operations between matrix products.

use super::{
    Gpu, Outcome, TWO_ROUNDINGS,
    fixture::{Poisoned, widened},
    relative_error,
};
use crate::{
    KernelError, bf16,
    launch::{BLOCK_SIZE, Heads},
    pointwise::{AddRmsNorm, Embed, QkNorm, RmsNorm, RopeKv, SiluMul, angle_table},
    reference,
};

const EPS: f32 = 1e-5;

pub(super) fn run(gpu: &mut Gpu) -> Result<Vec<Outcome>, KernelError> {
    let mut outcomes = Vec::new();
    for (n_rows, width) in [(1, 8), (3, 320), (17, 4096), (2, 8192), (5, 8200), (1, 16384)] {
        outcomes.push(embed(gpu, n_rows, width)?);
        outcomes.push(rms_norm(gpu, n_rows, width)?);
        outcomes.extend(add_rms_norm(gpu, n_rows, width)?);
        outcomes.push(silu_mul(gpu, n_rows, width)?);
    }
    for (n_q, n_kv, dim) in [(32, 8, 128), (14, 2, 64), (6, 6, 64), (5, 1, 128)] {
        for n_rows in [1, 37] {
            for options in [Options::Plain, Options::Bias, Options::Norm] {
                outcomes.extend(rope_kv(gpu, n_rows, Heads { n_q, n_kv, dim }, options)?);
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

fn embed(gpu: &mut Gpu, n_rows: usize, width: usize) -> Result<Outcome, KernelError> {
    let vocab = 51;
    let table = gpu.noise.normals(vocab * width);
    let mut tokens: Vec<u32> = (0..n_rows).map(|_| gpu.noise.below(vocab) as u32).collect();
    if n_rows > 1 {
        tokens[n_rows - 1] = vocab as u32;
    }
    let mut out = gpu.poisoned(n_rows * width)?;
    let (on_device, ids) = (gpu.upload_bf16(&table)?, gpu.upload(&tokens)?);
    gpu.kernels.embed(Embed { out: out.view(), table: on_device.as_view(), tokens: ids.as_view(), width })?;
    outcome(gpu, "embed", format!("{n_rows} x {width}"), &out, &reference::embed(&table, &tokens, width))
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

#[derive(Clone, Copy, Debug)]
enum Options {
    Plain,
    Bias,
    Norm,
}

fn rope_kv(gpu: &mut Gpu, n_rows: usize, heads: Heads, options: Options) -> Result<Vec<Outcome>, KernelError> {
    let (n_blocks, n_positions, width) = (n_rows.div_ceil(4) + 3, 5000, heads.qkv_width());
    let qkv = gpu.noise.normals(n_rows * width);
    let inv_freq: Vec<f64> = (0..heads.dim / 2).map(|i| 5e5f64.powf(-2.0 * i as f64 / heads.dim as f64)).collect();
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
    let mut k_cache = gpu.upload(&vec![bf16::NAN; n_blocks * heads.block_values()])?;
    let mut v_cache = gpu.upload(&vec![bf16::NAN; n_blocks * heads.block_values()])?;
    let (angles_gpu, positions_gpu, slots_gpu) = (gpu.upload(&angles)?, gpu.upload(&positions)?, gpu.upload(&slots)?);
    let norm = QkNorm { q_weight: q_gpu.as_view(), k_weight: k_gpu.as_view(), eps: EPS };
    gpu.kernels.rope_kv(RopeKv {
        qkv: rows.as_view_mut(),
        k_cache: k_cache.as_view_mut(),
        v_cache: v_cache.as_view_mut(),
        bias: matches!(options, Options::Bias).then(|| bias_gpu.as_view()),
        norm: matches!(options, Options::Norm).then_some(norm),
        angles: angles_gpu.as_view(),
        positions: positions_gpu.as_view(),
        slots: slots_gpu.as_view(),
        heads,
    })?;
    let wanted: Vec<Vec<f32>> = (0..n_rows)
        .map(|row| {
            reference::rope(&reference::RopeRow {
                qkv: &qkv[row * width..][..width],
                bias: matches!(options, Options::Bias).then_some(&bias[..]),
                norm: matches!(options, Options::Norm).then_some((&q_weight[..], &k_weight[..], EPS)),
                angles: &angles[positions[row] as usize * heads.dim..][..heads.dim],
                heads,
            })
        })
        .collect();
    let case = format!("{n_rows} rows, {} / {} heads of {}, {options:?}", heads.n_q, heads.n_kv, heads.dim);
    let found = widened(&gpu.download(&rows)?);
    let n_query = heads.n_q * heads.dim;
    let queries = |all: &[f32]| all.chunks(width).flat_map(|row| row[..n_query].to_vec()).collect::<Vec<_>>();
    let error = relative_error(&queries(&found), &queries(&wanted.concat()));
    let caches = [&gpu.download(&k_cache)?, &gpu.download(&v_cache)?].map(|cache| widened(cache));
    let kv_error = cache_error(&caches, &wanted, &slots, heads);
    let limit = TWO_ROUNDINGS;
    Ok(vec![
        Outcome { op: "rope_kv", case: format!("{case}: q"), error, limit },
        Outcome { op: "rope_kv", case: format!("{case}: kv"), error: kv_error, limit },
    ])
}

/// Compares the slots that were to be written; infinite if any other slot was touched.
fn cache_error(caches: &[Vec<f32>; 2], wanted: &[Vec<f32>], slots: &[i32], heads: Heads) -> f64 {
    let Heads { n_q, n_kv, dim } = heads;
    let mut expected = [vec![f32::NAN; caches[0].len()], vec![f32::NAN; caches[1].len()]];
    for (row, &slot) in wanted.iter().zip(slots) {
        let Ok(slot) = usize::try_from(slot) else { continue };
        for (kind, cache) in expected.iter_mut().enumerate() {
            for head in 0..n_kv {
                let source = &row[(n_q + kind * n_kv + head) * dim..][..dim];
                cache[reference::cache_offset(slot, head, heads)..][..dim].copy_from_slice(source);
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
