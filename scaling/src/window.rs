//! The bounded memory of one deployment's load: the last believed reading of each replica and one line of totals per
//! tick.
//!
//! Owns who exists, what they last said, and the totals of the last minutes. Its size is bounded by the number of
//! replicas plus [`TICKS_KEPT`]. Never decides, never reads a clock.

use std::collections::{BTreeMap, VecDeque};

use crate::reading::{Absurdity, Answer, Expected, FRESH_FOR_MS, Load, NotFresh, Reading};

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
    believed: Option<(u64, Load)>,
    doubt: Option<Absurdity>,
    /// Counted from answers since the last tick.
    arrivals: i64,
    finished: u64,
    preemptions: u64,
}

/// See the module.
#[derive(Clone, Debug, Default)]
pub struct LoadWindow {
    replicas: BTreeMap<String, Replica>,
    ticks: VecDeque<Totals>,
    start_seconds: Option<f64>,
    held_requests: u32,
    busy_ms: Option<u64>,
}

impl LoadWindow {
    /// Takes over who exists. Replicas not named are forgotten; known ones keep their readings.
    pub fn set_fleet<'a>(&mut self, fleet: impl IntoIterator<Item = (&'a str, Standing)>) {
        let mut before = std::mem::take(&mut self.replicas);
        for (id, standing) in fleet {
            let replica = before.remove(id).unwrap_or(Replica {
                standing,
                believed: None,
                doubt: None,
                arrivals: 0,
                finished: 0,
                preemptions: 0,
            });
            self.replicas.insert(id.to_owned(), Replica { standing, ..replica });
        }
    }

    /// The learned 90th percentile of the start time, see [`crate::StartTimes`].
    pub fn set_start_seconds(&mut self, seconds: f64) {
        self.start_seconds = Some(seconds).filter(|seconds| seconds.is_finite() && *seconds >= 0.0);
    }

    /// Requests that the gateway holds because no replica serves.
    pub fn set_held_requests(&mut self, held: u32) {
        self.held_requests = held;
    }

    /// Takes one answer of a replica; answers of replicas that do not exist any more are ignored.
    pub fn take(&mut self, id: &str, answer: Answer<'_>, expected: Expected<'_>) {
        let Some(replica) = self.replicas.get_mut(id) else { return };
        match answer {
            Answer::Silence => {}
            Answer::NotAReport => replica.doubt = Some(Absurdity::NotAReport),
            Answer::Down => replica.doubt = Some(Absurdity::Down),
            Answer::Report(report) => {
                let before = replica.believed.as_ref().map(|(_, load)| load);
                match Load::believe(report, before, expected) {
                    Err(absurdity) => replica.doubt = Some(absurdity),
                    Ok(load) => replica.believe(load, expected.now_ms),
                }
            }
        }
    }

    /// Closes a tick: adds up what was read since the last one.
    pub fn tick(&mut self, now_ms: u64) {
        let totals = self.totals(now_ms);
        for replica in self.replicas.values_mut() {
            (replica.arrivals, replica.finished, replica.preemptions) = (0, 0, 0);
        }
        if totals.in_flight() > 0.0 || totals.arrivals > 0 || self.held_requests > 0 || self.busy_ms.is_none() {
            self.busy_ms = Some(now_ms);
        }
        if self.ticks.len() == TICKS_KEPT {
            self.ticks.pop_front();
        }
        self.ticks.push_back(totals);
        self.ticks.make_contiguous();
    }

    /// How the reading of a replica counts at `now_ms`.
    pub fn reading(&self, id: &str, now_ms: u64) -> Reading<'_> {
        self.replicas.get(id).map_or(Reading::Missing, |replica| replica.reading(now_ms))
    }

    pub(crate) fn count(&self, standing: Standing) -> u32 {
        let matching = self.replicas.values().filter(|replica| replica.standing == standing).count();
        u32::try_from(matching).expect("fewer than 2^32 replicas")
    }

    pub(crate) fn not_fresh(&self, now_ms: u64) -> impl Iterator<Item = (&str, NotFresh)> {
        let serving = self.replicas.iter().filter(|(_, replica)| replica.standing == Standing::Serving);
        serving.filter_map(move |(id, replica)| Some((id.as_str(), replica.reading(now_ms).not_fresh()?)))
    }

    pub(crate) fn ticks(&self) -> &[Totals] {
        self.ticks.as_slices().0
    }

    pub(crate) fn start_seconds(&self) -> Option<f64> {
        self.start_seconds
    }

    pub(crate) fn held_requests(&self) -> u32 {
        self.held_requests
    }

    /// When a request was last seen; the first tick counts as one, so that a new process waits its full time.
    pub(crate) fn busy_ms(&self) -> Option<u64> {
        self.busy_ms
    }

    fn totals(&self, now_ms: u64) -> Totals {
        let serving = || self.replicas.values().filter(|replica| replica.standing == Standing::Serving);
        let fresh: Vec<&Load> = serving().filter_map(|replica| replica.fresh(now_ms)).collect();
        let n_serving = self.count(Standing::Serving);
        let n_fresh = u32::try_from(fresh.len()).expect("fewer than 2^32 replicas");
        let scale = f64::from(n_serving) / f64::from(n_fresh.max(1));
        let sum = |of: fn(&Load) -> f64| fresh.iter().map(|load| of(load)).sum::<f64>();
        Totals {
            at_ms: now_ms,
            serving: n_serving,
            fresh: n_fresh,
            blocks_per_replica: sum(|load| f64::from(load.total_blocks)) / f64::from(n_fresh.max(1)),
            referenced: scale * sum(|load| f64::from(load.referenced_blocks)),
            running: scale * sum(|load| f64::from(load.running)),
            waiting: scale * sum(|load| f64::from(load.waiting)),
            queue_seconds: queue_seconds(&fresh),
            arrivals: serving().map(|replica| replica.arrivals).sum(),
            finished: serving().map(|replica| replica.finished).sum(),
            preemptions: serving().map(|replica| replica.preemptions).sum(),
            // The largest bounds what it is of all requests together; a mean would hide the one replica that is late.
            ttft_p95_seconds: fresh.iter().filter_map(|load| load.ttft_p95_seconds).reduce(f64::max),
            itl_p95_seconds: fresh.iter().filter_map(|load| load.itl_p95_seconds).reduce(f64::max),
        }
    }
}

