//! The hub's HTTP API: which commit a revision is, which files it has, where their bytes are. Repeats what passes.

use std::time::Duration;

use reqwest::{Response, StatusCode, Url, header::LINK};
use serde::{Deserialize, de::DeserializeOwned};

use crate::{
    backoff,
    choose::RemoteFile,
    digest::Digest,
    error::FetchError,
    source::{HubModel, is_commit},
    transport::{Failure, Transport, error_chain},
};

/// Failures in a row, without a byte between them, after which a server is given up: about two minutes.
pub(crate) const TRIES: u32 = 9;
/// A listing longer than this is no model's.
const PAGES: usize = 100;
/// A file larger than this is none: what a listing claims is counted with.
const FILE_BYTES_MAX: u64 = 1 << 44;
/// Of a file that is read into memory: an index of shards has some hundred kilobytes.
const SMALL_FILE_BYTES: u64 = 64 << 20;

/// One model on a hub.
pub(crate) struct Hub {
    pub(crate) transport: Transport,
    model: HubModel,
    token_name: Option<String>,
}

/// Of `/api/models/ID/revision/REVISION`.
#[derive(Deserialize)]
struct Info {
    sha: String,
}

/// Of `/api/models/ID/tree/REVISION`.
#[derive(Deserialize)]
struct TreeEntry {
    #[serde(rename = "type")]
    kind: String,
    oid: String,
    size: u64,
    path: String,
    lfs: Option<Lfs>,
}

#[derive(Deserialize)]
struct Lfs {
    oid: String,
    size: u64,
}

impl Hub {
    pub(crate) fn new(transport: Transport, model: HubModel, token_name: Option<String>) -> Self {
        Self { transport, model, token_name }
    }

    /// The commit that the revision is now.
    pub(crate) async fn commit(&self) -> Result<String, FetchError> {
        let (id, revision) = (&self.model.id, escaped(&self.model.revision));
        let url = self.transport.url(&format!("/api/models/{id}/revision/{revision}"));
        let info: Info = self.json(&url).await?.0;
        if is_commit(&info.sha) {
            Ok(info.sha)
        } else {
            Err(FetchError::Answer { url: url.into(), reason: format!("\"{}\" is no commit", info.sha) })
        }
    }

    /// All files of a commit.
    pub(crate) async fn listing(&self, commit: &str) -> Result<Vec<RemoteFile>, FetchError> {
        let first = format!("/api/models/{}/tree/{commit}?recursive=true&expand=false", self.model.id);
        let mut next = Some(self.transport.url(&first));
        let mut files = Vec::new();
        for _ in 0..PAGES {
            let Some(url) = next.take() else { return Ok(files) };
            let (entries, link): (Vec<TreeEntry>, _) = self.json(&url).await?;
            let found = entries.into_iter().filter(|entry| entry.kind == "file").map(|entry| remote(&url, entry));
            files.extend(found.collect::<Result<Vec<_>, _>>()?);
            next = link.and_then(|link| next_page(&url, &link));
        }
        Err(FetchError::Answer { url: self.transport.hub(), reason: format!("a listing of more than {PAGES} pages") })
    }

    /// Where the bytes of a file are.
    pub(crate) fn file_url(&self, commit: &str, path: &str) -> Url {
        self.transport.url(&format!("/{}/resolve/{commit}/{path}", self.model.id))
    }

    /// A small file.
    pub(crate) async fn small_file(&self, commit: &str, file: &RemoteFile) -> Result<Vec<u8>, FetchError> {
        let url = self.file_url(commit, &file.path);
        let wrong = |reason| FetchError::Answer { url: url.to_string(), reason };
        if file.size > SMALL_FILE_BYTES {
            return Err(wrong(format!("{} bytes are more than an index has", file.size)));
        }
        let bytes = self.repeated(&url, async |answer| Ok(answer.bytes().await?.to_vec())).await?;
        let mut hasher = file.digest.hasher(file.size);
        hasher.update(&bytes);
        let found = hasher.finish();
        if found == file.digest {
            Ok(bytes)
        } else {
            let (file, wanted) = (file.path.clone(), file.digest.to_string());
            Err(FetchError::WrongHash { file, wanted, found: found.to_string(), tries: 1 })
        }
    }

    async fn json<T: DeserializeOwned>(&self, url: &Url) -> Result<(T, Option<String>), FetchError> {
        let read = async |answer: Response| {
            let link = answer.headers().get(LINK).and_then(|link| link.to_str().ok()).map(str::to_owned);
            Ok((answer.bytes().await?, link))
        };
        let (body, link) = self.repeated(url, read).await?;
        let wrong = |error: serde_json::Error| FetchError::Answer { url: url.to_string(), reason: error.to_string() };
        Ok((serde_json::from_slice(&body).map_err(wrong)?, link))
    }

