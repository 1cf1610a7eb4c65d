//! How rotary frequencies are set: the rope part of `config.json`, in its old and its new spelling. Computes no angle.

use serde_json::Value;

use super::{ModelError, fields::Fields};

/// Rotary frequencies of a model, or of some of its layers.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeSettings {
    /// Base of the frequencies.
    pub theta: f32,
    /// Numbers of a head that turn: even, at most the head's width.
    pub width: usize,
    /// How the frequencies are stretched.
    pub scaling: RopeScaling,
}

/// How rotary frequencies are stretched to a longer context.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    Default,
    /// All are divided.
    Linear {
        /// The divisor.
        factor: f32,
    },
    /// The base grows with the context beyond the one the model was trained with.
    Dynamic {
        /// Stretch of the context at most.
        factor: f32,
        /// Context the model was trained with.
        original_max_position_embeddings: f32,
    },
    /// Llama 3.1's: low frequencies are divided, middle ones interpolated.
    Llama3(Llama3Scaling),
    /// YaRN: as above with a ramp over dimensions, and a temperature on attention.
    Yarn(YarnScaling),
    /// LongRoPE: a divisor for each frequency, one set within the original context and one beyond.
    LongRope(LongRopeScaling),
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

/// Parameters of `rope_type: longrope`.
#[derive(Clone, Debug, PartialEq)]
pub struct LongRopeScaling {
    /// Divisors within the original context, one a pair.
    pub short_factor: Vec<f32>,
    /// Divisors beyond it, one a pair.
    pub long_factor: Vec<f32>,
    /// Context the model was first trained with.
    pub original_max_position_embeddings: f32,
    /// Factor on cosines and sines.
    pub attention_factor: f32,
}

/// What the settings need to know of the rest of the model.
#[derive(Clone, Copy, Debug)]
pub(super) struct RopeContext {
    pub(super) theta: f32,
    pub(super) head_dim: usize,
    pub(super) max_position_embeddings: usize,
}

impl RopeSettings {
    /// Reads the settings of all layers but those with angles of their own.
    pub(super) fn read(config: &Fields, context: RopeContext) -> Result<Self, ModelError> {
        let rope = rope_fields(config)?;
        let theta = rope.positive("rope_theta")?.or(config.positive("rope_theta")?).unwrap_or(context.theta);
        let partial = rope.positive("partial_rotary_factor")?.or(config.positive("partial_rotary_factor")?);
        // Rounded down, as the reference does.
        let width = partial.map_or(context.head_dim, |part| (context.head_dim as f32 * part) as usize);
        if !width.is_multiple_of(2) || width == 0 || width > context.head_dim {
            let problem = format!("gives {width} of {} numbers, expected an even part", context.head_dim);
            return Err(config.error("partial_rotary_factor", problem));
        }
        let scaling = Reader { rope: &rope, config, max_positions: context.max_position_embeddings as f32 };
        Ok(Self { theta, width, scaling: scaling.read(width / 2)? })
    }

    /// Reads the settings of layers with a window, where they have their own.
    pub(super) fn read_windowed(config: &Fields, theta_field: &str, context: RopeContext) -> Result<Self, ModelError> {
        // What is said of no kind of layer is not of these.
        let rope = all_rope_fields(config)?.object("sliding_attention")?;
        if let Some(kind) = rope.get("rope_type").or(rope.get("type")).filter(|kind| *kind != "default") {
            return Err(rope.wrong("rope_type", kind, "\"default\": angles of windows are not stretched here"));
        }
        let theta = rope.positive("rope_theta")?.or(config.positive(theta_field)?).unwrap_or(context.theta);
        Ok(Self { theta, width: context.head_dim, scaling: RopeScaling::Default })
    }
}

/// The settings of all layers, or of those that see all. Where layers differ, newer files hold one object a kind of layer.
fn rope_fields<'a>(config: &Fields<'a>) -> Result<Fields<'a>, ModelError> {
    let rope = all_rope_fields(config)?;
    if rope.get("full_attention").is_some() || rope.get("sliding_attention").is_some() {
        return rope.object("full_attention");
    }
    Ok(rope)
}

/// Newer files say `rope_parameters`, older ones `rope_scaling` beside `rope_theta`.
fn all_rope_fields<'a>(config: &Fields<'a>) -> Result<Fields<'a>, ModelError> {
    let name = if config.get("rope_parameters").is_some() { "rope_parameters" } else { "rope_scaling" };
    config.object(name)
}

