//! A model's tokenizer: text to tokens and back, and the exact bytes behind one token.
//!
//! Wraps the `tokenizers` crate. It never keeps state between calls; incremental decoding is `Detokenizer`'s.

use std::{borrow::Cow, collections::HashMap};

use serde_json::{Value, json};

use crate::request::TokenId;

/// Why a tokenizer cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// `tokenizer.json` is not what the `tokenizers` crate reads.
    #[error("not a tokenizer: {0}")]
    Malformed(String),
    /// The file decodes tokens in a way whose bytes are not known.
    #[error("decoder {found} is not supported; supported: ByteLevel, ByteFallback, Metaspace")]
    UnsupportedDecoder {
        /// The decoder's description in the file.
        found: String,
    },
    /// The text cannot be expressed in the vocabulary.
    #[error("the text cannot be encoded: {0}")]
    Encode(String),
}

/// How a token's text stands for bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
enum TokenSpelling {
    /// Each character stands for one byte (GPT-2's table).
    ByteLevel,
    /// Plain text with `▁` for a space and `<0xAB>` for single bytes.
    SentencePiece,
}

/// A model's tokenizer.
#[derive(Debug)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    spelling: TokenSpelling,
    byte_of_char: HashMap<char, u8>,
}

impl Tokenizer {
    /// Reads `tokenizer.json`.
    pub fn from_json(json: &[u8]) -> Result<Self, TokenizerError> {
        let inner = parse(json)?;
        let decoder = serde_json::to_value(inner.get_decoder()).unwrap_or(Value::Null);
        let spelling =
            spelling_of(&decoder).ok_or_else(|| TokenizerError::UnsupportedDecoder { found: decoder.to_string() })?;
        Ok(Self { inner, spelling, byte_of_char: byte_of_char() })
    }

    /// One token a byte (ids 0 to 255) and the end token 256, `<|end|>`: for tests and simulations.
    pub fn bytes() -> Self {
        let vocab: HashMap<String, u8> = byte_of_char().into_iter().map(|(c, byte)| (c.to_string(), byte)).collect();
        let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
                                "use_regex": false});
        let file = json!({
            "version": "1.0",
            "added_tokens": [{"id": 256, "content": "<|end|>", "single_word": false, "lstrip": false, "rstrip": false,
                              "normalized": false, "special": true}],
            "pre_tokenizer": byte_level, "decoder": byte_level,
            "model": {"type": "BPE", "vocab": vocab, "merges": []},
        });
        Self::from_json(file.to_string().as_bytes()).expect("the byte tokenizer is well formed")
    }

    /// Tokens of a text. `add_special` adds what the model's template puts around a prompt (a begin token, say).
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<TokenId>, TokenizerError> {
        let encoding =
            self.inner.encode_fast(text, add_special).map_err(|error| TokenizerError::Encode(error.to_string()))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Text of tokens, special ones included. Unknown ids are skipped; broken UTF-8 becomes U+FFFD.
    pub fn decode(&self, tokens: &[TokenId]) -> String {
        let bytes: Vec<u8> = tokens.iter().flat_map(|token| self.token_bytes(*token)).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Text of one token as it would appear in a completion; broken UTF-8 becomes U+FFFD. Empty for an unknown id.
    pub fn token_text(&self, token: TokenId) -> String {
        String::from_utf8_lossy(&self.token_bytes(token)).into_owned()
    }

    /// The exact bytes of one token; empty for an unknown id.
    pub fn token_bytes(&self, token: TokenId) -> Vec<u8> {
        let Some(spelled) = self.inner.id_to_token(token) else { return Vec::new() };
        let is_added = || self.inner.get_added_vocabulary().get_added_tokens_decoder().contains_key(&token);
        match self.spelling {
            TokenSpelling::ByteLevel if is_added() => spelled.into_bytes(),
            TokenSpelling::ByteLevel => self.byte_level_bytes(&spelled),
            // Added ones too: Gemma's runs of spaces are among them.
            TokenSpelling::SentencePiece => sentence_piece_bytes(&spelled),
        }
    }

    /// A control token that is not part of a completion's text.
    pub fn is_special(&self, token: TokenId) -> bool {
        self.inner.get_added_vocabulary().get_added_tokens_decoder().get(&token).is_some_and(|added| added.special)
    }

    /// The token that is exactly this text.
    pub fn token_id(&self, text: &str) -> Option<TokenId> {
        self.inner.token_to_id(text)
    }

    /// One more than the largest id.
    pub fn n_ids(&self) -> usize {
        self.inner.get_vocab(true).into_values().max().map_or(0, |id| id as usize + 1)
    }

    /// Tokens of the model itself, without those added to them.
    pub fn base_vocab_size(&self) -> usize {
        self.inner.get_vocab_size(false)
    }

    fn byte_level_bytes(&self, spelled: &str) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(spelled.len());
        for c in spelled.chars() {
            match self.byte_of_char.get(&c) {
                Some(byte) => bytes.push(*byte),
                None => bytes.extend(c.encode_utf8(&mut [0; 4]).as_bytes()),
            }
        }
        bytes
    }
}

