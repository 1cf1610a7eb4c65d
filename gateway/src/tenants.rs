//! Who may ask for what: tenants, the hashes of their keys and their limits, as a file says that a Secret is mounted as. No key is ever
//! in it, nor in a log. Pure; [`keys`](crate::keys) reads the file.

use std::{collections::HashSet, sync::Arc};

use serde::Deserialize;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;
use thiserror::Error;

use crate::fleet::Deployment;

/// How a hash is written: `sha256:` and 64 hexadecimal digits.
const HASH_PREFIX: &str = "sha256:";
const HASH_BYTES: usize = 32;
/// Longer keys are nobody's.
const KEY_BYTES_MAX: usize = 1024;
/// Beyond it a tenant of weight 1 would hardly ever have its turn.
const WEIGHT_MAX: u32 = 1000;

/// What is wrong with a file.
#[derive(Clone, Debug, Error, PartialEq)]
pub enum TenantsError {
    /// It is not YAML of this form.
    #[error("{0}")]
    Form(String),
    /// Everybody would be refused.
    #[error("there is no tenant: without the file everybody may ask")]
    Empty,
    /// A name that cannot be one, or is there twice.
    #[error("tenant {0:?}: names are 1 to 63 letters, digits, '-', '_' and '.', each there once")]
    Name(String),
    /// A hash that is none.
    #[error(
        "tenant {tenant}: keys[{place}] is no hash: write `sha256:` and what `printf %s \"$KEY\" | sha256sum` says"
    )]
    Hash {
        /// Whose.
        tenant: String,
        /// Which of its keys; what it is may be a secret.
        place: usize,
    },
    /// Two tenants with one key: whose request is it?
    #[error("tenants {0} and {1} have a key in common")]
    Shared(String, String),
    /// A weight that is none.
    #[error("tenant {0}: weight is a whole number of 1 to {WEIGHT_MAX}; 1 if it is left out")]
    Weight(String),
    /// A limit that admits nothing.
    #[error("tenant {0}: limits.{1} is 0: leave the tenant out, or the limit")]
    Zero(String, &'static str),
}

/// A tenant.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Tenant {
    /// By which metrics and logs know it.
    pub name: String,
    #[serde(rename = "keys")]
    written: Vec<String>,
    /// What it may ask for: names of models, or `NAME.NAMESPACE` of deployments. Nothing: everything.
    pub models: Option<Vec<String>>,
    /// What it may have.
    #[serde(default)]
    pub limits: Limits,
    /// The class of its requests in line, unless they ask for a larger one; smaller is sooner.
    #[serde(default)]
    pub priority: i32,
    /// Its part beside others of its class.
    #[serde(default = "one")]
    pub weight: u32,
    /// Its cached prompts serve other tenants' requests, and theirs its own.
    #[serde(default)]
    pub shares_prefixes: bool,
    #[serde(skip)]
    hashes: Vec<[u8; HASH_BYTES]>,
}

/// What a tenant may have of each gateway. Nothing: as much as there is.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Limits {
    /// Requests that begin in a minute.
    pub requests_per_minute: Option<u32>,
    /// Prompt and completion tokens in a minute.
    pub tokens_per_minute: Option<u32>,
    /// Requests at the same time.
    pub concurrent_requests: Option<u32>,
}

fn one() -> u32 {
    1
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    tenants: Vec<Tenant>,
}

/// All tenants.
#[derive(Clone, Debug, PartialEq)]
pub struct Tenants(Vec<Arc<Tenant>>);

impl Tenants {
    /// Reads what a file says.
    pub fn parse(text: &str) -> Result<Self, TenantsError> {
        let file: File = serde_norway::from_str(text).map_err(|error| TenantsError::Form(error.to_string()))?;
        if file.tenants.is_empty() {
            return Err(TenantsError::Empty);
        }
        let tenants = file.tenants.into_iter().map(checked).collect::<Result<Vec<_>, _>>()?;
        let mut names = HashSet::new();
        for tenant in &tenants {
            if !names.insert(&tenant.name) {
                return Err(TenantsError::Name(tenant.name.clone()));
            }
        }
        for (at, tenant) in tenants.iter().enumerate() {
            let shares = |other: &&Tenant| other.hashes.iter().any(|hash| tenant.hashes.contains(hash));
            if let Some(other) = tenants[..at].iter().find(shares) {
                return Err(TenantsError::Shared(other.name.clone(), tenant.name.clone()));
            }
        }
        Ok(Self(tenants.into_iter().map(Arc::new).collect()))
    }

    /// Whose key it is. Takes as long for one that is nearly right, and looks at all of them.
    pub fn of(&self, key: &[u8]) -> Option<&Arc<Tenant>> {
        if key.len() > KEY_BYTES_MAX {
            return None;
        }
        let sent = Sha256::digest(key);
        let mut found = None;
        for tenant in &self.0 {
            for hash in &tenant.hashes {
                if bool::from(hash.as_slice().ct_eq(&sent)) {
                    found = Some(tenant);
                }
            }
        }
        found
    }

