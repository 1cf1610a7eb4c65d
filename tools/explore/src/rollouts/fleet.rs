//! One fleet by virtual time. What the operator decides is its own; when agents are ready, when their last stream ends and when a node
//! has room is the model's. That a revision which never serves is given up after ten minutes is taken from `rollback`, not decided here.

use std::collections::BTreeSet;

use jiff::{SignedDuration, Timestamp};
use stoker_crds::{
    contract::{AgentPhase, DrainSettings, LoadReport},
    intent::Want,
};
use stoker_operator::{
    lint,
    plan::Plan,
    rollout::{PodRef, RolloutPlan, Wanted, plan_rollout, prefetch::Prefetching},
};
use stoker_replica::{Intent, Needs, ObservedPod, Reading, Replica, Stage, Trouble};

use super::cases::{Case, Fault};

const DRAIN: DrainSettings = DrainSettings { withdraw_seconds: 3, deadline_seconds: 600 };
/// Until an order has reached its agent, and until a pod that was deleted is gone.
const ORDER_SECONDS: i64 = 1;
const GONE_SECONDS: i64 = 2;
/// The last stream of a replica that withdraws ends after up to so many seconds.
const STREAM_SECONDS: i64 = 20;
/// `progressDeadlineSeconds`.
const GIVEN_UP_SECONDS: i64 = 600;
/// Until pods of a lost node are deleted: the node controller's patience, and that of pods with their node.
const LOST_SECONDS: i64 = 340;
const REPLICAS_OF_A_NODE: usize = 4;
/// Nothing takes as long.
const FOREVER_SECONDS: i64 = 24 * 3600;
const REVISIONS: [&str; 3] = ["aaaaaaaa", "bbbbbbbb", "cccccccc"];

/// How a change went.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Outcome {
    /// Seconds from the change until exactly the wanted replicas served; `None`: not within a day.
    pub done: Option<i64>,
    /// Fewest replicas that served at one time.
    pub fewest_serving: usize,
    /// Most pods that there were at one time: with those that wait for room, without those that are being deleted.
    pub most_pods: usize,
    /// Most pods of a revision that cannot serve, where there is one.
    pub most_bad: Option<usize>,
    /// Streams that the operator cut.
    pub streams_cut: usize,
}

/// See the module.
pub(super) struct Fleet<'a> {
    case: &'a Case,
    wanted: Wanted,
    begun: Timestamp,
    now: i64,
    pods: Vec<Pod>,
    room: usize,
    made: u32,
    outcome: Outcome,
}

/// A pod, and what becomes of it next.
struct Pod {
    replica: Replica,
    /// It has room on a node.
    placed: bool,
    next: Option<(i64, Next)>,
}

/// What becomes of a pod.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Next {
    Serves,
    /// Its agent takes the order to drain.
    Obeys,
    /// Its last stream ends.
    Empties,
    Goes,
    /// Its node is taken for lost.
    IsLost,
}

impl<'a> Fleet<'a> {
    /// All replicas serve the first revision, and the second is asked for.
    pub(super) fn settled(case: &'a Case) -> Self {
        let wanted = Wanted {
            replicas: case.replicas,
            revision: REVISIONS[1].into(),
            drain: DRAIN,
            replacing: case.rule.of(case.replicas),
            paused: false,
            needs: Needs::default(),
            canary: None,
            foreign_pods: BTreeSet::new(),
            prefetching: Prefetching::default(),
        };
        let begun: Timestamp = "2026-11-26T10:00:00Z".parse().expect("a date");
        let outcome = Outcome {
            done: None,
            fewest_serving: case.replicas,
            most_pods: case.replicas,
            most_bad: None,
            streams_cut: 0,
        };
        let mut fleet = Self { case, wanted, begun, now: 0, pods: Vec::new(), room: case.room, made: 0, outcome };
        for ordinal in 0..case.replicas as u32 {
            fleet.make(REVISIONS[0], ordinal);
        }
        for pod in &mut fleet.pods {
            pod.become_ready();
        }
        fleet
    }

    /// Goes on until nothing moves any more.
    pub(super) fn change(mut self) -> Outcome {
        while self.now < FOREVER_SECONDS {
            let look_again = self.decide();
            self.note();
            if self.is_settled() {
                self.outcome.done = Some(self.now);
                break;
            }
            let next = self.pods.iter().filter_map(|pod| pod.next).map(|(at, _)| at);
            let next = next.chain(self.script().into_iter().filter(|at| *at > self.now)).chain(look_again);
            let Some(next) = next.min() else { break };
            self.now = next.max(self.now + 1);
            self.happen();
        }
        self.outcome
    }

