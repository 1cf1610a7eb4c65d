//! What quantising did to a model's answers: both models read the same text, and their next-token probabilities are compared.

use std::path::Path;

use anyhow::Result;
use serde::{Deserialize, Serialize};
use stoker_engine::{DeviceChoice, EngineConfig, EngineLimits, LoadedModel, ModelFiles};

use crate::calibration::sequences;

/// Two models on one text.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
pub struct Comparison {
    /// Tokens whose probability was compared.
    pub n_tokens: usize,
    /// e to the mean of what each token took by surprise, of the original.
    pub perplexity_before: f64,
    /// The same of the quantised one.
    pub perplexity_after: f64,
    /// Mean Kullback-Leibler divergence of the quantised one's probabilities from the original's, in nats.
    pub divergence: f64,
    /// Share of places where both find the same token the likeliest.
    pub agreement: f64,
}

/// Opens a model for reading sequences of so many tokens on the CPU, one at a time.
pub(crate) fn open(model: &Path, length: usize) -> Result<LoadedModel> {
    let tokens = u32::try_from(length)?;
    let limits = EngineLimits {
        max_model_len: Some(tokens),
        max_num_seqs: Some(1),
        max_batched_tokens: Some(tokens),
        kv_cache_tokens: Some(tokens),
        ..EngineLimits::default()
    };
    let config = EngineConfig { model: ModelFiles::Directory(model.to_owned()), limits, device: DeviceChoice::Cpu };
    Ok(LoadedModel::open(&config, &|_| {})?)
}

/// Lets both read `text`: sequences of `length` tokens at most, `most` of them.
pub fn compare(original: &Path, quantised: &Path, text: &Path, length: usize, most: usize) -> Result<Comparison> {
    let (mut before, mut after) = (open(original, length)?, open(quantised, length)?);
    let sequences = sequences(text, &before.parts.tokenizer, length, most)?;
    let (mut n_tokens, mut surprises, mut divergence, mut agreed) = (0usize, [0.0; 2], 0.0, 0usize);
    for tokens in &sequences {
        let rows = before.executor.teacher_forced_logits(tokens, tokens.len());
        let others = after.executor.teacher_forced_logits(tokens, tokens.len());
        for ((row, other), token) in rows.iter().zip(&others).zip(&tokens[1..]) {
            let [row, other] = [row, other].map(|logits| log_probabilities(logits));
            let token = *token as usize;
            n_tokens += 1;
            surprises[0] -= row[token];
            surprises[1] -= other[token];
            divergence += row.iter().zip(&other).map(|(p, q)| p.exp() * (p - q)).sum::<f64>();
            agreed += usize::from(likeliest(&row) == likeliest(&other));
        }
    }
    let mean = |sum: f64| sum / n_tokens as f64;
    let [perplexity_before, perplexity_after] = surprises.map(|sum| mean(sum).exp());
    Ok(Comparison {
        n_tokens,
        perplexity_before,
        perplexity_after,
        divergence: mean(divergence),
        agreement: mean(agreed as f64),
    })
}

fn log_probabilities(logits: &[f32]) -> Vec<f64> {
    let most = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let sum: f64 = logits.iter().map(|logit| (f64::from(*logit) - most).exp()).sum();
    let sum = most + sum.ln();
    logits.iter().map(|logit| f64::from(*logit) - sum).collect()
}

fn likeliest(row: &[f64]) -> usize {
    row.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).map_or(0, |(idx, _)| idx)
}
