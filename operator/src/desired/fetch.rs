//! How a model comes that a hub, a bucket, a registry or a web server has: a container that fetches it before the agent starts, the cache it is
//! kept in, the link that leads to it. Pure.
//!
//! Only that container gets token, keys or login. The agent sees the cache read-only, and the link under a name that is known before
//! anybody knows the commit.

use k8s_openapi::api::core::v1::{
    Container, EmptyDirVolumeSource, EnvVar, EnvVarSource, HostPathVolumeSource, PersistentVolumeClaimVolumeSource,
    SecretKeySelector, Volume, VolumeMount,
};

use super::{
    additions,
    pod::{container_security, own_mounts, pod_uid, read_only_mount, resources_without_gpus, told_by_operator},
};
use crate::validate::{CacheVolume, FetchSecret, LINK_DIR, MODEL_MOUNT, ModelFetch, ReplicaInputs};

/// Name of the container that fetches.
pub const FETCH_CONTAINER: &str = "fetch";
/// What says where a bucket is and who asks for it, as every tool of AWS reads it.
const BUCKET_VARIABLES: [&str; 5] =
    ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION", "AWS_ENDPOINT_URL"];
/// What a web server is told of who asks, by the keys that Secrets have for it.
const WEB_VARIABLES: [(&str, &str); 3] =
    [("STOKER_SOURCE_TOKEN", "token"), ("STOKER_SOURCE_USERNAME", "username"), ("STOKER_SOURCE_PASSWORD", "password")];
const CACHE_VOLUME: &str = "model-cache";
const LINK_VOLUME: &str = "model-link";

/// What runs before the agent.
pub(super) fn container(inputs: &ReplicaInputs, fetch: &ModelFetch, commit: Option<&str>) -> Container {
    let added = inputs.volumes.iter().enumerate().map(|(place, volume)| additions::volume_mount(place, volume));
    Container {
        name: FETCH_CONTAINER.to_owned(),
        image: Some(inputs.image.clone()),
        image_pull_policy: inputs.image_pull_policy.clone(),
        args: Some(args(fetch, commit).into_iter().chain(link(inputs)).chain(told_by_operator()).collect()),
        env: Some(inputs.env.iter().map(additions::env).chain(secret(fetch)).chain([pod_uid()]).collect()),
        resources: resources_without_gpus(inputs),
        volume_mounts: Some(mounts().into_iter().map(writable).chain(own_mounts()).chain(added).collect()),
        security_context: Some(container_security()),
        termination_message_policy: Some("FallbackToLogsOnError".to_owned()),
        ..Container::default()
    }
}

/// The same where no agent follows: it fills the cache and tells nobody.
pub(super) fn ahead(inputs: &ReplicaInputs, fetch: &ModelFetch, commit: Option<&str>) -> Container {
    let added = inputs.volumes.iter().enumerate().map(|(place, volume)| additions::volume_mount(place, volume));
    let cache = writable(read_only_mount(CACHE_VOLUME, MODEL_MOUNT));
    Container {
        args: Some(args(fetch, commit)),
        env: Some(inputs.env.iter().map(additions::env).chain(secret(fetch)).collect()),
        resources: None,
        volume_mounts: Some([cache].into_iter().chain(added).collect()),
        ..container(inputs, fetch, commit)
    }
}

/// Its volumes.
pub(super) fn volumes_ahead(inputs: &ReplicaInputs, fetch: &ModelFetch) -> Vec<Volume> {
    let added = inputs.volumes.iter().enumerate().map(|(place, volume)| additions::volume(place, volume));
    let [cache, _link] = volumes(fetch);
    [cache].into_iter().chain(added).collect()
}

/// The agent's mounts for it.
pub(super) fn mounts() -> [VolumeMount; 2] {
    [read_only_mount(CACHE_VOLUME, MODEL_MOUNT), read_only_mount(LINK_VOLUME, LINK_DIR)]
}

