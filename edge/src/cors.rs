//! Browsers on pages of other origins: which of them may ask, and what their browsers are told (CORS). Nobody may unless it is said. Only
//! browsers keep to this; keys are what keeps others out.

use std::{str::FromStr, sync::Arc};

use axum::{
    Router,
    extract::{Request, State},
    http::{HeaderMap, HeaderValue, Method, StatusCode, header},
    middleware::{self, Next},
    response::{IntoResponse, Response},
};

/// What endpoints answer to.
const METHODS: HeaderValue = HeaderValue::from_static("GET, POST, DELETE");
/// Headers of answers that scripts may read beside the usual ones.
const EXPOSED: HeaderValue = HeaderValue::from_static("x-request-id, retry-after");
/// Seconds that a browser remembers a permission: Chromium keeps none longer than two hours.
const MAX_AGE: HeaderValue = HeaderValue::from_static("7200");

/// An origin whose pages may ask: `https://app.example`, or `*` for all.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct AllowedOrigin(HeaderValue);

impl FromStr for AllowedOrigin {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let is_origin = |text: &str| {
            let host = text.strip_prefix("https://").or_else(|| text.strip_prefix("http://"));
            host.is_some_and(|host| !host.is_empty() && !host.contains('/'))
        };
        match HeaderValue::from_str(text) {
            Ok(value) if text == "*" || is_origin(text) => Ok(Self(value)),
            _ => Err(format!("`{text}` is no origin: write https://HOST[:PORT] without a path, or *")),
        }
    }
}

/// The same endpoints for pages of these origins, too.
pub fn shared(router: Router, origins: &[AllowedOrigin]) -> Router {
    if origins.is_empty() {
        return router;
    }
    let origins: Arc<[AllowedOrigin]> = origins.into();
    router.layer(middleware::from_fn_with_state(origins, share))
}

/// A browser asks for permission before it sends what it has; that question has no key and no body.
async fn share(State(origins): State<Arc<[AllowedOrigin]>>, request: Request, next: Next) -> Response {
    let Some(allowed) = allowed(&origins, request.headers()) else { return next.run(request).await };
    let mut response = match permission(request.method(), request.headers()) {
        Some(permission) => (StatusCode::NO_CONTENT, permission).into_response(),
        None => next.run(request).await,
    };
    let headers = response.headers_mut();
    headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, allowed);
    headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, EXPOSED);
    headers.append(header::VARY, HeaderValue::from_static("origin"));
    response
}

/// The origin as its browser is told it, if it may ask.
fn allowed(origins: &[AllowedOrigin], headers: &HeaderMap) -> Option<HeaderValue> {
    let origin = headers.get(header::ORIGIN)?;
    let is_named = |allowed: &AllowedOrigin| allowed.0 == "*" || allowed.0 == origin;
    origins.iter().any(is_named).then(|| origin.clone())
}

/// What answers a browser's question.
fn permission(method: &Method, headers: &HeaderMap) -> Option<HeaderMap> {
    if method != Method::OPTIONS || !headers.contains_key(header::ACCESS_CONTROL_REQUEST_METHOD) {
        return None;
    }
    let mut permission = HeaderMap::from_iter([
        (header::ACCESS_CONTROL_ALLOW_METHODS, METHODS),
        (header::ACCESS_CONTROL_MAX_AGE, MAX_AGE),
    ]);
    // Clients send headers of their own, and none of them is dangerous here.
    if let Some(asked) = headers.get(header::ACCESS_CONTROL_REQUEST_HEADERS) {
        permission.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, asked.clone());
    }
    Some(permission)
}

#[cfg(test)]
mod tests {
    use axum::{body::Body, routing::post};
    use tower::ServiceExt;

    use super::*;

    async fn ask(origins: &[&str], method: Method, headers: &[(&str, &str)]) -> (u16, HeaderMap) {
        let origins: Vec<AllowedOrigin> = origins.iter().map(|origin| origin.parse().unwrap()).collect();
        let router = shared(Router::new().route("/v1/x", post(|| async { "said" })), &origins);
        let request = Request::builder().method(method).uri("/v1/x");
        let request = headers.iter().fold(request, |request, (name, value)| request.header(*name, *value));
        let response = router.oneshot(request.body(Body::empty()).unwrap()).await.unwrap();
        (response.status().as_u16(), response.headers().clone())
    }

    const PREFLIGHT: [(&str, &str); 3] = [
        ("origin", "https://app.example"),
        ("access-control-request-method", "POST"),
        ("access-control-request-headers", "authorization,x-stainless-os"),
    ];

    #[tokio::test]
    async fn a_page_of_a_named_origin_may_ask_with_its_headers() {
        for origins in [&["https://app.example", "http://localhost:3000"][..], &["*"]] {
            let (status, headers) = ask(origins, Method::OPTIONS, &PREFLIGHT).await;
            assert_eq!((status, &headers["access-control-allow-origin"]), (204, &PREFLIGHT[0].1.parse().unwrap()));
            assert_eq!(headers["access-control-allow-methods"], "GET, POST, DELETE");
            assert_eq!(headers["access-control-allow-headers"], PREFLIGHT[2].1);
            let (status, headers) = ask(origins, Method::POST, &PREFLIGHT[..1]).await;
            assert_eq!((status, &headers["access-control-allow-origin"]), (200, &PREFLIGHT[0].1.parse().unwrap()));
            assert_eq!(
                (&headers["vary"], &headers["access-control-expose-headers"]),
                (&"origin".parse().unwrap(), &EXPOSED)
            );
        }
    }

    #[tokio::test]
    async fn no_other_page_is_told_anything() {
        for origins in [&[][..], &["https://other.example"], &["https://app.example:8443"], &["http://app.example"]] {
            let (status, headers) = ask(origins, Method::OPTIONS, &PREFLIGHT).await;
            assert_eq!((status, headers.get("access-control-allow-origin")), (405, None), "{origins:?}");
            let (status, headers) = ask(origins, Method::POST, &PREFLIGHT[..1]).await;
            assert_eq!(
                (status, headers.get("access-control-allow-origin")),
                (200, None),
                "browsers keep it from the page"
            );
        }
        let (_, headers) = ask(&["*"], Method::POST, &[]).await;
        assert!(headers.get("access-control-allow-origin").is_none(), "whoever is no browser is told nothing");
    }

    #[test]
    fn what_is_no_origin_is_refused() {
        for text in ["", "app.example", "https://", "https://app.example/", "ftp://app.example", "https://a\n"] {
            assert!(text.parse::<AllowedOrigin>().is_err(), "{text}");
        }
    }
}
