//! `stoker-agent describe` prints what the engine says of a model, and says why not of one that is none.

use std::{fs, path::Path, process::Command};

fn describe(model: &str) -> std::process::Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_stoker-agent"));
    command.args(["describe", "--model", model]).output().expect("the agent starts")
}

#[test]
fn the_builtin_model_is_described() {
    let output = describe("builtin://ember");
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/goldens/specs/ember.txt");
    assert_eq!(String::from_utf8_lossy(&output.stdout), fs::read_to_string(golden).expect("the golden is there"));
    assert!(output.status.success());
}

#[test]
fn a_directory_without_a_model_is_refused_with_the_file_that_is_missing() {
    let output = describe("no/such/model");
    assert!(!output.status.success());
    let message = String::from_utf8_lossy(&output.stderr);
    assert!(message.contains("no/such/model/config.json"), "{message}");
}