    /// Asks until there is a whole answer, or none is to be expected.
    async fn repeated<T>(
        &self,
        url: &Url,
        read: impl AsyncFn(Response) -> reqwest::Result<T>,
    ) -> Result<T, FetchError> {
        let mut failures = 0;
        loop {
            let failure = match self.transport.get(url, None).await {
                Ok(answer) => match read(answer).await {
                    Ok(value) => return Ok(value),
                    Err(error) => Failure::passing(error_chain(&error)),
                },
                Err(failure) => failure,
            };
            failures += 1;
            tokio::time::sleep(self.after(failure, url, failures)?).await;
        }
    }

    /// How long to wait after a failure, or why there is no use in it.
    pub(crate) fn after(&self, failure: Failure, url: &Url, failures: u32) -> Result<Duration, FetchError> {
        match failure {
            Failure::Passing { reason, .. } if failures >= TRIES => {
                Err(FetchError::Unreachable { url: url.to_string(), reason, tries: failures })
            }
            Failure::Passing { retry_after, .. } => Ok(backoff::pause(failures, rand::random(), retry_after)),
            Failure::Refused { status, code, said, url } => Err(self.refused(status, &code, said, &url)),
        }
    }

    fn refused(&self, status: StatusCode, code: &str, said: String, url: &Url) -> FetchError {
        let (hub, model, token_name) = (self.transport.hub(), self.model.id.clone(), self.token_name.clone());
        match (status, code) {
            (StatusCode::UNAUTHORIZED, _) => {
                FetchError::Unauthorized { hub, model, had_token: self.transport.has_token(), token_name, said }
            }
            (StatusCode::FORBIDDEN, _) => FetchError::Forbidden { hub, model, token_name, said },
            (StatusCode::NOT_FOUND, "RevisionNotFound") => {
                FetchError::NoRevision { hub, model, revision: self.model.revision.clone(), said }
            }
            (StatusCode::NOT_FOUND, code) if code != "EntryNotFound" => FetchError::NoModel { hub, model, said },
            _ => FetchError::Answer { url: url.to_string(), reason: format!("{status}: {said}") },
        }
    }
}

fn remote(url: &Url, entry: TreeEntry) -> Result<RemoteFile, FetchError> {
    let (size, digest) = match &entry.lfs {
        Some(lfs) => (lfs.size, Digest::sha256(&lfs.oid)),
        None => (entry.size, Digest::git_blob(&entry.oid)),
    };
    let wrong = |what: &str| FetchError::Answer { url: url.to_string(), reason: format!("{} {what}", entry.path) };
    if size > FILE_BYTES_MAX {
        return Err(wrong(&format!("has {size} bytes, more than a file has")));
    }
    let digest = digest.ok_or_else(|| wrong("has no hash"))?;
    Ok(RemoteFile { size, digest, path: entry.path })
}

/// A revision is one part of the API's paths.
fn escaped(revision: &str) -> String {
    revision.replace('/', "%2F")
}

/// `<URL>; rel="next"`.
fn next_page(url: &Url, link: &str) -> Option<Url> {
    let next = link.split(',').find(|part| part.contains("rel=\"next\""))?;
    let target = next.trim().strip_prefix('<')?.split_once('>')?.0;
    url.join(target).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_lead_to_the_next_one() {
        let url = Url::parse("https://hub.example/api/models/a/b/tree/main?recursive=true").unwrap();
        let next = |link| next_page(&url, link).map(String::from);
        assert_eq!(next("<https://hub.example/x?cursor=1>; rel=\"next\"").unwrap(), "https://hub.example/x?cursor=1");
        assert_eq!(next("</y>; rel=\"prev\", </z>; rel=\"next\"").unwrap(), "https://hub.example/z");
        assert_eq!(next("</y>; rel=\"prev\""), None);
    }

    #[test]
    fn a_large_object_has_its_own_hash_and_size() {
        let url = Url::parse("https://hub.example/").unwrap();
        let entry = |lfs: &str| {
            let git = "1".repeat(40);
            let text = format!(r#"{{"type": "file", "oid": "{git}", "size": 134, "path": "w"{lfs}}}"#);
            remote(&url, serde_json::from_str(&text).unwrap())
        };
        let large = format!(r#", "lfs": {{"oid": "{}", "size": 9, "pointerSize": 134}}"#, "a".repeat(64));
        let large = entry(&large).unwrap();
        assert_eq!((large.size, large.digest.to_string()), (9, format!("sha256-{}", "a".repeat(64))));
        assert_eq!(entry("").unwrap().digest.to_string(), format!("git-{}", "1".repeat(40)));
        assert!(entry(r#", "lfs": {"oid": "../x", "size": 9}"#).unwrap_err().to_string().contains("w has no hash"));
        let vast = entry(&format!(r#", "lfs": {{"oid": "{}", "size": {}}}"#, "a".repeat(64), u64::MAX)).unwrap_err();
        assert!(vast.to_string().contains("more than a file has"), "{vast}");
    }
}
