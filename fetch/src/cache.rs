//! The directory of fetched models on a node or volume: files by their hash, models as links to them.
//!
//! ```text
//! blobs/sha256-…, git-…            whole files, verified, never changed
//! models/ORG--MODEL@COMMIT/        links to blobs, and .lease, which those who use it lock
//! partial/ORG--MODEL@COMMIT/       what is being fetched, and `wanted`: the blobs that it will link to
//! locks/ORG--MODEL@COMMIT.lock     held by the one who fetches it
//! cache.lock                       held for a moment by who decides what is kept
//! ```
//!
//! A model appears by a rename when all its files are whole, so that whoever dies when leaves nothing half made there.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    io,
    os::unix::fs::{MetadataExt, symlink},
    path::{Path, PathBuf},
    time::SystemTime,
};

use rustix::fs::statvfs;

use crate::{
    choose::RemoteFile,
    digest::Digest,
    error::FetchError,
    evict::{Entry, evictions},
    lease::{self, LEASE_FILE},
    source::Source,
};

/// Names of the blobs that a fetch will link to.
const WANTED: &str = "wanted";

/// See the module.
#[derive(Clone, Debug)]
pub struct Cache {
    root: PathBuf,
    /// Bytes that it may hold.
    limit: Option<u64>,
}

/// What a model is called in the cache: a name for people, and the commit, which says the rest.
pub fn key(source: &Source, commit: &str) -> String {
    let file = source.file().filter(|_| !matches!(source, Source::Web(_)));
    // Of an image's folder the same: another folder is another model.
    let part = file.or(source.folder()).map(|part| format!("--{}", part.replace('/', "--"))).unwrap_or_default();
    let name = match source {
        Source::Hub(model) => model.id.replace('/', "--"),
        Source::Bucket(model) => format!("s3--{}", for_people(&format!("{}/{}", model.bucket, model.prefix))),
        Source::Image(image) => format!("oci--{}", for_people(&image.repository)),
        Source::Web(model) => format!("https--{}", for_people(model.url.path())),
    };
    format!("{name}@{commit}{part}")
}

/// The last parts of a path that may be longer than a file's name, and have other characters.
fn for_people(path: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.') { c } else { '_' };
    let parts: Vec<&str> = path.trim_end_matches('/').rsplit('/').take(2).collect();
    let short = |part: &&str| part.chars().take(40).map(plain).collect::<String>();
    parts.iter().rev().map(short).collect::<Vec<_>>().join("--")
}

/// The commit in the name of a model of the cache.
pub fn commit_of(dir: &Path) -> Option<&str> {
    let name = dir.file_name()?.to_str()?;
    name.split_once('@').map(|(_, rest)| rest.split_once("--").map_or(rest, |(commit, _)| commit))
}

impl Cache {
    /// The cache in `root`, which is made if it is not there.
    pub fn open(root: &Path, limit: Option<u64>) -> Result<Self, FetchError> {
        for dir in ["blobs", "models", "partial", "locks"] {
            let path = root.join(dir);
            fs::create_dir_all(&path).map_err(FetchError::io("create", path))?;
        }
        Ok(Self { root: root.to_owned(), limit })
    }

    /// Where a model is, once it is there.
    pub(crate) fn model_dir(&self, key: &str) -> PathBuf {
        self.root.join("models").join(key)
    }

    /// Where it is fetched.
    pub(crate) fn partial_dir(&self, key: &str) -> PathBuf {
        self.root.join("partial").join(key)
    }

    /// Where whole files are.
    pub(crate) fn blobs(&self) -> PathBuf {
        self.root.join("blobs")
    }

    /// Where this one is.
    pub(crate) fn blob(&self, digest: &Digest) -> PathBuf {
        self.blobs().join(digest.to_string())
    }

    pub(crate) fn lock_path(&self, key: &str) -> PathBuf {
        self.root.join("locks").join(format!("{key}.lock"))
    }

