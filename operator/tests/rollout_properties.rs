//! Whatever happens to pods, and however often the spec changes: no plan breaks what the linter guards, plans come to
//! rest without news, and once the world calms down exactly the wanted replicas serve.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::collections::BTreeSet;

use jiff::{SignedDuration, Timestamp};
use proptest::prelude::*;
use stoker_crds::{
    contract::{AgentPhase, DrainSettings, LoadReport},
    intent::Want,
};
use stoker_operator::{
    lint,
    plan::Plan,
    rollout::{
        CanaryWanted, Missing, PodRef, Replacing, ReplacingRule, RolloutPlan, Share, Wanted, plan_rollout,
        prefetch::Prefetching,
    },
};
use stoker_replica::{Intent, Needs, ObservedPod, Reading, Replica, Stage, Trouble};

/// Something that happens between two rounds.
#[derive(Clone, Debug)]
enum Happening {
    TimePasses {
        seconds: i64,
    },
    SpecChanges {
        replicas: usize,
        revision: usize,
        missing: usize,
        surge: usize,
    },
    /// A revision is tried, or none any more.
    Tries {
        revision: Option<usize>,
    },
    Pod {
        which: usize,
        what: PodChange,
    },
}

/// Something that happens to one pod.
#[derive(Clone, Copy, Debug)]
enum PodChange {
    NoRoom,
    Prepared,
    Started,
    Served,
    Faltered,
    Crashed,
    Evicted,
    DeletedByOthers,
    Gone,
    GotWork(u32),
    RanEmpty,
    Obeyed,
    Restarted,
    /// Its agent says that it took an order which is not on the pod.
    LostItsAnnotation,
    Silent,
}

struct World {
    now: Timestamp,
    wanted: Wanted,
    pods: Vec<Replica>,
    made: u32,
}

/// A plan may make room for the next one, but without news there is soon nothing left to do: after four plans, and one more where all but
/// one of several pods of a revision that is tried have left, so that the last is its canary.
const ROUNDS_TO_REST: usize = 5;
const REVISIONS: [&str; 3] = ["aaaaaaaa", "bbbbbbbb", "cccccccc"];

impl World {
    fn new() -> Self {
        let drain = DrainSettings { deadline_seconds: 60, withdraw_seconds: 3 };
        let wanted = Wanted {
            replicas: 2,
            revision: REVISIONS[0].into(),
            drain,
            replacing: Replacing::default(),
            paused: false,
            needs: Needs::default(),
            canary: None,
            foreign_pods: BTreeSet::new(),
            prefetching: Prefetching::default(),
        };
        Self { now: "2026-11-21T10:00:00Z".parse().unwrap(), wanted, pods: Vec::new(), made: 0 }
    }

    fn happen(&mut self, happening: &Happening) {
        match happening {
            Happening::TimePasses { seconds } => self.now += SignedDuration::from_secs(*seconds),
            Happening::SpecChanges { replicas, revision, missing, surge } => {
                self.wanted.replicas = *replicas;
                let (missing, surge) = (Missing::AtMost(*missing), Share::Count(*surge));
                self.wanted.replacing = ReplacingRule { missing, surge, ..ReplacingRule::default() }.of(*replicas);
                self.wanted.revision = REVISIONS[*revision].into();
                self.tries(None);
            }
            Happening::Tries { revision } => self.tries(*revision),
            Happening::Pod { which, what } if !self.pods.is_empty() => {
                let which = which % self.pods.len();
                change(&mut self.pods[which], *what, self.now);
            }
            Happening::Pod { .. } => {}
        }
        self.pods.retain(|pod| pod.pod.uid != "gone");
    }

    /// As the operator's course: nothing is tried beside itself or beside nobody.
    fn tries(&mut self, revision: Option<usize>) {
        let revision = revision.map(|revision| REVISIONS[revision].to_owned());
        // It is one replica more.
        let may_be = self.wanted.replicas > 0 && self.wanted.replacing.max_surge > 0;
        let revision = revision.filter(|revision| *revision != self.wanted.revision && may_be);
        self.wanted.canary =
            revision.map(|revision| CanaryWanted { revision, needs: Needs::default(), is_announced: true });
    }

    /// Replicas of a revision that serve.
    fn serving(&self, revision: &str) -> usize {
        self.pods.iter().filter(|pod| pod.serves() && pod.pod.revision == revision).count()
    }

