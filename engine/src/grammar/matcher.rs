//! A compiled grammar and one completion's way through it.
//!
//! All ways share one lexer, since what one learns about lexemes saves the others time. What one of them asks too much of it breaks
//! it for all, and for good: llguidance bounds its work and its states, and an error stays. So a way that fails is gone again from
//! the beginning with a lexer that nobody else has. If that fails too, the failure is its own.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use llguidance::{TokenParser, api::StopReason};
use toktrie::SimpleVob;

use super::{
    refusal::limit_in_words,
    vocabulary,
    words::{WordMasks, Words},
};
use crate::{
    constraint::{Grammar, Matcher},
    request::TokenId,
};

/// A grammar at the beginning of a completion.
pub(super) struct Compiled(Arc<Beginning>);

struct Beginning {
    /// No way has begun from it.
    untouched: TokenParser,
    words: Arc<Words>,
    /// Where ways begin, by spelling. Critical sections leave valid ones.
    shared: Mutex<[TokenParser; 2]>,
}

/// Which masks a way has where a text must come: those of the tokenizer's own tokens, or of all that spell it.
#[derive(Clone, Copy)]
enum Spelling {
    Canonical,
    Any,
}

impl Compiled {
    /// Computes the first mask, which the first request would wait for otherwise.
    pub(super) fn new(untouched: TokenParser, words: Arc<Words>) -> Result<Self, String> {
        let mut shared = beginnings(&untouched, &words);
        let first = &mut shared[Spelling::Canonical as usize];
        match mask_of(first) {
            Err(_) if first.stop_reason() == StopReason::NoExtensionBias => Err("nothing matches it".into()),
            Err(error) => Err(limit_in_words(&error, &first.limits)),
            Ok(_) => Ok(Self(Arc::new(Beginning { untouched, words, shared: Mutex::new(shared) }))),
        }
    }

    fn walk(&self, spelling: Spelling) -> Box<Walk> {
        let parser = self.0.shared()[spelling as usize].clone();
        Box::new(Walk { parser, beginning: Some(Arc::clone(&self.0)), spelling, accepted: Vec::new() })
    }
}

impl Beginning {
    fn shared(&self) -> MutexGuard<'_, [TokenParser; 2]> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins with a lexer of its own. So do all who begin later, together: the one that was shared may be broken.
    fn anew(&self, spelling: Spelling) -> TokenParser {
        *self.shared() = beginnings(&self.untouched, &self.words);
        let [canonical, any] = beginnings(&self.untouched, &self.words);
        match spelling {
            Spelling::Canonical => canonical,
            Spelling::Any => any,
        }
    }
}

/// A beginning for each spelling, with one lexer for both. What is known of words is known of a lexer's states.
fn beginnings(untouched: &TokenParser, words: &Arc<Words>) -> [TokenParser; 2] {
    let mut canonical = untouched.deep_clone();
    canonical.bias_computer = Arc::new(WordMasks::new(Arc::clone(words)));
    canonical.start_without_prompt();
    let mut any = canonical.clone();
    any.token_env = vocabulary::any_spelling(&canonical.token_env);
    [canonical, any]
}

impl Grammar for Compiled {
    fn matcher(&self) -> Box<dyn Matcher> {
        self.walk(Spelling::Canonical)
    }

    fn any_spelling(&self) -> Box<dyn Matcher> {
        self.walk(Spelling::Any)
    }
}

impl std::fmt::Debug for Compiled {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Compiled").finish_non_exhaustive()
    }
}

/// One completion.
struct Walk {
    parser: TokenParser,
    /// `None`: it has a lexer of its own.
    beginning: Option<Arc<Beginning>>,
    spelling: Spelling,
    accepted: Vec<TokenId>,
}

