//! The load of `mix_N`: N requests a second at random moments, whether or not earlier ones have ended, as people send them. Nine of
//! ten have short prompts; the tenth has a long one, which is what makes streams stall. And that of `beside_N`: chats, in the middle of
//! which one prompt of N tokens comes. What is told are moments as a client sees them. Opens no engine.

use std::time::Duration;

use stoker_workload::{Lengths, Rng};

use crate::reading::Reading;

/// Seconds in which requests come.
const SECONDS: f64 = 40.0;
/// Prompts of nine of ten requests, and the longest of them.
const SHORT: Lengths = Lengths::LogNormal { median: 400.0, sigma: 0.6 };
const SHORT_MAX: u32 = 4000;
/// Prompts of the tenth.
const LONG: Lengths = Lengths::Uniform { low: 8_000, high: 14_000 };
const LONG_SHARE: f64 = 0.1;
/// Tokens of answers, 155 in the mean, and at most.
const ANSWER: Lengths = Lengths::LogNormal { median: 135.0, sigma: 0.5 };
const ANSWER_MAX: u32 = 1_000;
/// Prompt and answer of the longest request.
pub const CONTEXT_TOKENS: u32 = 14_000 + ANSWER_MAX;

/// Chats beside the prompt of `beside_N`, and when that comes: all of them stream by then, and go on until it is computed.
const CHATS: u32 = 64;
const CHAT_TOKENS: (u32, u32) = (400, 1_200);
const BESIDE_AT: f64 = 1.0;
/// Tokens that are answered to it.
pub const BESIDE_ANSWER: u32 = 2;

/// One request to come.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Arrival {
    /// Seconds since the load began.
    pub at: f64,
    /// Tokens of its prompt.
    pub prompt_tokens: u32,
    /// Tokens of its answer.
    pub completion_tokens: u32,
}

/// The requests of `mix_RATE`: the same for every system and every time.
pub fn arrivals(rate: u32) -> Vec<Arrival> {
    let mut rng = Rng::seeded(u64::from(rate));
    let mut at = 0.0;
    std::iter::from_fn(|| {
        at += rng.exponential() / f64::from(rate);
        let is_long = rng.uniform() < LONG_SHARE;
        let prompt_tokens = if is_long { LONG.draw(&mut rng) } else { SHORT.draw(&mut rng).min(SHORT_MAX) };
        let completion_tokens = ANSWER.draw(&mut rng).clamp(2, ANSWER_MAX);
        (at < SECONDS).then_some(Arrival { at, prompt_tokens, completion_tokens })
    })
    .collect()
}

/// The requests of `beside_N`, that prompt last.
pub fn beside(prompt_tokens: u32) -> Vec<Arrival> {
    let chat = Arrival { at: 0.0, prompt_tokens: CHAT_TOKENS.0, completion_tokens: CHAT_TOKENS.1 };
    let long = Arrival { at: BESIDE_AT, prompt_tokens, completion_tokens: BESIDE_ANSWER };
    std::iter::repeat_n(chat, CHATS as usize).chain([long]).collect()
}

/// The requests of `beside_N`, and the tokens of a prompt and of an answer in the mean.
pub fn beside_size(prompt_tokens: u32) -> (u32, u32, u32) {
    let requests = CHATS + 1;
    (requests, CHAT_TOKENS.0 + prompt_tokens.div_ceil(requests), CHAT_TOKENS.1)
}

/// The moments of an answer's tokens, since its request was due.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// When each token was there, in order.
    pub tokens: Vec<Duration>,
}

/// What users of all requests saw: how long the first token of a short prompt took, how long every further one, the longest time
/// that a stream stood still, and how long a whole answer took.
pub fn readings(answers: &[Answer]) -> Vec<Reading> {
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    let gaps = |answer: &Answer| answer.tokens.windows(2).map(|pair| ms(pair[1] - pair[0])).collect::<Vec<_>>();
    let is_short = |answer: &&Answer| answer.prompt_tokens <= SHORT_MAX;
    let first = sorted(answers.iter().filter(is_short).filter_map(|answer| answer.tokens.first().copied().map(ms)));
    let every = sorted(answers.iter().flat_map(gaps));
    let worst = sorted(answers.iter().filter_map(|answer| gaps(answer).into_iter().reduce(f64::max)));
    let whole = sorted(answers.iter().filter_map(|answer| answer.tokens.last().copied().map(ms)));
    [
        ("short_ttft_p50_ms", &first, 0.5),
        ("short_ttft_p95_ms", &first, 0.95),
        ("itl_p50_ms", &every, 0.5),
        ("itl_p90_ms", &every, 0.9),
        ("itl_p99_ms", &every, 0.99),
        ("itl_p999_ms", &every, 0.999),
        ("worst_gap_p50_ms", &worst, 0.5),
        ("worst_gap_p95_ms", &worst, 0.95),
        ("e2e_p50_ms", &whole, 0.5),
        ("e2e_p95_ms", &whole, 0.95),
    ]
    .into_iter()
    .filter_map(|(metric, values, share)| Some(Reading::new(metric, percentile(values, share)?)))
    .collect()
}

