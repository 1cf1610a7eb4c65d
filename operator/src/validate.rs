//! From the object as stored to one that can be deployed: defaults filled in, references resolved.
//!
//! The API server has checked ranges and combinations already (CEL beside the types). What is left is what a schema
//! cannot say, and objects stored under an older schema. Pure: no client, no clock.

use std::collections::BTreeMap;

use jiff::SignedDuration;
use k8s_openapi::{
    api::core::v1::{Affinity, Toleration, TopologySpreadConstraint},
    apimachinery::pkg::api::resource::Quantity,
};
use kube::ResourceExt;
use serde::{Deserialize, Serialize};
use stoker_crds::{
    InferenceDeployment, InferenceDeploymentSpec,
    contract::{DrainSettings, EngineSettings, ParallelSettings, is_commit},
    inference_deployment::{DrainSpec, EngineSpec, ModelSpec, ResourcesSpec, RolloutSpec},
    parallelism::ParallelismSpec,
    pod::{EnvVariable, PodSecurity, PodSpec, PodVolume},
    quantity::{Amount, amount},
    scaling::{self, ScalingMode, ScalingSpec},
    status::ModelStatus,
};
use thiserror::Error;

use crate::{
    allow::Allowed,
    canary::Canary,
    course::Course,
    image_volumes::{Delivery, ImageVolumes},
    peers::Peers,
    rollout::{Missing, ReplacingRule, Share},
};

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
/// What NVIDIA's device plugin calls a GPU.
pub(crate) const GPU_RESOURCE: &str = "nvidia.com/gpu";

/// What agents, and most programs, read a collector's URL from.
const OTLP_ENDPOINT: &str = "OTEL_EXPORTER_OTLP_ENDPOINT";

/// How long waiting is no fault, where the deployment does not say.
pub const PROGRESS_DEADLINE: SignedDuration = SignedDuration::from_mins(10);

/// Older revisions whose configuration is kept, where the deployment does not say.
const KEEP_REVISIONS: u32 = 3;

/// What the operator was started with and every deployment falls back to.
#[derive(Clone, Debug, Default)]
pub struct Defaults {
    /// Agent image of deployments that name none.
    pub agent_image: String,
    /// Whether the platform gives user and group ids to pods whose deployment names none.
    pub platform_ids: bool,
    /// What deployments may name.
    pub allowed: Allowed,
    /// Who may reach replicas; `None`: everybody, as far as this operator says.
    pub peers: Option<Peers>,
    /// How models are fetched.
    pub models: ModelDefaults,
    /// Where agents send spans of requests whose deployment does not say; `None`: nowhere.
    pub otlp_endpoint: Option<String>,
}

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

/// A deployment that can be deployed: the only thing `desired` reads. Made by [`validate`] alone.
#[derive(Clone, Debug, PartialEq)]
pub struct ValidatedDeployment {
    /// Who it is.
    pub identity: Identity,
    /// Replicas to work towards.
    pub replicas: u32,
    /// How an older revision is replaced. No part of the revision: changing it rolls nothing.
    pub replacing: ReplacingRule,
    /// How long waiting is no fault.
    pub progress_deadline: SignedDuration,
    /// Changes are held.
    pub paused: bool,
    /// Older revisions whose configuration is kept.
    pub keep_revisions: u32,
    /// A revision that never serves is given up, and one that does not pass its canary's gate.
    pub auto_rollback: bool,
    /// How a change is tried on one replica first.
    pub canary: Option<Canary>,
    /// How the revision that is worked towards was chosen: [`course::settle`](crate::course::settle) says.
    pub course: Course,
    /// What of the spec replicas are made from, as it was written: what undoing a change puts back.
    pub asked: AskedSpec,
    /// How the number follows the load.
    pub scaling: Option<ScalingSpec>,
    /// Everything a replica's pod depends on.
    pub replica: ReplicaInputs,
    /// The commit of a model that is fetched, once it is written down. No part of the revision: it is what the revision's first
    /// replica found.
    pub commit: Option<String>,
    /// What the status says of a model that was fetched.
    pub fetched: Option<ModelStatus>,
    /// How the model comes, where the cluster could mount it. No part of the revision: a cluster that learns to mount images rolls nothing.
    pub delivery: Option<Delivery>,
    /// Nodes whose own cache had it when another deployment's replica served there.
    pub nodes_of_others: Vec<String>,
    /// Nodes that have its model in memory for replicas to come.
    pub warm_nodes: Vec<String>,
    /// Who may reach replicas, where that is limited.
    pub peers: Option<Peers>,
    /// Keeps every other module from building one.
    _checked: Checked,
}

