//! Whatever goes wrong between the operator and the API server, or between the operator and agents, while users change their minds: the same end as without
//! faults, and no write on the way that may not be. `make faults` runs more seeds; docs/faults.md has the table.
//!
//! Deployments of a batch live beside each other under one operator; each is a seed of its own.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::{
    process::Command,
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use k8s_openapi::api::core::v1::{ConfigMap, Pod, Service};
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, Patch, PatchParams},
};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use serde_json::{Value, json};
use stoker_cluster::{Audit, ControlPlaneOptions, Controllers, NodeOptions};
use stoker_tests::{
    faults::{Fault, FaultProxy},
    operator::{NAMESPACE, Operator, Rig},
    wall_clock::WallClock,
};

/// Deployments beside each other.
const BATCH: usize = 40;
/// Things that a user does to each of them.
const ACTS: usize = 6;
const SETTLED_WITHIN: Duration = Duration::from_secs(120);
/// Without faults nothing is written for so long.
const QUIET: Duration = Duration::from_secs(2);
/// Longer than a Lease lasts without its holder, and than a silent node counts as there.
const LEASE_OVER: Duration = Duration::from_secs(18);
const NODE_GRACE: Duration = Duration::from_secs(12);
const HEARTBEAT: Duration = Duration::from_secs(3);
const YEAR: i64 = 8766 * 3600;

/// What a user does.
#[derive(Clone, Copy, Debug)]
enum Act {
    Change,
    /// Three changes at once, the last is as before the first.
    ChangeAndReturn,
    Scale,
    DeletePod,
    DeleteChildren,
    EditService,
    TakeAnnotation,
    MakeAnew,
}

const ALL_ACTS: [Act; 8] = [
    Act::Change,
    Act::ChangeAndReturn,
    Act::Scale,
    Act::DeletePod,
    Act::DeleteChildren,
    Act::EditService,
    Act::TakeAnnotation,
    Act::MakeAnew,
];

/// What an agent does wrong.
#[derive(Clone, Copy, Debug)]
enum Trouble {
    /// It lies about its load or answers badly, as the stand-in calls it.
    Answers(&'static str),
    Freezes,
    GoesOn,
    Dies,
}

const ALL_TROUBLES: [Trouble; 14] = [
    Trouble::Answers("html"),
    Trouble::Answers("nan"),
    Trouble::Answers("negative"),
    Trouble::Answers("repeated"),
    Trouble::Answers("revision"),
    Trouble::Answers("other"),
    Trouble::Answers("late"),
    Trouble::Answers("slow"),
    Trouble::Answers("cut"),
    Trouble::Answers("deaf"),
    Trouble::Answers("none"),
    Trouble::Freezes,
    Trouble::GoesOn,
    Trouble::Dies,
];

/// One deployment and what its user wants last.
struct Life {
    name: String,
    spec: Value,
    random: StdRng,
}

impl Life {
    fn new(fault: Fault, seed: u64) -> Self {
        let name = format!("{}-{seed}", format!("{fault:?}").to_lowercase());
        let mut life = Self { name, spec: Value::Null, random: StdRng::seed_from_u64(seed) };
        life.spec = life.draw();
        life
    }

    fn draw(&mut self) -> Value {
        json!({
            "model": {"source": "builtin://ember"},
            "replicas": self.random.random_range(0..3),
            "drain": {"withdrawSeconds": self.random.random_range(0..2), "deadlineSeconds": 5},
            "engine": {"maxNumSeqs": self.random.random_range(1..4)},
        })
    }

    fn act(&mut self, rig: &Rig) -> Result<()> {
        let act = ALL_ACTS[self.random.random_range(0..ALL_ACTS.len())];
        let name = self.name.clone();
        match act {
            Act::Change => self.spec = self.draw(),
            Act::ChangeAndReturn => {
                let (first, second) = (self.draw(), self.draw());
                rig.apply(&name, first)?;
                rig.apply(&name, second)?;
            }
            Act::Scale => self.spec["replicas"] = self.random.random_range(0..3).into(),
            Act::DeletePod => {
                for pod in rig.pods(&name)?.into_iter().take(1) {
                    // It may be gone since.
                    let _ = rig.delete_pod(&pod.name_any());
                }
            }
            Act::DeleteChildren => {
                let _ = rig.block_on(rig.api::<Service>().delete(&name, &DeleteParams::default()));
                for map in rig.config_maps(&name)? {
                    let _ = rig.block_on(rig.api::<ConfigMap>().delete(&map.name_any(), &DeleteParams::default()));
                }
            }
            Act::EditService => {
                let patch = json!({"spec": {"selector": {"edited": "by-hand"}}});
                let _ = rig.block_on(rig.api::<Service>().patch(&name, &PatchParams::default(), &Patch::Merge(patch)));
            }
            Act::TakeAnnotation => self.take_annotations(rig)?,
            Act::MakeAnew => rig.delete(&name)?,
        }
        rig.apply(&name, self.spec.clone())
    }

