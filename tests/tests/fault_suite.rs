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
use k8s_openapi::{
    api::core::v1::{ConfigMap, Pod, Service},
    apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
};
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, Patch, PatchParams, PostParams},
};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use serde_json::{Value, json};
use stoker_cluster::{Audit, ControlPlaneOptions, Controllers, NodeOptions};
use stoker_crds::crd::crd;
use stoker_operator::validate::{Defaults, validate};
use stoker_tests::{
    crds,
    faults::{Fault, FaultProxy},
    operator::{AGENT_IMAGE, NAMESPACE, Operator, Rig, condition},
    wall_clock::WallClock,
};

use self::fields::{another, fields, objects, schema_of_spec, take_out};

#[path = "../../operator/tests/fields/mod.rs"]
mod fields;

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
/// Fields that an older CRD lacks: those that no object of here has, and those without which no status can be written or what is in every
/// spec is neither read nor kept.
const LATER: [&str; 8] = [
    "/spec/pod",
    "/spec/engine/itlTargetMs",
    "/status/budget",
    "/status/standby",
    "/status/rollout",
    "/status/readyOfWanted",
    "/spec/engine/maxNumSeqs",
    "/spec/drain",
];

/// What a user does.
#[derive(Clone, Copy, Debug, PartialEq)]
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

/// What a user does with a field.
#[derive(Clone, Copy, Debug)]
enum Edit {
    /// It has a value.
    Set,
    /// It has another.
    Change,
    TakeOut,
    /// It has a value of another type, which is refused.
    Mistype,
    /// There is another field beside it, which is refused.
    Misname,
}

const ALL_EDITS: [Edit; 5] = [Edit::Set, Edit::Change, Edit::TakeOut, Edit::Mistype, Edit::Misname];
const MISNAMED: &str = "misnamed";

/// A spec with an edited field.
struct Edited {
    edit: Edit,
    field: String,
    spec: Value,
}

impl Edited {
    /// A field of the schema, as it is in an object that has many, alone or with all that it stands among.
    fn draw(spec: &Value, random: &mut StdRng) -> Self {
        let samples = objects();
        let sample = &samples[random.random_range(0..samples.len())];
        let all = fields(&schema_of_spec(crd()), "");
        let all: Vec<String> = all.into_iter().filter(|field| sample.pointer(field).is_some()).collect();
        let field = all[random.random_range(0..all.len())].clone();
        let (edit, section) = (ALL_EDITS[random.random_range(0..ALL_EDITS.len())], section(&field));
        let (mut spec, value) = (spec.clone(), sample.pointer(&field).unwrap());
        if section == "scaling" || random.random_bool(0.5) {
            spec[section] = sample[section].clone();
        } else {
            set(&mut spec, &field, value.clone());
        }
        if section == "scaling" {
            take_out(&mut spec, "/replicas");
        }
        match edit {
            Edit::Set => {}
            Edit::Change => another(value).into_iter().for_each(|value| set(&mut spec, &field, value)),
            Edit::TakeOut => take_out(&mut spec, &field),
            Edit::Mistype => {
                let mistyped = if value.is_string() { true.into() } else { Value::from("mistyped") };
                set(&mut spec, &field, mistyped);
            }
            Edit::Misname => {
                let beside = field.rsplit_once('/').unwrap().0;
                set(&mut spec, &format!("{beside}/{MISNAMED}"), true.into());
            }
        }
        Self { edit, field, spec }
    }

    /// What became of it: stored as it was sent, or refused in words that name what was sent.
    fn is_answered_by(&self, answer: Result<Value, kube::Error>) -> Result<()> {
        let Self { edit, field, spec } = self;
        let named = match edit {
            Edit::Misname => MISNAMED,
            Edit::Mistype => field.rsplit('/').next().unwrap(),
            Edit::Set | Edit::Change | Edit::TakeOut => section(field),
        };
        match (answer, edit) {
            (Ok(stored), Edit::Set | Edit::Change | Edit::TakeOut) => {
                let sent = as_stored(spec.clone());
                ensure!(as_stored(stored.clone()) == sent, "{edit:?} of {field}: {sent} was stored as {stored}");
            }
            (Ok(stored), Edit::Mistype | Edit::Misname) => anyhow::bail!("{edit:?} of {field} was stored as {stored}"),
            (Err(kube::Error::Api(refusal)), _) => {
                ensure!(refusal.message.contains(named), "{edit:?} of {field}: {named} is not in {}", refusal.message);
            }
            (Err(error), _) => return Err(error.into()),
        }
        Ok(())
    }
}

/// With whole numbers as they are told: the API server knows no others.
fn as_stored(value: Value) -> Value {
    match value {
        Value::Number(number) => {
            let whole = number.as_f64().filter(|number| number.fract() == 0.0);
            whole.map_or(Value::Number(number), |whole| (whole as i64).into())
        }
        Value::Array(items) => items.into_iter().map(as_stored).collect(),
        Value::Object(fields) => fields.into_iter().map(|(name, value)| (name, as_stored(value))).collect(),
        Value::Null | Value::Bool(_) | Value::String(_) => value,
    }
}

/// The field of a spec that this one is a part of.
fn section(field: &str) -> &str {
    field.split('/').nth(1).unwrap()
}

