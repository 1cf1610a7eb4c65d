//! One deployment's memory between decisions, and one step of it. Pure: replicas and time are arguments.

use std::{collections::VecDeque, sync::Arc};

use jiff::Timestamp;
use stoker_crds::{
    InferenceDeploymentStatus,
    scaling::{ScalingMode, ScalingSpec},
    scaling_status::{DECISIONS_KEPT, DecisionStatus},
};
use stoker_replica::{Absurdity, Replica};
use stoker_scaling::{
    ASSUMED_START_SECONDS, Coverage, DecisionRecord, Held, LoadWindow, ScaleState, ServiceLaw, Standby, decide_scale,
};

use super::{
    fleet::Fleet,
    ledger::{CoverageSummary, Latest},
    report::in_short,
};
use crate::readings::millis;

/// How long all readings must be fresh again before the status says so: an agent that comes and goes causes no writes.
const HEALTHY_AFTER_MS: u64 = 30_000;

/// What one step looks at.
#[derive(Clone, Debug)]
pub(super) struct Scene<'a> {
    pub(super) spec: &'a ScalingSpec,
    /// Replicas worked towards.
    pub(super) wanted: u32,
    pub(super) status: Option<&'a InferenceDeploymentStatus>,
    /// Those that there are.
    pub(super) replicas: &'a [Replica],
    /// What gateways have in line.
    pub(super) held: Held,
    /// How long starts were seen to take; `None`: this process saw none.
    pub(super) start_seconds: Option<f64>,
    /// The same on nodes that had the model in memory.
    pub(super) warm_start_seconds: Option<f64>,
    pub(super) now: Timestamp,
}

impl Scene<'_> {
    fn now_ms(&self) -> u64 {
        millis(self.now)
    }

    fn revision(&self) -> &str {
        self.status.map_or("", |status| &status.revision)
    }
}

/// See the module.
#[derive(Clone, Debug)]
pub(super) struct Scaler {
    window: LoadWindow,
    fleet: Fleet,
    state: ScaleState,
    mode: ScalingMode,
    revision: String,
    changes: VecDeque<DecisionStatus>,
    coverage: CoverageSummary,
    /// When some reading was last not fresh.
    shaken_ms: Option<u64>,
}

impl Scaler {
    /// Goes on where the status says that another operator stopped, or begins with the replicas that there are.
    pub(super) fn resume(scene: &Scene<'_>) -> Self {
        let before = scene.status.and_then(|status| status.scaling.as_ref());
        let state = before.and_then(|before| serde_json::from_str::<ScaleState>(&before.state).ok());
        let mut state = state.unwrap_or_else(|| ScaleState::starting_at(scene.wanted)).resumed(scene.now_ms());
        if scene.spec.mode == ScalingMode::Native {
            // What was written down is what was acted on.
            state.desired = scene.wanted;
        }
        Self {
            window: LoadWindow::default(),
            fleet: Fleet::default(),
            state,
            mode: scene.spec.mode,
            revision: scene.revision().to_owned(),
            changes: before.map(|before| before.decisions.clone().into()).unwrap_or_default(),
            coverage: CoverageSummary::default(),
            shaken_ms: None,
        }
    }

    /// One tick: who is there, what they said, what follows.
    pub(super) fn step(&mut self, scene: &Scene<'_>) -> Latest {
        self.turn(scene);
        self.read(scene);
        let now_ms = scene.now_ms();
        let decided = decide_scale(scene.spec, &self.window, &self.state, now_ms);
        let record = Arc::new(DecisionRecord::new(scene.spec, &self.state, decided, now_ms));
        self.state = record.after.clone();
        self.remember(&record, scene.now);
        self.show(&record.signals.coverage, now_ms);
        Latest { changes: self.changes.iter().cloned().collect(), coverage: self.coverage.clone(), record }
    }

    /// A new mode begins with the replicas that there are. A new revision is another model or another engine: what was
    /// learned of its speed does not hold; what was needed lately does.
    fn turn(&mut self, scene: &Scene<'_>) {
        if self.mode != scene.spec.mode {
            self.mode = scene.spec.mode;
            self.state.desired = scene.wanted;
        }
        if self.revision != scene.revision() {
            scene.revision().clone_into(&mut self.revision);
            self.state.law = ServiceLaw::default();
            self.state.learned.work = None;
        }
    }

