//! `kubectl stoker top`: every deployment in one table, as its replicas and gateways say at this moment; from the operator, which asks
//! them all the time.

use std::{io::IsTerminal, time::Duration};

use anyhow::{Context, Result};
use clap::Args;
use serde_json::json;
use stoker_crds::{
    contract::LoadReport,
    endpoints::{DeploymentLoad, EndpointState, FLEET_PATH, FleetLoad, ReplicaLoad},
};

use crate::{
    cluster::{Cluster, ClusterArgs},
    operator::{self, OperatorArgs},
    output::Output,
    table::table,
};

/// Columns that are no numbers.
const N_WORDS: usize = 2;
const N_COLUMNS: usize = 13;
/// The operator asks as often.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// Which fleet.
#[derive(Debug, Args)]
pub(crate) struct Top {
    /// The InferenceDeployment, with a line a replica. Default: all of the namespace, a line each.
    name: Option<String>,
    /// Of all namespaces.
    #[arg(long, short = 'A', conflicts_with = "name")]
    all_namespaces: bool,
    /// Look again every two seconds.
    #[arg(long, short)]
    watch: bool,
    #[command(flatten)]
    output: Output,
    #[command(flatten)]
    cluster: ClusterArgs,
    #[command(flatten)]
    operator: OperatorArgs,
}

