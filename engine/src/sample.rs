//! Chooses the next token from one row of logits. Pure: all randomness is a function of (seed, position, token), so a
//! preempted or moved request continues exactly as it would have (D9), whatever else is in the batch.
//!
//! Order: log-probabilities of the raw distribution; penalties; logit bias; banned tokens; temperature; top-k, top-p and
//! min-p as masks over the tempered distribution; the Gumbel-max draw. The draw needs no running sum over the
//! vocabulary, so its outcome does not depend on the order of a reduction, on a CPU or on a GPU.

use std::cmp::Ordering;

use crate::{
    request::{SamplingParams, TokenId},
    sched::{RawLogprobs, SampleSpec},
};

/// A chosen token and, when asked for, the log-probabilities around it.
#[derive(Clone, Debug, PartialEq)]
pub struct Choice {
    /// The token.
    pub token: TokenId,
    /// Of the raw distribution.
    pub logprobs: Option<RawLogprobs>,
}

/// Chooses the token that follows. `logits` holds the whole vocabulary and is left in an unspecified state.
pub fn sample(logits: &mut [f32], spec: &SampleSpec) -> Choice {
    let request = &spec.request;
    let raw = request.logprobs.map(|k| (raw_logprobs(logits), usize::from(k)));
    shape(logits, spec);
    let token = match request.sampling.temperature {
        0.0 => argmax(logits),
        _ => draw(logits, &request.sampling, spec.position),
    };
    Choice { token, logprobs: raw.map(|(all, k)| around(&all, token, k)) }
}

/// Penalties, bias and bans: everything that changes single logits.
fn shape(logits: &mut [f32], spec: &SampleSpec) {
    let params = &spec.request.sampling;
    if !spec.history.is_empty() {
        penalise(logits, params, &spec.history, spec.request.prompt.len());
    }
    for (&token, &bias) in &params.logit_bias {
        logits[token as usize] += bias;
    }
    for &token in &spec.banned {
        logits[token as usize] = f32::NEG_INFINITY;
    }
}

/// Repetition reads prompt and completion (Keskar et al. 2019, CTRL); presence and frequency the completion only
/// (OpenAI's definition).
fn penalise(logits: &mut [f32], params: &SamplingParams, history: &[TokenId], n_prompt: usize) {
    let mut counts: std::collections::BTreeMap<TokenId, u32> = history.iter().map(|&token| (token, 0)).collect();
    for token in &history[n_prompt..] {
        *counts.entry(*token).or_default() += 1;
    }
    for (token, n_generated) in counts {
        let logit = &mut logits[token as usize];
        *logit = if *logit > 0.0 { *logit / params.repetition_penalty } else { *logit * params.repetition_penalty };
        if n_generated > 0 {
            *logit -= params.presence_penalty + params.frequency_penalty * n_generated as f32;
        }
    }
}

/// The first of the largest logits. A NaN is never larger.
fn argmax(logits: &[f32]) -> TokenId {
    let best = logits.iter().enumerate().fold(0, |best, (idx, &logit)| if logit > logits[best] { idx } else { best });
    best as TokenId
}

/// The Gumbel-max draw: argmax over kept tokens of `logit / temperature - ln(-ln(u))`.
fn draw(logits: &mut [f32], params: &SamplingParams, position: usize) -> TokenId {
    logits.iter_mut().for_each(|logit| *logit /= params.temperature);
    let floor = kept_from(logits, params);
    let mut best = (f32::NEG_INFINITY, argmax(logits));
    for (idx, &logit) in logits.iter().enumerate().filter(|(_, logit)| **logit >= floor) {
        let score = logit + gumbel(uniform(params.seed, position as u64, idx as u64));
        if score > best.0 {
            best = (score, idx as TokenId);
        }
    }
    best.1
}

/// The smallest tempered logit that top-k, top-p and min-p all keep. Equal logits are kept or dropped together.
fn kept_from(logits: &[f32], params: &SamplingParams) -> f32 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut floor = f32::NEG_INFINITY;
    if params.min_p > 0.0 {
        floor = max + params.min_p.ln();
    }
    if params.top_k > 0 || params.top_p < 1.0 {
        floor = floor.max(rank_floor(logits, max, params));
    }
    floor
}

