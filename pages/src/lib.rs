//! Pages for people: views in, HTML out. Owns the look that all of them share (`layout`, `assets`) and what browsers are told
//! about them (`headers`).
//!
//! Does no I/O, reads no clock and knows no type of operator, agent or gateway: who serves a page makes its view. Markup is
//! checked when this crate is compiled, and everything in it is escaped unless it says `PreEscaped`. There is no inline style and
//! no inline script anywhere, because [`headers`] forbid both.

pub mod assets;
pub mod deployment;
pub mod fleet;
pub mod headers;
pub mod layout;
pub mod live;
pub mod playground;
pub mod report;
pub mod view;
pub mod words;

pub use maud::{Markup, PreEscaped, html};
