//! Where a deployment's model is: what its source means to the container, and how one that is not there yet is fetched.

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use serde::{Deserialize, Serialize};
use stoker_crds::{
    inference_deployment::ModelSpec,
    quantity::{Amount, amount},
};

use super::{SpecError, replica::as_quantity};
use crate::image_volumes::ImageVolumes;

/// Where a PersistentVolumeClaim with weights is mounted in the agent's container.
pub const MODEL_MOUNT: &str = "/models";
/// Where the link to a fetched model is.
pub const LINK_DIR: &str = "/run/stoker/model";
/// That link: what the agent serves, whatever commit it leads to.
pub const MODEL_LINK: &str = "/run/stoker/model/current";
/// What stands in a source before the folder of an image.
pub(crate) const IMAGE_FOLDER: &str = "#path=";
/// Key of a hub's token in a Secret, where a deployment names none.
const TOKEN_KEY: &str = "token";
/// Key of a registry's login: what `kubectl create secret docker-registry` writes.
pub(crate) const LOGIN_KEY: &str = ".dockerconfigjson";

/// How models are fetched where a deployment does not say.
#[derive(Clone, Debug, Default)]
pub struct ModelDefaults {
    /// The hub, or a mirror of it; `None`: the agent's own default.
    pub endpoint: Option<String>,
    /// Directory of every node that keeps models; `None`: each pod keeps its own.
    pub node_cache: Option<String>,
    /// Bytes that such a directory may hold.
    pub node_cache_limit: Option<u64>,
    /// Bytes a second that a replica gives of its model to those that fetch it; 0: nothing.
    pub give_bytes_per_second: u64,
    /// Whether the cluster mounts images that are models.
    pub image_volumes: ImageVolumes,
}

/// A model that is fetched before the agent starts.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct ModelFetch {
    /// `hf://…`, `s3://…`, `oci://…` or `https://…`.
    pub source: String,
    /// The hub, or a mirror of it; `None`: the agent's own default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<String>,
    /// Where its token, keys or login are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token: Option<FetchSecret>,
    /// Where it is kept.
    pub cache: CacheVolume,
    /// Bytes that may be kept there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit_bytes: Option<u64>,
}

/// What of a Secret a fetch gets.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct FetchSecret {
    /// Name of the Secret.
    pub name: String,
    /// Key in it. `None`: those that are named as the variables of a bucket, or as the parts of a login.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
}

/// Where fetched models are kept.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub enum CacheVolume {
    /// In the pod, and gone with it.
    Pod,
    /// On a PersistentVolumeClaim.
    Claim(String),
    /// In a directory of the node.
    Node(String),
}

/// A model source as the container sees it.
#[derive(Debug, PartialEq)]
pub(super) struct ResolvedSource {
    pub(super) path: String,
    pub(super) claim: Option<String>,
    pub(super) is_fetched: bool,
}

impl ResolvedSource {
    fn at(path: &str) -> Self {
        Self { path: path.to_owned(), claim: None, is_fetched: false }
    }
}

pub(super) fn model_source(source: &str) -> Result<ResolvedSource, SpecError> {
    let (scheme, rest) = source.split_once("://").unwrap_or_default();
    match (scheme, rest.split_once('/')) {
        ("builtin", None) if !rest.is_empty() => Ok(ResolvedSource::at(source)),
        ("file", Some(("", path))) if !path.is_empty() => Ok(ResolvedSource::at(rest)),
        ("hf", Some((org, model))) if !org.is_empty() && !model.is_empty() => Ok(fetched()),
        ("oci", Some((registry, image))) if !registry.is_empty() && !image.is_empty() => Ok(of_image(image)),
        ("s3" | "https", Some((place, _))) if !place.is_empty() => Ok(fetched()),
        ("s3" | "https", None) if !rest.is_empty() => Ok(fetched()),
        ("pvc", Some((claim, path))) if !claim.is_empty() => Ok(claimed(claim, path)),
        ("pvc", None) if !rest.is_empty() => Ok(claimed(rest, "")),
        _ => Err(SpecError::ModelSource { found: source.to_owned() }),
    }
}

fn fetched() -> ResolvedSource {
    ResolvedSource { is_fetched: true, ..ResolvedSource::at(MODEL_LINK) }
}

