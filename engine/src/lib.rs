//! The inference engine: paged KV cache, continuous batching, token sampling, one process-wide owner thread.
//!
//! It knows no HTTP and no Kubernetes. A request goes `EngineHandle::submit` → `schedule` → `Executor::launch` and
//! `finish` → `resolve` → ledger → `RequestStream`. Decisions (`sched`, `memory`, `sample`) are plain functions over values.

#![deny(unsafe_code)]

pub mod config;
pub mod constraint;
mod each;
mod engine;
mod engine_loop;
mod events;
pub mod exec;
pub mod grammar;
mod grammar_threads;
mod handle;
mod host;
mod info;
pub mod kv;
mod latency;
mod ledger;
mod matchers;
mod metrics;
pub mod model;
mod modules;
pub mod ops;
mod output;
mod pool;
mod pooling;
mod prefix_news;
mod relevance;
mod request;
mod resume;
pub mod sample;
pub mod sched;
mod sequence;
pub mod text;
pub mod token_filter;
mod wakefulness;

pub use config::{
    DeviceChoice, EngineConfig, EngineLimits, KvCacheDtype, LimitError, ModelFiles, Quantization, StepSizes,
};
pub use engine::{Engine, EngineParts, LoadedModel, StartError};
pub use handle::{EngineHandle, RequestStream};
pub use info::{GenerationDefaults, ModelInfo};
pub use metrics::{EngineLoad, FinishedCounts, RequestSample, Samples, StepTimes};
pub use model::{ChatTemplates, ModelError};
pub use pooling::{EmbeddingForm, Pooling};
pub use prefix_news::PrefixNews;
pub use relevance::{Activation, LogitScore, Relevance};
pub use request::*;
pub use sample::choose;
pub use sequence::Sequence;
pub use stoker_fit::memory::{DeviceMemory, Fix, Fixes, MemoryBudget, MemoryError, MemoryNeeds, MemoryPlan};
pub use text::{EncodeError, EncodeLimit, SLICE_BYTES, Tokenizer, TokenizerError};
