//! The files of one model of a cache, by what the cache calls their content: what may be given to others. Nothing else of the cache is
//! on it, as nodes share theirs among models that not everybody may have.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};

use crate::cache::commit_of;

/// See the module.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Shelf {
    commit: String,
    files: BTreeMap<String, PathBuf>,
}

impl Shelf {
    /// Of the model in `dir`; `None` if that is none of a cache.
    pub fn of(dir: &Path) -> io::Result<Option<Self>> {
        let Some(commit) = commit_of(dir) else { return Ok(None) };
        let mut files = BTreeMap::new();
        for entry in fs::read_dir(dir)? {
            let entry = entry?;
            if entry.file_type()?.is_symlink() {
                // A blob was verified before it was called so, and is never changed.
                let blob = fs::canonicalize(entry.path())?;
                let name = blob.file_name().unwrap_or_default().to_string_lossy().into_owned();
                files.insert(name, blob);
            }
        }
        Ok(Some(Self { commit: commit.to_owned(), files }))
    }

    /// Which commit they are.
    pub fn commit(&self) -> &str {
        &self.commit
    }

    /// Where the content of this name is.
    pub fn file(&self, name: &str) -> Option<&Path> {
        self.files.get(name).map(PathBuf::as_path)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn only_files_of_the_model_are_on_it() {
        let cache = tempfile::tempdir().unwrap();
        let (blobs, model) = (cache.path().join("blobs"), cache.path().join("models/a--b@c0ffee"));
        fs::create_dir_all(&blobs).unwrap();
        fs::create_dir_all(&model).unwrap();
        fs::write(blobs.join("sha256-1"), "weights").unwrap();
        fs::write(blobs.join("sha256-2"), "of another model").unwrap();
        symlink("../../blobs/sha256-1", model.join("model.safetensors")).unwrap();
        fs::write(model.join(".lease"), "").unwrap();
        let shelf = Shelf::of(&model).unwrap().unwrap();
        assert_eq!(shelf.commit(), "c0ffee");
        assert_eq!(fs::read_to_string(shelf.file("sha256-1").unwrap()).unwrap(), "weights");
        for name in ["sha256-2", "model.safetensors", ".lease", "../blobs/sha256-2", ""] {
            assert_eq!(shelf.file(name), None, "{name}");
        }
        assert_eq!(Shelf::of(&blobs).unwrap(), None);
    }
}
