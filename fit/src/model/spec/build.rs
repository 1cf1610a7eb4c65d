//! From a checked configuration to the description of every layer and weight, with the names that each format of
//! checkpoints has for them. The only place that knows a tensor's name.

use super::{
    AttentionLayer, EmbeddingSpec, FeedForwardLayer, HeadShape, HeadSpec, LayerSpec, LinearSpec, ModelSpec, NormSpec,
    QkNormSpec, RowOrder, Sharding, Stage, WeightRole, WeightSpec,
};
use crate::model::{
    ModelConfig, ModelError, RopeOfLayer,
    family::{GgufRows, NormWeight, Projections, QkNorm},
};

/// More layers than any model has: what a file claims beyond is not described.
pub const LAYERS_MAX: usize = 4096;

/// Who names and orders the tensors.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum CheckpointFormat {
    /// Hugging Face: safetensors.
    HuggingFace,
    /// llama.cpp: GGUF.
    Gguf,
}

/// A tensor's name without layer and suffix, in both formats.
struct Part<'a> {
    hugging_face: &'a str,
    gguf: &'a str,
}

const fn part<'a>(hugging_face: &'a str, gguf: &'a str) -> Part<'a> {
    Part { hugging_face, gguf }
}

/// Projections of the same input: each a tensor, or rows of one tensor in this order.
struct Group<'a, const N: usize> {
    separate: [Part<'a>; N],
    fused: Part<'a>,
    widths: [usize; N],
    sharding: [Sharding; N],
    has_bias: bool,
}

/// Which rows of a tensor of how many a projection is.
struct Rows {
    first: usize,
    len: usize,
    of: usize,
}

impl Rows {
    fn all(len: usize) -> Self {
        Self { first: 0, len, of: len }
    }
}

impl ModelSpec {
    /// Describes a model whose checkpoint has that format.
    pub fn new(config: &ModelConfig, format: CheckpointFormat) -> Result<Self, ModelError> {
        let n_layers = config.num_hidden_layers;
        if n_layers > LAYERS_MAX {
            return Err(ModelError::TooManyLayers { found: n_layers, limit: LAYERS_MAX });
        }
        let whole = Builder { config, format, layer: None };
        let layers = (0..n_layers).map(|idx| Builder { layer: Some(idx), ..whole }.layer(idx)).collect();
        let head = || whole.matrix(&part("lm_head", "output"), config.vocab_size, Sharding::Vocabulary);
        Ok(Self {
            architecture: config.family.architecture,
            hidden_size: config.hidden_size,
            vocab_size: config.vocab_size,
            stage: Stage::WHOLE,
            embedding: EmbeddingSpec { weight: whole.embedding(), scale: config.embedding_scale },
            layers,
            norm: whole.norm(&part("model.norm", "output_norm"), config.hidden_size, Sharding::Replicated),
            head: HeadSpec { weight: (!config.tie_word_embeddings).then(head), softcap: config.logit_softcap },
            rope_sets: [&config.rope].into_iter().chain(&config.windowed_rope).cloned().collect(),
        })
    }
}

/// Describes the weights of one layer, or those outside of layers.
#[derive(Clone, Copy)]
struct Builder<'a> {
    config: &'a ModelConfig,
    format: CheckpointFormat,
    layer: Option<usize>,
}

