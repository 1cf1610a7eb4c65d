//! What one agent said, judged before anything believes it.
//!
//! Owns the last believed report, the doubt about the last answer, and what was counted from report to report. A report
//! is believed only if its numbers are finite and consistent, it is of the expected revision, and it is later than the
//! one before it by the agent's own uptime. Its age is by the clock of who asked.

use std::sync::Arc;

use stoker_cost::Spent;
use stoker_crds::contract::{AgentPhase, LoadReport, PROTOCOL};

use crate::{
    absurdity::Absurdity,
    preemptions::LastMinute,
    rate::Rate,
    reading::{Reading, Sight},
};

/// Readings are taken every two seconds. One may be lost; with the second, within three ticks, sight is called lost.
pub const FRESH_FOR_MS: u64 = 4_100;
/// Requests in one agent beyond which a reading is taken for nonsense.
const REQUESTS_MAX: u32 = 10_000_000;

/// What a replica answered when it was asked.
#[derive(Clone, Copy, Debug)]
pub enum Answer<'a> {
    /// A well-formed load report.
    Report(&'a LoadReport),
    /// Something else: HTML, an error status, half a body.
    NotAReport,
    /// Nobody says a load there, of a process that takes clients.
    OlderAgent,
    /// Nothing within the timeout.
    Silence,
}

/// What is known about a replica apart from what it says.
#[derive(Clone, Copy, Debug)]
pub struct Expected<'a> {
    /// Revision of the replica's pod.
    pub revision: &'a str,
    /// When the answer arrived, by the observer's clock, which never goes back.
    pub now_ms: u64,
}

/// What happened in a replica since it was first seen, whatever processes it had meanwhile.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Counted {
    /// Requests that arrived; less than before when a process was lost with what it held.
    pub arrivals: i64,
    /// Requests that ended.
    pub finished: u64,
    /// Preemptions.
    pub preemptions: u64,
    /// Work that was done, and of whom; nothing of agents that do not say.
    pub spent: Spent,
}

/// An agent of another release than whoever asks it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum OtherRelease {
    /// Of a release in which less is relied on.
    Older {
        /// Its load can be read all the same.
        is_read: bool,
    },
    /// Of one that is to come: what it says may mean something else.
    Newer,
}

/// See the module.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Judge {
    asked: bool,
    believed: Option<Believed>,
    doubt: Option<Absurdity>,
    counted: Counted,
    preemptions: LastMinute,
    /// Tokens generated since the replica was first seen, and how fast.
    generated: u64,
    tokens: Rate,
}

#[derive(Clone, Debug, PartialEq)]
struct Believed {
    at_ms: u64,
    report: Arc<LoadReport>,
}

impl Judge {
    /// Takes in one answer.
    pub fn hear(&mut self, answer: Answer<'_>, expected: Expected<'_>) {
        self.asked = true;
        match answer {
            Answer::Silence => {}
            Answer::NotAReport => self.doubt = Some(Absurdity::NotAReport),
            Answer::OlderAgent => self.doubt = Some(Absurdity::OlderAgent),
            Answer::Report(report) => match absurdity(report, self.last(), expected.revision) {
                Some(absurdity) => self.doubt = Some(absurdity),
                None => self.believe(report, expected.now_ms),
            },
        }
    }

    /// What was believed is not about now, as who looked elsewhere knows. Holds until the next report is believed.
    pub fn doubt(&mut self, why: Absurdity) {
        self.doubt = Some(why);
    }

