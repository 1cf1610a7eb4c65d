//! How many of an answer's tokens were thoughts: those between the marks of the model's reasoning, counted by id as they come.
//! Reads no text.

use stoker_engine::{TokenId, Tokenizer};

use crate::answer::{Reading, ReasoningFormat};

/// The tokens around thoughts.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ThoughtMarks {
    /// Thoughts begin behind these, in this order.
    open: Vec<TokenId>,
    /// Each of these ends them.
    close: Vec<TokenId>,
    /// The prompt has opened them.
    is_open: bool,
}

impl ThoughtMarks {
    /// Those of a model's format, where each of them is one token.
    pub(crate) fn new(reading: &Reading, tokenizer: &Tokenizer) -> Option<Self> {
        let ids = |marks: &[&str]| marks.iter().map(|mark| tokenizer.token_id(mark)).collect::<Option<Vec<_>>>();
        let (open, close) = match reading.reasoning? {
            ReasoningFormat::Harmony => (ids(&["<|channel|>", "analysis", "<|message|>"])?, ids(&["<|end|>"])?),
            format => {
                let [open, close] = format.marks()?;
                (ids(&[open])?, ids(&[close])?)
            }
        };
        Some(Self { open, close, is_open: reading.reasoning_is_open })
    }
}

/// Counts the thoughts of one choice.
#[derive(Clone, Debug)]
pub(crate) struct ThoughtCount {
    marks: ThoughtMarks,
    /// Opening marks seen, one behind the other.
    n_opened: usize,
    is_inside: bool,
    n_tokens: u32,
}

impl ThoughtCount {
    pub(crate) fn new(marks: ThoughtMarks) -> Self {
        Self { is_inside: marks.is_open, marks, n_opened: 0, n_tokens: 0 }
    }

    /// Takes the next tokens in.
    pub(crate) fn add(&mut self, tokens: &[TokenId]) {
        tokens.iter().for_each(|token| self.add_one(*token));
    }

    /// Thoughts so far.
    pub(crate) fn n_tokens(&self) -> u32 {
        self.n_tokens
    }

    fn add_one(&mut self, token: TokenId) {
        let Self { marks: ThoughtMarks { open, close, .. }, n_opened, is_inside, n_tokens } = self;
        // A model may repeat the mark that its prompt ends with.
        *n_opened = if open[*n_opened] == token { *n_opened + 1 } else { usize::from(open[0] == token) };
        if *n_opened > 0 {
            if *n_opened == open.len() {
                (*n_opened, *is_inside) = (0, true);
            }
        } else if close.contains(&token) {
            *is_inside = false;
        } else {
            *n_tokens += u32::from(*is_inside);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count(is_open: bool, open: &[TokenId], tokens: &[TokenId]) -> u32 {
        let mut count = ThoughtCount::new(ThoughtMarks { open: open.to_vec(), close: vec![9], is_open });
        count.add(tokens);
        count.n_tokens()
    }

    #[test]
    fn thoughts_are_what_lies_between_the_marks() {
        assert_eq!(count(false, &[1], &[1, 5, 6, 9, 7, 7]), 2);
        assert_eq!(count(true, &[1], &[5, 6, 9, 7]), 2, "the prompt opened them");
        assert_eq!(count(true, &[1], &[1, 5, 6]), 2, "and the model again; they have no end yet");
        assert_eq!(count(false, &[1], &[5, 6, 7]), 0);
        assert_eq!(count(false, &[1, 2, 3], &[1, 2, 3, 5, 9, 1, 4, 3, 5, 9]), 1, "another channel is no thought");
    }
}
