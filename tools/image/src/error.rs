//! Everything that can go wrong between a recipe and its archive. Each message names the file and the fix.

use std::{io, path::PathBuf};

/// Why an image could not be written.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// A file or directory could not be read or written.
    #[error("{path}: {source}")]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The recipe is not a recipe.
    #[error("{path}: {reason}")]
    Recipe {
        /// The recipe file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The recipe refers to a variable that was not given.
    #[error("the recipe uses ${{{name}}}: pass --set {name}=VALUE")]
    UnknownVariable {
        /// The variable's name.
        name: String,
    },
    /// A variable reference has no closing brace.
    #[error("`{text}`: `${{` without `}}`")]
    UnclosedVariable {
        /// The text that holds it.
        text: String,
    },
    /// A path in the recipe cannot be a path in the image.
    #[error("`{path}` is not a path inside an image: it must be absolute, without `.` and `..`")]
    ImagePath {
        /// The path as written.
        path: String,
    },
    /// A mode in the recipe is not an octal number.
    #[error("mode `{mode}` of {path}: write it in octal, as \"0755\"")]
    Mode {
        /// The mode as written.
        mode: String,
        /// The path it belongs to.
        path: String,
    },
    /// Two entries of the recipe want the same path.
    #[error("{path} is in the recipe twice, with different content")]
    Conflict {
        /// The path both want.
        path: String,
    },
    /// A shared library of a binary is not on this machine.
    #[error("{binary} needs {library}, which this machine does not have")]
    MissingLibrary {
        /// The binary that needs it.
        binary: PathBuf,
        /// The library's name.
        library: String,
    },
    /// `ldd` could not say what a binary needs.
    #[error("ldd {binary}: {reason}")]
    Ldd {
        /// The binary.
        binary: PathBuf,
        /// What it said.
        reason: String,
    },
    /// An image name is not complete.
    #[error("image name `{name}`: {reason}; write it as REGISTRY/NAME:TAG, for example localhost/stoker-agent:dev")]
    Reference {
        /// The name as written.
        name: String,
        /// Which part is missing.
        reason: &'static str,
    },
}

impl ImageError {
    /// Says which path an I/O error belongs to.
    pub(crate) fn io(path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { path, source }
    }
}