    /// The one of this name.
    pub fn named(&self, name: &str) -> Option<&Arc<Tenant>> {
        self.0.iter().find(|tenant| tenant.name == name)
    }
}

impl Tenant {
    /// Whether it may ask a deployment.
    pub fn may_ask(&self, deployment: &Deployment) -> bool {
        let Some(models) = &self.models else { return true };
        models.iter().any(|model| deployment.models.contains(model) || *model == deployment.host())
    }
}

fn checked(mut tenant: Tenant) -> Result<Tenant, TenantsError> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if tenant.name.is_empty() || tenant.name.len() > 63 || !tenant.name.chars().all(is_plain) {
        return Err(TenantsError::Name(tenant.name));
    }
    let written = std::mem::take(&mut tenant.written);
    for (place, text) in written.iter().enumerate() {
        let hash = parsed(text).ok_or_else(|| TenantsError::Hash { tenant: tenant.name.clone(), place })?;
        tenant.hashes.push(hash);
    }
    if !(1..=WEIGHT_MAX).contains(&tenant.weight) {
        return Err(TenantsError::Weight(tenant.name));
    }
    let Limits { requests_per_minute, tokens_per_minute, concurrent_requests } = tenant.limits;
    for (limit, name) in [
        (requests_per_minute, "requestsPerMinute"),
        (tokens_per_minute, "tokensPerMinute"),
        (concurrent_requests, "concurrentRequests"),
    ] {
        if limit == Some(0) {
            return Err(TenantsError::Zero(tenant.name, name));
        }
    }
    Ok(tenant)
}

fn parsed(text: &str) -> Option<[u8; HASH_BYTES]> {
    let digits = text.strip_prefix(HASH_PREFIX)?;
    if digits.len() != 2 * HASH_BYTES || !digits.is_ascii() {
        return None;
    }
    let mut hash = [0; HASH_BYTES];
    for (at, byte) in hash.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&digits[2 * at..2 * at + 2], 16).ok()?;
    }
    Some(hash)
}

#[cfg(test)]
mod tests {
    use super::*;

    const OF_ABC: &str = "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
    const OF_NOTHING: &str = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

    fn file(tenants: &str) -> Result<Tenants, TenantsError> {
        Tenants::parse(&format!("tenants: [{tenants}]"))
    }

    #[test]
    fn a_tenant_is_known_by_any_of_its_keys() {
        let tenants = file(&format!(
            "{{name: search, keys: ['{OF_ABC}'], limits: {{requestsPerMinute: 60}}, models: [chat]}}, {{name: b, keys: ['{OF_NOTHING}']}}"
        ));
        let tenants = tenants.unwrap();
        let name = |key: &[u8]| tenants.of(key).map(|tenant| tenant.name.clone());
        assert_eq!([name(b"abc"), name(b"")], [Some("search".into()), Some("b".into())]);
        assert_eq!([name(b"abd"), name(b"ab"), name(&[b'a'; 2000])], [None, None, None]);
        let search = tenants.of(b"abc").unwrap();
        assert_eq!((search.limits.requests_per_minute, search.priority, search.weight), (Some(60), 0, 1));
        assert!(!format!("{tenants:?}").contains("abc\""));
    }

    #[test]
    fn what_is_wrong_is_said_without_the_key() {
        for (tenants, error) in [
            ("", TenantsError::Empty),
            ("{name: '', keys: []}", TenantsError::Name(String::new())),
            ("{name: 'a b', keys: []}", TenantsError::Name("a b".into())),
            ("{name: a, keys: []}, {name: a, keys: []}", TenantsError::Name("a".into())),
            ("{name: a, keys: [the-key-itself]}", TenantsError::Hash { tenant: "a".into(), place: 0 }),
            ("{name: a, keys: ['sha256:ü']}", TenantsError::Hash { tenant: "a".into(), place: 0 }),
            (
                &format!("{{name: a, keys: ['{OF_ABC}']}}, {{name: b, keys: ['{OF_ABC}']}}"),
                TenantsError::Shared("a".into(), "b".into()),
            ),
            ("{name: a, keys: [], limits: {tokensPerMinute: 0}}", TenantsError::Zero("a".into(), "tokensPerMinute")),
            ("{name: a, keys: [], weight: 0}", TenantsError::Weight("a".into())),
        ] {
            assert_eq!(file(tenants), Err(error), "{tenants}");
        }
        for unknown in ["{name: a, keys: [], model: x}", "{keys: []}", "{name: a, keys: [], limits: {rpm: 1}}"] {
            assert!(matches!(file(unknown), Err(TenantsError::Form(_))), "{unknown}");
        }
        assert!(matches!(Tenants::parse("a: b"), Err(TenantsError::Form(_))));
    }
}
