//! A file on its way: its bytes on disk with gaps, which of them are noted, and its hash as far as it is computed.
//!
//! Bytes are hashed by whoever brings them, as long as they come in order; they are in its processor's cache then. What came before its
//! turn, or was there before, is read back from the file.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::{
        Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use reqwest::{Response, Url};

use crate::{
    choose::RemoteFile,
    digest::{Digest, Hasher},
    error::FetchError,
    ledger::{CHUNK_BYTES, Ledger},
    progress::Progress,
    suppliers::Stream,
    transport::{Failure, error_chain},
};

/// Bytes between two notes: what a kill costs each connection at most.
const NOTED_BYTES: u64 = 256 << 10;
/// Of one read while hashing.
const HASHED_BYTES: usize = 1 << 20;

/// A file on its way.
pub(crate) struct Blob {
    pub(crate) remote: RemoteFile,
    pub(crate) file: File,
    notes: File,
    ledger: Mutex<Ledger>,
    /// More of it is there.
    grown: Condvar,
    hashing: Hashing,
    /// The other server that we were sent to, as long as that answers.
    pub(crate) location: Mutex<Option<Url>>,
    /// Held by the one connection that brings all of it, if the server knows no ranges.
    pub(crate) whole: tokio::sync::Mutex<()>,
    /// One for each chunk, held by the connection that writes it: a byte that was written is hashed, and must not be written again.
    pub(crate) writers: Vec<tokio::sync::Mutex<()>>,
    /// Whether replicas may give it: its hash tells what they gave, and it was not wrong before.
    pub(crate) is_given: bool,
    gifts: Mutex<Gifts>,
}

/// What replicas had to do with a file.
#[derive(Default)]
pub(crate) struct Gifts {
    /// Who gave something, and of which chunks.
    pub(crate) givers: BTreeSet<String>,
    pub(crate) chunks: BTreeSet<usize>,
    /// Bytes.
    pub(crate) bytes: u64,
    /// Who has it not.
    pub(crate) lacking: BTreeSet<String>,
}

/// The hash of a file from its beginning up to where it is computed.
struct Hashing {
    hasher: Mutex<Hasher>,
    /// Bytes that are in it. Written by who holds the hasher.
    front: AtomicU64,
}

impl Hashing {
    fn new(digest: &Digest, size: u64) -> Self {
        Self { hasher: Mutex::new(digest.hasher(size)), front: AtomicU64::new(0) }
    }

    fn front(&self) -> u64 {
        self.front.load(Ordering::Acquire)
    }

    /// Takes bytes of the file that begin where it is, if nobody is at it. Others are left to [`Hashing::read`].
    fn offer(&self, bytes: &[u8], at: u64) {
        if self.front() != at {
            return;
        }
        let Ok(mut hasher) = self.hasher.try_lock() else { return };
        if self.front() == at {
            hasher.update(bytes);
            self.front.store(at + bytes.len() as u64, Ordering::Release);
        }
    }

    /// Takes the next bytes from the file, which has them up to `end`.
    fn read(&self, file: &File, end: u64, buffer: &mut [u8]) -> io::Result<()> {
        let mut hasher = self.hasher.lock().unwrap_or_else(PoisonError::into_inner);
        let front = self.front();
        let length = buffer.len().min(usize::try_from(end.saturating_sub(front)).unwrap_or(usize::MAX));
        file.read_exact_at(&mut buffer[..length], front)?;
        hasher.update(&buffer[..length]);
        self.front.store(front + length as u64, Ordering::Release);
        Ok(())
    }

    /// What the file is, when all of it was taken.
    fn finish(&self) -> Digest {
        self.hasher.lock().unwrap_or_else(PoisonError::into_inner).clone().finish()
    }
}

/// Where it is noted which bytes of it are there.
pub(crate) fn notes_path(partial: &Path) -> PathBuf {
    partial.with_added_extension("state")
}

