//! What every task of one node shares. Values and handles; decides nothing.

use std::{
    net::{Ipv4Addr, SocketAddr},
    path::PathBuf,
    sync::RwLock,
};

use k8s_openapi::{
    api::core::v1::{Event, EventSource, Pod},
    apimachinery::pkg::apis::meta::v1::Time,
};
use kube::{Api, Client, Resource, ResourceExt, api::PostParams, core::ObjectMeta};
use tokio::sync::watch;

use super::{
    addresses::AddressPool, backoff::BackoffLimits, environment::Place, gpus::GpuPool, images::ImageMap,
    processes::Processes,
};

/// Whether the node takes part in the cluster.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Voice {
    Speaking,
    /// As if the machine had lost its network: containers go on, nobody hears of them.
    Silent,
}

pub(crate) struct NodeContext {
    pub(crate) client: Client,
    pub(crate) name: String,
    /// The node's own address.
    pub(crate) host: Ipv4Addr,
    pub(crate) api: SocketAddr,
    /// Where the API server asks for logs and ports.
    pub(crate) kubelet: SocketAddr,
    pub(crate) dir: PathBuf,
    pub(crate) images: RwLock<ImageMap>,
    pub(crate) backoff: BackoffLimits,
    pub(crate) processes: Processes,
    pub(crate) addresses: AddressPool,
    pub(crate) gpus: GpuPool,
    pub(crate) voice: watch::Sender<Voice>,
}

/// Whether an event is good news.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum EventKind {
    Normal,
    Warning,
}

impl NodeContext {
    /// Returns at once, or when the node's silence ends.
    pub(crate) async fn speaking(&self) {
        let mut voice = self.voice.subscribe();
        // The sender lives as long as `self`, so waiting cannot fail.
        let _speaking = voice.wait_for(|voice| *voice == Voice::Speaking).await;
    }

    pub(crate) fn place(&self, address: Ipv4Addr) -> Place<'_> {
        Place { node: &self.name, host: self.host, address }
    }

    /// The folder of `pod`: volumes and logs.
    pub(crate) fn pod_dir(&self, pod: &Pod) -> PathBuf {
        let name = [pod.namespace(), pod.metadata.name.clone(), pod.uid()].map(Option::unwrap_or_default).join("_");
        self.dir.join("pods").join(name)
    }

    /// Tells whoever runs `kubectl describe pod`, without waiting: an event that cannot be written is lost, as with a
    /// kubelet, and a container must not wait for an API server that is away.
    pub(crate) fn event(&self, pod: &Pod, kind: EventKind, reason: &str, message: String) {
        let namespace = pod.namespace().unwrap_or_default();
        let now = Some(Time(jiff::Timestamp::now()));
        let event = Event {
            metadata: ObjectMeta {
                generate_name: Some(format!("{}-", pod.name_any())),
                namespace: Some(namespace.clone()),
                ..Default::default()
            },
            involved_object: pod.object_ref(&()),
            type_: Some(format!("{kind:?}")),
            reason: Some(reason.to_owned()),
            message: Some(message),
            count: Some(1),
            first_timestamp: now.clone(),
            last_timestamp: now,
            source: Some(EventSource { component: Some("process-node".to_owned()), host: Some(self.name.clone()) }),
            ..Default::default()
        };
        let api = Api::<Event>::namespaced(self.client.clone(), &namespace);
        tokio::spawn(async move {
            if let Err(error) = api.create(&PostParams::default(), &event).await {
                tracing::debug!(%error, "an event was lost");
            }
        });
    }
}
