//! `stoker-routes`: which replica gets what. Our rule beside others' before simulated replicas, and the time that a choice takes. Figures
//! are appended to a results file.

use std::{path::PathBuf, time::Instant};

use anyhow::Result;
use clap::Parser;
use stoker_figures::{self as figures, Figure, Key, Run, System};
use stoker_routing::{Ask, Capacity, Chain, Load as ReplicaLoad, PrefixIndex, ReplicaView, Rules, Source, mix, route};
use stoker_sim::routing::{Kind, Load, RuleName, Setting, run, shared_cache_hits};

/// Compares rules of routing in virtual time, and measures ours.
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    /// Replicas of the simulated fleets.
    #[arg(long, value_delimiter = ',', default_value = "4,16,64")]
    replicas: Vec<usize>,
    /// Virtual seconds for which requests come.
    #[arg(long, default_value_t = 60.0)]
    seconds: f64,
    /// How often sessions begin, beside what is usual: 1 leaves room for every rule.
    #[arg(long, value_delimiter = ',', default_value = "1,1.5")]
    paces: Vec<f64>,
    /// Of everything that is left to chance.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Only these kinds of load (shared, catalogue, chat, agents, unshared) and rules (by their names in figures); repeat for more. Default: all.
    #[arg(long, value_parser = word)]
    only: Vec<String>,
    /// File that figures are appended to. Default: none is written.
    #[arg(long)]
    out: Option<PathBuf>,
    /// Measure only the time of a choice.
    #[arg(long)]
    time_only: bool,
    /// Measure everything but the time of a choice, which says nothing on a machine that has other things to do.
    #[arg(long, conflicts_with = "time_only")]
    without_time: bool,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let run = Run::start("stoker-routes");
    let mut found = Vec::new();
    if !args.without_time {
        found.push(time_of_choices(&run));
    }
    if !args.time_only {
        for kind in Kind::ALL.into_iter().filter(|kind| is_meant(&args.only, &kinds(), kind.word())) {
            for (n_replicas, pace) in args.replicas.iter().flat_map(|n| args.paces.iter().map(move |pace| (*n, *pace)))
            {
                let load = Load { kind, n_replicas, seconds: args.seconds, pace, seed: args.seed };
                found.extend(compared(&run, &load, &args.only));
            }
        }
    }
    match args.out {
        Some(out) => figures::append(&out, &found),
        None => Ok(()),
    }
}

fn kinds() -> Vec<&'static str> {
    Kind::ALL.map(Kind::word).into()
}

fn rules() -> Vec<&'static str> {
    RuleName::ALL.map(RuleName::word).into()
}

/// A kind of load or a rule.
fn word(text: &str) -> Result<String, String> {
    let known = [kinds(), rules()].concat();
    if known.contains(&text) { Ok(text.to_owned()) } else { Err(format!("one of: {}", known.join("; "))) }
}

/// Whether one of these words is asked for: it is named, or none of them is.
fn is_meant(only: &[String], words: &[&str], word: &str) -> bool {
    only.iter().any(|named| named == word) || !only.iter().any(|named| words.contains(&named.as_str()))
}

