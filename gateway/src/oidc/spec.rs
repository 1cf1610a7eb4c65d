//! What a file says of an issuer of tokens: who it is, where its keys are, and what of its tokens names a tenant. Pure.

use std::{
    net::IpAddr,
    path::{Path, PathBuf},
};

use serde::Deserialize;

use super::jwks::Algorithm;

/// Clocks that differ by more are to be set.
const LEEWAY_SECONDS_MAX: u64 = 300;
/// What is below an issuer, by OpenID Connect Discovery 1.0, 4.
const DISCOVERY: &str = "/.well-known/openid-configuration";

/// An issuer of tokens.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct IssuerSpec {
    /// What `iss` of its tokens is, to the letter.
    pub issuer: String,
    /// `aud` of its tokens has one of them: tokens for others are not for us.
    pub audiences: Vec<String>,
    /// Where its keys are: a URL, or a file beside the one that says so. Nothing: where its discovery document says.
    pub jwks: Option<String>,
    /// Who vouches for its certificate, in PEM: a file beside the one that says so. Nothing: whom the system trusts.
    pub certificate_authority: Option<PathBuf>,
    /// By which it signs.
    #[serde(default = "all")]
    pub algorithms: Vec<Algorithm>,
    /// What names the tenant: a claim, or a path to one inside others that begins with '/'.
    pub tenant_claim: String,
    /// What stands before that in the tenant's name: two issuers may know different people by one name.
    #[serde(default)]
    pub tenant_prefix: String,
    /// What names the class of tenants that are not in the file.
    pub class_claim: Option<String>,
    /// What clocks may differ by.
    #[serde(default = "leeway")]
    pub leeway_seconds: u64,
}

/// Where keys are read.
#[derive(Clone, Debug, PartialEq)]
pub enum Source {
    /// At a URL that a document at this one names.
    Discovery(String),
    /// At this URL.
    Url(String),
    /// In this file.
    File(PathBuf),
}

fn all() -> Vec<Algorithm> {
    Algorithm::ALL.to_vec()
}

fn leeway() -> u64 {
    60
}

impl IssuerSpec {
    /// What is wrong with it.
    pub fn fault(&self) -> Option<String> {
        if self.issuer.is_empty() {
            return Some("issuer is empty: write what `iss` of its tokens is".to_owned());
        }
        if self.audiences.is_empty() || self.audiences.contains(&String::new()) {
            return Some("audiences names nobody: write what `aud` of tokens for this gateway is".to_owned());
        }
        if self.algorithms.is_empty() {
            return Some("algorithms is empty: leave it out, or name some".to_owned());
        }
        if self.tenant_claim.is_empty() || self.class_claim.as_deref() == Some("") {
            return Some("tenantClaim and classClaim are names of claims, or paths as /realm/team".to_owned());
        }
        if self.leeway_seconds > LEEWAY_SECONDS_MAX {
            return Some(format!("leewaySeconds is {LEEWAY_SECONDS_MAX} at most"));
        }
        match self.source(Path::new("")) {
            Source::Discovery(url) | Source::Url(url) if !is_safe(&url) => Some(format!(
                "keys are not read from {url}: use https://, or a file; who answers for them there is every tenant"
            )),
            _ => None,
        }
    }

    /// Where its keys are, if files are in this folder.
    pub fn source(&self, folder: &Path) -> Source {
        match &self.jwks {
            None => Source::Discovery(format!("{}{DISCOVERY}", self.issuer.trim_end_matches('/'))),
            Some(jwks) if jwks.contains("://") => Source::Url(jwks.clone()),
            Some(jwks) => Source::File(folder.join(jwks)),
        }
    }
}

/// Whether keys may be believed that come from there: nobody else answers on the way.
pub fn is_safe(url: &str) -> bool {
    let Ok(url) = reqwest::Url::parse(url) else { return false };
    let is_loopback = || {
        let host = url.host_str().unwrap_or_default().trim_matches(['[', ']']);
        host == "localhost" || host.parse().is_ok_and(|address: IpAddr| address.is_loopback())
    };
    url.scheme() == "https" || url.scheme() == "http" && is_loopback()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_read_where_nobody_else_answers() {
        for (url, expected) in [
            ("https://login.example/keys", true),
            ("http://127.0.0.1:8080/keys", true),
            ("http://[::1]/keys", true),
            ("http://localhost/keys", true),
            ("http://login.example/keys", false),
            ("http://127.0.0.1.example/keys", false),
            ("http://127.0.0.1@login.example/keys", false),
            ("ftp://127.0.0.1/keys", false),
            ("keys", false),
        ] {
            assert_eq!(is_safe(url), expected, "{url}");
        }
    }
}
