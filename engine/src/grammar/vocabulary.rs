//! A tokenizer's vocabulary as llguidance wants it: the exact bytes of every token, special tokens behind a mark that no
//! text contains.

use std::sync::Arc;

use toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};

use crate::{request::TokenId, text::Tokenizer};

/// The bytes of every token by its id; empty for an id that no token has, which no grammar allows then.
pub(super) fn words(tokenizer: &Tokenizer) -> Vec<Vec<u8>> {
    let word = |token| {
        let bytes = tokenizer.token_bytes(token);
        if tokenizer.is_special(token) && !bytes.is_empty() {
            return [&[TokTrie::SPECIAL_TOKEN_MARKER], bytes.as_slice()].concat();
        }
        bytes
    };
    (0..tokenizer.n_ids() as TokenId).map(word).collect()
}

/// What llguidance calls a tokenizer. It only ever reads what tokens mean; it never tokenizes for us, so how it would is
/// of no account.
pub(super) fn environment(tokenizer: &Tokenizer, eos: &[TokenId]) -> Result<TokEnv, String> {
    let words = words(tokenizer);
    let eos: Vec<TokenId> = eos.iter().copied().filter(|id| (*id as usize) < words.len()).collect();
    let Some(first) = eos.first() else { return Err("it has no end token".into()) };
    let trie = TokTrie::from(&TokRxInfo::new(words.len() as u32, *first), &words).with_eos_tokens(&eos);
    Ok(Arc::new(ApproximateTokEnv::new(trie)))
}
