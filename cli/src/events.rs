//! `kubectl stoker events`: what happened to a deployment and its pods, oldest first.

use anyhow::{Context, Result};
use clap::Args;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Event;
use kube::{Api, api::ListParams};
use serde_json::{Value, json};

use crate::{
    cluster::{Cluster, ClusterArgs},
    explain::ago,
    output::Output,
};

/// Whose events.
#[derive(Debug, Args)]
pub(crate) struct Events {
    /// The InferenceDeployment.
    name: String,
    #[command(flatten)]
    output: Output,
    #[command(flatten)]
    cluster: ClusterArgs,
}

/// Prints them.
pub(crate) async fn events(args: &Events) -> Result<()> {
    let cluster = Cluster::find(&args.cluster).await?;
    cluster.deployment(&args.name).await?;
    let events: Api<Event> = cluster.namespaced();
    let mut events = events.list(&ListParams::default()).await.context("list Events")?.items;
    events.retain(|event| is_about(event, &args.name));
    events.sort_by_key(when);
    let now = Timestamp::now();
    let text: String = events.iter().map(|event| line(event, now)).collect();
    let text = if text.is_empty() {
        "nothing happened within the time that the cluster keeps Events\n".to_owned()
    } else {
        text
    };
    args.output.print(&text, || events.iter().map(value).collect());
    Ok(())
}

/// About the deployment, or a pod of it: NAME-REVISION-ORDINAL.
fn is_about(event: &Event, name: &str) -> bool {
    let object = &event.involved_object;
    let (kind, of) = (object.kind.as_deref().unwrap_or_default(), object.name.as_deref().unwrap_or_default());
    let parts = of.strip_prefix(name).and_then(|rest| rest.strip_prefix('-')).and_then(|rest| rest.split_once('-'));
    let is_pod = parts.is_some_and(|(revision, ordinal)| revision.len() == 8 && ordinal.parse::<u32>().is_ok());
    (kind == "InferenceDeployment" && of == name) || (kind == "Pod" && is_pod)
}

fn when(event: &Event) -> Timestamp {
    let micro =
        event.series.as_ref().and_then(|series| series.last_observed_time.as_ref()).or(event.event_time.as_ref());
    let whole = event.last_timestamp.as_ref().or(event.first_timestamp.as_ref()).map(|time| time.0);
    micro.map(|time| time.0).or(whole).unwrap_or_default()
}

fn count(event: &Event) -> i32 {
    event.series.as_ref().and_then(|series| series.count).or(event.count).unwrap_or(1)
}

fn line(event: &Event, now: Timestamp) -> String {
    let reason = event.reason.as_deref().unwrap_or_default();
    let object = event.involved_object.name.as_deref().unwrap_or_default();
    let message = event.message.as_deref().unwrap_or_default().replace('\n', " ");
    let times = match count(event) {
        1 => String::new(),
        n => format!(" (x{n})"),
    };
    format!("{:>8} ago  {reason:<20} {object}: {message}{times}\n", ago(when(event), now))
}

fn value(event: &Event) -> Value {
    json!({
        "at": when(event).to_string(), "type": event.type_, "reason": event.reason, "object": event.involved_object.name,
        "kind": event.involved_object.kind, "message": event.message, "count": count(event),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_of_other_deployments_are_left_out() {
        let about = |kind: &str, name: &str| {
            let object = json!({"involvedObject": {"kind": kind, "name": name}, "metadata": {}});
            is_about(&serde_json::from_value(object).unwrap(), "chat")
        };
        assert!(about("InferenceDeployment", "chat") && about("Pod", "chat-0a1b2c3d-12"));
        assert!(!about("InferenceDeployment", "chat-2") && !about("Pod", "chat-2-0a1b2c3d-0"));
        assert!(!about("Pod", "chat-worker-0") && !about("Service", "chat"));
    }
}
