//! A token that a client sends, a JSON Web Token (RFC 7519) in the compact form (RFC 7515): read, and believed or not. Nothing of a token is in an
//! error. Pure: what time it is, and which keys there are, are arguments.

use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Map, Value};
use thiserror::Error;

use super::{
    jwks::{Algorithm, Keys, Verdict},
    spec::IssuerSpec,
};

/// Longer tokens are nobody's: common proxies take heads of 8 to 32 KiB.
pub const TOKEN_BYTES_MAX: usize = 16 << 10;

/// Why a token is not believed, and what to change.
#[derive(Clone, Debug, Error, Eq, PartialEq)]
pub enum TokenError {
    /// Nobody reads that much.
    #[error("the token is longer than {TOKEN_BYTES_MAX} bytes: ask its issuer for fewer claims")]
    TooLong,
    /// It is not of this form.
    #[error("the token is no JWT: its {0} cannot be read")]
    Malformed(&'static str),
    /// It is not signed, or in a way that proves nothing or is not accepted.
    #[error("the token's algorithm is not accepted: have it signed by one of {0}")]
    Algorithm(String),
    /// What must be understood is not.
    #[error("the token's header has `crit`, of which nothing is understood here: have it made without")]
    Critical,
    /// Who made it is nobody. Which issuers are accepted is not everybody's to know.
    #[error("the token's `iss` is no issuer that is accepted here: ask who keeps the list of tenants")]
    Issuer,
    /// Its key is not known.
    #[error("the token's issuer does not publish a key that signed it: get a new one")]
    UnknownKey,
    /// It was not signed by its key.
    #[error("the token's signature is wrong: it was changed or cut, or signed by another key")]
    Signature,
    /// It is too old.
    #[error("the token has expired: get a new one")]
    Expired,
    /// It is too young.
    #[error("the token is not valid yet (`nbf`): use it later, or set clocks")]
    NotYet,
    /// It is for others.
    #[error("the token's `aud` is not this gateway: ask for one for {0}")]
    Audience(String),
    /// What has to be there is not.
    #[error("the token has no claim {0} of the right type: have its issuer add one")]
    Claim(String),
}

/// Whom a token is of, as its issuer says.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Identity {
    /// Name of the tenant.
    pub tenant: String,
    /// Of which class, if it says that.
    pub class: Option<String>,
    /// From then on it is nobody's, in seconds since 1970.
    pub until_s: u64,
}

/// What is read of a header.
#[derive(Deserialize)]
struct Header {
    alg: String,
    kid: Option<String>,
    crit: Option<Value>,
}

/// A token that was read and is not believed yet.
pub struct Unverified<'a> {
    header: Header,
    claims: Map<String, Value>,
    signed: &'a [u8],
    signature: Vec<u8>,
}

/// Whether somebody might mean this to be a token: keys are drawn without dots.
pub fn is_like_one(sent: &[u8]) -> bool {
    sent.iter().filter(|byte| **byte == b'.').count() == 2
}

impl<'a> Unverified<'a> {
    /// Reads its parts.
    pub fn read(token: &'a [u8]) -> Result<Self, TokenError> {
        if token.len() > TOKEN_BYTES_MAX {
            return Err(TokenError::TooLong);
        }
        let mut parts = token.split(|byte| *byte == b'.');
        let (Some(header), Some(claims), Some(signature), None) =
            (parts.next(), parts.next(), parts.next(), parts.next())
        else {
            return Err(TokenError::Malformed("three parts"));
        };
        let signed = &token[..header.len() + 1 + claims.len()];
        let signature = URL_SAFE_NO_PAD.decode(signature).map_err(|_| TokenError::Malformed("signature"))?;
        Ok(Self { header: part(header, "header")?, claims: part(claims, "claims")?, signed, signature })
    }

    /// Who says to have made it.
    pub fn issuer(&self) -> Option<&str> {
        self.claims.get("iss")?.as_str()
    }

    /// Believes it, or does not: signed by one of these keys of this issuer, for us, now.
    pub fn verified(&self, spec: &IssuerSpec, keys: &Keys, now_s: u64) -> Result<Identity, TokenError> {
        let accepted = |algorithm: &Algorithm| spec.algorithms.contains(algorithm);
        let algorithm = Algorithm::named(&self.header.alg).filter(accepted).ok_or_else(|| {
            let names: Vec<String> = spec.algorithms.iter().map(|algorithm| format!("{algorithm:?}")).collect();
            TokenError::Algorithm(names.join(", "))
        })?;
        if self.header.crit.is_some() {
            return Err(TokenError::Critical);
        }
        match keys.verdict(algorithm, self.header.kid.as_deref(), self.signed, &self.signature) {
            Verdict::Signed => self.believed(spec, now_s),
            Verdict::Forged => Err(TokenError::Signature),
            Verdict::UnknownKey => Err(TokenError::UnknownKey),
        }
    }

    /// What its claims come to, now that its issuer is known to have made them.
    fn believed(&self, spec: &IssuerSpec, now_s: u64) -> Result<Identity, TokenError> {
        if self.issuer() != Some(&spec.issuer) {
            return Err(TokenError::Issuer);
        }
        if !self.is_for(&spec.audiences) {
            return Err(TokenError::Audience(spec.audiences.join(" or ")));
        }
        let until_s = self.seconds("exp")?.ok_or_else(|| missing("exp"))?.saturating_add(spec.leeway_seconds);
        if now_s >= until_s {
            return Err(TokenError::Expired);
        }
        if self.seconds("nbf")?.is_some_and(|nbf| now_s.saturating_add(spec.leeway_seconds) < nbf) {
            return Err(TokenError::NotYet);
        }
        let tenant = self.text(&spec.tenant_claim)?.ok_or_else(|| missing(&spec.tenant_claim))?;
        let class = spec.class_claim.as_deref().map(|claim| self.text(claim)).transpose()?.flatten();
        Ok(Identity { tenant: format!("{}{tenant}", spec.tenant_prefix), class: class.map(str::to_owned), until_s })
    }

    /// `aud` is one text or several.
    fn is_for(&self, audiences: &[String]) -> bool {
        let is_ours = |audience: &Value| audiences.iter().any(|ours| audience.as_str() == Some(ours));
        match self.claims.get("aud") {
            Some(Value::Array(several)) => several.iter().any(is_ours),
            Some(one) => is_ours(one),
            None => false,
        }
    }

    /// A moment, in whole seconds: of a part, none.
    fn seconds(&self, claim: &str) -> Result<Option<u64>, TokenError> {
        let Some(value) = self.claims.get(claim) else { return Ok(None) };
        let seconds = value.as_f64().filter(|seconds| *seconds >= 0.0).ok_or_else(|| missing(claim))?;
        Ok(Some(seconds as u64))
    }

    fn text(&self, claim: &str) -> Result<Option<&str>, TokenError> {
        let value = match claim.strip_prefix('/') {
            Some(path) => {
                let mut names = path.split('/');
                let first = names.next().and_then(|name| self.claims.get(name));
                names.fold(first, |value, name| value?.get(name))
            }
            None => self.claims.get(claim),
        };
        value.map(|value| value.as_str().ok_or_else(|| missing(claim))).transpose()
    }
}

fn missing(claim: &str) -> TokenError {
    TokenError::Claim(format!("`{claim}`"))
}

fn part<T: DeserializeOwned>(text: &[u8], name: &'static str) -> Result<T, TokenError> {
    let json = URL_SAFE_NO_PAD.decode(text).ok();
    json.and_then(|json| serde_json::from_slice(&json).ok()).ok_or(TokenError::Malformed(name))
}
