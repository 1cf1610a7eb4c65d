//! The key that a client sends, as OpenAI's clients do or as Anthropic's, and what is said to one that sends none of those that are
//! valid. Knows no key.

use axum::http::{HeaderMap, HeaderName, header::AUTHORIZATION};

/// As Anthropic's clients send it.
pub const API_KEY: HeaderName = HeaderName::from_static("x-api-key");
/// Beside 401 and the code `invalid_api_key`.
pub const INVALID_API_KEY: &str =
    "no valid API key was sent: send one as `Authorization: Bearer KEY` or `x-api-key: KEY`";

/// The key, if there is one. Schemes are written in either case (RFC 9110, 11.1).
pub fn sent(headers: &HeaderMap) -> Option<&[u8]> {
    let bearer = headers.get(AUTHORIZATION).and_then(|value| {
        let (scheme, key) = value.as_bytes().split_at_checked("Bearer ".len())?;
        scheme.eq_ignore_ascii_case(b"Bearer ").then_some(key)
    });
    bearer.or(headers.get(API_KEY).map(|value| value.as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_what_follows_the_scheme_or_a_header_of_its_own() {
        for (name, value, key) in [
            ("authorization", "Bearer first", Some("first")),
            ("authorization", "bearer first", Some("first")),
            ("authorization", "Bearer ", Some("")),
            ("authorization", "Basic first", None),
            ("authorization", "first", None),
            ("authorization", "", None),
            ("x-api-key", "second", Some("second")),
            ("x-key", "third", None),
        ] {
            let headers = HeaderMap::from_iter([(HeaderName::from_static(name), value.parse().unwrap())]);
            assert_eq!(sent(&headers), key.map(str::as_bytes), "{name}: {value}");
        }
    }
}
