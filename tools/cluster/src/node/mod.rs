//! A Kubernetes node that runs the containers of pods as local processes: no root, no images, no cgroups, no network
//! namespaces. It registers itself, renews its lease, runs what the scheduler binds to it, probes, restarts with
//! back-off, and writes pod status as a kubelet does. It also offers what a kubelet does not: faults on demand.
//!
//! What it does not do: ephemeral containers and init containers that go on running, exec and gRPC probes, resource limits, security contexts, in-place
//! updates, refreshed ConfigMaps. What a pod asks for beyond that is refused in its status, or (limits and security
//! contexts) has no effect.

mod addresses;
mod backoff;
mod container;
mod context;
mod environment;
mod gpus;
mod images;
mod kubelet;
mod launch;
mod logs;
mod pod;
mod port_forward;
mod probe;
mod processes;
mod registration;
mod rewrite;
mod status;
mod view;
mod volumes;

use std::{
    collections::{HashMap, HashSet},
    path::PathBuf,
    sync::{Arc, RwLock},
    time::Duration,
};

use futures::{Stream, StreamExt};
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, ResourceExt,
    runtime::{WatchStreamExt, watcher},
};
use rustix::process::Signal;
use tokio::{runtime::Runtime, sync::watch};

use self::{
    addresses::AddressPool,
    context::{NodeContext, Voice},
    gpus::GpuPool,
    kubelet::KubeletServer,
    pod::{PodUpdate, run_pod},
    processes::{Processes, signal_group},
};
pub use self::{
    backoff::BackoffLimits,
    gpus::Gpus,
    images::{ImageBinary, ImageMap},
    registration::Capacity,
};
pub(crate) use self::{probe::port_number, status::is_ready};
use crate::{
    blocking::{SteadyRetry, enter, start_runtime},
    control_plane::{ControlPlane, client_of},
    credentials::Identity,
    error::ClusterError,
};

/// Which node to be.
#[derive(Clone, Debug)]
pub struct NodeOptions {
    /// Its name.
    pub name: String,
    /// Which part of the cluster's pod addresses it has: 0 or 1.
    pub node_idx: usize,
    /// The binaries that stand for images.
    pub images: ImageMap,
    /// What it offers to the scheduler.
    pub capacity: Capacity,
    /// How long containers that crash wait.
    pub backoff: BackoffLimits,
    /// How often the lease is renewed.
    pub heartbeat: Duration,
}

impl Default for NodeOptions {
    fn default() -> Self {
        Self {
            name: "node-0".to_owned(),
            node_idx: 0,
            images: ImageMap::default(),
            capacity: Capacity::default(),
            backoff: BackoffLimits::default(),
            heartbeat: Duration::from_secs(10),
        }
    }
}

/// A running node. Dropping it is what pulling the plug of a machine is: every process dies, and nobody is told.
pub struct ProcessNode {
    ctx: Arc<NodeContext>,
    runtime: Option<Runtime>,
}

impl ProcessNode {
    /// Registers the node and begins to run pods.
    pub fn start(control_plane: &ControlPlane, options: NodeOptions) -> Result<Self, ClusterError> {
        let runtime = start_runtime(&options.name)?;
        let ctx = Arc::new(enter(&runtime, context(control_plane, &options))?);
        let kubelet = enter(&runtime, KubeletServer::bind(ctx.kubelet))?;
        enter(&runtime, registration::register(&ctx, &options))?;
        runtime.spawn(kubelet.serve(Arc::clone(&ctx)));
        runtime.spawn(registration::heartbeat(Arc::clone(&ctx), options));
        runtime.spawn(run_pods(Arc::clone(&ctx)));
        Ok(Self { ctx, runtime: Some(runtime) })
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.ctx.name
    }

    /// Makes `binary` the entry point of `image` from now on.
    pub fn add_image(&self, image: &str, binary: impl Into<PathBuf>) {
        self.ctx.images.write().expect("no holder panics").insert(image, binary);
    }

    /// Main processes of a pod's containers.
    pub fn pids_of(&self, namespace: &str, pod: &str) -> Vec<u32> {
        self.ctx.processes.of_pod(namespace, pod)
    }

    /// A fault: SIGKILL to everything a pod runs. The node sees it as a crash.
    pub fn kill_pod(&self, namespace: &str, pod: &str) -> Result<(), ClusterError> {
        self.signal_pod(namespace, pod, Signal::KILL)
    }

