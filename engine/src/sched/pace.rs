//! How much of a prompt a step may compute beside sequences that decode: what fits between two of their tokens. Takes readings
//! of steps and tells a number of tokens; reads no clock.

use std::time::Duration;

/// Tokens of prompts that a step may compute in any case, so that long prompts end.
const MIN_SHARE: usize = 128;
/// Before anything is known. 2,048 tokens a step lose nothing against 8,192 on a GPU, where they take 50 ms for 8 billion
/// parameters.
const FIRST_SHARE: usize = 2048;
/// A step counts for so much against all before it.
const WEIGHT: f64 = 0.2;
/// Of a step's time, what passes before the host must have launched what follows. Below 1, so that a wait does not prolong the next one.
const BUSY_SHARE: f64 = 0.75;

/// Time between two tokens of a sequence that prompts beside it may take, where decoding itself takes less.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ItlTarget {
    /// That time.
    pub time: Duration,
    /// Prompts fill steps all the same while more sequences wait for a first token than get a further one, or 24 do: a step of
    /// prompts then helps more than it keeps waiting.
    pub yields_to_bursts: bool,
}

/// Sequences that wait for a first token and make a burst, however many decode beside them: of chats' lengths they fill a step.
pub(super) const BURST: usize = 24;

impl ItlTarget {
    /// Where nobody asked for another: faster than people read, and on a GPU long prompts are computed as fast as by whole steps.
    pub const DEFAULT: Self = Self { time: Duration::from_millis(30), yields_to_bursts: true };

    /// What somebody asked for, which holds always.
    pub fn asked(time: Duration) -> Self {
        Self { time, yields_to_bursts: false }
    }
}

/// What steps take.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Pace {
    /// A step that only decodes.
    decode_seconds: Option<f64>,
    /// The newest of those.
    last_decode_seconds: Option<f64>,
    /// What a token of a prompt adds to it.
    seconds_per_token: Option<f64>,
}

/// A step that is over.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PacedStep {
    /// Tokens of prompts that it computed.
    pub n_prefill_tokens: usize,
    /// Sequences that it decoded.
    pub n_decodes: usize,
    /// Since the step before it was over, or it was launched.
    pub seconds: f64,
}

impl Pace {
    /// Takes a step in.
    pub fn note(&mut self, step: PacedStep) {
        let PacedStep { n_prefill_tokens, n_decodes, seconds } = step;
        if n_prefill_tokens == 0 {
            mix(&mut self.decode_seconds, seconds);
            self.last_decode_seconds = Some(seconds);
        } else if n_prefill_tokens >= MIN_SHARE {
            let decoding = if n_decodes > 0 { self.decode_seconds.unwrap_or(0.0) } else { 0.0 };
            mix(&mut self.seconds_per_token, (seconds - decoding).max(seconds / 2.0) / n_prefill_tokens as f64);
        }
    }

    /// How long the device is busy with a step at the least, before it draws: most of what steps that only decode took of late.
    pub fn busy_at_least(&self) -> Duration {
        let shortest = self.decode_seconds.into_iter().chain(self.last_decode_seconds).reduce(f64::min);
        Duration::from_secs_f64(shortest.unwrap_or(0.0) * BUSY_SHARE)
    }

    /// Tokens of prompts beside decodes that keep a step within the target, or within twice what decoding takes anyway.
    pub fn share(&self, target: Duration) -> usize {
        let Some(seconds_per_token) = self.seconds_per_token else { return FIRST_SHARE };
        let decoding = self.decode_seconds.unwrap_or(0.0);
        let spare = (target.as_secs_f64() - decoding).max(decoding);
        ((spare / seconds_per_token) as usize).max(MIN_SHARE)
    }
}

fn mix(mean: &mut Option<f64>, reading: f64) {
    *mean = Some(mean.map_or(reading, |mean| mean + WEIGHT * (reading - mean)));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(n_prefill_tokens: usize, n_decodes: usize, seconds: f64) -> PacedStep {
        PacedStep { n_prefill_tokens, n_decodes, seconds }
    }

    /// After many steps of a device: 10 ms to decode, `per_token` for a prompt's.
    fn share(per_token: f64, target_ms: u64) -> usize {
        let mut pace = Pace::default();
        for _ in 0..50 {
            pace.note(step(0, 8, 0.010));
            pace.note(step(500, 8, 0.010 + 500.0 * per_token));
        }
        pace.share(Duration::from_millis(target_ms))
    }

    #[test]
    fn a_share_fills_the_time_between_two_tokens() {
        assert_eq!(Pace::default().share(ItlTarget::DEFAULT.time), FIRST_SHARE);
        assert!((1180..=1220).contains(&share(25e-6, 40)), "{}", share(25e-6, 40));
        assert!((3500..=3700).contains(&share(25e-6, 100)));
    }

    #[test]
    fn a_device_is_busy_for_most_of_the_shortest_of_late_steps() {
        let mut pace = Pace::default();
        assert_eq!(pace.busy_at_least(), Duration::ZERO);
        pace.note(step(0, 64, 0.008));
        assert_eq!(pace.busy_at_least(), Duration::from_millis(6));
        // Steps with prompts say nothing of those without.
        pace.note(step(2048, 64, 0.050));
        assert_eq!(pace.busy_at_least(), Duration::from_millis(6));
        // Fewer sequences: the next one takes no longer than this.
        pace.note(step(0, 1, 0.004));
        assert_eq!(pace.busy_at_least(), Duration::from_millis(3));
        // One that waited long is not believed at once.
        pace.note(step(0, 1, 0.100));
        assert!(pace.busy_at_least() < Duration::from_millis(25));
    }

    #[test]
    fn where_decoding_takes_longer_than_the_target_a_prompt_may_take_as_long_again() {
        assert!((390..=410).contains(&share(25e-6, 1)), "{}", share(25e-6, 1));
    }

    #[test]
    fn a_long_prompt_goes_on_in_any_case() {
        assert_eq!(share(10e-3, 40), MIN_SHARE);
    }
}
