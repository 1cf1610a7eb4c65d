//! `stoker-agent fetch s3://…` as a process against moto's S3 server on loopback, which checks signatures with botocore's code: the
//! right bytes whatever goes wrong on the way, one version of each file, and causes that say what to change.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead, BufReader, Write},
    net::{SocketAddr, TcpListener},
    path::Path,
    thread::{sleep, spawn},
    time::{Duration, Instant},
};

use ring::digest::{SHA256, digest};
use serde_json::json;
use stoker_tests::{
    bucket::{Bucket, Put},
    fetches::{Fetcher, NEEDED, Noted, assert_needed, files, has, noise, none_twice, sharded},
    hub::{Asked, Fault},
    skip::skip,
};

const SOURCE: &str = "s3://models/team/chat";
/// What an object's name begins with.
const PREFIX: &str = "team/chat/";

/// A bucket, and what fetches from it.
struct Site {
    bucket: Bucket,
    fetcher: Fetcher,
}

impl Site {
    /// With the files of `model`; `None` with the reason printed where there can be no bucket.
    fn with(test: &str, model: &[(&str, Vec<u8>)], how: impl Fn(&str) -> Put) -> Option<Self> {
        let bucket = match Bucket::start() {
            Ok(bucket) => bucket,
            Err(error) => {
                skip(test, &format!("{error:#}"));
                return None;
            }
        };
        for (name, content) in model {
            bucket.put(&format!("{PREFIX}{name}"), content, how(name)).unwrap();
        }
        let mut fetcher = Fetcher::new(&[]).unwrap();
        fetcher.env = BTreeMap::from([("AWS_ENDPOINT_URL".to_owned(), bucket.endpoint())]);
        let site = Self { bucket, fetcher };
        Some(site)
    }

    /// One that gives its files to a reader who signs.
    fn signed(test: &str, model: &[(&str, Vec<u8>)], how: impl Fn(&str) -> Put) -> Option<Self> {
        let mut site = Self::with(test, model, how)?;
        site.fetcher.env.extend(site.bucket.reader().unwrap());
        site.bucket.enforce().unwrap();
        Some(site)
    }

    /// Requests for ranges of objects.
    fn take_ranges(&self) -> Vec<Asked> {
        self.bucket.middle().take_asked().into_iter().filter(|asked| asked.range.is_some()).collect()
    }
}

fn sha256(_: &str) -> Put {
    Put { checksum: Some("SHA256"), ..Put::default() }
}

/// What a file whose server knows its SHA-256 is called in the cache.
fn name(content: &[u8]) -> String {
    let hex: String = digest(&SHA256, content).as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256-{hex}")
}

#[test]
fn the_official_client_and_ours_bring_the_same_files() {
    let bytes = [12 << 20, 1 << 20];
    let how = |name: &str| match name {
        name if name == NEEDED[1] => Put { part_bytes: Some(5 << 20), ..Put::default() },
        "config.json" => Put { checksum: Some("CRC64NVME"), ..Put::default() },
        "tokenizer.json" => Put { checksum: Some("CRC32C"), ..Put::default() },
        _ => Put::default(),
    };
    let test = "the_official_client_and_ours_bring_the_same_files";
    let Some(site) = Site::signed(test, &sharded(bytes), how) else { return };
    let (dir, said) = site.fetcher.fetch(SOURCE, &[]).unwrap();
    assert_needed(&dir, bytes);
    let asked = site.bucket.middle().take_asked();
    let official = site.fetcher.home().join("official");
    fs::create_dir(&official).unwrap();
    for name in NEEDED {
        site.bucket.get(&format!("{PREFIX}{name}"), &official.join(name)).unwrap();
    }
    assert_eq!(files(&dir), files(&official));
    assert!(asked.iter().all(|asked| !asked.what.contains("README") && !asked.what.contains(".bin")), "{asked:?}");
    let signed = |asked: &Asked| asked.authorization.as_ref().is_some_and(|said| said.starts_with("AWS4-HMAC-SHA256 "));
    assert!(asked.iter().all(signed), "{asked:?}");
    let commit = dir.file_name().unwrap().to_str().unwrap().split_once('@').unwrap().1.to_owned();
    assert!(commit.len() == 64 && said.contains(&format!("commit {commit}")), "{said}");
}

