//! What load is like: which requests arrive when, and how long they are.
//!
//! One home for the simulator and the load generator: [`Trace`] and the forms in which others publish theirs
//! ([`published`]), [`Lengths`], [`Steps`], the named traces of our comparisons, and the seeded [`Rng`] that all of them
//! draw from. Nothing here knows a replica, a clock or a network.

mod hash_ids;
mod lengths;
mod named;
pub mod published;
mod rng;
mod steps;
mod trace;

pub use hash_ids::{HASH_BLOCK_TOKENS, HashIds};
pub use lengths::{Lengths, LengthsError};
pub use named::{Named, TRACE_NAMES, named_trace};
pub use rng::Rng;
pub use steps::{Sizes, Step, Steps, StepsError, seconds};
pub use trace::{EXAMPLE_LINE, Gaps, ReadTrace, Request, Trace, TraceError};
