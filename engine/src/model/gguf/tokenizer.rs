//! The tokenizer of a GGUF file, written as the `tokenizer.json` it was made from: byte-level BPE, or SentencePiece's BPE
//! with bytes for what it does not know.

use serde_json::{Map, Value, json};

use super::{Gguf, merges::merges_of};
use crate::model::ModelError;

const MODEL: &str = "tokenizer.ggml.model";
const PRE: &str = "tokenizer.ggml.pre";
const TOKENS: &str = "tokenizer.ggml.tokens";
const SCORES: &str = "tokenizer.ggml.scores";
const TYPES: &str = "tokenizer.ggml.token_type";
const MERGES: &str = "tokenizer.ggml.merges";

/// ggml's numbers of token types.
const CONTROL: u64 = 3;
const USER_DEFINED: u64 = 4;

/// How a text is cut before its words become tokens: the patterns are the ones the vocabularies were made with.
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

pub(super) fn tokenizer_json(gguf: &Gguf) -> Result<Value, ModelError> {
    let tokens = Tokens::read(gguf)?;
    let mut tokenizer = match gguf.value(MODEL).as_str() {
        Some("gpt2") => byte_level(gguf, &tokens)?,
        Some("llama") => sentence_piece(gguf, &tokens)?,
        _ => return Err(gguf.error(MODEL, format!("is {}, supported: gpt2, llama", gguf.value(MODEL)))),
    };
    tokenizer["version"] = json!("1.0");
    tokenizer["added_tokens"] = tokens.added();
    tokenizer["post_processor"] = begin_token(gguf, &tokens)?;
    Ok(tokenizer)
}

/// The vocabulary as the file spells it.
struct Tokens<'a> {
    texts: Vec<&'a str>,
    types: Vec<u64>,
}

impl<'a> Tokens<'a> {
    fn read(gguf: &'a Gguf) -> Result<Self, ModelError> {
        let list = gguf.value(TOKENS).as_array().ok_or_else(|| gguf.error(TOKENS, "is not a list of tokens"))?;
        let texts = list.iter().map(Value::as_str).collect::<Option<Vec<_>>>();
        let texts = texts.ok_or_else(|| gguf.error(TOKENS, "is not a list of texts"))?;
        let types =
            gguf.value(TYPES).as_array().map(|types| types.iter().map(|kind| kind.as_u64().unwrap_or(0)).collect());
        Ok(Self { texts, types: types.unwrap_or_default() })
    }

    /// Tokens that are found whole in a text before anything else.
    fn added(&self) -> Value {
        let added = self
            .texts
            .iter()
            .zip(&self.types)
            .enumerate()
            .filter(|(_, (_, kind))| matches!(**kind, CONTROL | USER_DEFINED));
        let entry = |(id, (text, kind)): (usize, (&&str, &u64))| {
            json!({"id": id, "content": text, "special": *kind == CONTROL, "normalized": false, "single_word": false,
                   "lstrip": false, "rstrip": false})
        };
        added.map(entry).collect()
    }
}

fn vocabulary<'a>(texts: impl Iterator<Item = &'a str>) -> Map<String, Value> {
    texts.enumerate().map(|(id, text)| (text.to_owned(), id.into())).collect()
}

fn byte_level(gguf: &Gguf, tokens: &Tokens) -> Result<Value, ModelError> {
    let list = gguf.value(MERGES).as_array().ok_or_else(|| gguf.error(MERGES, "is not a list of merges"))?;
    let pair = |merge: &Value| merge.as_str().and_then(|text| text.split_once(' ')).map(|(a, b)| json!([a, b]));
    let merges = list.iter().map(pair).collect::<Option<Vec<_>>>();
    let merges =
        merges.ok_or_else(|| gguf.error(MERGES, "has an entry that is not two tokens with a space between"))?;
    let cut = |pattern: &str| {
        json!([{"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false},
               {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false}])
    };
    let words = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": true});
    let (steps, ignore_merges, normalizer) = match gguf.value(PRE).as_str() {
        None | Some("default" | "gpt-2") => (json!([words]), false, Value::Null),
        Some("smollm") => (json!([{"type": "Digits", "individual_digits": true}, words]), false, Value::Null),
        Some("llama-bpe" | "llama3" | "llama-v3") => (cut(LLAMA3), true, Value::Null),
        Some("dbrx" | "smaug-bpe" | "falcon3") => (cut(LLAMA3), false, Value::Null),
        Some("qwen2" | "deepseek-r1-qwen") => (cut(QWEN2), false, json!({"type": "NFC"})),
        Some("tekken") => (cut(TEKKEN), true, Value::Null),
        Some(other) => {
            let known = "default, gpt-2, smollm, llama-bpe, dbrx, qwen2, deepseek-r1-qwen, tekken";
            return Err(gguf.error(PRE, format!("is \"{other}\", supported: {known}")));
        }
    };
    Ok(json!({
        "normalizer": normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false},
        "model": {"type": "BPE", "vocab": vocabulary(tokens.texts.iter().copied()), "merges": merges,
                  "ignore_merges": ignore_merges},
    }))
}

