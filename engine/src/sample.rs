//! Choosing the next token from logits. Pure: all randomness is a function of (seed, position), so a sequence goes on
//! the same after preemption or on another replica (D9).

use std::collections::BTreeMap;

use crate::{
    request::{SamplingParams, TokenId},
    sched::{RawLogprobs, SampleSpec},
};

/// What was chosen at one position.
#[derive(Clone, Debug, PartialEq)]
pub struct Choice {
    /// The token.
    pub token: TokenId,
    /// Set when the request asked for log-probabilities.
    pub logprobs: Option<RawLogprobs>,
}

/// A candidate token and its logit after penalties and temperature.
type Candidate = (TokenId, f32);

/// Chooses the token that follows. Log-probabilities are those of the model's own distribution, before any change.
pub fn choose(logits: &[f32], spec: &SampleSpec<'_>) -> Choice {
    let params = &spec.request.sampling;
    let mut changed = logits.to_vec();
    apply_bias(&mut changed, &params.logit_bias);
    apply_penalties(&mut changed, params, spec.history, spec.request.prompt.len());
    ban(&mut changed, spec.banned);
    let token = if params.temperature == 0.0 { greedy(&changed) } else { draw(&changed, params, spec.position) };
    let logprobs = spec.request.logprobs.map(|k| raw_logprobs(logits, token, k as usize));
    Choice { token, logprobs }
}

