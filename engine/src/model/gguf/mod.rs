//! GGUF, the one-file format of llama.cpp: weights, tokenizer and chat template. Each part is turned into what a Hugging Face directory
//! would hold, so that everything behind it is the same. The header and the hyper-parameters in it are read by `stoker_fit::gguf`.

mod merges;
mod tensors;
#[cfg(test)]
mod tests;
mod tokenizer;

use std::{ops::Range, path::Path, sync::Arc};

use serde_json::Value;
use stoker_fit::gguf::{Extent, Gguf as Described, Header};

use super::{FileBytes, ModelError, WeightStore, files};

/// One GGUF file with a checked header.
#[derive(Debug)]
pub(super) struct Gguf {
    file: Arc<str>,
    content: Arc<FileBytes>,
    header: Header,
}

impl Gguf {
    /// Maps the file and reads its header.
    pub(super) fn open(path: &Path) -> Result<Self, ModelError> {
        let file: Arc<str> = path.display().to_string().into();
        let content = files::map(path).map_err(|source| ModelError::Open { file: file.to_string(), source })?;
        let header = Header::read(&content, Extent::Whole).map_err(|reason| ModelError::Header {
            file: file.to_string(),
            format: "GGUF",
            reason,
        })?;
        Ok(Self { file, content: Arc::new(content), header })
    }

    /// Its name in messages.
    pub(super) fn file(&self) -> &str {
        &self.file
    }

    /// What its header says.
    pub(super) fn described(&self) -> Described<'_> {
        Described { file: &self.file, header: &self.header }
    }

    /// What its `config.json` would say.
    pub(super) fn config(&self) -> Result<Value, ModelError> {
        self.described().config(&|range| self.bytes(range))
    }

    /// The same with what plans need beside it.
    pub(super) fn planning_config(&self) -> Result<Value, ModelError> {
        self.described().planning_config(&|range| self.bytes(range))
    }

    fn bytes(&self, range: Range<usize>) -> Option<Vec<u8>> {
        self.content.get(range).map(<[u8]>::to_vec)
    }

    /// What its `tokenizer.json` would say.
    pub(super) fn tokenizer(&self) -> Result<Value, ModelError> {
        tokenizer::tokenizer_json(self)
    }

    /// Its tensors.
    pub(super) fn weights(&self) -> WeightStore {
        tensors::weights(self)
    }

    /// The value of a key, `null` where there is none.
    pub(super) fn value(&self, key: &str) -> &Value {
        static NULL: Value = Value::Null;
        self.header.metadata.get(key).unwrap_or(&NULL)
    }

    /// The text of a token.
    pub(super) fn token(&self, id: &Value) -> Option<String> {
        let tokens = self.value("tokenizer.ggml.tokens").as_array()?;
        tokens.get(usize::try_from(id.as_u64()?).ok()?)?.as_str().map(str::to_owned)
    }

    fn error(&self, key: &str, problem: impl Into<String>) -> ModelError {
        ModelError::Field { file: self.file.to_string(), field: key.into(), problem: problem.into() }
    }
}
