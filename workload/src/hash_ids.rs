//! What a prompt begins with, as names of its blocks: what traces publish in place of the text. Knows no cache.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// Tokens of a block that has a name; the last one of a prompt may have fewer.
pub const HASH_BLOCK_TOKENS: u32 = 512;

/// Names of a prompt's blocks, the first one first: the same name is the same block behind the same blocks. None where a trace
/// does not say what its prompts share.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(from = "Vec<u64>", into = "Vec<u64>")]
pub struct HashIds(Option<Arc<[u64]>>);

impl HashIds {
    /// The names.
    pub fn as_slice(&self) -> &[u64] {
        self.0.as_deref().unwrap_or_default()
    }

    /// Whether nothing is said.
    pub fn is_empty(&self) -> bool {
        self.0.is_none()
    }

    /// Names in a copy of the trace: prompts of one copy share what these share, and nothing with other copies. Copy 0 is the trace.
    #[must_use]
    pub fn in_copy(&self, copy: u32) -> Self {
        let apart = u64::from(copy).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.as_slice().iter().map(|id| id.wrapping_add(apart)).collect::<Vec<_>>().into()
    }
}

impl From<Vec<u64>> for HashIds {
    fn from(ids: Vec<u64>) -> Self {
        Self((!ids.is_empty()).then(|| ids.into()))
    }
}

impl From<HashIds> for Vec<u64> {
    fn from(ids: HashIds) -> Self {
        ids.as_slice().to_vec()
    }
}
