//! `config.json` of the Llama family, checked field by field. Reads a JSON value; never a file.

use serde_json::{Map, Value};

use super::ModelError;
use crate::request::TokenId;

/// Architectures with an implementation.
pub(super) const SUPPORTED: &[&str] = &["LlamaForCausalLM"];

/// Hyper-parameters of a Llama model, by the names of `config.json`.
#[derive(Clone, Debug, PartialEq)]
pub struct LlamaConfig {
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the feed-forward layer.
    pub intermediate_size: usize,
    /// Decoder layers.
    pub num_hidden_layers: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key/value heads; divides the query heads.
    pub num_key_value_heads: usize,
    /// Width of one head; even.
    pub head_dim: usize,
    /// Tokens of the vocabulary.
    pub vocab_size: usize,
    /// Positions the model was made for.
    pub max_position_embeddings: usize,
    /// Added under the root of the norm.
    pub rms_norm_eps: f32,
    /// Base of the rotary frequencies.
    pub rope_theta: f32,
    /// How the rotary frequencies are stretched.
    pub rope_scaling: RopeScaling,
    /// The output matrix is the embedding table.
    pub tie_word_embeddings: bool,
    /// The attention projections have biases.
    pub attention_bias: bool,
    /// The feed-forward projections have biases.
    pub mlp_bias: bool,
    /// Begin token.
    pub bos_token_id: Option<TokenId>,
    /// End tokens.
    pub eos_token_ids: Vec<TokenId>,
}

/// How rotary frequencies are stretched to a longer context.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    Default,
    /// Llama 3.1's: low frequencies are divided, middle ones interpolated.
    Llama3(Llama3Scaling),
    /// YaRN: as above with a ramp over dimensions, and a temperature on attention.
    Yarn(YarnScaling),
}

/// Parameters of `rope_type: llama3`.
#[derive(Clone, Debug, PartialEq)]
pub struct Llama3Scaling {
    /// Divisor of low frequencies.
    pub factor: f32,
    /// Wavelengths above `original / low_freq_factor` are divided.
    pub low_freq_factor: f32,
    /// Wavelengths below `original / high_freq_factor` stay.
    pub high_freq_factor: f32,
    /// Context the model was first trained with.
    pub original_max_position_embeddings: f32,
}

/// Parameters of `rope_type: yarn`.
#[derive(Clone, Debug, PartialEq)]
pub struct YarnScaling {
    /// Stretch of the context.
    pub factor: f32,
    /// Turns over the original context above which a dimension stays.
    pub beta_fast: f32,
    /// Turns below which a dimension is divided by `factor`.
    pub beta_slow: f32,
    /// Context the model was first trained with.
    pub original_max_position_embeddings: f32,
    /// Factor on cosines and sines; derived from `factor` when the file has none.
    pub attention_factor: f32,
    /// Round the ramp's ends to whole dimensions.
    pub truncate: bool,
}

impl LlamaConfig {
    /// Reads `config.json`; `file` is its name in messages.
    pub fn from_json(config: &Value, file: &str) -> Result<Self, ModelError> {
        let fields = Fields::of(config, file)?;
        fields.refuse_other_architectures()?;
        fields.refuse_other_activations()?;
        let hidden_size = fields.size("hidden_size")?;
        let num_attention_heads = fields.size("num_attention_heads")?;
        let rope = fields.rope()?;
        let config = Self {
            hidden_size,
            intermediate_size: fields.size("intermediate_size")?,
            num_hidden_layers: fields.size("num_hidden_layers")?,
            num_attention_heads,
            num_key_value_heads: fields.optional_size("num_key_value_heads")?.unwrap_or(num_attention_heads),
            head_dim: fields.optional_size("head_dim")?.unwrap_or(hidden_size / num_attention_heads),
            vocab_size: fields.size("vocab_size")?,
            max_position_embeddings: fields.size("max_position_embeddings")?,
            rms_norm_eps: fields.positive("rms_norm_eps")?.unwrap_or(1e-6),
            rope_theta: rope.positive("rope_theta")?.or(fields.positive("rope_theta")?).unwrap_or(10_000.0),
            rope_scaling: rope.scaling(&fields)?,
            tie_word_embeddings: fields.flag("tie_word_embeddings")?,
            attention_bias: fields.flag("attention_bias")?,
            mlp_bias: fields.flag("mlp_bias")?,
            bos_token_id: fields.tokens("bos_token_id")?.first().copied(),
            eos_token_ids: fields.tokens("eos_token_id")?,
        };
        config.refuse_odd_shapes(&fields)?;
        Ok(config)
    }

    fn refuse_odd_shapes(&self, fields: &Fields) -> Result<(), ModelError> {
        let (heads, kv_heads) = (self.num_attention_heads, self.num_key_value_heads);
        if !heads.is_multiple_of(kv_heads) {
            let problem = format!("is {kv_heads}, which does not divide the {heads} attention heads");
            return Err(fields.error("num_key_value_heads", problem));
        }
        if !self.head_dim.is_multiple_of(2) || self.head_dim == 0 {
            return Err(fields.error("head_dim", format!("is {}: rotary embedding needs an even width", self.head_dim)));
        }
        if let Some(token) = self.eos_token_ids.iter().find(|token| **token as usize >= self.vocab_size) {
            let problem = format!("is {token}, outside the vocabulary of {}", self.vocab_size);
            return Err(fields.error("eos_token_id", problem));
        }
        Ok(())
    }
}

