//! How several GPUs share the model of a replica. Nothing here reads a cluster.

#![expect(unreachable_pub, reason = "the schema derive repeats each struct, `pub` included, inside a private scope")]

use kube::KubeSchema;
use serde::{Deserialize, Serialize};

use crate::{
    contract::{PIPELINE_PARALLEL_MAX, ParallelSettings, TENSOR_PARALLEL_MAX},
    inference_deployment::InferenceDeploymentSpec,
    nodes::{GPU_RESOURCE, GpuName},
};

/// How many GPUs share the model of a replica, 1 if none do, in the rules of the schema.
pub(crate) const GPUS_THAT_SHARE: &str = "(has(self.spec.parallelism) && has(self.spec.parallelism.tensor) ? self.spec.parallelism.tensor : 1) \
     * (has(self.spec.parallelism) && has(self.spec.parallelism.pipeline) ? self.spec.parallelism.pipeline : 1)";

/// How several GPUs share the model of a replica: each has a part of every layer (`tensor`), or some of the layers (`pipeline`), or a part
/// of some of the layers (both).
#[derive(Clone, Debug, Default, Deserialize, KubeSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ParallelismSpec {
    /// GPUs of a replica that share the model, or each stage of it, 1 to 8: each holds and computes its part of the attention heads, the
    /// feed-forward and the vocabulary, so that a model fits which one GPU has no room for, and its tokens come sooner. The GPUs are those
    /// of one node and must reach each other's memory (NVLink, or PCIe without isolation); the number must divide the model's heads. Where
    /// that cannot be, take `pipeline`. `resources.gpus` follows from both. Default: 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = TENSOR_PARALLEL_MAX))]
    pub tensor: Option<u32>,
    /// Stages that the model's layers are cut into, 1 to 8, each with `tensor` GPUs of its own that hold and compute its layers and hand what
    /// comes out to the next. For models that one GPU has no room for and that GPUs cannot share otherwise: with heads that their number does
    /// not divide, with norms over whole rows as OLMo 2 has them, or on GPUs that do not reach each other's memory. The tokens of one sequence
    /// come no sooner than from one stage, as it goes through one after the other; those of many at once do. All GPUs are of one node;
    /// `resources.gpus` follows: `tensor` times `pipeline`. Default: 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = PIPELINE_PARALLEL_MAX))]
    pub pipeline: Option<u32>,
}

impl InferenceDeploymentSpec {
    /// Ranks and stages that share the model of a replica.
    pub fn parallel_settings(&self) -> ParallelSettings {
        let said = self.parallelism.clone().unwrap_or_default();
        ParallelSettings { tensor: said.tensor.unwrap_or(1), pipeline: said.pipeline.unwrap_or(1) }
    }

    /// GPUs of a replica: as it says, else those that share its model if there are several.
    pub fn gpus(&self) -> u32 {
        let said = self.resources.as_ref().and_then(|resources| resources.gpus);
        let n_gpus = self.parallel_settings().n_gpus();
        said.unwrap_or(if n_gpus > 1 { n_gpus } else { 0 })
    }

    /// What its pods ask for GPUs by.
    pub fn gpu_name(&self) -> GpuName<'_> {
        let resources = self.resources.as_ref();
        match resources.and_then(|resources| resources.device_class.as_deref()) {
            Some(class) => GpuName::Class(class),
            None => GpuName::Resource(
                resources.and_then(|resources| resources.gpu_resource.as_deref()).unwrap_or(GPU_RESOURCE),
            ),
        }
    }
}
