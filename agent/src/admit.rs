//! Says yes or no to a request before the engine sees it: is the replica in service, does the prompt fit, is there room
//! in the queue. Pure: readings and limits come in, a verdict goes out; nothing is reserved here.

use stoker_crds::contract::AgentPhase;

/// What the replica reports about itself at the moment of the decision.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QueueLoad {
    /// Sequences taken and not ended, running or waiting.
    pub open: u32,
    /// Sequences that may be open: as many as run together, and those that may wait.
    pub limit: u32,
    /// Their prompt tokens that still need prefill.
    pub waiting_prefill_tokens: u64,
    /// Recent prefill speed; `None` without samples.
    pub prefill_tokens_per_second: Option<f64>,
}

/// The sequences a request becomes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Asked {
    /// Prompts.
    pub prompts: u32,
    /// Completions of each.
    pub n: u32,
}

/// What a sequence needs of the context.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SequenceShape {
    /// Tokens of one prompt.
    pub prompt_tokens: u32,
    /// Completion tokens wanted, and by which field; `None` is "as many as fit".
    pub max_tokens: Option<MaxTokens>,
}

/// The bound on completion tokens a client sent.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MaxTokens {
    /// The bound.
    pub tokens: u32,
    /// The field that carried it.
    pub field: &'static str,
}

/// Why a request is refused. Each names what was asked, the limit and what to change.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Refusal {
    /// The model is still being read.
    #[error("the model is still loading ({percent} %): retry in {retry_after_seconds} s")]
    Loading {
        /// How far.
        percent: u32,
        /// When to come back.
        retry_after_seconds: u32,
    },
    /// The replica leaves service.
    #[error("this replica is draining and takes no new requests: retry, another replica will answer")]
    Draining {
        /// When to come back.
        retry_after_seconds: u32,
    },
    /// The engine does not run.
    #[error("this replica cannot serve: {0}")]
    Failed(String),
    /// The queue is full.
    #[error(
        "{open} sequences run or wait and this request needs {sequences} more of {limit} places: retry in {retry_after_seconds} s"
    )]
    QueueFull {
        /// Sequences running or waiting.
        open: u32,
        /// Places this request needs.
        sequences: u32,
        /// Places in all.
        limit: u32,
        /// When to come back.
        retry_after_seconds: u32,
    },
    /// The request needs more places than there are.
    #[error("{} prompts with n={} are more sequences than the {limit} that may run and wait here: {}", asked.prompts, asked.n, asked.advice())]
    TooManySequences {
        /// What was asked.
        asked: Asked,
        /// Places in all.
        limit: u32,
    },
    /// The prompt was not read to its end, because what was read leaves no room already.
    #[error("This model's maximum context length is {max_model_len} tokens. However, your prompt contains at least {at_least} input tokens, which leaves no room for output tokens. Please reduce the length of the input prompt to at most {} tokens.", max_model_len - 1)]
    PromptMuchTooLong {
        /// Tokens of the prompt's beginning.
        at_least: usize,
        /// Tokens of the context.
        max_model_len: u32,
    },
    /// No token of completion fits behind the prompt.
    #[error("This model's maximum context length is {max_model_len} tokens. However, your prompt contains {prompt_tokens} input tokens, which leaves no room for output tokens. Please reduce the length of the input prompt to at most {} tokens.", max_model_len - 1)]
    PromptTooLong {
        /// Tokens of the prompt.
        prompt_tokens: u32,
        /// Tokens of the context.
        max_model_len: u32,
    },
    /// More completion tokens than any prompt leaves room for.
    #[error("{}={} cannot be greater than max_model_len={max_model_len}. Please request fewer output tokens.", asked.field, asked.tokens)]
    MaxTokensTooLarge {
        /// What was asked.
        asked: MaxTokens,
        /// Tokens of the context.
        max_model_len: u32,
    },
}

/// A reload of a small model takes about this long; larger ones are asked for again.
const LOADING_RETRY_SECONDS: u32 = 5;
/// Endpoints follow readiness within about a second, so the next try meets another replica.
const DRAINING_RETRY_SECONDS: u32 = 1;
/// Bounds of the hint when the queue is full: never "now", never longer than a client would wait.
const QUEUE_RETRY_SECONDS: std::ops::RangeInclusive<u32> = 1..=60;

/// Whether the replica takes requests in this phase.
pub fn in_service(phase: AgentPhase, load_progress: f64, error: Option<&str>) -> Result<(), Refusal> {
    match phase {
        AgentPhase::Ready | AgentPhase::Withdrawing => Ok(()),
        AgentPhase::Loading => Err(Refusal::Loading {
            percent: (load_progress * 100.0) as u32,
            retry_after_seconds: LOADING_RETRY_SECONDS,
        }),
        AgentPhase::Draining | AgentPhase::Empty => {
            Err(Refusal::Draining { retry_after_seconds: DRAINING_RETRY_SECONDS })
        }
        AgentPhase::Failed => Err(Refusal::Failed(error.unwrap_or("unknown reason").to_owned())),
    }
}

/// Whether there is room for a request. What could run at once takes no place of those that wait.
pub fn admit(load: QueueLoad, asked: Asked) -> Result<(), Refusal> {
    let (sequences, limit) = (asked.sequences(), load.limit);
    if sequences > limit {
        return Err(Refusal::TooManySequences { asked, limit });
    }
    if load.open.saturating_add(sequences) > limit {
        let retry_after_seconds = queue_retry_seconds(load);
        return Err(Refusal::QueueFull { open: load.open, sequences, limit, retry_after_seconds });
    }
    Ok(())
}

