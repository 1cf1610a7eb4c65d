//! Where requests are sent, and what comes of it: rules of ours and of others before the same simulated replicas, which cache
//! prefixes by the block as the engine does. Virtual time; every number follows from the load and a seed. Rules know nothing of that:
//! whoever has replicas tells them what these said and what became of requests.

mod cache;
mod fleet;
mod load;
mod prompt;
mod replica;
mod rules;

pub use cache::Cache;
pub use fleet::{Outcome, Percentiles, Setting, run, shared_cache_hits};
pub use load::{Kind, Load};
pub use prompt::{BLOCK_TOKENS, Prompt};
pub use rules::{Hears, Rule, RuleName, Said};