    /// The model, if it is whole; its use is noted, so that it stays.
    pub(crate) fn find(&self, key: &str) -> Result<Option<PathBuf>, FetchError> {
        let dir = self.model_dir(key);
        let Ok(files) = fs::read_dir(&dir) else { return Ok(None) };
        let mut whole = true;
        for file in files {
            let file = file.map_err(FetchError::io("read", &dir))?.path();
            whole &= file.exists();
        }
        if !whole {
            // Somebody took files out of the cache.
            fs::remove_dir_all(&dir).map_err(FetchError::io("remove", &dir))?;
            return Ok(None);
        }
        // Where another user fetched it, its age is told by that one alone.
        let lease = File::options().write(true).open(dir.join(LEASE_FILE));
        let _untold = lease.and_then(|file| file.set_modified(SystemTime::now()));
        Ok(Some(dir))
    }

    /// Makes room for what is missing of `files` and for as many bytes `beside` them, and keeps others from taking away what is there
    /// of them.
    pub(crate) async fn make_room(&self, key: &str, files: &[RemoteFile], beside: u64) -> Result<(), FetchError> {
        let _deciding = self.deciding().await?;
        let partial = self.partial_dir(key);
        fs::create_dir_all(&partial).map_err(FetchError::io("create", &partial))?;
        let names: BTreeSet<String> = files.iter().map(|file| file.digest.to_string()).collect();
        let wanted = partial.join(WANTED);
        fs::write(&wanted, names.into_iter().collect::<Vec<_>>().join("\n"))
            .map_err(FetchError::io("write", wanted))?;
        let absent = files.iter().filter(|file| !self.blob(&file.digest).exists());
        let missing = |file: &RemoteFile| file.size.saturating_sub(on_disk(&partial.join(file.digest.to_string())));
        let needed: u64 = absent.map(missing).sum::<u64>() + beside;
        let (used, free) = (self.used(), self.free()?);
        let over_limit = self.limit.map_or(0, |limit| (used + needed).saturating_sub(limit));
        let too_much = over_limit.max(needed.saturating_sub(free));
        if too_much > 0 {
            self.evict(too_much)?;
        }
        self.has_room(needed)
    }

    fn has_room(&self, needed: u64) -> Result<(), FetchError> {
        let (dir, used, free) = (self.root.clone(), self.used(), self.free()?);
        match self.limit {
            Some(limit) if used + needed > limit => Err(FetchError::CacheFull { dir, needed, used, limit }),
            _ if needed > free => Err(FetchError::DiskFull { dir, needed, free }),
            _ => Ok(()),
        }
    }

    /// Links the model's files, all of which are there.
    pub(crate) async fn install(&self, key: &str, files: &[RemoteFile]) -> Result<PathBuf, FetchError> {
        let _deciding = self.deciding().await?;
        let (partial, dir) = (self.partial_dir(key), self.model_dir(key));
        let made = partial.join("model");
        let _absent = fs::remove_dir_all(&made);
        fs::create_dir_all(&made).map_err(FetchError::io("create", &made))?;
        for file in files {
            let link = made.join(link_name(&file.path));
            let blob = Path::new("../../blobs").join(file.digest.to_string());
            symlink(blob, &link).map_err(FetchError::io("link", link))?;
        }
        let lease = made.join(LEASE_FILE);
        File::create(&lease).map_err(FetchError::io("create", lease))?;
        fs::rename(&made, &dir).map_err(FetchError::io("rename to", &dir))?;
        for written in [&self.root.join("models"), &dir] {
            sync_dir(written).map_err(FetchError::io("sync", written))?;
        }
        fs::remove_dir_all(&partial).map_err(FetchError::io("remove", partial))?;
        Ok(dir)
    }

    async fn deciding(&self) -> Result<File, FetchError> {
        let path = self.root.join("cache.lock");
        lease::lock(path.clone(), || ()).await.map_err(FetchError::io("lock", path))
    }

