//! Everything that a replica's pod depends on, from a deployment and the operator's defaults.

use std::collections::BTreeMap;

use k8s_openapi::{
    api::core::v1::{Affinity, Toleration, TopologySpreadConstraint},
    apimachinery::pkg::api::resource::Quantity,
};
use serde::{Deserialize, Serialize};
use stoker_crds::{
    InferenceDeployment,
    contract::{DrainSettings, EngineSettings, ParallelSettings},
    inference_deployment::{DrainSpec, EngineSpec, ResourcesSpec},
    nodes::GPU_RESOURCE,
    pod::{EnvVariable, PodSecurity, PodSpec, PodVolume},
    quantity::Amount,
};

use super::{
    Defaults, Identity, SpecError,
    model::{ModelFetch, model_fetch, model_source},
};

/// What agents, and most programs, read a collector's URL from.
const OTLP_ENDPOINT: &str = "OTEL_EXPORTER_OTLP_ENDPOINT";

/// Everything a replica's pod depends on; hashed into its revision. Absent options are left out of the hash, so that a
/// later operator with more options does not roll pods that use none of them.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct ReplicaInputs {
    /// `builtin://NAME` or a directory inside the container.
    pub model_source: String,
    /// PersistentVolumeClaim mounted at [`MODEL_MOUNT`](super::MODEL_MOUNT).
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
    /// DeviceClass that they are claimed by; `None`: they are among the resources.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_class: Option<String>,
    /// Ranks and stages that share the model.
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

pub(super) fn replica_inputs(
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
        device_class: resources.device_class.clone().filter(|_| gpus > 0),
        parallelism: spec.parallel_settings(),
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

fn is_zero(count: &u32) -> bool {
    *count == 0
}

fn quantities(spec: ResourcesSpec) -> BTreeMap<String, Quantity> {
    let gpu_resource = spec.gpu_resource.unwrap_or_else(|| GPU_RESOURCE.to_owned());
    let is_claimed = spec.device_class.is_some();
    let gpus = spec.gpus.filter(|gpus| *gpus > 0 && !is_claimed).map(|gpus| Amount::Whole(gpus.into()));
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
        let claimed =
            ResourcesSpec { gpus: Some(1), device_class: Some("gpu.nvidia.com".into()), ..Default::default() };
        assert!(quantities(claimed).is_empty(), "a claim is no resource");
    }
}
