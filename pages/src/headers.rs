//! What browsers are told about every answer. Nothing inline runs, nothing comes from elsewhere, nobody frames a page, no address
//! leaks to another site.

use http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, HeaderName, HeaderValue, REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS,
    X_FRAME_OPTIONS,
};

/// What a page may load and do.
pub const POLICY: &str = "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; connect-src 'self'; \
                          form-action 'self'; base-uri 'none'; frame-ancestors 'none'";
const CORP: HeaderName = HeaderName::from_static("cross-origin-resource-policy");
const COOP: HeaderName = HeaderName::from_static("cross-origin-opener-policy");

/// How long an answer may be kept.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Keep {
    /// It is another one the next time.
    Never,
    /// Its name has the hash of its content.
    Forever,
}

/// Headers of an answer, besides its content type.
pub fn headers(keep: Keep) -> [(HeaderName, HeaderValue); 7] {
    let cache = match keep {
        Keep::Never => "no-store",
        Keep::Forever => "public, max-age=31536000, immutable",
    };
    [
        (CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY)),
        (X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
        (X_FRAME_OPTIONS, HeaderValue::from_static("DENY")),
        (REFERRER_POLICY, HeaderValue::from_static("no-referrer")),
        (CORP, HeaderValue::from_static("same-origin")),
        (COOP, HeaderValue::from_static("same-origin")),
        (CACHE_CONTROL, HeaderValue::from_static(cache)),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_inline_and_nothing_from_elsewhere() {
        assert!(POLICY.starts_with("default-src 'none'"));
        assert!(!POLICY.contains("unsafe") && !POLICY.contains("http") && !POLICY.contains('*'), "{POLICY}");
    }

    #[test]
    fn only_what_is_named_by_its_content_is_kept() {
        let cache = |keep| headers(keep).into_iter().find(|(name, _)| name == CACHE_CONTROL).unwrap().1;
        assert!(cache(Keep::Forever).to_str().unwrap().contains("immutable"));
        assert_eq!(cache(Keep::Never), "no-store");
    }
}
