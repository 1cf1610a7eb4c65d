//! A model is ordered and comes: which commit, what is there, what is needed, room for it, its bytes, its place.

use std::{collections::BTreeMap, fs, path::PathBuf, sync::Arc, time::Instant};

use crate::{
    cache::{self, Cache},
    choose::{RemoteFile, Unfit, choose},
    download::{Download, download},
    error::FetchError,
    lease,
    origin::{Listing, Origin},
    progress::{Progress, Snapshot},
    source::Source,
};

/// What is wanted, from where to where.
#[derive(Clone)]
pub struct Order {
    /// The model.
    pub source: Source,
    /// Who asks for it.
    pub access: Access,
    /// The commit that others took already, whatever the source is now.
    pub commit: Option<String>,
    /// The cache.
    pub cache: PathBuf,
    /// Bytes that it may hold.
    pub limit: Option<u64>,
    /// Requests at the same time.
    pub connections: usize,
}

/// What servers are asked with. Each is told what is meant for its kind, and nobody that it redirects to.
#[derive(Clone, Default)]
pub struct Access {
    /// The hub or a mirror of it.
    pub endpoint: String,
    /// The hub's token.
    pub token: Option<String>,
    /// Variables whose names begin with `AWS_`: where buckets are, and who asks for them.
    pub aws: BTreeMap<String, String>,
    /// A `config.json` of Docker's with logins to registries.
    pub docker_config: Option<String>,
    /// What the user knows these as, for messages.
    pub secret_name: Option<String>,
}

impl Access {
    /// A variable that says something: people end Secrets with a line break, and templates leave variables empty.
    pub(crate) fn aws_variable(&self, name: &str) -> Option<String> {
        self.aws.get(name).map(|value| value.trim().to_owned()).filter(|value| !value.is_empty())
    }
}

/// Where it is.
#[derive(Clone, Debug)]
pub struct Fetched {
    /// A directory with its files.
    pub dir: PathBuf,
    /// What they are.
    pub commit: String,
}

/// Brings the model into the cache, or finds it there. With a commit that is there nobody is asked.
pub async fn fetch(order: Order, progress: Arc<Progress>) -> Result<Fetched, FetchError> {
    let cache = Cache::open(&order.cache, order.limit)?;
    let known = order.commit.as_deref().or(order.source.commit());
    if let Some(found) = found(&cache, &order, &progress, known)? {
        return Ok(found);
    }
    let origin = Origin::of(&order.source, &order.access)?;
    let listing = origin.listing(known).await?;
    let commit = listing.commit.clone();
    if let Some(found) = found(&cache, &order, &progress, Some(&commit))? {
        return Ok(found);
    }
    let key = cache::key(&order.source, &commit);
    let path = cache.lock_path(&key);
    let told = cache.partial_dir(&key).join(PROGRESS_FILE);
    let _only = lease::lock(path.clone(), || follow(&told, &progress)).await.map_err(FetchError::io("lock", path))?;
    // Whoever had the lock may have brought it.
    if let Some(found) = found(&cache, &order, &progress, Some(&commit))? {
        return Ok(found);
    }
    let files = needed(&origin, &order, listing).await?;
    cache.make_room(&key, &files).await?;
    let telling = tokio::spawn(tell(told, progress.clone()));
    let work = Download { origin, cache: cache.clone(), key: key.clone(), connections: order.connections, progress };
    let brought = download(Arc::new(work), &files).await;
    telling.abort();
    // It may be in the middle of a file that is about to go.
    let _aborted = telling.await;
    brought?;
    Ok(Fetched { dir: cache.install(&key, &files).await?, commit })
}

/// The model of a commit that is known, if the cache has it.
fn found(
    cache: &Cache,
    order: &Order,
    progress: &Progress,
    commit: Option<&str>,
) -> Result<Option<Fetched>, FetchError> {
    let Some(commit) = commit else { return Ok(None) };
    progress.resolved(commit);
    let dir = cache.find(&cache::key(&order.source, commit))?;
    Ok(dir.map(|dir| Fetched { dir, commit: commit.to_owned() }))
}

/// How far the one who fetches is, for others who wait for the same.
const PROGRESS_FILE: &str = "progress.json";

/// Files that the model needs.
async fn needed(origin: &Origin, order: &Order, listing: Listing) -> Result<Vec<RemoteFile>, FetchError> {
    let Listing { commit, files } = listing;
    let unfit = |unfit: Unfit| FetchError::Unfit { model: order.source.to_string(), commit: commit.clone(), unfit };
    let choice = choose(&files, order.source.file()).map_err(unfit)?;
    let needed = match choice.index.clone() {
        None => choice.files,
        Some(index) => choice.with_shards(&files, &origin.small_file(&index).await?).map_err(unfit)?,
    };
    origin.with_hashes(needed).await
}

fn follow(told: &std::path::Path, progress: &Progress) {
    let other = fs::read(told).ok().and_then(|text| serde_json::from_slice::<Snapshot>(&text).ok());
    if let Some(other) = other {
        progress.follow(&other);
    }
}

/// Writes how far it is into a file, every second.
async fn tell(path: PathBuf, progress: Arc<Progress>) {
    let made = path.with_added_extension("new");
    loop {
        let text = serde_json::to_vec(&progress.at(Instant::now())).expect("numbers are JSON");
        // Only for those who wait: the fetch goes on without it.
        let _untold = fs::write(&made, text).and_then(|()| fs::rename(&made, &path));
        tokio::time::sleep(std::time::Duration::from_secs(1)).await;
    }
}
