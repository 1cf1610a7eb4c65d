//! Whether the cluster mounts a model's image itself, so that nobody fetches it. Pure: the API server's release and the nodes are
//! arguments.
//!
//! Only an image whose source names its digest and the folder that is the model: nothing here can ask a registry what a tag is, or whether
//! what was pushed has a file system at all. Never a part of the revision: pods are made in the way that the cluster has when they are made, and serve
//! the same bytes either way.

use std::fmt;

use k8s_openapi::api::core::v1::{LocalObjectReference, Node, NodeSystemInfo};
use kube::{Client, ResourceExt};
use stoker_crds::{
    InferenceDeploymentSpec,
    devices::Gpus,
    nodes::{Placement, gpus_on},
};
use tracing::warn;

use crate::{
    course::Course,
    validate::{CacheVolume, FetchSecret, IMAGE_FOLDER, LOGIN_KEY, ModelFetch, ValidatedDeployment},
    watched::Seen,
};

/// From here on API servers and kubelets mount images unless somebody switches it off (`ImageVolume`); before, unless nobody switches it on.
const ON_FROM: Release = Release { major: 1, minor: 35 };
/// What runs containers, and from which release on it mounts images.
const RUNTIMES: [(&str, Release); 2] =
    [("containerd", Release { major: 2, minor: 1 }), ("cri-o", Release { major: 1, minor: 33 })];
/// What makes the rule of them no question.
const ALWAYS: &str = "models.imageVolumes: always, if they do";

/// Whether images are mounted, as whoever installs the operator says.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, clap::ValueEnum)]
pub enum ImageVolumes {
    /// Where API server and nodes do that by their releases.
    #[default]
    Auto,
    /// Wherever the source allows it.
    Always,
    /// Nowhere.
    Never,
}

/// A release of Kubernetes, or of what runs its containers.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct Release {
    major: u32,
    minor: u32,
}

/// How the model of an image comes, where the cluster could mount it.
#[derive(Clone, Debug, PartialEq)]
pub enum Delivery {
    /// As a volume.
    Mounted(MountedImage),
    /// As every other model, and why.
    Fetched(String),
}

/// An image that is a volume.
#[derive(Clone, Debug, PartialEq)]
pub struct MountedImage {
    /// What kubelets pull, by its digest.
    pub reference: String,
    /// That digest, in hexadecimal: the model's commit.
    pub digest: String,
    /// Secret with the registry's login.
    pub pull_secret: Option<LocalObjectReference>,
}

/// What it depends on beside the deployment.
#[derive(Clone, Copy, Debug)]
pub struct Ground<'a> {
    /// What was said.
    pub rule: ImageVolumes,
    /// The API server's; `None`: it did not say.
    pub server: Option<Release>,
    /// The nodes.
    pub nodes: &'a Seen<Node>,
    /// The GPUs among what drivers publish; `None` where nobody knows them: then any node may have some.
    pub devices: Option<&'a Gpus<'a>>,
    /// Says which of them its pods may land on.
    pub spec: &'a InferenceDeploymentSpec,
}

impl ValidatedDeployment {
    /// The same, and its canary, knowing how their models come.
    pub fn delivered_on(mut self, ground: &Ground<'_>) -> Self {
        self.delivery = delivery(&self, ground);
        if let Course::Canary(asked) = self.course {
            self.course = Course::Canary(Box::new(asked.delivered_on(ground)));
        }
        self
    }

    /// The image that new replicas mount.
    pub fn mounted(&self) -> Option<&MountedImage> {
        match &self.delivery {
            Some(Delivery::Mounted(image)) => Some(image),
            Some(Delivery::Fetched(_)) | None => None,
        }
    }
}

/// `None`: of a source that is no folder of an image.
fn delivery(deployment: &ValidatedDeployment, ground: &Ground<'_>) -> Option<Delivery> {
    let fetch = deployment.replica.fetch.as_ref()?;
    let (image, _folder) = fetch.source.strip_prefix("oci://")?.split_once(IMAGE_FOLDER)?;
    let decided = mountable(image, fetch, deployment).and_then(|image| cluster_mounts(ground).map(|()| image));
    Some(decided.map_or_else(Delivery::Fetched, Delivery::Mounted))
}

/// The image, or why no cluster would mount it for this deployment.
fn mountable(image: &str, fetch: &ModelFetch, deployment: &ValidatedDeployment) -> Result<MountedImage, String> {
    let Some((named, digest)) = image.split_once("@sha256:") else {
        return Err("the source names a tag, which may become another image: name its digest (…@sha256:…)".to_owned());
    };
    if deployment.scaling.as_ref().is_some_and(|scaling| scaling.standby > 0) {
        return Err("scaling.standby is for a model that nodes keep themselves: remove it".to_owned());
    }
    if deployment.asked.model.cache.is_some() || matches!(fetch.cache, CacheVolume::Claim(_)) {
        return Err("model.cache says where it is kept: remove it".to_owned());
    }
    let pull_secret = fetch.token.as_ref().map(login).transpose()?;
    // A tag beside a digest says nothing, and not every runtime takes both. What stands behind the last slash alone may have one.
    let (path, name) = named.rsplit_once('/').unwrap_or(("", named));
    let name = name.split_once(':').map_or(name, |(name, _tag)| name);
    Ok(MountedImage { reference: format!("{path}/{name}@sha256:{digest}"), digest: digest.to_owned(), pull_secret })
}