/// A JSON object whose errors name file and field.
pub(super) struct Fields<'a> {
    fields: &'a Map<String, Value>,
    file: &'a str,
}

impl<'a> Fields<'a> {
    pub(super) fn of(value: &'a Value, file: &'a str) -> Result<Self, ModelError> {
        let Value::Object(fields) = value else {
            return Err(ModelError::Json { file: file.into(), reason: "it is not an object".into() });
        };
        Ok(Self { fields, file })
    }

    pub(super) fn error(&self, field: &str, problem: String) -> ModelError {
        ModelError::Field { file: self.file.into(), field: field.into(), problem }
    }

    /// The value of a field that is there and not null.
    fn get(&self, field: &str) -> Option<&'a Value> {
        self.fields.get(field).filter(|value| !value.is_null())
    }

    fn wrong(&self, field: &str, value: &Value, expected: &str) -> ModelError {
        self.error(field, format!("is {value}, expected {expected}"))
    }

    fn size(&self, field: &str) -> Result<usize, ModelError> {
        self.optional_size(field)?.ok_or_else(|| self.error(field, "is missing".into()))
    }

    fn optional_size(&self, field: &str) -> Result<Option<usize>, ModelError> {
        // Below this no product of two sizes overflows, and no model is near it.
        const LARGEST: u64 = 1 << 31;
        let Some(value) = self.get(field) else { return Ok(None) };
        let size = value.as_u64().filter(|size| (1..LARGEST).contains(size));
        match size {
            Some(size) => Ok(Some(size as usize)),
            None => Err(self.wrong(field, value, "a whole number from 1 on")),
        }
    }

    pub(super) fn number(&self, field: &str) -> Result<Option<f32>, ModelError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        match value.as_f64().filter(|number| number.is_finite()) {
            Some(number) => Ok(Some(number as f32)),
            None => Err(self.wrong(field, value, "a number")),
        }
    }

    fn positive(&self, field: &str) -> Result<Option<f32>, ModelError> {
        match self.number(field)? {
            Some(number) if number <= 0.0 => Err(self.error(field, format!("is {number}, expected more than 0"))),
            number => Ok(number),
        }
    }

    fn needed(&self, field: &str) -> Result<f32, ModelError> {
        self.positive(field)?.ok_or_else(|| self.error(field, "is missing".into()))
    }

    fn flag(&self, field: &str) -> Result<bool, ModelError> {
        match self.get(field) {
            None => Ok(false),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(value) => Err(self.wrong(field, value, "true or false")),
        }
    }

    /// One token or a list of them.
    pub(super) fn tokens(&self, field: &str) -> Result<Vec<TokenId>, ModelError> {
        let token = |value: &Value| value.as_u64().and_then(|token| TokenId::try_from(token).ok());
        let tokens = match self.get(field) {
            None => Some(Vec::new()),
            Some(Value::Array(list)) => list.iter().map(token).collect(),
            Some(value) => token(value).map(|token| vec![token]),
        };
        tokens.ok_or_else(|| self.wrong(field, &self.fields[field], "a token id or a list of them"))
    }

    fn refuse_other_architectures(&self) -> Result<(), ModelError> {
        let architectures = self.get("architectures").and_then(Value::as_array);
        let found = architectures.and_then(|names| names.first()?.as_str());
        let found = found.ok_or_else(|| self.error("architectures", "names no architecture".into()))?;
        if SUPPORTED.contains(&found) {
            return Ok(());
        }
        Err(ModelError::UnsupportedArchitecture { file: self.file.into(), found: found.into(), supported: SUPPORTED })
    }

    fn refuse_other_activations(&self) -> Result<(), ModelError> {
        match self.get("hidden_act") {
            None => Ok(()),
            Some(Value::String(name)) if name == "silu" || name == "swish" => Ok(()),
            Some(value) => Err(self.wrong("hidden_act", value, "\"silu\"")),
        }
    }

    /// Newer files say `rope_parameters`, older ones `rope_scaling` beside `rope_theta`.
    fn rope(&self) -> Result<Fields<'a>, ModelError> {
        const NONE: &Value = &Value::Null;
        let value = self.get("rope_parameters").or(self.get("rope_scaling")).unwrap_or(NONE);
        match value {
            Value::Object(fields) => Ok(Fields { fields, file: self.file }),
            Value::Null => Ok(Fields { fields: empty(), file: self.file }),
            value => Err(self.wrong("rope_scaling", value, "an object")),
        }
    }

    fn scaling(&self, config: &Fields) -> Result<RopeScaling, ModelError> {
        let Some(kind) = self.get("rope_type").or(self.get("type")) else { return Ok(RopeScaling::Default) };
        match kind.as_str() {
            Some("default") => Ok(RopeScaling::Default),
            Some("llama3") => Ok(RopeScaling::Llama3(self.llama3()?)),
            Some("yarn") => Ok(RopeScaling::Yarn(self.yarn(config)?)),
            _ => Err(self.wrong("rope_type", kind, "\"default\", \"llama3\" or \"yarn\"")),
        }
    }

    fn llama3(&self) -> Result<Llama3Scaling, ModelError> {
        Ok(Llama3Scaling {
            factor: self.needed("factor")?,
            low_freq_factor: self.needed("low_freq_factor")?,
            high_freq_factor: self.needed("high_freq_factor")?,
            original_max_position_embeddings: self.needed("original_max_position_embeddings")?,
        })
    }

    fn yarn(&self, config: &Fields) -> Result<YarnScaling, ModelError> {
        let factor = self.needed("factor")?;
        let original = self.positive("original_max_position_embeddings")?;
        let original = match original {
            Some(original) => original,
            None => config.size("max_position_embeddings")? as f32,
        };
        Ok(YarnScaling {
            factor,
            beta_fast: self.positive("beta_fast")?.unwrap_or(32.0),
            beta_slow: self.positive("beta_slow")?.unwrap_or(1.0),
            original_max_position_embeddings: original,
            attention_factor: self.attention_factor(factor)?,
            truncate: self.get("truncate").is_none_or(|value| value != &Value::Bool(false)),
        })
    }

    /// The YaRN paper's `0.1 ln(s) + 1`; checkpoints that carry `mscale` use its ratio to `mscale_all_dim`.
    fn attention_factor(&self, factor: f32) -> Result<f32, ModelError> {
        let scale = |mscale: f32| if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 };
        if let Some(given) = self.positive("attention_factor")? {
            return Ok(given);
        }
        match (self.positive("mscale")?, self.positive("mscale_all_dim")?) {
            (Some(mscale), Some(all_dim)) => Ok(scale(mscale) / scale(all_dim)),
            _ => Ok(scale(1.0)),
        }
    }
}