struct Reader<'a> {
    rope: &'a Fields<'a>,
    config: &'a Fields<'a>,
    max_positions: f32,
}

impl Reader<'_> {
    fn read(&self, n_pairs: usize) -> Result<RopeScaling, ModelError> {
        let Some(kind) = self.rope.get("rope_type").or(self.rope.get("type")) else { return Ok(RopeScaling::Default) };
        match kind.as_str() {
            Some("default") => Ok(RopeScaling::Default),
            Some("linear") => Ok(RopeScaling::Linear { factor: self.rope.needed("factor")? }),
            Some("dynamic") => Ok(RopeScaling::Dynamic {
                factor: self.rope.needed("factor")?,
                original_max_position_embeddings: self.max_positions,
            }),
            Some("llama3") => Ok(RopeScaling::Llama3(self.llama3()?)),
            // The first Phi-3 files call LongRoPE `su`, and some `yarn` while they carry its divisors.
            Some("longrope" | "su") => Ok(RopeScaling::LongRope(self.long_rope(n_pairs)?)),
            Some("yarn") if self.rope.get("long_factor").is_some() => {
                Ok(RopeScaling::LongRope(self.long_rope(n_pairs)?))
            }
            Some("yarn") => Ok(RopeScaling::Yarn(self.yarn()?)),
            _ => {
                let known = "\"default\", \"linear\", \"dynamic\", \"llama3\", \"yarn\" or \"longrope\"";
                Err(self.rope.wrong("rope_type", kind, known))
            }
        }
    }

    fn llama3(&self) -> Result<Llama3Scaling, ModelError> {
        Ok(Llama3Scaling {
            factor: self.rope.needed("factor")?,
            low_freq_factor: self.rope.needed("low_freq_factor")?,
            high_freq_factor: self.rope.needed("high_freq_factor")?,
            original_max_position_embeddings: self.rope.needed("original_max_position_embeddings")?,
        })
    }

    fn yarn(&self) -> Result<YarnScaling, ModelError> {
        let factor = self.rope.needed("factor")?;
        let original = self.rope.positive("original_max_position_embeddings")?;
        Ok(YarnScaling {
            factor,
            beta_fast: self.rope.positive("beta_fast")?.unwrap_or(32.0),
            beta_slow: self.rope.positive("beta_slow")?.unwrap_or(1.0),
            original_max_position_embeddings: original.unwrap_or(self.max_positions),
            attention_factor: self.yarn_attention_factor(factor)?,
            truncate: self.rope.get("truncate").is_none_or(|value| value != &Value::Bool(false)),
        })
    }

    /// The YaRN paper's `0.1 ln(s) + 1`; checkpoints that carry `mscale` use its ratio to `mscale_all_dim`.
    fn yarn_attention_factor(&self, factor: f32) -> Result<f32, ModelError> {
        let scale = |mscale: f32| if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 };
        if let Some(given) = self.rope.positive("attention_factor")? {
            return Ok(given);
        }
        match (self.rope.positive("mscale")?, self.rope.positive("mscale_all_dim")?) {
            (Some(mscale), Some(all_dim)) => Ok(scale(mscale) / scale(all_dim)),
            _ => Ok(scale(1.0)),
        }
    }

    fn long_rope(&self, n_pairs: usize) -> Result<LongRopeScaling, ModelError> {
        const ORIGINAL: &str = "original_max_position_embeddings";
        let original = self.rope.positive(ORIGINAL)?.or(self.config.positive(ORIGINAL)?);
        let original = original.unwrap_or(self.max_positions);
        let factor = self.rope.positive("factor")?.unwrap_or(self.max_positions / original);
        let derived = if factor <= 1.0 { 1.0 } else { (1.0 + factor.ln() / original.ln()).sqrt() };
        Ok(LongRopeScaling {
            short_factor: self.divisors("short_factor", n_pairs)?,
            long_factor: self.divisors("long_factor", n_pairs)?,
            original_max_position_embeddings: original,
            attention_factor: self.rope.positive("attention_factor")?.unwrap_or(derived),
        })
    }

    fn divisors(&self, field: &str, n_pairs: usize) -> Result<Vec<f32>, ModelError> {
        let divisors = self.rope.numbers(field)?.ok_or_else(|| self.rope.error(field, "is missing".into()))?;
        if divisors.len() == n_pairs {
            return Ok(divisors);
        }
        Err(self.rope.error(field, format!("has {} numbers, the heads have {n_pairs} pairs", divisors.len())))
    }
}
