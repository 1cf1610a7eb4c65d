//! One weight of a model: which rows of which tensor it is, and which of them a rank needs. Pure; the bytes are the store's.

use std::{fmt, ops::Range};

use crate::model::{ModelError, Scheme};

/// A weight, as rows of a tensor in a checkpoint. Projections that share a tensor are different rows of it.
#[derive(Clone, Debug, PartialEq)]
pub struct WeightSpec {
    /// Hugging Face's name of the tensor.
    pub name: String,
    /// Its name in the checkpoint.
    pub tensor: String,
    /// Shape of the whole tensor: outputs, inputs.
    pub tensor_shape: Vec<usize>,
    /// The rows that are this weight.
    pub rows: Range<usize>,
    /// How they are ordered in the checkpoint.
    pub order: RowOrder,
    /// What it is to the layer.
    pub role: WeightRole,
    /// How ranks share it.
    pub sharding: Sharding,
    /// How it is quantised in the checkpoint, if it is: then other tensors of its module hold it.
    pub scheme: Option<Scheme>,
}

/// What a weight is to its layer.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum WeightRole {
    /// One row a token.
    Embedding,
    /// A matrix that rows are multiplied with.
    Projection,
    /// What is added to a product.
    Bias,
    /// What a norm multiplies with.
    Norm,
}

/// How the rows of a head are ordered in a checkpoint.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum RowOrder {
    /// As they are needed.
    AsNeeded,
    /// Rotary pair by pair, in heads of this many rows: `0 h/2 1 h/2+1 ...`.
    Pairs {
        /// Rows of a head; even.
        head_dim: usize,
    },
}

/// How the ranks of a tensor-parallel group share a weight.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Sharding {
    /// Each has all of it.
    Replicated,
    /// Each has some outputs (rows), as many units of them as the others (column parallel).
    Outputs {
        /// Rows that stay together: a head, or one.
        unit: usize,
    },
    /// Each has some heads of as many rows, as many as the others; where ranks are more than heads, neighbours have the same one.
    KvHeads {
        /// Rows of a head.
        unit: usize,
    },
    /// Each has some tokens' rows, in steps of [`VOCABULARY_STEP`]: the last ones may have fewer, or none.
    Vocabulary,
    /// Each has some inputs (columns), as many units of them as the others (row parallel).
    Inputs {
        /// Columns that stay together: a head, or one.
        unit: usize,
    },
}

/// Rows of a vocabulary that stay together.
pub const VOCABULARY_STEP: usize = 16;

/// One device's share of a model.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Rank {
    /// From 0 on.
    pub idx: usize,
    /// How many there are.
    pub of: usize,
}

impl Rank {
    /// The only one.
    pub const ALONE: Self = Self { idx: 0, of: 1 };

    /// All ranks of a group.
    pub fn all(of: usize) -> impl Iterator<Item = Self> {
        (0..of).map(move |idx| Self { idx, of })
    }

    /// How many of so many heads are this rank's: the same for all ranks.
    pub fn kv_heads(self, n_heads: usize) -> usize {
        (n_heads / self.of).max(1)
    }

    /// The tokens of a vocabulary whose rows are this rank's.
    pub fn vocabulary(self, n_tokens: usize) -> Range<usize> {
        let share = self.vocabulary_share(n_tokens);
        (self.idx * share).min(n_tokens)..((self.idx + 1) * share).min(n_tokens)
    }

    /// How many they are at most.
    pub fn vocabulary_share(self, n_tokens: usize) -> usize {
        if self.of == 1 { n_tokens } else { n_tokens.div_ceil(self.of).next_multiple_of(VOCABULARY_STEP) }
    }
}

/// Consecutive layers of a model that GPUs of their own hold and compute (pipeline parallelism): rows of the residual stream go from each
/// stage to the next. The first one has the embedding table, the last one the norm and the head behind the layers.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Stage {
    /// From 0 on.
    pub idx: usize,
    /// How many there are.
    pub of: usize,
}

impl Stage {
    /// The only one.
    pub const WHOLE: Self = Self { idx: 0, of: 1 };

    /// All stages of a pipeline.
    pub fn all(of: usize) -> impl Iterator<Item = Self> {
        (0..of).map(move |idx| Self { idx, of })
    }

    /// Whether tokens enter here.
    pub fn is_first(self) -> bool {
        self.idx == 0
    }

