//! Load on an OpenAI-compatible endpoint, in an open loop: requests leave when they were planned, however slow the
//! answers are, and every latency counts from the planned moment. So a server that stalls cannot slow down the load that
//! would have shown it (coordinated omission).
//!
//! [`stoker_workload`] and [`session`] plan, [`client`] asks, [`run`] keeps the plan, [`shape`] judges what must be JSON or a call,
//! [`summary`] counts. Nothing here retries.

pub mod answer;
pub mod client;
pub mod prompt;
pub mod report;
pub mod run;
pub mod session;
pub mod shape;
pub mod slo;
pub mod summary;
