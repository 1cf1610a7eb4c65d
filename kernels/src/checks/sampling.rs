//! Comparisons of the sampling tail: tokens must be the reference's, not merely near.

use super::{Gpu, Outcome};
use crate::{
    KernelError, reference,
    sampling::{EditLogits, Filters, LogitEdit, NO_TOKEN, Penalties, Sample, SampleRow, SampleScratch},
};

/// Rows of each kind where vocabularies are those of models.
const REPEATS: usize = 5;

/// Vocabularies and rows for a race checker, which is some hundred times slower.
pub(super) fn run_small(gpu: &mut Gpu) -> Result<Vec<Outcome>, KernelError> {
    let mut outcomes = run(gpu, &[1, 33, 4096], 1)?;
    outcomes.push(ties_and_broken_rows(gpu)?);
    Ok(outcomes)
}

/// Vocabularies of models.
pub(super) fn run_large(gpu: &mut Gpu) -> Result<Vec<Outcome>, KernelError> {
    run(gpu, &[32_001, 128_256, 151_936, 262_145], REPEATS)
}

fn run(gpu: &mut Gpu, vocabularies: &[usize], repeats: usize) -> Result<Vec<Outcome>, KernelError> {
    let mut outcomes = Vec::new();
    for &vocab in vocabularies {
        outcomes.extend(draws(gpu, vocab, repeats)?);
        outcomes.push(edits(gpu, vocab)?);
    }
    Ok(outcomes)
}

/// Every filter alone and all together, on rows of their own seeds.
fn rows(noise: &mut crate::noise::Noise, repeats: usize) -> Vec<SampleRow> {
    let plain = SampleRow { temperature: 1.0, ..SampleRow::GREEDY };
    let kinds = [
        SampleRow::GREEDY,
        plain,
        SampleRow { temperature: 0.3, ..plain },
        SampleRow { top_k: 1, ..plain },
        SampleRow { top_k: 50, ..plain },
        SampleRow { top_p: 0.9, ..plain },
        SampleRow { top_p: 0.01, ..plain },
        SampleRow { ln_min_p: 0.05f32.ln(), ..plain },
        SampleRow { temperature: 0.7, top_k: 40, top_p: 0.8, ln_min_p: 0.02f32.ln(), ..plain },
        SampleRow { top_k: 1 << 30, top_p: 0.999, ..plain },
    ];
    let seeded = |row| SampleRow { seed: noise.bits(), position: noise.bits() % 100_000, ..row };
    kinds.iter().cycle().take(repeats * kinds.len()).copied().map(seeded).collect()
}

fn draws(gpu: &mut Gpu, vocab: usize, repeats: usize) -> Result<[Outcome; 2], KernelError> {
    let rows = rows(&mut gpu.noise, repeats);
    // Spread like real logits: a deviation of 3 leaves some hundred likely tokens.
    let logits: Vec<f32> = (0..rows.len() * vocab).map(|_| 3.0 * gpu.noise.normal()).collect();
    let wanted: Vec<u32> = logits.chunks(vocab).zip(&rows).map(|(row, how)| reference::sample(row, *how)).collect();
    let found = draw(gpu, &logits, &rows, vocab, Filters::On)?;
    let unfiltered: Vec<SampleRow> =
        rows.iter().map(|row| SampleRow { top_k: 0, top_p: 1.0, ln_min_p: f32::NEG_INFINITY, ..*row }).collect();
    let plain: Vec<u32> =
        logits.chunks(vocab).zip(&unfiltered).map(|(row, how)| reference::sample(row, *how)).collect();
    let without = draw(gpu, &logits, &unfiltered, vocab, Filters::Off)?;
    Ok([
        compared(format!("{} rows of {vocab}, filtered", rows.len()), &found, &wanted),
        compared(format!("{} rows of {vocab}", rows.len()), &without, &plain),
    ])
}

fn draw(
    gpu: &Gpu,
    logits: &[f32],
    rows: &[SampleRow],
    vocab: usize,
    filters: Filters,
) -> Result<Vec<u32>, KernelError> {
    let (logits, how) = (gpu.upload(logits)?, gpu.upload(rows)?);
    let mut scratch = SampleScratch::new(gpu.stream(), rows.len())?;
    let mut tokens = gpu.poisoned(rows.len())?;
    // Twice: the second launch finds the tickets as the first one left them.
    for _ in 0..2 {
        gpu.kernels.sample(Sample {
            tokens: tokens.view(),
            logits: logits.as_view(),
            rows: how.as_view(),
            scratch: &mut scratch,
            vocab,
            filters,
        })?;
    }
    Ok(gpu.written(&tokens)?.unwrap_or_default())
}

/// The share of rows with another token. None is allowed: a logarithm that differs in its last bit moves the outcome only
/// where two scores of some 10^5 agree to 10^-6, which these seeds do not hit.
fn compared(case: String, found: &[u32], wanted: &[u32]) -> Outcome {
    let n_different = found.iter().zip(wanted).filter(|(found, wanted)| found != wanted).count();
    let error = if found.len() == wanted.len() { n_different as f64 / wanted.len() as f64 } else { f64::INFINITY };
    Outcome { op: "sample", case, error, limit: 0.0 }
}

fn ties_and_broken_rows(gpu: &mut Gpu) -> Result<Outcome, KernelError> {
    let vocab = 10_000;
    let mut logits: Vec<f32> = vec![0.0; 4 * vocab];
    logits[9_999] = 1.0;
    logits[5_000] = 1.0;
    logits[vocab + 7_777] = f32::NAN;
    logits[2 * vocab..3 * vocab].fill(f32::NEG_INFINITY);
    logits[3 * vocab + 42] = f32::INFINITY;
    let found = draw(gpu, &logits, &[SampleRow::GREEDY; 4], vocab, Filters::Off)?;
    Ok(compared("ties, NaN and infinities".to_owned(), &found, &[5_000, NO_TOKEN, 0, 42]))
}

fn edits(gpu: &mut Gpu, vocab: usize) -> Result<Outcome, KernelError> {
    let n_rows = 3;
    let mut logits: Vec<f32> = (0..n_rows * vocab).map(|_| gpu.noise.normal()).collect();
    let penalties = [0.5, 0.0, 1.25].map(|x| Penalties { presence: x, frequency: x / 2.0, repetition: 1.0 + x });
    let edits: Vec<LogitEdit> = (0..n_rows * vocab.min(100))
        .map(|at| LogitEdit {
            row: (at % n_rows) as u32,
            token: ((at / n_rows) * (vocab / vocab.min(100))) as u32,
            n_generated: gpu.noise.below(5) as i32 - 1,
            bias: if at % 7 == 0 { 1.5 } else { 0.0 },
        })
        .collect();
    let (mut on_device, list, each) = (gpu.upload(&logits)?, gpu.upload(&edits)?, gpu.upload(&penalties)?);
    gpu.kernels.edit_logits(EditLogits {
        logits: on_device.as_view_mut(),
        edits: list.as_view(),
        penalties: each.as_view(),
        vocab,
    })?;
    reference::edit_logits(&mut logits, &edits, &penalties, vocab);
    let n_different = gpu.download(&on_device)?.iter().zip(&logits).filter(|(found, wanted)| found != wanted).count();
    let case = format!("{} edits of {n_rows} rows of {vocab}", edits.len());
    Ok(Outcome { op: "edit_logits", case, error: n_different as f64, limit: 0.0 })
}
