//! Rotary position embedding: the angles. Pure arithmetic in f32, as the models were trained.
//!
//! Pair `i` of a head turns by `position x frequency[i]`; the two halves of the head hold the pairs' two coordinates.

use std::ops::Range;

use super::{Llama3Scaling, LongRopeScaling, RopeScaling, RopeSettings, YarnScaling};
use crate::each::each;

/// Positions that a thread takes at a time.
const POSITIONS_AT_ONCE: usize = 1024;

/// Cosines and sines of every position and pair.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeTable {
    /// Width of a head.
    pub head_dim: usize,
    /// Pairs of a head that turn: they are its first `2 x n_pairs` numbers.
    pub n_pairs: usize,
    /// `positions x n_pairs`.
    pub cos: Vec<f32>,
    /// `positions x n_pairs`.
    pub sin: Vec<f32>,
}

impl RopeTable {
    /// Angles of positions `0..n_positions` for heads of width `head_dim`.
    ///
    /// Dynamic scaling and LongRoPE depend on the context's length. It is taken to be `n_positions`, the longest that may
    /// come: keys that are cached keep their angles, so the choice cannot change while a sequence grows.
    pub fn new(rope: &RopeSettings, head_dim: usize, n_positions: usize) -> Self {
        let frequencies = frequencies(rope, n_positions as f32);
        let scale = attention_factor(&rope.scaling);
        let runs: Vec<Range<usize>> = (0..n_positions)
            .step_by(POSITIONS_AT_ONCE)
            .map(|first| first..(first + POSITIONS_AT_ONCE).min(n_positions))
            .collect();
        // Of 131072 positions one thread takes a quarter of a second, for which a start would wait.
        let parts = each(&runs, |run| {
            let angles = || run.clone().flat_map(|position| frequencies.iter().map(move |f| position as f32 * f));
            let cos: Vec<f32> = angles().map(|angle| angle.cos() * scale).collect();
            let sin: Vec<f32> = angles().map(|angle| angle.sin() * scale).collect();
            (cos, sin)
        });
        let (cos, sin): (Vec<_>, Vec<_>) = parts.into_iter().unzip();
        Self { head_dim, n_pairs: frequencies.len(), cos: cos.concat(), sin: sin.concat() }
    }
}

fn frequencies(rope: &RopeSettings, n_positions: f32) -> Vec<f32> {
    let plain = plain_frequencies(rope.theta, rope.width);
    match &rope.scaling {
        RopeScaling::Default => plain,
        RopeScaling::Linear { factor } => plain.into_iter().map(|f| f / factor).collect(),
        RopeScaling::Dynamic { factor, original_max_position_embeddings } => {
            let stretch = n_positions.max(*original_max_position_embeddings) / original_max_position_embeddings;
            plain_frequencies(dynamic_theta(rope, *factor, stretch), rope.width)
        }
        RopeScaling::Llama3(scaling) => plain.into_iter().map(|f| llama3_frequency(f, scaling)).collect(),
        RopeScaling::Yarn(scaling) => yarn_frequencies(plain, scaling, rope),
        RopeScaling::LongRope(scaling) => {
            plain.into_iter().zip(long_rope_divisors(scaling, n_positions)).map(|(f, divisor)| f / divisor).collect()
        }
    }
}

fn plain_frequencies(theta: f32, width: usize) -> Vec<f32> {
    let exponent = |pair: usize| (2 * pair) as f32 / width as f32;
    (0..width / 2).map(|pair| 1.0 / theta.powf(exponent(pair))).collect()
}

/// The base at which the lowest frequency is divided by about `stretch`, and the highest stays.
fn dynamic_theta(rope: &RopeSettings, factor: f32, stretch: f32) -> f32 {
    let width = rope.width as f32;
    rope.theta * (factor * stretch - (factor - 1.0)).powf(width / (width - 2.0))
}

fn long_rope_divisors(scaling: &LongRopeScaling, n_positions: f32) -> &[f32] {
    match n_positions > scaling.original_max_position_embeddings {
        true => &scaling.long_factor,
        false => &scaling.short_factor,
    }
}

/// Llama 3.1: long wavelengths are stretched by `factor`, short ones stay, between them the two are mixed.
fn llama3_frequency(frequency: f32, scaling: &Llama3Scaling) -> f32 {
    let Llama3Scaling { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings } = *scaling;
    let wavelength = 2.0 * std::f32::consts::PI / frequency;
    if wavelength < original_max_position_embeddings / high_freq_factor {
        return frequency;
    }
    if wavelength > original_max_position_embeddings / low_freq_factor {
        return frequency / factor;
    }
    let turns = original_max_position_embeddings / wavelength;
    let smooth = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
    (1.0 - smooth) * frequency / factor + smooth * frequency
}

/// YaRN: pairs that turn often over the original context stay, those that turn rarely are stretched, with a linear
/// ramp over the pairs between.
fn yarn_frequencies(plain: Vec<f32>, scaling: &YarnScaling, rope: &RopeSettings) -> Vec<f32> {
    let (low, high) = yarn_ramp(scaling, rope);
    let mix = |(pair, frequency): (usize, f32)| {
        let stretched = ((pair as f32 - low) / (high - low)).clamp(0.0, 1.0);
        frequency / scaling.factor * stretched + frequency * (1.0 - stretched)
    };
    plain.into_iter().enumerate().map(mix).collect()
}

/// The pairs that turn `beta_fast` and `beta_slow` times over the original context.
fn yarn_ramp(scaling: &YarnScaling, rope: &RopeSettings) -> (f32, f32) {
    let width = rope.width as f32;
    let pair_of_turns = |turns: f32| {
        let positions = scaling.original_max_position_embeddings;
        width * (positions / (turns * 2.0 * std::f32::consts::PI)).ln() / (2.0 * rope.theta.ln())
    };
    let (mut low, mut high) = (pair_of_turns(scaling.beta_fast), pair_of_turns(scaling.beta_slow));
    if scaling.truncate {
        (low, high) = (low.floor(), high.ceil());
    }
    (low, high) = (low.max(0.0), high.min(width - 1.0));
    // The paper's code keeps the ramp from having no width.
    if low == high { (low, high + 0.001) } else { (low, high) }
}

fn attention_factor(scaling: &RopeScaling) -> f32 {
    match scaling {
        RopeScaling::Yarn(yarn) => yarn.attention_factor,
        RopeScaling::LongRope(long) => long.attention_factor,
        RopeScaling::Default | RopeScaling::Linear { .. } | RopeScaling::Dynamic { .. } | RopeScaling::Llama3(_) => 1.0,
    }
}
