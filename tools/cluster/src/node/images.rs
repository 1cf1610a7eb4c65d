//! Which local binary stands for which container image. Pulls nothing.

use std::{collections::BTreeMap, path::PathBuf, str::FromStr};

/// Container image names and the binaries that run in their place.
#[derive(Clone, Debug, Default)]
pub struct ImageMap(BTreeMap<String, PathBuf>);

/// One `NAME=BINARY` of a command line.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct ImageBinary {
    /// The image, with or without a tag; without one it stands for every tag.
    pub name: String,
    /// The program that is its entry point.
    pub binary: PathBuf,
}

impl FromStr for ImageBinary {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.split_once('=') {
            Some((name, binary)) if !name.is_empty() && !binary.is_empty() => {
                Ok(Self { name: name.to_owned(), binary: binary.into() })
            }
            _ => Err(format!("'{text}' is not NAME=BINARY, e.g. stoker-agent=target/release/stoker-agent")),
        }
    }
}

impl FromIterator<ImageBinary> for ImageMap {
    fn from_iter<I: IntoIterator<Item = ImageBinary>>(images: I) -> Self {
        Self(images.into_iter().map(|image| (image.name, image.binary)).collect())
    }
}

impl ImageMap {
    /// Makes `binary` the entry point of `image`.
    pub fn insert(&mut self, image: &str, binary: impl Into<PathBuf>) {
        self.0.insert(image.to_owned(), binary.into());
    }

    /// The entry point of `image`: an exact match, else the name without its tag or digest.
    pub(crate) fn entry_point(&self, image: &str) -> Option<PathBuf> {
        self.0.get(image).or_else(|| self.0.get(without_tag(image))).cloned()
    }

    /// The names, for the message of a failed pull.
    pub(crate) fn names(&self) -> String {
        let names: Vec<&str> = self.0.keys().map(String::as_str).collect();
        if names.is_empty() { "none".to_owned() } else { names.join(", ") }
    }
}

/// `host:5000/a/b:tag@sha256:…` without tag and digest. A colon before the last slash belongs to a port.
fn without_tag(image: &str) -> &str {
    let name = image.split_once('@').map_or(image, |(name, _)| name);
    let last_part = name.rfind('/').map_or(0, |slash| slash + 1);
    name[last_part..].find(':').map_or(name, |colon| &name[..last_part + colon])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_without_tag_stands_for_every_tag_and_a_tagged_one_for_itself() {
        let images: ImageMap = ["a.example:5000/agent=/bin/agent", "other:v1=/bin/other"]
            .iter()
            .map(|text| text.parse::<ImageBinary>().unwrap())
            .collect();
        let entry_point = |image| images.entry_point(image).map(|path| path.display().to_string());
        assert_eq!(entry_point("a.example:5000/agent"), Some("/bin/agent".to_owned()));
        assert_eq!(entry_point("a.example:5000/agent:0.1"), Some("/bin/agent".to_owned()));
        assert_eq!(entry_point("a.example:5000/agent:0.1@sha256:00"), Some("/bin/agent".to_owned()));
        assert_eq!(entry_point("other:v1"), Some("/bin/other".to_owned()));
        assert_eq!(entry_point("other:v2"), None);
    }

    #[test]
    fn a_pair_without_a_binary_is_refused_with_an_example() {
        let error = "agent".parse::<ImageBinary>().unwrap_err();
        assert!(error.contains("NAME=BINARY"), "{error}");
    }
}
