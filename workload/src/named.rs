//! The named traces: seeded arrivals of a rate that changes with time, and the sizes of their requests.
//!
//! Owns the shapes. At the KV target one replica carries about seven chat requests per second (see [`chat`]).

use crate::{HashIds, Request, Rng, Trace};

/// Every named trace.
pub const TRACE_NAMES: [&str; 8] =
    ["step", "ramp", "diurnal", "burst", "long_context", "flapping", "slow_start", "azure"];

const MINUTE: f64 = 60.0;
const HOUR: f64 = 3600.0;

/// A trace of ours.
#[derive(Clone, Debug, PartialEq)]
pub struct Named {
    /// The requests.
    pub trace: Trace,
    /// Median seconds that the replicas it was made for take to start, where that is what it is about.
    pub start_seconds: Option<f64>,
}

/// Makes a named trace; `None` for an unknown name.
pub fn named_trace(name: &str, seed: u64) -> Option<Named> {
    let name = TRACE_NAMES.into_iter().find(|known| *known == name)?;
    let mut rng = Rng::seeded(seed);
    let (seconds, requests) = match name {
        "step" => (75.0 * MINUTE, arrivals(&mut rng, 75.0 * MINUTE, 40.0, step, |rng, _| chat(rng))),
        "ramp" => (90.0 * MINUTE, arrivals(&mut rng, 90.0 * MINUTE, 55.0, ramp, |rng, _| chat(rng))),
        "diurnal" => (3.0 * HOUR, arrivals(&mut rng, 3.0 * HOUR, 55.0, diurnal, |rng, _| chat(rng))),
        "burst" => {
            let peaks = bursts(&mut rng, 2.0 * HOUR);
            let rate = |at: f64| if peaks.iter().any(|(from, to)| (*from..*to).contains(&at)) { 45.0 } else { 12.0 };
            (2.0 * HOUR, arrivals(&mut rng, 2.0 * HOUR, 45.0, rate, |rng, _| chat(rng)))
        }
        "long_context" => (90.0 * MINUTE, arrivals(&mut rng, 90.0 * MINUTE, 14.0, |_| 14.0, long_context)),
        "flapping" => (75.0 * MINUTE, arrivals(&mut rng, 75.0 * MINUTE, 36.0, flapping, |rng, _| chat(rng))),
        "slow_start" => (2.0 * HOUR, arrivals(&mut rng, 2.0 * HOUR, 50.0, slow_start, |rng, _| chat(rng))),
        _ => {
            let gusts = gusts(&mut rng, 2.0 * HOUR);
            let rate = |at: f64| azure_rate(at) * gusts[(at / GUST_SECONDS) as usize];
            (2.0 * HOUR, arrivals(&mut rng, 2.0 * HOUR, 130.0, rate, |rng, _| azure_request(rng)))
        }
    };
    let start_seconds = (name == "slow_start").then_some(300.0);
    Some(Named { trace: Trace { name: name.to_owned(), seconds, requests }, start_seconds })
}

/// Poisson arrivals of a changing rate, by thinning those of the largest one.
fn arrivals(
    rng: &mut Rng,
    seconds: f64,
    rate_max: f64,
    rate: impl Fn(f64) -> f64,
    sizes: impl Fn(&mut Rng, f64) -> Sizes,
) -> Vec<Request> {
    let mut requests = Vec::new();
    let mut at = rng.exponential() / rate_max;
    while at < seconds {
        if rng.uniform() * rate_max < rate(at) {
            requests.push(sizes(rng, at).arriving(at));
        }
        at += rng.exponential() / rate_max;
    }
    requests
}

struct Sizes {
    prompt: f64,
    cached_share: f64,
    completion: f64,
}

impl Sizes {
    fn arriving(self, arrived: f64) -> Request {
        let prompt = self.prompt.clamp(16.0, 120_000.0);
        Request {
            arrived,
            prompt_tokens: prompt as u32,
            cached_tokens: (prompt * self.cached_share) as u32,
            completion_tokens: self.completion.clamp(1.0, 4096.0) as u32,
            hash_ids: HashIds::default(),
        }
    }
}

/// A turn of a longer conversation or of an agent: about 5,000 tokens of history, most of them in the prefix cache,
/// and an answer of about 500.
fn chat(rng: &mut Rng) -> Sizes {
    let prompt = rng.log_normal(4000.0, 0.7);
    Sizes { prompt, cached_share: 0.88, completion: rng.log_normal(400.0, 0.65) }
}

/// The number of requests stays; after a quarter of an hour every tenth one brings a document of about 40,000 tokens,
/// and after an hour none does again.
fn long_context(rng: &mut Rng, at: f64) -> Sizes {
    let has_documents = (15.0 * MINUTE..60.0 * MINUTE).contains(&at);
    if has_documents && rng.uniform() < 0.10 {
        return Sizes {
            prompt: rng.log_normal(40_000.0, 0.35),
            cached_share: 0.75,
            completion: rng.log_normal(600.0, 0.5),
        };
    }
    chat(rng)
}

