//! Published hashes of files, and computing them as bytes come: SHA-256 of a file that is stored as a large object, git's
//! own SHA-1 of one that is not. Pure.

use std::fmt;

use ring::digest::{Context, SHA1_FOR_LEGACY_USE_ONLY, SHA256};

/// A published hash: what a file must be.
#[derive(Clone, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum Digest {
    /// SHA-256 of its bytes, in hexadecimal digits.
    Sha256(String),
    /// Git's name of it, in hexadecimal digits.
    GitBlob(String),
}

impl Digest {
    /// A hash of 64 digits; `None` if `hex` is none.
    pub fn sha256(hex: &str) -> Option<Self> {
        is_hex(hex, 64).then(|| Self::Sha256(hex.to_owned()))
    }

    /// A name of 40 digits; `None` if `hex` is none.
    pub fn git_blob(hex: &str) -> Option<Self> {
        is_hex(hex, 40).then(|| Self::GitBlob(hex.to_owned()))
    }

    /// Begins to compute the hash of a file of `size` bytes.
    pub fn hasher(&self, size: u64) -> Hasher {
        match self {
            Self::Sha256(_) => Hasher { git: false, context: Context::new(&SHA256) },
            Self::GitBlob(_) => {
                let mut context = Context::new(&SHA1_FOR_LEGACY_USE_ONLY);
                context.update(format!("blob {size}\0").as_bytes());
                Hasher { git: true, context }
            }
        }
    }
}

/// The name of a file with this content.
impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sha256(hex) => write!(f, "sha256-{hex}"),
            Self::GitBlob(hex) => write!(f, "git-{hex}"),
        }
    }
}

fn is_hex(text: &str, digits: usize) -> bool {
    text.len() == digits && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// A hash that is being computed.
pub struct Hasher {
    git: bool,
    context: Context,
}

impl Hasher {
    /// The next bytes of the file.
    pub fn update(&mut self, bytes: &[u8]) {
        self.context.update(bytes);
    }

    /// The hash of all bytes.
    pub fn finish(self) -> Digest {
        let hex = self.context.finish().as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
        if self.git { Digest::GitBlob(hex) } else { Digest::Sha256(hex) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digest_of(like: &str, bytes: &[u8]) -> String {
        let zeros = |digits| "0".repeat(digits);
        let wanted = if like == "git" { Digest::git_blob(&zeros(40)) } else { Digest::sha256(&zeros(64)) };
        let mut hasher = wanted.unwrap().hasher(bytes.len() as u64);
        bytes.chunks(2).for_each(|part| hasher.update(part));
        hasher.finish().to_string()
    }

    /// Against `git hash-object` and `sha256sum`.
    #[test]
    fn hashes_are_those_of_git_and_of_sha256sum() {
        assert_eq!(digest_of("git", b"hello\n"), "git-ce013625030ba8dba906f756967f9e9ca394464a");
        assert_eq!(digest_of("git", b""), "git-e69de29bb2d1d6434b8b29ae775ad8c2e48c5391");
        let sha256 = "sha256-5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03";
        assert_eq!(digest_of("sha256", b"hello\n"), sha256);
    }

    #[test]
    fn what_is_no_hash_is_none() {
        assert_eq!(Digest::sha256("../../etc/passwd"), None);
        assert_eq!(Digest::git_blob(&"g".repeat(40)), None);
        assert_eq!(Digest::sha256(&"a".repeat(40)), None);
    }
}
