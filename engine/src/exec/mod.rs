//! Executors carry out a step plan: compute the chunks, sample the next tokens. They decide nothing.

mod cpu;
pub mod cuda;
mod micro_batches;
mod rows;
pub mod sim;

pub(crate) use cpu::CacheSize;
pub use cpu::{CpuExecutor, Passage, ProjectionInput};
pub use rows::{Abilities, RowsRead, RowsSpec, RowsWanted, Score};

use crate::{
    constraint::Masks,
    sched::{Step, StepOutput},
};

/// A step that could not be carried out. The engine stops: every open request ends with this text.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("step failed: {0}")]
pub struct ExecError(pub String);

/// One back end, owned by the engine thread. May be dropped with steps in flight.
///
/// Steps take effect in the order of their launch: a later one finds every key and value that an earlier one writes,
/// and may be given blocks that an earlier one still writes to. Within a step, every layer writes the keys and values of
/// all chunks before its attention reads any: a chunk may read blocks that another one of the same step fills.
pub trait Executor: Send {
    /// Steps that may be launched before the first of them must be finished; 1 or 2 ([`MAX_STEPS_IN_FLIGHT`]). 2 pays
    /// where computing needs no host thread.
    ///
    /// [`MAX_STEPS_IN_FLIGHT`]: crate::sched::MAX_STEPS_IN_FLIGHT
    fn max_steps_in_flight(&self) -> usize {
        1
    }

    /// Devices that compute each step together, by which its time counts; 1 where the host computes.
    fn n_devices(&self) -> u32 {
        1
    }

    /// Whether it makes the copies that steps ask for; none do where it does not.
    fn copies_blocks(&self) -> bool {
        false
    }

    /// What it gives beside tokens.
    fn abilities(&self) -> Abilities {
        Abilities::default()
    }

    /// Asks the step that is launched next also for what rows of prompts hold; called only if it is able to give that, and for a
    /// step that wants some.
    fn read(&mut self, wanted: Vec<RowsSpec>) {
        unreachable!("{wanted:?} was refused")
    }

    /// What those of the step finished last hold, one entry for each that was wanted.
    fn take_read(&mut self) -> Vec<RowsRead> {
        Vec::new()
    }

    /// Begins to compute every chunk of the step and to sample where it says so. The step's borrows end with the call.
    /// A `Fed` input is the token of that entry of the step launched before; an entry without a token feeds any token,
    /// because its sequence has ended.
    fn launch(&mut self, step: &Step<'_>) -> Result<(), ExecError>;

    /// Gives the step launched last the masks of its constrained draws, one for each entry of it whose
    /// [`SampleSpec`](crate::sched::SampleSpec) is constrained, in their order. Called once for such a step, when every
    /// step before it has been finished and before anything else is launched or it is finished itself; never for a
    /// step without constrained draws. Those of its draws that are free need not wait for it.
    fn constrain(&mut self, masks: Masks<'_>) -> Result<(), ExecError>;

    /// Waits until the oldest step in flight is about to end, by about as much as threads take to wake up. `false`, at once, for a step
    /// of which nothing can tell.
    fn nears_end(&mut self) -> Result<bool, ExecError> {
        Ok(false)
    }

    /// Waits for the oldest step in flight and returns what it sampled. Called once for each launch.
    fn finish(&mut self) -> Result<StepOutput, ExecError>;

    /// Seconds that the device computed nothing between the step that `finish` gave last and the one before it. `None`: that one
    /// was over before this one was launched, or nothing can tell.
    fn idle_seconds(&self) -> Option<f64> {
        None
    }
}
