//! Why a model is refused. Every variant names the file and, where there is one, the field or tensor.

/// Why a model cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// A file cannot be opened or read.
    #[error("open {file}: {source}")]
    Open {
        /// The file.
        file: String,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// A file of a built-in model is missing.
    #[error("built-in model {model} has no {file}")]
    NotBuiltin {
        /// The model.
        model: String,
        /// The file.
        file: String,
    },
    /// It is not clear which file is meant.
    #[error("{directory} has {n_files} .gguf files and no config.json: name one of the files")]
    ManyFiles {
        /// The directory.
        directory: String,
        /// How many there are.
        n_files: usize,
    },
    /// Weights in PyTorch's own format, which runs code of whoever wrote it.
    #[error(
        "{directory} has weights in .bin files only: convert them to safetensors, for instance with `save_pretrained` of \
         transformers"
    )]
    OnlyPickles {
        /// The directory.
        directory: String,
    },
    /// A JSON file is not JSON.
    #[error("{file} is not JSON: {reason}")]
    Json {
        /// The file.
        file: String,
        /// Where and why.
        reason: String,
    },
    /// A field has a value we cannot use.
    #[error("{file}: field `{field}` {problem}")]
    Field {
        /// The file.
        file: String,
        /// The field.
        field: String,
        /// What is wrong, with the value and what would be right.
        problem: String,
    },
    /// The architecture has no implementation here.
    #[error("{file}: architecture {found} is not supported; supported: {}", supported.join(", "))]
    UnsupportedArchitecture {
        /// The file.
        file: String,
        /// What the model says it is.
        found: String,
        /// What we can run.
        supported: Vec<&'static str>,
    },
    /// A weight file's own description cannot be read.
    #[error("{file} is not a {format} file: {reason}")]
    Header {
        /// The file.
        file: String,
        /// What it should be.
        format: &'static str,
        /// Why.
        reason: String,
    },
    /// A weight file ends before its tensors do.
    #[error("{file} is truncated: tensor {tensor} ends at byte {expected}, the file at byte {found}: copy it again")]
    Truncated {
        /// The file.
        file: String,
        /// The first tensor that is not whole.
        tensor: String,
        /// Bytes it needs.
        expected: u64,
        /// Bytes there are.
        found: u64,
    },
    /// A tensor's bytes are not what its shape needs.
    #[error("{file}: tensor {tensor} has {found} bytes, its shape {shape} needs {expected}")]
    Size {
        /// The file.
        file: String,
        /// The tensor.
        tensor: String,
        /// Its shape and number format.
        shape: String,
        /// Bytes needed.
        expected: String,
        /// Bytes described.
        found: u64,
    },
    /// A tensor the architecture needs is missing.
    #[error("{file}: tensor {tensor} is missing; expected shape {expected:?}")]
    MissingTensor {
        /// The file, or the index.
        file: String,
        /// The tensor.
        tensor: String,
        /// Its shape by config.json.
        expected: Vec<usize>,
    },
    /// A tensor the architecture does not know: computing without it would be wrong.
    #[error("{file}: tensor {tensor} is not part of {architecture}: the model is not what config.json says")]
    UnexpectedTensor {
        /// The file.
        file: String,
        /// The tensor.
        tensor: String,
        /// The architecture.
        architecture: String,
    },
    /// A tensor has another shape than config.json says.
    #[error("{file}: tensor {tensor} has shape {found:?}, {described_by} says {expected:?}")]
    Shape {
        /// The file.
        file: String,
        /// The tensor.
        tensor: String,
        /// Who says otherwise.
        described_by: &'static str,
        /// By it.
        expected: Vec<usize>,
        /// By the file.
        found: Vec<usize>,
    },
    /// An output matrix of its own beside embeddings that are said to be tied to it.
    #[error(
        "{file}: lm_head.weight is another matrix than {embedding}, though config.json ties them: the answer would be \
         wrong; set `tie_word_embeddings` to false to use both"
    )]
    NotTied {
        /// The file.
        file: String,
        /// The embedding table.
        embedding: String,
    },
    /// A rank's share of a weight ends inside a block of numbers.
    #[error("{file}: tensor {tensor}: {problem}; take fewer ranks")]
    InsideBlock {
        /// The file.
        file: String,
        /// The tensor.
        tensor: String,
        /// Which block.
        problem: String,
    },
    /// More layers than are described.
    #[error("config.json: field `num_hidden_layers` is {found}, more than any model has: at most {limit}")]
    TooManyLayers {
        /// By the configuration.
        found: usize,
        /// At most.
        limit: usize,
    },
    /// Ranks cannot share a weight.
    #[error("{tensor}: {ranks} ranks do not divide its {n_units} {what}; take a number of ranks that does")]
    Indivisible {
        /// The tensor.
        tensor: String,
        /// Parts that stay whole.
        n_units: usize,
        /// What they are.
        what: String,
        /// How many ranks there are.
        ranks: usize,
    },
    /// A stage would have no layer.
    #[error("{n_stages} stages of a pipeline are more than the model's {n_layers} layers: take at most as many")]
    TooManyStages {
        /// Of the model.
        n_layers: usize,
        /// What was asked.
        n_stages: usize,
    },
    /// A norm runs over what ranks would have in parts.
    #[error(
        "{tensor}: {architecture} norms all heads of a row together, and ranks would have some each: take one GPU, or stages of a \
         pipeline in place of ranks"
    )]
    Undivided {
        /// The norm's weight.
        tensor: String,
        /// The architecture.
        architecture: String,
    },
    /// A tensor's number format is not supported.
    #[error("{file}: tensor {tensor} is {found}; supported: F32, BF16, F16")]
    Dtype {
        /// The file.
        file: String,
        /// The tensor.
        tensor: String,
        /// Its format.
        found: String,
    },
    /// A tensor of a quantised projection is not what `quantization_config` says, or cannot be used.
    #[error("{file}: tensor {tensor} {problem}")]
    Quantised {
        /// The file.
        file: String,
        /// The tensor.
        tensor: String,
        /// What is wrong, and what would be right.
        problem: String,
    },
    /// The tokenizer cannot be used.
    #[error("{file}: {source}")]
    Tokenizer {
        /// The file.
        file: String,
        /// Why.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The tokenizer has tokens that the model has no embedding for.
    #[error("{file} has {found} tokens, but the model's vocabulary is {expected}: it belongs to another model")]
    WrongTokenizer {
        /// The file.
        file: String,
        /// Tokens of the model.
        expected: usize,
        /// Tokens of the tokenizer.
        found: usize,
    },
}
