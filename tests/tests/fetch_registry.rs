//! `stoker-agent fetch oci://…` as a process against the CNCF's registry on loopback: images that ORAS pushed and those of other
//! kinds, the right bytes whatever goes wrong on the way, logins, and causes that say what to change.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use stoker_tests::{
    fetches::{Fetcher, NEEDED, Noted, assert_needed, files, has, noise, none_twice, sharded},
    hub::{Asked, Fault},
    registry::{LOGIN, Layer, Registry},
    skip::skip,
};

const IMAGE: &str = "team/chat:v1";
const TITLE: &str = "org.opencontainers.image.title";

/// A registry, and what fetches from it.
struct Site {
    registry: Registry,
    fetcher: Fetcher,
}

impl Site {
    /// An empty one; `None` with the reason printed where there can be no registry.
    fn empty(test: &str) -> Option<Self> {
        match Registry::start() {
            Ok(registry) => Some(Self { registry, fetcher: Fetcher::new(&[]).unwrap() }),
            Err(error) => {
                skip(test, &format!("{error:#}"));
                None
            }
        }
    }

    /// With [`sharded`] as an image whose layers are its files.
    fn with(test: &str, bytes: [usize; 2]) -> Option<Self> {
        let site = Self::empty(test)?;
        site.push(IMAGE, bytes);
        Some(site)
    }

    fn push(&self, image: &str, bytes: [usize; 2]) {
        let dir = self.folder(&sharded(bytes));
        let names: Vec<&str> = sharded(bytes).iter().map(|(name, _)| *name).collect();
        self.registry.push(image, &dir, &names).unwrap();
    }

    /// A folder with these files.
    fn folder(&self, model: &[(&str, Vec<u8>)]) -> PathBuf {
        let dir = self.fetcher.home().join("pushed");
        fs::create_dir_all(&dir).unwrap();
        model.iter().for_each(|(name, content)| fs::write(dir.join(name), content).unwrap());
        dir
    }

    fn source(&self, image: &str) -> String {
        format!("oci://{}/{image}", self.registry.address())
    }

    fn take_blobs(&self) -> Vec<Asked> {
        let asked = self.registry.middle().take_asked();
        asked.into_iter().filter(|asked| asked.range.is_some() && asked.what.contains("/blobs/")).collect()
    }
}

/// What a blob is called in the cache.
fn name(what: &str) -> Option<String> {
    Some(what.split_once("/blobs/sha256:")?.1.to_owned()).map(|hash| format!("sha256-{hash}"))
}

fn tar_of(files: &[(&str, Vec<u8>)]) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    for (path, content) in files {
        let mut header = tar::Header::new_gnu();
        header.set_size(content.len() as u64);
        builder.append_data(&mut header, path, &content[..]).unwrap();
    }
    builder.into_inner().unwrap()
}

fn commit_of(dir: &Path) -> String {
    dir.file_name().unwrap().to_str().unwrap().split_once('@').unwrap().1.to_owned()
}

#[test]
fn the_official_client_and_ours_bring_the_same_files() {
    let bytes = [3 << 20, 2 << 20];
    let test = "the_official_client_and_ours_bring_the_same_files (registry)";
    let Some(site) = Site::with(test, bytes) else { return };
    let (dir, said) = site.fetcher.fetch(&site.source(IMAGE), &[]).unwrap();
    assert_needed(&dir, bytes);
    let asked = site.registry.middle().take_asked();
    let official = site.fetcher.home().join("official");
    site.registry.pull(IMAGE, &official).unwrap();
    let pulled = files(&official);
    assert!(NEEDED.iter().all(|name| files(&dir)[*name] == pulled[*name]), "other bytes");
    // The README and the same weights in another format are layers that nobody asked for.
    assert_eq!(asked.iter().filter(|asked| asked.what.contains("/blobs/")).count(), NEEDED.len() + 1, "{asked:?}");
    let commit = commit_of(&dir);
    assert!(commit.len() == 64 && said.contains(&format!("commit {commit}")), "{said}");
    // By its digest it is found without the registry.
    let by_digest = site.source(&format!("team/chat@sha256:{commit}"));
    site.registry.middle().take_asked();
    assert_eq!(site.fetcher.fetch(&by_digest, &[]).unwrap().0, dir);
    assert!(site.registry.middle().take_asked().is_empty());
}

