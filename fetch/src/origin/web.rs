//! A web server that knows nothing of models: what is at a URL, which version of it, ranges of that version.
//!
//! A folder cannot be listed over HTTP. Where it has a `SHA256SUMS`, as coreutils write it, that is its listing, its hashes and its
//! commit; else the names that a model's files may have are asked for one by one. What pins those, and a file whose source says no
//! hash, is what the server says of their versions: ETag, else Last-Modified.

use std::ops::Range;

use base64::{Engine, prelude::BASE64_STANDARD};
use futures::{StreamExt, TryStreamExt, stream};
use reqwest::{
    Response, StatusCode, Url,
    header::{
        AUTHORIZATION, CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE, ETAG, HeaderMap, HeaderValue, IF_MATCH,
        IF_UNMODIFIED_SINCE, LAST_MODIFIED,
    },
};

use super::{Listing, SMALL_FILE_BYTES, elsewhere, header, judged, plausible, repeated, whole, wrong_answer};
use crate::{
    choose::{INDEX, RemoteFile, is_of_a_model, shards, well_known},
    digest::{Crc, Digest, sha256_hex},
    error::FetchError,
    order::{Access, WebLogin},
    source::{WebForm, WebModel},
    transport::{Failure, Refusal, Request, Said, Transport, shown},
    unpack::{Holds, Packed, Packing},
};

/// Lists a folder's files with their hashes.
const SUMS: &str = "SHA256SUMS";
/// Questions about single files at the same time.
const PROBES: usize = 8;

/// What is at one URL.
pub(crate) struct Web {
    pub(super) transport: Transport,
    model: WebModel,
    /// Sent to the URL's own origin and nowhere else.
    authorization: Option<HeaderValue>,
    secret_name: Option<String>,
}

/// What a web server says no with.
#[derive(Debug, thiserror::Error)]
pub enum WebRefusal {
    /// Whoever asks may not.
    #[error("{status} from {server} for {url}: {fix}; {said}")]
    Denied {
        /// Of the answer.
        status: StatusCode,
        /// Who was asked.
        server: String,
        /// For what.
        url: String,
        /// What to change.
        fix: String,
        /// The server's own words.
        said: String,
    },
    /// Nothing is there.
    #[error("{status} from {server}: there is no {url}; correct spec.model.source")]
    Absent {
        /// Of the answer.
        status: StatusCode,
        /// Who was asked.
        server: String,
        /// For what.
        url: String,
    },
    /// No model is below the URL.
    #[error(
        "there is neither config.json nor {SUMS} below {source_name}: correct spec.model.source, name a .gguf file or an archive, or put \
         a {SUMS} there"
    )]
    NoFolder {
        /// The folder.
        source_name: String,
    },
    /// A hash of a folder is that of its list.
    #[error(
        "there is no {SUMS} below {source_name}, and that is what #sha256= of a folder is of: put it there, or remove #sha256="
    )]
    NoSums {
        /// The folder.
        source_name: String,
    },
    /// The list is none, or not of what is there.
    #[error("{SUMS} of {source_name}: {reason}")]
    BadSums {
        /// The folder.
        source_name: String,
        /// What is wrong with it.
        reason: String,
    },
    /// Nothing tells its versions apart.
    #[error("{server} says neither ETag nor Last-Modified of {url}, so nothing tells its versions apart: {fix}")]
    Unversioned {
        /// Who was asked.
        server: String,
        /// For what.
        url: String,
        /// What to change.
        fix: String,
    },
    /// A page for people: a login, or words about a file that is not there.
    #[error(
        "{url} is a web page (text/html) and no file of a model: name what a program can download, and give a login if it needs one"
    )]
    Page {
        /// What was asked for.
        url: String,
    },
    /// It was replaced or removed since it was looked at.
    #[error(
        "{url} was replaced or removed while it was fetched: publish each version of a model under a URL of its own"
    )]
    Changed {
        /// Which.
        url: String,
    },
    /// What is there is not what was pinned.
    #[error(
        "what is at {source_name} is another version ({found}) than the one that replicas were told to serve ({pinned}): put that back, or \
         name a new URL in spec.model.source"
    )]
    Moved {
        /// Of what.
        source_name: String,
        /// What was pinned.
        pinned: String,
        /// What is there.
        found: String,
    },
    /// Half a login.
    #[error("login{}: there is a username and no password, or the other way round: give both, or a token", crate::error::of(.secret_name))]
    HalfLogin {
        /// What the user knows it as.
        secret_name: Option<String>,
    },
}

