//! `kubectl stoker status`: one deployment on one screen. Reads the API server, and the operator's last record where it
//! can be had; without it the screen says what is missing.

mod screen;

use anyhow::{Context, Result};
use clap::Args;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;
use stoker_crds::InferenceDeployment;
use stoker_scaling::DecisionRecord;

use self::screen::{Facts, Record};
use crate::{
    cluster::{Cluster, ClusterArgs},
    operator::{self, OperatorArgs},
    records,
};

/// Whose status.
#[derive(Debug, Args)]
pub(crate) struct Status {
    /// The InferenceDeployment.
    name: String,
    #[command(flatten)]
    cluster: ClusterArgs,
    #[command(flatten)]
    operator: OperatorArgs,
}

/// Prints the screen.
pub(crate) async fn status(args: &Status) -> Result<()> {
    let cluster = Cluster::find(&args.cluster).await?;
    let deployment = cluster.deployment(&args.name).await?;
    let pods = pods(&cluster, &deployment).await?;
    let record = record(args, &cluster, &deployment).await;
    print!("{}", screen::screen(&Facts { deployment, pods, record, now: Timestamp::now() }));
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

async fn record(args: &Status, cluster: &Cluster, deployment: &InferenceDeployment) -> Record {
    if deployment.spec.scaling.is_none() {
        return Record::NoneMade;
    }
    match latest(args, cluster).await {
        Ok(record) => Record::Latest(Box::new(record)),
        Err(error) => Record::OutOfReach(format!("{error:#}")),
    }
}

async fn latest(args: &Status, cluster: &Cluster) -> Result<DecisionRecord> {
    let text = operator::records(&args.operator, cluster, &args.name, 0).await?;
    records::parse("the operator's answer", &text)?.pop().context("it has no record")
}