impl Replica {
    fn believe(&mut self, load: Load, now_ms: u64) {
        let before = self.believed.take().map(|(_, load)| load);
        let same = before.as_ref().filter(|before| before.start_id == load.start_id);
        // A replica seen for the first time brings its past with it: only what happens from now on is counted.
        let is_first = before.is_none();
        let (finished, preemptions, open) = match same {
            Some(before) => (before.finished, before.preemptions, before.open()),
            None if is_first => (load.finished, load.preemptions, load.open()),
            None => (0, 0, 0),
        };
        let ended = load.finished - finished;
        let more = load.open() - open;
        self.arrivals = self.arrivals.saturating_add_unsigned(ended).saturating_add(more);
        self.finished = self.finished.saturating_add(ended);
        self.preemptions = self.preemptions.saturating_add(load.preemptions - preemptions);
        self.believed = Some((now_ms, load));
        self.doubt = None;
    }

    fn reading(&self, now_ms: u64) -> Reading<'_> {
        if let Some(absurdity) = self.doubt {
            return Reading::Absurd(absurdity);
        }
        let Some((at_ms, load)) = &self.believed else { return Reading::Missing };
        let age_ms = now_ms.saturating_sub(*at_ms);
        if age_ms > FRESH_FOR_MS { Reading::Stale { age_ms } } else { Reading::Fresh(load) }
    }

    fn fresh(&self, now_ms: u64) -> Option<&Load> {
        match self.reading(now_ms) {
            Reading::Fresh(load) => Some(load),
            Reading::Stale { .. } | Reading::Absurd(_) | Reading::Missing => None,
        }
    }
}

