//! Prompts of random tokens from a seed: fresh ones every time, so that a prefix cache finds only what a case repeats.

use rand::{RngExt, SeedableRng, rngs::StdRng};
use stoker_engine::TokenId;

/// An endless supply of prompts for one vocabulary.
#[derive(Debug)]
pub struct Prompts {
    rng: StdRng,
    first: TokenId,
    end: TokenId,
}

impl Prompts {
    /// Tokens are drawn from the middle of the vocabulary: special tokens stand at its ends.
    pub fn new(vocab_size: u32, seed: u64) -> Self {
        Self { rng: StdRng::seed_from_u64(seed), first: vocab_size / 128, end: vocab_size - vocab_size / 16 }
    }

    /// A prompt nobody has seen.
    pub fn fresh(&mut self, tokens: u32) -> Vec<TokenId> {
        (0..tokens).map(|_| self.rng.random_range(self.first..self.end)).collect()
    }

    /// `n` of them.
    pub fn many(&mut self, n: u32, tokens: u32) -> Vec<Vec<TokenId>> {
        (0..n).map(|_| self.fresh(tokens)).collect()
    }

    /// `n` prompts that begin alike and end each with `own` tokens of its own.
    pub fn after(&mut self, prefix: &[TokenId], n: u32, own: u32) -> Vec<Vec<TokenId>> {
        (0..n).map(|_| [prefix, &self.fresh(own)].concat()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_repeats_its_prompts_and_no_prompt_repeats() {
        let (mut a, mut b) = (Prompts::new(4096, 7), Prompts::new(4096, 7));
        let first = a.many(2, 64);
        assert_eq!(first, b.many(2, 64));
        assert_ne!(first[0], first[1]);
        assert!(first.concat().iter().all(|token| (32..3840).contains(token)));
    }

    #[test]
    fn prompts_after_a_prefix_share_it_and_nothing_else() {
        let mut prompts = Prompts::new(128_256, 1);
        let prefix = prompts.fresh(2048);
        let shared = prompts.after(&prefix, 2, 128);
        assert!(shared.iter().all(|prompt| prompt.len() == 2176 && prompt.starts_with(&prefix)));
        assert_ne!(shared[0][2048..], shared[1][2048..]);
    }
}