/// Where its folder is below the link's place: of an image that is mounted there the folder is the model, and one that is fetched is linked there.
fn of_image(image: &str) -> ResolvedSource {
    let folder = image.split_once(IMAGE_FOLDER).map_or("", |(_, folder)| folder.trim_matches('/'));
    let path = if folder.is_empty() { MODEL_LINK.to_owned() } else { format!("{MODEL_LINK}/{folder}") };
    ResolvedSource { is_fetched: true, ..ResolvedSource::at(&path) }
}

fn claimed(claim: &str, path: &str) -> ResolvedSource {
    let path = path.trim_end_matches('/');
    let path = if path.is_empty() { MODEL_MOUNT.to_owned() } else { format!("{MODEL_MOUNT}/{path}") };
    ResolvedSource { claim: Some(claim.to_owned()), ..ResolvedSource::at(&path) }
}

/// A claim stands before a directory of the node; the limit of the one says nothing of the other.
pub(super) fn model_fetch(model: &ModelSpec, defaults: &ModelDefaults) -> Result<ModelFetch, SpecError> {
    let asked = model.cache.clone();
    let limit = asked.as_ref().and_then(|cache| cache.size_limit.clone()).map(bytes_of).transpose()?;
    let (cache, default_limit) = match (asked.and_then(|cache| cache.claim_name), &defaults.node_cache) {
        (Some(claim), _) => (CacheVolume::Claim(claim), None),
        (None, Some(path)) => (CacheVolume::Node(path.clone()), defaults.node_cache_limit),
        (None, None) => (CacheVolume::Pod, None),
    };
    let source = model.source.clone();
    let token = model.token_secret.as_ref().map(|secret| FetchSecret {
        name: secret.name.clone(),
        key: secret.key.clone().or_else(|| default_key(&source)),
    });
    // The mirror is one of hubs.
    let endpoint = defaults.endpoint.clone().filter(|_| source.starts_with("hf://"));
    Ok(ModelFetch { source, endpoint, token, cache, limit_bytes: limit.or(default_limit) })
}

fn default_key(source: &str) -> Option<String> {
    match source.split_once("://").unwrap_or_default().0 {
        "s3" | "https" => None,
        "oci" => Some(LOGIN_KEY.to_owned()),
        _ => Some(TOKEN_KEY.to_owned()),
    }
}

fn bytes_of(limit: Amount) -> Result<u64, SpecError> {
    let Quantity(text) = as_quantity(limit);
    match amount(&text) {
        Some(bytes) if bytes >= 1.0 => Ok(bytes as u64),
        _ => Err(SpecError::CacheLimit { found: text }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolved(source: &str) -> (String, Option<String>) {
        let resolved = model_source(source).unwrap();
        (resolved.path, resolved.claim)
    }

    #[test]
    fn sources_resolve_to_what_the_container_sees() {
        assert_eq!(resolved("builtin://ember"), ("builtin://ember".into(), None));
        assert_eq!(resolved("file:///models/chat"), ("/models/chat".into(), None));
        assert_eq!(resolved("pvc://weights/llama/8b/"), ("/models/llama/8b".into(), Some("weights".into())));
        assert_eq!(resolved("pvc://weights"), ("/models".into(), Some("weights".into())));
        for fetched in [
            "hf://Qwen/Qwen3-8B@v1",
            "s3://models/qwen3-8b",
            "s3://models",
            "oci://registry.example/qwen3-8b:v1",
            "https://files.example/qwen3-8b",
            "https://files.example",
        ] {
            assert_eq!(resolved(fetched), (MODEL_LINK.into(), None), "{fetched}");
        }
        for (folder, path) in [("/", ""), ("models", "/models"), ("/models/chat/", "/models/chat")] {
            let of_image = resolved(&format!("oci://registry.example/qwen3-8b:v1#path={folder}"));
            assert_eq!(of_image, (format!("{MODEL_LINK}{path}"), None), "{folder}");
        }
    }

    #[test]
    fn other_sources_are_refused_by_name() {
        for source in [
            "",
            "ember",
            "builtin://",
            "file://relative",
            "pvc:///x",
            "http://host/x",
            "builtin://a/b",
            "hf://a",
            "hf:///b",
            "s3://",
            "oci://registry.example",
            "https:///m",
        ] {
            let refused = model_source(source).unwrap_err();
            assert_eq!(refused, SpecError::ModelSource { found: source.into() });
        }
    }
}