fn sentence_piece(gguf: &Gguf, tokens: &Tokens) -> Result<Value, ModelError> {
    let architecture = gguf.described().family()?.architecture;
    let is_gemma = architecture.starts_with("Gemma");
    let texts: Vec<String> =
        tokens.texts.iter().map(|text| if is_gemma { respelled(text) } else { text.to_string() }).collect();
    let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
    let scores = match is_gemma {
        // Gemma's vocabulary is in the order of its merges, its scores are not.
        true => (0..texts.len()).map(|id| -(id as f64)).collect(),
        false => scores(gguf)?,
    };
    let unknown = gguf.token(gguf.value("tokenizer.ggml.unknown_token_id"));
    let has_prefix = gguf.value("tokenizer.ggml.add_space_prefix").as_bool().unwrap_or(!is_gemma);
    let (normalizer, pre_tokenizer) = spaces(has_prefix, architecture);
    Ok(json!({
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {"type": "BPE", "vocab": vocabulary(texts.iter().copied()), "merges": merges_of(&texts, &scores),
                  "unk_token": unknown, "fuse_unk": true, "byte_fallback": true},
    }))
}

/// How spaces become part of words, and where a text gets one more in front: in Llama's vocabularies where it has none,
/// in Phi's always.
fn spaces(has_prefix: bool, architecture: &str) -> (Value, Value) {
    let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
    match (has_prefix, architecture.starts_with("Phi")) {
        (false, _) => (replace, Value::Null),
        (true, true) => {
            let steps = json!([{"type": "Prepend", "prepend": "▁"}, replace]);
            (json!({"type": "Sequence", "normalizers": steps}), Value::Null)
        }
        (true, false) => {
            (Value::Null, json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": false}))
        }
    }
}

/// Runs of spaces, which the files have as they look.
fn respelled(text: &str) -> String {
    match text.len() > 1 && text.bytes().all(|byte| byte == b' ') {
        true => "▁".repeat(text.len()),
        false => text.to_owned(),
    }
}

fn scores(gguf: &Gguf) -> Result<Vec<f64>, ModelError> {
    let scores = gguf.value(SCORES).as_array().and_then(|list| list.iter().map(Value::as_f64).collect());
    scores.ok_or_else(|| gguf.error(SCORES, "is not a list of numbers"))
}

/// SentencePiece vocabularies begin a prompt with the begin token unless the file says otherwise, others only if it does.
fn begin_token(gguf: &Gguf, tokens: &Tokens) -> Result<Value, ModelError> {
    const KEY: &str = "tokenizer.ggml.bos_token_id";
    let by_default = gguf.value(MODEL) == "llama";
    if !gguf.value("tokenizer.ggml.add_bos_token").as_bool().unwrap_or(by_default) {
        return Ok(Value::Null);
    }
    let id = gguf.value(KEY).as_u64().and_then(|id| usize::try_from(id).ok());
    let Some((id, text)) = id.and_then(|id| Some((id, *tokens.texts.get(id)?))) else {
        return Err(
            gguf.error(KEY, format!("is {}, expected one of the {} tokens", gguf.value(KEY), tokens.texts.len()))
        );
    };
    Ok(json!({
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": text, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {text: {"id": text, "ids": [id], "tokens": [text]}},
    }))
}
