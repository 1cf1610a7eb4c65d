//! The HTTP surface over a simulated engine: scripted text, scripted timing, scripted failures; where numbers count (`relevance`), over
//! tiny models. The real engine behind a real socket is tested in the `tests` crate.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod agent;
mod answers;
mod anthropic;
mod chat;
mod completions;
mod device_time;
mod embedding_deadline;
#[path = "../fetched/mod.rs"]
mod fetched;
mod fields;
mod layouts;
mod life;
mod named_events;
mod page;
mod published;
mod refusals;
mod relevance;
mod responses;
mod resume;
mod tokens;
mod trace;
