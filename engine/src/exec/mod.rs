//! Executors carry out a step plan: compute the chunks, sample the next tokens. They decide nothing.

mod batch;
mod cpu;
pub mod sim;

pub use batch::BatchInputs;
pub use cpu::{CpuExecutor, kv_layout, workspace_bytes};

use crate::sched::{StepOutput, StepPlan};

/// A step that could not be carried out. The engine stops: every open request ends with this text.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("step failed: {0}")]
pub struct ExecError(pub String);

/// One back end, owned by the engine thread.
pub trait Executor: Send {
    /// Computes every chunk of the plan and samples where it says so, in the plan's order.
    fn execute(&mut self, plan: &StepPlan) -> Result<StepOutput, ExecError>;
}
