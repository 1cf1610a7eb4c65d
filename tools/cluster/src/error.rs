//! What can go wrong while a cluster is started, driven or stopped.

use std::{io, path::PathBuf};

/// Every failure of this crate. The text says what was being done and, where there is one, the way out.
#[derive(Debug, thiserror::Error)]
pub enum ClusterError {
    /// A binary of the control plane is not where it should be.
    #[error("no {name} in {}; build it with: tools/kube/build.sh {name}", dir.display())]
    BinaryMissing {
        /// Which binary.
        name: String,
        /// The folder that was looked into.
        dir: PathBuf,
    },
    /// A file or folder could not be read or written.
    #[error("{doing} {}: {source}", path.display())]
    File {
        /// Present tense: what was tried.
        doing: &'static str,
        /// On which path.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// A process could not be started, signalled or waited for.
    #[error("{doing} {name}: {source}")]
    Process {
        /// Present tense: what was tried.
        doing: &'static str,
        /// The component.
        name: String,
        /// Why not.
        source: io::Error,
    },
    /// A component ended or never became ready.
    #[error("{name} {what}; the end of its log:\n{log_tail}")]
    NotReady {
        /// The component.
        name: String,
        /// What was seen instead.
        what: String,
        /// Its last lines.
        log_tail: String,
    },
    /// Every address range for a local cluster is taken.
    #[error("all {0} address ranges for local clusters on this machine are taken; stop one (stoker-cluster down)")]
    NoFreeSlot(usize),
    /// There is no GPU to offer.
    #[error("nvidia-smi lists no GPUs: {0}")]
    NoGpus(String),
    /// Certificates could not be made.
    #[error("make certificates: {0}")]
    Certificates(#[from] rcgen::Error),
    /// The API server said no, or nothing.
    #[error("{doing}: {source}")]
    Api {
        /// Present tense: what was tried.
        doing: String,
        /// Why not.
        source: Box<kube::Error>,
    },
    /// The chart does not hold what the operator needs.
    #[error("read charts/stoker: {0}")]
    Chart(String),
    /// kubectl refused.
    #[error("kubectl {args}: {complaint}")]
    Kubectl {
        /// What was asked.
        args: String,
        /// What it said.
        complaint: String,
    },
    /// What should say which control plane is lent does not.
    #[error("read the lease of a control plane: {0}")]
    Lease(serde_json::Error),
    /// A slot has addresses for two nodes.
    #[error("a local cluster has addresses for two nodes: node_idx is 0 or 1")]
    TooManyNodes,
    /// A fault was asked for a pod that this node does not run.
    #[error("the node runs no process for pod {namespace}/{name}")]
    NoSuchPod {
        /// Its namespace.
        namespace: String,
        /// Its name.
        name: String,
    },
}

impl ClusterError {
    pub(crate) fn file(doing: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::File { doing, path, source }
    }

    pub(crate) fn process(doing: &'static str, name: &str) -> impl FnOnce(io::Error) -> Self {
        let name = name.to_owned();
        move |source| Self::Process { doing, name, source }
    }

    pub(crate) fn api(doing: impl Into<String>) -> impl FnOnce(kube::Error) -> Self {
        let doing = doing.into();
        move |source| Self::Api { doing, source: Box::new(source) }
    }
}
