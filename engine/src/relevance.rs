//! Relevance: how well one text answers another. A causal reranker says it by the logits of two tokens behind a prompt that shows it
//! both texts; a model of embeddings by the angle between their vectors. Which of the two, and with which tokens, is the model's own
//! word, in the files that sentence-transformers writes beside it. This computes nothing.

use std::ops::Not;

use serde_json::{Map, Value};

use crate::{
    model::{ModelError, ModelSource},
    modules::{Module, open_modules, refused},
    request::TokenId,
};

/// Prompts, and what becomes of scores.
const SETTINGS_FILE: &str = "config_sentence_transformers.json";
/// What the chat template is told.
const PROCESSING_FILE: &str = "sentence_bert_config.json";

/// How a model compares two texts.
#[derive(Clone, Debug, PartialEq)]
pub enum Relevance {
    /// By what it would say of them.
    Logits(LogitScore),
    /// By the cosine of their embeddings.
    Cosine,
}

/// What a causal reranker is asked, and which tokens are its answer.
#[derive(Clone, Debug, PartialEq)]
pub struct LogitScore {
    /// Said of texts that match.
    pub true_token: TokenId,
    /// Said of texts that do not.
    pub false_token: TokenId,
    /// What makes a score of the difference of their logits.
    pub activation: Activation,
    /// What matching means, unless a request says so. It is the prompt's system message.
    pub instruction: Option<String>,
    /// Variables of the chat template.
    pub template_variables: Map<String, Value>,
}

/// From the difference of two logits to a score.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Activation {
    /// How likely the texts match, from 0 to 1, if nothing but the two tokens could be said.
    #[default]
    Sigmoid,
    /// The difference as it is.
    Identity,
}

impl Activation {
    /// The score of a difference.
    pub fn of(self, difference: f64) -> f64 {
        match self {
            Self::Sigmoid => 1.0 / (1.0 + (-difference).exp()),
            Self::Identity => difference,
        }
    }
}

impl Relevance {
    /// What the model's files say; `None` for one that was made for neither.
    pub(crate) fn open(source: &ModelSource, vocab_size: usize) -> Result<Option<Self>, ModelError> {
        let modules = open_modules(source)?.unwrap_or_default();
        let of_kind = |kind: &str| modules.iter().find(|module| module.kind() == kind);
        match (of_kind("LogitScore"), of_kind("Pooling")) {
            (Some(module), _) => Ok(Some(Self::Logits(LogitScore::open(source, module, vocab_size)?))),
            (None, pooling) => Ok(pooling.map(|_| Self::Cosine)),
        }
    }
}

impl LogitScore {
    fn open(source: &ModelSource, module: &Module, vocab_size: usize) -> Result<Self, ModelError> {
        let (file, own) = (module.settings_file(), module.settings(source)?);
        let token = |field: &str| {
            let token = own[field].as_u64().filter(|token| *token < vocab_size as u64);
            token.map(|token| token as TokenId).ok_or_else(|| {
                let problem = format!("is {}, expected a token below {vocab_size}", own[field]);
                refused(source, &file, field, problem)
            })
        };
        let settings = source.json_optional(SETTINGS_FILE)?;
        let processing = source.json_optional(PROCESSING_FILE)?;
        let variables = &processing["processing_kwargs"]["chat_template"];
        Ok(Self {
            true_token: token("true_token_id")?,
            false_token: token("false_token_id")?,
            activation: open_activation(source, &settings)?,
            instruction: default_prompt(&settings),
            template_variables: variables.as_object().cloned().unwrap_or_default(),
        })
    }
}

/// Its class. A file that names none leaves it to the number of scores, which is one.
fn open_activation(source: &ModelSource, settings: &Value) -> Result<Activation, ModelError> {
    let Some(class) = settings["activation_fn"].as_str() else { return Ok(Activation::default()) };
    match class.rsplit('.').next() {
        Some("Sigmoid") => Ok(Activation::Sigmoid),
        Some("Identity") => Ok(Activation::Identity),
        _ => {
            let problem = format!("is {class}, expected Sigmoid or Identity");
            Err(refused(source, SETTINGS_FILE, "activation_fn", problem))
        }
    }
}