impl Web {
    pub(super) fn new(transport: Transport, model: WebModel, access: &Access) -> Result<Self, FetchError> {
        let secret_name = access.secret_name.clone();
        let authorization = match login(&access.web) {
            Ok(None) => None,
            Ok(Some(words)) => {
                let value = HeaderValue::from_str(&words);
                Some(value.map_err(|_| FetchError::Token { secret_name: secret_name.clone() })?)
            }
            Err(HalfALogin) => return Err(WebRefusal::HalfLogin { secret_name }.into()),
        };
        Ok(Self { transport, model, authorization, secret_name })
    }

    /// What is there now; another version than the pinned one is none.
    pub(super) async fn listing(&self, pinned: Option<&str>) -> Result<Listing, FetchError> {
        let listing = match &self.model.form {
            WebForm::Folder => self.folder().await?,
            WebForm::Gguf(_) | WebForm::Archive => self.file().await?,
        };
        match pinned.filter(|pinned| *pinned != listing.commit) {
            None => Ok(listing),
            Some(pinned) => {
                let (source_name, pinned) = (self.model.to_string(), pinned.to_owned());
                Err(WebRefusal::Moved { source_name, pinned, found: listing.commit }.into())
            }
        }
    }

    /// One file, which is the model or holds it.
    async fn file(&self) -> Result<Listing, FetchError> {
        let url = &self.model.url;
        let name = url.path().rsplit('/').next().unwrap_or_default();
        let seen = self.seen(url, name).await?;
        let (commit, file) = match &self.model.sha256 {
            Some(hash) => (hash.clone(), held_to(seen, hash)),
            None => {
                self.has_version(&seen)?;
                (pin(url, std::slice::from_ref(&seen)), seen)
            }
        };
        if self.model.form != WebForm::Archive {
            return Ok(Listing { commit, files: vec![file], packed: Vec::new() });
        }
        let packing = if name.ends_with(".tar") { Packing::Tar } else { Packing::TarGzip };
        Ok(Listing { commit, files: Vec::new(), packed: vec![Packed { file, packing, holds: Holds::Anything }] })
    }

    async fn folder(&self) -> Result<Listing, FetchError> {
        match self.seen_if_there(SUMS).await? {
            Some(sums) => self.by_sums(&sums).await,
            None if self.model.sha256.is_some() => {
                Err(WebRefusal::NoSums { source_name: self.model.to_string() }.into())
            }
            None => self.by_names().await,
        }
    }

    /// Files and hashes as `SHA256SUMS` has them; its own is the commit.
    async fn by_sums(&self, sums: &RemoteFile) -> Result<Listing, FetchError> {
        let text = self.small(sums).await?;
        let commit = sha256_hex(&text);
        if let Some(wanted) = self.model.sha256.clone().filter(|wanted| *wanted != commit) {
            return Err(FetchError::WrongHash { file: SUMS.to_owned(), wanted, found: commit, tries: 1 });
        }
        let bad = |reason: String| WebRefusal::BadSums { source_name: self.model.to_string(), reason };
        let listed = sums_of(&String::from_utf8_lossy(&text)).map_err(bad)?;
        let held = async |(name, hash): (String, String)| match self.seen_if_there(&name).await? {
            Some(seen) => Ok(held_to(seen, &hash)),
            None => Err(FetchError::from(bad(format!("{name} is not there, the upload is not complete")))),
        };
        let files = stream::iter(listed).map(held).buffered(PROBES).try_collect().await?;
        Ok(Listing { commit, files, packed: Vec::new() })
    }

    /// The names that a model's files have, and those that its index has.
    async fn by_names(&self) -> Result<Listing, FetchError> {
        let mut files = self.those_there(well_known().map(str::to_owned)).await?;
        if !files.iter().any(|file| file.path == "config.json") {
            return Err(WebRefusal::NoFolder { source_name: self.model.to_string() }.into());
        }
        if let Some(index) = files.iter().find(|file| file.path == INDEX) {
            // One that cannot be read is refused by whoever chooses.
            let named = shards(&self.small(index).await?).unwrap_or_default();
            files.extend(self.those_there(named.into_iter().filter(|name| is_of_a_model(name) && stays(name))).await?);
        }
        files.iter().try_for_each(|file| self.has_version(file))?;
        Ok(Listing { commit: pin(&self.model.url, &files), files, packed: Vec::new() })
    }

