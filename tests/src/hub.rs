//! A model hub on loopback, and beside it, on a port of its own, the store that it redirects to for large files: the HTTP
//! API that `huggingface_hub` and `stoker-agent fetch` speak, with faults where a test wants them.
//!
//! Held to the official client by `tests/tests/fetch.rs`. It remembers every request with what was sent of it.

use std::{
    borrow::Cow,
    collections::VecDeque,
    fs,
    io::{self, BufRead, BufReader, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    ops::Range,
    path::Path,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{sleep, spawn},
    time::Duration,
};

use anyhow::{Context, Result};
use ring::digest::{SHA1_FOR_LEGACY_USE_ONLY, SHA256, digest};
use serde_json::{Value, json};

/// Files from this size on, and all weights, are in the store.
const LARGE_BYTES: usize = 1 << 20;
/// Written at once: a fault can be put between two.
const PIECE_BYTES: usize = 64 << 10;

/// A model with its history.
#[derive(Clone, Debug)]
pub struct Repository {
    /// `ORG/MODEL`.
    pub id: String,
    /// Names of revisions and the commits they are.
    pub revisions: Vec<(String, Commit)>,
    /// What a reader needs.
    pub access: Access,
}

/// Who may read a repository.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Access {
    /// Everybody.
    Public,
    /// Who has this token.
    Token(String),
    /// Who has this token gets 403: its account did not accept the terms.
    Gated(String),
}

/// One commit.
#[derive(Clone, Debug)]
pub struct Commit {
    sha: String,
    files: Vec<RepositoryFile>,
}

#[derive(Clone, Debug)]
struct RepositoryFile {
    path: String,
    content: Arc<Vec<u8>>,
    git: String,
    sha256: String,
    large: bool,
}

/// What goes wrong with one answer.
#[derive(Clone, Debug, PartialEq)]
pub enum Fault {
    /// This status instead, with a `Retry-After`.
    Status(u16, Option<u32>),
    /// The connection is cut after this many bytes of the body.
    Cut(usize),
    /// The byte at this place of the file is another one.
    Wrong(usize),
    /// The whole file, whatever range was asked for.
    NoRange,
}

/// A request that came.
#[derive(Clone, Debug)]
pub struct Asked {
    /// True when it came to the store.
    pub store: bool,
    /// Method and path.
    pub what: String,
    /// What was asked for of a file.
    pub range: Option<Range<u64>>,
    /// The header, if there was one.
    pub authorization: Option<String>,
}

/// See the module. It stops answering when it is dropped.
pub struct Hub {
    shared: Arc<Shared>,
    addresses: [SocketAddr; 2],
}

#[derive(Default)]
struct Shared {
    repositories: Mutex<Vec<Repository>>,
    /// Part of a path and what goes wrong there next, once each.
    faults: Mutex<VecDeque<(String, Fault)>>,
    /// What models are called now, by former names.
    renamed: Mutex<Vec<(String, String)>>,
    asked: Mutex<Vec<Asked>>,
    /// Microseconds between two pieces of a body.
    pause_us: AtomicU64,
    store: Mutex<Option<SocketAddr>>,
    ended: AtomicBool,
}

impl Commit {
    /// Of files in memory; its name is a hash of them.
    pub fn of(files: Vec<(&str, Vec<u8>)>) -> Self {
        let files: Vec<RepositoryFile> =
            files.into_iter().map(|(path, content)| RepositoryFile::new(path, content)).collect();
        let names: String = files.iter().map(|file| format!("{} {}\n", file.path, file.git)).collect();
        Self { sha: hex(digest(&SHA1_FOR_LEGACY_USE_ONLY, names.as_bytes()).as_ref()), files }
    }

