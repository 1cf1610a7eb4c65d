//! Brings the bytes of files: chunks on several connections, each noted on disk as it is written, hashes computed behind
//! them. Who is killed goes on where it was.
//!
//! ```text
//! partial/KEY/DIGEST        the file, with gaps
//! partial/KEY/DIGEST.state  for each chunk how many bytes are there (u64, little endian), written behind the bytes
//! ```
//!
//! A machine that loses power may have noted bytes that are not on its disk. The hash says so, as of every other
//! corruption; which bytes they are a hash of the whole file cannot say, so that all of that file is fetched again.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    io,
    num::NonZero,
    ops::Range,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread::available_parallelism,
    time::{Duration, Instant},
};

use reqwest::{Response, StatusCode, Url, header::CONTENT_RANGE};
use tokio::task::JoinSet;

use crate::{
    cache::{Cache, sync_dir},
    choose::RemoteFile,
    digest::Digest,
    error::FetchError,
    ledger::{CHUNK_BYTES, Ledger},
    origin::{Origin, pause},
    progress::Progress,
    suppliers::{Giver, NotGiven, Stream, Suppliers},
    transport::{Failure, error_chain},
};

/// Bytes between two notes: what a kill costs each connection at most.
const NOTED_BYTES: u64 = 256 << 10;
/// Of one read while hashing.
const HASHED_BYTES: usize = 1 << 20;
/// How often a file is fetched whose hash is wrong.
const ROUNDS: u32 = 3;

/// What a download needs.
pub(crate) struct Download {
    pub(crate) origin: Origin,
    pub(crate) cache: Cache,
    /// Name of the model in the cache.
    pub(crate) key: String,
    pub(crate) connections: usize,
    pub(crate) suppliers: Arc<Suppliers>,
    pub(crate) progress: Arc<Progress>,
}

/// A file on its way.
struct Blob {
    remote: RemoteFile,
    file: File,
    notes: File,
    ledger: Mutex<Ledger>,
    /// More of it is there.
    grown: Condvar,
    /// The other server that we were sent to, as long as that answers.
    location: Mutex<Option<Url>>,
    /// Held by the one connection that brings all of it, if the server knows no ranges.
    whole: tokio::sync::Mutex<()>,
    /// One for each chunk, held by the connection that writes it: a byte that was noted is hashed, and must not be written again.
    writers: Vec<tokio::sync::Mutex<()>>,
    /// Whether replicas may give it: its hash tells what they gave, and it was not wrong before.
    is_given: bool,
    gifts: Mutex<Gifts>,
}

/// What replicas had to do with a file.
#[derive(Default)]
struct Gifts {
    /// Who gave something, and of which chunks.
    givers: BTreeSet<String>,
    chunks: BTreeSet<usize>,
    /// Bytes.
    bytes: u64,
    /// Who has it not.
    lacking: BTreeSet<String>,
}

/// The files of one round and who is next.
struct Round {
    download: Arc<Download>,
    blobs: Vec<Blob>,
    /// Blob and chunk, in the order of the files, so that hashing can follow.
    chunks: Vec<(usize, usize)>,
    next_chunk: AtomicUsize,
    next_blob: AtomicUsize,
    given_up: AtomicBool,
}

/// A file whose hash is wrong.
struct Wrong {
    file: RemoteFile,
    found: Digest,
}

/// Fetches what is not in the cache of `files`, and puts it there.
pub(crate) async fn download(download: Arc<Download>, files: &[RemoteFile]) -> Result<(), FetchError> {
    let mut missing = unique(files);
    missing.retain(|file| !download.cache.blob(&file.digest).exists());
    let absent: u64 = missing.iter().map(|file| file.size).sum();
    download.progress.begin(unique(files).iter().map(|file| file.size).sum());
    let present = unique(files).iter().map(|file| file.size).sum::<u64>() - absent;
    download.progress.add(present);
    for tries in 1..=ROUNDS {
        // Who gave wrong bytes is left; that nobody else does, neither, costs less than another round.
        let is_given = tries == 1;
        let wrong = round(&download, &missing, is_given).await?;
        let Some(first) = wrong.first() else { return Ok(()) };
        if tries == ROUNDS {
            let (wanted, found) = (first.file.digest.published(), first.found.published());
            return Err(FetchError::WrongHash { file: first.file.path.clone(), wanted, found, tries });
        }
        missing = wrong.into_iter().map(|wrong| wrong.file).collect();
    }
    Ok(())
}