impl Builder<'_> {
    fn layer(&self, idx: usize) -> LayerSpec {
        LayerSpec { attention: self.attention(idx), feed_forward: self.feed_forward() }
    }

    fn attention(&self, idx: usize) -> AttentionLayer {
        let ModelConfig { family, biases, .. } = self.config;
        let attention = self.config.attention_of_layer(idx);
        let HeadShape { head_dim, .. } = attention.heads;
        let (q_width, kv_width) = (attention.heads.q_width(), attention.heads.kv_width());
        let [mut q, mut k, v] = self.group(Group {
            separate: [
                part("self_attn.q_proj", "attn_q"),
                part("self_attn.k_proj", "attn_k"),
                part("self_attn.v_proj", "attn_v"),
            ],
            fused: part("self_attn.qkv_proj", "attn_qkv"),
            widths: [q_width, kv_width, kv_width],
            sharding: [
                Sharding::Outputs { unit: head_dim },
                Sharding::KvHeads { unit: head_dim },
                Sharding::KvHeads { unit: head_dim },
            ],
            has_bias: biases.qkv,
        });
        [&mut q, &mut k].into_iter().for_each(|linear| self.order_rows(linear, head_dim));
        let sharding = Sharding::Inputs { unit: head_dim };
        AttentionLayer {
            before: self.norm_if(family.norms.before_attention, "attn_norm"),
            q,
            k,
            v,
            qk_norm: self.qk_norm(attention.heads),
            rope_set: match self.config.rope_of_layer(idx) {
                RopeOfLayer::None => None,
                RopeOfLayer::Model => Some(0),
                RopeOfLayer::Windowed => Some(1),
            },
            attention,
            o: self.output(&part("self_attn.o_proj", "attn_output"), q_width, sharding, biases.attention_output),
            after: self.norm_if(family.norms.after_attention, "post_attention_norm"),
        }
    }

    fn feed_forward(&self) -> FeedForwardLayer {
        let ModelConfig { family, biases, activation, intermediate_size: inner, .. } = *self.config;
        let [gate, up] = self.group(Group {
            separate: [part("mlp.gate_proj", "ffn_gate"), part("mlp.up_proj", "ffn_up")],
            // There gate and up in one matrix go by the name of up.
            fused: part("mlp.gate_up_proj", "ffn_up"),
            widths: [inner, inner],
            sharding: [Sharding::Outputs { unit: 1 }; 2],
            has_bias: biases.feed_forward,
        });
        let sharding = Sharding::Inputs { unit: 1 };
        FeedForwardLayer {
            before: self.norm_if(family.norms.before_feed_forward, "ffn_norm"),
            gate,
            up,
            activation,
            down: self.output(&part("mlp.down_proj", "ffn_down"), inner, sharding, biases.feed_forward),
            after: self.norm_if(family.norms.after_feed_forward, "post_ffw_norm"),
        }
    }

    fn group<const N: usize>(&self, group: Group<'_, N>) -> [LinearSpec; N] {
        let Group { separate, fused, widths, sharding, has_bias } = group;
        let of = widths.iter().sum();
        let mut first = 0;
        std::array::from_fn(|idx| {
            let (part, rows) = match self.config.family.projections {
                Projections::Separate => (&separate[idx], Rows::all(widths[idx])),
                Projections::Fused => (&fused, Rows { first, len: widths[idx], of }),
            };
            first += widths[idx];
            self.linear(part, rows, self.config.hidden_size, sharding[idx], has_bias)
        })
    }

    /// A projection back to the residual stream. Ranks add up what they give: only one of them adds the bias.
    fn output(&self, part: &Part<'_>, n_inputs: usize, sharding: Sharding, has_bias: bool) -> LinearSpec {
        self.linear(part, Rows::all(self.config.hidden_size), n_inputs, sharding, has_bias)
    }

    fn linear(&self, part: &Part<'_>, rows: Rows, n_inputs: usize, sharding: Sharding, has_bias: bool) -> LinearSpec {
        let of_bias = match sharding {
            Sharding::Outputs { .. } | Sharding::KvHeads { .. } | Sharding::Vocabulary => sharding,
            Sharding::Inputs { .. } | Sharding::Replicated => Sharding::Replicated,
        };
        let bias = || WeightSpec {
            tensor_shape: vec![rows.of],
            role: WeightRole::Bias,
            ..self.weight(part, "bias", &rows, of_bias)
        };
        LinearSpec {
            bias: has_bias.then(bias),
            weight: self.quantised(WeightSpec {
                tensor_shape: vec![rows.of, n_inputs],
                ..self.weight(part, "weight", &rows, sharding)
            }),
        }
    }

    fn quantised(&self, weight: WeightSpec) -> WeightSpec {
        let quantization = self.config.quantization.as_ref();
        WeightSpec { scheme: quantization.and_then(|all| all.scheme_of(weight.module())).cloned(), ..weight }
    }

    fn matrix(&self, part: &Part<'_>, n_outputs: usize, sharding: Sharding) -> WeightSpec {
        self.linear(part, Rows::all(n_outputs), self.config.hidden_size, sharding, false).weight
    }

    fn embedding(&self) -> WeightSpec {
        let table = part("model.embed_tokens", "token_embd");
        let matrix = self.matrix(&table, self.config.vocab_size, Sharding::Replicated);
        WeightSpec { role: WeightRole::Embedding, scheme: None, ..matrix }
    }

    fn qk_norm(&self, heads: HeadShape) -> Option<QkNormSpec> {
        let [q, k] = match self.config.family.qk_norm {
            QkNorm::None => return None,
            QkNorm::EveryHead => [(heads.head_dim, Sharding::Replicated); 2],
            QkNorm::WholeRow => [
                (heads.q_width(), Sharding::Outputs { unit: heads.head_dim }),
                (heads.kv_width(), Sharding::KvHeads { unit: heads.head_dim }),
            ],
        };
        Some(QkNormSpec {
            q: self.norm(&part("self_attn.q_norm", "attn_q_norm"), q.0, q.1),
            k: self.norm(&part("self_attn.k_norm", "attn_k_norm"), k.0, k.1),
        })
    }

    fn norm_if(&self, hugging_face: Option<&str>, gguf: &str) -> Option<NormSpec> {
        hugging_face.map(|name| self.norm(&part(name, gguf), self.config.hidden_size, Sharding::Replicated))
    }

    fn norm(&self, part: &Part<'_>, width: usize, sharding: Sharding) -> NormSpec {
        let rows = Rows::all(width);
        let weight = WeightSpec { role: WeightRole::Norm, ..self.weight(part, "weight", &rows, sharding) };
        NormSpec { weight, stored: self.norm_weight(), eps: self.config.rms_norm_eps }
    }

    /// Who converts a model to GGUF adds the one that Gemma's norms lack.
    fn norm_weight(&self) -> NormWeight {
        match self.format {
            CheckpointFormat::HuggingFace => self.config.family.norm_weight,
            CheckpointFormat::Gguf => NormWeight::Factor,
        }
    }

    /// Some families' queries and keys are reordered in GGUF.
    fn order_rows(&self, linear: &mut LinearSpec, head_dim: usize) {
        let is_paired = self.config.family.gguf.is_some_and(|format| format.rows == GgufRows::Pairs);
        if self.format == CheckpointFormat::Gguf && is_paired {
            linear.weight.order = RowOrder::Pairs { head_dim };
            linear.bias.iter_mut().for_each(|bias| bias.order = RowOrder::Pairs { head_dim });
        }
    }

    /// A weight of one column; matrices say how many they have.
    fn weight(&self, part: &Part<'_>, suffix: &str, rows: &Rows, sharding: Sharding) -> WeightSpec {
        let (name, gguf) = match self.layer {
            None => (part.hugging_face.to_owned(), part.gguf.to_owned()),
            Some(idx) => (format!("model.layers.{idx}.{}", part.hugging_face), format!("blk.{idx}.{}", part.gguf)),
        };
        let name = format!("{name}.{suffix}");
        WeightSpec {
            tensor: match self.format {
                CheckpointFormat::HuggingFace => name.clone(),
                CheckpointFormat::Gguf => format!("{gguf}.{suffix}"),
            },
            name,
            tensor_shape: vec![rows.of],
            rows: rows.first..rows.first + rows.len,
            order: RowOrder::AsNeeded,
            role: WeightRole::Projection,
            sharding,
            scheme: None,
        }
    }
}
