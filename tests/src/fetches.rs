//! `stoker-agent fetch` as a process, whatever it fetches from, and what its cache holds while it does.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::{
    collections::BTreeMap,
    fs,
    ops::Range,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::Result;
use stoker_cluster::Keeper;

use crate::{agent::binary, hub::Asked};

/// What the fetcher asks for at once (`stoker_fetch::ledger::CHUNK_BYTES`): files are made of more than one.
pub const CHUNK_BYTES: u64 = 32 << 20;
/// How often [`Fetcher::kill_often`] kills.
const KILLS: u64 = 20;
/// Variables that somebody who runs tests may have, and no fetch of a test is to see.
const HIDDEN: [&str; 12] = [
    "HF_TOKEN",
    "HF_ENDPOINT",
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "DOCKER_AUTH_CONFIG",
    "STOKER_SOURCE_TOKEN",
    "STOKER_SOURCE_USERNAME",
    "STOKER_SOURCE_PASSWORD",
    "SSL_CERT_FILE",
];

/// Bytes that are noted as there, by the name of their file in the cache: for each chunk those from its beginning.
pub type Noted = BTreeMap<String, Vec<Range<u64>>>;

/// Bytes that look random, the same each time.
pub fn noise(seed: u64, count: usize) -> Vec<u8> {
    let mut state = seed | 1;
    let mut bytes = vec![0; count];
    // By words: tests make hundreds of megabytes of it, and are not optimised.
    for word in bytes.chunks_mut(8) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        word.copy_from_slice(&state.to_le_bytes()[..word.len()]);
    }
    bytes
}

