//! Who may ask, and under which path: keys that clients must send, and the prefix that a proxy leaves before every path. What load
//! balancers and scrapers read is open to all. Knows no endpoint's answers.

use std::{path::Path, sync::Arc};

use anyhow::Context;
use axum::{
    Router,
    extract::{Request, State},
    http::{HeaderMap, StatusCode},
    middleware::{self, Next},
    response::{IntoResponse, Response},
};
use stoker_edge::{
    api_key::{self, INVALID_API_KEY},
    playground::is_page,
};
use subtle::ConstantTimeEq;

use crate::http::error::ApiError;

/// Answer without a key.
const OPEN: [&str; 5] = ["/health", "/healthz", "/readyz", "/metrics", "/version"];

/// The keys of which each request must send one; without any, everybody may ask.
#[derive(Clone, Default)]
pub struct ApiKeys(Arc<[String]>);

impl ApiKeys {
    /// Reads a file with a key a line. One without a key is refused: it would let everybody in.
    pub fn read(path: &Path) -> anyhow::Result<Self> {
        let text = std::fs::read_to_string(path).with_context(|| format!("read API keys: {}", path.display()))?;
        Self::parse(&text).with_context(|| format!("{} has no key: write one a line", path.display()))
    }

    /// Keys, one a line; `None` if there is none.
    pub fn parse(text: &str) -> Option<Self> {
        let keys: Arc<[String]> =
            text.lines().map(str::trim).filter(|key| !key.is_empty()).map(str::to_owned).collect();
        (!keys.is_empty()).then_some(Self(keys))
    }

    /// Whether a request sends one of them. Takes as long for a key that is nearly right.
    fn admits(&self, headers: &HeaderMap) -> bool {
        let is_one = |sent: &[u8]| self.0.iter().any(|key| bool::from(key.as_bytes().ct_eq(sent)));
        self.0.is_empty() || api_key::sent(headers).is_some_and(is_one)
    }
}

impl std::fmt::Debug for ApiKeys {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "{} API keys", self.0.len())
    }
}

/// The same endpoints for those who have a key, also below `root` if there is one.
pub fn guarded(router: Router, keys: ApiKeys, root: Option<&str>) -> Router {
    let router = router.layer(middleware::from_fn_with_state(keys, check));
    match root {
        Some(root) => router.clone().nest(root, router),
        None => router,
    }
}

/// A prefix as the router takes it, from how a person writes it; `None`: it is none.
pub fn root_path(written: &str) -> Option<String> {
    let trimmed = written.trim_matches('/');
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./~".contains(c);
    (!trimmed.is_empty() && trimmed.chars().all(is_plain)).then(|| format!("/{trimmed}"))
}

/// What says nothing of requests, and the page on which a key is written.
fn is_open(path: &str) -> bool {
    OPEN.contains(&path) || is_page(path)
}

async fn check(State(keys): State<ApiKeys>, request: Request, next: Next) -> Response {
    if is_open(request.uri().path()) || keys.admits(request.headers()) {
        return next.run(request).await;
    }
    ApiError::new(StatusCode::UNAUTHORIZED, "invalid_api_key", INVALID_API_KEY.to_owned()).into_response()
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderName;

    use super::*;

    fn sends(name: &'static str, value: &str) -> HeaderMap {
        HeaderMap::from_iter([(HeaderName::from_static(name), value.parse().unwrap())])
    }

    #[test]
    fn a_request_sends_one_of_the_keys() {
        let keys = ApiKeys::parse("first\n\n  second \n").unwrap();
        for (headers, is_admitted) in [
            (sends("authorization", "Bearer first"), true),
            (sends("x-api-key", "second"), true),
            (sends("authorization", "Bearer firs"), false),
            (sends("authorization", "Bearer "), false),
            (sends("authorization", "first"), false),
            (sends("x-api-key", "third"), false),
            (HeaderMap::new(), false),
        ] {
            assert_eq!(keys.admits(&headers), is_admitted, "{headers:?}");
        }
        assert!(ApiKeys::default().admits(&HeaderMap::new()), "without keys everybody may ask");
        assert!(ApiKeys::parse(" \n").is_none());
        assert_eq!(format!("{keys:?}"), "2 API keys", "they are not logged");
    }

    #[test]
    fn a_root_is_a_plain_path() {
        assert_eq!(root_path("llm/v2/").as_deref(), Some("/llm/v2"));
        assert_eq!(root_path("/llm").as_deref(), Some("/llm"));
        assert_eq!([root_path("/"), root_path("a{b}"), root_path("a b")], [None, None, None]);
    }
}