    /// Of the files of a directory, without those in folders.
    pub fn of_directory(dir: &Path) -> Result<Self> {
        let mut files = Vec::new();
        for entry in fs::read_dir(dir).with_context(|| format!("list {}", dir.display()))? {
            let path = entry?.path();
            if path.is_file() {
                let name = path.file_name().context("a file has a name")?.to_string_lossy().into_owned();
                files.push((name, fs::read(&path)?));
            }
        }
        files.sort();
        Ok(Self::of(files.iter().map(|(name, content)| (name.as_str(), content.clone())).collect()))
    }

    /// Its name.
    pub fn sha(&self) -> &str {
        &self.sha
    }
}

impl RepositoryFile {
    fn new(path: &str, content: Vec<u8>) -> Self {
        let git = [format!("blob {}\0", content.len()).as_bytes(), &content].concat();
        Self {
            path: path.to_owned(),
            git: hex(digest(&SHA1_FOR_LEGACY_USE_ONLY, &git).as_ref()),
            sha256: hex(digest(&SHA256, &content).as_ref()),
            large: content.len() >= LARGE_BYTES || path.ends_with(".safetensors"),
            content: Arc::new(content),
        }
    }

    fn etag(&self) -> &str {
        if self.large { &self.sha256 } else { &self.git }
    }
}

impl Repository {
    /// One that everybody may read, with one commit.
    pub fn public(id: &str, commit: Commit) -> Self {
        Self { id: id.to_owned(), revisions: vec![("main".to_owned(), commit)], access: Access::Public }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

impl Hub {
    /// Starts to answer.
    pub fn start(repositories: Vec<Repository>) -> Result<Self> {
        let shared = Arc::new(Shared { repositories: Mutex::new(repositories), ..Shared::default() });
        let listeners = [TcpListener::bind("127.0.0.1:0")?, TcpListener::bind("127.0.0.1:0")?];
        let addresses = [listeners[0].local_addr()?, listeners[1].local_addr()?];
        *lock(&shared.store) = Some(addresses[1]);
        for (listener, is_store) in listeners.into_iter().zip([false, true]) {
            let shared = shared.clone();
            spawn(move || accept(&listener, &shared, is_store));
        }
        Ok(Self { shared, addresses })
    }

    /// Its URL.
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.addresses[0])
    }

    /// The next answers to paths that contain `part` go wrong, one for each fault.
    pub fn fail(&self, part: &str, faults: impl IntoIterator<Item = Fault>) {
        lock(&self.shared.faults).extend(faults.into_iter().map(|fault| (part.to_owned(), fault)));
    }

    /// Faults that nobody met.
    pub fn faults_left(&self) -> usize {
        lock(&self.shared.faults).len()
    }

    /// A pause between every two pieces of 64 KiB.
    pub fn slow_down(&self, pause: Duration) {
        self.shared.pause_us.store(u64::try_from(pause.as_micros()).unwrap_or(u64::MAX), Ordering::SeqCst);
    }

    /// Other models from now on.
    pub fn set(&self, repositories: Vec<Repository>) {
        *lock(&self.shared.repositories) = repositories;
    }

    /// A model's former name leads to the one that it has, as on the hub: everything asked by it is redirected.
    pub fn rename(&self, former: &str, now: &str) {
        lock(&self.shared.renamed).push((former.to_owned(), now.to_owned()));
    }

    /// Requests that came since this was last called.
    pub fn take_asked(&self) -> Vec<Asked> {
        std::mem::take(&mut lock(&self.shared.asked))
    }
}