#[test]
fn killed_twenty_times_it_brings_the_right_bytes_and_asks_for_none_that_it_has() {
    const BYTES: [usize; 2] = [36 << 20, 20 << 20];
    let Some(site) = Site::with("killed_twenty_times (registry)", BYTES) else { return };
    let source = site.source(IMAGE);
    let check = |noted: &Noted| none_twice(noted, &site.take_blobs(), name);
    // Slow enough that it is in the middle whenever it is looked at; what decides is how much is there, not the time.
    site.registry.middle().slow_down(Duration::from_millis(10));
    let total = BYTES.iter().map(|bytes| *bytes as u64).sum();
    site.fetcher.kill_often(&source, total, || _ = site.take_blobs(), check);
    site.registry.middle().slow_down(Duration::ZERO);
    let noted = site.fetcher.noted();
    let (dir, _) = site.fetcher.fetch(&source, &[]).unwrap();
    check(&noted);
    assert_needed(&dir, BYTES);
    assert!(!site.fetcher.cache().join("partial").read_dir().unwrap().any(|_| true), "nothing is left half made");
}

#[test]
fn cut_refused_wrong_and_without_ranges_it_brings_the_right_bytes() {
    const BYTES: [usize; 2] = [40 << 20, 3 << 20];
    let Some(site) = Site::with("cut_refused_wrong_and_without_ranges (registry)", BYTES) else { return };
    let middle = site.registry.middle();
    middle.fail("/manifests/", [Fault::Status(503, None), Fault::Status(429, Some(1)), Fault::Cut(10)]);
    let of_blobs = [Fault::Cut(100), Fault::Status(500, None), Fault::Cut(1 << 20), Fault::Wrong(3), Fault::NoRange];
    middle.fail("/blobs/", of_blobs.into_iter().chain([Fault::Cut(5 << 20), Fault::Wrong(1_234_567), Fault::NoRange]));
    let (dir, _) = site.fetcher.fetch(&site.source(IMAGE), &["--connections", "2"]).unwrap();
    assert_needed(&dir, BYTES);
    assert_eq!(middle.faults_left(), 0);

    middle.fail("/manifests/", std::iter::repeat_n(Fault::Wrong(20), 1));
    let pinned = site.source(&format!("team/chat@sha256:{}", commit_of(&dir)));
    let other = Fetcher::new(&[]).unwrap();
    let said = other.fetch(&pinned, &[]).unwrap_err();
    has(&said, &["the bytes that came have the hash", "published is"]);
}

#[test]
fn a_moved_tag_moves_nobody() {
    let [old, new] = [[2 << 20, 1 << 20], [1 << 20, 1 << 20]];
    let Some(site) = Site::with("a_moved_tag_moves_nobody", old) else { return };
    let (source, link) = (site.source(IMAGE), site.fetcher.home().join("current"));
    let linked = ["--link", link.to_str().unwrap()];
    let (dir, _) = site.fetcher.fetch(&source, &linked).unwrap();
    site.push(IMAGE, new);
    site.registry.middle().take_asked();
    assert_eq!(site.fetcher.fetch(&source, &linked).unwrap().0, dir);
    assert!(site.registry.middle().take_asked().is_empty(), "nobody was asked");
    // Another node gets the old image by what the first one said.
    let elsewhere = Fetcher::new(&[]).unwrap();
    let (same, _) = elsewhere.fetch(&source, &["--commit", &commit_of(&dir)]).unwrap();
    assert_needed(&same, old);
    let (moved, _) = site.fetcher.fetch(&source, &[]).unwrap();
    assert_needed(&moved, new);
}

#[test]
fn folders_and_images_of_other_kinds_are_models_too() {
    let bytes = [2 << 20, 1 << 20];
    let Some(site) = Site::empty("folders_and_images_of_other_kinds_are_models_too") else { return };
    let fetched = |image: &str| site.fetcher.fetch(&site.source(image), &[]).unwrap().0;
    let dir = site.folder(&sharded(bytes));
    site.registry.push("kinds/folder:v1", dir.parent().unwrap(), &["pushed"]).unwrap();
    assert_needed(&fetched("kinds/folder:v1"), bytes);

    let below = |folder: &str| {
        let named = sharded(bytes).into_iter().map(|(name, content)| (format!("{folder}{name}"), content));
        let named: Vec<(String, Vec<u8>)> = named.collect();
        tar_of(&named.iter().map(|(name, content)| (name.as_str(), content.clone())).collect::<Vec<_>>())
    };
    let layer = |content, media_type, annotations| Layer { content, media_type, annotations };
    let base = tar_of(&[("etc/config.json", b"no".to_vec()), ("models/chat/config.json", b"old".to_vec())]);
    let top = below("models/chat/");
    let of_image = "application/vnd.oci.image.layer.v1.tar";
    site.registry.push_layers("kinds/image:v1", &[layer(&base, of_image, &[]), layer(&top, of_image, &[])]).unwrap();
    assert_needed(&fetched("kinds/image:v1"), bytes);

    let kit = below("");
    site.registry
        .push_layers("kinds/kit:v1", &[layer(&kit, "application/vnd.kitops.modelkit.model.v1.tar", &[])])
        .unwrap();
    assert_needed(&fetched("kinds/kit:v1"), bytes);

    let gguf = noise(5, 1 << 20);
    site.registry.push_layers("kinds/runner:v1", &[layer(&gguf, "application/vnd.docker.ai.gguf.v3", &[])]).unwrap();
    assert_eq!(files(&fetched("kinds/runner:v1")), BTreeMap::from([("model.gguf".to_owned(), gguf)]));

    // What layers were needed for is here; they are not.
    let blobs = fs::read_dir(site.fetcher.cache().join("blobs")).unwrap().flatten();
    let kept: u64 = blobs.map(|blob| blob.metadata().unwrap().len()).sum();
    let wanted: u64 = files(&fetched("kinds/kit:v1")).values().map(|content| content.len() as u64).sum();
    assert_eq!(kept, wanted + (1 << 20), "each file once");
}