fn empty() -> &'static Map<String, Value> {
    static EMPTY: std::sync::OnceLock<Map<String, Value>> = std::sync::OnceLock::new();
    EMPTY.get_or_init(Map::new)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn tiny() -> Value {
        json!({"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 96,
               "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100,
               "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "eos_token_id": [1, 2]})
    }

    fn with(field: &str, value: Value) -> Result<LlamaConfig, ModelError> {
        let mut config = tiny();
        config[field] = value;
        LlamaConfig::from_json(&config, "config.json")
    }

    fn refusal(field: &str, value: Value) -> String {
        with(field, value).unwrap_err().to_string()
    }

    #[test]
    fn fields_that_are_missing_take_the_familys_defaults() {
        let config = LlamaConfig::from_json(&tiny(), "config.json").unwrap();
        assert_eq!((config.head_dim, config.rope_theta), (16, 10_000.0));
        assert_eq!((config.rope_scaling, config.tie_word_embeddings), (RopeScaling::Default, false));
        assert_eq!(config.eos_token_ids, [1, 2]);
    }

    #[test]
    fn both_spellings_of_rope_settings_are_read() {
        let llama3 = json!({"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
                            "high_freq_factor": 4.0, "original_max_position_embeddings": 64});
        let new = with("rope_parameters", llama3.clone()).unwrap();
        let old = with("rope_scaling", llama3).unwrap();
        assert_eq!(new, old);
        assert_eq!(new.rope_theta, 500_000.0);
        assert!(matches!(new.rope_scaling, RopeScaling::Llama3(_)));
    }

    #[test]
    fn yarn_derives_its_attention_factor() {
        let yarn = json!({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32});
        let RopeScaling::Yarn(yarn) = with("rope_scaling", yarn).unwrap().rope_scaling else { panic!("yarn") };
        assert!((yarn.attention_factor - (0.1 * 4f32.ln() + 1.0)).abs() < 1e-6);
    }

    #[test]
    fn another_architecture_is_refused_with_its_name_and_the_supported_list() {
        let message = refusal("architectures", json!(["MambaForCausalLM"]));
        assert!(message.contains("MambaForCausalLM") && message.contains("LlamaForCausalLM"), "{message}");
    }

    #[test]
    fn bad_fields_are_named_with_their_value() {
        assert!(refusal("hidden_size", json!("64")).contains("`hidden_size` is \"64\""));
        assert!(refusal("hidden_size", json!(null)).contains("`hidden_size` is missing"));
        assert!(refusal("num_hidden_layers", json!(0)).contains("`num_hidden_layers` is 0"));
        assert!(refusal("num_key_value_heads", json!(3)).contains("does not divide the 4"));
        assert!(refusal("head_dim", json!(15)).contains("even"));
        assert!(refusal("hidden_act", json!("gelu")).contains("`hidden_act`"));
        assert!(refusal("rope_scaling", json!({"rope_type": "longrope"})).contains("\"longrope\""));
        assert!(refusal("eos_token_id", json!(100)).contains("outside the vocabulary"));
        assert!(refusal("rms_norm_eps", json!(-1)).contains("more than 0"));
    }
}
