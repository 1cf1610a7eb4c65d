//! Changes that are tried on one replica first, on a real API server: a good one goes on, a bad one is stopped by its gate, and nobody's
//! stream is cut.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::{
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::{
        Arc, LazyLock,
        atomic::{AtomicBool, Ordering},
    },
    thread::{JoinHandle, sleep},
    time::Duration,
};

use k8s_openapi::api::{core::v1::Pod, events::v1::Event};
use kube::{ResourceExt, api::ListParams};
use serde_json::{Value, json};
use stoker_cluster::Audit;
use stoker_tests::{
    cluster::built,
    operator::{Rig, condition, is_ready, revision_of, serves},
};

/// Long enough for two busy cores.
const SOON: Duration = Duration::from_secs(60);
/// Shortest time for which a gate may have to pass.
const SECONDS: u32 = 10;
/// Long enough that no gate passes within a test.
const LONG: u32 = 3600;

/// One cluster for all tests of this file but one; each has deployments of its own.
static RIG: LazyLock<Rig> = LazyLock::new(|| Rig::start(Audit::Off).unwrap());

/// Two replicas that leave fast and serve this, with this canary.
fn spec(source: &str, seconds: u32, analysis: Value) -> Value {
    json!({
        "model": {"source": source, "servedNames": ["m"]}, "replicas": 2,
        "drain": {"withdrawSeconds": 1, "deadlineSeconds": 120},
        "rollout": {"canary": {"seconds": seconds, "analysis": analysis}},
    })
}

fn begun(rig: &Rig, name: &str, analysis: Value) -> (String, Vec<String>) {
    rig.apply(name, spec("builtin://ember", SECONDS, analysis)).unwrap();
    rig.wait_ready(name, SOON).unwrap();
    let good = rig.get(name).unwrap().status.unwrap().revision;
    (good, serving(rig, name))
}

fn rollout(rig: &Rig, name: &str) -> Value {
    serde_json::to_value(rig.get(name).unwrap().status.unwrap().rollout).unwrap()
}

fn serving(rig: &Rig, name: &str) -> Vec<String> {
    rig.pods(name).unwrap().iter().filter(|pod| serves(pod)).map(ResourceExt::name_any).collect()
}

/// Pods of another revision than this one.
fn others(rig: &Rig, name: &str, revision: &str) -> Vec<Pod> {
    rig.pods(name).unwrap().into_iter().filter(|pod| revision_of(pod) != revision).collect()
}

/// Waits until the one replica of another revision is compared; its pod.
fn compared(rig: &Rig, name: &str, good: &str) -> Pod {
    rig.wait("the canary is compared", SOON, |rig| {
        Ok(rollout(rig, name)["canary"]["phase"] == "Analysing" && serving(rig, name).len() == 3)
    })
    .unwrap();
    others(rig, name, good).remove(0)
}

fn is_given_up(rig: &Rig, name: &str, limit: Duration) -> String {
    rig.wait("it is given up", limit, |rig| {
        Ok(condition(&rig.get(name)?, "Degraded").is_some_and(|(value, why, _)| value == "True" && why == "RolledBack"))
    })
    .unwrap();
    condition(&rig.get(name).unwrap(), "Ready").unwrap().2
}

fn address(pod: &Pod) -> String {
    format!("{}:8000", pod.status.as_ref().unwrap().pod_ip.as_ref().unwrap())
}

/// A stream that a client holds open until it is finished.
fn hold(pod: &Pod) -> Child {
    let url = format!("http://{}/stream/600", address(pod));
    Command::new("curl").args(["-sSN", "--max-time", "300", &url]).stdout(Stdio::piped()).spawn().unwrap()
}

/// Lets the streams of a replica come to their end; the last lines of these.
fn ends(pod: &Pod, stream: Child) -> String {
    let url = format!("http://{}/finish", address(pod));
    assert!(Command::new("curl").args(["-sS", "-X", "POST", &url]).status().unwrap().success());
    let output = stream.wait_with_output().unwrap();
    String::from_utf8(output.stdout).unwrap().lines().last().unwrap_or_default().to_owned()
}