impl Walk {
    /// Takes a step; if that fails, once more with a lexer that nobody else has. A panic there is nobody else's doing, and goes up.
    fn step<T>(&mut self, step: impl Fn(&mut TokenParser) -> Result<T, String>) -> Result<T, String> {
        let done = match self.beginning.take() {
            None => attempt(&mut self.parser, step),
            Some(beginning) => {
                let shared = catch_unwind(AssertUnwindSafe(|| attempt(&mut self.parser, &step)));
                match shared.unwrap_or_else(|_| Err("it panicked".into())) {
                    Ok(done) => {
                        self.beginning = Some(beginning);
                        Ok(done)
                    }
                    Err(_) => {
                        self.parser = beginning.anew(self.spelling);
                        self.go_again().and_then(|()| attempt(&mut self.parser, step))
                    }
                }
            }
        };
        done.map_err(|error| limit_in_words(&error, &self.parser.limits))
    }

    /// As it went before: each mask is what gives the lexer time for the token behind it.
    fn go_again(&mut self) -> Result<(), String> {
        for token in &self.accepted {
            attempt(&mut self.parser, mask_of)?;
            attempt(&mut self.parser, |parser| take(parser, *token))?;
        }
        attempt(&mut self.parser, mask_of).map(drop)
    }
}

/// Takes a step. Where the lexer is broken, what it came to may be wrong without being an error.
fn attempt<T>(parser: &mut TokenParser, step: impl Fn(&mut TokenParser) -> Result<T, String>) -> Result<T, String> {
    let done = step(parser)?;
    match parser.parser.get_error() {
        None => Ok(done),
        Some(error) => Err(error.message()),
    }
}

/// What may come next: behind the end only end tokens.
fn mask_of(parser: &mut TokenParser) -> Result<SimpleVob, String> {
    match parser.stop_reason() {
        StopReason::EndOfSentence | StopReason::NoExtension => Ok(parser.token_env.tok_trie().eos_token_set()),
        _ => parser.compute_mask().map_err(|error| format!("{error:#}")),
    }
}

fn take(parser: &mut TokenParser, token: TokenId) -> Result<(), String> {
    let taken = parser.consume_token(token).and_then(|n_taken_back| {
        assert_eq!(n_taken_back, 0, "nobody lets it take tokens back");
        parser.check_stop()
    });
    taken.map(drop).map_err(|error| format!("{error:#}"))
}

impl Matcher for Walk {
    fn allow(&mut self, mask: &mut [u32]) -> Result<(), String> {
        let allowed = self.step(mask_of)?;
        // The model's vocabulary may be larger than the tokenizer's: no text, not allowed.
        let n_words = mask.len().min(allowed.as_slice().len());
        mask[..n_words].copy_from_slice(&allowed.as_slice()[..n_words]);
        Ok(())
    }

    fn accept(&mut self, token: TokenId) -> Result<(), String> {
        // Behind the end, with `ignore_eos`, only end tokens come.
        if self.parser.stopped() {
            return Ok(());
        }
        self.step(|parser| take(parser, token))?;
        self.accepted.push(token);
        Ok(())
    }
}

impl std::fmt::Debug for Walk {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Walk").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        constraint::mask_words,
        grammar::{GrammarCompiler, GrammarSpec},
        text::Tokenizer,
    };

    #[test]
    fn a_panic_goes_up_from_its_own_way_and_from_no_other() {
        let compiler = GrammarCompiler::new(&Arc::new(Tokenizer::bytes()), &[256]).unwrap();
        let parser = compiler.parser(&GrammarSpec::Regex("[a-z]+".into())).unwrap();
        let compiled = Compiled::new(parser, Arc::clone(&compiler.words)).unwrap();
        let [mut broken, mut beside] = [(); 2].map(|()| compiled.walk(Spelling::Canonical));
        let panics = |parser: &mut TokenParser| parser.parser.test_trigger_lexer_error().map_err(|e| e.to_string());
        assert!(catch_unwind(AssertUnwindSafe(|| broken.step(panics))).is_err(), "it is a fault of ours");
        let mask = || vec![0; mask_words(257)];
        beside.allow(&mut mask()).unwrap();
        beside.accept(TokenId::from(b'a')).unwrap();
        compiled.matcher().allow(&mut mask()).unwrap();
    }
}
