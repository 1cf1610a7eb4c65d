//! `stoker-agent fetch` as a process against a hub on loopback: the right bytes whatever goes wrong on the way, nothing
//! fetched twice, the token told to nobody else, and causes that say what to change.

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

use anyhow::{Context, Result, ensure};
use stoker_cluster::Keeper;
use stoker_tests::{
    agent::binary,
    hub::{Access, Asked, Commit, Fault, Hub, Repository},
    python::python_with,
    skip::skip,
};

const HUB_REQUIREMENTS: &str = include_str!("../clients/hub-requirements.txt");
/// What the fetcher asks for at once (`stoker_fetch::ledger::CHUNK_BYTES`): files are made of more than one.
const CHUNK_BYTES: u64 = 32 << 20;
const MODEL: &str = "tests/model";

/// Bytes that look random, the same each time.
fn noise(seed: u64, count: usize) -> Vec<u8> {
    let mut state = seed | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    std::iter::repeat_with(&mut next).flatten().take(count).collect()
}

/// A model of two shards, with what a repository has beside them.
fn sharded(bytes: [usize; 2]) -> Commit {
    let names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
    let index = format!(r#"{{"metadata": {{}}, "weight_map": {{"a": "{}", "b": "{}"}}}}"#, names[0], names[1]);
    Commit::of(vec![
        ("README.md", b"# A model".to_vec()),
        ("config.json", b"{}".to_vec()),
        (names[0], noise(1, bytes[0])),
        (names[1], noise(2, bytes[1])),
        ("model.safetensors.index.json", index.into_bytes()),
        ("pytorch_model.bin", noise(3, 1000)),
        ("tokenizer.json", noise(4, 5000)),
    ])
}

/// What of [`sharded`] is needed.
const NEEDED: [&str; 5] = [
    "config.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
];

/// A hub, and a cache to fetch into.
struct Site {
    hub: Hub,
    home: tempfile::TempDir,
    keeper: Keeper,
}

impl Site {
    fn with(repositories: Vec<Repository>) -> Self {
        let (hub, home) = (Hub::start(repositories).unwrap(), tempfile::tempdir().unwrap());
        Self { hub, home, keeper: Keeper::start().unwrap() }
    }

    fn of(commit: Commit) -> Self {
        Self::with(vec![Repository::public(MODEL, commit)])
    }

    fn cache(&self) -> PathBuf {
        self.home.path().join("cache")
    }

    fn command(&self, source: &str, more: &[&str]) -> Command {
        let mut command = self.keeper.command(&binary().unwrap()).unwrap();
        command.args(["fetch", source, "--endpoint", &self.hub.endpoint(), "--cache"]).arg(self.cache()).args(more);
        command.env_remove("HF_TOKEN").env_remove("HF_ENDPOINT");
        command
    }

    /// The model's directory and what was said on the way; what was said last if it failed.
    fn fetch(&self, source: &str, more: &[&str]) -> Result<(PathBuf, String), String> {
        self.fetch_with(self.command(source, more))
    }

    fn fetch_with(&self, mut command: Command) -> Result<(PathBuf, String), String> {
        let output = command.output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let said = text(&output.stderr);
        if output.status.success() { Ok((text(&output.stdout).trim().into(), said)) } else { Err(said) }
    }

    fn start(&self, source: &str, more: &[&str]) -> Child {
        self.command(source, more).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
    }

    /// Bytes that are noted as there, by the hash in the file's name: for each chunk those from its beginning.
    fn noted(&self) -> BTreeMap<String, Vec<Range<u64>>> {
        let partial = fs::read_dir(self.cache().join("partial")).into_iter().flatten().flatten();
        let files = partial.flat_map(|model| fs::read_dir(model.path()).into_iter().flatten().flatten());
        let of_file = |path: PathBuf| {
            let name = path.file_name()?.to_str()?.strip_suffix(".state")?.to_owned();
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
    fn present(&self) -> u64 {
        let noted = self.noted().into_values().flatten().map(|range| range.end - range.start).sum::<u64>();
        let blobs = fs::read_dir(self.cache().join("blobs")).into_iter().flatten().flatten();
        noted + blobs.filter_map(|blob| Some(blob.metadata().ok()?.len())).sum::<u64>()
    }
}

/// The files of a directory.
fn files(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let visible = entries.filter(|path| !path.file_name().unwrap().to_string_lossy().starts_with('.'));
    visible.map(|path| (path.file_name().unwrap().to_string_lossy().into_owned(), fs::read(&path).unwrap())).collect()
}

#[track_caller]
fn assert_needed(dir: &Path, bytes: [usize; 2]) {
    let found = files(dir);
    assert_eq!(found.keys().collect::<Vec<_>>(), NEEDED);
    assert!(found[NEEDED[1]] == noise(1, bytes[0]) && found[NEEDED[2]] == noise(2, bytes[1]), "other bytes");
}

#[test]
fn the_official_client_and_ours_bring_the_same_files() {
    let test = "the_official_client_and_ours_bring_the_same_files";
    let python = match python_with(HUB_REQUIREMENTS) {
        Ok(python) => python,
        Err(error) => return skip(test, &format!("{error:#}")),
    };
    let commit = sharded([3 << 20, 2 << 20]);
    let revisions = ["main", "v1"].map(|name| (name.to_owned(), commit.clone())).to_vec();
    let access = Access::Token("secret".to_owned());
    let site = Site::with(vec![Repository { id: MODEL.to_owned(), revisions, access }]);
    let official = site.home.path().join("official");
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/clients/fetch_from_hub.py");
    let mut client = Command::new(python);
    client.args(["-B", script, &site.hub.endpoint(), MODEL, "v1"]).arg(&official).args(NEEDED);
    let output = client.env("TOKEN", "secret").env("HF_HOME", site.home.path().join("hf")).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), commit.sha());
    let mut ours = site.command(&format!("hf://{MODEL}@v1"), &[]);
    let (dir, said) = site
        .fetch_with({
            ours.env("HF_TOKEN", "secret");
            ours
        })
        .unwrap();
    assert_eq!(files(&dir), files(&official));
    assert!(said.contains(commit.sha()), "{said}");
}

#[test]
fn only_what_is_needed_is_asked_for_and_the_token_stays_with_the_hub() {
    let repository = |access| Repository { access, ..Repository::public(MODEL, sharded([3 << 20, 2 << 20])) };
    let site = Site::with(vec![repository(Access::Token("secret".to_owned()))]);
    let mut command = site.command(&format!("hf://{MODEL}"), &[]);
    command.env("HF_TOKEN", " secret\n");
    let (dir, _) = site.fetch_with(command).unwrap();
    assert_needed(&dir, [3 << 20, 2 << 20]);
    let asked = site.hub.take_asked();
    assert!(asked.iter().all(|asked| !asked.what.contains("README") && !asked.what.contains(".bin")), "{asked:?}");
    let (store, hub): (Vec<Asked>, Vec<Asked>) = asked.into_iter().partition(|asked| asked.store);
    assert!(hub.iter().all(|asked| asked.authorization.as_deref() == Some("Bearer secret")), "{hub:?}");
    assert!(store.len() >= 2 && store.iter().all(|asked| asked.authorization.is_none()), "{store:?}");
}

#[test]
fn killed_twenty_times_it_brings_the_right_bytes_and_asks_for_none_that_it_has() {
    const BYTES: [usize; 2] = [36 << 20, 20 << 20];
    const KILLS: u64 = 20;
    let site = Site::of(sharded(BYTES));
    let total: u64 = BYTES.iter().map(|bytes| *bytes as u64).sum();
    let source = format!("hf://{MODEL}");
    // Slow enough that it is in the middle whenever it is looked at; what decides is how much is there, not the time.
    site.hub.slow_down(Duration::from_millis(3));
    for kill in 1..=KILLS {
        let mut fetch = site.start(&source, &[]);
        let enough = total * kill / (KILLS + 6);
        let deadline = Instant::now() + Duration::from_secs(120);
        while site.present() < enough {
            assert!(fetch.try_wait().unwrap().is_none(), "it ended before it was killed");
            assert!(Instant::now() < deadline, "nothing comes");
            sleep(Duration::from_millis(2));
        }
        fetch.kill().unwrap();
        fetch.wait().unwrap();
        let (noted, before) = (site.noted(), site.present());
        site.hub.take_asked();
        assert!(before < total, "killed in the middle");
        assert!(noted.values().flatten().any(|range| !range.is_empty()), "in the middle of a file");
        // The next one must not ask for what is there: every request of it is held to what was noted before it began.
        let mut next = site.start(&source, &[]);
        while site.present() < before + 1 {
            assert!(next.try_wait().unwrap().is_none(), "it ended before it was killed");
            sleep(Duration::from_millis(2));
        }
        next.kill().unwrap();
        next.wait().unwrap();
        none_twice(&noted, &site.hub.take_asked());
    }
    site.hub.slow_down(Duration::ZERO);
    let noted = site.noted();
    let (dir, _) = site.fetch(&source, &[]).unwrap();
    none_twice(&noted, &site.hub.take_asked());
    assert_needed(&dir, BYTES);
    assert!(!site.cache().join("partial").read_dir().unwrap().any(|_| true), "nothing is left half made");
}

/// No request for bytes of the store is about one that was noted.
#[track_caller]
fn none_twice(noted: &BTreeMap<String, Vec<Range<u64>>>, asked: &[Asked]) {
    let of_store = asked.iter().filter(|asked| asked.store);
    for Asked { what, range, .. } in of_store {
        let range = range.clone().expect("ranges are asked for");
        let hash = what.split("/store/").nth(1).and_then(|rest| rest.split('?').next()).unwrap();
        let had = noted.get(&format!("sha256-{hash}")).into_iter().flatten();
        for had in had {
            assert!(range.start >= had.end || range.end <= had.start, "{range:?} again, {had:?} is there: {what}");
        }
    }
}

#[test]
fn cut_refused_and_slowed_down_it_goes_on_where_it_was() {
    const BYTES: [usize; 2] = [40 << 20, 3 << 20];
    let site = Site::of(sharded(BYTES));
    let cuts = [1 << 20, 0, 5 << 20].map(Fault::Cut);
    site.hub.fail("/store/", cuts);
    site.hub.fail("/tree/", [Fault::Status(503, None), Fault::Status(429, Some(1)), Fault::Cut(10)]);
    site.hub.fail("tokenizer.json", [Fault::Status(500, None), Fault::Cut(100)]);
    let begun = Instant::now();
    let (dir, _) = site.fetch(&format!("hf://{MODEL}"), &["--connections", "1"]).unwrap();
    assert!(begun.elapsed() >= Duration::from_secs(1), "429 said when to come back");
    assert_needed(&dir, BYTES);
    assert_eq!(site.hub.faults_left(), 0);
    let asked = site.hub.take_asked();
    let starts = asked.iter().filter(|asked| asked.store).filter_map(|asked| Some(asked.range.as_ref()?.start >> 20));
    assert_eq!(starts.collect::<Vec<_>>(), [0, 1, 1, 6, 32, 0], "in MiB: what came before a cut is kept");
}

#[test]
fn a_wrong_byte_is_found_and_the_file_fetched_again() {
    const BYTES: [usize; 2] = [2 << 20, 3 << 20];
    let site = Site::of(sharded(BYTES));
    site.hub.fail("/store/", [Fault::Wrong(1_234_567)]);
    site.hub.fail("tokenizer.json", [Fault::Wrong(3)]);
    let (dir, _) = site.fetch(&format!("hf://{MODEL}"), &[]).unwrap();
    assert_needed(&dir, BYTES);
    assert_eq!(site.hub.faults_left(), 0);

    let wrong = Site::of(sharded(BYTES));
    wrong.hub.fail("tokenizer.json", std::iter::repeat_n(Fault::Wrong(3), 3));
    let said = wrong.fetch(&format!("hf://{MODEL}"), &[]).unwrap_err();
    assert!(said.contains("tokenizer.json: the hub's bytes have the hash git-"), "{said}");
    assert!(!wrong.cache().join("models").read_dir().unwrap().any(|_| true), "nothing wrong is called a model");
    // What was right stays.
    wrong.hub.take_asked();
    wrong.fetch(&format!("hf://{MODEL}"), &[]).unwrap();
    assert!(wrong.hub.take_asked().iter().all(|asked| !asked.store));
}

#[test]
fn a_server_without_ranges_is_read_from_the_beginning() {
    const BYTES: [usize; 2] = [70 << 20, 1 << 20];
    let site = Site::of(sharded(BYTES));
    site.hub.fail("/store/", std::iter::repeat_n(Fault::NoRange, 20));
    let (dir, _) = site.fetch(&format!("hf://{MODEL}"), &["--connections", "3"]).unwrap();
    assert_needed(&dir, BYTES);
}

#[test]
fn what_is_there_is_found_without_the_hub_and_a_moved_branch_moves_nobody() {
    let [old, new] = [[2 << 20, 1 << 20], [1 << 20, 1 << 20]].map(sharded);
    let site = Site::of(old.clone());
    let link = site.home.path().join("current");
    let linked = ["--link", link.to_str().unwrap()];
    let source = format!("hf://{MODEL}");
    let (dir, _) = site.fetch(&source, &linked).unwrap();
    assert_eq!(fs::canonicalize(&link).unwrap(), dir);
    site.hub.set(vec![Repository::public(MODEL, new.clone())]);
    site.hub.take_asked();
    // Who starts again, and who is told the commit, takes the same bytes and asks nobody.
    assert_eq!(site.fetch(&source, &linked).unwrap().0, dir);
    assert_eq!(site.fetch(&source, &["--commit", old.sha()]).unwrap().0, dir);
    assert_eq!(site.fetch(&format!("{source}@{}", old.sha()), &[]).unwrap().0, dir);
    assert!(site.hub.take_asked().is_empty());
    let (moved, _) = site.fetch(&source, &[]).unwrap();
    assert!(moved.ends_with(format!("tests--model@{}", new.sha())), "{}", moved.display());
}

#[test]
fn sigterm_ends_it_at_once() {
    let site = Site::of(sharded([20 << 20, 1 << 20]));
    site.hub.slow_down(Duration::from_millis(200));
    let mut fetch = site.start(&format!("hf://{MODEL}"), &[]);
    let deadline = Instant::now() + Duration::from_secs(60);
    while site.present() == 0 {
        assert!(Instant::now() < deadline, "nothing comes");
        sleep(Duration::from_millis(5));
    }
    assert!(Command::new("kill").args(["-TERM", &fetch.id().to_string()]).status().unwrap().success());
    // The first process of a container has to hear it; that it says 143 shows that it did.
    assert_eq!(fetch.wait().unwrap().code(), Some(143));
}

#[test]
fn two_at_once_fetch_once() {
    let site = Site::of(sharded([20 << 20, 1 << 20]));
    site.hub.slow_down(Duration::from_millis(1));
    let source = format!("hf://{MODEL}");
    let mut both = [0, 1].map(|_| site.start(&source, &[]));
    assert!(both.iter_mut().all(|fetch| fetch.wait().unwrap().success()));
    let asked = site.hub.take_asked();
    let mut starts: Vec<_> =
        asked.iter().filter(|asked| asked.store).map(|asked| (&asked.what, &asked.range)).collect();
    let count = starts.len();
    starts.sort_by_key(|(what, range)| ((*what).clone(), range.as_ref().map(|range| range.start)));
    starts.dedup();
    assert_eq!(starts.len(), count, "{starts:?}");
}

#[test]
fn causes_say_what_to_change() {
    let commit = sharded([1000, 1000]);
    let half = Commit::of(vec![
        ("config.json", b"{}".to_vec()),
        ("model.safetensors.index.json", br#"{"weight_map": {"a": "model-00001-of-00001.safetensors"}}"#.to_vec()),
        ("tokenizer.json", b"{}".to_vec()),
    ]);
    let repository =
        |id: &str, access| Repository { id: id.to_owned(), access, ..Repository::public("", commit.clone()) };
    let site = Site::with(vec![
        repository("tests/private", Access::Token("secret".to_owned())),
        repository("tests/gated", Access::Gated("secret".to_owned())),
        repository("tests/model", Access::Public),
        Repository::public("tests/half", half),
    ]);
    let said = |source: &str, token: &str, more: &[&str]| {
        let mut command = site.command(source, more);
        let said = site.fetch_with({
            command.env("HF_TOKEN", token);
            command
        });
        said.unwrap_err()
    };
    let named = ["--token-name", "key token of Secret hub"];
    #[track_caller]
    fn has(said: &str, words: &[&str]) {
        words.iter().for_each(|word| assert!(said.contains(word), "no \"{word}\" in: {said}"));
    }
    has(
        &said("hf://tests/private", "", &named),
        &["401 from", "tests/private", "key token of Secret hub holds no token"],
    );
    has(&said("hf://tests/private", "wrong", &named), &["401 from", "key token of Secret hub is not valid there"]);
    has(&said("hf://tests/none", "", &[]), &["401 from", "correct its name", "spec.model.tokenSecret"]);
    has(&said("hf://tests/none", "secret", &[]), &["404 from", "there is no model tests/none"]);
    has(&said("hf://tests/gated", "secret", &[]), &["403 from", "accept its terms at", "/tests/gated"]);
    has(&said("hf://tests/model@v9", "", &[]), &["404 from", "has no revision \"v9\""]);
    has(&said("hf://tests/half", "", &[]), &["the upload is not complete: model-00001-of-00001.safetensors"]);
    has(&said("hf://tests/model/q8.gguf", "", &[]), &["there is no q8.gguf"]);
    has(&said("hf://tests/model", "", &["--cache-limit", "100"]), &["of at most 100", "raise its size limit"]);
    has(&said("hf://tests", "", &[]), &["hf://ORG/MODEL"]);
}

#[test]
fn what_was_fetched_is_served() -> Result<()> {
    let ember = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/ember");
    let site = Site::of(Commit::of_directory(&ember)?);
    let (dir, _) = site.fetch(&format!("hf://{MODEL}"), &[]).map_err(anyhow::Error::msg)?;
    let mut describe = Command::new(binary()?);
    let output = describe.args(["describe", "--model"]).arg(&dir).output().context("describe")?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}