    fn time(&self) -> Timestamp {
        self.begun + SignedDuration::from_secs(self.now)
    }

    /// The operator's rounds until it has nothing to do; when it would look again.
    fn decide(&mut self) -> Option<i64> {
        loop {
            let replicas: Vec<Replica> = self.pods.iter().map(|pod| pod.replica.clone()).collect();
            let pods = plan_rollout(&self.wanted, &replicas, self.time());
            let plan = Plan { pods: pods.clone(), revision: self.wanted.revision.clone(), ..Plan::default() };
            let violations = lint::check(&plan, &self.wanted, &replicas, self.time());
            assert!(violations.is_empty(), "{violations:?}\n{plan}");
            if pods.is_empty() {
                let seconds = |moment: Timestamp| moment.duration_since(self.begun).as_secs();
                return pods.look_again.map(seconds);
            }
            self.carry_out(&pods);
        }
    }

    fn carry_out(&mut self, plan: &RolloutPlan) {
        for deletion in &plan.delete {
            let now = self.now;
            let pod = self.find(&deletion.pod);
            let held = pod.replica.may_hold_streams() && !pod.replica.is_drained();
            pod.replica.pod.stage = Stage::Leaving;
            pod.next = Some((now + GONE_SECONDS, Next::Goes));
            self.outcome.streams_cut += usize::from(held);
        }
        let orders = plan.drain.iter().map(|pod| (pod, Want::Drain(DRAIN)));
        for (pod, want) in orders.chain(plan.undrain.iter().map(|pod| (pod, Want::Serve))) {
            let (now, since) = (self.now, self.time());
            let pod = self.find(pod);
            pod.replica.intent = Some(Intent { number: pod.replica.next_number(), want, since });
            pod.next = Some((now + ORDER_SECONDS, Next::Obeys));
        }
        let revision = self.wanted.revision.clone();
        plan.create.iter().for_each(|ordinal| self.make(&revision, *ordinal));
        assert!(plan.reassert.is_empty() && plan.create_canary.is_none(), "nobody gives cause to");
    }

    fn find(&mut self, pod: &PodRef) -> &mut Pod {
        self.pods.iter_mut().find(|found| found.replica.pod.uid == pod.uid).expect("plans name what is there")
    }

    fn make(&mut self, revision: &str, ordinal: u32) {
        self.made += 1;
        let name = format!("chat-{revision}-{ordinal}");
        let message = format!("0/{} nodes are available: Insufficient nvidia.com/gpu.", self.room);
        let pod = ObservedPod {
            uid: format!("{name}-{}", self.made),
            name,
            revision: revision.into(),
            ordinal,
            resource_version: String::new(),
            created: self.time(),
            stage: Stage::Unscheduled { trouble: Trouble::new("Unschedulable", message), since: self.time() },
            lost: false,
            gone_by: None,
            node: None,
            needs: Needs::default(),
        };
        let replica = Replica { pod, reading: Reading::default(), intent: None };
        self.pods.push(Pod { replica, placed: false, next: None });
        self.schedule();
    }

    /// Who waits longest gets the room that there is.
    fn schedule(&mut self) {
        let mut free = self.room.saturating_sub(self.pods.iter().filter(|pod| pod.placed).count());
        let (now, since) = (self.now, self.time());
        for pod in self.pods.iter_mut().filter(|pod| !pod.placed && pod.replica.is_live()) {
            if free == 0 {
                break;
            }
            free -= 1;
            pod.placed = true;
            let is_bad = pod.replica.pod.revision == REVISIONS[1];
            let serves = Some((now + self.case.start_seconds, Next::Serves));
            (pod.replica.pod.stage, pod.next) = match self.case.fault {
                Fault::BadImage if is_bad => {
                    (Stage::Preparing { trouble: Trouble::new("ImagePullBackOff", ""), since }, None)
                }
                Fault::BadModel if is_bad => (Stage::Blocked(Trouble::new("CrashLoopBackOff", "")), None),
                _ => (Stage::Starting, serves),
            };
        }
    }

