//! `hf://ORG/MODEL[/FILE.gguf][@REVISION]`: which model of a hub, and which file or revision of it. Pure.

use std::{fmt, str::FromStr};

/// What a source begins with.
pub const HUB_SCHEME: &str = "hf://";
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

/// Not a source of this form.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("\"{0}\" is not hf://ORG/MODEL[/FILE.gguf][@REVISION], for example hf://Qwen/Qwen2.5-0.5B-Instruct")]
pub struct NotAHubModel(pub String);

impl FromStr for HubModel {
    type Err = NotAHubModel;

    fn from_str(text: &str) -> Result<Self, NotAHubModel> {
        parse(text).ok_or_else(|| NotAHubModel(text.to_owned()))
    }
}

fn parse(text: &str) -> Option<HubModel> {
    let rest = text.strip_prefix(HUB_SCHEME)?;
    let (path, revision) = rest.split_once('@').unwrap_or((rest, DEFAULT_REVISION));
    let mut parts = path.splitn(3, '/');
    let (org, model, file) = (parts.next()?, parts.next()?, parts.next());
    let names_are_plain = [org, model].into_iter().all(is_name);
    let file_is_gguf = file.is_none_or(|file| file.ends_with(".gguf") && file.split('/').all(is_name));
    let revision_is_plain = revision.split('/').all(is_name);
    (names_are_plain && file_is_gguf && revision_is_plain).then(|| HubModel {
        id: format!("{org}/{model}"),
        file: file.map(str::to_owned),
        revision: revision.to_owned(),
    })
}

/// One part of a path: what a hub allows in names, and nothing that leads out of a directory.
fn is_name(part: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    !part.is_empty() && part.chars().all(plain) && !part.starts_with('.') && !part.contains("..")
}

impl HubModel {
    /// The commit, if the revision is one: it can never mean other bytes.
    pub fn commit(&self) -> Option<&str> {
        Some(&*self.revision).filter(|revision| is_commit(revision))
    }
}

/// Whether `revision` is a commit, written out.
pub fn is_commit(revision: &str) -> bool {
    revision.len() == 40 && revision.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

impl fmt::Display for HubModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{HUB_SCHEME}{}", self.id)?;
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
            let model: HubModel = text.parse().unwrap();
            assert_eq!(model.to_string(), text);
            (model.id, model.file, model.revision)
        };
        assert_eq!(parts("hf://Qwen/Qwen2.5-0.5B"), ("Qwen/Qwen2.5-0.5B".into(), None, "main".into()));
        assert_eq!(parts("hf://a/b@v1.0"), ("a/b".into(), None, "v1.0".into()));
        assert_eq!(parts("hf://a/b@refs/pr/3"), ("a/b".into(), None, "refs/pr/3".into()));
        assert_eq!(parts("hf://a/b/q8.gguf@v1"), ("a/b".into(), Some("q8.gguf".into()), "v1".into()));
        assert_eq!(parts("hf://a/b/q8/q8.gguf"), ("a/b".into(), Some("q8/q8.gguf".into()), "main".into()));
    }

    #[test]
    fn other_forms_are_refused_with_the_right_one() {
        for text in
            ["hf://", "hf://a", "hf://a/", "hf://a/b@", "hf://a/../b", "hf://a/b/c.txt", "hf://a/b/", "s3://a/b"]
        {
            let refused = text.parse::<HubModel>().unwrap_err().to_string();
            assert!(refused.contains(text) && refused.contains("hf://ORG/MODEL"), "{refused}");
        }
    }

    #[test]
    fn only_a_whole_hash_is_a_commit() {
        let commit = |revision: &str| format!("hf://a/b@{revision}").parse::<HubModel>().unwrap().commit().is_some();
        assert!(commit("0123456789abcdef0123456789abcdef01234567"));
        assert!(!commit("0123456"));
        assert!(!commit("main"));
    }
}
