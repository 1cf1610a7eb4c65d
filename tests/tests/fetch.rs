//! `stoker-agent fetch` as a process against a hub on loopback: the right bytes whatever goes wrong on the way, nothing
//! fetched twice, the token told to nobody else, and causes that say what to change.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::{
    fs,
    path::Path,
    process::Command,
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use stoker_tests::{
    agent::binary,
    fetches::{self, Fetcher, NEEDED, Noted, assert_needed, files, has},
    hub::{Access, Asked, Commit, Fault, Hub, Repository},
    python::python_with,
    skip::skip,
};

const HUB_REQUIREMENTS: &str = include_str!("../clients/hub-requirements.txt");
const MODEL: &str = "tests/model";

/// [`fetches::sharded`] as a commit.
fn sharded(bytes: [usize; 2]) -> Commit {
    Commit::of(fetches::sharded(bytes))
}

/// A hub, and what fetches from it.
struct Site {
    hub: Hub,
    fetcher: Fetcher,
}

impl Site {
    fn with(repositories: Vec<Repository>) -> Self {
        let hub = Hub::start(repositories).unwrap();
        let fetcher = Fetcher::new(&["--endpoint", &hub.endpoint()]).unwrap();
        Self { hub, fetcher }
    }

    fn of(commit: Commit) -> Self {
        Self::with(vec![Repository::public(MODEL, commit)])
    }
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
    let official = site.fetcher.home().join("official");
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/clients/fetch_from_hub.py");
    let mut client = Command::new(python);
    client.args(["-B", script, &site.hub.endpoint(), MODEL, "v1"]).arg(&official).args(NEEDED);
    let output = client.env("TOKEN", "secret").env("HF_HOME", site.fetcher.home().join("hf")).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), commit.sha());
    let mut ours = site.fetcher.command(&format!("hf://{MODEL}@v1"), &[]);
    let (dir, said) = site
        .fetcher
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
    let mut command = site.fetcher.command(&format!("hf://{MODEL}"), &[]);
    command.env("HF_TOKEN", " secret\n");
    let (dir, _) = site.fetcher.fetch_with(command).unwrap();
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
    let site = Site::of(sharded(BYTES));
    let total: u64 = BYTES.iter().map(|bytes| *bytes as u64).sum();
    let source = format!("hf://{MODEL}");
    // Slow enough that it is in the middle whenever it is looked at; what decides is how much is there, not the time.
    site.hub.slow_down(Duration::from_millis(15));
    let check = |noted: &Noted| none_twice(noted, &site.hub.take_asked());
    site.fetcher.kill_often(&source, total, || _ = site.hub.take_asked(), check);
    site.hub.slow_down(Duration::ZERO);
    let noted = site.fetcher.noted();
    let (dir, _) = site.fetcher.fetch(&source, &[]).unwrap();
    none_twice(&noted, &site.hub.take_asked());
    assert_needed(&dir, BYTES);
    assert!(!site.fetcher.cache().join("partial").read_dir().unwrap().any(|_| true), "nothing is left half made");
}

/// No request for bytes of the store is about one that was noted.
#[track_caller]
fn none_twice(noted: &Noted, asked: &[Asked]) {
    let asked: Vec<Asked> = asked.iter().filter(|asked| asked.store).cloned().collect();
    let hash = |what: &str| what.split("/store/").nth(1)?.split('?').next().map(|hash| format!("sha256-{hash}"));
    fetches::none_twice(noted, &asked, hash);
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
    let (dir, _) = site.fetcher.fetch(&format!("hf://{MODEL}"), &["--connections", "1"]).unwrap();
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
    let (dir, _) = site.fetcher.fetch(&format!("hf://{MODEL}"), &[]).unwrap();
    assert_needed(&dir, BYTES);
    assert_eq!(site.hub.faults_left(), 0);

    let wrong = Site::of(sharded(BYTES));
    wrong.hub.fail("tokenizer.json", std::iter::repeat_n(Fault::Wrong(3), 3));
    let said = wrong.fetcher.fetch(&format!("hf://{MODEL}"), &[]).unwrap_err();
    assert!(said.contains("tokenizer.json: the bytes that came have the hash git-"), "{said}");
    assert!(!wrong.fetcher.cache().join("models").read_dir().unwrap().any(|_| true), "nothing wrong is called a model");
    // What was right stays.
    wrong.hub.take_asked();
    wrong.fetcher.fetch(&format!("hf://{MODEL}"), &[]).unwrap();
    assert!(wrong.hub.take_asked().iter().all(|asked| !asked.store));
}

