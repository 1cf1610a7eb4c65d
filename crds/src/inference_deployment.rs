//! `InferenceDeployment`: what a user may write, and what the API server refuses.
//!
//! Every field is live: it changes a child object or the agent's configuration. Ranges and CEL rules stand beside
//! their field, and their messages name the field and the fix. The doc comments of fields are what `kubectl explain`
//! prints; units and defaults belong there. Nothing here reads a cluster.

#![expect(unreachable_pub, reason = "the schema derive repeats each struct, `pub` included, inside a private scope")]

use kube::{CustomResource, KubeSchema};
use schemars::{Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

use crate::{
    canary::CanarySpec,
    contract::{GPUS_MAX, KvCacheDtype, Quantization},
    parallelism::{GPUS_THAT_SHARE, ParallelismSpec},
    pod::PodSpec,
    quantity::{Amount, quantity_schema},
    scaling::ScalingSpec,
    status::InferenceDeploymentStatus,
};

/// One model, served by a number of equal replicas behind one Service of the same name.
#[derive(Clone, CustomResource, Debug, Deserialize, KubeSchema, PartialEq, Serialize)]
#[kube(
    group = "stoker.dev",
    version = "v1alpha1",
    kind = "InferenceDeployment",
    plural = "inferencedeployments",
    singular = "inferencedeployment",
    shortname = "infd",
    category = "all",
    namespaced,
    status = "InferenceDeploymentStatus",
    derive = "PartialEq",
    doc = "InferenceDeployment serves one model with a number of equal replicas behind one Service of the same name. Unknown fields are refused by clients that validate strictly, as kubectl and Helm do by default.",
    scale(
        spec_replicas_path = ".spec.replicas",
        status_replicas_path = ".status.replicas",
        label_selector_path = ".status.selector"
    ),
    printcolumn(name = "Ready", type_ = "string", json_path = ".status.conditions[?(@.type==\"Ready\")].status"),
    printcolumn(name = "Replicas", type_ = "string", json_path = ".status.readyOfWanted"),
    printcolumn(name = "Model", type_ = "string", json_path = ".spec.model.source"),
    printcolumn(name = "KV%", type_ = "integer", json_path = ".status.capacity.kvUsedPercent"),
    printcolumn(name = "Preempt/min", type_ = "integer", json_path = ".status.capacity.preemptionsPerMinute"),
    printcolumn(name = "URL", type_ = "string", json_path = ".status.url"),
    printcolumn(name = "Reason", type_ = "string", json_path = ".status.conditions[?(@.type==\"Ready\")].reason"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    printcolumn(
        name = "Message",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].message",
        priority = 1
    ),
    printcolumn(name = "Revision", type_ = "string", json_path = ".status.revision", priority = 1),
    // A number that was set through the scale subresource belongs to nobody who applies manifests, so an apply cannot take
    // it out. It may stay while the number is handed to the operator, which removes it.
    validation = Rule::new(
        "!has(self.spec.replicas) || !has(self.spec.scaling) || (has(self.spec.scaling.mode) && self.spec.scaling.mode != 'native') \
         || oldSelf.optMap(old, has(old.spec.scaling) && has(old.spec.replicas) && old.spec.replicas == self.spec.replicas).orValue(false)"
    ).optional_old_self(true).message(
        "spec.replicas and spec.scaling exclude each other: remove replicas to let the operator decide the number, or set scaling.mode to external or advisory to keep it"
    ),
    validation = Rule::new(format!(
        "!has(self.spec.engine) || !has(self.spec.engine.quantization) || (has(self.spec.resources) && has(self.spec.resources.gpus) && self.spec.resources.gpus > 0) \
         || {GPUS_THAT_SHARE} > 1"
    )).message("engine.quantization needs a GPU, an H100 or H200: set resources.gpus to 1 or remove quantization"),
    validation = Rule::new(format!(
        "!has(self.spec.engine) || !has(self.spec.engine.kvCacheDtype) || (has(self.spec.resources) && has(self.spec.resources.gpus) && self.spec.resources.gpus > 0) \
         || {GPUS_THAT_SHARE} > 1"
    )).message("engine.kvCacheDtype needs a GPU: set resources.gpus to 1 or remove kvCacheDtype"),
    validation = Rule::new(format!(
        "!has(self.spec.resources) || !has(self.spec.resources.gpus) || self.spec.resources.gpus == 0 || self.spec.resources.gpus == {GPUS_THAT_SHARE}"
    )).message(
        "resources.gpus is not parallelism.tensor times parallelism.pipeline (each 1 where it is not set), and each of the ranks that share a model has a GPU of its own: set parallelism.tensor to the number of GPUs, or parallelism.pipeline, and remove resources.gpus, which follows from them"
    ),
    validation = Rule::new(format!(
        "!has(self.spec.resources) || !has(self.spec.resources.deviceClass) || (has(self.spec.resources.gpus) && self.spec.resources.gpus > 0) \
         || {GPUS_THAT_SHARE} > 1"
    )).message("resources.deviceClass says what GPUs are claimed by, and none are asked for: set resources.gpus to 1 or remove deviceClass"),
    // Ranks on CPUs are for tests: they have the memory and the threads that one rank would have.
    validation = Rule::new(format!(
        "!has(self.spec.resources) || !has(self.spec.resources.gpus) || self.spec.resources.gpus > 0 || {GPUS_THAT_SHARE} == 1"
    )).message(
        "parallelism shares a model among GPUs, and resources.gpus 0 asks for none, where a replica has one rank: remove resources.gpus, which follows from parallelism, or remove parallelism"
    ),
    validation = Rule::new(
        "!has(self.spec.scaling) || !has(self.spec.scaling.standby) || self.spec.scaling.standby == 0 \
         || (self.spec.model.source.matches('^(hf|s3|oci|https)://') && (!has(self.spec.model.cache) || !has(self.spec.model.cache.claimName)))"
    ).message(
        "scaling.standby is for a model that nodes keep: use a model.source that is fetched (hf://, s3://, oci:// or https://), without model.cache.claimName, or remove standby"
    ),
    validation = Rule::new("self.metadata.name.matches('^[a-z]([-a-z0-9]{0,43}[a-z0-9])?$')").message(
        "metadata.name: it names the Service too, so use at most 45 characters: lower-case letters, digits and '-', starting with a letter, ending with a letter or digit"
    )
)]
#[serde(rename_all = "camelCase")]
pub struct InferenceDeploymentSpec {
    /// Which weights to serve and under which names. The only required field.
    pub model: ModelSpec,
    /// What each replica asks of its node. Default: nothing asked, nothing limited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resources: Option<ResourcesSpec>,
    /// How several GPUs share the model of a replica. Default: they do not, a replica computes on one GPU or on CPUs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parallelism: Option<ParallelismSpec>,
    /// Sizes of the engine in each replica. Default: derived from the model and the machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engine: Option<EngineSpec>,
    /// Number of replicas, 0 to 1000. Not together with `scaling` in mode native, which decides it. Default: 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1000))]
    pub replicas: Option<i32>,
    /// Lets the number of replicas follow the load. Default: it does not, `replicas` stands.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scaling: Option<ScalingSpec>,
    /// How an older revision is replaced. Default: the new replica serves before the old one goes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rollout: Option<RolloutSpec>,
    /// How a replica leaves when it is replaced or no longer wanted. Default: 3 s withdrawn, then up to 600 s.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drain: Option<DrainSpec>,
    /// Where and as what the pods run. Default: the operator's agent image, anywhere.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<PodSpec>,
}

