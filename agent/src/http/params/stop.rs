//! When generation ends.

use serde::Deserialize;
use stoker_engine::StopParams;

use super::tokens;
use crate::{
    admit::MaxTokens,
    http::{
        error::ApiError,
        fields::{FieldError, Fields},
    },
};

/// Stop strings one request may have.
const MAX_STOP_STRINGS: usize = 16;
/// Stop tokens one request may have.
const MAX_STOP_TOKENS: usize = 128;

/// Takes the bound on the answer's tokens, by its new name or its old one.
pub(super) fn max_tokens(fields: &mut Fields) -> Result<Option<MaxTokens>, ApiError> {
    let mut bound = |field| {
        let tokens = fields.number(field, 1..=u32::MAX)?;
        Ok::<_, FieldError>(tokens.map(|tokens| MaxTokens { tokens, field }))
    };
    let (new, old) = (bound("max_completion_tokens")?, bound("max_tokens")?);
    match (new, old) {
        (Some(new), Some(old)) if new.tokens != old.tokens => Err(ApiError::invalid(
            "max_tokens",
            format!("max_tokens={} contradicts max_completion_tokens={}: send one of them", old.tokens, new.tokens),
        )),
        (new, old) => Ok(new.or(old)),
    }
}

/// Takes the rest; `max_tokens` is what the client sent, and admission sets the one that counts.
pub(super) fn stop_params(
    fields: &mut Fields,
    max_tokens: Option<MaxTokens>,
    vocab_size: u32,
) -> Result<StopParams, ApiError> {
    let min_tokens = fields.number("min_tokens", 0..=u32::MAX)?.unwrap_or(0);
    if let Some(max) = max_tokens.filter(|max| min_tokens > max.tokens) {
        let MaxTokens { field, tokens } = max;
        let message = format!(
            "min_tokens={min_tokens} cannot be greater than {field}={tokens}: send a `min_tokens` of at most {tokens}, or a larger `{field}`"
        );
        return Err(ApiError::invalid("min_tokens", message));
    }
    Ok(StopParams {
        max_tokens: 0,
        min_tokens,
        ignore_eos: fields.take("ignore_eos")?.unwrap_or(false),
        stop: stop_strings(fields)?,
        stop_token_ids: tokens(fields, "stop_token_ids", vocab_size, Some(MAX_STOP_TOKENS))?,
        include_stop: fields.take("include_stop_str_in_output")?.unwrap_or(false),
        ..StopParams::default()
    })
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a string or an array of strings")]
enum OneOrMany {
    One(String),
    Many(Vec<String>),
}

fn stop_strings(fields: &mut Fields) -> Result<Vec<String>, ApiError> {
    let stop = match fields.take("stop")? {
        None => vec![],
        Some(OneOrMany::One(stop)) => vec![stop],
        Some(OneOrMany::Many(stop)) => stop,
    };
    if stop.len() > MAX_STOP_STRINGS {
        let message = format!(
            "`stop` has {} strings, more than {MAX_STOP_STRINGS}: send fewer, and single tokens in `stop_token_ids`, which takes \
             {MAX_STOP_TOKENS}",
            stop.len()
        );
        return Err(ApiError::invalid("stop", message));
    }
    if stop.iter().any(String::is_empty) {
        return Err(ApiError::invalid("stop", "`stop` has an empty string: it would end every answer at once"));
    }
    Ok(stop)
}
