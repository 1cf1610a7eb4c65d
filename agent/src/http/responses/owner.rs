//! Whose a kept response is. Knows no response.

use std::convert::Infallible;

use axum::{
    extract::FromRequestParts,
    http::{HeaderMap, request::Parts},
};
use sha2::{Digest, Sha256};
use stoker_edge::api_key;

use crate::http::passage::TENANT;

/// Who asks: the key that was sent and the tenant that a gateway names, as a hash, so that no key is kept with what is stored. All
/// who send neither are one.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct Owner([u8; 32]);

impl Owner {
    fn of(headers: &HeaderMap) -> Self {
        let key = api_key::sent(headers).unwrap_or_default();
        let tenant = headers.get(TENANT).map(|value| value.as_bytes()).unwrap_or_default();
        let parts = [&key.len().to_le_bytes()[..], key, tenant];
        Self(Sha256::digest(parts.concat()).into())
    }
}

impl<S: Sync> FromRequestParts<S> for Owner {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        Ok(Self::of(&parts.headers))
    }
}
