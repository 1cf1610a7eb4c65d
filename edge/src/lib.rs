//! What agent and gateway do alike at the edge to clients: connections within limits, an end that cuts no answer, and the form of their
//! log. Knows no endpoint.

pub mod connections;
mod stalled;
pub mod telemetry;
