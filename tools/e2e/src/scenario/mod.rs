//! The walk through Stoker: install, serve, roll under load, scale, guard by NetworkPolicies, explain, mount a model, delete, uninstall.
//! Lists the steps; each lives in the file of its noun.

mod chart;
mod client;
mod deployment;
mod guard;
mod mounted;
mod pod;
mod streams;
mod ways;

use std::time::Duration;

use anyhow::{Context, Result};

use crate::{Options, cluster::Cluster, node, stages::Stages};
use client::Client;
use deployment::Deployment;
use guard::Guard;
use mounted::Mounted;
use pod::Pod;

/// An image with a model, which the recipe `e2e-model` makes.
const MODEL_IMAGE: (&str, &str) = ("localhost/stoker-e2e-model", "dev");
/// The longest any single step may take. Everything local takes seconds; the rest is a slow machine's allowance.
const LIMIT: Duration = Duration::from_secs(300);
/// Streams held through a roll: with two replicas, each holds some of them when its turn comes.
const N_STREAMS: usize = 8;
/// Long enough to last until a new replica has started, on a machine that is busy with something else too; short enough for
/// the model's context of 2048 tokens.
const N_TOKENS: u64 = 1900;

/// Walks through everything; the first thing that is not as promised ends it.
pub(crate) fn run(options: &Options, cluster: &Cluster, stages: &mut Stages) -> Result<()> {
    let kubectl = &cluster.kubectl;
    chart::install(kubectl, &options.chart).context("install chart")?;
    stages.done("chart installed by Helm, operator ready");

    let deployment = Deployment::new(kubectl);
    deployment.apply().context("apply InferenceDeployment")?;
    deployment.wait_ready(2).context("wait for 2 replicas")?;
    stages.done("2 replicas ready");

    let pod = Pod::start(kubectl, "default", "client").context("start client pod")?;
    let client = Client::new(pod, deployment.url()?);
    client.wait_routed().context("reach the replicas through the Service")?;
    stages.done("the Service's address answers");
    let answer = client.ask("What is 2 + 3?").context("stream an answer")?;
    stages.done(format_args!("answer streamed inside the pod network: {:?}", answer.text));

    let logged = deployment.logs().context("read what all replicas log")?;
    stages.done(format_args!("kubectl stoker logs: {logged} lines of both replicas in order"));

    let streams = client.hold_streams(N_STREAMS, N_TOKENS).context("open streams")?;
    stages.done(format_args!("{N_STREAMS} long streams begun"));
    deployment.change_engine().context("change spec.engine")?;
    let roll = deployment.wait_rolled(|| client.ask("ping").map(drop)).context("roll under load")?;
    stages.done(format_args!("rolled to a new revision; {} requests meanwhile, none refused", roll.n_calls));
    streams.finish_after(roll.first_leaves).context("streams held open through the roll")?;
    stages.done(format_args!("{N_STREAMS} streams held open through the roll came whole, {N_TOKENS} tokens each"));

    deployment.scale(3).context("scale up")?;
    stages.done("scaled up to 3");
    deployment.scale(1).context("scale down")?;
    client.ask("still there?").context("ask after scaling down")?;
    stages.done("scaled down to 1");

    let guard = Guard::start(kubectl, pod).context("start pods that ask")?;
    chart::guard(kubectl, &options.chart, guard::NAMED).context("switch gateways and NetworkPolicies on")?;
    guard.wait_shut().context("policies that hold")?;
    stages.done(
        "gateways and NetworkPolicies on: three pods reach what the policies say, in every pod, and nothing else",
    );
    deployment.scale(3).context("scale up behind policies")?;
    guard.wait_read(3).context("operator and gateways behind policies")?;
    guard.wait_shut().context("policies that hold for new replicas")?;
    stages.done("scaled up to 3 behind them; operator and gateways hear from all of them and from each other");
    client.ask("through a gateway?").context("ask through the Service behind policies")?;
    deployment.scale(1).context("scale down behind policies")?;
    let drained = guard.drained().context("how replicas left behind policies")?;
    stages.done(format_args!(
        "an answer through the Service; scaled down to 1: {drained} replicas obeyed and were drained"
    ));
    chart::unguard(kubectl, &options.chart).context("switch NetworkPolicies off")?;
    guard.wait_open().context("no policies")?;
    stages.done("NetworkPolicies off: the same pods reach everything");
    let refused = guard.forge_orders().context("orders that the operator did not sign")?;
    deployment.wait_ready(1).context("a replica that was told to leave by others")?;
    client.ask("still serving?").context("ask after forged orders")?;
    stages.done(format_args!("orders to leave that the operator did not sign: {refused}; the replica serves"));

    let decision = deployment.explain_scaling().context("explain a decision through a forwarded port")?;
    stages.done(format_args!("kubectl stoker explain through a forwarded port: {decision:?}"));

    let (repository, tag) = MODEL_IMAGE;
    let image = node::name_by_digest(&options.containerd_bin, repository, tag).context("name the model's image")?;
    let mounted = Mounted::of(kubectl, image);
    let delivery = mounted.serve().context("serve a model out of an image")?;
    stages.done(format_args!("a model is served out of an image, {delivery}"));
    mounted.delete().context("delete it")?;

    deployment.delete().context("delete InferenceDeployment")?;
    stages.done("deleted; nothing of it is left");
    chart::uninstall(kubectl).context("uninstall chart")?;
    stages.done("chart uninstalled; nothing of it is left but the CRD: passed");
    Ok(())
}