/// A model of two shards, with what a repository has beside them.
pub fn sharded(bytes: [usize; 2]) -> Vec<(&'static str, Vec<u8>)> {
    let index = format!(r#"{{"metadata": {{}}, "weight_map": {{"a": "{}", "b": "{}"}}}}"#, NEEDED[1], NEEDED[2]);
    vec![
        ("README.md", b"# A model".to_vec()),
        ("config.json", b"{}".to_vec()),
        (NEEDED[1], noise(1, bytes[0])),
        (NEEDED[2], noise(2, bytes[1])),
        ("model.safetensors.index.json", index.into_bytes()),
        ("pytorch_model.bin", noise(3, 1000)),
        ("tokenizer.json", noise(4, 5000)),
    ]
}

/// What of [`sharded`] is needed.
pub const NEEDED: [&str; 5] = [
    "config.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
];

/// What is needed of [`sharded`] is in `dir`, and nothing else.
#[track_caller]
pub fn assert_needed(dir: &Path, bytes: [usize; 2]) {
    let found = files(dir);
    assert_eq!(found.keys().collect::<Vec<_>>(), NEEDED);
    assert!(found[NEEDED[1]] == noise(1, bytes[0]) && found[NEEDED[2]] == noise(2, bytes[1]), "other bytes");
}

/// What was said has all of these words.
#[track_caller]
pub fn has(said: &str, words: &[&str]) {
    words.iter().for_each(|word| assert!(said.contains(word), "no \"{word}\" in: {said}"));
}

/// A cache, and what every fetch into it is told.
pub struct Fetcher {
    home: tempfile::TempDir,
    keeper: Keeper,
    args: Vec<String>,
    /// Variables.
    pub env: BTreeMap<String, String>,
}

impl Fetcher {
    /// An empty cache.
    pub fn new(args: &[&str]) -> Result<Self> {
        let args = args.iter().map(|arg| (*arg).to_owned()).collect();
        Ok(Self { home: tempfile::tempdir()?, keeper: Keeper::start()?, args, env: BTreeMap::new() })
    }

    /// A folder that goes with it.
    pub fn home(&self) -> &Path {
        self.home.path()
    }

    /// Where it is.
    pub fn cache(&self) -> PathBuf {
        self.home.path().join("cache")
    }

    /// One fetch, not begun yet.
    pub fn command(&self, source: &str, more: &[&str]) -> Command {
        let mut command = self.keeper.command(&binary().unwrap()).unwrap();
        command.args(["fetch", source]).args(&self.args).arg("--cache").arg(self.cache()).args(more);
        HIDDEN.iter().for_each(|name| _ = command.env_remove(name));
        command.env("DOCKER_CONFIG", self.home()).envs(&self.env);
        command
    }

    /// The model's directory and what was said on the way; what was said last if it failed.
    pub fn fetch(&self, source: &str, more: &[&str]) -> Result<(PathBuf, String), String> {
        self.fetch_with(self.command(source, more))
    }

    /// The same of a command of its own.
    pub fn fetch_with(&self, mut command: Command) -> Result<(PathBuf, String), String> {
        let output = command.output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let said = text(&output.stderr);
        if output.status.success() { Ok((text(&output.stdout).trim().into(), said)) } else { Err(said) }
    }

    /// A fetch that goes on.
    pub fn start(&self, source: &str, more: &[&str]) -> Child {
        self.command(source, more).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
    }

    /// See [`Noted`].
    pub fn noted(&self) -> Noted {
        let partial = fs::read_dir(self.cache().join("partial")).into_iter().flatten().flatten();
        let files = partial.flat_map(|model| fs::read_dir(model.path()).into_iter().flatten().flatten());
        let of_file = |path: PathBuf| {
            let name = path.file_name()?.to_str()?.strip_suffix(".state")?.to_owned();
            // A whole file is moved among the blobs before its notes go: they count no more.
            path.with_file_name(&name).exists().then_some(())?;
            let notes = fs::read(&path).ok()?;
            let (counts, _) = notes.as_chunks::<8>();
            let counts = counts.iter().map(|bytes| u64::from_le_bytes(*bytes)).enumerate();
            Some((
                name,
                counts.map(|(idx, count)| idx as u64 * CHUNK_BYTES..idx as u64 * CHUNK_BYTES + count).collect(),
            ))
        };
        files.filter_map(|file| of_file(file.path())).collect()
    }

    /// Bytes that are there, whole files included.
    pub fn present(&self) -> u64 {
        let noted = self.noted().into_values().flatten().map(|range| range.end - range.start).sum::<u64>();
        let blobs = fs::read_dir(self.cache().join("blobs")).into_iter().flatten().flatten();
        noted + blobs.filter_map(|blob| Some(blob.metadata().ok()?.len())).sum::<u64>()
    }

    /// Waits until more than `bytes` are there.
    pub fn wait_for(&self, fetch: &mut Child, bytes: u64) {
        let deadline = Instant::now() + Duration::from_secs(120);
        while self.present() < bytes {
            assert!(fetch.try_wait().unwrap().is_none(), "it ended before it was killed");
            assert!(Instant::now() < deadline, "nothing comes");
            sleep(Duration::from_millis(2));
        }
    }

    /// Kills fetches of `total` bytes twenty times in the middle, and the one that goes on after each. That one must not ask for
    /// what is there: `check` is given what was noted before it began, and `forget` is called then.
    pub fn kill_often(&self, source: &str, total: u64, forget: impl Fn(), check: impl Fn(&Noted)) {
        for kill in 1..=KILLS {
            self.kill_at(source, total * kill / (KILLS + 6));
            let (noted, before) = (self.noted(), self.present());
            assert!(before < total, "killed in the middle");
            assert!(noted.values().flatten().any(|range| !range.is_empty()), "in the middle of a file");
            forget();
            self.kill_at(source, before + 1);
            check(&noted);
        }
    }

    fn kill_at(&self, source: &str, bytes: u64) {
        let mut fetch = self.start(source, &[]);
        self.wait_for(&mut fetch, bytes);
        fetch.kill().unwrap();
        fetch.wait().unwrap();
    }
}

/// The files of a directory.
pub fn files(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let visible = entries.filter(|path| !path.file_name().unwrap().to_string_lossy().starts_with('.'));
    visible.map(|path| (path.file_name().unwrap().to_string_lossy().into_owned(), fs::read(&path).unwrap())).collect()
}

/// No request for bytes is about one that was noted. `name` says of what was asked for what it is called in the cache.
#[track_caller]
pub fn none_twice(noted: &Noted, asked: &[Asked], name: impl Fn(&str) -> Option<String>) {
    for Asked { what, range, .. } in asked {
        let range = range.clone().expect("ranges are asked for");
        let name = name(what).unwrap_or_else(|| panic!("{what} is of no file"));
        for had in noted.get(&name).into_iter().flatten() {
            assert!(range.start >= had.end || range.end <= had.start, "{range:?} again, {had:?} is there: {what}");
        }
    }
}
