//! Brings the bytes of files: chunks on several connections, each noted on disk as it is written, hashes computed on the way
//! ([`crate::blob`]). Who is killed goes on where it was.
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
    ops::Range,
    path::{Path, PathBuf},
    sync::{
        Arc, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Instant,
};

use reqwest::{Response, StatusCode, header::CONTENT_RANGE};
use tokio::task::JoinSet;

use crate::{
    blob::{Blob, notes_path},
    cache::{Cache, sync_dir},
    choose::RemoteFile,
    digest::Digest,
    error::FetchError,
    origin::{Origin, pause},
    progress::Progress,
    suppliers::{Giver, NotGiven, Stream, Suppliers},
    transport::Failure,
};

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
    /// The lock of who fetches it. Threads and connections of a fetch that nobody waits for any more end a little later than it does: until then
    /// the next one would find its files changed, or gone.
    pub(crate) _only: Arc<File>,
}

/// The files of one round and who is next.
struct Round {
    download: Arc<Download>,
    blobs: Vec<Blob>,
    /// Blob and chunk, in the order in which they are begun.
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

/// File and chunk of files with so many chunks each. As many files go side by side as there are connections: the bytes of each come in
/// order then, and who brings them can hash them.
fn side_by_side(n_chunks: impl Iterator<Item = usize>, n_connections: usize) -> Vec<(usize, usize)> {
    let chunks = n_chunks.enumerate().flat_map(|(file_idx, count)| (0..count).map(move |idx| (file_idx, idx)));
    let mut chunks: Vec<(usize, usize)> = chunks.collect();
    chunks.sort_by_key(|(file_idx, chunk_idx)| (file_idx / n_connections, *chunk_idx));
    chunks
}

async fn round(download: &Arc<Download>, files: &[RemoteFile], is_given: bool) -> Result<Vec<Wrong>, FetchError> {
    let open = |file: &RemoteFile| {
        let is_given = is_given && file.digest.is_proof();
        Blob::open(&download.partial(&file.digest), file, is_given, &download.progress)
    };
    let blobs = files.iter().map(open).collect::<Result<Vec<_>, _>>()?;
    let n_connections = download.connections.max(1);
    let round = Arc::new(Round {
        chunks: side_by_side(blobs.iter().map(|blob| blob.ledger().n_chunks()), n_connections),
        download: download.clone(),
        next_chunk: AtomicUsize::new(0),
        next_blob: AtomicUsize::new(0),
        given_up: AtomicBool::new(false),
        blobs,
    });
    let _left = Left(&round.given_up);
    let mut hashers = JoinSet::new();
    for _ in 0..n_connections.min(round.blobs.len()) {
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

/// Tells who hashes that nobody waits for it any more: a thread that runs is not aborted.
struct Left<'a>(&'a AtomicBool);

impl Drop for Left<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_files_go_side_by_side_as_there_are_connections() {
        let expected = [(0, 0), (1, 0), (0, 1), (1, 1), (1, 2), (2, 0), (2, 1)];
        assert_eq!(side_by_side([2, 3, 2].into_iter(), 2), expected);
        assert_eq!(side_by_side([2, 0, 1].into_iter(), 1), [(0, 0), (0, 1), (2, 0)], "one after the other");
        assert_eq!(side_by_side([2, 1].into_iter(), 8), [(0, 0), (1, 0), (0, 1)], "all of them");
    }

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
