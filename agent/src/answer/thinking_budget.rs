//! A bound on thoughts, as a constraint: when so many tokens were thought, only the mark that ends thoughts may come. Around a
//! grammar it narrows that one's masks, where the grammar lets thoughts end. Reads tokens, no text.

use std::sync::Arc;

use stoker_engine::{
    TokenId, Tokenizer,
    constraint::{Constraint, Grammar, Matcher},
};

use super::{Reading, ReasoningFormat};

/// How many tokens may be thought.
#[derive(Clone, Debug)]
pub struct ThinkingBudget {
    rules: Arc<Rules>,
    inner: Option<Constraint>,
}

#[derive(Debug)]
struct Rules {
    /// Thoughts begin behind these tokens.
    open: Vec<TokenId>,
    /// These end them.
    close: Vec<TokenId>,
    /// The prompt has opened them.
    is_open: bool,
    n_tokens: u32,
}

impl ThinkingBudget {
    /// Of a model that writes its thoughts as `reading` says; `None` if it has none.
    pub fn new(n_tokens: u32, reading: &Reading, tokenizer: &Tokenizer, inner: Option<Constraint>) -> Option<Self> {
        let (open, close) = match reading.reasoning? {
            ReasoningFormat::Harmony => ("<|channel|>analysis<|message|>", "<|end|>"),
            format => format.marks().map(|[open, close]| (open, close))?,
        };
        let tokens = |mark| tokenizer.encode(mark, false).ok().filter(|tokens| !tokens.is_empty());
        let rules = Rules { open: tokens(open)?, close: tokens(close)?, is_open: reading.reasoning_is_open, n_tokens };
        Some(Self { rules: Arc::new(rules), inner })
    }
}

impl Grammar for ThinkingBudget {
    fn matcher(&self) -> Box<dyn Matcher> {
        self.around(self.inner.as_ref().map(|inner| inner.0.matcher()))
    }

    fn any_spelling(&self) -> Box<dyn Matcher> {
        self.around(self.inner.as_ref().map(|inner| inner.0.any_spelling()))
    }
}

impl ThinkingBudget {
    fn around(&self, inner: Option<Box<dyn Matcher>>) -> Box<dyn Matcher> {
        let place = if self.rules.is_open { Place::Thinking } else { Place::Outside };
        Box::new(Thinking { rules: Arc::clone(&self.rules), inner, place, n_thought: 0, last: Vec::new() })
    }
}

/// One completion.
#[derive(Debug)]
struct Thinking {
    rules: Arc<Rules>,
    inner: Option<Box<dyn Matcher>>,
    place: Place,
    /// Tokens of all thoughts so far.
    n_thought: u32,
    /// The newest tokens, as many as a mark has.
    last: Vec<TokenId>,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Place {
    Outside,
    Thinking,
    /// So many tokens of the closing mark are there; the others are owed.
    Closing(usize),
}

impl Thinking {
    /// The only token that may come, if the budget says so.
    fn owed(&self) -> Option<TokenId> {
        match self.place {
            Place::Closing(n_there) => Some(self.rules.close[n_there]),
            Place::Thinking if self.n_thought >= self.rules.n_tokens => Some(self.rules.close[0]),
            Place::Thinking | Place::Outside => None,
        }
    }

    fn note(&mut self, token: TokenId) {
        let Self { rules, place, n_thought, last, .. } = self;
        let is_owed = *n_thought >= rules.n_tokens && token == rules.close[0];
        last.push(token);
        *place = match *place {
            Place::Outside if last.ends_with(&rules.open) => Place::Thinking,
            Place::Outside => Place::Outside,
            Place::Closing(n_there) => closing(n_there + 1, rules),
            Place::Thinking if last.ends_with(&rules.close) => {
                // Its other tokens were taken for thoughts, but for one that ends the opening mark, too.
                *n_thought = n_thought.saturating_sub(rules.close.len() as u32 - 1);
                Place::Outside
            }
            Place::Thinking if is_owed => closing(1, rules),
            Place::Thinking => {
                *n_thought += 1;
                Place::Thinking
            }
        };
        if last.len() == rules.open.len().max(rules.close.len()) {
            last.remove(0);
        }
    }
}

fn closing(n_there: usize, rules: &Rules) -> Place {
    if n_there == rules.close.len() { Place::Outside } else { Place::Closing(n_there) }
}

impl Matcher for Thinking {
    fn allow(&mut self, mask: &mut [u32]) -> Result<(), String> {
        match &mut self.inner {
            Some(inner) => inner.allow(mask)?,
            None => mask.fill(u32::MAX),
        }
        if let Some(owed) = self.owed() {
            let (word, bit) = (owed as usize / 32, 1 << (owed % 32));
            // A grammar may not let thoughts end here, as in the middle of a character: then a token later.
            if mask.get(word).is_some_and(|allowed| allowed & bit != 0) {
                mask.fill(0);
                mask[word] = bit;
            }
        }
        Ok(())
    }

