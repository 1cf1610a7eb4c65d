//! Log-probabilities of tokens beside the parts of an answer that their text became. Parts come later than tokens, and leave marks
//! and white space out: what a part is made of is found by its bytes.

use stoker_engine::PositionLogprobs;

/// Tokens whose part has not come yet.
#[derive(Debug, Default)]
pub(super) struct Aligned {
    pending: Vec<PositionLogprobs>,
}

/// What stands in a text for bytes that are no character.
const REPLACED: &[u8] = "\u{fffd}".as_bytes();

impl Aligned {
    pub(super) fn push(&mut self, positions: Vec<PositionLogprobs>) {
        self.pending.extend(positions);
    }

    /// The tokens of which a part is made. Those before them belong to what is no part. The newest place is taken: a part ends
    /// about where the tokens do.
    pub(super) fn take(&mut self, part: &str) -> Vec<PositionLogprobs> {
        let bytes: Vec<u8> = self.pending.iter().flat_map(|position| position.chosen.bytes.iter().copied()).collect();
        // Nothing is made of no token: not of the one that ends an answer, which is all that is left then.
        if part.is_empty() {
            return Vec::new();
        }
        let (text, places) = as_text(&bytes);
        let is_here = |at: &usize| text[*at..].starts_with(part.as_bytes());
        let Some(start) = (0..text.len()).rev().find(is_here) else { return Vec::new() };
        let (start, end) = (places[start], places[start + part.len()]);
        let (mut at, mut first, mut last) = (0, self.pending.len(), 0);
        for (idx, position) in self.pending.iter().enumerate() {
            let after = at + position.chosen.bytes.len();
            if after > start && at < end {
                (first, last) = (first.min(idx), idx + 1);
            }
            at = after;
        }
        let mut taken: Vec<PositionLogprobs> = self.pending.drain(..last).collect();
        taken.split_off(first.min(taken.len()))
    }
}

/// What bytes are as text, which has another character where they are none, and where in them each byte of that begins, its end as well.
fn as_text(bytes: &[u8]) -> (Vec<u8>, Vec<usize>) {
    let (mut text, mut places, mut at) = (Vec::new(), Vec::new(), 0);
    for chunk in bytes.utf8_chunks() {
        text.extend_from_slice(chunk.valid().as_bytes());
        places.extend(at..at + chunk.valid().len());
        at += chunk.valid().len();
        if !chunk.invalid().is_empty() {
            text.extend_from_slice(REPLACED);
            places.extend([at; REPLACED.len()]);
            at += chunk.invalid().len();
        }
    }
    places.push(at);
    (text, places)
}

#[cfg(test)]
mod tests {
    use stoker_engine::TokenLogprob;

    use super::*;

    fn aligned(texts: &[&str]) -> Aligned {
        let position = |text: &&str| PositionLogprobs {
            chosen: TokenLogprob { token: 1, text: (*text).into(), bytes: text.bytes().collect(), logprob: -1.0 },
            top: Vec::new(),
        };
        Aligned { pending: texts.iter().map(position).collect() }
    }

    fn texts(taken: Vec<PositionLogprobs>) -> Vec<String> {
        taken.into_iter().map(|position| position.chosen.text).collect()
    }

    #[test]
    fn a_part_has_the_tokens_of_its_bytes() {
        let mut whole = aligned(&["<think>", "Th", "in", "</think>", "\n\n", "Hé", "llo", "!"]);
        assert_eq!(texts(whole.take("Thin")), ["Th", "in"]);
        assert_eq!(texts(whole.take("Héllo!")), ["Hé", "llo", "!"]);
        assert!(whole.take("more").is_empty() && whole.pending.is_empty());
    }

    #[test]
    fn bytes_that_are_no_character_have_their_tokens_too() {
        let mut whole = aligned(&["a", "?", "b", "?", "?", "c"]);
        let broken: [(usize, &[u8]); 3] = [(1, b"\xff"), (3, b"\xe2\x82"), (4, b"\xf0")];
        broken.iter().for_each(|(at, bytes)| whole.pending[*at].chosen.bytes = bytes.to_vec());
        assert_eq!(texts(whole.take("a\u{fffd}")), ["a", "?"]);
        assert_eq!(texts(whole.take("b\u{fffd}\u{fffd}")), ["b", "?", "?"]);
        assert_eq!(texts(whole.take("c")), ["c"]);
    }

    #[test]
    fn a_token_is_told_once_also_where_a_part_ends_inside_it() {
        let mut stream = aligned(&["Hel", "lo wor"]);
        assert_eq!(texts(stream.take("Hello")), ["Hel", "lo wor"]);
        stream.push(aligned(&["ld"]).pending);
        assert_eq!(texts(stream.take("ld")), ["ld"]);
        assert_eq!(texts(aligned(&["k", "</think>", "k"]).take("k")), ["k"]);
    }

    #[test]
    fn without_log_probabilities_there_are_none() {
        assert!(aligned(&[]).take("text").is_empty());
        assert!(aligned(&["<|end|>"]).take("").is_empty(), "nor of nothing");
    }
}
