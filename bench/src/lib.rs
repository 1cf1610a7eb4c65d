//! The bench of the engine: cases (`case`) on models of named shapes (`shape`, `checkpoint`), asked of the engine and of its
//! peers alternately (`session`), noted as figures in the one form of docs/benchmarks; and what its steps cost beside what it learned
//! of them (`curve`). Judges nothing.

pub mod agent;
pub mod autotune;
pub mod case;
pub mod checkpoint;
pub mod constrained;
pub mod curve;
pub mod gguf;
pub mod in_process;
pub mod masks;
pub mod mix;
pub mod model;
pub mod peer_log;
pub mod peers;
pub mod probe;
pub mod program;
pub mod prompts;
pub mod quality;
pub mod quantised;
pub mod reading;
pub mod report;
pub mod sampled;
pub mod schemas;
pub mod session;
pub mod shape;
pub mod stoker;
pub mod table;
