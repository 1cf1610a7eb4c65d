//! From `hf://ORG/MODEL` to a directory of this node: the files a model needs, each verified by its published hash.
//!
//! Decisions are plain functions over values: [`choose`] picks files, [`ledger`] knows which bytes are there, [`evict`]
//! picks what goes, [`backoff`] says how long to wait. [`hub`] speaks with the hub, [`download`] brings bytes, [`cache`]
//! owns the directory. Nothing here knows Kubernetes, an engine or a command line.

pub mod backoff;
pub mod cache;
pub mod choose;
pub mod digest;
pub mod download;
pub mod error;
pub mod evict;
pub mod hub;
pub mod lease;
pub mod ledger;
pub mod order;
pub mod progress;
pub mod source;
mod transport;

pub use self::{
    error::FetchError,
    order::{Fetched, Order, fetch},
    progress::Progress,
    source::HubModel,
};
