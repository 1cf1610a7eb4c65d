//! The `InferenceDeployment` resource and the wire contract between operator and agent.
//!
//! `accounts`, `contract`, `description`, `endpoints`, `history`, `holders`, `in_flight`, `intent`, `kv_events`, `route` and `scaling` are plain serde, all that agent, gateway and decision link; the Kubernetes resource stands
//! behind the feature `resource`.

pub mod accounts;
pub mod contract;
pub mod description;
pub mod endpoints;
pub mod history;
pub mod holders;
pub mod in_flight;
pub mod intent;
pub mod kv_events;
pub mod route;
pub mod scaling;

#[cfg(feature = "resource")]
pub mod canary;
#[cfg(feature = "resource")]
pub mod conditions;
#[cfg(feature = "resource")]
pub mod crd;
#[cfg(feature = "resource")]
pub mod devices;
#[cfg(feature = "resource")]
pub mod fit;
#[cfg(feature = "resource")]
pub mod inference_budget;
#[cfg(feature = "resource")]
pub mod inference_deployment;
#[cfg(feature = "resource")]
pub mod nodes;
#[cfg(feature = "resource")]
pub mod parallelism;
#[cfg(feature = "resource")]
pub mod pod;
#[cfg(feature = "resource")]
pub mod quantity;
#[cfg(feature = "resource")]
pub mod scaling_status;
#[cfg(feature = "resource")]
pub mod status;

#[cfg(feature = "resource")]
pub use inference_budget::InferenceBudget;
#[cfg(feature = "resource")]
pub use inference_deployment::{InferenceDeployment, InferenceDeploymentSpec};
#[cfg(feature = "resource")]
pub use status::InferenceDeploymentStatus;