/// The crate panics on some damaged files (a decoder of a kind it does not know, for one); a file must not end the
/// process, so its panic becomes a refusal here.
fn parse(json: &[u8]) -> Result<tokenizers::Tokenizer, TokenizerError> {
    match std::panic::catch_unwind(|| tokenizers::Tokenizer::from_bytes(json)) {
        Ok(parsed) => parsed.map_err(|error| TokenizerError::Malformed(error.to_string())),
        Err(_) => Err(TokenizerError::Malformed("a part of it is of an unknown kind".into())),
    }
}

fn sentence_piece_bytes(spelled: &str) -> Vec<u8> {
    let single = spelled.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
    match single.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
        Some(byte) => vec![byte],
        None => Cow::from(spelled).replace('▁', " ").into_bytes(),
    }
}

/// Looks through `Sequence` decoders for the part that says how tokens spell bytes.
fn spelling_of(decoder: &Value) -> Option<TokenSpelling> {
    match decoder["type"].as_str()? {
        "ByteLevel" => Some(TokenSpelling::ByteLevel),
        "ByteFallback" | "Metaspace" => Some(TokenSpelling::SentencePiece),
        "Sequence" => decoder["decoders"].as_array()?.iter().find_map(spelling_of),
        _ => None,
    }
}

/// GPT-2's table: printable bytes stand for themselves, the others for characters from U+0100 on.
fn byte_of_char() -> HashMap<char, u8> {
    let is_printable = |byte: &u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let printable = (0..=255).filter(is_printable).map(|byte| (char::from(byte), byte));
    let others = (0..=255u8).filter(|byte| !is_printable(byte));
    let shifted = (0x100..).filter_map(char::from_u32).zip(others);
    printable.chain(shifted).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_its_own_character() {
        let table = byte_of_char();
        let mut bytes: Vec<u8> = table.values().copied().collect();
        bytes.sort_unstable();
        assert_eq!(bytes, (0..=255).collect::<Vec<u8>>());
        assert_eq!(table[&'Ġ'], b' ');
        assert_eq!(table[&'Ċ'], b'\n');
    }

    #[test]
    fn the_byte_tokenizer_spells_every_text_byte_by_byte() {
        let tokenizer = Tokenizer::bytes();
        let text = "naïve 🔥\n\0";
        let tokens = tokenizer.encode(text, true).unwrap();
        assert_eq!(tokens, text.bytes().map(u32::from).collect::<Vec<_>>());
        assert_eq!(tokenizer.decode(&tokens), text);
        assert_eq!(tokenizer.encode("<|end|>", true).unwrap(), [256]);
        assert!(tokenizer.is_special(256) && !tokenizer.is_special(65));
    }

    #[test]
    fn a_sentence_piece_token_spells_spaces_and_single_bytes() {
        assert_eq!(sentence_piece_bytes("▁the"), b" the");
        assert_eq!(sentence_piece_bytes("<0xE2>"), [0xE2]);
        assert_eq!(sentence_piece_bytes("<0xZZ>"), b"<0xZZ>");
    }

    #[test]
    fn a_file_that_is_no_tokenizer_is_refused() {
        assert!(matches!(Tokenizer::from_json(b"{}"), Err(TokenizerError::Malformed(_))));
        let unknown_decoder = br#"{"version": "1.0", "decoder": {"type": "Nonsense"},
                                   "model": {"type": "BPE", "vocab": {}, "merges": []}}"#;
        assert!(matches!(Tokenizer::from_json(unknown_decoder), Err(TokenizerError::Malformed(_))));
    }
}
