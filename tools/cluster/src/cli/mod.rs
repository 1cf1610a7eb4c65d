//! The command line of `stoker-cluster`.

mod background;
mod demo;
mod demo_gpu;
mod demo_load;
mod kubectl;
mod serve;
mod state;

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use stoker_cluster::{Gpus, ImageBinary, cache_dir};

/// A Kubernetes cluster on this machine, without root, containers or images.
///
/// etcd, kube-apiserver, kube-controller-manager and kube-scheduler are real and run as ordinary processes on loopback
/// addresses. One node runs the containers of pods as local processes: it knows images only by name and runs the binary
/// that stands for each. Services are reachable at their ClusterIPs from this machine.
///
///     stoker-cluster up --image web=target/debug/web     # start; prints the kubeconfig
///     stoker-cluster status
///     stoker-cluster down                                # stop everything, remove everything
///
/// The Kubernetes binaries come from tools/kube/build.sh.
#[derive(Debug, Parser)]
#[command(version, verbatim_doc_comment)]
pub(crate) struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Start a cluster in the background and return when it is ready.
    Up(ClusterArgs),
    /// Stop it: no process, address or file is left.
    Down(DirArgs),
    /// Say whether it runs, and where its kubeconfig is.
    Status(DirArgs),
    /// Start a cluster with the operator, apply examples/chat.yaml and stream an answer; leaves it running.
    Demo(DemoArgs),
    /// Send a step of load to a deployment that scales, on the demo's cluster, and show its replicas follow and come back.
    DemoLoad(DemoLoadArgs),
    /// On a machine with GPUs: pods that have them are served, scaled, rolled, made to fail and deleted, each step checked.
    DemoGpu(DemoGpuArgs),
    /// The cluster itself, in the foreground.
    #[command(hide = true)]
    Serve(ClusterArgs),
}

/// Where a cluster keeps its files.
#[derive(Args, Clone, Debug)]
struct DirArgs {
    /// Folder of the cluster; it is made by `up` and removed by `down`. Default: `demo` in the project's cache.
    #[arg(long, value_name = "DIR", default_value_os_t = cache_dir().join("demo"))]
    dir: PathBuf,
}

/// What runs in a cluster.
#[derive(Args, Clone, Debug)]
struct ClusterArgs {
    #[command(flatten)]
    dir: DirArgs,

    /// The binary that runs for a container image; repeat for more. NAME without a tag stands for every tag.
    #[arg(long = "image", value_name = "NAME=BINARY")]
    images: Vec<ImageBinary>,

    /// The agent: the binary that runs for the image `stoker-agent`.
    #[arg(long, value_name = "BINARY")]
    agent: Option<PathBuf>,

    /// Install the CRD and run this operator beside the cluster, with the rights the chart gives it.
    #[arg(long, value_name = "BINARY")]
    operator: Option<PathBuf>,

    /// Run this gateway beside the operator: Services of deployments lead there.
    #[arg(long, value_name = "BINARY", requires = "operator")]
    gateway: Option<PathBuf>,

    /// Stop when the process with this id ends. Default: only `down` stops it.
    #[arg(long, value_name = "PID")]
    owner: Option<u32>,

    /// `nvidia.com/gpu` devices that the node offers: a number that it pretends to have, or `here` for those of this machine (`here:2`: each
    /// twice, for pods that share it by time).
    #[arg(long, default_value_t = Gpus::Pretended(0), value_name = "N|here[:SHARES]")]
    gpus: Gpus,

    /// The source tree: where charts/ and examples/ are.
    #[arg(long, default_value = ".", value_name = "DIR")]
    source: PathBuf,
}

/// What the demo needs: its programs.
#[derive(Args, Clone, Debug)]
struct DemoArgs {
    #[command(flatten)]
    dir: DirArgs,

    /// The agent's binary.
    #[arg(long, value_name = "BINARY")]
    agent: PathBuf,

    /// The operator's binary.
    #[arg(long, value_name = "BINARY")]
    operator: PathBuf,

    /// The gateway's binary. Default: Services lead to replicas.
    #[arg(long, value_name = "BINARY")]
    gateway: Option<PathBuf>,

    /// Stop when the process with this id ends. Default: only `down` stops it.
    #[arg(long, value_name = "PID")]
    owner: Option<u32>,

    /// The source tree: where charts/ and examples/ are.
    #[arg(long, default_value = ".", value_name = "DIR")]
    source: PathBuf,
}

/// What the load step needs beside the demo.
#[derive(Args, Clone, Debug)]
struct DemoLoadArgs {
    #[command(flatten)]
    demo: DemoArgs,

    /// The load generator, `stoker-load`.
    #[arg(long, value_name = "BINARY")]
    load: PathBuf,

    /// The load, as `stoker-load --step` takes it.
    #[arg(long, value_name = "STEPS", default_value = "15s:0.5,45s:6,15s:0.5")]
    step: String,
}

/// What the demo on GPUs needs beside the demo.
#[derive(Args, Clone, Debug)]
struct DemoGpuArgs {
    #[command(flatten)]
    demo: DemoArgs,

    /// The load generator, `stoker-load`.
    #[arg(long, value_name = "BINARY")]
    load: PathBuf,

    /// The library that makes a GPU fail, `libstoker_gpu_fault.so`.
    #[arg(long, value_name = "LIBRARY")]
    fault: PathBuf,

    /// A large checkpoint to serve on all GPUs as well: a directory in Hugging Face's layout.
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
}

pub(crate) fn run(cli: Cli) -> anyhow::Result<()> {
    match cli.command {
        Command::Up(args) => background::up(&args),
        Command::Down(args) => background::down(&args.dir),
        Command::Status(args) => background::status(&args.dir),
        Command::Demo(args) => demo::demo(&args),
        Command::DemoLoad(args) => demo_load::demo_load(&args),
        Command::DemoGpu(args) => demo_gpu::demo_gpu(&args),
        Command::Serve(args) => serve::serve(&args),
    }
}
