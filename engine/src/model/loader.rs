//! From named tensors to a decoder's layers, by the description of the family. Checks every shape; computes nothing but
//! norm weights that are stored around zero.

use super::{
    ModelConfig, ModelError, Tensor, WeightStore,
    decoder::{Attention, FeedForward, Layer, Linear},
    family::{NormWeight, Projections, QkNorm},
};
use crate::ops::Ops;

/// Takes tensors out of the store by name and shape, counting what it took.
pub(super) struct Loader<'a, O: Ops> {
    ops: &'a mut O,
    weights: WeightStore,
    config: &'a ModelConfig,
    n_params: u64,
    dtype: String,
}

/// Projections of the same input: stored one by one, or one below the other.
struct Group<'a, const N: usize> {
    names: [&'a str; N],
    fused_name: &'a str,
    widths: [usize; N],
    has_bias: bool,
}

impl<'a, O: Ops> Loader<'a, O> {
    pub(super) fn new(ops: &'a mut O, weights: WeightStore, config: &'a ModelConfig) -> Self {
        let dtype = weights.format_name();
        Self { ops, weights, config, n_params: 0, dtype }
    }

    pub(super) fn layer(&mut self, idx: usize) -> Result<Layer<O>, ModelError> {
        let prefix = format!("model.layers.{idx}.");
        Ok(Layer { attention: self.attention(idx, &prefix)?, feed_forward: self.feed_forward(&prefix)? })
    }

    fn attention(&mut self, idx: usize, prefix: &str) -> Result<Attention<O>, ModelError> {
        let ModelConfig { family, hidden_size, head_dim, biases, .. } = *self.config;
        let q_width = self.config.num_attention_heads * head_dim;
        let kv_width = self.config.num_key_value_heads * head_dim;
        let before = self.norm_if(prefix, family.norms.before_attention)?;
        let group = Group {
            names: ["q_proj", "k_proj", "v_proj"],
            fused_name: "qkv_proj",
            widths: [q_width, kv_width, kv_width],
            has_bias: biases.qkv,
        };
        let inner = format!("{prefix}self_attn.");
        let [q, k, v] = self.group(&inner, group)?;
        let [q_len, k_len] = match family.qk_norm {
            QkNorm::None => [None, None],
            QkNorm::EveryHead => [Some(head_dim), Some(head_dim)],
            QkNorm::WholeRow => [Some(q_width), Some(kv_width)],
        };
        let q_norm = q_len.map(|len| self.norm(&format!("{inner}q_norm.weight"), len)).transpose()?;
        let k_norm = k_len.map(|len| self.norm(&format!("{inner}k_norm.weight"), len)).transpose()?;
        let o = self.linear(&format!("{inner}o_proj"), [hidden_size, q_width], biases.attention_output)?;
        let after = self.norm_if(prefix, family.norms.after_attention)?;
        let (spec, rope) = (self.config.attention_of_layer(idx), self.config.rope_of_layer(idx));
        Ok(Attention { spec, rope, before, q, k, v, q_norm, k_norm, o, after })
    }

    fn feed_forward(&mut self, prefix: &str) -> Result<FeedForward<O>, ModelError> {
        let ModelConfig { family, hidden_size, intermediate_size: inner, biases, .. } = *self.config;
        let group = Group {
            names: ["gate_proj", "up_proj"],
            fused_name: "gate_up_proj",
            widths: [inner, inner],
            has_bias: biases.feed_forward,
        };
        let before = self.norm_if(prefix, family.norms.before_feed_forward)?;
        let [gate, up] = self.group(&format!("{prefix}mlp."), group)?;
        let down = self.linear(&format!("{prefix}mlp.down_proj"), [hidden_size, inner], biases.feed_forward)?;
        let after = self.norm_if(prefix, family.norms.after_feed_forward)?;
        Ok(FeedForward { before, gate, up, down, after })
    }