#[test]
fn killed_twenty_times_it_brings_the_right_bytes_and_asks_for_none_that_it_has() {
    const BYTES: [usize; 2] = [36 << 20, 20 << 20];
    let (test, model) = ("killed_twenty_times (bucket)", sharded(BYTES));
    let Some(site) = Site::with(test, &model, |name| Put { public: true, ..sha256(name) }) else { return };
    let names: BTreeMap<&str, String> = model.iter().map(|(path, content)| (*path, name(content))).collect();
    let check = |noted: &Noted| {
        let of_path = |what: &str| names.get(what.rsplit('/').next()?).cloned();
        none_twice(noted, &site.take_ranges(), of_path);
    };
    // Slow enough that it is in the middle whenever it is looked at; what decides is how much is there, not the time.
    site.bucket.middle().slow_down(Duration::from_millis(10));
    let total = BYTES.iter().map(|bytes| *bytes as u64).sum();
    site.fetcher.kill_often(SOURCE, total, || _ = site.take_ranges(), check);
    site.bucket.middle().slow_down(Duration::ZERO);
    let noted = site.fetcher.noted();
    let (dir, _) = site.fetcher.fetch(SOURCE, &[]).unwrap();
    check(&noted);
    assert_needed(&dir, BYTES);
    assert!(!site.fetcher.cache().join("partial").read_dir().unwrap().any(|_| true), "nothing is left half made");
}

#[test]
fn cut_refused_and_slowed_down_it_goes_on_where_it_was() {
    const BYTES: [usize; 2] = [40 << 20, 3 << 20];
    let Some(site) = Site::signed("cut_refused_and_slowed_down (bucket)", &sharded(BYTES), sha256) else { return };
    let middle = site.bucket.middle();
    middle.fail("list-type", [Fault::Status(503, None), Fault::Status(429, Some(1)), Fault::Cut(10)]);
    middle.fail("model-00001", [Fault::Status(500, None), Fault::Cut(1 << 20), Fault::Cut(0), Fault::Cut(5 << 20)]);
    middle.fail("index.json", [Fault::Cut(10), Fault::Status(503, None)]);
    let (dir, _) = site.fetcher.fetch(SOURCE, &["--connections", "1"]).unwrap();
    assert_needed(&dir, BYTES);
    assert_eq!(middle.faults_left(), 0);
    let shards = site.take_ranges().into_iter().filter(|asked| asked.what.ends_with(".safetensors"));
    let starts: Vec<u64> = shards.filter_map(|asked| Some(asked.range?.start >> 20)).collect();
    assert_eq!(starts, [0, 0, 1, 1, 6, 32, 0], "in MiB: what came before a cut is kept");
}

#[test]
fn a_wrong_byte_is_found_by_whatever_checksum_the_server_has() {
    const BYTES: [usize; 2] = [2 << 20, 3 << 20];
    let test = "a_wrong_byte_is_found_by_whatever_checksum_the_server_has";
    for checksum in ["SHA256", "CRC64NVME", "CRC32C", "CRC32"] {
        let how = |_: &str| Put { checksum: Some(checksum), ..Put::default() };
        let Some(site) = Site::signed(test, &sharded(BYTES), how) else { return };
        site.bucket.middle().fail("model-00001", [Fault::Wrong(1_234_567)]);
        let (dir, _) = site.fetcher.fetch(SOURCE, &[]).unwrap();
        assert_needed(&dir, BYTES);
        assert_eq!(site.bucket.middle().faults_left(), 0, "{checksum}");
    }
    let Some(site) = Site::signed(test, &sharded(BYTES), sha256) else { return };
    site.bucket.middle().fail("tokenizer.json", std::iter::repeat_n(Fault::Wrong(3), 3));
    let said = site.fetcher.fetch(SOURCE, &[]).unwrap_err();
    has(&said, &["tokenizer.json: the bytes that came have the hash sha256-", "fetched 3 times"]);
    assert!(!site.fetcher.cache().join("models").read_dir().unwrap().any(|_| true), "nothing wrong is called a model");
}

