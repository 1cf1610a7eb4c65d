//! A real Kubernetes cluster on one machine without root, containers or images: etcd, kube-apiserver,
//! kube-controller-manager and kube-scheduler as ordinary processes on loopback addresses, a [`ProcessNode`] that runs
//! the containers of pods as local processes, and a [`ServiceProxy`] that makes Services reachable.
//!
//! The API is synchronous; from a tokio test call it through `spawn_blocking` or from the test's own thread. Whatever is
//! started here is gone when its owner is dropped, and also when the owning process is killed with SIGKILL.

mod baseline;
mod binaries;
mod blocking;
mod component;
mod control_plane;
mod credentials;
mod error;
mod gateway;
mod keeper;
mod kinds;
mod node;
mod operator;
mod process;
mod proxy;
mod servers;
mod slot;

pub use baseline::Baseline;
pub use binaries::{Binaries, cache_dir};
pub use control_plane::{Audit, ControlPlane, ControlPlaneOptions, Controllers};
pub use credentials::{Credentials, Identity, KUBELET_NODE};
pub use error::ClusterError;
pub use gateway::GatewayProcess;
pub use keeper::Keeper;
pub use node::{BackoffLimits, Capacity, Gpus, ImageBinary, ImageMap, NodeOptions, ProcessNode};
pub use operator::{OperatorOptions, OperatorProcess, established};
pub use process::is_running;
pub use proxy::ServiceProxy;
pub use servers::{Addresses, Servers, flag};
