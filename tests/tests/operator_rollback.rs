//! Changes that are held, undone, or given up by the operator itself, on a real API server: whoever served goes on serving.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::{
    path::PathBuf,
    process::{Command, Output},
    sync::LazyLock,
    thread::sleep,
    time::Duration,
};

use kube::{
    ResourceExt,
    api::{Patch, PatchParams},
};
use serde_json::{Value, json};
use stoker_cluster::Audit;
use stoker_crds::InferenceDeployment;
use stoker_tests::{
    cluster::built,
    operator::{Rig, condition, is_ready, revision_of, serves},
};

/// Long enough for two busy cores.
const SOON: Duration = Duration::from_secs(60);
/// Shortest time in which a revision may show that it comes further.
const DEADLINE: u32 = 30;
/// It, and as long again for busy cores.
const GIVEN_UP: Duration = Duration::from_secs(90);

/// One cluster for all tests of this file; each has deployments of its own.
static RIG: LazyLock<Rig> = LazyLock::new(|| Rig::start(Audit::Off).unwrap());

/// Two replicas that leave fast, with these fields.
fn spec(more: Value) -> Value {
    let mut spec = json!({
        "model": {"source": "builtin://ember"}, "replicas": 2, "drain": {"withdrawSeconds": 1, "deadlineSeconds": 60},
        "rollout": {"progressDeadlineSeconds": DEADLINE},
    });
    spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    spec
}

fn rollout(rig: &Rig, name: &str) -> Value {
    serde_json::to_value(rig.get(name).unwrap().status.unwrap().rollout).unwrap()
}

fn serving(rig: &Rig, name: &str) -> Vec<String> {
    rig.pods(name).unwrap().iter().filter(|pod| serves(pod)).map(|pod| pod.name_any()).collect()
}

fn command(rig: &Rig, args: &[&str]) -> Command {
    let mut command: Command = rig.cluster.control_plane.kubectl().unwrap();
    let plugins = built("kubectl-stoker").parent().unwrap().to_owned();
    let path = std::env::join_paths([plugins, PathBuf::from("/usr/bin"), PathBuf::from("/bin")]).unwrap();
    command.arg("stoker").args(args).env("PATH", path);
    command
}

fn stoker(rig: &Rig, args: &[&str]) -> Output {
    command(rig, args).output().unwrap()
}

