//! The node as the cluster sees it: the Node object and its heartbeat. Knows no pods.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use jiff::Timestamp;
use k8s_openapi::{
    api::{
        coordination::v1::{Lease, LeaseSpec},
        core::v1::{DaemonEndpoint, Node, NodeAddress, NodeCondition, NodeDaemonEndpoints, NodeStatus},
    },
    apimachinery::pkg::{
        api::resource::Quantity,
        apis::meta::v1::{MicroTime, Time},
    },
};
use kube::{
    Api,
    api::{Patch, PatchParams},
    core::ObjectMeta,
};
use tokio::time::sleep;

use super::{
    NodeOptions,
    context::NodeContext,
    gpus::{GPU_RESOURCE, Gpus},
};
use crate::error::ClusterError;

const FIELD_MANAGER: &str = "process-node";
const LEASE_NAMESPACE: &str = "kube-node-lease";

/// What the node offers to the scheduler.
#[derive(Clone, Debug)]
pub struct Capacity {
    /// CPUs, as a Kubernetes quantity. Not enforced.
    pub cpu: String,
    /// Memory, as a Kubernetes quantity. Not enforced.
    pub memory: String,
    /// Pods at most.
    pub pods: u32,
    /// `nvidia.com/gpu` devices.
    pub gpus: Gpus,
}

impl Default for Capacity {
    /// More than the machine has: replicas of the tests are small, and the scheduler must not be what stops them.
    fn default() -> Self {
        Self { cpu: "64".to_owned(), memory: "256Gi".to_owned(), pods: 110, gpus: Gpus::Pretended(0) }
    }
}

impl Capacity {
    fn quantities(&self) -> BTreeMap<String, Quantity> {
        let mut quantities =
            vec![("cpu", self.cpu.clone()), ("memory", self.memory.clone()), ("pods", self.pods.to_string())];
        let n_gpus = self.gpus.count();
        quantities.extend((n_gpus > 0).then(|| (GPU_RESOURCE, n_gpus.to_string())));
        quantities.into_iter().map(|(name, quantity)| (name.to_owned(), Quantity(quantity))).collect()
    }
}

/// Creates the Node, says that it is ready, and takes the first lease.
pub(crate) async fn register(ctx: &NodeContext, options: &NodeOptions) -> Result<(), ClusterError> {
    let failed = || format!("register node {}", ctx.name);
    let nodes: Api<Node> = Api::all(ctx.client.clone());
    let labels =
        [("kubernetes.io/hostname", ctx.name.as_str()), ("kubernetes.io/os", "linux"), ("kubernetes.io/arch", arch())];
    let labels = labels.into_iter().map(|(key, value)| (key.to_owned(), value.to_owned())).collect();
    let node = Node {
        metadata: ObjectMeta { name: Some(ctx.name.clone()), labels: Some(labels), ..Default::default() },
        ..Default::default()
    };
    nodes.patch(&ctx.name, &params(), &Patch::Apply(&node)).await.map_err(ClusterError::api(failed()))?;
    write_status(ctx, options).await.map_err(ClusterError::api(failed()))?;
    // Admission marks every new node as not ready; where the node lifecycle controller does not run, nobody else lifts it.
    let untaint = serde_json::json!({"spec": {"taints": null}});
    nodes
        .patch(&ctx.name, &PatchParams::default(), &Patch::Merge(&untaint))
        .await
        .map_err(ClusterError::api(failed()))?;
    renew_lease(ctx, options.heartbeat).await.map_err(ClusterError::api(failed()))
}

/// Renews the lease for ever; says again that the node is ready after every gap, and whenever the node lifecycle controller
/// said otherwise: one that missed news itself takes the node for lost, and only the node can take that back.
pub(crate) async fn heartbeat(ctx: Arc<NodeContext>, options: NodeOptions) {
    let mut gap = false;
    loop {
        sleep(options.heartbeat).await;
        let silence_began = std::time::Instant::now();
        ctx.speaking().await;
        gap |= silence_began.elapsed() > Duration::from_millis(100);
        let renewed = renew_lease(&ctx, options.heartbeat).await;
        if renewed.is_ok() && (gap || !is_called_ready(&ctx).await) {
            gap = write_status(&ctx, &options).await.is_err();
        }
        if let Err(error) = renewed {
            tracing::warn!(node = ctx.name, %error, "the lease was not renewed");
            gap = true;
        }
    }
}

/// What the Node object says; a node that cannot be read may be called anything.
async fn is_called_ready(ctx: &NodeContext) -> bool {
    let node = Api::<Node>::all(ctx.client.clone()).get_status(&ctx.name).await;
    let conditions = node.ok().and_then(|node| node.status?.conditions).unwrap_or_default();
    conditions.iter().any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

async fn write_status(ctx: &NodeContext, options: &NodeOptions) -> kube::Result<()> {
    let capacity = options.capacity.quantities();
    let address = |type_: &str, address: String| NodeAddress { type_: type_.to_owned(), address };
    let mut status = NodeStatus {
        addresses: Some(vec![address("InternalIP", ctx.host.to_string()), address("Hostname", ctx.name.clone())]),
        allocatable: Some(capacity.clone()),
        capacity: Some(capacity),
        conditions: Some(conditions()),
        daemon_endpoints: Some(NodeDaemonEndpoints {
            kubelet_endpoint: Some(DaemonEndpoint { port: ctx.kubelet.port().into() }),
        }),
        ..Default::default()
    };
    let info = status.node_info.get_or_insert_default();
    info.kubelet_version = format!("stoker-cluster-{}", env!("CARGO_PKG_VERSION"));
    info.container_runtime_version = "process://1".to_owned();
    info.operating_system = "linux".to_owned();
    info.architecture = arch().to_owned();
    info.os_image = "local processes".to_owned();
    let patch = serde_json::json!({"status": status});
    Api::<Node>::all(ctx.client.clone())
        .patch_status(&ctx.name, &PatchParams::default(), &Patch::Merge(&patch))
        .await
        .map(drop)
}

fn conditions() -> Vec<NodeCondition> {
    let now = Some(Time(Timestamp::now()));
    let condition = |type_: &str, status: &str, reason: &str| NodeCondition {
        type_: type_.to_owned(),
        status: status.to_owned(),
        reason: Some(reason.to_owned()),
        last_heartbeat_time: now.clone(),
        last_transition_time: now.clone(),
        ..Default::default()
    };
    vec![
        condition("Ready", "True", "ProcessNodeReady"),
        condition("MemoryPressure", "False", "NotMeasured"),
        condition("DiskPressure", "False", "NotMeasured"),
        condition("PIDPressure", "False", "NotMeasured"),
    ]
}

async fn renew_lease(ctx: &NodeContext, heartbeat: Duration) -> kube::Result<()> {
    let seconds = i32::try_from(heartbeat.as_secs().max(1) * 4).unwrap_or(i32::MAX);
    let spec = LeaseSpec {
        holder_identity: Some(ctx.name.clone()),
        lease_duration_seconds: Some(seconds),
        renew_time: Some(MicroTime(Timestamp::now())),
        ..Default::default()
    };
    let lease = Lease { metadata: ObjectMeta { name: Some(ctx.name.clone()), ..Default::default() }, spec: Some(spec) };
    let leases: Api<Lease> = Api::namespaced(ctx.client.clone(), LEASE_NAMESPACE);
    leases.patch(&ctx.name, &params(), &Patch::Apply(&lease)).await.map(drop)
}

fn params() -> PatchParams {
    PatchParams::apply(FIELD_MANAGER).force()
}

fn arch() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}
