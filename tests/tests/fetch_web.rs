//! `stoker-agent fetch https://…` as a process against aiohttp's and Python's own web server on loopback: the right bytes whatever goes
//! wrong on the way, one version of each file, a login for nobody else, and causes that say what to change.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::{
    collections::BTreeMap,
    fs,
    process::{Command, Stdio},
    time::Duration,
};

use ring::digest::{SHA256, digest};
use stoker_tests::{
    fetches::{Fetcher, NEEDED, Noted, assert_needed, files, has, noise, none_twice, sharded},
    hub::{Asked, Fault},
    skip::skip,
    web::Web,
};

/// A web server, and what fetches from it.
struct Site {
    web: Web,
    fetcher: Fetcher,
}

impl Site {
    /// With `model` below `chat`; `None` with the reason printed where there can be no server.
    fn with(test: &str, model: &[(&str, Vec<u8>)]) -> Option<Self> {
        let web = match Web::start() {
            Ok(web) => web,
            Err(error) => {
                skip(test, &format!("{error:#}"));
                return None;
            }
        };
        model.iter().for_each(|(name, content)| web.put(&format!("chat/{name}"), content).unwrap());
        Some(Self { web, fetcher: Fetcher::new(&[]).unwrap() })
    }

    /// With the hashes of all files beside them; that of the list.
    fn with_sums(&self, model: &[(&str, Vec<u8>)]) -> String {
        let sums: String = model.iter().map(|(name, content)| format!("{}  {name}\n", sha256(content))).collect();
        self.web.put("chat/SHA256SUMS", sums.as_bytes()).unwrap();
        sha256(sums.as_bytes())
    }

    fn source(&self, path: &str) -> String {
        format!("{}/{path}", self.web.url())
    }

    fn refused(&self, path: &str) -> String {
        self.fetcher.fetch(&self.source(path), &[]).unwrap_err()
    }

    /// Requests for bytes, but those that ask how long a file is.
    fn take_ranges(&self) -> Vec<Asked> {
        let asked = self.web.middle().take_asked().into_iter();
        asked.filter(|asked| asked.range.as_ref().is_some_and(|range| *range != (0..1))).collect()
    }
}

