//! How several GPUs share the model of a replica. Nothing here reads a cluster.

#![expect(unreachable_pub, reason = "the schema derive repeats each struct, `pub` included, inside a private scope")]

use kube::KubeSchema;
use serde::{Deserialize, Serialize};

use crate::{
    contract::TENSOR_PARALLEL_MAX,
    inference_deployment::InferenceDeploymentSpec,
    nodes::{GPU_RESOURCE, GpuName},
};

/// How several GPUs share the model of a replica.
#[derive(Clone, Debug, Default, Deserialize, KubeSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ParallelismSpec {
    /// GPUs of a replica that share the model, 1 to 8: each holds and computes its part of the attention heads, the feed-forward
    /// and the vocabulary, so that a model fits which one GPU has no room for, and its tokens come sooner. The GPUs are those of
    /// one node and must reach each other's memory (NVLink, or PCIe without isolation); the number must divide the model's heads.
    /// `resources.gpus` follows from it. Default: 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = TENSOR_PARALLEL_MAX))]
    pub tensor: Option<u32>,
}

impl InferenceDeploymentSpec {
    /// Ranks that share the model of a replica.
    pub fn tensor(&self) -> u32 {
        self.parallelism.as_ref().and_then(|parallelism| parallelism.tensor).unwrap_or(1)
    }

    /// GPUs of a replica: as it says, else one for each of several ranks.
    pub fn gpus(&self) -> u32 {
        let said = self.resources.as_ref().and_then(|resources| resources.gpus);
        said.unwrap_or_else(|| if self.tensor() > 1 { self.tensor() } else { 0 })
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
