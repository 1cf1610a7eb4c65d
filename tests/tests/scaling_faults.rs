//! Agents that die, freeze or lie: nothing goes down, and the status says within three ticks that it cannot see. Each
//! deployment has two replicas where one would do; in most of them one agent is broken. Stand-ins lie; real agents
//! are killed and frozen too. One that crashes without end is given up.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::{
    collections::BTreeMap,
    process::Command,
    thread::sleep,
    time::{Duration, Instant},
};

use kube::ResourceExt;
use serde_json::{Value, json};
use stoker_cluster::Audit;
use stoker_scaling::explain;
use stoker_tests::{
    agent,
    operator::{AGENT_IMAGE, NAMESPACE, Rig, condition, serves},
};

const SOON: Duration = Duration::from_secs(90);
/// Three ticks of two seconds, and the time to write the status and to look at it.
const SAID_WITHIN: Duration = Duration::from_millis(3 * 2000 + 1500);
/// Windows, stabilisation and a drain of the one that may go, several times over.
const WATCHED: Duration = Duration::from_secs(30);
/// The image with the real agent.
const REAL_IMAGE: &str = "real/agent:1";
/// Each with what is said of it.
const LIES: [(&str, &str); 8] = [
    ("html", "answered something that is no load report"),
    ("nan", "answered something that is no load report"),
    ("negative", "reported a negative or endless number"),
    ("repeated", "repeated an answer of before"),
    ("revision", "runs another revision than its pod"),
    ("falling", "reported costs of steps that cannot be"),
    ("endless", "answered something that is no load report"),
    ("forgets", "reported a counter that went back"),
];
/// Nothing is wrong with these: a clock that jumps is no reason to doubt what an agent says.
const FINE: [&str; 2] = ["healthy", "clock"];

fn spec(image: &str, min: u32) -> Value {
    json!({
        "model": {"source": "builtin://ember"}, "drain": {"withdrawSeconds": 0, "deadlineSeconds": 10},
        "pod": {"image": image}, "engine": {"maxModelLen": 512, "kvCacheTokens": 2048, "threads": 1},
        "scaling": {"min": min, "max": 3, "behavior": {
            "stableWindowSeconds": 6, "panicWindowSeconds": 2, "downStabilizationSeconds": 4}},
    })
}

/// Breaks one agent of the deployment of that name.
fn break_one(rig: &Rig, fault: &str) {
    let pod = rig.pods(fault).unwrap().remove(0);
    match fault {
        "healthy" => {}
        "killed" => rig.cluster.node.kill_pod(NAMESPACE, &pod.name_any()).unwrap(),
        "frozen" => rig.cluster.node.freeze_pod(NAMESPACE, &pod.name_any()).unwrap(),
        lie => {
            let url = format!("http://{}:8000/lie/{lie}", pod.status.unwrap().pod_ip.unwrap());
            assert!(Command::new("curl").args(["-sSf", "-X", "POST", &url]).status().unwrap().success());
        }
    }
}

fn desired(rig: &Rig, name: &str) -> i32 {
    rig.get(name).unwrap().status.unwrap().scaling.unwrap().desired
}

/// The message of MetricsHealthy, while it is False.
fn complaint(rig: &Rig, name: &str) -> Option<String> {
    let (value, _, message) = condition(&rig.get(name).unwrap(), "MetricsHealthy")?;
    (value == "False").then_some(message)
}

#[test]
fn agents_that_die_freeze_or_lie_never_scale_down_and_are_named_within_three_ticks() {
    let rig = Rig::start(Audit::Off).unwrap();
    let faults: Vec<&str> = LIES.iter().map(|(lie, _)| *lie).chain(["killed", "frozen"]).collect();
    let named = unseen_replicas_stay(&rig, AGENT_IMAGE, &faults, &FINE);
    for (lie, words) in LIES {
        assert!(named[lie].contains(words), "{lie}: {}", named[lie]);
    }
}

#[test]
fn real_agents_that_are_killed_or_frozen_never_scale_down_and_are_named_within_three_ticks() {
    let rig = Rig::start(Audit::Off).unwrap();
    rig.cluster.node.add_image(REAL_IMAGE, agent::binary().unwrap());
    unseen_replicas_stay(&rig, REAL_IMAGE, &["killed", "frozen"], &["healthy"]);
}

