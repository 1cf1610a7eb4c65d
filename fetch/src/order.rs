//! A model is ordered and comes: which commit, what is there, what is needed, room for it, its bytes, its place.

use std::{fs, path::PathBuf, sync::Arc, time::Instant};

use crate::{
    cache::{self, Cache},
    choose::{RemoteFile, Unfit, choose},
    download::{Download, download},
    error::FetchError,
    hub::Hub,
    lease,
    progress::{Progress, Snapshot},
    source::HubModel,
    transport::Transport,
};

/// What is wanted, from where to where.
#[derive(Clone)]
pub struct Order {
    /// The model.
    pub model: HubModel,
    /// The hub or a mirror of it.
    pub endpoint: String,
    /// Sent to the hub, and to nobody it redirects to.
    pub token: Option<String>,
    /// What the user knows the token as, for messages.
    pub token_name: Option<String>,
    /// The commit that others took already, whatever the revision is now.
    pub commit: Option<String>,
    /// The cache.
    pub cache: PathBuf,
    /// Bytes that it may hold.
    pub limit: Option<u64>,
    /// Requests at the same time.
    pub connections: usize,
}

/// Where it is.
#[derive(Clone, Debug)]
pub struct Fetched {
    /// A directory with its files.
    pub dir: PathBuf,
    /// What they are.
    pub commit: String,
}

/// Brings the model into the cache, or finds it there. With a commit that is there the hub is not asked.
pub async fn fetch(order: Order, progress: Arc<Progress>) -> Result<Fetched, FetchError> {
    let cache = Cache::open(&order.cache, order.limit)?;
    let transport = Transport::new(&order.endpoint, order.token.clone())?;
    let hub = Hub::new(transport, order.model.clone(), order.token_name.clone());
    let known = order.commit.as_deref().or(order.model.commit());
    let commit = match known {
        Some(commit) => commit.to_owned(),
        None => hub.commit().await?,
    };
    progress.resolved(&commit);
    let key = cache::key(&order.model, &commit);
    if let Some(dir) = cache.find(&key)? {
        return Ok(Fetched { dir, commit });
    }
    let path = cache.lock_path(&key);
    let told = cache.partial_dir(&key).join(PROGRESS_FILE);
    let _only = lease::lock(path.clone(), || follow(&told, &progress)).await.map_err(FetchError::io("lock", path))?;
    // Whoever had the lock may have brought it.
    if let Some(dir) = cache.find(&key)? {
        return Ok(Fetched { dir, commit });
    }
    let files = needed(&hub, &order, &commit).await?;
    cache.make_room(&key, &files).await?;
    let telling = tokio::spawn(tell(told, progress.clone()));
    let (commit, connections) = (commit.clone(), order.connections);
    let work = Download { hub, commit: commit.clone(), cache: cache.clone(), key: key.clone(), connections, progress };
    let brought = download(Arc::new(work), &files).await;
    telling.abort();
    // It may be in the middle of a file that is about to go.
    let _aborted = telling.await;
    brought?;
    Ok(Fetched { dir: cache.install(&key, &files).await?, commit })
}

/// How far the one who fetches is, for others who wait for the same.
const PROGRESS_FILE: &str = "progress.json";

/// Files that the model needs.
async fn needed(hub: &Hub, order: &Order, commit: &str) -> Result<Vec<RemoteFile>, FetchError> {
    let unfit = |unfit: Unfit| FetchError::Unfit { model: order.model.id.clone(), commit: commit.to_owned(), unfit };
    let listing = hub.listing(commit).await?;
    let choice = choose(&listing, order.model.file.as_deref()).map_err(unfit)?;
    match choice.index.clone() {
        None => Ok(choice.files),
        Some(index) => choice.with_shards(&listing, &hub.small_file(commit, &index).await?).map_err(unfit),
    }
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
