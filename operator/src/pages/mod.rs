//! Pages for people, on a port of their own: the fleet, and each deployment. Reads only, writes nothing anywhere, asks nobody: what
//! is shown is in the caches, the readings and the ledger that rounds look at, too.
//!
//! [`Board`] is what pages look at; [`serve`] answers browsers. What pages look like is `stoker-pages`'.

mod board;
mod deployment;
mod history;
mod live;
mod server;
mod summary;
mod told;

pub use self::{
    board::{Board, Sources},
    server::serve,
};
