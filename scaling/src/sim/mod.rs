//! The simulator: the same decision against a model of replicas, in virtual time.
//!
//! `traces` makes requests, `fleet` serves them on [`Replica`]s under a [`Rule`], `compare` asks each rule for its best
//! at equal GPU-hours. Nothing here reads a clock; every number follows from the trace and a seed.

mod compare;
mod fleet;
mod model;
mod outcome;
pub mod plot;
mod recorded;
mod replica;
mod rng;
pub mod rules;
mod trace;
mod traces;

pub use compare::{Comparison, EQUAL_WITHIN, Progress, Rival, STOKER, Tuned, compare, run_ours};
pub use fleet::{LOOK_SECONDS, Member, Rule, Setting, Stage, View, simulate};
pub use model::{Promise, ReplicaModel};
pub use outcome::{Outcomes, REVERSAL_SECONDS, Sample};
pub use recorded::{RecordedError, recorded_trace};
pub use replica::{Outcome, Replica};
pub use rng::Rng;
pub use trace::{EXAMPLE_LINE, Request, Trace, TraceError};
pub use traces::{TRACE_NAMES, named_trace};
