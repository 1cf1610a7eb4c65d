//! What a full KV block holds, by name (D11): a hash over its tokens and the name of the block before it. Two blocks of
//! the same name hold the same keys and values, whichever request computed them.
//!
//! SHA-256 and not a faster hash: whoever could make two prefixes collide would read another one's continuation.

use sha2::{Digest, Sha256};

use super::BLOCK_TOKENS;
use crate::request::TokenId;

/// The name of a full block and all before it: the first 128 bits of the hash.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct BlockHash(u128);

impl BlockHash {
    /// What the first block of a sequence follows.
    pub const ROOT: Self = Self(0);

    /// What the first block of a sequence follows whose blocks only those with the same salt may find.
    pub fn root_of(salt: &str) -> Self {
        let mut hash = Sha256::new();
        hash.update(b"salt");
        hash.update(salt);
        Self::first_half(hash)
    }

    /// The name of the block of these tokens after `self`. Tokens and parent are hashed as little-endian numbers.
    pub fn then(self, tokens: &[TokenId]) -> Self {
        assert_eq!(tokens.len(), BLOCK_TOKENS, "only full blocks have names");
        let mut hash = Sha256::new();
        hash.update(self.0.to_le_bytes());
        let mut bytes = [0; BLOCK_TOKENS * size_of::<TokenId>()];
        for (bytes, token) in bytes.chunks_exact_mut(size_of::<TokenId>()).zip(tokens) {
            bytes.copy_from_slice(&token.to_le_bytes());
        }
        hash.update(bytes);
        Self::first_half(hash)
    }

    fn first_half(hash: Sha256) -> Self {
        let digest: [u8; 32] = hash.finalize().into();
        let (first, _) = digest.split_first_chunk().expect("a digest has 32 bytes");
        Self(u128::from_le_bytes(*first))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_depends_on_every_token_and_on_what_came_before() {
        let block: Vec<TokenId> = (0..16).collect();
        let name = BlockHash::ROOT.then(&block);
        assert_eq!(name, BlockHash::ROOT.then(&block));
        assert_ne!(name, name.then(&block));
        for idx in 0..BLOCK_TOKENS {
            let mut other = block.clone();
            other[idx] += 1 << 24;
            assert_ne!(BlockHash::ROOT.then(&other), name, "token {idx}");
        }
    }

    #[test]
    fn every_salt_has_names_of_its_own() {
        let block: Vec<TokenId> = (0..16).collect();
        let [a, again, b] = ["a", "a", "b"].map(|salt| BlockHash::root_of(salt).then(&block));
        assert_eq!(a, again);
        assert!(a != b && a != BlockHash::ROOT.then(&block));
        assert_ne!(BlockHash::root_of(""), BlockHash::ROOT);
    }

    #[test]
    fn names_are_the_first_half_of_sha256() {
        // python3 -c 'import hashlib,struct; print(hashlib.sha256(bytes(16)+struct.pack("<16I",*range(16))).hexdigest())'
        let name = BlockHash::ROOT.then(&(0..16).collect::<Vec<_>>());
        let expected = "41f37273f5dcb9d417f8541c20d382ed";
        let found: String = name.0.to_le_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(found, expected);
    }
}
