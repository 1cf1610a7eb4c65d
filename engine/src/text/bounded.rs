//! Encoding of a prompt that may be far too long: what surely does not fit is refused after its beginning was read, and
//! whoever no longer wants the tokens can say so on the way. Bounds the work, not the answer: a text that fits has the tokens
//! that `Tokenizer::encode` gives it.

use super::{Tokenizer, TokenizerError};
use crate::request::TokenId;

/// A text with fewer bytes than this for each token that fits is encoded as a whole. English has 4 to 5.
const LIKELY_BYTES_PER_TOKEN: usize = 6;
/// Bytes of a longer text that are read at a time: about a millisecond's work. A short context is read beyond by that at most.
pub const SLICE_BYTES: usize = 4 * 1024;
/// Slices of a text may have more tokens together than the text: a word cut in two, a begin token each. So many of a
/// hundred tokens are not believed; with cuts 4 KiB apart it is a fraction of one.
const PERCENT_DISBELIEVED: usize = 10;

/// How far encoding goes.
pub struct EncodeLimit<'a> {
    /// Tokens that may be of use.
    pub max_tokens: usize,
    /// Whether nobody wants the tokens any more.
    pub is_abandoned: &'a dyn Fn() -> bool,
}

impl EncodeLimit<'_> {
    /// Whether a text of so many bytes is likely to have no more tokens than that.
    pub fn is_likely_within(n_bytes: usize, max_tokens: usize) -> bool {
        n_bytes <= max_tokens.saturating_mul(LIKELY_BYTES_PER_TOKEN)
    }
}

/// Why a text has no tokens.
#[derive(Debug, thiserror::Error)]
pub enum EncodeError {
    /// More tokens than may be of use.
    #[error("the text has at least {at_least} tokens")]
    TooLong {
        /// Tokens of the part that was read, less what its cuts may have added.
        at_least: usize,
    },
    /// Nobody wants them any more.
    #[error("the text was abandoned")]
    Abandoned,
    /// It cannot be expressed.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
}

impl Tokenizer {
    /// Tokens of a text, or why it was given up. A text that is refused is longer than the limit; one that is only a little
    /// longer may be encoded, and its length is the caller's to check.
    pub fn encode_within(
        &self,
        text: &str,
        add_special: bool,
        limit: &EncodeLimit<'_>,
    ) -> Result<Vec<TokenId>, EncodeError> {
        self.refuse_too_long(&[text], limit)?;
        if (limit.is_abandoned)() {
            return Err(EncodeError::Abandoned);
        }
        Ok(self.encode(text, add_special)?)
    }

    /// Refuses texts that are too long together, whatever stands between them: counts the tokens of slices until they are too
    /// many. Texts that are likely to fit are not looked at.
    pub fn refuse_too_long(&self, texts: &[&str], limit: &EncodeLimit<'_>) -> Result<(), EncodeError> {
        let n_bytes = texts.iter().map(|text| text.len()).sum();
        self.refuse_too_many(n_bytes, texts.iter().flat_map(|text| slices(text)), limit)
    }

    /// The same of texts that come in slices, each of about [`SLICE_BYTES`], and have at most `n_bytes` together.
    pub fn refuse_too_many(
        &self,
        n_bytes: usize,
        slices: impl Iterator<Item = impl AsRef<str>>,
        limit: &EncodeLimit<'_>,
    ) -> Result<(), EncodeError> {
        if EncodeLimit::is_likely_within(n_bytes, limit.max_tokens) {
            return Ok(());
        }
        let mut n_counted = 0;
        for slice in slices {
            if (limit.is_abandoned)() {
                return Err(EncodeError::Abandoned);
            }
            n_counted += self.encode(slice.as_ref(), false)?.len();
            let at_least = n_counted - n_counted * PERCENT_DISBELIEVED / 100;
            if at_least > limit.max_tokens {
                return Err(EncodeError::TooLong { at_least });
            }
        }
        Ok(())
    }
}

/// The text in pieces of about `SLICE_BYTES`, none of which cuts a character.
fn slices(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        let (slice, behind) = rest.split_at(rest.floor_char_boundary(SLICE_BYTES));
        rest = behind;
        (!slice.is_empty()).then_some(slice)
    })
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    const WANTED: &dyn Fn() -> bool = &|| false;

    #[test]
    fn slices_add_up_and_cut_no_character() {
        let text = "né日🔥".repeat(SLICE_BYTES);
        assert_eq!(slices(&text).collect::<String>(), text);
        assert!(slices(&text).all(|slice| slice.len() <= SLICE_BYTES));
        assert_eq!(slices("").count(), 0);
    }

    #[test]
    fn a_text_that_cannot_fit_is_refused_after_its_beginning() {
        let text = "x".repeat(1 << 20);
        let n_asked = Cell::new(0);
        let is_abandoned = || {
            n_asked.set(n_asked.get() + 1);
            false
        };
        let limit = EncodeLimit { max_tokens: 20_000, is_abandoned: &is_abandoned };
        let refused = Tokenizer::bytes().encode_within(&text, true, &limit).unwrap_err();
        assert!(matches!(refused, EncodeError::TooLong { at_least } if at_least > 20_000 && at_least <= 1 << 20));
        assert_eq!(n_asked.replace(0), 6, "six slices of the 256 were read");
        let short = "x".repeat(100);
        let refused = Tokenizer::bytes().refuse_too_long(&[&short, &text, &text], &limit).unwrap_err();
        assert!(matches!(refused, EncodeError::TooLong { at_least } if at_least > 20_000));
        assert_eq!(n_asked.replace(0), 7, "seven of 513");
        Tokenizer::bytes().refuse_too_long(&[short.as_str(); 1000], &limit).unwrap();
        assert_eq!(n_asked.get(), 0, "what is likely to fit costs nothing");
    }

    #[test]
    fn a_text_that_fits_has_the_tokens_it_always_has() {
        let tokenizer = Tokenizer::bytes();
        for (text, max_tokens) in [("short", 5), ("a little longer than fits", 5)] {
            let tokens = tokenizer.encode_within(text, true, &EncodeLimit { max_tokens, is_abandoned: WANTED });
            assert_eq!(tokens.unwrap(), tokenizer.encode(text, true).unwrap());
        }
    }

    #[test]
    fn nobody_is_served_who_has_left() {
        for text in ["short".to_owned(), "x".repeat(1 << 20)] {
            let limit = EncodeLimit { max_tokens: 1000, is_abandoned: &|| true };
            let ended = Tokenizer::bytes().encode_within(&text, true, &limit);
            assert!(matches!(ended, Err(EncodeError::Abandoned)), "{ended:?}");
        }
    }
}
