//! Errors of a reconciliation: one variant for each step. The variant's name is the metric's label.

use thiserror::Error;

use crate::lint::Violation;

/// Why a reconciliation ended early. It is tried again, later each time.
#[derive(Debug, Error)]
pub enum ReconcileError {
    /// Reading the cluster failed.
    #[error("observe: {0}")]
    Observe(#[source] kube::Error),
    /// Our own plan would break something; it was not carried out.
    #[error("plan refused: {}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Lint(Vec<Violation>),
    /// Writing a child failed in a way that may pass.
    #[error("apply: {what}: {source}")]
    Apply {
        /// What was written.
        what: String,
        /// The API server's answer.
        #[source]
        source: kube::Error,
    },
    /// Writing the status failed.
    #[error("status: {0}")]
    Status(#[source] kube::Error),
    /// The status has a field that the installed CRD does not know.
    #[error("status: the installed CRD is older than this operator: apply the CRD of this release ({0})")]
    OldCrd(#[source] kube::Error),
    /// The Lease is not ours at the moment.
    #[error("not leading")]
    NotLeading,
}

impl ReconcileError {
    /// Why a status could not be written. A server-side apply of an unknown field is answered with 500, not with 422.
    pub fn of_status(source: kube::Error) -> Self {
        match &source {
            kube::Error::Api(answer) if answer.message.contains("field not declared in schema") => Self::OldCrd(source),
            _ => Self::Status(source),
        }
    }

    /// The step, as the metric's label.
    pub fn step(&self) -> &'static str {
        match self {
            Self::Observe(_) => "observe",
            Self::Lint(_) => "lint",
            Self::Apply { .. } => "apply",
            Self::Status(_) | Self::OldCrd(_) => "status",
            Self::NotLeading => "lease",
        }
    }
}