    /// Whether tokens are drawn here.
    pub fn is_last(self) -> bool {
        self.idx + 1 == self.of
    }

    /// Its layers of so many, one at least: so that all stages take about as long, of which the last one has the head, which takes as long as
    /// `head` layers.
    pub fn layers(self, n_layers: usize, head: f64) -> Range<usize> {
        let begin = |idx: usize| match self.of - idx {
            0 => n_layers,
            n_behind => {
                let share = (n_layers as f64 + head) * idx as f64 / self.of as f64;
                (share.round() as usize).clamp(idx, n_layers - n_behind)
            }
        };
        begin(self.idx)..begin(self.idx + 1)
    }
}

/// The part of a tensor that is a rank's share of a weight.
#[derive(Clone, Debug, PartialEq)]
pub struct WeightSlice {
    /// Rows of the whole tensor.
    pub rows: Range<usize>,
    /// Columns of them; `0..1` of a vector.
    pub columns: Range<usize>,
}

impl WeightSpec {
    /// Outputs and inputs; of a vector, its length.
    pub fn shape(&self) -> Vec<usize> {
        [&[self.rows.len()], &self.tensor_shape[1..]].concat()
    }

    /// How many numbers it has. Saturates, since files may claim anything.
    pub fn n_values(&self) -> u64 {
        self.shape().into_iter().fold(1, |product, size| product.saturating_mul(size as u64))
    }

    /// A rank's share, or why there is none.
    pub fn slice(&self, rank: Rank) -> Result<WeightSlice, ModelError> {
        let columns = 0..self.tensor_shape.get(1).copied().unwrap_or(1);
        let indivisible = |n_units: usize, unit: usize| {
            let what = if unit == 1 { "parts".into() } else { format!("heads of {unit}") };
            ModelError::Indivisible { tensor: self.name.clone(), n_units, what, ranks: rank.of }
        };
        let share = |all: Range<usize>, unit: usize| {
            let n_units = all.len() / unit;
            if !n_units.is_multiple_of(rank.of) {
                return Err(indivisible(n_units, unit));
            }
            let len = n_units / rank.of * unit;
            Ok(all.start + rank.idx * len..all.start + (rank.idx + 1) * len)
        };
        let heads = |all: Range<usize>, unit: usize| {
            let n_heads = all.len() / unit;
            if n_heads >= rank.of || n_heads == 0 {
                return share(all, unit);
            }
            if !rank.of.is_multiple_of(n_heads) {
                return Err(indivisible(n_heads, unit));
            }
            let first = all.start + rank.idx * n_heads / rank.of * unit;
            Ok(first..first + unit)
        };
        Ok(match self.sharding {
            Sharding::Replicated => WeightSlice { rows: self.rows.clone(), columns },
            Sharding::Outputs { unit } => WeightSlice { rows: share(self.rows.clone(), unit)?, columns },
            Sharding::KvHeads { unit } => WeightSlice { rows: heads(self.rows.clone(), unit)?, columns },
            Sharding::Vocabulary => {
                let Range { start, end } = rank.vocabulary(self.rows.len());
                WeightSlice { rows: self.rows.start + start..self.rows.start + end, columns }
            }
            Sharding::Inputs { unit } => WeightSlice { rows: self.rows.clone(), columns: share(columns, unit)? },
        })
    }

    /// How many numbers a rank's share has, of a weight that ranks divide.
    pub fn n_values_of(&self, rank: Rank) -> Result<u64, ModelError> {
        let WeightSlice { rows, columns } = self.slice(rank)?;
        Ok((rows.len() as u64).saturating_mul(columns.len() as u64))
    }

    /// The module that it belongs to, by its name in the checkpoint.
    pub fn module(&self) -> &str {
        self.tensor.rsplit_once('.').map_or(&self.tensor, |(module, _)| module)
    }

    /// Its tensor as messages name it: both names where the checkpoint has its own.
    pub fn label(&self) -> String {
        match self.name == self.tensor {
            true => self.name.clone(),
            false => format!("{} = {}", self.tensor, self.name),
        }
    }
}

