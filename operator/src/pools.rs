//! InferencePools, by which Gateways of other projects find a deployment's replicas and who picks one of them: what of their API is
//! written here, and those that there are. The kind is somebody else's, and need not be there: it is looked for until it is, where pools are
//! wanted, and once where they are not, since some may have been before. Writes nothing.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use clap::ValueEnum;
use futures::{FutureExt, Stream, stream};
use kube::{
    Api, Client, CustomResource, ResourceExt,
    api::ListParams,
    runtime::{
        WatchStreamExt,
        reflector::{ObjectRef, Store, store::Writer},
        watcher::{self, watcher},
    },
};
use serde::{Deserialize, Serialize};
use tokio::time::sleep;
use tracing::{info, warn};

use crate::{desired::labels, pause::WatchPauses};

/// `spec` of an InferencePool, as far as it is written here.
#[derive(Clone, CustomResource, Debug, Deserialize, PartialEq, Serialize)]
#[kube(
    group = "inference.networking.k8s.io",
    version = "v1",
    kind = "InferencePool",
    namespaced,
    derive = "PartialEq",
    schema = "disabled"
)]
#[serde(rename_all = "camelCase")]
pub struct InferencePoolSpec {
    /// Which pods are in it.
    pub selector: PoolSelector,
    /// Where they serve.
    pub target_ports: Vec<PoolPort>,
    /// Who picks one of them; a pool that somebody else made may name nobody.
    pub endpoint_picker_ref: Option<EndpointPickerRef>,
}

/// Which pods are in a pool.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PoolSelector {
    /// They have all of these labels.
    pub match_labels: BTreeMap<String, String>,
}

/// A port.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
pub struct PoolPort {
    /// Its number.
    pub number: u16,
}

/// Who picks a replica: a Service of the pool's namespace.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct EndpointPickerRef {
    /// Its name.
    pub name: String,
    /// Its port.
    pub port: Option<PoolPort>,
    /// What happens to requests while it does not answer.
    pub failure_mode: Option<FailureMode>,
}

/// What a Gateway does with requests while nobody picks.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize, ValueEnum)]
#[value(rename_all = "PascalCase")]
pub enum FailureMode {
    /// It sends them to any replica.
    FailOpen,
    /// It refuses them.
    FailClose,
}

/// Whether pools are kept, and from when on.
#[derive(Clone, Copy, Debug)]
pub struct PoolOptions {
    /// What Gateways do while nobody picks; `None`: there are to be no pools.
    pub failure_mode: Option<FailureMode>,
    /// Between two looks whether the kind is there by now.
    pub look_again: Duration,
}

/// Those that the operator made, where there are any. Cheap to clone.
#[derive(Clone)]
pub struct Pools {
    store: Store<InferencePool>,
    /// All that there are have been listed.
    are_listed: Arc<AtomicBool>,
    failure_mode: Option<FailureMode>,
}

/// What is watched for: pools that changed, and that pools can be kept from now on.
pub type Watching<S, T> = (Pools, S, T);

impl Pools {
    /// Begins to watch them, in this namespace or all, as soon as their kind is there.
    pub fn watch(
        client: Client,
        scope: Option<&str>,
        options: PoolOptions,
    ) -> Watching<
        impl Stream<Item = watcher::Result<InferencePool>> + Send + use<>,
        impl Stream<Item = ()> + Send + use<>,
    > {
        let writer = Writer::<InferencePool>::default();
        let store = writer.as_reader();
        let api: Api<InferencePool> = match scope {
            Some(namespace) => Api::namespaced(client, namespace),
            None => Api::all(client),
        };
        let config = watcher::Config::default().labels(&labels::managed_selector());
        let events = there(api.clone(), options).map(move |()| watcher(api, config).backoff(WatchPauses::default()));
        let events = events.flatten_stream().modify(|pool| pool.managed_fields_mut().clear());
        let events = events.reflect(writer).touched_objects();
        let pools = Self { store: store.clone(), are_listed: Arc::default(), failure_mode: options.failure_mode };
        let are_listed = Arc::clone(&pools.are_listed);
        let listed = stream::once(async move {
            // An error: the watch has ended, and with it the process.
            _ = store.wait_until_ready().await;
            are_listed.store(true, Ordering::Release);
        });
        (pools, events, listed)
    }

    /// Whether it is known which there are; before that there may be no kind, too.
    pub fn are_listed(&self) -> bool {
        self.are_listed.load(Ordering::Acquire)
    }

    /// What happens while nobody picks; `None` where there are to be no pools, and as long as there can be none.
    pub fn kept(&self) -> Option<FailureMode> {
        self.failure_mode.filter(|_| self.are_listed())
    }

    /// The pool of this name. None is seen before all are listed: it would be taken for one that is not wanted.
    pub fn get(&self, namespace: &str, name: &str) -> Option<Arc<InferencePool>> {
        self.store.get(&ObjectRef::new(name).within(namespace)).filter(|_| self.are_listed())
    }
}

/// Until the API server knows the kind, and lets the operator list it; for ever, if it does not and no pools are wanted.
async fn there(api: Api<InferencePool>, PoolOptions { failure_mode, look_again }: PoolOptions) {
    let mut is_told = false;
    loop {
        match api.list_metadata(&ListParams::default().limit(1)).await {
            Ok(_) => return info!(are_wanted = failure_mode.is_some(), "InferencePools are watched"),
            Err(kube::Error::Api(answer)) if matches!(answer.code, 403 | 404) => {
                if failure_mode.is_none() {
                    return std::future::pending().await;
                }
                if !std::mem::replace(&mut is_told, true) {
                    info!(
                        code = answer.code,
                        "no InferencePools yet: the cluster has no such kind, or they may not be listed"
                    );
                }
            }
            Err(error) => warn!(%error, "look for InferencePools"),
        }
        sleep(look_again).await;
    }
}
