//! A prompt's beginnings, each as one hash: two prompts that begin alike have the same marks up to where they part.
//!
//! Marks lie 256 bytes (some 64 tokens, four KV blocks) apart at first and farther the longer the text, by a sixteenth of what lies
//! before. So a prompt of 80 KB has some 60 marks, not 320, and at most a sixteenth of what two prompts share is not seen:
//!
//! ```text
//! 0    256   512  ...  4096   4352 (+256) ...  8192    8704 (+512)
//! ├─────┼─────┼─────────┼──────┼────────────────┼───────┼───
//! ```

use crate::{
    BYTES_PER_TOKEN,
    mix::{hash, mix},
};

const FIRST_STEP: u32 = 256;
/// A step is this part of the text before it, in whole first steps.
const PART: u32 = 16;

/// How many times as long a prompt's next key is.
const KEY_STEP: u32 = 8;

/// The end of a beginning.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Mark {
    /// Of all bytes up to `end`, and of what they were asked of.
    pub hash: u64,
    /// In bytes.
    pub end: u32,
}

/// See the module.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Chain {
    marks: Vec<Mark>,
    n_bytes: u32,
    key: u64,
    whole: u64,
}

impl Chain {
    /// The chain of these parts in this order, asked of `model`: the same text of two models shares nothing.
    pub fn of(model: u64, parts: &[&[u8]]) -> Self {
        let mut chain = Self { key: model, ..Self::default() };
        let (mut state, mut next) = (model, FIRST_STEP);
        for part in parts {
            let mut rest = *part;
            while !rest.is_empty() {
                let taken = rest.len().min((next - chain.n_bytes) as usize);
                let (head, tail) = rest.split_at(taken);
                state = hash(state, head);
                chain.n_bytes = chain.n_bytes.saturating_add(taken as u32);
                rest = tail;
                if chain.n_bytes == next {
                    chain.marks.push(Mark { hash: state, end: next });
                    next = next.saturating_add(step(next));
                }
                if next == u32::MAX {
                    break;
                }
            }
            // Where a part ends is a part of what it says.
            state = mix(state, 1);
        }
        chain.whole = state;
        chain.key = chain.key_mark().map_or(state, |mark| mark.hash);
        chain
    }

    /// The mark at 256 bytes, or at 8, 64, 512 … times as many of a longer prompt: a conversation keeps it while it grows to eight times
    /// its length, and what many prompts begin with does not make them one.
    fn key_mark(&self) -> Option<&Mark> {
        let longest = self.marks.last()?.end;
        let powers = std::iter::successors(Some(FIRST_STEP), |end| end.checked_mul(KEY_STEP));
        let end = powers.take_while(|end| *end <= longest).last()?;
        self.marks.iter().rev().find(|mark| mark.end <= end)
    }

    /// Marks, the first one first.
    pub fn marks(&self) -> &[Mark] {
        &self.marks
    }

    /// The same for prompts that begin alike: what to choose by among equals.
    pub fn key(&self) -> u64 {
        self.key
    }

    /// The same for the same prompt only.
    pub fn whole(&self) -> u64 {
        self.whole
    }

    /// Bytes of the whole.
    pub fn n_bytes(&self) -> u32 {
        self.n_bytes
    }

    /// Tokens of the whole, about.
    pub fn n_tokens(&self) -> u32 {
        self.n_bytes.div_ceil(BYTES_PER_TOKEN)
    }
}

fn step(end: u32) -> u32 {
    (end / PART).next_multiple_of(FIRST_STEP).max(FIRST_STEP)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shared(a: &Chain, b: &Chain) -> u32 {
        let alike = a.marks.iter().zip(&b.marks).take_while(|(a, b)| a == b);
        alike.last().map_or(0, |(mark, _)| mark.end)
    }

    fn text(seed: u8, len: usize) -> Vec<u8> {
        (0..len).map(|at| (at as u8).wrapping_mul(31).wrapping_add(seed)).collect()
    }

    #[test]
    fn prompts_share_marks_up_to_where_they_part() {
        for parted in [0, 255, 256, 1000, 5000, 80_000] {
            let (mut one, mut other) = (text(0, parted), text(0, parted));
            one.extend(text(1, 3000));
            other.extend(text(2, 4000));
            let (one, other) = (Chain::of(9, &[&one]), Chain::of(9, &[&other]));
            let (seen, parted) = (shared(&one, &other), parted as u32);
            assert!(seen <= parted && parted - seen < FIRST_STEP.max(parted / 15 + FIRST_STEP), "{seen} of {parted}");
        }
    }

    #[test]
    fn another_model_shares_nothing() {
        let text = text(0, 2000);
        assert_eq!(shared(&Chain::of(1, &[&text]), &Chain::of(2, &[&text])), 0);
    }

    #[test]
    fn what_is_added_changes_no_mark_before_it() {
        let (before, after) = (text(0, 10_000), text(0, 12_000));
        let (before, after) = (Chain::of(1, &[b"tools", &before]), Chain::of(1, &[b"tools", &after]));
        assert_eq!(shared(&before, &after), before.marks.last().unwrap().end);
    }

    #[test]
    fn marks_of_long_prompts_are_few() {
        assert!((50..80).contains(&Chain::of(1, &[&text(0, 80_000)]).marks.len()));
        assert!(Chain::of(1, &[&text(0, 8 << 20)]).marks.len() < 160);
    }

    #[test]
    fn a_conversation_keeps_its_key_and_others_with_its_beginning_have_theirs() {
        let of = |own: u8, len: usize| {
            let (shared, own) = (text(0, 6000), text(own, len));
            Chain::of(1, &[&shared, &own]).key()
        };
        assert!(of(1, 12_000) == of(1, 40_000) && of(1, 12_000) != of(2, 12_000));
    }

    #[test]
    fn short_prompts_have_no_mark_and_a_key() {
        let of = |text: &[u8]| Chain::of(1, &[text]);
        assert!(of(b"Hello!").marks.is_empty() && of(b"Hello!").key() != of(b"Hello?").key());
        assert_eq!((of(b"").n_tokens(), of(b"Hello!").n_tokens()), (0, 2));
    }

    #[test]
    fn parts_are_told_apart() {
        assert_ne!(Chain::of(1, &[b"ab", b"c"]).key(), Chain::of(1, &[b"a", b"bc"]).key());
    }
}