    async fn those_there(&self, names: impl Iterator<Item = String>) -> Result<Vec<RemoteFile>, FetchError> {
        let asked = stream::iter(names).map(async |name| self.seen_if_there(&name).await).buffered(PROBES);
        let found: Vec<Option<RemoteFile>> = asked.try_collect().await?;
        Ok(found.into_iter().flatten().collect())
    }

    async fn seen_if_there(&self, name: &str) -> Result<Option<RemoteFile>, FetchError> {
        let mut url = self.model.url.clone();
        url.path_segments_mut().expect("an https URL has a path").pop_if_empty().extend(name.split('/'));
        match self.seen(&url, name).await {
            Ok(seen) => Ok(Some(seen)),
            Err(FetchError::Web(WebRefusal::Absent { .. })) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Size and version of a file. Its first byte is asked for: URLs that somebody signed for GET are not for HEAD.
    async fn seen(&self, url: &Url, name: &str) -> Result<RemoteFile, FetchError> {
        let ask = async || {
            let answer = self.transport.get(&self.request(url, None), Some(0..1)).await?;
            if answer.status() == StatusCode::RANGE_NOT_SATISFIABLE && is_empty(answer.headers()) {
                return Ok(answer);
            }
            self.no_page(judged(answer, said, |refusal| self.refused(refusal, None)).await?, url)
        };
        let told = repeated(url, ask).await?;
        let size = size(told.status(), told.headers()).ok_or_else(|| wrong_answer(url, "it does not say its size"))?;
        let (size, version) = (plausible(url, name, size)?, version(told.headers()));
        let line = format!("{url}\n{size}\n{}", version.unwrap_or_default());
        let digest = published(told.headers(), sha256_hex(line.as_bytes()));
        Ok(RemoteFile { path: name.to_owned(), size, digest, url: url.clone(), etag: version.map(str::to_owned) })
    }

    fn has_version(&self, file: &RemoteFile) -> Result<(), FetchError> {
        let fix = match self.model.form {
            WebForm::Folder => format!("put a {SUMS} beside it"),
            WebForm::Gguf(_) | WebForm::Archive => "add #sha256=HASH to spec.model.source".to_owned(),
        };
        match file.etag {
            Some(_) => Ok(()),
            None => Err(WebRefusal::Unversioned { server: self.server(), url: shown(&file.url), fix }.into()),
        }
    }

    async fn small(&self, file: &RemoteFile) -> Result<Vec<u8>, FetchError> {
        if file.size > SMALL_FILE_BYTES {
            return Err(wrong_answer(&file.url, format!("{} bytes are more than a list has", file.size)));
        }
        repeated(&file.url, async || whole(self.get(file, None).await?).await).await
    }

    /// Bytes of the version that was seen.
    pub(super) async fn get(&self, file: &RemoteFile, range: Option<Range<u64>>) -> Result<Response, Failure> {
        let answer = self.transport.get(&self.request(&file.url, file.etag.as_deref()), range).await?;
        let answer = judged(answer, said, |refusal| self.refused(refusal, Some(file))).await?;
        self.of_version(answer, file)
    }

    /// The answer, if it is of the version that was seen: not every server heeds conditions, and who we were sent to hears none.
    pub(super) fn of_version(&self, answer: Response, file: &RemoteFile) -> Result<Response, Failure> {
        let answer = self.no_page(answer, &file.url)?;
        match &file.etag {
            Some(seen) if version(answer.headers()) != Some(seen) => Err(changed(file).into()),
            _ => Ok(answer),
        }
    }

    fn no_page(&self, answer: Response, url: &Url) -> Result<Response, Failure> {
        if header(answer.headers(), CONTENT_TYPE.as_str()).starts_with("text/html") {
            return Err(FetchError::from(WebRefusal::Page { url: shown(url) }).into());
        }
        Ok(answer)
    }

    fn request(&self, url: &Url, version: Option<&str>) -> Request {
        let mut request = Request::plain(url.clone());
        request.headers.extend(self.authorization.clone().map(|login| (AUTHORIZATION, login)));
        request.headers.extend(version.and_then(condition));
        request
    }

    fn refused(&self, refusal: Refusal, file: Option<&RemoteFile>) -> Failure {
        if refusal.url.origin() != self.model.url.origin() {
            return elsewhere(refusal);
        }
        let Refusal { status, said: Said { words: said, .. }, url, .. } = refusal;
        let server = self.server();
        let is_absent = matches!(status, StatusCode::NOT_FOUND | StatusCode::GONE);
        match (status, file) {
            (StatusCode::PRECONDITION_FAILED, Some(file)) => changed(file).into(),
            (_, Some(file)) if is_absent => changed(file).into(),
            (_, None) if is_absent => FetchError::from(WebRefusal::Absent { status, server, url: shown(&url) }).into(),
            (StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN, _) => {
                let fix = self.fix(status);
                FetchError::from(WebRefusal::Denied { status, server, url: shown(&url), fix, said }).into()
            }
            _ => wrong_answer(&url, format!("{status}: {said}")).into(),
        }
    }

    /// What to change about a refusal to whoever asks.
    fn fix(&self, status: StatusCode) -> String {
        let fix = match (&self.authorization, &self.secret_name) {
            (Some(_), Some(name)) if status == StatusCode::UNAUTHORIZED => {
                format!("the login of {name} is not valid there: put a valid one into it")
            }
            (Some(_), Some(name)) => format!("the login of {name} may not read it"),
            (Some(_), None) => "the login is not valid there, or may not read it".to_owned(),
            (None, Some(name)) => format!("{name} has no token, and no username and password: put them into it"),
            (None, None) => {
                "it may not be read without a login: give a token, or username and password, in a Secret (spec.model.tokenSecret)"
                    .to_owned()
            }
        };
        match self.model.form {
            WebForm::Folder if status == StatusCode::FORBIDDEN => {
                format!("{fix}; where files that are not there are forbidden, put a {SUMS} beside those that are")
            }
            _ if self.model.url.query().is_some() => format!("{fix}; a signature in the URL may have ended"),
            _ => fix,
        }
    }

    fn server(&self) -> String {
        self.model.url.origin().ascii_serialization()
    }
}

/// A name without a password, or a password without a name.
#[derive(Debug, PartialEq)]
struct HalfALogin;

/// The value of `Authorization`; `None`: nobody says who asks.
fn login(login: &WebLogin) -> Result<Option<String>, HalfALogin> {
    let said = |text: &str| Some(text.trim().to_owned()).filter(|text| !text.is_empty());
    if let Some(token) = said(&login.token) {
        return Ok(Some(format!("Bearer {token}")));
    }
    match (said(&login.username), said(&login.password)) {
        (None, None) => Ok(None),
        (Some(name), Some(password)) => {
            Ok(Some(format!("Basic {}", BASE64_STANDARD.encode(format!("{name}:{password}")))))
        }
        _ => Err(HalfALogin),
    }
}

fn changed(file: &RemoteFile) -> FetchError {
    WebRefusal::Changed { url: shown(&file.url) }.into()
}

/// A file whose hash is known needs no word on its version: mirrors of the same bytes have ETags of their own.
fn held_to(seen: RemoteFile, hash: &str) -> RemoteFile {
    let digest = Digest::sha256(hash).expect("hashes are looked at when they are read");
    RemoteFile { digest, etag: None, ..seen }
}

/// What pins files: their names, sizes and versions, and where they are.
fn pin(url: &Url, files: &[RemoteFile]) -> String {
    let line =
        |file: &RemoteFile| format!("{}\n{}\n{}\n", file.path, file.size, file.etag.as_deref().unwrap_or_default());
    let mut lines: Vec<String> = files.iter().map(line).collect();
    lines.sort();
    sha256_hex(format!("{url}\n{}", lines.concat()).as_bytes())
}

/// What the file must be, by what its server tells of it: Artifactory its SHA-256, others by RFC 9530, Google's store a checksum.
fn published(told: &HeaderMap, listed: String) -> Digest {
    let word = |name: &str, of: &str| {
        let words =
            told.get_all(name).iter().filter_map(|value| value.to_str().ok()).flat_map(|value| value.split(','));
        words.map(str::trim).find_map(|word| word.strip_prefix(of)).map(|word| word.trim_matches(':').to_owned())
    };
    let of_content = word("repr-digest", "sha-256=").and_then(|hash| Digest::sha256_of_base64(&hash));
    let sha256 = Digest::sha256(header(told, "x-checksum-sha256")).or(of_content);
    // Of what is stored, which may be packed otherwise than what comes.
    let is_stored = matches!(header(told, "x-goog-stored-content-encoding"), "" | "identity");
    let crc = word("x-goog-hash", "crc32c=").filter(|_| is_stored);
    sha256.unwrap_or(Digest::Object { listed, checksum: crc.and_then(|crc| Crc::Crc32c.checksum(&crc)) })
}

/// What tells versions of a file apart.
fn version(headers: &HeaderMap) -> Option<&str> {
    [ETAG, LAST_MODIFIED].iter().map(|name| header(headers, name.as_str())).find(|value| !value.is_empty())
}

/// Asks for one version alone. A weak ETag is never equal in this sense: the answer's is compared instead.
fn condition(version: &str) -> Option<(reqwest::header::HeaderName, HeaderValue)> {
    let name = if version.starts_with('"') { IF_MATCH } else { IF_UNMODIFIED_SINCE };
    let value = HeaderValue::from_str(version).ok()?;
    (!version.starts_with("W/")).then_some((name, value))
}

fn is_empty(headers: &HeaderMap) -> bool {
    header(headers, CONTENT_RANGE.as_str()) == "bytes */0"
}

/// Bytes of the whole file, by an answer about its first one.
fn size(status: StatusCode, headers: &HeaderMap) -> Option<u64> {
    match status {
        StatusCode::PARTIAL_CONTENT => header(headers, CONTENT_RANGE.as_str()).strip_prefix("bytes 0-0/")?.parse().ok(),
        StatusCode::RANGE_NOT_SATISFIABLE => Some(0),
        _ => header(headers, CONTENT_LENGTH.as_str()).parse().ok(),
    }
}

/// Files of a model and their hashes, of lines `HASH  NAME` or `HASH *NAME`.
fn sums_of(text: &str) -> Result<Vec<(String, String)>, String> {
    let entry = |line: &str| {
        let (hash, name) = line.split_once(' ')?;
        let name = name.strip_prefix([' ', '*'])?;
        let hash = hash.to_ascii_lowercase();
        Digest::sha256(&hash).map(|_| (name.strip_prefix("./").unwrap_or(name).to_owned(), hash))
    };
    let lines = text.lines().map(str::trim_end).filter(|line| !line.is_empty() && !line.starts_with('#'));
    let entries = lines.map(|line| entry(line).ok_or_else(|| format!("\"{line:.80}\" is no line of sha256sum")));
    let mut entries = entries.collect::<Result<Vec<_>, _>>()?;
    entries.retain(|(name, _)| is_of_a_model(name) && stays(name));
    if entries.is_empty() { Err("it names no file of a model".to_owned()) } else { Ok(entries) }
}

/// Whether a name leads to something below its folder.
fn stays(name: &str) -> bool {
    !name.split('/').any(|part| matches!(part, "" | "." | ".."))
}

/// Pages are for people with browsers.
fn said(headers: &HeaderMap, body: &[u8]) -> Said {
    let kind = header(headers, CONTENT_TYPE.as_str());
    let readable = kind.starts_with("text/plain") || kind.starts_with("application/json");
    let words = Some(String::from_utf8_lossy(body).trim().to_owned()).filter(|words| readable && !words.is_empty());
    Said { code: String::new(), words: words.unwrap_or_else(|| "the server says nothing more".to_owned()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        pairs.iter().map(|(name, value)| (name.parse().unwrap(), HeaderValue::from_static(value))).collect()
    }

    #[test]
    fn a_version_is_an_etag_or_else_a_date_and_a_weak_one_is_not_asked_for() {
        const DATE: &str = "Sun, 06 Nov 1994 08:49:37 GMT";
        let both = headers(&[("etag", "\"a\""), ("last-modified", DATE)]);
        assert_eq!(version(&both), Some("\"a\""));
        assert_eq!(version(&headers(&[("last-modified", DATE)])), Some(DATE));
        assert_eq!(version(&headers(&[])), None);
        let asked = |version| condition(version).map(|(name, _)| name);
        assert_eq!([asked("\"a\""), asked(DATE), asked("W/\"a\"")], [Some(IF_MATCH), Some(IF_UNMODIFIED_SINCE), None]);
    }

    #[test]
    fn a_server_may_publish_a_hash_or_a_checksum() {
        let told = |pairs: &[(&'static str, &'static str)]| published(&headers(pairs), "1".repeat(64)).published();
        let base64 = "sha-512=:AAAA:, sha-256=:LPJNul+wow4m6DsqxbninhsWHlwfp0JecwQzYpOLmCQ=:";
        assert!(told(&[("repr-digest", base64)]).starts_with("sha256-2cf24dba"));
        let hex = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824";
        assert!(told(&[("x-checksum-sha256", hex)]).starts_with("sha256-2cf24dba"));
        let google = ("x-goog-hash", "crc32c=NhCmhg==,md5=AAAA");
        assert_eq!(told(&[google]), "crc32c-3610a686");
        let nothing = format!("object-{}", "1".repeat(64));
        let packed = [google, ("x-goog-stored-content-encoding", "gzip")];
        for pairs in [&packed[..], &[("repr-digest", "sha-256=:AAAA:")], &[("x-checksum-sha256", "no")], &[]] {
            assert_eq!(told(pairs), nothing, "{pairs:?}");
        }
    }

    #[test]
    fn a_size_is_that_of_the_whole_file() {
        let told = |status: u16, pairs: &[(&'static str, &'static str)]| {
            size(StatusCode::from_u16(status).unwrap(), &headers(pairs))
        };
        assert_eq!(told(206, &[("content-range", "bytes 0-0/12"), ("content-length", "1")]), Some(12));
        assert_eq!(told(200, &[("content-length", "12")]), Some(12));
        assert_eq!(told(416, &[("content-range", "bytes */0")]), Some(0));
        for (status, range) in [(206, "bytes 0-0/*"), (206, "bytes 5-5/12"), (200, "")] {
            assert_eq!(told(status, &[("content-range", range)]), None, "{status} {range}");
        }
    }

    #[test]
    fn a_list_is_read_as_sha256sum_writes_it() {
        let hash = "0A".repeat(32);
        let text = format!(
            "# made today\n{hash}  ./config.json\r\n{hash} *model.safetensors\n{hash}  README.md\n{hash}  ../config.json\n"
        );
        let names: Vec<String> = sums_of(&text).unwrap().into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["config.json", "model.safetensors"]);
        assert!(sums_of("0a  config.json").unwrap_err().contains("is no line of sha256sum"));
        assert_eq!(sums_of(&format!("{hash}  README.md")).unwrap_err(), "it names no file of a model");
    }

    #[test]
    fn another_version_or_place_is_another_pin() {
        let file = |etag: &str| RemoteFile {
            path: "config.json".to_owned(),
            size: 2,
            digest: Digest::Object { listed: "1".repeat(64), checksum: None },
            url: Url::parse("https://files.example/m/config.json").unwrap(),
            etag: Some(etag.to_owned()),
        };
        let at = |url: &str, etag: &str| pin(&Url::parse(url).unwrap(), &[file(etag)]);
        let pinned = at("https://files.example/m/", "\"a\"");
        assert!(crate::source::is_commit(&pinned), "{pinned}");
        assert_ne!(at("https://files.example/m/", "\"b\""), pinned);
        assert_ne!(at("https://other.example/m/", "\"a\""), pinned);
    }

    #[test]
    fn a_token_goes_before_a_password_and_half_a_login_is_none() {
        let said = |token: &str, username: &str, password: &str| {
            login(&WebLogin { token: token.into(), username: username.into(), password: password.into() })
        };
        assert_eq!(said("t\n", "u", "p"), Ok(Some("Bearer t".to_owned())));
        assert_eq!(said("", "u", "p\n"), Ok(Some("Basic dTpw".to_owned())));
        assert_eq!((said("", "", " "), said("", "u", "")), (Ok(None), Err(HalfALogin)));
    }
}
