//! What belongs to a model beside its weights: tokenizer, chat template, special tokens, sampling defaults.

use serde_json::Value;

use super::{ModelConfig, ModelError, ModelSource, fields::Fields, gguf::Gguf};
use crate::{info::GenerationDefaults, request::TokenId, text::Tokenizer};

const TOKENIZER_FILE: &str = "tokenizer.json";
const TOKENIZER_CONFIG_FILE: &str = "tokenizer_config.json";
const TEMPLATE_FILE: &str = "chat_template.jinja";
const GENERATION_FILE: &str = "generation_config.json";

/// A model's files that are not numbers.
#[derive(Debug)]
pub struct ModelAssets {
    /// Text to tokens and back.
    pub tokenizer: Tokenizer,
    /// The chat template (Jinja).
    pub chat_template: Option<String>,
    /// Text of the begin token.
    pub bos_token: Option<String>,
    /// Text of the end token.
    pub eos_token: Option<String>,
    /// Tokens that end a completion.
    pub eos: Vec<TokenId>,
    /// Sampling defaults.
    pub defaults: GenerationDefaults,
}

impl ModelAssets {
    /// Reads everything; only the tokenizer must be there.
    pub fn open(source: &ModelSource, config: &ModelConfig) -> Result<Self, ModelError> {
        let tokenizer = open_tokenizer(source, config)?;
        let settings = source.json_optional(TOKENIZER_CONFIG_FILE)?;
        let generation = source.json_optional(GENERATION_FILE)?;
        let (defaults, generation_eos) = read_generation(&generation, source)?;
        let eos = if generation_eos.is_empty() { config.eos_token_ids.clone() } else { generation_eos };
        let spelled = |token: Option<&TokenId>| token.map(|token| tokenizer.token_text(*token));
        Ok(Self {
            chat_template: open_template(source, &settings)?,
            bos_token: token_text(&settings["bos_token"]).or_else(|| spelled(config.bos_token_id.as_ref())),
            eos_token: token_text(&settings["eos_token"]).or_else(|| spelled(eos.first())),
            eos,
            defaults,
            tokenizer,
        })
    }

    /// The same of a GGUF file, which has no sampling defaults.
    pub(super) fn of_gguf(gguf: &Gguf, config: &ModelConfig) -> Result<Self, ModelError> {
        let tokenizer = read_tokenizer(gguf.tokenizer()?.to_string().as_bytes(), gguf.file().into(), config)?;
        Ok(Self {
            chat_template: gguf.value("tokenizer.chat_template").as_str().map(str::to_owned),
            bos_token: gguf.token(gguf.value("tokenizer.ggml.bos_token_id")),
            eos_token: gguf.token(gguf.value("tokenizer.ggml.eos_token_id")),
            eos: config.eos_token_ids.clone(),
            defaults: GenerationDefaults::default(),
            tokenizer,
        })
    }
}

fn open_tokenizer(source: &ModelSource, config: &ModelConfig) -> Result<Tokenizer, ModelError> {
    read_tokenizer(&source.open(TOKENIZER_FILE)?, source.display(TOKENIZER_FILE), config)
}

fn read_tokenizer(json: &[u8], file: String, config: &ModelConfig) -> Result<Tokenizer, ModelError> {
    let tokenizer =
        Tokenizer::from_json(json).map_err(|source| ModelError::Tokenizer { file: file.clone(), source })?;
    let (expected, found) = (config.vocab_size, tokenizer.vocab_size());
    // Fewer tokens than embeddings is usual: tables are padded.
    if found > expected {
        return Err(ModelError::WrongTokenizer { file, expected, found });
    }
    Ok(tokenizer)
}

/// A file of its own, or a field of the tokenizer's settings: one template, or several by name.
fn open_template(source: &ModelSource, settings: &Value) -> Result<Option<String>, ModelError> {
    if let Some(bytes) = source.open_optional(TEMPLATE_FILE)? {
        let template = std::str::from_utf8(&bytes).map_err(|error| ModelError::Field {
            file: source.display(TEMPLATE_FILE),
            field: "template".into(),
            problem: format!("is not UTF-8: {error}"),
        })?;
        return Ok(Some(template.to_owned()));
    }
    let template = match &settings["chat_template"] {
        Value::Array(named) => {
            let default = named.iter().find(|entry| entry["name"] == "default");
            default.and_then(|entry| entry["template"].as_str())
        }
        value => value.as_str(),
    };
    Ok(template.map(str::to_owned))
}

/// A token is written as its text or as an object with `content`.
fn token_text(value: &Value) -> Option<String> {
    value.as_str().or_else(|| value["content"].as_str()).map(str::to_owned)
}

fn read_generation(generation: &Value, source: &ModelSource) -> Result<(GenerationDefaults, Vec<TokenId>), ModelError> {
    if generation.is_null() {
        return Ok((GenerationDefaults::default(), Vec::new()));
    }
    let file = source.display(GENERATION_FILE);
    let fields = Fields::of(generation, &file)?;
    // `do_sample: false` is how these files say greedy.
    let greedy = (generation["do_sample"] == Value::Bool(false)).then_some(0.0);
    let defaults = GenerationDefaults {
        temperature: greedy.or(fields.number("temperature")?),
        top_p: fields.number("top_p")?,
        top_k: fields.number("top_k")?.map(|k| k as u32),
        min_p: fields.number("min_p")?,
        repetition_penalty: fields.number("repetition_penalty")?,
    };
    Ok((defaults, fields.tokens("eos_token_id")?))
}
