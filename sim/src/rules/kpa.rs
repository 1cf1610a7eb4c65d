//! Knative's pod autoscaler on concurrency.
//!
//! Source: knative/serving `pkg/autoscaler/scaling/autoscaler.go` with the defaults of `config-autoscaler` as knobs: tick
//! 2 s, stable window 60 s, panic window 10 % of it, panic at 200 %, up by at most 1000 times and down by at most half per
//! tick, no scale-down delay. While it panics, the larger of the stable and the panic number counts and it never falls;
//! panic ends one stable window after its last cause. The target is concurrency times utilisation in one number.
//! Concurrency counts requests that run and wait.

use std::collections::VecDeque;

use crate::{LOOK_SECONDS, Rule, View, peer_rule::Knobs};

const TICK_SECONDS: f64 = 2.0;

/// See the module.
#[derive(Clone, Debug)]
pub struct Kpa {
    /// Requests in flight per pod that are wanted.
    target: f64,
    stable_seconds: usize,
    panic_seconds: usize,
    panic_threshold: f64,
    up_rate_max: f64,
    down_rate_max: f64,
    down_delay_seconds: f64,
    concurrency: VecDeque<f64>,
    /// When panic last had a cause, and the largest number wanted since it began.
    panic: Option<(f64, f64)>,
    /// What was wanted lately, for the delay.
    wanted: VecDeque<(f64, f64)>,
}

impl Kpa {
    /// Its knobs and their defaults.
    pub const KNOBS: &[(&str, f64)] = &[
        ("target", 70.0),
        ("stableWindow", 60.0),
        ("panicWindowPercentage", 10.0),
        ("panicThresholdPercentage", 200.0),
        ("maxScaleUpRate", 1000.0),
        ("maxScaleDownRate", 2.0),
        ("scaleDownDelay", 0.0),
    ];

    /// A rule with these knobs.
    pub(crate) fn new(knobs: Knobs<'_>) -> Self {
        let stable_seconds = knobs.get("stableWindow").max(6.0);
        Self {
            target: knobs.get("target"),
            stable_seconds: stable_seconds as usize,
            panic_seconds: (stable_seconds * knobs.get("panicWindowPercentage") / 100.0).max(1.0) as usize,
            panic_threshold: knobs.get("panicThresholdPercentage") / 100.0,
            up_rate_max: knobs.get("maxScaleUpRate"),
            down_rate_max: knobs.get("maxScaleDownRate").max(1.0),
            down_delay_seconds: knobs.get("scaleDownDelay"),
            concurrency: VecDeque::new(),
            panic: None,
            wanted: VecDeque::new(),
        }
    }

    fn sample(&mut self, view: &View<'_>) {
        let in_flight: u32 = view.members.iter().map(|member| member.replica.open()).sum();
        self.concurrency.push_back(f64::from(in_flight + view.held));
        if self.concurrency.len() > self.stable_seconds {
            self.concurrency.pop_front();
        }
    }

    fn mean_of_last(&self, seconds: usize) -> f64 {
        let n = seconds.min(self.concurrency.len());
        self.concurrency.iter().rev().take(n).sum::<f64>() / n.max(1) as f64
    }

    fn decide(&mut self, now: f64, ready: f64) -> f64 {
        let (most, least) = ((self.up_rate_max * ready).ceil(), (ready / self.down_rate_max).floor());
        let wanted = |mean: f64| (mean / self.target).ceil();
        let (stable, panic) =
            (wanted(self.mean_of_last(self.stable_seconds)), wanted(self.mean_of_last(self.panic_seconds)));
        let bounded = |wanted: f64| wanted.max(least).min(most);
        let is_over = panic / ready >= self.panic_threshold;
        self.panic = match self.panic {
            before if is_over => Some((now, before.map_or(0.0, |(_, most)| most))),
            Some((since, _)) if now - since > self.stable_seconds as f64 => None,
            same => same,
        };
        let Some((_, most_wanted)) = &mut self.panic else { return bounded(stable) };
        *most_wanted = most_wanted.max(bounded(stable)).max(bounded(panic));
        *most_wanted
    }

    /// The largest number wanted within the delay.
    fn delayed(&mut self, now: f64, wanted: f64) -> f64 {
        self.wanted.push_back((now, wanted));
        while self.wanted.front().is_some_and(|(at, _)| now - at > self.down_delay_seconds) {
            self.wanted.pop_front();
        }
        self.wanted.iter().map(|(_, wanted)| *wanted).fold(wanted, f64::max)
    }
}

impl Rule for Kpa {
    fn look(&mut self, view: &View<'_>) -> Option<u32> {
        debug_assert_eq!(LOOK_SECONDS, 1.0, "one sample a second, as the real one takes");
        self.sample(view);
        if view.now % TICK_SECONDS != 0.0 {
            return None;
        }
        let ready = view.serving().count().max(1) as f64;
        let wanted = self.decide(view.now, ready);
        Some(self.delayed(view.now, wanted) as u32)
    }
}
