//! Who asks a registry: the entry of a `config.json` of Docker's, and what a registry's challenge wants of it. Pure.

use std::{collections::BTreeMap, net::IpAddr};

use base64::{Engine, prelude::BASE64_STANDARD};
use reqwest::{Url, header::HeaderValue};
use serde::Deserialize;

use super::RegistryRefusal;
use crate::{order::Access, source::ImageModel};

/// What Docker calls its own registry, where that answers, and what logins to it are kept under.
const DOCKER_HUB: [&str; 3] = ["docker.io", "registry-1.docker.io", "index.docker.io"];

/// What is known of who asks.
pub(super) struct Login {
    /// `USER:PASSWORD`, of the entry for the registry.
    pair: Option<String>,
    registry: String,
    /// Registries that there are entries for; `None`: there is no configuration.
    entries: Option<Vec<String>>,
    secret_name: Option<String>,
}

/// What a registry wants.
#[derive(Debug, PartialEq)]
pub(super) enum Challenge {
    /// User and password.
    Basic,
    /// A token of who hands them out.
    Bearer { realm: Url, service: Option<String>, scope: Option<String> },
}

/// Of `config.json`, and of a Secret of type kubernetes.io/dockerconfigjson.
#[derive(Deserialize)]
struct DockerConfig {
    #[serde(default)]
    auths: BTreeMap<String, Entry>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Entry {
    auth: String,
    username: String,
    password: String,
}

/// Of a server of tokens.
#[derive(Deserialize)]
struct Token {
    #[serde(default, alias = "access_token")]
    token: String,
}

impl Login {
    pub(super) fn of(image: &ImageModel, access: &Access) -> Result<Self, RegistryRefusal> {
        let secret_name = access.secret_name.clone();
        let none =
            Self { pair: None, registry: image.registry.clone(), entries: None, secret_name: secret_name.clone() };
        let Some(text) = &access.docker_config else { return Ok(none) };
        let config: DockerConfig = serde_json::from_str(text)
            .map_err(|error| RegistryRefusal::Login { secret_name, reason: error.to_string() })?;
        let entries = config.auths.keys().cloned().collect();
        Ok(Self {
            pair: config
                .auths
                .iter()
                .filter_map(|(name, entry)| of_image(name, entry, image))
                .max()
                .map(|(_, pair)| pair),
            entries: Some(entries),
            ..none
        })
    }

    /// User and password as a header.
    pub(super) fn basic(&self) -> Option<HeaderValue> {
        let pair = self.pair.as_ref()?;
        let mut value = HeaderValue::from_str(&format!("Basic {}", BASE64_STANDARD.encode(pair))).ok()?;
        value.set_sensitive(true);
        Some(value)
    }