/// Notes beside a file of a cache's `partial` that all of it is there, however it came.
pub(crate) fn note_whole(partial: &Path, size: u64) -> io::Result<()> {
    let whole = Ledger::new(size, CHUNK_BYTES);
    let counts = (0..whole.n_chunks()).map(|chunk_idx| whole.missing(chunk_idx));
    fs::write(
        notes_path(partial),
        counts.flat_map(|chunk| (chunk.end - chunk.start).to_le_bytes()).collect::<Vec<u8>>(),
    )
}

impl Blob {
    /// The file at `path`, as far as it came before; what came is told to `progress`.
    pub(crate) fn open(
        path: &Path,
        remote: &RemoteFile,
        is_given: bool,
        progress: &Progress,
    ) -> Result<Self, FetchError> {
        let open = |path: &Path| {
            let file = File::options().create(true).truncate(false).read(true).write(true).open(path);
            file.map_err(FetchError::io("open", path))
        };
        let (file, notes) = (open(path)?, open(&notes_path(path))?);
        let kept = fs::read(notes_path(path)).map_err(FetchError::io("read", notes_path(path)))?;
        let (counts, _torn) = kept.as_chunks::<8>();
        let counts: Vec<u64> = counts.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect();
        let ledger = Ledger::resumed(remote.size, CHUNK_BYTES, &counts);
        let writers = (0..ledger.n_chunks()).map(|_| tokio::sync::Mutex::new(())).collect();
        progress.add(ledger.present());
        let length = file.metadata().map_err(FetchError::io("look at", path))?.len();
        if length != remote.size {
            file.set_len(remote.size).map_err(FetchError::io("size", path))?;
        }
        Ok(Self {
            remote: remote.clone(),
            file,
            notes,
            ledger: Mutex::new(ledger),
            grown: Condvar::new(),
            hashing: Hashing::new(&remote.digest, remote.size),
            location: Mutex::new(None),
            whole: tokio::sync::Mutex::new(()),
            writers,
            is_given,
            gifts: Mutex::default(),
        })
    }

    pub(crate) fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn gifts(&self) -> MutexGuard<'_, Gifts> {
        self.gifts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that nothing is there of a chunk. For a file that nobody writes to any more.
    pub(crate) fn forget(&self, chunk_idx: usize) -> Result<(), FetchError> {
        self.notes.write_all_at(&0_u64.to_le_bytes(), chunk_idx as u64 * 8).map_err(self.write_error())
    }

    /// Notes bytes that came over a stream, and whom they are of.
    fn note_from(
        &self,
        stream: &Stream<'_>,
        chunk_idx: usize,
        count: u64,
        progress: &Progress,
    ) -> Result<(), FetchError> {
        if let Some(giver) = stream.giver().filter(|_| count > 0) {
            let mut gifts = self.gifts();
            gifts.givers.insert(giver.name.clone());
            gifts.chunks.insert(chunk_idx);
            gifts.bytes += count;
            progress.given(count);
        }
        self.note(chunk_idx, count, progress)
    }

    /// Writes what comes of a chunk behind what is there of it, until somebody else would bring the rest much sooner.
    pub(crate) async fn write_chunk(
        &self,
        mut answer: Response,
        chunk_idx: usize,
        progress: &Progress,
        stream: &mut Stream<'_>,
    ) -> Result<Result<(), Failure>, FetchError> {
        let missing = self.ledger().missing(chunk_idx);
        let (mut at, mut unnoted) = (missing.start, 0);
        let ended = loop {
            let bytes = match answer.chunk().await {
                Ok(Some(bytes)) => bytes,
                Ok(None) => break Ok(()),
                Err(error) => break Err(Failure::passing(error_chain(&error))),
            };
            let bytes = &bytes[..bytes.len().min(usize::try_from(missing.end - at).unwrap_or(usize::MAX))];
            self.write(bytes, at)?;
            (at, unnoted) = (at + bytes.len() as u64, unnoted + bytes.len() as u64);
            if unnoted >= NOTED_BYTES {
                self.note_from(stream, chunk_idx, std::mem::take(&mut unnoted), progress)?;
            }
            if stream.came(bytes.len(), Instant::now()) {
                self.note_from(stream, chunk_idx, unnoted, progress)?;
                return Ok(Ok(()));
            }
        };
        self.note_from(stream, chunk_idx, unnoted, progress)?;
        Ok(ended.and(if at == missing.end { Ok(()) } else { Err(Failure::passing("the answer ended early")) }))
    }

