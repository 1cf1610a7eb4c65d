//! `config.json` of a decoder, checked field by field against the description of its family. Reads a JSON value; never
//! a file.

use serde_json::Value;

use super::{
    Activation, AttentionSpec, Family, HeadShape, ModelError, Quantization, RopeScaling, RopeSettings, TokenId,
    families::FAMILIES,
    family::{EmbeddingScale, HasBias, Rotary},
    fields::Fields,
    layers::{RopeLayers, WindowLayers},
    rope_scaling::RopeContext,
};

/// Hyper-parameters of a model, by the names of `config.json` where it has them.
#[derive(Clone, Debug)]
pub struct ModelConfig {
    /// What the model shares with its family.
    pub family: &'static Family,
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
    /// The feed-forward's curve.
    pub activation: Activation,
    /// Rotary frequencies.
    pub rope: RopeSettings,
    /// Rotary frequencies of layers with a window, where they have their own.
    pub windowed_rope: Option<RopeSettings>,
    /// The output matrix is the embedding table.
    pub tie_word_embeddings: bool,
    /// Which projections have biases.
    pub biases: BiasesPresent,
    /// Factor on embeddings.
    pub embedding_scale: Option<f32>,
    /// Factor on the product of query and key.
    pub attention_scale: f32,
    /// Bound of attention scores.
    pub attention_softcap: Option<f32>,
    /// Bound of logits.
    pub logit_softcap: Option<f32>,
    /// Begin token.
    pub bos_token_id: Option<TokenId>,
    /// End tokens.
    pub eos_token_ids: Vec<TokenId>,
    /// How its projections are quantised, if they are.
    pub quantization: Option<Quantization>,
    windows: WindowLayers,
    rope_layers: RopeLayers,
}

/// Which projections of one model have biases.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BiasesPresent {
    /// Queries, keys, values.
    pub qkv: bool,
    /// Attention's output.
    pub attention_output: bool,
    /// Gate, up and down.
    pub feed_forward: bool,
}

/// The angles one layer turns queries and keys by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RopeOfLayer {
    /// None: positions are known from the causal order alone.
    None,
    /// The model's.
    Model,
    /// Those of layers with a window.
    Windowed,
}

impl ModelConfig {
    /// Reads `config.json`; `file` is its name in messages.
    pub fn from_json(config: &Value, file: &str) -> Result<Self, ModelError> {
        let fields = Fields::of(config, file)?;
        let family = family_of(&fields)?;
        let defaults = &family.defaults;
        let hidden_size = fields.size("hidden_size")?;
        let num_hidden_layers = fields.size("num_hidden_layers")?;
        let num_attention_heads = fields.size("num_attention_heads")?;
        let head_dim = fields.optional_size("head_dim")?.or(defaults.head_dim);
        let head_dim = head_dim.unwrap_or(hidden_size / num_attention_heads);
        refuse_odd_heads(&fields, head_dim)?;
        refuse_what_would_be_ignored(&fields)?;
        let kv_heads = fields.optional_size("num_key_value_heads")?;
        let kv_heads = kv_heads.or(fields.if_absent("num_key_value_heads", defaults.num_key_value_heads));
        // The default of a number that may be left out, and may be null for none.
        let positive =
            |field, default| Ok::<_, ModelError>(fields.positive(field)?.or(fields.if_absent(field, default)));
        let max_position_embeddings = fields.size("max_position_embeddings")?;
        let rope = RopeContext { theta: defaults.rope_theta, head_dim, max_position_embeddings };
        let config = Self {
            family,
            hidden_size,
            intermediate_size: fields.size("intermediate_size")?,
            num_hidden_layers,
            num_attention_heads,
            num_key_value_heads: kv_heads.unwrap_or(num_attention_heads),
            head_dim,
            vocab_size: fields.size("vocab_size")?,
            max_position_embeddings,
            rms_norm_eps: fields.positive("rms_norm_eps")?.unwrap_or(defaults.rms_norm_eps),
            activation: activation(&fields)?.unwrap_or(defaults.activation),
            rope: RopeSettings::read(&fields, rope)?,
            windowed_rope: windowed_rope(&fields, family, rope)?,
            tie_word_embeddings: fields.flag("tie_word_embeddings", defaults.tie_word_embeddings)?,
            biases: biases(&fields, family)?,
            embedding_scale: embedding_scale(family, hidden_size),
            attention_scale: positive("query_pre_attn_scalar", defaults.query_pre_attn_scalar)?
                .unwrap_or(head_dim as f32)
                .sqrt()
                .recip(),
            attention_softcap: positive("attn_logit_softcapping", defaults.attention_softcap)?,
            logit_softcap: positive("final_logit_softcapping", defaults.logit_softcap)?,
            bos_token_id: fields.tokens("bos_token_id")?.first().copied(),
            eos_token_ids: fields.tokens("eos_token_id")?,
            quantization: Quantization::read(&fields)?,
            windows: WindowLayers::read(&fields, family.windows, defaults.sliding_window, num_hidden_layers)?,
            rope_layers: RopeLayers::read(&fields, family.rotary, num_hidden_layers)?,
        };
        config.refuse_odd_shapes(&fields)?;
        Ok(config)
    }

