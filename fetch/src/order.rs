//! A model is ordered and comes: which commit, what is there, what is needed, room for it, its bytes, its place.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    path::PathBuf,
    sync::Arc,
    time::Instant,
};

use tokio::task::JoinSet;

use crate::{
    cache::{self, Cache},
    choose::{RemoteFile, Unfit, choose, inside, rooted},
    download::{Download, download},
    error::FetchError,
    lease,
    origin::{Listing, Origin},
    progress::{Progress, Snapshot},
    source::Source,
    suppliers::Suppliers,
    unpack::{self, Packed, unpack},
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
    /// Replicas that have the model.
    pub suppliers: Arc<Suppliers>,
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
    /// Who asks a web server.
    pub web: WebLogin,
    /// What the user knows these as, for messages.
    pub secret_name: Option<String>,
}

/// What a web server is told of who asks: a token, or a name and its password. Empty texts are none.
#[derive(Clone, Default)]
pub struct WebLogin {
    /// Sent as `Bearer`.
    pub token: String,
    /// Sent with the password as `Basic`, where there is no token.
    pub username: String,
    /// The name's.
    pub password: String,
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
    let is_told = order.commit.is_some();
    let origin = Origin::of(&order.source, &order.access)?;
    let listing = origin.listing(known).await?;
    let commit = listing.commit.clone();
    if let Some(found) = found(&cache, &order, &progress, Some(&commit))? {
        return Ok(found);
    }
    let key = cache::key(&order.source, &commit);
    let path = cache.lock_path(&key);
    let told = cache.partial_dir(&key).join(PROGRESS_FILE);
    let locked = lease::lock(path.clone(), || follow(&told, &progress)).await;
    let only = Arc::new(locked.map_err(FetchError::io("lock", path))?);
    // Whoever had the lock may have brought it.
    if let Some(found) = found(&cache, &order, &progress, Some(&commit))? {
        return Ok(found);
    }
    // It ends with this, wherever that is.
    let mut telling = JoinSet::new();
    telling.spawn(tell(Arc::clone(&only), told, progress.clone()));
    let has_layers = !listing.packed.is_empty();
    let Order { source, connections, suppliers, .. } = order;
    // Who is told the commit is not the first: whoever was has it, and is nearer than the source.
    if is_told {
        suppliers.first_word().await;
    }
    let work = Work { cache: &cache, key: &key, source: &source, only: &only };
    let (cached, locked) = (cache.clone(), Arc::clone(&only));
    let download =
        Download { origin, cache: cached, key: key.clone(), connections, suppliers, progress, _only: locked };
    let brought = work.bring(Arc::new(download), listing).await;
    // It may be in the middle of a file that is about to go.
    telling.shutdown().await;
    let dir = cache.install(&key, &brought?).await?;
    // Layers have done what they were for.
    if has_layers {
        cache.tidy().await?;
    }
    Ok(Fetched { dir, commit })
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

/// What a fetch works on.
struct Work<'a> {
    cache: &'a Cache,
    key: &'a str,
    source: &'a Source,
    only: &'a Arc<File>,
}

impl Work<'_> {
    /// Brings what the model needs into the cache; which files that is.
    async fn bring(&self, download: Arc<Download>, listing: Listing) -> Result<Vec<RemoteFile>, FetchError> {
        let Listing { commit, mut files, packed } = listing;
        let layers: Vec<RemoteFile> = packed.iter().map(|packed| packed.file.clone()).collect();
        if !packed.is_empty() {
            self.bring_files(&download, &layers, layers.iter().map(|layer| layer.size).sum()).await?;
            files.extend(self.unpacked(packed).await?);
        }
        let needed = self.needed(&download.origin, &commit, files).await?;
        // Layers stay until all of it is here: who is killed does not fetch them again.
        self.bring_files(&download, &[layers, needed.clone()].concat(), 0).await?;
        Ok(needed)
    }

    async fn bring_files(&self, work: &Arc<Download>, files: &[RemoteFile], beside: u64) -> Result<(), FetchError> {
        self.cache.make_room(self.key, files, beside).await?;
        download(work.clone(), files).await
    }

    async fn unpacked(&self, packed: Vec<Packed>) -> Result<Vec<RemoteFile>, FetchError> {
        let (cache, key, only) = (self.cache.clone(), self.key.to_owned(), Arc::clone(self.only));
        let unpacking = tokio::task::spawn_blocking(move || {
            let _only = only;
            unpack(&cache, &key, &packed)
        });
        unpacking.await.expect("unpacking does not panic")
    }

    /// Files that the model needs.
    async fn needed(
        &self,
        origin: &Origin,
        commit: &str,
        mut files: Vec<RemoteFile>,
    ) -> Result<Vec<RemoteFile>, FetchError> {
        let unfit =
            |unfit: Unfit| FetchError::Unfit { model: self.source.to_string(), commit: commit.to_owned(), unfit };
        files = match self.source.folder() {
            Some(folder) => inside(files, folder).map_err(unfit)?,
            None if self.source.is_packed() => rooted(files).map_err(unfit)?,
            None => files,
        };
        let choice = choose(&files, self.source.file()).map_err(unfit)?;
        let needed = match choice.index.clone() {
            None => choice.files,
            Some(index) => {
                let bytes = match unpack::read(self.cache, self.key, &index) {
                    Some(bytes) => bytes,
                    None => origin.small_file(&index).await?,
                };
                choice.with_shards(&files, &bytes).map_err(unfit)?
            }
        };
        origin.with_hashes(needed).await
    }
}

fn follow(told: &std::path::Path, progress: &Progress) {
    let other = fs::read(told).ok().and_then(|text| serde_json::from_slice::<Snapshot>(&text).ok());
    if let Some(other) = other {
        progress.follow(&other);
    }
}

/// Writes how far it is into a file, every second.
async fn tell(_only: Arc<File>, path: PathBuf, progress: Arc<Progress>) {
    let made = path.with_added_extension("new");
    loop {
        let text = serde_json::to_vec(&progress.at(Instant::now())).expect("numbers are JSON");
        // Only for those who wait: the fetch goes on without it.
        let _untold = fs::write(&made, text).and_then(|()| fs::rename(&made, &path));
        tokio::time::sleep(std::time::Duration::from_secs(1)).await;
    }
}
