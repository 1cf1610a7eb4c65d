//! What goes wrong, by seed: one verdict for each request and for each event of a watch. Does nothing of it.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use axum::{body::Bytes, http::Method};
use rand::{RngExt, SeedableRng, rngs::StdRng};

/// Answers that are remembered of a list.
const LISTS_REMEMBERED: usize = 4;
/// Kinds of objects that are listed, and of which an API server refuses to write some.
const KINDS: [&str; 4] = ["pods", "services", "configmaps", "inferencedeployments"];

/// What goes wrong, by the rows of docs/faults.md.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Fault {
    /// Nothing.
    None,
    /// The operator is killed when one of its writes was made and not answered.
    CrashAfterWrite,
    /// The operator is killed before it writes a status.
    CrashBeforeStatus,
    /// A list shows the cluster as it was some lists ago, when the operator starts.
    StaleList,
    /// Events are left out; later the watch must be begun anew.
    MissedEvent,
    /// Events come twice, and in another order.
    RepeatedEvent,
    /// Requests are refused with 409, 429, 500 and 503.
    Refused,
    /// Writes are made and their answers lost; answers come late, or half.
    LostAnswer,
    /// The API server is gone for seconds, again and again.
    Gone,
    /// Writes of one kind of object are forbidden for seconds: a quota, a policy or a right that is taken away.
    Denied,
    /// Two operators, of which one is frozen, now and then for longer than its Lease lasts.
    Paused,
    /// The operator's wall clock is set, ahead and back.
    Clock,
    /// Between operator and API server all is well; users change, take out and put back any field, give values that may not be and fields
    /// that there are none of.
    Fields,
    /// The CRD is replaced by an older one, now and then one that knows not all that is stored, and by the present one again.
    Crd,
    /// Between operator and API server all is well; the node takes no more pods, or falls silent, now and then for so long that it counts as lost.
    Node,
    /// The same; agents lie, freeze, and answer badly.
    Agents,
}

impl Fault {
    /// How soon an operator hears what happens to objects; `None`: it may never.
    pub(super) fn heard_within(self) -> Option<Duration> {
        match self {
            Self::MissedEvent | Self::RepeatedEvent | Self::StaleList => None,
            // Until it goes on, or until its watches are whole again.
            Self::Paused | Self::Gone | Self::Refused | Self::LostAnswer | Self::Crd => Some(Duration::from_secs(20)),
            _ => Some(Duration::from_secs(10)),
        }
    }
}

/// What is done with one request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Verdict {
    Pass,
    Refuse(u16),
    Late(Duration),
    /// The connection ends, and so do all watches.
    Away,
    /// It is passed on, and the connection ends without an answer.
    Lose,
    /// Half of the answer comes.
    Half,
    KillBefore,
    KillAfter,
    Stale,
}

/// What becomes of one event.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum EventVerdict {
    Pass,
    Drop,
    Twice,
    /// Behind the next one.
    Later,
    /// The watch ends: what comes after is too old to be told.
    Expire,
}

/// What a request is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Kind {
    pub(super) writes: bool,
    pub(super) of_lease: bool,
    pub(super) of_status: bool,
    pub(super) watches: bool,
    pub(super) lists: bool,
}

impl Kind {
    pub(super) fn of(method: &Method, path: &str, query: &str) -> Self {
        let reads = method == Method::GET;
        let watches = query.contains("watch=true");
        let last = path.rsplit('/').next().unwrap_or_default();
        Self {
            writes: !reads,
            of_lease: path.contains("/leases"),
            of_status: !reads && last == "status",
            watches,
            lists: reads && KINDS.contains(&last) && !watches,
        }
    }
}

/// What goes wrong next.
pub(super) struct Script {
    fault: Fault,
    random: StdRng,
    /// Writes until the operator is killed.
    writes_to_live: u32,
    /// Answers to lists, by path, the oldest first.
    lists: HashMap<String, Vec<Bytes>>,
    outage: Outage,
}

/// What is away for seconds, and then there for seconds.
struct Outage {
    is_on: bool,
    turns: Instant,
    /// Of which kind of objects writes are forbidden.
    of: &'static str,
}

impl Outage {
    /// Whether it is away now: up to six seconds, and then there for as many.
    fn is_on(&mut self, random: &mut StdRng) -> bool {
        let now = Instant::now();
        if now >= self.turns {
            self.is_on = !self.is_on;
            self.turns = now + Duration::from_millis(random.random_range(200..6000));
            self.of = KINDS[random.random_range(0..KINDS.len())];
        }
        self.is_on
    }
}

impl Script {
    /// In which nothing goes wrong yet.
    pub(super) fn of(seed: u64) -> Self {
        Self {
            fault: Fault::None,
            random: StdRng::seed_from_u64(seed),
            writes_to_live: 0,
            lists: HashMap::new(),
            outage: Outage { is_on: false, turns: Instant::now(), of: KINDS[0] },
        }
    }

    /// What goes wrong now.
    pub(super) fn fault(&self) -> Fault {
        self.fault
    }

