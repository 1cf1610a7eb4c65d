//! `kubectl stoker logs`: what all replicas of a deployment log, merged by time, each line with its pod.

use anyhow::{Context, Result, ensure};
use clap::Args;
use futures::{AsyncBufReadExt, TryStreamExt};
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, ResourceExt, api::LogParams};
use serde_json::json;
use tokio::{sync::mpsc, task::JoinSet};

use crate::{
    cluster::{Cluster, ClusterArgs},
    output::Output,
};

/// Name of the container that serves.
const CONTAINER: &str = "agent";
/// Lines that wait to be printed at most.
const LINES_MAX: usize = 1024;

/// Whose logs.
#[derive(Debug, Args)]
pub(crate) struct Logs {
    /// The InferenceDeployment.
    name: String,
    /// Go on with what comes.
    #[arg(long, short)]
    follow: bool,
    /// Lines of each replica to begin with.
    #[arg(long, default_value_t = 100)]
    tail: i64,
    /// Of the processes before the present ones: why they ended.
    #[arg(long, short, conflicts_with = "follow")]
    previous: bool,
    /// Container of the pods: `agent`, or `fetch` where a model is fetched.
    #[arg(long, short, default_value = CONTAINER)]
    container: String,
    #[command(flatten)]
    output: Output,
    #[command(flatten)]
    cluster: ClusterArgs,
}

/// Prints them.
pub(crate) async fn logs(args: &Logs) -> Result<()> {
    let cluster = Cluster::find(&args.cluster).await?;
    let deployment = cluster.deployment(&args.name).await?;
    let pods = cluster.pods_of(&deployment).await?;
    ensure!(!pods.is_empty(), "{} has no replicas: kubectl stoker status {} says why", args.name, args.name);
    let names: Vec<String> = pods.iter().map(ResourceExt::name_any).collect();
    if args.follow { follow(args, &cluster, names).await } else { print(args, &cluster, &names).await }
}

fn params(args: &Logs) -> LogParams {
    LogParams {
        container: Some(args.container.clone()),
        follow: args.follow,
        previous: args.previous,
        tail_lines: Some(args.tail),
        timestamps: true,
        ..LogParams::default()
    }
}

async fn print(args: &Logs, cluster: &Cluster, names: &[String]) -> Result<()> {
    let pods: Api<Pod> = cluster.namespaced();
    let mut lines = Vec::new();
    for name in names {
        match pods.logs(name, &params(args)).await {
            Ok(text) => lines.extend(text.lines().map(|line| (line.to_owned(), name.clone()))),
            // One that has not begun has none: the others' are worth reading.
            Err(error) => eprintln!("{name}: {error}"),
        }
    }
    lines.sort();
    lines.iter().for_each(|(line, name)| say(args.output, name, line));
    Ok(())
}

async fn follow(args: &Logs, cluster: &Cluster, names: Vec<String>) -> Result<()> {
    let (send, mut lines) = mpsc::channel(LINES_MAX);
    let mut readers = JoinSet::new();
    for name in names {
        let (pods, send, params): (Api<Pod>, _, _) = (cluster.namespaced(), send.clone(), params(args));
        readers.spawn(async move {
            let read = async {
                let stream = pods.log_stream(&name, &params).await.context("read its log")?;
                let mut read = stream.lines();
                while let Some(line) = read.try_next().await.context("read on")? {
                    if send.send((name.clone(), line)).await.is_err() {
                        break;
                    }
                }
                Ok::<_, anyhow::Error>(())
            };
            if let Err(error) = read.await {
                eprintln!("{name}: {error:#}");
            }
        });
    }
    drop(send);
    while let Some((name, line)) = lines.recv().await {
        say(args.output, &name, &line);
    }
    Ok(())
}

/// A line with its pod. The time that the kubelet put before it was for sorting, and says something to programs alone.
fn say(output: Output, pod: &str, line: &str) {
    let (time, words) = parted(line);
    output.print_line(&format!("[{pod}] {words}"), || json!({"pod": pod, "time": time, "line": words}));
}

/// The kubelet's time and what was logged.
fn parted(line: &str) -> (&str, &str) {
    line.split_once(' ').unwrap_or((line, ""))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_what_was_logged_behind_the_kubelets_time() {
        assert_eq!(parted("2026-01-31T12:00:00.1Z serving chat"), ("2026-01-31T12:00:00.1Z", "serving chat"));
        assert_eq!(parted("2026-01-31T12:00:00.1Z"), ("2026-01-31T12:00:00.1Z", ""), "an empty line");
    }
}