/// Which weights to serve and under which names.
#[derive(Clone, Debug, Deserialize, KubeSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new(
        "!has(self.tokenSecret) || self.source.matches('^(hf|s3|oci|https)://')"
    ).message(
        "model.tokenSecret is for a model.source that is fetched (hf://, s3://, oci:// or https://): remove it or change source"
    ),
    validation = Rule::new(
        "!has(self.cache) || self.source.matches('^(hf|s3|oci|https)://')"
    ).message("model.cache is for a model.source that is fetched (hf://, s3://, oci:// or https://): remove it or change source"),
    validation = Rule::new("!has(self.tokenSecret) || !has(self.tokenSecret.key) || !self.source.startsWith('s3://')").message(
        "model.tokenSecret.key: the Secret of a bucket has the keys AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and may have AWS_SESSION_TOKEN, AWS_REGION and AWS_ENDPOINT_URL: remove key"
    )
)]
pub struct ModelSpec {
    /// Where the weights are: `builtin://NAME` (inside the agent, for example builtin://ember), `hf://ORG/MODEL` (fetched
    /// from a hub before the agent starts; more precisely hf://ORG/MODEL/FILE.gguf and …@REVISION, a branch, tag or commit),
    /// `s3://BUCKET/PREFIX` (fetched from a bucket; or s3://BUCKET/PREFIX/FILE.gguf), `oci://REGISTRY/REPOSITORY:TAG` (fetched from a
    /// registry; or …@sha256:DIGEST; with #path=FOLDER the model is that folder of the image, which the cluster mounts if it can), `https://HOST/PATH` (fetched from a web server: a folder, a .gguf file or a tar; with
    /// #sha256=HASH held to that), `pvc://CLAIM/PATH` (on a PersistentVolumeClaim of the same namespace, mounted read-only) or
    /// `file:///PATH` (in the agent's image). A path is a directory with a Hugging Face model (config.json, tokenizer.json, *.safetensors) or with
    /// one .gguf file, or that file itself.
    #[schemars(length(min = 1, max = 1024))]
    #[x_kube(
        validation = Rule::new("self.matches('^(builtin|hf|s3|oci|https|pvc|file)://')").message(
            "model.source: unknown scheme; use builtin://NAME, hf://ORG/MODEL, s3://BUCKET/PREFIX, oci://REGISTRY/REPOSITORY:TAG, https://HOST/PATH, pvc://CLAIM/PATH or file:///PATH"
        ),
        validation = Rule::new("!self.startsWith('s3://') || self.matches('^s3://[A-Za-z0-9][A-Za-z0-9._-]{2,62}(/[^/?#\\\\s]+)*/?$')").message(
            "model.source: use s3://BUCKET/PREFIX, where PREFIX is a folder or a .gguf file of the bucket, for example s3://models/llama-3.1-8b"
        ),
        validation = Rule::new(
            "!self.startsWith('oci://') || self.matches('^oci://[A-Za-z0-9][A-Za-z0-9.-]*(:[0-9]{1,5})?(/[a-z0-9]([a-z0-9._-]*[a-z0-9])?)+(:[A-Za-z0-9_][A-Za-z0-9._-]{0,127})?(@sha256:[a-f0-9]{64})?(#path=(/|/?[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)*/?))?$')"
        ).message(
            "model.source: use oci://REGISTRY/REPOSITORY:TAG or …@sha256:DIGEST, either with #path=FOLDER of the image, for example oci://registry.example/models/llama-3.1-8b:v1"
        ),
        validation = Rule::new("!self.startsWith('oci://') || !self.matches('#path=(/?[^/].{127}[^/]|.*[.]gguf/?$)')").message(
            "model.source: #path= of an image is a folder, of at most 128 characters: name the folder that a .gguf file is in"
        ),
        validation = Rule::new(
            "!self.startsWith('https://') || self.matches('^https://[A-Za-z0-9][A-Za-z0-9.-]*(:[0-9]{1,5})?(/[^?#\\\\s]*)?([?][^#\\\\s]+)?(#sha256=[a-f0-9]{64})?$')"
        ).message(
            "model.source: use https://HOST/PATH of a folder, a .gguf file or a .tar, .tar.gz or .tgz, either with #sha256=HASH of 64 digits, for example https://files.example/models/llama-3.1-8b/; a login belongs into model.tokenSecret"
        ),
        validation = Rule::new(
            "!self.startsWith('https://') || !self.matches('[?]') || self.matches('^[^?]*[.](gguf|tar|tar[.]gz|tgz)[?]')"
        ).message("model.source: a folder takes no ?QUERY, only a .gguf, .tar, .tar.gz or .tgz file does"),
        validation = Rule::new(
            "!self.startsWith('hf://') || self.matches('^hf://[A-Za-z0-9_-][A-Za-z0-9._-]*/[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._/-]*[.]gguf)?(@[A-Za-z0-9_-][A-Za-z0-9._/-]*)?$')"
        ).message(
            "model.source: use hf://ORG/MODEL, hf://ORG/MODEL/FILE.gguf or either with @REVISION, for example hf://Qwen/Qwen2.5-0.5B-Instruct"
        ),
        validation = Rule::new("!self.startsWith('builtin://') || self.matches('^builtin://[a-z0-9]([-a-z0-9.]*[a-z0-9])?$')").message(
            "model.source: after builtin:// comes the name of a model inside the agent, for example builtin://ember"
        ),
        validation = Rule::new("!self.startsWith('pvc://') || self.matches('^pvc://[a-z0-9]([-a-z0-9.]*[a-z0-9])?(/[^/]+)*/?$')").message(
            "model.source: use pvc://CLAIM/PATH, where CLAIM is a PersistentVolumeClaim of this namespace and PATH a directory or a .gguf file on it"
        ),
        validation = Rule::new("!self.startsWith('file://') || self.matches('^file://(/[^/]+)+/?$')").message(
            "model.source: use file:///PATH with an absolute directory or .gguf file of the agent's image, for example file:///models/chat"
        ),
        validation = Rule::new("!self.matches('(^|/)[.][.]?(/|$)')").message(
            "model.source: a path has no '.' or '..' parts; write it out"
        )
    )]
    pub source: String,
    /// Names that requests may use in their `model` field; the first is the one answers carry. At most 16. Default: the
    /// name of this object.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 16), schema_with = "served_names_schema")]
    #[x_kube(validation = Rule::new("self.all(n, self.exists_one(m, m == n))").message(
        "model.servedNames: each name once; remove the repeated one"
    ))]
    pub served_names: Option<Vec<String>>,
    /// Secret with what a fetched model needs: a hub's token, a bucket's keys (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and what else the
    /// variables of these names say), a registry's login (type kubernetes.io/dockerconfigjson), or a web server's token, or username and
    /// password (type kubernetes.io/basic-auth). Only the container that fetches
    /// gets it, or a node that mounts an image. Default: nobody says who asks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token_secret: Option<TokenSecret>,
    /// Where a fetched model is kept. Default: as the operator was installed, else in the pod, which fetches again when it
    /// is replaced.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache: Option<ModelCache>,
}