    /// From now on this goes wrong.
    pub(super) fn begin(&mut self, fault: Fault) {
        self.fault = fault;
        self.writes_to_live = self.random.random_range(1..12);
        self.outage.is_on = false;
    }

    /// Nothing goes wrong any more.
    pub(super) fn end(&mut self) {
        self.fault = Fault::None;
    }

    pub(super) fn judge(&mut self, kind: Kind, path: &str) -> Verdict {
        let write = kind.writes && !kind.of_lease;
        match self.fault {
            Fault::CrashAfterWrite if write => self.countdown(Verdict::KillAfter),
            Fault::CrashBeforeStatus if kind.of_status => self.countdown(Verdict::KillBefore),
            // Its caches are filled by lists that follow a kill; an operator does not list often otherwise.
            Fault::StaleList if kind.lists && self.random.random_bool(0.5) => Verdict::Stale,
            Fault::StaleList if write => self.countdown(Verdict::KillAfter),
            Fault::Refused if !kind.of_lease && self.random.random_bool(0.25) => {
                let codes = if kind.writes { &[409, 429, 500, 503][..] } else { &[429, 500, 503] };
                Verdict::Refuse(codes[self.random.random_range(0..codes.len())])
            }
            Fault::Gone if self.outage.is_on(&mut self.random) => Verdict::Away,
            Fault::Denied
                if write
                    && self.outage.is_on(&mut self.random)
                    && path.split('/').any(|part| part == self.outage.of) =>
            {
                Verdict::Refuse(403)
            }
            Fault::LostAnswer if !kind.watches && !kind.of_lease => match self.random.random_range(0..8) {
                0 if kind.writes => Verdict::Lose,
                1 => Verdict::Half,
                2 => Verdict::Late(Duration::from_millis(self.random.random_range(50..800))),
                _ => Verdict::Pass,
            },
            _ => Verdict::Pass,
        }
    }

    fn countdown(&mut self, verdict: Verdict) -> Verdict {
        self.writes_to_live = self.writes_to_live.saturating_sub(1);
        if self.writes_to_live > 0 {
            return Verdict::Pass;
        }
        // The next one's time; it is a new process.
        self.writes_to_live = self.random.random_range(1..12);
        verdict
    }

    /// What becomes of one event of a watch.
    pub(super) fn judge_event(&mut self) -> EventVerdict {
        match self.fault {
            Fault::MissedEvent if self.random.random_bool(0.3) => EventVerdict::Drop,
            Fault::MissedEvent if self.random.random_bool(0.1) => EventVerdict::Expire,
            Fault::RepeatedEvent if self.random.random_bool(0.3) => EventVerdict::Twice,
            Fault::RepeatedEvent if self.random.random_bool(0.3) => EventVerdict::Later,
            _ => EventVerdict::Pass,
        }
    }

    /// An older answer to the same list, and the present one is remembered.
    pub(super) fn older(&mut self, key: &str, present: &Bytes) -> Bytes {
        let known = self.lists.entry(key.to_owned()).or_default();
        known.push(present.clone());
        if known.len() > LISTS_REMEMBERED {
            known.remove(0);
        }
        let place = self.random.random_range(0..known.len());
        known[place].clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const POD: &str = "/api/v1/namespaces/default/pods/chat-0";

    fn written() -> Kind {
        Kind::of(&Method::PATCH, POD, "")
    }

    #[test]
    fn a_seed_is_one_story() {
        let story = |seed| {
            let mut script = Script::of(seed);
            script.begin(Fault::Refused);
            let requests: Vec<Verdict> = (0..100).map(|_| script.judge(written(), POD)).collect();
            script.begin(Fault::MissedEvent);
            (requests, (0..100).map(|_| script.judge_event()).collect::<Vec<_>>())
        };
        assert_eq!(story(7), story(7));
        assert_ne!(story(7), story(8));
    }

    #[test]
    fn an_operator_is_killed_at_one_of_its_next_writes_and_renews_its_lease_in_peace() {
        let lease = Kind::of(&Method::PUT, "/apis/coordination.k8s.io/v1/namespaces/a/leases/b", "");
        for seed in 0..50 {
            let mut script = Script::of(seed);
            script.begin(Fault::CrashAfterWrite);
            assert!((0..50).all(|_| script.judge(lease, "") == Verdict::Pass));
            let lived = (1..).find(|_| script.judge(written(), POD) == Verdict::KillAfter);
            assert!(lived.is_some_and(|writes| writes < 12), "{lived:?}");
            script.end();
            assert!((0..50).all(|_| script.judge(written(), POD) == Verdict::Pass));
        }
    }

    #[test]
    fn a_list_is_an_old_one_of_the_last_few() {
        let mut script = Script::of(1);
        let told: Vec<u8> = (0..100).map(|at| script.older("/pods", &vec![at].into())[0]).collect();
        assert!(told.iter().enumerate().all(|(at, told)| at as u8 - told < LISTS_REMEMBERED as u8), "{told:?}");
        assert!(told.iter().enumerate().any(|(at, told)| at as u8 != *told), "{told:?}");
    }
}
