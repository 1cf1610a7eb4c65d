//! From a model's source, on a hub, in a bucket, in a registry or on a web server, to a directory of this node: the files a model needs, each held
//! to what is published of it.
//!
//! Decisions are plain functions over values: [`choose`] picks files, [`ledger`] knows which bytes are there, [`evict`]
//! picks what goes, [`backoff`] says how long to wait. [`origin`] speaks with servers, one file for each kind, [`download`]
//! brings bytes, [`cache`] owns the directory. Nothing here knows Kubernetes, an engine or a command line.

pub mod backoff;
pub mod cache;
pub mod choose;
pub mod digest;
pub mod download;
pub mod error;
pub mod evict;
pub mod lease;
pub mod ledger;
pub mod order;
pub mod origin;
pub mod progress;
pub mod source;
mod transport;
mod unpack;

pub use self::{
    error::FetchError,
    order::{Access, Fetched, Order, WebLogin, fetch},
    progress::Progress,
    source::Source,
};
