//! What the GPU executor needs to know of a model: its sizes, what its layers do, and whether the kernels take it. Pure.

use std::ops::Range;

use stoker_fit::gpu::{DecoderSizes, LayerFormats, WeightFormat, layer_formats};
use stoker_kernels::{
    KernelError,
    cache::KvFormat,
    choose::Numerics,
    device::{Link, Properties},
    launch::{self, AttentionSpec, Heads, NormWeight, Push, RotaryForm, Rows},
    plan::SplitPolicy,
};

use crate::{
    config::{KvCacheDtype, Quantization},
    model::{
        Activation, ModelSpec, NormWeight as Stored,
        spec::{AttentionLayer, FeedForwardLayer, LayerSpec, QkNormSpec, Rank, Stage},
    },
};

/// Weights that a step still reads when it is about to end: 0.6 to 0.8 ms on an H200, as long as two threads take to wake up one
/// after the other.
const NEAR_THE_END_BYTES: usize = 5 << 29;

/// Up to so many rows a step takes as long as reading the weights. In longer ones each layer takes too long, but for the last one,
/// where only drawn rows go on.
const READING_ROWS_MAX: usize = 256;

/// A decoder that the kernels take.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct ModelShape {
    pub(super) hidden: usize,
    pub(super) inner: usize,
    pub(super) vocab: usize,
    /// Of several GPUs, which this is: heads, the width of the feed-forward and logits are its share.
    pub(super) rank: Rank,
    /// Of which stage, whose layers alone are here.
    pub(super) stage: Stage,
    /// How few rows go from rank to rank.
    pub(super) push: Push,
    pub(super) heads: Heads,
    /// Of all norms.
    pub(super) eps: f32,
    /// How the weights of all norms are stored.
    pub(super) norm_weight: NormWeight,
    /// Factor on the rows of the embedding table.
    pub(super) embedding_scale: Option<f32>,
    /// Logits go through `cap * tanh(logit / cap)`.
    pub(super) logit_softcap: Option<f32>,
    /// What every layer does.
    pub(super) block: Block,
    /// What layers differ in.
    pub(super) layers: Vec<LayerShape>,
    /// How keys and values lie in the cache.
    pub(super) kv_format: KvFormat,
}

/// What every layer of a model does.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Block {
    pub(super) norms: Norms,
    pub(super) qk_norm: QkNorm,
    pub(super) biases: Biases,
    pub(super) activation: Activation,
    /// What scores are multiplied by.
    pub(super) attention_scale: f32,
    /// Scores go through `cap * tanh(score / cap)`.
    pub(super) attention_softcap: Option<f32>,
}

/// Where norms stand: in front of each half of a layer, and behind it, before what it gives is added.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Norms {
    pub(super) before: bool,
    pub(super) after: bool,
}

/// What of queries and keys is normed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum QkNorm {
    None,
    EveryHead,
    /// All heads of a row together.
    WholeRow,
}

/// Which GEMMs have a bias. That of queries, keys and values is added where they are turned.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Biases {
    pub(super) o: bool,
    pub(super) gate_up: bool,
    pub(super) down: bool,
}

/// What a layer has for itself.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct LayerShape {
    /// Tokens that a query sees; `None`: all up to itself.
    pub(super) window: Option<usize>,
    /// The angles that heads turn by, an index into the model's sets; `None`: they do not.
    pub(super) rope_set: Option<usize>,
    /// How what it multiplies with lies on the device.
    pub(super) formats: LayerFormats,
}

impl ModelShape {
    /// The shape of a rank's share in bf16, or what of the model the kernels do not take. Ranks divide the model.
    pub(super) fn of(spec: &ModelSpec, rank: Rank) -> Result<Self, String> {
        let shape = Self::described(spec, rank).and_then(|shape| {
            shape.check_launches(spec)?;
            Ok(shape)
        });
        shape.map_err(|problem| format!("{}: {problem}", spec.architecture))
    }