#[test]
fn a_server_without_ranges_is_read_from_the_beginning() {
    const BYTES: [usize; 2] = [70 << 20, 1 << 20];
    let site = Site::of(sharded(BYTES));
    site.hub.fail("/store/", std::iter::repeat_n(Fault::NoRange, 20));
    let (dir, _) = site.fetcher.fetch(&format!("hf://{MODEL}"), &["--connections", "3"]).unwrap();
    assert_needed(&dir, BYTES);
}

#[test]
fn what_is_there_is_found_without_the_hub_and_a_moved_branch_moves_nobody() {
    let [old, new] = [[2 << 20, 1 << 20], [1 << 20, 1 << 20]].map(sharded);
    let site = Site::of(old.clone());
    let link = site.fetcher.home().join("current");
    let linked = ["--link", link.to_str().unwrap()];
    let source = format!("hf://{MODEL}");
    let (dir, _) = site.fetcher.fetch(&source, &linked).unwrap();
    assert_eq!(fs::canonicalize(&link).unwrap(), dir);
    site.hub.set(vec![Repository::public(MODEL, new.clone())]);
    site.hub.take_asked();
    // Who starts again, and who is told the commit, takes the same bytes and asks nobody.
    assert_eq!(site.fetcher.fetch(&source, &linked).unwrap().0, dir);
    assert_eq!(site.fetcher.fetch(&source, &["--commit", old.sha()]).unwrap().0, dir);
    assert_eq!(site.fetcher.fetch(&format!("{source}@{}", old.sha()), &[]).unwrap().0, dir);
    assert!(site.hub.take_asked().is_empty());
    let (moved, _) = site.fetcher.fetch(&source, &[]).unwrap();
    assert!(moved.ends_with(format!("tests--model@{}", new.sha())), "{}", moved.display());
}

#[test]
fn a_model_that_was_renamed_is_found_by_its_former_name_with_the_token() {
    const BYTES: [usize; 2] = [3 << 20, 2 << 20];
    let access = Access::Token("secret".to_owned());
    let site = Site::with(vec![Repository { access, ..Repository::public("tests/now", sharded(BYTES)) }]);
    site.hub.rename(MODEL, "tests/now");
    let mut command = site.fetcher.command(&format!("hf://{MODEL}"), &[]);
    command.env("HF_TOKEN", "secret");
    let (dir, _) = site.fetcher.fetch_with(command).unwrap();
    assert_needed(&dir, BYTES);
    let asked = site.hub.take_asked();
    assert!(asked.iter().any(|asked| asked.what.contains("tests/now")), "{asked:?}");
    assert!(asked.iter().filter(|asked| asked.store).all(|asked| asked.authorization.is_none()), "{asked:?}");
}

