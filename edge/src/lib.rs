//! What agent and gateway do alike at the edge to clients: connections within limits, and an end that cuts no answer. Knows no
//! endpoint.

pub mod connections;
mod stalled;