/// The floor of top-k and top-p, which need the order: the k-th largest logit, then the last of the smallest set whose
/// share of the top-k mass reaches top-p.
fn rank_floor(logits: &[f32], max: f32, params: &SamplingParams) -> f32 {
    let mut sorted = logits.to_vec();
    let k = if params.top_k == 0 { sorted.len() } else { (params.top_k as usize).min(sorted.len()) };
    if k < sorted.len() {
        sorted.select_nth_unstable_by(k - 1, |a, b| descending(*a, *b));
        sorted.truncate(k);
    }
    sorted.sort_unstable_by(|a, b| descending(*a, *b));
    if params.top_p >= 1.0 {
        return sorted[k - 1];
    }
    let total: f64 = sorted.iter().map(|logit| f64::from((logit - max).exp())).sum();
    let mut mass = 0.0;
    let last = sorted.iter().find(|logit| {
        mass += f64::from((**logit - max).exp());
        mass >= f64::from(params.top_p) * total
    });
    last.copied().unwrap_or(sorted[k - 1])
}

fn descending(a: f32, b: f32) -> Ordering {
    b.total_cmp(&a)
}

/// Standard Gumbel noise from a uniform number in (0, 1).
fn gumbel(u: f32) -> f32 {
    -(-u.ln()).ln()
}

/// A uniform number in (0, 1), the middle of one of 2^23 equal steps, from a stateless hash of its arguments.
pub fn uniform(seed: u64, position: u64, token: u64) -> f32 {
    let bits = mix(mix(mix(seed).wrapping_add(position)).wrapping_add(token)) >> 41;
    (bits as f32 + 0.5) / (1u32 << 23) as f32
}

/// One step of SplitMix64 (Steele, Lea, Flood 2014): increment, then its finaliser.
fn mix(state: u64) -> u64 {
    let z = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Natural log-probabilities of the whole vocabulary.
fn raw_logprobs(logits: &[f32]) -> Vec<f32> {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&logit| f64::from(logit - max).exp()).sum();
    let log_sum = max + sum.ln() as f32;
    logits.iter().map(|logit| logit - log_sum).collect()
}