#[test]
fn a_folder_of_an_image_that_the_source_names_is_the_model_wherever_it_is() {
    let bytes = [2 << 20, 1 << 20];
    let Some(site) = Site::empty("a_folder_of_an_image_that_the_source_names_is_the_model_wherever_it_is") else {
        return;
    };
    let below = |folder: &str| -> Vec<(String, Vec<u8>)> {
        sharded(bytes).into_iter().map(|(name, content)| (format!("{folder}/{name}"), content)).collect()
    };
    let both = [below("opt/chat"), below("opt/draft")].concat();
    let files: Vec<(&str, Vec<u8>)> = both.iter().map(|(name, content)| (&**name, content.clone())).collect();
    let tar = tar_of(&files);
    let layer = Layer { content: &tar, media_type: "application/vnd.oci.image.layer.v1.tar", annotations: &[] };
    site.registry.push_layers("folders/two:v1", &[layer]).unwrap();
    let links = tempfile::tempdir().unwrap();
    let fetched = |folder: &str| {
        let (source, link) =
            (site.source(&format!("folders/two:v1#path={folder}")), links.path().join("current").join(folder));
        let fetched = site.fetcher.fetch(&source, &["--link", link.to_str().unwrap()]);
        fetched.map(|(dir, _)| (fs::read_link(&link).unwrap(), dir))
    };
    for folder in ["opt/chat", "opt/draft"] {
        let (link, dir) = fetched(folder).unwrap();
        assert_needed(&dir, bytes);
        assert_eq!(link, dir, "folders of the link are made");
    }
    assert_ne!(fetched("opt/chat").unwrap().1, fetched("opt/draft").unwrap().1, "two models of one image");
    has(
        &fetched("models").unwrap_err(),
        &["its folder /models is not there", "folders that hold one: /opt/chat, /opt/draft"],
    );
    // Who names none has those that are at the root or below /models.
    has(&site.fetcher.fetch(&site.source("folders/two:v1"), &[]).unwrap_err(), &["no config.json"]);
}

#[test]
fn a_killed_fetch_of_packed_layers_goes_on_where_it_was() {
    let bytes = [36 << 20, 1 << 20];
    let Some(site) = Site::empty("a_killed_fetch_of_packed_layers_goes_on_where_it_was") else { return };
    let (dir, source) = (site.folder(&sharded(bytes)), site.source("packed/chat:v1"));
    site.registry.push("packed/chat:v1", dir.parent().unwrap(), &["pushed"]).unwrap();
    site.registry.middle().slow_down(Duration::from_millis(15));
    site.take_blobs();
    let mut fetch = site.fetcher.start(&source, &[]);
    site.fetcher.wait_for(&mut fetch, 10 << 20);
    fetch.kill().unwrap();
    fetch.wait().unwrap();
    site.registry.middle().slow_down(Duration::ZERO);
    let noted = site.fetcher.noted();
    site.take_blobs();
    let (dir, _) = site.fetcher.fetch(&source, &[]).unwrap();
    none_twice(&noted, &site.take_blobs(), name);
    assert_needed(&dir, bytes);
}