impl Reading<'_> {
    /// Why this reading does not count, if it does not.
    pub fn not_fresh(&self) -> Option<NotFresh> {
        match *self {
            Reading::Fresh(_) => None,
            Reading::Stale { age_ms } => Some(NotFresh::Stale { age_ms }),
            Reading::Absurd(why) => Some(NotFresh::Absurd { why }),
            Reading::Missing => Some(NotFresh::Missing),
        }
    }
}

impl Load {
    fn open(&self) -> i64 {
        i64::from(self.running) + i64::from(self.waiting)
    }
}

/// Seconds of waiting prefill per replica; 0 while no prefill was measured, the KV term sees those requests too.
fn queue_seconds(fresh: &[&Load]) -> f64 {
    let rates = fresh.iter().filter_map(|load| load.prefill_tokens_per_second);
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
    use super::*;
    use crate::reading::tests::report;

    const NOW_MS: u64 = 100_000;

    fn take(window: &mut LoadWindow, id: &str, now_ms: u64, change: impl Fn(&mut stoker_crds::contract::LoadReport)) {
        let mut report = report();
        report.time_ms = now_ms;
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
    fn a_lie_hides_the_truth_told_before_until_the_next_one() {
        let mut window = window(&["a"]);
        take(&mut window, "a", NOW_MS, |_| {});
        take(&mut window, "a", NOW_MS + 2000, |report| report.free_blocks = 1);
        assert_eq!(window.reading("a", NOW_MS + 2000), Reading::Absurd(Absurdity::Blocks));
        take(&mut window, "a", NOW_MS + 4000, |_| {});
        assert!(matches!(window.reading("a", NOW_MS + 4000), Reading::Fresh(_)));
    }

    #[test]
    fn silence_ages_and_html_is_absurd() {
        let mut window = window(&["a", "b"]);
        take(&mut window, "a", NOW_MS, |_| {});
        let expected = Expected { revision: "r1", now_ms: NOW_MS };
        window.take("a", Answer::Silence, expected);
        window.take("b", Answer::NotAReport, expected);
        assert_eq!(window.reading("b", NOW_MS), Reading::Absurd(Absurdity::NotAReport));
        window.take("b", Answer::Down, expected);
        assert!(matches!(window.reading("a", NOW_MS + FRESH_FOR_MS), Reading::Fresh(_)));
        let age_ms = FRESH_FOR_MS + 1;
        assert_eq!(window.reading("a", NOW_MS + age_ms), Reading::Stale { age_ms });
        assert_eq!(window.reading("b", NOW_MS), Reading::Absurd(Absurdity::Down));
        assert_eq!(window.reading("nobody", NOW_MS), Reading::Missing);
        assert_eq!(window.not_fresh(NOW_MS).count(), 1);
    }

    #[test]
    fn who_is_gone_is_forgotten_and_who_stays_keeps_its_reading() {
        let mut window = window(&["a", "b"]);
        take(&mut window, "a", NOW_MS, |_| {});
        window.set_fleet([("a", Standing::Draining), ("c", Standing::Starting)]);
        let counts = [Standing::Serving, Standing::Draining, Standing::Starting].map(|standing| window.count(standing));
        assert_eq!(counts, [0, 1, 1]);
        assert!(matches!(window.reading("a", NOW_MS), Reading::Fresh(_)));
        assert_eq!(window.reading("b", NOW_MS), Reading::Missing);
    }

    #[test]
    fn its_size_is_bounded() {
        let mut window = window(&["a"]);
        (0..3 * TICKS_KEPT as u64).for_each(|tick| window.tick(NOW_MS + tick * 2000));
        assert_eq!(window.ticks().len(), TICKS_KEPT);
    }
}