    /// What to change where it was not enough.
    pub(super) fn fix(&self) -> String {
        let (registry, whose) = (&self.registry, crate::error::of(&self.secret_name));
        match (&self.pair, &self.entries) {
            (Some(_), _) => {
                format!("the login to {registry}{whose} is not valid there, or may not pull: put one into it that may")
            }
            (None, Some(entries)) => format!(
                "the registry login{whose} has no entry for {registry} (it has: {}): add one",
                if entries.is_empty() { "none".to_owned() } else { entries.join(", ") }
            ),
            (None, None) => {
                "there is no such image for people without a login: correct its name, or give a Secret of type \
                             kubernetes.io/dockerconfigjson (spec.model.tokenSecret)"
                    .to_owned()
            }
        }
    }
}

/// How much of the image's name an entry is for, and its user and password; `None` if it is for another one.
fn of_image(name: &str, entry: &Entry, image: &ImageModel) -> Option<(usize, String)> {
    let name = name.trim_start_matches("https://").trim_start_matches("http://").trim_end_matches('/');
    let (host, path) = name.split_once('/').unwrap_or((name, ""));
    let is_version = matches!(path, "v1" | "v2");
    let inside =
        path.is_empty() || is_version || image.repository == path || image.repository.starts_with(&format!("{path}/"));
    if api_host(host) != api_host(&image.registry) || !inside {
        return None;
    }
    let decoded = BASE64_STANDARD.decode(&entry.auth).ok().and_then(|bytes| String::from_utf8(bytes).ok());
    let pair =
        decoded.filter(|pair| pair.contains(':')).unwrap_or_else(|| format!("{}:{}", entry.username, entry.password));
    (pair != ":").then_some((if is_version { 0 } else { path.len() }, pair))
}

/// Where a registry answers.
pub(super) fn api_host(registry: &str) -> &str {
    if DOCKER_HUB.contains(&registry) { DOCKER_HUB[1] } else { registry }
}

pub(super) fn is_loopback(host: &str) -> bool {
    let name = host.split_once(':').map_or(host, |(name, _)| name);
    name == "localhost" || name.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

impl Challenge {
    /// Of one `WWW-Authenticate`; `None` if it is of a kind that nobody knows.
    pub(super) fn parse(header: &str) -> Option<Self> {
        let all = http_auth::parse_challenges(header).ok()?;
        all.iter().find_map(|challenge| {
            let value = |name: &str| {
                let found = challenge.params.iter().find(|(key, _)| key.eq_ignore_ascii_case(name));
                found.map(|(_, value)| value.to_unescaped())
            };
            match challenge.scheme.to_ascii_lowercase().as_str() {
                "bearer" => Some(Self::Bearer {
                    realm: Url::parse(&value("realm")?).ok()?,
                    service: value("service"),
                    scope: value("scope"),
                }),
                "basic" => Some(Self::Basic),
                _ => None,
            }
        })
    }
}

/// A token as a header.
pub(super) fn bearer(body: &[u8]) -> Option<HeaderValue> {
    let Token { token } = serde_json::from_slice(body).ok()?;
    let mut value = HeaderValue::from_str(&format!("Bearer {token}")).ok().filter(|_| !token.is_empty())?;
    value.set_sensitive(true);
    Some(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn login(config: &str, source: &str) -> Login {
        let crate::source::Source::Image(image) = source.parse().unwrap() else { panic!("{source} is of a registry") };
        Login::of(&image, &Access { docker_config: Some(config.to_owned()), ..Access::default() }).unwrap()
    }

    #[test]
    fn the_entry_of_the_registry_is_taken_the_closest_one_first() {
        let config = r#"{"auths": {
            "https://index.docker.io/v1/": {"auth": "aHViOmE="},
            "registry.example": {"username": "all", "password": "b:c"},
            "registry.example/team": {"auth": "dGVhbTpk"}}}"#;
        let pair = |source| login(config, source).pair;
        assert_eq!(pair("oci://docker.io/ai/m").unwrap(), "hub:a");
        assert_eq!(pair("oci://registry.example/m").unwrap(), "all:b:c");
        assert_eq!(pair("oci://registry.example/team/m").unwrap(), "team:d");
        assert_eq!(pair("oci://registry.example/teams/m").unwrap(), "all:b:c");
        let none = login(config, "oci://other.example/m");
        assert!(none.basic().is_none() && none.fix().contains("no entry for other.example"), "{}", none.fix());
    }

    #[test]
    fn a_challenge_says_where_tokens_come_from() {
        let bearer =
            r#"Bearer realm="https://auth.example/token",service="registry.example",scope="repository:a/b:pull""#;
        let Some(Challenge::Bearer { realm, service, scope }) = Challenge::parse(bearer) else { panic!("{bearer}") };
        assert_eq!(realm.as_str(), "https://auth.example/token");
        assert_eq!((service.as_deref(), scope.as_deref()), (Some("registry.example"), Some("repository:a/b:pull")));
        assert_eq!(Challenge::parse(r#"Basic realm="a""#), Some(Challenge::Basic));
        for none in ["", "Negotiate", "Bearer service=\"a\"", "\u{7f}"] {
            assert_eq!(Challenge::parse(none), None, "{none}");
        }
    }

    #[test]
    fn tokens_have_one_of_two_names() {
        for body in [r#"{"token": "a"}"#, r#"{"access_token": "a", "expires_in": 300}"#] {
            assert_eq!(super::bearer(body.as_bytes()).unwrap(), "Bearer a");
        }
        assert!(super::bearer(b"{}").is_none());
    }

    #[test]
    fn only_registries_of_this_machine_are_asked_in_the_clear() {
        for near in ["localhost", "localhost:5000", "127.0.0.1:5000"] {
            assert!(is_loopback(near), "{near}");
        }
        for far in ["registry.example", "10.0.0.1:5000", "localhost.example"] {
            assert!(!is_loopback(far), "{far}");
        }
    }
}
