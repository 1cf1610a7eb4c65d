//! `kubectl stoker status`: one deployment on one screen, from the API server alone.

mod screen;

use anyhow::{Context, Result};
use clap::Args;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;
use stoker_crds::InferenceDeployment;

use self::screen::Facts;
use crate::cluster::{Cluster, ClusterArgs};

/// Whose status.
#[derive(Debug, Args)]
pub(crate) struct Status {
    /// The InferenceDeployment.
    name: String,
    #[command(flatten)]
    cluster: ClusterArgs,
}

/// Prints the screen.
pub(crate) async fn status(args: &Status) -> Result<()> {
    let cluster = Cluster::find(&args.cluster).await?;
    let deployment = cluster.deployment(&args.name).await?;
    let pods = pods(&cluster, &deployment).await?;
    print!("{}", screen::screen(&Facts { deployment, pods, now: Timestamp::now() }));
    Ok(())
}

/// The pods that its status selects.
async fn pods(cluster: &Cluster, deployment: &InferenceDeployment) -> Result<Vec<Pod>> {
    let selector = deployment.status.as_ref().map(|status| status.selector.clone()).unwrap_or_default();
    if selector.is_empty() {
        return Ok(Vec::new());
    }
    let pods = cluster.namespaced::<Pod>().list(&ListParams::default().labels(&selector)).await;
    Ok(pods.context("list its pods")?.items)
}