    /// How a layer attends.
    pub fn attention_of_layer(&self, idx: usize) -> AttentionSpec {
        AttentionSpec {
            heads: HeadShape {
                n_heads: self.num_attention_heads,
                n_kv_heads: self.num_key_value_heads,
                head_dim: self.head_dim,
            },
            scale: self.attention_scale,
            window: self.windows.of_layer(idx),
            softcap: self.attention_softcap,
        }
    }

    /// The angles of a layer.
    pub fn rope_of_layer(&self, idx: usize) -> RopeOfLayer {
        match (self.rope_layers.turns(idx), &self.windowed_rope, self.windows.of_layer(idx)) {
            (false, _, _) => RopeOfLayer::None,
            (true, Some(_), Some(_)) => RopeOfLayer::Windowed,
            (true, _, _) => RopeOfLayer::Model,
        }
    }

    /// Longest sequence, in tokens. Dynamic scaling reaches beyond the context the model was made for, but only when
    /// asked: within that context its angles are the plain ones.
    pub fn context_limit(&self, asked: Option<u32>) -> u32 {
        let made_for = self.max_position_embeddings;
        match (&self.rope.scaling, asked) {
            (RopeScaling::Dynamic { factor, .. }, Some(asked)) if asked as usize > made_for => {
                (made_for as f32 * factor.max(1.0)) as u32
            }
            _ => made_for as u32,
        }
    }

    fn refuse_odd_shapes(&self, fields: &Fields) -> Result<(), ModelError> {
        let (heads, kv_heads) = (self.num_attention_heads, self.num_key_value_heads);
        if !heads.is_multiple_of(kv_heads) {
            let problem = format!("is {kv_heads}, which does not divide the {heads} attention heads");
            return Err(fields.error("num_key_value_heads", problem));
        }
        if let Some(token) = self.eos_token_ids.iter().find(|token| **token as usize >= self.vocab_size) {
            let problem = format!("is {token}, outside the vocabulary of {}", self.vocab_size);
            return Err(fields.error("eos_token_id", problem));
        }
        Ok(())
    }
}

fn refuse_odd_heads(fields: &Fields, head_dim: usize) -> Result<(), ModelError> {
    if !head_dim.is_multiple_of(2) || head_dim == 0 {
        return Err(fields.error("head_dim", format!("is {head_dim}: rotary embedding needs an even width")));
    }
    Ok(())
}

/// Fields that change what a model computes, in ways that are not implemented.
fn refuse_what_would_be_ignored(fields: &Fields) -> Result<(), ModelError> {
    for (field, only) in [("use_bidirectional_attention", false), ("is_causal", true)] {
        if fields.flag(field, only)? != only {
            return Err(fields.error(field, format!("is {}: attention to later tokens is not implemented", !only)));
        }
    }
    Ok(())
}