#[test]
fn a_file_that_is_replaced_in_the_middle_ends_the_fetch_and_the_next_one_brings_the_new_files() {
    let test = "a_file_that_is_replaced_in_the_middle_ends_the_fetch";
    let (old, new) = (sharded([36 << 20, 1 << 20]), noise(9, 36 << 20));
    for checksum in [Some("SHA256"), None] {
        let how = |_: &str| Put { checksum, part_bytes: Some(8 << 20).filter(|_| checksum.is_none()), public: true };
        let Some(site) = Site::with(test, &old, how) else { return };
        // Until the other file is there, however long a busy machine takes to put it.
        site.bucket.middle().slow_down(Duration::from_millis(20));
        let link = site.fetcher.home().join("fetched");
        let mut fetch = site.fetcher.command(SOURCE, &["--link", link.to_str().unwrap(), "--connections", "1"]);
        let mut fetch = fetch.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::piped()).spawn().unwrap();
        site.fetcher.wait_for(&mut fetch, 4 << 20);
        site.bucket.put(&format!("{PREFIX}{}", NEEDED[1]), &new, how("")).unwrap();
        site.bucket.middle().slow_down(Duration::ZERO);
        let ended = fetch.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&ended.stderr);
        assert!(!ended.status.success() && !link.exists(), "{said}");
        has(
            &said,
            &[NEEDED[1], "of s3://models/team/chat/ was replaced or removed while it was fetched", "prefix of its own"],
        );
        let (dir, _) = site.fetcher.fetch(SOURCE, &[]).unwrap();
        assert!(files(&dir)[NEEDED[1]] == new, "the new file, whole");
    }
}

/// The arguments of a replica's container, which tells the operator.
fn in_a_pod(dir: &Path) -> Vec<String> {
    let config = json!({"revision": "r1", "model": {"source": "/run/model", "servedNames": ["chat"]}});
    let [config_file, keys, link] = ["config.json", "keys.json", "current"].map(|name| dir.join(name));
    fs::write(&config_file, config.to_string()).unwrap();
    fs::write(&keys, "").unwrap();
    let text = |path: &Path| path.to_str().unwrap().to_owned();
    let flags = ["--config", &text(&config_file), "--operator-keys", &text(&keys), "--link", &text(&link)];
    let address = ["--host", "127.0.0.1", "--admin-port", "0"];
    flags.iter().chain(&address).map(|word| (*word).to_owned()).collect()
}

#[test]
fn what_the_operator_was_told_holds_for_the_container_that_starts_again() {
    let (test, old) =
        ("what_the_operator_was_told_holds_for_the_container_that_starts_again", sharded([36 << 20, 1 << 20]));
    let Some(site) = Site::with(test, &old, |name| Put { public: true, ..sha256(name) }) else { return };
    let told = in_a_pod(site.fetcher.home());
    let told: Vec<&str> = told.iter().map(String::as_str).collect();
    let noted = site.fetcher.home().join("current.commit");
    site.bucket.middle().slow_down(Duration::from_millis(20));
    let mut fetch = site.fetcher.start(SOURCE, &told);
    let deadline = Instant::now() + Duration::from_secs(60);
    while !noted.exists() {
        assert!(fetch.try_wait().unwrap().is_none() && Instant::now() < deadline, "it notes nothing");
        sleep(Duration::from_millis(5));
    }
    fetch.kill().unwrap();
    fetch.wait().unwrap();
    site.bucket.middle().slow_down(Duration::ZERO);
    let commit = fs::read_to_string(&noted).unwrap();
    let public = Put { public: true, ..Put::default() };
    site.bucket.put(&format!("{PREFIX}config.json"), b"{\"a\": 1}", public).unwrap();
    let said = site.fetcher.fetch(SOURCE, &told).unwrap_err();
    has(&said, &["are others", &format!("replicas were told to serve ({commit})"), "put them back"]);
    site.bucket.put(&format!("{PREFIX}config.json"), b"{}", Put { public: true, ..sha256("") }).unwrap();
    let (dir, _) = site.fetcher.fetch(SOURCE, &told).unwrap();
    assert!(dir.to_str().unwrap().ends_with(&commit), "the same bytes have the same ETag");
}

