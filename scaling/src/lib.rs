//! How many replicas a deployment should have, and why.
//!
//! The decision is a plain function: [`decide_scale`] takes a specification, a window of readings, the state the last
//! decision left, and the time. It is the same function in the operator, in `explain` and in the simulator (`stoker-sim`).
//! Nothing here reads a clock, talks to a cluster or awaits.

mod decide;
mod demand;
mod explain;
mod held;
mod law;
mod learned;
mod recent_peaks;
mod record;
mod regret;
mod rhythm;
mod signals;
mod standby;
mod startup;
mod window;
mod work;

pub use decide::{Bound, Decided, ScaleDecision, ScaleState, decide, decide_scale};
pub use demand::{ArrivalTerm, Cause, Demand, Regime, Term};
pub use explain::{explain, fresh_words, held_requests_words, untold_words};
pub use held::{Held, Holders};
pub use law::{Line, ServiceLaw};
pub use learned::Learned;
pub use recent_peaks::RecentPeaks;
pub use record::{DecisionRecord, FORMULA, RecordError, Replay, what_if_over};
pub use regret::Regret;
pub use rhythm::{Foreseen, Rhythm};
pub use signals::{Arrivals, Coverage, Flow, Signals, Untold, Work};
pub use standby::Standby;
pub use startup::{ASSUMED_START_SECONDS, StartTimes};
pub use stoker_crds::scaling::{
    Behavior, Quorum, STABLE_WINDOW_SECONDS_MAX, ScalingMode, ScalingSpec, SpecError, StepLimit, Targets, ToZero,
};
pub use stoker_replica::{Absurdity, Answer, Expected, FRESH_FOR_MS, NotFresh, Reading};
pub use window::{LoadWindow, Standing, TICKS_KEPT};
pub use work::WorkTerm;
