//! Generation parameters shared by chat and text completions: names, ranges and defaults, checked once into `Generation`.
//! Pure: defaults and the random seed are arguments. Ranges are vLLM's where OpenAI's API does not define the field.
//!
//! `sampling` is how tokens are chosen, `stop` when generation ends, `delivery` how the answer travels, `truncation` what is kept of a prompt,
//! `standing` when it begins and whose cached prompts are its.

mod delivery;
mod sampling;
mod standing;
mod stop;
mod truncation;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use stoker_engine::{SamplingParams, StopParams, TokenId};

use self::{
    delivery::delivery,
    sampling::sampling,
    standing::{begins_within, both_salts, cache_salt, priority},
    stop::{max_tokens, stop_params},
};
pub(crate) use self::{
    delivery::{Delivery, UsageIn},
    standing::{DEADLINE, Standing},
    truncation::{Kept, Truncation, truncation},
};
use crate::{
    admit::MaxTokens,
    http::{
        error::ApiError,
        fields::{FieldError, Fields},
        filter::Filter,
        logprobs::Names,
        neutral::take_neutral,
    },
};

/// Tokens whose log-probabilities one request may ask for by id.
const MAX_LOGPROB_TOKENS: usize = 128;
/// Longest name of a request.
const MAX_REQUEST_ID_CHARS: usize = 128;
/// Completions of one prompt.
const MAX_N: u32 = 128;
/// Likeliest tokens reported at each position.
pub(crate) const MAX_TOP_LOGPROBS: u8 = 20;

/// How to continue a prompt and how to answer.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Generation {
    /// How tokens are chosen; `seed` is the first completion's.
    pub(crate) sampling: SamplingParams,
    /// When generation ends; its `max_tokens` is set by admission.
    pub(crate) stop: StopParams,
    /// The bound the client sent.
    pub(crate) max_tokens: Option<MaxTokens>,
    /// Completions of each prompt.
    pub(crate) n: u32,
    /// How the answer travels.
    pub(crate) delivery: Delivery,
    /// What the client wants the answer to be called.
    pub(crate) request_id: Option<String>,
    /// Tokens of each prompt that are kept.
    pub(crate) truncate: Option<Truncation>,
    /// How tokens are shown.
    pub(crate) shown: TokensShown,
    /// Log-probabilities of the prompt's tokens, each with so many rivals.
    pub(crate) prompt_logprobs: Option<u8>,
    /// Tokens whose log-probabilities are wanted instead of the likeliest ones'.
    pub(crate) logprob_tokens: Vec<TokenId>,
    /// Tokens and words that are allowed or banned one by one.
    pub(crate) filter: Filter,
    /// The smaller, the sooner.
    pub(crate) priority: i32,
    /// How long it may wait before it begins.
    pub(crate) begins_within: Option<Duration>,
    /// Who may find the prompt's keys and values: those who know it.
    pub(crate) cache_salt: Option<Arc<str>>,
}

/// How an answer shows tokens beside text.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct TokensShown {
    /// The ids of prompt and completion are part of the answer.
    pub(crate) with_ids: bool,
    /// Log-probabilities name tokens by id, not by text.
    pub(crate) named_by_id: bool,
}

/// What the model and the process bring to a request that does not say.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Defaults {
    /// From the model's generation config.
    pub(crate) sampling: SamplingParams,
    /// For a request without one.
    pub(crate) seed: u64,
    /// Tokens the model knows.
    pub(crate) vocab_size: u32,
    /// What the gateway says that its cached prompts are told apart by, before what the request says.
    pub(crate) salt: Option<Arc<str>>,
    /// Whether log-probabilities call tokens by their ids.
    pub(crate) names_tokens_by_id: bool,
}

