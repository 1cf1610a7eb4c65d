//! The `InferenceDeployment` resource and the wire contract between operator and agent.

pub mod contract;