/// A Secret of the same namespace.
#[derive(Clone, Debug, Deserialize, KubeSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct TokenSecret {
    /// Name of the Secret.
    #[schemars(length(min = 1, max = 253), regex(pattern = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"))]
    pub name: String,
    /// Key of the hub's or web server's token or the registry's login in it; a bucket's keys have names of their own. Default: "token"
    /// for hf://, ".dockerconfigjson" for oci://, "token" or else "username" and "password" for https://.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253), regex(pattern = r"^[-._a-zA-Z0-9]+$"))]
    pub key: Option<String>,
}

/// Where a fetched model is kept.
#[derive(Clone, Debug, Deserialize, KubeSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ModelCache {
    /// PersistentVolumeClaim of the same namespace that replicas share; on several nodes it has to be ReadWriteMany. The
    /// agent's user must be able to write to it (pod.securityContext.fsGroup). Default: as the operator was installed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253), regex(pattern = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"))]
    pub claim_name: Option<String>,
    /// Bytes that it may hold as a Kubernetes quantity ("200Gi"), from 1Mi: what was used least recently goes, what is used
    /// never. Default: as much as its volume has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "quantity_schema")]
    #[x_kube(validation = Rule::new(
        "isQuantity(string(self)) && quantity(string(self)).compareTo(quantity('1Mi')) >= 0 && quantity(string(self)).compareTo(quantity('1000Ti')) <= 0"
    ).message("model.cache.sizeLimit: a quantity of bytes from 1Mi, for example \"200Gi\""))]
    pub size_limit: Option<Amount>,
}

