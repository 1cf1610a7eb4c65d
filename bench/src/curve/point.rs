//! Steps of one shape, and how long they take, seen from outside as a caller sees them. Knows no meter.

use std::fmt;

use anyhow::{Context, Result, ensure};
use stoker_cost::{StepCost, StepWork};
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
/// Prompts whose mean is timed, and numbers of sequences.
const N_PROMPTS: u32 = 8;
const N_COUNTS: u32 = 4;
/// A length is about another one within this factor: half an octave, so that in a grid of powers of two none is about two of them.
pub(super) const NEAR: f64 = std::f64::consts::SQRT_2;

/// A shape of steps: the mean of some about the one that is named, as those of a load are. A step pays for whole tiles of rows, and a
/// recorded one for as many sequences as it was recorded for: a prompt of 512 tokens takes a quarter less time than one of 513, and
/// nine sequences take as long as twelve.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Point {
    /// One step that gives each of about so many sequences a token.
    Decode {
        /// Sequences.
        sequences: u32,
        /// About so many tokens before each when it begins.
        context: u32,
    },
    /// All steps of a fresh prompt, alone.
    Prompt {
        /// About so many tokens.
        tokens: u32,
    },
}

impl Point {
    /// Seconds that it takes by these costs, where a step computes at most `max_batched_tokens`.
    pub(super) fn seconds(self, cost: &StepCost, max_batched_tokens: u32) -> f64 {
        let all: f64 = self.steps(max_batched_tokens).into_iter().map(|step| cost.step(step)).sum();
        all / self.members().count() as f64
    }

    /// The steps of all its members.
    pub(super) fn steps(self, max_batched_tokens: u32) -> Vec<StepWork> {
        let half_way = f64::from(COMPLETION_TOKENS) / 2.0;
        let of_member = |lengths: Vec<u32>| match self {
            Self::Decode { .. } => {
                let context_tokens = lengths.iter().map(|before| f64::from(*before) + half_way).sum();
                vec![StepWork { decodes: lengths.len() as f64, context_tokens, ..StepWork::default() }]
            }
            Self::Prompt { .. } => lengths.into_iter().flat_map(|n| prompt_steps(n, max_batched_tokens)).collect(),
        };
        self.members().flat_map(of_member).collect()
    }

    /// Those that it is the mean of: the tokens before each sequence, or of the one prompt.
    pub(super) fn members(self) -> impl Iterator<Item = Vec<u32>> {
        let (about, n) = match self {
            Self::Decode { sequences, .. } => (sequences, N_COUNTS),
            Self::Prompt { tokens } => (tokens, N_PROMPTS),
        };
        spread(about, n).map(move |member| match self {
            Self::Decode { context, .. } => spread(context, member).collect(),
            Self::Prompt { .. } => vec![member],
        })
    }

    /// Tokens of all its prompts.
    pub(super) fn prompt_tokens(self) -> u32 {
        self.members().flatten().sum()
    }

    /// The engine holds all members, and none has more than `most` tokens in all.
    pub(super) fn fits(self, sizes: &Sizes, most: u32) -> bool {
        let more = match self {
            Self::Decode { .. } => COMPLETION_TOKENS,
            Self::Prompt { .. } => 1,
        };
        self.members().all(|lengths| {
            lengths.len() <= sizes.max_num_seqs as usize
                && lengths.iter().all(|tokens| tokens + more < sizes.max_model_len)
                && blocks_of(&lengths, more) <= u64::from(sizes.blocks)
                && lengths.iter().map(|tokens| u64::from(*tokens)).sum::<u64>() <= u64::from(most)
        })
    }
}

/// So many numbers about this one, ascending: evenly between the two ends that are near, on a scale of logarithms.
fn spread(about: u32, n: u32) -> impl Iterator<Item = u32> {
    let place = move |idx: u32| 2.0 * (f64::from(idx) + 0.5) / f64::from(n) - 1.0;
    (0..n).map(move |idx| (f64::from(about) * NEAR.powf(place(idx))).round().max(1.0) as u32)
}

/// KV blocks of sequences with such contexts and so many more tokens each.
fn blocks_of(contexts: &[u32], more: u32) -> u64 {
    contexts.iter().map(|tokens| u64::from((tokens + more).div_ceil(BLOCK_TOKENS))).sum()
}

