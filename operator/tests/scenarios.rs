//! Scenarios: a spec and pods in YAML in, the plan and the conditions as text out. `tests/scenarios/NAME.yaml` is the
//! question, `NAME.txt` the answer; `UPDATE_GOLDENS=1` writes answers, which a commit then has to explain.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::{collections::BTreeMap, fs, path::Path, sync::Arc};

use jiff::Timestamp;
use serde::Deserialize;
use serde_json::{Value, json};
use stoker_crds::{
    InferenceDeployment,
    contract::{AgentPhase, LoadReport},
    intent::Want,
    nodes::GpuName,
};
use stoker_operator::{
    apply::Applied,
    desired::{Desired, desired},
    lint,
    observe::{Child, Holder, Observed},
    plan::{self, Plan},
    status::{Round, status_of},
    validate::{Defaults, ValidatedDeployment, validate},
};
use stoker_replica::{Intent, Needs, ObservedPod, Reading, Replica, Stage, Trouble};

/// Number of the intent of pods that drain.
const DRAIN: u64 = 1;
/// How a scenario writes the revision that its spec renders to.
const CURRENT: &str = "current";

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Scenario {
    now: Timestamp,
    spec: Value,
    #[serde(default)]
    pods: Vec<Pod>,
    /// Pods without their labels.
    #[serde(default)]
    strays: Vec<String>,
    #[serde(default)]
    children: Children,
}

