//! The bounded memory of one deployment's load: the judged reading of each replica and one line of totals per tick.
//!
//! Owns who exists, what they last said, and the totals of the last minutes. Its size is bounded by the number of
//! replicas plus [`TICKS_KEPT`]. Never decides, never judges an answer itself, never reads a clock.

use std::collections::{BTreeMap, VecDeque};

use stoker_cost::{Spent, StepCost};
use stoker_crds::contract::LoadReport;
use stoker_replica::{Absurdity, Answer, Counted, Expected, Judge, NotFresh, Reading};

use crate::{
    held::{Held, Holders},
    standby::Standby,
};

/// Lines of totals kept: twice the longest stable window at a tick of two seconds.
pub const TICKS_KEPT: usize = 640;

/// A replica as the cluster shows it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Standing {
    /// Created, not yet serving.
    Starting,
    /// Ready for requests.
    Serving,
    /// On its way out; takes no new requests.
    Draining,
    /// Served, and its process is gone for so long that its load must show elsewhere. No capacity, and nothing to read.
    Broken,
}

/// The totals of one tick over all serving replicas; readings that are not fresh are filled in with the mean of those
/// that are, so that a lost reading does not look like lost load.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Totals {
    pub(crate) at_ms: u64,
    pub(crate) serving: u32,
    pub(crate) fresh: u32,
    /// Blocks of one replica.
    pub(crate) blocks_per_replica: f64,
    /// Blocks referenced by sequences.
    pub(crate) referenced: f64,
    pub(crate) running: f64,
    pub(crate) waiting: f64,
    /// Seconds of prefill waiting per replica.
    pub(crate) queue_seconds: f64,
    /// Requests that arrived since the tick before; negative when one process lost more than came.
    pub(crate) arrivals: i64,
    pub(crate) finished: u64,
    pub(crate) preemptions: u64,
    /// Work done since the tick before.
    pub(crate) spent: Spent,
    /// What a step costs, mean of those that say so.
    pub(crate) cost: Option<StepCost>,
    pub(crate) ttft_p95_seconds: Option<f64>,
    pub(crate) itl_p95_seconds: Option<f64>,
}

impl Totals {
    pub(crate) fn in_flight(&self) -> f64 {
        self.running + self.waiting
    }
}

#[derive(Clone, Debug)]
struct Replica {
    standing: Standing,
    judge: Judge,
    /// What had been counted at the last tick; `None` until it is first seen.
    counted: Option<Counted>,
}

/// See the module.
#[derive(Clone, Debug, Default)]
pub struct LoadWindow {
    replicas: BTreeMap<String, Replica>,
    ticks: VecDeque<Totals>,
    start_seconds: Option<f64>,
    standby: Option<Standby>,
    held: Held,
    busy_ms: Option<u64>,
}