    /// Something else befalls each of its agents.
    fn trouble(&mut self, rig: &Rig, proxy: &FaultProxy) -> Result<()> {
        for pod in rig.pods(&self.name)? {
            let trouble = ALL_TROUBLES[self.random.random_range(0..ALL_TROUBLES.len())];
            proxy.note_fault();
            befall(rig, &pod, trouble);
        }
        Ok(())
    }

    /// Its agents are as agents should be again.
    fn calm(&self, rig: &Rig) -> Result<()> {
        for pod in rig.pods(&self.name)? {
            befall(rig, &pod, Trouble::GoesOn);
            befall(rig, &pod, Trouble::Answers("none"));
        }
        Ok(())
    }

    fn take_annotations(&self, rig: &Rig) -> Result<()> {
        let api: Api<Pod> = rig.api();
        for pod in rig.pods(&self.name)? {
            let patch = Patch::Merge(json!({"metadata": {"annotations": {"stoker.dev/intent": null}}}));
            let _ = rig.block_on(api.patch(&pod.name_any(), &PatchParams::default(), &patch));
        }
        Ok(())
    }
}

/// What befalls operators themselves, and where pods run.
enum Around {
    Nothing,
    /// Another one that stands by.
    Second(Box<Operator>),
    Clock(WallClock),
    /// The only node there is.
    Node,
}

impl Around {
    /// What a fault needs beside the proxy.
    fn of(fault: Fault, rig: &mut Rig, proxy: &FaultProxy) -> Result<Self> {
        Ok(match fault {
            Fault::Paused => {
                let second = Operator::start_with(&rig.cluster.control_plane, proxy.kubeconfig())?;
                Self::Second(Box::new(second))
            }
            Fault::Clock => {
                let clock = WallClock::new()?;
                rig.operator.restart_in(&clock.environment())?;
                Self::Clock(clock)
            }
            Fault::Node => Self::Node,
            _ => Self::Nothing,
        })
    }

    /// Something befalls one of them, or is over.
    fn befall(&mut self, rig: &mut Rig, proxy: &FaultProxy, random: &mut StdRng) -> Result<()> {
        match self {
            Self::Nothing => return Ok(()),
            Self::Second(second) => {
                let one = if random.random_bool(0.5) { &mut rig.operator } else { second };
                let freezes = random.random_bool(0.5);
                match one.is_running() {
                    true if freezes => one.freeze()?,
                    true => one.thaw()?,
                    false => {}
                }
            }
            Self::Clock(clock) => clock.set(random.random_range(-10 * YEAR..10 * YEAR))?,
            Self::Node => match random.random_range(0..6) {
                0 => takes_pods(rig, false)?,
                1 => takes_pods(rig, true)?,
                2 => rig.cluster.node.fall_silent(),
                3 => rig.cluster.node.speak(),
                _ => return Ok(()),
            },
        }
        proxy.note_fault();
        Ok(())
    }

    /// Whoever leads is frozen for so long that somebody else does; a node is silent for so long that it counts as lost.
    fn outlast(&mut self, rig: &mut Rig, proxy: &FaultProxy) -> Result<()> {
        match self {
            Self::Nothing | Self::Clock(_) => Ok(()),
            Self::Second(second) => Self::outlast_lease(second, rig, proxy),
            Self::Node => {
                rig.cluster.node.fall_silent();
                proxy.note_fault();
                let is_lost = |rig: &Rig| Ok(rig.cluster.kubectl(&["get", "nodes"]).contains("NotReady"));
                rig.wait("the node counts as lost", SETTLED_WITHIN, is_lost)?;
                rig.cluster.node.speak();
                Ok(())
            }
        }
    }