#[derive(Default, Deserialize, PartialEq)]
#[serde(rename_all = "camelCase")]
enum Children {
    #[default]
    Present,
    Absent,
    TakenByOthers,
    /// Somebody added a label to the Service's selector.
    SelectorEdited,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Pod {
    name: String,
    stage: String,
    reason: Option<String>,
    message: Option<String>,
    since: Option<Timestamp>,
    created: Option<Timestamp>,
    drain_started: Option<Timestamp>,
    load: Option<Said>,
    #[serde(default)]
    cpu: Option<String>,
    /// Devices that it claims, by their class.
    #[serde(default)]
    claims: BTreeMap<String, String>,
}

fn long_ago() -> u64 {
    3600
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Said {
    phase: Option<AgentPhase>,
    #[serde(default)]
    running: u32,
    #[serde(default)]
    referenced: u32,
    /// Number of the order that its agent took last. Default: that of the drain, or none.
    intent: Option<u64>,
    #[serde(default = "long_ago")]
    up_seconds: u64,
    error: Option<String>,
    missing: Option<String>,
}

#[test]
fn every_scenario_gets_its_answer() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/scenarios");
    let files = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut questions: Vec<_> = files.filter(|path| path.extension().is_some_and(|end| end == "yaml")).collect();
    questions.sort();
    assert!(!questions.is_empty());
    let wrong: Vec<String> = questions.iter().filter_map(|question| complaint(question)).collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

fn complaint(question: &Path) -> Option<String> {
    let name = question.display();
    let scenario: Scenario = serde_norway::from_str(&fs::read_to_string(question).unwrap())
        .unwrap_or_else(|error| panic!("{name}: {error}"));
    let answer = answer(&scenario);
    let golden = question.with_extension("txt");
    if std::env::var_os("UPDATE_GOLDENS").is_some() {
        fs::write(&golden, &answer).unwrap();
    }
    let expected = fs::read_to_string(&golden).unwrap_or_default();
    (answer != expected).then(|| format!("{name}\nexpected:\n{expected}\nanswered:\n{answer}"))
}

fn answer(scenario: &Scenario) -> String {
    let deployment = deployment(&scenario.spec);
    let valid = validate(&deployment, &Defaults { agent_image: "agent:1".into(), ..Defaults::default() }).unwrap();
    let desired = desired(&valid, "");
    let observed = observed(scenario, deployment, &desired);
    let plan = plan::plan(&valid, &desired, &observed, scenario.now);
    let wanted = plan::wanted(&valid, &desired, &observed);
    let violations = lint::check(&plan, &wanted, &observed.replicas, scenario.now);
    assert!(violations.is_empty(), "{violations:?}");
    let conditions = conditions(&valid, &desired, &observed, &plan, scenario.now);
    format!("{plan}---\n{conditions}").replace(&desired.revision, CURRENT)
}

fn conditions(
    deployment: &ValidatedDeployment,
    desired: &Desired,
    observed: &Observed,
    plan: &Plan,
    now: Timestamp,
) -> String {
    let applied = Applied::default();
    let status = status_of(
        &Round {
            deployment,
            desired,
            observed,
            plan,
            applied: &applied,
            decision: None,
            finding: None,
            fit: None,
            granted: None,
        },
        now,
    )
    .status;
    let lines = status.conditions.iter().map(|condition| {
        let (type_, value, reason) = (&condition.type_, &condition.status, &condition.reason);
        format!("{type_}={value} {reason}: {}\n", condition.message)
    });
    lines.collect()
}

fn deployment(spec: &Value) -> InferenceDeployment {
    let object = json!({
        "apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceDeployment", "spec": spec,
        "metadata": {"name": "chat", "namespace": "default", "uid": "uid-chat", "generation": 1, "resourceVersion": "1"},
    });
    serde_json::from_value(object).unwrap()
}

fn observed(scenario: &Scenario, deployment: InferenceDeployment, desired: &Desired) -> Observed {
    let maps = || [&desired.config_map, &desired.keys].map(|map| Child::Own(Arc::new(map.clone()))).into();
    let budget = match scenario.children {
        Children::Absent => Child::Absent,
        Children::Present | Children::SelectorEdited => Child::Own(Arc::new(desired.budget.clone())),
        Children::TakenByOthers => Child::Foreign { name: "chat".into(), holder: Holder::Other },
    };
    let (service, config_maps) = match scenario.children {
        Children::Absent => (Child::Absent, Vec::new()),
        Children::Present => (Child::Own(Arc::new(desired.service.clone())), maps()),
        Children::SelectorEdited => {
            let mut service = desired.service.clone();
            let selector = service.spec.as_mut().and_then(|spec| spec.selector.as_mut()).unwrap();
            selector.insert("edited".into(), "by-hand".into());
            (Child::Own(Arc::new(service)), maps())
        }
        Children::TakenByOthers => (Child::Foreign { name: "chat".into(), holder: Holder::Other }, Vec::new()),
    };
    let replicas = scenario.pods.iter().map(|pod| replica(pod, desired)).collect();
    let strays: Vec<String> = scenario.strays.iter().map(|name| full_name(name, desired)).collect();
    let foreign_pods = strays.iter().cloned().collect();
    Observed { replicas, foreign_pods, strays, service, config_maps, budget, ..Observed::of(Arc::new(deployment)) }
}

/// The whole name of a pod that a scenario calls `current-0` or `REVISION-0`.
fn full_name(name: &str, desired: &Desired) -> String {
    format!("chat-{}", name.replace(CURRENT, &desired.revision))
}

/// A pod named `current-0` or `REVISION-0`.
fn replica(pod: &Pod, desired: &Desired) -> Replica {
    let (revision, ordinal) = pod.name.split_once('-').unwrap();
    let revision = if revision == CURRENT { &desired.revision } else { revision };
    let intent = pod.drain_started.map(|since| Intent { number: DRAIN, want: Want::Drain(Default::default()), since });
    let reading = pod.load.as_ref().map(|said| load(said, pod.drain_started.map(|_| DRAIN)));
    let pod = ObservedPod {
        name: full_name(&pod.name, desired),
        uid: format!("uid-{}", pod.name),
        revision: revision.to_owned(),
        ordinal: ordinal.parse().unwrap(),
        resource_version: "1".into(),
        created: pod.created.unwrap_or_default(),
        stage: stage(pod),
        lost: false,
        gone_by: None,
        node: None,
        needs: needs(pod),
    };
    Replica { pod, reading: reading.unwrap_or_default(), intent }
}

fn needs(pod: &Pod) -> Needs {
    let cpu = pod.cpu.iter().map(|cpu| ("cpu".to_owned(), cpu.clone()));
    let claimed = pod.claims.iter().map(|(class, count)| (GpuName::Class(class).counted_as(), count.clone()));
    Needs { requests: cpu.chain(claimed).collect(), ..Needs::default() }
}

fn stage(pod: &Pod) -> Stage {
    let trouble = Trouble::new(pod.reason.clone().unwrap_or_default(), pod.message.clone().unwrap_or_default());
    let since = pod.since.unwrap_or_default();
    match pod.stage.as_str() {
        "unscheduled" => Stage::Unscheduled { trouble, since },
        "preparing" => Stage::Preparing { trouble, since },
        "blocked" => Stage::Blocked(trouble),
        "starting" => Stage::Starting,
        "serving" => Stage::Serving,
        "faltering" => Stage::Faltering { trouble, since },
        "finished" => Stage::Finished { trouble, since },
        "leaving" => Stage::Leaving,
        other => panic!("{}: no stage {other}", pod.name),
    }
}

fn load(reading: &Said, told: Option<u64>) -> Reading {
    if reading.missing.is_some() {
        return Reading::missing();
    }
    Reading::of(&LoadReport {
        phase: reading.phase.unwrap_or(AgentPhase::Ready),
        intent: reading.intent.or(told).filter(|number| *number > 0),
        up_ms: reading.up_seconds * 1000,
        error: reading.error.clone(),
        running: reading.running,
        referenced_blocks: reading.referenced,
        free_blocks: 1000 - reading.referenced,
        ..LoadReport::idle(1000)
    })
}
