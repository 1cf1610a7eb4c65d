//! Tokens of an answer that nobody waits for, on their way to its tenant's account (`accounts.rs`): each once, as they come, so that an
//! answer that is stopped has what it had.

use stoker_crds::accounts::Tokens;
use stoker_engine::RequestEvent;

use crate::accounts::Account;

/// Of a request with one answer.
#[derive(Debug)]
pub(crate) struct TokenAccount {
    account: Account,
    /// Of the prompt; nothing once they are on the account.
    prompt: Option<u32>,
    /// Of the answer that are there already.
    completion: u32,
}

impl TokenAccount {
    /// Of a prompt of so many tokens.
    pub(crate) fn new(account: Account, prompt_tokens: u32) -> Self {
        Self { account, prompt: Some(prompt_tokens), completion: 0 }
    }

    /// The next event of the answer, of whose prompt a cache held so many tokens.
    pub(crate) fn note(&mut self, cached_tokens: u32, event: &RequestEvent) {
        if let Some(prompt) = self.prompt.take() {
            let (prompt, cached) = (prompt.into(), cached_tokens.into());
            self.account.add_tokens(Tokens { prompt, cached, completion: 0 });
        }
        let generated = match event {
            RequestEvent::Delta { tokens, .. } => self.completion + tokens.len() as u32,
            // What ends an answer is in no delta.
            RequestEvent::Finished { usage, .. } => usage.completion_tokens.max(self.completion),
            RequestEvent::Prompt(_) | RequestEvent::Embedding(_) => self.completion,
        };
        let completion = u64::from(generated - std::mem::replace(&mut self.completion, generated));
        self.account.add_tokens(Tokens { completion, ..Tokens::default() });
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use stoker_engine::{FinishReason, Usage};

    use super::*;
    use crate::accounts::Accounts;

    #[test]
    fn each_token_is_on_account_once_and_what_was_stopped_has_what_came() {
        let (accounts, now) = (Accounts::default(), Instant::now());
        let mut account = TokenAccount::new(accounts.of("g", "t", now).unwrap(), 20);
        let told = || accounts.told("g", now).1.get("t").copied().unwrap_or_default();
        assert_eq!(told(), Tokens::default());
        let delta = RequestEvent::Delta { text: "ab".into(), tokens: vec![1, 2], logprobs: Vec::new() };
        account.note(16, &delta);
        account.note(16, &delta);
        assert_eq!(told(), Tokens { prompt: 20, cached: 16, completion: 4 });
        let usage = Usage { prompt_tokens: 20, completion_tokens: 5, cached_tokens: 16 };
        account.note(16, &RequestEvent::Finished { reason: FinishReason::Stop, usage, stop_match: None, timing: None });
        assert_eq!(told(), Tokens { prompt: 20, cached: 16, completion: 5 });
    }
}
