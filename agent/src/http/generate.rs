//! From prompts to running sequences: tokens, admission, submission. Shared by chat and text completions; knows the wire
//! form of neither.

use std::{
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use stoker_engine::{Request, StopParams, TokenId};

use crate::{
    admit::{SequenceShape, admit, completion_room},
    http::{
        choices::Choices,
        error::ApiError,
        fields::Fields,
        params::{Defaults, Generation},
        stream::AnswerHead,
    },
    replica::{OpenRequest, Replica, Served},
};

/// Texts longer than this are tokenized off the threads that serve connections: it takes more than a few milliseconds.
const INLINE_TEXT_BYTES: usize = 16 * 1024;

/// A request that has been read and tokenized.
pub(crate) struct TokenizedRequest {
    /// The prompts.
    pub(crate) prompts: Vec<Vec<TokenId>>,
    /// How to continue them.
    pub(crate) generation: Generation,
    /// Log-probabilities wanted.
    pub(crate) logprobs: Option<u8>,
}

/// Admits a request and hands its sequences to the engine.
pub(crate) fn start(
    replica: &Replica,
    served: &Served,
    request: &TokenizedRequest,
    open: OpenRequest,
) -> Result<Choices, ApiError> {
    let n_prompts = u32::try_from(request.prompts.len()).unwrap_or(u32::MAX);
    let n_sequences = n_prompts.saturating_mul(request.generation.n);
    admit(replica.queue_load(), replica.settings().limits.max_waiting, n_sequences)?;
    let mut sequences = Vec::new();
    for prompt in &request.prompts {
        sequences.extend(completions_of(prompt, request, served.engine.model().max_model_len)?);
    }
    Ok(Choices::submit(&served.engine, sequences, open)?)
}

/// The `n` sequences that continue one prompt.
fn completions_of<'a>(
    prompt: &'a [TokenId],
    request: &'a TokenizedRequest,
    max_model_len: u32,
) -> Result<impl Iterator<Item = Request> + 'a, ApiError> {
    let prompt_tokens = u32::try_from(prompt.len()).unwrap_or(u32::MAX);
    let TokenizedRequest { generation, logprobs, .. } = request;
    let shape = SequenceShape { prompt_tokens, max_tokens: generation.max_tokens };
    let max_tokens = completion_room(max_model_len, shape)?;
    Ok((0..generation.n).map(move |choice| Request {
        prompt: prompt.to_vec(),
        sampling: generation.sampling_of(choice),
        stop: StopParams { max_tokens, ..generation.stop.clone() },
        logprobs: *logprobs,
    }))
}

/// Defaults of a request that does not say: the model's, and a seed drawn here, at the edge.
pub(crate) fn defaults(served: &Served) -> Defaults {
    Defaults { sampling: served.default_sampling(), seed: rand::random(), vocab_size: served.engine.model().vocab_size }
}

/// Takes `model` and checks that it is served here. Absent means this replica's.
pub(crate) fn check_model(fields: &mut Fields, served_names: &[String]) -> Result<(), ApiError> {
    match fields.take::<String>("model")? {
        Some(name) if !served_names.contains(&name) => Err(ApiError::unknown_model(&name, served_names)),
        _ => Ok(()),
    }
}

/// Head of an answer that begins now.
pub(crate) fn answer_head(replica: &Replica, prefix: &str) -> AnswerHead {
    let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |age| age.as_secs());
    AnswerHead {
        id: format!("{prefix}-{:032x}", rand::random::<u128>()),
        created,
        model: replica.settings().served_names[0].clone(),
    }
}

/// Tokens of a text.
pub(crate) async fn tokenize(
    served: &Arc<Served>,
    text: String,
    specials: AddSpecials,
) -> Result<Vec<TokenId>, ApiError> {
    let add = specials == AddSpecials::Yes;
    let encoded = if text.len() <= INLINE_TEXT_BYTES {
        served.engine.tokenizer().encode(&text, add)
    } else {
        let served = served.clone();
        let ended = tokio::task::spawn_blocking(move || served.engine.tokenizer().encode(&text, add)).await;
        ended.map_err(|error| ApiError::engine_failed(&format!("tokenizing failed: {error}")))?
    };
    encoded.map_err(|error| ApiError::invalid("prompt", error.to_string()))
}

/// Whether the tokenizer adds the model's begin token.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum AddSpecials {
    /// Plain text.
    Yes,
    /// A chat template wrote them already.
    No,
}

impl From<bool> for AddSpecials {
    fn from(add: bool) -> Self {
        if add { Self::Yes } else { Self::No }
    }
}