/// Files with the same content are fetched once.
fn unique(files: &[RemoteFile]) -> Vec<RemoteFile> {
    let mut seen = BTreeSet::new();
    files.iter().filter(|file| seen.insert(&file.digest)).cloned().collect()
}

async fn round(download: &Arc<Download>, files: &[RemoteFile], is_given: bool) -> Result<Vec<Wrong>, FetchError> {
    let open = |file: &RemoteFile| Blob::open(download, file, is_given && file.digest.is_proof());
    let blobs = files.iter().map(open).collect::<Result<Vec<_>, _>>()?;
    let chunks = blobs.iter().enumerate();
    let chunks = chunks.flat_map(|(blob_idx, blob)| (0..blob.ledger().n_chunks()).map(move |idx| (blob_idx, idx)));
    let round = Arc::new(Round {
        chunks: chunks.collect(),
        download: download.clone(),
        next_chunk: AtomicUsize::new(0),
        next_blob: AtomicUsize::new(0),
        given_up: AtomicBool::new(false),
        blobs,
    });
    let mut hashers = JoinSet::new();
    for _ in 0..available_parallelism().map_or(2, NonZero::get).min(round.blobs.len()) {
        let round = round.clone();
        hashers.spawn_blocking(move || round.verify_blobs());
    }
    let fetched = round.clone().fetch_chunks().await;
    if fetched.is_err() {
        round.given_up.store(true, Ordering::SeqCst);
    }
    let mut wrong = Vec::new();
    while let Some(verified) = hashers.join_next().await {
        wrong.extend(verified.expect("hashing does not panic")?);
    }
    fetched.map(|()| wrong)
}

impl Round {
    async fn fetch_chunks(self: Arc<Self>) -> Result<(), FetchError> {
        let mut connections = JoinSet::new();
        for _ in 0..self.download.connections.clamp(1, self.chunks.len().max(1)) {
            connections.spawn(self.clone().fetch_some());
        }
        while let Some(ended) = connections.join_next().await {
            // Who hashes would wait for bytes that nobody brings.
            self.given_up.fetch_or(ended.is_err(), Ordering::SeqCst);
            // The others end with the set.
            ended.expect("fetching does not panic")?;
        }
        Ok(())
    }

    async fn fetch_some(self: Arc<Self>) -> Result<(), FetchError> {
        while let Some((blob_idx, chunk_idx)) = self.chunks.get(self.next_chunk.fetch_add(1, Ordering::Relaxed)) {
            self.download.fetch_chunk(&self.blobs[*blob_idx], *chunk_idx).await?;
        }
        Ok(())
    }

    /// Hashes files in their order while they come; those that are right go into the cache.
    fn verify_blobs(&self) -> Result<Vec<Wrong>, FetchError> {
        let mut wrong = Vec::new();
        while let Some(blob) = self.blobs.get(self.next_blob.fetch_add(1, Ordering::Relaxed)) {
            let Some(found) = blob.hash(&self.given_up).map_err(FetchError::io("read", &*blob.remote.path))? else {
                return Ok(wrong);
            };
            if found == blob.remote.digest {
                self.download.keep(blob)?;
            } else {
                self.download.reject(blob)?;
                wrong.push(Wrong { file: blob.remote.clone(), found });
            }
        }
        Ok(wrong)
    }
}

impl Download {
    fn partial(&self, digest: &Digest) -> PathBuf {
        self.cache.partial_dir(&self.key).join(digest.to_string())
    }