/// A list of names whose length is bounded, so that CEL can estimate its cost.
fn served_names_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array",
        "items": {"type": "string", "minLength": 1, "maxLength": 256, "pattern": "^[!-~]+$"},
    })
}

/// What each replica asks of its node. Requests equal limits, so that a replica that fits keeps fitting.
#[derive(Clone, Debug, Default, Deserialize, KubeSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("!has(self.deviceClass) || !has(self.gpuResource)").message(
    "resources.deviceClass and resources.gpuResource are two ways to ask for the same GPUs: remove gpuResource if a DRA driver gives them, deviceClass if a device plugin does"
))]
pub struct ResourcesSpec {
    /// CPUs per replica as a Kubernetes quantity (4, "500m"), request and limit, 50m to 1024. Default: none asked, none
    /// limited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "quantity_schema")]
    #[x_kube(validation = Rule::new(
        "isQuantity(string(self)) && quantity(string(self)).compareTo(quantity('50m')) >= 0 && quantity(string(self)).compareTo(quantity('1024')) <= 0"
    ).message("resources.cpu: a quantity of CPUs from 50m to 1024, for example 4 or \"500m\""))]
    pub cpu: Option<Amount>,
    /// Memory per replica as a Kubernetes quantity ("8Gi"), request and limit, 64Mi to 64Ti. It bounds weights and KV
    /// cache together. Default: none asked, none limited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "quantity_schema")]
    #[x_kube(validation = Rule::new(
        "isQuantity(string(self)) && quantity(string(self)).compareTo(quantity('64Mi')) >= 0 && quantity(string(self)).compareTo(quantity('64Ti')) <= 0"
    ).message("resources.memory: a quantity of bytes from 64Mi to 64Ti, for example \"8Gi\""))]
    pub memory: Option<Amount>,
    /// GPUs per replica, 0 to 64. A replica computes on the GPUs that its node gives it, and fails with the reason if it cannot;
    /// with 0 on CPUs, whatever the node has. Several share the model, as many as `parallelism.tensor` times `parallelism.pipeline`.
    /// Nodes with taints need pod.tolerations. Default: that product if it is above 1, else 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = GPUS_MAX))]
    pub gpus: Option<u32>,
    /// What the cluster calls its GPUs: the extended resource that its device plugin offers, or that a DeviceClass names
    /// (`extendedResourceName`). Not beside `deviceClass`. Default: "nvidia.com/gpu".
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 3, max = 253))]
    #[x_kube(validation = Rule::new(
        "self.matches('^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$')"
    ).message("resources.gpuResource: DOMAIN/NAME as the device plugin offers it, for example nvidia.com/gpu"))]
    pub gpu_resource: Option<String>,
    /// DeviceClass that each of the GPUs is claimed by, where a driver of Dynamic Resource Allocation gives them and no device plugin
    /// (Kubernetes 1.34 or newer): a replica's pod gets a ResourceClaim for all its GPUs. Not beside `gpuResource`. Default: none, GPUs are
    /// asked for by `gpuResource`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 190))]
    #[x_kube(validation = Rule::new(
        "self.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*$')"
    ).message("resources.deviceClass: the name of a DeviceClass of the cluster, for example gpu.nvidia.com"))]
    pub device_class: Option<String>,
}

