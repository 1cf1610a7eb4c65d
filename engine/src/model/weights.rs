//! The tensors of a checkpoint by name, and the weights of a model found among them: every one there and of the shape that
//! was described, none left over, before a number of any is read.

use std::collections::{BTreeMap, BTreeSet};

use stoker_kernels::format::WeightFormat;

use super::{
    CheckpointFormat, ModelError, ModelSpec,
    spec::{Rank, WeightSpec},
    tensor::{StoredWeight, Tensor},
};

/// All tensors of a checkpoint.
#[derive(Debug)]
pub struct WeightStore {
    tensors: BTreeMap<String, Tensor>,
    /// What a missing tensor is missing from.
    whole: String,
    format: CheckpointFormat,
}

/// The weights of a model in their files, as one rank needs them.
#[derive(Debug)]
pub struct BoundWeights {
    store: WeightStore,
    rank: Rank,
}

impl WeightStore {
    pub(super) fn new(tensors: BTreeMap<String, Tensor>, whole: String, format: CheckpointFormat) -> Self {
        Self { tensors, whole, format }
    }

    /// Who named and ordered the tensors.
    pub fn format(&self) -> CheckpointFormat {
        self.format
    }

    /// Finds every weight of a model, and refuses tensors that belong to none: computing without them would be wrong.
    pub fn bind(self, spec: &ModelSpec, rank: Rank) -> Result<BoundWeights, ModelError> {
        for weight in spec.weights() {
            self.weight(weight, rank)?;
        }
        self.refuse_leftovers(spec)?;
        Ok(BoundWeights { store: self, rank })
    }

    /// Number format of the largest tensor, blocks of numbers taken for bf16, which is more exact than they are.
    pub(crate) fn is_bf16_or_less(&self) -> bool {
        let format = self.largest().and_then(|tensor| tensor.format.ok());
        format.is_some_and(|format| format == WeightFormat::Bf16 || !format.is_plain())
    }

    /// Name of the number format of the largest tensor; empty without tensors.
    pub fn format_name(&self) -> String {
        self.largest().map(Tensor::format_name).unwrap_or_default()
    }

    /// What all tensors take, each by `bytes_of` of its format, its shape and how many numbers it has.
    pub(crate) fn bytes_by(&self, bytes_of: impl Fn(WeightFormat, &[usize]) -> u64) -> u64 {
        let bytes = |tensor: &Tensor| match tensor.format {
            Ok(format) => bytes_of(format, &tensor.shape),
            Err(_) => tensor.bytes().len() as u64,
        };
        self.tensors.values().map(bytes).sum()
    }

    fn largest(&self) -> Option<&Tensor> {
        self.tensors.values().max_by_key(|tensor| tensor.n_values())
    }

    fn weight(&self, weight: &WeightSpec, rank: Rank) -> Result<StoredWeight, ModelError> {
        let tensor = self.tensors.get(&weight.tensor).ok_or_else(|| ModelError::MissingTensor {
            file: self.whole.clone(),
            tensor: weight.label(),
            expected: weight.tensor_shape.clone(),
        })?;
        tensor.weight(weight, rank, self.described_by())
    }

    fn described_by(&self) -> &'static str {
        match self.format {
            CheckpointFormat::HuggingFace => "config.json",
            CheckpointFormat::Gguf => "its metadata",
        }
    }

    fn refuse_leftovers(&self, spec: &ModelSpec) -> Result<(), ModelError> {
        let used: BTreeSet<&str> = spec.weights().map(|weight| weight.tensor.as_str()).collect();
        let embedding = &spec.embedding.weight.tensor;
        let mut left = self.tensors.values().filter(|tensor| !used.contains(tensor.name.as_str()));
        left.try_for_each(|tensor| match tensor.name.as_str() {
            // Old checkpoints carry the rotary frequencies.
            name if name.ends_with("rotary_emb.inv_freq") => Ok(()),
            // Some carry the tied output matrix a second time. Another matrix would be an output matrix of its own.
            "lm_head.weight" if spec.head.weight.is_none() => match self.tensors[embedding].bytes() == tensor.bytes() {
                true => Ok(()),
                false => Err(ModelError::NotTied { file: tensor.file.to_string(), embedding: embedding.clone() }),
            },
            name => Err(ModelError::UnexpectedTensor {
                file: tensor.file.to_string(),
                tensor: name.into(),
                architecture: spec.architecture.into(),
            }),
        })
    }
}

impl BoundWeights {
    /// One of the weights of the model that these were found for.
    pub(crate) fn get(&self, weight: &WeightSpec) -> StoredWeight {
        self.store.weight(weight, self.rank).expect("every weight was found when they were bound")
    }

    /// Name of the number format of the largest tensor.
    pub(crate) fn format_name(&self) -> String {
        self.store.format_name()
    }
}