impl Drop for Hub {
    fn drop(&mut self) {
        self.shared.ended.store(true, Ordering::SeqCst);
        // Wakes those that wait for a connection.
        self.addresses.iter().for_each(|address| _ = TcpStream::connect(address));
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn accept(listener: &TcpListener, shared: &Arc<Shared>, is_store: bool) {
    for connection in listener.incoming() {
        if shared.ended.load(Ordering::SeqCst) {
            return;
        }
        let shared = shared.clone();
        // A client that goes away ends its connection, nothing else.
        if let Ok(connection) = connection {
            spawn(move || _ = serve(connection, &shared, is_store));
        }
    }
}

/// A request as it was read.
struct Request {
    method: String,
    path: String,
    range: Option<Range<u64>>,
    authorization: Option<String>,
}

/// An answer without a body that is streamed.
struct Answer {
    status: u16,
    headers: Vec<(&'static str, String)>,
    body: Vec<u8>,
}

fn serve(connection: TcpStream, shared: &Shared, is_store: bool) -> io::Result<()> {
    connection.set_nodelay(true)?;
    let mut reader = BufReader::new(connection.try_clone()?);
    let mut writer = connection;
    while let Some(request) = read_request(&mut reader)? {
        if shared.ended.load(Ordering::SeqCst) {
            return Ok(());
        }
        let Request { method, path, range, authorization } = &request;
        let what = format!("{method} {path}");
        let asked = Asked { store: is_store, what, range: range.clone(), authorization: authorization.clone() };
        lock(&shared.asked).push(asked);
        if let Some(location) = shared.renamed(path) {
            let headers = vec![("Location", location)];
            write_answer(&mut writer, &request, Answer { status: 307, headers, body: Vec::new() })?;
            continue;
        }
        let fault = shared.fault(path);
        match (fault, shared.file(&request, is_store)) {
            (Some(Fault::Status(status, retry_after)), _) => {
                let headers = retry_after.map(|seconds| ("Retry-After", seconds.to_string())).into_iter().collect();
                write_answer(&mut writer, &request, Answer { status, headers, body: b"not now".to_vec() })?;
            }
            (fault, Ok(file)) => {
                if write_file(&mut writer, &request, &file, fault, shared)? == Connection::Cut {
                    return Ok(());
                }
            }
            (_, Err(answer)) => write_answer(&mut writer, &request, answer)?,
        }
    }
    Ok(())
}

fn read_request(reader: &mut impl BufRead) -> io::Result<Option<Request>> {
    let mut line = String::new();
    if reader.read_line(&mut line)? == 0 {
        return Ok(None);
    }
    let mut words = line.split_whitespace().map(str::to_owned);
    let (method, path) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let mut request = Request { method, path, range: None, authorization: None };
    loop {
        let mut header = String::new();
        reader.read_line(&mut header)?;
        let Some((name, value)) = header.trim().split_once(':') else { return Ok(Some(request)) };
        match name.to_ascii_lowercase().as_str() {
            "range" => request.range = parse_range(value.trim()),
            "authorization" => request.authorization = Some(value.trim().to_owned()),
            _ => {}
        }
    }
}

/// `bytes=1-2` and `bytes=1-`.
pub(crate) fn parse_range(value: &str) -> Option<Range<u64>> {
    let (start, end) = value.strip_prefix("bytes=")?.split_once('-')?;
    let end = end.parse::<u64>().map_or(u64::MAX, |last| last + 1);
    Some(start.parse().ok()?..end)
}

impl Shared {
    /// Where it is now, of a path with a former name: relative, as the hub says it.
    fn renamed(&self, path: &str) -> Option<String> {
        let renamed = lock(&self.renamed);
        renamed.iter().find_map(|(former, now)| {
            let part = format!("/{former}/");
            let asked = format!("{path}/");
            asked
                .contains(&part)
                .then(|| asked.replacen(&part, &format!("/{now}/"), 1).trim_end_matches('/').to_owned())
        })
    }

    fn fault(&self, path: &str) -> Option<Fault> {
        let mut faults = lock(&self.faults);
        let place = faults.iter().position(|(part, _)| path.contains(part.as_str()))?;
        faults.remove(place).map(|(_, fault)| fault)
    }

    /// The file whose bytes the request is about, or another answer.
    fn file(&self, request: &Request, is_store: bool) -> Result<RepositoryFile, Answer> {
        let repositories = lock(&self.repositories);
        let path = request.path.split('?').next().unwrap_or_default();
        if is_store {
            let commits = repositories.iter().flat_map(|repository| &repository.revisions);
            let mut files = commits.flat_map(|(_, commit)| &commit.files);
            let signed = request.path.ends_with("?signature=valid");
            let found = files.find(|file| signed && path.strip_prefix("/store/") == Some(&file.sha256));
            return found.cloned().ok_or_else(|| refusal(403, "AccessDenied"));
        }
        let parts: Vec<&str> = path.trim_start_matches('/').split('/').collect();
        match parts[..] {
            ["api", "models", org, model, "revision", revision] => {
                Err(self.info(readable(&repositories, request, &format!("{org}/{model}"))?, revision)?)
            }
            ["api", "models", org, model, "tree", revision, ..] => {
                let repository = readable(&repositories, request, &format!("{org}/{model}"))?;
                Err(json_answer(&tree(commit(repository, revision)?)))
            }
            ["api", "models", org, model] => {
                Err(self.info(readable(&repositories, request, &format!("{org}/{model}"))?, "main")?)
            }
            [org, model, "resolve", revision, ..] => {
                let repository = readable(&repositories, request, &format!("{org}/{model}"))?;
                let commit = commit(repository, revision)?;
                let file = commit.files.iter().find(|file| file.path == parts[4..].join("/"));
                self.resolved(commit, file.ok_or_else(|| refusal(404, "EntryNotFound"))?)
            }
            _ => Err(refusal(404, "RepoNotFound")),
        }
    }

    fn info(&self, repository: &Repository, revision: &str) -> Result<Answer, Answer> {
        let commit = commit(repository, revision)?;
        let siblings: Vec<Value> = commit.files.iter().map(|file| json!({"rfilename": file.path})).collect();
        Ok(json_answer(&json!({
            "id": repository.id, "modelId": repository.id, "sha": commit.sha, "siblings": siblings, "tags": [],
            "private": false, "gated": false, "disabled": false, "downloads": 0, "likes": 0,
        })))
    }

    /// Large files are in the store, and the hub says what they are.
    fn resolved(&self, commit: &Commit, file: &RepositoryFile) -> Result<RepositoryFile, Answer> {
        if !file.large {
            return Ok(file.clone());
        }
        let store = lock(&self.store).expect("both ports are open");
        let headers = vec![
            ("Location", format!("http://{store}/store/{}?signature=valid", file.sha256)),
            ("X-Linked-Etag", format!("\"{}\"", file.sha256)),
            ("X-Linked-Size", file.content.len().to_string()),
            ("X-Repo-Commit", commit.sha.clone()),
        ];
        Err(Answer { status: 302, headers, body: Vec::new() })
    }
}

fn readable<'a>(repositories: &'a [Repository], request: &Request, id: &str) -> Result<&'a Repository, Answer> {
    let repository = repositories.iter().find(|repository| repository.id == id);
    let token = request.authorization.as_deref().and_then(|header| header.strip_prefix("Bearer "));
    match (repository.map(|repository| &repository.access), token) {
        // As the hub does: who has no token is not told what there is.
        (None, None) => Err(refusal(401, "RepoNotFound")),
        (None, Some(_)) => Err(refusal(404, "RepoNotFound")),
        (Some(Access::Public), _) => Ok(repository.expect("it has access")),
        (Some(Access::Token(wanted)), Some(token)) if wanted == token => Ok(repository.expect("it has access")),
        (Some(Access::Gated(wanted)), Some(token)) if wanted == token => Err(refusal(403, "GatedRepo")),
        (Some(Access::Gated(_)), None) => Err(refusal(401, "GatedRepo")),
        (Some(_), _) => Err(refusal(401, "RepoNotFound")),
    }
}

fn commit<'a>(repository: &'a Repository, revision: &str) -> Result<&'a Commit, Answer> {
    let revision = revision.replace("%2F", "/");
    let found = repository.revisions.iter().find(|(name, commit)| *name == revision || commit.sha == revision);
    found.map(|(_, commit)| commit).ok_or_else(|| refusal(404, "RevisionNotFound"))
}