/// Sets a field, and what it is a part of.
fn set(spec: &mut Value, field: &str, value: Value) {
    *field.split('/').skip(1).fold(spec, |spec, name| &mut spec[name]) = value;
}

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

    /// Its user edits a field, until the next act.
    fn edit(&mut self, rig: &Rig, proxy: &FaultProxy) -> Result<()> {
        let edited = Edited::draw(&self.spec, &mut self.random);
        proxy.note_fault();
        edited.is_answered_by(rig.try_apply(&self.name, edited.spec.clone()))
    }

    /// What is stored is looked at, and what cannot be deployed is called so.
    fn is_surfaced(&self, rig: &Rig) -> Result<bool> {
        let deployment = rig.get(&self.name)?;
        let defaults = Defaults { agent_image: AGENT_IMAGE.to_owned(), ..Defaults::default() };
        let is_invalid = validate(&deployment, &defaults).is_err();
        let is_seen =
            deployment.status.as_ref().and_then(|status| status.observed_generation) == deployment.metadata.generation;
        let is_told = condition(&deployment, "Ready").is_some_and(|(_, reason, _)| reason == "InvalidSpec");
        Ok(is_seen && (is_told || !is_invalid))
    }

    /// Its agents and its spec are as they should be again.
    fn calm(&self, rig: &Rig, fault: Fault) -> Result<()> {
        match fault {
            Fault::Agents => {
                for pod in rig.pods(&self.name)? {
                    befall(rig, &pod, Trouble::GoesOn);
                    befall(rig, &pod, Trouble::Answers("none"));
                }
            }
            Fault::Fields => rig.apply(&self.name, self.spec.clone())?,
            // What was read and written without a field lacks it until somebody says it again.
            Fault::Crd => {
                _ = rig.wait("the present CRD is in force", SETTLED_WITHIN, |rig| {
                    rig.apply(&self.name, self.spec.clone()).map(|()| true)
                })?
            }
            _ => {}
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
    /// The CRD.
    Crd {
        is_older: bool,
    },
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
            Fault::Crd => Self::Crd { is_older: false },
            _ => Self::Nothing,
        })
    }

    /// Something befalls one of them, or is over.
    fn befall(&mut self, rig: &mut Rig, proxy: &FaultProxy, random: &mut StdRng) -> Result<()> {
        match self {
            Self::Nothing | Self::Crd { .. } => return Ok(()),
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

    /// Whoever leads is frozen for so long that somebody else does; a node is silent for so long that it counts as lost; the CRD is older
    /// until the next time.
    fn outlast(&mut self, rig: &mut Rig, proxy: &FaultProxy, random: &mut StdRng) -> Result<()> {
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
            Self::Crd { is_older } => {
                *is_older = !*is_older;
                proxy.note_fault();
                let lacks = LATER[random.random_range(0..LATER.len())];
                if *is_older { install(rig, &crds::before(&crd(), lacks)) } else { install(rig, &crd()) }
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
            Self::Crd { is_older } => {
                *is_older = false;
                install(rig, &crd())
            }
        }
    }

    /// Who ended because somebody else leads stands by again.
    fn revive(&mut self) -> Result<()> {
        if let Self::Second(second) = self { second.restart() } else { Ok(()) }
    }
}

/// Puts a CRD in the place of the one that is there, as an upgrade does.
fn install(rig: &Rig, crd: &CustomResourceDefinition) -> Result<()> {
    let api = Api::<CustomResourceDefinition>::all(rig.client());
    let mut next = crd.clone();
    // Its status is written meanwhile.
    rig.wait("the CRD is replaced", SETTLED_WITHIN, |rig| {
        next.metadata.resource_version = rig.block_on(api.get(&crd.name_any()))?.resource_version();
        Ok(rig.block_on(api.replace(&crd.name_any(), &PostParams::default(), &next)).is_ok())
    })?;
    Ok(())
}

/// A user whose CRD is older, or is being replaced, is told so.
fn is_of_older_crd(error: &anyhow::Error) -> bool {
    let told = format!("{error:#}");
    ["not declared in schema", "unknown field", "could not find the requested resource", "not found"]
        .iter()
        .any(|words| told.contains(words))
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
            match life.act(rig) {
                Err(error) if fault == Fault::Crd && is_of_older_crd(&error) => {}
                acted => acted?,
            }
            if fault == Fault::Fields {
                life.edit(rig, proxy)?;
            }
            sleep(Duration::from_millis(random.random_range(0..120)));
        }
        sleep(Duration::from_millis(random.random_range(0..1500)));
        for life in lives.iter().filter(|_| fault == Fault::Fields) {
            rig.wait(&format!("{} is looked at", life.name), SETTLED_WITHIN, |rig| life.is_surfaced(rig))?;
        }
        if act % 3 == 2 {
            around.outlast(rig, proxy, &mut random)?;
        }
    }
    proxy.end();
    around.calm(rig)?;
    lives.iter().try_for_each(|life| life.calm(rig, fault))?;
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
fn fields_that_are_changed_taken_out_and_put_back_mistyped_and_misnamed() {
    suffer(Fault::Fields);
}

#[test]
fn a_crd_that_is_older_for_a_while_and_upgraded_under_stored_objects() {
    suffer(Fault::Crd);
}

#[test]
fn agents_that_lie_freeze_die_and_answer_late_half_or_for_others() {
    suffer(Fault::Agents);
}