fn step(at: f64) -> f64 {
    if (15.0 * MINUTE..50.0 * MINUTE).contains(&at) { 40.0 } else { 10.0 }
}

/// Up within half an hour, there for a quarter, down within half an hour.
fn ramp(at: f64) -> f64 {
    let up = (at - 5.0 * MINUTE) / (30.0 * MINUTE);
    let down = (80.0 * MINUTE - at) / (30.0 * MINUTE);
    6.0 + 49.0 * up.min(down).clamp(0.0, 1.0)
}

/// A day in three hours, eight times as steep as a real one: one night, one peak, a lunch dip.
fn diurnal(at: f64) -> f64 {
    let phase = at / (3.0 * HOUR) * std::f64::consts::TAU;
    let day = 0.5 - 0.5 * phase.cos();
    let lunch = 0.25 * (-((at - 1.5 * HOUR) / (0.15 * HOUR)).powi(2)).exp();
    6.0 + 49.0 * (day - lunch * day).max(0.0)
}

/// Square wave with a period of five minutes.
fn flapping(at: f64) -> f64 {
    if (at / (2.5 * MINUTE)) as u64 % 2 == 1 { 36.0 } else { 10.0 }
}

/// A ramp and a step with replicas that take five minutes to start.
fn slow_start(at: f64) -> f64 {
    let ramp = ((at - 10.0 * MINUTE) / (40.0 * MINUTE)).clamp(0.0, 1.0);
    let evening = ((at - 95.0 * MINUTE) / (20.0 * MINUTE)).clamp(0.0, 1.0);
    8.0 + 42.0 * ramp * (1.0 - evening)
}

/// Bursts of one to three minutes, four to twelve minutes apart.
fn bursts(rng: &mut Rng, seconds: f64) -> Vec<(f64, f64)> {
    let mut bursts = Vec::new();
    let mut at = 10.0 * MINUTE;
    while at < seconds {
        let end = at + MINUTE * (1.0 + 2.0 * rng.uniform());
        bursts.push((at, end));
        at = end + MINUTE * (4.0 + 8.0 * rng.uniform());
    }
    bursts
}

/// Published shape of the Azure LLM inference traces. Sizes: Splitwise (ISCA 2024) gives medians of 1,020 prompt and
/// 129 completion tokens for conversation, 1,500 and 13 for code. Load: DynamoLLM (2024) gives a daily cycle whose
/// valley is about a third (conversation) and a thirtieth (code) of the peak. Only these figures are used, no data.
fn azure_rate(at: f64) -> f64 {
    let day = 0.5 - 0.5 * (at / (2.0 * HOUR) * std::f64::consts::TAU).cos();
    AZURE_PEAK * (0.7 * (1.0 / 3.3 + (1.0 - 1.0 / 3.3) * day) + 0.3 * (1.0 / 34.6 + (1.0 - 1.0 / 34.6) * day.powi(2)))
}

const AZURE_PEAK: f64 = 80.0;
const GUST_SECONDS: f64 = 30.0;

/// Load within a day is rougher than Poisson: a slowly wandering factor with a standard deviation of about a tenth.
fn gusts(rng: &mut Rng, seconds: f64) -> Vec<f64> {
    let mut level = 0.0;
    let mut gust = || {
        level = 0.9 * level + 0.05 * rng.normal();
        f64::exp(level).clamp(0.6, 1.6)
    };
    (0..=(seconds / GUST_SECONDS) as usize).map(|_| gust()).collect()
}

fn azure_request(rng: &mut Rng) -> Sizes {
    let is_code = rng.uniform() < 0.25;
    let (prompt, completion) = if is_code {
        (rng.log_normal(1500.0, 0.9), rng.log_normal(13.0, 0.9))
    } else {
        (rng.log_normal(1020.0, 1.0), rng.log_normal(129.0, 1.0))
    };
    Sizes { prompt: prompt.min(16_000.0), cached_share: 0.0, completion: completion.min(1500.0) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_named_trace_is_the_same_every_time_and_another_with_another_seed() {
        let requests = |seed| named_trace("long_context", seed).unwrap().trace.requests;
        assert_eq!(requests(1), requests(1));
        assert_ne!(requests(1), requests(2));
        assert!(named_trace("nothing", 1).is_none());
    }

    #[test]
    fn arrivals_are_in_order_and_follow_their_rate() {
        let requests = named_trace("step", 1).unwrap().trace.requests;
        assert!(requests.is_sorted_by_key(|request| request.arrived));
        let between = |from: f64, to: f64| {
            requests.iter().filter(|request| (from..to).contains(&request.arrived)).count() as f64 / (to - from)
        };
        assert!((between(0.0, 900.0) - 10.0).abs() < 0.5);
        assert!((between(900.0, 3000.0) - 40.0).abs() < 1.0);
    }
}