/// The same, while somebody else writes to the object all the time, and, as often as there are numbers, to its spec: the last
/// number is there in the end.
fn stoker_among_writers(rig: &Rig, name: &str, args: &[&str], keep: &[u32]) -> Output {
    let (deployments, mut command) = (rig.api::<InferenceDeployment>(), command(rig, args));
    let write = async |change: Value| {
        deployments.patch(name, &PatchParams::default(), &Patch::Merge(change)).await.unwrap();
    };
    let writes = async {
        for count in 0.. {
            write(json!({"metadata": {"annotations": {"stoker.dev/of-a-test": format!("{count}")}}})).await;
        }
    };
    rig.block_on(async {
        let undo = tokio::task::spawn_blocking(move || command.output());
        for number in keep {
            write(json!({"spec": {"rollout": {"keepRevisions": number}}})).await;
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        tokio::select! {
            output = undo => output.unwrap().unwrap(),
            () = writes => unreachable!("it writes until it is asked no more"),
        }
    })
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A change to `bad` is given up, its reason is told, and the replicas that served before are those that serve.
fn is_given_up(name: &str, bad: Value, reason: &str) {
    let rig = &*RIG;
    rig.apply(name, spec(json!({}))).unwrap();
    rig.wait_ready(name, SOON).unwrap();
    let good = rig.get(name).unwrap().status.unwrap().revision;
    let before = serving(rig, name);

    rig.apply(name, spec(bad.clone())).unwrap();
    let mut fewest = usize::MAX;
    rig.wait("it is given up", GIVEN_UP, |rig| {
        fewest = fewest.min(serving(rig, name).len());
        Ok(condition(&rig.get(name)?, "Degraded").is_some_and(|(value, why, _)| value == "True" && why == "RolledBack"))
    })
    .unwrap();
    assert_eq!(fewest, 2, "{name}");
    rig.wait("only what served is left", SOON, |rig| Ok(rig.pods(name)?.len() == 2)).unwrap();
    let deployment = rig.get(name).unwrap();
    let (value, why, message) = condition(&deployment, "Ready").unwrap();
    assert_eq!((value.as_str(), why.as_str()), ("False", "RolledBack"), "{name}");
    assert!(message.contains(reason) && message.contains("kubectl stoker rollout undo"), "{name}: {message}");
    assert_eq!(condition(&deployment, "Available").unwrap().0, "True", "{name}");
    let status = deployment.status.unwrap();
    assert_eq!(status.revision, good);
    assert_eq!(status.observed_generation, deployment.metadata.generation);
    assert_eq!(serving(rig, name), before, "nobody was replaced");

    // It stays so: no replica of the bad revision is made again, and a change of the number is followed by the good one.
    rig.apply(name, {
        let mut spec = spec(bad);
        spec["replicas"] = json!(3);
        spec
    })
    .unwrap();
    rig.wait("three serve", SOON, |rig| Ok(serving(rig, name).len() == 3)).unwrap();
    assert!(rig.pods(name).unwrap().iter().all(|pod| revision_of(pod) == good), "{name}");

    let undone = stoker(rig, &["rollout", "undo", name]);
    assert!(undone.status.success(), "{}", text(&undone.stderr));
    rig.wait_ready(name, SOON).unwrap();
    rig.wait("it is settled", SOON, |rig| Ok(rollout(rig, name)["phase"] == "Settled")).unwrap();
    rig.delete(name).unwrap();
}

#[test]
fn an_image_that_cannot_be_pulled_is_given_up() {
    is_given_up("imageless", json!({"pod": {"image": "nowhere.example/agent:9"}}), "nowhere.example/agent:9");
}

#[test]
fn a_model_that_cannot_be_loaded_is_given_up() {
    is_given_up("weightless", json!({"model": {"source": "file:///stand-in/load-fails"}}), "ModelLoadFailed");
}

#[test]
fn an_agent_that_crashes_is_given_up() {
    is_given_up("crashing", json!({"model": {"source": "file:///stand-in/crashes"}}), "told to crash");
}

#[test]
fn a_slow_start_is_waited_for_and_a_change_in_the_middle_is_followed() {
    let rig = &*RIG;
    rig.apply("slow", spec(json!({}))).unwrap();
    rig.wait_ready("slow", SOON).unwrap();
    rig.apply("slow", spec(json!({"pod": {"image": "nowhere.example/agent:9"}}))).unwrap();
    rig.wait("it is under way", SOON, |rig| Ok(rig.pods("slow")?.len() == 3)).unwrap();
    let slow = json!({"model": {"source": "file:///stand-in/loads-seconds/8"}});
    rig.apply("slow", spec(slow)).unwrap();
    rig.wait_ready("slow", SOON * 2).unwrap();
    rig.wait("nobody is left of the others", SOON, |rig| Ok(rollout(rig, "slow")["phase"] == "Settled")).unwrap();
    let status = rollout(rig, "slow");
    assert_eq!(status["rolledBack"], Value::Null, "{status}");
    let served: Vec<bool> =
        status["revisions"].as_array().unwrap().iter().map(|entry| entry["served"] == true).collect();
    assert_eq!(served, [true, false, true], "{status}");
    rig.delete("slow").unwrap();
}

#[test]
fn a_change_that_is_paused_waits_while_the_number_is_followed() {
    let rig = &*RIG;
    let changed = |paused: bool, replicas: u32| {
        let mut spec = spec(json!({"pod": {"annotations": {"change": "b"}}}));
        spec["rollout"]["paused"] = json!(paused);
        spec["replicas"] = json!(replicas);
        spec
    };
    rig.apply("held", spec(json!({}))).unwrap();
    rig.wait_ready("held", SOON).unwrap();
    let good = rig.get("held").unwrap().status.unwrap().revision;
    rig.apply("held", changed(true, 3)).unwrap();
    rig.wait("it is told", SOON, |rig| {
        Ok(condition(&rig.get("held")?, "Ready").is_some_and(|(_, why, _)| why == "Paused"))
    })
    .unwrap();
    rig.wait("the number is followed", SOON, |rig| Ok(serving(rig, "held").len() == 3)).unwrap();
    sleep(Duration::from_secs(2));
    assert!(rig.pods("held").unwrap().iter().all(|pod| revision_of(pod) == good));
    let said = stoker(rig, &["rollout", "status", "held"]);
    assert!(text(&said.stdout).starts_with("Paused: "), "{}", text(&said.stdout));

    let resumed = stoker(rig, &["rollout", "resume", "held"]);
    assert_eq!(text(&resumed.stdout), "held is resumed\n", "{}", text(&resumed.stderr));
    rig.wait("it is rolled out", SOON * 2, |rig| {
        Ok(is_ready(&rig.get("held")?) && rig.pods("held")?.iter().all(|pod| revision_of(pod) != good))
    })
    .unwrap();

    let undo = ["rollout", "undo", "held", "--to-revision", "1"];
    let undone = stoker_among_writers(rig, "held", &undo, &[11, 12, 13, 14, 15, 16, 17, 18, 19]);
    assert!(undone.status.success(), "{}", text(&undone.stderr));
    let kept = rig.get("held").unwrap().spec.rollout.unwrap().keep_revisions;
    assert_eq!(kept, Some(19), "what others asked for meanwhile stays");
    rig.wait("the first revision serves again", SOON * 2, |rig| {
        Ok(is_ready(&rig.get("held")?) && rig.pods("held")?.iter().all(|pod| revision_of(pod) == good))
    })
    .unwrap();
    let entries = rollout(rig, "held")["revisions"].clone();
    assert_eq!(entries[1]["number"], 3, "{entries}");
    rig.delete("held").unwrap();
}

#[test]
fn undo_without_a_revision_to_go_back_to_says_what_there_is() {
    let rig = &*RIG;
    rig.apply("first", spec(json!({}))).unwrap();
    rig.wait_ready("first", SOON).unwrap();
    let refused = stoker(rig, &["rollout", "undo", "first"]);
    assert!(!refused.status.success());
    assert!(
        text(&refused.stderr).contains("no older revision that served is kept; there is: none"),
        "{}",
        text(&refused.stderr)
    );
    let refused = stoker(rig, &["rollout", "undo", "first", "--to-revision", "9"]);
    assert!(text(&refused.stderr).contains("no revision 9 is kept; there is: none"), "{}", text(&refused.stderr));
    rig.delete("first").unwrap();
}