fn around(all: &[f32], token: TokenId, k: usize) -> RawLogprobs {
    let mut order: Vec<TokenId> = (0..all.len() as TokenId).collect();
    let by_rank = |a: &TokenId, b: &TokenId| descending(all[*a as usize], all[*b as usize]).then(a.cmp(b));
    let k = k.min(order.len());
    if k > 0 && k < order.len() {
        order.select_nth_unstable_by(k - 1, by_rank);
    }
    order.truncate(k);
    order.sort_unstable_by(by_rank);
    let top = order.into_iter().map(|token| (token, all[token as usize])).collect();
    RawLogprobs { chosen: all[token as usize], top }
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeMap, sync::Arc};

    use super::*;
    use crate::request::{Request, StopParams};

    fn spec(sampling: SamplingParams, position: usize) -> SampleSpec {
        let request = Request { prompt: vec![0, 1], sampling, stop: StopParams::default(), logprobs: None };
        SampleSpec { request: Arc::new(request), position, banned: Vec::new(), history: Vec::new() }
    }

    fn chosen(logits: &[f32], sampling: SamplingParams, position: usize) -> TokenId {
        sample(&mut logits.to_vec(), &spec(sampling, position)).token
    }

    /// Relative frequencies over many positions.
    fn frequencies(logits: &[f32], sampling: &SamplingParams) -> Vec<f64> {
        let n = 20_000;
        let mut counts = vec![0.0; logits.len()];
        for position in 0..n {
            counts[chosen(logits, sampling.clone(), position) as usize] += 1.0 / n as f64;
        }
        counts
    }

    #[test]
    fn temperature_zero_takes_the_first_of_the_largest() {
        let greedy = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
        assert_eq!(chosen(&[1.0, 3.0, 3.0, 2.0], greedy, 7), 1);
    }

    #[test]
    fn tokens_come_as_often_as_their_probability_says() {
        let logits = [0.1f32, 0.2, 0.3, 0.4].map(f32::ln);
        let seen = frequencies(&logits, &SamplingParams { seed: 42, ..SamplingParams::default() });
        // Four standard deviations of a share over 20 000 draws are at most 4 * sqrt(0.25 / 20 000) = 0.0142.
        for (seen, wanted) in seen.iter().zip([0.1, 0.2, 0.3, 0.4]) {
            assert!((seen - wanted).abs() < 0.0142, "{seen} of {wanted}");
        }
    }

    #[test]
    fn the_same_seed_and_position_choose_the_same_token_and_others_differ() {
        let logits = vec![0.0; 1000];
        let with = |seed, position| chosen(&logits, SamplingParams { seed, ..SamplingParams::default() }, position);
        assert_eq!(with(1, 5), with(1, 5));
        assert_ne!(with(1, 5), with(2, 5));
        assert_ne!(with(1, 5), with(1, 6));
    }

    #[test]
    fn top_k_top_p_and_min_p_keep_only_the_likeliest() {
        let logits = [0.05f32, 0.15, 0.3, 0.5].map(f32::ln);
        let kept = |sampling: SamplingParams| {
            let seen = frequencies(&logits, &sampling);
            (0..4).filter(|&idx| seen[idx] > 0.0).collect::<Vec<_>>()
        };
        let all = SamplingParams::default;
        assert_eq!(kept(all()), [0, 1, 2, 3]);
        assert_eq!(kept(SamplingParams { top_k: 2, ..all() }), [2, 3]);
        assert_eq!(kept(SamplingParams { top_p: 0.79, ..all() }), [2, 3]);
        assert_eq!(kept(SamplingParams { top_p: 0.81, ..all() }), [1, 2, 3]);
        assert_eq!(kept(SamplingParams { min_p: 0.5, ..all() }), [2, 3]);
        assert_eq!(kept(SamplingParams { top_k: 3, top_p: 0.5, ..all() }), [3]);
        assert_eq!(kept(SamplingParams { top_k: 100, ..all() }), [0, 1, 2, 3]);
    }

    #[test]
    fn penalties_read_prompt_and_completion_as_their_definitions_say() {
        let params = SamplingParams {
            presence_penalty: 0.5,
            frequency_penalty: 0.25,
            repetition_penalty: 2.0,
            ..SamplingParams::default()
        };
        let mut spec = spec(params, 5);
        spec.history = vec![0, 1, 2, 2, 1];
        let mut logits = vec![4.0, 4.0, -4.0, 4.0];
        shape(&mut logits, &spec);
        // 0: prompt only. 1: prompt and once generated. 2: twice generated. 3: never.
        assert_eq!(logits, [2.0, 2.0 - 0.75, -8.0 - 1.0, 4.0]);
    }

    #[test]
    fn banned_and_biased_tokens_change_the_choice() {
        let greedy =
            SamplingParams { temperature: 0.0, logit_bias: BTreeMap::from([(0, 10.0)]), ..SamplingParams::default() };
        let mut spec = spec(greedy, 0);
        assert_eq!(sample(&mut [1.0, 3.0, 2.0], &spec).token, 0);
        spec.banned = vec![0, 1];
        assert_eq!(sample(&mut [1.0, 3.0, 2.0], &spec).token, 2);
    }

    #[test]
    fn logprobs_are_of_the_raw_distribution_best_first() {
        let mut spec = spec(SamplingParams { temperature: 0.0, ..SamplingParams::default() }, 0);
        spec.banned = vec![3];
        Arc::get_mut(&mut spec.request).unwrap().logprobs = Some(2);
        let choice = sample(&mut [0.1f32, 0.2, 0.3, 0.4].map(f32::ln), &spec);
        let logprobs = choice.logprobs.unwrap();
        assert_eq!(choice.token, 2);
        assert!((logprobs.chosen - 0.3f32.ln()).abs() < 1e-6);
        assert_eq!(logprobs.top.iter().map(|(token, _)| *token).collect::<Vec<_>>(), [3, 2]);
    }

    #[test]
    fn uniform_numbers_stay_inside_the_open_interval_and_centre_on_a_half() {
        let n = 10_000;
        let all: Vec<f32> = (0..n).map(|token| uniform(3, 9, token)).collect();
        assert!(all.iter().all(|u| *u > 0.0 && *u < 1.0));
        let mean = all.iter().map(|u| f64::from(*u)).sum::<f64>() / n as f64;
        assert!((mean - 0.5).abs() < 4.0 * (1.0f64 / 12.0 / n as f64).sqrt());
    }
}
