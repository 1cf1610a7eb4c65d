//! The account of a part: what it says is what the kernel counted, of those that outlive their program too.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::process::{Command, Output};

/// A shell's script, as a part.
fn part(script: &str) -> Output {
    Command::new(env!("CARGO_BIN_EXE_stoker-suite")).args(["--part", "/bin/sh", "-c", script]).output().unwrap()
}

fn seconds(output: &Output) -> f64 {
    let account = String::from_utf8_lossy(&output.stdout).into_owned();
    account.split(' ').next().unwrap().parse().unwrap_or_else(|_| panic!("{account:?}"))
}

/// Ends when it has had a second of a core.
const BURNS_A_SECOND: &str = "ulimit -t 1; while :; do :; done";

#[test]
fn what_a_program_left_behind_is_part_of_its_cost() {
    let orphan = part(&format!("({BURNS_A_SECOND}) & echo gone; exit 0"));
    assert!(orphan.status.success(), "{orphan:?}");
    assert_eq!(String::from_utf8_lossy(&orphan.stderr), "gone\n");
    // What the limit counts is exact; what is told of children may be samples, at every clock tick.
    assert!(seconds(&orphan) >= 0.5, "{orphan:?}");
    let idle = part("sleep 0.1");
    assert!(seconds(&idle) < 0.25, "what waits costs nothing: {idle:?}");
}

#[test]
fn how_a_program_failed_is_said() {
    let code = part("exit 3");
    assert!(!code.status.success());
    assert_eq!(String::from_utf8_lossy(&code.stdout).split_once(' ').unwrap().1, "true exit status: 3\n");
    let killed = part("kill -s KILL $$");
    assert!(!killed.status.success());
    assert_eq!(String::from_utf8_lossy(&killed.stdout).split_once(' ').unwrap().1, "true signal: 9 (SIGKILL)\n");
}