fn sha256(content: &[u8]) -> String {
    digest(&SHA256, content).as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn killed_often_a_folder_comes_whole_and_nothing_twice() {
    const BYTES: [usize; 2] = [36 << 20, 8 << 20];
    let model = sharded(BYTES);
    let Some(site) = Site::with("killed_often_a_folder_comes_whole_and_nothing_twice (web)", &model) else { return };
    let pinned = site.with_sums(&model);
    let source = site.source("chat/");
    let names: BTreeMap<&str, String> =
        model.iter().map(|(name, content)| (*name, format!("sha256-{}", sha256(content)))).collect();
    let name = |what: &str| names.get(what.rsplit('/').next()?).cloned();
    let check = |noted: &Noted| {
        let shards = site.take_ranges().into_iter().filter(|asked| asked.what.ends_with(".safetensors"));
        none_twice(noted, &shards.collect::<Vec<_>>(), name);
    };
    let total = model.iter().filter(|(name, _)| NEEDED.contains(name)).map(|(_, content)| content.len() as u64).sum();
    site.web.middle().slow_down(Duration::from_millis(2));
    site.fetcher.kill_often(&source, total, || _ = site.take_ranges(), check);
    site.web.middle().slow_down(Duration::ZERO);
    let noted = site.fetcher.noted();
    let (dir, _) = site.fetcher.fetch(&source, &[]).unwrap();
    check(&noted);
    assert_needed(&dir, BYTES);
    assert!(dir.to_str().unwrap().ends_with(&pinned), "the list's hash is the commit");
}

#[test]
fn cut_refused_and_slowed_down_it_goes_on_where_it_was() {
    const BYTES: [usize; 2] = [40 << 20, 3 << 20];
    let Some(site) = Site::with("cut_refused_and_slowed_down (web)", &sharded(BYTES)) else { return };
    let middle = site.web.middle();
    middle.fail("config.json", [Fault::Status(503, None), Fault::Status(429, Some(1))]);
    // The first is met by the question how long the file is.
    let of_shard = [Fault::Cut(0), Fault::Status(500, None), Fault::Cut(1 << 20), Fault::Cut(0), Fault::Cut(5 << 20)];
    middle.fail("model-00001", of_shard);
    let (dir, _) = site.fetcher.fetch(&site.source("chat"), &["--connections", "1"]).unwrap();
    assert_needed(&dir, BYTES);
    assert_eq!(middle.faults_left(), 0);
    let shards = site.take_ranges().into_iter().filter(|asked| asked.what.ends_with(".safetensors"));
    let starts: Vec<u64> = shards.filter_map(|asked| Some(asked.range?.start >> 20)).collect();
    assert_eq!(starts, [0, 0, 1, 1, 6, 32, 0], "in MiB: what came before a cut is kept");
}

#[test]
fn a_wrong_byte_is_found_by_the_list_by_the_hash_of_the_source_and_by_what_its_server_says() {
    const BYTES: [usize; 2] = [2 << 20, 3 << 20];
    let model = sharded(BYTES);
    let Some(site) = Site::with("a_wrong_byte_is_found_by_the_list (web)", &model) else { return };
    site.with_sums(&model);
    site.web.middle().fail("model-00001", [Fault::Wrong(1_234_567), Fault::Wrong(1_234_567)]);
    let (dir, _) = site.fetcher.fetch(&site.source("chat/"), &[]).unwrap();
    assert_needed(&dir, BYTES);
    assert_eq!(site.web.middle().faults_left(), 0);

    let file = noise(5, 1 << 20);
    site.web.put("summed/q8.gguf", &file).unwrap();
    site.web.middle().fail("summed", [Fault::Wrong(1000), Fault::Wrong(1000)]);
    let (dir, _) = site.fetcher.fetch(&site.source("summed/q8.gguf"), &[]).unwrap();
    assert!(files(&dir)["q8.gguf"] == file, "its server says the hash");
    assert_eq!(site.web.middle().faults_left(), 0);
    // Another one: that one is there, wherever it came from.
    let file = noise(6, 1 << 20);
    site.web.put("q8.gguf", &file).unwrap();
    site.web.middle().fail("q8.gguf", std::iter::repeat_n(Fault::Wrong(1000), 4));
    let said = site.refused(&format!("q8.gguf#sha256={}", sha256(&file)));
    has(&said, &["q8.gguf: the bytes that came have the hash sha256-", "fetched 3 times"]);
    let (dir, _) = site.fetcher.fetch(&site.source(&format!("q8.gguf#sha256={}", sha256(&file))), &[]).unwrap();
    assert!(files(&dir)["q8.gguf"] == file);
}

#[test]
fn a_server_without_ranges_and_etags_gives_a_folder_a_file_and_archives() {
    const BYTES: [usize; 2] = [36 << 20, 1 << 20];
    let model = sharded(BYTES);
    let Some(site) = Site::with("a_server_without_ranges_and_etags (web)", &model) else { return };
    let plain = |path: &str| site.fetcher.fetch(&format!("{}/{path}", site.web.plain_url()), &[]).unwrap().0;
    assert_needed(&plain("chat/"), BYTES);
    site.web.put("q8.gguf", &noise(7, 3 << 20)).unwrap();
    assert_eq!(files(&plain("q8.gguf")), BTreeMap::from([("q8.gguf".to_owned(), noise(7, 3 << 20))]));
    let scratch = tempfile::tempdir().unwrap();
    for (name, flags) in [("chat.tar", "-cf"), ("chat.tar.gz", "-czf")] {
        let folder = scratch.path().join("published/chat");
        fs::create_dir_all(&folder).unwrap();
        model.iter().for_each(|(name, content)| fs::write(folder.join(name), content).unwrap());
        let packed = scratch.path().join(name);
        let made = Command::new("tar").arg(flags).arg(&packed).arg("-C").arg(scratch.path()).arg("published").status();
        assert!(made.unwrap().success());
        site.web.put(name, &fs::read(packed).unwrap()).unwrap();
        assert_needed(&plain(name), BYTES);
        let cache = site.fetcher.cache();
        // The folder's five by their versions, the .gguf file, the archive's five by their hashes.
        assert_eq!(cache.join("blobs").read_dir().unwrap().count(), 11, "the archive has done what it was for");
    }
}

#[test]
fn a_file_that_is_replaced_in_the_middle_ends_the_fetch_and_the_next_one_brings_the_new_files() {
    let Some(site) = Site::with("a_file_that_is_replaced_in_the_middle (web)", &sharded([36 << 20, 1 << 20])) else {
        return;
    };
    let new = noise(9, 36 << 20);
    let source = site.source("chat/");
    // Until the other file is there, however long a busy machine takes to put it.
    site.web.middle().slow_down(Duration::from_millis(20));
    let mut fetch = site.fetcher.command(&source, &["--connections", "1"]);
    let mut fetch = fetch.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    site.fetcher.wait_for(&mut fetch, 4 << 20);
    // As it should be done: by a rename, so that nobody gets half of each.
    site.web.put("chat/new", &new).unwrap();
    site.web.rename("chat/new", &format!("chat/{}", NEEDED[1])).unwrap();
    site.web.middle().slow_down(Duration::ZERO);
    let ended = fetch.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&ended.stderr);
    assert!(!ended.status.success(), "{said}");
    has(&said, &[NEEDED[1], "was replaced or removed while it was fetched", "under a URL of its own"]);
    let (dir, _) = site.fetcher.fetch(&source, &[]).unwrap();
    assert!(files(&dir)[NEEDED[1]] == new, "the new file, whole");
}

