//! What is measured: the cases by their names in docs/benchmarks, the work each one is, and which of its metrics it is for.
//! Runs nothing.

use std::{fmt, str::FromStr};

use crate::{mix, sampled::Kind};

/// Completion tokens of a case that streams.
pub const COMPLETION_TOKENS: u32 = 256;
/// Prompt tokens of a single stream, and before the tokens of `decode_N`.
pub const SHORT_PROMPT_TOKENS: u32 = 128;
/// Prompt tokens of concurrent and offline requests.
pub const PROMPT_TOKENS: u32 = 512;
/// Prompt tokens, and completion tokens, of `balanced_N`.
pub const BALANCED_TOKENS: u32 = 1024;
/// Tokens of the prefix that `prefix_warm_2k` and `shared_prefix` share, the tokens of each prompt after it, and the completion
/// tokens of `shared_prefix`.
pub const PREFIX_TOKENS: u32 = 2048;
/// See [`PREFIX_TOKENS`].
pub const OWN_TOKENS: u32 = 128;
/// See [`PREFIX_TOKENS`].
pub const PREFIX_COMPLETION_TOKENS: u32 = 64;
/// Requests of `shared_prefix`.
pub const PREFIX_REQUESTS: u32 = 64;

/// One thing to measure.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum Case {
    /// `start`: from exec of the agent to its first token over HTTP.
    Start,
    /// `idle`: memory of an agent that has answered once.
    Idle,
    /// `prefill_N`: tokens a second of one prompt of N tokens.
    Prefill(u32),
    /// `decode_N`: tokens a second of N tokens after a prompt of 128.
    Decode(u32),
    /// `single_stream`: 128 in, 256 out, alone.
    SingleStream,
    /// `ttft_N`: time to the first token of a prompt of N tokens, alone.
    Ttft(u32),
    /// `concurrent_N`: N requests at once, 512 in, 256 out each.
    Concurrent(u32),
    /// `prefix_warm_2k`: time to the first token when 2048 tokens of the prompt are cached and 128 are new.
    PrefixWarm,
    /// `shared_prefix`: 64 requests that share 2048 tokens against 64 that share none.
    SharedPrefix,
    /// `offline_N`: N requests given at once, 512 in, 256 out each.
    Offline(u32),
    /// `balanced_N`: N requests given at once, 1,024 in, 1,024 out each: the lengths that others publish throughput for.
    Balanced(u32),
    /// `sampled_KIND_N`: `concurrent_N` with sampling options, as a share of greedy's speed just before it.
    Sampled(Kind, u32),
    /// `constrained_N`: `concurrent_N` with a JSON schema each, as a share of free generation's speed just before it.
    Constrained(u32),
    /// `required_N`: `concurrent_N` with a JSON schema of many required keys each, beside the same token by token just before it.
    Required(u32),
    /// `embedded_N` and `scored_N`: N prompts of 512 tokens given at once, of which rows are read, beside the same without just before it.
    Read(Reads, u32),
    /// `neighbour_N`: what N - 1 greedy requests lose when the N-th has every option.
    Neighbour(u32),
    /// `mix_N`: N requests a second, nine of ten with short prompts, one with a long one: see [`mix`].
    Mix(u32),
    /// `beside_N`: 64 chats beside one prompt of N tokens: see [`mix::beside`].
    Beside(u32),
    /// `http_N`: `concurrent_N` over HTTP and server-sent events, as a share of the engine in process.
    Http(u32),
}

/// What is read of prompts.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum Reads {
    /// The mean of all tokens' outputs.
    Embedding,
    /// Log-probabilities of all tokens, each with five rivals.
    Scores,
}

/// Sequences that a `mix_N` is given room for, of as many tokens as its requests have in the mean.
const MIX_SEQUENCES: u32 = 256;
const MIX_TOKENS: (u32, u32) = (1_500, 155);

/// Requests of a case at once, and the tokens of each: what an engine must hold for it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Size {
    /// Requests given at once.
    pub requests: u32,
    /// Prompt tokens of each.
    pub prompt_tokens: u32,
    /// Completion tokens of each.
    pub completion_tokens: u32,
}

impl Size {
    /// Prompt and completion of one request.
    pub fn context_tokens(self) -> u32 {
        self.prompt_tokens + self.completion_tokens
    }

    /// Completion tokens of all requests.
    pub fn all_completion_tokens(self) -> f64 {
        f64::from(self.requests) * f64::from(self.completion_tokens)
    }
}

impl Case {
    /// What a person on a machine without a GPU waits for.
    pub const CPU: &[Self] =
        &[Self::Start, Self::Idle, Self::Prefill(512), Self::Decode(128), Self::Concurrent(8), Self::Concurrent(32)];

    /// Does it work, and about how fast.
    pub const CPU_QUICK: &[Self] = &[Self::Prefill(512), Self::Decode(128), Self::Concurrent(8)];

