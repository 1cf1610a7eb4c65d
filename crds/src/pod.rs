//! `spec.pod`: where and as what the replicas' pods run, and what is added to them.
//!
//! What may be written here is what the restricted Pod Security Standard admits and what leaves the agent the agent: no
//! volume over its program, no variable that loads another one or takes a GPU that was not asked for.

#![expect(unreachable_pub, reason = "the schema derive repeats each struct, `pub` included, inside a private scope")]

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Affinity, Toleration, TopologySpreadConstraint};
use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::quantity::{Amount, quantity_schema};

/// Where and as what the pods run.
#[derive(Clone, Debug, Default, Deserialize, KubeSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PodSpec {
    /// Image of the agent. Default: the image the operator was installed with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 1024))]
    pub image: Option<String>,
    /// When the node pulls the image. Default: Always for the tag `latest` or no tag, otherwise IfNotPresent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_pull_policy: Option<ImagePullPolicy>,
    /// Secrets of this namespace with registry credentials, at most 16. Default: none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    pub image_pull_secrets: Vec<SecretRef>,
    /// Labels that a node must have to run a replica. Default: none.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 64))]
    pub node_selector: BTreeMap<String, String>,
    /// Node taints that replicas tolerate, at most 64. Default: none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    pub tolerations: Vec<Toleration>,
    /// More labels for the pods, at most 64. Keys of the operator (app.kubernetes.io/, stoker.dev/) are refused. Default:
    /// none.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 64))]
    #[x_kube(validation = Rule::new("self.all(k, !k.startsWith('app.kubernetes.io/') && !k.startsWith('stoker.dev/'))").message(
        "pod.labels: keys under app.kubernetes.io/ and stoker.dev/ belong to the operator; choose another prefix"
    ))]
    pub labels: BTreeMap<String, String>,
    /// More annotations for the pods, at most 64. Keys under stoker.dev/ are refused: behaviour is set by fields. Default:
    /// none.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 64))]
    #[x_kube(validation = Rule::new("self.all(k, !k.startsWith('stoker.dev/'))").message(
        "pod.annotations: keys under stoker.dev/ belong to the operator; choose another prefix"
    ))]
    pub annotations: BTreeMap<String, String>,
    /// ServiceAccount of the pods; no token of it is mounted. Default: the namespace's default account.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub service_account_name: Option<String>,
    /// PriorityClass of the pods. Default: the cluster's default priority.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub priority_class_name: Option<String>,
    /// Where replicas may, should and should not run: node affinity, pod affinity and pod anti-affinity as in any pod. The
    /// replicas of this deployment carry the label app.kubernetes.io/instance with its name. Default: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub affinity: Option<Affinity>,
    /// How replicas are spread over zones, nodes or other domains, at most 16. A constraint without `labelSelector` counts
    /// the replicas of this deployment, those of each revision by themselves. Default: none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    #[x_kube(
        validation = Rule::new("self.all(c, c.maxSkew >= 1)").message(
            "pod.topologySpreadConstraints: maxSkew is by how many replicas domains may differ; use 1 or more"
        ),
        validation = Rule::new("self.all(c, c.topologyKey.size() > 0)").message(
            "pod.topologySpreadConstraints: topologyKey names the node label to spread over, for example topology.kubernetes.io/zone"
        ),
        validation = Rule::new("self.all(c, c.whenUnsatisfiable in ['DoNotSchedule', 'ScheduleAnyway'])").message(
            "pod.topologySpreadConstraints: whenUnsatisfiable is DoNotSchedule or ScheduleAnyway"
        ),
        validation = Rule::new("self.all(c, has(c.labelSelector) || !has(c.matchLabelKeys))").message(
            "pod.topologySpreadConstraints: matchLabelKeys needs labelSelector; add it or remove matchLabelKeys"
        )
    )]
    pub topology_spread_constraints: Vec<TopologySpreadConstraint>,
    /// RuntimeClass of the pods, for example one for sandboxes or for NVIDIA's runtime. Default: the node's own runtime.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    #[x_kube(validation = Rule::new("self.matches('^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$')").message(
        "pod.runtimeClassName: use the name of a RuntimeClass: lower-case letters, digits, '-' and '.'"
    ))]
    pub runtime_class_name: Option<String>,
    /// Scheduler that places the pods. Default: the cluster's default scheduler.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    #[x_kube(validation = Rule::new("self.matches('^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$')").message(
        "pod.schedulerName: use the name that a scheduler of the cluster answers to: lower-case letters, digits, '-' and '.'"
    ))]
    pub scheduler_name: Option<String>,
    /// More environment variables for the agent, at most 64. Default: none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
    pub env: Vec<EnvVariable>,
    /// More volumes for the agent, at most 16, by the path where they are mounted. Default: none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["mountPath"]))]
    pub volumes: Vec<PodVolume>,
    /// As whom the agent runs, within the restricted Pod Security Standard. What is not here is fixed: no root, no added
    /// rights, a read-only root file system, the runtime's seccomp profile. Default: user and group 65532.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub security_context: Option<PodSecurity>,
}