/// What of a spec replicas are made from.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct AskedSpec {
    /// Which weights.
    pub model: ModelSpec,
    /// What of a node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resources: Option<ResourcesSpec>,
    /// How many share a model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parallelism: Option<ParallelismSpec>,
    /// Sizes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engine: Option<EngineSpec>,
    /// How replicas leave.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drain: Option<DrainSpec>,
    /// Where and as what pods run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<PodSpec>,
}

impl AskedSpec {
    fn of(spec: &InferenceDeploymentSpec) -> Self {
        // All fields by name: whoever adds one decides here whether undoing a change puts it back.
        let InferenceDeploymentSpec {
            model,
            resources,
            parallelism,
            engine,
            drain,
            pod,
            replicas: _,
            scaling: _,
            rollout: _,
        } = spec.clone();
        Self { model, resources, parallelism, engine, drain, pod }
    }
}

/// Only [`validate`] has one to give.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Checked;

/// Name and ownership of a deployment.
#[derive(Clone, Debug, PartialEq)]
pub struct Identity {
    /// Its name, also that of its Service.
    pub name: String,
    /// Its namespace.
    pub namespace: String,
    /// Its UID: a namesake created later is another owner.
    pub uid: String,
    /// Generation of its spec.
    pub generation: i64,
}

/// Everything a replica's pod depends on; hashed into its revision. Absent options are left out of the hash, so that a
/// later operator with more options does not roll pods that use none of them.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct ReplicaInputs {
    /// `builtin://NAME` or a directory inside the container.
    pub model_source: String,
    /// PersistentVolumeClaim mounted at [`MODEL_MOUNT`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model_claim: Option<String>,
    /// How the model comes, if it is fetched.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fetch: Option<ModelFetch>,
    /// Names accepted in requests; never empty.
    pub served_names: Vec<String>,
    /// GPUs it computes on.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub gpus: u32,
    /// Ranks that share the model.
    #[serde(default, skip_serializing_if = "ParallelSettings::is_one")]
    pub parallelism: ParallelSettings,
    /// Sizes of the engine.
    pub engine: EngineSettings,
    /// How the replica leaves.
    pub drain: DrainSettings,
    /// Quantities asked for and limited to, by resource name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub resources: BTreeMap<String, Quantity>,
    /// Image of the agent.
    pub image: String,
    /// When the node pulls it; `None`: by its tag.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_pull_policy: Option<String>,
    /// Names of Secrets with registry credentials.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub image_pull_secrets: Vec<String>,
    /// Labels a node must have.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub node_selector: BTreeMap<String, String>,
    /// Taints the pods tolerate.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tolerations: Vec<Toleration>,
    /// More labels of the pods.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// More annotations of the pods.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
    /// ServiceAccount of the pods.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub service_account_name: Option<String>,
    /// PriorityClass of the pods.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub priority_class_name: Option<String>,
    /// Where they may, should and should not run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub affinity: Option<Affinity>,
    /// How they are spread.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub topology_spread_constraints: Vec<TopologySpreadConstraint>,
    /// RuntimeClass of the pods.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub runtime_class_name: Option<String>,
    /// Who places them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scheduler_name: Option<String>,
    /// More variables of the agent.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<EnvVariable>,
    /// More volumes of the agent.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub volumes: Vec<PodVolume>,
    /// As whom the agent runs; `None`: as its own user.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub security: Option<PodSecurity>,
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

