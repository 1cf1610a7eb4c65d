//! All objects of a kind, as far as somebody looks at them. Writes nothing. What nobody looks at is no news: a node that says every few
//! seconds that it is there has not changed.

use std::{
    collections::BTreeMap,
    fmt::Debug,
    sync::{Arc, PoisonError, RwLock},
    time::Duration,
};

use futures::{Stream, StreamExt};
use kube::{
    Api, Resource, ResourceExt,
    runtime::{
        WatchStreamExt,
        watcher::{self, Event, watcher},
    },
};
use serde::de::DeserializeOwned;
use tokio::{
    sync::{mpsc, watch},
    time::{sleep, timeout},
};
use tracing::warn;

use crate::pause::WatchPauses;

/// Rounds begin after that, with objects or without.
const FIRST_LIST_WITHIN: Duration = Duration::from_secs(5);
/// Who may not look, or finds no such kind, asks again after that: somebody may have given the right, or the kind.
const DENIED_PAUSE: Duration = Duration::from_secs(300);

/// What is known of a kind.
#[derive(Clone, Debug)]
pub enum Seen<K> {
    /// They were not listed yet.
    NotYet,
    /// The operator may not list them, or the cluster has no such kind.
    Denied,
    /// All there are.
    All(Arc<Vec<K>>),
}

/// See the module. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Watched<K> {
    seen: Arc<RwLock<Seen<K>>>,
}

impl<K> Default for Watched<K> {
    fn default() -> Self {
        Self { seen: Arc::new(RwLock::new(Seen::NotYet)) }
    }
}

impl<K> Watched<K>
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + PartialEq + Send + Sync + 'static,
{
    /// Begins to watch them, `slim` to what is looked at, and waits for the first list. The stream has an item whenever they are others than
    /// before.
    pub async fn watch(api: Api<K>, slim: fn(K) -> K) -> (Self, impl Stream<Item = ()> + Send + use<K>) {
        let watched = Self::default();
        let (changed, mut changes) = mpsc::channel(1);
        let (listed, mut first) = watch::channel(false);
        tokio::spawn(watched.clone().follow(api, slim, move || {
            listed.send_replace(true);
            // One that waits already says the same.
            _ = changed.try_send(());
        }));
        if timeout(FIRST_LIST_WITHIN, first.wait_for(|listed| *listed)).await.is_err() {
            warn!(kind = %K::kind(&()), "not listed yet: rounds begin without");
        }
        (watched, futures::stream::poll_fn(move |context| changes.poll_recv(context)))
    }

    /// What is known now.
    pub fn seen(&self) -> Seen<K> {
        self.seen.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    async fn follow(self, api: Api<K>, slim: fn(K) -> K, changed: impl Fn()) {
        loop {
            let mut events = watcher(api.clone(), watcher::Config::default()).backoff(WatchPauses::default()).boxed();
            let mut known = Known::default();
            while let Some(event) = events.next().await {
                match event {
                    Err(error) if is_denied(&error) => break,
                    Err(error) => warn!(%error, kind = %K::kind(&()), "watch"),
                    Ok(event) => {
                        if known.take(event, slim) {
                            self.see(Seen::All(Arc::new(known.objects.values().cloned().collect())));
                            changed();
                        }
                    }
                }
            }
            // What was seen before stands: a right that somebody takes away must not lift a limit.
            if !matches!(self.seen(), Seen::All(_)) {
                self.see(Seen::Denied);
                changed();
            }
            sleep(DENIED_PAUSE).await;
        }
    }

    fn see(&self, seen: Seen<K>) {
        *self.seen.write().unwrap_or_else(PoisonError::into_inner) = seen;
    }
}

fn is_denied(error: &watcher::Error) -> bool {
    match error {
        watcher::Error::InitialListFailed(kube::Error::Api(answer))
        | watcher::Error::WatchStartFailed(kube::Error::Api(answer)) => matches!(answer.code, 403 | 404),
        _ => false,
    }
}

/// Objects by namespace and name, and those of a list that is not complete.
#[derive(Debug)]
pub(crate) struct Known<K> {
    pub(crate) objects: BTreeMap<(String, String), K>,
    listed: BTreeMap<(String, String), K>,
}

impl<K> Default for Known<K> {
    fn default() -> Self {
        Self { objects: BTreeMap::new(), listed: BTreeMap::new() }
    }
}

impl<K: Resource<DynamicType = ()> + PartialEq + Clone> Known<K> {
    /// True when they are others now. A list is news in any case: it may be the first.
    pub(crate) fn take(&mut self, event: Event<K>, slim: fn(K) -> K) -> bool {
        let place = |object: &K| (object.namespace().unwrap_or_default(), object.name_any());
        match event {
            Event::Init => {
                self.listed.clear();
                false
            }
            Event::InitApply(object) => {
                self.listed.insert(place(&object), slim(object));
                false
            }
            Event::InitDone => {
                self.objects = std::mem::take(&mut self.listed);
                true
            }
            Event::Apply(object) => {
                let (place, object) = (place(&object), slim(object));
                self.objects.insert(place, object.clone()).is_none_or(|before| before != object)
            }
            Event::Delete(object) => self.objects.remove(&place(&object)).is_some(),
        }
    }
}