/// A number in 0..1 from a seed and a counter: two rounds of SplitMix64's finaliser, which passes through every bit.
pub(crate) fn uniform(seed: u64, counter: u64) -> f64 {
    let bits = mix(mix(seed) ^ counter.wrapping_mul(0x9E37_79B9_7F4A_7C15));
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

fn mix(mut bits: u64) -> u64 {
    bits = bits.wrapping_add(0x9E37_79B9_7F4A_7C15);
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    bits ^ (bits >> 31)
}

fn apply_bias(logits: &mut [f32], bias: &BTreeMap<TokenId, f32>) {
    for (token, bias) in bias {
        if let Some(logit) = logits.get_mut(*token as usize) {
            *logit += bias;
        }
    }
}

/// Repetition reads prompt and completion, presence and frequency the completion only. `history` is empty when no
/// penalty is set.
fn apply_penalties(logits: &mut [f32], params: &SamplingParams, history: &[TokenId], prompt_len: usize) {
    if history.is_empty() {
        return;
    }
    let mut counts: BTreeMap<TokenId, u32> = BTreeMap::new();
    for (position, token) in history.iter().enumerate() {
        *counts.entry(*token).or_default() += u32::from(position >= prompt_len);
    }
    for (token, n_generated) in counts {
        let logit = &mut logits[token as usize];
        *logit = if *logit > 0.0 { *logit / params.repetition_penalty } else { *logit * params.repetition_penalty };
        if n_generated > 0 {
            *logit -= params.frequency_penalty * n_generated as f32 + params.presence_penalty;
        }
    }
}

fn ban(logits: &mut [f32], banned: &[TokenId]) {
    for token in banned {
        if let Some(logit) = logits.get_mut(*token as usize) {
            *logit = f32::NEG_INFINITY;
        }
    }
}

/// The likeliest token; of equals the one with the lowest id.
fn greedy(logits: &[f32]) -> TokenId {
    let best = logits
        .iter()
        .enumerate()
        .fold((0, f32::NEG_INFINITY), |best, (token, logit)| if *logit > best.1 { (token, *logit) } else { best });
    best.0 as TokenId
}

fn draw(logits: &[f32], params: &SamplingParams, position: usize) -> TokenId {
    let candidates = candidates(logits, params);
    let max = candidates.iter().map(|(_, logit)| *logit).fold(f32::NEG_INFINITY, f32::max);
    let weight = |logit: f32| f64::from(logit - max).exp();
    let total: f64 = candidates.iter().map(|(_, logit)| weight(*logit)).sum();
    let mut left = uniform(params.seed, position as u64) * total;
    for (token, logit) in &candidates {
        left -= weight(*logit);
        if left < 0.0 {
            return *token;
        }
    }
    // Rounding may leave a crumb after the last candidate.
    candidates.last().expect("filters keep at least one candidate").0
}

/// Tokens left by the filters, with logits at the temperature. Order: by id if nothing is filtered by rank, else the
/// likeliest first; either way it depends on the logits and parameters only.
fn candidates(logits: &[f32], params: &SamplingParams) -> Vec<Candidate> {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    // min_p is a bound on the ratio to the likeliest; on logits that is a difference.
    let least = if params.min_p > 0.0 { max / params.temperature + params.min_p.ln() } else { f32::NEG_INFINITY };
    let scaled = logits.iter().enumerate().map(|(token, logit)| (token as TokenId, logit / params.temperature));
    let mut kept: Vec<Candidate> = scaled.filter(|(_, logit)| *logit > f32::NEG_INFINITY && *logit >= least).collect();
    if kept.is_empty() {
        return vec![(greedy(logits), 0.0)];
    }
    if params.top_k > 0 {
        let n = kept.len().min(params.top_k as usize);
        rank(&mut kept, n);
        kept.truncate(n);
    }
    if params.top_p < 1.0 {
        keep_nucleus(&mut kept, params.top_p);
    }
    kept
}

/// Brings the `n` likeliest to the front, the likeliest first; of equals the lowest id.
fn rank(candidates: &mut [Candidate], n: usize) {
    let by_rank = |(a, x): &Candidate, (b, y): &Candidate| y.total_cmp(x).then(a.cmp(b));
    if n < candidates.len() {
        candidates.select_nth_unstable_by(n, by_rank);
    }
    candidates[..n].sort_unstable_by(by_rank);
}

/// Keeps the likeliest candidates whose probabilities reach `top_p`; at least one. Ranks only as many as needed: the
/// nucleus is usually a few tokens of a large vocabulary.
fn keep_nucleus(candidates: &mut Vec<Candidate>, top_p: f32) {
    let max = candidates.iter().map(|(_, logit)| *logit).fold(f32::NEG_INFINITY, f32::max);
    let weight = |logit: f32| f64::from(logit - max).exp();
    let needed = candidates.iter().map(|(_, logit)| weight(*logit)).sum::<f64>() * f64::from(top_p);
    let mut n_ranked = 0;
    while n_ranked < candidates.len() {
        n_ranked = (n_ranked * 8).max(64).min(candidates.len());
        rank(candidates, n_ranked);
        let mut reached = 0.0;
        let is_enough = |(_, logit): &Candidate| {
            reached += weight(*logit);
            reached >= needed
        };
        if let Some(last) = candidates[..n_ranked].iter().position(is_enough) {
            return candidates.truncate(last + 1);
        }
    }
}

/// Log-probabilities of the model's own distribution.
pub(crate) fn raw_logprobs(logits: &[f32], chosen: TokenId, k: usize) -> RawLogprobs {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let total: f64 = logits.iter().map(|logit| f64::from(logit - max).exp()).sum();
    let logprob = |logit: f32| (f64::from(logit - max) - total.ln()) as f32;
    let top = likeliest(logits, k).into_iter().map(|(token, logit)| (token, logprob(logit))).collect();
    RawLogprobs { chosen: logprob(logits[chosen as usize]), top }
}

fn likeliest(logits: &[f32], k: usize) -> Vec<Candidate> {
    let mut candidates: Vec<Candidate> =
        logits.iter().enumerate().map(|(token, logit)| (token as TokenId, *logit)).collect();
    let k = k.min(candidates.len());
    rank(&mut candidates, k);
    candidates.truncate(k);
    candidates
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::{Request, StopParams};

    const LOGITS: [f32; 4] = [1.0, 3.0, 2.0, 0.0];

    fn request(sampling: SamplingParams) -> Request {
        Request { prompt: vec![0], sampling, stop: StopParams::default(), logprobs: None }
    }

    fn spec(request: &Request) -> SampleSpec<'_> {
        SampleSpec { request, position: 1, banned: &[], history: &[] }
    }

    /// Shares of the tokens over many positions.
    fn shares(sampling: SamplingParams) -> Vec<f64> {
        const N: usize = 20_000;
        let mut counts = vec![0.0; LOGITS.len()];
        let request = request(sampling);
        for position in 0..N {
            let spec = SampleSpec { position, ..spec(&request) };
            counts[choose(&LOGITS, &spec).token as usize] += 1.0 / N as f64;
        }
        counts
    }

    fn softmax(temperature: f64) -> Vec<f64> {
        let weights: Vec<f64> = LOGITS.iter().map(|logit| (f64::from(*logit) / temperature).exp()).collect();
        let total: f64 = weights.iter().sum();
        weights.iter().map(|weight| weight / total).collect()
    }

    fn assert_close(found: &[f64], expected: &[f64]) {
        // Five standard deviations of a share over 20,000 draws.
        let bound = 5.0 * (0.25f64 / 20_000.0).sqrt();
        for (found, expected) in found.iter().zip(expected) {
            assert!((found - expected).abs() < bound, "{found} is not {expected}");
        }
    }

    #[test]
    fn temperature_zero_takes_the_likeliest_and_the_lowest_id_of_equals() {
        let greedy = request(SamplingParams { temperature: 0.0, ..SamplingParams::default() });
        assert_eq!(choose(&LOGITS, &spec(&greedy)).token, 1);
        assert_eq!(choose(&[5.0, 7.0, 7.0], &spec(&greedy)).token, 1);
    }

    #[test]
    fn draws_follow_the_distribution_at_the_temperature() {
        assert_close(&shares(SamplingParams::default()), &softmax(1.0));
        assert_close(&shares(SamplingParams { temperature: 2.0, ..SamplingParams::default() }), &softmax(2.0));
    }

    #[test]
    fn filters_keep_the_likeliest_and_their_ratios() {
        let ratio = 1f64.exp();
        let two = [0.0, ratio / (1.0 + ratio), 1.0 / (1.0 + ratio), 0.0];
        assert_close(&shares(SamplingParams { top_k: 2, ..SamplingParams::default() }), &two);
        assert_close(&shares(SamplingParams { top_p: 0.8, ..SamplingParams::default() }), &two);
        assert_close(&shares(SamplingParams { min_p: 0.3, ..SamplingParams::default() }), &two);
        assert_close(&shares(SamplingParams { top_k: 1, ..SamplingParams::default() }), &[0.0, 1.0, 0.0, 0.0]);
        assert_close(&shares(SamplingParams { top_p: 1e-6, ..SamplingParams::default() }), &[0.0, 1.0, 0.0, 0.0]);
    }

    #[test]
    fn a_nucleus_wider_than_the_first_ranks_is_found_too() {
        let logits: Vec<f32> = (0..1000).map(|token| ((token * 37) % 1000) as f32 * 1e-3).collect();
        let weights: Vec<f64> = logits.iter().map(|logit| f64::from(*logit).exp()).collect();
        let mut ranked: Vec<usize> = (0..1000).collect();
        ranked.sort_by(|a, b| weights[*b].total_cmp(&weights[*a]));
        for top_p in [0.01, 0.1, 0.5, 0.99] {
            let mut candidates: Vec<Candidate> = logits.iter().enumerate().map(|(t, l)| (t as u32, *l)).collect();
            keep_nucleus(&mut candidates, top_p);
            let needed = f64::from(top_p) * weights.iter().sum::<f64>();
            let mass = |n: usize| ranked[..n].iter().map(|token| weights[*token]).sum::<f64>();
            let expected: Vec<u32> = ranked[..candidates.len()].iter().map(|token| *token as u32).collect();
            assert_eq!(candidates.iter().map(|(token, _)| *token).collect::<Vec<_>>(), expected);
            assert!(mass(candidates.len()) >= needed && mass(candidates.len() - 1) < needed);
        }
    }

    #[test]
    fn the_same_seed_and_position_give_the_same_token() {
        let tokens = |seed| -> Vec<TokenId> {
            let request = request(SamplingParams { seed, ..SamplingParams::default() });
            let at = |position| choose(&LOGITS, &SampleSpec { position, ..spec(&request) }).token;
            (0..50).map(at).collect()
        };
        assert_eq!(tokens(7), tokens(7));
        assert_ne!(tokens(7), tokens(8));
    }

    #[test]
    fn uniform_numbers_fill_the_interval_for_neighbouring_seeds_and_counters() {
        for fixed in 0..3 {
            let mean_by_counter: f64 = (0..10_000).map(|i| uniform(fixed, i)).sum::<f64>() / 10_000.0;
            let mean_by_seed: f64 = (0..10_000).map(|i| uniform(i, fixed)).sum::<f64>() / 10_000.0;
            assert!((mean_by_counter - 0.5).abs() < 0.02 && (mean_by_seed - 0.5).abs() < 0.02);
        }
        assert!((0..10_000).all(|i| (0.0..1.0).contains(&uniform(i, i))));
    }

    #[test]
    fn bias_and_bans_change_the_choice_but_not_the_logprobs() {
        let params = SamplingParams { temperature: 0.0, logit_bias: [(3, 100.0)].into(), ..SamplingParams::default() };
        let request = Request { logprobs: Some(2), ..request(params) };
        let spec = spec(&request);
        let choice = choose(&LOGITS, &spec);
        let logprobs = choice.logprobs.unwrap();
        let expected = softmax(1.0);
        assert_eq!(choice.token, 3);
        assert!((f64::from(logprobs.chosen) - expected[3].ln()).abs() < 1e-6);
        assert_eq!(logprobs.top.iter().map(|(token, _)| *token).collect::<Vec<_>>(), [1, 2]);
        assert_eq!(choose(&LOGITS, &SampleSpec { banned: &[3, 1, 99], ..spec }).token, 2);
    }

    #[test]
    fn penalties_count_what_their_definition_says() {
        let choose_with = |sampling: SamplingParams| {
            let request = Request { prompt: vec![1], ..request(SamplingParams { temperature: 0.0, ..sampling }) };
            choose(&LOGITS, &SampleSpec { history: &[1, 2, 2], ..spec(&request) }).token
        };
        let none = SamplingParams::default;
        assert_eq!(choose_with(SamplingParams { presence_penalty: 2.0, ..none() }), 1, "the prompt does not count");
        assert_eq!(choose_with(SamplingParams { repetition_penalty: 4.0, ..none() }), 0, "prompt and completion count");
        let mut logits = [0.0, 1.0, 5.0, -1.0];
        let params = SamplingParams { frequency_penalty: 1.5, presence_penalty: 0.5, ..none() };
        apply_penalties(&mut logits, &params, &[1, 2, 2], 1);
        assert_eq!(logits, [0.0, 1.0, 1.5, -1.0]);
        let params = SamplingParams { repetition_penalty: 2.0, ..none() };
        apply_penalties(&mut logits, &params, &[1, 3], 2);
        assert_eq!(logits, [0.0, 0.5, 1.5, -2.0]);
    }
}
