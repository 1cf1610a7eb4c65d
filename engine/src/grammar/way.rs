//! A parser on its way through a grammar, and what it and its lexer hold of the grammars' [`Memory`]. Knows nobody else on the way.

use std::sync::Arc;

use llguidance::{TokenParser, api::StopReason, earley::ParserStats};
use toktrie::SimpleVob;

use super::{
    lexeme_masks::LexemeMasks,
    memory::{Account, Memory},
    refusal::{Kind, limit_in_words, too_much_in_words},
};
use crate::request::TokenId;

/// Bytes of a lexer's state that llguidance does not count, with what `words` and `lexeme_masks` know of it.
const STATE_BYTES: usize = 200;
/// Bytes of a rule that is followed at one place of a text, in a list that grows by doubling.
const ITEM_BYTES: usize = 12;

pub(super) struct Way {
    pub(super) parser: TokenParser,
    masks: Arc<LexemeMasks>,
    /// Of the lexer, which others may share.
    lexer: Arc<Account>,
    rows: Account,
    n_items: usize,
}

impl Way {
    pub(super) fn new(parser: TokenParser, masks: Arc<LexemeMasks>, memory: &Arc<Memory>) -> Self {
        Self { parser, masks, lexer: Arc::new(memory.open()), rows: memory.open(), n_items: 0 }
    }

    /// Another one from the same place on, with the same lexer.
    pub(super) fn fork(&self, memory: &Arc<Memory>) -> Self {
        let (parser, masks, lexer) = (self.parser.clone(), Arc::clone(&self.masks), Arc::clone(&self.lexer));
        Self { parser, masks, lexer, rows: memory.open(), n_items: self.n_items }
    }

    /// What may come next: behind the end only end tokens.
    pub(super) fn mask(&mut self) -> Result<SimpleVob, String> {
        self.attempt(|parser| match parser.stop_reason() {
            StopReason::EndOfSentence | StopReason::NoExtension => Ok(parser.token_env.tok_trie().eos_token_set()),
            _ => parser.compute_mask().map_err(|error| format!("{error:#}")),
        })
    }

    pub(super) fn take(&mut self, token: TokenId) -> Result<(), String> {
        self.attempt(|parser| {
            let taken = parser.consume_token(token).and_then(|n_taken_back| {
                assert_eq!(n_taken_back, 0, "nobody lets it take tokens back");
                parser.check_stop()
            });
            taken.map(drop).map_err(|error| format!("{error:#}"))
        })
    }

    /// Where the lexer is broken, what a step came to may be wrong without being an error.
    pub(super) fn attempt<T>(&mut self, step: impl FnOnce(&mut TokenParser) -> Result<T, String>) -> Result<T, String> {
        let before = self.parser.parser.stats().clone();
        let done = step(&mut self.parser).map_err(|error| limit_in_words(&error, &self.parser.limits))?;
        if let Some(error) = self.parser.parser.get_error() {
            return Err(limit_in_words(&error.message(), &self.parser.limits));
        }
        self.keep_accounts(&before)?;
        Ok(done)
    }

    fn keep_accounts(&mut self, before: &ParserStats) -> Result<(), String> {
        let new = self.parser.parser.stats().delta(before);
        // Items that a mask tries go again. They stay where the text went on.
        if new.definitive_bytes > 0 {
            self.n_items += new.all_items;
        }
        let lexer = self.parser.parser.lexer_stats();
        // A state has a bit for each lexeme.
        let states = lexer.num_bytes + lexer.num_states * (STATE_BYTES + lexer.num_regexps / 8);
        self.lexer
            .set(states + self.masks.n_bytes())
            .map_err(|too_much| too_much_in_words(Kind::Patterns, too_much))?;
        self.rows.set(self.n_items * ITEM_BYTES).map_err(|too_much| too_much_in_words(Kind::Rules, too_much))
    }
}
