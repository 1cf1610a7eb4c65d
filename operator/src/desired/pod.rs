//! A replica's pod: one agent container, restricted, with probes on the agent's own answers. Pure.
//!
//! Owns the grace period: long enough for the agent to withdraw and finish its streams on SIGTERM. Pods are created
//! from this and never patched; what changes here for running replicas needs a new `TEMPLATE_EPOCH`.

use k8s_openapi::{
    api::core::v1::{
        Capabilities, ConfigMapVolumeSource, Container, ContainerPort, EnvVar, EnvVarSource, HTTPGetAction,
        ImageVolumeSource, LocalObjectReference, ObjectFieldSelector, PersistentVolumeClaimVolumeSource, Pod,
        PodSecurityContext, PodSpec, Probe, ResourceRequirements, SELinuxOptions, SeccompProfile, SecurityContext,
        Toleration, TopologySpreadConstraint, Volume, VolumeMount,
    },
    apimachinery::pkg::{
        apis::meta::v1::{LabelSelector, ObjectMeta},
        util::intstr::IntOrString,
    },
};
use stoker_crds::{
    contract::{ADMIN_PORT, ADMIN_PORT_NAME, AGENT_PORT, AGENT_PORT_NAME, CONFIG_DIR, CONFIG_FILE, DrainSettings},
    holders::{WEIGHTS_PORT, WEIGHTS_PORT_NAME},
    intent::{KEYS_DIR, KEYS_FILE, POD_UID_VARIABLE},
    pod::SeLinux,
};

use super::{additions, claims, config_map_name, fetch, keys_name, labels, owner, preference};
use crate::{
    image_volumes::MountedImage,
    validate::{MODEL_LINK, MODEL_MOUNT, ModelFetch, ReplicaInputs, ValidatedDeployment},
};

/// Name of the agent's container.
pub const AGENT_CONTAINER: &str = "agent";
/// Volume of a model that is not fetched.
const MODEL_VOLUME: &str = "model";
/// Seconds a pod may take to exit after its streams ended.
const EXIT_SECONDS: i64 = 10;
/// Seconds after which a pod on an unreachable node is given up and replaced.
const NODE_LOSS_SECONDS: i64 = 30;
/// Seconds until the agent has to listen. From then on liveness sees whether loading moves, however long it takes.
const LISTEN_SECONDS: i32 = 120;
/// An unprivileged user that no distribution hands out.
const AGENT_UID: i64 = 65532;

/// Seconds from SIGTERM to SIGKILL: withdraw, finish streams, exit.
pub fn grace_period_seconds(drain: &DrainSettings) -> i64 {
    i64::from(drain.withdraw_seconds) + i64::from(drain.deadline_seconds) + EXIT_SECONDS
}

/// The pod of a replica, still without a name.
pub(super) fn template(deployment: &ValidatedDeployment, revision: &str) -> Pod {
    let (identity, inputs) = (&deployment.identity, &deployment.replica);
    let mut pod_labels = inputs.labels.clone();
    pod_labels.extend(labels::child_of_revision(&identity.name, revision));
    Pod {
        metadata: ObjectMeta {
            namespace: Some(identity.namespace.clone()),
            labels: Some(pod_labels),
            annotations: Some(inputs.annotations.clone()).filter(|annotations| !annotations.is_empty()),
            owner_references: Some(vec![owner(identity)]),
            ..ObjectMeta::default()
        },
        spec: Some(PodSpec {
            topology_spread_constraints: some_unless_empty(
                inputs.topology_spread_constraints.iter().map(|spread| constraint(spread, &identity.name)).collect(),
            ),
            affinity: preference::affinity(deployment),
            resource_claims: claims::of_pod(&identity.name, inputs),
            ..pod_spec(
                inputs,
                &Model::of(deployment),
                [config_map_name(&identity.name, revision), keys_name(&identity.name)],
            )
        }),
        status: None,
    }
}

