//! Scaling rules that meet the same fleet: ours and four that others ship, written again from their documents.

pub mod hpa;
pub mod kpa;
pub mod stoker;
pub mod wva;
pub mod wva_v2;

pub use hpa::HpaQueue;
pub use kpa::Kpa;
pub use stoker::Stoker;
pub use wva::Wva;
pub use wva_v2::WvaV2;
