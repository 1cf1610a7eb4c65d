//! A model's files, in a directory or inside the binary. Opens and reads; never interprets.

use std::{
    fs, io,
    ops::{Deref, Range},
    path::Path,
};

use memmap2::{Mmap, UncheckedAdvice};
use serde_json::Value;

use super::ModelError;
use crate::config::ModelFiles;

/// Where a model's files come from.
#[derive(Clone, Debug)]
pub struct ModelSource {
    files: ModelFiles,
}

/// A file's content, not copied where that can be avoided.
#[derive(Debug)]
pub enum FileBytes {
    /// Mapped from disk.
    Mapped(Mmap),
    /// Inside the binary.
    Static(&'static [u8]),
    /// In memory.
    Owned(Vec<u8>),
}

impl FileBytes {
    /// Says that a part is not read again soon: pages of a mapped file leave memory, and come back when they are.
    #[expect(unsafe_code, reason = "advice that takes pages away has no safe form")]
    pub(super) fn release(&self, range: Range<usize>) {
        if let Self::Mapped(map) = self {
            assert!(range.end <= map.len(), "the part lies in the file");
            // SAFETY: the map is read-only and backed by its file, so pages that are dropped are read from it again.
            let advised = unsafe { map.unchecked_advise_range(UncheckedAdvice::DontNeed, range.start, range.len()) };
            if let Err(reason) = advised {
                tracing::debug!(%reason, "the file's pages stay in memory");
            }
        }
    }
}

impl Deref for FileBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Mapped(map) => map,
            Self::Static(bytes) => bytes,
            Self::Owned(bytes) => bytes,
        }
    }
}

impl ModelSource {
    /// Files of one model.
    pub fn new(files: ModelFiles) -> Self {
        Self { files }
    }

    /// How a file is called in messages.
    pub fn display(&self, file: &str) -> String {
        match &self.files {
            ModelFiles::Directory(directory) | ModelFiles::Random { directory, .. } => {
                directory.join(file).display().to_string()
            }
            ModelFiles::Builtin { name, .. } => format!("builtin://{name}/{file}"),
        }
    }

    /// A file that must be there.
    pub fn open(&self, file: &str) -> Result<FileBytes, ModelError> {
        match &self.files {
            ModelFiles::Directory(directory) | ModelFiles::Random { directory, .. } => {
                map(&directory.join(file)).map_err(|source| ModelError::Open { file: self.display(file), source })
            }
            ModelFiles::Builtin { name, files } => {
                let found = files.iter().find(|(name, _)| *name == file);
                let missing = || ModelError::NotBuiltin { model: (*name).into(), file: file.into() };
                found.map(|(_, bytes)| FileBytes::Static(bytes)).ok_or_else(missing)
            }
        }
    }

    /// Whether there is a file whose name ends like that.
    pub(super) fn has_ending(&self, ending: &str) -> bool {
        let ModelFiles::Directory(directory) = &self.files else { return false };
        let mut entries = directory.read_dir().into_iter().flatten().flatten();
        entries.any(|entry| entry.file_name().to_string_lossy().ends_with(ending))
    }

    /// A file that may be missing.
    pub fn open_optional(&self, file: &str) -> Result<Option<FileBytes>, ModelError> {
        match self.open(file) {
            Ok(bytes) => Ok(Some(bytes)),
            Err(ModelError::NotBuiltin { .. }) => Ok(None),
            Err(ModelError::Open { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// A JSON file that must be there.
    pub fn json(&self, file: &str) -> Result<Value, ModelError> {
        self.parse(file, &self.open(file)?)
    }

    /// A JSON file that may be missing: then it is `null`.
    pub fn json_optional(&self, file: &str) -> Result<Value, ModelError> {
        match self.open_optional(file)? {
            Some(bytes) => self.parse(file, &bytes),
            None => Ok(Value::Null),
        }
    }

    fn parse(&self, file: &str, bytes: &[u8]) -> Result<Value, ModelError> {
        serde_json::from_slice(bytes)
            .map_err(|error| ModelError::Json { file: self.display(file), reason: error.to_string() })
    }
}

#[expect(unsafe_code, reason = "mapping a file has no safe form")]
pub(super) fn map(path: &Path) -> io::Result<FileBytes> {
    let file = fs::File::open(path)?;
    if file.metadata()?.is_dir() {
        return Err(io::Error::from(io::ErrorKind::IsADirectory));
    }
    // SAFETY: the map is read-only and private to this process. Model files are never written while they are served
    // (the operator mounts them read-only); one that is truncated meanwhile ends the process by a signal, which the
    // kubelet restarts, rather than giving wrong numbers.
    let map = unsafe { Mmap::map(&file)? };
    Ok(FileBytes::Mapped(map))
}