/// Why an object cannot be deployed, and what to change.
#[derive(Clone, Debug, Error, PartialEq)]
pub enum SpecError {
    /// The source has none of the known forms.
    #[error(
        "spec.model.source: \"{found}\" is not builtin://NAME, hf://ORG/MODEL, s3://BUCKET/PREFIX, oci://REGISTRY/REPOSITORY, https://HOST/PATH, pvc://CLAIM/PATH or file:///PATH"
    )]
    ModelSource {
        /// What the object says.
        found: String,
    },
    /// A limit that is no number of bytes.
    #[error("spec.model.cache.sizeLimit: \"{found}\" is no quantity of bytes, for example \"200Gi\"")]
    CacheLimit {
        /// What the object says.
        found: String,
    },
    /// Scaling that cannot be followed.
    #[error("spec.{0}")]
    Scaling(scaling::SpecError),
    /// Nodes are to have a model in memory that they do not keep.
    #[error("spec.scaling.standby is {nodes}, for a model that nodes keep: {fix}, or remove standby")]
    Standby {
        /// What was asked.
        nodes: u32,
        /// What makes nodes keep it.
        fix: &'static str,
    },
    /// A deployment without an image cannot run.
    #[error("spec.pod.image: not set, and the operator was started without --agent-image; set one of them")]
    NoImage,
    /// Whoever runs the operator allows other images only.
    #[error(
        "spec.pod.image: \"{image}\" is not allowed here; use an image of {allowed}, or remove the field for the operator's \
         own (whoever runs the operator sets the list: allow.images of its chart)"
    )]
    ImageNotAllowed {
        /// What the object says.
        image: String,
        /// What is allowed.
        allowed: String,
    },
    /// Whoever runs the operator allows other ServiceAccounts only.
    #[error(
        "spec.pod.serviceAccountName: \"{account}\" is not allowed here; use one of {allowed}, or remove the field for the \
         namespace's default account (whoever runs the operator sets the list: allow.serviceAccounts of its chart)"
    )]
    ServiceAccountNotAllowed {
        /// What the object says.
        account: String,
        /// What is allowed.
        allowed: String,
    },
    /// Stored under another version of the schema.
    #[error("the operator cannot read this object, its version and the CustomResourceDefinition's differ: {error}")]
    Unreadable {
        /// What reading it stumbled over.
        error: String,
    },
    /// The API server always sets these.
    #[error("metadata.{field}: missing; the object does not come from an API server")]
    Metadata {
        /// The missing field.
        field: &'static str,
    },
}

/// Checks `deployment` and fills in its defaults.
pub fn validate(deployment: &InferenceDeployment, defaults: &Defaults) -> Result<ValidatedDeployment, SpecError> {
    let identity = identity(deployment)?;
    let replica = replica_inputs(deployment, &identity, defaults)?;
    let scaling = scaling(deployment)?;
    standby(scaling.as_ref(), &replica)?;
    let rollout = deployment.spec.rollout.as_ref();
    let (replicas, replacing) = (replicas_wanted(deployment), replacing(rollout));
    let progress_deadline = progress_deadline(rollout);
    let peers = defaults.peers.clone();
    Ok(ValidatedDeployment {
        identity,
        replicas,
        replacing,
        progress_deadline,
        paused: rollout.and_then(|rollout| rollout.paused).unwrap_or(false),
        keep_revisions: rollout.and_then(|rollout| rollout.keep_revisions).unwrap_or(KEEP_REVISIONS),
        auto_rollback: rollout.and_then(|rollout| rollout.auto_rollback).unwrap_or(true),
        canary: rollout.and_then(|rollout| rollout.canary.as_ref()).map(Canary::of),
        course: Course::AsAsked,
        asked: AskedSpec::of(&deployment.spec),
        scaling,
        replica,
        commit: commit(deployment),
        fetched: deployment.status.as_ref().and_then(|status| status.model.clone()),
        delivery: None,
        nodes_of_others: Vec::new(),
        warm_nodes: Vec::new(),
        peers,
        _checked: Checked,
    })
}

/// The commit that the status says of this very source.
fn commit(deployment: &InferenceDeployment) -> Option<String> {
    let written = deployment.status.as_ref()?.model.as_ref()?;
    let stands = written.source == deployment.spec.model.source && is_commit(&written.commit);
    stands.then(|| written.commit.clone())
}

impl ValidatedDeployment {
    /// The same on another revision, which was checked when its configuration was written.
    pub(crate) fn working_on(self, replica: ReplicaInputs, commit: Option<String>, course: Course) -> Self {
        Self { replica, commit, course, ..self }
    }

    /// The same with no more replicas than are granted.
    pub(crate) fn limited_to(self, replicas: Option<u32>) -> Self {
        Self { replicas: replicas.map_or(self.replicas, |granted| granted.min(self.replicas)), ..self }
    }

