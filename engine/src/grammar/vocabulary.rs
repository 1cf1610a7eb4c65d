//! A tokenizer's vocabulary as llguidance wants it: the exact bytes of every token, special tokens behind a mark that no
//! text contains.

use std::sync::Arc;

use toktrie::{TokEnv, TokRxInfo, TokTrie, TokenizerEnv};

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

/// A text that comes before another one, so that a tokenizer that writes a space at the beginning writes it there.
const LEAD: &str = "\n";
/// Bytes of a text that are looked at, to know its first tokens. Far more than a token has: its end changes none of these.
const LOOKED_AT_BYTES: usize = 512;

/// What llguidance calls a tokenizer. Where a grammar leaves one text, the tokens that come are those that the model's own
/// tokenizer makes of it.
pub(super) fn environment(tokenizer: &Arc<Tokenizer>, eos: &[TokenId]) -> Result<TokEnv, String> {
    let words = words(tokenizer);
    let eos: Vec<TokenId> = eos.iter().copied().filter(|id| (*id as usize) < words.len()).collect();
    let Some(first) = eos.first() else { return Err("it has no end token".into()) };
    let trie = TokTrie::from(&TokRxInfo::new(words.len() as u32, *first), &words).with_eos_tokens(&eos);
    Ok(Arc::new(Canonical { trie, tokenizer: Arc::clone(tokenizer) }))
}

/// The same vocabulary without a word about how texts are cut into tokens: masks allow every way.
pub(super) fn any_spelling(environment: &TokEnv) -> TokEnv {
    Arc::new(AnySpelling(Arc::clone(environment)))
}

struct Canonical {
    trie: TokTrie,
    tokenizer: Arc<Tokenizer>,
}

impl Canonical {
    /// Tokens of a text in the midst of others.
    fn tokens(&self, text: &str) -> Vec<TokenId> {
        let alone = || self.tokenizer.encode(text, false).ok();
        let behind = || self.behind_lead(text);
        let exact = |tokens: &Vec<TokenId>| self.spell(tokens, text);
        alone().filter(exact).or_else(|| behind().filter(exact)).unwrap_or_else(|| self.any_tokens(text.as_bytes()))
    }

    fn behind_lead(&self, text: &str) -> Option<Vec<TokenId>> {
        let lead = self.tokenizer.encode(LEAD, false).ok()?;
        let tokens = self.tokenizer.encode(&format!("{LEAD}{text}"), false).ok()?;
        tokens.strip_prefix(&lead[..]).map(<[TokenId]>::to_vec)
    }

    /// Whether the tokens are exactly this text. Control tokens are no text, even if theirs is the same.
    fn spell(&self, tokens: &[TokenId], text: &str) -> bool {
        let bytes: Vec<u8> = tokens.iter().flat_map(|token| self.tokenizer.token_bytes(*token)).collect();
        bytes == text.as_bytes() && !tokens.iter().any(|token| self.tokenizer.is_special(*token))
    }

    /// The longest token each time: for what the tokenizer has no tokens of its own, as pieces of a character.
    fn any_tokens(&self, bytes: &[u8]) -> Vec<TokenId> {
        self.trie.greedy_tokenize(bytes)
    }
}

impl TokenizerEnv for Canonical {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        let looked_at = &bytes[..bytes.len().min(LOOKED_AT_BYTES)];
        let tokens = |chunk: std::str::Utf8Chunk<'_>| {
            let text = if chunk.valid().is_empty() { Vec::new() } else { self.tokens(chunk.valid()) };
            [text, self.any_tokens(chunk.invalid())].concat()
        };
        let mut all: Vec<TokenId> = looked_at.utf8_chunks().flat_map(tokens).collect();
        all.extend(self.any_tokens(&bytes[looked_at.len()..]));
        all
    }
}

struct AnySpelling(TokEnv);

impl TokenizerEnv for AnySpelling {
    fn tok_trie(&self) -> &TokTrie {
        self.0.tok_trie()
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        self.0.tokenize_bytes(bytes)
    }

    fn tokenize_is_canonical(&self) -> bool {
        false
    }
}