impl Generation {
    /// Takes every generation parameter out of `fields`.
    pub(crate) fn take(fields: &mut Fields, defaults: &Defaults) -> Result<Self, ApiError> {
        refuse_unsupported(fields)?;
        let (max_tokens, vocab_size) = (max_tokens(fields)?, defaults.vocab_size);
        let delivery = delivery(fields)?;
        let stop = stop_params(fields, max_tokens, defaults.vocab_size)?;
        Ok(Self {
            sampling: sampling(fields, defaults)?,
            stop,
            max_tokens,
            n: fields.number("n", 1..=MAX_N)?.unwrap_or(1),
            prompt_logprobs: prompt_logprobs(fields, delivery)?,
            delivery,
            request_id: request_id(fields)?,
            truncate: truncation(fields)?,
            shown: TokensShown {
                with_ids: fields.take("return_token_ids")?.unwrap_or(false),
                named_by_id: fields.take("return_tokens_as_token_ids")?.unwrap_or(defaults.names_tokens_by_id),
            },
            logprob_tokens: tokens(fields, "logprob_token_ids", vocab_size, Some(MAX_LOGPROB_TOKENS))?,
            filter: Filter::take(fields, vocab_size)?,
            priority: priority(fields)?,
            begins_within: begins_within(fields)?,
            cache_salt: both_salts(defaults.salt.as_ref(), cache_salt(fields)?),
        })
    }

    /// What log-probabilities call tokens.
    pub(crate) fn token_names(&self) -> Names {
        if self.shown.named_by_id { Names::Id } else { Names::Text }
    }

    /// Parameters of the `choice`-th completion: the same but for randomness, which must differ.
    pub(crate) fn sampling_of(&self, choice: u32) -> SamplingParams {
        SamplingParams { seed: seed_of(self.sampling.seed, choice), ..self.sampling.clone() }
    }
}

