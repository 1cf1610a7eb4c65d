//! The cluster's nodes, as far as it matters for where a model fits: labels, taints, what they have of each resource and whether they
//! are closed. Writes nothing. What changes on a node every few seconds is no news here.

use std::{
    collections::BTreeMap,
    sync::{Arc, PoisonError, RwLock},
    time::Duration,
};

use futures::{Stream, StreamExt};
use k8s_openapi::{
    api::core::v1::{Node, NodeSpec, NodeStatus},
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use kube::{
    Api, Client, ResourceExt,
    runtime::{
        WatchStreamExt,
        watcher::{self, Event, watcher},
    },
};
use tokio::{
    sync::{mpsc, watch},
    time::{sleep, timeout},
};
use tracing::warn;

use crate::pause::WatchPauses;

/// Rounds begin after that, with nodes or without.
const FIRST_LIST_WITHIN: Duration = Duration::from_secs(5);
/// Who may not look asks again after that: somebody may have given the right.
const DENIED_PAUSE: Duration = Duration::from_secs(300);

/// What is known of the nodes.
#[derive(Clone, Debug, Default)]
pub enum Seen {
    /// They were not listed yet.
    #[default]
    NotYet,
    /// The operator may not list them.
    Denied,
    /// All there are.
    Nodes(Arc<Vec<Node>>),
}

/// See the module. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Nodes {
    seen: Arc<RwLock<Seen>>,
}

impl Nodes {
    /// Begins to watch them, and waits for the first list. The stream has an item whenever they are others than before.
    pub async fn watch(client: Client) -> (Self, impl Stream<Item = ()> + Send + use<>) {
        let nodes = Self::default();
        let (changed, mut changes) = mpsc::channel(1);
        let (listed, mut first) = watch::channel(false);
        tokio::spawn(nodes.clone().follow(client, move || {
            listed.send_replace(true);
            // One that waits already says the same.
            _ = changed.try_send(());
        }));
        if timeout(FIRST_LIST_WITHIN, first.wait_for(|listed| *listed)).await.is_err() {
            warn!("no list of nodes yet: whether models fit is not known");
        }
        (nodes, futures::stream::poll_fn(move |context| changes.poll_recv(context)))
    }

    /// What is known now.
    pub fn seen(&self) -> Seen {
        self.seen.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    async fn follow(self, client: Client, changed: impl Fn()) {
        loop {
            let config = watcher::Config::default();
            let mut events = watcher(Api::<Node>::all(client.clone()), config).backoff(WatchPauses::default()).boxed();
            let mut known = Known::default();
            while let Some(event) = events.next().await {
                match event {
                    Err(error) if is_forbidden(&error) => break,
                    Err(error) => warn!(%error, "watch nodes"),
                    Ok(event) => {
                        if known.take(event) {
                            self.see(Seen::Nodes(Arc::new(known.nodes.values().cloned().collect())));
                            changed();
                        }
                    }
                }
            }
            self.see(Seen::Denied);
            changed();
            sleep(DENIED_PAUSE).await;
        }
    }

    fn see(&self, seen: Seen) {
        *self.seen.write().unwrap_or_else(PoisonError::into_inner) = seen;
    }
}

fn is_forbidden(error: &watcher::Error) -> bool {
    match error {
        watcher::Error::InitialListFailed(kube::Error::Api(answer))
        | watcher::Error::WatchStartFailed(kube::Error::Api(answer)) => answer.code == 403,
        _ => false,
    }
}

/// Nodes by name, and those of a list that is not complete.
#[derive(Debug, Default)]
struct Known {
    nodes: BTreeMap<String, Node>,
    listed: BTreeMap<String, Node>,
}

impl Known {
    /// True when they are others now. A list is news in any case: it may be the first.
    fn take(&mut self, event: Event<Node>) -> bool {
        match event {
            Event::Init => {
                self.listed.clear();
                false
            }
            Event::InitApply(node) => {
                self.listed.insert(node.name_any(), slim(node));
                false
            }
            Event::InitDone => {
                self.nodes = std::mem::take(&mut self.listed);
                true
            }
            Event::Apply(node) => {
                let node = slim(node);
                self.nodes.insert(node.name_any(), node.clone()).is_none_or(|before| before != node)
            }
            Event::Delete(node) => self.nodes.remove(&node.name_any()).is_some(),
        }
    }
}

fn slim(node: Node) -> Node {
    let Node { metadata, spec, status } = node;
    let spec = spec.unwrap_or_default();
    Node {
        metadata: ObjectMeta { name: metadata.name, labels: metadata.labels, ..ObjectMeta::default() },
        spec: Some(NodeSpec { taints: spec.taints, unschedulable: spec.unschedulable, ..NodeSpec::default() }),
        status: Some(NodeStatus { allocatable: status.and_then(|status| status.allocatable), ..NodeStatus::default() }),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn node(name: &str, status: Value) -> Node {
        let object =
            json!({"metadata": {"name": name, "resourceVersion": "7", "labels": {"a": "b"}}, "status": status});
        serde_json::from_value(object).unwrap()
    }

    #[test]
    fn a_heartbeat_is_no_news_and_another_amount_of_something_is() {
        let mut known = Known::default();
        let heard = |at: &str, gpus: &str| {
            json!({"allocatable": {"nvidia.com/gpu": gpus}, "conditions": [
                {"type": "Ready", "status": "True", "lastHeartbeatTime": at}]})
        };
        let first = heard("2026-11-26T10:00:00Z", "8");
        assert!(!known.take(Event::Init) && !known.take(Event::InitApply(node("a", first))));
        assert!(known.take(Event::InitDone));
        assert!(!known.take(Event::Apply(node("a", heard("2026-11-26T10:00:10Z", "8")))));
        assert!(known.take(Event::Apply(node("a", heard("2026-11-26T10:00:20Z", "7")))));
        assert!(known.take(Event::Delete(node("a", json!({})))) && known.nodes.is_empty());
    }
}