impl Asked {
    /// One completion of one prompt.
    pub const ONE: Self = Self { prompts: 1, n: 1 };

    fn sequences(self) -> u32 {
        self.prompts.saturating_mul(self.n)
    }

    /// The field to change.
    pub fn field(self) -> &'static str {
        if self.n == 1 { "prompt" } else { "n" }
    }

    fn advice(self) -> &'static str {
        if self.n == 1 { "send fewer prompts" } else { "lower `n` or send fewer prompts" }
    }
}

/// The completion tokens a sequence may have. A bound that fits the context but not behind this prompt is clamped, as
/// OpenAI's and vLLM's servers do: the answer then ends with `finish_reason: length`.
pub fn completion_room(max_model_len: u32, shape: SequenceShape) -> Result<u32, Refusal> {
    if shape.prompt_tokens >= max_model_len {
        return Err(Refusal::PromptTooLong { prompt_tokens: shape.prompt_tokens, max_model_len });
    }
    let room = max_model_len - shape.prompt_tokens;
    match shape.max_tokens {
        Some(asked) if asked.tokens > max_model_len => Err(Refusal::MaxTokensTooLarge { asked, max_model_len }),
        Some(asked) => Ok(asked.tokens.min(room)),
        None => Ok(room),
    }
}

/// The time the queue's prefill takes at the recent speed.
fn queue_retry_seconds(load: QueueLoad) -> u32 {
    let seconds = match load.prefill_tokens_per_second {
        Some(speed) if speed > 0.0 => (load.waiting_prefill_tokens as f64 / speed).ceil() as u32,
        _ => *QUEUE_RETRY_SECONDS.start(),
    };
    seconds.clamp(*QUEUE_RETRY_SECONDS.start(), *QUEUE_RETRY_SECONDS.end())
}

#[cfg(test)]
mod tests {
    use super::*;

    const IDLE: QueueLoad = QueueLoad { open: 0, limit: 4, waiting_prefill_tokens: 0, prefill_tokens_per_second: None };

    fn room(prompt_tokens: u32, max_tokens: Option<u32>) -> Result<u32, Refusal> {
        let max_tokens = max_tokens.map(|tokens| MaxTokens { tokens, field: "max_tokens" });
        completion_room(100, SequenceShape { prompt_tokens, max_tokens })
    }

    #[test]
    fn completion_tokens_are_clamped_to_the_room_behind_the_prompt() {
        assert_eq!(room(40, None), Ok(60));
        assert_eq!(room(40, Some(7)), Ok(7));
        assert_eq!(room(40, Some(100)), Ok(60));
        let refused = room(40, Some(101)).unwrap_err();
        assert!(refused.to_string().starts_with("max_tokens=101 cannot be greater than max_model_len=100"));
    }

    #[test]
    fn a_prompt_that_leaves_no_room_is_refused_with_both_numbers() {
        assert_eq!(room(99, None), Ok(1));
        let refused = room(100, None).unwrap_err().to_string();
        assert!(refused.contains("maximum context length is 100 tokens"), "{refused}");
        assert!(refused.contains("contains 100 input tokens") && refused.contains("at most 99"), "{refused}");
    }

    #[test]
    fn a_full_queue_is_refused_with_the_time_its_prefill_takes() {
        let load = QueueLoad { open: 3, waiting_prefill_tokens: 900, prefill_tokens_per_second: Some(100.0), ..IDLE };
        assert_eq!(admit(load, Asked::ONE), Ok(()));
        let refused = admit(load, Asked { prompts: 1, n: 2 }).unwrap_err();
        assert!(matches!(refused, Refusal::QueueFull { retry_after_seconds: 9, .. }), "{refused:?}");
        assert_eq!(queue_retry_seconds(QueueLoad { waiting_prefill_tokens: 1 << 40, ..load }), 60);
        assert_eq!(queue_retry_seconds(IDLE), 1);
    }

    #[test]
    fn more_sequences_than_ever_fit_is_the_clients_mistake_in_the_field_that_made_them() {
        for (asked, field) in [(Asked { prompts: 1, n: 5 }, "n"), (Asked { prompts: 5, n: 1 }, "prompt")] {
            assert_eq!(admit(IDLE, asked), Err(Refusal::TooManySequences { asked, limit: 4 }));
            assert_eq!(asked.field(), field);
        }
        assert_eq!(admit(IDLE, Asked { prompts: 2, n: 2 }), Ok(()));
    }

    #[test]
    fn only_ready_and_withdrawing_replicas_admit() {
        use AgentPhase::*;
        assert!(in_service(Ready, 1.0, None).is_ok() && in_service(Withdrawing, 1.0, None).is_ok());
        assert!(matches!(in_service(Loading, 0.42, None), Err(Refusal::Loading { percent: 42, .. })));
        for phase in [Draining, Empty] {
            assert!(matches!(in_service(phase, 1.0, None), Err(Refusal::Draining { .. })));
        }
        assert_eq!(in_service(Failed, 0.0, Some("no such file")), Err(Refusal::Failed("no such file".into())));
    }
}
