//! `https://HOST/PATH[?QUERY][#sha256=HASH]`: a folder, an archive or one .gguf file of a web server. Pure.

use std::{fmt, net::IpAddr};

use reqwest::Url;

use super::is_commit;

pub(super) const SCHEMES: [&str; 2] = ["https://", "http://"];
pub(super) const FORM: &str = "https://HOST/PATH of a folder, or of a .gguf, .tar, .tar.gz or .tgz file with ?QUERY if it needs one, either \
                               with #sha256=HASH, for example https://files.example/models/llama-3.1-8b/ (http:// for this machine alone)";
const ARCHIVES: [&str; 3] = [".tar", ".tar.gz", ".tgz"];

/// What a web server has at a URL.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct WebModel {
    /// Where it is; a folder's ends with `/`.
    pub url: Url,
    /// What is there.
    pub form: WebForm,
    /// What it must be: of a folder the SHA-256 of its `SHA256SUMS`, else of the file.
    pub sha256: Option<String>,
}

/// What is at a URL.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum WebForm {
    /// Files below it.
    Folder,
    /// The .gguf file of this name.
    Gguf(String),
    /// A tar, compressed or not.
    Archive,
}

impl WebModel {
    /// Of the whole text.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let (text, fragment) = text.split_once('#').map_or((text, None), |(text, fragment)| (text, Some(fragment)));
        let sha256 = fragment.map(|fragment| fragment.strip_prefix("sha256=").filter(|hash| is_sha256(hash)));
        let sha256 = sha256.map_or(Some(None), |hash| hash.map(|hash| Some(hash.to_owned())))?;
        let path = text.split('?').next()?;
        let strange =
            |part: &str| matches!(part, "." | "..") || part.chars().any(|c| c.is_whitespace() || c.is_control());
        let mut url = Url::parse(text).ok().filter(is_asked)?;
        // A URL parser takes more slashes than two for two.
        let host = path.split_once("://").is_some_and(|(_, rest)| !rest.starts_with('/'));
        if !host || path.split('/').any(strange) {
            return None;
        }
        let last = url.path().rsplit('/').next().unwrap_or_default().to_owned();
        let form = if last.ends_with(".gguf") {
            WebForm::Gguf(last)
        } else if ARCHIVES.iter().any(|end| last.ends_with(end)) {
            WebForm::Archive
        } else {
            WebForm::Folder
        };
        if form == WebForm::Folder {
            if url.query().is_some() {
                return None;
            }
            url.set_path(&format!("{}/", url.path().trim_end_matches('/')));
        }
        Some(Self { url, form, sha256 })
    }
}

/// Names a server, and nobody who asks it: a login is for a Secret. What is not encrypted does not leave this machine.
fn is_asked(url: &Url) -> bool {
    let encrypted = url.scheme() == "https" || url.host_str().is_some_and(is_loopback);
    encrypted && url.host().is_some() && url.username().is_empty() && url.password().is_none()
}

fn is_loopback(host: &str) -> bool {
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

fn is_sha256(hash: &str) -> bool {
    hash.len() == 64 && is_commit(hash)
}

/// Without query: that of a URL that somebody signed lets whoever reads it in.
impl fmt::Display for WebModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut url = self.url.clone();
        url.set_query(None);
        url.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_is_a_folder_an_archive_or_a_file() {
        let parts = |text: &str| {
            let model = WebModel::parse(text).unwrap();
            (model.to_string(), model.form, model.sha256)
        };
        let hash = "0a".repeat(32);
        let folder = ("https://files.example/chat/".to_owned(), WebForm::Folder, None);
        assert_eq!(parts("https://files.example/chat"), folder);
        assert_eq!(parts("https://files.example/chat/"), folder);
        let pinned = parts(&format!("https://files.example/chat#sha256={hash}"));
        assert_eq!(pinned.2, Some(hash.clone()));
        let signed = parts(&format!("https://files.example:8443/a/q8.gguf?sig=secret#sha256={hash}"));
        let shown = "https://files.example:8443/a/q8.gguf".to_owned();
        assert_eq!(signed, (shown, WebForm::Gguf("q8.gguf".to_owned()), Some(hash)));
        for archive in ["https://files.example/a.tar", "https://files.example/a.tar.gz", "http://127.0.0.1:1/a.tgz?v=1"]
        {
            assert_eq!(parts(archive).1, WebForm::Archive, "{archive}");
        }
    }
}