    /// A whole file becomes one of the cache, and is on the disk before it is called so.
    fn keep(&self, blob: &Blob) -> Result<(), FetchError> {
        let (partial, kept) = (self.partial(&blob.remote.digest), self.cache.blob(&blob.remote.digest));
        blob.file.sync_all().map_err(FetchError::io("sync", &partial))?;
        fs::rename(&partial, &kept).map_err(FetchError::io("rename to", &kept))?;
        let blobs = kept.parent().unwrap_or(Path::new("/"));
        sync_dir(blobs).map_err(FetchError::io("sync", blobs))?;
        let notes = notes_path(&partial);
        fs::remove_file(&notes).map_err(FetchError::io("remove", notes))
    }

    /// A wrong file: what replicas gave of it is fetched again, or all of it if they gave nothing.
    fn reject(&self, blob: &Blob) -> Result<(), FetchError> {
        let gifts = std::mem::take(&mut *blob.gifts());
        self.progress.take_back(blob.remote.size, gifts.bytes);
        if gifts.givers.is_empty() {
            return self.discard(blob);
        }
        self.suppliers.distrust(&gifts.givers);
        let (file, givers) = (&blob.remote.path, gifts.givers.into_iter().collect::<Vec<_>>().join(", "));
        self.progress.notice(format!(
            "{file}: wrong bytes, of which {givers} gave some: nothing more is taken from there, and what came is fetched again"
        ));
        gifts.chunks.into_iter().try_for_each(|chunk_idx| blob.forget(chunk_idx))
    }

    fn discard(&self, blob: &Blob) -> Result<(), FetchError> {
        let partial = self.partial(&blob.remote.digest);
        for path in [notes_path(&partial), partial] {
            fs::remove_file(&path).map_err(FetchError::io("remove", path))?;
        }
        Ok(())
    }

    /// Brings what is missing of a chunk, however often it takes as long as something comes.
    async fn fetch_chunk(&self, blob: &Blob, chunk_idx: usize) -> Result<(), FetchError> {
        let mut failures = 0;
        loop {
            let missing = blob.ledger().missing(chunk_idx);
            if missing.is_empty() {
                return Ok(());
            }
            let may_give = |name: &str| blob.is_given && !blob.gifts().lacking.contains(name);
            let mut stream = self.suppliers.begin(may_give).await;
            if let Some(giver) = stream.giver().cloned() {
                if let Err(how) = self.take(blob, chunk_idx, missing, (&giver, &mut stream)).await? {
                    self.note_not_given(blob, &giver, &how);
                }
                continue;
            }
            let Err(failure) = self.stream(blob, chunk_idx, missing.clone(), &mut stream).await? else { continue };
            drop(stream);
            self.suppliers.source_failed(Instant::now());
            let came = blob.ledger().missing(chunk_idx) != missing;
            failures = if came { 1 } else { failures + 1 };
            tokio::time::sleep(pause(failure, &blob.remote.url, failures)?).await;
        }
    }