    fn read(&mut self, scene: &Scene<'_>) {
        let now_ms = scene.now_ms();
        let patience_ms = u64::from(scene.spec.behavior.stable_window_seconds) * 1000;
        self.window.set_fleet(self.fleet.standings(scene.replicas, patience_ms, now_ms));
        for replica in scene.replicas {
            let name = &replica.pod.name;
            self.window.see(name, &replica.reading);
            if self.fleet.is_down(replica) {
                self.window.doubt(name, Absurdity::Down);
            }
            if let Ok(load) = self.window.load(name, now_ms) {
                self.fleet.believe(replica, &load.start_id);
            }
        }
        // At zero nobody is left who could tell, and what was written down stands.
        let start_seconds = scene.start_seconds.or(self.state.learned.start_seconds);
        self.window.set_start_seconds(start_seconds.unwrap_or(ASSUMED_START_SECONDS));
        self.window.set_standby(self.standby(scene));
        self.window.set_held(scene.held.clone());
        self.window.tick(now_ms);
    }

    /// The nodes that stand by, as the last round found them; `None` where none is asked to.
    fn standby(&self, scene: &Scene<'_>) -> Option<Standby> {
        let ready = scene.status.and_then(|status| status.standby.as_ref()).map_or(0, |standby| standby.ready);
        (scene.spec.standby > 0).then(|| Standby {
            nodes: ready.unsigned_abs(),
            start_seconds: scene.warm_start_seconds.or(self.state.learned.warm_start_seconds),
        })
    }

    fn remember(&mut self, record: &DecisionRecord, now: Timestamp) {
        if record.decision.desired == record.decision.previous {
            return;
        }
        if self.changes.len() == DECISIONS_KEPT {
            self.changes.pop_front();
        }
        self.changes.push_back(in_short(record, now));
    }

