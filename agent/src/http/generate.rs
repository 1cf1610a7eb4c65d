//! From prompts to running sequences: tokens, admission, submission. Shared by chat and text completions; knows the wire
//! form of neither.

use std::{
    sync::Arc,
    time::{Instant, SystemTime, UNIX_EPOCH},
};

use stoker_engine::{EncodeError, EncodeLimit, Request, StopParams, TokenId};

use crate::{
    admit::{Asked, Refusal, SequenceShape, admit, completion_room},
    http::{
        choices::Choices,
        error::ApiError,
        extract::Arrival,
        fields::Fields,
        params::{Defaults, Generation, Kept, Truncation},
        passage::{Drawn, Passage},
        prompt_work,
        stream::AnswerHead,
    },
    replica::{Replica, Served},
};

/// A text of which only the end is wanted is read up to so many times the context.
const CONTEXTS_READ_TO_CUT: u32 = 8;

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
    request: &mut TokenizedRequest,
    open: Arrival,
) -> Result<Choices, ApiError> {
    admit_prompts(replica, request.prompts.len(), &request.generation)?;
    replica.metrics().asked(request.generation.n);
    if request.logprobs.is_none() && !request.generation.logprob_tokens.is_empty() {
        let message = "`logprob_token_ids` says whose log-probabilities are wanted: ask for `logprobs` too";
        return Err(ApiError::invalid("logprob_token_ids", message));
    }
    let max_model_len = served.engine.model().max_model_len;
    for prompt in &mut request.prompts {
        keep(prompt, request.generation.truncate, max_model_len);
    }
    let marks = match &request.prompts[..] {
        // What gateways name is the text of one prompt that is used as it came.
        [prompt] if request.generation.truncate.is_none() => open.passage.prefixes.marks(prompt.len()),
        _ => Arc::default(),
    };
    let mut sequences = Vec::new();
    for prompt in &request.prompts {
        sequences.extend(completions_of(prompt, request, max_model_len)?);
    }
    let vocabulary = replica.identity().map_or("", |identity| &identity.vocabulary);
    open.passage.check(vocabulary, sequences.len())?;
    for (index, sequence) in sequences.iter_mut().enumerate() {
        sequence.resume = open.passage.resume(index);
        sequence.prefix_marks = Arc::clone(&marks);
    }
    let tells_numbers = request.logprobs.is_some() || request.generation.prompt_logprobs.is_some();
    let mut choices = Choices::submit(&served.engine, sequences, open)?;
    if tells_numbers {
        // They are all in a whole answer, and marks tell tokens only.
        choices.tell_not_whole();
    }
    Ok(choices)
}

/// Leaves one end of a prompt, if the client wants no more of it.
pub(crate) fn keep(prompt: &mut Vec<TokenId>, truncate: Option<Truncation>, max_model_len: u32) {
    let Some(Truncation { tokens, keeps }) = truncate else { return };
    let n_kept = (tokens.unwrap_or(max_model_len - 1) as usize).min(prompt.len());
    match keeps {
        Kept::Beginning => prompt.truncate(n_kept),
        Kept::End => drop(prompt.drain(..prompt.len() - n_kept)),
    }
}

/// Makes what a client allows and bans one by one a part of the constraint.
pub(crate) fn filter(served: &Served, generation: &mut Generation) -> Result<(), ApiError> {
    let constraint = generation.sampling.constraint.take();
    generation.sampling.constraint = generation.filter.around(constraint, served.engine.tokenizer())?;
    Ok(())
}

/// Whether there is room for so many prompts, which need not be tokenized yet.
pub(crate) fn admit_prompts(replica: &Replica, n_prompts: usize, generation: &Generation) -> Result<(), Refusal> {
    let prompts = u32::try_from(n_prompts).unwrap_or(u32::MAX);
    admit(replica.queue_load(), Asked { prompts, n: generation.n })
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
    let min_tokens = generation.stop.min_tokens;
    if min_tokens > max_tokens {
        let message = format!(
            "min_tokens={min_tokens}, and this answer can have {max_tokens} tokens: send a `min_tokens` of at most {max_tokens}, \
             a larger `max_tokens` if that is not all the context has room for, or else a shorter prompt"
        );
        return Err(ApiError::invalid("min_tokens", message));
    }
    let deadline = generation.begins_within.map(|within| Instant::now() + within);
    Ok((0..generation.n).map(move |choice| Request {
        prompt: prompt.to_vec(),
        sampling: generation.sampling_of(choice),
        stop: StopParams { max_tokens, ..generation.stop.clone() },
        logprobs: *logprobs,
        logprob_tokens: generation.logprob_tokens.clone(),
        prompt_logprobs: generation.prompt_logprobs,
        pooling: None,
        priority: generation.priority,
        deadline,
        cache_salt: generation.cache_salt.clone(),
        prefix_marks: Arc::default(),
        resume: None,
    }))
}

/// Defaults of a request that does not say: the model's, and a seed drawn at the edge, which is here or a gateway.
pub(crate) fn defaults(replica: &Replica, served: &Served, passage: &Passage) -> Defaults {
    let seed = passage.drawn.as_ref().map_or_else(rand::random, |drawn| drawn.seed);
    let (sampling, vocab_size) = (served.default_sampling(), served.engine.model().vocab_size);
    let names_tokens_by_id = replica.settings().wording.names_tokens_by_id;
    Defaults { sampling, seed, vocab_size, salt: passage.salt.clone(), names_tokens_by_id }
}

