//! Which bytes of a file are there: chunks that are fetched side by side, each filled from its beginning. Pure; how it is
//! kept on disk is [`crate::download`]'s.

use std::ops::Range;

/// Bytes of one request at most. Small enough that several connections share one file, large enough that asking is free.
pub const CHUNK_BYTES: u64 = 32 << 20;

/// See the module.
///
/// ```text
/// chunk      0          1          2
/// file   [######....][##########][#####]    written = [6, 10, 5], prefix = 6
/// ```
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Ledger {
    size: u64,
    chunk_bytes: u64,
    /// Bytes that are there, from the beginning of each chunk.
    written: Vec<u64>,
    /// The first chunk that is not whole.
    first_open: usize,
}

impl Ledger {
    /// Nothing is there of a file of `size` bytes.
    pub fn new(size: u64, chunk_bytes: u64) -> Self {
        let n_chunks =
            usize::try_from(size.div_ceil(chunk_bytes)).expect("a file has fewer chunks than memory has bytes");
        Self { size, chunk_bytes, written: vec![0; n_chunks], first_open: 0 }
    }

    /// As it was kept; counts that cannot be are taken for nothing.
    pub fn resumed(size: u64, chunk_bytes: u64, kept: &[u64]) -> Self {
        let mut ledger = Self::new(size, chunk_bytes);
        for (chunk_idx, count) in kept.iter().enumerate().take(ledger.written.len()) {
            let range = ledger.chunk(chunk_idx);
            ledger.written[chunk_idx] = if *count <= range.end - range.start { *count } else { 0 };
        }
        ledger.advance();
        ledger
    }

    /// Number of chunks.
    pub fn n_chunks(&self) -> usize {
        self.written.len()
    }

    /// The chunk's bytes that are not there yet.
    pub fn missing(&self, chunk_idx: usize) -> Range<u64> {
        let Range { start, end } = self.chunk(chunk_idx);
        start + self.written[chunk_idx]..end
    }

    /// Bytes of the chunk that are there.
    pub fn written(&self, chunk_idx: usize) -> u64 {
        self.written[chunk_idx]
    }

    /// Notes that the chunk has `count` more bytes, right behind those it has.
    pub fn add(&mut self, chunk_idx: usize, count: u64) {
        assert!(count <= self.missing_bytes(chunk_idx), "no more bytes than a chunk has");
        self.written[chunk_idx] += count;
        self.advance();
    }

    /// Bytes from the beginning of the file that are there without a gap.
    pub fn prefix(&self) -> u64 {
        self.written
            .get(self.first_open)
            .map_or(self.size, |written| self.first_open as u64 * self.chunk_bytes + written)
    }

    /// Bytes that are there.
    pub fn present(&self) -> u64 {
        self.written.iter().sum()
    }

    /// True when all are.
    pub fn is_complete(&self) -> bool {
        self.first_open == self.written.len()
    }

    fn missing_bytes(&self, chunk_idx: usize) -> u64 {
        let Range { start, end } = self.missing(chunk_idx);
        end - start
    }

    fn chunk(&self, chunk_idx: usize) -> Range<u64> {
        let start = chunk_idx as u64 * self.chunk_bytes;
        start..(start + self.chunk_bytes).min(self.size)
    }

    fn advance(&mut self) {
        while self.first_open < self.written.len() && self.missing(self.first_open).is_empty() {
            self.first_open += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn chunks_cover_the_file_and_the_last_one_is_short() {
        let ledger = Ledger::new(25, 10);
        let missing: Vec<_> = (0..ledger.n_chunks()).map(|idx| ledger.missing(idx)).collect();
        assert_eq!(missing, [0..10, 10..20, 20..25]);
        assert!(Ledger::new(0, 10).is_complete(), "an empty file is there at once");
    }

    #[test]
    fn the_prefix_ends_at_the_first_gap() {
        let mut ledger = Ledger::new(25, 10);
        ledger.add(1, 10);
        assert_eq!((ledger.prefix(), ledger.present()), (0, 10));
        ledger.add(0, 6);
        assert_eq!(ledger.prefix(), 6);
        ledger.add(0, 4);
        assert_eq!((ledger.prefix(), ledger.missing(2)), (20, 20..25));
    }

    #[test]
    fn counts_that_cannot_be_are_nothing() {
        let ledger = Ledger::resumed(25, 10, &[10, 11, 5, 7, 7]);
        assert_eq!((ledger.prefix(), ledger.present()), (10, 15));
    }

    proptest! {
        /// Whoever dies when: what is asked for next is never a byte that was noted, and in the end all bytes are there.
        #[test]
        fn no_byte_is_missing_twice(size in 1..500_u64, steps in prop::collection::vec((any::<prop::sample::Index>(), 1..40_u64, any::<bool>()), 1..200)) {
            let mut ledger = Ledger::new(size, 32);
            let mut there = vec![false; usize::try_from(size).unwrap()];
            for (place, count, dies) in steps {
                let idx = place.index(ledger.n_chunks());
                let missing = ledger.missing(idx);
                let count = count.min(missing.end - missing.start);
                for at in missing.start..missing.start + count {
                    prop_assert!(!std::mem::replace(&mut there[usize::try_from(at).unwrap()], true));
                }
                ledger.add(idx, count);
                if dies {
                    ledger = Ledger::resumed(size, 32, &ledger.written.clone());
                }
                prop_assert_eq!(ledger.present(), there.iter().filter(|at| **at).count() as u64);
                let prefix = there.iter().position(|at| !at).unwrap_or(there.len()) as u64;
                prop_assert_eq!(ledger.prefix(), prefix);
            }
            for idx in 0..ledger.n_chunks() {
                let missing = ledger.missing(idx);
                ledger.add(idx, missing.end - missing.start);
            }
            prop_assert!(ledger.is_complete());
        }
    }
}
