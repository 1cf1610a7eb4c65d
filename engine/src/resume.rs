//! A completion that another engine began and this one goes on with. What was told already is told once more to whoever must know it
//! before the rest (readers of text, counters), and to nobody else. Pure: from tokens to the events that they were, and whether
//! they are all.
//!
//! To the scheduler it is a sequence that was preempted: its tokens are known, their keys and values are not. As randomness is a
//! function of (seed, position, token) and text one of tokens, the rest is what it would have been, where logits are the same bits.

use crate::{
    info::ModelInfo,
    request::{FinishReason, Request, RequestEvent, Resume, Usage},
    sched::RawLogprobs,
    text::{TextAssembler, Tokenizer, spell_logprobs},
};

/// What a completion has told so far.
#[derive(Debug, PartialEq)]
pub(crate) struct Replay {
    /// One `Delta` a token. Log-probabilities have the token's text and no number worth reading: they were told, too.
    pub(crate) told: Vec<RequestEvent>,
    /// What is left to tell, if its tokens are complete.
    pub(crate) end: Option<End>,
}

/// The end of a completion whose tokens are all there.
#[derive(Debug, PartialEq)]
pub(crate) struct End {
    /// Text that waited for more.
    pub(crate) last_text: String,
    /// The terminal.
    pub(crate) terminal: RequestEvent,
}

impl Replay {
    /// Of a request, if it goes on with one.
    pub(crate) fn of(request: &Request, resume: &Resume, tokenizer: &Tokenizer, model: &ModelInfo) -> Self {
        let mut text = TextAssembler::new(&request.stop);
        let mut told = Vec::with_capacity(resume.tokens.len());
        let mut end = None;
        for (token, n_tokens) in resume.tokens.iter().copied().zip(1..) {
            let scan = text.push(token, tokenizer);
            let unknown = || spell_logprobs(token, RawLogprobs { chosen: 0.0, top: Vec::new() }, tokenizer);
            let logprobs = request.logprobs.map(|_| unknown()).into_iter().collect();
            told.push(RequestEvent::Delta { text: scan.text, tokens: vec![token], logprobs });
            let usage = Usage {
                prompt_tokens: request.prompt.len() as u32,
                completion_tokens: n_tokens,
                cached_tokens: resume.cached_tokens,
            };
            let terminal = |reason, stop_match| RequestEvent::Finished { reason, stop_match, usage, timing: None };
            if scan.matched.is_some() {
                end = Some(End { last_text: String::new(), terminal: terminal(FinishReason::Stop, scan.matched) });
                break;
            }
            let is_last = n_tokens as usize == resume.tokens.len();
            let forced = (is_last && resume.has_ended).then_some(FinishReason::Stop);
            if let Some(reason) = ends(request, token, n_tokens, model).or(forced) {
                end = Some(End { last_text: text.finish(), terminal: terminal(reason, None) });
                break;
            }
        }
        Self { told, end }
    }
}

/// Whether a completion ends with its `n_tokens`-th token, as the scheduler decides it.
fn ends(request: &Request, token: u32, n_tokens: u32, model: &ModelInfo) -> Option<FinishReason> {
    let stop = &request.stop;
    let is_end = (!stop.ignore_eos && model.eos.contains(&token)) || stop.stop_token_ids.contains(&token);
    if is_end && n_tokens >= stop.min_tokens {
        return Some(FinishReason::Stop);
    }
    let is_full = n_tokens >= stop.max_tokens || request.prompt.len() as u32 + n_tokens >= model.max_model_len;
    is_full.then_some(FinishReason::Length)
}
