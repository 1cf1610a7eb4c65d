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
    for words in
        ["--step 30s:1,60s:8", "goodput", "the planned moment", "promptTokens", "--turns 2..6", "--model large=3"]
    {
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
    assert!(refused(&["--step", "1s:0"]).contains("no session falls into"));
    assert!(refused(&["--step", "1s:1", "--max-tokens", "0"]).contains("lognormal:MEDIAN:SIGMA"));
    assert!(refused(&[]).contains("--step"));
    let refused = |args: &[&str]| refused(&[&["--step", "1s:9"], args].concat());
    assert!(refused(&["--slo", "ttft=1s,tpot=1s"]).contains("\"tpot=1s\" is no target: write ttft, itl or e2e"));
    assert!(refused(&["--tools", "0.2"]).contains("write a percentage"));
    assert!(refused(&["--tools", "60%", "--schemas", "50%"]).contains("lower one"));
    assert!(refused(&["--tools", "60%", "--ignore-eos"]).contains("leave it out"));
    assert!(refused(&["--turns", "2", "--form", "completions"]).contains("--turns needs --form chat"));
    assert!(refused(&["--turns", "2", "--trace", "x"]).contains("--trace"));
    assert!(refused(&["--model", "a=0"]).contains("a weight above 0"));
    assert!(refused(&["--model", "a=2", "--model", "a"]).contains("--model a is given twice"));
    assert!(refused(&["--schema-file", "absent.json", "--schemas", "1%"]).contains("read absent.json"));
    assert!(complaint(&["--url", "localhost:8000", "--step", "1s:9"]).contains("no http or https URL"));
}

#[test]
fn an_endpoint_that_is_not_there_is_named_before_any_load() {
    let words = complaint(&["--url", "http://127.0.0.1:1", "--step", "60s:1"]);
    assert!(words.contains("ask for models") && words.contains("refused"), "{words}");
}
