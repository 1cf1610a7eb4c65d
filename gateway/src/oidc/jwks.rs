//! The public keys of an issuer, as a JSON Web Key Set (RFC 7517) says them, and whether one of them signed something. The algorithm is the
//! key's as much as the token's: each kind of key has its own, and none of them is a secret that both sides know. Pure.

use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use ring::signature::{
    ECDSA_P256_SHA256_FIXED, ECDSA_P384_SHA384_FIXED, ED25519, RSA_PKCS1_2048_8192_SHA256, RSA_PKCS1_2048_8192_SHA384,
    RSA_PKCS1_2048_8192_SHA512, RSA_PSS_2048_8192_SHA256, RSA_PSS_2048_8192_SHA384, RSA_PSS_2048_8192_SHA512,
    RsaParameters, RsaPublicKeyComponents, UnparsedPublicKey, VerificationAlgorithm,
};
use serde::Deserialize;
use serde_json::Value;
use thiserror::Error;

/// A token without a key's name is tried with all that fit.
const KEYS_MAX: usize = 64;

/// How a token is signed. There is no `none` and nothing with a shared secret: what is not here is not read.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq)]
pub enum Algorithm {
    /// RSASSA-PKCS1-v1_5 with SHA-256.
    RS256,
    /// With SHA-384.
    RS384,
    /// With SHA-512.
    RS512,
    /// RSASSA-PSS with SHA-256.
    PS256,
    /// With SHA-384.
    PS384,
    /// With SHA-512.
    PS512,
    /// ECDSA on P-256 with SHA-256.
    ES256,
    /// ECDSA on P-384 with SHA-384.
    ES384,
    /// Ed25519 (RFC 8037; by its own name in RFC 9864).
    #[serde(alias = "Ed25519")]
    EdDSA,
}

impl Algorithm {
    /// All.
    pub const ALL: [Self; 9] = [
        Self::RS256,
        Self::RS384,
        Self::RS512,
        Self::PS256,
        Self::PS384,
        Self::PS512,
        Self::ES256,
        Self::ES384,
        Self::EdDSA,
    ];

    /// The one of this name.
    pub fn named(name: &str) -> Option<Self> {
        serde_json::from_value(Value::from(name)).ok()
    }

    fn of_rsa(self) -> Option<&'static RsaParameters> {
        match self {
            Self::RS256 => Some(&RSA_PKCS1_2048_8192_SHA256),
            Self::RS384 => Some(&RSA_PKCS1_2048_8192_SHA384),
            Self::RS512 => Some(&RSA_PKCS1_2048_8192_SHA512),
            Self::PS256 => Some(&RSA_PSS_2048_8192_SHA256),
            Self::PS384 => Some(&RSA_PSS_2048_8192_SHA384),
            Self::PS512 => Some(&RSA_PSS_2048_8192_SHA512),
            Self::ES256 | Self::ES384 | Self::EdDSA => None,
        }
    }
}

/// Why a document is no set of keys.
#[derive(Clone, Debug, Error, Eq, PartialEq)]
pub enum JwksError {
    /// It is not JSON of this form.
    #[error("it is no JSON Web Key Set: {0}")]
    Form(String),
    /// No token could be right.
    #[error(
        "none of its {0} keys can be used: RSA of 2048 bits and more, P-256, P-384 and Ed25519 can, for signatures"
    )]
    NoneOfUse(usize),
    /// More than anybody needs.
    #[error("it has {0} keys: {KEYS_MAX} are looked at")]
    TooMany(usize),
}

/// Whether a key signed something.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Verdict {
    /// One did.
    Signed,
    /// The one that is named did not.
    Forged,
    /// None that is known fits: a new one may be.
    UnknownKey,
}

/// A JSON Web Key, as far as it matters here.
#[derive(Deserialize)]
struct Written {
    kty: String,
    kid: Option<String>,
    #[serde(rename = "use")]
    purpose: Option<String>,
    alg: Option<String>,
    crv: Option<String>,
    n: Option<String>,
    e: Option<String>,
    x: Option<String>,
    y: Option<String>,
}

#[derive(Deserialize)]
struct Set {
    keys: Vec<Value>,
}

/// A key.
#[derive(Clone, Debug, Eq, PartialEq)]
struct Key {
    kid: Option<String>,
    /// It signs by no other, if it says so.
    algorithm: Option<Algorithm>,
    public: Public,
}

#[derive(Clone, Debug, Eq, PartialEq)]
enum Public {
    Rsa { n: Vec<u8>, e: Vec<u8> },
    P256(Vec<u8>),
    P384(Vec<u8>),
    Ed25519(Vec<u8>),
}