/// Rules on one load.
fn compared(figures: &Run, load: &Load, only: &[String]) -> Vec<Figure> {
    let pace = if load.pace == 1.0 { String::new() } else { format!("_at_{}", load.pace) };
    let case = format!("route_{}_{}{pace}", load.kind.word(), load.n_replicas);
    let oracle = shared_cache_hits(load);
    println!("\n{case}: one cache for all would have {:.1} % of prompt tokens", 100.0 * oracle);
    println!(
        "| rule | hits, of the oracle's | TTFT p50 | p99 | imbalance | agreement | requests |\n|---|---|---|---|---|---|---|"
    );
    let mut found = Vec::new();
    for rule in RuleName::ALL.into_iter().filter(|rule| is_meant(only, &rules(), rule.word())) {
        let outcome = run(&Setting { load: *load, rule });
        let share = if oracle > 0.01 { outcome.hit_share / oracle } else { 1.0 };
        let [p50, p99] = [outcome.ttft.p50, outcome.ttft.p99].map(|seconds| 1e3 * seconds);
        println!(
            "| {} | {:.1} %, {:.3} | {p50:.0} ms | {p99:.0} ms | {:.2} | {:.3} | {} |",
            rule.word(),
            100.0 * outcome.hit_share,
            share,
            outcome.imbalance,
            outcome.agreement,
            outcome.n_requests
        );
        let version = if rule.word().starts_with("stoker") { env!("CARGO_PKG_VERSION") } else { "as documented" };
        let system = System { name: rule.word().to_owned(), version: version.to_owned() };
        let figure = |metric, value| {
            let key = Key { model: "none", dtype: "none", case: &case, metric };
            figures.figure_of(&system, key, &[value])
        };
        found.extend([figure("ttft_p50_ms", p50), figure("ttft_p99_ms", p99), figure("imbalance", outcome.imbalance)]);
        if matches!(rule, RuleName::Stoker { n_gateways: 2.., .. }) {
            found.push(figure("agreement", outcome.agreement));
        }
        if load.kind != Kind::NoSharing {
            found.push(figure("hits_of_oracle", share));
        }
    }
    found
}

/// Microseconds for a choice among 1,000 replicas with a million beginnings of prompts known; what is remembered of it included, the
/// hash of the prompt's text not.
fn time_of_choices(figures: &Run) -> Figure {
    const REPLICAS: u32 = 1000;
    const PREFIXES: usize = 1 << 20;
    let mut index = PrefixIndex::bounded(PREFIXES);
    let prompt = |number: u64, n_bytes: usize| {
        let shared = vec![(number % 50) as u8; 8_000];
        let own: Vec<u8> = (0..n_bytes / 8).flat_map(|at| mix(number, at as u64).to_le_bytes()).collect();
        Chain::of(1, &[&shared, &own])
    };
    let mut number = 0;
    let hearings: Vec<_> = (0..REPLICAS).map(|slot| index.hear(slot)).collect();
    while index.len(Source::Predicted) < PREFIXES - 10_000 {
        number += 1;
        let (chain, slot) = (prompt(number, 16_000), (mix(3, number) % u64::from(REPLICAS)) as u32);
        index.note(&chain, slot, 0, 0);
        chain.marks().iter().for_each(|mark| index.store(&hearings[slot as usize], mark.hash));
    }
    let view = |slot| ReplicaView {
        slot,
        seed: mix(7, slot.into()),
        weight: 100,
        serving_since_ms: 0,
        is_healthy: true,
        load: ReplicaLoad {
            requests: (mix(9, slot.into()) % 20) as u32,
            prefill_tokens: 0,
            kv_share: 0.5,
            is_fresh: true,
        },
    };
    let views: Vec<ReplicaView> = (0..REPLICAS).map(view).collect();
    let capacity = Capacity { kv_blocks: 1 << 20, waiting_tokens: 0 };
    // Half go on with a prompt that is known, half are new behind one of fifty beginnings.
    let asked = (0..4000u64).map(|at| prompt(if at % 2 == 0 { number - at } else { number + at }, 20_000));
    let asked: Vec<Chain> = asked.collect();
    let mut samples = Vec::new();
    for chain in &asked {
        let begun = Instant::now();
        let matches = index.matches(chain, 0, |_| capacity);
        let ask = Ask { chain, session: None, request: 0, now_ms: 1_000_000 };
        let choice = route(&ask, &views, &matches, &Rules::default()).expect("there are replicas");
        index.note(chain, choice.place as u32, choice.matched, 0);
        samples.push(begun.elapsed().as_secs_f64() * 1e6);
    }
    let figure = figures.figure(Key { model: "none", dtype: "none", case: "route_1000", metric: "us" }, &samples);
    let marks = asked.iter().map(|chain| chain.marks().len()).sum::<usize>() / asked.len();
    println!(
        "a choice among {REPLICAS} replicas, {} beginnings known, prompts of {marks} marks: {:.1} us (min {:.1}, max {:.1})",
        index.len(Source::Exact),
        figure.value,
        figure.min,
        figure.max
    );
    figure
}
