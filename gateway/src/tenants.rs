//! Who may ask for what: tenants, the hashes of their keys and their limits, and whose tokens name them, as a file says that a Secret is mounted as.
//! No key is ever in it, nor in a log. Pure; [`keys`](crate::keys) reads the file.

use std::{collections::HashSet, sync::Arc};

use serde::Deserialize;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;
use thiserror::Error;

use crate::{
    fleet::Deployment,
    oidc::{spec::IssuerSpec, token::Identity},
};

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
    #[error("there is no tenant, and no class of an issuer's: without the file everybody may ask")]
    Empty,
    /// A name that cannot be one, or is there twice.
    #[error("tenant {0:?}: names are 1 to 63 letters, digits, '-', '_', '.', ':', '@' and '|', each there once")]
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
    /// Whoever has it would be all of the class.
    #[error("class {0}: a class has no keys, tenants of it send tokens")]
    ClassKeys(String),
    /// An issuer that cannot be one.
    #[error("issuer {0}: {1}")]
    Issuer(String, String),
}

/// Why a token that is believed names no tenant.
#[derive(Clone, Debug, Error, Eq, PartialEq)]
pub enum Nobody {
    /// It names nobody of the file, nor a class.
    #[error(
        "the token's claim names no tenant of this gateway, nor a class of tenants: ask who keeps the list to add it"
    )]
    Unknown,
    /// What it names cannot be a name.
    #[error("the token's claim is no name of a tenant: 1 to 63 letters, digits, '-', '_', '.', ':', '@' and '|'")]
    Name,
}

/// A tenant.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Tenant {
    /// By which metrics and logs know it.
    pub name: String,
    #[serde(rename = "keys", default)]
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
    #[serde(default)]
    tenants: Vec<Tenant>,
    #[serde(default)]
    classes: Vec<Tenant>,
    #[serde(default)]
    issuers: Vec<IssuerSpec>,
}

/// All tenants.
#[derive(Clone, Debug, PartialEq)]
pub struct Tenants {
    tenants: Vec<Arc<Tenant>>,
    /// What those have that are not in the file, by the class that their tokens name.
    classes: Vec<Tenant>,
    issuers: Vec<IssuerSpec>,
}

impl Tenants {
    /// Reads what a file says.
    pub fn parse(text: &str) -> Result<Self, TenantsError> {
        let file: File = serde_norway::from_str(text).map_err(|error| TenantsError::Form(error.to_string()))?;
        let File { tenants, classes, issuers } = file;
        if tenants.is_empty() && (classes.is_empty() || issuers.is_empty()) {
            return Err(TenantsError::Empty);
        }
        let (tenants, classes) = (each_once(tenants)?, each_once(classes)?);
        if let Some(class) = classes.iter().find(|class| !class.hashes.is_empty()) {
            return Err(TenantsError::ClassKeys(class.name.clone()));
        }
        for (at, tenant) in tenants.iter().enumerate() {
            let shares = |other: &&Tenant| other.hashes.iter().any(|hash| tenant.hashes.contains(hash));
            if let Some(other) = tenants[..at].iter().find(shares) {
                return Err(TenantsError::Shared(other.name.clone(), tenant.name.clone()));
            }
        }
        let mut names = HashSet::new();
        for spec in &issuers {
            let again = || (!names.insert(&spec.issuer)).then(|| "it is there twice".to_owned());
            if let Some(fault) = spec.fault().or_else(again) {
                return Err(TenantsError::Issuer(spec.issuer.clone(), fault));
            }
        }
        Ok(Self { tenants: tenants.into_iter().map(Arc::new).collect(), classes, issuers })
    }

