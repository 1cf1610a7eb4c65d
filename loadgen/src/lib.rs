//! Load on an OpenAI-compatible endpoint, in an open loop: requests leave when they were planned, however slow the
//! answers are, and every latency counts from the planned moment. So a server that stalls cannot slow down the load that
//! would have shown it (coordinated omission).
//!
//! [`stoker_workload`] plans, [`client`] asks, [`run`] keeps the plan, [`summary`] counts. Nothing here retries.

pub mod answer;
pub mod client;
pub mod prompt;
pub mod report;
pub mod run;
pub mod summary;
