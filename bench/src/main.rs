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
    in_process::{Setup, Weights, limits_for},
    peer_log::{self, Model},
    peers::{LlamaCpp, Peer, PeerSetup, Transformers},
    probe::Probe,
    session::{Contender, Session, Subject},
    stoker::Stoker,
    table::table,
};
use stoker_engine::DeviceChoice;
use stoker_figures::{self as figures, Conditions, Figure, Run};

use crate::args::{Args, Command, PeerArgs, RunArgs};

/// Weights smaller than this may stay in a processor's cache: then memory is no ceiling.
const CACHED_BYTES: u64 = 256 << 20;

fn main() -> Result<()> {
    let args = Args::parse();
    match args.command {
        Command::Run(run) => measure(&run),
        Command::Peer(peer) => take_in(&peer),
        Command::Join { files, out } => join(&files, &out),
        Command::Checkpoint { model, dtype, without_weights, cache } => {
            let make = if without_weights { checkpoint::without_weights } else { checkpoint::ensure };
            println!("{}", make(&cache, &model, dtype)?.display());
            Ok(())
        }
    }
}

fn measure(args: &RunArgs) -> Result<()> {
    let directory = model_directory(args)?;
    let cases = fitting(args.cases(), &directory)?;
    let subject = Subject {
        model: args.model_name(),
        dtype: args.dtype.name().to_owned(),
        bytes_per_token: read_from_memory(args, &directory)?,
    };
    let mut contenders = peers(args, &directory);
    let (limits, seed) = (limits_for(&cases, args.tuning()), args.seed);
    let setup = Setup { directory, weights: args.weights, device: args.device, limits, seed };
    contenders.insert(0, Box::new(Stoker::new(setup, args.agent()?)));
    let run = this_run(args);
    let probe = (!is_gpu(args)).then(|| Probe::new(args.tuning().n_threads()));
    let mut gb_s = probe.as_ref().map(|probe| || probe.gb_s());
    let mut session = Session {
        run: &run,
        subject: &subject,
        samples: args.samples(),
        probe: gb_s.as_mut().map(|probe| probe as &mut dyn FnMut() -> f64),
        progress: &mut progress,
    };
    let mut found = Vec::new();
    for case in cases {
        let figures = session.measure(&mut contenders, case)?;
        keep(args.out.as_deref(), &figures)?;
        found.extend(figures);
    }
    println!("{} {}, run {}\n{}", subject.model, subject.dtype, run.name(), table(&found));
    Ok(())
}

fn this_run(args: &RunArgs) -> Run {
    let here = Conditions::here(&command_line());
    let gpus = figures::gpus().filter(|_| is_gpu(args));
    let conditions = Conditions { machine: gpus.unwrap_or(here.machine), ..here };
    match &args.run {
        Some(name) => Run::named(name.clone(), conditions),
        None => Run::under(conditions),
    }
}

/// Whether a GPU will compute.
fn is_gpu(args: &RunArgs) -> bool {
    match args.device {
        DeviceChoice::Cpu => false,
        DeviceChoice::Cuda(_) => true,
        DeviceChoice::Auto => args.weights == Weights::Device || figures::gpus().is_some(),
    }
}

/// What a decoded token reads, if it is more than a cache may hold and this machine's own memory holds it.
fn read_from_memory(args: &RunArgs, directory: &Path) -> Result<Option<u64>> {
    if is_gpu(args) {
        return Ok(None);
    }
    Ok(Some(checkpoint::bytes_per_token(directory)?).filter(|bytes| *bytes > CACHED_BYTES))
}

/// The peers that are asked for and installed; the others are told.
fn peers(args: &RunArgs, directory: &Path) -> Vec<Box<dyn Contender>> {
    let setup =
        PeerSetup { cache: args.cache.clone(), directory: directory.to_owned(), threads: args.tuning().n_threads() };
    let opened = args.peers.iter().map(|peer| -> Result<Box<dyn Contender>> {
        match peer {
            Peer::LlamaCpp => Ok(Box::new(LlamaCpp::open(&setup).context("llama.cpp")?)),
            Peer::Transformers => Ok(Box::new(Transformers::open(&setup).context("transformers")?)),
        }
    });
    let told = opened.inspect(|peer| {
        if let Err(reason) = peer {
            eprintln!("skipped: {reason:#}");
        }
    });
    told.filter_map(Result::ok).collect()
}

fn model_directory(args: &RunArgs) -> Result<PathBuf> {
    let path = Path::new(&args.model);
    match args.weights {
        _ if path.join("config.json").exists() => Ok(path.to_owned()),
        Weights::Disk => checkpoint::ensure(&args.cache, &args.model, args.dtype),
        Weights::Device => checkpoint::without_weights(&args.cache, &args.model, args.dtype),
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

/// A peer's samples as figures of the run that they were measured in.
fn take_in(args: &PeerArgs) -> Result<()> {
    let log = fs::read_to_string(&args.log).with_context(|| format!("read {}", args.log.display()))?;
    let here = Conditions::here(&args.command);
    let run = Run::named(args.run.clone(), Conditions { machine: figures::gpus().unwrap_or(here.machine), ..here });
    let found = peer_log::figures(&log, &args.system, Model { name: &args.model, dtype: &args.dtype }, &run)?;
    figures::append(&args.out, &found)?;
    print!("{}", table(&found));
    Ok(())
}

fn join(files: &[PathBuf], out: &Path) -> Result<()> {
    let read = files.iter().map(|file| figures::read(file)).collect::<Result<Vec<_>>>()?;
    let joined = peer_log::joined(read.concat());
    figures::append(out, &joined)?;
    print!("{}", table(&joined));
    Ok(())
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
