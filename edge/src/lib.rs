//! What agent and gateway do alike at the edge to clients: connections and bodies within limits, an end that cuts no answer, the form
//! of their log, requests as spans of traces, memory that goes back when a storm of them is over, keys that clients send, pages of
//! other origins, and the playground. Knows no endpoint of an API.

pub mod allocator;
pub mod api_key;
pub mod body;
mod chunks;
pub mod connections;
pub mod cors;
mod http1;
mod pages;
pub mod playground;
pub mod spans;
mod stalled;
pub mod telemetry;
pub mod trace;
mod wire;