/// Kubelets read logins where Kubernetes keeps them.
fn login(secret: &FetchSecret) -> Result<LocalObjectReference, String> {
    match secret.key.as_deref() {
        Some(LOGIN_KEY) => Ok(LocalObjectReference { name: secret.name.clone() }),
        other => Err(format!(
            "nodes read a login of the key {LOGIN_KEY}, and model.tokenSecret.key is {}: make a Secret of type kubernetes.io/dockerconfigjson",
            other.unwrap_or("none")
        )),
    }
}

/// Or why not, as far as anybody knows.
fn cluster_mounts(ground: &Ground<'_>) -> Result<(), String> {
    match ground.rule {
        ImageVolumes::Always => return Ok(()),
        ImageVolumes::Never => return Err("this operator mounts no images (models.imageVolumes: never)".to_owned()),
        ImageVolumes::Auto => {}
    }
    match ground.server {
        Some(server) if server >= ON_FROM => nodes_mount(ground),
        Some(server) => Err(format!(
            "the API server is Kubernetes {server}, and image volumes are on from {ON_FROM} ({ALWAYS} before)"
        )),
        None => {
            Err(format!("the API server does not say its release, so nobody knows if it has image volumes ({ALWAYS})"))
        }
    }
}

/// Closed nodes count: they open without notice.
fn nodes_mount(ground: &Ground<'_>) -> Result<(), String> {
    let nodes = match ground.nodes {
        Seen::All(nodes) => nodes,
        Seen::Denied => return Err(format!("the operator may not list nodes, which may not mount images ({ALWAYS})")),
        Seen::NotYet => return Err("nodes were not listed yet".to_owned()),
    };
    let (placement, gpus) = (Placement::of(ground.spec), u64::from(ground.spec.gpus()));
    let has_some = |node: &Node, devices| gpus_on(node, placement.gpus, devices).is_some_and(|n| n >= gpus);
    let has_gpus = |node: &&Node| gpus == 0 || ground.devices.is_none_or(|devices| has_some(node, devices));
    let could_run = nodes.iter().filter(|node| placement.admits(node)).filter(has_gpus);
    let said: Vec<Result<(), String>> = could_run.map(node_mounts).collect();
    if said.is_empty() {
        return Err(format!("there is no node yet that its pods may land on ({ALWAYS} once there are some)"));
    }
    let mut unable = said.into_iter().filter_map(Result::err);
    match (unable.next(), unable.count()) {
        (None, _) => Ok(()),
        (Some(first), 0) => Err(first),
        (Some(first), others) => Err(format!("{first}; so do {others} other nodes, or what they run is not known")),
    }
}

fn node_mounts(node: &Node) -> Result<(), String> {
    let info = node.status.as_ref().and_then(|status| status.node_info.as_ref());
    let NodeSystemInfo { kubelet_version, container_runtime_version, .. } = info.cloned().unwrap_or_default();
    let name = node.name_any();
    match Release::parse(&kubelet_version) {
        Some(kubelet) if kubelet >= ON_FROM => {}
        _ => {
            return Err(format!(
                "node {name} runs kubelet {}, and images are mounted from {ON_FROM} on",
                or_unknown(&kubelet_version)
            ));
        }
    }
    let (runtime, version) = container_runtime_version.split_once("://").unwrap_or_default();
    let since = RUNTIMES.iter().find(|(name, _)| *name == runtime).map(|(_, since)| *since);
    match (since, Release::parse(version)) {
        (Some(since), Some(version)) if version >= since => Ok(()),
        (Some(since), _) => {
            Err(format!("node {name} runs {runtime} {version}, and images are mounted from {since} on"))
        }
        (None, _) => Err(format!(
            "node {name} runs {}, of which nobody here knows if it mounts images ({ALWAYS})",
            or_unknown(&container_runtime_version)
        )),
    }
}

fn or_unknown(version: &str) -> &str {
    if version.is_empty() { "an unknown release" } else { version }
}

impl Release {
    /// Of `v1.35.2-gke.1`, `2.1.4` and the like.
    pub fn parse(text: &str) -> Option<Self> {
        let (major, rest) = text.strip_prefix('v').unwrap_or(text).split_once('.')?;
        let digits = rest.find(|c: char| !c.is_ascii_digit()).map_or(rest, |end| &rest[..end]);
        Some(Self { major: major.parse().ok()?, minor: digits.parse().ok()? })
    }

    /// The API server's; `None` where it does not say.
    pub async fn of_server(client: &Client) -> Option<Self> {
        match client.apiserver_version().await {
            Ok(info) => Self::parse(&info.git_version),
            Err(error) => {
                warn!(%error, "the API server does not say its release: images of models are fetched, not mounted");
                None
            }
        }
    }
}

impl fmt::Display for Release {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

impl fmt::Display for Delivery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Mounted(_) => f.write_str("mounted by the node"),
            Self::Fetched(why) => write!(f, "fetched: {why}"),
        }
    }
}