    /// Writes what comes of the whole file, is not there yet, and is not being brought by somebody else.
    pub(crate) async fn write_whole(
        &self,
        mut answer: Response,
        progress: &Progress,
    ) -> Result<Result<(), Failure>, FetchError> {
        let (mut at, mut held) = (0, None);
        loop {
            let bytes = match answer.chunk().await {
                Ok(Some(bytes)) => bytes,
                Ok(None) if at == self.remote.size => return Ok(Ok(())),
                Ok(None) => return Ok(Err(Failure::passing("the answer ended early"))),
                Err(error) => return Ok(Err(Failure::passing(error_chain(&error)))),
            };
            let mut bytes = &bytes[..bytes.len().min(usize::try_from(self.remote.size - at).unwrap_or(usize::MAX))];
            while !bytes.is_empty() {
                let chunk_idx = usize::try_from(at / CHUNK_BYTES).expect("a chunk of this file");
                if held.as_ref().is_none_or(|(idx, _)| *idx != chunk_idx) {
                    held = Some((chunk_idx, self.writers[chunk_idx].try_lock().ok()));
                }
                let left = usize::try_from((chunk_idx as u64 + 1) * CHUNK_BYTES - at).expect("a chunk is small");
                let (part, rest) = bytes.split_at(bytes.len().min(left));
                if let Some((_, Some(_))) = &held {
                    self.write_part(chunk_idx, part, at, progress)?;
                }
                (bytes, at) = (rest, at + part.len() as u64);
            }
        }
    }

    /// Writes bytes of one chunk, leaving out those that are there.
    fn write_part(&self, chunk_idx: usize, bytes: &[u8], at: u64, progress: &Progress) -> Result<(), FetchError> {
        let from = self.ledger().missing(chunk_idx).start;
        let end = at + bytes.len() as u64;
        if from < at || from >= end {
            return Ok(());
        }
        let skipped = usize::try_from(from - at).expect("inside the piece");
        self.write(&bytes[skipped..], from)?;
        self.note(chunk_idx, end - from, progress)
    }

    fn write(&self, bytes: &[u8], at: u64) -> Result<(), FetchError> {
        self.file.write_all_at(bytes, at).map_err(self.write_error())?;
        self.hashing.offer(bytes, at);
        Ok(())
    }

    /// The bytes are written; now it is said that they are, on disk first: who hears that all is there may take back what is noted. So nothing is noted
    /// where nothing came since, which may be behind that.
    fn note(&self, chunk_idx: usize, count: u64, progress: &Progress) -> Result<(), FetchError> {
        if count == 0 {
            return Ok(());
        }
        let written = self.ledger().written(chunk_idx) + count;
        self.notes.write_all_at(&written.to_le_bytes(), chunk_idx as u64 * 8).map_err(self.write_error())?;
        let prefix = {
            let mut ledger = self.ledger();
            ledger.add(chunk_idx, count);
            ledger.prefix()
        };
        // Whoever reads back has nothing to do for bytes that are hashed already.
        if prefix > self.hashing.front() || prefix == self.remote.size {
            self.grown.notify_all();
        }
        progress.add(count);
        Ok(())
    }

    fn write_error(&self) -> impl FnOnce(io::Error) -> FetchError {
        FetchError::io("write", &*self.remote.path)
    }

