//! From a model's source, on a hub, in a bucket, in a registry or on a web server, and from replicas that have it, to a directory of this node: the
//! files a model needs, each held to what is published of it.
//!
//! Decisions are plain functions over values: [`choose`] picks files, [`ledger`] knows which bytes are there, [`supply`] says who is asked for
//! the next ones, [`evict`] picks what goes, [`backoff`] says how long to wait. [`origin`] speaks with servers, one file for each kind,
//! [`suppliers`] with replicas, [`download`] brings bytes (a file's own are `blob.rs`'s), [`shelf`] is what may be given to others, [`cache`] owns the directory,
//! [`resident`] keeps files of it in memory. Nothing here knows Kubernetes, an engine or a command line.

#![deny(unsafe_code)]

pub mod backoff;
mod blob;
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
pub mod resident;
pub mod shelf;
pub mod source;
pub mod suppliers;
pub mod supply;
mod transport;
mod unpack;

pub use self::{
    error::FetchError,
    order::{Access, Fetched, Order, WebLogin, fetch},
    progress::Progress,
    shelf::Shelf,
    source::Source,
    suppliers::{Giver, Suppliers},
};
