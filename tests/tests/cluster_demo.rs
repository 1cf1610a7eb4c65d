//! `make demo` and `make demo-down` as a newcomer runs them, with the programs of this build.

use std::{fs, os::unix::fs::symlink, path::Path, process::Command};

use serde_json::json;
use stoker_tests::{
    cluster::{built, wait_for},
    demo::{kubectl, source, start, stoker_cluster},
};

/// Command lines of living processes that mention `dir`.
fn processes_of(dir: &Path) -> Vec<String> {
    let command_line = |entry: fs::DirEntry| fs::read(entry.path().join("cmdline")).ok();
    let lines = fs::read_dir("/proc").expect("list processes").flatten().filter_map(command_line);
    let own = |line: &String| line.contains(&*dir.to_string_lossy());
    lines.map(|line| String::from_utf8_lossy(&line).replace('\0', " ")).filter(own).collect()
}

#[test]
fn the_demo_answers_is_reused_and_leaves_nothing() {
    let parent = tempfile::tempdir().unwrap();
    let dir = parent.path().join("demo");
    let first = start(&dir).unwrap();
    for stage in ["control plane", "node", "CRD and operator", "apply", "ready", "first token"] {
        assert!(
            first.lines().any(|line| line.starts_with(stage) && line.ends_with(" s")),
            "no time of {stage} in:\n{first}"
        );
    }
    let asked = fs::read_to_string(dir.join("cluster/stoker-gateway.log")).unwrap();
    assert!(asked.contains("/v1/chat/completions"), "the answer came through the gateway:\n{asked}\n{first}");
    assert!(stoker_cluster("status", &dir, &[]).unwrap().contains("kubeconfig"));
    let second = start(&dir).unwrap();
    assert!(second.starts_with("A demo is running already"), "{second}");
    assert!(!processes_of(&dir).is_empty(), "the demo goes on");
    stoker_cluster("down", &dir, &[]).unwrap();
    assert!(!dir.exists());
    wait_for("every process is gone", || processes_of(&dir).is_empty().then_some(()));
    assert!(
        stoker_cluster("down", &dir, &[]).unwrap().starts_with("no cluster runs"),
        "a second stop has nothing to do"
    );
}

#[test]
fn every_example_is_accepted_and_served() {
    let parent = tempfile::tempdir().unwrap();
    let dir = parent.path().join("demo");
    start(&dir).unwrap();
    let source = source().canonicalize().unwrap();
    let models = source.join("models");
    // What the example asks its reader to do: weights on the claim `models`, at `my-model`.
    let place = parent.path().join("place");
    fs::create_dir(&place).unwrap();
    symlink(models.join("ember"), place.join("my-model")).unwrap();
    let volume = json!({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": "models"}, "spec": {
        "capacity": {"storage": "10Gi"}, "accessModes": ["ReadWriteMany"], "storageClassName": "",
        "hostPath": {"path": place}, "claimRef": {"namespace": "default", "name": "models"}}});
    kubectl(&dir, &["apply", "-f", "-"], &volume.to_string()).unwrap();
    let examples = source.join("examples").display().to_string();
    kubectl(&dir, &["apply", "--validate=strict", "-f", &examples], "").unwrap();
    let waited = kubectl(&dir, &["wait", "--for=condition=Ready", "--timeout=60s", "infd", "--all"], "");
    let seen = kubectl(&dir, &["get", "infd,pods,pvc"], "").unwrap();
    assert!(waited.is_ok(), "{waited:?}\n{seen}");
    assert_eq!(waited.unwrap().lines().count(), deployments_in(&source.join("examples")), "{seen}");
    stoker_cluster("down", &dir, &[]).unwrap();
}

fn deployments_in(directory: &Path) -> usize {
    let entries = fs::read_dir(directory).expect("the examples are in the checkout");
    let paths = entries.map(|entry| entry.expect("the folder can be read").path());
    // Those in folders need what not every machine has.
    let texts = paths.filter(|path| path.is_file()).map(|path| fs::read_to_string(path).expect("an example is text"));
    let count = texts.map(|text| text.matches("\nkind: InferenceDeployment\n").count()).sum();
    assert!(count > 0, "{} has examples", directory.display());
    count
}

#[test]
fn a_cluster_ends_with_its_owner() {
    let parent = tempfile::tempdir().unwrap();
    let dir = parent.path().join("owned");
    let mut owner = Command::new("sleep").arg("600").spawn().unwrap();
    stoker_cluster("up", &dir, &["--owner", &owner.id().to_string()]).unwrap();
    owner.kill().unwrap();
    wait_for("every process is gone", || processes_of(&dir).is_empty().then_some(()));
    wait_for("the folder is gone", || (!dir.exists()).then_some(()));
    owner.wait().unwrap();
}

#[test]
fn a_start_that_fails_says_why_and_leaves_nothing() {
    let parent = tempfile::tempdir().unwrap();
    let dir = parent.path().join("demo");
    let output = Command::new(built("stoker-cluster"))
        .args(["up", "--agent", "/nonexistent/agent", "--dir"])
        .arg(&dir)
        .output()
        .unwrap();
    let complaint = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && complaint.contains("/nonexistent/agent"), "{complaint}");
    assert!(processes_of(&dir).is_empty());
    assert!(!dir.exists(), "files were left");
}