    /// Everything that is due.
    fn happen(&mut self) {
        let now = self.now;
        self.follow_script();
        let since = self.time();
        for pod in &mut self.pods {
            if let Some((_, next)) = pod.next.take_if(|(at, _)| *at <= now) {
                pod.happens(next, now, since);
            }
        }
        let lost = self.pods.iter().filter(|pod| pod.replica.pod.lost && pod.placed).count();
        self.pods.retain(|pod| !pod.is_gone());
        self.room -= lost - self.pods.iter().filter(|pod| pod.replica.pod.lost && pod.placed).count();
        self.schedule();
    }

    /// When somebody does something, or something fails.
    fn script(&self) -> Vec<i64> {
        match self.case.fault {
            Fault::None => Vec::new(),
            Fault::BadImage | Fault::BadModel => vec![GIVEN_UP_SECONDS],
            Fault::NodeLost { at } | Fault::Edited { at } => vec![at],
            Fault::Paused { at, until } => vec![at, until],
        }
    }

    fn follow_script(&mut self) {
        if !self.script().contains(&self.now) {
            return;
        }
        match self.case.fault {
            Fault::None => {}
            Fault::BadImage | Fault::BadModel => self.wanted.revision = REVISIONS[0].into(),
            Fault::Edited { .. } => self.wanted.revision = REVISIONS[2].into(),
            Fault::Paused { at, .. } => self.wanted.paused = self.now == at,
            Fault::NodeLost { .. } => self.lose_node(),
        }
    }

    /// Nobody reaches its replicas any more; the cluster finds out.
    fn lose_node(&mut self) {
        let (now, since) = (self.now, self.time());
        for pod in self.pods.iter_mut().filter(|pod| pod.replica.serves()).take(REPLICAS_OF_A_NODE) {
            let trouble = Trouble::new("NodeLost", "");
            pod.replica.pod.stage = Stage::Faltering { trouble, since };
            pod.replica.pod.lost = true;
            pod.replica.reading = Reading::missing();
            pod.next = Some((now + LOST_SECONDS, Next::IsLost));
        }
    }

    fn note(&mut self) {
        let outcome = &mut self.outcome;
        let serving = self.pods.iter().filter(|pod| pod.replica.serves()).count();
        outcome.fewest_serving = outcome.fewest_serving.min(serving);
        outcome.most_pods = outcome.most_pods.max(self.pods.iter().filter(|pod| pod.replica.is_live()).count());
        if matches!(self.case.fault, Fault::BadImage | Fault::BadModel) {
            let bad = self.pods.iter().filter(|pod| pod.replica.pod.revision == REVISIONS[1]).count();
            outcome.most_bad = Some(outcome.most_bad.unwrap_or_default().max(bad));
        }
    }

    fn is_settled(&self) -> bool {
        let is_wanted = |pod: &Pod| pod.replica.serves() && pod.replica.pod.revision == self.wanted.revision;
        let over = self.script().iter().all(|at| *at <= self.now);
        over && self.pods.len() == self.wanted.replicas && self.pods.iter().all(is_wanted)
    }
}

impl Pod {
    fn become_ready(&mut self) {
        self.replica.pod.stage = Stage::Serving;
        self.says(AgentPhase::Ready, 1);
        self.next = None;
    }

    fn says(&mut self, phase: AgentPhase, running: u32) {
        let intent = self.replica.intent.map(|intent| intent.number);
        self.replica.reading = Reading::of(&LoadReport { intent, phase, running, ..LoadReport::idle(100) });
    }

    fn happens(&mut self, next: Next, now: i64, since: Timestamp) {
        match next {
            Next::Serves => self.become_ready(),
            Next::Obeys if self.replica.drain_since().is_none() => self.become_ready(),
            Next::Obeys => {
                self.replica.pod.stage = Stage::Faltering { trouble: Trouble::default(), since };
                self.says(AgentPhase::Draining, 1);
                let last = i64::from(self.replica.pod.ordinal) * 7 % STREAM_SECONDS + 1;
                self.next = Some((now + i64::from(DRAIN.withdraw_seconds) + last, Next::Empties));
            }
            Next::Empties => self.says(AgentPhase::Empty, 0),
            Next::Goes => self.replica.pod.uid.clear(),
            Next::IsLost => {
                self.replica.pod.stage = Stage::Leaving;
                self.next = Some((now + GONE_SECONDS, Next::Goes));
            }
        }
    }

    fn is_gone(&self) -> bool {
        self.replica.pod.uid.is_empty()
    }
}
