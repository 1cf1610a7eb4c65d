//! `kubectl stoker`: what a deployment does and why, whether its model fits, how a change goes. Writes only what it is told to: a
//! change that is paused, resumed or undone, a pod that is drained.

mod cluster;
mod complete;
mod dashboard;
mod drain;
mod events;
mod explain;
mod http;
mod logs;
mod operator;
mod output;
mod plan;
mod records;
mod rollout;
mod route;
mod settings;
mod simulate;
mod status;
mod table;
mod top;

use std::{
    env, io, panic,
    process::{self, ExitCode},
};

use anyhow::Result;
use clap::{Command, CommandFactory, Parser, Subcommand};

/// Looks at InferenceDeployments, explains their scaling, plans, rolls and drains.
#[derive(Debug, Parser)]
#[command(name = "kubectl-stoker", bin_name = "kubectl stoker", version)]
struct Cli {
    #[command(subcommand)]
    word: Word,
}

#[derive(Debug, Subcommand)]
enum Word {
    /// One deployment on one screen: replicas, KV, preemptions, the last decision, conditions.
    Status(status::Status),
    /// All deployments in one table, as their replicas say at this moment.
    Top(top::Top),
    /// What all replicas log, merged, each line with its pod.
    Logs(logs::Logs),
    /// What happened to a deployment and its pods.
    Events(events::Events),
    /// One replica leaves: its streams finish, another one takes its place.
    Drain(drain::Drain),
    /// Does the model fit? Says the numbers before anything is scheduled, and what to change where it does not.
    Plan(plan::PlanArgs),
    /// How a change goes, holding it, undoing it.
    Rollout(rollout::Rollout),
    /// Why that many replicas? Explains scaling decisions from their records and makes each one again.
    Explain(explain::Explain),
    /// Where would a request go now, and why not elsewhere? What a gateway sees of each replica; nothing is sent to one.
    Route(route::Route),
    /// Completions for a shell, to be sourced by it: for the program by its own name. kubectl completes `kubectl stoker` where this
    /// program is on the PATH as `kubectl_complete-stoker`, too.
    Completions {
        /// The shell.
        shell: clap_complete::Shell,
    },
    /// The manual page, for man.
    Man,
    /// The operator's pages in a browser: all deployments, and why each has the replicas it has.
    Dashboard(dashboard::Dashboard),
    /// Runs the deciding function on a trace in virtual time, beside other autoscalers if you like.
    Simulate(simulate::Simulate),
}

/// What a shell says of a program that wrote where nobody reads.
const NOBODY_READS: i32 = 141;

/// Whoever reads may have had enough, as `head` does: then it is over, without a word. By a hook and not by the signal, which
/// would end the program at a connection that the other side has closed, too.
fn end_with_the_reader() {
    let usual = panic::take_hook();
    panic::set_hook(Box::new(move |info| match info.payload_as_str() {
        Some(said) if said.starts_with("failed printing to stdout: Broken pipe") => process::exit(NOBODY_READS),
        _ => usual(info),
    }));
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<ExitCode> {
    end_with_the_reader();
    let mut words = env::args();
    if complete::is_asked(&words.next().unwrap_or_default()) {
        complete::complete(Cli::command(), &words.collect::<Vec<_>>()).await;
        return Ok(ExitCode::SUCCESS);
    }
    match Cli::parse().word {
        Word::Status(args) => status::status(&args).await.map(|()| ExitCode::SUCCESS),
        Word::Top(args) => top::top(&args).await.map(|()| ExitCode::SUCCESS),
        Word::Logs(args) => logs::logs(&args).await.map(|()| ExitCode::SUCCESS),
        Word::Events(args) => events::events(&args).await.map(|()| ExitCode::SUCCESS),
        Word::Drain(args) => drain::drain(&args).await.map(|()| ExitCode::SUCCESS),
        Word::Completions { shell } => {
            clap_complete::generate(shell, &mut Cli::command(), "kubectl-stoker", &mut io::stdout());
            Ok(ExitCode::SUCCESS)
        }
        Word::Man => manual().map(|()| ExitCode::SUCCESS),
        Word::Plan(args) => plan::plan(&args).await,
        Word::Rollout(args) => rollout::rollout(&args).await.map(|()| ExitCode::SUCCESS),
        Word::Explain(args) => explain::explain(&args).await,
        Word::Route(args) => route::route(&args).await.map(|()| ExitCode::SUCCESS),
        Word::Dashboard(args) => dashboard::dashboard(&args).await.map(|()| ExitCode::SUCCESS),
        Word::Simulate(args) => simulate::simulate(&args).map(|()| ExitCode::SUCCESS),
    }
}

/// One page: the command, then each of its words, and theirs.
fn manual() -> Result<()> {
    let mut command = Cli::command();
    command.build();
    clap_mangen::Man::new(command.clone()).render(&mut io::stdout())?;
    sections(&command)
}

fn sections(command: &Command) -> Result<()> {
    for word in command.get_subcommands().filter(|word| word.get_name() != "help") {
        let name = word.get_bin_name().unwrap_or(word.get_name()).to_owned();
        let page = clap_mangen::Man::new(word.clone().display_name(name));
        page.render_name_section(&mut io::stdout())?;
        page.render_synopsis_section(&mut io::stdout())?;
        page.render_options_section(&mut io::stdout())?;
        sections(word)?;
    }
    Ok(())
}
