//! Which replica a request goes to. [`route`] is one pure function of what is asked, what is known of each replica and which of
//! them hold how much of its beginning; [`PrefixIndex`] remembers the last. Hashes text, never tokens: the gateway has no
//! tokenizer. Reads no clock, sends nothing, knows no HTTP.

mod chain;
mod held;
mod index;
mod load;
mod mix;
mod route;

pub use chain::{Chain, Mark};
pub use held::Hearing;
pub use index::{Capacity, Matches, PrefixIndex, Sent, Source};
pub use load::{Load, Own, Reported, load};
pub use mix::{hash, mix};
pub use route::{Ask, Choice, Reason, ReplicaView, Rules, Score, Standing, Terms, route, scores};

/// Bytes of text in a token, about: what a mean of English and code has. Only ratios of it matter.
pub const BYTES_PER_TOKEN: u32 = 4;
