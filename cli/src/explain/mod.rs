//! `kubectl stoker explain`: decisions in a person's words, each made again from its record.

mod pick;
mod words;

use std::{fs, path::PathBuf, process::ExitCode};

use anyhow::{Context, Result};
use clap::Args;
use jiff::Timestamp;
use stoker_scaling::DecisionRecord;

use crate::{records, settings};
use pick::{At, Pick};

/// What to explain.
#[derive(Debug, Args)]
pub(crate) struct Explain {
    /// A file of decision records, as `--record` writes it.
    #[arg(long, value_name = "FILE")]
    file: PathBuf,
    #[command(flatten)]
    which: Which,
    /// Also says what another setting would have decided, e.g. `scaling.targets.kv=0.7`; may be repeated.
    #[arg(long = "set", value_name = "PATH=VALUE")]
    settings: Vec<String>,
}

/// Which decisions.
#[derive(Debug, Args)]
struct Which {
    /// The last N. Default: 1, with --changes all.
    #[arg(long, value_name = "N", conflicts_with = "at")]
    last: Option<usize>,
    /// The one in force at a time: 2026-01-31T12:00:00Z, or 10m for ten minutes ago.
    #[arg(long, value_name = "TIME")]
    at: Option<At>,
    /// Only those that changed the number.
    #[arg(long)]
    changes: bool,
}

impl Which {
    fn pick(&self, now: Timestamp) -> Pick {
        match (self.at, self.last, self.changes) {
            (Some(at), ..) => Pick::InForceAt(at.ms(now)),
            (None, Some(last), _) => Pick::Last(last),
            (None, None, true) => Pick::All,
            (None, None, false) => Pick::Last(1),
        }
    }
}

/// Explains; fails the process when a decision does not come out again as it was recorded.
pub(crate) fn explain(args: &Explain) -> Result<ExitCode> {
    let name = args.file.display().to_string();
    let text = fs::read_to_string(&args.file).with_context(|| format!("read {name}"))?;
    show(args, &records::parse(&name, &text)?)
}

fn show(args: &Explain, records: &[DecisionRecord]) -> Result<ExitCode> {
    let pick = args.which.pick(Timestamp::now());
    for record in pick::picked(records, pick, args.which.changes)? {
        println!("{}", words::decision(record));
        if !args.settings.is_empty() {
            let other = record.what_if(&settings::spec(record.spec.clone(), &args.settings)?);
            println!("{}", words::otherwise(&args.settings, &other));
        }
    }
    let verdict = words::Verdict::of(records);
    println!("{verdict}");
    Ok(if verdict.is_reproduced() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
