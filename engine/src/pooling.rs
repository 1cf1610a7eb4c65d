//! Embeddings: one vector of a text, made of what the model's last norm gives for its tokens. Which tokens count is the model's own
//! word, in the files that sentence-transformers writes beside it.

use std::ops::Range;

use serde_json::Value;

use crate::{
    model::{ModelError, ModelSource},
    modules::{MODULES_FILE, Module, open_modules, refused},
};

/// The tokens of a text whose outputs its vector is made of.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Pooling {
    /// The last one, which has seen all others. What decoders are taught that say nothing else.
    #[default]
    LastToken,
    /// All of them; their mean.
    Mean,
}

/// How a model makes embeddings.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct EmbeddingForm {
    /// Which outputs count.
    pub pooling: Pooling,
    /// Whether vectors are made to have the length 1.
    pub normalizes: bool,
}

/// Of a model that does not say.
impl Default for EmbeddingForm {
    fn default() -> Self {
        Self { pooling: Pooling::LastToken, normalizes: true }
    }
}

impl Pooling {
    /// Positions of a prompt that count.
    pub(crate) fn rows(self, prompt_len: usize) -> Range<usize> {
        match self {
            Self::LastToken => prompt_len - 1..prompt_len,
            Self::Mean => 0..prompt_len,
        }
    }
}

impl EmbeddingForm {
    /// What the model's files say. What is not computed here is refused: its vectors would be others.
    pub(crate) fn open(source: &ModelSource) -> Result<Self, ModelError> {
        let Some(modules) = open_modules(source)? else { return Ok(Self::default()) };
        let mut form = Self { normalizes: false, ..Self::default() };
        for (idx, module) in modules.iter().enumerate() {
            match module.kind() {
                // Of a reranker, which is asked for scores ([`Relevance`](crate::Relevance)).
                "LogitScore" => return Ok(Self::default()),
                "Transformer" => {}
                "Pooling" => form.pooling = open_pooling(source, module)?,
                "Normalize" => form.normalizes = true,
                _ => {
                    let problem =
                        format!("is {}; known are Transformer, Pooling, Normalize and LogitScore", module.class);
                    return Err(refused(source, MODULES_FILE, &format!("[{idx}].type"), problem));
                }
            }
        }
        Ok(form)
    }
}

/// The kind by its name, or in older files `pooling_mode_KIND: true`, of one.
fn open_pooling(source: &ModelSource, module: &Module) -> Result<Pooling, ModelError> {
    let settings = module.settings(source)?;
    let chosen = |(name, value): (&String, &Value)| match (name.strip_prefix("pooling_mode"), value) {
        (Some(""), Value::String(kind)) => Some(kind.clone()),
        (Some(kind), Value::Bool(true)) => Some(kind.trim_start_matches('_').to_owned()),
        _ => None,
    };
    let kinds: Vec<String> = settings.as_object().into_iter().flatten().filter_map(chosen).collect();
    match kinds.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["lasttoken"] => Ok(Pooling::LastToken),
        ["mean" | "mean_tokens"] => Ok(Pooling::Mean),
        _ => {
            let problem = format!("is {kinds:?}, expected one of lasttoken and mean");
            Err(refused(source, &module.settings_file(), "pooling_mode", problem))
        }
    }
}

/// The vector of a prompt while its rows come, in their order. They are summed one by one, so that where the prompt was cut
/// changes no bit.
#[derive(Debug, Default)]
pub(crate) struct Pooled {
    sum: Vec<f64>,
    n_rows: usize,
}

impl Pooled {
    /// Takes in outputs, `[n_rows, width]` row after row.
    pub(crate) fn add(&mut self, outputs: &[f32], width: usize) {
        self.sum.resize(width, 0.0);
        for row in outputs.chunks(width) {
            self.sum.iter_mut().zip(row).for_each(|(sum, output)| *sum += f64::from(*output));
            self.n_rows += 1;
        }
    }

    /// Takes in the sums of so many rows' outputs.
    pub(crate) fn add_sums(&mut self, sums: &[f64], n_rows: usize) {
        self.sum.resize(sums.len(), 0.0);
        self.sum.iter_mut().zip(sums).for_each(|(sum, more)| *sum += more);
        self.n_rows += n_rows;
    }

    /// Their mean.
    pub(crate) fn mean(&self) -> Vec<f32> {
        self.sum.iter().map(|sum| (sum / self.n_rows as f64) as f32).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::config::ModelFiles;

    fn form_of(modules: &str, pooling: &str) -> Result<EmbeddingForm, String> {
        let directory = tempfile::tempdir().unwrap();
        fs::create_dir(directory.path().join("1_Pooling")).unwrap();
        fs::write(directory.path().join("modules.json"), modules).unwrap();
        fs::write(directory.path().join("1_Pooling/config.json"), pooling).unwrap();
        let source = ModelSource::new(ModelFiles::Directory(directory.path().to_owned()));
        EmbeddingForm::open(&source).map_err(|error| error.to_string())
    }

    fn module(kind: &str) -> String {
        format!(r#"{{"idx": 0, "name": "0", "path": "1_Pooling", "type": "{kind}"}}"#)
    }

    #[test]
    fn what_a_model_says_of_its_vectors_is_done_or_refused() {
        let [whole, pooling, unit, dense] = ["Transformer", "Pooling", "Normalize", "Dense"]
            .map(|kind| module(&format!("sentence_transformers.models.{kind}")));
        let last = r#"{"word_embedding_dimension": 64, "pooling_mode_cls_token": false, "pooling_mode_lasttoken": true,
                       "include_prompt": true}"#;
        let mean = r#"{"pooling_mode_mean_tokens": true, "pooling_mode_lasttoken": false}"#;
        let form = |pooling, normalizes| Ok(EmbeddingForm { pooling, normalizes });
        assert_eq!(form_of(&format!("[{whole},{pooling},{unit}]"), last), form(Pooling::LastToken, true));
        assert_eq!(form_of(&format!("[{whole},{pooling}]"), mean), form(Pooling::Mean, false));
        let newer = [
            module("sentence_transformers.base.modules.transformer.Transformer"),
            module("sentence_transformers.sentence_transformer.modules.pooling.Pooling"),
        ];
        let mean = r#"{"embedding_dimension": 64, "pooling_mode": "mean", "include_prompt": true}"#;
        assert_eq!(form_of(&format!("[{}]", newer.join(",")), mean), form(Pooling::Mean, false));
        for (modules, pooled, said) in [
            (format!("[{whole},{pooling},{dense}]"), last, "models.Dense"),
            (format!("[{whole},{pooling}]"), r#"{"pooling_mode_cls_token": true}"#, "cls_token"),
            (format!("[{whole},{pooling}]"), r#"{"pooling_mode": "weightedmean"}"#, "weightedmean"),
            (format!("[{whole},{pooling}]"), "{}", "expected one of lasttoken and mean"),
        ] {
            let refused = form_of(&modules, pooled).unwrap_err();
            assert!(refused.contains(said), "{refused}");
        }
    }

    #[test]
    fn where_a_prompt_is_cut_changes_no_bit() {
        let width = 3;
        let outputs: Vec<f32> = (0..30).map(|n| (n as f32 * 0.37).sin() * 10f32.powi(n % 7)).collect();
        let cut = |rows: usize| {
            let mut pooled = Pooled::default();
            outputs.chunks(rows * width).for_each(|part| pooled.add(part, width));
            pooled.mean()
        };
        let whole = cut(10);
        assert_eq!(whole.len(), width);
        assert!([1, 2, 3, 7].map(cut).iter().all(|pooled| *pooled == whole));
    }
}
