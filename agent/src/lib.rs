//! The node agent: one process that serves one replica over an OpenAI-compatible HTTP API.
//!
//! `config` says what to run, `startup` loads it, `replica` is what runs, `http` is how clients reach it,
//! `lifecycle`, `intent` and `admit` decide, `shutdown` ends it. The agent never talks to the Kubernetes
//! API.

pub mod accounts;
pub mod admit;
pub mod answer;
pub mod args;
pub mod builtin;
pub mod chat_template;
pub mod config;
mod dead_end;
pub mod fetch;
pub mod grammars;
pub mod health;
pub mod http;
pub mod identity;
pub mod intent;
mod keep;
pub mod kv_log;
pub mod lifecycle;
pub mod metrics;
pub mod replica;
pub mod shutdown;
pub mod startup;
pub mod ticket;
pub mod wording;
