//! What is piped into a program that stops reading, such as `head`, ends without a word.

use std::process::{Command, Stdio};

#[test]
fn a_reader_that_has_had_enough_is_no_error() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kubectl-stoker"));
    command.args(["simulate", "--trace", "step"]).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("the built program starts");
    drop(child.stdout.take());
    let output = child.wait_with_output().expect("it ends");
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    assert_eq!(output.status.code(), Some(141), "it noticed that nobody reads");
}
