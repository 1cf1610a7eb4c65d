//! Bytes of a completion to whole characters, piece by piece. Knows nothing of tokens or stop strings.

/// Holds back the bytes of a character that is not complete yet.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Detokenizer {
    undecided: Vec<u8>,
}

impl Detokenizer {
    /// Adds bytes; returns the text that became certain. Bytes that can never become a character are U+FFFD.
    pub fn push(&mut self, bytes: &[u8]) -> String {
        self.undecided.extend_from_slice(bytes);
        let mut text = String::new();
        let undecided = std::mem::take(&mut self.undecided);
        let mut chunks = undecided.utf8_chunks().peekable();
        while let Some(chunk) = chunks.next() {
            text.push_str(chunk.valid());
            let is_last = chunks.peek().is_none();
            if is_last && may_become_a_character(chunk.invalid()) {
                self.undecided = chunk.invalid().to_vec();
            } else if !chunk.invalid().is_empty() {
                text.push(char::REPLACEMENT_CHARACTER);
            }
        }
        text
    }

    /// Ends the text: an incomplete character is U+FFFD.
    pub fn finish(&mut self) -> String {
        String::from_utf8_lossy(&std::mem::take(&mut self.undecided)).into_owned()
    }
}

/// Whether these bytes are the proper beginning of a UTF-8 sequence.
fn may_become_a_character(bytes: &[u8]) -> bool {
    match std::str::from_utf8(bytes) {
        Ok(_) => false,
        Err(error) => error.error_len().is_none(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_character_split_over_tokens_appears_once_it_is_whole() {
        let mut detokenizer = Detokenizer::default();
        let fire = "🔥".as_bytes();
        assert_eq!(detokenizer.push(&fire[..1]), "");
        assert_eq!(detokenizer.push(&fire[1..3]), "");
        assert_eq!(detokenizer.push(&[fire[3], b'!']), "🔥!");
        assert_eq!(detokenizer.finish(), "");
    }

    #[test]
    fn bytes_that_cannot_become_a_character_are_replaced_at_once() {
        let mut detokenizer = Detokenizer::default();
        assert_eq!(detokenizer.push(b"a\xFFb"), "a\u{FFFD}b");
        assert_eq!(detokenizer.push(b"\xE2\x28"), "\u{FFFD}(");
    }

    #[test]
    fn an_incomplete_character_is_replaced_at_the_end() {
        let mut detokenizer = Detokenizer::default();
        assert_eq!(detokenizer.push(b"x\xF0\x9F"), "x");
        assert_eq!(detokenizer.finish(), "\u{FFFD}");
    }

    #[test]
    fn pieces_of_any_size_give_the_same_text() {
        let text = "naïve – 日本語 🔥🔥 \u{10FFFF}";
        for size in 1..8 {
            let mut detokenizer = Detokenizer::default();
            let mut joined: String = text.as_bytes().chunks(size).map(|piece| detokenizer.push(piece)).collect();
            joined.push_str(&detokenizer.finish());
            assert_eq!(joined, text, "pieces of {size} bytes");
        }
    }
}
