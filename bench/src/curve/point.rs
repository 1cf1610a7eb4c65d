//! Steps of one shape, and how long they take, seen from outside as a caller sees them. Knows no cost and no meter.

use std::fmt;

use anyhow::{Context, Result, ensure};
use stoker_cost::StepWork;
use stoker_engine::{RequestEvent, TokenId};
use stoker_figures::median;

use super::Sizes;
use crate::{
    case::Size,
    in_process::{InProcess, to_the_end},
};

/// Tokens that each sequence is asked for: the first and last steps, which may have fewer sequences, do not count for much.
const COMPLETION_TOKENS: u32 = 32;
const BLOCK_TOKENS: u32 = 16;

/// A shape of steps.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Point {
    /// One step that gives each of so many sequences a token.
    Decode {
        /// Sequences.
        sequences: u32,
        /// Tokens before each when it begins.
        context: u32,
    },
    /// All steps of a fresh prompt, alone.
    Prompt {
        /// Its tokens.
        tokens: u32,
    },
}

impl Point {
    /// The steps that it is, where one computes at most `max_batched_tokens`.
    pub fn steps(self, max_batched_tokens: u32) -> Vec<StepWork> {
        match self {
            Self::Decode { sequences, context } => {
                let (decodes, before) = (f64::from(sequences), f64::from(context) + f64::from(COMPLETION_TOKENS) / 2.0);
                vec![StepWork { decodes, context_tokens: decodes * before, ..StepWork::default() }]
            }
            Self::Prompt { tokens } => {
                let chunk = |before: u32| {
                    StepWork::prefill(f64::from(max_batched_tokens.min(tokens - before)), f64::from(before))
                };
                (0..tokens).step_by(max_batched_tokens as usize).map(chunk).collect()
            }
        }
    }

    /// The engine holds it, and it has no more than `most` tokens in all.
    pub(super) fn fits(self, sizes: &Sizes, most: u32) -> bool {
        let (sequences, tokens) = match self {
            Self::Decode { sequences, context } => (sequences, context + COMPLETION_TOKENS),
            Self::Prompt { tokens } => (1, tokens + 1),
        };
        let blocks = u64::from(sequences) * u64::from(tokens.div_ceil(BLOCK_TOKENS));
        let at_start = u64::from(sequences) * u64::from(tokens - COMPLETION_TOKENS.min(tokens - 1));
        sequences <= sizes.max_num_seqs
            && tokens < sizes.max_model_len
            && blocks <= u64::from(sizes.blocks)
            && at_start <= u64::from(most)
    }
}

impl fmt::Display for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Decode { sequences, context } => write!(f, "decode_{sequences}x{context}"),
            Self::Prompt { tokens } => write!(f, "prefill_{tokens}"),
        }
    }
}

/// A shape and what its steps took together.
#[derive(Clone, Debug)]
pub(super) struct Timed {
    /// The shape.
    pub(super) point: Point,
    /// Of each sample.
    pub(super) seconds: Vec<f64>,
}

impl Timed {
    pub(super) fn new(point: Point) -> Self {
        Self { point, seconds: Vec::new() }
    }

    /// Of all samples.
    pub(super) fn median(&self) -> f64 {
        median(&self.seconds)
    }
}

/// An engine whose prefix cache holds every context of a grid, so that the sequences of a sample all begin to decode at once.
pub(super) struct Bench<'a> {
    engine: &'a mut InProcess,
    /// The longest context of each sequence; shorter ones are how it begins.
    contexts: Vec<Vec<TokenId>>,
}

impl<'a> Bench<'a> {
    /// Computes the contexts of these points.
    pub(super) fn new(engine: &'a mut InProcess, points: &[Point]) -> Result<Self> {
        let longest = |idx: u32| {
            let those = points.iter().filter_map(|point| match *point {
                Point::Decode { sequences, context } => (sequences > idx).then_some(context),
                Point::Prompt { .. } => None,
            });
            those.max()
        };
        let lengths: Vec<u32> = (0..).map_while(longest).collect();
        let contexts: Vec<_> = lengths.into_iter().map(|tokens| engine.prompts().fresh(tokens)).collect();
        for context in &contexts {
            to_the_end(&mut engine.greedy(context.clone(), 1)?, 1)?;
        }
        Ok(Self { engine, contexts })
    }

    /// Seconds of all steps of a point.
    pub(super) fn sample(&mut self, point: Point) -> Result<f64> {
        match point {
            Point::Decode { sequences, context } => self.decode(sequences as usize, context as usize),
            Point::Prompt { tokens } => {
                let size = Size { requests: 1, prompt_tokens: tokens, completion_tokens: 1 };
                Ok(self.engine.alone(size)?.first)
            }
        }
    }

    /// The mean time between two tokens once all have their first. Not the median: where others compute too, a short step is
    /// interrupted or not, a long one always is, and only means grow as the work does.
    fn decode(&self, sequences: usize, context: usize) -> Result<f64> {
        let begun = self.contexts[..sequences].iter();
        let streams = begun.map(|tokens| self.engine.greedy(tokens[..context].to_vec(), COMPLETION_TOKENS));
        let mut streams = streams.collect::<Result<Vec<_>>>()?;
        for stream in &mut streams {
            let event = stream.blocking_next().context("a stream begins with an event")?;
            ensure!(matches!(event, RequestEvent::Delta { .. }), "a request ended before its first token: {event:?}");
        }
        self.engine.engine().take_samples();
        streams.iter_mut().try_for_each(|stream| to_the_end(stream, COMPLETION_TOKENS))?;
        let between = self.engine.engine().take_samples().itl;
        ensure!(!between.is_empty(), "no token came after the first ones");
        Ok(between.iter().sum::<f64>() / between.len() as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZES: Sizes = Sizes { blocks: 100, max_batched_tokens: 512, max_num_seqs: 8, max_model_len: 1024 };

    #[test]
    fn a_prompt_is_computed_in_as_many_steps_as_hold_it() {
        let steps = Point::Prompt { tokens: 1100 }.steps(512);
        let prefilled: Vec<f64> = steps.iter().map(|step| step.prefill_tokens).collect();
        assert_eq!(prefilled, [512.0, 512.0, 76.0]);
        let pairs: f64 = steps.iter().map(|step| step.prefill_pairs).sum();
        assert_eq!(pairs, 1100.0 * 550.0);
    }

    #[test]
    fn a_step_of_decoding_reads_the_context_of_each_as_it_is_half_way() {
        let steps = Point::Decode { sequences: 4, context: 100 }.steps(512);
        assert_eq!(steps, [StepWork { decodes: 4.0, context_tokens: 4.0 * 116.0, ..StepWork::default() }]);
    }

    #[test]
    fn what_the_engine_does_not_hold_does_not_fit() {
        let decode = |sequences, context| Point::Decode { sequences, context };
        for (point, most, fits) in [
            (decode(8, 100), 10_000, true),
            // More sequences than run together, more tokens than a context, than the KV cache, than a point may have.
            (decode(9, 10), 10_000, false),
            (decode(1, 1001), 10_000, false),
            (decode(8, 200), 10_000, false),
            (decode(8, 100), 799, false),
            (Point::Prompt { tokens: 1022 }, 10_000, true),
            (Point::Prompt { tokens: 1023 }, 10_000, false),
        ] {
            assert_eq!(point.fits(&SIZES, most), fits, "{point} of {most}");
        }
    }
}
