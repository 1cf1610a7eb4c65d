//! `stoker-bench`: the command line of the engine's bench. Parses, names the run, prints; measures nothing itself.

mod args;

use std::{
    fs,
    io::IsTerminal,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use clap::Parser;
use stoker_bench::{
    autotune,
    case::Case,
    checkpoint::{self, Dtype},
    curve,
    in_process::{Setup, Weights, limits_for},
    masks,
    mix::{self, Arrival},
    model::Model,
    peer_log::{self, PeerModel},
    peers::{LlamaCpp, Peer, PeerSetup, Transformers},
    probe::{Probe, Speeds},
    program, quality,
    quantised::Quantised,
    reading::Reading,
    report::report,
    schemas,
    session::{Contender, Session, Subject},
    stoker::Stoker,
    table::table,
};
use stoker_engine::{DeviceChoice, EngineLimits, ops::Isa};
use stoker_figures::{self as figures, Conditions, Figure, Key, Run};
use stoker_sim::ReplicaModel;

use crate::args::{Args, Command, CurveArgs, PeerArgs, QualityArgs, RunArgs};

/// Weights smaller than this may stay in a processor's cache: then memory is no ceiling.
const CACHED_BYTES: u64 = 256 << 20;

fn main() -> Result<()> {
    let args = Args::parse();
    match args.command {
        Command::Run(run) => measure(&run),
        Command::Curve(asked) => curve(&asked),
        Command::Quality(asked) => quality(&asked),
        Command::Peer(peer) => take_in(&peer),
        Command::Join { files, out } => join(&files, &out),
        Command::Report { files, run, html } => show(&files, run.as_deref(), &html),
        Command::Autotune { out, only, quantization, tensor_parallel, cache } => {
            let is_wanted = |name: &str| only.is_empty() || only.iter().any(|part| name.contains(part));
            let models: Vec<_> = autotune::MODELS.into_iter().filter(|model| is_wanted(model.name)).collect();
            let wanted = autotune::Wanted { models: &models, quantised: quantization, tensor_parallel };
            autotune::autotune(wanted, &cache, &out, &mut |line| eprintln!("{line}"))
        }
        Command::Program { model, rows, context, quantization, chip, tensor_parallel, cache } => {
            let directory = checkpoint::without_weights(&cache, &model, Dtype::Bf16, quantization)?;
            let quantization = quantization.and_then(Quantised::at_start);
            match chip {
                Some(chip) => program::list(&directory, &chip, &rows, (quantization, tensor_parallel)),
                None => program::measure(&directory, &rows, context, (quantization, tensor_parallel)),
            }
        }
        Command::Masks { tokenizer, rounds, step_ms, beside, steps } => {
            let bench = masks::Bench::open(&tokenizer)?;
            println!("{:34} {:>7} {:>9} {:>9} {:>9}", "us", "n", "p50", "p99", "most");
            bench.masks(rounds)?.iter().for_each(|spread| println!("{spread}"));
            for (steps_in_flight, n_constrained) in [(1, 0), (1, beside), (2, 0), (2, beside)] {
                let step = Duration::from_millis(step_ms);
                let load = masks::Load { n_constrained, step, n_tokens: steps, steps_in_flight };
                println!("{}", bench.steps(load)?);
            }
            Ok(())
        }
        Command::Schemas { directory, tokenizer, every, drawn_tokens, out } => {
            schemas::run(&schemas::Asked { directory, tokenizer, every, drawn_tokens, out })
        }
        Command::Arrivals { rate } => {
            for Arrival { at, prompt_tokens, completion_tokens } in mix::arrivals(rate) {
                println!("{at} {prompt_tokens} {completion_tokens}");
            }
            Ok(())
        }
        Command::Checkpoint { model, dtype, without_weights, quantization, cache } => {
            let directory = match without_weights {
                true => checkpoint::without_weights(&cache, &model, dtype, quantization)?,
                false => checkpoint::ensure(&cache, &model, dtype, quantization)?,
            };
            println!("{}", directory.display());
            Ok(())
        }
    }
}

fn show(files: &[PathBuf], run: Option<&str>, html: &Path) -> Result<()> {
    let topics = files.iter().map(|path| {
        let topic = path.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
        let mut all = figures::read(path)?;
        all.retain(|figure| run.is_none_or(|run| figure.run == run));
        Ok((topic, all))
    });
    let topics = topics.collect::<Result<Vec<_>>>()?;
    ensure!(topics.iter().any(|(_, all)| !all.is_empty()), "no figure of {}", run.unwrap_or("any run"));
    fs::write(html, report(topics)).with_context(|| format!("write {}", html.display()))
}

fn measure(args: &RunArgs) -> Result<()> {
    let model = Model::open(&args.wanted(), &args.cache)?;
    let cases = fitting(args.cases(), model.max_position_embeddings)?;
    let subject = Subject {
        model: model.name.clone(),
        dtype: args.format(&model.dtype),
        case_prefix: args.peers_isa().map_or_else(String::new, |isa| format!("{isa}_")),
        bytes_per_token: model.bytes_per_token.filter(|bytes| !is_gpu(args) && *bytes > CACHED_BYTES),
        spec: model.spec.clone(),
    };
    let probe = (!is_gpu(args)).then(|| Probe::new(args.tuning().n_threads(), args.isa(), model.format()));
    let mut probe = probe.transpose().context("start threads that probe the machine")?;
    let mut speeds = probe.as_mut().map(|probe| || probe.speeds());
    let mut contenders = peers(args, &model.path);
    let (limits, seed) = (limits_for(&cases, args.tuning()), args.seed);
    let setup = Setup { model: model.path, weights: args.weights, device: args.device, limits, seed };
    contenders.insert(0, Box::new(Stoker::new(setup, args.agent()?)));
    let run = this_run(args);
    let mut session = Session {
        run: &run,
        subject: &subject,
        samples: args.samples(),
        probe: speeds.as_mut().map(|probe| probe as &mut dyn FnMut() -> Speeds),
        progress: &mut progress,
    };
    let mut found = Vec::new();
    for case in cases {
        let figures = session.measure(&mut contenders, case)?;
        keep(args.figures.out.as_deref(), &figures)?;
        found.extend(figures);
    }
    println!("{} {}, run {}\n{}", subject.model, subject.dtype, run.name(), table(&found));
    Ok(())
}

fn this_run(args: &RunArgs) -> Run {
    run_on(is_gpu(args), args.isa(), args.figures.run.as_deref())
}

fn run_on(is_gpu: bool, isa: Isa, name: Option<&str>) -> Run {
    let here = Conditions::here(&command_line());
    let gpus = figures::gpus().filter(|_| is_gpu);
    let machine = gpus.unwrap_or_else(|| format!("{}, {isa}", here.machine));
    let conditions = Conditions { machine, ..here };
    match name {
        Some(name) => Run::named(name.to_owned(), conditions),
        None => Run::under(conditions),
    }
}

fn is_gpu(args: &RunArgs) -> bool {
    computes_on_gpu(args.device, args.weights)
}

/// Whether a GPU will compute.
fn computes_on_gpu(device: DeviceChoice, weights: Weights) -> bool {
    match device {
        DeviceChoice::Cpu => false,
        DeviceChoice::Cuda(_) => true,
        DeviceChoice::Auto => weights == Weights::Device || figures::gpus().is_some(),
    }
}

fn curve(args: &CurveArgs) -> Result<()> {
    let start_seconds = args.start_seconds.unwrap_or(ReplicaModel::default().start_seconds);
    ensure!(start_seconds.is_finite() && start_seconds >= 0.0, "--start-seconds is {start_seconds}: use 0 or more");
    let model = Model::open(&args.wanted(), &args.cache)?;
    let is_gpu = computes_on_gpu(args.device, args.weights);
    let comparison = curve::measure(&args.asked(model.path.clone(), is_gpu), &mut progress)?;
    let run = run_on(is_gpu, Isa::best(), args.figures.run.as_deref());
    println!("{} {}, run {}\n{}", model.name, model.dtype, run.name(), comparison.table());
    keep(args.figures.out.as_deref(), &comparison.figures(&run, &model.name, &model.dtype))?;
    let Some(path) = &args.replica_out else { return Ok(()) };
    let replica = serde_json::to_string_pretty(&comparison.replica(start_seconds))? + "\n";
    fs::write(path, replica).with_context(|| format!("write {}", path.display()))
}

/// The peers that are asked for and installed; the others are told.
fn peers(args: &RunArgs, model: &Path) -> Vec<Box<dyn Contender>> {
    let setup = PeerSetup {
        cache: args.cache.clone(),
        model: model.to_owned(),
        threads: args.tuning().n_threads(),
        isa: args.peers_isa(),
    };
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

/// The cases that the model's context holds; the others are told.
fn fitting(cases: Vec<Case>, positions: u64) -> Result<Vec<Case>> {
    let (refused, fitting): (Vec<_>, Vec<_>) = cases.into_iter().partition(|case| case.refusal(positions).is_some());
    refused.iter().filter_map(|case| case.refusal(positions)).for_each(|reason| eprintln!("skipped: {reason}"));
    ensure!(!fitting.is_empty(), "no case is left");
    Ok(fitting)
}

fn quality(args: &QualityArgs) -> Result<()> {
    let QualityArgs { model, original, heldout, name, dtype, device, quantization, kv_cache_dtype, figures: noted } =
        args;
    let limits =
        EngineLimits { quantization: *quantization, kv_cache_dtype: *kv_cache_dtype, ..EngineLimits::default() };
    let original = original.as_deref().unwrap_or(model);
    let (readings, n_answers) =
        quality::measure(&quality::Subject { original, model, heldout, limits, device: *device })?;
    let here = Conditions::here(&command_line());
    let gpus = figures::gpus().filter(|_| matches!(device, DeviceChoice::Cuda(_)));
    let conditions = Conditions { machine: gpus.unwrap_or_else(|| here.machine.clone()), ..here };
    let run = match &noted.run {
        Some(name) => Run::named(name.clone(), conditions),
        None => Run::under(conditions),
    };
    let figure = |Reading { metric, value }: &Reading| {
        run.figure(Key { model: name, dtype, case: "quality_heldout", metric }, &[*value])
    };
    let found: Vec<Figure> = readings.iter().map(figure).collect();
    keep(noted.out.as_deref(), &found)?;
    println!("{name} {dtype}, {n_answers} answers\n{}", table(&found));
    Ok(())
}

/// A peer's samples as figures of the run that they were measured in.
fn take_in(args: &PeerArgs) -> Result<()> {
    let log = fs::read_to_string(&args.log).with_context(|| format!("read {}", args.log.display()))?;
    let here = Conditions::here(&args.command);
    let run = Run::named(args.run.clone(), Conditions { machine: figures::gpus().unwrap_or(here.machine), ..here });
    let found = peer_log::figures(&log, &args.system, PeerModel { name: &args.model, dtype: &args.dtype }, &run)?;
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

fn command_line() -> String {
    repeating(std::env::args().skip(1))
}

/// The words that repeat a run, without the path of the program and where the figures went.
fn repeating(words: impl Iterator<Item = String>) -> String {
    let mut said = vec!["stoker-bench".to_owned()];
    let mut is_path = false;
    for word in words {
        if !is_path && word != "--out" && !word.starts_with("--out=") {
            said.push(word.clone());
        }
        is_path = word == "--out";
    }
    said.join(" ")
}

/// One line that is written over in a terminal; lines where somebody keeps them.
fn progress(line: &str) {
    if std::io::stderr().is_terminal() {
        eprint!("\r\x1b[2K{line}");
    } else {
        eprintln!("{line}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_repeated_by_its_words_and_not_by_where_its_figures_went() {
        for words in ["run --out /tmp/a.jsonl --quick", "run --quick --out=/tmp/a.jsonl", "run --quick"] {
            assert_eq!(repeating(words.split(' ').map(str::to_owned)), "stoker-bench run --quick");
        }
    }
}