#[test]
fn what_is_pinned_is_found_without_the_server_and_another_version_is_refused() {
    let model = sharded([2 << 20, 1 << 20]);
    let Some(site) = Site::with("what_is_pinned_is_found_without_the_server (web)", &model) else { return };
    let source = site.source("chat/");
    let (dir, _) = site.fetcher.fetch(&source, &[]).unwrap();
    let commit = dir.file_name().unwrap().to_str().unwrap().split_once('@').unwrap().1.to_owned();
    site.web.put("chat/README.md", b"# Another text").unwrap();
    assert_eq!(site.fetcher.fetch(&source, &[]).unwrap().0, dir, "what is no part of the model moves nobody");
    site.web.put("chat/config.json", b"{\"a\": 1}").unwrap();
    site.web.middle().take_asked();
    assert_eq!(site.fetcher.fetch(&source, &["--commit", &commit]).unwrap().0, dir);
    assert!(site.web.middle().take_asked().is_empty(), "nobody was asked");
    let elsewhere = Fetcher::new(&[]).unwrap();
    let said = elsewhere.fetch(&source, &["--commit", &commit]).unwrap_err();
    has(&said, &["is another version", &commit, "name a new URL in spec.model.source"]);

    let pinned = format!("{source}#sha256={}", site.with_sums(&model));
    has(&site.fetcher.fetch(&pinned, &["--connections", "1"]).unwrap_err(), &["config.json: the bytes that came"]);
    site.web.put("chat/config.json", b"{}").unwrap();
    let (listed, _) = site.fetcher.fetch(&pinned, &[]).unwrap();
    site.web.middle().take_asked();
    assert_eq!(site.fetcher.fetch(&pinned, &[]).unwrap().0, listed);
    assert!(site.web.middle().take_asked().is_empty(), "the source says all");
}

#[test]
fn a_login_is_for_the_server_alone_and_not_for_where_it_redirects() {
    let Some(mut site) = Site::with("a_login_is_for_the_server_alone (web)", &[]) else { return };
    let file = noise(3, 36 << 20);
    site.web.put("q8.gguf", &file).unwrap();
    site.web.guard("Bearer secret").unwrap();
    site.fetcher.env.insert("STOKER_SOURCE_TOKEN".to_owned(), "secret\n".to_owned());
    let (dir, _) = site.fetcher.fetch(&site.source("moved/q8.gguf"), &[]).unwrap();
    assert!(files(&dir)["q8.gguf"] == file);
    let heard = site.web.take_heard_elsewhere().unwrap();
    assert!(!heard.is_empty() && heard.iter().all(|(login, _)| login.is_none()), "{heard:?}");

    site.web.guard("Basic bWU6d29yZA==").unwrap();
    site.fetcher.env = [("STOKER_SOURCE_USERNAME", "me"), ("STOKER_SOURCE_PASSWORD", "word")]
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .into();
    site.fetcher.fetch(&site.source("q8.gguf"), &[]).unwrap();
}

