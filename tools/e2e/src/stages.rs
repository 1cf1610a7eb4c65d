//! The lines a run prints: each step with the time it took and the time since the start.

use std::time::Instant;

/// Clock of a run.
pub(crate) struct Stages {
    started: Instant,
    last: Instant,
}

impl Stages {
    /// Starts the clock.
    pub(crate) fn new() -> Self {
        let now = Instant::now();
        Self { started: now, last: now }
    }

    /// Says that a step is done.
    pub(crate) fn done(&mut self, step: impl std::fmt::Display) {
        let now = Instant::now();
        let (took, total) = (now - self.last, now - self.started);
        println!("{:6.1} s  (+{:.1})  {step}", total.as_secs_f64(), took.as_secs_f64());
        self.last = now;
    }
}