/// All that an issuer signs with.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Keys(Vec<Key>);

impl Keys {
    /// Reads a set. Keys that are for something else, or of a kind that is not known here, are passed over (RFC 7517, 5).
    pub fn parse(document: &[u8]) -> Result<Self, JwksError> {
        let set: Set = serde_json::from_slice(document).map_err(|error| JwksError::Form(error.to_string()))?;
        if set.keys.len() > KEYS_MAX {
            return Err(JwksError::TooMany(set.keys.len()));
        }
        let n_written = set.keys.len();
        let of_use = |key| Written::deserialize(key).ok().and_then(Key::of);
        let keys: Vec<Key> = set.keys.iter().filter_map(of_use).collect();
        if keys.is_empty() { Err(JwksError::NoneOfUse(n_written)) } else { Ok(Self(keys)) }
    }

    /// Whether the key of this name, or any that fits if none is named, signed a message so.
    pub fn verdict(&self, algorithm: Algorithm, kid: Option<&str>, message: &[u8], signature: &[u8]) -> Verdict {
        let is_meant = |key: &&Key| kid.is_none() || key.kid.as_deref() == kid;
        let fits = |key: &&Key| key.algorithm.is_none_or(|own| own == algorithm) && key.public.signs_by(algorithm);
        let mut meant = self.0.iter().filter(is_meant).filter(fits).peekable();
        if meant.peek().is_none() {
            return Verdict::UnknownKey;
        }
        match (meant.any(|key| key.public.signed(algorithm, message, signature)), kid) {
            (true, _) => Verdict::Signed,
            (false, Some(_)) => Verdict::Forged,
            (false, None) => Verdict::UnknownKey,
        }
    }
}

impl Key {
    fn of(written: Written) -> Option<Self> {
        let Written { kty, kid, purpose, alg, crv, n, e, x, y } = written;
        if purpose.is_some_and(|purpose| purpose != "sig") {
            return None;
        }
        let algorithm = match alg {
            Some(name) => Some(Algorithm::named(&name)?),
            None => None,
        };
        let public = match (kty.as_str(), crv.as_deref()) {
            ("RSA", _) => Public::Rsa { n: number(&n?)?, e: number(&e?)? },
            ("EC", Some("P-256")) => Public::P256(point(&x?, &y?, 32)?),
            ("EC", Some("P-384")) => Public::P384(point(&x?, &y?, 48)?),
            ("OKP", Some("Ed25519")) => Public::Ed25519(bytes(&x?)?),
            _ => return None,
        };
        Some(Self { kid, algorithm, public })
    }
}

impl Public {
    fn signs_by(&self, algorithm: Algorithm) -> bool {
        match self {
            Self::Rsa { n, .. } => algorithm.of_rsa().is_some() && n.len() >= 2048 / 8,
            Self::P256(_) => algorithm == Algorithm::ES256,
            Self::P384(_) => algorithm == Algorithm::ES384,
            Self::Ed25519(_) => algorithm == Algorithm::EdDSA,
        }
    }

    fn signed(&self, algorithm: Algorithm, message: &[u8], signature: &[u8]) -> bool {
        let by = |known: &'static dyn VerificationAlgorithm, key: &[u8]| {
            UnparsedPublicKey::new(known, key).verify(message, signature).is_ok()
        };
        match self {
            Self::Rsa { n, e } => algorithm
                .of_rsa()
                .is_some_and(|known| RsaPublicKeyComponents { n, e }.verify(known, message, signature).is_ok()),
            Self::P256(key) => by(&ECDSA_P256_SHA256_FIXED, key),
            Self::P384(key) => by(&ECDSA_P384_SHA384_FIXED, key),
            Self::Ed25519(key) => by(&ED25519, key),
        }
    }
}

fn bytes(text: &str) -> Option<Vec<u8>> {
    URL_SAFE_NO_PAD.decode(text).ok()
}

/// Without zeros in front, which some issuers write.
fn number(text: &str) -> Option<Vec<u8>> {
    let bytes = bytes(text)?;
    let first = bytes.iter().position(|byte| *byte != 0)?;
    Some(bytes[first..].to_vec())
}

/// As SEC 1, 2.3.3 writes it: uncompressed.
fn point(x: &str, y: &str, n_bytes: usize) -> Option<Vec<u8>> {
    let (x, y) = (bytes(x)?, bytes(y)?);
    (x.len() == n_bytes && y.len() == n_bytes).then(|| [&[4], x.as_slice(), y.as_slice()].concat())
}
