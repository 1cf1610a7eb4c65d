//! `stoker-suite`: every test of the workspace, as `make test` runs it. Tests of the whole system mostly wait, for a real API server, for
//! probes, for timers, so many more of them run at once than there are cores; tests that compute run behind them, on what they leave.
//!
//! What is run when is decided in [`part`] and [`order`]; [`run`] starts processes and writes what they say.

mod order;
mod part;
mod program;
mod run;

use std::{fs, path::PathBuf, process::ExitCode, time::Instant};

use anyhow::{Context, Result};

use crate::{order::Machine, part::Part};

const USAGE: &str = "\
stoker-suite PROGRAMS LOG

Runs the tests of all programs that PROGRAMS, the messages of `cargo build --all-targets --message-format json-render-diagnostics`,
says were built. What they say goes to standard output and to LOG, part by part; the LOG of before says what took longest and is
begun with. Ends with 1 when a test failed. Run by cargo it would hand on cargo's environment, by which some crates are built again.";

fn main() -> Result<ExitCode> {
    let mut arguments = std::env::args_os().skip(1).map(PathBuf::from);
    let (programs, log) = arguments.next().zip(arguments.next()).context(USAGE)?;
    let begun = Instant::now();
    let took = order::times(&fs::read_to_string(&log).unwrap_or_default());
    let mut parts: Vec<Part> = Vec::new();
    let messages = fs::read_to_string(&programs).with_context(|| format!("read {}", programs.display()))?;
    for program in program::read(&messages)? {
        parts.extend(part::of(&program, &program.tests()?));
    }
    order::longest_first(&mut parts, &took);
    let machine = Machine::this()?;
    println!("{} parts; {machine}", parts.len());
    let failed = run::all(&parts, machine, &log)?;
    println!("{} s in all", begun.elapsed().as_secs());
    if failed.is_empty() {
        return Ok(ExitCode::SUCCESS);
    }
    println!("failed: {}", failed.join(", "));
    Ok(ExitCode::FAILURE)
}
