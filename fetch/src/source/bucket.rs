//! `s3://BUCKET/PREFIX[/FILE.gguf]`: files of a bucket that are a model. Pure.

use std::fmt;

pub(super) const SCHEME: &str = "s3://";
pub(super) const FORM: &str = "s3://BUCKET/PREFIX[/FILE.gguf], for example s3://models/llama-3.1-8b";

/// Objects of a bucket below a prefix.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct BucketModel {
    /// Name of the bucket.
    pub bucket: String,
    /// What the names of its objects begin with: nothing, or a path that ends with `/`.
    pub prefix: String,
    /// The one .gguf file that is wanted; `None`: what is there.
    pub file: Option<String>,
}

impl BucketModel {
    /// Of what follows the scheme.
    pub(super) fn parse(rest: &str) -> Option<Self> {
        let (bucket, path) = rest.split_once('/').unwrap_or((rest, ""));
        let path = path.strip_suffix('/').unwrap_or(path);
        if !is_bucket(bucket) || !(path.is_empty() || path.split('/').all(is_part)) {
            return None;
        }
        let (dir, last) = path.rsplit_once('/').unwrap_or(("", path));
        let (dir, file) = if last.ends_with(".gguf") { (dir, Some(last.to_owned())) } else { (path, None) };
        let prefix = if dir.is_empty() { String::new() } else { format!("{dir}/") };
        Some(Self { bucket: bucket.to_owned(), prefix, file })
    }
}

/// What S3 and those that speak as it does allow.
fn is_bucket(name: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    (3..=63).contains(&name.len()) && name.chars().all(plain) && name.starts_with(|c: char| c.is_ascii_alphanumeric())
}

/// A part of an object's name: nothing that a URL or a directory takes for something else.
fn is_part(part: &str) -> bool {
    let plain = |c: char| !c.is_whitespace() && !c.is_control() && !matches!(c, '?' | '#');
    !matches!(part, "" | "." | "..") && part.chars().all(plain)
}

impl fmt::Display for BucketModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = format!("{}{}", self.prefix, self.file.as_deref().unwrap_or_default());
        write!(f, "{SCHEME}{}/{path}", self.bucket)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_names_a_prefix_or_a_file() {
        let parts = |text: &str| {
            let model = BucketModel::parse(text.strip_prefix(SCHEME).unwrap()).unwrap();
            (model.bucket, model.prefix, model.file)
        };
        assert_eq!(parts("s3://models"), ("models".into(), "".into(), None));
        assert_eq!(parts("s3://models/"), ("models".into(), "".into(), None));
        assert_eq!(parts("s3://models/a/b"), ("models".into(), "a/b/".into(), None));
        assert_eq!(parts("s3://models/a/b/"), ("models".into(), "a/b/".into(), None));
        assert_eq!(parts("s3://models/a/q8.gguf"), ("models".into(), "a/".into(), Some("q8.gguf".into())));
        assert_eq!(parts("s3://my.models/q8.gguf"), ("my.models".into(), "".into(), Some("q8.gguf".into())));
        assert_eq!(BucketModel::parse("models/a/q8.gguf").unwrap().to_string(), "s3://models/a/q8.gguf");
        assert_eq!(BucketModel::parse("models/a").unwrap().to_string(), "s3://models/a/");
    }
}
