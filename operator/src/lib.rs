//! The operator of `InferenceDeployment`: observe → validate → plan → apply → status.
//!
//! `controller::round` lists these steps and nothing else. `validate`, `desired`, `revision`, `rollout`, `plan`,
//! `lint`, `pace` and `status` are functions over values: no client, no clock, no randomness. `observe` only reads, `probe`
//! reads agents and tells them what is written on their pods, `canary` is pure but for its examiner, which asks agents, `apply` and `events` are the only ones that write to the cluster. The operator never links the engine.

pub mod adoption;
pub mod agent_client;
pub mod allow;
pub mod apply;
pub mod budgets;
pub mod canary;
pub mod cause;
pub mod clock;
pub mod controller;
pub mod course;
pub mod desired;
pub mod devices;
pub mod endpoints;
pub mod error;
pub mod events;
pub mod fence;
pub mod fits;
pub mod fleet;
pub mod gateways;
pub mod holders;
pub mod image_volumes;
pub mod intake;
pub mod keys;
pub mod lease;
pub mod lines;
pub mod lint;
pub mod metrics;
pub mod nodes;
pub mod observe;
pub mod pace;
pub mod pages;
pub mod pause;
pub mod peers;
pub mod plan;
pub mod pools;
mod prefetch;
pub mod probe;
pub mod readings;
pub mod refused;
mod release;
pub mod revision;
mod rollback;
pub mod rollout;
pub mod scaling;
pub mod server;
pub mod standby;
pub mod status;
pub mod telemetry;
pub mod validate;
pub mod verdict;
pub mod vitals;
pub mod watched;
