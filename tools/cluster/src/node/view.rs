//! What one container is doing, as its loop reports it and the pod's status shows it. Values only.

use jiff::Timestamp;

/// One container now.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ContainerView {
    pub(crate) state: ContainerPhase,
    /// How it ended the time before.
    pub(crate) last: Option<Ended>,
    pub(crate) restarts: i32,
    /// The startup probe, if any, has succeeded.
    pub(crate) started: bool,
    /// The readiness probe, if any, succeeds.
    pub(crate) ready: bool,
}

/// Where a container is in its life.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum ContainerPhase {
    /// Not running, and will be tried (again).
    Waiting { reason: &'static str, message: String },
    /// Its process runs.
    Running { since: Timestamp },
    /// Its process ended.
    Terminated(Ended),
}

/// How a process ended.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Ended {
    pub(crate) exit_code: i32,
    pub(crate) reason: &'static str,
    /// What the container said about it: the end of its log, when its policy asks for that.
    pub(crate) message: String,
    pub(crate) started_at: Timestamp,
    pub(crate) finished_at: Timestamp,
}

impl ContainerView {
    /// Before anything was tried.
    pub(crate) fn creating() -> Self {
        let state = ContainerPhase::Waiting { reason: "ContainerCreating", message: String::new() };
        Self { state, last: None, restarts: 0, started: false, ready: false }
    }

    /// While init containers run.
    pub(crate) fn initializing() -> Self {
        let state = ContainerPhase::Waiting { reason: "PodInitializing", message: String::new() };
        Self { state, ..Self::creating() }
    }

    /// Whether it ended with success and will not run again.
    pub(crate) fn succeeded(&self) -> bool {
        matches!(&self.state, ContainerPhase::Terminated(ended) if ended.exit_code == 0)
    }

    /// Whether its process has ever run.
    pub(crate) fn has_run(&self) -> bool {
        self.last.is_some() || !matches!(self.state, ContainerPhase::Waiting { .. })
    }
}