/// When a node pulls the image. Default: Always for the tag `latest` or no tag, otherwise IfNotPresent.
#[derive(Clone, Copy, Debug, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub enum ImagePullPolicy {
    /// At every start.
    Always,
    /// When the node does not have it.
    IfNotPresent,
    /// Never: the node must have it.
    Never,
}

impl ImagePullPolicy {
    /// The word that a pod's container carries.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Always => "Always",
            Self::IfNotPresent => "IfNotPresent",
            Self::Never => "Never",
        }
    }
}

/// A Secret of the same namespace.
#[derive(Clone, Debug, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SecretRef {
    /// Name of the Secret.
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
}

/// An environment variable of the agent: a value, or where the value is.
#[derive(Clone, Debug, Deserialize, KubeSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("has(self.value) != has(self.valueFrom)").message(
    "pod.env: a variable has either value or valueFrom; keep one of them"
))]
pub struct EnvVariable {
    /// Its name. Refused are those that load other programs into the agent (LD_…, GLIBC_TUNABLES), take GPUs that were not
    /// asked for (NVIDIA_…), or belong to the operator (STOKER_HOST, STOKER_POD_UID).
    #[schemars(length(min = 1, max = 256))]
    #[x_kube(
        validation = Rule::new("self.matches('^[A-Za-z_][A-Za-z0-9_]*$')").message(
            "pod.env: a name has letters, digits and '_' and begins with no digit"
        ),
        validation = Rule::new("!self.startsWith('LD_') && self != 'GLIBC_TUNABLES'").message(
            "pod.env: LD_… and GLIBC_TUNABLES change which program runs; remove them, or build an image of your own (pod.image)"
        ),
        validation = Rule::new("!self.startsWith('NVIDIA_')").message(
            "pod.env: NVIDIA_… would give GPUs that nobody counts; ask for GPUs with resources.gpus"
        ),
        validation = Rule::new("!(self in ['STOKER_HOST', 'STOKER_POD_UID'])").message(
            "pod.env: STOKER_HOST and STOKER_POD_UID belong to the operator; remove them"
        )
    )]
    pub name: String,
    /// Its value. Default: what `valueFrom` names.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 4096))]
    pub value: Option<String>,
    /// Where its value is, read when a pod starts. Default: `value` is it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value_from: Option<EnvSource>,
}

/// Where the value of a variable is: a key of a Secret or of a ConfigMap.
#[derive(Clone, Debug, Deserialize, KubeSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("has(self.secretKeyRef) != has(self.configMapKeyRef)").message(
    "pod.env: valueFrom has either secretKeyRef or configMapKeyRef; keep one of them"
))]
pub struct EnvSource {
    /// A key of a Secret of this namespace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret_key_ref: Option<KeyRef>,
    /// A key of a ConfigMap of this namespace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub config_map_key_ref: Option<KeyRef>,
}

/// A key of an object of the same namespace. A pod does not start without it.
#[derive(Clone, Debug, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct KeyRef {
    /// Name of the object.
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
    /// The key.
    #[schemars(length(min = 1, max = 253))]
    pub key: String,
}

/// A volume and where the agent finds it. Exactly one of emptyDir, configMap, secret and persistentVolumeClaim.
#[derive(Clone, Debug, Deserialize, KubeSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new(
        "[has(self.emptyDir), has(self.configMap), has(self.secret), has(self.persistentVolumeClaim)].filter(x, x).size() == 1"
    ).message("pod.volumes: a volume is exactly one of emptyDir, configMap, secret and persistentVolumeClaim"),
    validation = Rule::new("!has(self.readOnly) || self.readOnly || has(self.persistentVolumeClaim)").message(
        "pod.volumes: readOnly says something of a persistentVolumeClaim only: an emptyDir can be written, a configMap and a secret cannot; remove readOnly"
    )
)]
pub struct PodVolume {
    /// Where it is mounted: /tmp, /dev/shm, or at or below /mnt, /data, /cache or /var/cache. Weights come by
    /// `model.source`.
    #[schemars(length(min = 1, max = 512))]
    #[x_kube(
        validation = Rule::new("self.matches('^(/tmp|/dev/shm|(/mnt|/data|/cache|/var/cache)(/[^/]+)*)$')").message(
            "pod.volumes: mountPath is /tmp, /dev/shm, or at or below /mnt, /data, /cache or /var/cache, without a '/' at its end"
        ),
        validation = Rule::new("!self.matches('/[.][.]?(/|$)') && !self.contains(':')").message(
            "pod.volumes: mountPath has no '.' or '..' parts and no ':'; write it out"
        )
    )]
    pub mount_path: String,
    /// False lets the agent write to a persistentVolumeClaim. Default: true.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_only: Option<bool>,
    /// Room of the node that goes with the pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub empty_dir: Option<EmptyDir>,
    /// The files of a ConfigMap of this namespace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub config_map: Option<ConfigMapFiles>,
    /// The files of a Secret of this namespace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret: Option<SecretFiles>,
    /// A PersistentVolumeClaim of this namespace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub persistent_volume_claim: Option<Claim>,
}