#[test]
fn what_is_pinned_is_found_without_the_bucket_and_other_files_are_refused() {
    let test = "what_is_pinned_is_found_without_the_bucket_and_other_files_are_refused";
    let bytes = [2 << 20, 1 << 20];
    let Some(site) = Site::with(test, &sharded(bytes), |name| Put { public: true, ..sha256(name) }) else { return };
    let link = site.fetcher.home().join("current");
    let linked = ["--link", link.to_str().unwrap()];
    let (dir, _) = site.fetcher.fetch(SOURCE, &linked).unwrap();
    let commit = dir.file_name().unwrap().to_str().unwrap().split_once('@').unwrap().1.to_owned();
    // What is no part of the model moves nobody.
    site.bucket.put(&format!("{PREFIX}README.md"), b"# Another text", Put { public: true, ..Put::default() }).unwrap();
    assert_eq!(site.fetcher.fetch(SOURCE, &[]).unwrap().0, dir);
    site.bucket.put(&format!("{PREFIX}config.json"), b"{\"a\": 1}", Put { public: true, ..Put::default() }).unwrap();
    site.bucket.middle().take_asked();
    assert_eq!(site.fetcher.fetch(SOURCE, &linked).unwrap().0, dir);
    assert_eq!(site.fetcher.fetch(SOURCE, &["--commit", &commit]).unwrap().0, dir);
    assert!(site.bucket.middle().take_asked().is_empty(), "nobody was asked");
    // A node that has it not cannot get it any more, and serves nothing else in its place.
    let mut elsewhere = Fetcher::new(&[]).unwrap();
    elsewhere.env = site.fetcher.env.clone();
    let said = elsewhere.fetch(SOURCE, &["--commit", &commit]).unwrap_err();
    has(&said, &["the files at s3://models/team/chat/ are others", &commit, "name a new prefix in spec.model.source"]);
    let (moved, _) = site.fetcher.fetch(SOURCE, &[]).unwrap();
    assert!(moved != dir && files(&moved)["config.json"] == b"{\"a\": 1}");
    let shared = |dir: &Path| fs::canonicalize(dir.join(NEEDED[1])).unwrap();
    assert_eq!(shared(&moved), shared(&dir), "what is the same is there once");
}

/// Hands out keys to who has the token, as a server of a node does for a role of EKS Pod Identity.
fn hand_out(keys: &BTreeMap<String, String>, token: &'static str) -> SocketAddr {
    let body = json!({
        "AccessKeyId": keys["AWS_ACCESS_KEY_ID"], "SecretAccessKey": keys["AWS_SECRET_ACCESS_KEY"],
        "Token": keys["AWS_SESSION_TOKEN"], "Expiration": "2099-01-01T00:00:00Z",
    });
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    spawn(move || {
        for mut connection in listener.incoming().flatten() {
            let lines = BufReader::new(connection.try_clone().unwrap()).lines().map_while(Result::ok);
            let head: Vec<String> = lines.take_while(|line| !line.is_empty()).collect();
            let knows = head.iter().any(|line| line.eq_ignore_ascii_case(&format!("authorization: {token}")));
            let (status, body) = if knows { ("200 OK", body.to_string()) } else { ("403 Forbidden", String::new()) };
            let head = format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", body.len());
            connection.write_all((head + &body).as_bytes()).unwrap();
        }
    });
    address
}

#[test]
fn a_role_may_read_by_its_variables_or_by_what_the_node_hands_out() {
    let test = "a_role_may_read_by_its_variables_or_by_what_the_node_hands_out";
    let Some(mut site) = Site::with(test, &sharded([1000, 1000]), |_| Put::default()) else { return };
    let keys = site.bucket.role().unwrap();
    site.bucket.enforce().unwrap();
    let endpoint = site.fetcher.env.clone();
    site.fetcher.env.extend(keys.clone());
    site.fetcher.fetch(SOURCE, &[]).unwrap();
    site.fetcher.env.insert("AWS_SESSION_TOKEN".to_owned(), "another".to_owned());
    has(
        &site.fetcher.fetch(SOURCE, &[]).unwrap_err(),
        &["400 Bad Request", "AWS_SESSION_TOKEN is no longer valid: put a fresh one"],
    );

    let uri = format!("http://{}/v1/credentials", hand_out(&keys, "of-this-pod"));
    let token = site.fetcher.home().join("token");
    fs::write(&token, "of-this-pod\n").unwrap();
    site.fetcher.env = endpoint;
    site.fetcher.env.insert("AWS_CONTAINER_CREDENTIALS_FULL_URI".to_owned(), uri);
    site.fetcher.env.insert("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE".to_owned(), token.to_str().unwrap().to_owned());
    site.bucket.middle().take_asked();
    site.fetcher.fetch(SOURCE, &[]).unwrap();
    let asked = site.bucket.middle().take_asked();
    assert!(!asked.is_empty() && asked.iter().all(|asked| asked.authorization.is_some()), "{asked:?}");
    fs::write(&token, "of-another").unwrap();
    has(&site.fetcher.fetch(SOURCE, &[]).unwrap_err(), &["credentials: "]);
}