    fn described(spec: &ModelSpec, rank: Rank) -> Result<Self, String> {
        let first = spec.layers.first().ok_or("it has no layers")?;
        let block = Block::of(first)?;
        for (idx, layer) in spec.layers.iter().enumerate() {
            if Block::of(layer)? != block {
                return Err(format!("layer {idx} is not built as layer 0 is: windows and angles alone may differ"));
            }
        }
        let sizes = DecoderSizes::of(spec, rank).ok_or("it has no layers")?;
        let DecoderSizes { hidden, inner, vocab, heads, push, kv_format, layers, .. } = sizes;
        Ok(Self {
            hidden,
            inner,
            vocab,
            rank,
            stage: spec.stage,
            push,
            heads,
            eps: spec.norm.eps,
            norm_weight: match spec.norm.stored {
                Stored::Factor => NormWeight::Factor,
                Stored::OnePlusFactor => NormWeight::OnePlusFactor,
            },
            embedding_scale: spec.embedding.scale,
            logit_softcap: spec.head.softcap,
            block,
            layers: spec.layers.iter().zip(layers).map(|(layer, formats)| LayerShape::of(layer, formats)).collect(),
            kv_format,
        })
    }

    /// With each projection as it is described and the chip multiplies it, or in fewer bits; or why the kernels do not take these.
    pub(super) fn stored_as_described(
        self,
        spec: &ModelSpec,
        properties: Properties,
        quantization: Option<Quantization>,
    ) -> Result<Self, String> {
        let is_fp8 = quantization == Some(Quantization::Fp8);
        let formats = layer_formats(spec, self.rank, properties.capability, is_fp8)?;
        Ok(self.stored_as(formats))
    }

    /// With the projections of each layer so.
    pub(super) fn stored_as(mut self, formats: Vec<LayerFormats>) -> Self {
        self.layers.iter_mut().zip(formats).for_each(|(layer, formats)| layer.formats = formats);
        self
    }

    /// Over that link, where only speed counts. Else every row's norm is summed in one order, however many go at once.
    pub(super) fn over(self, link: Link, numerics: Numerics) -> Self {
        let push = match (link, numerics) {
            (Link::NvLink, Numerics::Fastest) => Push::Lines,
            (Link::NvLink, Numerics::BatchInvariant) | (Link::Pcie, _) => Push::Words,
        };
        Self { push, ..self }
    }

    /// With keys and values stored as it is asked. There is no head that the kernels take otherwise and not in this format.
    pub(super) fn with_cache_of(self, asked: Option<KvCacheDtype>) -> Self {
        let kv_format = match asked {
            None => KvFormat::Bf16,
            Some(KvCacheDtype::Fp8) => KvFormat::E4m3,
        };
        Self { kv_format, ..self }
    }

    /// What memory depends on.
    pub(super) fn sizes(&self) -> DecoderSizes {
        DecoderSizes {
            hidden: self.hidden,
            inner: self.inner,
            vocab: self.vocab,
            layers: self.layers.iter().map(|layer| layer.formats).collect(),
            n_rope_sets: self.n_rope_sets(),
            heads: self.heads,
            rank: self.rank,
            stage: self.stage,
            push: self.push,
            kv_format: self.kv_format,
        }
    }

    /// Tokens whose logits this rank computes.
    pub(super) fn own_tokens(&self) -> Range<usize> {
        self.rank.vocabulary(self.vocab)
    }

    /// Whether others have a part of each layer.
    pub(super) fn is_shared(&self) -> bool {
        self.rank.of > 1
    }

    /// GPUs that have a part of the model.
    pub(super) fn n_gpus(&self) -> usize {
        self.rank.of * self.stage.of
    }

    /// Whether ranks share the rows of a step of `m` out, where they may. A stage hands whole rows over.
    pub(super) fn shares_rows(&self, m: usize) -> bool {
        if self.stage.of > 1 {
            return false;
        }
        let quantises = self.layers.iter().any(|layer| layer.formats.each().into_iter().any(WeightFormat::is_e4m3));
        launch::shares_rows(m, self.rank.of, quantises)
    }