/// The first completion keeps the client's seed, so `n` does not change it.
fn seed_of(seed: u64, choice: u32) -> u64 {
    // Odd multiplier (2^64 / golden ratio): distinct for every choice, far apart in every bit.
    seed ^ u64::from(choice).wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

/// It becomes part of the answer's id and of logs.
pub(crate) fn request_id(fields: &mut Fields) -> Result<Option<String>, FieldError> {
    let is_name =
        |id: &String| (1..=MAX_REQUEST_ID_CHARS).contains(&id.len()) && id.chars().all(|c| c.is_ascii_graphic());
    fields.checked("request_id", "1 to 128 visible ASCII characters", is_name)
}

/// Of a whole answer only: they are known before its first token and would hold up a stream.
fn prompt_logprobs(fields: &mut Fields, delivery: Delivery) -> Result<Option<u8>, ApiError> {
    let asked = fields.number("prompt_logprobs", 0..=MAX_TOP_LOGPROBS)?;
    if asked.is_some() && delivery != Delivery::Whole {
        let message = "`prompt_logprobs` is not part of a stream: remove it, or set `stream` to false";
        return Err(ApiError::unsupported("prompt_logprobs", message));
    }
    Ok(asked)
}

/// Takes the bound on tokens of thought; -1 is none.
pub(crate) fn thinking_budget(fields: &mut Fields) -> Result<Option<u32>, FieldError> {
    let is_budget = |sent: &i64| (-1..=i64::from(u32::MAX)).contains(sent);
    let sent = fields.checked::<i64>("thinking_token_budget", "-1 or more", is_budget)?;
    Ok(sent.and_then(|sent| u32::try_from(sent).ok()))
}

/// A list of tokens of the vocabulary, checked one by one.
pub(crate) fn tokens(
    fields: &mut Fields,
    field: &'static str,
    vocab_size: u32,
    limit: Option<usize>,
) -> Result<Vec<TokenId>, ApiError> {
    let sent: Vec<i64> = fields.take(field)?.unwrap_or_default();
    if let Some(limit) = limit.filter(|limit| sent.len() > *limit) {
        let message = format!("`{field}` has {} tokens, at most {limit} are supported", sent.len());
        return Err(ApiError::invalid(field, message));
    }
    let token = |(idx, id): (usize, i64)| {
        TokenId::try_from(id).ok().filter(|id| *id < vocab_size).ok_or_else(|| {
            let param = format!("{field}[{idx}]");
            ApiError::invalid(&param, format!("`{param}` must be between 0 and {}, got {id}", vocab_size - 1))
        })
    };
    sent.into_iter().enumerate().map(token).collect()
}

/// Fields that describe the caller and change no answer are taken and dropped; fields that would change it and are not
/// implemented are taken only at the value that changes nothing.
fn refuse_unsupported(fields: &mut Fields) -> Result<(), ApiError> {
    for label in ["user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"] {
        fields.take::<String>(label)?;
    }
    fields.take::<BTreeMap<String, String>>("metadata")?;
    take_neutral(fields)?;
    only(fields, "skip_special_tokens", &true, "special tokens are never part of the text")?;
    let tier = fields.take::<String>("service_tier")?.unwrap_or_default();
    if !["", "auto", "default"].contains(&tier.as_str()) {
        return Err(ApiError::unsupported(
            "service_tier",
            format!("service_tier `{tier}` is not supported: use `auto`"),
        ));
    }
    Ok(())
}

/// Takes a field that is supported at one value only.
pub(crate) fn only<T>(fields: &mut Fields, field: &'static str, supported: &T, why: &str) -> Result<(), ApiError>
where
    T: serde::de::DeserializeOwned + PartialEq + std::fmt::Debug,
{
    match fields.take::<T>(field)? {
        Some(value) if value != *supported => Err(ApiError::unsupported(
            field,
            format!("`{field}: {value:?}` is not supported ({why}): use {supported:?}"),
        )),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take(json: &str) -> Result<Generation, ApiError> {
        let defaults = Defaults {
            sampling: SamplingParams { temperature: 0.6, ..SamplingParams::default() },
            seed: 99,
            vocab_size: 100,
            salt: None,
            names_tokens_by_id: false,
        };
        let mut fields = Fields::parse(json.to_owned().into())?;
        let generation = Generation::take(&mut fields, &defaults)?;
        fields.finish()?;
        Ok(generation)
    }

    #[test]
    fn absent_parameters_come_from_the_models_generation_config() {
        let generation = take("{}").unwrap();
        assert_eq!((generation.sampling.temperature, generation.sampling.seed), (0.6, 99));
        assert_eq!((generation.n, generation.delivery, generation.max_tokens), (1, Delivery::Whole, None));
    }

    #[test]
    fn every_range_is_checked_and_names_its_field() {
        for (field, bad) in [
            ("temperature", "2.1"),
            ("temperature", "-0.1"),
            ("top_p", "0"),
            ("top_p", "1.01"),
            ("top_k", "-2"),
            ("min_p", "1.5"),
            ("presence_penalty", "-2.5"),
            ("frequency_penalty", "3"),
            ("repetition_penalty", "0"),
            ("n", "0"),
            ("n", "129"),
            ("max_tokens", "0"),
            ("max_completion_tokens", "0"),
            ("seed", "36893488147419103232"),
            ("seed", "1.5"),
            ("min_tokens", "-1"),
            ("stop", "\"\""),
            ("stop", "[\"a\", \"\"]"),
            ("stop", "5"),
            ("stream", "\"yes\""),
            ("stream_options", "{\"include_usage\": true}"),
            ("store", "true"),
            ("modalities", "[\"text\", \"audio\"]"),
            ("service_tier", "\"flex\""),
            ("skip_special_tokens", "false"),
            ("request_id", "\"\""),
            ("request_id", "\"a b\""),
            ("truncate_prompt_tokens", "0"),
            ("truncate_prompt_tokens", "-2"),
            ("truncation_side", "\"middle\""),
            ("prompt_logprobs", "-1"),
            ("prompt_logprobs", "21"),
            ("priority", "2147483648"),
            ("priority", "0.5"),
            ("deadline_ms", "0"),
            ("deadline_ms", "86400001"),
            ("deadline_ms", "\"5s\""),
            ("cache_salt", "\"\""),
            ("bad_words", "[\"\"]"),
            ("bad_words", "\"a\""),
            ("return_token_ids", "1"),
            ("guided_json", "{}"),
        ] {
            let error = take(&format!("{{\"{field}\": {bad}}}")).unwrap_err();
            assert_eq!(
                (error.param.as_deref(), error.status.as_u16()),
                (Some(field), 400),
                "{field} = {bad}: {error:?}"
            );
        }
    }

    #[test]
    fn what_openais_clients_send_along_is_accepted() {
        let generation = take(
            r#"{"user": "u", "metadata": {"a": "b"}, "store": false, "service_tier": "auto", "top_k": -1,
                "modalities": ["text"], "stream": true,
                "stream_options": {"include_usage": true, "include_obfuscation": false}, "stop": "x", "seed": -1, "logprobs": null}"#,
        )
        .unwrap();
        assert_eq!(generation.delivery, Delivery::Stream { usage: UsageIn { every: false, last: true } });
        assert_eq!((generation.sampling.top_k, generation.sampling.seed), (0, u64::MAX));
        assert_eq!(generation.stop.stop, ["x"]);
    }

    #[test]
    fn stop_tokens_are_checked_one_by_one() {
        assert_eq!(take(r#"{"stop_token_ids": [1, 99]}"#).unwrap().stop.stop_token_ids, [1, 99]);
        for (sent, param) in [("[1, 100]", "stop_token_ids[1]"), ("[-1]", "stop_token_ids[0]")] {
            let error = take(&format!(r#"{{"stop_token_ids": {sent}}}"#)).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(param), "{}", error.message);
        }
        let many = format!(r#"{{"stop_token_ids": {:?}}}"#, vec![1; 129]);
        assert_eq!(take(&many).unwrap_err().param.as_deref(), Some("stop_token_ids"));
    }

    #[test]
    fn a_prompt_is_cut_to_so_many_tokens_or_to_the_context() {
        let truncate = |sent: &str| take(&format!(r#"{{"truncate_prompt_tokens": {sent}}}"#)).unwrap().truncate;
        assert_eq!(truncate("null"), None);
        assert_eq!(truncate("-1"), Some(Truncation { tokens: None, keeps: Kept::End }));
        assert_eq!(truncate("7"), Some(Truncation { tokens: Some(7), keeps: Kept::End }));
        assert_eq!(truncate(r#"null, "truncation_side": "left""#), None);
        let alone = take(r#"{"truncation_side": "right"}"#).unwrap_err();
        assert_eq!(alone.param.as_deref(), Some("truncation_side"));
        assert!(alone.message.contains("`truncate_prompt_tokens`"), "{}", alone.message);
        let right = Some(Truncation { tokens: Some(7), keeps: Kept::Beginning });
        assert_eq!(truncate(r#"7, "truncation_side": "right""#), right);
    }

    #[test]
    fn a_top_k_beyond_any_vocabulary_is_off() {
        for (sent, top_k) in [("-1", 0), ("20", 20), ("4294967295", u32::MAX), ("4294967296", 0)] {
            assert_eq!(take(&format!(r#"{{"top_k": {sent}}}"#)).unwrap().sampling.top_k, top_k, "{sent}");
        }
    }

    #[test]
    fn contradicting_bounds_are_refused() {
        assert!(take(r#"{"max_tokens": 5, "max_completion_tokens": 5}"#).is_ok());
        assert_eq!(take(r#"{"max_tokens": 5, "max_completion_tokens": 6}"#).unwrap_err().param.unwrap(), "max_tokens");
        let contradiction = take(r#"{"max_tokens": 5, "min_tokens": 6}"#).unwrap_err();
        assert_eq!(contradiction.param.unwrap(), "min_tokens");
        assert!(contradiction.message.ends_with("`min_tokens` of at most 5, or a larger `max_tokens`"));
    }

    #[test]
    fn logit_bias_names_the_bad_entry() {
        assert_eq!(take(r#"{"logit_bias": {"7": -100}}"#).unwrap().sampling.logit_bias[&7], -100.0);
        for bad in [r#"{"100": 1}"#, r#"{"x": 1}"#, r#"{"7": 101}"#] {
            let error = take(&format!(r#"{{"logit_bias": {bad}}}"#)).unwrap_err();
            assert!(error.param.unwrap().starts_with("logit_bias."));
        }
    }

    #[test]
    fn the_first_completion_keeps_the_seed_and_the_others_differ() {
        let generation = take(r#"{"seed": 5, "n": 3}"#).unwrap();
        let seeds: Vec<u64> = (0..3).map(|choice| generation.sampling_of(choice).seed).collect();
        assert_eq!(seeds[0], 5);
        assert!(seeds[1] != seeds[0] && seeds[2] != seeds[1] && seeds[2] != seeds[0]);
    }
}
