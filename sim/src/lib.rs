//! The simulator: scaling rules, and in `routing` rules of where requests go, against models of replicas, in virtual time.
//!
//! A [`World`] is a load and the replicas that meet it; [`simulate`] lets a [`Rule`] decide over it; `compare` asks each
//! rival for its best at equal GPU-hours; [`Oracle`] knows what comes. Nothing here reads a clock; every number follows
//! from the world and a seed. The operator links none of this.

mod cache;
pub mod compare;
mod fleet;
mod gateway;
pub mod judge;
pub mod lottery;
mod model;
mod oracle;
mod outcome;
mod peer_rule;
pub mod plot;
mod recorded;
mod replica;
pub mod routing;
pub mod rules;
mod standby;
pub mod warm;
mod world;

pub use compare::{Comparison, EQUAL_WITHIN, Progress, STOKER, Tuned, compare, run_ours};
pub use fleet::{LOOK_SECONDS, Member, Rule, Setting, Stage, View, simulate};
pub use model::{ReplicaModel, Slo};
pub use oracle::{Oracle, foreseen};
pub use outcome::{Outcomes, REVERSAL_SECONDS, Sample};
pub use peer_rule::{Kind, PeerRule, PeerRuleError};
pub use recorded::{RecordedError, recorded_replica, recorded_world};
pub use replica::{Outcome, Replica};
pub use world::{DoesNotFit, Mishaps, Router, World, named_world};
