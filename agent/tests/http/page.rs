//! The page at `/`: who gets it, under which rules, and that it stands in no endpoint's way.

use axum::body::Body;
use axum::http::Request;
use axum::http::Response;
use axum::http::header;
use http_body_util::BodyExt;
use stoker_agent::http;
use stoker_agent::http::access::ApiKeys;
use stoker_agent::http::access::guarded;
use stoker_edge::playground::Playground;
use tower::ServiceExt;

use crate::agent::*;

async fn text_of(response: Response<Body>) -> String {
    String::from_utf8(response.into_body().collect().await.unwrap().to_bytes().to_vec()).unwrap()
}

/// Addresses of the files that a page loads.
fn assets(page: &str) -> Vec<&str> {
    ["href=\"", "src=\""]
        .iter()
        .flat_map(|attribute| page.split(attribute).skip(1))
        .filter_map(|rest| rest.split('"').next())
        .filter(|address| address.contains("_/"))
        .collect()
}

#[tokio::test]
async fn a_browser_gets_the_page_and_all_it_loads_under_a_strict_policy() {
    let agent = Agent::new();
    let response = agent.send("GET", "/", "").await;
    let headers = response.headers().clone();
    assert_eq!(
        (response.status().as_u16(), &headers[header::CONTENT_TYPE]),
        (200, &"text/html; charset=utf-8".parse().unwrap())
    );
    assert!(headers[header::CONTENT_SECURITY_POLICY].to_str().unwrap().starts_with("default-src 'none'; "));
    assert_eq!(headers[header::CACHE_CONTROL], "no-store");
    let page = text_of(response).await;
    let assets = assets(&page);
    assert_eq!(assets.len(), 4, "{assets:?}");
    for address in assets {
        let asset = agent.send("GET", &format!("/{address}"), "").await;
        assert_eq!(asset.status(), 200, "{address}");
        assert_eq!(asset.headers()[header::X_CONTENT_TYPE_OPTIONS], "nosniff");
    }
    assert_eq!(agent.send("GET", "/_/style-0.css", "").await.status(), 404);
    let (status, refusal) = json_of(agent.send("POST", "/", "{}").await).await;
    assert_eq!((status.as_u16(), refusal["error"]["code"].as_str()), (405, Some("method_not_allowed")));
}

#[tokio::test]
async fn the_page_needs_no_key_and_finds_its_files_below_a_root() {
    let agent = Agent::new();
    let router = guarded(agent.router.clone(), ApiKeys::parse("sesame").unwrap(), Some("/llm"));
    let get = async |path: &str| router.clone().oneshot(Request::get(path).body(Body::empty()).unwrap()).await.unwrap();
    assert_eq!(get("/").await.status(), 200);
    assert_eq!(get("/v1/models").await.status(), 401);
    let page = text_of(get("/llm").await).await;
    for address in assets(&page) {
        // Relative to /llm.
        assert_eq!(get(&format!("/{address}")).await.status(), 200, "{address}");
    }
}

#[tokio::test]
async fn switched_off_it_is_no_endpoint() {
    let replica = Agent::new().replica;
    let router = http::router(replica, Playground::Off.routes());
    let response = router.oneshot(Request::get("/").body(Body::empty()).unwrap()).await.unwrap();
    assert_eq!(response.status(), 404);
}