/// Sizes of the engine in each replica.
#[derive(Clone, Debug, Default, Deserialize, KubeSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new(
        "!has(self.kvCacheTokens) || !has(self.maxModelLen) || self.kvCacheTokens / 16 * 16 >= self.maxModelLen"
    ).message("engine.kvCacheTokens, rounded down to whole blocks of 16, must hold at least one sequence of engine.maxModelLen: raise kvCacheTokens or lower maxModelLen"),
    validation = Rule::new(
        "!has(self.maxBatchedTokens) || !has(self.maxNumSeqs) || self.maxBatchedTokens >= self.maxNumSeqs"
    ).message("engine.maxBatchedTokens must be at least engine.maxNumSeqs, as every running sequence computes one token a step: raise maxBatchedTokens or lower maxNumSeqs")
)]
pub struct EngineSpec {
    /// Longest prompt plus completion, in tokens, 16 to 10485760. Default: the model's own limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 16, max = 10_485_760))]
    pub max_model_len: Option<u32>,
    /// Sequences decoded together at most, 1 to 4096. Default: 64, on a GPU 256; `maxBatchedTokens` if that is less.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 4096))]
    pub max_num_seqs: Option<u32>,
    /// Tokens computed in one step at most, prompt chunks and decodes together, 16 to 1048576. Default: 512, on a GPU
    /// 8192; `maxNumSeqs` if that is more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 16, max = 1_048_576))]
    pub max_batched_tokens: Option<u32>,
    /// Tokens that the KV cache holds, rounded down to whole blocks of 16, 16 to 1073741824. Default: from the memory
    /// that the pod may use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 16, max = 1_073_741_824))]
    pub kv_cache_tokens: Option<u32>,
    /// Requests that wait at most before new ones are refused with 429, 1 to 100000. Default: 256.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 100_000))]
    pub max_waiting: Option<u32>,
    /// Compute threads of the CPU back end, 1 to 1024. Default: the CPUs that the pod may use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1024))]
    pub threads: Option<u32>,
    /// Share of a GPU's memory that the engine may use, 0.01 to 1. Default: 0.9.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.01, max = 1))]
    pub memory_fraction: Option<f64>,
    /// Keep the KV of prompts and completions for requests that begin with the same tokens. Default: true.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefix_caching: Option<bool>,
    /// Give a request the same tokens whatever else runs beside it, at some cost in speed; on a GPU this needs an H100 or
    /// H200. On CPUs it is always so. Default: false.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub batch_invariant: Option<bool>,
    /// Milliseconds between two tokens of a stream that prompts of others may take at most, 1 to 10000, or as long again as
    /// decoding takes if that is longer; at 10000 prompts fill steps. Default: 30, except while 24 requests, or more than
    /// stream, wait for a first token: what is set here holds then too, which costs output.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 10_000))]
    pub itl_target_ms: Option<u32>,
    /// Multiply with weights in fewer bits than they are stored in. Default: as they are stored.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quantization: Option<Quantization>,
    /// Store keys and values in fewer bits than they are computed in. Default: as they are computed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_cache_dtype: Option<KvCacheDtype>,
    /// Render the chat template that a request brings (`chat_template`) instead of the model's own. A template is a program: its
    /// length and its steps are bounded, the memory that it takes is not, so let only those in whom you trust with a replica.
    /// Default: false, such requests are refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trust_request_chat_template: Option<bool>,
}

