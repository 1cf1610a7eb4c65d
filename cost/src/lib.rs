//! What a step of an engine costs, in seconds: a fixed part, and one part for each kind of work.
//!
//! An engine learns its own costs while it serves ([`CostMeter`]) and tells them with its load ([`StepReport`]), so that nobody
//! outside has to guess from totals what a replica can carry. Plain numbers; reads no clock.

mod cost;
mod meter;
mod report;
mod squares;

pub use cost::{StepCost, StepWork};
pub use meter::CostMeter;
pub use report::{Spent, StepReport};