    /// Sampling options on a GPU.
    pub const GPU_SAMPLED: &[Self] = &[
        Self::Sampled(Kind::Qwen, 64),
        Self::Sampled(Kind::Penalties, 64),
        Self::Sampled(Kind::MinP, 64),
        Self::Sampled(Kind::Bias300, 64),
        Self::Sampled(Kind::Logprobs5, 64),
        Self::Sampled(Kind::Logprobs20, 64),
        Self::Neighbour(64),
    ];

    /// The full sweep of a GPU: the same cases as its peers' baselines.
    pub const GPU: &[Self] = &[
        Self::Start,
        Self::Idle,
        Self::Ttft(128),
        Self::Ttft(2048),
        Self::Ttft(8192),
        Self::SingleStream,
        Self::Concurrent(8),
        Self::Concurrent(32),
        Self::Concurrent(64),
        Self::Concurrent(128),
        Self::Concurrent(256),
        Self::PrefixWarm,
        Self::SharedPrefix,
        Self::Offline(1000),
        Self::Http(256),
    ];

    /// The GPU's sweep within a minute and a half.
    pub const GPU_QUICK: &[Self] = &[
        Self::Ttft(128),
        Self::Ttft(2048),
        Self::Ttft(8192),
        Self::SingleStream,
        Self::Concurrent(32),
        Self::Concurrent(256),
        Self::PrefixWarm,
        Self::SharedPrefix,
    ];

    /// The work it is.
    pub fn size(self) -> Size {
        let (requests, prompt_tokens, completion_tokens) = match self {
            Self::Start | Self::Idle => (1, 16, 1),
            Self::Prefill(prompt) | Self::Ttft(prompt) => (1, prompt, 1),
            // The first completion token comes with the prompt.
            Self::Decode(decoded) => (1, SHORT_PROMPT_TOKENS, decoded + 1),
            Self::SingleStream => (1, SHORT_PROMPT_TOKENS, COMPLETION_TOKENS),
            Self::Concurrent(n)
            | Self::Offline(n)
            | Self::Http(n)
            | Self::Sampled(_, n)
            | Self::Constrained(n)
            | Self::Required(n)
            | Self::Neighbour(n) => (n, PROMPT_TOKENS, COMPLETION_TOKENS),
            Self::Balanced(n) => (n, BALANCED_TOKENS, BALANCED_TOKENS),
            Self::Read(_, n) => (n, PROMPT_TOKENS, 1),
            Self::Mix(_) => (MIX_SEQUENCES, MIX_TOKENS.0, MIX_TOKENS.1),
            Self::Beside(prompt) => mix::beside_size(prompt),
            Self::PrefixWarm => (1, PREFIX_TOKENS + OWN_TOKENS, 1),
            Self::SharedPrefix => (PREFIX_REQUESTS, PREFIX_TOKENS + OWN_TOKENS, PREFIX_COMPLETION_TOKENS),
        };
        Size { requests, prompt_tokens, completion_tokens }
    }

    /// Positions of its longest request, and one more: a request that ends at the edge of the context is another case.
    pub fn positions(self) -> u32 {
        1 + match self {
            Self::Mix(_) => mix::CONTEXT_TOKENS,
            Self::Beside(prompt) => prompt + mix::BESIDE_ANSWER,
            _ => self.size().context_tokens(),
        }
    }

    /// Why a model of so many positions cannot have it, if it cannot.
    pub fn refusal(self, max_position_embeddings: u64) -> Option<String> {
        let needed = u64::from(self.positions());
        (needed > max_position_embeddings)
            .then(|| format!("{self} needs {needed} positions, the model has {max_position_embeddings}"))
    }

    /// The metric a case exists for: `ratio_to_PEER` is formed of it.
    pub fn headline(self) -> &'static str {
        match self {
            Self::Start => "seconds",
            Self::Idle => "rss_mb",
            Self::Prefill(_)
            | Self::Decode(_)
            | Self::SingleStream
            | Self::Offline(_)
            | Self::Balanced(_)
            | Self::Sampled(..) => "tok_s",
            Self::Constrained(_) => "share_of_free",
            Self::Read(..) => "share_of_unread",
            Self::Ttft(_) | Self::PrefixWarm => "ttft_ms",
            Self::Concurrent(_) => "itl_ms",
            Self::SharedPrefix | Self::Required(_) => "gain",
            Self::Neighbour(_) => "loss",
            Self::Mix(_) | Self::Beside(_) => "worst_gap_p95_ms",
            Self::Http(_) => "share_of_in_process",
        }
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Start => f.write_str("start"),
            Self::Idle => f.write_str("idle"),
            Self::Prefill(n) => write!(f, "prefill_{n}"),
            Self::Decode(n) => write!(f, "decode_{n}"),
            Self::SingleStream => f.write_str("single_stream"),
            Self::Ttft(n) => write!(f, "ttft_{n}"),
            Self::Concurrent(n) => write!(f, "concurrent_{n}"),
            Self::PrefixWarm => f.write_str("prefix_warm_2k"),
            Self::SharedPrefix => f.write_str("shared_prefix"),
            Self::Offline(n) => write!(f, "offline_{n}"),
            Self::Balanced(n) => write!(f, "balanced_{n}"),
            Self::Sampled(kind, n) => write!(f, "sampled_{kind}_{n}"),
            Self::Constrained(n) => write!(f, "constrained_{n}"),
            Self::Required(n) => write!(f, "required_{n}"),
            Self::Read(Reads::Embedding, n) => write!(f, "embedded_{n}"),
            Self::Read(Reads::Scores, n) => write!(f, "scored_{n}"),
            Self::Neighbour(n) => write!(f, "neighbour_{n}"),
            Self::Mix(n) => write!(f, "mix_{n}"),
            Self::Beside(n) => write!(f, "beside_{n}"),
            Self::Http(n) => write!(f, "http_{n}"),
        }
    }
}

