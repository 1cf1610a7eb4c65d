//! Named model shapes: the published hyper-parameters of models whose weights do not matter for speed. Reads no file.

use serde_json::{Map, Value, json};

/// The architecture a shape has, where architectures differ in tensors.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Family {
    /// Llama 2 and 3.
    Llama,
    /// Qwen 2 and 2.5: biases on query, key and value.
    Qwen2,
    /// Qwen 3: norms on query and key heads.
    Qwen3,
    /// Gemma 2: norms on both sides, soft-caps, every second layer with a window.
    Gemma2,
    /// Phi-3 and Phi-4: queries, keys and values in one matrix, gate and up in another.
    Phi3,
}

/// Hyper-parameters of a model, by the names of `config.json`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shape {
    /// The model's name in figures, lower case.
    pub name: &'static str,
    /// Its architecture.
    pub family: Family,
    /// Width of the residual stream.
    pub hidden_size: u32,
    /// Width of the feed-forward layer.
    pub intermediate_size: u32,
    /// Decoder layers.
    pub num_hidden_layers: u32,
    /// Query heads.
    pub num_attention_heads: u32,
    /// Key and value heads.
    pub num_key_value_heads: u32,
    /// Width of one head.
    pub head_dim: u32,
    /// Tokens of the vocabulary.
    pub vocab_size: u32,
    /// Positions.
    pub max_position_embeddings: u32,
    /// Base of the rotary frequencies.
    pub rope_theta: f32,
    /// Divisor of low rotary frequencies (Llama 3.1 and later); 1 is off.
    pub rope_factor: f32,
    /// Added under the root of the norm.
    pub rms_norm_eps: f32,
    /// The output matrix is the embedding table.
    pub tie_word_embeddings: bool,
}

/// One tensor of a checkpoint.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Tensor {
    /// Its name in Hugging Face's layout.
    pub name: String,
    /// Its sizes, slowest first.
    pub shape: Vec<u32>,
    /// What it is filled with.
    pub fill: Fill,
}

/// What a tensor of random weights holds.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Fill {
    /// Normal draws of a standard deviation of 0.02, as models are initialised with: logits stay sane.
    Normal,
    /// Ones: norms.
    One,
    /// Eight codes of four bits, each as likely as another.
    Fours,
    /// e4m3 below 2: none is no number.
    E4m3,
    /// One scale for all, with which quantised weights have about the spread of `Normal`.
    Scale,
}