fn family_of(fields: &Fields) -> Result<&'static Family, ModelError> {
    let architectures = fields.get("architectures").and_then(Value::as_array);
    let found = architectures.and_then(|names| names.first()?.as_str());
    let found = found.ok_or_else(|| fields.error("architectures", "names no architecture".into()))?;
    // Embedding models are often saved without the part that predicts tokens.
    let whole = found.strip_suffix("Model").map(|name| format!("{name}ForCausalLM"));
    let family = FAMILIES.iter().find(|family| family.architecture == whole.as_deref().unwrap_or(found));
    family.copied().ok_or_else(|| ModelError::UnsupportedArchitecture {
        file: fields.file().into(),
        found: found.into(),
        supported: FAMILIES.iter().map(|family| family.architecture).collect(),
    })
}

/// Gemma's files carry a second field that is meant, beside one that was wrong.
fn activation(fields: &Fields) -> Result<Option<Activation>, ModelError> {
    let field = if fields.get("hidden_activation").is_some() { "hidden_activation" } else { "hidden_act" };
    let Some(value) = fields.get(field) else { return Ok(None) };
    match value.as_str() {
        Some("silu" | "swish") => Ok(Some(Activation::Silu)),
        Some("gelu_pytorch_tanh" | "gelu_new") => Ok(Some(Activation::GeluTanh)),
        _ => Err(fields.wrong(field, value, "\"silu\" or \"gelu_pytorch_tanh\"")),
    }
}

fn windowed_rope(fields: &Fields, family: &Family, context: RopeContext) -> Result<Option<RopeSettings>, ModelError> {
    match family.rotary {
        Rotary::OwnInWindows { theta_field, theta } => {
            RopeSettings::read_windowed(fields, theta_field, RopeContext { theta, ..context }).map(Some)
        }
        Rotary::EveryLayer | Rotary::AllButEvery { .. } => Ok(None),
    }
}

fn biases(fields: &Fields, family: &Family) -> Result<BiasesPresent, ModelError> {
    let present = |has| match has {
        HasBias::Never => Ok(false),
        HasBias::Always => Ok(true),
        HasBias::If(field) => fields.flag(field, false),
    };
    Ok(BiasesPresent {
        qkv: present(family.biases.qkv)?,
        attention_output: present(family.biases.attention_output)?,
        feed_forward: present(family.biases.feed_forward)?,
    })
}