    /// Layers.
    pub(super) fn n_layers(&self) -> usize {
        self.layers.len()
    }

    /// Sets of rotary angles that layers name.
    pub(super) fn n_rope_sets(&self) -> usize {
        self.layers.iter().filter_map(|layer| layer.rope_set).max().map_or(0, |last| last + 1)
    }

    /// Width of attention's output.
    pub(super) fn attended_width(&self) -> usize {
        self.heads.n_q * self.heads.dim
    }

    /// How a layer attends.
    pub(super) fn attention(&self, layer: usize) -> AttentionSpec {
        AttentionSpec {
            heads: self.heads,
            scale: self.block.attention_scale,
            window: self.layers[layer].window,
            softcap: self.block.attention_softcap,
        }
    }

    /// The last layers of a step of `n_rows`, from where it is about to end.
    pub(super) fn n_layers_near_the_end(&self, n_rows: usize) -> usize {
        if n_rows > READING_ROWS_MAX {
            return self.n_layers().min(1);
        }
        let layer = self.hidden * (self.heads.qkv_width() + self.attended_width() + 3 * self.inner);
        let (layer_bytes, head_bytes) = (2 * layer, 2 * self.hidden * self.own_tokens().len());
        (NEAR_THE_END_BYTES.saturating_sub(head_bytes) / layer_bytes).min(self.n_layers())
    }

    /// What a launch would refuse is refused now, by the same functions.
    fn check_launches(&self, spec: &ModelSpec) -> Result<(), String> {
        let row = |width: usize| Rows { n_rows: 1, width };
        let said = |error: KernelError| error.to_string();
        launch::any_norm(row(self.hidden)).map_err(said)?;
        launch::silu_mul(row(self.inner)).map_err(said)?;
        for (idx, layer) in self.layers.iter().enumerate() {
            let one_piece = SplitPolicy::Balanced { n_slots: 1 };
            launch::paged_decode(1, self.attention(idx), one_piece, self.kv_format).map_err(said)?;
            let n_pairs = layer.rope_set.map_or(0, |set| spec.rope_sets[set].width / 2);
            let form = RotaryForm { heads: self.heads, n_pairs, norm_weight: self.norm_weight };
            launch::rope_kv(1, form, self.kv_format).map_err(said)?;
        }
        if self.block.qk_norm == QkNorm::WholeRow {
            launch::any_norm(row(self.attended_width())).map_err(said)?;
        }
        Ok(())
    }
}

impl Block {
    fn of(LayerSpec { attention: layer, feed_forward: feed }: &LayerSpec) -> Result<Self, String> {
        let AttentionLayer { before, q, qk_norm, attention, o, after, .. } = layer;
        let FeedForwardLayer { before: before_feed, gate, activation, down, after: after_feed, .. } = feed;
        let qk_norm = QkNorm::of(qk_norm.as_ref(), attention.heads.head_dim);
        if (before.is_some(), after.is_some()) != (before_feed.is_some(), after_feed.is_some()) {
            return Err("attention and feed-forward have norms at different places".into());
        }
        if qk_norm == QkNorm::WholeRow && q.bias.is_some() {
            return Err("its queries have both biases and a norm over the whole row".into());
        }
        Ok(Self {
            norms: Norms { before: before.is_some(), after: after.is_some() },
            qk_norm,
            biases: Biases { o: o.bias.is_some(), gate_up: gate.bias.is_some(), down: down.bias.is_some() },
            activation: *activation,
            attention_scale: attention.scale,
            attention_softcap: attention.softcap,
        })
    }
}

impl QkNorm {
    fn of(norms: Option<&QkNormSpec>, head_dim: usize) -> Self {
        match norms {
            None => Self::None,
            Some(norms) if norms.q.weight.rows.len() == head_dim => Self::EveryHead,
            Some(_) => Self::WholeRow,
        }
    }
}