fn tree(commit: &Commit) -> Value {
    let entry = |file: &RepositoryFile| {
        let size = file.content.len();
        let mut entry = json!({"type": "file", "oid": file.git, "size": size, "path": file.path});
        if file.large {
            entry["lfs"] = json!({"oid": file.sha256, "size": size, "pointerSize": 134});
        }
        entry
    };
    commit.files.iter().map(entry).collect()
}

fn json_answer(body: &Value) -> Answer {
    let headers = vec![("Content-Type", "application/json".to_owned())];
    Answer { status: 200, headers, body: body.to_string().into_bytes() }
}

fn refusal(status: u16, code: &'static str) -> Answer {
    let headers = vec![("X-Error-Code", code.to_owned()), ("X-Error-Message", format!("the hub says {code}"))];
    Answer { status, headers, body: json!({"error": code}).to_string().into_bytes() }
}

fn write_answer(writer: &mut TcpStream, request: &Request, answer: Answer) -> io::Result<()> {
    let Answer { status, headers, body } = answer;
    let mut head = format!("HTTP/1.1 {status} Status\r\nContent-Length: {}\r\n", body.len());
    headers.iter().for_each(|(name, value)| head.push_str(&format!("{name}: {value}\r\n")));
    head.push_str("\r\n");
    writer.write_all(head.as_bytes())?;
    if request.method == "HEAD" { Ok(()) } else { writer.write_all(&body) }
}