fn embedding_scale(family: &Family, hidden_size: usize) -> Option<f32> {
    match family.embedding_scale {
        EmbeddingScale::One => None,
        EmbeddingScale::RootOfWidth => Some((hidden_size as f32).sqrt()),
    }
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

    fn with(field: &str, value: Value) -> Result<ModelConfig, ModelError> {
        let mut config = tiny();
        config[field] = value;
        ModelConfig::from_json(&config, "config.json")
    }

    fn refusal(field: &str, value: Value) -> String {
        with(field, value).unwrap_err().to_string()
    }

    #[test]
    fn fields_that_are_missing_take_the_familys_defaults() {
        let config = ModelConfig::from_json(&tiny(), "config.json").unwrap();
        assert_eq!((config.head_dim, config.rope.theta), (16, 10_000.0));
        assert_eq!((config.rope.scaling, config.tie_word_embeddings), (RopeScaling::Default, false));
        assert_eq!(config.eos_token_ids, [1, 2]);
        let gemma = with("architectures", json!(["Gemma3ForCausalLM"])).unwrap();
        assert_eq!((gemma.head_dim, gemma.rope.theta, gemma.tie_word_embeddings), (256, 1_000_000.0, true));
        assert_eq!((gemma.embedding_scale, gemma.activation), (Some(8.0), Activation::GeluTanh));
    }

    #[test]
    fn both_spellings_of_rope_settings_are_read() {
        let llama3 = json!({"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
                            "high_freq_factor": 4.0, "original_max_position_embeddings": 64});
        let new = with("rope_parameters", llama3.clone()).unwrap();
        let old = with("rope_scaling", llama3).unwrap();
        assert_eq!(new.rope, old.rope);
        assert_eq!(new.rope.theta, 500_000.0);
        assert!(matches!(new.rope.scaling, RopeScaling::Llama3(_)));
    }

    #[test]
    fn yarn_derives_its_attention_factor() {
        let yarn = json!({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32});
        let RopeScaling::Yarn(yarn) = with("rope_scaling", yarn).unwrap().rope.scaling else { panic!("yarn") };
        assert!((yarn.attention_factor - (0.1 * 4f32.ln() + 1.0)).abs() < 1e-6);
    }

    #[test]
    fn dynamic_scaling_allows_a_longer_context_when_asked() {
        let config = with("rope_scaling", json!({"type": "dynamic", "factor": 2.0})).unwrap();
        assert_eq!(config.context_limit(None), 128);
        assert_eq!(config.context_limit(Some(200)), 256);
        let plain = ModelConfig::from_json(&tiny(), "config.json").unwrap();
        assert_eq!(plain.context_limit(Some(200)), 128);
    }

    #[test]
    fn another_architecture_is_refused_with_its_name_and_the_supported_list() {
        let message = refusal("architectures", json!(["MambaForCausalLM"]));
        assert!(message.contains("MambaForCausalLM is not supported"), "{message}");
        assert!(message.contains("LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM"), "{message}");
    }

    #[test]
    fn bad_fields_are_named_with_their_value() {
        assert!(refusal("hidden_size", json!("64")).contains("`hidden_size` is \"64\""));
        assert!(refusal("hidden_size", json!(null)).contains("`hidden_size` is missing"));
        assert!(refusal("num_hidden_layers", json!(0)).contains("`num_hidden_layers` is 0"));
        assert!(refusal("num_key_value_heads", json!(3)).contains("does not divide the 4"));
        assert!(refusal("head_dim", json!(15)).contains("even"));
        assert!(refusal("hidden_act", json!("relu")).contains("`hidden_act` is \"relu\""));
        assert!(refusal("rope_scaling", json!({"rope_type": "spiral"})).contains("\"spiral\""));
        let short = json!({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]});
        assert!(refusal("rope_scaling", short).contains("`short_factor` has 1 numbers, the heads have 8 pairs"));
        assert!(refusal("eos_token_id", json!(100)).contains("outside the vocabulary"));
        assert!(refusal("rms_norm_eps", json!(-1)).contains("more than 0"));
    }

    #[test]
    fn what_would_change_the_result_and_is_not_implemented_is_refused_by_name() {
        let both = refusal("use_bidirectional_attention", json!(true));
        assert!(both.contains("`use_bidirectional_attention` is true: attention to later tokens"), "{both}");
        assert!(refusal("is_causal", json!(false)).contains("`is_causal` is false"));
        let method = refusal("quantization_config", json!({"quant_method": "hqq"}));
        assert!(method.contains("config.json: quantization_config: field `quant_method` is \"hqq\""), "{method}");
        let of = |architecture: &str, field: &str, value: Value| {
            let mut config = tiny();
            (config["architectures"], config[field]) = (json!([architecture]), value);
            ModelConfig::from_json(&config, "config.json").unwrap_err().to_string()
        };
        let window = of("SmolLM3ForCausalLM", "use_sliding_window", json!(true));
        assert!(window.contains("`use_sliding_window` is true: the windows of this family"), "{window}");
        let stretched = json!({"sliding_attention": {"rope_type": "linear", "factor": 8.0}});
        let angles = of("Gemma3ForCausalLM", "rope_parameters", stretched);
        assert!(angles.contains("`rope_type` is \"linear\", expected \"default\""), "{angles}");
    }
}
