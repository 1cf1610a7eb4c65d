//! One request's token state inside the scheduler. Owns tokens, progress and block table; never text, never a channel.
//!
//! A step that was planned counts as computed: steps take effect in the order in which they are launched, so whatever
//! is planned later finds its keys and values. Only the tokens that it samples are missing until `resolve` knows them.
//!
//! ```text
//! position   0 ..................... known        known + in_flight = len
//!            [ prompt | generated ]  [ sampled by steps in flight ]
//!            [ computed ............................... ] remaining
//! ```

use std::{ops::Range, sync::Arc, time::Duration};

use crate::{
    kv::{BlockHash, BlockTable},
    request::{FinishReason, Request, RequestId, TokenId},
};

/// A request being waited for or computed.
#[derive(Clone, Debug, PartialEq)]
pub struct Sequence {
    /// The request's name.
    pub id: RequestId,
    /// What was asked; `stop.max_tokens` is already clamped to the context.
    pub request: Arc<Request>,
    /// Prompt and generated tokens, as far as they are known.
    pub tokens: Vec<TokenId>,
    /// Tokens after them that steps in flight sample.
    pub in_flight: usize,
    /// Which sampling chunk of its step the newest of those is, counted from 0.
    pub sampled_entry: usize,
    /// Tokens whose KV is present once the steps in flight are over. The last sampled token gets its KV only when it is
    /// fed back in, so a sequence never has `computed == len()`.
    pub computed: usize,
    /// Those of them that the steps before the one that is planned compute; what is found in the plan is not among them.
    pub n_settled: usize,
    /// Where the KV lies.
    pub table: BlockTable,
    /// What the name of its first block is made from.
    pub root: BlockHash,
    /// Rows of the prompt, counted from its first, of which what is wanted was read or is being computed.
    pub n_read: usize,
    /// Tokens whose blocks were found: others may hold them too.
    pub n_found: usize,
    /// Names of the blocks that the known tokens fill, as far as they were needed.
    pub names: Vec<BlockHash>,
    /// Blocks of the table, from the first, whose content the pool knows by name.
    pub n_named: usize,
    /// Its own among the running sequences; `None` while it waits.
    pub slot: Option<usize>,
    /// Known tokens at the end that were not drawn, because nothing else could come, and that nobody was told of yet.
    pub n_untold: usize,
    /// Tokens that are computed as one decode at most: 1, and more when it has jumped ahead.
    pub decode_len: usize,
    /// A token was sampled for it, or is being sampled, since it has its slot.
    pub has_sampled_in_slot: bool,
    /// Its draw was put off until its mask is there.
    pub awaits_mask: bool,
    /// Set when the sequence must leave, and why.
    pub leaving: Option<FinishReason>,
    /// It has been in the running queue at least once.
    pub started: bool,
    /// Its part of the time that devices took for steps, times their number; see [`shares`](crate::sched::shares).
    pub device_time: Duration,
}

impl Sequence {
    /// A sequence that has computed nothing.
    pub fn new(id: RequestId, request: Arc<Request>) -> Self {
        Self {
            id,
            tokens: [&request.prompt[..], resumed_tokens(&request)].concat(),
            in_flight: 0,
            sampled_entry: 0,
            computed: 0,
            n_settled: 0,
            table: BlockTable::default(),
            root: request.cache_salt.as_deref().map_or(BlockHash::ROOT, BlockHash::root_of),
            n_read: 0,
            n_found: 0,
            names: Vec::new(),
            n_named: 0,
            slot: None,
            n_untold: 0,
            decode_len: 1,
            has_sampled_in_slot: false,
            awaits_mask: false,
            leaving: None,
            started: false,
            device_time: Duration::ZERO,
            request,
        }
    }

    /// Tokens, those in flight included.
    #[expect(clippy::len_without_is_empty, reason = "a prompt is never empty")]
    pub fn len(&self) -> usize {
        self.tokens.len() + self.in_flight
    }

    /// Tokens of the prompt.
    pub fn prompt_len(&self) -> usize {
        self.request.prompt.len()
    }

    /// Tokens generated so far, those in flight included.
    pub fn n_generated(&self) -> usize {
        self.len() - self.prompt_len()
    }

    /// Tokens to compute before the next one can be sampled; 1 while decoding, if it does not jump ahead.
    pub fn remaining(&self) -> usize {
        self.len() - self.computed
    }

    /// Whether only the newest token is left to compute, and what had to come behind it.
    pub fn is_decoding(&self) -> bool {
        self.remaining() <= self.decode_len
    }

    /// Whether it has all the tokens it may have, those in flight included.
    pub fn is_full(&self, max_model_len: usize) -> bool {
        self.n_generated() >= self.request.stop.max_tokens as usize || self.len() >= max_model_len
    }

    /// Rows of the prompt that are wanted and were not read.
    pub fn rows_unread(&self) -> Range<usize> {
        let Request { prompt_logprobs, pooling, .. } = &*self.request;
        let wanted = match (prompt_logprobs, pooling) {
            (Some(_), _) => 0..self.prompt_len() - 1,
            (None, Some(pooling)) => pooling.rows(self.prompt_len()),
            (None, None) => 0..0,
        };
        wanted.start.max(self.n_read)..wanted.end
    }

    /// Whether all of its prompt must be computed for it, as tokens that are found have no rows. The last one is never found.
    pub fn awaits_rows(&self) -> bool {
        let unread = self.rows_unread();
        unread.start < unread.end.min(self.prompt_len() - 1)
    }

    /// Whether a token at this position is one of the first `min_tokens`: no end token may be sampled there.
    pub fn is_below_minimum(&self, position: usize) -> bool {
        position < self.prompt_len() + self.request.stop.min_tokens as usize
    }
}

/// Tokens of the completion that another engine has made. Without their keys and values: as after a preemption.
fn resumed_tokens(request: &Request) -> &[TokenId] {
    request.resume.as_ref().map_or(&[], |resume| &resume.tokens)
}
