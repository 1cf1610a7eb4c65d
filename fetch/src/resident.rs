//! The files of a model in this node's memory, so that a replica which starts here reads no disk: mapped, brought in, and locked there where
//! this process may; where it may not they are asked for again now and then, and the kernel takes what is used less.
//!
//! Never looks at a clock and starts nothing: who calls says when. Files of a cache are replaced and never cut, so that no map of one ends
//! before its length.

use std::{
    fs::{self, File},
    hint::black_box,
    io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use memmap2::{Advice, Mmap};
use thiserror::Error;

/// What is brought in at once, and told: a disk reads it in one go, and progress moves several times a second.
const STRETCH_BYTES: usize = 64 << 20;
/// The smallest that Linux has: each is asked for where a kernel brings no range.
const PAGE_BYTES: usize = 4096;

/// Why a model does not stay in memory.
#[derive(Debug, Error)]
pub enum ResidentError {
    /// A file cannot be mapped, or does not come from where it is.
    #[error("keep {path} in memory: {source}", path = path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// Somebody took a file out of the cache. What is mapped of it helps nobody who starts now.
    #[error("{path} is gone: it was removed while the model was kept in memory; fetch the model again", path = path.display())]
    Gone {
        /// The file.
        path: PathBuf,
    },
}

/// See the module. Dropped, it lets go of everything.
#[derive(Debug)]
pub struct Resident {
    files: Vec<Mapped>,
}

#[derive(Debug)]
struct Mapped {
    path: PathBuf,
    file: File,
    map: Mmap,
    is_locked: bool,
}

impl Resident {
    /// Maps the files in `dir`, or those that links there lead to; nothing is read yet.
    pub fn of(dir: &Path) -> Result<Self, ResidentError> {
        let failed = |path: &Path| {
            let path = path.to_owned();
            move |source| ResidentError::File { path, source }
        };
        let mut files = Vec::new();
        for entry in fs::read_dir(dir).map_err(failed(dir))? {
            let path = entry.map_err(failed(dir))?.path();
            files.extend(Mapped::open(&path).map_err(failed(&path))?);
        }
        Ok(Self { files })
    }

    /// Bytes of all files.
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.map.len() as u64).sum()
    }

    /// Bytes that no pressure takes away.
    pub fn locked_bytes(&self) -> u64 {
        self.files.iter().filter(|file| file.is_locked).map(|file| file.map.len() as u64).sum()
    }

    /// Brings in what is not there, and locks what may be locked. `told` hears how many bytes are there so far.
    pub fn bring(&mut self, mut told: impl FnMut(u64)) -> Result<(), ResidentError> {
        let mut so_far = 0;
        for file in &mut self.files {
            file.ask(|bytes| {
                so_far += bytes;
                told(so_far);
            })?;
            file.is_locked = file.map.lock().is_ok();
        }
        Ok(())
    }

    /// Asks again for what is not locked: it counts as used, and what went comes back.
    pub fn touch(&self) -> Result<(), ResidentError> {
        self.files.iter().filter(|file| !file.is_locked).try_for_each(|file| file.ask(|_| {}))
    }

    /// Finds files that were removed: their bytes stay for as long as they are mapped, and nobody can open them.
    pub fn check(&self) -> Result<(), ResidentError> {
        let is_gone = |file: &&Mapped| file.file.metadata().is_ok_and(|found| found.nlink() == 0);
        match self.files.iter().find(is_gone) {
            Some(file) => Err(ResidentError::Gone { path: file.path.clone() }),
            None => Ok(()),
        }
    }
}

impl Mapped {
    /// `None` for what has no bytes to keep: folders, and empty files such as that of a lease.
    fn open(path: &Path) -> io::Result<Option<Self>> {
        let file = File::open(path)?;
        let found = file.metadata()?;
        if !found.is_file() || found.len() == 0 {
            return Ok(None);
        }
        let map = map(&file)?;
        Ok(Some(Self { path: fs::canonicalize(path)?, file, map, is_locked: false }))
    }

    fn ask(&self, mut told: impl FnMut(u64)) -> Result<(), ResidentError> {
        let failed = |source| ResidentError::File { path: self.path.clone(), source };
        for at in (0..self.map.len()).step_by(STRETCH_BYTES) {
            let bytes = STRETCH_BYTES.min(self.map.len() - at);
            self.ask_stretch(at, bytes).map_err(failed)?;
            told(bytes as u64);
        }
        Ok(())
    }

    fn ask_stretch(&self, at: usize, bytes: usize) -> io::Result<()> {
        // In one go from the disk; without it what follows asks page after page. A kernel that knows no such advice loses speed alone.
        let _slower = self.map.advise_range(Advice::WillNeed, at, bytes);
        match self.map.advise_range(Advice::PopulateRead, at, bytes) {
            // Kernels before 5.14.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
                (at..at + bytes).step_by(PAGE_BYTES).for_each(|at| _ = black_box(self.map[at]));
                Ok(())
            }
            outcome => outcome,
        }
    }
}

#[expect(unsafe_code, reason = "mapping a file has no safe form")]
fn map(file: &File) -> io::Result<Mmap> {
    // SAFETY: the map is read-only, and nothing is made of the bytes: they are asked for and dropped. Whole files of a cache are never
    // written nor cut (`cache.rs`); one that somebody else cuts ends this process by a signal at worst, which serves nobody.
    unsafe { Mmap::map(file) }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn all_files_are_brought_in_and_what_was_removed_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let (model, blob) = (dir.path().join("model"), dir.path().join("blob"));
        fs::create_dir(&model).unwrap();
        fs::write(&blob, vec![1; 3 * PAGE_BYTES + 1]).unwrap();
        symlink(&blob, model.join("model.safetensors")).unwrap();
        fs::write(model.join("config.json"), "{}").unwrap();
        fs::write(model.join(".lease"), "").unwrap();
        let mut resident = Resident::of(&model).unwrap();
        let mut heard = Vec::new();
        resident.bring(|bytes| heard.push(bytes)).unwrap();
        assert_eq!((resident.bytes(), heard.last(), heard.len()), (12_291, Some(&12_291), 2));
        resident.touch().and_then(|()| resident.check()).unwrap();

        fs::remove_file(&blob).unwrap();
        let said = resident.check().unwrap_err().to_string();
        assert!(said.contains("blob is gone") && said.contains("fetch the model again"), "{said}");
        let said = Resident::of(&model).unwrap_err().to_string();
        assert!(said.contains("model.safetensors in memory: No such file"), "{said}");
    }
}