impl LoadWindow {
    /// Takes over who exists. Replicas not named are forgotten; known ones keep their readings.
    pub fn set_fleet<'a>(&mut self, fleet: impl IntoIterator<Item = (&'a str, Standing)>) {
        let mut before = std::mem::take(&mut self.replicas);
        for (id, standing) in fleet {
            let new = Replica { standing, judge: Judge::default(), counted: None };
            let replica = before.remove(id).unwrap_or(new);
            self.replicas.insert(id.to_owned(), Replica { standing, ..replica });
        }
    }

    /// The learned 90th percentile of the start time, see [`crate::StartTimes`].
    pub fn set_start_seconds(&mut self, seconds: f64) {
        self.start_seconds = Some(seconds).filter(|seconds| seconds.is_finite() && *seconds >= 0.0);
    }

    /// Nodes that have the model in memory for the next replicas; `None` where none is asked to.
    pub fn set_standby(&mut self, standby: Option<Standby>) {
        self.standby = standby;
    }

    /// What gateways hold: it waits as what waits at replicas does, and there are no other signs of it.
    pub fn set_held(&mut self, held: Held) {
        self.held = held;
    }

    /// Takes one answer of a replica; answers of replicas that do not exist any more are ignored.
    pub fn take(&mut self, id: &str, answer: Answer<'_>, expected: Expected<'_>) {
        if let Some(replica) = self.replicas.get_mut(id) {
            replica.judge.hear(answer, expected);
            replica.counted.get_or_insert(replica.judge.counted());
        }
    }

    /// Takes over the reading of a replica that somebody else judges, by the clock of the ticks.
    pub fn see(&mut self, id: &str, reading: &Reading) {
        if let Some(replica) = self.replicas.get_mut(id) {
            replica.judge = reading.judge().clone();
            replica.counted.get_or_insert(replica.judge.counted());
        }
    }

    /// The reading of a replica is not about now, until the next one.
    pub fn doubt(&mut self, id: &str, why: Absurdity) {
        if let Some(replica) = self.replicas.get_mut(id) {
            replica.judge.doubt(why);
        }
    }

    /// Closes a tick: adds up what was read since the last one.
    pub fn tick(&mut self, now_ms: u64) {
        let totals = self.totals(now_ms);
        for replica in self.replicas.values_mut() {
            replica.counted = replica.counted.map(|_| replica.judge.counted());
        }
        // What a gateway has in line and does not say may be a request, and without gateways nobody counts those that are refused.
        let is_known = self.held.by == Holders::All && self.busy_ms.is_some();
        if totals.in_flight() > 0.0 || totals.arrivals > 0 || !is_known {
            self.busy_ms = Some(now_ms);
        }
        if self.ticks.len() == TICKS_KEPT {
            self.ticks.pop_front();
        }
        self.ticks.push_back(totals);
        self.ticks.make_contiguous();
    }

    /// The load of a replica at `now_ms`, or why it does not count.
    pub fn load(&self, id: &str, now_ms: u64) -> Result<&LoadReport, NotFresh> {
        self.replicas.get(id).map_or(Err(NotFresh::Missing), |replica| replica.load(now_ms))
    }

    pub(crate) fn count(&self, standing: Standing) -> u32 {
        let matching = self.replicas.values().filter(|replica| replica.standing == standing).count();
        u32::try_from(matching).expect("fewer than 2^32 replicas")
    }

    pub(crate) fn not_fresh(&self, now_ms: u64) -> impl Iterator<Item = (&str, NotFresh)> {
        let serving = self.replicas.iter().filter(|(_, replica)| replica.standing == Standing::Serving);
        serving.filter_map(move |(id, replica)| Some((id.as_str(), replica.load(now_ms).err()?)))
    }

    /// Serving replicas with a fresh reading that tells nothing of their steps.
    pub(crate) fn untold(&self, now_ms: u64) -> impl Iterator<Item = &str> {
        let serving = self.replicas.iter().filter(|(_, replica)| replica.standing == Standing::Serving);
        let is_untold = move |replica: &Replica| replica.load(now_ms).is_ok_and(|load| load.steps.is_none());
        serving.filter(move |(_, replica)| is_untold(replica)).map(|(id, _)| id.as_str())
    }

    /// What a step costs, of each replica that serves and says so.
    pub(crate) fn costs(&self, now_ms: u64) -> impl Iterator<Item = StepCost> {
        let serving = self.replicas.values().filter(|replica| replica.standing == Standing::Serving);
        serving.filter_map(move |replica| replica.load(now_ms).ok()?.steps?.cost)
    }

    pub(crate) fn ticks(&self) -> &[Totals] {
        self.ticks.as_slices().0
    }

    pub(crate) fn start_seconds(&self) -> Option<f64> {
        self.start_seconds
    }

    pub(crate) fn standby(&self) -> Option<Standby> {
        self.standby
    }

    pub(crate) fn held(&self) -> &Held {
        &self.held
    }

    /// When a request was last seen; the first tick counts as one, so that a new process waits its full time.
    pub(crate) fn busy_ms(&self) -> Option<u64> {
        self.busy_ms
    }

    fn totals(&self, now_ms: u64) -> Totals {
        let serving = || self.replicas.values().filter(|replica| replica.standing == Standing::Serving);
        let fresh: Vec<&LoadReport> = serving().filter_map(|replica| replica.load(now_ms).ok()).collect();
        let n_serving = self.count(Standing::Serving);
        let n_fresh = u32::try_from(fresh.len()).expect("fewer than 2^32 replicas");
        let scale = f64::from(n_serving) / f64::from(n_fresh.max(1));
        let sum = |of: fn(&LoadReport) -> f64| fresh.iter().map(|load| of(load)).sum::<f64>();
        Totals {
            at_ms: now_ms,
            serving: n_serving,
            fresh: n_fresh,
            blocks_per_replica: sum(|load| f64::from(load.total_blocks)) / f64::from(n_fresh.max(1)),
            referenced: scale * sum(|load| f64::from(load.referenced_blocks)),
            running: scale * sum(|load| f64::from(load.running)),
            waiting: f64::from(self.held.requests) + scale * sum(|load| f64::from(load.waiting)),
            queue_seconds: queue_seconds(&fresh),
            arrivals: serving().map(|replica| replica.news().arrivals).sum(),
            finished: serving().map(|replica| replica.news().finished).sum(),
            preemptions: serving().map(|replica| replica.news().preemptions).sum(),
            spent: serving().fold(Spent::default(), |sum, replica| sum.and(&replica.news().spent)),
            cost: StepCost::mean(fresh.iter().filter_map(|load| load.steps?.cost)),
            // The largest bounds what it is of all requests together; a mean would hide the one replica that is late.
            ttft_p95_seconds: fresh.iter().filter_map(|load| load.ttft_p95_seconds).reduce(f64::max),
            itl_p95_seconds: fresh.iter().filter_map(|load| load.itl_p95_seconds).reduce(f64::max),
        }
    }
}

