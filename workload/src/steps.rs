//! When which request leaves: Poisson arrivals whose rate changes in steps.
//!
//! Pure: the same steps, lengths and seed give the same requests.

use std::{fmt, str::FromStr};

use thiserror::Error;

use crate::{HashIds, Lengths, Request, Rng};

/// A stretch of time with one rate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Step {
    /// How long it lasts.
    pub seconds: f64,
    /// Requests per second, on average.
    pub rate: f64,
}

/// One stretch after another.
#[derive(Clone, Debug, PartialEq)]
pub struct Steps(pub Vec<Step>);

/// What requests ask for.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Tokens of the prompt.
    pub prompt: Lengths,
    /// Completion tokens at most.
    pub completion: Lengths,
}

/// Not a list of steps.
#[derive(Debug, Error, PartialEq)]
#[error(
    "{part:?} is no step: write DURATION:RATE, several with commas, such as 30s:1,2m:8 (ms, s, m, h; requests per second)"
)]
pub struct StepsError {
    part: String,
}

impl Steps {
    /// How long they last together.
    pub fn seconds(&self) -> f64 {
        self.0.iter().map(|step| step.seconds).sum()
    }

    /// Draws the requests.
    pub fn requests(&self, sizes: Sizes, seed: u64) -> Vec<Request> {
        let mut rng = Rng::seeded(seed);
        let mut requests = Vec::new();
        let mut begin = 0.0;
        for step in &self.0 {
            let end = begin + step.seconds;
            // Nothing is remembered between exponential gaps, so each step may begin with a new one.
            let mut at = begin + rng.exponential() / step.rate;
            while at < end {
                requests.push(request(at, sizes, &mut rng));
                at += rng.exponential() / step.rate;
            }
            begin = end;
        }
        requests
    }
}

fn request(arrived: f64, sizes: Sizes, rng: &mut Rng) -> Request {
    let prompt_tokens = sizes.prompt.draw(rng);
    let completion_tokens = sizes.completion.draw(rng);
    Request { arrived, prompt_tokens, cached_tokens: 0, completion_tokens, hash_ids: HashIds::default() }
}

impl FromStr for Steps {
    type Err = StepsError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let step = |part: &str| step(part).ok_or_else(|| StepsError { part: part.to_owned() });
        text.split(',').map(step).collect::<Result<_, _>>().map(Self)
    }
}

fn step(part: &str) -> Option<Step> {
    let (duration, rate) = part.split_once(':')?;
    let (seconds, rate) = (seconds(duration)?, rate.parse().ok()?);
    (seconds > 0.0 && (0.0..=1e6).contains(&rate)).then_some(Step { seconds, rate })
}

/// Reads a duration such as `500ms`, `30s`, `2m`, `1h` as seconds.
pub fn seconds(text: &str) -> Option<f64> {
    let unit_at = text.find(|sign: char| sign.is_ascii_alphabetic())?;
    let (number, unit) = text.split_at(unit_at);
    let factor = match unit {
        "ms" => 0.001,
        "s" => 1.0,
        "m" => 60.0,
        "h" => 3600.0,
        _ => return None,
    };
    number.parse::<f64>().ok().map(|number| number * factor).filter(|seconds| (0.0..=1e6).contains(seconds))
}

impl fmt::Display for Steps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words: Vec<String> = self.0.iter().map(|step| format!("{}s:{}", step.seconds, step.rate)).collect();
        f.write_str(&words.join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZES: Sizes = Sizes { prompt: Lengths::Fixed(10), completion: Lengths::Fixed(5) };

    #[test]
    fn steps_are_read_with_their_units_and_nonsense_names_the_part() {
        let steps: Steps = "30s:1,1.5m:8,500ms:0".parse().unwrap();
        let pairs: Vec<_> = steps.0.iter().map(|step| (step.seconds, step.rate)).collect();
        assert_eq!(pairs, [(30.0, 1.0), (90.0, 8.0), (0.5, 0.0)]);
        assert_eq!(steps.seconds(), 120.5);
        for bad in ["", "30:1", "30s", "30s:-1", "30s:x", "0s:1", "30d:1", "30s:nan", "-3s:1"] {
            let error = format!("10s:1,{bad}").parse::<Steps>().unwrap_err();
            assert_eq!(error.part, bad);
        }
    }

    #[test]
    fn arrivals_follow_the_rate_of_their_step() {
        let requests = "1000s:2,1000s:0,1000s:8".parse::<Steps>().unwrap().requests(SIZES, 1);
        assert!(requests.is_sorted_by_key(|request| request.arrived));
        let count = |from: f64, to: f64| requests.iter().filter(|r| (from..to).contains(&r.arrived)).count() as f64;
        // Four standard deviations of a Poisson count.
        assert!((count(0.0, 1000.0) - 2000.0).abs() < 4.0 * 2000_f64.sqrt());
        assert_eq!(count(1000.0, 2000.0), 0.0);
        assert!((count(2000.0, 3000.0) - 8000.0).abs() < 4.0 * 8000_f64.sqrt());
    }

    #[test]
    fn gaps_vary_as_those_of_a_poisson_process_do() {
        let requests = "5000s:4".parse::<Steps>().unwrap().requests(SIZES, 2);
        let gaps: Vec<f64> = requests.windows(2).map(|pair| pair[1].arrived - pair[0].arrived).collect();
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        let variance = gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / gaps.len() as f64;
        // Exponential gaps: standard deviation equals mean.
        assert!((variance.sqrt() / mean - 1.0).abs() < 0.03, "{}", variance.sqrt() / mean);
    }
}
