//! Scales of a cache in e4m3, for heads that the checkpoint has none for: found before anyone is served. A prompt of tokens from all over
//! the vocabulary goes through the model; how large what it leaves in the cache is says what the scales have to be. They are
//! powers of two, so that they cost no digits, with room for what is larger.

/// The largest number of e4m3.
const LARGEST: f32 = 448.0;

/// A number may be so many times the largest one of the prompt.
const ROOM: f32 = 8.0;

/// From a scale by which everything is too large for e4m3, or too small, to the next one that is tried.
const FAR: f32 = 4096.0;

/// Prompts in which a scale is found, or none will be: of numbers from 1e-16 to 1e+16.
pub(super) const ROUNDS: usize = 4;

/// Tokens of the prompt.
pub(super) const TOKENS: usize = 256;

/// A head's scale.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Scale {
    /// Of the checkpoint.
    Published(f32),
    /// Tried, or found.
    Measured(f32),
}

impl Scale {
    pub(super) fn value(self) -> f32 {
        match self {
            Self::Published(value) | Self::Measured(value) => value,
        }
    }

    /// After a prompt whose largest number, without the scale, is this; and whether that is the last word.
    pub(super) fn after(self, largest: f32) -> (Self, Found) {
        let Self::Measured(scale) = self else { return (self, Found::Yes) };
        if largest >= LARGEST {
            return (Self::Measured(scale * FAR), Found::No);
        }
        if largest == 0.0 {
            return (Self::Measured(scale / FAR), Found::No);
        }
        (Self::Measured((scale * largest * ROOM / LARGEST).log2().ceil().exp2()), Found::Yes)
    }

    /// Where all rounds found nothing: a head whose numbers are all 0, say.
    pub(super) fn or_one(self, found: Found) -> Self {
        if found == Found::Yes { self } else { Self::Measured(1.0) }
    }
}

/// Whether a scale is found.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Found {
    Yes,
    No,
}

/// Which of the prompts.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Round {
    /// Another one may follow.
    Early,
    /// What is not found in it is 1.
    Last,
}

/// Tokens from all over a vocabulary.
pub(super) fn prompt(n_tokens: usize, vocab: usize) -> Vec<u32> {
    (0..n_tokens).map(|i| (i * vocab / n_tokens) as u32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scale_is_the_power_of_two_by_which_eight_times_the_largest_still_has_a_number() {
        for largest in [0.002, 0.9, 1.0, 7.3, 56.0, 57.0, 440.0] {
            let (scale, found) = Scale::Measured(1.0).after(largest);
            let value = scale.value();
            assert_eq!((found, value.log2().fract()), (Found::Yes, 0.0), "{largest}");
            assert!(
                ROOM * largest / value <= LARGEST && ROOM * largest / (value / 2.0) > LARGEST,
                "{largest}: {value}"
            );
        }
    }

    #[test]
    fn what_is_too_large_or_too_small_for_a_scale_is_tried_with_another_one() {
        for size in [1e-9, 1e-5, 0.3, 900.0, 1e6, 1e9] {
            let mut scale = Scale::Measured(1.0);
            let found = (0..ROUNDS).any(|_| {
                // As it would be stored: numbers below half the smallest are zero.
                let stored = size / scale.value();
                let (next, found) = scale.after(if stored < 0.001 { 0.0 } else { f32::min(stored, LARGEST) });
                scale = next;
                found == Found::Yes
            });
            assert!(found && ROOM * size / scale.value() <= LARGEST * 1.01, "{size}: {scale:?}");
        }
        assert_eq!(Scale::Measured(1.0 / FAR).or_one(Found::No), Scale::Measured(1.0));
    }

    #[test]
    fn what_is_published_stays() {
        assert_eq!(Scale::Published(0.03).after(448.0), (Scale::Published(0.03), Found::Yes));
    }

    #[test]
    fn the_prompt_is_of_the_vocabulary() {
        assert_eq!(prompt(4, 10), [0, 2, 5, 7]);
        assert!(prompt(TOKENS, 128_256).iter().all(|token| *token < 128_256));
    }
}