    fn outlast_lease(second: &mut Operator, rig: &mut Rig, proxy: &FaultProxy) -> Result<()> {
        thaw([&mut rig.operator, second])?;
        rig.operator.restart()?;
        second.restart()?;
        rig.wait("somebody leads", SETTLED_WITHIN, |rig| Ok(rig.operator.leads() || second.leads()))?;
        let leader = if rig.operator.leads() { &rig.operator } else { &*second };
        leader.freeze()?;
        proxy.note_fault();
        sleep(LEASE_OVER);
        leader.thaw()
    }

    /// All is as it should be.
    fn calm(&mut self, rig: &mut Rig) -> Result<()> {
        match self {
            Self::Nothing => Ok(()),
            Self::Second(second) => thaw([&mut rig.operator, second]),
            Self::Clock(clock) => clock.set(0),
            Self::Node => {
                rig.cluster.node.speak();
                takes_pods(rig, true)
            }
        }
    }

    /// Who ended because somebody else leads stands by again.
    fn revive(&mut self) -> Result<()> {
        if let Self::Second(second) = self { second.restart() } else { Ok(()) }
    }
}

/// The scheduler may send pods to the node, or may not.
fn takes_pods(rig: &Rig, takes: bool) -> Result<()> {
    let said = rig.cluster.try_kubectl(&[if takes { "uncordon" } else { "cordon" }, rig.cluster.node.name()]);
    said.map(drop).map_err(anyhow::Error::msg)
}

/// Those that have not ended go on.
fn thaw(operators: [&mut Operator; 2]) -> Result<()> {
    operators.into_iter().filter_map(|one| one.is_running().then_some(one)).try_for_each(|one| one.thaw())
}

/// Lets it happen to a pod's agent, if there is one.
fn befall(rig: &Rig, pod: &Pod, trouble: Trouble) {
    let (node, name) = (&rig.cluster.node, pod.name_any());
    match (trouble, pod.status.as_ref().and_then(|status| status.pod_ip.as_ref())) {
        (Trouble::Answers(badly), Some(ip)) => {
            let url = format!("http://{ip}:8000/lie/{badly}");
            // One that is frozen or gone does not hear it.
            let _ = Command::new("curl").args(["-sS", "--max-time", "0.5", "-X", "POST", &url]).output();
        }
        (Trouble::Answers(_), None) => {}
        (Trouble::Freezes, _) => _ = node.freeze_pod(NAMESPACE, &name),
        (Trouble::Dies, _) => _ = node.kill_pod(NAMESPACE, &name),
        (Trouble::GoesOn, _) => {
            for pid in node.pids_of(NAMESPACE, &name) {
                let _ = Command::new("kill").args(["-s", "CONT", &pid.to_string()]).output();
            }
        }
    }
}

/// Lives of a batch under one fault, and what was seen.
fn batch(rig: &mut Rig, proxy: &FaultProxy, around: &mut Around, fault: Fault, seeds: &[u64]) -> Result<()> {
    let before = proxy.seen().faults;
    let mut lives: Vec<Life> = seeds.iter().map(|seed| Life::new(fault, *seed)).collect();
    let mut random = StdRng::seed_from_u64(seeds[0]);
    for life in &lives {
        rig.apply(&life.name, life.spec.clone())?;
    }
    for act in 0..ACTS {
        for life in &mut lives {
            revive(rig, proxy, fault)?;
            around.revive()?;
            around.befall(rig, proxy, &mut random)?;
            if fault == Fault::Agents {
                life.trouble(rig, proxy)?;
            }
            life.act(rig)?;
            sleep(Duration::from_millis(random.random_range(0..120)));
        }
        sleep(Duration::from_millis(random.random_range(0..1500)));
        if act % 3 == 2 {
            around.outlast(rig, proxy)?;
        }
    }
    proxy.end();
    around.calm(rig)?;
    lives.iter().filter(|_| fault == Fault::Agents).try_for_each(|life| life.calm(rig))?;
    for life in &lives {
        revive(rig, proxy, Fault::None)?;
        around.revive()?;
        rig.ends_as_asked(&life.name, &life.spec, SETTLED_WITHIN)?;
    }
    let seen = proxy.seen();
    ensure!(seen.violations.is_empty(), "{:?}", seen.violations);
    ensure!(seen.faults > before, "nothing went wrong: {fault:?}");
    rests(rig, proxy)?;
    lives.iter().try_for_each(|life| rig.delete(&life.name))
}

/// Starts the operator again if it was killed.
fn revive(rig: &mut Rig, proxy: &FaultProxy, fault: Fault) -> Result<()> {
    let was_running = rig.operator.is_running();
    rig.operator.restart()?;
    let pid = rig.operator.pid().unwrap_or_default();
    if fault != Fault::None && (!was_running || !proxy.aims_at(pid)) {
        proxy.begin(fault, pid);
    }
    Ok(())
}

/// Settled means that nothing is written any more.
fn rests(rig: &Rig, proxy: &FaultProxy) -> Result<()> {
    let mut before = proxy.seen().writes;
    rig.wait("the operator rests", SETTLED_WITHIN, |_| {
        let started = Instant::now();
        while started.elapsed() < QUIET {
            sleep(Duration::from_millis(100));
        }
        let writes = proxy.seen().writes;
        Ok(std::mem::replace(&mut before, writes) == writes)
    })?;
    Ok(())
}

fn number(variable: &str, default: u64) -> u64 {
    std::env::var(variable).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

/// Where it befalls: nodes are given up within seconds where that is it.
fn rig_of(fault: Fault) -> Result<Rig> {
    if fault != Fault::Node {
        return Rig::start(Audit::Off);
    }
    let controllers = Controllers::All { node_grace: NODE_GRACE };
    let options = ControlPlaneOptions { controllers, ..ControlPlaneOptions::default() };
    Rig::start_with(options, NodeOptions { heartbeat: HEARTBEAT, ..NodeOptions::default() })
}

/// Runs so many seeds of one fault, in batches.
fn suffer(fault: Fault) {
    let (first, count) = (number("STOKER_TEST_SEED", 20_261_122), number("STOKER_FAULT_SEEDS", 4));
    println!("{fault:?}: STOKER_TEST_SEED={first} STOKER_FAULT_SEEDS={count}");
    let mut rig = rig_of(fault).unwrap();
    let proxy = FaultProxy::start(&rig.cluster.control_plane, first).unwrap();
    rig.operator = Operator::start_with(&rig.cluster.control_plane, proxy.kubeconfig()).unwrap();
    let mut around = Around::of(fault, &mut rig, &proxy).unwrap();
    let seeds: Vec<u64> = (first..first + count).collect();
    let started = Instant::now();
    for seeds in seeds.chunks(BATCH) {
        let ended = batch(&mut rig, &proxy, &mut around, fault, seeds);
        ended.unwrap_or_else(|error| panic!("{fault:?}, seeds {seeds:?}: {error:?}"));
    }
    let seen = proxy.seen();
    println!(
        "| {fault:?} | {count} | {} | {} | {} | {:.0} |",
        seen.faults,
        seen.writes,
        seen.violations.len(),
        started.elapsed().as_secs_f64()
    );
}

#[test]
fn a_crash_after_any_write() {
    suffer(Fault::CrashAfterWrite);
}

#[test]
fn a_crash_before_a_status_is_written() {
    suffer(Fault::CrashBeforeStatus);
}

#[test]
fn lists_that_are_older_than_the_cluster() {
    suffer(Fault::StaleList);
}

#[test]
fn events_that_are_missed() {
    suffer(Fault::MissedEvent);
}

#[test]
fn events_that_come_twice_and_in_another_order() {
    suffer(Fault::RepeatedEvent);
}

#[test]
fn requests_that_are_refused() {
    suffer(Fault::Refused);
}

#[test]
fn answers_that_are_lost_late_or_half() {
    suffer(Fault::LostAnswer);
}

#[test]
fn an_api_server_that_is_gone_for_seconds() {
    suffer(Fault::Gone);
}

#[test]
fn writes_that_a_quota_or_a_policy_forbids_for_seconds() {
    suffer(Fault::Denied);
}

#[test]
fn two_operators_of_which_one_is_frozen() {
    suffer(Fault::Paused);
}

#[test]
fn a_wall_clock_that_is_set_ahead_and_back() {
    suffer(Fault::Clock);
}

#[test]
fn a_node_that_takes_no_pods_falls_silent_and_counts_as_lost() {
    suffer(Fault::Node);
}

#[test]
fn agents_that_lie_freeze_die_and_answer_late_half_or_for_others() {
    suffer(Fault::Agents);
}