impl LayerShape {
    fn of(layer: &LayerSpec, formats: LayerFormats) -> Self {
        Self { window: layer.attention.attention.window, rope_set: layer.attention.rope_set, formats }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::model::{CheckpointFormat, ModelConfig};

    fn shape(architecture: &str, changes: Value) -> Result<ModelShape, String> {
        let mut config = json!({"architectures": [architecture], "hidden_size": 256, "intermediate_size": 512,
            "num_hidden_layers": 12, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
            "vocab_size": 100, "max_position_embeddings": 128});
        for (name, value) in changes.as_object().unwrap() {
            config[name] = value.clone();
        }
        let config = ModelConfig::from_json(&config, "config.json").unwrap();
        ModelShape::of(&ModelSpec::new(&config, CheckpointFormat::HuggingFace).unwrap(), Rank::ALONE)
    }

    #[test]
    fn llama_mistral_and_qwen_have_norms_in_front() {
        let llama = shape("LlamaForCausalLM", json!({"head_dim": 80})).unwrap();
        assert_eq!(llama.heads, Heads { n_q: 4, n_kv: 2, dim: 80 });
        assert_eq!(llama.block.norms, Norms { before: true, after: false });
        let mistral = shape("MistralForCausalLM", json!({"sliding_window": 32})).unwrap();
        assert_eq!(mistral.attention(11).window, Some(32));
        let qwen3 = shape("Qwen3ForCausalLM", json!({"use_sliding_window": false})).unwrap();
        assert_eq!(qwen3.block.qk_norm, QkNorm::EveryHead);
        let biases = shape("LlamaForCausalLM", json!({"mlp_bias": true})).unwrap().block.biases;
        assert_eq!(biases, Biases { o: false, gate_up: true, down: true });
    }

    #[test]
    fn gemma_olmo_and_smollm_are_told_apart_by_what_their_layers_do() {
        let gemma = shape("Gemma2ForCausalLM", json!({"head_dim": 256, "sliding_window": 32})).unwrap();
        assert_eq!(gemma.block.norms, Norms { before: true, after: true });
        assert_eq!((gemma.norm_weight, gemma.embedding_scale), (NormWeight::OnePlusFactor, Some(16.0)));
        assert_eq!([0, 1].map(|layer| gemma.attention(layer).window), [Some(32), None]);
        assert_eq!((gemma.block.attention_softcap, gemma.logit_softcap), (Some(50.0), Some(30.0)));
        let gemma3 = shape("Gemma3ForCausalLM", json!({"head_dim": 256, "sliding_window": 32})).unwrap();
        assert_eq!([4, 5].map(|layer| gemma3.layers[layer].rope_set), [Some(1), Some(0)]);
        let olmo = shape("Olmo2ForCausalLM", json!({})).unwrap();
        assert_eq!((olmo.block.norms, olmo.block.qk_norm), (Norms { before: false, after: true }, QkNorm::WholeRow));
        let smollm = shape("SmolLM3ForCausalLM", json!({})).unwrap();
        assert_eq!([2, 3].map(|layer| smollm.layers[layer].rope_set), [Some(0), None]);
    }

    #[test]
    fn what_no_launch_takes_is_refused_with_the_architecture_and_what_is_taken() {
        let refusal = |changes| shape("LlamaForCausalLM", changes).unwrap_err();
        let narrow = refusal(json!({"head_dim": 72}));
        assert!(narrow.starts_with("LlamaForCausalLM: ") && narrow.contains("no multiple of 16 up to 256"), "{narrow}");
        let many = refusal(json!({"num_attention_heads": 34, "num_key_value_heads": 2}));
        assert!(many.contains("groups of 1 to 16"), "{many}");
        assert!(refusal(json!({"intermediate_size": 500})).contains("500 is not a multiple of 8"));
    }
}
