//! Paged KV cache bookkeeping: which blocks exist, who holds them, where a token's keys and values lie.
//!
//! Nothing here touches the cached numbers themselves; those belong to the back end's `Ops`.

mod block_hash;
mod block_pool;
mod block_table;
mod layout;
mod lru;
mod marks;

pub use block_hash::BlockHash;
pub use block_pool::{BlockCopy, BlockId, BlockPool};
pub use block_table::{BlockTable, NoFreeBlock};
pub use layout::{KvDtype, KvLayout};
pub use marks::PrefixChange;

pub use stoker_fit::{BLOCK_TOKENS, blocks_for};