fn writable(mount: VolumeMount) -> VolumeMount {
    VolumeMount { read_only: None, ..mount }
}

/// Cache and link.
pub(super) fn volumes(fetch: &ModelFetch) -> [Volume; 2] {
    let volume = |name: &str| Volume { name: name.to_owned(), ..Volume::default() };
    let cache = match &fetch.cache {
        CacheVolume::Pod => Volume { empty_dir: Some(EmptyDirVolumeSource::default()), ..volume(CACHE_VOLUME) },
        CacheVolume::Claim(name) => {
            let claim = PersistentVolumeClaimVolumeSource { claim_name: name.clone(), read_only: None };
            Volume { persistent_volume_claim: Some(claim), ..volume(CACHE_VOLUME) }
        }
        CacheVolume::Node(path) => {
            // It must be there: one that the kubelet makes belongs to root, and nobody could write to it.
            let path = HostPathVolumeSource { path: path.clone(), type_: Some("Directory".to_owned()) };
            Volume { host_path: Some(path), ..volume(CACHE_VOLUME) }
        }
    };
    [cache, Volume { empty_dir: Some(EmptyDirVolumeSource::default()), ..volume(LINK_VOLUME) }]
}

fn args(fetch: &ModelFetch, commit: Option<&str>) -> Vec<String> {
    let flag = |name: &str, value: Option<String>| value.map(|value| [name.to_owned(), value]);
    let secret = fetch.token.as_ref().map(|FetchSecret { name, key }| match key {
        Some(key) => format!("key {key} of Secret {name}"),
        None => format!("Secret {name}"),
    });
    let flags = [
        flag("--cache", Some(MODEL_MOUNT.to_owned())),
        flag("--endpoint", fetch.endpoint.clone()),
        flag("--token-name", secret),
        flag("--cache-limit", fetch.limit_bytes.map(|bytes| bytes.to_string())),
        flag("--commit", commit.map(str::to_owned)),
    ];
    let command = ["fetch".to_owned(), fetch.source.clone()].into_iter();
    command.chain(flags.into_iter().flatten().flatten()).collect()
}

/// What the agent serves.
fn link(inputs: &ReplicaInputs) -> [String; 2] {
    ["--link".to_owned(), inputs.model_source.clone()]
}

/// Variables that the fetcher reads.
fn secret(fetch: &ModelFetch) -> Vec<EnvVar> {
    let Some(FetchSecret { name, key }) = &fetch.token else { return Vec::new() };
    let scheme = fetch.source.split_once("://").unwrap_or_default().0;
    match (key, scheme) {
        (Some(key), "oci") => vec![variable("DOCKER_AUTH_CONFIG", name, key, Presence::Needed)],
        (Some(key), "https") => vec![variable(WEB_VARIABLES[0].0, name, key, Presence::Needed)],
        (Some(key), _) => vec![variable("HF_TOKEN", name, key, Presence::Needed)],
        // Which of these a server needs is known to the fetcher, who says what is missing.
        (None, "https") => WEB_VARIABLES.iter().map(|(of, key)| variable(of, name, key, Presence::MayLack)).collect(),
        (None, _) => BUCKET_VARIABLES.iter().map(|key| variable(key, name, key, Presence::MayLack)).collect(),
    }
}

/// Whether a pod starts without a key of a Secret.
#[derive(Clone, Copy, PartialEq)]
enum Presence {
    Needed,
    MayLack,
}

fn variable(variable: &str, secret: &str, key: &str, presence: Presence) -> EnvVar {
    let optional = (presence == Presence::MayLack).then_some(true);
    let key = SecretKeySelector { name: secret.to_owned(), key: key.to_owned(), optional };
    EnvVar {
        name: variable.to_owned(),
        value_from: Some(EnvVarSource { secret_key_ref: Some(key), ..EnvVarSource::default() }),
        value: None,
    }
}
