//! The line on stderr that says how a run goes: once a second in place on a terminal, now and then in a log.

use std::{
    io::{self, IsTerminal, Write},
    time::Duration,
};

use stoker_loadgen::{
    run::{Outcome, Progress},
    summary::Percentiles,
};

/// A log gets a line this often.
const LOG_EVERY: Duration = Duration::from_secs(5);

/// See the module.
#[derive(Debug)]
pub(crate) struct Line {
    is_terminal: bool,
    /// Outcomes that the last line spoke of.
    n_told: usize,
    told_at: Option<Duration>,
}

impl Line {
    pub(crate) fn new() -> Self {
        Self { is_terminal: io::stderr().is_terminal(), n_told: 0, told_at: None }
    }

    pub(crate) fn show(&mut self, progress: &Progress<'_>) {
        let is_due = self.told_at.is_none_or(|told| progress.elapsed - told >= LOG_EVERY);
        if !(self.is_terminal || is_due) {
            return;
        }
        let text = text(progress, &progress.outcomes[self.n_told..]);
        let (before, after) = if self.is_terminal { ("\r\x1b[2K", "") } else { ("", "\n") };
        // A progress line that cannot be shown is no reason to end a measurement.
        let _ = write!(io::stderr(), "{before}{text}{after}").and_then(|()| io::stderr().flush());
        self.n_told = progress.outcomes.len();
        self.told_at = Some(progress.elapsed);
    }

    /// Leaves the last line standing.
    pub(crate) fn end(self) {
        if self.is_terminal {
            eprintln!();
        }
    }
}

/// `news` are the outcomes since the line before.
fn text(progress: &Progress<'_>, news: &[Outcome]) -> String {
    let Progress { elapsed, n_planned, n_sent, n_in_flight, outcomes } = progress;
    let n_failed = outcomes.iter().filter(|outcome| outcome.result.is_err()).count();
    let n_answered = outcomes.len() - n_failed;
    let ttft = Percentiles::of(news.iter().filter_map(|outcome| Some(outcome.result.as_ref().ok()?.ttft)));
    format!(
        "{:>4.0} s  sent {n_sent}/{n_planned}  in flight {n_in_flight}  answered {n_answered}  failed {n_failed}  ttft p50 \
         {:.2} s, p99 {:.2} s",
        elapsed.as_secs_f64(),
        ttft.p50,
        ttft.p99
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use stoker_loadgen::{
        client::{Failure, FailureKind},
        run::Which,
        shape::Kind,
    };

    #[test]
    fn the_line_counts_what_was_sent_answered_and_failed() {
        let failure = Failure { kind: FailureKind::Cut, message: String::new() };
        let which = Which { planned: Duration::ZERO, model_idx: 0, turn_idx: 0, kind: Kind::Text };
        let outcomes = [Outcome { which, send_lag: Duration::ZERO, result: Err(failure), verdict: None }];
        let progress =
            Progress { elapsed: Duration::from_secs(12), n_planned: 9, n_sent: 3, n_in_flight: 2, outcomes: &outcomes };
        let words = text(&progress, &outcomes);
        assert!(words.starts_with("  12 s  sent 3/9  in flight 2  answered 0  failed 1"), "{words}");
    }
}
