//! Where records come from: a file, or the operator.

use std::{fs, path::PathBuf};

use anyhow::{Context, Result, ensure};
use stoker_crds::InferenceDeploymentStatus;
use stoker_scaling::DecisionRecord;

use super::Explain;
use crate::{
    cluster::Cluster,
    operator::{self, OperatorArgs},
    records,
};

/// See the module.
pub(super) enum Source {
    /// A file that `--record` wrote.
    File(PathBuf),
    /// The operator's memory of one deployment.
    Operator {
        /// Where it is.
        args: OperatorArgs,
        /// Whose deployment.
        cluster: Cluster,
        /// Its name.
        name: String,
        /// What its status said when it was found.
        status: Box<InferenceDeploymentStatus>,
    },
}

impl Source {
    pub(super) async fn of(args: &Explain) -> Result<Self> {
        if let Some(path) = &args.file {
            return Ok(Self::File(path.clone()));
        }
        let (cluster, name) = (Cluster::find(&args.cluster).await?, args.name.clone().unwrap_or_default());
        let deployment = cluster.deployment(&name).await?;
        ensure!(
            deployment.spec.scaling.is_some(),
            "{name} has no spec.scaling, so nothing is decided about it: it keeps spec.replicas"
        );
        let status = Box::new(deployment.status.unwrap_or_default());
        Ok(Self::Operator { args: args.operator.clone(), cluster, name, status })
    }

    /// What the status says of the deployment, if it is one of a cluster.
    pub(super) fn status(&self) -> Option<&InferenceDeploymentStatus> {
        match self {
            Self::File(_) => None,
            Self::Operator { status, .. } => Some(status),
        }
    }

    /// Records made after this Unix time in milliseconds, oldest first. None is an error only where none can come.
    pub(super) async fn records(&self, after_ms: u64) -> Result<Vec<DecisionRecord>> {
        match self {
            Self::File(path) => {
                let name = path.display().to_string();
                records::parse(&name, &fs::read_to_string(path).with_context(|| format!("read {name}"))?)
            }
            Self::Operator { args, cluster, name, status: _ } => {
                let text = operator::records(args, cluster, name, after_ms).await?;
                let is_quiet = after_ms > 0 && text.trim().is_empty();
                if is_quiet { Ok(Vec::new()) } else { records::parse("the operator's answer", &text) }
            }
        }
    }
}
