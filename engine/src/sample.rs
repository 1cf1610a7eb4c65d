//! Choosing the next token from logits. Pure: all randomness is a function of (seed, position, token), so a sequence
//! goes on the same after preemption or on another replica (D9).
//!
//! ```text
//! logits ── penalties, bias, bans, mask ──► changed ── / temperature ──► tempered ── >= floor(top-k, top-p, min-p) ──► kept
//! greedy: argmax(changed)             drawn: argmax over kept of tempered + gumbel(seed, position, token)
//! ```
//! The same definition as the GPU's (`kernels/csrc/sample.cu`, `sample_options.cu`): no sum over the vocabulary decides
//! a draw, so it does not depend on the order of additions. A row with a NaN has no next token.

use std::{borrow::Cow, cmp::Ordering, collections::BTreeMap};

use stoker_kernels::draw::{Draw, GUMBEL_MAX};

use crate::{
    request::{SamplingParams, TokenId},
    sched::{RawLogprobs, SampleSpec, Sampled},
};

/// Logits that are looked through without a branch, in vectors.
const RUN: usize = 256;

/// A candidate token and its logit.
type Candidate = (TokenId, f32);

/// Chooses the token that follows, of those that `mask` allows if there is one (its layout: [`Matcher::allow`]).
/// Log-probabilities are those of the model's own distribution, before any change.
///
/// [`Matcher::allow`]: crate::constraint::Matcher::allow
pub fn choose(logits: &[f32], spec: &SampleSpec<'_>, mask: Option<&[u32]>) -> Sampled {
    let params = &spec.request.sampling;
    if logits.chunks(RUN).any(|run| run.iter().fold(false, |found, logit| found | logit.is_nan())) {
        return Sampled::NotANumber;
    }
    let changed = changed(logits, spec, mask);
    let token = if params.temperature == 0.0 { greedy(&changed) } else { draw(&changed, params, spec.position) };
    let named = &spec.request.logprob_tokens;
    let logprobs = spec.request.logprobs.map(|k| raw_logprobs(logits, token, k as usize, named));
    Sampled::Token { token, logprobs }
}

/// The logits after everything that changes single ones.
fn changed<'a>(logits: &'a [f32], spec: &SampleSpec<'_>, mask: Option<&[u32]>) -> Cow<'a, [f32]> {
    let params = &spec.request.sampling;
    let mut changed = Cow::Borrowed(logits);
    if params.has_penalties() {
        apply_penalties(changed.to_mut(), params, spec.history, spec.request.prompt.len());
    }
    if !params.logit_bias.is_empty() {
        apply_bias(changed.to_mut(), &params.logit_bias);
    }
    if !spec.banned.is_empty() {
        ban(changed.to_mut(), spec.banned);
    }
    if let Some(mask) = mask {
        keep_allowed(changed.to_mut(), mask);
    }
    changed
}

fn keep_allowed(logits: &mut [f32], mask: &[u32]) {
    for (run, word) in logits.chunks_mut(32).zip(mask) {
        for (bit, logit) in run.iter_mut().enumerate() {
            *logit = if word >> bit & 1 == 1 { *logit } else { f32::NEG_INFINITY };
        }
    }
}

fn apply_bias(logits: &mut [f32], bias: &BTreeMap<TokenId, f32>) {
    for (token, bias) in bias {
        if let Some(logit) = logits.get_mut(*token as usize) {
            *logit += bias;
        }
    }
}

/// Repetition reads prompt and completion, presence and frequency the completion only.
fn apply_penalties(logits: &mut [f32], params: &SamplingParams, history: &[TokenId], prompt_len: usize) {
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
    let mut best = (0, f32::NEG_INFINITY);
    for (idx, run) in logits.chunks(RUN).enumerate() {
        let max = largest(run);
        if max > best.1 {
            best = (idx * RUN, max);
        }
    }
    let (start, max) = best;
    let within = logits[start..].iter().position(|logit| *logit == max).expect("the largest is one of them");
    (start + within) as TokenId
}

/// The largest of numbers, in 16 lanes, which the compiler makes vectors of.
fn largest(run: &[f32]) -> f32 {
    let (chunks, rest) = run.as_chunks::<16>();
    let mut lanes = [f32::NEG_INFINITY; 16];
    for chunk in chunks {
        for (lane, logit) in lanes.iter_mut().zip(chunk) {
            *lane = if *logit > *lane { *logit } else { *lane };
        }
    }
    lanes.iter().chain(rest).copied().fold(f32::NEG_INFINITY, f32::max)
}