fn default_prompt(settings: &Value) -> Option<String> {
    let prompt = settings["prompts"][settings["default_prompt_name"].as_str()?].as_str()?;
    prompt.is_empty().not().then(|| prompt.to_owned())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use serde_json::json;

    use super::*;
    use crate::config::ModelFiles;

    fn open(files: &[(&str, Value)]) -> Result<Option<Relevance>, String> {
        let directory = tempfile::tempdir().unwrap();
        for (name, content) in files {
            let path = directory.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content.to_string()).unwrap();
        }
        let source = ModelSource::new(ModelFiles::Directory(directory.path().to_owned()));
        Relevance::open(&source, 300).map_err(|error| error.to_string())
    }

    fn modules(kind: &str) -> (&'static str, Value) {
        let module = |name: &str, class: &str| json!({"path": name, "type": class});
        ("modules.json", json!([module("", "sentence_transformers.base.Transformer"), module("1_Last", kind)]))
    }

    #[test]
    fn a_reranker_names_its_tokens_its_instruction_and_what_its_template_is_told() {
        let tokens = ("1_Last/config.json", json!({"true_token_id": 7, "false_token_id": 8}));
        let listed = modules("sentence_transformers.cross_encoder.modules.logit_score.LogitScore");
        let plain = LogitScore {
            true_token: 7,
            false_token: 8,
            activation: Activation::Sigmoid,
            instruction: None,
            template_variables: Map::new(),
        };
        let found = open(&[listed.clone(), tokens.clone()]);
        assert_eq!(found, Ok(Some(Relevance::Logits(plain.clone()))));
        let cached = ("1_Last-config.json", tokens.1.clone());
        assert_eq!(open(&[listed.clone(), cached]), found, "as the cache of fetched models names it");
        let settings = json!({"activation_fn": "torch.nn.modules.linear.Identity", "default_prompt_name": "web",
                              "prompts": {"web": "Find what answers."}});
        let processing = json!({"processing_kwargs": {"chat_template": {"add_generation_prompt": true}}});
        let more = [listed, tokens, (SETTINGS_FILE, settings), (PROCESSING_FILE, processing)];
        let expected = LogitScore {
            activation: Activation::Identity,
            instruction: Some("Find what answers.".into()),
            template_variables: Map::from_iter([("add_generation_prompt".to_owned(), json!(true))]),
            ..plain
        };
        assert_eq!(open(&more), Ok(Some(Relevance::Logits(expected))));
    }

    #[test]
    fn what_cannot_be_scored_with_is_refused_by_its_file_and_field() {
        let listed = modules("sentence_transformers.cross_encoder.modules.logit_score.LogitScore");
        let softmax = json!({"activation_fn": "torch.nn.modules.activation.Softmax"});
        for (tokens, settings, said) in [
            (json!({"true_token_id": 7}), json!({}), "false_token_id"),
            (json!({"true_token_id": 300, "false_token_id": 1}), json!({}), "expected a token below 300"),
            (json!({"true_token_id": 1, "false_token_id": 2}), softmax, "Softmax"),
        ] {
            let refused = open(&[listed.clone(), ("1_Last/config.json", tokens), (SETTINGS_FILE, settings)]);
            assert!(refused.as_ref().is_err_and(|reason| reason.contains(said)), "{refused:?}");
        }
    }

    #[test]
    fn embeddings_are_compared_and_other_models_compare_nothing() {
        assert_eq!(open(&[modules("sentence_transformers.models.Pooling")]), Ok(Some(Relevance::Cosine)));
        assert_eq!(open(&[]), Ok(None));
    }

    #[test]
    fn a_difference_is_a_score_between_zero_and_one_or_itself() {
        assert_eq!(Activation::Sigmoid.of(0.0), 0.5);
        assert!(Activation::Sigmoid.of(800.0) == 1.0 && Activation::Sigmoid.of(-800.0) == 0.0);
        assert_eq!(Activation::Identity.of(-3.5), -3.5);
    }
}