fn stoker(rig: &Rig, args: &[&str]) -> String {
    let mut command: Command = rig.cluster.control_plane.kubectl().unwrap();
    let plugins = built("kubectl-stoker").parent().unwrap().to_owned();
    let path = std::env::join_paths([plugins, PathBuf::from("/usr/bin"), PathBuf::from("/bin")]).unwrap();
    let output = command.arg("stoker").args(args).env("PATH", path).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Notes of a deployment's Events for this reason.
fn events(rig: &Rig, name: &str, reason: &str) -> Vec<String> {
    let of_reason = ListParams::default().fields(&format!("regarding.name={name},reason={reason}"));
    let found = rig.block_on(rig.api::<Event>().list(&of_reason)).unwrap();
    found.items.into_iter().filter_map(|event| event.note).collect()
}

/// Clients that stream for a second from each replica that serves, over and over.
struct Traffic {
    stop: Arc<AtomicBool>,
    clients: Vec<JoinHandle<()>>,
}

impl Traffic {
    fn to(pods: &[Pod]) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let client = |pod: &Pod| {
            let (stop, url) = (stop.clone(), format!("http://{}/stream/1", address(pod)));
            std::thread::spawn(move || {
                while !stop.load(Ordering::SeqCst) {
                    let curl = Command::new("curl").args(["-sSN", "--max-time", "30", &url]).output();
                    assert!(curl.unwrap().status.success());
                }
            })
        };
        // Two a replica, one behind the other: none is ever without a stream.
        let clients = pods.iter().chain(pods).map(client).collect();
        Self { stop, clients }
    }

    fn end(self) {
        self.stop.store(true, Ordering::SeqCst);
        self.clients.into_iter().for_each(|client| client.join().unwrap());
    }
}

#[test]
fn a_good_change_is_tried_on_one_replica_and_goes_on() {
    let rig = &*RIG;
    let (good, before) = begun(rig, "good", json!({"prompts": {}}));
    rig.apply("good", spec("file:///stand-in/drifts/1", SECONDS, json!({"prompts": {}}))).unwrap();
    let canary = compared(rig, "good", &good);
    assert_eq!(condition(&rig.get("good").unwrap(), "Ready").unwrap().1, "Canary");
    let said = stoker(rig, &["rollout", "status", "good"]);
    assert!(
        said.starts_with("Canary: ") && said.contains(&format!("canary of revision {}", revision_of(&canary))),
        "{said}"
    );

    let mut at_most = 0;
    let took = rig
        .wait("its gate passes", SOON, |rig| {
            let said = rollout(rig, "good");
            if said["canary"]["phase"] != "Passed" {
                at_most = at_most.max(others(rig, "good", &good).len());
                assert!(before.iter().all(|pod| serving(rig, "good").contains(pod)), "{said}");
            }
            Ok(said["canary"]["phase"] == "Passed")
        })
        .unwrap();
    assert!(took >= Duration::from_secs(u64::from(SECONDS) - 2) && at_most == 1, "{took:?}, {at_most} at once");
    rig.wait_ready("good", SOON).unwrap();
    assert!(serving(rig, "good").contains(&canary.name_any()), "the canary is one of those that stay");
    let canary = rollout(rig, "good")["canary"].clone();
    assert_eq!(canary["measured"]["meanDrift"], 0.01, "{canary}");
    let passed = events(rig, "good", "CanaryPassed");
    assert!(passed.len() == 1 && passed[0].contains("0.010 nats"), "{passed:?}");
    rig.delete("good").unwrap();
}

