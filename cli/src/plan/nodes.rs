//! GPUs of a cluster, asked of its API server.

use std::{fmt::Debug, sync::Arc};

use anyhow::{Context, Result, anyhow};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::{Api, Client, Resource, api::ListParams};
use serde::de::DeserializeOwned;
use stoker_crds::{
    devices::{Published, gpus as gpus_of},
    nodes::{GpuKind, Placement, kinds_of},
};

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
    let published = published(&cluster.client).await.context("list what drivers publish of their devices")?;
    let devices = gpus_of(published.as_ref(), placement.gpus)
        .map_err(|why| anyhow!("{why}: say the GPU with --gpu or --gpu-memory"))?;
    Ok(kinds_of(&nodes, &pods, placement, gpus, devices))
}

async fn published(client: &Client) -> kube::Result<Option<Published>> {
    let (slices, claims, classes) = tokio::try_join!(listed(client), listed(client), listed(client))?;
    let all = slices.zip(claims).zip(classes);
    Ok(all.map(|((slices, claims), classes)| Published { slices, claims, classes }))
}

/// `None` where the cluster has no such kind, or there is no right to list it.
async fn listed<K>(client: &Client) -> kube::Result<Option<Arc<Vec<K>>>>
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned,
{
    match Api::<K>::all(client.clone()).list(&ListParams::default()).await {
        Ok(list) => Ok(Some(Arc::new(list.items))),
        Err(kube::Error::Api(answer)) if matches!(answer.code, 403 | 404) => Ok(None),
        Err(error) => Err(error),
    }
}