    fn group<const N: usize>(&mut self, prefix: &str, group: Group<'_, N>) -> Result<[Linear<O>; N], ModelError> {
        let linears = match self.config.family.projections {
            Projections::Separate => self.separate(prefix, &group)?,
            Projections::Fused => self.fused(prefix, &group)?,
        };
        Ok(linears.try_into().expect("there is one projection a name"))
    }

    fn separate<const N: usize>(&mut self, prefix: &str, group: &Group<'_, N>) -> Result<Vec<Linear<O>>, ModelError> {
        let hidden = self.config.hidden_size;
        let parts = group.names.iter().zip(group.widths);
        parts.map(|(name, width)| self.linear(&format!("{prefix}{name}"), [width, hidden], group.has_bias)).collect()
    }

    /// The rows of the one matrix belong to the projections in the order of their names.
    fn fused<const N: usize>(&mut self, prefix: &str, group: &Group<'_, N>) -> Result<Vec<Linear<O>>, ModelError> {
        assert!(!group.has_bias, "no family has fused projections with biases");
        let n_rows = group.widths.iter().sum();
        let fused =
            self.take_matrix(&format!("{prefix}{}.weight", group.fused_name), [n_rows, self.config.hidden_size])?;
        let mut first = 0;
        let rows_of = |width| {
            let rows = fused.rows(first..first + width);
            first += width;
            Linear { weight: self.ops.matrix(&rows), bias: None }
        };
        Ok(group.widths.map(rows_of).into())
    }

    fn linear(&mut self, name: &str, shape: [usize; 2], has_bias: bool) -> Result<Linear<O>, ModelError> {
        let weight = self.matrix(&format!("{name}.weight"), shape)?;
        let bias = if has_bias { Some(self.vector(&format!("{name}.bias"), shape[0])?) } else { None };
        Ok(Linear { weight, bias })
    }

    fn norm_if(&mut self, prefix: &str, name: Option<&str>) -> Result<Option<O::Vector>, ModelError> {
        name.map(|name| self.norm(&format!("{prefix}{name}.weight"), self.config.hidden_size)).transpose()
    }

    /// The weight of a norm, as the factor that it is.
    pub(super) fn norm(&mut self, name: &str, len: usize) -> Result<O::Vector, ModelError> {
        let tensor = self.take(name, &[len])?;
        let stored = self.weights.norm_weight().unwrap_or(self.config.family.norm_weight);
        Ok(match stored {
            NormWeight::Factor => self.ops.vector(&tensor),
            NormWeight::OnePlusFactor => self.ops.vector(&tensor.plus_one()),
        })
    }

    pub(super) fn matrix(&mut self, name: &str, shape: [usize; 2]) -> Result<O::Matrix, ModelError> {
        let tensor = self.take_matrix(name, shape)?;
        Ok(self.ops.matrix(&tensor))
    }

    fn vector(&mut self, name: &str, len: usize) -> Result<O::Vector, ModelError> {
        let tensor = self.take(name, &[len])?;
        Ok(self.ops.vector(&tensor))
    }

    fn take_matrix(&mut self, name: &str, shape: [usize; 2]) -> Result<Tensor, ModelError> {
        let tensor = self.weights.take_in_blocks(name, &shape)?;
        self.n_params += tensor.n_values() as u64;
        Ok(tensor)
    }

    fn take(&mut self, name: &str, shape: &[usize]) -> Result<Tensor, ModelError> {
        let tensor = self.weights.take(name, shape)?;
        self.n_params += tensor.n_values() as u64;
        Ok(tensor)
    }

    /// Parameters and number format. Old checkpoints carry the rotary frequencies, and some a second copy of a tied
    /// output matrix.
    pub(super) fn finish(mut self) -> Result<(u64, String), ModelError> {
        let is_tied = self.config.tie_word_embeddings;
        self.weights.ignore(|name| name.ends_with("rotary_emb.inv_freq") || (is_tied && name == "lm_head.weight"));
        self.weights.finish(self.config.family.architecture)?;
        Ok((self.n_params, self.dtype))
    }
}
