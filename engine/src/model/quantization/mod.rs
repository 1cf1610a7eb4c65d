//! Projections that a checkpoint holds quantised: how they are found in files and read. How they are described is
//! [`stoker_fit::model`]'s.

#[cfg(test)]
pub(super) mod tests;
mod weight;

pub(super) use weight::Place;
pub(crate) use weight::{Int4Groups, QuantisedWeight};
