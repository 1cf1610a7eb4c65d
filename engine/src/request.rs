//! What a client asks of the engine and what it gets back. Owns the request types, never their execution.

use std::{collections::BTreeMap, sync::Arc, time::Instant};

use crate::{constraint::Constraint, kv::BLOCK_TOKENS, pooling::Pooling};

/// Names one request for its whole life inside the engine.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct RequestId(pub u64);

/// A token of the model's vocabulary.
pub type TokenId = u32;

/// Likeliest tokens whose log-probabilities one request may ask for.
pub const LOGPROBS_MAX: u8 = 20;
/// Tokens that one request may give a bias.
pub const LOGIT_BIASES_MAX: usize = 1024;

/// One prompt and how to continue it. `n > 1` is `n` requests that share the prompt; the caller sends them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Request {
    /// Prompt tokens; never empty, shorter than the model's context.
    pub prompt: Vec<TokenId>,
    /// How tokens are chosen.
    pub sampling: SamplingParams,
    /// When generation ends.
    pub stop: StopParams,
    /// Log-probabilities wanted: `None` for none, `Some(k)` for the chosen token and the `k` likeliest.
    pub logprobs: Option<u8>,
    /// Tokens whose log-probabilities are given instead of the likeliest ones'.
    pub logprob_tokens: Vec<TokenId>,
    /// Log-probabilities of the prompt's own tokens: `Some(k)` for each of them and the `k` likeliest in its place.
    pub prompt_logprobs: Option<u8>,
    /// The prompt's embedding, made of these of its tokens. Without `prompt_logprobs`.
    pub pooling: Option<Pooling>,
    /// The smaller, the sooner it runs and the later it is preempted; of equals, who came first.
    pub priority: i32,
    /// When it should have begun. Among those of its priority the earliest comes first, before all that have none; who has not begun
    /// by then ends as [`FinishReason::Expired`].
    pub deadline: Option<Instant>,
    /// Its KV is found by requests with the same salt only.
    pub cache_salt: Option<Arc<str>>,
    /// What others call beginnings of its prompt, the shortest first.
    pub prefix_marks: Arc<[PrefixMark]>,
    /// Another engine began its completion.
    pub resume: Option<Resume>,
}

/// A name that somebody without a tokenizer has for the first tokens of a prompt: who listens ([`PrefixNews`](crate::PrefixNews))
/// is told by it whether they are in the cache.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct PrefixMark {
    /// The same for the same beginning.
    pub name: u64,
    /// How many they are, about.
    pub n_tokens: u32,
}

impl PrefixMark {
    /// The blocks that they fill.
    pub fn n_blocks(&self) -> usize {
        self.n_tokens as usize / BLOCK_TOKENS
    }
}

/// What of a completion another engine has made and told. It goes on behind that: its stream tells what is new, and its usage counts all.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Resume {
    /// Tokens of the completion so far.
    pub tokens: Vec<TokenId>,
    /// Prompt tokens that were found in a cache when it began.
    pub cached_tokens: u32,
    /// Its end was told, too.
    pub has_ended: bool,
}

/// How the next token is chosen. Ranges are checked at the edge (`validate`).
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// 0 is greedy.
    pub temperature: f32,
    /// Nucleus: smallest set of tokens whose probability reaches `top_p`; 1 is off.
    pub top_p: f32,
    /// Only the `top_k` likeliest tokens; 0 is off.
    pub top_k: u32,
    /// Only tokens at least `min_p` times as likely as the likeliest; 0 is off.
    pub min_p: f32,
    /// Subtracted from the logit of tokens already generated.
    pub presence_penalty: f32,
    /// Subtracted once per earlier occurrence among generated tokens.
    pub frequency_penalty: f32,
    /// Divides positive and multiplies negative logits of tokens seen in prompt or completion; 1 is off.
    pub repetition_penalty: f32,
    /// Added to single logits.
    pub logit_bias: BTreeMap<TokenId, f32>,
    /// Randomness is a function of (seed, position) only (D9).
    pub seed: u64,
    /// Only what a grammar allows.
    pub constraint: Option<Constraint>,
}

impl SamplingParams {
    /// Whether the tokens before change the choice of the next one.
    pub fn has_penalties(&self) -> bool {
        self.presence_penalty != 0.0 || self.frequency_penalty != 0.0 || self.repetition_penalty != 1.0
    }
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
            logit_bias: BTreeMap::new(),
            seed: 0,
            constraint: None,
        }
    }
}

/// When generation ends.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StopParams {
    /// Completion tokens at most; clamped to the room left in the context.
    pub max_tokens: u32,
    /// Completion tokens before an end token or stop string may end the request.
    pub min_tokens: u32,
    /// Go on after the model's end token.
    pub ignore_eos: bool,
    /// Strings that end the request; they are not part of the text unless `include_stop`.
    pub stop: Vec<String>,
    /// Tokens that end the request, beside the model's own; they have no text unless `include_stop`.
    pub stop_token_ids: Vec<TokenId>,
    /// Keep the matched stop string, and a stop token's text, in the text.
    pub include_stop: bool,
    /// Special tokens that have text in the completion: marks that somebody reads. The others have none.
    pub shown_specials: Arc<[TokenId]>,
}

