//! `stoker-bench`: the command line of the engine's bench. Parses, names the run, prints; measures nothing itself.

mod args;

use std::{
    fs,
    io::IsTerminal,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, ensure};
use clap::Parser;
use serde_json::Value;
use stoker_bench::{
    case::Case,
    checkpoint,
    in_process::{Setup, limits_for},
    session::{self, Contender, Plan, Subject},
    stoker::Stoker,
    table::table,
};
use stoker_figures::{self as figures, Conditions, Figure, Run};

use crate::args::{Args, Command, RunArgs};

fn main() -> Result<()> {
    let args = Args::parse();
    match args.command {
        Command::Run(run) => measure(&run),
        Command::Checkpoint { model, dtype, cache } => {
            println!("{}", checkpoint::ensure(&cache, &model, dtype)?.display());
            Ok(())
        }
    }
}

fn measure(args: &RunArgs) -> Result<()> {
    let directory = model_directory(args)?;
    let cases = fitting(args.cases(), &directory)?;
    let setup = Setup { directory, limits: limits_for(&cases, args.tuning()), seed: args.seed };
    let mut contenders: Vec<Box<dyn Contender>> = vec![Box::new(Stoker::new(setup, args.agent()?))];
    let run = Run::under(Conditions::here(&command_line()));
    let (model, dtype) = (args.model_name(), args.dtype.name());
    let mut found = Vec::new();
    for case in cases {
        let mut plan = Plan { samples: args.samples(), progress: &mut progress };
        let figures = session::measure(&mut contenders, case, Subject { model: &model, dtype }, &run, &mut plan)?;
        keep(args.out.as_deref(), &figures)?;
        found.extend(figures);
    }
    println!("{model} {dtype}, run {}\n{}", run.name(), table(&found));
    Ok(())
}

fn model_directory(args: &RunArgs) -> Result<PathBuf> {
    let path = Path::new(&args.model);
    if path.join("config.json").exists() {
        Ok(path.to_owned())
    } else {
        checkpoint::ensure(&args.cache, &args.model, args.dtype)
    }
}

/// The cases that the model's context holds; the others are told.
fn fitting(cases: Vec<Case>, directory: &Path) -> Result<Vec<Case>> {
    let path = directory.join("config.json");
    let text = fs::read(&path).with_context(|| format!("read {}", path.display()))?;
    let config: Value = serde_json::from_slice(&text).with_context(|| format!("read {}", path.display()))?;
    let positions = config["max_position_embeddings"].as_u64().context("config.json has no max_position_embeddings")?;
    let (refused, fitting): (Vec<_>, Vec<_>) = cases.into_iter().partition(|case| case.refusal(positions).is_some());
    refused.iter().filter_map(|case| case.refusal(positions)).for_each(|reason| eprintln!("skipped: {reason}"));
    ensure!(!fitting.is_empty(), "no case is left");
    Ok(fitting)
}

/// After every case, so that a run that is cut short keeps what it found.
fn keep(out: Option<&Path>, found: &[Figure]) -> Result<()> {
    out.map_or(Ok(()), |out| figures::append(out, found))
}

/// The words that repeat this run, without the path of the program.
fn command_line() -> String {
    let words = std::env::args().skip(1);
    std::iter::once("stoker-bench".to_owned()).chain(words).collect::<Vec<_>>().join(" ")
}

/// One line that is written over in a terminal; lines where somebody keeps them.
fn progress(line: &str) {
    if std::io::stderr().is_terminal() {
        eprint!("\r\x1b[2K{line}");
    } else {
        eprintln!("{line}");
    }
}