#[test]
fn a_real_agent_that_crashes_without_end_moves_nothing_is_given_up_and_is_the_one_that_goes() {
    let rig = Rig::start(Audit::Off).unwrap();
    rig.cluster.node.add_image(REAL_IMAGE, agent::binary().unwrap());
    rig.apply("crashing", spec(REAL_IMAGE, 2)).unwrap();
    rig.wait_ready("crashing", SOON).unwrap();
    rig.wait("both are read", SOON, |rig| Ok(section_is_calm(rig, "crashing"))).unwrap();
    let victim = rig.pods("crashing").unwrap().remove(0).name_any();
    // Between two lives there is nobody to kill.
    let crash = |rig: &Rig| _ = rig.cluster.node.kill_pod(NAMESPACE, &victim);
    rig.wait("it is missed by name", SOON, |rig| {
        crash(rig);
        Ok(complaint(rig, "crashing").is_some_and(|message| message.contains(&victim)))
    })
    .unwrap();
    // Longer than the half minute after which readings that are all fresh again count as healthy.
    rig.wait("it is given up", SOON, |rig| {
        crash(rig);
        let (value, _, message) = condition(&rig.get("crashing")?, "MetricsHealthy").unwrap_or_default();
        Ok((value.as_str(), message.as_str()) == ("True", "1 of 1 serving replica fresh; 1 crashed and given up"))
    })
    .unwrap();
    let records = rig.operator.records("crashing", 0).unwrap();
    let given_up = records.iter().rfind(|record| record.signals.coverage.broken == 1).unwrap();
    assert!(explain(given_up).contains("1 crashed and given up"), "{}", explain(given_up));
    assert!(records.iter().all(|record| record.decision.desired == 2), "neither more nor fewer");
    assert_eq!(rig.pods("crashing").unwrap().len(), 2);

    rig.apply("crashing", spec(REAL_IMAGE, 1)).unwrap();
    rig.wait("the healthy one is left", SOON, |rig| {
        crash(rig);
        let pods = rig.pods("crashing")?;
        Ok(pods.len() == 1 && pods[0].name_any() != victim && serves(&pods[0]))
    })
    .unwrap();
    for record in rig.operator.records("crashing", 0).unwrap() {
        let coverage = &record.signals.coverage;
        let seen = coverage.fresh == coverage.serving;
        assert!(seen || record.decision.desired >= record.decision.previous, "{record:?}");
    }
}

/// What was said of each fault.
fn unseen_replicas_stay<'a>(rig: &Rig, image: &str, faults: &[&'a str], fine: &[&'a str]) -> BTreeMap<&'a str, String> {
    let all: Vec<&str> = faults.iter().copied().chain(fine.iter().copied()).collect();
    all.iter().for_each(|name| rig.apply(name, spec(image, 2)).unwrap());
    for name in &all {
        rig.wait_ready(name, SOON).unwrap();
    }
    rig.wait("all are read", SOON, |rig| Ok(all.iter().all(|name| section_is_calm(rig, name)))).unwrap();

    let mut broken: BTreeMap<&str, Instant> = BTreeMap::new();
    for name in &all {
        break_one(rig, name);
        broken.insert(name, Instant::now());
    }
    let mut named: BTreeMap<&str, (Duration, String)> = BTreeMap::new();
    while named.len() < faults.len() && broken["frozen"].elapsed() < SOON {
        for name in faults.iter().filter(|name| !named.contains_key(**name)).copied().collect::<Vec<_>>() {
            if let Some(message) = complaint(rig, name) {
                named.insert(name, (broken[name].elapsed(), message));
            }
        }
    }
    println!("{named:#?}");
    for name in faults {
        let (after, message) = named.get(name).unwrap_or_else(|| panic!("{name} was never noticed: {named:#?}"));
        assert!(*after <= SAID_WITHIN, "{name} was noticed after {after:?}");
        assert!(message.starts_with("1 of 2 serving replicas fresh; nothing goes down"), "{name}: {message}");
    }

    all.iter().for_each(|name| rig.apply(name, spec(image, 1)).unwrap());
    let until = Instant::now() + WATCHED;
    while Instant::now() < until {
        // A process that was killed is soon seen again, and then its replica may go.
        let dark = faults.iter().filter(|name| **name != "killed");
        dark.for_each(|name| assert_eq!(desired(rig, name), 2, "{name}"));
        sleep(Duration::from_millis(200));
    }
    for name in fine {
        assert_eq!((desired(rig, name), complaint(rig, name)), (1, None), "{name}");
    }
    for name in &all {
        for record in rig.operator.records(name, 0).unwrap() {
            let seen = record.signals.coverage.fresh == record.signals.coverage.serving;
            assert!(seen || record.decision.desired >= record.decision.previous, "{name}: {record:?}");
        }
    }
    named.into_iter().map(|(name, (_, message))| (name, message)).collect()
}

#[test]
fn an_agent_that_does_not_say_what_its_steps_cost_is_named_and_hinders_nothing() {
    let rig = Rig::start(Audit::Off).unwrap();
    rig.apply("untold", spec(AGENT_IMAGE, 2)).unwrap();
    rig.wait_ready("untold", SOON).unwrap();
    rig.wait("both are read", SOON, |rig| Ok(section_is_calm(rig, "untold"))).unwrap();
    let older = rig.pods("untold").unwrap()[0].name_any();
    break_one(&rig, "untold");
    let words = format!(
        "1 of 2 replicas does not say what its steps cost (an older agent: {older}): replicas are reckoned from totals"
    );
    let said = format!("2 of 2 serving replicas fresh; {words}");
    rig.wait("it is named", SOON, |rig| {
        let (value, reason, message) = condition(&rig.get("untold")?, "MetricsHealthy").unwrap_or_default();
        Ok((value.as_str(), reason.as_str(), message) == ("True", "CostsUntold", said.clone()))
    })
    .unwrap();
    let records = rig.operator.records("untold", 0).unwrap();
    let last = explain(records.last().unwrap());
    assert!(last.contains(&words), "{last}");
    assert_eq!(records[0].signals.coverage.untold, None);

    rig.apply("untold", spec(AGENT_IMAGE, 1)).unwrap();
    rig.wait("one is left", SOON, |rig| Ok(rig.pods("untold")?.len() == 1)).unwrap();
}

fn section_is_calm(rig: &Rig, name: &str) -> bool {
    let healthy = condition(&rig.get(name).unwrap(), "MetricsHealthy").is_some_and(|(value, ..)| value == "True");
    let section = rig.get(name).unwrap().status.and_then(|status| status.scaling);
    healthy && section.is_some_and(|section| section.coverage == "2/2")
}
