//! `stoker-lottery`: our rule over worlds drawn by seed, beside an oracle and beside rivals with one setting for all.
//!
//! `--half seen` is where constants may be chosen; `--half unseen` is for reporting. What the others came to does not depend
//! on ours and can be kept in a file.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use clap::{Parser, ValueEnum};
use stoker_figures::{Key, Run, append};
use stoker_sim::judge::{self, Came, Others, Played};

/// Plays a lottery of worlds.
#[derive(Debug, Parser)]
struct Args {
    /// Worlds.
    #[arg(long, default_value_t = 100)]
    worlds: u64,
    /// Worlds of that half that are passed over: the first hundred of both have been looked at.
    #[arg(long, default_value_t = 0)]
    skip: u64,
    /// Which half of the seeds: `seen`, the even ones, or `unseen`, the odd ones.
    #[arg(long)]
    half: Half,
    /// Days of each world on which ours is tried, for the spread.
    #[arg(long, default_value_t = 3)]
    days: u64,
    /// Leaves the rivals out: only ours and the oracle.
    #[arg(long)]
    no_rivals: bool,
    /// Keeps what the others came to here, and takes it from here when it is there.
    #[arg(long, value_name = "FILE")]
    others: Option<PathBuf>,
    /// Prints a line for each world.
    #[arg(long)]
    each: bool,
    /// Appends the figures to this file of results.
    #[arg(long, value_name = "FILE")]
    figures: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
enum Half {
    Seen,
    Unseen,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let first = u64::from(args.half == Half::Unseen);
    let seeds: Vec<u64> = (args.skip..args.skip + args.worlds).map(|idx| 2 * idx + first).collect();
    let others = others(&args, &seeds)?;
    let played = judge::for_each(&seeds, |seed| Played {
        seed,
        ours: (0..args.days.max(1)).map(|day| judge::ours(seed, day)).collect(),
        others: others.get(&seed).cloned().unwrap_or_default(),
    });
    if args.each {
        played.iter().for_each(each);
    }
    let measures = judge::measures(&played);
    for measure in &measures {
        println!("{:>10.3}  {}", measure.value, measure.words);
    }
    let Some(path) = &args.figures else { return Ok(()) };
    let half = if args.half == Half::Seen { "seen" } else { "unseen" };
    let skip = if args.skip > 0 { format!(" --skip {}", args.skip) } else { String::new() };
    let run = Run::start(&format!("stoker-lottery --half {half} --worlds {}{skip}", args.worlds));
    let case = if args.skip > 0 { format!("lottery_{half}_{}", args.skip) } else { format!("lottery_{half}") };
    let figure = |measure: &judge::Measure| {
        run.figure(Key { model: "none", dtype: "none", case: &case, metric: measure.metric }, &[measure.value])
    };
    append(path, &measures.iter().map(figure).collect::<Vec<_>>())
}

fn each(played: &Played) {
    let came = played.ours[0].came;
    let share = 100.0 * came.late as f64 / played.ours[0].requests.max(1) as f64;
    let oracle = played.oracle().map_or_else(|| "-".to_owned(), |oracle| format!("{:.2}", came.hours / oracle.hours));
    let drawn = stoker_sim::lottery::drawn(played.seed, 0);
    println!(
        "{:>4}  late {:>6} ({share:>5.2} %)  {:>6.2} h  over oracle {oracle:>5}  {:.1}/h turns  need {:.1} max {} start {:.0} s{}",
        played.seed,
        came.late,
        came.hours,
        played.ours[0].reversals,
        drawn.need,
        drawn.setting.max,
        drawn.world.replica.start_seconds,
        if drawn.is_constant { "  constant" } else { "" }
    );
}

fn others(args: &Args, seeds: &[u64]) -> Result<BTreeMap<u64, Others>> {
    let kept = args.others.as_ref().filter(|path| path.exists());
    let mut others = kept.map_or_else(|| Ok(BTreeMap::new()), |path| read(path))?;
    let missing: Vec<u64> = seeds.iter().copied().filter(|seed| !others.contains_key(seed)).collect();
    let played = judge::for_each(&missing, |seed| judge::others(seed, !args.no_rivals));
    others.extend(missing.iter().copied().zip(played));
    if let Some(path) = &args.others {
        let lines = others.iter().flat_map(|(seed, others)| lines(*seed, others));
        fs::write(path, lines.collect::<String>()).with_context(|| format!("write {}", path.display()))?;
    }
    Ok(others)
}

fn lines(seed: u64, others: &Others) -> impl Iterator<Item = String> + use<'_> {
    let of = move |(label, target, came): (&String, f64, Came)| {
        format!("{seed} {label} {target} {} {} {}\n", came.late, came.hours, came.preemptions)
    };
    others.iter().flat_map(|(label, runs)| runs.iter().map(move |(target, came)| (label, *target, *came))).map(of)
}

fn read(path: &Path) -> Result<BTreeMap<u64, Others>> {
    let text = fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?;
    let mut all: BTreeMap<u64, Others> = BTreeMap::new();
    for line in text.lines() {
        let cells: Vec<&str> = line.split(' ').collect();
        let [seed, label, target, late, hours, preemptions] = cells[..] else {
            anyhow::bail!("{}: {line:?} is not of six cells", path.display());
        };
        let came = Came { late: late.parse()?, hours: hours.parse()?, preemptions: preemptions.parse()? };
        let runs = all.entry(seed.parse()?).or_default().entry(label.to_owned()).or_default();
        runs.push((target.parse()?, came));
    }
    Ok(all)
}