/// Prints the table, once or for as long as somebody looks.
pub(crate) async fn top(args: &Top) -> Result<()> {
    let cluster = Cluster::find(&args.cluster).await?;
    loop {
        let fleet = fleet(args, &cluster).await?;
        if args.watch && std::io::stdout().is_terminal() {
            print!("\x1b[H\x1b[2J");
        }
        let text = match &args.name {
            Some(_) => fleet.deployments.iter().map(replicas).collect(),
            None => deployments(&fleet, args.all_namespaces),
        };
        args.output.print(&text, || json!(fleet));
        if !args.watch {
            return Ok(());
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

async fn fleet(args: &Top, cluster: &Cluster) -> Result<FleetLoad> {
    if let Some(name) = &args.name {
        cluster.deployment(name).await?;
    }
    let text = operator::ask(&args.operator, cluster, FLEET_PATH).await?;
    let mut fleet: FleetLoad =
        serde_json::from_str(&text).context("read the operator's answer: it is of another version")?;
    fleet.deployments.retain(|deployment| {
        (args.all_namespaces || deployment.namespace == cluster.namespace)
            && args.name.as_ref().is_none_or(|name| deployment.name == *name)
    });
    fleet.deployments.sort_by(|a, b| (&a.namespace, &a.name).cmp(&(&b.namespace, &b.name)));
    Ok(fleet)
}

/// A line each.
fn deployments(fleet: &FleetLoad, with_namespace: bool) -> String {
    let rows = fleet.deployments.iter().map(|deployment| {
        let DeploymentLoad { namespace, name, replicas_wanted, in_line, replicas } = deployment;
        let name = if with_namespace { format!("{namespace}/{name}") } else { name.clone() };
        let serving = replicas.iter().filter(|replica| replica.state == EndpointState::Serving).count();
        row([name, format!("{serving}/{replicas_wanted}"), or_dash(*in_line)], replicas)
    });
    let rows: Vec<_> = rows.collect();
    if rows.is_empty() {
        "no InferenceDeployment here\n".to_owned()
    } else {
        table(head(["NAME", "READY", "IN LINE"]), N_WORDS, &rows)
    }
}

/// A line for each replica.
fn replicas(deployment: &DeploymentLoad) -> String {
    let of = |replica: &ReplicaLoad| {
        let circuit = replica.routed.as_ref().map(|routed| if routed.circuit_open { "open" } else { "closed" });
        row([replica.pod.clone(), replica.state.word().to_owned(), or_dash(circuit)], std::slice::from_ref(replica))
    };
    table(head(["POD", "STATE", "CIRCUIT"]), N_WORDS, &deployment.replicas.iter().map(of).collect::<Vec<_>>())
}

fn head([name, state, at_gateways]: [&str; 3]) -> [&str; N_COLUMNS] {
    [
        name,
        state,
        at_gateways,
        "ROUTED",
        "RUNNING",
        "WAITING",
        "KV",
        "TOKENS/s",
        "TTFT p95",
        "ITL p95",
        "PREEMPTED",
        "GPUS",
        "GPU-HOURS",
    ]
}

fn row([name, state, at_gateways]: [String; 3], replicas: &[ReplicaLoad]) -> [String; N_COLUMNS] {
    let routed = replicas.iter().filter_map(|replica| Some(replica.routed.as_ref()?.requests)).reduce(|a, b| a + b);
    let [running, waiting, kv, tokens, ttft, itl, preempted] = loads(replicas);
    let gpus = replicas.iter().map(|replica| replica.gpus).sum::<u64>().to_string();
    let hours = replicas.iter().map(|replica| replica.gpu_seconds).sum::<u64>() as f64 / 3600.0;
    let routed = or_dash(routed);
    [name, state, at_gateways, routed, running, waiting, kv, tokens, ttft, itl, preempted, gpus, format!("{hours:.1}")]
}

fn or_dash(value: Option<impl ToString>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| value.to_string())
}

/// Sums, shares and the worst of those that could be read; a dash where none could.
fn loads(replicas: &[ReplicaLoad]) -> [String; 7] {
    let loads = || replicas.iter().filter_map(|replica| replica.load.as_ref());
    let dash = || "-".to_owned();
    if loads().next().is_none() {
        return std::array::from_fn(|_| dash());
    }
    let sum = |of: fn(&LoadReport) -> u64| loads().map(of).sum::<u64>();
    let worst = |of: fn(&LoadReport) -> Option<f64>| loads().filter_map(of).reduce(f64::max);
    let total = sum(|load| load.total_blocks.into());
    let kv = sum(|load| load.referenced_blocks.into()) * 100 / total.max(1);
    let tokens = replicas.iter().filter_map(|replica| replica.tokens_per_second).reduce(|a, b| a + b);
    [
        sum(|load| load.running.into()).to_string(),
        sum(|load| load.waiting.into()).to_string(),
        format!("{kv} %"),
        tokens.map_or_else(dash, |tokens| format!("{tokens:.0}")),
        worst(|load| load.ttft_p95_seconds).map_or_else(dash, |seconds| format!("{:.0} ms", seconds * 1e3)),
        worst(|load| load.itl_p95_seconds).map_or_else(dash, |seconds| format!("{:.1} ms", seconds * 1e3)),
        sum(|load| load.preemptions).to_string(),
    ]
}

#[cfg(test)]
mod tests {
    use stoker_crds::endpoints::RoutedReplica;

    use super::*;

    fn replica(pod: &str, load: Option<LoadReport>) -> ReplicaLoad {
        let state = if load.is_some() { EndpointState::Serving } else { EndpointState::Starting };
        let tokens_per_second = load.as_ref().map(|load| f64::from(load.running) * 100.0);
        ReplicaLoad { pod: pod.to_owned(), state, gpus: 2, gpu_seconds: 9000, tokens_per_second, load, routed: None }
    }

    fn words(text: &str) -> Vec<Vec<&str>> {
        text.lines().map(|line| line.split_whitespace().collect()).collect()
    }

    #[test]
    fn a_deployment_is_the_sum_of_its_replicas_and_as_late_as_the_latest() {
        let load = |running, referenced_blocks, ttft| LoadReport {
            running,
            referenced_blocks,
            ttft_p95_seconds: Some(ttft),
            preemptions: 2,
            ..LoadReport::idle(100)
        };
        let replicas =
            vec![replica("a", Some(load(3, 30, 0.2))), replica("b", Some(load(4, 60, 0.5))), replica("c", None)];
        let routed = |of: ReplicaLoad, requests, circuit_open| {
            let routed = Some(RoutedReplica { pod: of.pod.clone(), requests, circuit_open });
            ReplicaLoad { routed, ..of }
        };
        let [a, b, c] = <[_; 3]>::try_from(replicas).unwrap();
        let replicas = vec![routed(a, 3, false), routed(b, 5, true), c];
        let (namespace, name) = ("default".into(), "chat".into());
        let chat = DeploymentLoad { namespace, name, replicas_wanted: 3, in_line: Some(9), replicas };
        let each = super::replicas(&chat);
        assert_eq!(words(&each)[1][..4], ["a", "serving", "closed", "3"], "{each}");
        assert_eq!(words(&each)[2][..4], ["b", "serving", "open", "5"], "{each}");
        let text = deployments(&FleetLoad { deployments: vec![chat] }, false);
        // Three hold two GPUs each, for two hours and a half.
        assert_eq!(
            words(&text)[1],
            ["chat", "2/3", "9", "8", "7", "0", "45", "%", "700", "500", "ms", "-", "4", "6", "7.5"],
            "{text}"
        );
    }

    #[test]
    fn nothing_is_said_of_a_replica_that_says_nothing_but_what_it_holds() {
        let chat = DeploymentLoad { replicas: vec![replica("chat-a-0", None)], ..DeploymentLoad::default() };
        let text = replicas(&chat);
        let dashes = ["-"; 9];
        assert_eq!(words(&text)[1], [&["chat-a-0", "starting"], &dashes[..], &["2", "2.5"]].concat(), "{text}");
        assert_eq!(deployments(&FleetLoad::default(), true), "no InferenceDeployment here\n");
    }
}