/// In a file system of its own, with so much room: fetches; fetches again while somebody else takes all of it in the middle; and again
/// when that is gone. What is said goes to standard error.
const SMALL_DISK: &str = r#"
mount -t tmpfs -o size="$1" none "$2" || exit 99
fetch() { "$3" fetch "$4" --endpoint "$5" --cache "$2/cache" --connections 1; }
if [ "$6" = small ]; then fetch "$@"; exit; fi
fetch "$@" & fetching=$!
# Two MB of one file are there: of a weight's, as small files come first.
looks=0
until cat "$2"/cache/partial/*/*.state 2> /dev/null | od -An -v -t u8 -w8 | awk '$1 > 2097152 { n++ } END { exit !n }'; do
  looks=$((looks + 1)); [ $looks -lt 2000 ] || exit 96
  sleep 0.01
done
cat /dev/zero > "$2/hog" 2> /dev/null
wait $fetching && { echo "it fits beside the hog" >&2; exit 98; }
echo "== again" >&2
rm "$2/hog"
dir=$(fetch "$@") || exit 97
cmp "$6" "$dir/model-00001-of-00002.safetensors"
"#;

/// Its exit code and all that was said.
fn on_a_small_disk(site: &Site, size: &str, last: &str) -> (Option<i32>, String) {
    let mounted = tempfile::tempdir().unwrap();
    let mut unshare = Command::new("unshare");
    unshare.args(["--mount", "--map-root-user", "sh", "-c", SMALL_DISK, "sh", size]).arg(mounted.path());
    unshare.arg(binary().unwrap()).args([&format!("hf://{MODEL}"), &site.hub.endpoint(), last]);
    let output = unshare.env_remove("HF_TOKEN").output().unwrap();
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn a_disk_that_is_full_is_named_with_what_to_change_and_what_came_before_stays() {
    const BYTES: [usize; 2] = [40 << 20, 1 << 20];
    let site = Site::of(sharded(BYTES));
    let (code, said) = on_a_small_disk(&site, "16m", "small");
    if code == Some(99) || said.starts_with("unshare: ") {
        let test = "a_disk_that_is_full_is_named_with_what_to_change_and_what_came_before_stays";
        return skip(test, &format!("no file systems of one's own here: {said}"));
    }
    has(&said, &["the model needs ", " more bytes in ", " free; give the cache a larger volume, or free some"]);
    assert_eq!(code, Some(1), "{said}");
    assert!(site.hub.take_asked().iter().all(|asked| !asked.store), "it is known before a weight is fetched");

    // Somebody else fills it while the fetch goes on.
    let wanted = site.fetcher.home().join("wanted");
    fs::write(&wanted, fetches::noise(1, BYTES[0])).unwrap();
    site.hub.slow_down(Duration::from_millis(10));
    let (code, said) = on_a_small_disk(&site, "64m", wanted.to_str().unwrap());
    assert_eq!(code, Some(0), "{said}");
    let (full, _) = said.split_once("== again").unwrap();
    has(full, &["No space left on device", "give the cache a larger volume, or free some"]);
    let asked = site.hub.take_asked();
    let starts: Vec<u64> =
        asked.iter().filter(|asked| asked.store).filter_map(|asked| Some(asked.range.as_ref()?.start)).collect();
    assert_eq!(starts.iter().filter(|start| **start == 0).count(), 2, "each shard once from its beginning: {starts:?}");
}

#[test]
fn sigterm_ends_it_at_once() {
    let site = Site::of(sharded([20 << 20, 1 << 20]));
    site.hub.slow_down(Duration::from_millis(200));
    let mut fetch = site.fetcher.start(&format!("hf://{MODEL}"), &[]);
    let deadline = Instant::now() + Duration::from_secs(60);
    while site.fetcher.present() == 0 {
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
    let mut both = [0, 1].map(|_| site.fetcher.start(&source, &[]));
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
        let mut command = site.fetcher.command(source, more);
        let said = site.fetcher.fetch_with({
            command.env("HF_TOKEN", token);
            command
        });
        said.unwrap_err()
    };
    let named = ["--token-name", "key token of Secret hub"];
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
    let (dir, _) = site.fetcher.fetch(&format!("hf://{MODEL}"), &[]).map_err(anyhow::Error::msg)?;
    let mut describe = Command::new(binary()?);
    let output = describe.args(["describe", "--model"]).arg(&dir).output().context("describe")?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}