/// Whether a connection goes on.
#[derive(Debug, Eq, PartialEq)]
enum Connection {
    Goes,
    Cut,
}

fn write_file(
    writer: &mut TcpStream,
    request: &Request,
    file: &RepositoryFile,
    fault: Option<Fault>,
    shared: &Shared,
) -> io::Result<Connection> {
    let size = file.content.len();
    let asked = request.range.clone().filter(|_| fault != Some(Fault::NoRange));
    let (status, start, end) = match &asked {
        Some(range) if range.start < size as u64 => {
            (206, usize::try_from(range.start).unwrap_or(0), usize::try_from(range.end).unwrap_or(size).min(size))
        }
        _ => (200, 0, size),
    };
    let mut head =
        format!("HTTP/1.1 {status} Status\r\nContent-Length: {}\r\nETag: \"{}\"\r\n", end - start, file.etag());
    if status == 206 {
        head.push_str(&format!("Content-Range: bytes {start}-{}/{size}\r\n", end - 1));
    }
    if let Some(commit) = shared.commit_of(file) {
        head.push_str(&format!("X-Repo-Commit: {commit}\r\n"));
    }
    head.push_str("Accept-Ranges: bytes\r\n\r\n");
    writer.write_all(head.as_bytes())?;
    if request.method == "HEAD" {
        return Ok(Connection::Goes);
    }
    let mut body = Cow::Borrowed(&file.content[start..end]);
    let mut ends_at = body.len();
    match fault {
        Some(Fault::Wrong(place)) if (start..end).contains(&place) => body.to_mut()[place - start] ^= 1,
        Some(Fault::Cut(count)) => ends_at = count.min(body.len()),
        _ => {}
    }
    for piece in body[..ends_at].chunks(PIECE_BYTES) {
        writer.write_all(piece)?;
        let pause = shared.pause_us.load(Ordering::Relaxed);
        if pause > 0 {
            sleep(Duration::from_micros(pause));
        }
    }
    Ok(if ends_at < end - start { Connection::Cut } else { Connection::Goes })
}

impl Shared {
    fn commit_of(&self, file: &RepositoryFile) -> Option<String> {
        let repositories = lock(&self.repositories);
        let mut commits = repositories.iter().flat_map(|repository| &repository.revisions);
        let holds = |commit: &Commit| commit.files.iter().any(|other| Arc::ptr_eq(&other.content, &file.content));
        commits.find(|(_, commit)| holds(commit)).map(|(_, commit)| commit.sha.clone())
    }
}