/// How an older revision is replaced: new replicas first, until one of them serves only one, then a tenth at a time.
#[derive(Clone, Debug, Default, Deserialize, KubeSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!has(self.minAvailable) || !has(self.maxUnavailable)").message(
        "rollout.minAvailable and rollout.maxUnavailable say the same from two sides: remove one of them"
    ),
    validation = Rule::new(
        "!has(self.maxSurge) || !(string(self.maxSurge) in ['0', '0%']) || has(self.minAvailable) || (has(self.maxUnavailable) && self.maxUnavailable > 0)"
    ).message(
        "rollout.maxSurge is 0 and no replica may be missing, so nothing could ever be replaced: raise maxSurge, or let replicas be missing by maxUnavailable or minAvailable"
    ),
    validation = Rule::new("!has(self.maxSurge) || !(string(self.maxSurge) in ['0', '0%']) || !has(self.canary)").message(
        "rollout.maxSurge is 0, and rollout.canary is one replica more: raise maxSurge or remove canary"
    )
)]
pub struct RolloutSpec {
    /// Replicas that may be missing during a change, 0 to 1000. With 0 no old replica goes before a new one serves: where the
    /// cluster has no room for one more, the change waits and says so. With more, so many old replicas go first when new ones found
    /// no room for `surgeSeconds`; a deployment of one replica then does not serve for as long as the new one takes to load.
    /// A node drain may evict as many at a time, but at least one. Not beside `minAvailable`. Default: 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1000))]
    pub max_unavailable: Option<u32>,
    /// The same from the other side: replicas that serve at least during a change, a number from 0 to 1000 or a part of those that are
    /// wanted ("90%", rounded up). Not beside `maxUnavailable`. Default: as `maxUnavailable` says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "quantity_schema")]
    #[x_kube(validation = Rule::new(
        "string(self).matches('^([0-9]{1,3}|1000|([0-9]{1,2}|100)%)$')"
    ).message("rollout.minAvailable: a number of replicas from 0 to 1000 or a percentage of them, for example 9 or \"90%\""))]
    pub min_available: Option<Amount>,
    /// Replicas that there may be beyond the wanted ones during a change, a number from 0 to 1000 or a part of those that are wanted
    /// ("25%", rounded up): so many are replaced at a time, from the moment that a new one serves. With 0, as for a namespace whose quota
    /// has no room, old replicas go before new ones are made; where none may be missing, 1 is meant. Default: "10%".
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "quantity_schema")]
    #[x_kube(validation = Rule::new(
        "string(self).matches('^([0-9]{1,3}|1000|([0-9]{1,2}|100)%)$')"
    ).message("rollout.maxSurge: a number of replicas from 0 to 1000 or a percentage of them, for example 2 or \"10%\""))]
    pub max_surge: Option<Amount>,
    /// Seconds that a new replica waits for room before an old one goes for it, 0 to 3600: as long as a cluster autoscaler
    /// takes for a node. Says nothing where no replica may be missing, or none too many. Default: 120.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 3600))]
    pub surge_seconds: Option<u32>,
    /// Seconds without success after which waiting counts as a fault, 30 to 86400: a pod whose image, volumes or network are
    /// not ready by then makes the deployment Degraded with the cause, and a deployment that is Degraded for as long and
    /// short of replicas is Stalled. A new revision that came no further for as long is given up, see `autoRollback`. Default: 600.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 30, max = 86_400))]
    pub progress_deadline_seconds: Option<u32>,
    /// Hold a change: replicas of another revision than the one that serves are not made, and none that serves goes for them. The
    /// number of replicas still follows what is asked, and failed ones are replaced. Default: false.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub paused: Option<bool>,
    /// Older revisions whose configuration is kept, so that a change can be undone, 0 to 20. With 0 only those of replicas that there
    /// are. Default: 3.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 20))]
    pub keep_revisions: Option<u32>,
    /// Go back to the last revision that served when no replica of a new one ever did and, for `progressDeadlineSeconds`, none came any
    /// further: image, model or settings are wrong. It is not tried again until the spec asks for another one. Want of room and
    /// refusals of the API server are waited for. Default: true.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub auto_rollback: Option<bool>,
    /// Try a change on one replica first. Default: it is not tried.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub canary: Option<CanarySpec>,
}

/// How a replica leaves: it is withdrawn from the Service, finishes its streams, and is deleted when empty.
#[derive(Clone, Debug, Default, Deserialize, KubeSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new(
    "!has(self.withdrawSeconds) || !has(self.deadlineSeconds) || self.withdrawSeconds <= self.deadlineSeconds"
).message("drain.withdrawSeconds is above drain.deadlineSeconds, so a leaving replica would take requests for longer than it then lets them finish: lower withdrawSeconds or raise deadlineSeconds"))]
pub struct DrainSpec {
    /// Seconds that streams may take to finish before they are ended with an error, 0 to 86400. Default: 600.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 86_400))]
    pub deadline_seconds: Option<u32>,
    /// Seconds that a leaving replica still takes requests while load balancers stop sending them, and up to ten times as long while
    /// some still do; 0 to 300 and not above a `deadlineSeconds` that is set. Default: 3.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 300))]
    pub withdraw_seconds: Option<u32>,
}