    /// Nodes that are to have its model in memory for replicas to come; none where nodes keep no model of the revision that is worked on.
    pub fn nodes_on_standby(&self) -> usize {
        let wanted = self.scaling.as_ref().map_or(0, |scaling| scaling.standby as usize);
        if self.kept_by_nodes().is_some() { wanted } else { 0 }
    }

    /// Whether replicas that ask at different times could get different models.
    pub fn awaits_commit(&self) -> bool {
        let commit = |revision: &str| is_commit(revision.strip_prefix("sha256:").unwrap_or(revision));
        let names_one = |source: &str| match source.split_once("://").unwrap_or_default().0 {
            // A bucket's names may have any sign, and never mean a commit.
            "s3" => false,
            "oci" => {
                let image = source.split_once(IMAGE_FOLDER).map_or(source, |(image, _)| image);
                image.rsplit_once('@').is_some_and(|(_, digest)| commit(digest))
            }
            "https" => source.rsplit_once("#sha256=").is_some_and(|(_, hash)| is_commit(hash)),
            _ => source.rsplit_once('@').is_some_and(|(_, revision)| commit(revision)),
        };
        self.commit.is_none() && self.replica.fetch.as_ref().is_some_and(|fetch| !names_one(&fetch.source))
    }
}

/// Replicas to work towards. With native scaling that is the decision in the status: it was written down before anything
/// acts on it. Handing the number over, to the operator or back, changes nothing by itself.
pub fn replicas_wanted(deployment: &InferenceDeployment) -> u32 {
    let status = deployment.status.as_ref();
    let decided = status.and_then(|status| status.scaling.as_ref()).map(|scaling| scaling.desired);
    let said = deployment.spec.replicas;
    let count = |number: i32| number.max(0).unsigned_abs();
    match &deployment.spec.scaling {
        None => count(said.unwrap_or(1)),
        Some(scaling) if scaling.mode == ScalingMode::Native => {
            let present = decided.or(status.map(|status| status.replicas)).unwrap_or_default();
            let sleeps = scaling.to_zero.is_some() && decided == Some(0);
            if sleeps { 0 } else { count(present).max(scaling.min).min(scaling.max) }
        }
        Some(scaling) => said.or(decided).map_or(scaling.min, count),
    }
}

fn scaling(deployment: &InferenceDeployment) -> Result<Option<ScalingSpec>, SpecError> {
    let Some(scaling) = &deployment.spec.scaling else { return Ok(None) };
    match scaling.errors().into_iter().next() {
        Some(error) => Err(SpecError::Scaling(error)),
        None => Ok(Some(scaling.clone())),
    }
}

fn standby(scaling: Option<&ScalingSpec>, replica: &ReplicaInputs) -> Result<(), SpecError> {
    let Some(nodes) = scaling.map(|scaling| scaling.standby).filter(|nodes| *nodes > 0) else { return Ok(()) };
    let fix = match replica.fetch.as_ref().map(|fetch| &fetch.cache) {
        Some(CacheVolume::Node(_)) => return Ok(()),
        None => "use a spec.model.source that is fetched (hf://, s3://, oci:// or https://)",
        Some(CacheVolume::Claim(_)) => "remove spec.model.cache.claimName",
        Some(CacheVolume::Pod) => "give nodes a directory for models (models.cache.hostPath of the operator's chart)",
    };
    Err(SpecError::Standby { nodes, fix })
}

fn identity(deployment: &InferenceDeployment) -> Result<Identity, SpecError> {
    Ok(Identity {
        name: deployment.name_any(),
        namespace: deployment.namespace().ok_or(SpecError::Metadata { field: "namespace" })?,
        uid: deployment.uid().ok_or(SpecError::Metadata { field: "uid" })?,
        generation: deployment.metadata.generation.ok_or(SpecError::Metadata { field: "generation" })?,
    })
}

