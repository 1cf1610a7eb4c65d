//! `stoker-load` as a person runs it.

use std::{
    fs,
    process::{Command, Output},
};

fn stoker_load(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_stoker-load"))
        .args(args)
        .env_remove("OPENAI_API_KEY")
        .output()
        .expect("it was built")
}

fn complaint(args: &[&str]) -> String {
    let output = stoker_load(args);
    assert!(!output.status.success());
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn help_shows_examples_and_says_what_the_words_mean() {
    let help = String::from_utf8(stoker_load(&["--help"]).stdout).unwrap();
    for words in ["--step 30s:1,60s:8", "goodput", "the planned moment", "promptTokens"] {
        assert!(help.contains(words), "no {words} in:\n{help}");
    }
}

#[test]
fn a_bad_line_of_a_trace_is_refused_with_number_and_reason() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("bad.jsonl");
    let good = "{\"arrived\": 0.5, \"promptTokens\": 900, \"completionTokens\": 200}\n";
    fs::write(&path, format!("{good}{}", good.replace("900", "0"))).unwrap();
    let path = path.display().to_string();
    let words = complaint(&["--url", "http://127.0.0.1:1", "--trace", &path]);
    assert!(words.contains("line 2: promptTokens and completionTokens must be at least 1"), "{words}");
}

#[test]
fn bad_arguments_are_refused_with_what_to_write() {
    let url = ["--url", "http://127.0.0.1:1"];
    let refused = |args: &[&str]| complaint(&[&url[..], args].concat());
    assert!(refused(&["--step", "30:1"]).contains("write DURATION:RATE"));
    assert!(refused(&["--step", "1s:0"]).contains("no request falls into"));
    assert!(refused(&["--step", "1s:1", "--max-tokens", "0"]).contains("lognormal:MEDIAN:SIGMA"));
    assert!(refused(&[]).contains("--step"));
    assert!(complaint(&["--url", "localhost:8000", "--step", "1s:9"]).contains("no http or https URL"));
}

#[test]
fn an_endpoint_that_is_not_there_is_named_before_any_load() {
    let words = complaint(&["--url", "http://127.0.0.1:1", "--step", "60s:1"]);
    assert!(words.contains("ask for models") && words.contains("refused"), "{words}");
}
