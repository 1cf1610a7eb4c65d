//! `kubectl stoker explain`: decisions in a person's words, each made again from its record.

mod journal;
mod limits;
mod pick;
mod source;
mod watch;
mod words;

use std::{path::PathBuf, process::ExitCode};

use anyhow::Result;
use clap::Args;
use jiff::Timestamp;
use serde_json::json;
use stoker_crds::InferenceDeploymentStatus;
use stoker_scaling::DecisionRecord;

use self::{
    journal::Journal,
    pick::{At, Pick},
    source::Source,
    words::Verdict,
};
use crate::{cluster::ClusterArgs, operator::OperatorArgs, output::Output, settings};

pub(crate) use self::words::ago;

/// What to explain.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Explain {
    /// The InferenceDeployment.
    #[arg(required_unless_present = "file")]
    name: Option<String>,
    /// A file of decision records instead, as --record writes it.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["name", "watch", "record"])]
    file: Option<PathBuf>,
    #[command(flatten)]
    which: Which,
    /// Also says what another setting would have decided, e.g. `scaling.targets.kv=0.7`; may be repeated.
    #[arg(long = "set", value_name = "PATH=VALUE")]
    settings: Vec<String>,
    /// Goes on: a line for each decision, and the whole explanation when number, cause or bound changes.
    #[arg(long, short, conflicts_with_all = ["last", "at", "changes", "settings"])]
    watch: bool,
    /// Appends the records that FILE does not have yet; with --watch also those to come. `simulate` takes it as a trace.
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,
    #[command(flatten)]
    output: Output,
    #[command(flatten)]
    cluster: ClusterArgs,
    #[command(flatten)]
    operator: OperatorArgs,
}

const EXAMPLES: &str = "\
Examples:
  kubectl stoker explain chat                          the last decision, term by term
  kubectl stoker explain chat --at 10m                 the one in force ten minutes ago
  kubectl stoker explain chat --changes                every one that changed the number
  kubectl stoker explain chat --watch --record FILE    live, and kept
  kubectl stoker explain --file FILE --set scaling.targets.kv=0.7

The operator keeps the decisions of some minutes; --record keeps more. Every record read is decided again by the same
function, and the exit status is 1 if one bit comes out different.";

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
    /// Only the last one is asked for.
    fn is_newest(&self) -> bool {
        matches!(self, Self { last: None, at: None, changes: false })
    }

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
pub(crate) async fn explain(args: &Explain) -> Result<ExitCode> {
    let source = Source::of(args).await?;
    let mut journal = args.record.as_deref().map(Journal::open).transpose()?;
    if args.watch {
        return watch::watch(&source, journal.as_mut()).await;
    }
    let records = source.records(0).await?;
    if let Some(journal) = &mut journal {
        journal.append(&records)?;
    }
    show(args, &records, source.status())
}

fn show(args: &Explain, records: &[DecisionRecord], status: Option<&InferenceDeploymentStatus>) -> Result<ExitCode> {
    let picked = pick::picked(records, args.which.pick(Timestamp::now()), args.which.changes)?;
    if args.output.is_json() {
        let verdict = Verdict::of(records);
        let limits = status.map(limits::json);
        println!("{:#}", json!({"decisions": picked, "reproduced": verdict.is_reproduced(), "limits": limits}));
        return Ok(verdict.exit_code());
    }
    for record in picked {
        println!("{}", words::decision(record));
        if !args.settings.is_empty() {
            let other = record.what_if(&settings::spec(record.spec.clone(), &args.settings)?);
            println!("{}", words::otherwise(&args.settings, &other));
        }
    }
    // They are of now: beside decisions of other times they would mislead.
    let limits = status.filter(|_| args.which.is_newest()).map(limits::lines).unwrap_or_default();
    if !limits.is_empty() {
        println!("Of these replicas\n{limits}");
    }
    let verdict = Verdict::of(records);
    println!("{verdict}");
    Ok(verdict.exit_code())
}