    /// How what was said counts at `now_ms`, by the clock of the answers.
    pub fn sight(&self, now_ms: u64) -> Sight<'_> {
        match (&self.believed, self.doubt) {
            (_, Some(absurdity)) => Sight::Absurd(absurdity),
            (None, None) if self.asked => Sight::Missing,
            (None, None) => Sight::Unread,
            (Some(Believed { at_ms, report }), None) => match now_ms.saturating_sub(*at_ms) {
                age_ms if age_ms > FRESH_FOR_MS => Sight::Stale { age_ms },
                _ => Sight::Fresh(report),
            },
        }
    }

    /// Of which other release its agent is, as it last showed. A pod keeps its image, so it holds whatever became of the process since.
    pub fn other_release(&self) -> Option<OtherRelease> {
        match self.doubt {
            Some(Absurdity::OlderAgent) => Some(OtherRelease::Older { is_read: false }),
            Some(Absurdity::NewerAgent) => Some(OtherRelease::Newer),
            _ => self.last().filter(|last| last.protocol < PROTOCOL).map(|_| OtherRelease::Older { is_read: true }),
        }
    }

    /// All of it, as it counts at `now_ms`.
    pub fn reading(&self, now_ms: u64) -> Reading {
        Reading::new(self.clone(), now_ms)
    }

    /// What was counted.
    pub fn counted(&self) -> Counted {
        self.counted
    }

    /// Preemptions within the last minute.
    pub fn preemptions_last_minute(&self) -> u64 {
        self.preemptions.count()
    }

    /// Tokens generated a second, over the last seconds; `None` until there were some readings.
    pub fn tokens_per_second(&self) -> Option<f64> {
        self.tokens.per_second()
    }

    fn last(&self) -> Option<&LoadReport> {
        self.believed.as_ref().map(|believed| &*believed.report)
    }

    fn believe(&mut self, report: &LoadReport, now_ms: u64) {
        self.count(report);
        self.preemptions.take(self.counted.preemptions, now_ms);
        if report.generated_tokens.is_some() {
            self.tokens.take(self.generated, now_ms);
        }
        self.believed = Some(Believed { at_ms: now_ms, report: Arc::new(report.clone()) });
        self.doubt = None;
    }

    /// A replica seen for the first time brings its past with it: only what happens from then on is counted. A process
    /// that replaced another one counts from zero.
    fn count(&mut self, report: &LoadReport) {
        let (finished, preemptions, were_open) = match self.last() {
            None => (report.finished, report.preemptions, open(report)),
            Some(before) if before.start_id == report.start_id => (before.finished, before.preemptions, open(before)),
            Some(_) => (0, 0, 0),
        };
        let generated = report.generated_tokens.unwrap_or_default();
        let generated_before = match self.last() {
            None => generated,
            Some(before) if before.start_id == report.start_id => before.generated_tokens.unwrap_or(generated),
            Some(_) => 0,
        };
        let spent = report.steps.map_or(Spent::default(), |steps| match self.last() {
            None => Spent::default(),
            Some(before) if before.start_id == report.start_id => {
                before.steps.map_or(Spent::default(), |before| steps.spent.since(&before.spent))
            }
            Some(_) => steps.spent,
        });
        let ended = report.finished - finished;
        let counted = &mut self.counted;
        counted.arrivals = counted.arrivals.saturating_add_unsigned(ended).saturating_add(open(report) - were_open);
        counted.finished = counted.finished.saturating_add(ended);
        counted.preemptions = counted.preemptions.saturating_add(report.preemptions - preemptions);
        counted.spent = counted.spent.and(&spent);
        // Nothing is decided by it: an agent that counts backwards generated nothing.
        self.generated = self.generated.saturating_add(generated.saturating_sub(generated_before));
    }
}

fn open(report: &LoadReport) -> i64 {
    i64::from(report.running) + i64::from(report.waiting)
}

/// Why a report cannot be true, or not be of now. `before` is the last believed one of the same replica.
fn absurdity(report: &LoadReport, before: Option<&LoadReport>, revision: &str) -> Option<Absurdity> {
    if report.protocol > PROTOCOL {
        return Some(Absurdity::NewerAgent);
    }
    if report.revision != revision {
        return Some(Absurdity::Revision);
    }
    let same = before.filter(|before| before.start_id == report.start_id);
    if same.is_some_and(|before| report.up_ms <= before.up_ms) {
        return Some(Absurdity::Repeated);
    }
    let spent_fell = |before: &LoadReport| {
        before.steps.zip(report.steps).is_some_and(|(before, now)| now.spent.fell_below(&before.spent))
    };
    let fell = |before: &LoadReport| {
        report.preemptions < before.preemptions || report.finished < before.finished || spent_fell(before)
    };
    wrong_number(report).or_else(|| same.is_some_and(fell).then_some(Absurdity::CounterWentBack))
}

fn wrong_number(report: &LoadReport) -> Option<Absurdity> {
    let optional = [
        report.ttft_p50_seconds,
        report.ttft_p95_seconds,
        report.itl_p50_seconds,
        report.itl_p95_seconds,
        report.prefill_tokens_per_second,
    ];
    let numbers = optional.into_iter().flatten().chain([report.stalled_seconds, report.load_progress]);
    if numbers.into_iter().any(|number| !number.is_finite() || number < 0.0) {
        return Some(Absurdity::NotANumber);
    }
    if report.steps.is_some_and(|steps| !steps.is_sound()) {
        return Some(Absurdity::Costs);
    }
    let parts = [report.referenced_blocks, report.cached_blocks, report.free_blocks];
    let sum: u64 = parts.into_iter().map(u64::from).sum();
    let none_to_serve_with = report.total_blocks == 0 && report.phase == AgentPhase::Ready;
    if none_to_serve_with || sum != u64::from(report.total_blocks) {
        return Some(Absurdity::Blocks);
    }
    (report.running.max(report.waiting) > REQUESTS_MAX).then_some(Absurdity::Requests)
}

