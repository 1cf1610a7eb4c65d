//! What makes an answer good: bounds of its latencies, and their spelling on a command line.

use std::{fmt, str::FromStr, time::Duration};

use thiserror::Error;

use crate::run::AnswerTiming;

/// An answer meets it if it keeps every bound that is there.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Slo {
    /// As it was written.
    text: String,
    ttft: Option<Duration>,
    itl: Option<Duration>,
    e2e: Option<Duration>,
}

/// Not a target.
#[derive(Debug, Error, PartialEq)]
#[error(
    "{0:?} is no target: write ttft, itl or e2e with a duration, several with commas, such as ttft=500ms,itl=40ms (ms, \
     s, m, h)"
)]
pub struct SloError(String);

impl Slo {
    /// Whether an answer is good. `itl` is held against the mean time per token after the first.
    pub fn is_met(&self, timing: &AnswerTiming) -> bool {
        let within =
            |time: Option<Duration>, bound: Option<Duration>| bound.zip(time).is_none_or(|(bound, time)| time <= bound);
        within(Some(timing.ttft), self.ttft)
            && within(timing.time_per_token(), self.itl)
            && within(Some(timing.e2e), self.e2e)
    }

    /// Nothing if a part says no bound, or one for the second time.
    fn bound(&mut self, part: &str) -> Option<()> {
        let (name, bound) = part.split_once('=')?;
        let place = match name {
            "ttft" => &mut self.ttft,
            "itl" => &mut self.itl,
            "e2e" => &mut self.e2e,
            _ => return None,
        };
        let bound = Duration::from_secs_f64(stoker_workload::seconds(bound)?);
        place.replace(bound).is_none().then_some(())
    }
}

impl FromStr for Slo {
    type Err = SloError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut slo = Self { text: text.to_owned(), ..Self::default() };
        for part in text.split(',') {
            slo.bound(part).ok_or_else(|| SloError(part.to_owned()))?;
        }
        Ok(slo)
    }
}

impl fmt::Display for Slo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::answer::Usage;

    fn timing(ttft_ms: u64, e2e_ms: u64, completion_tokens: u32) -> AnswerTiming {
        let (ttft, e2e) = (Duration::from_millis(ttft_ms), Duration::from_millis(e2e_ms));
        AnswerTiming { ttft, e2e, gaps: Vec::new(), usage: Usage { prompt_tokens: 1, completion_tokens } }
    }

    #[test]
    fn every_bound_must_be_kept_and_a_single_token_has_no_gap() {
        let is_met = |slo: &str, timing: &AnswerTiming| slo.parse::<Slo>().unwrap().is_met(timing);
        let answer = timing(100, 1100, 11);
        for (slo, met) in [
            ("ttft=100ms", true),
            ("ttft=99ms", false),
            ("itl=100ms", true),
            ("itl=99ms", false),
            ("e2e=1.1s", true),
            ("e2e=1s", false),
            ("ttft=1s,itl=1s,e2e=1s", false),
            ("ttft=1s,itl=1s,e2e=2s", true),
        ] {
            assert_eq!(is_met(slo, &answer), met, "{slo}");
        }
        assert!(is_met("itl=1ms", &timing(100, 100, 1)));
    }

    #[test]
    fn nonsense_names_the_part() {
        for (text, part) in [
            ("", ""),
            ("ttft", "ttft"),
            ("ttft=1", "ttft=1"),
            ("itl=1s,tpot=1s", "tpot=1s"),
            ("e2e=1s,e2e=2s", "e2e=2s"),
        ] {
            assert_eq!(text.parse::<Slo>(), Err(SloError(part.to_owned())));
        }
    }
}
