//! Where a source's files are: which there are, what each must be, and a request for a range of it. One file for each kind
//! of server; what they share is here. Repeats what passes. Writes nothing.

mod bucket;
mod hub;
mod registry;
mod web;

use std::{ops::Range, time::Duration};

use reqwest::{Response, Url};

use self::{bucket::Bucket, hub::Hub, registry::Registry, web::Web};
use crate::{
    backoff,
    choose::RemoteFile,
    error::FetchError,
    order::Access,
    source::Source,
    transport::{Failure, Refusal, Request, Said, Transport, error_chain, header, judged, shown},
    unpack::Packed,
};

pub use self::{bucket::BucketRefusal, registry::RegistryRefusal, web::WebRefusal};

/// Failures in a row, without a byte between them, after which a server is given up: about two minutes.
const TRIES: u32 = 9;
/// A listing longer than this is no model's.
const PAGES: usize = 100;
/// A file larger than this is none: what a listing claims is counted with.
const FILE_BYTES_MAX: u64 = 1 << 44;
/// Of a file that is read into memory: an index of shards has some hundred kilobytes.
const SMALL_FILE_BYTES: u64 = 64 << 20;

/// The server that a source names.
pub(crate) enum Origin {
    Hub(Hub),
    Bucket(Bucket),
    Registry(Registry),
    Web(Web),
}

/// What a source has.
#[derive(Debug)]
pub(crate) struct Listing {
    /// What pins it: who is told this gets these files and no others.
    pub(crate) commit: String,
    pub(crate) files: Vec<RemoteFile>,
    /// Files that hold others; what is in them is known when they are here.
    pub(crate) packed: Vec<Packed>,
}

impl Origin {
    /// Asks nobody yet.
    pub(crate) fn of(source: &Source, access: &Access) -> Result<Self, FetchError> {
        let transport = Transport::new()?;
        Ok(match source.clone() {
            Source::Hub(model) => Self::Hub(Hub::new(transport, model, access)?),
            Source::Bucket(model) => Self::Bucket(Bucket::new(transport, model, access)?),
            Source::Image(image) => Self::Registry(Registry::new(transport, image, access)?),
            Source::Web(model) => Self::Web(Web::new(transport, model, access)?),
        })
    }

    /// The files of `commit`, or of what the source is now.
    pub(crate) async fn listing(&self, commit: Option<&str>) -> Result<Listing, FetchError> {
        match self {
            Self::Hub(hub) => hub.listing(commit).await,
            Self::Bucket(bucket) => bucket.listing(commit).await,
            Self::Registry(registry) => registry.listing(commit).await,
            Self::Web(web) => web.listing(commit).await,
        }
    }

    /// The same files with the hashes that their server tells of single files only.
    pub(crate) async fn with_hashes(&self, files: Vec<RemoteFile>) -> Result<Vec<RemoteFile>, FetchError> {
        match self {
            Self::Bucket(bucket) => bucket.with_hashes(files).await,
            Self::Hub(_) | Self::Registry(_) | Self::Web(_) => Ok(files),
        }
    }

    /// Asks once for bytes of a file.
    pub(crate) async fn get(&self, file: &RemoteFile, range: Option<Range<u64>>) -> Result<Response, Failure> {
        match self {
            Self::Hub(hub) => hub.get(&file.url, range).await,
            Self::Bucket(bucket) => bucket.get(file, range).await,
            Self::Registry(registry) => registry.get(&file.url, range).await,
            Self::Web(web) => web.get(file, range).await,
        }
    }

    /// The same where the server sent us before. Refusals pass: such URLs are signed for a while.
    pub(crate) async fn get_at(&self, url: Url, file: &RemoteFile, range: Range<u64>) -> Result<Response, Failure> {
        let transport = match self {
            Self::Hub(hub) => &hub.transport,
            Self::Bucket(bucket) => &bucket.transport,
            Self::Registry(registry) => &registry.transport,
            Self::Web(web) => &web.transport,
        };
        let answer = transport.get(&Request::plain(url), Some(range)).await?;
        let answer = judged(answer, |_, _| Said::default(), elsewhere).await?;
        match self {
            Self::Web(web) => web.of_version(answer, file),
            Self::Hub(_) | Self::Bucket(_) | Self::Registry(_) => Ok(answer),
        }
    }

    /// A small file, whole and right.
    pub(crate) async fn small_file(&self, file: &RemoteFile) -> Result<Vec<u8>, FetchError> {
        if file.size > SMALL_FILE_BYTES {
            return Err(wrong_answer(&file.url, format!("{} bytes are more than an index has", file.size)));
        }
        let bytes = repeated(&file.url, async || whole(self.get(file, None).await?).await).await?;
        let mut hasher = file.digest.hasher(file.size);
        hasher.update(&bytes);
        let found = hasher.finish();
        if found == file.digest && bytes.len() as u64 == file.size {
            Ok(bytes)
        } else {
            let (file, wanted) = (file.path.clone(), file.digest.published());
            Err(FetchError::WrongHash { file, wanted, found: found.published(), tries: 1 })
        }
    }
}

/// Asks until there is an answer, or none is to be expected.
async fn repeated<T>(url: &Url, ask: impl AsyncFn() -> Result<T, Failure>) -> Result<T, FetchError> {
    let mut failures = 0;
    loop {
        let failure = match ask().await {
            Ok(value) => return Ok(value),
            Err(failure) => failure,
        };
        failures += 1;
        tokio::time::sleep(pause(failure, url, failures)?).await;
    }
}

/// How long to wait after a failure, or why there is no use in it.
pub(crate) fn pause(failure: Failure, url: &Url, failures: u32) -> Result<Duration, FetchError> {
    match failure {
        Failure::Passing { reason, .. } if failures >= TRIES => {
            Err(FetchError::Unreachable { url: shown(url), reason, tries: failures })
        }
        Failure::Passing { retry_after, .. } => Ok(backoff::pause(failures, rand::random(), retry_after)),
        Failure::Final(error) => Err(*error),
    }
}

/// All bytes of an answer.
async fn whole(answer: Response) -> Result<Vec<u8>, Failure> {
    match answer.bytes().await {
        Ok(bytes) => Ok(bytes.to_vec()),
        Err(error) => Err(Failure::passing(error_chain(&error))),
    }
}

/// A refusal of a server that we were sent to.
fn elsewhere(refusal: Refusal) -> Failure {
    let Refusal { status, said, url, .. } = refusal;
    Failure::passing(format!("{status} from {}: {}", url.host_str().unwrap_or_default(), said.words))
}

fn wrong_answer(url: &Url, reason: impl ToString) -> FetchError {
    FetchError::Answer { url: shown(url), reason: reason.to_string() }
}

/// A size that a listing claims, if a file can have it.
fn plausible(url: &Url, path: &str, size: u64) -> Result<u64, FetchError> {
    let too_much = || wrong_answer(url, format!("{path} has {size} bytes, more than a file has"));
    if size > FILE_BYTES_MAX { Err(too_much()) } else { Ok(size) }
}