#[cfg(test)]
mod tests {
    use stoker_cost::{StepCost, StepReport};

    use super::*;

    const NOW_MS: u64 = 100_000;

    fn report() -> LoadReport {
        LoadReport {
            time_ms: NOW_MS,
            start_id: "a".to_owned(),
            up_ms: 5_000,
            revision: "r1".to_owned(),
            running: 10,
            waiting: 2,
            waiting_prefill_tokens: 320,
            referenced_blocks: 400,
            cached_blocks: 100,
            free_blocks: 500,
            preemptions: 3,
            finished: 50,
            ttft_p95_seconds: Some(0.2),
            prefill_tokens_per_second: Some(5000.0),
            steps: Some(StepReport {
                cost: Some(StepCost { step_seconds: 0.01, ..StepCost::default() }),
                error: 0.0,
                spent: Spent { decodes: 100.0, ..Spent::default() },
            }),
            ..LoadReport::idle(1000)
        }
    }

    fn steps(report: &mut LoadReport) -> &mut StepReport {
        report.steps.as_mut().unwrap()
    }

    fn cost(report: &mut LoadReport) -> &mut StepCost {
        steps(report).cost.as_mut().unwrap()
    }

    fn hear(judge: &mut Judge, seconds: u64, change: impl FnOnce(&mut LoadReport)) {
        let mut report = LoadReport { up_ms: 5_000 + 1000 * seconds, ..report() };
        change(&mut report);
        judge.hear(Answer::Report(&report), Expected { revision: "r1", now_ms: NOW_MS + 1000 * seconds });
    }

    /// A judge that believed one report.
    fn judge() -> Judge {
        let mut judge = Judge::default();
        hear(&mut judge, 0, |_| {});
        judge
    }