impl FromStr for Case {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let plain = [Self::Start, Self::Idle, Self::SingleStream, Self::PrefixWarm, Self::SharedPrefix];
        if let Some(case) = plain.into_iter().find(|case| case.to_string() == name) {
            return Ok(case);
        }
        let numbered = name.rsplit_once('_').and_then(|(kind, n)| Some((kind, n.parse().ok().filter(|n| *n > 0)?)));
        match numbered {
            Some(("prefill", n)) => Ok(Self::Prefill(n)),
            Some(("decode", n)) => Ok(Self::Decode(n)),
            Some(("ttft", n)) => Ok(Self::Ttft(n)),
            Some(("concurrent", n)) => Ok(Self::Concurrent(n)),
            Some(("offline", n)) => Ok(Self::Offline(n)),
            Some(("balanced", n)) => Ok(Self::Balanced(n)),
            Some(("http", n)) => Ok(Self::Http(n)),
            Some(("constrained", n)) => Ok(Self::Constrained(n)),
            Some(("required", n)) => Ok(Self::Required(n)),
            Some(("embedded", n)) => Ok(Self::Read(Reads::Embedding, n)),
            Some(("scored", n)) => Ok(Self::Read(Reads::Scores, n)),
            Some(("neighbour", n)) => Ok(Self::Neighbour(n)),
            Some(("mix", n)) => Ok(Self::Mix(n)),
            Some(("beside", n)) => Ok(Self::Beside(n)),
            Some((kind, n)) => sampled(kind).map(|kind| Self::Sampled(kind, n)).ok_or_else(|| no_case(name)),
            None => Err(no_case(name)),
        }
    }
}

/// The options in the name of a case.
fn sampled(name: &str) -> Option<Kind> {
    name.strip_prefix("sampled_")?.parse().ok()
}

fn no_case(name: &str) -> String {
    let kinds = Kind::ALL.map(|kind| kind.to_string()).join(", ");
    format!(
        "{name} is not a case: use start, idle, single_stream, prefix_warm_2k, shared_prefix, or prefill_N, decode_N, \
         ttft_N, concurrent_N, offline_N, balanced_N, mix_N, beside_N, http_N, neighbour_N, constrained_N, required_N, embedded_N, scored_N, sampled_KIND_N with a number N and a KIND of {kinds}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_case_is_read_by_the_name_it_is_written_with() {
        for case in Case::CPU
            .iter()
            .chain(Case::CPU_QUICK)
            .chain(Case::GPU)
            .chain(Case::GPU_QUICK)
            .chain(Case::GPU_SAMPLED)
            .chain(&[Case::Balanced(512), Case::Mix(6), Case::Beside(128_000), Case::Constrained(8), Case::Required(8)])
        {
            assert_eq!(case.to_string().parse(), Ok(*case));
        }
    }

    #[test]
    fn a_word_that_is_no_case_is_refused_with_the_list() {
        for word in [
            "",
            "ttft",
            "ttft_",
            "ttft_0",
            "ttft_-1",
            "concurrent_x",
            "prefix_warm_4k",
            "sampled_qwen",
            "sampled_best_4",
        ] {
            assert!(word.parse::<Case>().unwrap_err().contains("concurrent_N"), "{word}");
        }
    }

    #[test]
    fn a_case_beyond_the_models_context_says_so() {
        assert_eq!(Case::Ttft(2046).refusal(2048), None);
        let reason = Case::Ttft(2048).refusal(2048).unwrap();
        assert_eq!(reason, "ttft_2048 needs 2050 positions, the model has 2048");
    }

    #[test]
    fn sizes_are_those_of_the_baselines() {
        assert_eq!(Case::Concurrent(32).size(), Size { requests: 32, prompt_tokens: 512, completion_tokens: 256 });
        assert_eq!(Case::SharedPrefix.size().context_tokens(), 2240);
        assert_eq!(Case::SingleStream.size().context_tokens(), 384);
    }
}
