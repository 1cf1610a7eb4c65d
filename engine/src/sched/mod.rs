//! The scheduler: `schedule` decides a step, `resolve` takes its results in. Both are plain functions over
//! [`SchedState`]: no clock, no channel, no randomness, so the same state and limits always give the same plan.

mod invariants;
mod plan;
mod resolve;
mod state;
#[cfg(test)]
mod tests;

pub use plan::{Chunk, SampleSpec, StepPlan, schedule};
pub use resolve::{Ended, RawLogprobs, SampledToken, StepEffects, StepOutput, resolve};
pub use state::{SchedLimits, SchedState};