impl Replica {
    fn load(&self, now_ms: u64) -> Result<&LoadReport, NotFresh> {
        self.judge.sight(now_ms).serving()
    }

    /// What was counted since the last tick.
    fn news(&self) -> Counted {
        let Some(before) = self.counted else { return Counted::default() };
        let now = self.judge.counted();
        Counted {
            arrivals: now.arrivals - before.arrivals,
            finished: now.finished.saturating_sub(before.finished),
            preemptions: now.preemptions.saturating_sub(before.preemptions),
            spent: now.spent.since(&before.spent),
        }
    }
}

/// Seconds of waiting prefill per replica; 0 while no prefill was measured, the KV term sees those requests too.
fn queue_seconds(fresh: &[&LoadReport]) -> f64 {
    let rates = fresh.iter().filter_map(|load| load.prefill_tokens_per_second).filter(|rate| *rate > 0.0);
    let Some(rate) = mean(rates) else { return 0.0 };
    let tokens: u64 = fresh.iter().map(|load| load.waiting_prefill_tokens).sum();
    tokens as f64 / (rate * fresh.len().max(1) as f64)
}

fn mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    let (n, sum) = values.fold((0_u32, 0.0), |(n, sum), value| (n + 1, sum + value));
    (n > 0).then(|| sum / f64::from(n))
}

#[cfg(test)]
mod tests {
    use stoker_cost::StepReport;
    use stoker_replica::FRESH_FOR_MS;

    use super::*;

    const NOW_MS: u64 = 100_000;

    fn report(up_ms: u64) -> LoadReport {
        LoadReport {
            up_ms,
            start_id: "a".to_owned(),
            revision: "r1".to_owned(),
            running: 10,
            waiting: 2,
            referenced_blocks: 400,
            cached_blocks: 100,
            free_blocks: 500,
            preemptions: 3,
            finished: 50,
            ..LoadReport::idle(1000)
        }
    }

    fn take(window: &mut LoadWindow, id: &str, now_ms: u64, change: impl Fn(&mut LoadReport)) {
        let mut report = report(now_ms);
        change(&mut report);
        window.take(id, Answer::Report(&report), Expected { revision: "r1", now_ms });
    }

    fn window(ids: &[&str]) -> LoadWindow {
        let mut window = LoadWindow::default();
        window.set_fleet(ids.iter().map(|id| (*id, Standing::Serving)));
        window
    }

    fn newest(window: &LoadWindow) -> Totals {
        *window.ticks().last().unwrap()
    }

    #[test]
    fn what_was_counted_before_we_looked_is_no_arrival() {
        let mut window = window(&["a"]);
        take(&mut window, "a", NOW_MS, |_| {});
        window.tick(NOW_MS);
        assert_eq!((newest(&window).arrivals, newest(&window).finished), (0, 0));
    }

    #[test]
    fn arrivals_are_those_that_ended_and_those_that_became_more() {
        let mut window = window(&["a"]);
        take(&mut window, "a", NOW_MS, |_| {});
        window.tick(NOW_MS);
        take(&mut window, "a", NOW_MS + 2000, |report| {
            (report.finished, report.running, report.preemptions) = (55, 12, 4);
        });
        window.tick(NOW_MS + 2000);
        let totals = newest(&window);
        assert_eq!((totals.arrivals, totals.finished, totals.preemptions), (7, 5, 1));
    }

    #[test]
    fn a_restarted_process_counts_from_zero() {
        let mut window = window(&["a"]);
        take(&mut window, "a", NOW_MS, |_| {});
        window.tick(NOW_MS);
        take(&mut window, "a", NOW_MS + 2000, |report| {
            report.start_id = "b".to_owned();
            (report.finished, report.running, report.waiting, report.preemptions) = (3, 1, 0, 0);
        });
        window.tick(NOW_MS + 2000);
        assert_eq!((newest(&window).arrivals, newest(&window).finished), (4, 3));
    }

