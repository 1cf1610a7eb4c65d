//! `make demo` and `make demo-down` as a newcomer runs them, with the programs of this build.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use stoker_tests::cluster::{built, wait_for};

/// Runs a word of `stoker-cluster` on `dir`; its output, or a panic with everything it said.
fn stoker_cluster(word: &str, dir: &Path, args: &[&str]) -> String {
    let output = Command::new(built("stoker-cluster")).arg(word).arg("--dir").arg(dir).args(args).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{word}:\n{}\n{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

fn demo(dir: &Path) -> String {
    let source = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..");
    let [agent, operator] = ["stoker-agent", "stoker-operator"].map(|name| built(name).display().to_string());
    stoker_cluster("demo", dir, &["--agent", &agent, "--operator", &operator, "--source", &source.to_string_lossy()])
}

/// Command lines of living processes that mention `dir`.
fn processes_of(dir: &Path) -> Vec<String> {
    let command_line = |entry: fs::DirEntry| fs::read(entry.path().join("cmdline")).ok();
    let lines = fs::read_dir("/proc").unwrap().flatten().filter_map(command_line);
    let own = |line: &String| line.contains(&*dir.to_string_lossy());
    lines.map(|line| String::from_utf8_lossy(&line).replace('\0', " ")).filter(own).collect()
}

#[test]
fn the_demo_answers_is_reused_and_leaves_nothing() {
    let parent = tempfile::tempdir().unwrap();
    let dir = parent.path().join("demo");
    let first = demo(&dir);
    for stage in ["control plane", "node", "CRD and operator", "apply", "ready", "first token"] {
        assert!(
            first.lines().any(|line| line.starts_with(stage) && line.ends_with(" s")),
            "no time of {stage} in:\n{first}"
        );
    }
    assert!(stoker_cluster("status", &dir, &[]).contains("kubeconfig"));
    let second = demo(&dir);
    assert!(second.starts_with("A demo is running already"), "{second}");
    assert!(!processes_of(&dir).is_empty(), "the demo goes on");
    stoker_cluster("down", &dir, &[]);
    assert!(!dir.exists());
    wait_for("every process is gone", || processes_of(&dir).is_empty().then_some(()));
    assert!(stoker_cluster("down", &dir, &[]).starts_with("no cluster runs"), "a second stop has nothing to do");
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