#[test]
fn it_is_fetched_over_tls_under_a_certificate_of_ones_own() {
    let Some(mut site) = Site::with("it_is_fetched_over_tls (web)", &sharded([1000, 1000])) else { return };
    let (url, ca) = site.web.secure();
    let said = site.fetcher.fetch(&format!("{url}/chat/"), &[]);
    has(&said.unwrap_err(), &["invalid peer certificate", "trust who issued it: SSL_CERT_FILE"]);
    site.fetcher.env.insert("SSL_CERT_FILE".to_owned(), ca.to_str().unwrap().to_owned());
    assert_needed(&site.fetcher.fetch(&format!("{url}/chat/"), &[]).unwrap().0, [1000, 1000]);
}

#[test]
fn causes_say_what_to_change() {
    let model = sharded([1000, 1000]);
    let Some(mut site) = Site::with("causes_say_what_to_change (web)", &model) else { return };
    for (path, content) in [
        ("half/config.json", &b"{}"[..]),
        ("half/tokenizer.json", b"{}"),
        ("half/model.safetensors.index.json", br#"{"weight_map": {"a": "model-00001-of-00001.safetensors"}}"#),
        ("out/config.json", b"{}"),
        ("out/tokenizer.json", b"{}"),
        ("out/model.safetensors.index.json", br#"{"weight_map": {"a": "../q8.safetensors"}}"#),
        ("mute/q8.gguf", b"GGUF"),
        ("many/SHA256SUMS", b"no line"),
        ("bad.tar.gz", b"no archive"),
        ("q8.safetensors", b"x"),
    ] {
        site.web.put(path, content).unwrap();
    }
    has(
        &site.refused("none/q8.gguf?sig=hidden"),
        &["404 Not Found from http://127.0.0.1", "there is no http://", "/none/q8.gguf;"],
    );
    assert!(!site.refused("none/q8.gguf?sig=hidden").contains("hidden"), "a signature stays where it was");
    has(
        &site.refused("none/"),
        &["there is neither config.json nor SHA256SUMS below", "name a .gguf file or an archive"],
    );
    has(&site.refused("half/"), &["the upload is not complete: model-00001-of-00001.safetensors"]);
    has(&site.refused("out/"), &["the upload is not complete: ../q8.safetensors"]);
    has(&site.refused("mute/q8.gguf"), &["says neither ETag nor Last-Modified of", "add #sha256=HASH"]);
    has(&site.refused("many/"), &["SHA256SUMS of", "\"no line\" is no line of sha256sum"]);
    has(&site.refused("login/q8.gguf"), &["is a web page (text/html) and no file of a model"]);
    has(&site.refused("bad.tar.gz"), &["unpack"]);
    has(
        &site.refused(&format!("chat/#sha256={}", "0a".repeat(32))),
        &["there is no SHA256SUMS below", "or remove #sha256="],
    );
    site.with_sums(&model);
    let other = site.refused(&format!("chat/#sha256={}", "0a".repeat(32)));
    has(&other, &["SHA256SUMS: the bytes that came have the hash", "published is 0a0a"]);
    site.web.put("chat/SHA256SUMS", format!("{}  vocab.json\n", "0a".repeat(32)).as_bytes()).unwrap();
    has(&site.refused("chat/"), &["vocab.json is not there, the upload is not complete"]);

    site.web.guard("Bearer secret").unwrap();
    has(
        &site.refused("q8.gguf"),
        &["401 Unauthorized from", "without a login", "spec.model.tokenSecret", "not for you"],
    );
    let named = ["--token-name", "Secret files"];
    let source = site.source("q8.gguf");
    has(
        &site.fetcher.fetch(&source, &named).unwrap_err(),
        &["Secret files has no token, and no username and password"],
    );
    site.fetcher.env.insert("STOKER_SOURCE_TOKEN".to_owned(), "other".to_owned());
    has(
        &site.fetcher.fetch(&source, &named).unwrap_err(),
        &["403 Forbidden", "the login of Secret files may not read it"],
    );
    site.fetcher.env = BTreeMap::from([("STOKER_SOURCE_USERNAME".to_owned(), "me".to_owned())]);
    has(&site.fetcher.fetch(&source, &named).unwrap_err(), &["(Secret files): there is a username and no password"]);
}
