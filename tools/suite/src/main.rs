//! `stoker-suite`: the tests of the workspace, as `make test` and `make check` run them. Tests of the whole system mostly wait, for a real API server, for
//! probes, for timers, so many more of them run at once than there are cores; tests that compute run behind them, on what they leave, and the
//! few that compare clocks when all others are over.
//!
//! What is run when is decided in [`part`] and [`order`]; [`run`] starts processes and writes what they say. Above each stands a
//! process of this program that says what it cost ([`steward`]).

mod dear;
mod order;
mod part;
mod plane;
mod program;
mod run;
mod steward;

use std::{ffi::OsString, fs, path::Path, process::ExitCode, time::Instant};

use anyhow::{Context, Result, bail};

use crate::{order::Machine, part::Part};

/// Parts that are named at the end for what they took of cores.
const DEAREST: usize = 10;

/// The word for a run that leaves nothing out.
const ALL: &str = "all";

const USAGE: &str = "\
stoker-suite [all] PROGRAMS LOG

Runs the tests of all programs, or all but the dearest ones, that PROGRAMS, the messages of `cargo build --all-targets --message-format json-render-diagnostics`,
says were built. What they say goes to standard output and to LOG, part by part; the LOG of before says what took longest and is
begun with. Ends with 1 when a test failed. Run by cargo it would hand on cargo's environment, by which some crates are built again.";

fn main() -> Result<ExitCode> {
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    match &arguments[..] {
        [word, program, arguments @ ..] if word == steward::WORD => steward::run(Path::new(program), arguments),
        [word, programs, log] if word == ALL => suite(true, Path::new(programs), Path::new(log)),
        [programs, log] => suite(false, Path::new(programs), Path::new(log)),
        _ => bail!(USAGE),
    }
}

fn suite(runs_all: bool, programs: &Path, log: &Path) -> Result<ExitCode> {
    let begun = Instant::now();
    let took = order::times(&fs::read_to_string(log).unwrap_or_default());
    let mut parts: Vec<Part> = Vec::new();
    let said = fs::read_to_string(programs).with_context(|| format!("read {}", programs.display()))?;
    let messages = program::messages(&said)?;
    for program in program::of_tests(&messages)? {
        parts.extend(part::of(&program, &program.tests()?, |module| program.shares(module)));
    }
    let n_parts = parts.len();
    if !runs_all {
        parts = dear::leave_out(parts)?;
    }
    order::longest_first(&mut parts, &took);
    let machine = Machine::this(runs_all)?;
    println!("{} parts of {n_parts}; {machine}", parts.len());
    let outcome = run::all(&parts, machine, program::path(&messages, plane::PROGRAM).as_deref(), log)?;
    println!("{} s in all, {:.0} s of a core", begun.elapsed().as_secs(), steward::cpu_seconds()?);
    for (title, seconds) in order::dearest(outcome.costs, DEAREST) {
        println!("{seconds:7.1} s of a core  {title}");
    }
    if parts.len() < n_parts {
        println!(
            "left out: {} parts that take long: `make test-all` runs them, and `make check` does",
            n_parts - parts.len()
        );
    }
    if outcome.failed.is_empty() {
        return Ok(ExitCode::SUCCESS);
    }
    println!("failed: {}", outcome.failed.join(", "));
    Ok(ExitCode::FAILURE)
}