const SHAPES: [Shape; 9] = [
    Shape {
        name: "llama-3.1-8b",
        family: Family::Llama,
        hidden_size: 4096,
        intermediate_size: 14336,
        num_hidden_layers: 32,
        num_attention_heads: 32,
        num_key_value_heads: 8,
        head_dim: 128,
        vocab_size: 128_256,
        max_position_embeddings: 131_072,
        rope_theta: 500_000.0,
        rope_factor: 8.0,
        rms_norm_eps: 1e-5,
        tie_word_embeddings: false,
    },
    Shape {
        name: "llama-3.1-70b",
        family: Family::Llama,
        hidden_size: 8192,
        intermediate_size: 28672,
        num_hidden_layers: 80,
        num_attention_heads: 64,
        num_key_value_heads: 8,
        head_dim: 128,
        vocab_size: 128_256,
        max_position_embeddings: 131_072,
        rope_theta: 500_000.0,
        rope_factor: 8.0,
        rms_norm_eps: 1e-5,
        tie_word_embeddings: false,
    },
    Shape {
        name: "qwen3-1.7b",
        family: Family::Qwen3,
        hidden_size: 2048,
        intermediate_size: 6144,
        num_hidden_layers: 28,
        num_attention_heads: 16,
        num_key_value_heads: 8,
        head_dim: 128,
        vocab_size: 151_936,
        max_position_embeddings: 40_960,
        rope_theta: 1_000_000.0,
        rope_factor: 1.0,
        rms_norm_eps: 1e-6,
        tie_word_embeddings: true,
    },
    Shape {
        name: "qwen3-8b",
        family: Family::Qwen3,
        hidden_size: 4096,
        intermediate_size: 12288,
        num_hidden_layers: 36,
        num_attention_heads: 32,
        num_key_value_heads: 8,
        head_dim: 128,
        vocab_size: 151_936,
        max_position_embeddings: 40_960,
        rope_theta: 1_000_000.0,
        rope_factor: 1.0,
        rms_norm_eps: 1e-6,
        tie_word_embeddings: false,
    },
    Shape {
        name: "gemma-2-9b",
        family: Family::Gemma2,
        hidden_size: 3584,
        intermediate_size: 14336,
        num_hidden_layers: 42,
        num_attention_heads: 16,
        num_key_value_heads: 8,
        head_dim: 256,
        vocab_size: 256_000,
        max_position_embeddings: 8192,
        rope_theta: 10_000.0,
        rope_factor: 1.0,
        rms_norm_eps: 1e-6,
        tie_word_embeddings: true,
    },
    Shape {
        name: "phi-4",
        family: Family::Phi3,
        hidden_size: 5120,
        intermediate_size: 17_920,
        num_hidden_layers: 40,
        num_attention_heads: 40,
        num_key_value_heads: 10,
        head_dim: 128,
        vocab_size: 100_352,
        max_position_embeddings: 16_384,
        rope_theta: 250_000.0,
        rope_factor: 1.0,
        rms_norm_eps: 1e-5,
        tie_word_embeddings: false,
    },
    Shape {
        name: "llama-3.2-1b",
        family: Family::Llama,
        hidden_size: 2048,
        intermediate_size: 8192,
        num_hidden_layers: 16,
        num_attention_heads: 32,
        num_key_value_heads: 8,
        head_dim: 64,
        vocab_size: 128_256,
        max_position_embeddings: 131_072,
        rope_theta: 500_000.0,
        rope_factor: 32.0,
        rms_norm_eps: 1e-5,
        tie_word_embeddings: true,
    },
    Shape {
        name: "qwen2.5-0.5b",
        family: Family::Qwen2,
        hidden_size: 896,
        intermediate_size: 4864,
        num_hidden_layers: 24,
        num_attention_heads: 14,
        num_key_value_heads: 2,
        head_dim: 64,
        vocab_size: 151_936,
        max_position_embeddings: 32_768,
        rope_theta: 1_000_000.0,
        rope_factor: 1.0,
        rms_norm_eps: 1e-6,
        tie_word_embeddings: true,
    },
    Shape {
        name: "tinyllama-1.1b",
        family: Family::Llama,
        hidden_size: 2048,
        intermediate_size: 5632,
        num_hidden_layers: 22,
        num_attention_heads: 32,
        num_key_value_heads: 4,
        head_dim: 64,
        vocab_size: 32_000,
        max_position_embeddings: 2048,
        rope_theta: 10_000.0,
        rope_factor: 1.0,
        rms_norm_eps: 1e-5,
        tie_word_embeddings: false,
    },
];