#[test]
fn drifted_answers_are_stopped_and_no_stream_is_cut() {
    let rig = &*RIG;
    let (good, before) = begun(rig, "drifted", json!({"prompts": {}}));
    let older: Vec<(Pod, Child)> =
        rig.pods("drifted").unwrap().into_iter().map(|pod| (pod.clone(), hold(&pod))).collect();
    let bad = spec("file:///stand-in/drifts/50", LONG, json!({"prompts": {}}));
    rig.apply("drifted", bad.clone()).unwrap();
    let message = is_given_up(rig, "drifted", SOON);
    for said in ["did not pass its canary's gate", "0.500 nats", "the mean may be 0.1", "maxMeanDrift"] {
        assert!(message.contains(said), "{message}");
    }
    rig.wait("only what served is left", SOON, |rig| Ok(rig.pods("drifted")?.len() == 2)).unwrap();
    assert_eq!(serving(rig, "drifted"), before, "nobody was replaced");
    assert!(!events(rig, "drifted", "RolledBack").is_empty());

    // The same is not tried again, whatever else the spec says.
    let more = {
        let mut more = bad;
        more["replicas"] = json!(3);
        more
    };
    rig.apply("drifted", more).unwrap();
    rig.wait("three serve", SOON, |rig| Ok(serving(rig, "drifted").len() == 3)).unwrap();
    assert!(others(rig, "drifted", &good).is_empty());
    for (pod, stream) in older {
        assert_eq!(ends(&pod, stream), "done");
    }
    rig.delete("drifted").unwrap();
}

#[test]
fn a_stream_of_a_canary_that_is_given_up_comes_to_its_end() {
    let rig = &*RIG;
    let (good, before) = begun(rig, "slow", json!({"traffic": {"minRequests": 10}}));
    rig.apply("slow", spec("file:///stand-in/slower/4", SECONDS, json!({"traffic": {"minRequests": 10}}))).unwrap();
    let canary = compared(rig, "slow", &good);
    let stream = hold(&canary);
    let said = rollout(rig, "slow")["canary"]["message"].as_str().unwrap().to_owned();
    assert!(said.contains("10 each are compared") || said.contains("looked at"), "{said}");
    let traffic = Traffic::to(&rig.pods("slow").unwrap());
    let message = is_given_up(rig, "slow", SOON * 2);
    for said in ["TTFT may be 1.5 times", "maxTtftRatio"] {
        assert!(message.contains(said), "{message}");
    }
    let ratio = message.split_once("TTFT is ").and_then(|(_, rest)| rest.split(' ').next()?.parse::<f64>().ok());
    // A stand-in says 0.08 s and 0.02 more a stream: with one to three there, one of which is held, and one or two in each older one.
    let bounds = 4.0 * 0.10 / 0.12..=4.0 * 0.14 / 0.10;
    assert!(ratio.is_some_and(|ratio| bounds.contains(&ratio)), "it takes four times as long: {message}");
    let draining = others(rig, "slow", &good);
    assert!(draining.len() == 1 && draining[0].metadata.deletion_timestamp.is_none(), "deleted while it streams");
    traffic.end();
    assert_eq!(ends(&canary, stream), "done");
    rig.wait("only what served is left", SOON, |rig| Ok(rig.pods("slow")?.len() == 2)).unwrap();
    assert_eq!(serving(rig, "slow"), before);
    rig.delete("slow").unwrap();
}

#[test]
fn a_third_revision_in_the_middle_is_tried_and_going_back_leaves_all_as_it_was() {
    let rig = &*RIG;
    let analysis = json!({"prompts": {}});
    let (good, before) = begun(rig, "edited", analysis.clone());
    rig.apply("edited", spec("file:///stand-in/drifts/1", LONG, analysis.clone())).unwrap();
    let second = revision_of(&compared(rig, "edited", &good));
    rig.apply("edited", spec("file:///stand-in/drifts/2", LONG, analysis.clone())).unwrap();
    rig.wait("the third is tried alone", SOON, |rig| {
        let others = others(rig, "edited", &good);
        Ok(others.len() == 1 && revision_of(&others[0]) != second && serves(&others[0]))
    })
    .unwrap();
    compared(rig, "edited", &good);

    let more = {
        let mut more = spec("file:///stand-in/drifts/2", LONG, analysis.clone());
        more["replicas"] = json!(3);
        more
    };
    rig.apply("edited", more).unwrap();
    rig.wait("a third one of the first revision serves", SOON, |rig| {
        Ok(serving(rig, "edited").len() == 4 && others(rig, "edited", &good).len() == 1)
    })
    .unwrap();

    rig.apply("edited", spec("builtin://ember", LONG, analysis)).unwrap();
    rig.wait_ready("edited", SOON).unwrap();
    rig.wait("two are left", SOON, |rig| Ok(rig.pods("edited")?.len() == 2)).unwrap();
    assert!(serving(rig, "edited").iter().all(|pod| pod.contains(&good)), "{before:?}");
    assert_eq!(rollout(rig, "edited")["canary"], Value::Null);
    rig.delete("edited").unwrap();
}