    /// Plans, lints and carries out.
    fn round(&mut self) -> RolloutPlan {
        let pods = plan_rollout(&self.wanted, &self.pods, self.now);
        let plan = Plan { pods: pods.clone(), revision: self.wanted.revision.clone(), ..Plan::default() };
        let violations = lint::check(&plan, &self.wanted, &self.pods, self.now);
        assert!(violations.is_empty(), "{violations:?}\n{plan}{:#?}", self.pods);
        self.carry_out(&pods);
        pods
    }

    fn carry_out(&mut self, plan: &RolloutPlan) {
        for pod in &plan.drain {
            self.intend(pod, Want::Drain(self.wanted.drain));
        }
        for pod in &plan.undrain {
            self.intend(pod, Want::Serve);
        }
        for pod in &plan.reassert {
            let want = self.pods.iter().find(|observed| observed.pod.uid == pod.uid).unwrap().want();
            self.intend(pod, want);
        }
        for deletion in &plan.delete {
            self.pods.iter_mut().find(|pod| pod.pod.uid == deletion.pod.uid).unwrap().pod.stage = Stage::Leaving;
        }
        for ordinal in &plan.create {
            self.made += 1;
            self.pods.push(new_pod(&self.wanted.revision, *ordinal, self.made, self.now));
        }
        for (canary, ordinal) in self.wanted.canary.iter().zip(plan.create_canary) {
            self.made += 1;
            self.pods.push(new_pod(&canary.revision, ordinal, self.made, self.now));
        }
    }

    /// Writes what a replica should do, under a number that only rises.
    fn intend(&mut self, pod: &PodRef, want: Want) {
        let now = self.now;
        let pod = self.pods.iter_mut().find(|observed| observed.pod.uid == pod.uid).unwrap();
        let number = pod.next_number();
        assert!(pod.intent.is_none_or(|before| before.number < number));
        let since = pod.drain_since().filter(|_| want != Want::Serve).unwrap_or(now);
        pod.intent = Some(Intent { number, want, since });
    }

    /// Every pod gets one step further on its way.
    fn calm(&mut self) {
        self.now += SignedDuration::from_secs(5);
        for pod in &mut self.pods {
            pod.pod.stage = match &pod.pod.stage {
                Stage::Leaving => {
                    pod.pod.uid = "gone".into();
                    Stage::Leaving
                }
                finished @ Stage::Finished { .. } => finished.clone(),
                Stage::Starting | Stage::Faltering { .. } | Stage::Serving => Stage::Serving,
                Stage::Unscheduled { .. } | Stage::Preparing { .. } | Stage::Blocked(_) => Stage::Starting,
            };
            obey(pod);
            if pod.drain_since().is_some() {
                set_phase(pod, AgentPhase::Empty);
            }
        }
        self.pods.retain(|pod| pod.pod.uid != "gone");
    }
}

fn preparing(since: Timestamp) -> Stage {
    Stage::Preparing { trouble: Trouble::default(), since }
}

fn new_pod(revision: &str, ordinal: u32, made: u32, now: Timestamp) -> Replica {
    let pod = ObservedPod {
        name: format!("chat-{revision}-{ordinal}"),
        uid: format!("uid-{made}"),
        revision: revision.into(),
        ordinal,
        resource_version: String::new(),
        created: now,
        stage: preparing(now),
        lost: false,
        gone_by: None,
        node: None,
        needs: Needs::default(),
    };
    Replica { pod, reading: Reading::default(), intent: None }
}