/// The first of the largest sums of tempered logit and noise.
fn draw(logits: &[f32], params: &SamplingParams, position: usize) -> TokenId {
    // Divided, not multiplied by an inverse: the GPU divides too, and a floor must meet the very same values.
    let tempered: Vec<f32> = logits.iter().map(|logit| logit / params.temperature).collect();
    let (floor, noise) = (floor(&tempered, params), Draw::new(params.seed, position as u64));
    let mut best = (0, f32::NEG_INFINITY);
    for (token, tempered) in (0..).zip(tempered) {
        // Most tokens cannot win whatever their noise: a comparison instead of a hash and two logarithms.
        if tempered < floor || tempered + GUMBEL_MAX < best.1 {
            continue;
        }
        let score = tempered + noise.gumbel(token);
        if score > best.1 {
            best = (token, score);
        }
    }
    best.0
}

/// The smallest tempered logit that all filters keep. Equal logits are kept or dropped together.
fn floor(tempered: &[f32], params: &SamplingParams) -> f32 {
    let max = tempered.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    // min_p is a bound on the ratio to the likeliest; on logits that is a difference.
    let by_ratio = if params.min_p > 0.0 { max + params.min_p.ln() } else { f32::NEG_INFINITY };
    let ranks = params.top_k > 0 || params.top_p < 1.0;
    if ranks && max.is_finite() { by_ratio.max(floor_by_rank(tempered, max, params)) } else { by_ratio }
}

/// The k-th largest; of the k largest, the last of the fewest whose probabilities reach `top_p` of theirs.
fn floor_by_rank(tempered: &[f32], max: f32, params: &SamplingParams) -> f32 {
    let mut top = tempered.to_vec();
    if params.top_k > 0 && (params.top_k as usize) < top.len() {
        let k = params.top_k as usize;
        top.select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a));
        top.truncate(k);
    }
    if params.top_p < 1.0 {
        return floor_by_mass(&mut top, max, params.top_p);
    }
    top.into_iter().fold(max, f32::min)
}

/// The last of the fewest largest whose mass reaches `top_p` of the whole. Ranks only as many as needed: the nucleus is
/// usually a few tokens of a large vocabulary.
fn floor_by_mass(tempered: &mut [f32], max: f32, top_p: f32) -> f32 {
    let total: u64 = tempered.iter().map(|logit| mass(*logit, max)).sum();
    let needed = ((f64::from(top_p) * total as f64).ceil() as u64).clamp(1, total);
    let mut n_ranked = 0;
    loop {
        n_ranked = (n_ranked * 8).max(64).min(tempered.len());
        rank(tempered, n_ranked, |a, b| b.total_cmp(a));
        let mut reached = 0;
        let is_last = |logit: &&f32| {
            reached += mass(**logit, max);
            reached >= needed
        };
        if let Some(last) = tempered[..n_ranked].iter().find(is_last) {
            return *last;
        }
        assert!(n_ranked < tempered.len(), "all together are the total");
    }
}

/// Probability relative to the likeliest in units of 2^-40: integers, so that any order of adding gives the same sum.
fn mass(logit: f32, max: f32) -> u64 {
    const UNIT: f32 = (1u64 << 40) as f32;
    ((logit - max).exp() * UNIT).round_ties_even() as u64
}

/// Brings the first `n` of an order to the front, in order.
fn rank<T>(values: &mut [T], n: usize, order: impl Fn(&T, &T) -> Ordering) {
    if n < values.len() {
        values.select_nth_unstable_by(n, &order);
    }
    values[..n].sort_unstable_by(order);
}

/// Log-probabilities of the model's own distribution: of the tokens that are named and the chosen one, or else of the `k` likeliest.
pub(crate) fn raw_logprobs(logits: &[f32], chosen: TokenId, k: usize, named: &[TokenId]) -> RawLogprobs {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let total: f64 = logits.iter().map(|logit| f64::from(logit - max).exp()).sum();
    let logprob = |logit: f32| (f64::from(logit - max) - total.ln()) as f32;
    let wanted = match named {
        [] => likeliest(logits, k),
        named => at(logits, named.iter().copied().chain((!named.contains(&chosen)).then_some(chosen))),
    };
    let top = wanted.into_iter().map(|(token, logit)| (token, logprob(logit))).collect();
    RawLogprobs { chosen: logprob(logits[chosen as usize]), top }
}

