//! The background process: starts the cluster part by part, says so in the cluster's folder, and holds it until it is told
//! to stop. Prints nothing but its log.

use std::{
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::Context;
use stoker_cluster::{
    Capacity, ControlPlane, ControlPlaneOptions, Controllers, GatewayProcess, ImageMap, NodeOptions, OperatorOptions,
    OperatorProcess, ProcessNode, ServiceProxy, is_running,
};
use tokio::{
    signal::unix::{SignalKind, signal},
    time::interval,
};
use tracing_subscriber::EnvFilter;

use super::{
    ClusterArgs,
    state::{Files, State},
};

/// The image that the operator gives to pods.
pub(crate) const AGENT_IMAGE: &str = "stoker-agent";
/// How often the operator is looked after.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// Everything that runs, in the order of its end.
struct Cluster {
    gateway: Option<GatewayProcess>,
    operator: Option<OperatorProcess>,
    _node: ProcessNode,
    _proxy: ServiceProxy,
    control_plane: ControlPlane,
}

pub(crate) fn serve(args: &ClusterArgs) -> anyhow::Result<()> {
    // While the API server starts it answers with errors on purpose; the client would log each of them.
    let filter = EnvFilter::new("info,kube_client::client::builder=off");
    tracing_subscriber::fmt().with_ansi(false).with_env_filter(filter).init();
    let files = Files::at(&args.dir.dir);
    let mut cluster = start(args, &files)?;
    files.write(&state(&cluster)).context("write state.json")?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(hold(&mut cluster, &files, args.owner))?;
    tracing::info!("stopping");
    Ok(())
}

fn start(args: &ClusterArgs, files: &Files) -> anyhow::Result<Cluster> {
    let mut clock = Instant::now();
    let mut done = |stage: &str| -> anyhow::Result<()> {
        files.add_stage(stage, clock.elapsed().as_secs_f64()).context("write stages.jsonl")?;
        clock = Instant::now();
        Ok(())
    };
    let options =
        ControlPlaneOptions { controllers: Controllers::all(), dir: Some(files.cluster_dir()), ..Default::default() };
    let control_plane = ControlPlane::start(options)?;
    // The folder around the cluster's own goes with it, also when this process is killed.
    control_plane.keeper().remove_at_end(files.dir());
    done("control plane")?;
    let proxy = ServiceProxy::start(&control_plane)?;
    let node = ProcessNode::start(&control_plane, node_options(args)?)?;
    done("node")?;
    let operator = args.operator.as_deref().map(|binary| start_operator(&control_plane, binary, args)).transpose()?;
    if operator.is_some() {
        done("CRD and operator")?;
    }
    let gateway = match (&operator, &args.gateway) {
        (Some(operator), Some(binary)) => Some(GatewayProcess::start(&control_plane, operator, absolute(binary)?)?),
        _ => None,
    };
    Ok(Cluster { gateway, operator, _node: node, _proxy: proxy, control_plane })
}

fn node_options(args: &ClusterArgs) -> anyhow::Result<NodeOptions> {
    let mut images: ImageMap = args.images.iter().cloned().collect();
    if let Some(agent) = &args.agent {
        images.insert(AGENT_IMAGE, absolute(agent)?);
    }
    Ok(NodeOptions {
        images,
        capacity: Capacity { gpus: args.gpus.clone(), ..Default::default() },
        ..Default::default()
    })
}

fn start_operator(control_plane: &ControlPlane, binary: &Path, args: &ClusterArgs) -> anyhow::Result<OperatorProcess> {
    let options = OperatorOptions {
        binary: absolute(binary)?,
        chart: args.source.join("charts/stoker"),
        agent_image: format!("{AGENT_IMAGE}:{}", env!("CARGO_PKG_VERSION")),
        gateway: args.gateway.is_some(),
    };
    Ok(OperatorProcess::start(control_plane, &options)?)
}

fn absolute(binary: &Path) -> anyhow::Result<PathBuf> {
    binary.canonicalize().with_context(|| format!("find {}; build it first", binary.display()))
}

fn state(cluster: &Cluster) -> State {
    let control_plane = &cluster.control_plane;
    State {
        operator: cluster.operator.as_ref().map(|operator| operator.url().to_owned()),
        pages: cluster.operator.as_ref().map(|operator| operator.pages_url().to_owned()),
        gateway: cluster.gateway.as_ref().map(|gateway| gateway.url().to_owned()),
        pid: std::process::id(),
        kubeconfig: control_plane.kubeconfig_path(),
        binaries: control_plane.binaries().dir().to_owned(),
        url: control_plane.url(),
        ready_at: jiff::Timestamp::now().as_second(),
    }
}

/// Looks after the operator until a signal says that it is time to go, or nobody is left to send one: the owner ended, or
/// the folder by which we could be found is gone.
async fn hold(cluster: &mut Cluster, files: &Files, owner: Option<u32>) -> anyhow::Result<()> {
    let (mut terminated, mut interrupted) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    // The terminal that started us may close; we stay.
    let mut hung_up = signal(SignalKind::hangup())?;
    let mut look = interval(LOOK_INTERVAL);
    loop {
        tokio::select! {
            _ = terminated.recv() => return Ok(()),
            _ = interrupted.recv() => return Ok(()),
            _ = hung_up.recv() => {}
            _ = look.tick() => {
                if !files.dir().exists() || owner.is_some_and(|owner| !is_running(owner)) {
                    return Ok(());
                }
                if let Some(operator) = &mut cluster.operator && operator.revive()? {
                    tracing::warn!("the operator had ended; it was started again");
                }
                if let Some(gateway) = &mut cluster.gateway && gateway.revive()? {
                    tracing::warn!("the gateway had ended; it was started again");
                }
            }
        }
    }
}
