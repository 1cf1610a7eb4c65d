//! The full name of an image: registry, name, tag. Never guesses a registry or a tag, because a guessed one is how a
//! cluster ends up pulling somebody else's image.

use std::{fmt, str::FromStr};

use crate::ImageError;

/// A complete image name, for example `localhost/stoker-agent:dev`.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct ImageReference {
    repository: String,
    tag: String,
}

impl ImageReference {
    /// The part behind the last colon.
    pub fn tag(&self) -> &str {
        &self.tag
    }
}

impl fmt::Display for ImageReference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.repository, self.tag)
    }
}

impl FromStr for ImageReference {
    type Err = ImageError;

    fn from_str(name: &str) -> Result<Self, ImageError> {
        let refuse = |reason| ImageError::Reference { name: name.to_owned(), reason };
        let (host, path) = name.split_once('/').ok_or_else(|| refuse("it names no registry"))?;
        if host != "localhost" && !host.contains(['.', ':']) {
            return Err(refuse("the part before the first slash is not a registry"));
        }
        let (path, tag) = path.split_once(':').ok_or_else(|| refuse("it has no tag"))?;
        if path.is_empty() || !path.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || "-_./".contains(c))
        {
            return Err(refuse("the name may hold lower case letters, digits and -_./"));
        }
        if tag.is_empty() || !tag.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c)) {
            return Err(refuse("the tag may hold letters, digits and -_."));
        }
        Ok(Self { repository: format!("{host}/{path}"), tag: tag.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_complete_name_comes_back_as_written() {
        for name in ["localhost/stoker-agent:dev", "registry.example:5000/team/agent:v0.1.0"] {
            assert_eq!(name.parse::<ImageReference>().unwrap().to_string(), name);
        }
    }

    #[test]
    fn an_incomplete_name_is_refused_with_the_missing_part() {
        let reason = |name: &str| name.parse::<ImageReference>().unwrap_err().to_string();
        assert!(reason("agent:dev").contains("no registry"));
        assert!(reason("team/agent:dev").contains("not a registry"));
        assert!(reason("localhost/agent").contains("no tag"));
        assert!(reason("localhost/Agent:dev").contains("lower case"));
        assert!(reason("localhost/agent:a b").contains("tag may hold"));
    }
}
