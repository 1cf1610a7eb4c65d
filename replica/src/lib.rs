//! What is known of one replica: its pod, what its agent said, what it should do. Pure.
//!
//! There is one [`Judge`] of what an agent says, and one rule of how long a reading holds; rollout, scaling and status
//! look at the same [`Replica`]. A reading is judged by the observer's own clock and by the agent's start id and uptime:
//! no clock of one machine is compared with another's. Nothing here asks anybody, reads a clock or knows a cluster.

mod absurdity;
pub mod history;
mod intent;
mod judge;
mod pod;
mod preemptions;
mod rate;
mod reading;
mod replica;

pub use absurdity::{Absurdity, NotFresh};
pub use intent::Intent;
pub use judge::{Answer, Counted, Expected, FRESH_FOR_MS, Judge, OtherRelease};
pub use pod::{Needs, ObservedPod, Stage, Trouble};
pub use reading::{Reading, Sight};
pub use replica::Replica;
