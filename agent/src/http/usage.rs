//! Token counts on the wire, and how the counts of an answer's choices add up.

use serde::Serialize;
use stoker_engine::{RequestTiming, TokenId, Usage};

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
    /// Of all choices, where each told; not a part of OpenAI's object.
    #[serde(skip)]
    timing: Option<RequestTiming>,
}

/// The counts of what generates nothing.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct PromptUsage {
    prompt_tokens: usize,
    total_tokens: usize,
}

impl PromptUsage {
    /// Of so many tokens read.
    pub(crate) fn of(prompt_tokens: usize) -> Self {
        Self { prompt_tokens, total_tokens: prompt_tokens }
    }
}

/// How long an answer took, by vLLM's names; milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct AnswerMetrics {
    queue_time_ms: f64,
    time_to_first_token_ms: f64,
    /// From the first token to the end.
    generation_time_ms: f64,
    /// Where there is more than one token.
    #[serde(skip_serializing_if = "Option::is_none")]
    mean_itl_ms: Option<f64>,
    /// Of all choices together, since the computation began.
    tokens_per_second: f64,
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

    /// What the counts and times of an answer with `n_choices` come to.
    pub(crate) fn metrics(&self, n_choices: usize) -> Option<AnswerMetrics> {
        let RequestTiming { queue_seconds, ttft_seconds, e2e_seconds } = self.timing?;
        let (generation, computed) = (e2e_seconds - ttft_seconds, e2e_seconds - queue_seconds);
        let gaps = f64::from(self.completion_tokens) / n_choices.max(1) as f64 - 1.0;
        Some(AnswerMetrics {
            queue_time_ms: queue_seconds * 1e3,
            time_to_first_token_ms: ttft_seconds * 1e3,
            generation_time_ms: generation * 1e3,
            mean_itl_ms: (gaps > 0.0).then(|| generation * 1e3 / gaps),
            tokens_per_second: if computed > 0.0 { f64::from(self.completion_tokens) / computed } else { 0.0 },
        })
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
            timing: None,
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
    /// Of the choices that have ended.
    timing: Timing,
}

/// Times of choices that are made at once.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Timing {
    NoneYet,
    /// The first to begin, the first token, the last end.
    All(RequestTiming),
    /// One has none.
    Unknown,
}

impl Timing {
    fn with(self, told: Option<RequestTiming>) -> Self {
        let Some(told) = told else { return Self::Unknown };
        match self {
            Self::NoneYet => Self::All(told),
            Self::All(so_far) => Self::All(RequestTiming {
                queue_seconds: so_far.queue_seconds.min(told.queue_seconds),
                ttft_seconds: so_far.ttft_seconds.min(told.ttft_seconds),
                e2e_seconds: so_far.e2e_seconds.max(told.e2e_seconds),
            }),
            Self::Unknown => Self::Unknown,
        }
    }
}

impl UsageSum {
    /// Tokens of the prompts.
    pub(crate) fn prompt_tokens(&self) -> u32 {
        self.prompt_tokens
    }

    /// For answers with `n` choices a prompt, numbered prompt by prompt.
    pub(crate) fn new(n: u32, prompt_tokens: u32) -> Self {
        let timing = Timing::NoneYet;
        Self { n, total: Usage::default(), prompt_tokens, n_generated: 0, thoughts: Vec::new(), timing }
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
    pub(crate) fn add(&mut self, index: u32, usage: Usage, timing: Option<RequestTiming>) {
        self.timing = self.timing.with(timing);
        self.total.completion_tokens += usage.completion_tokens;
        if index.is_multiple_of(self.n) {
            self.total.prompt_tokens += usage.prompt_tokens;
            self.total.cached_tokens += usage.cached_tokens;
        }
    }

    /// The sum at the end.
    pub(crate) fn body(&self) -> UsageBody {
        let timing = match self.timing {
            Timing::All(timing) => Some(timing),
            Timing::NoneYet | Timing::Unknown => None,
        };
        UsageBody { timing, ..self.with_details(self.total) }
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
            sum.add(index, Usage { prompt_tokens, completion_tokens: 5, cached_tokens: 0 }, None);
        }
        let expected = UsageBody::from(Usage { prompt_tokens: 17, completion_tokens: 20, cached_tokens: 0 });
        assert_eq!((sum.body(), sum.so_far()), (expected, expected));
    }

    #[test]
    fn times_of_an_answer_are_those_of_all_its_choices_or_nobody_s() {
        let timing =
            |queue_seconds, ttft_seconds, e2e_seconds| Some(RequestTiming { queue_seconds, ttft_seconds, e2e_seconds });
        let metrics = |timings: &[Option<RequestTiming>], completion_tokens| {
            let mut sum = UsageSum::new(timings.len() as u32, 10);
            for (index, timing) in (0..).zip(timings) {
                sum.add(index, Usage { prompt_tokens: 10, completion_tokens, cached_tokens: 0 }, *timing);
            }
            sum.body().metrics(timings.len())
        };
        let both = metrics(&[timing(0.5, 1.0, 3.0), timing(0.75, 1.5, 4.5)], 8).unwrap();
        let expected = AnswerMetrics {
            queue_time_ms: 500.0,
            time_to_first_token_ms: 1000.0,
            generation_time_ms: 3500.0,
            mean_itl_ms: Some(500.0),
            tokens_per_second: 4.0,
        };
        assert_eq!(both, expected);
        assert_eq!(metrics(&[timing(0.5, 1.0, 1.0)], 1).unwrap().mean_itl_ms, None, "one token has no gap");
        assert_eq!(metrics(&[None, timing(0.5, 1.0, 3.0)], 8), None);
        assert_eq!(metrics(&[timing(0.5, 1.0, 3.0), None], 8), None);
    }
}