#[test]
fn a_lost_canary_is_made_again() {
    let rig = &*RIG;
    let (good, before) = begun(rig, "lost", json!({"prompts": {}}));
    rig.apply("lost", spec("file:///stand-in/drifts/1", LONG, json!({"prompts": {}}))).unwrap();
    let canary = compared(rig, "lost", &good);
    rig.delete_pod(&canary.name_any()).unwrap();
    rig.wait("another one is compared", SOON, |rig| {
        let others = others(rig, "lost", &good);
        let is_another = others.len() == 1 && others[0].uid() != canary.uid() && serves(&others[0]);
        Ok(is_another && rollout(rig, "lost")["canary"]["passingSince"].is_string())
    })
    .unwrap();
    assert!(before.iter().all(|pod| serving(rig, "lost").contains(pod)));
    rig.delete("lost").unwrap();
}

#[test]
fn a_canary_goes_on_under_another_operator() {
    let mut rig = Rig::start(Audit::Off).unwrap();
    let (good, before) = begun(&rig, "restarted", json!({"prompts": {}}));
    rig.apply("restarted", spec("file:///stand-in/drifts/1", SECONDS, json!({"prompts": {}}))).unwrap();
    compared(&rig, "restarted", &good);
    rig.operator.kill().unwrap();
    sleep(Duration::from_secs(2));
    assert_eq!(others(&rig, "restarted", &good).len(), 1);
    rig.operator.restart().unwrap();
    rig.wait("it goes on", SOON * 2, |rig| {
        Ok(is_ready(&rig.get("restarted")?) && serving(rig, "restarted").iter().all(|pod| !before.contains(pod)))
    })
    .unwrap();
    assert_eq!(rollout(&rig, "restarted")["canary"]["phase"], "Passed");
}

#[test]
fn what_stops_nothing_is_refused_with_what_to_change() {
    let rig = &*RIG;
    let refused = |canary: Value| {
        let mut spec = spec("builtin://ember", SECONDS, json!({}));
        spec["rollout"]["canary"] = canary;
        rig.apply("refused", spec).unwrap_err().to_string()
    };
    let without = refused(json!({"analysis": {}}));
    assert!(without.contains("a canary without a gate would stop nothing; add prompts: {}"), "{without}");
    let absent = refused(json!({"weight": 10}));
    assert!(absent.contains("spec.rollout.canary.analysis: Required value"), "{absent}");
    let gate = json!({"prompts": {}});
    for (canary, said) in [
        (json!({"weight": 51, "analysis": gate}), "should be less than or equal to 50"),
        (json!({"weight": 0, "analysis": gate}), "should be greater than or equal to 1"),
        (json!({"seconds": 5, "analysis": gate}), "should be greater than or equal to 10"),
        (json!({"analysis": {"prompts": {"maxMeanDrift": 0}}}), "maxMeanDrift: from 0.001 to 10 nats"),
        (json!({"analysis": {"prompts": {"texts": []}}}), "should have at least 1 items"),
        (json!({"analysis": {"traffic": {"maxTtftRatio": 1}}}), "maxTtftRatio: from 1.05 to 100"),
    ] {
        let refusal = refused(canary);
        assert!(refusal.contains(said), "{refusal}");
    }
}