    /// One request to a replica. The outer error is final.
    async fn take(
        &self,
        blob: &Blob,
        chunk_idx: usize,
        missing: Range<u64>,
        (giver, stream): (&Giver, &mut Stream<'_>),
    ) -> Result<Result<(), NotGiven>, FetchError> {
        let answer = match self.suppliers.ask(giver, &blob.remote.digest, &missing).await {
            Ok(answer) => answer,
            Err(how) => return Ok(Err(how)),
        };
        if let Body::Other(reason) = body_of(&answer, &missing, blob.remote.size) {
            return Ok(Err(NotGiven::Refused(reason)));
        }
        let _only = blob.writers[chunk_idx].lock().await;
        if blob.ledger().missing(chunk_idx) != missing {
            return Ok(Ok(()));
        }
        let written = blob.write_chunk(answer, chunk_idx, &self.progress, stream).await?;
        Ok(written.map_err(|failure| NotGiven::Failed(failure.to_string())))
    }

    /// A replica that is left is named: who looks why the source is asked finds it.
    fn note_not_given(&self, blob: &Blob, giver: &Giver, how: &NotGiven) {
        if matches!(how, NotGiven::Lacks) {
            blob.gifts().lacking.insert(giver.name.clone());
        }
        let is_left = self.suppliers.failed(&giver.name, how, Instant::now());
        if let (true, NotGiven::Failed(reason) | NotGiven::Refused(reason)) = (is_left, how) {
            self.progress.notice(format!("nothing more is taken from {}: {reason}", giver.name));
        }
    }

    /// One request to the source. The outer error is final.
    async fn stream(
        &self,
        blob: &Blob,
        chunk_idx: usize,
        missing: Range<u64>,
        stream: &mut Stream<'_>,
    ) -> Result<Result<(), Failure>, FetchError> {
        let answer = match self.ask(blob, &missing).await {
            Ok(answer) => answer,
            Err(failure) => return Ok(Err(failure)),
        };
        match body_of(&answer, &missing, blob.remote.size) {
            Body::Asked => {
                let _only = blob.writers[chunk_idx].lock().await;
                // Somebody who got the whole file may have brought some of it.
                if blob.ledger().missing(chunk_idx) != missing {
                    return Ok(Ok(()));
                }
                blob.write_chunk(answer, chunk_idx, &self.progress, stream).await
            }
            Body::Whole => {
                let _only = blob.whole.lock().await;
                if blob.ledger().missing(chunk_idx).is_empty() {
                    return Ok(Ok(()));
                }
                blob.write_whole(answer, &self.progress).await
            }
            Body::Other(reason) => {
                *blob.location.lock().unwrap_or_else(PoisonError::into_inner) = None;
                Ok(Err(Failure::passing(reason)))
            }
        }
    }

    /// Asks where we were sent before, or the origin.
    async fn ask(&self, blob: &Blob, missing: &Range<u64>) -> Result<Response, Failure> {
        let location = || blob.location.lock().unwrap_or_else(PoisonError::into_inner);
        let before = location().clone();
        let asked = match before {
            Some(url) => self.origin.get_at(url, &blob.remote, missing.clone()).await,
            None => self.origin.get(&blob.remote, Some(missing.clone())).await,
        };
        let elsewhere = |answer: &Response| answer.url().origin() != blob.remote.url.origin();
        *location() = asked.as_ref().ok().filter(|answer| elsewhere(answer)).map(|answer| answer.url().clone());
        asked
    }
}

/// What an answer carries.
#[derive(Debug, Eq, PartialEq)]
enum Body {
    /// The bytes that were asked for.
    Asked,
    /// The file from its beginning.
    Whole,
    /// Something else.
    Other(String),
}

fn body_of(answer: &Response, asked: &Range<u64>, size: u64) -> Body {
    let range = answer.headers().get(CONTENT_RANGE).and_then(|range| range.to_str().ok()).unwrap_or_default();
    judge(answer.status(), range, answer.content_length(), (asked, size))
}

fn judge(status: StatusCode, range: &str, length: Option<u64>, (asked, size): (&Range<u64>, u64)) -> Body {
    match status {
        StatusCode::PARTIAL_CONTENT => {
            let expected = format!("bytes {}-{}/{size}", asked.start, asked.end - 1);
            if range == expected { Body::Asked } else { Body::Other(format!("{range} instead of {expected}")) }
        }
        StatusCode::OK if length.is_none_or(|length| length == size) => Body::Whole,
        _ => Body::Other(format!("{status} with {length:?} bytes, the file has {size}")),
    }
}

fn notes_path(partial: &Path) -> PathBuf {
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
    fn open(download: &Download, remote: &RemoteFile, is_given: bool) -> Result<Self, FetchError> {
        let path = download.partial(&remote.digest);
        let open = |path: &Path| {
            let file = File::options().create(true).truncate(false).read(true).write(true).open(path);
            file.map_err(FetchError::io("open", path))
        };
        let (file, notes) = (open(&path)?, open(&notes_path(&path))?);
        let kept = fs::read(notes_path(&path)).map_err(FetchError::io("read", notes_path(&path)))?;
        let (counts, _torn) = kept.as_chunks::<8>();
        let counts: Vec<u64> = counts.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect();
        let ledger = Ledger::resumed(remote.size, CHUNK_BYTES, &counts);
        let writers = (0..ledger.n_chunks()).map(|_| tokio::sync::Mutex::new(())).collect();
        download.progress.add(ledger.present());
        let length = file.metadata().map_err(FetchError::io("look at", &path))?.len();
        if length != remote.size {
            file.set_len(remote.size).map_err(FetchError::io("size", &path))?;
        }
        Ok(Self {
            remote: remote.clone(),
            file,
            notes,
            ledger: Mutex::new(ledger),
            grown: Condvar::new(),
            location: Mutex::new(None),
            whole: tokio::sync::Mutex::new(()),
            writers,
            is_given,
            gifts: Mutex::default(),
        })
    }

    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn gifts(&self) -> MutexGuard<'_, Gifts> {
        self.gifts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that nothing is there of a chunk. For a file that nobody writes to any more.
    fn forget(&self, chunk_idx: usize) -> Result<(), FetchError> {
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
    async fn write_chunk(
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
            self.file.write_all_at(bytes, at).map_err(self.write_error())?;
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
    async fn write_whole(&self, mut answer: Response, progress: &Progress) -> Result<Result<(), Failure>, FetchError> {
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
        self.file.write_all_at(&bytes[skipped..], from).map_err(self.write_error())?;
        self.note(chunk_idx, end - from, progress)
    }

    /// The bytes are written; now it is said that they are.
    fn note(&self, chunk_idx: usize, count: u64, progress: &Progress) -> Result<(), FetchError> {
        let written = {
            let mut ledger = self.ledger();
            ledger.add(chunk_idx, count)
        };
        self.grown.notify_all();
        progress.add(count);
        self.notes.write_all_at(&written.to_le_bytes(), chunk_idx as u64 * 8).map_err(self.write_error())
    }

    fn write_error(&self) -> impl FnOnce(io::Error) -> FetchError {
        FetchError::io("write", &*self.remote.path)
    }

    /// The hash of the file, computed behind the bytes that come; `None` when no more will come.
    fn hash(&self, given_up: &AtomicBool) -> io::Result<Option<Digest>> {
        let mut hasher = self.remote.digest.hasher(self.remote.size);
        let (mut at, mut buffer) = (0, vec![0; HASHED_BYTES]);
        while at < self.remote.size {
            let Some(end) = self.wait_beyond(at, given_up) else { return Ok(None) };
            while at < end {
                let part = &mut buffer[..usize::try_from(end - at).unwrap_or(HASHED_BYTES).min(HASHED_BYTES)];
                self.file.read_exact_at(part, at)?;
                hasher.update(part);
                at += part.len() as u64;
            }
        }
        Ok(Some(hasher.finish()))
    }

    /// Waits until there is more than `at` from the beginning; up to where. `None` when no more will come.
    fn wait_beyond(&self, at: u64, given_up: &AtomicBool) -> Option<u64> {
        let mut ledger = self.ledger();
        while ledger.prefix() <= at {
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

    #[test]
    fn only_the_bytes_that_were_asked_for_are_written() {
        let judged = |status: u16, range: &str, length| {
            judge(StatusCode::from_u16(status).unwrap(), range, length, (&(10..20), 30))
        };
        assert_eq!(judged(206, "bytes 10-19/30", Some(10)), Body::Asked);
        assert_eq!(judged(200, "", Some(30)), Body::Whole);
        assert_eq!(judged(200, "", None), Body::Whole);
        for (status, range, length) in
            [(206, "bytes 0-9/30", 10), (206, "bytes 10-19/31", 10), (206, "", 10), (200, "", 31), (204, "", 0)]
        {
            assert!(matches!(judged(status, range, Some(length)), Body::Other(_)), "{status} {range}");
        }
    }
}
