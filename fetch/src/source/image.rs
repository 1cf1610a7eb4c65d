//! `oci://REGISTRY/REPOSITORY[:TAG|@DIGEST][#path=FOLDER]`: an image of a registry whose layers are a model. Pure.

use std::fmt;

use super::is_commit;

pub(super) const SCHEME: &str = "oci://";
pub(super) const FORM: &str = "oci://REGISTRY/REPOSITORY[:TAG|@sha256:DIGEST][#path=FOLDER], for example oci://registry.example/models/llama-3.1-8b:v1";
/// Of a folder's path: it is a part of the name that the model has in a cache.
const FOLDER_LENGTH_MAX: usize = 128;
/// What stands before the folder.
const PATH: &str = "#path=";
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
    /// The folder of the image that is the model, without slashes at its ends; empty: the root. `None`: whichever folder is one.
    pub folder: Option<String>,
}

impl ImageModel {
    /// Of what follows the scheme.
    pub(super) fn parse(rest: &str) -> Option<Self> {
        let (rest, folder) = match rest.split_once(PATH) {
            Some((_, "")) => return None,
            Some((rest, folder)) => (rest, Some(trimmed(folder))),
            None => (rest, None),
        };
        let (named, digest) = match rest.split_once("@sha256:") {
            Some((named, digest)) => (named, Some(digest)),
            None => (rest, None),
        };
        let (registry, path) = named.split_once('/')?;
        let (repository, tag) = path.split_once(':').unwrap_or((path, DEFAULT_TAG));
        let digest_is_whole = digest.is_none_or(|digest| digest.len() == 64 && is_commit(digest));
        let plain = is_registry(registry) && repository.split('/').all(is_part) && is_tag(tag);
        let folder_is_plain = folder.is_none_or(is_folder);
        (plain && digest_is_whole && folder_is_plain).then(|| Self {
            registry: registry.to_owned(),
            repository: repository.to_owned(),
            tag: tag.to_owned(),
            digest: digest.map(str::to_owned),
            folder: folder.map(str::to_owned),
        })
    }

    /// What the registry is asked for.
    pub fn reference(&self) -> String {
        self.digest.as_ref().map_or_else(|| self.tag.clone(), |digest| format!("sha256:{digest}"))
    }
}

/// One slash at either end says nothing.
fn trimmed(folder: &str) -> &str {
    let folder = folder.strip_prefix('/').unwrap_or(folder);
    folder.strip_suffix('/').unwrap_or(folder)
}

/// The root, or names that lead nowhere else.
fn is_folder(folder: &str) -> bool {
    let word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let is_name = |name: &str| name.starts_with(word) && name.chars().all(|c| word(c) || matches!(c, '-' | '.'));
    folder.len() <= FOLDER_LENGTH_MAX && (folder.is_empty() || folder.split('/').all(is_name))
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
        }?;
        self.folder.as_ref().map_or(Ok(()), |folder| write!(f, "{PATH}/{folder}"))
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

    #[test]
    fn a_source_may_name_the_folder_of_the_image() {
        let folder = |rest: &str| ImageModel::parse(&format!("r.example/m{rest}")).map(|image| image.folder);
        let named = |folder: &str| Some(Some(folder.to_owned()));
        let digest = format!("@sha256:{}", "0a".repeat(32));
        for same in ["#path=models/chat-3.1", "#path=/models/chat-3.1", "#path=models/chat-3.1/"] {
            assert_eq!(folder(same), named("models/chat-3.1"));
            assert_eq!(folder(&format!(":v1{digest}{same}")), named("models/chat-3.1"));
        }
        assert_eq!(folder("#path=/"), named(""), "the root");
        assert_eq!(folder(""), Some(None));
        for wrong in ["#path=", "#path=..", "#path=a/../b", "#path=a//b", "#path=.git", "#path=a b", "#folder=a"] {
            assert_eq!(folder(wrong), None, "{wrong}");
        }
        let image = ImageModel::parse(&format!("r.example/m{digest}#path=models/")).unwrap();
        assert_eq!(image.to_string(), format!("oci://r.example/m{digest}#path=/models"));
    }
}
