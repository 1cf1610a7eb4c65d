//! A hub's HTTP API: which commit a revision is, which files it has, where their bytes are.

use std::ops::Range;

use reqwest::{
    Response, StatusCode, Url,
    header::{AUTHORIZATION, HeaderMap, HeaderValue, LINK},
};
use serde::{Deserialize, de::DeserializeOwned};

use super::{Listing, PAGES, elsewhere, header, judged, plausible, repeated, whole, wrong_answer};
use crate::{
    choose::RemoteFile,
    digest::Digest,
    error::FetchError,
    order::Access,
    source::{HubModel, is_commit},
    transport::{Failure, Refusal, Request, Said, Transport},
};

/// One model on a hub.
pub(crate) struct Hub {
    pub(super) transport: Transport,
    endpoint: Url,
    model: HubModel,
    /// Sent to the hub's own origin and nowhere else.
    authorization: Option<HeaderValue>,
    secret_name: Option<String>,
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
    pub(super) fn new(transport: Transport, model: HubModel, access: &Access) -> Result<Self, FetchError> {
        let wrong =
            |reason: &str| FetchError::Endpoint { endpoint: access.endpoint.clone(), reason: reason.to_owned() };
        let endpoint = Url::parse(&access.endpoint).map_err(|error| wrong(&error.to_string()))?;
        if !matches!(endpoint.scheme(), "http" | "https") || endpoint.host().is_none() {
            return Err(wrong("not an http or https URL"));
        }
        let bearer = |token: &String| HeaderValue::from_str(&format!("Bearer {token}"));
        let authorization = access.token.as_ref().map(bearer).transpose();
        let authorization = authorization.map_err(|_| FetchError::Token { secret_name: access.secret_name.clone() })?;
        Ok(Self { transport, endpoint, model, authorization, secret_name: access.secret_name.clone() })
    }

    pub(super) async fn listing(&self, commit: Option<&str>) -> Result<Listing, FetchError> {
        let commit = match commit {
            Some(commit) => commit.to_owned(),
            None => self.commit().await?,
        };
        Ok(Listing { files: self.files(&commit).await?, commit, packed: Vec::new() })
    }

    /// The commit that the revision is now.
    async fn commit(&self) -> Result<String, FetchError> {
        let (id, revision) = (&self.model.id, escaped(&self.model.revision));
        let url = self.url(&format!("/api/models/{id}/revision/{revision}"));
        let info: Info = self.json(&url).await?.0;
        if is_commit(&info.sha) {
            Ok(info.sha)
        } else {
            Err(wrong_answer(&url, format!("\"{}\" is no commit", info.sha)))
        }
    }

    /// All files of a commit.
    async fn files(&self, commit: &str) -> Result<Vec<RemoteFile>, FetchError> {
        let first = format!("/api/models/{}/tree/{commit}?recursive=true&expand=false", self.model.id);
        let mut next = Some(self.url(&first));
        let mut files = Vec::new();
        for _ in 0..PAGES {
            let Some(url) = next.take() else { return Ok(files) };
            let (entries, link): (Vec<TreeEntry>, _) = self.json(&url).await?;
            let found = entries.into_iter().filter(|entry| entry.kind == "file");
            let found = found.map(|entry| remote(&url, entry, |path| self.file_url(commit, path)));
            files.extend(found.collect::<Result<Vec<_>, _>>()?);
            next = next_page(&url, &link);
        }
        Err(wrong_answer(&self.endpoint, format!("a listing of more than {PAGES} pages")))
    }

    /// Where the bytes of a file are.
    fn file_url(&self, commit: &str, path: &str) -> Url {
        self.url(&format!("/{}/resolve/{commit}/{path}", self.model.id))
    }

    /// The URL of a path of the hub.
    fn url(&self, path: &str) -> Url {
        let mut url = self.endpoint.clone();
        let base = self.endpoint.path().trim_end_matches('/');
        let (path, query) = path.split_once('?').map_or((path, None), |(path, query)| (path, Some(query)));
        url.set_path(&format!("{base}{path}"));
        url.set_query(query);
        url
    }

    pub(super) async fn get(&self, url: &Url, range: Option<Range<u64>>) -> Result<Response, Failure> {
        let mut request = Request::plain(url.clone());
        if let Some(authorization) = self.authorization.as_ref().filter(|_| url.origin() == self.endpoint.origin()) {
            request.headers.insert(AUTHORIZATION, authorization.clone());
        }
        judged(self.transport.get(&request, range).await?, said, |refusal| self.refused(refusal)).await
    }

    async fn json<T: DeserializeOwned>(&self, url: &Url) -> Result<(T, String), FetchError> {
        let ask = async || {
            let answer = self.get(url, None).await?;
            let link = header(answer.headers(), LINK.as_str()).to_owned();
            Ok((whole(answer).await?, link))
        };
        let (body, link) = repeated(url, ask).await?;
        Ok((serde_json::from_slice(&body).map_err(|error| wrong_answer(url, error))?, link))
    }

    fn refused(&self, refusal: Refusal) -> Failure {
        if refusal.url.origin() != self.endpoint.origin() {
            return elsewhere(refusal);
        }
        let Refusal { status, said: Said { code, words: said }, url, .. } = refusal;
        let hub = self.endpoint.as_str().trim_end_matches('/').to_owned();
        let (model, token_name) = (self.model.id.clone(), self.secret_name.clone());
        Failure::from(match (status, &*code) {
            (StatusCode::UNAUTHORIZED, _) => {
                FetchError::Unauthorized { hub, model, had_token: self.authorization.is_some(), token_name, said }
            }
            (StatusCode::FORBIDDEN, _) => FetchError::Forbidden { hub, model, token_name, said },
            (StatusCode::NOT_FOUND, "RevisionNotFound") => {
                FetchError::NoRevision { hub, model, revision: self.model.revision.clone(), said }
            }
            (StatusCode::NOT_FOUND, code) if code != "EntryNotFound" => FetchError::NoModel { hub, model, said },
            _ => wrong_answer(&url, format!("{status}: {said}")),
        })
    }
}

/// A hub says it in headers.
fn said(headers: &HeaderMap, _: &[u8]) -> Said {
    let words = Some(header(headers, "x-error-message")).filter(|words| !words.is_empty());
    let words = words.unwrap_or("the hub says nothing more").to_owned();
    Said { code: header(headers, "x-error-code").to_owned(), words }
}

fn remote(url: &Url, entry: TreeEntry, place: impl Fn(&str) -> Url) -> Result<RemoteFile, FetchError> {
    let (size, digest) = match &entry.lfs {
        Some(lfs) => (lfs.size, Digest::sha256(&lfs.oid)),
        None => (entry.size, Digest::git_blob(&entry.oid)),
    };
    let size = plausible(url, &entry.path, size)?;
    let digest = digest.ok_or_else(|| wrong_answer(url, format!("{} has no hash", entry.path)))?;
    // The URL has the commit.
    Ok(RemoteFile { size, digest, url: place(&entry.path), path: entry.path, etag: None })
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
            remote(&url, serde_json::from_str(&text).unwrap(), |path| url.join(path).unwrap())
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
