//! Scaling rules that meet the same fleet: ours and three that others ship, written again from their documents.

pub mod hpa;
pub mod kpa;
pub mod stoker;
pub mod wva;

pub use hpa::HpaQueue;
pub use kpa::Kpa;
pub use stoker::Stoker;
pub use wva::Wva;
