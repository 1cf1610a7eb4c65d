//! What a model's source says: a model of a hub, files of a bucket, an image of a registry, what a web server
//! has. Pure.

mod bucket;
mod hub;
mod image;
mod web;

use std::{fmt, str::FromStr};

pub use self::{
    bucket::BucketModel,
    hub::HubModel,
    image::ImageModel,
    web::{WebForm, WebModel},
};

/// Where a model is.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Source {
    /// `hf://…`.
    Hub(HubModel),
    /// `s3://…`.
    Bucket(BucketModel),
    /// `oci://…`.
    Image(ImageModel),
    /// `https://…`.
    Web(WebModel),
}

/// Not a source.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("\"{text}\" is not {wanted}")]
pub struct NotASource {
    text: String,
    wanted: String,
}

impl FromStr for Source {
    type Err = NotASource;

    fn from_str(text: &str) -> Result<Self, NotASource> {
        let refused = |wanted: &str| NotASource { text: text.to_owned(), wanted: wanted.to_owned() };
        if let Some(rest) = text.strip_prefix(hub::SCHEME) {
            return HubModel::parse(rest).map(Self::Hub).ok_or_else(|| refused(hub::FORM));
        }
        if let Some(rest) = text.strip_prefix(bucket::SCHEME) {
            return BucketModel::parse(rest).map(Self::Bucket).ok_or_else(|| refused(bucket::FORM));
        }
        if let Some(rest) = text.strip_prefix(image::SCHEME) {
            return ImageModel::parse(rest).map(Self::Image).ok_or_else(|| refused(image::FORM));
        }
        if web::SCHEMES.iter().any(|scheme| text.starts_with(scheme)) {
            return WebModel::parse(text).map(Self::Web).ok_or_else(|| refused(web::FORM));
        }
        Err(refused(&format!("{}; {}; {}; or {}", hub::FORM, bucket::FORM, image::FORM, web::FORM)))
    }
}

impl Source {
    /// The commit, if the source names one: it can never mean other bytes.
    pub fn commit(&self) -> Option<&str> {
        match self {
            Self::Hub(model) => model.commit(),
            Self::Bucket(_) => None,
            Self::Image(image) => image.digest.as_deref(),
            Self::Web(model) => model.sha256.as_deref(),
        }
    }

    /// The one .gguf file that is wanted of it; `None`: what is there.
    pub fn file(&self) -> Option<&str> {
        match self {
            Self::Hub(model) => model.file.as_deref(),
            Self::Bucket(model) => model.file.as_deref(),
            Self::Web(WebModel { form: WebForm::Gguf(name), .. }) => Some(name),
            Self::Image(_) | Self::Web(_) => None,
        }
    }

    /// The folder of an image that is the model, if the source says which.
    pub(crate) fn folder(&self) -> Option<&str> {
        match self {
            Self::Image(image) => image.folder.as_deref(),
            Self::Hub(_) | Self::Bucket(_) | Self::Web(_) => None,
        }
    }

    /// Whether the model may lie in folders of whoever packed it.
    pub(crate) fn is_packed(&self) -> bool {
        matches!(self, Self::Image(_) | Self::Web(WebModel { form: WebForm::Archive, .. }))
    }
}

/// Whether `revision` is a commit, written out: git's name of one, or the SHA-256 of what lists a model's files.
pub fn is_commit(revision: &str) -> bool {
    matches!(revision.len(), 40 | 64) && revision.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Hub(model) => model.fmt(f),
            Self::Bucket(model) => model.fmt(f),
            Self::Image(image) => image.fmt(f),
            Self::Web(model) => model.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_forms_are_refused_with_the_right_one() {
        let refused = |text: &str| {
            let refused = text.parse::<Source>().unwrap_err().to_string();
            assert!(refused.starts_with(&format!("\"{text}\" is not ")), "{refused}");
            refused
        };
        for text in ["hf://", "hf://a", "hf://a/", "hf://a/b@", "hf://a/../b", "hf://a/b/c.txt", "hf://a/b/"] {
            assert!(refused(text).contains("hf://ORG/MODEL"));
        }
        for text in
            ["s3://", "s3:///a", "s3://ab", "s3://models/../x", "s3://models//x", "s3://models/a b", "s3://-models"]
        {
            assert!(refused(text).contains("s3://BUCKET/PREFIX"));
        }
        for text in [
            "oci://registry.example",
            "oci://registry.example/",
            "oci://registry.example/Team/m",
            "oci://registry.example/m:",
            "oci://registry.example/m@sha256:12",
            "oci://registry.example/../m",
            "oci://user@registry.example/m",
        ] {
            assert!(refused(text).contains("oci://REGISTRY/REPOSITORY"));
        }
        for text in [
            "https://",
            "https:///m",
            "http://files.example/m",
            "https://user:word@files.example/m",
            "https://files.example/../m",
            "https://files.example/a b",
            "https://files.example/m?folder=1",
            "https://files.example/m#sha256=12",
            "https://files.example/m#main",
        ] {
            assert!(refused(text).contains("https://HOST/PATH"));
        }
        let unknown = refused("gs://a/b");
        assert!(["hf://", "s3://", "oci://", "https://"].iter().all(|scheme| unknown.contains(scheme)), "{unknown}");
    }

    #[test]
    fn only_a_whole_hash_is_a_commit() {
        let commit = |text: &str| text.parse::<Source>().unwrap().commit().map(str::len);
        assert_eq!(commit("hf://a/b@0123456789abcdef0123456789abcdef01234567"), Some(40));
        assert_eq!(commit(&format!("oci://r.example/m@sha256:{}", "0a".repeat(32))), Some(64));
        assert_eq!(commit(&format!("https://files.example/m#sha256={}", "0a".repeat(32))), Some(64));
        for moving in [
            "https://files.example/m",
            "hf://a/b@0123456",
            "hf://a/b",
            "s3://models/m",
            "oci://r.example/m:v1",
            "oci://r.example/m",
        ] {
            assert_eq!(commit(moving), None, "{moving}");
        }
    }
}