    /// Lost sight shows at once and gets only worse until all readings were fresh for a while.
    fn show(&mut self, coverage: &Coverage, now_ms: u64) {
        let current = CoverageSummary::of(coverage);
        if !current.is_complete() {
            self.shaken_ms = Some(now_ms);
        }
        let healed = self.shaken_ms.is_none_or(|shaken_ms| now_ms >= shaken_ms + HEALTHY_AFTER_MS);
        let worse = current.serving != self.coverage.serving || current.fresh < self.coverage.fresh;
        if healed || (worse && !current.is_complete()) {
            self.coverage = current;
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use stoker_cost::StepReport;
    use stoker_crds::scaling::ToZero;
    use stoker_crds::{contract::LoadReport, scaling_status::ScalingStatus, status::StandbyStatus};
    use stoker_replica::{Answer, Needs, ObservedPod, Stage};

    use super::*;
    use crate::{
        readings::Readings,
        scaling::report::{metrics_healthy, scaling_status, scaling_verdict},
        verdict::Verdict,
    };

    const START_MS: i64 = 1_763_700_000_000;

    /// One deployment whose replicas all have the same load, tick by tick.
    struct World {
        spec: ScalingSpec,
        status: InferenceDeploymentStatus,
        silent: usize,
        /// So many do not say what their steps cost.
        untold: usize,
        start_id: &'static str,
        held: Held,
        warm_start_seconds: Option<f64>,
        readings: Readings,
        ticked: i64,
    }

    impl World {
        fn new(replicas: i32) -> Self {
            let mut spec = ScalingSpec::between(1, 8);
            spec.behavior.stable_window_seconds = 4;
            spec.behavior.panic_window_seconds = 2;
            spec.behavior.down_stabilization_seconds = Some(4);
            let status = InferenceDeploymentStatus { replicas, revision: "0a".into(), ..Default::default() };
            let (held, readings) = (Held::by_all(0), Readings::default());
            let warm_start_seconds = None;
            Self { spec, status, silent: 0, untold: 0, start_id: "a", held, warm_start_seconds, readings, ticked: 0 }
        }

        fn now(&self) -> Timestamp {
            Timestamp::from_millisecond(START_MS + self.ticked * 2000).unwrap()
        }

        fn desired(&self) -> u32 {
            self.status.scaling.as_ref().map_or(self.status.replicas, |scaling| scaling.desired).unsigned_abs()
        }

        /// One tick without load.
        fn latest(&mut self, scaler: &mut Scaler) -> Latest {
            self.tick(scaler, 0);
            let pods: Vec<Replica> = (0..self.desired() as usize).map(|ordinal| pod(ordinal, 0, self)).collect();
            scaler.clone().step(&self.scene(&pods, self.now()))
        }

        /// One tick in which every replica references this many of its 1000 blocks; true when the status moved.
        fn tick(&mut self, scaler: &mut Scaler, referenced: u32) -> bool {
            self.ticked += 1;
            let now = self.now();
            let n_pods = self.desired() as usize;
            let pods: Vec<Replica> = (0..n_pods).map(|ordinal| pod(ordinal, referenced, self)).collect();
            let latest = scaler.step(&self.scene(&pods, now));
            let line = latest.record.to_line();
            assert_eq!(DecisionRecord::parse(&line).ok().as_ref(), Some(&*latest.record), "{line}");
            let before = self.status.scaling.take();
            let after = scaling_status(&self.spec, self.desired_before(&before), before.as_ref(), Some(&latest), now);
            let moved = before.as_ref() != Some(&after);
            self.status.scaling = Some(after);
            moved
        }

        /// Some ticks; how many of them moved the status.
        fn ticks(&mut self, scaler: &mut Scaler, count: usize, referenced: u32) -> usize {
            (0..count).filter(|_| self.tick(scaler, referenced)).count()
        }

        fn desired_before(&self, before: &Option<ScalingStatus>) -> u32 {
            before.as_ref().map_or(self.status.replicas, |before| before.desired).unsigned_abs()
        }

        fn scene<'a>(&'a self, pods: &'a [Replica], now: Timestamp) -> Scene<'a> {
            Scene {
                spec: &self.spec,
                wanted: self.desired(),
                status: Some(&self.status),
                replicas: pods,
                held: self.held.clone(),
                start_seconds: Some(5.0),
                warm_start_seconds: self.warm_start_seconds,
                now,
            }
        }

        fn scaler(&self) -> Scaler {
            Scaler::resume(&self.scene(&[], self.now()))
        }
    }

    fn pod(ordinal: usize, referenced: u32, world: &World) -> Replica {
        let now = world.now();
        let mut report: LoadReport = serde_json::from_value(json!({
            "timeMs": now.as_millisecond(), "startId": world.start_id, "upMs": now.as_millisecond(), "intent": null, "revision": "0a", "phase": "ready", "error": null,
            "loadProgress": 1.0, "running": referenced / 10, "waiting": 0, "waitingPrefillTokens": 0, "totalBlocks": 1000,
            "referencedBlocks": referenced, "cachedBlocks": 0, "freeBlocks": 1000 - referenced, "preemptions": 0,
            "finished": 0, "ttftP95Seconds": null, "itlP95Seconds": null, "prefillTokensPerSecond": null,
            "stalledSeconds": 0.0
        }))
        .unwrap();
        report.steps = (ordinal >= world.untold).then(StepReport::default);
        let pod = ObservedPod {
            name: format!("chat-0a-{ordinal}"),
            uid: ordinal.to_string(),
            revision: "0a".into(),
            ordinal: 0,
            resource_version: String::new(),
            created: Timestamp::UNIX_EPOCH,
            stage: Stage::Serving,
            lost: false,
            gone_by: None,
            node: None,
            needs: Needs::default(),
        };
        if ordinal >= world.silent {
            world.readings.hear(&pod.uid, Answer::Report(&report), "0a", now);
        }
        let reading = world.readings.at(&pod.uid, now);
        Replica { pod, reading, intent: None }
    }

    #[test]
    fn a_deployment_without_load_writes_its_status_once() {
        let mut world = World::new(1);
        let mut scaler = world.scaler();
        let writes: Vec<i64> = (0..600).filter(|_| world.tick(&mut scaler, 0)).collect();
        assert_eq!(writes, [0, 1], "the first says who decides, the second what");
    }

    #[test]
    fn steady_load_is_written_every_five_minutes() {
        let mut world = World::new(4);
        let mut scaler = world.scaler();
        let writes = world.ticks(&mut scaler, 600, 700);
        assert!(writes <= 8, "{writes} writes in twenty minutes");
    }

    #[test]
    fn a_killed_operator_goes_on_with_the_number_it_had_written_down() {
        let mut world = World::new(2);
        let mut scaler = world.scaler();
        world.ticks(&mut scaler, 5, 900);
        let before = world.desired();
        assert!(before > 2);
        // Another process, with load that would let replicas go: the higher number was needed until now.
        let mut successor = world.scaler();
        assert_eq!(successor.state.desired, before);
        world.tick(&mut successor, 0);
        assert_eq!(world.desired(), before);
        world.ticks(&mut successor, 20, 0);
        assert_eq!(world.desired(), 1);
    }

    #[test]
    fn a_killed_operator_goes_on_at_zero_with_what_was_learned() {
        let mut world = World::new(1);
        world.spec.to_zero = Some(ToZero { after_seconds: 10, max_wake_seconds: 40 });
        let mut scaler = world.scaler();
        world.ticks(&mut scaler, 12, 0);
        assert_eq!(world.desired(), 0);
        let mut successor = world.scaler();
        assert_eq!(successor.state.learned.start_seconds, Some(5.0));
        world.ticks(&mut successor, 30, 0);
        assert_eq!(world.ticks(&mut successor, 100, 0), 0, "at zero nothing is written");
        world.held = Held::by_all(3);
        world.tick(&mut successor, 0);
        let section = world.status.scaling.as_ref().unwrap();
        assert_eq!((section.desired, section.held), (1, 3));
        world.held = Held::by_all(0);
        world.ticks(&mut successor, 3, 0);
        assert_eq!(world.status.scaling.as_ref().unwrap().held, 0, "one serves");
    }

    #[test]
    fn who_stands_by_is_looked_at_where_it_is_asked_for_and_the_time_of_warm_starts_outlives_the_operator() {
        let mut world = World::new(2);
        world.status.standby = Some(StandbyStatus { wanted: 2, ready: 1, ..StandbyStatus::default() });
        world.warm_start_seconds = Some(1.5);
        let mut scaler = world.scaler();
        assert_eq!(world.latest(&mut scaler).record.signals.standby, None);
        world.spec.standby = 2;
        let seen = Standby { nodes: 1, start_seconds: Some(1.5) };
        assert_eq!(world.latest(&mut scaler).record.signals.standby, Some(seen));
        world.ticks(&mut scaler, 200, 500);
        world.warm_start_seconds = None;
        world.status.standby = None;
        let mut successor = world.scaler();
        let remembered = Standby { nodes: 0, ..seen };
        assert_eq!(world.latest(&mut successor).record.signals.standby, Some(remembered));
    }

    #[test]
    fn without_a_gateway_the_last_replica_stays_and_the_condition_says_what_to_do() {
        let mut world = World::new(1);
        world.spec.to_zero = Some(ToZero { after_seconds: 10, max_wake_seconds: 40 });
        world.held = Held::default();
        let mut scaler = world.scaler();
        let latest = (0..100).map(|_| world.latest(&mut scaler)).last().unwrap();
        assert_eq!(world.desired(), 1);
        let section = world.status.scaling.as_ref().unwrap();
        let Verdict { value, trouble } = scaling_verdict(section, &world.spec, Some(&latest.record));
        assert_eq!((value, trouble.reason.as_str()), (false, "NoGateway"));
        assert!(trouble.message.contains("gateway.enabled=true"), "{}", trouble.message);
    }

    #[test]
    fn an_idle_replica_that_would_be_too_long_in_coming_back_stays_and_the_condition_has_the_numbers() {
        let mut world = World::new(1);
        world.spec.to_zero = Some(ToZero { after_seconds: 10, max_wake_seconds: 4 });
        world.held = Held::by_all(0);
        let mut scaler = world.scaler();
        let latest = (0..100).map(|_| world.latest(&mut scaler)).last().unwrap();
        assert_eq!(world.desired(), 1);
        let section = world.status.scaling.as_ref().unwrap();
        let Verdict { value, trouble } = scaling_verdict(section, &world.spec, Some(&latest.record));
        assert_eq!((value, trouble.reason.as_str()), (true, "SlowWake"));
        for words in ["takes 5 s to come back", "maxWakeSeconds is 4", "gateway.holdSeconds", "scaling.standby"] {
            assert!(trouble.message.contains(words), "{}", trouble.message);
        }
    }

    #[test]
    fn a_silent_replica_shows_within_three_ticks_and_nothing_goes_down() {
        let mut world = World::new(3);
        let mut scaler = world.scaler();
        world.ticks(&mut scaler, 3, 700);
        world.silent = 1;
        world.ticks(&mut scaler, 3, 0);
        assert_eq!((scaler.coverage.fresh, scaler.coverage.serving), (2, 3));
        world.ticks(&mut scaler, 100, 0);
        assert_eq!(world.desired(), 3);
        world.silent = 0;
        let ticks = (0..100)
            .take_while(|_| !{
                world.tick(&mut scaler, 0);
                scaler.coverage.is_complete()
            })
            .count();
        assert!((14..=16).contains(&ticks), "healthy again after {ticks} ticks");
    }

    #[test]
    fn an_older_agent_is_named_and_hinders_nothing() {
        let mut world = World::new(3);
        let mut scaler = world.scaler();
        world.untold = 1;
        world.ticks(&mut scaler, 3, 700);
        let said = |scaler: &Scaler| {
            let Verdict { value, trouble } = metrics_healthy(&scaler.coverage);
            (value, trouble.reason, trouble.message)
        };
        let costs = "1 of 3 replicas does not say what its steps cost (an older agent: chat-0a-0): replicas are reckoned from totals";
        let expected = format!("3 of 3 serving replicas fresh; {costs}");
        assert_eq!(said(&scaler), (true, "CostsUntold".to_owned(), expected));
        world.untold = 0;
        world.ticks(&mut scaler, 30, 0);
        assert_eq!(said(&scaler), (true, "AllFresh".to_owned(), "1 of 1 serving replica fresh".to_owned()));
    }

    #[test]
    fn a_process_that_was_replaced_between_two_ticks_was_out_of_sight() {
        let mut world = World::new(2);
        let mut scaler = world.scaler();
        world.ticks(&mut scaler, 3, 700);
        world.start_id = "b";
        world.tick(&mut scaler, 0);
        assert_eq!((scaler.coverage.fresh, scaler.coverage.serving), (0, 2));
        assert_eq!(world.desired(), 2);
    }

    #[test]
    fn a_new_revision_forgets_the_speed_of_the_old_one_and_keeps_the_number() {
        let mut world = World::new(2);
        let mut scaler = world.scaler();
        world.tick(&mut scaler, 700);
        scaler.state.law = serde_json::from_value(json!({
            "weight": 1.0, "kv": 0.5, "residence": 4.0, "kvKv": 0.25, "kvResidence": 2.0, "chance": 0.0, "learnedMs": START_MS
        }))
        .unwrap();
        let desired = scaler.state.desired;
        world.status.revision = "0b".into();
        scaler.turn(&world.scene(&[], world.now()));
        assert_eq!((scaler.state.law, scaler.state.desired), (ServiceLaw::default(), desired));
    }

    #[test]
    fn the_section_stays_small_however_often_the_number_changes() {
        let mut world = World::new(2);
        let mut scaler = world.scaler();
        for round in 0..200 {
            world.tick(&mut scaler, if round % 20 < 4 { 990 } else { 0 });
        }
        let section = world.status.scaling.as_ref().unwrap();
        assert_eq!(section.decisions.len(), DECISIONS_KEPT);
        let bytes = serde_json::to_string(section).unwrap().len();
        assert!(bytes < 5 * 1024, "{bytes} bytes");
    }
}
