//! What a run came to: promises broken, sequences thrown out, GPU time, changes of mind.

use super::{model::Slo, replica::Outcome};

/// A change of direction within this time of the last change is a reversal: the earlier one was a mistake.
pub const REVERSAL_SECONDS: f64 = 600.0;

/// See the module.
#[derive(Clone, Debug)]
pub struct Outcomes {
    slo: Slo,
    /// Requests answered.
    pub requests: u64,
    /// Requests whose first token or whose tokens came later than promised.
    pub misses: u64,
    /// Of those, by the first token.
    pub ttft_misses: u64,
    /// Tokens of the prompts of those requests.
    pub prompt_tokens: u64,
    /// Tokens whose prefill was computed: without what was cached, and again for sequences that were thrown out.
    pub prefill_tokens: u64,
    /// Sequences thrown out for lack of blocks.
    pub preemptions: u64,
    /// Seconds of existence, summed over the replicas, while the trace lasted.
    pub gpu_seconds: f64,
    /// Seconds the trace lasted.
    pub seconds: f64,
    /// Changes of direction, see [`REVERSAL_SECONDS`].
    pub reversals: u32,
    /// Decisions that changed the number.
    pub changes: u32,
    /// Points of the plots.
    pub samples: Vec<Sample>,
    last_change: Option<(f64, bool)>,
}

/// One point of the plots.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sample {
    /// Seconds since the beginning.
    pub at: f64,
    /// Replicas wanted.
    pub desired: u32,
    /// Replicas serving.
    pub serving: u32,
    /// Replicas that cost money.
    pub members: u32,
    /// Mean share of KV blocks referenced.
    pub kv: f64,
    /// Requests waiting.
    pub waiting: u32,
    /// Requests that arrived since the point before.
    pub arrivals: u32,
    /// Requests answered late since the point before.
    pub misses: u32,
    /// Preemptions since the beginning.
    pub preemptions: u64,
}

impl Outcomes {
    /// Nothing yet.
    pub fn new(slo: Slo) -> Self {
        Self {
            slo,
            requests: 0,
            misses: 0,
            ttft_misses: 0,
            prompt_tokens: 0,
            prefill_tokens: 0,
            preemptions: 0,
            gpu_seconds: 0.0,
            seconds: 0.0,
            reversals: 0,
            changes: 0,
            samples: Vec::new(),
            last_change: None,
        }
    }

    /// Counts an answer; true when it came later than promised.
    pub fn add(&mut self, outcome: &Outcome) -> bool {
        let is_late_first = outcome.ttft > outcome.unloaded + self.slo.ttft_seconds;
        let decoding = outcome.finished - outcome.arrived - outcome.ttft;
        let promised = f64::from(outcome.gaps) * self.slo.itl_seconds + self.slo.stall_seconds;
        let is_late = is_late_first || decoding > promised;
        self.requests += 1;
        self.prompt_tokens += u64::from(outcome.prompt_tokens);
        self.ttft_misses += u64::from(is_late_first);
        self.misses += u64::from(is_late);
        is_late
    }

    /// Counts a change of the number.
    pub fn change(&mut self, now: f64, from: u32, to: u32) {
        let is_up = to > from;
        let turned = |(at, was_up): (f64, bool)| was_up != is_up && now - at <= REVERSAL_SECONDS;
        self.reversals += u32::from(self.last_change.is_some_and(turned));
        self.changes += 1;
        self.last_change = Some((now, is_up));
    }

    /// GPU time in hours.
    pub fn gpu_hours(&self) -> f64 {
        self.gpu_seconds / 3600.0
    }

    /// Reversals per hour of the trace.
    pub fn reversals_per_hour(&self) -> f64 {
        f64::from(self.reversals) * 3600.0 / self.seconds.max(1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_turn_soon_after_a_change_is_a_reversal_and_a_late_one_is_not() {
        let mut outcomes = Outcomes::new(Slo::default());
        outcomes.change(0.0, 1, 2);
        outcomes.change(10.0, 2, 4);
        outcomes.change(20.0, 4, 3);
        outcomes.change(20.0 + REVERSAL_SECONDS + 1.0, 3, 5);
        assert_eq!((outcomes.reversals, outcomes.changes), (1, 4));
    }

    #[test]
    fn a_late_answer_counts_once_however_late_it_is() {
        let mut outcomes = Outcomes::new(Slo::default());
        let fine = Outcome { arrived: 0.0, finished: 6.6, ttft: 1.4, gaps: 100, unloaded: 0.5, prompt_tokens: 9 };
        assert!(!outcomes.add(&fine));
        assert!(outcomes.add(&Outcome { ttft: 1.6, finished: 9.0, ..fine }));
        assert!(outcomes.add(&Outcome { finished: 6.7, ..fine }));
        assert_eq!((outcomes.requests, outcomes.misses, outcomes.ttft_misses), (3, 2, 1));
    }
}