    /// Reads back and hashes what nobody hashed who brought it; the hash when all is there, `None` when no more will come.
    pub(crate) fn hash(&self, given_up: &AtomicBool) -> io::Result<Option<Digest>> {
        let mut buffer = vec![0; HASHED_BYTES];
        while self.hashing.front() < self.remote.size {
            let Some(end) = self.wait_beyond_hashed(given_up) else { return Ok(None) };
            self.hashing.read(&self.file, end, &mut buffer)?;
        }
        Ok(Some(self.hashing.finish()))
    }

    /// Waits until there is more from the beginning than is hashed, or all is hashed; up to where. `None` when no more will come.
    fn wait_beyond_hashed(&self, given_up: &AtomicBool) -> Option<u64> {
        let mut ledger = self.ledger();
        while ledger.prefix() <= self.hashing.front() && self.hashing.front() < self.remote.size {
            if given_up.load(Ordering::SeqCst) {
                return None;
            }
            let waited = self.grown.wait_timeout(ledger, Duration::from_millis(100));
            ledger = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        Some(ledger.prefix())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: &[u8] = b"0123456789";

    /// A file of ten bytes of which nothing is there.
    fn blob(path: &Path) -> Blob {
        let (digest, url) =
            (Digest::sha256(&crate::digest::sha256_hex(BYTES)).unwrap(), Url::parse("http://127.0.0.1/").unwrap());
        let remote = RemoteFile { path: "weights".to_owned(), size: 10, digest, url, etag: None };
        Blob::open(path, &remote, false, &Progress::default()).unwrap()
    }

    /// Who hashes may find the whole file wrong as soon as the ledger has all of it, and takes back what is noted of a chunk: a note written
    /// behind the ledger would come after that, and wrong bytes would pass for right ones until all of the file is fetched again.
    #[test]
    fn what_is_not_noted_on_disk_is_not_in_the_ledger() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("weights");
        let mut blob = blob(&path);
        blob.note(0, 4, &Progress::default()).unwrap();
        blob.notes = File::open(notes_path(&path)).unwrap();
        blob.note(0, 6, &Progress::default()).unwrap_err();
        assert_eq!(blob.ledger().written(0), 4);
        assert_eq!(fs::read(notes_path(&path)).unwrap(), 4_u64.to_le_bytes());
    }

    /// A chunk whose last byte was noted on the way has nothing left to note when its answer ends.
    #[test]
    fn what_was_taken_back_is_not_noted_again_by_who_has_brought_nothing_since() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("weights");
        let blob = blob(&path);
        blob.note(0, 10, &Progress::default()).unwrap();
        blob.forget(0).unwrap();
        blob.note(0, 0, &Progress::default()).unwrap();
        assert_eq!(fs::read(notes_path(&path)).unwrap(), [0; 8]);
    }

    #[test]
    fn what_comes_in_order_is_hashed_at_once_and_the_rest_is_read_back() {
        let file = tempfile::tempfile().unwrap();
        let digest = Digest::sha256(&crate::digest::sha256_hex(BYTES)).unwrap();
        let hashing = Hashing::new(&digest, 10);
        let mut buffer = [0; 2];
        let write = |at: usize, end: usize| {
            file.write_all_at(&BYTES[at..end], at as u64).unwrap();
            hashing.offer(&BYTES[at..end], at as u64);
            hashing.front()
        };
        assert_eq!([write(0, 3), write(5, 8), write(3, 4), write(4, 5), write(8, 10)], [3, 3, 4, 5, 5]);
        let fronts = [8, 8, 10, 10].map(|end| {
            hashing.read(&file, end, &mut buffer).unwrap();
            hashing.front()
        });
        assert_eq!(fronts, [7, 8, 10, 10], "as much as the buffer holds and the file has, and nothing twice");
        assert_eq!(hashing.finish(), digest);
    }
}