/// How the model gets into the pod.
enum Model<'a> {
    /// It is in the agent or its image.
    Inside,
    /// On a claim.
    Claimed(&'a str),
    /// It is fetched, of this commit if one is written down.
    Fetched(&'a ModelFetch, Option<&'a str>),
    /// Its image is a volume.
    Mounted(&'a MountedImage),
}

impl<'a> Model<'a> {
    fn of(deployment: &'a ValidatedDeployment) -> Self {
        let inputs = &deployment.replica;
        match (deployment.mounted(), &inputs.fetch, &inputs.model_claim) {
            (Some(image), ..) => Self::Mounted(image),
            (None, Some(fetch), _) => Self::Fetched(fetch, deployment.commit.as_deref()),
            (None, None, Some(claim)) => Self::Claimed(claim),
            (None, None, None) => Self::Inside,
        }
    }

    fn init_containers(&self, inputs: &ReplicaInputs) -> Option<Vec<Container>> {
        match self {
            Self::Fetched(fetch, commit) => Some(vec![fetch::container(inputs, fetch, *commit)]),
            Self::Inside | Self::Claimed(_) | Self::Mounted(_) => None,
        }
    }

    fn volumes(&self) -> Vec<Volume> {
        match self {
            Self::Inside => Vec::new(),
            Self::Claimed(claim) => vec![claimed(claim)],
            Self::Fetched(fetch, _) => fetch::volumes(fetch).into(),
            Self::Mounted(image) => vec![of_image(image)],
        }
    }

    fn mounts(&self) -> Vec<VolumeMount> {
        match self {
            Self::Inside => Vec::new(),
            Self::Claimed(_) => vec![read_only_mount(MODEL_VOLUME, MODEL_MOUNT)],
            Self::Fetched(..) => fetch::mounts().into(),
            Self::Mounted(_) => vec![read_only_mount(MODEL_VOLUME, MODEL_LINK)],
        }
    }

    /// Secrets that kubelets pull with, beside those that the deployment names.
    fn pull_secret(&self) -> Option<&LocalObjectReference> {
        match self {
            Self::Mounted(image) => image.pull_secret.as_ref(),
            Self::Inside | Self::Claimed(_) | Self::Fetched(..) => None,
        }
    }
}

fn claimed(claim: &str) -> Volume {
    let claim = PersistentVolumeClaimVolumeSource { claim_name: claim.to_owned(), read_only: Some(true) };
    Volume { name: MODEL_VOLUME.to_owned(), persistent_volume_claim: Some(claim), ..Volume::default() }
}

/// What a digest names does not change: a node that has it asks nobody.
fn of_image(image: &MountedImage) -> Volume {
    let reference = Some(image.reference.clone());
    let image = ImageVolumeSource { reference, pull_policy: Some("IfNotPresent".to_owned()) };
    Volume { name: MODEL_VOLUME.to_owned(), image: Some(image), ..Volume::default() }
}

fn pod_spec(inputs: &ReplicaInputs, model: &Model<'_>, config_maps: [String; 2]) -> PodSpec {
    let around = surroundings(inputs);
    let mut pull_secrets = around.image_pull_secrets.unwrap_or_default();
    pull_secrets.extend(model.pull_secret().filter(|secret| !pull_secrets.contains(secret)).cloned());
    PodSpec {
        init_containers: model.init_containers(inputs),
        containers: vec![container(inputs, model)],
        volumes: Some(volumes(inputs, model, config_maps)),
        image_pull_secrets: some_unless_empty(pull_secrets),
        node_selector: Some(inputs.node_selector.clone()).filter(|selector| !selector.is_empty()),
        priority_class_name: inputs.priority_class_name.clone(),
        scheduler_name: inputs.scheduler_name.clone(),
        termination_grace_period_seconds: Some(grace_period_seconds(&inputs.drain)),
        ..around
    }
}

/// As whom and among what containers of the deployment run, whatever they do.
pub(super) fn surroundings(inputs: &ReplicaInputs) -> PodSpec {
    PodSpec {
        automount_service_account_token: Some(false),
        enable_service_links: Some(false),
        image_pull_secrets: some_unless_empty(inputs.image_pull_secrets.iter().map(|name| secret_ref(name)).collect()),
        runtime_class_name: inputs.runtime_class_name.clone(),
        security_context: Some(pod_security(inputs)),
        service_account_name: inputs.service_account_name.clone(),
        tolerations: Some(tolerations(inputs)),
        ..PodSpec::default()
    }
}

fn container(inputs: &ReplicaInputs, model: &Model<'_>) -> Container {
    Container {
        name: AGENT_CONTAINER.to_owned(),
        image: Some(inputs.image.clone()),
        image_pull_policy: inputs.image_pull_policy.clone(),
        args: Some(told_by_operator()),
        env: Some(inputs.env.iter().map(additions::env).chain([pod_uid()]).collect()),
        ports: Some(vec![
            port(AGENT_PORT_NAME, AGENT_PORT),
            port(ADMIN_PORT_NAME, ADMIN_PORT),
            port(WEIGHTS_PORT_NAME, WEIGHTS_PORT),
        ]),
        resources: resource_requirements(inputs),
        volume_mounts: Some(volume_mounts(inputs, model)),
        // Where clients cannot come in, no more are to be sent there; that they come in crowds is nothing to be restarted for.
        startup_probe: Some(probe(
            ADMIN_PORT_NAME,
            "/healthz",
            Pace { period: 1, timeout: 2, failures: LISTEN_SECONDS },
        )),
        readiness_probe: Some(probe(AGENT_PORT_NAME, "/readyz", Pace { period: 1, timeout: 2, failures: 2 })),
        liveness_probe: Some(probe(ADMIN_PORT_NAME, "/healthz", Pace { period: 10, timeout: 5, failures: 3 })),
        security_context: Some(container_security()),
        termination_message_policy: Some("FallbackToLogsOnError".to_owned()),
        ..Container::default()
    }
}

/// Where a process of the pod finds what the operator says.
pub(super) fn told_by_operator() -> Vec<String> {
    let config = format!("{CONFIG_DIR}/{CONFIG_FILE}");
    let keys = format!("{KEYS_DIR}/{KEYS_FILE}");
    vec!["--config".to_owned(), config, "--operator-keys".to_owned(), keys]
}

/// An agent refuses orders for another pod.
pub(super) fn pod_uid() -> EnvVar {
    let field = ObjectFieldSelector { api_version: None, field_path: "metadata.uid".to_owned() };
    EnvVar {
        name: POD_UID_VARIABLE.to_owned(),
        value_from: Some(EnvVarSource { field_ref: Some(field), ..EnvVarSource::default() }),
        value: None,
    }
}

pub(super) fn port(name: &str, number: u16) -> ContainerPort {
    ContainerPort { name: Some(name.to_owned()), container_port: number.into(), ..ContainerPort::default() }
}

/// How often a probe asks: seconds between questions, seconds to answer, failures in a row that count.
struct Pace {
    period: i32,
    timeout: i32,
    failures: i32,
}

fn probe(port: &str, path: &str, pace: Pace) -> Probe {
    Probe {
        http_get: Some(HTTPGetAction {
            path: Some(path.to_owned()),
            port: IntOrString::String(port.to_owned()),
            ..HTTPGetAction::default()
        }),
        period_seconds: Some(pace.period),
        timeout_seconds: Some(pace.timeout),
        failure_threshold: Some(pace.failures),
        ..Probe::default()
    }
}

fn resource_requirements(inputs: &ReplicaInputs) -> Option<ResourceRequirements> {
    let quantities = Some(inputs.resources.clone()).filter(|quantities| !quantities.is_empty());
    let claims = claims::of_container(inputs);
    (quantities.is_some() || claims.is_some()).then(|| ResourceRequirements {
        requests: quantities.clone(),
        limits: quantities,
        claims,
    })
}

/// What holds for the replica without its GPUs: a container that uses none, and asks for no less of the rest, so that the
/// pod is in the same class of service.
pub(super) fn resources_without_gpus(inputs: &ReplicaInputs) -> Option<ResourceRequirements> {
    let mut resources = ResourceRequirements { claims: None, ..resource_requirements(inputs)? };
    for quantities in [&mut resources.requests, &mut resources.limits].into_iter().flatten() {
        quantities.retain(|name, _| matches!(name.as_str(), "cpu" | "memory"));
    }
    Some(resources)
}

/// The ranks that share a model are threads of one process that write into each other's GPU memory by its address
/// (`kernels/src/ranks.rs`), and so are those of all stages, so a replica on several GPUs needs no larger `/dev/shm`.
fn volumes(inputs: &ReplicaInputs, model: &Model<'_>, [config, keys]: [String; 2]) -> Vec<Volume> {
    let of_config_map = |volume: &str, name: String| Volume {
        name: volume.to_owned(),
        config_map: Some(ConfigMapVolumeSource { name, ..ConfigMapVolumeSource::default() }),
        ..Volume::default()
    };
    let added = inputs.volumes.iter().enumerate().map(|(place, volume)| additions::volume(place, volume));
    let own = [of_config_map("config", config), of_config_map("keys", keys)];
    own.into_iter().chain(model.volumes()).chain(added).collect()
}

fn volume_mounts(inputs: &ReplicaInputs, model: &Model<'_>) -> Vec<VolumeMount> {
    let added = inputs.volumes.iter().enumerate().map(|(place, volume)| additions::volume_mount(place, volume));
    own_mounts().into_iter().chain(model.mounts()).chain(added).collect()
}

/// The configuration and the operator's keys.
pub(super) fn own_mounts() -> [VolumeMount; 2] {
    [read_only_mount("config", CONFIG_DIR), read_only_mount("keys", KEYS_DIR)]
}

pub(super) fn read_only_mount(volume: &str, path: &str) -> VolumeMount {
    VolumeMount {
        name: volume.to_owned(),
        mount_path: path.to_owned(),
        read_only: Some(true),
        ..VolumeMount::default()
    }
}

/// The user's tolerations, and a short patience with lost nodes: Kubernetes would wait for five minutes.
fn tolerations(inputs: &ReplicaInputs) -> Vec<Toleration> {
    let lost = ["node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"].map(|key| Toleration {
        key: Some(key.to_owned()),
        operator: Some("Exists".to_owned()),
        effect: Some("NoExecute".to_owned()),
        toleration_seconds: Some(NODE_LOSS_SECONDS),
        value: None,
    });
    inputs.tolerations.iter().cloned().chain(lost).collect()
}

/// The same with what clusters add for pods that ask for GPUs, of a pod that asks for none and is to run where they do: nodes often have a taint
/// of the resource's name.
pub(super) fn tolerations_beside_gpus(inputs: &ReplicaInputs) -> Vec<Toleration> {
    let devices = inputs.resources.keys().filter(|name| !matches!(name.as_str(), "cpu" | "memory"));
    let of_device = |name: &String| Toleration {
        key: Some(name.clone()),
        operator: Some("Exists".to_owned()),
        ..Toleration::default()
    };
    tolerations(inputs).into_iter().chain(devices.map(of_device)).collect()
}

/// A constraint that selects nobody counts nobody: without a selector it is about the replicas of the deployment. Those of
/// each revision by themselves, so that they stand evenly when the older ones are gone.
fn constraint(spread: &TopologySpreadConstraint, deployment: &str) -> TopologySpreadConstraint {
    if spread.label_selector.is_some() {
        return spread.clone();
    }
    TopologySpreadConstraint {
        label_selector: Some(LabelSelector {
            match_labels: Some(labels::selector(deployment)),
            ..LabelSelector::default()
        }),
        match_label_keys: Some(vec![labels::REVISION.to_owned()]),
        ..spread.clone()
    }
}

fn pod_security(inputs: &ReplicaInputs) -> PodSecurityContext {
    let asked = inputs.security.clone().unwrap_or_default();
    let own = (!asked.platform_ids.unwrap_or_default()).then_some(AGENT_UID);
    PodSecurityContext {
        run_as_non_root: Some(true),
        run_as_user: asked.run_as_user.or(own),
        run_as_group: asked.run_as_group.or(own),
        fs_group: asked.fs_group,
        se_linux_options: asked.se_linux_options.map(se_linux),
        seccomp_profile: Some(SeccompProfile { type_: "RuntimeDefault".to_owned(), localhost_profile: None }),
        ..PodSecurityContext::default()
    }
}

fn se_linux(label: SeLinux) -> SELinuxOptions {
    let type_ = label.type_.map(|type_| type_.as_str().to_owned());
    SELinuxOptions { level: label.level, type_, ..SELinuxOptions::default() }
}

pub(super) fn container_security() -> SecurityContext {
    SecurityContext {
        allow_privilege_escalation: Some(false),
        capabilities: Some(Capabilities { drop: Some(vec!["ALL".to_owned()]), add: None }),
        read_only_root_filesystem: Some(true),
        ..SecurityContext::default()
    }
}

fn secret_ref(name: &str) -> LocalObjectReference {
    LocalObjectReference { name: name.to_owned() }
}

fn some_unless_empty<T>(items: Vec<T>) -> Option<Vec<T>> {
    if items.is_empty() { None } else { Some(items) }
}
