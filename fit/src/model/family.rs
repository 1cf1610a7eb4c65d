//! What distinguishes one family of decoders from another, as data. `Decoder` is written over it once; a family never
//! brings code. Reads no file.

use super::Activation;

/// The description of a family.
#[derive(Debug)]
pub struct Family {
    /// Hugging Face's name of the architecture.
    pub architecture: &'static str,
    /// Where a layer's norms sit, by their names in the checkpoint.
    pub norms: NormNames,
    /// How a norm's weight is stored.
    pub norm_weight: NormWeight,
    /// What of queries and keys is normed before they are turned.
    pub qk_norm: QkNorm,
    /// How the projections are stored.
    pub projections: Projections,
    /// Which projections have biases.
    pub biases: Biases,
    /// Factor on embeddings.
    pub embedding_scale: EmbeddingScale,
    /// Which layers look back a window only.
    pub windows: Windows,
    /// Which layers turn queries and keys, and by which angles.
    pub rotary: Rotary,
    /// What `config.json` may leave out.
    pub defaults: Defaults,
    /// How GGUF files hold it; `None`: they are refused.
    pub gguf: Option<GgufFormat>,
}

/// How GGUF files hold a family.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GgufFormat {
    /// The architecture's name there.
    pub architecture: &'static str,
    /// How the rows of queries and keys are ordered.
    pub rows: GgufRows,
}

/// How the rows of queries and keys are ordered in a head.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum GgufRows {
    /// All first coordinates of the rotary pairs, then all second ones: as everywhere else.
    Halves,
    /// Pair by pair.
    Pairs,
}

impl GgufFormat {
    /// A family whose rows are left as they are.
    pub const fn halves(architecture: &'static str) -> Option<Self> {
        Some(Self { architecture, rows: GgufRows::Halves })
    }
}

/// Names of a layer's norms; `None` where there is none.
#[derive(Debug)]
pub struct NormNames {
    /// Of what goes into attention.
    pub before_attention: Option<&'static str>,
    /// Of what attention gives, before it is added.
    pub after_attention: Option<&'static str>,
    /// Of what goes into the feed-forward.
    pub before_feed_forward: Option<&'static str>,
    /// Of what the feed-forward gives, before it is added.
    pub after_feed_forward: Option<&'static str>,
}

/// How a norm's weight is stored.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum NormWeight {
    /// As the factor itself.
    Factor,
    /// As the factor less one.
    OnePlusFactor,
}

/// What of queries and keys is normed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum QkNorm {
    /// Nothing.
    None,
    /// Each head, all with the same weight.
    EveryHead,
    /// All heads of a token together.
    WholeRow,
}

/// How the projections are stored.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Projections {
    /// Each as its own matrix.
    Separate,
    /// Queries, keys and values one below the other in `qkv_proj`, gate and up in `gate_up_proj`.
    Fused,
}

/// Which projections have biases.
#[derive(Clone, Copy, Debug)]
pub struct Biases {
    /// Queries, keys, values.
    pub qkv: HasBias,
    /// Attention's output.
    pub attention_output: HasBias,
    /// Gate, up and down.
    pub feed_forward: HasBias,
}

impl Biases {
    /// No biases anywhere.
    pub const NONE: Self = Self { qkv: HasBias::Never, attention_output: HasBias::Never, feed_forward: HasBias::Never };
}

/// Whether a projection has a bias.
#[derive(Clone, Copy, Debug)]
pub enum HasBias {
    /// In no model of the family.
    Never,
    /// In every one.
    Always,
    /// As this field of `config.json` says.
    If(&'static str),
}

/// Factor on embeddings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum EmbeddingScale {
    /// They are taken as they are.
    One,
    /// The root of the hidden size.
    RootOfWidth,
}

/// Which layers look back a window only. `layer_types` in `config.json`, where it is, is believed before this.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Windows {
    /// None.
    Never,
    /// All, if the model has a window.
    EveryLayer,
    /// Those from `max_window_layers` on, if `use_sliding_window`.
    UpperLayers {
        /// The first one where the field is missing.
        from: usize,
    },
    /// A kind of window that is not implemented, if `use_sliding_window`.
    Unsupported,
    /// All but every `period`-th; `sliding_window_pattern` in `config.json` is another period.
    AllButEvery {
        /// Layers from one that sees all to the next.
        period: usize,
    },
}

/// Which layers turn queries and keys, and by which angles.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rotary {
    /// All, by the same angles.
    EveryLayer,
    /// All but every `period`-th.
    AllButEvery {
        /// Field of `config.json` with another period.
        field: &'static str,
        /// Layers from one that does not turn to the next.
        period: usize,
        /// Field of `config.json` with one number a layer, 0 where it does not turn.
        list: &'static str,
    },
    /// All; layers with a window by unscaled angles of another base.
    OwnInWindows {
        /// Field of `config.json` with the base.
        theta_field: &'static str,
        /// The base when the field is missing.
        theta: f32,
    },
}

/// What `config.json` may leave out: what transformers assumes for a field that is not there. One that is there and null is
/// nothing.
#[derive(Clone, Copy, Debug)]
pub struct Defaults {
    /// The feed-forward's curve.
    pub activation: Activation,
    /// Width of a head; `None`: hidden size / heads.
    pub head_dim: Option<usize>,
    /// Key/value heads; `None`: as many as query heads.
    pub num_key_value_heads: Option<usize>,
    /// Tokens that a windowed layer sees; `None`: all.
    pub sliding_window: Option<usize>,
    /// What the root of scales scores down; `None`: the width of a head.
    pub query_pre_attn_scalar: Option<f32>,
    /// Bound of attention scores.
    pub attention_softcap: Option<f32>,
    /// Bound of logits.
    pub logit_softcap: Option<f32>,
    /// Added under the root of the norm.
    pub rms_norm_eps: f32,
    /// Base of the rotary frequencies.
    pub rope_theta: f32,
    /// The output matrix is the embedding table.
    pub tie_word_embeddings: bool,
}
