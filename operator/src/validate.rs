//! From the object as stored to one that can be deployed: defaults filled in, references resolved.
//!
//! The API server has checked ranges and combinations already (CEL beside the types). What is left is what a schema
//! cannot say, and objects stored under an older schema. Pure: no client, no clock.

mod model;
mod replica;

use jiff::SignedDuration;
use kube::ResourceExt;
use serde::{Deserialize, Serialize};
use stoker_crds::{
    InferenceDeployment, InferenceDeploymentSpec,
    contract::is_commit,
    inference_deployment::{DrainSpec, EngineSpec, ModelSpec, ResourcesSpec, RolloutSpec},
    parallelism::ParallelismSpec,
    pod::PodSpec,
    quantity::Amount,
    scaling::{self, ScalingMode, ScalingSpec},
    status::ModelStatus,
};
use thiserror::Error;

pub use self::{
    model::{CacheVolume, FetchSecret, LINK_DIR, MODEL_LINK, MODEL_MOUNT, ModelDefaults, ModelFetch},
    replica::ReplicaInputs,
};
pub(crate) use self::{
    model::{IMAGE_FOLDER, LOGIN_KEY},
    replica::as_quantity,
};
use crate::{
    allow::Allowed,
    canary::Canary,
    course::Course,
    image_volumes::Delivery,
    peers::Peers,
    rollout::{Missing, ReplacingRule, Share},
};

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
    let replica = replica::replica_inputs(deployment, &identity, defaults)?;
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