    #[test]
    fn a_lost_reading_does_not_look_like_lost_load() {
        let mut window = window(&["a", "b"]);
        take(&mut window, "a", NOW_MS, |_| {});
        window.tick(NOW_MS);
        let totals = newest(&window);
        assert_eq!((totals.serving, totals.fresh, totals.referenced, totals.running), (2, 1, 800.0, 20.0));
    }

    #[test]
    fn what_waits_at_gateways_waits_as_at_replicas() {
        let mut window = window(&["a", "b"]);
        take(&mut window, "a", NOW_MS, |_| {});
        take(&mut window, "b", NOW_MS, |_| {});
        window.set_held(Held::by_all(30));
        window.tick(NOW_MS);
        assert_eq!((newest(&window).waiting, newest(&window).running), (34.0, 20.0));
        window.set_held(Held::by_all(0));
        window.tick(NOW_MS + 2000);
        assert_eq!(newest(&window).waiting, 4.0);
    }

    #[test]
    fn a_reading_that_was_judged_elsewhere_counts_the_same() {
        let (mut window, mut judge) = (window(&["a"]), Judge::default());
        for second in 0..4 {
            let now_ms = NOW_MS + 1000 * second;
            let report = LoadReport { finished: 50 + second, ..report(now_ms) };
            judge.hear(Answer::Report(&report), Expected { revision: "r1", now_ms });
            if second % 2 == 1 {
                window.see("a", &judge.reading(now_ms));
                window.tick(now_ms);
            }
        }
        assert_eq!((newest(&window).arrivals, newest(&window).finished, newest(&window).fresh), (2, 2, 1));
        window.doubt("a", Absurdity::Down);
        window.tick(NOW_MS + 4000);
        assert_eq!(window.load("a", NOW_MS + 4000), Err(NotFresh::Absurd { why: Absurdity::Down }));
        assert_eq!((newest(&window).arrivals, newest(&window).fresh), (0, 0));
    }

    #[test]
    fn silence_ages_and_nobody_is_missing() {
        let mut window = window(&["a", "b"]);
        take(&mut window, "a", NOW_MS, |_| {});
        window.take("a", Answer::Silence, Expected { revision: "r1", now_ms: NOW_MS });
        assert!(window.load("a", NOW_MS + FRESH_FOR_MS).is_ok());
        let age_ms = FRESH_FOR_MS + 1;
        assert_eq!(window.load("a", NOW_MS + age_ms), Err(NotFresh::Stale { age_ms }));
        assert_eq!([window.load("b", NOW_MS), window.load("nobody", NOW_MS)], [Err(NotFresh::Missing); 2]);
        assert_eq!(window.not_fresh(NOW_MS).count(), 1);
    }

    #[test]
    fn who_serves_and_tells_nothing_of_its_steps_is_untold_while_its_reading_is_fresh() {
        let mut window = window(&["a", "b", "c"]);
        window.set_fleet([("a", Standing::Serving), ("b", Standing::Serving), ("c", Standing::Draining)]);
        take(&mut window, "a", NOW_MS, |report| report.steps = Some(StepReport::default()));
        take(&mut window, "b", NOW_MS, |_| {});
        take(&mut window, "c", NOW_MS, |_| {});
        assert_eq!(window.untold(NOW_MS).collect::<Vec<_>>(), ["b"]);
        assert_eq!(window.untold(NOW_MS + FRESH_FOR_MS + 1).count(), 0);
    }

    #[test]
    fn who_is_gone_is_forgotten_and_who_stays_keeps_its_reading() {
        let mut window = window(&["a", "b"]);
        take(&mut window, "a", NOW_MS, |_| {});
        window.set_fleet([("a", Standing::Draining), ("c", Standing::Starting)]);
        let counts = [Standing::Serving, Standing::Draining, Standing::Starting].map(|standing| window.count(standing));
        assert_eq!(counts, [0, 1, 1]);
        assert!(window.load("a", NOW_MS).is_ok());
        assert_eq!(window.load("b", NOW_MS), Err(NotFresh::Missing));
    }

    #[test]
    fn its_size_is_bounded() {
        let mut window = window(&["a"]);
        (0..3 * TICKS_KEPT as u64).for_each(|tick| window.tick(NOW_MS + tick * 2000));
        assert_eq!(window.ticks().len(), TICKS_KEPT);
    }
}