impl Shape {
    /// The shape of that name.
    pub fn named(name: &str) -> Option<&'static Self> {
        SHAPES.iter().find(|shape| shape.name == name)
    }

    /// All names.
    pub fn names() -> impl Iterator<Item = &'static str> {
        SHAPES.iter().map(|shape| shape.name)
    }

    /// Its `config.json`; `dtype` by PyTorch's name.
    pub fn config(&self, dtype: &str) -> Value {
        let (architecture, model_type) = match self.family {
            Family::Llama => ("LlamaForCausalLM", "llama"),
            Family::Qwen2 => ("Qwen2ForCausalLM", "qwen2"),
            Family::Qwen3 => ("Qwen3ForCausalLM", "qwen3"),
            Family::Gemma2 => ("Gemma2ForCausalLM", "gemma2"),
            Family::Phi3 => ("Phi3ForCausalLM", "phi3"),
        };
        let mut config = json!({
            "architectures": [architecture], "model_type": model_type, "torch_dtype": dtype, "hidden_act": "silu",
            "hidden_size": self.hidden_size, "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers, "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads, "head_dim": self.head_dim,
            "vocab_size": self.vocab_size, "max_position_embeddings": self.max_position_embeddings,
            "rms_norm_eps": self.rms_norm_eps, "rope_theta": self.rope_theta, "rope_scaling": self.rope_scaling(),
            "tie_word_embeddings": self.tie_word_embeddings, "attention_bias": false, "mlp_bias": false,
            "bos_token_id": 1, "eos_token_id": 2,
        });
        self.add_of_family(config.as_object_mut().expect("it is an object"));
        config
    }

    fn add_of_family(&self, config: &mut Map<String, Value>) {
        let added = match self.family {
            Family::Gemma2 => json!({
                "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 4096,
                "query_pre_attn_scalar": self.head_dim, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
            }),
            Family::Phi3 => json!({
                "original_max_position_embeddings": self.max_position_embeddings, "sliding_window": null, "pad_token_id": 0,
            }),
            Family::Llama | Family::Qwen2 | Family::Qwen3 => json!({}),
        };
        config.extend(added.as_object().cloned().unwrap_or_default());
    }

    fn rope_scaling(&self) -> Value {
        if self.rope_factor == 1.0 {
            return Value::Null;
        }
        json!({
            "rope_type": "llama3", "factor": self.rope_factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        })
    }

    /// Every tensor of its checkpoint, in the order of the layers.
    pub fn tensors(&self) -> Vec<Tensor> {
        let mut tensors = vec![weight("model.embed_tokens", &[self.vocab_size, self.hidden_size])];
        (0..self.num_hidden_layers).for_each(|layer| self.layer(&format!("model.layers.{layer}"), &mut tensors));
        tensors.push(norm("model.norm", self.hidden_size));
        if !self.tie_word_embeddings {
            tensors.push(weight("lm_head", &[self.vocab_size, self.hidden_size]));
        }
        tensors
    }

    fn layer(&self, prefix: &str, tensors: &mut Vec<Tensor>) {
        let (hidden, wide) = (self.hidden_size, self.intermediate_size);
        let query = self.num_attention_heads * self.head_dim;
        let kv = self.num_key_value_heads * self.head_dim;
        let named = |name: &str| format!("{prefix}.{name}");
        tensors.push(norm(&named("input_layernorm"), hidden));
        let is_fused = self.family == Family::Phi3;
        let attention: &[(&str, u32)] = if is_fused {
            &[("qkv_proj", query + 2 * kv)]
        } else {
            &[("q_proj", query), ("k_proj", kv), ("v_proj", kv)]
        };
        for &(name, rows) in attention {
            let name = named(&format!("self_attn.{name}"));
            tensors.push(weight(&name, &[rows, hidden]));
            if self.family == Family::Qwen2 {
                tensors.push(Tensor { name: format!("{name}.bias"), shape: vec![rows], fill: Fill::Normal });
            }
        }
        tensors.push(weight(&named("self_attn.o_proj"), &[hidden, query]));
        if self.family == Family::Qwen3 {
            tensors.push(norm(&named("self_attn.q_norm"), self.head_dim));
            tensors.push(norm(&named("self_attn.k_norm"), self.head_dim));
        }
        tensors.push(norm(&named("post_attention_layernorm"), hidden));
        if self.family == Family::Gemma2 {
            tensors.push(norm(&named("pre_feedforward_layernorm"), hidden));
            tensors.push(norm(&named("post_feedforward_layernorm"), hidden));
        }
        let feed_forward: &[(&str, u32)] =
            if is_fused { &[("gate_up_proj", 2 * wide)] } else { &[("gate_proj", wide), ("up_proj", wide)] };
        for &(name, rows) in feed_forward {
            tensors.push(weight(&named(&format!("mlp.{name}")), &[rows, hidden]));
        }
        tensors.push(weight(&named("mlp.down_proj"), &[hidden, wide]));
    }
}

fn weight(name: &str, shape: &[u32]) -> Tensor {
    Tensor { name: format!("{name}.weight"), shape: shape.to_vec(), fill: Fill::Normal }
}

fn norm(name: &str, width: u32) -> Tensor {
    Tensor { name: format!("{name}.weight"), shape: vec![width], fill: Fill::One }
}

impl Tensor {
    /// How many values it holds.
    pub fn n_values(&self) -> u64 {
        self.shape.iter().map(|size| u64::from(*size)).product()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn n_params(name: &str) -> u64 {
        Shape::named(name).unwrap().tensors().iter().map(Tensor::n_values).sum()
    }

    /// The counts that the models' publishers state.
    #[test]
    fn shapes_have_the_published_number_of_parameters() {
        assert_eq!(n_params("llama-3.1-8b"), 8_030_261_248);
        assert_eq!(n_params("llama-3.1-70b"), 70_553_706_496);
        assert_eq!(n_params("qwen3-1.7b"), 1_720_574_976);
        assert_eq!(n_params("qwen3-8b"), 8_190_735_360);
        assert_eq!(n_params("gemma-2-9b"), 9_241_705_984);
        assert_eq!(n_params("phi-4"), 14_659_507_200);
        assert_eq!(n_params("llama-3.2-1b"), 1_235_814_400);
        assert_eq!(n_params("qwen2.5-0.5b"), 494_032_768);
        assert_eq!(n_params("tinyllama-1.1b"), 1_100_048_384);
    }

    #[test]
    fn only_llama_3_stretches_its_positions() {
        let scaling = |name| Shape::named(name).unwrap().config("bfloat16")["rope_scaling"]["factor"].as_f64();
        assert_eq!(
            [scaling("llama-3.1-8b"), scaling("llama-3.2-1b"), scaling("qwen3-8b")],
            [Some(8.0), Some(32.0), None]
        );
    }
}
