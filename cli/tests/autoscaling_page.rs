//! Every command, specification and answer in `docs/autoscaling.md` works as printed.

use std::{
    fs,
    path::Path,
    process::{Command, Output},
};

use stoker_scaling::ScalingSpec;

struct Block {
    language: String,
    text: String,
}

fn page() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/autoscaling.md");
    fs::read_to_string(path).expect("the page is in the checkout")
}

fn blocks(page: &str) -> Vec<Block> {
    let parts = page.split("```").skip(1).step_by(2);
    parts
        .map(|part| {
            let (language, text) = part.split_once('\n').expect("a fence ends with its line");
            Block { language: language.to_owned(), text: text.to_owned() }
        })
        .collect()
}

/// Runs `kubectl stoker …` as kubectl would.
fn attempt(line: &str, dir: &Path) -> Output {
    let args = line.strip_prefix("kubectl stoker ").expect("a command of ours").split_whitespace();
    let mut command = Command::new(env!("CARGO_BIN_EXE_kubectl-stoker"));
    command.args(args).current_dir(dir).output().expect("the built program starts")
}

fn run(line: &str, dir: &Path) -> String {
    let output = attempt(line, dir);
    assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("it prints text")
}

#[test]
fn every_specification_on_the_page_is_accepted() {
    let yaml: Vec<_> = blocks(&page()).into_iter().filter(|block| block.language == "yaml").collect();
    assert!(!yaml.is_empty());
    for block in yaml {
        let object: serde_norway::Value = serde_norway::from_str(&block.text).unwrap();
        let spec: ScalingSpec = serde_norway::from_value(object["scaling"].clone()).unwrap();
        assert_eq!(spec.errors(), [], "{}", block.text);
    }
}

#[test]
fn every_command_on_the_page_runs_and_answers_what_is_printed() {
    let dir = tempfile::tempdir().unwrap();
    let mut answer = String::new();
    let mut n_commands = 0;
    for block in blocks(&page()) {
        match block.language.as_str() {
            "sh" => {
                answer = block.text.lines().map(|line| run(line, dir.path())).collect();
                n_commands += block.text.lines().count();
            }
            "text" => assert!(answer.contains(block.text.trim_end()), "not in the answer:\n{}", block.text),
            _ => {}
        }
    }
    assert!(n_commands >= 4, "{n_commands}");
}

#[test]
fn a_simulation_leaves_a_report_that_asks_for_nothing() {
    let dir = tempfile::tempdir().unwrap();
    run("kubectl stoker simulate --trace step --out out", dir.path());
    let report = fs::read_to_string(dir.path().join("out/report.html")).unwrap();
    assert!(report.starts_with("<!DOCTYPE html>") && report.contains("<svg class=\"timeline\""), "{report}");
    assert!(!report.contains("://") && !report.contains("<script"), "nothing comes from elsewhere, nothing runs");
}

#[test]
fn a_bad_line_of_a_trace_is_refused_with_its_number() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("bad.jsonl"), "{\"arrived\": 1, \"promptTokens\": 9, \"completionTokens\": 9}\n<html>\n")
        .unwrap();
    let output = attempt("kubectl stoker simulate --trace bad.jsonl", dir.path());
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && message.contains("line 2: expected value"), "{message}");
}

#[test]
fn nodes_that_stand_by_without_a_time_of_warm_starts_are_refused_and_so_is_the_time_without_nodes() {
    let dir = tempfile::tempdir().unwrap();
    let refusal = |more: &str| {
        let output = attempt(&format!("kubectl stoker simulate --trace step {more}"), dir.path());
        assert!(!output.status.success(), "{more}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let untold = refusal("--set scaling.standby=2");
    assert!(untold.contains("scaling.standby is 2") && untold.contains("give --warm-start SECONDS"), "{untold}");
    assert!(refusal("--warm-start 5").contains("ask for some by --set scaling.standby=N"));
    assert!(refusal("--set scaling.standby=2 --warm-start=-1").contains("--warm-start takes 0 or more seconds"));
}

#[test]
fn an_altered_record_is_not_reproduced_and_fails_the_command() {
    let dir = tempfile::tempdir().unwrap();
    run("kubectl stoker simulate --trace step --record step.jsonl", dir.path());
    let path = dir.path().join("step.jsonl");
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, text.replacen("\"serving\":4,", "\"serving\":3,", 1)).unwrap();
    let output = attempt("kubectl stoker explain --file step.jsonl", dir.path());
    let words = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.code() == Some(1) && words.contains("NOT REPRODUCED"), "{words}");
}
