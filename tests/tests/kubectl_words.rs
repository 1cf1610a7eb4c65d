//! The words of `kubectl stoker` that look at a fleet which lives: top, events, status, drain; and those that need none.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::{
    ffi::OsStr,
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
    time::Duration,
};

use kube::ResourceExt;
use serde_json::{Value, json};
use stoker_cluster::Audit;
use stoker_tests::{
    cluster::built,
    operator::{Rig, serves},
    skip::skip,
};

const SOON: Duration = Duration::from_secs(60);

fn stoker(rig: &Rig, args: &[&str]) -> Output {
    let plugins = built("kubectl-stoker").parent().unwrap().to_owned();
    let path = std::env::join_paths([plugins, PathBuf::from("/usr/bin"), PathBuf::from("/bin")]).unwrap();
    let mut command = rig.cluster.control_plane.kubectl().unwrap();
    command.arg("stoker").args(args).env("PATH", path).env("STOKER_OPERATOR_URL", rig.operator.url()).output().unwrap()
}

fn said(rig: &Rig, args: &[&str]) -> String {
    let output = stoker(rig, args);
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn json_of(rig: &Rig, args: &[&str]) -> Value {
    serde_json::from_str(&said(rig, &[args, &["--output", "json"]].concat())).unwrap()
}

#[test]
fn a_fleet_is_seen_as_text_and_as_json_and_a_replica_leaves_when_it_is_told_to() {
    let rig = Rig::start(Audit::Off).unwrap();
    let drain = json!({"withdrawSeconds": 0, "deadlineSeconds": 5});
    rig.apply("chat", json!({"model": {"source": "builtin://ember"}, "replicas": 2, "drain": drain})).unwrap();
    rig.wait_ready("chat", SOON).unwrap();

    // Pods are seen before what their agents say.
    rig.wait("top shows both, with what they say", SOON, |rig| {
        let table = said(rig, &["top"]);
        let replicas = json_of(rig, &["top"])["deployments"][0]["replicas"].as_array().cloned().unwrap_or_default();
        let told = replicas.iter().filter(|replica| replica["load"]["totalBlocks"].as_u64().is_some_and(|n| n > 0));
        Ok(told.count() == 2 && table.lines().any(|line| line.starts_with("chat") && line.contains("2/2")))
    })
    .unwrap();
    let table = said(&rig, &["top", "chat"]);
    assert_eq!(
        table.lines().filter(|line| line.starts_with("chat-") && line.contains("serving")).count(),
        2,
        "{table}"
    );

    let events = said(&rig, &["events", "chat"]);
    assert!(events.contains("Created") && events.contains("chat-"), "{events}");
    assert!(json_of(&rig, &["events", "chat"]).as_array().unwrap().iter().any(|event| event["reason"] == "Created"));
    let status = json_of(&rig, &["status", "chat"]);
    assert_eq!((status["status"]["readyReplicas"].as_i64(), status["pods"].as_array().unwrap().len()), (Some(2), 2));

    let paused = |word: &str| json_of(&rig, &["rollout", word, "chat"]);
    assert_eq!(paused("pause"), json!({"name": "chat", "paused": true, "changed": true}));
    assert_eq!(paused("pause"), json!({"name": "chat", "paused": true, "changed": false}));
    assert_eq!(paused("resume"), json!({"name": "chat", "paused": false, "changed": true}));

    let pod = rig.pods("chat").unwrap().remove(0);
    let words = said(&rig, &["drain", "chat", &pod.name_any()]);
    assert!(words.ends_with("is gone\n"), "{words}");
    rig.wait("another one took its place", SOON, |rig| {
        let pods = rig.pods("chat")?;
        Ok(pods.iter().filter(|pod| serves(pod)).count() == 2 && pods.iter().all(|other| other.uid() != pod.uid()))
    })
    .unwrap();
    let pod = rig.pods("chat").unwrap().remove(0).name_any();
    let left = said(&rig, &["drain", "chat", &pod, "--output", "json"]);
    let left: Vec<Value> = left.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(left, [json!({"pod": &pod, "phase": "leaving"}), json!({"pod": &pod, "phase": "gone"})]);
    // Completed by kubectl itself, which finds a program of that name.
    let plugins = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(built("kubectl-stoker"), plugins.path().join("kubectl_complete-stoker")).unwrap();
    std::os::unix::fs::symlink(built("kubectl-stoker"), plugins.path().join("kubectl-stoker")).unwrap();
    let completed = |words: &[&str]| {
        let mut kubectl = rig.cluster.control_plane.kubectl().unwrap();
        let output = kubectl.env("PATH", plugins.path()).args(["__complete", "stoker"]).args(words).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    assert!(completed(&["rollout", "un"]).starts_with("undo\t"), "{}", completed(&["rollout", "un"]));
    assert_eq!(completed(&["status", "c"]).lines().next(), Some("chat"));
    let pods = completed(&["drain", "chat", ""]);
    assert!(rig.pods("chat").unwrap().iter().all(|pod| pods.contains(&pod.name_any())), "{pods}");
    assert_eq!(completed(&["status", "--namespace", "kube-system", ""]).trim(), ":4", "there is none");

    let refused = stoker(&rig, &["drain", "chat", "chat-x-0"]);
    let refused = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(refused.contains("chat-x-0 is no pod of chat; it has: chat-"), "{refused}");
}

#[test]
fn krew_installs_the_plugin_from_the_manifest_that_is_made() {
    let dir = tempfile::tempdir().unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tools/krew.sh");
    let run = |args: &[&OsStr]| {
        let output = Command::new(&script).args(args).output().unwrap();
        (
            output.status.success(),
            [output.stdout, output.stderr].map(|said| String::from_utf8_lossy(&said).into_owned()),
        )
    };
    let program = built("kubectl-stoker");
    let made = || {
        let (made, said) =
            run(&[program.as_os_str(), OsStr::new("https://releases.example/v1/"), dir.path().as_os_str()]);
        assert!(made, "{said:?}");
        fs::read_to_string(dir.path().join("stoker.yaml")).unwrap()
    };
    let manifest = made();
    assert!(manifest.contains("uri: https://releases.example/v1/kubectl-stoker-linux-"), "{manifest}");
    assert_eq!(made(), manifest, "the same program makes the same archive");
    let check = || run(&[OsStr::new("--check"), dir.path().as_os_str()]);
    let (installed, said) = check();
    if said[0].starts_with("skipped") {
        return skip("krew_installs_the_plugin_from_the_manifest_that_is_made", said[0].trim());
    }
    assert!(installed && said[0].starts_with("kubectl-stoker "), "{said:?}");
    let archive = manifest.lines().find_map(|line| line.trim().strip_prefix("sha256: ")).unwrap().trim_matches('"');
    fs::write(dir.path().join("stoker.yaml"), manifest.replace(archive, &"0".repeat(64))).unwrap();
    let (installed, said) = check();
    assert!(!installed && said[1].contains("checksum does not match"), "{said:?}");
}

#[test]
fn a_simulation_is_told_to_programs_as_well() {
    let mut command = Command::new(built("kubectl-stoker"));
    let output = command.args(["simulate", "--trace", "step", "--output", "json"]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let told: Value = serde_json::from_slice(&output.stdout).unwrap();
    let ours = &told[0]["rules"][0];
    assert_eq!((told[0]["trace"].as_str(), ours["rule"].as_str()), (Some("step"), Some("stoker")), "{told}");
    assert!(ours["gpuHours"].as_f64().unwrap() > 0.0 && told[0]["requests"].as_u64().unwrap() > 0, "{told}");
}

#[test]
fn completions_and_the_manual_name_every_word() {
    let printed = |args: &[&str]| {
        let output = Command::new(built("kubectl-stoker")).args(args).output().unwrap();
        assert!(output.status.success(), "{args:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let words = ["status", "top", "logs", "events", "drain", "plan", "rollout", "explain", "simulate", "completions"];
    for args in [&["completions", "bash"][..], &["completions", "zsh"], &["completions", "fish"], &["man"], &["--help"]]
    {
        let text = printed(args);
        words.iter().for_each(|word| assert!(text.contains(word), "{args:?} without {word}"));
    }
    let manual = printed(&["man"]);
    for section in ["kubectl stoker rollout undo", "kubectl stoker drain"] {
        assert!(manual.contains(section), "no section of {section}");
    }
    assert!(manual.contains(r"\-\-to\-revision"), "what a word's words take");
}