    /// Whose key it is. Takes as long for one that is nearly right, and looks at all of them.
    pub fn of(&self, key: &[u8]) -> Option<&Arc<Tenant>> {
        if key.len() > KEY_BYTES_MAX {
            return None;
        }
        let sent = Sha256::digest(key);
        let mut found = None;
        for tenant in &self.tenants {
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
        self.tenants.iter().find(|tenant| tenant.name == name)
    }

    /// Whose tokens are believed.
    pub fn issuers(&self) -> &[IssuerSpec] {
        &self.issuers
    }

    /// Whom a token means that was believed: the one of the file, else one of its own with what its class may have; whether it is the last.
    pub fn meant(&self, identity: &Identity) -> Result<(Arc<Tenant>, bool), Nobody> {
        if let Some(tenant) = self.named(&identity.tenant) {
            return Ok((Arc::clone(tenant), false));
        }
        let class = self.classes.iter().find(|class| Some(&class.name) == identity.class.as_ref());
        let class = class.ok_or(Nobody::Unknown)?;
        if !is_name(&identity.tenant) {
            return Err(Nobody::Name);
        }
        Ok((Arc::new(Tenant { name: identity.tenant.clone(), ..class.clone() }), true))
    }
}

impl Tenant {
    /// Whether it may ask a deployment.
    pub fn may_ask(&self, deployment: &Deployment) -> bool {
        let Some(models) = &self.models else { return true };
        models.iter().any(|model| deployment.models.contains(model) || *model == deployment.host())
    }
}

fn each_once(tenants: Vec<Tenant>) -> Result<Vec<Tenant>, TenantsError> {
    let tenants = tenants.into_iter().map(checked).collect::<Result<Vec<_>, _>>()?;
    let mut names = HashSet::new();
    match tenants.iter().find(|tenant| !names.insert(&tenant.name)) {
        Some(again) => Err(TenantsError::Name(again.name.clone())),
        None => Ok(tenants),
    }
}

/// It is in metrics, logs and headers.
fn is_name(name: &str) -> bool {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.:@|".contains(c);
    (1..=63).contains(&name.len()) && name.chars().all(is_plain)
}

fn checked(mut tenant: Tenant) -> Result<Tenant, TenantsError> {
    if !is_name(&tenant.name) {
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
    fn a_token_means_a_tenant_of_the_file_or_one_of_a_class() {
        let tenants = Tenants::parse(
            "{tenants: [{name: search, weight: 7}], classes: [{name: small, weight: 2, limits: {requestsPerMinute: 3}}],
              issuers: [{issuer: 'https://a.example', audiences: [stoker], tenantClaim: sub, classClaim: tier}]}",
        );
        let tenants = tenants.unwrap();
        let meant = |tenant: &str, class: Option<&str>| {
            let identity = Identity { tenant: tenant.into(), class: class.map(str::to_owned), until_s: 0 };
            let found = tenants.meant(&identity);
            found.map(|(tenant, of_class)| {
                (tenant.name.clone(), tenant.weight, tenant.limits.requests_per_minute, of_class)
            })
        };
        assert_eq!(meant("search", None), Ok(("search".into(), 7, None, false)));
        assert_eq!(meant("search", Some("small")), Ok(("search".into(), 7, None, false)), "the file knows it");
        assert_eq!(meant("a@b.example", Some("small")), Ok(("a@b.example".into(), 2, Some(3), true)));
        assert_eq!([meant("x", None), meant("x", Some("large"))], [Err(Nobody::Unknown), Err(Nobody::Unknown)]);
        for name in ["", "a b", "a\nb", "ä", &"x".repeat(64)] {
            assert_eq!(meant(name, Some("small")), Err(Nobody::Name), "{name:?}");
        }
        assert_eq!(tenants.of(b""), None);
        let only = "{classes: [{name: a}], issuers: [{issuer: 'https://a.example', audiences: [b], tenantClaim: c}]}";
        assert!(Tenants::parse(only).is_ok());
        assert_eq!(Tenants::parse("classes: [{name: a}]"), Err(TenantsError::Empty));
        let keys = format!("{{tenants: [{{name: a}}], classes: [{{name: b, keys: ['{OF_ABC}']}}]}}");
        assert_eq!(Tenants::parse(&keys), Err(TenantsError::ClassKeys("b".into())));
    }

    #[test]
    fn an_issuer_that_cannot_be_one_is_refused_by_name() {
        let parse = |issuers: &str| Tenants::parse(&format!("{{tenants: [{{name: a}}], issuers: [{issuers}]}}"));
        let with = |more: &str| format!("{{issuer: 'https://a.example', audiences: [b], tenantClaim: c{more}}}");
        assert!(parse(&with("")).is_ok());
        for (issuers, expected) in [
            ("{issuer: '', audiences: [b], tenantClaim: c}".to_owned(), "issuer is empty"),
            ("{issuer: x, audiences: [], tenantClaim: c}".to_owned(), "audiences names nobody"),
            ("{issuer: x, audiences: [b], tenantClaim: ''}".to_owned(), "tenantClaim"),
            ("{issuer: 'http://a.example', audiences: [b], tenantClaim: c}".to_owned(), "https://"),
            (with(", jwks: 'http://a.example/keys'"), "https://"),
            (with(", algorithms: []"), "algorithms is empty"),
            (with(", leewaySeconds: 301"), "leewaySeconds is 300 at most"),
            (format!("{}, {}", with(""), with("")), "it is there twice"),
        ] {
            let Err(TenantsError::Issuer(_, fault)) = parse(&issuers) else { panic!("{issuers}") };
            assert!(fault.contains(expected), "{issuers}: {fault}");
        }
        for algorithm in ["none", "HS256", "ES512"] {
            let refused = parse(&with(&format!(", algorithms: [{algorithm}]")));
            assert!(matches!(refused, Err(TenantsError::Form(_))), "{algorithm}");
        }
        assert!(parse("{issuer: x, audiences: [b], tenantClaim: c, jwks: keys.json}").is_ok(), "a file");
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
