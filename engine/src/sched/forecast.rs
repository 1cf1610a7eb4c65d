//! How full the cache becomes if a sequence is let in: at the moment each running one ends, those that still run have grown as
//! much as that took. The worst of these moments must fit, else somebody would be preempted later and computed again.
//! Pure; what sequences still become is an estimate, so preemption remains, and is rare.

use super::Lengths;
use crate::{kv::BLOCK_TOKENS, sequence::Sequence};

/// A sequence, as far as the cache is concerned.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Growing {
    /// Tokens whose blocks are its own.
    pub(super) own_tokens: usize,
    /// Tokens that it still gets.
    pub(super) more: usize,
}

impl Growing {
    /// What becomes of a sequence. `at_first` is what a completion is taken for before any has ended.
    pub(super) fn new(sequence: &Sequence, lengths: &Lengths, at_first: usize, max_model_len: usize) -> Self {
        let (len, generated) = (sequence.len(), sequence.n_generated());
        let stop = &sequence.request.stop;
        let most = (stop.max_tokens as usize).saturating_sub(generated).min(max_model_len.saturating_sub(len));
        // One that is longer than what is known goes on for half as long again.
        let unknown = at_first.saturating_sub(generated).max(generated / 2);
        let expected = lengths.expected_more(generated).unwrap_or(unknown);
        let least = (stop.min_tokens as usize).saturating_sub(generated);
        Self { own_tokens: len - sequence.n_found, more: expected.max(least).max(BLOCK_TOKENS).min(most) }
    }
}

/// Blocks that these hold together at the worst moment, beside those they share.
pub(super) fn peak_blocks(mut growing: Vec<Growing>) -> usize {
    growing.sort_unstable_by_key(|one| one.more);
    let mut own_tokens: usize = growing.iter().map(|one| one.own_tokens).sum();
    let mut peak = 0;
    for (one, n_left) in growing.iter().zip((1..=growing.len()).rev()) {
        // When `one` ends, all that are left have grown like it; the last block of each is half empty.
        peak = peak.max((own_tokens + n_left * (one.more + BLOCK_TOKENS / 2)).div_ceil(BLOCK_TOKENS));
        own_tokens -= one.own_tokens;
    }
    peak
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peak(growing: &[(usize, usize)]) -> usize {
        peak_blocks(growing.iter().map(|&(own_tokens, more)| Growing { own_tokens, more }).collect())
    }

    #[test]
    fn the_peak_is_where_most_is_held_at_once() {
        assert_eq!(peak(&[]), 0);
        assert_eq!(peak(&[(160, 160)]), 21, "10 blocks, 10 more and half of one");
        // The first gives its 100 blocks back before the second has grown.
        assert_eq!(peak(&[(1600, 16), (16, 1600)]), 104);
        assert_eq!(peak(&[(16, 1600), (1600, 16)]), 104, "in whatever order they are named");
        assert_eq!(peak(&[(16, 1600), (16, 1600)]), 203);
    }
}
