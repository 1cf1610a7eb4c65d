//! The playground's page and its assets over HTTP, beside an API that it talks to. Both say nothing of the server and need no key.

use axum::{
    Router,
    extract::{OriginalUri, Path},
    http::{StatusCode, header::CONTENT_TYPE},
    response::{IntoResponse, Response},
    routing::get,
};
use clap::ValueEnum;
use stoker_pages::{
    assets,
    headers::{Keep, headers},
    playground::{ASSETS, ASSETS_PATH, page, root_of},
};

/// Whether the page is served.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, ValueEnum)]
pub enum Playground {
    /// At `/`.
    #[default]
    On,
    /// `/` is no endpoint.
    Off,
}

impl Playground {
    /// `GET /` and `GET /_/NAME`, or nothing.
    pub fn routes<S: Clone + Send + Sync + 'static>(self) -> Router<S> {
        match self {
            Self::On => Router::new().route("/", get(show)).route(&format!("{ASSETS_PATH}/{{name}}"), get(asset)),
            Self::Off => Router::new(),
        }
    }
}

/// Whether a path is the page's own.
pub fn is_page(path: &str) -> bool {
    path == "/" || path.strip_prefix(ASSETS_PATH).is_some_and(|rest| rest.starts_with('/'))
}

async fn show(OriginalUri(uri): OriginalUri) -> Response {
    let html = [(CONTENT_TYPE, "text/html; charset=utf-8")];
    (html, headers(Keep::Never), page(&root_of(uri.path()))).into_response()
}

async fn asset(Path(name): Path<String>) -> Response {
    match assets::named(&ASSETS, &name) {
        Some(asset) => ([(CONTENT_TYPE, asset.content_type)], headers(Keep::Forever), asset.text).into_response(),
        None => {
            (StatusCode::NOT_FOUND, headers(Keep::Never), "there is no such asset: load the page again").into_response()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_page_and_its_assets_are_the_pages_own() {
        assert!(is_page("/") && is_page("/_/style-0.css"));
        assert!(!["/v1/models", "/_", "/_x", "", "//"].into_iter().any(is_page));
    }
}