    fn said_after_two_seconds(change: impl FnOnce(&mut LoadReport)) -> Result<(), Absurdity> {
        let mut judge = judge();
        hear(&mut judge, 2, change);
        match judge.sight(NOW_MS + 2000) {
            Sight::Fresh(_) => Ok(()),
            Sight::Absurd(why) => Err(why),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn each_lie_has_its_name() {
        use Absurdity::*;
        type Lie = fn(&mut LoadReport);
        let lies: [(Lie, Absurdity); 15] = [
            (|report| report.protocol = PROTOCOL + 1, NewerAgent),
            (|report| report.revision = "r2".to_owned(), Revision),
            (|report| report.ttft_p95_seconds = Some(f64::NAN), NotANumber),
            (|report| report.itl_p95_seconds = Some(-0.1), NotANumber),
            (|report| report.stalled_seconds = f64::INFINITY, NotANumber),
            (|report| report.free_blocks = 400, Blocks),
            (|report| report.running = u32::MAX, Requests),
            (|report| report.finished = 49, CounterWentBack),
            (|report| report.preemptions = 2, CounterWentBack),
            (|report| report.up_ms = 5_000, Repeated),
            (|report| report.up_ms = 0, Repeated),
            (|report| cost(report).decode_seconds = -1e-6, Costs),
            (|report| cost(report).prefill_pair_seconds = f64::NAN, Costs),
            (|report| cost(report).step_seconds = 0.0, Costs),
            (|report| steps(report).spent.decodes = 99.0, CounterWentBack),
        ];
        for (lie, name) in lies {
            assert_eq!(said_after_two_seconds(lie), Err(name));
        }
        assert_eq!(said_after_two_seconds(|_| {}), Ok(()));
    }

    #[test]
    fn an_agent_of_another_release_is_known_by_what_it_last_showed() {
        let older = |is_read| Some(OtherRelease::Older { is_read });
        let expected = |second: u64| Expected { revision: "r1", now_ms: NOW_MS + 1000 * second };
        let mut judge = judge();
        assert_eq!(judge.other_release(), None);
        hear(&mut judge, 2, |report| report.protocol = 0);
        assert!(matches!(judge.sight(NOW_MS + 2000), Sight::Fresh(_)), "what it says is believed");
        assert_eq!(judge.other_release(), older(true));
        judge.hear(Answer::Silence, expected(20));
        assert_eq!(judge.other_release(), older(true), "between two starts, too");
        judge.hear(Answer::OlderAgent, expected(22));
        assert_eq!(judge.sight(NOW_MS + 22_000), Sight::Absurd(Absurdity::OlderAgent));
        judge.hear(Answer::Silence, expected(24));
        assert_eq!(judge.other_release(), older(false));
        hear(&mut judge, 26, |report| report.protocol = PROTOCOL + 1);
        assert_eq!(judge.other_release(), Some(OtherRelease::Newer));
        hear(&mut judge, 28, |_| {});
        assert_eq!(judge.other_release(), None);
    }

    #[test]
    fn clocks_of_other_machines_are_not_looked_at() {
        for time_ms in [0, NOW_MS - 3_600_000.min(NOW_MS), NOW_MS + 10 * 365 * 86_400_000, u64::MAX] {
            assert_eq!(said_after_two_seconds(|report| report.time_ms = time_ms), Ok(()), "{time_ms}");
        }
    }

    #[test]
    fn a_ready_replica_without_blocks_cannot_be_and_a_loading_one_has_none_yet() {
        let without_blocks = |phase| {
            move |report: &mut LoadReport| {
                let (start_id, revision) = (report.start_id.clone(), report.revision.clone());
                *report = LoadReport {
                    start_id,
                    revision,
                    up_ms: 9_000,
                    phase,
                    finished: 50,
                    preemptions: 3,
                    ..LoadReport::idle(0)
                };
            }
        };
        assert_eq!(said_after_two_seconds(without_blocks(AgentPhase::Ready)), Err(Absurdity::Blocks));
        assert_eq!(said_after_two_seconds(without_blocks(AgentPhase::Loading)), Ok(()));
    }

    #[test]
    fn a_new_process_starts_its_counters_and_its_uptime_again() {
        let mut judge = judge();
        hear(&mut judge, 2, |report| {
            report.start_id = "b".to_owned();
            (report.up_ms, report.finished, report.preemptions) = (1, 3, 1);
            (report.running, report.waiting) = (1, 0);
            steps(report).spent.decodes = 7.0;
        });
        assert!(matches!(judge.sight(NOW_MS + 2000), Sight::Fresh(_)));
        let spent = Spent { decodes: 7.0, ..Spent::default() };
        assert_eq!(judge.counted(), Counted { arrivals: 4, finished: 3, preemptions: 1, spent });
    }

    #[test]
    fn what_was_counted_before_we_looked_is_left_out() {
        let mut judge = judge();
        assert_eq!(judge.counted(), Counted::default());
        hear(&mut judge, 2, |report| {
            (report.finished, report.running, report.preemptions) = (55, 12, 4);
            steps(report).spent.decodes = 130.0;
        });
        let spent = Spent { decodes: 30.0, ..Spent::default() };
        assert_eq!(judge.counted(), Counted { arrivals: 7, finished: 5, preemptions: 1, spent });
        assert_eq!(judge.preemptions_last_minute(), 1);
    }

    #[test]
    fn a_report_outlives_lost_answers_until_it_is_stale() {
        let mut judge = judge();
        judge.hear(Answer::Silence, Expected { revision: "r1", now_ms: NOW_MS + 2000 });
        assert!(matches!(judge.sight(NOW_MS + FRESH_FOR_MS), Sight::Fresh(_)));
        let age_ms = FRESH_FOR_MS + 1;
        assert_eq!(judge.sight(NOW_MS + age_ms), Sight::Stale { age_ms });
    }

    #[test]
    fn a_lie_hides_the_truth_told_before_until_the_next_one() {
        let mut judge = judge();
        hear(&mut judge, 2, |report| report.free_blocks = 1);
        judge.hear(Answer::Silence, Expected { revision: "r1", now_ms: NOW_MS + 3000 });
        assert_eq!(judge.sight(NOW_MS + 3000), Sight::Absurd(Absurdity::Blocks));
        hear(&mut judge, 4, |_| {});
        assert!(matches!(judge.sight(NOW_MS + 4000), Sight::Fresh(_)));
    }

    #[test]
    fn who_was_not_asked_is_unread_and_who_never_answered_is_missing() {
        let mut judge = Judge::default();
        assert_eq!(judge.sight(NOW_MS), Sight::Unread);
        judge.hear(Answer::Silence, Expected { revision: "r1", now_ms: NOW_MS });
        assert_eq!(judge.sight(NOW_MS), Sight::Missing);
        judge.hear(Answer::NotAReport, Expected { revision: "r1", now_ms: NOW_MS });
        assert_eq!(judge.sight(NOW_MS), Sight::Absurd(Absurdity::NotAReport));
    }
}
