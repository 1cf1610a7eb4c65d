//! Log-probabilities of tokens beside the parts of an answer that their text became. Parts come later than tokens, and leave marks
//! and white space out: what a part is made of is found by its bytes.

use stoker_engine::PositionLogprobs;

/// Tokens whose part has not come yet.
#[derive(Debug, Default)]
pub(super) struct Aligned {
    pending: Vec<PositionLogprobs>,
}

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
        let is_here = |at: &usize| bytes[*at..].starts_with(part.as_bytes());
        let Some(start) = (0..bytes.len()).rev().find(is_here) else { return Vec::new() };
        let end = start + part.len();
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