/// Why a request ended.
#[derive(Clone, Debug, PartialEq)]
pub enum FinishReason {
    /// The model's end token, or a stop string.
    Stop,
    /// `max_tokens` or the context was reached.
    Length,
    /// The client went away, or asked.
    Abort,
    /// Its deadline passed before it began.
    Expired,
    /// Its constraint cannot be followed any further: a limit was met, which the text names, or nothing may come.
    Unfollowed(String),
    /// The engine failed; the text says how.
    Error(String),
}

/// Log-probability of one token.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprob {
    /// The token.
    pub token: TokenId,
    /// Its text alone (may be an incomplete UTF-8 sequence: see `bytes`).
    pub text: String,
    /// Its bytes.
    pub bytes: Vec<u8>,
    /// Natural logarithm of its probability, of the distribution before temperature and filters.
    pub logprob: f32,
}

/// A chosen token's log-probability and its likeliest rivals, best first.
#[derive(Clone, Debug, PartialEq)]
pub struct PositionLogprobs {
    /// The chosen token.
    pub chosen: TokenLogprob,
    /// The `k` likeliest tokens, best first.
    pub top: Vec<TokenLogprob>,
}

/// Log-probability of one of a prompt's own tokens. The first one has none: nothing is before it.
#[derive(Clone, Debug, PartialEq)]
pub struct PromptPosition {
    /// Tokens in its place that are likelier, and one.
    pub rank: u32,
    /// Its own and those of the likeliest in its place.
    pub logprobs: PositionLogprobs,
}

/// Token counts of one request, by OpenAI's names.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Usage {
    /// Prompt tokens.
    pub prompt_tokens: u32,
    /// Generated tokens, the end token included, tokens after a stop string excluded.
    pub completion_tokens: u32,
    /// Prompt tokens whose KV was found in the prefix cache.
    pub cached_tokens: u32,
}

/// What a request's stream carries: `Prompt` or `Embedding` if it was asked for, any number of `Delta`, then exactly one `Finished`, then nothing.
#[derive(Clone, Debug, PartialEq)]
pub enum RequestEvent {
    /// Log-probabilities of the prompt's tokens, from its second one.
    Prompt(Vec<PromptPosition>),
    /// The prompt's embedding, `[hidden_size]`, of no certain length.
    Embedding(Vec<f32>),
    /// New text. `text` is whole UTF-8; it may be empty while a character or a stop string is undecided.
    Delta {
        /// Text that became certain.
        text: String,
        /// Tokens behind it.
        tokens: Vec<TokenId>,
        /// One entry a token, when asked for.
        logprobs: Vec<PositionLogprobs>,
    },
    /// The only terminal.
    Finished {
        /// Why.
        reason: FinishReason,
        /// The stop string that matched, if one did.
        stop_match: Option<String>,
        /// Final counts.
        usage: Usage,
        /// How long it took; nothing where there was no token, or another engine made the first ones.
        timing: Option<RequestTiming>,
    },
}

/// How long a request took, in seconds from its submission.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RequestTiming {
    /// To the first step that computed something of it.
    pub queue_seconds: f64,
    /// To its first token.
    pub ttft_seconds: f64,
    /// To its end.
    pub e2e_seconds: f64,
}

/// Why a request was not taken. Nothing was started.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum RejectReason {
    /// The prompt is empty.
    #[error("the prompt is empty: send at least one token")]
    EmptyPrompt,
    /// Prompt does not fit the context with one token of completion.
    #[error("the prompt has {prompt_tokens} tokens but the context is {max_model_len}: shorten the prompt to at most {} tokens", max_model_len - 1)]
    PromptTooLong {
        /// Tokens of the prompt.
        prompt_tokens: u32,
        /// Tokens the context holds.
        max_model_len: u32,
    },
    /// A token id beyond the vocabulary.
    #[error("token {token} is outside the vocabulary of {vocab_size}")]
    BadToken {
        /// The token.
        token: TokenId,
        /// Size of the vocabulary.
        vocab_size: u32,
    },
    /// The waiting queue is full.
    #[error("{waiting} requests are waiting, the queue holds {limit}: retry later")]
    QueueFull {
        /// Requests waiting.
        waiting: u32,
        /// The bound.
        limit: u32,
    },
    /// Tokens are not delivered as fast as they come.
    #[error("the delivery of tokens is {messages} messages behind: retry later")]
    OutputBehind {
        /// Messages that wait for the output thread.
        messages: u32,
    },
    /// More biases than draws can hold.
    #[error("logit_bias has {biases} tokens, at most {limit} may have a bias: leave out {}", biases - limit)]
    TooManyBiases {
        /// Asked for.
        biases: u32,
        /// The bound.
        limit: u32,
    },
    /// More log-probabilities than draws give.
    #[error("log-probabilities of {asked} tokens were asked for, at most {limit} are given: ask for fewer")]
    TooManyLogprobs {
        /// Asked for.
        asked: u32,
        /// The bound.
        limit: u32,
    },
    /// The device gives no log-probabilities of prompts, or of tokens that are named.
    #[error("the device that serves this model does not compute {asked}: leave `{field}` out")]
    NotOnThisDevice {
        /// What was asked for.
        asked: &'static str,
        /// The field that asked.
        field: &'static str,
    },
    /// The engine has ended.
    #[error("the engine has stopped: {0}")]
    Stopped(String),
}