#[test]
fn a_login_is_told_to_who_asks_for_it() {
    let bytes = [1000, 1000];
    let Some(mut site) = Site::with("a_login_is_told_to_who_asks_for_it", bytes) else { return };
    site.push("public/chat:v1", bytes);
    let guards = [site.registry.with_password().unwrap(), site.registry.with_tokens().unwrap()];
    let login = |address: &str, password: &str| {
        serde_json::json!({"auths": {address: {"username": LOGIN[0], "password": password}}}).to_string()
    };
    let mut as_user = |address: &str, image: &str, config: &str| {
        site.fetcher.env = BTreeMap::from([("DOCKER_AUTH_CONFIG".to_owned(), config.to_owned())]);
        let _fresh = fs::remove_dir_all(site.fetcher.cache());
        site.fetcher
            .fetch(&format!("oci://{address}/{image}"), &["--token-name", "key .dockerconfigjson of Secret pull"])
    };
    for guard in &guards {
        let address = guard.address();
        let (dir, _) = as_user(address, IMAGE, &login(address, LOGIN[1])).unwrap();
        assert_needed(&dir, bytes);
        let wrong = as_user(address, IMAGE, &login(address, "wrong")).unwrap_err();
        let whose = format!("the login to {address} (key .dockerconfigjson of Secret pull) is not valid there");
        has(&wrong, &["401 Unauthorized from 127.0.0.1", &whose]);
        let other = as_user(address, IMAGE, &login("registry.example", LOGIN[1])).unwrap_err();
        has(&other, &["401 Unauthorized", &format!("has no entry for {address} (it has: registry.example): add one")]);
        let nobody = as_user(address, IMAGE, "").unwrap_err();
        has(&nobody, &["401 Unauthorized", "kubernetes.io/dockerconfigjson (spec.model.tokenSecret)"]);
        let broken = as_user(address, IMAGE, "{").unwrap_err();
        has(&broken, &["the registry login (key .dockerconfigjson of Secret pull) is no config.json of Docker"]);
    }
    let (dir, _) = as_user(guards[1].address(), "public/chat:v1", "").unwrap();
    assert_needed(&dir, bytes);
}

#[test]
fn causes_say_what_to_change() {
    let Some(site) = Site::with("causes_say_what_to_change (registry)", [1000, 1000]) else { return };
    let layer = |content: &'static [u8], media_type, annotations| Layer { content, media_type, annotations };
    let push = |image: &str, layers: &[Layer<'_>]| site.registry.push_layers(image, layers).unwrap();
    let plain = "application/octet-stream";
    push("bad/nothing:v1", &[layer(b"x", plain, &[])]);
    push(
        "bad/mute:v1",
        &[layer(b"{}", plain, &[(TITLE, "config.json")]), layer(b"w", plain, &[(TITLE, "model.safetensors")])],
    );
    let index = br#"{"weight_map": {"a": "model-00001-of-00001.safetensors"}}"#;
    let half = [("config.json", &b"{}"[..]), ("tokenizer.json", b"{}"), ("model.safetensors.index.json", index)];
    let half = half.map(|(name, content)| (content, [(TITLE, name)]));
    push(
        "bad/half:v1",
        &half.each_ref().map(|(content, said)| Layer { content, media_type: plain, annotations: said }),
    );
    push("bad/zstd:v1", &[layer(b"x", "application/vnd.oci.image.layer.v1.tar+zstd", &[])]);
    push("bad/tar:v1", &[layer(b"no tar at all", "application/vnd.oci.image.layer.v1.tar", &[])]);
    let empty: &'static [u8] = Box::leak(tar_of(&[("opt/config.json", b"{}".to_vec())]).into_boxed_slice());
    push("bad/elsewhere:v1", &[layer(empty, "application/vnd.oci.image.layer.v1.tar", &[])]);
    let said = |image: &str| site.fetcher.fetch(&site.source(image), &[]).unwrap_err();
    has(
        &said("team/chat:v9"),
        &["404 from 127.0.0.1", "there is no oci://127.0.0.1", "/team/chat:v9: correct its repository, tag or digest"],
    );
    has(&said("none/chat:v1"), &["404 from 127.0.0.1", "there is no oci://127.0.0.1"]);
    has(&said("bad/nothing:v1"), &["holds no files of a model", TITLE, "its layers: application/octet-stream"]);
    has(&said("bad/mute:v1"), &["there is no tokenizer.json"]);
    has(&said("bad/half:v1"), &["the upload is not complete: model-00001-of-00001.safetensors"]);
    has(&said("bad/zstd:v1"), &["has a layer of type application/vnd.oci.image.layer.v1.tar+zstd", "pack it as tar"]);
    has(&said("bad/tar:v1"), &["unpack "]);
    has(&said("bad/elsewhere:v1"), &["there is no config.json and no .gguf file"]);
    has(&site.fetcher.fetch("oci://127.0.0.1:1", &[]).unwrap_err(), &["is not oci://REGISTRY/REPOSITORY"]);
    has(
        &site.fetcher.fetch(&site.source(IMAGE), &["--cache-limit", "100"]).unwrap_err(),
        &["of at most 100", "raise its size limit"],
    );
}
