//! What belongs to a model beside its weights: tokenizer, chat template, special tokens, sampling defaults.

use serde_json::Value;

use stoker_fit::model::Fields;

use super::{ModelConfig, ModelError, ModelSource, gguf::Gguf};
use crate::{
    info::GenerationDefaults, pooling::EmbeddingForm, relevance::Relevance, request::TokenId, text::Tokenizer,
};

const TOKENIZER_FILE: &str = "tokenizer.json";
const TOKENIZER_CONFIG_FILE: &str = "tokenizer_config.json";
const TEMPLATE_FILE: &str = "chat_template.jinja";
/// The template for conversations with tools, where a model has one.
const TOOL_TEMPLATE_FILE: &str = "additional_chat_templates/tool_use.jinja";
const GENERATION_FILE: &str = "generation_config.json";

/// A model's files that are not numbers.
#[derive(Debug)]
pub struct ModelAssets {
    /// Text to tokens and back.
    pub tokenizer: Tokenizer,
    /// The chat templates.
    pub chat_template: Option<ChatTemplates>,
    /// Text of the begin token.
    pub bos_token: Option<String>,
    /// Text of the end token.
    pub eos_token: Option<String>,
    /// Tokens that end a completion.
    pub eos: Vec<TokenId>,
    /// Sampling defaults.
    pub defaults: GenerationDefaults,
    /// How embeddings are made.
    pub embedding: EmbeddingForm,
    /// How texts are compared.
    pub relevance: Option<Relevance>,
}

/// A model's chat templates (Jinja).
#[derive(Clone, Debug, PartialEq)]
pub struct ChatTemplates {
    /// For any conversation.
    pub default: String,
    /// For those with tools, if it is another.
    pub tool_use: Option<String>,
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
            bos_token: token_text(settings.get("bos_token"), || spelled(config.bos_token_id.as_ref())),
            eos_token: token_text(settings.get("eos_token"), || spelled(eos.first())),
            eos,
            defaults,
            embedding: EmbeddingForm::open(source)?,
            relevance: Relevance::open(source, config.vocab_size)?,
            tokenizer,
        })
    }

    /// The same of a GGUF file, which has no sampling defaults.
    pub(super) fn of_gguf(gguf: &Gguf, config: &ModelConfig) -> Result<Self, ModelError> {
        let tokenizer = read_tokenizer(gguf.tokenizer()?.to_string().as_bytes(), gguf.file().into(), config)?;
        Ok(Self {
            chat_template: gguf.value("tokenizer.chat_template").as_str().map(|default| ChatTemplates {
                default: default.to_owned(),
                tool_use: gguf.value("tokenizer.chat_template.tool_use").as_str().map(str::to_owned),
            }),
            bos_token: gguf.token(gguf.value("tokenizer.ggml.bos_token_id")),
            eos_token: gguf.token(gguf.value("tokenizer.ggml.eos_token_id")),
            eos: config.eos_token_ids.clone(),
            defaults: GenerationDefaults::default(),
            embedding: EmbeddingForm::default(),
            relevance: None,
            tokenizer,
        })
    }
}

fn open_tokenizer(source: &ModelSource, config: &ModelConfig) -> Result<Tokenizer, ModelError> {
    read_tokenizer(&source.open(TOKENIZER_FILE)?, source.display(TOKENIZER_FILE), config)
}

fn read_tokenizer(json: &[u8], file: String, config: &ModelConfig) -> Result<Tokenizer, ModelError> {
    let tokenizer = Tokenizer::from_json(json)
        .map_err(|source| ModelError::Tokenizer { file: file.clone(), source: Box::new(source) })?;
    let (expected, found) = (config.vocab_size, tokenizer.base_vocab_size());
    // Fewer tokens than embeddings is usual: tables are padded. Added tokens may lie beyond, as that for images in a model
    // that reads text only (Gemma 3 1B): a prompt with such a one is refused.
    if found > expected {
        return Err(ModelError::WrongTokenizer { file, expected, found });
    }
    Ok(tokenizer)
}

/// Files of their own, or a field of the tokenizer's settings: one template, or several by name.
fn open_template(source: &ModelSource, settings: &Value) -> Result<Option<ChatTemplates>, ModelError> {
    if let Some(default) = open_text(source, TEMPLATE_FILE)? {
        return Ok(Some(ChatTemplates { default, tool_use: open_text(source, TOOL_TEMPLATE_FILE)? }));
    }
    let template = &settings["chat_template"];
    let named = |name: &str| {
        let entry = template.as_array()?.iter().find(|entry| entry["name"] == name)?;
        entry["template"].as_str().map(str::to_owned)
    };
    let default = template.as_str().map(str::to_owned).or_else(|| named("default"));
    Ok(default.map(|default| ChatTemplates { default, tool_use: named("tool_use") }))
}

fn open_text(source: &ModelSource, file: &str) -> Result<Option<String>, ModelError> {
    let Some(bytes) = source.open_optional(file)? else { return Ok(None) };
    let text = std::str::from_utf8(&bytes).map_err(|error| ModelError::Field {
        file: source.display(file),
        field: "template".into(),
        problem: format!("is not UTF-8: {error}"),
    })?;
    Ok(Some(text.to_owned()))
}

/// A token is written as its text or as an object with `content`; `null` says that there is none. Settings that do not name
/// it leave it to the model's configuration.
fn token_text(value: Option<&Value>, of_config: impl FnOnce() -> Option<String>) -> Option<String> {
    match value {
        None => of_config(),
        Some(value) => value.as_str().or_else(|| value["content"].as_str()).map(str::to_owned),
    }
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

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::config::ModelFiles;

    fn templates_of(files: &[(&str, &str)], settings: &str) -> Option<ChatTemplates> {
        let directory = tempfile::tempdir().unwrap();
        for (name, content) in files {
            let path = directory.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        let source = ModelSource::new(ModelFiles::Directory(directory.path().to_owned()));
        open_template(&source, &serde_json::from_str(settings).unwrap()).unwrap()
    }

    fn templates(default: &str, tool_use: Option<&str>) -> Option<ChatTemplates> {
        Some(ChatTemplates { default: default.into(), tool_use: tool_use.map(str::to_owned) })
    }

    #[test]
    fn named_templates_are_found_in_settings_and_in_files() {
        let named =
            r#"{"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]}"#;
        assert_eq!(templates_of(&[], named), templates("d", Some("t")));
        assert_eq!(templates_of(&[], r#"{"chat_template": "d"}"#), templates("d", None));
        assert_eq!(templates_of(&[], r#"{"chat_template": null}"#), None);
        let files = [("chat_template.jinja", "f"), ("additional_chat_templates/tool_use.jinja", "t")];
        assert_eq!(templates_of(&files, named), templates("f", Some("t")));
        assert_eq!(templates_of(&files[..1], named), templates("f", None), "files count, settings do not");
    }

    #[test]
    fn a_token_that_settings_call_null_is_none_whatever_the_configuration_says() {
        let of_config = || Some("<s>".to_owned());
        for (settings, expected) in [
            (r#"{"bos_token": null}"#, None),
            ("{}", Some("<s>")),
            (r#"{"bos_token": "<b>"}"#, Some("<b>")),
            (r#"{"bos_token": {"content": "<c>", "special": true}}"#, Some("<c>")),
        ] {
            let settings: Value = serde_json::from_str(settings).unwrap();
            assert_eq!(token_text(settings.get("bos_token"), of_config).as_deref(), expected);
        }
    }
}