    /// Takes the least recently used models away, and every blob that nobody needs then.
    fn evict(&self, bytes: u64) -> Result<(), FetchError> {
        let entries: Vec<Entry> = self.models().into_iter().chain(self.fetches()).collect();
        for name in evictions(&entries, bytes, SystemTime::now()) {
            let (dir, gone) = (self.root.join(name), self.root.join("partial").join(".gone"));
            let _absent = fs::remove_dir_all(&gone);
            fs::rename(&dir, &gone).map_err(FetchError::io("rename", dir))?;
            fs::remove_dir_all(&gone).map_err(FetchError::io("remove", gone))?;
        }
        self.drop_unneeded()
    }

    /// Takes blobs away that no model and no fetch needs: what only helped to bring others.
    pub(crate) async fn tidy(&self) -> Result<(), FetchError> {
        let _deciding = self.deciding().await?;
        self.drop_unneeded()
    }

    fn drop_unneeded(&self) -> Result<(), FetchError> {
        let needed: BTreeSet<String> = self.references().into_values().flatten().chain(self.wanted()).collect();
        for blob in names_in(&self.blobs()).into_iter().filter(|blob| !needed.contains(blob)) {
            let path = self.blobs().join(blob);
            fs::remove_file(&path).map_err(FetchError::io("remove", path))?;
        }
        Ok(())
    }

    fn models(&self) -> Vec<Entry> {
        let (references, wanted) = (self.references(), self.wanted());
        let mut users: BTreeMap<&String, usize> = wanted.iter().map(|blob| (blob, 1)).collect();
        references.values().flatten().for_each(|blob| *users.entry(blob).or_default() += 1);
        let entry = |(name, blobs): (&String, &BTreeSet<String>)| {
            let dir = self.model_dir(name);
            let own = blobs.iter().filter(|blob| users.get(blob) == Some(&1));
            let size = |blob: &String| fs::metadata(self.blobs().join(blob)).map_or(0, |file| file.len());
            let last_used = fs::metadata(dir.join(LEASE_FILE)).and_then(|lease| lease.modified());
            Entry {
                name: format!("models/{name}"),
                bytes: own.map(size).sum(),
                last_used: last_used.unwrap_or(SystemTime::UNIX_EPOCH),
                in_use: lease::is_held(&dir),
            }
        };
        references.iter().map(entry).collect()
    }

    /// Fetches that came to no end; one that goes on holds its lock.
    fn fetches(&self) -> Vec<Entry> {
        let entry = |key: String| {
            let dir = self.partial_dir(&key);
            let files = names_in(&dir).into_iter().filter_map(|name| fs::metadata(dir.join(name)).ok());
            let last_used = files.filter_map(|file| file.modified().ok()).max();
            Entry {
                name: format!("partial/{key}"),
                bytes: size_of_all(&dir),
                last_used: last_used.unwrap_or(SystemTime::UNIX_EPOCH),
                in_use: lease::is_locked(&self.lock_path(&key)),
            }
        };
        let keys = names_in(&self.root.join("partial")).into_iter().filter(|key| !key.starts_with('.'));
        keys.map(entry).collect()
    }

    /// Blobs that each model links to.
    fn references(&self) -> BTreeMap<String, BTreeSet<String>> {
        let models = names_in(&self.root.join("models")).into_iter().filter(|name| !name.starts_with('.'));
        let links = |name: String| {
            let dir = self.model_dir(&name);
            let targets = names_in(&dir).into_iter().filter_map(|link| fs::read_link(dir.join(link)).ok());
            let blobs = targets.map(|target| base_name(&target.to_string_lossy()).to_owned()).collect();
            (name, blobs)
        };
        models.map(links).collect()
    }

    /// Blobs that fetches under way will link to.
    fn wanted(&self) -> BTreeSet<String> {
        let partial = self.root.join("partial");
        let lists =
            names_in(&partial).into_iter().filter_map(|key| fs::read_to_string(partial.join(key).join(WANTED)).ok());
        lists.flat_map(|list| list.lines().map(str::to_owned).collect::<Vec<_>>()).collect()
    }

