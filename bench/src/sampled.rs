//! Requests with sampling options, as clients send them: what a case `sampled_KIND_N` asks for. Runs nothing.

use std::{fmt, str::FromStr};

use stoker_engine::SamplingParams;

/// Tokens that `bias300` biases.
const N_BIASES: u32 = 300;

/// A set of options.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum Kind {
    /// None: the likeliest token.
    Greedy,
    /// Qwen2.5's own defaults: temperature 0.7, top-p 0.8, top-k 20, repetition penalty 1.05.
    Qwen,
    /// Greedy with a presence, a frequency and a repetition penalty.
    Penalties,
    /// Temperature 1, min-p 0.05.
    MinP,
    /// Greedy with 300 biases.
    Bias300,
    /// Greedy with the log-probabilities of the 5 likeliest tokens.
    Logprobs5,
    /// Of the 20 likeliest.
    Logprobs20,
    /// All of these at once.
    Everything,
}

/// How a request's tokens are chosen, and what it wants to know of them.
#[derive(Clone, Debug)]
pub struct Asked {
    /// Of the request.
    pub sampling: SamplingParams,
    /// Of the request.
    pub logprobs: Option<u8>,
}

impl Kind {
    /// Those that a case may have.
    pub const ALL: [Self; 6] =
        [Self::Qwen, Self::Penalties, Self::MinP, Self::Bias300, Self::Logprobs5, Self::Logprobs20];

    /// A request of this kind over a vocabulary; every request of a case has a seed of its own.
    pub fn asked(self, vocab_size: u32, seed: u64) -> Asked {
        let greedy = SamplingParams { temperature: 0.0, seed, ..SamplingParams::default() };
        let qwen =
            SamplingParams { temperature: 0.7, top_p: 0.8, top_k: 20, repetition_penalty: 1.05, ..greedy.clone() };
        let biases = || (0..N_BIASES).map(|i| (i * (vocab_size / N_BIASES), (i % 5) as f32 - 2.0)).collect();
        let (sampling, logprobs) = match self {
            Self::Greedy => (greedy, None),
            Self::Qwen => (qwen, None),
            Self::Penalties => (
                SamplingParams { presence_penalty: 0.5, frequency_penalty: 0.2, repetition_penalty: 1.1, ..greedy },
                None,
            ),
            Self::MinP => (SamplingParams { temperature: 1.0, min_p: 0.05, ..greedy }, None),
            Self::Bias300 => (SamplingParams { logit_bias: biases(), ..greedy }, None),
            Self::Logprobs5 => (greedy, Some(5)),
            Self::Logprobs20 => (greedy, Some(20)),
            Self::Everything => {
                let penalised = SamplingParams { presence_penalty: 0.5, frequency_penalty: 0.2, ..qwen };
                (SamplingParams { min_p: 0.05, logit_bias: biases(), ..penalised }, Some(20))
            }
        };
        Asked { sampling, logprobs }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Greedy => "greedy",
            Self::Qwen => "qwen",
            Self::Penalties => "penalties",
            Self::MinP => "min_p",
            Self::Bias300 => "bias300",
            Self::Logprobs5 => "logprobs5",
            Self::Logprobs20 => "logprobs20",
            Self::Everything => "everything",
        })
    }
}

impl FromStr for Kind {
    type Err = ();

    fn from_str(name: &str) -> Result<Self, ()> {
        Self::ALL.into_iter().find(|kind| kind.to_string() == name).ok_or(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn biases_lie_inside_the_vocabulary() {
        let asked = Kind::Bias300.asked(128_256, 1);
        assert_eq!(asked.sampling.logit_bias.len(), 300);
        assert!(asked.sampling.logit_bias.keys().all(|token| *token < 128_256));
    }
}
