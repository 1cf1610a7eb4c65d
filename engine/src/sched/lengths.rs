//! How long completions become: what those that ended tell of one that goes on. Forgets slowly, so that what clients send today
//! counts more than what they sent an hour ago.

/// Lengths in one bucket differ by less than a quarter.
const N_BUCKETS: usize = 64;
/// Completions after which all before count half.
const HALF_LIFE: f64 = 512.0;
/// Completions of which at least so many must have been longer for them to tell anything.
const MIN_KNOWN: f64 = 4.0;

/// The lengths of ended completions.
#[derive(Clone, Debug, PartialEq)]
pub struct Lengths {
    /// Per bucket: how many ended, and how many tokens they had together, by weight.
    buckets: [(f64, f64); N_BUCKETS],
    /// The same of each bucket and all above it.
    at_least: [(f64, f64); N_BUCKETS],
    n_ended: f64,
}

impl Default for Lengths {
    fn default() -> Self {
        Self { buckets: [(0.0, 0.0); N_BUCKETS], at_least: [(0.0, 0.0); N_BUCKETS], n_ended: 0.0 }
    }
}

impl Lengths {
    /// A completion ended by itself with so many tokens.
    pub fn note(&mut self, n_tokens: usize) {
        let (n, tokens) = &mut self.buckets[bucket_of(n_tokens)];
        (*n, *tokens) = (*n + 1.0, *tokens + n_tokens as f64);
        self.n_ended += 1.0;
        if self.n_ended >= HALF_LIFE {
            self.buckets.iter_mut().for_each(|(n, tokens)| (*n, *tokens) = (*n / 2.0, *tokens / 2.0));
            self.n_ended /= 2.0;
        }
        let mut above = (0.0, 0.0);
        for (bucket, at_least) in self.buckets.iter().zip(&mut self.at_least).rev() {
            above = (above.0 + bucket.0, above.1 + bucket.1);
            *at_least = above;
        }
    }

    /// How many tokens more a completion of `n_tokens` has, on average; `None` if too few were that long.
    pub fn expected_more(&self, n_tokens: usize) -> Option<usize> {
        let (n, tokens) = self.at_least[bucket_of(n_tokens)];
        (n >= MIN_KNOWN).then(|| ((tokens / n) as usize).saturating_sub(n_tokens))
    }
}

/// Ten buckets for every tenfold; what is longer than any context is in the last.
fn bucket_of(n_tokens: usize) -> usize {
    ((((n_tokens + 1) as f64).log10() * 10.0) as usize).min(N_BUCKETS - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_completion_still_becomes_depends_on_how_long_it_is() {
        let mut lengths = Lengths::default();
        (0..3).for_each(|_| lengths.note(10));
        assert_eq!(lengths.expected_more(0), None, "too few to tell");
        (0..97).for_each(|_| lengths.note(10));
        (0..100).for_each(|_| lengths.note(1010));
        assert_eq!(lengths.expected_more(0), Some(510));
        assert_eq!(lengths.expected_more(100), Some(910), "the short ones have ended by then");
        assert_eq!(lengths.expected_more(2000), None, "nobody was that long");
    }

    #[test]
    fn what_is_long_ago_counts_less() {
        let mut lengths = Lengths::default();
        (0..5000).for_each(|_| lengths.note(1000));
        (0..2000).for_each(|_| lengths.note(100));
        assert!(lengths.expected_more(0).unwrap() < 200, "{:?}", lengths.expected_more(0));
    }

    #[test]
    fn every_length_has_a_bucket() {
        assert_eq!((bucket_of(0), bucket_of(u32::MAX as usize)), (0, N_BUCKETS - 1));
        assert!((0..2_000_000).step_by(37).map(bucket_of).is_sorted());
    }
}