    fn used(&self) -> u64 {
        size_of_all(&self.blobs()) + size_of_all(&self.root.join("partial"))
    }

    fn free(&self) -> Result<u64, FetchError> {
        let stat = statvfs(&self.root).map_err(|error| FetchError::io("statvfs", &self.root)(error.into()))?;
        Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
    }
}

/// Makes `link` lead to `target`, whatever it led to before.
pub fn point(link: &Path, target: &Path) -> Result<(), FetchError> {
    let made = link.with_extension("new");
    let _absent = fs::remove_file(&made);
    symlink(target, &made).map_err(FetchError::io("link", &made))?;
    fs::rename(&made, link).map_err(FetchError::io("rename to", link))
}

pub(crate) fn sync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

/// A file's name in the folder that a model is. Settings of a part of a model, `1_Pooling/config.json`, are not those of the model:
/// their folder is a part of the name.
fn link_name(path: &str) -> String {
    match base_name(path) {
        settings @ "config.json" if path != settings => path.replace('/', "-"),
        name => name.to_owned(),
    }
}

/// A file's name without the folders of its repository.
fn base_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

fn names_in(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

/// Bytes that files below `dir` take on the disk.
fn size_of_all(dir: &Path) -> u64 {
    let size = |entry: fs::DirEntry| match entry.file_type() {
        Ok(kind) if kind.is_dir() => size_of_all(&entry.path()),
        _ => on_disk(&entry.path()),
    };
    fs::read_dir(dir).into_iter().flatten().flatten().map(size).sum()
}

/// Bytes that a file takes on the disk: one with gaps takes less than it is long.
fn on_disk(path: &Path) -> u64 {
    fs::symlink_metadata(path).map_or(0, |file| if file.is_file() { file.blocks() * 512 } else { 0 })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

    fn file(path: &str, content: &str) -> (RemoteFile, String) {
        let digest = |digest: Digest| {
            let mut hasher = digest.hasher(content.len() as u64);
            hasher.update(content.as_bytes());
            hasher.finish()
        };
        let digest = digest(Digest::GitBlob(String::new()));
        let url = reqwest::Url::parse("https://hub.example/").unwrap();
        let (path, size) = (path.to_owned(), content.len() as u64);
        (RemoteFile { path, size, digest, url, etag: None }, content.to_owned())
    }

    async fn put(cache: &Cache, key: &str, files: &[(RemoteFile, String)]) -> Result<PathBuf, FetchError> {
        let remote: Vec<RemoteFile> = files.iter().map(|(file, _)| file.clone()).collect();
        cache.make_room(key, &remote, 0).await?;
        for (file, content) in files {
            fs::write(cache.blob(&file.digest), content).unwrap();
        }
        cache.install(key, &remote).await
    }

    fn idle_for(dir: &Path, hours: u64) {
        let lease = File::options().write(true).open(dir.join(LEASE_FILE)).unwrap();
        lease.set_modified(SystemTime::now() - Duration::from_secs(3600 * hours)).unwrap();
    }

    #[test]
    fn a_models_name_has_its_commit() {
        let name = |text: &str| key(&text.parse().unwrap(), COMMIT);
        assert_eq!(name("hf://a/b"), format!("a--b@{COMMIT}"));
        assert_eq!(name("hf://a/b/q8/x.gguf"), format!("a--b@{COMMIT}--q8--x.gguf"));
        assert_eq!(name("s3://models/a/b@c/q8.gguf"), format!("s3--a--b_c@{COMMIT}--q8.gguf"));
        assert_eq!(name("s3://models"), format!("s3--models@{COMMIT}"));
        assert_eq!(name("oci://registry.example/team/m:v1"), format!("oci--team--m@{COMMIT}"));
        assert_eq!(name("oci://registry.example/m#path=a/b"), format!("oci--m@{COMMIT}--a--b"));
        assert_eq!(name("https://files.example/a/b/q8.gguf?sig=x"), format!("https--b--q8.gguf@{COMMIT}"));
        assert!(name(&format!("s3://models/{}", "x".repeat(1000))).len() < 200);
        for source in [
            "hf://a/b",
            "hf://a--x/b/q8.gguf",
            "s3://models/b@c",
            "oci://registry.example/m",
            "oci://r.example/m#path=/",
            "oci://r.example/m#path=a",
        ] {
            assert_eq!(commit_of(Path::new(&name(source))), Some(COMMIT));
        }
    }

    #[tokio::test]
    async fn a_full_cache_lets_the_oldest_unused_model_go_and_keeps_shared_files() {
        let root = tempfile::tempdir().unwrap();
        let block = |letter: &str| letter.repeat(8192);
        let cache = Cache::open(root.path(), Some(6 * 8192)).unwrap();
        let shared = file("tokenizer.json", &block("t"));
        let [old, used, new] = ["o", "u", "n"].map(|letter| [file("w", &block(letter)), shared.clone()]);
        let old_dir = put(&cache, "old", &old).await.unwrap();
        let used_dir = put(&cache, "used", &used).await.unwrap();
        let _lease = lease::hold(&used_dir).unwrap().unwrap();
        idle_for(&old_dir, 1);
        idle_for(&used_dir, 9);
        let huge = file("w", &block("h").repeat(3));
        put(&cache, "huge", &[huge]).await.unwrap();
        assert_eq!(cache.find("old").unwrap(), None, "the only one that nobody uses");
        assert!(cache.find("used").unwrap().is_some());
        assert!(!cache.blob(&old[0].0.digest).exists() && cache.blob(&shared.0.digest).exists());
        let full = put(&cache, "new", &[new[0].clone(), file("x", &block("x").repeat(2))]).await.unwrap_err();
        assert!(matches!(full, FetchError::CacheFull { .. }), "{full}");
    }

    #[tokio::test]
    async fn a_fetch_that_nobody_goes_on_with_makes_room_and_one_under_way_does_not() {
        let root = tempfile::tempdir().unwrap();
        let cache = Cache::open(root.path(), Some(8 * 8192)).unwrap();
        let begin = async |key: &str| {
            let (half, content) = file(key, &"h".repeat(3 * 8192));
            cache.make_room(key, std::slice::from_ref(&half), 0).await.unwrap();
            fs::write(cache.partial_dir(key).join(half.digest.to_string()), content).unwrap();
            for name in names_in(&cache.partial_dir(key)) {
                let file = File::options().write(true).open(cache.partial_dir(key).join(name)).unwrap();
                file.set_modified(SystemTime::now() - Duration::from_secs(3600)).unwrap();
            }
        };
        begin("left").await;
        begin("goes-on").await;
        let _fetching = lease::lock(cache.lock_path("goes-on"), || ()).await.unwrap();
        put(&cache, "new", &[file("w", &"n".repeat(3 * 8192))]).await.unwrap();
        assert!(!cache.partial_dir("left").exists() && cache.partial_dir("goes-on").exists());
    }

    #[tokio::test]
    async fn a_model_that_lost_a_file_is_not_there() {
        let root = tempfile::tempdir().unwrap();
        let cache = Cache::open(root.path(), None).unwrap();
        let weights = file("w", "weights");
        put(&cache, "m", std::slice::from_ref(&weights)).await.unwrap();
        assert!(cache.find("m").unwrap().is_some());
        fs::remove_file(cache.blob(&weights.0.digest)).unwrap();
        assert_eq!(cache.find("m").unwrap(), None);
    }

    #[tokio::test]
    async fn a_disk_that_is_too_small_says_what_is_needed_and_free() {
        let root = tempfile::tempdir().unwrap();
        let cache = Cache::open(root.path(), None).unwrap();
        let (weights, _) = file("w", "weights");
        let error = cache.make_room("m", &[RemoteFile { size: 1 << 60, ..weights }], 0).await.unwrap_err();
        assert!(error.to_string().contains("1152921504606846976 more bytes"), "{error}");
    }
}
