//! Text to tokens and back, piece by piece, as transformers does it on 10 000 random strings. The goldens are made by
//! `tests/tools/make_tokenizer_goldens.py`, which explains them.

use std::{fs, path::PathBuf};

use serde_json::Value;
use sha2::{Digest, Sha256};
use stoker_engine::{
    TokenId,
    text::{Detokenizer, Tokenizer},
};

use crate::{common, families::random_bits};

const N_STRINGS: usize = 10_000;
const N_CHUNK: usize = 1000;
const WORDS: [&str; 14] =
    ["the", " the", "token", "serve", "  ", "\n", "\r\n", "\t", "1234", "don't", "</s>", "<s>", "<|im_end|>", "ing"];
/// First code points and sizes of the ranges that characters come from.
const RANGES: [(u32, u64); 10] = [
    (0x20, 95),
    (0x61, 26),
    (0xA0, 0x160),
    (0x300, 0x70),
    (0x400, 0x100),
    (0x4E00, 0x5000),
    (0x1F300, 0x400),
    (0x200B, 5),
    (0, 0x20),
    (0x10000, 0x100000),
];

fn goldens() -> PathBuf {
    common::checkpoint("../tokenizers")
}

/// The script's string of that number.
fn string(number: usize) -> String {
    let mut bits = random_bits(&format!("string {number}"));
    let mut next = || bits.next().expect("there is no end");
    let len = next() % 25;
    let piece = |z: u64| {
        let (kind, rest) = ((z % 14) as usize, z >> 8);
        match RANGES.get(kind) {
            Some((first, size)) => char::from_u32(first + (rest % size) as u32).unwrap().to_string(),
            None => WORDS[(rest % WORDS.len() as u64) as usize].to_owned(),
        }
    };
    (0..len).map(|_| piece(next())).collect()
}

fn hex(digest: Sha256) -> String {
    digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

fn digest_texts(texts: impl Iterator<Item = String>) -> String {
    let mut digest = Sha256::new();
    for text in texts {
        digest.update((text.len() as u32).to_le_bytes());
        digest.update(text);
    }
    hex(digest)
}

fn digest_ids(lists: &[Vec<TokenId>]) -> String {
    let mut digest = Sha256::new();
    for ids in lists {
        digest.update((ids.len() as u32).to_le_bytes());
        ids.iter().for_each(|id| digest.update(id.to_le_bytes()));
    }
    hex(digest)
}

/// The text as it would be streamed, a token at a time.
fn streamed(tokenizer: &Tokenizer, ids: &[TokenId]) -> String {
    let mut detokenizer = Detokenizer::default();
    let mut text: String = ids.iter().map(|id| detokenizer.push(&tokenizer.token_bytes(*id))).collect();
    text.push_str(&detokenizer.finish());
    text
}

/// How transformers' decoding of a whole text begins.
#[derive(Clone, Copy, PartialEq)]
enum FirstSpace {
    Kept,
    /// The space that the vocabulary puts before a text is dropped with it. A completion is the rest of a text: what is
    /// streamed keeps its spaces.
    Dropped,
}

impl FirstSpace {
    fn of(self, text: String) -> String {
        match (self, text.strip_prefix(' ')) {
            (Self::Dropped, Some(rest)) => rest.to_owned(),
            _ => text,
        }
    }
}

fn check(name: &str, file: PathBuf, first_space: FirstSpace) {
    let tokenizer = Tokenizer::from_json(&fs::read(file).unwrap()).unwrap();
    let golden: Value = serde_json::from_slice(&fs::read(goldens().join("golden.json")).unwrap()).unwrap();
    let strings: Vec<String> = (0..N_STRINGS).map(string).collect();
    assert_eq!(digest_texts(strings.iter().cloned()), golden["strings"], "the strings of the script");
    for (chunk, strings) in strings.chunks(N_CHUNK).enumerate() {
        let expected = &golden[name][chunk];
        let ids: Vec<Vec<TokenId>> = strings.iter().map(|text| tokenizer.encode(text, true).unwrap()).collect();
        assert_eq!(digest_ids(&ids), expected[0], "{name}: tokens of strings from {}", chunk * N_CHUNK);
        let texts = ids.iter().map(|ids| first_space.of(streamed(&tokenizer, ids)));
        assert_eq!(digest_texts(texts), expected[1], "{name}: texts of strings from {}", chunk * N_CHUNK);
        if expected[2].is_string() {
            let cut = ids.iter().map(|ids| streamed(&tokenizer, &ids[..ids.len().saturating_sub(1)]));
            assert_eq!(digest_texts(cut), expected[2], "{name}: cut texts of strings from {}", chunk * N_CHUNK);
        }
    }
}

#[test]
fn the_built_in_tokenizer_is_transformers_on_ten_thousand_strings() {
    check("ember", common::ember().join("tokenizer.json"), FirstSpace::Kept);
}

#[test]
fn a_byte_level_tokenizer_is_transformers_on_ten_thousand_strings() {
    check("byte-level", goldens().join("byte-level.json"), FirstSpace::Kept);
}

#[test]
fn a_sentence_piece_tokenizer_is_transformers_on_ten_thousand_strings() {
    check("sentence-piece", goldens().join("sentence-piece.json"), FirstSpace::Dropped);
}

#[test]
fn added_tokens_spell_spaces_as_the_others_do() {
    let golden: Value = serde_json::from_slice(&fs::read(goldens().join("added.json")).unwrap()).unwrap();
    let tokenizer = Tokenizer::from_json(golden["tokenizer"].to_string().as_bytes()).unwrap();
    for case in golden["decoded"].as_array().unwrap() {
        let tokens: Vec<TokenId> = serde_json::from_value(case[0].clone()).unwrap();
        assert_eq!(tokenizer.decode(&tokens), case[1].as_str().unwrap(), "{tokens:?}");
    }
}
