//! The tensors of a checkpoint by name, and the weights of a model found among them: every one there and of the shape that
//! was described, none left over, before a number of any is read.

use std::collections::{BTreeMap, BTreeSet};

use stoker_fit::format::{BytesByFormat, WeightFormat};

use super::{
    CheckpointFormat, ModelError, ModelSpec, QuantisedWeight, Scheme, kv_scales,
    quantization::Place,
    spec::{Rank, WeightSpec},
    tensor::{StoredWeight, Tensor},
};
use crate::each::each;

/// All tensors of a checkpoint, where they lie in its files.
#[derive(Clone, Debug)]
pub struct WeightStore {
    tensors: BTreeMap<String, Tensor>,
    /// What a missing tensor is missing from.
    whole: String,
    format: CheckpointFormat,
}

/// Of a file, at a time: a thread that maps or unmaps memory meanwhile waits for no more than a millisecond or two.
const RELEASED_BYTES: usize = 64 << 20;

/// A matrix in its file.
#[derive(Debug)]
pub(crate) enum StoredMatrix {
    /// Numbers, or GGUF's blocks of them, in one tensor.
    Plain(StoredWeight),
    /// Codes and their scales, each in a tensor of its own.
    Quantised(QuantisedWeight),
}

/// A tensor as it lies in its file.
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'a> {
    /// Its name.
    pub name: &'a str,
    /// How its numbers are stored, if that is known.
    pub format: Option<WeightFormat>,
    /// Rows, columns.
    pub shape: &'a [usize],
    /// Its bytes.
    pub bytes: &'a [u8],
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

    /// All tensors, by name.
    pub fn tensors(&self) -> impl Iterator<Item = TensorView<'_>> {
        self.tensors.values().map(|tensor| {
            let Tensor { name, format, shape, .. } = tensor;
            TensorView { name, format: format.ok(), shape, bytes: tensor.bytes() }
        })
    }

    pub(super) fn tensor(&self, name: &str) -> Option<&Tensor> {
        self.tensors.get(name)
    }

    /// Nothing of it is read again. What was mapped of files leaves the address space piece by piece: all of a large model at once takes
    /// seconds, in which no other thread could map memory.
    pub(crate) fn let_go(self) {
        for Tensor { content, range, .. } in self.tensors.values() {
            for start in range.clone().step_by(RELEASED_BYTES) {
                content.release(start..range.end.min(start + RELEASED_BYTES));
            }
        }
    }

    /// Finds every weight of a model, and refuses tensors that belong to none: computing without them would be wrong.
    pub fn bind(self, spec: &ModelSpec, rank: Rank) -> Result<BoundWeights, ModelError> {
        let weights: Vec<&WeightSpec> = spec.weights().collect();
        each(&weights, |weight| self.matrix(weight, rank).map(drop)).into_iter().collect::<Result<(), _>>()?;
        self.refuse_leftovers(spec)?;
        Ok(BoundWeights { store: self, rank })
    }

    /// Number format of the largest tensor of numbers, blocks of them taken for bf16, which is more exact than they are.
    pub(crate) fn is_bf16_or_less(&self) -> bool {
        let format = self.largest().and_then(|tensor| tensor.format.ok());
        format.is_some_and(|format| format == WeightFormat::Bf16 || !format.is_plain())
    }

    /// Name of the number format of the largest tensor of numbers; empty without tensors.
    pub fn format_name(&self) -> String {
        self.largest().map(Tensor::format_name).unwrap_or_default()
    }

    /// What all tensors of numbers take, each by `bytes_of` of its format and its shape, and quantised matrices in the formats that they are
    /// kept in: their codes leave memory.
    pub(crate) fn held_by(
        &self,
        spec: &ModelSpec,
        bytes_of: impl Fn(WeightFormat, &[usize]) -> u64,
    ) -> Result<BytesByFormat, ModelError> {
        let mut held = BytesByFormat::new();
        let mut hold = |format: WeightFormat, shape: &[usize]| {
            *held.entry(format.name()).or_default() += bytes_of(format, shape);
        };
        for tensor in self.tensors.values() {
            tensor.format.into_iter().for_each(|format| hold(format, &tensor.shape));
        }
        for weight in spec.weights() {
            if let Some(scheme) = &weight.scheme {
                let found = self.quantised(weight, scheme, Rank::ALONE)?;
                hold(found.kept_as(self.plain_format()), &weight.shape());
            }
        }
        Ok(held)
    }

    /// Number format of the largest tensor of plain numbers.
    fn plain_format(&self) -> WeightFormat {
        self.largest().and_then(|tensor| tensor.format.ok()).unwrap_or(WeightFormat::Bf16)
    }

    fn largest(&self) -> Option<&Tensor> {
        self.tensors.values().filter(|tensor| tensor.format.is_ok()).max_by_key(|tensor| tensor.n_values())
    }

    pub(super) fn matrix(&self, weight: &WeightSpec, rank: Rank) -> Result<StoredMatrix, ModelError> {
        match &weight.scheme {
            Some(scheme) => self.quantised(weight, scheme, rank).map(StoredMatrix::Quantised),
            None => self.weight(weight, rank).map(StoredMatrix::Plain),
        }
    }

    fn quantised(&self, weight: &WeightSpec, scheme: &Scheme, rank: Rank) -> Result<QuantisedWeight, ModelError> {
        let [n_outputs, n_inputs] = weight.tensor_shape[..] else { unreachable!("only matrices are quantised") };
        let place = Place { module: weight.module(), shape: [n_outputs, n_inputs], whole: &self.whole };
        QuantisedWeight::find(scheme, &place, weight.slice(rank)?, |name| self.tensors.get(name))
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
        let used: BTreeSet<String> = spec.weights().flat_map(tensors_of).collect();
        let is_quantised = spec.is_quantised();
        let embedding = &spec.embedding.weight.tensor;
        let mut left = self.tensors.values().filter(|tensor| !used.contains(&tensor.name));
        left.try_for_each(|tensor| match tensor.name.as_str() {
            // Old checkpoints carry the rotary frequencies.
            name if name.ends_with("rotary_emb.inv_freq") => Ok(()),
            name if is_quantised && kv_scales::ENDS.iter().any(|end| name.ends_with(end)) => Ok(()),
            // Some who quantise give every projection a bias.
            name if is_quantised && name.ends_with(".bias") && tensor.bytes().iter().all(|byte| *byte == 0) => Ok(()),
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

impl StoredMatrix {
    /// Rows; of a vector, its length.
    pub(crate) fn n_outputs(&self) -> usize {
        match self {
            Self::Plain(weight) => weight.n_outputs(),
            Self::Quantised(weight) => weight.n_outputs(),
        }
    }

    /// If it is quantised.
    pub(crate) fn quantised(&self) -> Option<&QuantisedWeight> {
        if let Self::Quantised(weight) = self { Some(weight) } else { None }
    }

    /// The numbers of some rows, one row behind the other.
    pub(crate) fn to_f32(&self, rows: std::ops::Range<usize>) -> Vec<f32> {
        match self {
            Self::Plain(weight) => weight.runs(rows).into_iter().flat_map(|run| weight.format().unpack(run)).collect(),
            Self::Quantised(weight) => weight.dequantise(rows),
        }
    }

    /// How its numbers are stored, in words.
    pub(super) fn stored_as(&self) -> String {
        match self {
            Self::Plain(weight) => weight.format().name().into(),
            Self::Quantised(weight) => weight.scheme().to_string(),
        }
    }

    /// Bytes of its tensors, or of its share of one.
    pub(super) fn n_bytes(&self) -> usize {
        match self {
            Self::Plain(weight) => weight.format().bytes_of(weight.n_outputs() * weight.n_inputs()),
            Self::Quantised(weight) => weight.n_bytes(),
        }
    }
}

/// The tensors that may hold a weight.
fn tensors_of(weight: &WeightSpec) -> Vec<String> {
    match &weight.scheme {
        None => vec![weight.tensor.clone()],
        Some(scheme) => scheme.names().map(|name| format!("{}.{name}", weight.module())).collect(),
    }
}

impl BoundWeights {
    pub(super) fn store(&self) -> &WeightStore {
        &self.store
    }

    /// One of the matrices of the model that these were found for.
    pub(crate) fn matrix(&self, weight: &WeightSpec) -> StoredMatrix {
        self.store.matrix(weight, self.rank).expect("every weight was found when they were bound")
    }

    /// The number format in which a quantised matrix is kept where its codes cannot be: that of the others.
    pub(crate) fn plain_format(&self) -> WeightFormat {
        self.store.plain_format()
    }

    /// One of the weights of that model that is not quantised.
    pub(crate) fn get(&self, weight: &WeightSpec) -> StoredWeight {
        self.store.weight(weight, self.rank).expect("every weight was found when they were bound")
    }

    /// Name of the number format of the largest tensor of numbers.
    pub(crate) fn format_name(&self) -> String {
        self.store.format_name()
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path, sync::Arc};

    use super::*;
    use crate::model::files::map;

    const BYTES: usize = 1 << 20;

    /// Bytes of a mapped file that are in this process's memory.
    fn resident(path: &Path) -> u64 {
        let maps = fs::read_to_string("/proc/self/smaps").unwrap();
        let of_file = maps.lines().skip_while(|line| !line.ends_with(path.to_str().unwrap()));
        let rss = of_file.into_iter().find_map(|line| line.strip_prefix("Rss:")).expect("it is mapped");
        rss.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
    }

    #[test]
    fn what_is_let_go_leaves_memory_and_who_holds_it_too_reads_it_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("weights.bin");
        fs::write(&path, vec![7; BYTES]).unwrap();
        let content = Arc::new(map(&path).unwrap());
        assert!(content.iter().all(|byte| *byte == 7));
        assert_eq!(resident(&path), BYTES as u64);
        let tensor = Tensor {
            file: "weights.bin".into(),
            name: "w".to_owned(),
            format: Ok(WeightFormat::F32),
            shape: vec![BYTES / 4],
            content: content.clone(),
            range: 0..BYTES,
        };
        let tensors = BTreeMap::from([("w".to_owned(), tensor)]);
        WeightStore::new(tensors, "weights.bin".to_owned(), CheckpointFormat::HuggingFace).let_go();
        assert_eq!(resident(&path), 0);
        assert!(content.iter().all(|byte| *byte == 7));
    }
}
