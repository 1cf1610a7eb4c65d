//! Token counts on the wire. Counts nothing itself.

use serde::Serialize;
use stoker_engine::Usage;

/// OpenAI's `usage` object.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct UsageBody {
    prompt_tokens: u32,
    completion_tokens: u32,
    total_tokens: u32,
    prompt_tokens_details: PromptTokensDetails,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
struct PromptTokensDetails {
    cached_tokens: u32,
}

impl UsageBody {
    /// Tokens of the prompts.
    pub(crate) fn prompt_tokens(&self) -> u32 {
        self.prompt_tokens
    }

    /// Of those, the ones whose KV was there already.
    pub(crate) fn cached_tokens(&self) -> u32 {
        self.prompt_tokens_details.cached_tokens
    }

    /// Generated tokens.
    pub(crate) fn completion_tokens(&self) -> u32 {
        self.completion_tokens
    }
}

impl From<Usage> for UsageBody {
    fn from(usage: Usage) -> Self {
        Self {
            prompt_tokens: usage.prompt_tokens,
            completion_tokens: usage.completion_tokens,
            total_tokens: usage.prompt_tokens + usage.completion_tokens,
            prompt_tokens_details: PromptTokensDetails { cached_tokens: usage.cached_tokens },
        }
    }
}

/// Adds up the usage of an answer's choices: a prompt counts once however many completions it has.
#[derive(Clone, Copy, Debug)]
pub(crate) struct UsageSum {
    n: u32,
    total: Usage,
}

impl UsageSum {
    /// For answers with `n` choices a prompt, numbered prompt by prompt.
    pub(crate) fn new(n: u32) -> Self {
        Self { n, total: Usage::default() }
    }

    /// Adds one choice.
    pub(crate) fn add(&mut self, index: u32, usage: Usage) {
        self.total.completion_tokens += usage.completion_tokens;
        if index.is_multiple_of(self.n) {
            self.total.prompt_tokens += usage.prompt_tokens;
            self.total.cached_tokens += usage.cached_tokens;
        }
    }

    /// The sum.
    pub(crate) fn body(&self) -> UsageBody {
        self.total.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_counts_once_however_many_completions_it_has() {
        let mut sum = UsageSum::new(2);
        for (index, prompt_tokens) in [(0, 10), (1, 10), (2, 7), (3, 7)] {
            sum.add(index, Usage { prompt_tokens, completion_tokens: 5, cached_tokens: 0 });
        }
        let expected = UsageBody::from(Usage { prompt_tokens: 17, completion_tokens: 20, cached_tokens: 0 });
        assert_eq!(sum.body(), expected);
    }
}
