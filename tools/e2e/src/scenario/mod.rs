//! The walk through Stoker: install, serve, roll under load, scale, delete, uninstall. Lists the steps; each lives in
//! the file of its noun.

mod chart;
mod client;
mod deployment;

use std::time::Duration;

use anyhow::{Context, Result};

use crate::{Options, cluster::Cluster, stages::Stages};
use client::Client;
use deployment::Deployment;

/// The longest any single step may take. Everything local takes seconds; the rest is a slow machine's allowance.
const LIMIT: Duration = Duration::from_secs(180);

/// Walks through everything; the first thing that is not as promised ends it.
pub(crate) fn run(options: &Options, cluster: &Cluster, stages: &mut Stages) -> Result<()> {
    let kubectl = &cluster.kubectl;
    chart::install(kubectl, &options.chart).context("install chart")?;
    stages.done("chart installed by Helm, operator ready");

    let deployment = Deployment::new(kubectl);
    deployment.apply().context("apply InferenceDeployment")?;
    deployment.wait_ready(2).context("wait for 2 replicas")?;
    stages.done("2 replicas ready");

    let client = Client::start(kubectl, deployment.url()?).context("start client pod")?;
    let answer = client.ask("What is 2 + 3?").context("stream an answer")?;
    stages.done(format_args!("answer streamed inside the pod network: {:?}", answer.text));

    let streams = client.hold_streams().context("open streams")?;
    deployment.change_engine().context("change spec.engine")?;
    let n_asked = deployment.wait_rolled(|| client.ask("ping").map(drop)).context("roll under load")?;
    stages.done(format_args!("rolled to a new revision; {n_asked} requests meanwhile, none refused"));
    let n_whole = streams.finish().context("streams held open through the roll")?;
    stages.done(format_args!("{n_whole} streams held open through the roll came whole"));

    deployment.scale(3).context("scale up")?;
    stages.done("scaled up to 3");
    deployment.scale(1).context("scale down")?;
    client.ask("still there?").context("ask after scaling down")?;
    stages.done("scaled down to 1");

    deployment.delete().context("delete InferenceDeployment")?;
    stages.done("deleted; nothing of it is left");
    chart::uninstall(kubectl).context("uninstall chart")?;
    stages.done("chart uninstalled; nothing of it is left but the CRD");
    Ok(())
}