fn replica_inputs(
    deployment: &InferenceDeployment,
    identity: &Identity,
    defaults: &Defaults,
) -> Result<ReplicaInputs, SpecError> {
    let spec = &deployment.spec;
    let source = model_source(&spec.model.source)?;
    let fetch = if source.is_fetched { Some(model_fetch(&spec.model, &defaults.models)?) } else { None };
    let pod = spec.pod.clone().unwrap_or_default();
    let gpus = spec.gpus();
    let resources = ResourcesSpec { gpus: Some(gpus), ..spec.resources.clone().unwrap_or_default() };
    Ok(ReplicaInputs {
        model_source: source.path,
        model_claim: source.claim,
        fetch,
        served_names: spec.model.served_names.clone().unwrap_or_else(|| vec![identity.name.clone()]),
        gpus,
        parallelism: ParallelSettings { tensor: spec.tensor() },
        engine: engine_settings(spec.engine.as_ref()),
        drain: drain_settings(spec.drain.as_ref()),
        resources: quantities(resources),
        image: image(&pod, defaults)?,
        service_account_name: service_account(&pod, defaults)?,
        security: security(&pod, defaults),
        image_pull_policy: pod.image_pull_policy.map(|policy| policy.as_str().to_owned()),
        image_pull_secrets: pod.image_pull_secrets.into_iter().map(|secret| secret.name).collect(),
        node_selector: pod.node_selector,
        tolerations: pod.tolerations,
        labels: pod.labels,
        annotations: pod.annotations,
        priority_class_name: pod.priority_class_name,
        affinity: pod.affinity,
        topology_spread_constraints: pod.topology_spread_constraints,
        runtime_class_name: pod.runtime_class_name,
        scheduler_name: pod.scheduler_name,
        env: env(pod.env, defaults),
        volumes: pod.volumes,
    })
}

/// What a deployment says of a collector itself counts, nothing included.
fn env(mut asked: Vec<EnvVariable>, defaults: &Defaults) -> Vec<EnvVariable> {
    let is_said = asked.iter().any(|variable| variable.name == OTLP_ENDPOINT);
    let collector = defaults.otlp_endpoint.clone().filter(|_| !is_said);
    asked.extend(collector.map(|url| EnvVariable {
        name: OTLP_ENDPOINT.to_owned(),
        value: Some(url),
        value_from: None,
    }));
    asked
}

/// A model source as the container sees it.
#[derive(Debug, PartialEq)]
struct ResolvedSource {
    path: String,
    claim: Option<String>,
    is_fetched: bool,
}

impl ResolvedSource {
    fn at(path: &str) -> Self {
        Self { path: path.to_owned(), claim: None, is_fetched: false }
    }
}

