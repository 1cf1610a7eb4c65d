//! Who uses a model of the cache: a shared lock on a file beside it, for as long as its holder lives. The kernel takes it
//! back however the holder ends, also in another container of the node.

use std::{
    fs::File,
    io,
    path::{Path, PathBuf},
};

use rustix::fs::{FlockOperation, flock};

/// The file that is locked; its modification time is when the model was last asked for.
pub(crate) const LEASE_FILE: &str = ".lease";

/// Keeps a model in the cache.
#[derive(Debug)]
pub struct Lease(#[expect(dead_code, reason = "its lock is what matters")] File);

/// Takes a lease on the model in `dir`; `None` if it is not in a cache, as a model that is one file. Needs no right to write.
pub fn hold(dir: &Path) -> io::Result<Option<Lease>> {
    let file = match File::open(dir.join(LEASE_FILE)) {
        Ok(file) => file,
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            return Ok(None);
        }
        Err(error) => return Err(error),
    };
    flock(&file, FlockOperation::LockShared)?;
    Ok(Some(Lease(file)))
}

/// Whether somebody has a lease on the model in `dir`. Who cannot tell takes it for used.
pub(crate) fn is_held(dir: &Path) -> bool {
    let free = File::open(dir.join(LEASE_FILE))
        .is_ok_and(|file| flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok());
    !free
}

/// Whether somebody holds the lock on a file.
pub(crate) fn is_locked(path: &Path) -> bool {
    File::open(path).is_ok_and(|file| flock(&file, FlockOperation::NonBlockingLockExclusive).is_err())
}

/// Waits for the lock on a file, which is made if it is not there. `waiting` is called as often as it is not to be had.
pub(crate) async fn lock(path: PathBuf, mut waiting: impl FnMut()) -> io::Result<File> {
    let file = File::options().create(true).append(true).open(path)?;
    while let Err(error) = flock(&file, FlockOperation::NonBlockingLockExclusive) {
        if error != rustix::io::Errno::WOULDBLOCK {
            return Err(error.into());
        }
        waiting();
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_of_no_cache_is_served_without_a_lease_be_it_a_directory_or_a_file() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("q8.gguf");
        std::fs::write(&file, "GGUF").unwrap();
        for model in [dir.path(), &file, &dir.path().join("absent")] {
            assert!(hold(model).unwrap().is_none(), "{}", model.display());
        }
        std::fs::write(dir.path().join(LEASE_FILE), "").unwrap();
        let lease = hold(dir.path()).unwrap();
        assert!(lease.is_some() && is_held(dir.path()));
        drop(lease);
        assert!(!is_held(dir.path()));
    }
}
