//! `oci://REGISTRY/REPOSITORY[:TAG|@DIGEST]`: an image of a registry whose layers are a model. Pure.

use std::fmt;

use super::is_commit;

pub(super) const SCHEME: &str = "oci://";
pub(super) const FORM: &str =
    "oci://REGISTRY/REPOSITORY[:TAG|@sha256:DIGEST], for example oci://registry.example/models/llama-3.1-8b:v1";
/// The tag of a source that names none.
const DEFAULT_TAG: &str = "latest";

/// An image of a registry.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct ImageModel {
    /// Host and, if it has one, port.
    pub registry: String,
    /// Path of the repository.
    pub repository: String,
    /// The tag, which may mean another image tomorrow. Says nothing beside a digest.
    pub tag: String,
    /// SHA-256 of the manifest, if the source names it.
    pub digest: Option<String>,
}

impl ImageModel {
    /// Of what follows the scheme.
    pub(super) fn parse(rest: &str) -> Option<Self> {
        let (named, digest) = match rest.split_once("@sha256:") {
            Some((named, digest)) => (named, Some(digest)),
            None => (rest, None),
        };
        let (registry, path) = named.split_once('/')?;
        let (repository, tag) = path.split_once(':').unwrap_or((path, DEFAULT_TAG));
        let digest_is_whole = digest.is_none_or(|digest| digest.len() == 64 && is_commit(digest));
        let plain = is_registry(registry) && repository.split('/').all(is_part) && is_tag(tag);
        (plain && digest_is_whole).then(|| Self {
            registry: registry.to_owned(),
            repository: repository.to_owned(),
            tag: tag.to_owned(),
            digest: digest.map(str::to_owned),
        })
    }

    /// What the registry is asked for.
    pub fn reference(&self) -> String {
        self.digest.as_ref().map_or_else(|| self.tag.clone(), |digest| format!("sha256:{digest}"))
    }
}

fn is_registry(registry: &str) -> bool {
    let (host, port) = registry.split_once(':').unwrap_or((registry, "443"));
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.');
    !host.is_empty()
        && host.chars().all(plain)
        && host.starts_with(|c: char| c.is_ascii_alphanumeric())
        && port.parse::<u16>().is_ok()
}

fn is_part(part: &str) -> bool {
    let word = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    let plain = |c: char| word(c) || matches!(c, '-' | '_' | '.');
    part.starts_with(word) && part.ends_with(word) && part.chars().all(plain) && !part.contains("..")
}

fn is_tag(tag: &str) -> bool {
    let word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    tag.len() <= 128 && tag.starts_with(word) && tag.chars().all(|c| word(c) || matches!(c, '-' | '.'))
}

impl fmt::Display for ImageModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{SCHEME}{}/{}", self.registry, self.repository)?;
        match &self.digest {
            Some(digest) => write!(f, "@sha256:{digest}"),
            None => write!(f, ":{}", self.tag),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_names_a_repository_and_may_name_a_tag_or_a_digest() {
        let parts = |text: &str| {
            let image = ImageModel::parse(text.strip_prefix(SCHEME).unwrap()).unwrap();
            (image.registry.clone(), image.repository.clone(), image.reference())
        };
        let digest = "0a".repeat(32);
        let [registry, repository] = ["registry.example:5000", "team/llama-3.1_8b"].map(str::to_owned);
        let whole = |rest: &str| parts(&format!("oci://{registry}/{repository}{rest}"));
        assert_eq!(whole(""), (registry.clone(), repository.clone(), "latest".into()));
        assert_eq!(whole(":v1.0"), (registry.clone(), repository.clone(), "v1.0".into()));
        let named = format!("@sha256:{digest}");
        assert_eq!(whole(&named), (registry.clone(), repository.clone(), format!("sha256:{digest}")));
        assert_eq!(whole(&format!(":v1{named}")).2, format!("sha256:{digest}"), "a digest says more than a tag");
        assert_eq!(parts("oci://localhost/m").0, "localhost");
    }
}
