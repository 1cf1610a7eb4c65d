//! What should exist for one deployment: a Service, the revision's ConfigMap, the operator's public keys, pods of that
//! revision, a budget for their disruptions and, where they are asked for, a NetworkPolicy and an InferencePool. Pure.

mod additions;
mod budget;
pub(crate) mod claims;
mod config_map;
mod fetch;
pub mod labels;
mod network_policy;
mod pod;
mod pool;
pub(crate) mod preference;
mod prefetch;
mod service;
mod slices;
mod standby;

use k8s_openapi::{
    api::{
        core::v1::{ConfigMap, Pod, Service},
        discovery::v1::EndpointSlice,
        networking::v1::NetworkPolicy,
        policy::v1::PodDisruptionBudget,
        resource::v1::ResourceClaimTemplate,
    },
    apimachinery::pkg::apis::meta::v1::OwnerReference,
};
use kube::Resource;
use stoker_crds::InferenceDeployment;

pub use self::{
    config_map::INPUTS_FILE,
    fetch::FETCH_CONTAINER,
    pod::{AGENT_CONTAINER, grace_period_seconds},
};
use crate::{
    course::Course,
    gateways::Front,
    pools::{FailureMode, InferencePool},
    revision::revision,
    validate::{Identity, ValidatedDeployment},
};

/// Everything that should exist for one deployment.
#[derive(Clone, Debug)]
pub struct Desired {
    /// Revision of the pods.
    pub revision: String,
    /// The one address of all replicas.
    pub service: Service,
    /// What leads it to gateways, if it does not lead to replicas.
    pub slices: Vec<EndpointSlice>,
    /// The agent's configuration, immutable, one per revision.
    pub config_map: ConfigMap,
    /// What its canary is made from, if the deployment is on a course with one: of this only the revision, its ConfigMap, its claim and its pod.
    pub canary: Option<Box<Self>>,
    /// What Kubernetes makes the claims of its pods from, where their GPUs are claimed.
    pub claim: Option<ResourceClaimTemplate>,
    /// The operator's public keys.
    pub keys: ConfigMap,
    /// Evictions take one replica at a time.
    pub budget: PodDisruptionBudget,
    /// Who may reach replicas, where that is limited.
    pub network_policy: Option<NetworkPolicy>,
    /// How Gateways of others find replicas, where that is asked for.
    pub pool: Option<InferencePool>,
    /// A replica's pod, still without name and ordinal.
    template: Pod,
    /// What brings its model onto a node ahead, still without a node; where nodes keep models.
    prefetch: Option<Pod>,
    /// What keeps it in a node's memory, still without a node; where nodes keep models.
    standby: Option<Pod>,
    /// Name of the deployment, the first part of every pod name.
    name: String,
}

/// Renders what `deployment` asks for; its Service leads to its replicas. Its agents take the orders of who has the private halves of `public_keys`.
pub fn desired(deployment: &ValidatedDeployment, public_keys: &str) -> Desired {
    let revision = revision(&deployment.replica);
    Desired {
        service: service::service(&deployment.identity),
        slices: Vec::new(),
        config_map: config_map::config_map(deployment, &revision),
        canary: match &deployment.course {
            Course::Canary(asked) => Some(Box::new(desired(asked, public_keys))),
            Course::AsAsked | Course::Held { .. } | Course::RolledBack(_) => None,
        },
        claim: claims::template(&deployment.identity, &deployment.replica),
        keys: config_map::keys(&deployment.identity, public_keys),
        budget: budget::budget(deployment),
        network_policy: deployment
            .peers
            .as_ref()
            .map(|peers| network_policy::network_policy(&deployment.identity, peers)),
        pool: None,
        template: pod::template(deployment, &revision),
        prefetch: prefetch::template(deployment, &revision),
        standby: standby::template(deployment, &revision),
        name: deployment.identity.name.clone(),
        revision,
    }
}

impl Desired {
    /// The same with a Service that leads to gateways, where there are any.
    pub fn behind(mut self, identity: &Identity, front: Option<&Front>) -> Self {
        let Some(front) = front else { return self };
        self.slices = slices::slices(identity, front);
        if let Some(spec) = &mut self.service.spec {
            spec.selector = Some(labels::selector_of_nobody(&identity.name));
        }
        self
    }

    /// The same with an InferencePool, if pools are kept.
    pub fn pooled(mut self, identity: &Identity, failure_mode: Option<FailureMode>) -> Self {
        self.pool = failure_mode.map(|failure_mode| pool::pool(identity, failure_mode));
        self
    }

    /// Name of the pod with this ordinal.
    pub fn pod_name(&self, ordinal: u32) -> String {
        format!("{}-{}-{ordinal}", self.name, self.revision)
    }

    /// The pod with this ordinal.
    pub fn pod(&self, ordinal: u32) -> Pod {
        let mut pod = self.template.clone();
        pod.metadata.name = Some(self.pod_name(ordinal));
        pod
    }

    /// The pod that fetches the model of `revision`, this or the canary's, onto a node ahead of the replica there.
    pub fn prefetch(&self, revision: &str, node: &str) -> Option<Pod> {
        let all = [Some(self), self.canary.as_deref()];
        let made = all.into_iter().flatten().find(|made| made.revision == revision)?;
        Some(prefetch::on(made.prefetch.as_ref()?, &format!("{}-{revision}-prefetch", made.name), node))
    }

    /// The pod that keeps the model in the memory of a node.
    pub fn standby(&self, node: &str) -> Option<Pod> {
        let prefix = format!("{}-{}-standby", self.name, self.revision);
        Some(prefetch::on(self.standby.as_ref()?, &prefix, node))
    }
}

/// Name of the ConfigMap of a revision.
pub fn config_map_name(deployment: &str, revision: &str) -> String {
    format!("{deployment}-{revision}")
}

/// Name of the ConfigMap with the operator's public keys. No revision is called like that.
pub fn keys_name(deployment: &str) -> String {
    format!("{deployment}-operator-keys")
}

/// Base URL of the deployment's Service for OpenAI clients inside the cluster.
pub fn url(identity: &Identity) -> String {
    format!("http://{}.{}.svc:{}/v1", identity.name, identity.namespace, stoker_crds::contract::AGENT_PORT)
}

/// Makes the deployment the controlling owner, so that its children go when it goes.
fn owner(identity: &Identity) -> OwnerReference {
    OwnerReference {
        api_version: InferenceDeployment::api_version(&()).into_owned(),
        kind: InferenceDeployment::kind(&()).into_owned(),
        name: identity.name.clone(),
        uid: identity.uid.clone(),
        controller: Some(true),
        block_owner_deletion: Some(true),
    }
}
