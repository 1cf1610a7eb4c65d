//! What a file must be, and computing it as bytes come: SHA-256, git's own SHA-1, or the checksum that a bucket publishes of
//! an object. Pure.

use std::fmt;

use base64::{Engine, prelude::BASE64_STANDARD};
use crc_fast::CrcAlgorithm;
use ring::digest::{Context, SHA1_FOR_LEGACY_USE_ONLY, SHA256};

/// What a file must be. It names the file in the cache.
#[derive(Clone, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum Digest {
    /// SHA-256 of its bytes, in hexadecimal digits.
    Sha256(String),
    /// Git's name of it, in hexadecimal digits.
    GitBlob(String),
    /// An object of a bucket whose hash nobody publishes.
    Object {
        /// SHA-256 of where it is and what was listed of it, in hexadecimal digits.
        listed: String,
        /// What tells whether its bytes came as they were uploaded, if its server has it.
        checksum: Option<Checksum>,
    },
}

/// A checksum of a whole object: finds what went wrong on the way, not what somebody did on purpose.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Checksum {
    kind: Crc,
    value: u64,
}

/// Checksums that buckets publish.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum Crc {
    /// CRC-32 of zip and Ethernet.
    Crc32,
    /// Castagnoli's.
    Crc32c,
    /// 64 bits, as NVMe has it.
    Crc64Nvme,
}

impl Crc {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Crc64Nvme, Self::Crc32c, Self::Crc32];

    /// As headers name it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Crc32 => "crc32",
            Self::Crc32c => "crc32c",
            Self::Crc64Nvme => "crc64nvme",
        }
    }

    fn algorithm(self) -> CrcAlgorithm {
        match self {
            Self::Crc32 => CrcAlgorithm::Crc32IsoHdlc,
            Self::Crc32c => CrcAlgorithm::Crc32Iscsi,
            Self::Crc64Nvme => CrcAlgorithm::Crc64Nvme,
        }
    }

    fn n_bytes(self) -> usize {
        if self == Self::Crc64Nvme { 8 } else { 4 }
    }

    /// Of its bytes in base64, the highest first; `None` if `text` is none.
    pub fn checksum(self, text: &str) -> Option<Checksum> {
        let bytes = BASE64_STANDARD.decode(text).ok().filter(|bytes| bytes.len() == self.n_bytes())?;
        Some(Checksum { kind: self, value: bytes.iter().fold(0, |value, byte| value << 8 | u64::from(*byte)) })
    }
}

impl fmt::Display for Checksum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{:0digits$x}", self.kind.name(), self.value, digits = self.kind.n_bytes() * 2)
    }
}

impl Digest {
    /// A hash of 64 digits; `None` if `hex` is none.
    pub fn sha256(hex: &str) -> Option<Self> {
        is_hex(hex, 64).then(|| Self::Sha256(hex.to_owned()))
    }

    /// The same of its bytes in base64.
    pub fn sha256_of_base64(text: &str) -> Option<Self> {
        let bytes = BASE64_STANDARD.decode(text).ok().filter(|bytes| bytes.len() == 32)?;
        Some(Self::Sha256(hex(&bytes)))
    }

    /// A name of 40 digits; `None` if `hex` is none.
    pub fn git_blob(hex: &str) -> Option<Self> {
        is_hex(hex, 40).then(|| Self::GitBlob(hex.to_owned()))
    }

    /// Whether nobody can make other bytes of it: a checksum finds damage, not intent.
    pub fn is_proof(&self) -> bool {
        matches!(self, Self::Sha256(_) | Self::GitBlob(_))
    }

    /// Begins to compute what a file of `size` bytes is.
    pub fn hasher(&self, size: u64) -> Hasher {
        let sum = match self {
            Self::Sha256(_) => Sum::Sha256(Context::new(&SHA256)),
            Self::GitBlob(_) => {
                let mut context = Context::new(&SHA1_FOR_LEGACY_USE_ONLY);
                context.update(format!("blob {size}\0").as_bytes());
                Sum::GitBlob(context)
            }
            Self::Object { listed, checksum } => {
                let digest = |checksum: &Checksum| crc_fast::Digest::new(checksum.kind.algorithm());
                Sum::Object { listed: listed.clone(), crc: checksum.as_ref().map(|sum| (sum.kind, digest(sum))) }
            }
        };
        Hasher(sum)
    }

    /// What is published of its bytes.
    pub fn published(&self) -> String {
        match self {
            Self::Object { checksum: Some(checksum), .. } => checksum.to_string(),
            _ => self.to_string(),
        }
    }
}

/// The name of a file with this content.
impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sha256(hex) => write!(f, "sha256-{hex}"),
            Self::GitBlob(hex) => write!(f, "git-{hex}"),
            Self::Object { listed, .. } => write!(f, "object-{listed}"),
        }
    }
}

/// SHA-256 of a text or a small file, in hexadecimal digits.
pub fn sha256_hex(bytes: &[u8]) -> String {
    hex(ring::digest::digest(&SHA256, bytes).as_ref())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn is_hex(text: &str, digits: usize) -> bool {
    text.len() == digits && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// What a file is, being computed.
#[derive(Clone)]
pub struct Hasher(Sum);

#[derive(Clone)]
enum Sum {
    Sha256(Context),
    GitBlob(Context),
    Object { listed: String, crc: Option<(Crc, crc_fast::Digest)> },
}

impl Hasher {
    /// The next bytes of the file.
    pub fn update(&mut self, bytes: &[u8]) {
        match &mut self.0 {
            Sum::Sha256(context) | Sum::GitBlob(context) => context.update(bytes),
            Sum::Object { crc, .. } => crc.iter_mut().for_each(|(_, digest)| digest.update(bytes)),
        }
    }

    /// What all bytes are.
    pub fn finish(self) -> Digest {
        match self.0 {
            Sum::Sha256(context) => Digest::Sha256(hex(context.finish().as_ref())),
            Sum::GitBlob(context) => Digest::GitBlob(hex(context.finish().as_ref())),
            Sum::Object { listed, crc } => {
                let checksum = crc.map(|(kind, digest)| Checksum { kind, value: digest.finalize() });
                Digest::Object { listed, checksum }
            }
        }
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

    /// Against the check values of the catalogue of CRCs: of "123456789".
    #[test]
    fn checksums_are_those_of_the_catalogue() {
        let catalogue = [(Crc::Crc32, "cbf43926"), (Crc::Crc32c, "e3069283"), (Crc::Crc64Nvme, "ae8b14860a799888")];
        for (kind, value) in catalogue {
            let other = Checksum { kind, value: 0 };
            let object = Digest::Object { listed: "1".repeat(64), checksum: Some(other) };
            let mut hasher = object.hasher(9);
            [&b"1234"[..], b"56789"].into_iter().for_each(|part| hasher.update(part));
            let found = hasher.finish();
            assert_eq!(found.published(), format!("{}-{value}", kind.name()));
            assert_ne!(found, object, "another checksum is another file");
            assert_eq!(found.to_string(), object.to_string(), "by its name it is the one that was listed");
        }
        assert_eq!(Crc::Crc32.checksum("y/Q5Jg==").unwrap().to_string(), "crc32-cbf43926");
        for none in ["y/Q5Jg==-3", "y/Q5", ""] {
            assert_eq!(Crc::Crc32.checksum(none), None, "{none}");
        }
    }

    #[test]
    fn an_object_without_a_checksum_is_what_was_listed() {
        let object = Digest::Object { listed: "1".repeat(64), checksum: None };
        let mut hasher = object.hasher(1);
        hasher.update(b"x");
        assert_eq!(hasher.finish(), object);
    }
}