fn prompt_steps(tokens: u32, max_batched_tokens: u32) -> impl Iterator<Item = StepWork> {
    (0..tokens)
        .step_by(max_batched_tokens as usize)
        .map(move |before| StepWork::prefill(f64::from(max_batched_tokens.min(tokens - before)), f64::from(before)))
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
        let lengths = longest(points);
        let (needed, there) = (blocks_of(&lengths, COMPLETION_TOKENS), engine.engine().load().total_blocks);
        ensure!(
            needed <= u64::from(there),
            "all contexts together take {needed} KV blocks, and there are {there}: give more --kv-cache-tokens, or smaller --contexts, \
             --sequences or --point-tokens"
        );
        let contexts: Vec<_> = lengths.into_iter().map(|tokens| engine.prompts().fresh(tokens)).collect();
        for context in &contexts {
            to_the_end(&mut engine.greedy(context.clone(), 1)?, 1)?;
        }
        Ok(Self { engine, contexts })
    }

    /// Seconds of a point: the mean of its members.
    pub(super) fn sample(&mut self, point: Point) -> Result<f64> {
        let each = point.members().map(|lengths| match point {
            Point::Decode { .. } => self.decode(&lengths),
            Point::Prompt { .. } => {
                let size = Size { requests: 1, prompt_tokens: lengths[0], completion_tokens: 1 };
                Ok(self.engine.alone(size)?.first)
            }
        });
        Ok(each.sum::<Result<f64>>()? / point.members().count() as f64)
    }

    /// The mean time between two tokens once all have their first. Not the median: where others compute too, a short step is
    /// interrupted or not, a long one always is, and only means grow as the work does.
    fn decode(&self, lengths: &[u32]) -> Result<f64> {
        let begun = self.contexts.iter().zip(lengths);
        let streams = begun.map(|(tokens, n)| self.engine.greedy(tokens[..*n as usize].to_vec(), COMPLETION_TOKENS));
        let mut streams = streams.collect::<Result<Vec<_>>>()?;
        for (stream, length) in streams.iter_mut().zip(lengths) {
            let event = stream.blocking_next().context("a stream begins with an event")?;
            ensure!(matches!(event, RequestEvent::Delta { .. }), "a request ended before its first token: {event:?}");
            // Else the first ones decode while the last ones are computed, and most steps have fewer sequences.
            let computed = length - stream.cached_tokens();
            ensure!(
                computed <= BLOCK_TOKENS,
                "{computed} tokens of a context had left the cache: give more --kv-cache-tokens, or smaller --prompts"
            );
        }
        self.engine.engine().take_samples();
        streams.iter_mut().try_for_each(|stream| to_the_end(stream, COMPLETION_TOKENS))?;
        let between = self.engine.engine().take_samples().itl;
        ensure!(!between.is_empty(), "no token came after the first ones");
        Ok(between.iter().sum::<f64>() / between.len() as f64)
    }
}

/// Tokens of the longest context that each sequence has in any of these points.
fn longest(points: &[Point]) -> Vec<u32> {
    let mut longest: Vec<u32> = Vec::new();
    for point in points.iter().filter(|point| matches!(point, Point::Decode { .. })) {
        for (idx, tokens) in point.members().flat_map(|lengths| lengths.into_iter().enumerate()) {
            match longest.get_mut(idx) {
                Some(most) => *most = tokens.max(*most),
                None => longest.push(tokens),
            }
        }
    }
    longest
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZES: Sizes = Sizes { blocks: 100, max_batched_tokens: 512, max_num_seqs: 8, max_model_len: 1024 };

    #[test]
    fn what_is_about_a_number_lies_evenly_within_half_an_octave_of_it() {
        assert_eq!(spread(512, 8).collect::<Vec<_>>(), [378, 412, 450, 490, 535, 583, 636, 693]);
        assert_eq!(spread(8, 4).collect::<Vec<_>>(), [6, 7, 9, 10]);
        assert_eq!(spread(1, 4).collect::<Vec<_>>(), [1; 4]);
        assert_eq!(spread(1024, 1).collect::<Vec<_>>(), [1024]);
    }

    #[test]
    fn a_prompt_is_computed_in_as_many_steps_as_hold_it() {
        let steps: Vec<StepWork> = prompt_steps(1100, 512).collect();
        let prefilled: Vec<f64> = steps.iter().map(|step| step.prefill_tokens).collect();
        assert_eq!(prefilled, [512.0, 512.0, 76.0]);
        let pairs: f64 = steps.iter().map(|step| step.prefill_pairs).sum();
        assert_eq!(pairs, 1100.0 * 550.0);
    }

    #[test]
    fn a_point_takes_the_mean_of_what_its_members_do() {
        let cost =
            StepCost { step_seconds: 2.0, decode_seconds: 1.0, prefill_token_seconds: 0.5, ..StepCost::default() };
        let prompts = Point::Prompt { tokens: 64 };
        assert_eq!(prompts.seconds(&cost, 4096), 2.0 + 0.5 * f64::from(prompts.prompt_tokens()) / 8.0);
        let decode = Point::Decode { sequences: 8, context: 50 };
        assert_eq!(decode.seconds(&cost, 4096), 2.0 + f64::from(6 + 7 + 9 + 10) / 4.0);
    }

    #[test]
    fn a_step_of_decoding_reads_the_context_of_each_as_it_is_half_way() {
        let steps = Point::Decode { sequences: 2, context: 100 }.steps(512);
        let step = |decodes, context_tokens| StepWork { decodes, context_tokens, ..StepWork::default() };
        let (two, three) = (step(2.0, 84.0 + 119.0 + 32.0), step(3.0, 79.0 + 100.0 + 126.0 + 48.0));
        assert_eq!(steps, [two, two, two, three]);
    }

    #[test]
    fn a_sequence_has_the_longest_of_its_contexts() {
        let decode = |sequences, context| Point::Decode { sequences, context };
        let points = [decode(1, 120), decode(2, 100), Point::Prompt { tokens: 900 }];
        assert_eq!(longest(&points), [120, 119, 126]);
    }

    #[test]
    fn what_the_engine_does_not_hold_does_not_fit() {
        let decode = |sequences, context| Point::Decode { sequences, context };
        for (point, most, fits) in [
            (decode(6, 100), 10_000, true),
            // More sequences than run together, more tokens than a context, than the KV cache, than a point may have.
            (decode(7, 10), 10_000, false),
            (decode(1, 1001), 10_000, false),
            (decode(6, 200), 10_000, false),
            (decode(6, 100), 799, false),
            (Point::Prompt { tokens: 750 }, 10_000, true),
            (Point::Prompt { tokens: 770 }, 10_000, false),
        ] {
            assert_eq!(point.fits(&SIZES, most), fits, "{point} of {most}");
        }
    }
}
