//! Deployments as they come from the watch. One that this operator cannot read, stored under a newer or older schema,
//! is told so in its status and kept from the others: it must not blind the operator. Its replicas are left as they are.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use futures::{Stream, StreamExt};
use kube::{
    Api, Client,
    api::{Patch, PatchParams},
    core::{DeserializeGuard, error_boundary::InvalidObject},
    runtime::{WatchStreamExt, watcher, watcher::Event},
};
use serde_json::json;
use stoker_crds::InferenceDeployment;
use tracing::warn;

use crate::{apply::FIELD_MANAGER, clock::Clock, pause::WatchPauses, status::status_of_invalid, validate::SpecError};

/// Generation that was told, by UID, of deployments that cannot be read and are there.
type Told = Arc<Mutex<HashMap<String, Option<i64>>>>;

/// An object that cannot be read, and whether it is there.
enum Unreadable {
    There(Box<InvalidObject>),
    Gone(Box<InvalidObject>),
}

/// Watch events of deployments that can be read.
pub fn readable(
    api: Api<DeserializeGuard<InferenceDeployment>>,
    client: Client,
    clock: Clock,
) -> impl Stream<Item = watcher::Result<Event<InferenceDeployment>>> + Send {
    let told = Told::default();
    watcher(api, watcher::Config::default()).backoff(WatchPauses::default()).filter_map(move |event| {
        let (client, told) = (client.clone(), told.clone());
        async move {
            match event.map(sort) {
                Err(error) => Some(Err(error)),
                Ok(Ok(event)) => {
                    if let Event::Apply(deployment) | Event::Delete(deployment) = &event {
                        forget(deployment.metadata.uid.as_deref(), &told);
                    }
                    Some(Ok(event))
                }
                Ok(Err(Unreadable::Gone(object))) => {
                    forget(object.metadata.uid.as_deref(), &told);
                    None
                }
                Ok(Err(Unreadable::There(object))) => {
                    report_once(&object, &client, clock, &told).await;
                    None
                }
            }
        }
    })
}

/// The event, or the object that could not be read.
fn sort(event: Event<DeserializeGuard<InferenceDeployment>>) -> Result<Event<InferenceDeployment>, Unreadable> {
    let there = |object| Unreadable::There(Box::new(object));
    Ok(match event {
        Event::Apply(guard) => Event::Apply(guard.0.map_err(there)?),
        Event::Delete(guard) => Event::Delete(guard.0.map_err(|object| Unreadable::Gone(Box::new(object)))?),
        Event::InitApply(guard) => Event::InitApply(guard.0.map_err(there)?),
        Event::Init => Event::Init,
        Event::InitDone => Event::InitDone,
    })
}

/// It can be read, or it is gone.
fn forget(uid: Option<&str>, told: &Told) {
    if let Some(uid) = uid {
        told.lock().unwrap_or_else(PoisonError::into_inner).remove(uid);
    }
}

/// Our own status write comes back as an event: each generation is told once.
async fn report_once(object: &InvalidObject, client: &Client, clock: Clock, told: &Told) {
    let metadata = &object.metadata;
    let uid = metadata.uid.clone().unwrap_or_default();
    let before = told.lock().unwrap_or_else(PoisonError::into_inner).insert(uid, metadata.generation);
    if before != Some(metadata.generation) && metadata.deletion_timestamp.is_none() {
        warn!(namespace = metadata.namespace, name = metadata.name, error = object.error, "deployment cannot be read");
        if let Err(error) = report(object, client, clock).await {
            warn!(name = metadata.name, %error, "its status was not written");
        }
    }
}

async fn report(object: &InvalidObject, client: &Client, clock: Clock) -> kube::Result<()> {
    let metadata = &object.metadata;
    let api = Api::<InferenceDeployment>::namespaced(client.clone(), metadata.namespace.as_deref().unwrap_or_default());
    let error = SpecError::Unreadable { error: object.error.clone() };
    let status = status_of_invalid(&error, metadata.generation, &Default::default(), clock.now());
    let patch = json!({"metadata": {"uid": metadata.uid}, "status": {
        "conditions": status.conditions, "observedGeneration": status.observed_generation,
    }});
    let params = PatchParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PatchParams::default() };
    let name = metadata.name.clone().unwrap_or_default();
    match api.patch_status(&name, &params, &Patch::Merge(&patch)).await {
        // The answer is as unreadable as the object; the write was done.
        Err(kube::Error::SerdeError(_)) => Ok(()),
        result => result.map(drop),
    }
}
