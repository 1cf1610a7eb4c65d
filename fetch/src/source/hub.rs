//! `hf://ORG/MODEL[/FILE.gguf][@REVISION]`: which model of a hub, and which file or revision of it. Pure.

use std::fmt;

use super::is_commit;

pub(super) const SCHEME: &str = "hf://";
pub(super) const FORM: &str = "hf://ORG/MODEL[/FILE.gguf][@REVISION], for example hf://Qwen/Qwen2.5-0.5B-Instruct";
/// The revision of a source that names none.
const DEFAULT_REVISION: &str = "main";

/// A model on a hub.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct HubModel {
    /// `ORG/MODEL`.
    pub id: String,
    /// The one .gguf file that is wanted; `None`: what the repository has.
    pub file: Option<String>,
    /// Branch, tag or commit.
    pub revision: String,
}

impl HubModel {
    /// Of what follows the scheme.
    pub(super) fn parse(rest: &str) -> Option<Self> {
        let (path, revision) = rest.split_once('@').unwrap_or((rest, DEFAULT_REVISION));
        let mut parts = path.splitn(3, '/');
        let (org, model, file) = (parts.next()?, parts.next()?, parts.next());
        let names_are_plain = [org, model].into_iter().all(is_name);
        let file_is_gguf = file.is_none_or(|file| file.ends_with(".gguf") && file.split('/').all(is_name));
        let revision_is_plain = revision.split('/').all(is_name);
        (names_are_plain && file_is_gguf && revision_is_plain).then(|| Self {
            id: format!("{org}/{model}"),
            file: file.map(str::to_owned),
            revision: revision.to_owned(),
        })
    }

    /// The commit, if the revision is one.
    pub fn commit(&self) -> Option<&str> {
        Some(&*self.revision).filter(|revision| is_commit(revision))
    }
}

/// One part of a path: what a hub allows in names, and nothing that leads out of a directory.
fn is_name(part: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    !part.is_empty() && part.chars().all(plain) && !part.starts_with('.') && !part.contains("..")
}

impl fmt::Display for HubModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{SCHEME}{}", self.id)?;
        self.file.iter().try_for_each(|file| write!(f, "/{file}"))?;
        if self.revision == DEFAULT_REVISION { Ok(()) } else { write!(f, "@{}", self.revision) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_names_a_model_and_may_name_a_file_and_a_revision() {
        let parts = |text: &str| {
            let model = HubModel::parse(text.strip_prefix(SCHEME).unwrap()).unwrap();
            assert_eq!(model.to_string(), text);
            (model.id, model.file, model.revision)
        };
        assert_eq!(parts("hf://Qwen/Qwen2.5-0.5B"), ("Qwen/Qwen2.5-0.5B".into(), None, "main".into()));
        assert_eq!(parts("hf://a/b@v1.0"), ("a/b".into(), None, "v1.0".into()));
        assert_eq!(parts("hf://a/b@refs/pr/3"), ("a/b".into(), None, "refs/pr/3".into()));
        assert_eq!(parts("hf://a/b/q8.gguf@v1"), ("a/b".into(), Some("q8.gguf".into()), "v1".into()));
        assert_eq!(parts("hf://a/b/q8/q8.gguf"), ("a/b".into(), Some("q8/q8.gguf".into()), "main".into()));
    }
}
