//! Token counts on the wire, and how the counts of an answer's choices add up.

use serde::Serialize;
use stoker_engine::{TokenId, Usage};

use crate::http::reasoning_tokens::{ThoughtCount, ThoughtMarks};

/// OpenAI's `usage` object.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct UsageBody {
    prompt_tokens: u32,
    completion_tokens: u32,
    total_tokens: u32,
    prompt_tokens_details: PromptTokensDetails,
    #[serde(skip_serializing_if = "Option::is_none")]
    completion_tokens_details: Option<CompletionTokensDetails>,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
struct PromptTokensDetails {
    cached_tokens: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
struct CompletionTokensDetails {
    reasoning_tokens: u32,
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

    /// Of those, the thoughts.
    pub(crate) fn reasoning_tokens(&self) -> u32 {
        self.completion_tokens_details.map_or(0, |details| details.reasoning_tokens)
    }
}

impl From<Usage> for UsageBody {
    fn from(usage: Usage) -> Self {
        Self {
            prompt_tokens: usage.prompt_tokens,
            completion_tokens: usage.completion_tokens,
            total_tokens: usage.prompt_tokens + usage.completion_tokens,
            prompt_tokens_details: PromptTokensDetails { cached_tokens: usage.cached_tokens },
            completion_tokens_details: None,
        }
    }
}

/// Adds up the usage of an answer's choices: a prompt counts once however many completions it has.
#[derive(Clone, Debug)]
pub(crate) struct UsageSum {
    n: u32,
    total: Usage,
    /// Tokens of the prompts, known before any choice has ended.
    prompt_tokens: u32,
    /// Tokens that came so far.
    n_generated: u32,
    /// One a choice, where the model thinks.
    thoughts: Vec<ThoughtCount>,
}

impl UsageSum {
    /// For answers with `n` choices a prompt, numbered prompt by prompt.
    pub(crate) fn new(n: u32, prompt_tokens: u32) -> Self {
        Self { n, total: Usage::default(), prompt_tokens, n_generated: 0, thoughts: Vec::new() }
    }

    /// Counts thoughts too, of so many choices.
    pub(crate) fn with_thoughts(self, marks: Option<ThoughtMarks>, n_choices: u32) -> Self {
        let counts = marks.into_iter().flat_map(|marks| vec![ThoughtCount::new(marks); n_choices as usize]);
        Self { thoughts: counts.collect(), ..self }
    }

    /// Tokens of a choice came.
    pub(crate) fn note(&mut self, index: u32, tokens: &[TokenId]) {
        self.n_generated += tokens.len() as u32;
        if let Some(thoughts) = self.thoughts.get_mut(index as usize) {
            thoughts.add(tokens);
        }
    }

    /// Adds one choice, which has ended.
    pub(crate) fn add(&mut self, index: u32, usage: Usage) {
        self.total.completion_tokens += usage.completion_tokens;
        if index.is_multiple_of(self.n) {
            self.total.prompt_tokens += usage.prompt_tokens;
            self.total.cached_tokens += usage.cached_tokens;
        }
    }

    /// The sum at the end.
    pub(crate) fn body(&self) -> UsageBody {
        self.with_details(self.total)
    }

    /// The counts while tokens come.
    pub(crate) fn so_far(&self) -> UsageBody {
        let Self { total: Usage { cached_tokens, .. }, prompt_tokens, n_generated, .. } = *self;
        self.with_details(Usage { prompt_tokens, completion_tokens: n_generated, cached_tokens })
    }

    fn with_details(&self, usage: Usage) -> UsageBody {
        let reasoning_tokens = self.thoughts.iter().map(ThoughtCount::n_tokens).sum();
        let details = (!self.thoughts.is_empty()).then_some(CompletionTokensDetails { reasoning_tokens });
        UsageBody { completion_tokens_details: details, ..usage.into() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_counts_once_however_many_completions_it_has() {
        let mut sum = UsageSum::new(2, 17);
        for (index, prompt_tokens) in [(0, 10), (1, 10), (2, 7), (3, 7)] {
            sum.note(index, &[1, 2, 3, 4, 5]);
            sum.add(index, Usage { prompt_tokens, completion_tokens: 5, cached_tokens: 0 });
        }
        let expected = UsageBody::from(Usage { prompt_tokens: 17, completion_tokens: 20, cached_tokens: 0 });
        assert_eq!((sum.body(), sum.so_far()), (expected, expected));
    }
}
