//! How long prompts and completions are: a distribution of tokens and its spelling on a command line.

use std::{fmt, str::FromStr};

use thiserror::Error;

use crate::Rng;

/// A distribution of token counts; draws are at least 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Lengths {
    /// Always the same.
    Fixed(u32),
    /// Every count from `low` to `high`, both included, equally often.
    Uniform {
        /// Shortest.
        low: u32,
        /// Longest.
        high: u32,
    },
    /// Log-normal, as lengths of real requests are.
    LogNormal {
        /// Half of the draws are shorter.
        median: f64,
        /// Standard deviation of the logarithm.
        sigma: f64,
    },
}

/// Not a distribution.
#[derive(Debug, Error, PartialEq)]
#[error(
    "{0:?} is no length: write tokens (`200`), a range (`100..400`) or `lognormal:MEDIAN:SIGMA` (`lognormal:300:0.7`)"
)]
pub struct LengthsError(String);

impl Lengths {
    /// Draws a count.
    pub fn draw(self, rng: &mut Rng) -> u32 {
        match self {
            Self::Fixed(tokens) => tokens,
            Self::Uniform { low, high } => low + (rng.uniform() * f64::from(high - low + 1)) as u32,
            Self::LogNormal { median, sigma } => (rng.log_normal(median, sigma).round() as u32).max(1),
        }
    }
}

impl FromStr for Lengths {
    type Err = LengthsError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        parse(text).ok_or_else(|| LengthsError(text.to_owned()))
    }
}

fn parse(text: &str) -> Option<Lengths> {
    if let Some(shape) = text.strip_prefix("lognormal:") {
        let (median, sigma) = shape.split_once(':')?;
        let (median, sigma): (f64, f64) = (median.parse().ok()?, sigma.parse().ok()?);
        let is_sane = (1.0..=1e7).contains(&median) && (0.0..=5.0).contains(&sigma);
        return is_sane.then_some(Lengths::LogNormal { median, sigma });
    }
    if let Some((low, high)) = text.split_once("..") {
        let (low, high) = (low.parse().ok()?, high.parse().ok()?);
        return (1 <= low && low <= high && high < u32::MAX).then_some(Lengths::Uniform { low, high });
    }
    text.parse().ok().filter(|tokens| *tokens > 0).map(Lengths::Fixed)
}

impl fmt::Display for Lengths {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fixed(tokens) => write!(f, "{tokens}"),
            Self::Uniform { low, high } => write!(f, "{low}..{high}"),
            Self::LogNormal { median, sigma } => write!(f, "lognormal:{median}:{sigma}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_spelling_reads_back_and_nonsense_is_refused() {
        for text in ["200", "100..400", "lognormal:300:0.7"] {
            assert_eq!(text.parse::<Lengths>().unwrap().to_string(), text);
        }
        for text in ["", "0", "-1", "400..100", "0..9", "lognormal:300", "lognormal:0:1", "lognormal:9:-1", "many"] {
            assert!(text.parse::<Lengths>().is_err(), "{text}");
        }
    }

    #[test]
    fn draws_stay_in_their_range_and_have_their_middle() {
        let mut rng = Rng::seeded(3);
        let mut draws = |lengths: Lengths| {
            let mut draws: Vec<u32> = (0..10_001).map(|_| lengths.draw(&mut rng)).collect();
            draws.sort_unstable();
            draws
        };
        assert_eq!(draws(Lengths::Fixed(7)).last(), Some(&7));
        let uniform = draws(Lengths::Uniform { low: 10, high: 12 });
        assert_eq!((uniform[0], uniform[5000], uniform[10_000]), (10, 11, 12));
        let middle = draws(Lengths::LogNormal { median: 300.0, sigma: 0.7 })[5000];
        assert!((280..320).contains(&middle), "{middle}");
    }
}
