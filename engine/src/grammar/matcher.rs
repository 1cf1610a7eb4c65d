//! A compiled grammar and one completion's way through it.
//!
//! All ways share one lexer, since what one learns about lexemes saves the others time. What one of them asks too much of it breaks
//! it for all, and for good: llguidance bounds its work and its states, and an error stays. So a way that fails is gone again from
//! the beginning with a lexer that nobody else has, and as llguidance goes by itself ([`LexemeMasks`]). If that fails too, the failure is
//! its own. The same goes for a lexer that has come to hold too much of what all grammars may hold ([`Memory`]).

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use llguidance::{TokenParser, api::StopReason};

use super::{
    lexeme_masks::LexemeMasks,
    memory::{Account, Memory},
    refusal::{Kind, too_much_in_words},
    vocabulary,
    way::Way,
    words::Words,
};
use crate::{
    constraint::{Grammar, Matcher},
    request::TokenId,
};

/// A grammar at the beginning of a completion.
pub(super) struct Compiled(Arc<Beginning>);

/// Bytes that a compiled grammar takes for each of its text, at most: 180 of a schema of many properties, 20 of a choice.
const BYTES_A_BYTE: usize = 200;

struct Beginning {
    /// No way has begun from it.
    untouched: TokenParser,
    words: Arc<Words>,
    memory: Arc<Memory>,
    _text: Account,
    /// Where ways begin, by spelling. Critical sections leave valid ones.
    shared: Mutex<[Way; 2]>,
}

/// Which masks a way has where a text must come: those of the tokenizer's own tokens, or of all that spell it.
#[derive(Clone, Copy)]
enum Spelling {
    Canonical,
    Any,
}

impl Compiled {
    /// Computes the first mask, which the first request would wait for otherwise.
    pub(super) fn new(
        untouched: TokenParser,
        words: Arc<Words>,
        memory: Arc<Memory>,
        text_bytes: usize,
    ) -> Result<Self, String> {
        let text = memory.open();
        text.set(text_bytes * BYTES_A_BYTE).map_err(|too_much| too_much_in_words(Kind::Text, too_much))?;
        let mut shared = beginnings(&untouched, LexemeMasks::learning(&words), &memory);
        if shared[Spelling::Canonical as usize].mask().is_err() {
            shared = beginnings(&untouched, LexemeMasks::by_llguidance(&words), &memory);
        }
        let first = &mut shared[Spelling::Canonical as usize];
        match first.mask() {
            Err(_) if first.parser.stop_reason() == StopReason::NoExtensionBias => Err("nothing matches it".into()),
            Err(error) => Err(error),
            Ok(_) => {
                let shared = Mutex::new(shared);
                Ok(Self(Arc::new(Beginning { untouched, words, memory, _text: text, shared })))
            }
        }
    }

    fn walk(&self, spelling: Spelling) -> Box<Walk> {
        let way = self.0.shared()[spelling as usize].fork(&self.0.memory);
        Box::new(Walk { way, beginning: Some(Arc::clone(&self.0)), spelling, accepted: Vec::new() })
    }
}

impl Beginning {
    fn shared(&self) -> MutexGuard<'_, [Way; 2]> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins with a lexer of its own. So do all who begin later, together: the one that was shared may be broken.
    fn anew(&self, spelling: Spelling) -> Way {
        let beginnings = || beginnings(&self.untouched, LexemeMasks::by_llguidance(&self.words), &self.memory);
        *self.shared() = beginnings();
        let [canonical, any] = beginnings();
        match spelling {
            Spelling::Canonical => canonical,
            Spelling::Any => any,
        }
    }
}

/// A beginning for each spelling, with one lexer for both. What is known of masks is known of a lexer's states.
fn beginnings(untouched: &TokenParser, masks: LexemeMasks, memory: &Arc<Memory>) -> [Way; 2] {
    let (mut canonical, masks) = (untouched.deep_clone(), Arc::new(masks));
    canonical.bias_computer = Arc::<LexemeMasks>::clone(&masks);
    canonical.start_without_prompt();
    let canonical = Way::new(canonical, masks, memory);
    let mut any = canonical.fork(memory);
    any.parser.token_env = vocabulary::any_spelling(&canonical.parser.token_env);
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
    way: Way,
    /// `None`: it has a lexer of its own.
    beginning: Option<Arc<Beginning>>,
    spelling: Spelling,
    accepted: Vec<TokenId>,
}

impl Walk {
    /// Takes a step; if that fails, once more with a lexer that nobody else has. A panic there is nobody else's doing, and goes up.
    fn step<T>(&mut self, step: impl Fn(&mut Way) -> Result<T, String>) -> Result<T, String> {
        let Some(beginning) = self.beginning.take() else { return step(&mut self.way) };
        let shared = catch_unwind(AssertUnwindSafe(|| step(&mut self.way)));
        match shared.unwrap_or_else(|_| Err("it panicked".into())) {
            Ok(done) => {
                self.beginning = Some(beginning);
                Ok(done)
            }
            Err(_) => {
                self.way = beginning.anew(self.spelling);
                self.go_again().and_then(|()| step(&mut self.way))
            }
        }
    }

    /// As it went before: each mask is what gives the lexer time for the token behind it.
    fn go_again(&mut self) -> Result<(), String> {
        for token in &self.accepted {
            self.way.mask()?;
            self.way.take(*token)?;
        }
        self.way.mask().map(drop)
    }
}

impl Matcher for Walk {
    fn allow(&mut self, mask: &mut [u32]) -> Result<(), String> {
        let allowed = self.step(Way::mask)?;
        // The model's vocabulary may be larger than the tokenizer's: no text, not allowed.
        let n_words = mask.len().min(allowed.as_slice().len());
        mask[..n_words].copy_from_slice(&allowed.as_slice()[..n_words]);
        Ok(())
    }

    fn accept(&mut self, token: TokenId) -> Result<(), String> {
        // Behind the end, with `ignore_eos`, only end tokens come.
        if self.way.parser.stopped() {
            return Ok(());
        }
        self.step(|way| way.take(token))?;
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
        let compiled = Compiled::new(parser, Arc::clone(&compiler.words), Arc::clone(&compiler.memory), 0).unwrap();
        let [mut broken, mut beside] = [(); 2].map(|()| compiled.walk(Spelling::Canonical));
        let panics = |parser: &mut TokenParser| parser.parser.test_trigger_lexer_error().map_err(|e| e.to_string());
        let broken = || broken.step(|way| way.attempt(panics));
        assert!(catch_unwind(AssertUnwindSafe(broken)).is_err(), "it is a fault of ours");
        let mask = || vec![0; mask_words(257)];
        beside.allow(&mut mask()).unwrap();
        beside.accept(TokenId::from(b'a')).unwrap();
        compiled.matcher().allow(&mut mask()).unwrap();
    }
}
