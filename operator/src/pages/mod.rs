//! Pages for people, on a port of their own: the fleet, and each deployment. Reads only, writes nothing anywhere: what is shown is in
//! the caches, the readings and the ledger that rounds look at, too. Agents are asked once, by an operator that begins to lead, for
//! what was before.
//!
//! [`Board`] is what pages look at; [`serve`] answers browsers. What pages look like is `stoker-pages`'.

mod board;
mod deployment;
mod history;
mod live;
mod recall;
mod server;
mod summary;
mod told;

pub use self::{
    board::{Board, Sources},
    server::serve,
};