/// Tokens that are likelier, and one.
pub(crate) fn rank_of(logits: &[f32], token: TokenId) -> u32 {
    let own = logits[token as usize];
    1 + logits.iter().filter(|logit| **logit > own).count() as u32
}

fn at(logits: &[f32], tokens: impl Iterator<Item = TokenId>) -> Vec<Candidate> {
    tokens.map(|token| (token, logits[token as usize])).collect()
}

/// The `k` likeliest, of equals the lowest id first. Holds no more than these: results are kept for a whole prompt.
fn likeliest(logits: &[f32], k: usize) -> Vec<Candidate> {
    let mut best: Vec<Candidate> = Vec::with_capacity(k + 1);
    for (token, logit) in logits.iter().enumerate() {
        let is_in_front = |(_, other): &Candidate| other.total_cmp(logit).is_ge();
        if best.len() < k || best.last().is_some_and(|least| !is_in_front(least)) {
            best.insert(best.partition_point(is_in_front), (token as TokenId, *logit));
            best.truncate(k);
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::request::{Request, StopParams};

    const LOGITS: [f32; 4] = [1.0, 3.0, 2.0, 0.0];

    fn request(sampling: SamplingParams) -> Arc<Request> {
        Arc::new(Request {
            prompt: vec![0],
            sampling,
            stop: StopParams::default(),
            logprobs: None,
            ..Request::default()
        })
    }

    fn spec(request: &Arc<Request>) -> SampleSpec<'_> {
        SampleSpec { request, position: 1, banned: &[], history: &[], slot: 0, enters_slot: false }
    }

    fn token(logits: &[f32], spec: &SampleSpec<'_>) -> TokenId {
        choose(logits, spec, None).token().expect("the logits are numbers")
    }

    /// Shares of the tokens over many positions.
    fn shares(sampling: SamplingParams) -> Vec<f64> {
        const N: usize = 20_000;
        let mut counts = vec![0.0; LOGITS.len()];
        let request = request(sampling);
        for position in 0..N {
            let spec = SampleSpec { position, ..spec(&request) };
            counts[token(&LOGITS, &spec) as usize] += 1.0 / N as f64;
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
    fn the_likeliest_are_those_of_a_sort_and_nothing_else_is_held() {
        // Many equals, and what masks and overflows give.
        let logits: Vec<f32> = (0..5000_u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 22) as f32 / 8.0).collect();
        let logits = [&logits[..], &[f32::NEG_INFINITY, f32::INFINITY, -0.0, 0.0]].concat();
        let mut sorted: Vec<Candidate> = (0..).zip(logits.iter().copied()).collect();
        sorted.sort_by(|(a, x), (b, y)| y.total_cmp(x).then(a.cmp(b)));
        for k in [0, 1, 20, logits.len(), logits.len() + 1] {
            assert_eq!(likeliest(&logits, k), sorted[..k.min(logits.len())], "{k}");
        }
        let RawLogprobs { top, .. } = raw_logprobs(&logits, 0, 20, &[]);
        assert!(top.capacity() < 2 * 20 + 2, "{} are held", top.capacity());
    }

    #[test]
    fn temperature_zero_takes_the_likeliest_and_the_lowest_id_of_equals() {
        let greedy = request(SamplingParams { temperature: 0.0, ..SamplingParams::default() });
        assert_eq!(token(&LOGITS, &spec(&greedy)), 1);
        assert_eq!(token(&[5.0, 7.0, 7.0], &spec(&greedy)), 1);
        let mut many = vec![-1.0; 3 * RUN + 5];
        (many[RUN + 9], many[RUN + 40], many[3 * RUN + 4]) = (2.0, 2.0, 2.0);
        assert_eq!(token(&many, &spec(&greedy)) as usize, RUN + 9);
        many[3 * RUN + 4] = 2.5;
        assert_eq!(token(&many, &spec(&greedy)) as usize, 3 * RUN + 4);
        assert_eq!(token(&[f32::NEG_INFINITY; 2], &spec(&greedy)), 0);
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
    fn every_kind_of_draw_is_the_reference_of_the_gpu_kernels() {
        let off = SamplingParams::default();
        let kinds = [
            SamplingParams { temperature: 0.0, ..off.clone() },
            off.clone(),
            SamplingParams { temperature: 0.3, ..off.clone() },
            SamplingParams { top_k: 1, ..off.clone() },
            SamplingParams { top_k: 50, ..off.clone() },
            SamplingParams { top_p: 0.9, ..off.clone() },
            SamplingParams { top_p: 0.01, ..off.clone() },
            SamplingParams { min_p: 0.05, ..off.clone() },
            SamplingParams { temperature: 0.7, top_k: 40, top_p: 0.8, min_p: 0.02, ..off.clone() },
            SamplingParams { temperature: 1.5, top_k: 1 << 30, top_p: 0.999, ..off },
        ];
        for vocab in [1, 33, 4096, 32_001] {
            for (n, params) in (0..).zip(kinds.iter().cycle().take(30)) {
                // Spread like real logits, with ties.
                let noise = Draw::new(99, n);
                let logits: Vec<f32> = (0..vocab).map(|i| (noise.gumbel(i) * 30.0).round() / 10.0).collect();
                let request = request(SamplingParams { seed: n * 7, ..params.clone() });
                let spec = SampleSpec { position: 5 + n as usize, ..spec(&request) };
                let row = stoker_kernels::sampling::SampleRow {
                    seed: n * 7,
                    position: 5 + n,
                    temperature: params.temperature,
                    top_p: params.top_p,
                    ln_min_p: if params.min_p > 0.0 { params.min_p.ln() } else { f32::NEG_INFINITY },
                    top_k: params.top_k,
                    ..stoker_kernels::sampling::SampleRow::GREEDY
                };
                let expected = stoker_kernels::reference::sample(&logits, row);
                assert_eq!(token(&logits, &spec), expected, "{params:?} over {vocab}");
            }
        }
    }

    /// Penalties, bias, bans and masks too: with the test above, what `kernel-check` holds the GPU's draws to is this sampler.
    #[test]
    fn everything_that_changes_single_logits_is_the_reference_of_the_gpu_kernels() {
        use stoker_kernels::{
            reference::{self, RowHistory},
            sampling::{SampleRow, TokenEdit},
        };
        let vocab = 5_001;
        for n in 0..40u64 {
            let noise = Draw::new(7, n);
            let token_at = |i: u32| (noise.uniform(i) * vocab as f32) as TokenId;
            let logits: Vec<f32> = (0..vocab).map(|i| (noise.gumbel(i) * 30.0).round() / 10.0).collect();
            let history: Vec<TokenId> = (0..400).map(token_at).collect();
            let (prompt, completion) = history.split_at(300);
            let banned: Vec<TokenId> = (400..403).map(token_at).collect();
            let biases = (500..800).map(|i| (token_at(i), (i % 9) as f32 - 4.0)).collect();
            let mask: Vec<u32> = (0..vocab.div_ceil(32)).map(|i| (noise.uniform(900 + i) * 4e9) as u32 | 1).collect();
            let params = SamplingParams {
                temperature: (n % 3) as f32 * 0.5,
                top_k: if n % 4 == 0 { 20 } else { 0 },
                top_p: if n % 5 == 0 { 0.8 } else { 1.0 },
                presence_penalty: 0.5,
                frequency_penalty: 0.25,
                repetition_penalty: 1.3,
                logit_bias: biases,
                seed: n,
                ..SamplingParams::default()
            };
            let position = history.len();
            let edit = |(token, bias): (&TokenId, &f32)| TokenEdit { token: *token, bias: *bias, banned_until: 0 };
            let mut edits: Vec<TokenEdit> = params.logit_bias.iter().map(edit).collect();
            edits.retain(|edit| !banned.contains(&edit.token));
            edits.extend(banned.iter().map(|token| TokenEdit { token: *token, bias: 0.0, banned_until: 401 }));
            let row = SampleRow {
                seed: n,
                position: position as u64,
                temperature: params.temperature,
                top_p: params.top_p,
                top_k: params.top_k,
                presence: 0.5,
                frequency: 0.25,
                repetition: 1.3,
                ..SampleRow::GREEDY
            };
            let request = Arc::new(Request { prompt: prompt.to_vec(), ..Request::clone(&request(params)) });
            let spec = SampleSpec {
                request: &request,
                position,
                banned: &banned,
                history: &history,
                slot: 0,
                enters_slot: false,
            };
            let mask = (n % 2 == 0).then_some(&mask[..]);
            let seen = RowHistory { prompt, completion, edits: &edits, mask };
            let expected = reference::sample(&reference::edited(&logits, row, seen), row);
            assert_eq!(choose(&logits, &spec, mask).token(), Some(expected), "{n}");
        }
    }

    #[test]
    fn a_nucleus_wider_than_the_first_ranks_is_found_too() {
        let logits: Vec<f32> = (0..1000).map(|token| ((token * 37) % 1000) as f32 * 1e-3).collect();
        let max = 0.999;
        let mut ranked = logits.clone();
        ranked.sort_by(|a, b| b.total_cmp(a));
        for top_p in [0.01, 0.1, 0.5, 0.99] {
            let last = floor_by_mass(&mut logits.clone(), max, top_p);
            let n_kept = ranked.iter().filter(|logit| **logit >= last).count();
            let needed = f64::from(top_p) * logits.iter().map(|logit| mass(*logit, max)).sum::<u64>() as f64;
            let mass_of = |n: usize| ranked[..n].iter().map(|logit| mass(*logit, max)).sum::<u64>() as f64;
            assert!(mass_of(n_kept) >= needed && mass_of(n_kept - 1) < needed, "{top_p}");
        }
    }

    #[test]
    fn a_row_with_a_nan_has_no_next_token() {
        for temperature in [0.0, 1.0] {
            let request = request(SamplingParams { temperature, top_k: 2, ..SamplingParams::default() });
            assert_eq!(choose(&[1.0, f32::NAN, 3.0], &spec(&request), None), Sampled::NotANumber);
            assert_eq!(token(&[1.0, f32::NEG_INFINITY, 9e9], &spec(&request)), 2);
        }
    }

    #[test]
    fn the_same_seed_and_position_give_the_same_token() {
        let tokens = |seed| -> Vec<TokenId> {
            let request = request(SamplingParams { seed, ..SamplingParams::default() });
            let at = |position| token(&LOGITS, &SampleSpec { position, ..spec(&request) });
            (0..50).map(at).collect()
        };
        assert_eq!(tokens(7), tokens(7));
        assert_ne!(tokens(7), tokens(8));
    }

    #[test]
    fn bias_and_bans_change_the_choice_but_not_the_logprobs() {
        let params = SamplingParams { temperature: 0.0, logit_bias: [(3, 100.0)].into(), ..SamplingParams::default() };
        let request = Arc::new(Request { logprobs: Some(2), ..Request::clone(&request(params)) });
        let spec = spec(&request);
        let Sampled::Token { token: chosen, logprobs: Some(logprobs) } = choose(&LOGITS, &spec, None) else {
            panic!("a token with its log-probabilities")
        };
        let expected = softmax(1.0);
        assert_eq!(chosen, 3);
        assert!((f64::from(logprobs.chosen) - expected[3].ln()).abs() < 1e-6);
        assert_eq!(logprobs.top.iter().map(|(token, _)| *token).collect::<Vec<_>>(), [1, 2]);
        assert_eq!(token(&LOGITS, &SampleSpec { banned: &[3, 1, 99], ..spec }), 2);
    }

    #[test]
    fn a_mask_leaves_the_likeliest_of_what_it_allows() {
        for temperature in [0.0, 1.0] {
            let params = SamplingParams { temperature, logit_bias: [(3, 100.0)].into(), ..SamplingParams::default() };
            let request = request(SamplingParams { top_k: 1, ..params });
            let token = |mask: &[u32]| choose(&LOGITS, &spec(&request), Some(mask)).token().unwrap();
            assert_eq!([0b1111, 0b0111, 0b0101, 0b0001].map(|mask| token(&[mask])), [3, 1, 2, 0]);
        }
        let greedy = request(SamplingParams { temperature: 0.0, ..SamplingParams::default() });
        let mut logits = vec![0.0; 70];
        (logits[40], logits[69]) = (2.0, 1.0);
        let token = |mask: &[u32]| choose(&logits, &spec(&greedy), Some(mask)).token().unwrap();
        assert_eq!(token(&[u32::MAX; 3]), 40);
        assert_eq!(token(&[u32::MAX, !(1 << 8), u32::MAX]), 69);
        logits[5] = f32::NAN;
        assert_eq!(choose(&logits, &spec(&greedy), Some(&[1, 0, 0])), Sampled::NotANumber, "damage is never hidden");
    }

    #[test]
    fn penalties_count_what_their_definition_says() {
        let choose_with = |sampling: SamplingParams| {
            let greedy = request(SamplingParams { temperature: 0.0, ..sampling });
            let request = Arc::new(Request { prompt: vec![1], ..Request::clone(&greedy) });
            token(&LOGITS, &SampleSpec { history: &[1, 2, 2], ..spec(&request) })
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
