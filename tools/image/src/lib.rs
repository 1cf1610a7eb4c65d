//! Container image archives from a recipe, without a container engine.
//!
//! A [`Recipe`] names files, directories and how the image starts; [`RootFs`] is the same as a sorted tree of bytes;
//! [`write_archive`] turns the tree into one tar that `ctr`, `docker load`, `podman load` and `skopeo` read. The same
//! inputs give the same bytes: entries are sorted, times are zero, owners are root. Nothing here runs a container,
//! talks to a registry or reads the clock.

#![forbid(unsafe_code)]

mod archive;
mod error;
mod layer;
mod libraries;
mod recipe;
mod reference;
mod root_fs;

pub use archive::{ImageSummary, write_archive};
pub use error::ImageError;
pub use recipe::{Recipe, Variables};
pub use reference::ImageReference;
pub use root_fs::{Entry, RootFs};
