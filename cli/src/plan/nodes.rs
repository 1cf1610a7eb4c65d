//! GPUs of a cluster, asked of its API server.

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::{Api, api::ListParams};
use stoker_crds::nodes::{GpuKind, Placement, kinds_of};

use crate::cluster::Cluster;

/// The kinds of GPUs of the nodes that such pods may run on; `gpus` are those of a replica.
pub(super) async fn kinds(cluster: &Cluster, placement: &Placement<'_>, gpus: u32) -> Result<Vec<GpuKind>> {
    let all = ListParams::default();
    let nodes: Api<Node> = Api::all(cluster.client.clone());
    let nodes =
        nodes.list(&all).await.context("list nodes: that needs the right to, else say the GPU with --gpu")?.items;
    let pods: Api<Pod> = Api::all(cluster.client.clone());
    let running = all.fields("status.phase!=Succeeded,status.phase!=Failed");
    let pods = pods
        .list(&running)
        .await
        .context("list pods of all namespaces: that needs the right to, else say the GPU with --gpu")?
        .items;
    Ok(kinds_of(&nodes, &pods, placement, gpus))
}
