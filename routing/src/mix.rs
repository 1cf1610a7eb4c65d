//! A fast hash for text and for who is first at a key. Every gateway computes the same, so it has no secret: who makes two texts
//! collide gets a replica without their prefix, and nothing else.

use std::hash::{BuildHasherDefault, Hasher};

const WORD: u64 = 0x9e37_79b9_7f4a_7c15;
const SPREAD: u64 = 0xd6e8_feb8_6659_fd93;

/// Two words into one: both halves of their product.
pub fn mix(a: u64, b: u64) -> u64 {
    let product = u128::from(a ^ WORD) * u128::from(b ^ SPREAD);
    (product as u64) ^ ((product >> 64) as u64)
}

/// Bytes behind a state.
pub fn hash(state: u64, bytes: &[u8]) -> u64 {
    let words = bytes.chunks_exact(8);
    let mut tail = [0; 8];
    tail[..words.remainder().len()].copy_from_slice(words.remainder());
    let word = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("a chunk of eight"));
    let state = words.fold(state, |state, bytes| mix(state, word(bytes)));
    mix(mix(state, u64::from_le_bytes(tail)), bytes.len() as u64)
}

/// Of maps whose keys are hashes.
pub(crate) type AlreadyHashed = BuildHasherDefault<Hashed>;

/// A key that is a hash is its own.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Hashed(u64);

impl Hasher for Hashed {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, _: &[u8]) {
        unreachable!("keys are of 64 bits")
    }

    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_lengths_and_states_count() {
        let of: [&[u8]; 6] = [b"", b"\0", b"\0\0", b"abcdefgh", b"abcdefgh\0", b"hgfedcba"];
        let hashes: std::collections::HashSet<u64> =
            of.iter().flat_map(|text| [hash(0, text), hash(1, text)]).collect();
        assert_eq!(hashes.len(), 12);
    }

    #[test]
    fn words_that_count_up_are_spread_over_all_bits() {
        let ones: Vec<u32> =
            (0..64).map(|bit| (0..4096u64).filter(|n| mix(7, *n) >> bit & 1 == 1).count() as u32).collect();
        assert!(ones.iter().all(|ones| (1850..2250).contains(ones)), "{ones:?}");
    }
}