    fn accept(&mut self, token: TokenId) -> Result<(), String> {
        self.note(token);
        self.inner.as_mut().map_or(Ok(()), |inner| inner.accept(token))
    }
}

#[cfg(test)]
mod tests {
    use stoker_engine::constraint::allows;

    use super::*;

    const VOCAB: TokenId = 64;

    fn budget(n_tokens: u32, marks: [&[TokenId]; 2], is_open: bool, inner: Option<Constraint>) -> Box<dyn Matcher> {
        let [open, close] = marks.map(<[TokenId]>::to_vec);
        ThinkingBudget { rules: Arc::new(Rules { open, close, is_open, n_tokens }), inner }.matcher()
    }

    /// What comes of a model that wants to say `says`, where it may not say something else: the least that it may.
    fn said(mut matcher: Box<dyn Matcher>, says: &[TokenId]) -> Vec<TokenId> {
        let mut said = Vec::new();
        for token in says {
            let mut mask = [0; VOCAB as usize / 32];
            matcher.allow(&mut mask).unwrap();
            let token = if allows(&mask, *token) { *token } else { (0..VOCAB).find(|t| allows(&mask, *t)).unwrap() };
            matcher.accept(token).unwrap();
            said.push(token);
        }
        said
    }

    #[test]
    fn thoughts_end_when_the_budget_is_used_up() {
        let marks: [&[TokenId]; 2] = [&[1], &[2]];
        assert_eq!(said(budget(3, marks, false, None), &[1, 9, 9, 9, 9, 9, 9]), [1, 9, 9, 9, 2, 9, 9]);
        assert_eq!(said(budget(3, marks, true, None), &[9, 9, 9, 9, 9]), [9, 9, 9, 2, 9], "the prompt opened them");
        assert_eq!(said(budget(0, marks, false, None), &[1, 9, 9]), [1, 2, 9], "no thoughts at all");
        assert_eq!(
            said(budget(3, marks, false, None), &[1, 9, 2, 9, 9, 9, 9]),
            [1, 9, 2, 9, 9, 9, 9],
            "fewer are enough"
        );
        assert_eq!(said(budget(3, marks, false, None), &[9, 9, 9, 9, 9]), [9; 5], "who does not think is left alone");
        let again = said(budget(3, marks, false, None), &[1, 9, 9, 2, 8, 1, 9, 9, 9]);
        assert_eq!(again, [1, 9, 9, 2, 8, 1, 9, 2, 9], "the budget is of all thoughts together");
    }

    #[test]
    fn marks_of_several_tokens_are_written_whole() {
        let marks: [&[TokenId]; 2] = [&[1, 3], &[4, 5, 6]];
        assert_eq!(said(budget(2, marks, false, None), &[1, 3, 9, 9, 9, 9, 9, 9]), [1, 3, 9, 9, 4, 5, 6, 9]);
        let own = [1, 3, 9, 4, 5, 6, 9, 9, 9];
        assert_eq!(said(budget(4, marks, false, None), &own), own, "a mark of the model's own is no thought");
        let at_once = [1, 3, 5, 9];
        assert_eq!(said(budget(4, [&[1, 3], &[3, 5]], false, None), &at_once), at_once, "marks may share a token");
    }

    /// Allows even tokens only, and the closing mark, 2, only behind 8.
    #[derive(Debug)]
    struct Even {
        last: TokenId,
    }

    impl Grammar for Even {
        fn matcher(&self) -> Box<dyn Matcher> {
            Box::new(Self { last: self.last })
        }
    }

    impl Matcher for Even {
        fn allow(&mut self, mask: &mut [u32]) -> Result<(), String> {
            let close = if self.last == 8 { 0 } else { 1 << 2 };
            mask.fill(0x5555_5555);
            mask[0] &= !close;
            Ok(())
        }

        fn accept(&mut self, token: TokenId) -> Result<(), String> {
            self.last = token;
            Ok(())
        }
    }

    #[test]
    fn a_grammar_says_where_thoughts_may_end() {
        let inner = Some(Constraint(Arc::new(Even { last: 0 })));
        let thoughts = said(budget(2, [&[0], &[2]], false, inner), &[0, 6, 6, 6, 8, 6, 6]);
        assert_eq!(thoughts, [0, 6, 6, 6, 8, 2, 6], "two tokens late, where the grammar allows it");
    }
}
