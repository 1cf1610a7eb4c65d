//! Knative's pod autoscaler on concurrency.
//!
//! Source: knative/serving `pkg/autoscaler/scaling/autoscaler.go` with the defaults of `config-autoscaler`: tick 2 s,
//! stable window 60 s, panic window 10 % of it, panic at 200 %, up by at most 1000 times and down by at most half per
//! tick, no scale-down delay; while panicking the number never falls, and panic ends one stable window after its last
//! cause. The target is concurrency times utilisation in one number. Concurrency counts requests that run and wait.

use std::collections::VecDeque;

use crate::sim::{LOOK_SECONDS, Rule, View};

const TICK_SECONDS: f64 = 2.0;
const STABLE_SECONDS: usize = 60;
const PANIC_SECONDS: usize = 6;
const PANIC_THRESHOLD: f64 = 2.0;
const UP_RATE_MAX: f64 = 1000.0;
const DOWN_RATE_MAX: f64 = 2.0;

/// See the module.
#[derive(Clone, Debug)]
pub struct Kpa {
    /// Requests in flight per pod that are wanted.
    target: f64,
    concurrency: VecDeque<f64>,
    panic: Option<Panic>,
}

#[derive(Clone, Copy, Debug)]
struct Panic {
    since: f64,
    most: f64,
}

impl Kpa {
    /// A rule with this target.
    pub fn new(target: f64) -> Self {
        Self { target, concurrency: VecDeque::new(), panic: None }
    }

    fn sample(&mut self, view: &View<'_>) {
        let in_flight: u32 =
            view.members.iter().map(|member| member.replica.running() + member.replica.waiting()).sum();
        self.concurrency.push_back(f64::from(in_flight + view.held));
        if self.concurrency.len() > STABLE_SECONDS {
            self.concurrency.pop_front();
        }
    }

    fn mean_of_last(&self, seconds: usize) -> f64 {
        let n = seconds.min(self.concurrency.len());
        self.concurrency.iter().rev().take(n).sum::<f64>() / n.max(1) as f64
    }

    fn decide(&mut self, now: f64, ready: f64) -> f64 {
        let (most, least) = ((UP_RATE_MAX * ready).ceil(), (ready / DOWN_RATE_MAX).floor());
        let wanted_stable = (self.mean_of_last(STABLE_SECONDS) / self.target).ceil();
        let wanted_panic = (self.mean_of_last(PANIC_SECONDS) / self.target).ceil();
        let bounded = |wanted: f64| wanted.max(least).min(most);
        let is_over = wanted_panic / ready >= PANIC_THRESHOLD;
        self.panic = match self.panic {
            _ if is_over => Some(Panic { since: now, most: self.panic.map_or(0.0, |panic| panic.most) }),
            Some(panic) if now - panic.since > STABLE_SECONDS as f64 => None,
            same => same,
        };
        let Some(panic) = &mut self.panic else { return bounded(wanted_stable) };
        panic.most = panic.most.max(bounded(wanted_panic)).max(ready);
        panic.most
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
        Some(self.decide(view.now, ready) as u32)
    }
}
