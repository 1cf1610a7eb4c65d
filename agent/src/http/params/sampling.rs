//! How tokens are chosen, and what of it the model says where a request does not.

use std::collections::BTreeMap;

use stoker_engine::{SamplingParams, TokenId};

use super::Defaults;
use crate::http::{
    error::ApiError,
    fields::{FieldError, Fields},
};

/// Takes it out of `fields`.
pub(super) fn sampling(fields: &mut Fields, defaults: &Defaults) -> Result<SamplingParams, ApiError> {
    let base = &defaults.sampling;
    Ok(SamplingParams {
        temperature: fields.number("temperature", 0.0..=2.0)?.unwrap_or(base.temperature),
        top_p: fields.checked("top_p", "above 0 and at most 1", |p| *p > 0.0 && *p <= 1.0)?.unwrap_or(base.top_p),
        top_k: top_k(fields)?.unwrap_or(base.top_k),
        min_p: fields.number("min_p", 0.0..=1.0)?.unwrap_or(base.min_p),
        presence_penalty: fields.number("presence_penalty", -2.0..=2.0)?.unwrap_or(base.presence_penalty),
        frequency_penalty: fields.number("frequency_penalty", -2.0..=2.0)?.unwrap_or(base.frequency_penalty),
        repetition_penalty: repetition_penalty(fields)?.unwrap_or(base.repetition_penalty),
        logit_bias: logit_bias(fields, defaults.vocab_size)?,
        seed: seed(fields)?.unwrap_or(defaults.seed),
        constraint: None,
    })
}

/// -1 and 0 both mean "off", as does more than there are tokens.
fn top_k(fields: &mut Fields) -> Result<Option<u32>, FieldError> {
    let top_k = fields.checked::<i128>("top_k", "-1 or more", |k| *k >= -1)?;
    Ok(top_k.map(|k| u32::try_from(k).unwrap_or(0)))
}

fn repetition_penalty(fields: &mut Fields) -> Result<Option<f32>, FieldError> {
    fields.checked("repetition_penalty", "above 0", |penalty: &f32| *penalty > 0.0 && penalty.is_finite())
}

/// Any 64-bit integer: negative ones are the same bits.
fn seed(fields: &mut Fields) -> Result<Option<u64>, FieldError> {
    let range = i128::from(i64::MIN)..=i128::from(u64::MAX);
    let seed = fields.checked::<i128>("seed", "a 64-bit integer", |seed| range.contains(seed))?;
    Ok(seed.map(|seed| seed as u64))
}

fn logit_bias(fields: &mut Fields, vocab_size: u32) -> Result<BTreeMap<TokenId, f32>, ApiError> {
    let sent: BTreeMap<String, f32> = fields.take("logit_bias")?.unwrap_or_default();
    let (mut biases, mut unknown) = (BTreeMap::new(), Vec::new());
    for (key, bias) in sent {
        let param = format!("logit_bias.{key}");
        if !(-100.0..=100.0).contains(&bias) {
            return Err(ApiError::invalid(&param, format!("`{param}` must be between -100 and 100, got {bias}")));
        }
        match key.parse().ok().filter(|id: &TokenId| *id < vocab_size) {
            Some(id) => drop(biases.insert(id, bias)),
            None => unknown.push(param),
        }
    }
    let Some(first) = unknown.first() else { return Ok(biases) };
    let message = format!("`{}`: keys are token ids below the vocabulary of {vocab_size}", unknown.join("`, `"));
    Err(ApiError::invalid(first, message))
}