/// How the chats of `beside_N` streamed while the prompt was computed that came between them, which has the last answer, and how long
/// its first token took.
pub fn beside_readings(answers: &[Answer]) -> Vec<Reading> {
    let Some((long, chats)) = answers.split_last() else { return vec![] };
    let Some(first) = long.tokens.first() else { return vec![] };
    let came = Duration::from_secs_f64(BESIDE_AT);
    let meanwhile = came..=came + *first;
    let streamed = |chat: &Answer| Answer {
        tokens: chat.tokens.iter().copied().filter(|at| meanwhile.contains(at)).collect(),
        ..chat.clone()
    };
    let mut seen = readings(&chats.iter().map(streamed).collect::<Vec<_>>());
    seen.retain(|reading| reading.metric.starts_with("itl_") || reading.metric.starts_with("worst_gap_"));
    seen.push(Reading::new("long_ttft_ms", first.as_secs_f64() * 1e3));
    seen
}

fn sorted(values: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values
}

/// The smallest value that so large a share is not above.
fn percentile(sorted: &[f64], share: f64) -> Option<f64> {
    let rank = (share * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.max(1) - 1).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(prompt_tokens: u32, ms: &[u64]) -> Answer {
        Answer { prompt_tokens, tokens: ms.iter().copied().map(Duration::from_millis).collect() }
    }

    #[test]
    fn a_rate_has_its_requests_and_a_tenth_of_them_is_long() {
        let load = arrivals(16);
        assert_eq!(load, arrivals(16));
        assert!((560..720).contains(&load.len()), "{}", load.len());
        let n_long = load.iter().filter(|arrival| arrival.prompt_tokens > SHORT_MAX).count();
        assert!((40..90).contains(&n_long), "{n_long}");
        assert!(load.iter().all(|arrival| arrival.prompt_tokens + arrival.completion_tokens <= CONTEXT_TOKENS));
        assert!(load.is_sorted_by(|a, b| a.at <= b.at) && load.iter().all(|arrival| arrival.at < SECONDS));
    }

    #[test]
    fn a_long_prompt_comes_while_chats_stream_and_is_told_apart() {
        let load = beside(128_000);
        let (requests, prompt_tokens, completion_tokens) = beside_size(128_000);
        assert_eq!((load.len(), load.last().unwrap().prompt_tokens), (65, 128_000));
        let tokens: u32 = load.iter().map(|arrival| arrival.prompt_tokens + arrival.completion_tokens).sum();
        assert!(requests * (prompt_tokens + completion_tokens) >= tokens, "there is room for all");
        // What chats do before it comes and behind its first token does not count.
        let chat = answer(400, &[10, 900, 1005, 1045, 1085, 9990, 20_000]);
        let found = beside_readings(&[chat, answer(128_000, &[9000, 9900])]);
        let of = |metric: &str| found.iter().find(|reading| reading.metric == metric).map(|found| found.value.round());
        assert_eq!(
            ["itl_p50_ms", "worst_gap_p95_ms", "long_ttft_ms", "short_ttft_p50_ms", "e2e_p50_ms"].map(of),
            [Some(40.0), Some(8905.0), Some(9000.0), None, None]
        );
    }

    #[test]
    fn moments_become_what_users_saw() {
        let found = readings(&[answer(100, &[10, 15, 45]), answer(100, &[30, 34, 38]), answer(9000, &[400, 410])]);
        let of = |metric: &str| found.iter().find(|reading| reading.metric == metric).unwrap().value.round();
        assert_eq!((of("short_ttft_p50_ms"), of("short_ttft_p95_ms")), (10.0, 30.0));
        assert_eq!((of("itl_p50_ms"), of("itl_p999_ms")), (5.0, 30.0));
        assert_eq!((of("worst_gap_p50_ms"), of("worst_gap_p95_ms")), (10.0, 30.0));
        assert_eq!((of("e2e_p50_ms"), of("e2e_p95_ms")), (45.0, 410.0));
        assert_eq!(readings(&[]), []);
    }
}