/// Takes `model` and checks that it is served here. Absent means this replica's.
pub(crate) fn check_model(fields: &mut Fields, served_names: &[String]) -> Result<(), ApiError> {
    match fields.take::<String>("model")? {
        Some(name) if !served_names.contains(&name) => Err(ApiError::unknown_model(&name, served_names)),
        _ => Ok(()),
    }
}

/// Head of an answer that begins now.
pub(crate) fn answer_head(
    replica: &Replica,
    prefix: &str,
    generation: &Generation,
    drawn: Option<&Drawn>,
) -> AnswerHead {
    let naming = Naming::new(generation.request_id.clone(), drawn);
    AnswerHead {
        id: naming.id(prefix),
        created: naming.created,
        model: replica.settings().served_names[0].clone(),
        prompt_token_ids: None,
        tells_times: replica.settings().wording.tells_times,
    }
}

/// What an answer that begins now is called, and when that is.
pub(crate) struct Naming {
    name: String,
    /// Unix time in seconds.
    pub(crate) created: u64,
}

impl Naming {
    /// As the client says, or else a gateway, or chance and this machine's clock.
    pub(crate) fn new(request_id: Option<String>, drawn: Option<&Drawn>) -> Self {
        let now = || SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |age| age.as_secs());
        let own = || drawn.map_or_else(|| format!("{:032x}", rand::random::<u128>()), |drawn| drawn.id.clone());
        Self { name: request_id.unwrap_or_else(own), created: drawn.map_or_else(now, |drawn| drawn.created) }
    }

    /// With what says its kind.
    pub(crate) fn id(&self, prefix: &str) -> String {
        format!("{prefix}-{}", self.name)
    }
}

/// How much of a text is read: one that does not fit is refused, unless only its end is wanted. Then it may be longer than what
/// is kept, but no text is read without an end.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Encoding {
    /// What goes around the text.
    pub(crate) specials: AddSpecials,
    /// Contexts that may be filled.
    pub(crate) contexts: u32,
}

impl Encoding {
    /// Of a text that is used whole, or cut.
    pub(crate) fn new(specials: AddSpecials, truncate: Option<Truncation>) -> Self {
        Self { specials, contexts: if truncate.is_some() { CONTEXTS_READ_TO_CUT } else { 1 } }
    }

    /// Of a text of which a part becomes a part of a prompt.
    pub(crate) fn of_what_is_cut() -> Self {
        Self { specials: AddSpecials::No, contexts: CONTEXTS_READ_TO_CUT }
    }
}

/// Tokens of texts.
pub(crate) async fn tokenize(
    served: &Arc<Served>,
    texts: Vec<String>,
    encoding: Encoding,
) -> Result<Vec<Vec<TokenId>>, ApiError> {
    let served = served.clone();
    let n_bytes = texts.iter().map(String::len).sum();
    let work = move |is_abandoned: &dyn Fn() -> bool| {
        texts.into_iter().map(|text| encode(&served, &text, encoding, is_abandoned)).collect()
    };
    prompt_work::run(n_bytes, work).await
}

/// Tokens of a text. One that cannot fit the context is refused before it was read to its end.
pub(crate) fn encode(
    served: &Served,
    text: &str,
    encoding: Encoding,
    is_abandoned: &dyn Fn() -> bool,
) -> Result<Vec<TokenId>, ApiError> {
    let limit = EncodeLimit { max_tokens: max_tokens_read(served, encoding), is_abandoned };
    let add_special = encoding.specials == AddSpecials::Yes;
    let encoded = served.engine.tokenizer().encode_within(text, add_special, &limit);
    encoded.map_err(|error| not_encoded(error, served))
}

/// Refuses texts that will be part of one prompt if they cannot fit the context, before anything is made of them.
pub(crate) fn refuse_too_long(
    served: &Served,
    texts: &[&str],
    encoding: Encoding,
    is_abandoned: &dyn Fn() -> bool,
) -> Result<(), ApiError> {
    let limit = EncodeLimit { max_tokens: max_tokens_read(served, encoding), is_abandoned };
    let counted = served.engine.tokenizer().refuse_too_long(texts, &limit);
    counted.map_err(|error| not_encoded(error, served))
}

/// The same of texts that come in slices and have so many bytes at most.
pub(crate) fn refuse_too_many(
    served: &Served,
    n_bytes: usize,
    slices: impl Iterator<Item = impl AsRef<str>>,
    encoding: Encoding,
    is_abandoned: &dyn Fn() -> bool,
) -> Result<(), ApiError> {
    let limit = EncodeLimit { max_tokens: max_tokens_read(served, encoding), is_abandoned };
    let counted = served.engine.tokenizer().refuse_too_many(n_bytes, slices, &limit);
    counted.map_err(|error| not_encoded(error, served))
}

/// Tokens that are read of a text.
pub(crate) fn max_tokens_read(served: &Served, encoding: Encoding) -> usize {
    served.engine.model().max_model_len as usize * encoding.contexts as usize
}

fn not_encoded(error: EncodeError, served: &Served) -> ApiError {
    let max_model_len = served.engine.model().max_model_len;
    match error {
        EncodeError::TooLong { at_least } => Refusal::PromptMuchTooLong { at_least, max_model_len }.into(),
        // Nobody is there to read it.
        EncodeError::Abandoned => ApiError::engine_failed("its client left"),
        EncodeError::Tokenizer(error) => ApiError::invalid("prompt", error.to_string()),
    }
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
