//! `kubectl stoker drain`: one replica leaves, as a node drain makes it leave: evicted within the deployment's budget, its streams
//! finish, another one takes its place.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args;
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, ResourceExt, api::EvictParams};
use serde_json::json;

use crate::{
    cluster::{Cluster, ClusterArgs},
    output::Output,
};

/// Between two looks, and two tries where the budget does not allow it yet.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// Who leaves.
#[derive(Debug, Args)]
pub(crate) struct Drain {
    /// The InferenceDeployment.
    name: String,
    /// The pod that leaves; all pods of a node with --node.
    #[arg(required_unless_present = "node")]
    pod: Option<String>,
    /// The pods on this node leave, one after the other.
    #[arg(long, conflicts_with = "pod")]
    node: Option<String>,
    /// Do not wait until it is gone.
    #[arg(long)]
    no_wait: bool,
    #[command(flatten)]
    output: Output,
    #[command(flatten)]
    cluster: ClusterArgs,
}

/// Lets them leave.
pub(crate) async fn drain(args: &Drain) -> Result<()> {
    let cluster = Cluster::find(&args.cluster).await?;
    let deployment = cluster.deployment(&args.name).await?;
    let pods = cluster.pods_of(&deployment).await?;
    let leaving = leaving(args, &pods)?;
    for pod in leaving {
        evict(&cluster, &pod.name_any(), args).await?;
    }
    Ok(())
}

fn leaving<'a>(args: &Drain, pods: &'a [Pod]) -> Result<Vec<&'a Pod>> {
    let names = || pods.iter().map(ResourceExt::name_any).collect::<Vec<_>>().join(", ");
    let is_meant = |pod: &&Pod| match (&args.pod, &args.node) {
        (Some(name), _) => pod.name_any() == *name,
        (None, node) => pod.spec.as_ref().and_then(|spec| spec.node_name.as_ref()) == node.as_ref(),
    };
    let meant: Vec<&Pod> = pods.iter().filter(is_meant).collect();
    match (meant.is_empty(), &args.pod, &args.node) {
        (false, _, _) => Ok(meant),
        (true, Some(pod), _) => bail!("{pod} is no pod of {}; it has: {}", args.name, names()),
        (true, None, node) => {
            bail!("{} has no pod on node {}; it has: {}", args.name, node.as_deref().unwrap_or_default(), names())
        }
    }
}

async fn evict(cluster: &Cluster, name: &str, args: &Drain) -> Result<()> {
    let said = |phase: &str, words: &str| {
        args.output.print_line(&format!("{name} {words}"), || json!({"pod": name, "phase": phase}));
    };
    let pods: Api<Pod> = cluster.namespaced();
    let uid = pods.get(name).await.with_context(|| format!("read pod {name}"))?.uid();
    let mut told = false;
    loop {
        match pods.evict(name, &EvictParams::default()).await {
            Ok(_) => break,
            // The budget: another one is leaving or not ready yet.
            Err(kube::Error::Api(answer)) if answer.code == 429 => {
                if !told {
                    eprintln!("{name} waits: {}", answer.message);
                    told = true;
                }
                tokio::time::sleep(LOOK_EVERY).await;
            }
            Err(error) => return Err(error).with_context(|| format!("evict pod {name}")),
        }
    }
    said("leaving", "finishes its streams and leaves");
    while !args.no_wait && pods.get_opt(name).await.context("look at it")?.and_then(|pod| pod.uid()) == uid {
        tokio::time::sleep(LOOK_EVERY).await;
    }
    if !args.no_wait {
        said("gone", "is gone");
    }
    Ok(())
}