/// Room of the node that goes with the pod.
#[derive(Clone, Debug, Default, Deserialize, KubeSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct EmptyDir {
    /// Memory keeps it in memory, which counts against `resources.memory`. Default: the node's disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub medium: Option<Medium>,
    /// Most that it holds, a Kubernetes quantity ("1Gi"); a pod that writes more is evicted. Default: no limit of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "quantity_schema")]
    #[x_kube(validation = Rule::new(
        "isQuantity(string(self)) && quantity(string(self)).compareTo(quantity('1Mi')) >= 0"
    ).message("pod.volumes: emptyDir.sizeLimit is a quantity of bytes from 1Mi, for example \"1Gi\""))]
    pub size_limit: Option<Amount>,
}

/// What an emptyDir is made of. Default: the node's disk.
#[derive(Clone, Copy, Debug, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub enum Medium {
    /// The node's memory.
    Memory,
}

/// The files of a ConfigMap.
#[derive(Clone, Debug, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ConfigMapFiles {
    /// Name of the ConfigMap.
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
}

/// The files of a Secret.
#[derive(Clone, Debug, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SecretFiles {
    /// Name of the Secret.
    #[schemars(length(min = 1, max = 253))]
    pub secret_name: String,
}

/// A PersistentVolumeClaim.
#[derive(Clone, Debug, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Claim {
    /// Name of the PersistentVolumeClaim.
    #[schemars(length(min = 1, max = 253))]
    pub claim_name: String,
}

/// As whom the agent runs.
#[derive(Clone, Debug, Default, Deserialize, KubeSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new(
    "!has(self.platformIds) || !self.platformIds || !(has(self.runAsUser) || has(self.runAsGroup) || has(self.fsGroup))"
).message("pod.securityContext.platformIds leaves the ids to the platform: remove runAsUser, runAsGroup and fsGroup, or platformIds"))]
pub struct PodSecurity {
    /// User id, 1 to 2147483647: not root's. Default: 65532.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 2_147_483_647))]
    pub run_as_user: Option<i64>,
    /// Group id, 0 to 2147483647. Default: 65532.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 2_147_483_647))]
    pub run_as_group: Option<i64>,
    /// Group that owns the files of volumes, 0 to 2147483647. Default: volumes stay as they are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 2_147_483_647))]
    pub fs_group: Option<i64>,
    /// Writes no ids at all, so that the platform gives them: on OpenShift each namespace has its own range. Where nobody
    /// gives any, the image's user stands. Default: what the operator was installed with (chart value platformIds).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub platform_ids: Option<bool>,
    /// SELinux label of the agent. Default: what the node's runtime gives.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub se_linux_options: Option<SeLinux>,
}

/// What of an SELinux label a restricted pod may choose.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SeLinux {
    /// Level, for example "s0:c123,c456". Default: what the node's runtime gives.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 256))]
    pub level: Option<String>,
    /// Type. Default: what the node's runtime gives.
    #[serde(default, rename = "type", skip_serializing_if = "Option::is_none")]
    pub type_: Option<SeLinuxType>,
}

/// The types that the restricted Pod Security Standard admits.
#[derive(Clone, Copy, Debug, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum SeLinuxType {
    /// Any container.
    ContainerT,
    /// A container with an init system.
    ContainerInitT,
    /// A container in a virtual machine.
    ContainerKvmT,
    /// A container that runs containers.
    ContainerEngineT,
}

impl SeLinuxType {
    /// The word that a pod carries.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::ContainerT => "container_t",
            Self::ContainerInitT => "container_init_t",
            Self::ContainerKvmT => "container_kvm_t",
            Self::ContainerEngineT => "container_engine_t",
        }
    }
}