impl fmt::Display for Sharding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Replicated => f.write_str("every rank"),
            Self::Outputs { unit: 1 } => f.write_str("by outputs"),
            Self::Outputs { unit } => write!(f, "by heads of {unit} outputs"),
            Self::KvHeads { unit } => write!(f, "by KV heads of {unit} outputs"),
            Self::Vocabulary => f.write_str("by tokens"),
            Self::Inputs { unit: 1 } => f.write_str("by inputs"),
            Self::Inputs { unit } => write!(f, "by heads of {unit} inputs"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(sharding: Sharding) -> WeightSpec {
        WeightSpec {
            name: "qkv_proj.weight".into(),
            tensor: "qkv_proj.weight".into(),
            tensor_shape: vec![128, 40],
            rows: 64..96,
            order: RowOrder::AsNeeded,
            role: WeightRole::Projection,
            sharding,
            scheme: None,
        }
    }

    #[test]
    fn ranks_share_rows_or_columns_and_cover_them_once() {
        let slices = |sharding| [0, 1].map(|idx| keys(sharding).slice(Rank { idx, of: 2 }).unwrap());
        let [first, second] = slices(Sharding::Outputs { unit: 8 });
        assert_eq!((first.rows, second.rows, second.columns), (64..80, 80..96, 0..40));
        let [first, second] = slices(Sharding::Inputs { unit: 1 });
        assert_eq!((first.columns, second.columns, second.rows), (0..20, 20..40, 64..96));
        let [first, second] = slices(Sharding::Replicated);
        assert_eq!(first, second);
        assert_eq!(keys(Sharding::Outputs { unit: 8 }).slice(Rank::ALONE).unwrap().rows, 64..96);
    }

    #[test]
    fn ranks_beyond_kv_heads_share_them_and_the_last_rank_of_a_vocabulary_has_what_is_left() {
        let rows =
            |sharding, of| Rank::all(of).map(|rank| keys(sharding).slice(rank).map(|slice| slice.rows)).collect();
        let heads: Vec<_> = rows(Sharding::KvHeads { unit: 16 }, 4);
        assert_eq!(heads.into_iter().map(Result::unwrap).collect::<Vec<_>>(), [64..80, 64..80, 80..96, 80..96]);
        let heads: Vec<_> = rows(Sharding::KvHeads { unit: 8 }, 2);
        assert_eq!(heads.into_iter().map(Result::unwrap).collect::<Vec<_>>(), [64..80, 80..96]);
        let refused: Vec<_> = rows(Sharding::KvHeads { unit: 16 }, 3);
        assert!(refused.iter().all(Result::is_err));
        assert_eq!(Rank::all(3).map(|rank| rank.vocabulary(1003)).collect::<Vec<_>>(), [0..336, 336..672, 672..1003]);
        assert_eq!(Rank { idx: 3, of: 4 }.vocabulary(40), 40..40);
        assert_eq!(Rank::ALONE.vocabulary(1003), 0..1003);
        assert_eq!([2, 8].map(|of| Rank { idx: 0, of }.kv_heads(4)), [2, 1]);
    }

    #[test]
    fn stages_have_all_layers_once_and_the_last_one_fewer_for_its_head() {
        let lens = |n_layers, of, head| -> Vec<usize> {
            let layers: Vec<_> = Stage::all(of).map(|stage| stage.layers(n_layers, head)).collect();
            assert_eq!(layers.iter().cloned().flatten().collect::<Vec<_>>(), (0..n_layers).collect::<Vec<_>>());
            layers.iter().map(Range::len).collect()
        };
        assert_eq!(lens(32, 1, 1.2), [32]);
        assert_eq!((lens(32, 2, 0.0), lens(32, 2, 1.2), lens(80, 2, 0.6)), (vec![16, 16], vec![17, 15], vec![40, 40]));
        assert_eq!((lens(32, 4, 1.2), lens(26, 2, 5.6)), (vec![8, 9, 8, 7], vec![16, 10]));
        // However large a head is.
        for (n_layers, of, head) in [(7, 7, 0.0), (7, 7, 100.0), (3, 2, 1e9), (8, 3, 50.0)] {
            assert!(lens(n_layers, of, head).iter().all(|len| *len > 0), "{n_layers} {of} {head}");
        }
    }

    #[test]
    fn ranks_that_do_not_divide_a_weight_are_refused_with_its_name() {
        let refusal = keys(Sharding::Outputs { unit: 16 }).slice(Rank { idx: 0, of: 4 }).unwrap_err();
        let text = "qkv_proj.weight: 4 ranks do not divide its 2 heads of 16; take a number of ranks that does";
        assert_eq!(refusal.to_string(), text);
    }
}