    /// A fault: the pod's processes hang (SIGSTOP) until their death.
    pub fn freeze_pod(&self, namespace: &str, pod: &str) -> Result<(), ClusterError> {
        self.signal_pod(namespace, pod, Signal::STOP)
    }

    /// A fault: the node renews no lease, writes no status and hears no news until [`Self::speak`]; its pods go on.
    pub fn fall_silent(&self) {
        self.ctx.voice.send_replace(Voice::Silent);
    }

    /// Ends [`Self::fall_silent`].
    pub fn speak(&self) {
        self.ctx.voice.send_replace(Voice::Speaking);
    }

    fn signal_pod(&self, namespace: &str, pod: &str, signal: Signal) -> Result<(), ClusterError> {
        let pids = self.pids_of(namespace, pod);
        if pids.is_empty() {
            return Err(ClusterError::NoSuchPod { namespace: namespace.to_owned(), name: pod.to_owned() });
        }
        pids.into_iter().for_each(|pid| signal_group(pid, signal));
        Ok(())
    }
}

impl Drop for ProcessNode {
    fn drop(&mut self) {
        self.ctx.processes.close();
        // In the background, because a runtime may not be waited for inside another one.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

async fn context(control_plane: &ControlPlane, options: &NodeOptions) -> Result<NodeContext, ClusterError> {
    let slot = control_plane.slot();
    let addresses = slot.pod_addresses(options.node_idx).ok_or(ClusterError::TooManyNodes)?;
    Ok(NodeContext {
        client: client_of(control_plane.config_of(Identity::Node).await?)?,
        name: options.name.clone(),
        host: slot.home(),
        api: slot.addresses().api,
        kubelet: slot.kubelet(options.node_idx),
        dir: control_plane.dir().join(&options.name),
        images: RwLock::new(options.images.clone()),
        backoff: options.backoff,
        processes: Processes::new(Arc::clone(control_plane.keeper())),
        addresses: AddressPool::new(addresses),
        gpus: GpuPool::new(&options.capacity.gpus),
        voice: watch::Sender::new(Voice::Speaking),
    })
}

/// Follows the pods that are bound to this node.
async fn run_pods(ctx: Arc<NodeContext>) {
    let config = watcher::Config::default().fields(&format!("spec.nodeName={}", ctx.name));
    let pods = watcher(Api::<Pod>::all(ctx.client.clone()), config).backoff(SteadyRetry);
    PodTable { ctx, runs: HashMap::new(), listed: HashSet::new() }.follow(pods).await;
}

/// The pods that run here, by uid: a name may be taken again while its last holder still stops.
struct PodTable {
    ctx: Arc<NodeContext>,
    runs: HashMap<String, watch::Sender<PodUpdate>>,
    /// What a list in progress has shown; pods that it did not show are gone.
    listed: HashSet<String>,
}

impl PodTable {
    async fn follow(mut self, events: impl Stream<Item = watcher::Result<watcher::Event<Pod>>>) {
        let mut events = std::pin::pin!(events);
        while let Some(event) = events.next().await {
            self.ctx.speaking().await;
            match event {
                Ok(watcher::Event::Init) => self.listed.clear(),
                Ok(watcher::Event::InitApply(pod)) => {
                    self.listed.insert(pod.uid().unwrap_or_default());
                    self.apply(pod);
                }
                Ok(watcher::Event::InitDone) => self.runs.retain(|uid, run| {
                    let listed = self.listed.contains(uid);
                    if !listed {
                        run.send_replace(PodUpdate::Gone);
                    }
                    listed
                }),
                Ok(watcher::Event::Apply(pod)) => self.apply(pod),
                Ok(watcher::Event::Delete(pod)) => {
                    if let Some(run) = self.runs.remove(&pod.uid().unwrap_or_default()) {
                        run.send_replace(PodUpdate::Gone);
                    }
                }
                Err(error) => tracing::warn!(node = self.ctx.name, %error, "the watch of pods was interrupted"),
            }
        }
    }

    fn apply(&mut self, pod: Pod) {
        let update = PodUpdate::Present(Arc::new(pod.clone()));
        let uid = pod.uid().unwrap_or_default();
        if let Some(run) = self.runs.get(&uid) {
            run.send_replace(update);
            return;
        }
        let (sender, updates) = watch::channel(update);
        tokio::spawn(run_pod(Arc::clone(&self.ctx), updates));
        self.runs.insert(uid, sender);
    }
}
