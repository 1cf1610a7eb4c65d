//! Tokens that a request allows or bans one by one, as a constraint: alone, or around a grammar whose masks it narrows.
//! Knows no text.

use std::sync::Arc;

use crate::{
    constraint::{Constraint, Grammar, Matcher},
    request::TokenId,
};

/// What may come.
#[derive(Clone, Debug)]
pub struct TokenFilter {
    rules: Arc<Rules>,
    inner: Option<Constraint>,
}

#[derive(Debug)]
struct Rules {
    /// A mask of the tokens that may come; `None`: all of them.
    allowed: Option<Vec<u32>>,
    /// Runs of tokens that may not come, none of them empty: each bans its last token behind the others.
    banned: Vec<Vec<TokenId>>,
    /// Tokens before the next one that such a run may begin with.
    longest: usize,
}

impl TokenFilter {
    /// Allows only these tokens, if there are any, and none of the banned runs; and only what `inner` allows.
    pub fn new(allowed: &[TokenId], banned: Vec<Vec<TokenId>>, inner: Option<Constraint>) -> Self {
        assert!(banned.iter().all(|run| !run.is_empty()), "nothing cannot be banned");
        let longest = banned.iter().map(|run| run.len() - 1).max().unwrap_or(0);
        let allowed = (!allowed.is_empty()).then(|| mask_of(allowed));
        Self { rules: Arc::new(Rules { allowed, banned, longest }), inner }
    }
}

fn mask_of(tokens: &[TokenId]) -> Vec<u32> {
    let n_words = tokens.iter().max().map_or(0, |last| *last as usize / 32 + 1);
    let mut mask = vec![0; n_words];
    for token in tokens {
        mask[*token as usize / 32] |= 1 << (token % 32);
    }
    mask
}

impl Grammar for TokenFilter {
    fn matcher(&self) -> Box<dyn Matcher> {
        let inner = self.inner.as_ref().map(|inner| inner.0.any_spelling());
        Box::new(Filtered { rules: Arc::clone(&self.rules), inner, last: Vec::new() })
    }
}

/// One completion.
#[derive(Debug)]
struct Filtered {
    rules: Arc<Rules>,
    inner: Option<Box<dyn Matcher>>,
    /// The newest tokens, as many as a banned run may begin with.
    last: Vec<TokenId>,
}

impl Matcher for Filtered {
    fn allow(&mut self, mask: &mut [u32]) -> Result<(), String> {
        match &mut self.inner {
            Some(inner) => inner.allow(mask)?,
            None => mask.fill(u32::MAX),
        }
        if let Some(allowed) = &self.rules.allowed {
            let allowed = allowed.iter().copied().chain(std::iter::repeat(0));
            mask.iter_mut().zip(allowed).for_each(|(word, allowed)| *word &= allowed);
        }
        for run in &self.rules.banned {
            let (last, before) = run.split_last().expect("no run is empty");
            if let Some(word) = mask.get_mut(*last as usize / 32).filter(|_| self.last.ends_with(before)) {
                *word &= !(1 << (last % 32));
            }
        }
        Ok(())
    }

    fn accept(&mut self, token: TokenId) -> Result<(), String> {
        if self.rules.longest > 0 {
            if self.last.len() == self.rules.longest {
                self.last.remove(0);
            }
            self.last.push(token);
        }
        self.inner.as_mut().map_or(Ok(()), |inner| inner.accept(token))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::constraint::allows;

    const VOCAB: TokenId = 70;

    /// Tokens that may come after some have.
    fn allowed(filter: &TokenFilter, before: &[TokenId]) -> Vec<TokenId> {
        let mut matcher = filter.matcher();
        before.iter().for_each(|token| matcher.accept(*token).unwrap());
        let mut mask = vec![0; VOCAB.div_ceil(32) as usize];
        matcher.allow(&mut mask).unwrap();
        (0..VOCAB).filter(|token| allows(&mask, *token)).collect()
    }

    #[test]
    fn only_allowed_tokens_come() {
        assert_eq!(allowed(&TokenFilter::new(&[3, 31, 32], vec![], None), &[]), [3, 31, 32]);
        assert_eq!(allowed(&TokenFilter::new(&[3], vec![], None), &[3, 3]), [3]);
    }

    #[test]
    fn a_banned_run_bans_its_last_token_behind_the_others_only() {
        let filter = TokenFilter::new(&[], vec![vec![5], vec![1, 2, 69]], None);
        let without = |banned: &[TokenId]| (0..VOCAB).filter(|token| !banned.contains(token)).collect::<Vec<_>>();
        assert_eq!(allowed(&filter, &[]), without(&[5]));
        assert_eq!(allowed(&filter, &[1, 2]), without(&[5, 69]));
        assert_eq!(allowed(&filter, &[7, 7, 1, 2]), without(&[5, 69]));
        assert_eq!(allowed(&filter, &[2]), without(&[5]));
        assert_eq!(allowed(&filter, &[1, 2, 3]), without(&[5]));
    }

    #[test]
    fn a_filter_narrows_what_a_grammar_allows_and_tells_it_what_came() {
        let inner = Constraint(Arc::new(TokenFilter::new(&[4, 5, 6], vec![vec![4, 6]], None)));
        let filter = TokenFilter::new(&[5, 6, 7], vec![], Some(inner));
        assert_eq!(allowed(&filter, &[]), [5, 6]);
        assert_eq!(allowed(&filter, &[4]), [5]);
    }
}