#[test]
fn a_gguf_file_is_named_and_comes_alone() {
    let model = [("q4.gguf", noise(1, 1000)), ("q8.gguf", noise(2, 2000))];
    let how = |_: &str| Put { public: true, ..Put::default() };
    let Some(site) = Site::with("a_gguf_file_is_named_and_comes_alone", &model, how) else { return };
    let (dir, _) = site.fetcher.fetch(&format!("{SOURCE}/q8.gguf"), &[]).unwrap();
    assert_eq!(files(&dir), BTreeMap::from([("q8.gguf".to_owned(), noise(2, 2000))]));
    let said = site.fetcher.fetch(SOURCE, &[]).unwrap_err();
    has(&said, &["there are several .gguf files", "q4.gguf, q8.gguf", "s3://BUCKET/PREFIX/FILE.gguf"]);
}

#[test]
fn causes_say_what_to_change() {
    let model = sharded([1000, 1000]);
    let Some(mut site) = Site::with("causes_say_what_to_change (bucket)", &model, |_| Put::default()) else { return };
    let put =
        |key: &str, content: &[u8]| site.bucket.put(key, content, Put { public: true, ..Put::default() }).unwrap();
    put("half/config.json", b"{}");
    put("half/tokenizer.json", b"{}");
    put("half/model.safetensors.index.json", br#"{"weight_map": {"a": "model-00001-of-00001.safetensors"}}"#);
    put("mute/config.json", b"{}");
    put("mute/model.safetensors", b"x");
    let said = |site: &Site, source: &str, more: &[&str]| site.fetcher.fetch(source, more).unwrap_err();
    has(
        &said(&site, SOURCE, &[]),
        &["403 Forbidden from http://127.0.0.1", "without credentials", "spec.model.tokenSecret"],
    );
    let named = ["--token-name", "Secret s3"];
    has(
        &said(&site, SOURCE, &named),
        &["Secret s3 has no AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY: put them into it"],
    );
    has(&said(&site, "s3://none/x", &[]), &["404 from", "there is no bucket \"none\"", "spec.model.source"]);
    has(&said(&site, "s3://models/nothing", &[]), &["there is no file of a model at s3://models/nothing/"]);
    has(&said(&site, "s3://models/half", &[]), &["the upload is not complete: model-00001-of-00001.safetensors"]);
    has(&said(&site, "s3://models/mute", &[]), &["there is no tokenizer.json"]);
    has(&said(&site, "s3://models/mute", &["--commit", "main"]), &["a commit has 40 or 64"]);
    has(&said(&site, "s3://models//x", &[]), &["is not s3://BUCKET/PREFIX[/FILE.gguf]"]);

    let reader = site.bucket.reader().unwrap();
    let nobody = site.bucket.user("nobody", &[]).unwrap();
    let lists = site.bucket.user("lists", &["s3:ListBucket"]).unwrap();
    site.bucket.enforce().unwrap();
    let endpoint = site.fetcher.env.clone();
    let mut as_user = |keys: &BTreeMap<String, String>, more: &[(&str, &str)]| {
        site.fetcher.env = endpoint.iter().chain(keys).map(|(name, value)| (name.clone(), value.clone())).collect();
        site.fetcher.env.extend(more.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())));
        site.fetcher.fetch(SOURCE, &["--token-name", "Secret s3"])
    };
    let may = ["the credentials of Secret s3 may not read it", "s3:ListBucket on the bucket and s3:GetObject"];
    has(&as_user(&nobody, &[]).unwrap_err(), &[&["403 Forbidden", "Access Denied"][..], &may].concat());
    has(&as_user(&lists, &[]).unwrap_err(), &may);
    has(
        &as_user(&reader, &[("AWS_SECRET_ACCESS_KEY", "wrong")]).unwrap_err(),
        &["AWS_SECRET_ACCESS_KEY of Secret s3 is not that of"],
    );
    has(
        &as_user(&reader, &[("AWS_ACCESS_KEY_ID", "nobody-knows")]).unwrap_err(),
        &["AWS_ACCESS_KEY_ID of Secret s3 is not known there"],
    );
    has(
        &as_user(&reader, &[("AWS_SECRET_ACCESS_KEY", "")]).unwrap_err(),
        &["(Secret s3): AWS_SECRET_ACCESS_KEY is missing"],
    );
    has(&as_user(&reader, &[("AWS_ENDPOINT_URL", "s3.example")]).unwrap_err(), &["AWS_ENDPOINT_URL \"s3.example\""]);
    // As it comes out of a file that ends with a line break.
    let broken = format!("{}\n", reader["AWS_SECRET_ACCESS_KEY"]);
    as_user(&reader, &[("AWS_SECRET_ACCESS_KEY", &broken)]).unwrap();
}
