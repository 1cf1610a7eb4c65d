//! `stoker-e2e`: a real Kubernetes node in namespaces of its own, and the walk through Stoker on it.
//!
//! The process starts itself twice more (see [`Stage`]): as the first process of fresh PID, mount and network
//! namespaces, which outlives everything in them and cleans up, and inside them as the one that starts the cluster
//! and walks through the scenario. Nothing is left behind however it ends, because the kernel ends a PID namespace
//! with its first process, and mounts and network devices go with their namespaces.

#![forbid(unsafe_code)]

mod cgroups;
mod cluster;
mod control_plane;
mod daemon;
mod diagnose;
mod init;
mod kubectl;
mod namespaces;
mod network;
mod node;
mod outer;
mod requirements;
mod scenario;
mod stages;
mod transcript;
mod wait;

use std::{path::PathBuf, process::ExitCode};

use anyhow::Result;
use clap::{Args, Parser, Subcommand, ValueEnum};

/// Run Stoker on a real kubelet and containerd, in namespaces of its own. Needs root; leaves nothing behind.
#[derive(Debug, Parser)]
#[command(version, after_help = "tools/e2e/run.sh builds everything and gives all of these arguments.")]
struct Cli {
    /// Which of its three processes this is
    #[arg(long, hide = true, value_enum, default_value_t = Stage::Outer)]
    stage: Stage,
    /// Name of this run's cgroups
    #[arg(long, hide = true, default_value = "")]
    slot: String,
    #[command(subcommand)]
    word: Word,
}

/// The three processes of a run, each the parent of the next.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
enum Stage {
    /// Started by a person: checks requirements, makes the namespaces, passes signals on.
    Outer,
    /// First process of the namespaces: reaps, and cleans up when the next one ends.
    Init,
    /// Starts the cluster and does what was asked.
    Inside,
}

#[derive(Clone, Debug, Subcommand)]
enum Word {
    /// Install the chart, serve two replicas, roll, scale, guard, explain, delete; then take everything down
    Run(Options),
    /// Start the node with the images imported, say how to enter it, and keep it until Ctrl-C
    Node(Options),
    /// Start the node, run one command in it with KUBECONFIG and PATH set, and take everything down
    Exec {
        #[command(flatten)]
        options: Options,
        /// The command and its arguments, after `--`
        #[arg(last = true, required = true)]
        command: Vec<String>,
    },
}

/// What the cluster is made of.
#[derive(Args, Clone, Debug)]
struct Options {
    /// Folder with etcd, kube-apiserver, kube-controller-manager, kube-scheduler, kubelet, kube-proxy, kubectl
    #[arg(long, value_name = "DIR")]
    kube_bin: PathBuf,
    /// The helm binary
    #[arg(long, value_name = "FILE")]
    helm: PathBuf,
    /// Folder with containerd, containerd-shim-runc-v2, ctr
    #[arg(long, value_name = "DIR")]
    containerd_bin: PathBuf,
    /// The coredns binary
    #[arg(long, value_name = "FILE")]
    coredns: PathBuf,
    /// The kube-router binary
    #[arg(long, value_name = "FILE")]
    kube_router: PathBuf,
    /// The kubectl plugin
    #[arg(long, value_name = "FILE")]
    plugin: PathBuf,
    /// The chart
    #[arg(long, value_name = "DIR", default_value = "charts/stoker")]
    chart: PathBuf,
    /// Image archive to import; may be given more than once
    #[arg(long = "image", value_name = "FILE")]
    images: Vec<PathBuf>,
    /// Keep the logs of every process and pod here
    #[arg(long, value_name = "DIR")]
    logs: Option<PathBuf>,
}

impl Word {
    fn options(&self) -> &Options {
        match self {
            Self::Run(options) | Self::Node(options) | Self::Exec { options, .. } => options,
        }
    }
}

fn main() -> Result<ExitCode> {
    let cli = Cli::parse();
    match cli.stage {
        Stage::Outer => outer::run(),
        Stage::Init => init::run(&cli.slot),
        Stage::Inside => inside(&cli),
    }
}

fn inside(cli: &Cli) -> Result<ExitCode> {
    init::exit_when_abandoned();
    let options = cli.word.options();
    let mut stages = stages::Stages::new();
    namespaces::prepare()?;
    let outcome = cluster::Cluster::start(options, &cli.slot, &mut stages)
        .and_then(|cluster| act(&cli.word, &cluster, &mut stages));
    diagnose::keep_logs(options);
    match outcome {
        Ok(code) => Ok(code),
        Err(error) => {
            diagnose::print(options);
            Err(error)
        }
    }
}

fn act(word: &Word, cluster: &cluster::Cluster, stages: &mut stages::Stages) -> Result<ExitCode> {
    match word {
        Word::Run(options) => scenario::run(options, cluster, stages).map(|()| ExitCode::SUCCESS),
        Word::Node(_) => cluster.keep(),
        Word::Exec { command, .. } => cluster.exec(command),
    }
}
