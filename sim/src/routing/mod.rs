//! Where requests are sent, and what comes of it: rules of ours and of others before the same simulated replicas, which cache
//! prefixes by the block as the engine does. Virtual time; every number follows from the load and a seed.

mod fleet;
mod load;
mod prompt;
mod replica;
mod rules;

pub use fleet::{Outcome, Percentiles, Setting, run, shared_cache_hits};
pub use load::{Kind, Load};
pub use rules::{Hears, Rule, RuleName};
