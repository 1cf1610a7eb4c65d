//! The scheduler: `schedule` decides a step, `resolve` takes its results in. Both are plain functions over
//! [`SchedState`]: no clock, no channel, no randomness, so the same state and limits always give the same plan.
//!
//! A step may be planned while the one before it is still being computed. Then its decodes do not know their input yet:
//! they name the entry of the step before that samples it ([`ChunkInput::Fed`]).

mod device_time;
mod follow;
mod forecast;
mod invariants;
mod jump;
mod lengths;
mod order;
mod pace;
mod plan;
mod prefix;
mod put_off;
mod resolve;
mod rows;
mod slots;
mod state;
mod step;
#[cfg(test)]
mod tests;

pub use device_time::{charge, shares};
pub use jump::{jump, jump_over_draw};
pub use lengths::Lengths;
pub use pace::{ItlTarget, Pace, PacedStep};
pub use plan::{Chunk, Started, StepPlan, schedule};
pub use put_off::put_off;
pub use resolve::{Ended, RawLogprobs, Sampled, SampledToken, StepEffects, StepOutput, resolve};
pub use rows::rows_wanted;
pub use slots::Slots;
pub use state::{SchedLimits, SchedState};
pub use step::{ChunkInput, SampleSpec, Step, StepChunk};

/// Steps that may be in flight at most: one being computed, one planned behind it. More would not hide more host time.
pub const MAX_STEPS_IN_FLIGHT: usize = 2;