fn model_source(source: &str) -> Result<ResolvedSource, SpecError> {
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
fn model_fetch(model: &ModelSpec, defaults: &ModelDefaults) -> Result<ModelFetch, SpecError> {
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

fn image(pod: &PodSpec, defaults: &Defaults) -> Result<String, SpecError> {
    let (own, allowed) = (&defaults.agent_image, &defaults.allowed.images);
    match &pod.image {
        Some(image) if image != own && !allowed.permits(image) => {
            Err(SpecError::ImageNotAllowed { image: image.clone(), allowed: allowed.text() })
        }
        Some(image) => Ok(image.clone()),
        None if own.is_empty() => Err(SpecError::NoImage),
        None => Ok(own.clone()),
    }
}

fn service_account(pod: &PodSpec, defaults: &Defaults) -> Result<Option<String>, SpecError> {
    let allowed = &defaults.allowed.service_accounts;
    match &pod.service_account_name {
        Some(account) if !allowed.permits(account) => {
            Err(SpecError::ServiceAccountNotAllowed { account: account.clone(), allowed: allowed.text() })
        }
        named => Ok(named.clone()),
    }
}

/// Ids that the deployment names stand; those that nobody names are the platform's or the agent's own.
fn security(pod: &PodSpec, defaults: &Defaults) -> Option<PodSecurity> {
    let asked = pod.security_context.clone().unwrap_or_default();
    let names_ids = asked.run_as_user.is_some() || asked.run_as_group.is_some() || asked.fs_group.is_some();
    let of_platform = asked.platform_ids.unwrap_or(defaults.platform_ids && !names_ids);
    let security = PodSecurity { platform_ids: of_platform.then_some(true), ..asked };
    (security != PodSecurity::default()).then_some(security)
}

fn engine_settings(spec: Option<&EngineSpec>) -> EngineSettings {
    let spec = spec.cloned().unwrap_or_default();
    EngineSettings {
        max_model_len: spec.max_model_len,
        max_num_seqs: spec.max_num_seqs,
        max_batched_tokens: spec.max_batched_tokens,
        max_waiting: spec.max_waiting,
        kv_cache_tokens: spec.kv_cache_tokens,
        threads: spec.threads,
        memory_fraction: spec.memory_fraction,
        prefix_caching: spec.prefix_caching,
        batch_invariant: spec.batch_invariant,
        itl_target_ms: spec.itl_target_ms,
        quantization: spec.quantization,
        kv_cache_dtype: spec.kv_cache_dtype,
        trust_request_chat_template: spec.trust_request_chat_template,
    }
}

fn drain_settings(spec: Option<&DrainSpec>) -> DrainSettings {
    let default = DrainSettings::default();
    let spec = spec.cloned().unwrap_or_default();
    DrainSettings {
        deadline_seconds: spec.deadline_seconds.unwrap_or(default.deadline_seconds),
        withdraw_seconds: spec.withdraw_seconds.unwrap_or(default.withdraw_seconds),
    }
}

fn replacing(spec: Option<&RolloutSpec>) -> ReplacingRule {
    let (spec, default) = (spec.cloned().unwrap_or_default(), ReplacingRule::default());
    let patience = |seconds: u32| SignedDuration::from_secs(seconds.into());
    let available = spec.min_available.as_ref().and_then(share).map(Missing::AllBut);
    let missing = spec.max_unavailable.map(|count| Missing::AtMost(count as usize));
    ReplacingRule {
        missing: available.or(missing).unwrap_or(default.missing),
        surge: spec.max_surge.as_ref().and_then(share).unwrap_or(default.surge),
        surge_patience: spec.surge_seconds.map_or(default.surge_patience, patience),
    }
}

/// A number of replicas or a percentage of them; the schema takes nothing else.
fn share(amount: &Amount) -> Option<Share> {
    match amount {
        Amount::Whole(count) => usize::try_from(*count).ok().map(Share::Count),
        Amount::Text(text) => match text.strip_suffix('%') {
            Some(percent) => percent.parse().ok().map(Share::Percent),
            None => text.parse().ok().map(Share::Count),
        },
    }
}

/// How long waiting is no fault.
pub(crate) fn progress_deadline(spec: Option<&RolloutSpec>) -> SignedDuration {
    let seconds = spec.and_then(|spec| spec.progress_deadline_seconds);
    seconds.map_or(PROGRESS_DEADLINE, |seconds| SignedDuration::from_secs(seconds.into()))
}

fn is_zero(count: &u32) -> bool {
    *count == 0
}

fn quantities(spec: ResourcesSpec) -> BTreeMap<String, Quantity> {
    let gpu_resource = spec.gpu_resource.unwrap_or_else(|| GPU_RESOURCE.to_owned());
    let gpus = spec.gpus.filter(|gpus| *gpus > 0).map(|gpus| Amount::Whole(gpus.into()));
    [("cpu".to_owned(), spec.cpu), ("memory".to_owned(), spec.memory), (gpu_resource, gpus)]
        .into_iter()
        .filter_map(|(name, amount)| Some((name, as_quantity(amount?))))
        .collect()
}

/// The amount as Kubernetes writes it.
pub(crate) fn as_quantity(amount: Amount) -> Quantity {
    match amount {
        Amount::Whole(number) => Quantity(number.to_string()),
        Amount::Text(text) => Quantity(text),
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
    fn gpus_are_asked_for_by_the_clusters_name_and_none_is_no_line() {
        let asked = |gpus, gpu_resource: Option<&str>| {
            let spec = ResourcesSpec { gpus, gpu_resource: gpu_resource.map(str::to_owned), ..Default::default() };
            quantities(spec).into_iter().map(|(name, Quantity(amount))| format!("{name}={amount}")).collect::<Vec<_>>()
        };
        assert_eq!(asked(Some(1), None), ["nvidia.com/gpu=1"]);
        assert_eq!(asked(Some(1), Some("nvidia.com/mig-3g.71gb")), ["nvidia.com/mig-3g.71gb=1"]);
        assert_eq!(asked(Some(0), Some("nvidia.com/gpu")), Vec::<String>::new());
        assert_eq!(asked(None, None), Vec::<String>::new());
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