fn change(pod: &mut Replica, what: PodChange, now: Timestamp) {
    if pod.pod.stage == Stage::Leaving && !matches!(what, PodChange::Gone) {
        return;
    }
    let trouble = |reason: &str| Trouble::new(reason, "1 Insufficient cpu");
    match what {
        PodChange::NoRoom => pod.pod.stage = Stage::Unscheduled { trouble: trouble("Unschedulable"), since: now },
        PodChange::Prepared => pod.pod.stage = preparing(now),
        PodChange::Started => pod.pod.stage = Stage::Starting,
        PodChange::Served => pod.pod.stage = Stage::Serving,
        PodChange::Faltered => pod.pod.stage = Stage::Faltering { trouble: trouble("NotReady"), since: now },
        PodChange::Crashed => pod.pod.stage = Stage::Blocked(trouble("CrashLoopBackOff")),
        PodChange::Evicted => pod.pod.stage = Stage::Finished { trouble: trouble("Evicted"), since: now },
        PodChange::DeletedByOthers => pod.pod.stage = Stage::Leaving,
        PodChange::Gone if pod.pod.stage == Stage::Leaving => pod.pod.uid = "gone".into(),
        PodChange::Gone => {}
        PodChange::GotWork(running) => {
            let intent = pod.reading.report().and_then(|report| report.intent);
            pod.reading = Reading::of(&LoadReport { intent, ..report(AgentPhase::Ready, running) });
        }
        PodChange::RanEmpty if pod.drain_since().is_some() => {
            obey(pod);
            set_phase(pod, AgentPhase::Empty);
        }
        PodChange::RanEmpty => {}
        PodChange::Obeyed => obey(pod),
        PodChange::Restarted => pod.reading = Reading::of(&report(AgentPhase::Ready, 0)),
        PodChange::LostItsAnnotation => {
            obey(pod);
            pod.intent = None;
        }
        PodChange::Silent => pod.reading = Reading::missing(),
    }
}

/// Its agent does what is written.
fn obey(pod: &mut Replica) {
    let phase = if pod.drain_since().is_some() { AgentPhase::Draining } else { AgentPhase::Ready };
    let running = pod.reading.report().map_or(0, |report| report.running);
    let intent = pod.intent.map(|intent| intent.number);
    pod.reading = Reading::of(&LoadReport { intent, ..report(phase, running) });
}

fn set_phase(pod: &mut Replica, phase: AgentPhase) {
    let before = pod.reading.report().cloned().unwrap_or_else(|| report(phase, 0));
    let running = if phase == AgentPhase::Empty { 0 } else { before.running };
    pod.reading = Reading::of(&LoadReport { intent: before.intent, ..report(phase, running) });
}

fn report(phase: AgentPhase, running: u32) -> LoadReport {
    LoadReport { phase, running, referenced_blocks: running, free_blocks: 100 - running, ..LoadReport::idle(100) }
}

fn pod_change() -> impl Strategy<Value = PodChange> {
    use PodChange::*;
    let plain = vec![
        NoRoom,
        Prepared,
        Started,
        Faltered,
        Crashed,
        Evicted,
        DeletedByOthers,
        Gone,
        RanEmpty,
        Obeyed,
        Restarted,
        LostItsAnnotation,
        Silent,
    ];
    prop_oneof![6 => Just(Served), 6 => prop::sample::select(plain), 2 => (0..50u32).prop_map(GotWork)]
}

fn happening() -> impl Strategy<Value = Happening> {
    prop_oneof![
        2 => (1..40i64).prop_map(|seconds| Happening::TimePasses { seconds }),
        1 => (0..7usize, 0..3usize, 0..4usize, 0..4usize).prop_map(|(replicas, revision, missing, surge)| {
            Happening::SpecChanges { replicas, revision, missing, surge }
        }),
        1 => prop::option::of(0..3usize).prop_map(|revision| Happening::Tries { revision }),
        8 => (any::<usize>(), pod_change()).prop_map(|(which, what)| Happening::Pod { which, what }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_plan_breaks_a_rule_and_a_calm_world_ends_as_wanted(happenings in prop::collection::vec(happening(), 1..80)) {
        let mut world = World::new();
        for happening in &happenings {
            world.happen(happening);
            let rounds = (0..ROUNDS_TO_REST).take_while(|_| !world.round().is_empty()).count();
            prop_assert!(rounds < ROUNDS_TO_REST, "plans without end\n{:#?}", world.pods);
        }
        for _ in 0..120 {
            world.calm();
            world.round();
        }
        let serving = world.serving(&world.wanted.revision);
        let Some(canary) = world.wanted.canary.clone() else {
            prop_assert_eq!(serving, world.wanted.replicas, "{:#?}", world.pods);
            prop_assert_eq!(world.pods.len(), world.wanted.replicas, "{:#?}", world.pods);
            return Ok(());
        };
        // It stands beside all of them, or in the place of the one that may be missing.
        let least = world.wanted.replicas - world.wanted.replacing.max_unavailable.min(world.wanted.replicas - 1);
        prop_assert!((least..=world.wanted.replicas).contains(&serving), "{serving} {:#?}", world.pods);
        prop_assert_eq!(world.serving(&canary.revision), 1, "{:#?}", world.pods);
        prop_assert_eq!(world.pods.len(), serving + 1, "{:#?}", world.pods);
    }
}
