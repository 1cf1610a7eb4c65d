//! One request's token state inside the scheduler. Owns tokens, progress and block table; never text, never a channel.

use std::sync::Arc;

use crate::{
    kv::BlockTable,
    request::{FinishReason, Request, RequestId, TokenId},
};

/// A request being waited for or computed.
#[derive(Clone, Debug, PartialEq)]
pub struct Sequence {
    /// The request's name.
    pub id: RequestId,
    /// What was asked; `stop.max_tokens` is already clamped to the context.
    pub request: Arc<Request>,
    /// Prompt and generated tokens.
    pub tokens: Vec<TokenId>,
    /// Tokens whose KV is present. The last sampled token gets its KV only when it is fed back in, so a finished
    /// sequence never has `computed == tokens.len()`.
    pub computed: usize,
    /// Where the KV lies.
    pub table: BlockTable,
    /// Set when the sequence must leave at the next step, and why.
    pub leaving: Option<FinishReason>,
    /// It has been in the running queue at least once.
    pub started: bool,
}

impl Sequence {
    /// A sequence that has computed nothing.
    pub fn new(id: RequestId, request: Arc<Request>) -> Self {
        let tokens = request.prompt.clone();
        Self { id, request, tokens, computed: 0, table: BlockTable::default(), leaving: None, started: false }
    }

    /// Tokens of the prompt.
    pub fn prompt_len(&self) -> usize {
        self.request.prompt.len()
    }

    /// Tokens generated so far.
    pub fn n_generated(&self) -> usize {
        self.tokens.len() - self.prompt_len()
    }

    /// Tokens to compute before the next one can be sampled; 1 while decoding.
    pub fn remaining(&self) -> usize {
        self.tokens.len() - self.computed
    }

    /// Whether only the newest token is left to compute.
    pub fn is_decoding(&self) -> bool {
        self.remaining() == 1
    }
}
