//! Prompts of a wanted number of tokens, without the server's tokenizer: words, and how many tokens the server counts
//! for them. Words differ from request to request, so that a prefix cache finds only what a trace says it finds.

use stoker_workload::Rng;

use crate::session::Turn;

/// Common words: one to two tokens each in every tokenizer.
const WORDS: [&str; 32] = [
    "the", "river", "small", "light", "came", "with", "under", "house", "green", "after", "water", "seven", "long",
    "garden", "between", "morning", "they", "found", "stone", "where", "people", "walked", "over", "night", "road",
    "never", "open", "door", "still", "warm", "from", "winter",
];
/// The part that a trace calls cached is the same text in every request.
const SHARED_SEED: u64 = 0;

/// How the server counts: tokens of the template around a prompt, and tokens per word.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenCount {
    fixed: f64,
    per_word: f64,
}

/// Two prompts that the server counted.
#[derive(Clone, Copy, Debug)]
pub struct Counted {
    /// Words sent.
    pub words: usize,
    /// Prompt tokens by the server's usage.
    pub tokens: u32,
}

impl TokenCount {
    /// The straight line through two counts of different lengths; `None` when the server does not count more tokens for
    /// more words.
    pub fn through(short: Counted, long: Counted) -> Option<Self> {
        let words = long.words.checked_sub(short.words).filter(|words| *words > 0)? as f64;
        let tokens = f64::from(long.tokens.checked_sub(short.tokens).filter(|tokens| *tokens > 0)?);
        let per_word = tokens / words;
        Some(Self { fixed: f64::from(short.tokens) - per_word * short.words as f64, per_word })
    }

    /// Words that make about this many tokens, at least one.
    fn words(self, tokens: u32) -> usize {
        (((f64::from(tokens) - self.fixed) / self.per_word).round() as usize).max(1)
    }
}

/// What the user says in a turn; `idx` makes it unlike the others.
pub fn prompt(turn: &Turn, count: TokenCount, idx: u64) -> String {
    let n_words = count.words(turn.prompt_tokens);
    let n_shared = (f64::from(turn.shared_tokens) / count.per_word) as usize;
    let shared = words(SHARED_SEED, n_shared.min(n_words));
    let own = words(idx + 1, n_words.saturating_sub(n_shared));
    shared.chain(own).collect::<Vec<_>>().join(" ")
}

/// A text of this many words.
pub fn words(seed: u64, n: usize) -> impl Iterator<Item = &'static str> {
    let mut rng = Rng::seeded(seed);
    (0..n).map(move |_| WORDS[(rng.uniform() * WORDS.len() as f64) as usize])
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::shape::Shape;

    fn turn(prompt_tokens: u32, shared_tokens: u32) -> Turn {
        Turn { think: Duration::ZERO, prompt_tokens, shared_tokens, completion_tokens: 1, shape: Shape::Text }
    }

    #[test]
    fn a_prompt_has_the_words_that_make_its_tokens() {
        let count = |words, tokens| Counted { words, tokens };
        // Ten tokens of template, one and a half a word.
        let line = TokenCount::through(count(20, 40), count(120, 190)).unwrap();
        let n_words = |turn: &Turn| prompt(turn, line, 4).split(' ').count();
        assert_eq!(n_words(&turn(310, 0)), 200);
        assert_eq!(n_words(&turn(3, 0)), 1, "a prompt is never empty");
        assert_eq!(n_words(&turn(310, 310)), 200, "cached tokens are among those of the prompt");
        assert_eq!(TokenCount::through(count(20, 40), count(120, 40)), None);
    }

    #[test]
    fn only_the_cached_part_is_shared() {
        let line = TokenCount::through(Counted { words: 0, tokens: 0 }, Counted { words: 1, tokens: 1 }).unwrap();
        let (one, other) = (prompt(&turn(100, 50), line, 1), prompt(&turn(100, 50), line, 2));
        let same = one.split(' ').zip(other.split(' ')).take_while(|(a, b)| a == b).count();
        assert!((50..60).contains(&same), "{same}");
    }
}
