//! What was before this operator led: asked of the agents once, because they remember their own load. Moves nothing in them.

use std::sync::Arc;

use futures::{StreamExt, stream};
use k8s_openapi::api::core::v1::Pod;
use stoker_crds::{contract::LoadReport, history::LoadHistory};
use stoker_replica::{Replica, history::is_believable};
use tracing::debug;

use crate::agent_client::AgentClient;

/// Agents asked at the same time.
const ASKED_AT_ONCE: usize = 16;

/// An agent that said who it is a moment ago.
pub(super) struct Witness {
    ip: String,
    start_id: String,
}

/// The agents of a deployment that can be asked.
pub(super) fn witnesses(pods: &[Arc<Pod>], replicas: &[Replica]) -> Vec<Witness> {
    let witness = |(pod, replica): (&Arc<Pod>, &Replica)| {
        let LoadReport { start_id, .. } = replica.reading.report()?;
        Some(Witness { ip: pod.status.as_ref()?.pod_ip.clone()?, start_id: start_id.clone() })
    };
    pods.iter().zip(replicas).filter_map(witness).collect()
}

/// What they remember, as far as it can be.
pub(super) async fn ask(agents: &AgentClient, witnesses: Vec<Witness>) -> Vec<LoadHistory> {
    let asked = witnesses.into_iter().map(|Witness { ip, start_id }| async move {
        match agents.history(&ip).await {
            Ok(told) => is_believable(&told, &start_id).then_some(told),
            Err(error) => {
                debug!(ip, %error, "an agent remembers nothing");
                None
            }
        }
    });
    stream::iter(asked).buffer_unordered(ASKED_AT_ONCE).filter_map(async |told| told).collect().await
}
