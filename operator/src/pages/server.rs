//! Answers browsers: two kinds of pages, their changes, and files that they need. Reads only. How many connections there are and how
//! slow they may be is bounded as it is for agents.

use std::time::Duration;

use axum::{
    Router,
    body::Body,
    extract::{Path, Query, State},
    http::{
        HeaderValue, StatusCode,
        header::{CONNECTION, CONTENT_TYPE, REFRESH},
    },
    response::{IntoResponse, Response, Sse, sse::KeepAlive},
    routing::get,
};
use stoker_edge::connections::{self, Limits};
use stoker_pages::{
    assets::{ASSETS_PATH, Asset, ICON, STYLE, named},
    deployment::{self, DeploymentQuery},
    fleet::{self, EVENTS_PATH, FleetQuery},
    headers::{Keep, headers},
    layout::message,
    live::SCRIPT,
};
use tokio::net::TcpListener;

use super::{
    board::{Board, STREAMS},
    live::{Live, Target},
};
use crate::lease::Leadership;

/// Of pages: each that is open holds one connection, and opens another one now and then.
const LIMITS: Limits =
    Limits { head: Duration::from_secs(30), stall: Duration::from_secs(60), n_connections: 2 * STREAMS, http2: false };

static ASSETS: [&Asset; 3] = [&STYLE, &SCRIPT, &ICON];

/// Whom pages ask.
#[derive(Clone)]
struct Pages {
    board: Board,
    leadership: Leadership,
}

/// Serves until the process ends.
pub async fn serve(listener: TcpListener, board: Board, leadership: Leadership) {
    let routes = Router::new()
        .route("/", get(all))
        .route(EVENTS_PATH, get(all_events))
        .route("/ns/{namespace}/{name}", get(one))
        .route("/ns/{namespace}/{name}/events", get(one_events))
        .route(&format!("{ASSETS_PATH}/{{name}}"), get(asset))
        .fallback(|| async {
            page(StatusCode::NOT_FOUND, message("No such page", "There is nothing at this address."))
        })
        .with_state(Pages { board, leadership });
    connections::serve(listener, routes, LIMITS, || {}, std::future::pending()).await;
}

async fn all(State(pages): State<Pages>, Query(query): Query<FleetQuery>) -> Response {
    match pages.board.look().filter(|_| pages.leadership.holds()) {
        Some(look) => page(StatusCode::OK, fleet::page(&look.fleet, &query)),
        None => elsewhere(),
    }
}

async fn one(
    State(pages): State<Pages>,
    Path((namespace, name)): Path<(String, String)>,
    Query(query): Query<DeploymentQuery>,
) -> Response {
    let key = (namespace, name);
    match pages.board.deployment(&key, &query).filter(|_| pages.leadership.holds()) {
        Some(Some(view)) => page(StatusCode::OK, deployment::page(&view, &query)),
        Some(None) => page(StatusCode::NOT_FOUND, deployment::absent(&key.0, &key.1)),
        None => elsewhere(),
    }
}

async fn all_events(State(pages): State<Pages>, Query(query): Query<FleetQuery>) -> Response {
    events(pages, Target::Fleet(query))
}

async fn one_events(
    State(pages): State<Pages>,
    Path(key): Path<(String, String)>,
    Query(query): Query<DeploymentQuery>,
) -> Response {
    events(pages, Target::Deployment { key, query })
}

fn events(Pages { board, leadership }: Pages, target: Target) -> Response {
    let Ok(place) = board.streams().try_acquire_owned() else {
        return (StatusCode::SERVICE_UNAVAILABLE, headers(Keep::Never), "too many pages are open: ask again\n")
            .into_response();
    };
    if !leadership.holds() {
        return elsewhere();
    }
    let live = Live::new(board, leadership, target, place);
    (headers(Keep::Never), Sse::new(live.messages()).keep_alive(KeepAlive::default())).into_response()
}

async fn asset(Path(name): Path<String>) -> Response {
    match named(&ASSETS, &name) {
        Some(asset) => {
            let content_type = [(CONTENT_TYPE, HeaderValue::from_static(asset.content_type))];
            (headers(Keep::Forever), content_type, asset.text).into_response()
        }
        None => page(
            StatusCode::NOT_FOUND,
            message("No such file", "Pages of another build had it: ask for the page again."),
        ),
    }
}

/// Another operator leads, or this one has only begun to. Who asks again, on another connection, may reach who knows.
fn elsewhere() -> Response {
    let words = "This operator does not lead, or has only begun to: it is asked again in three seconds.";
    let again = [(REFRESH, HeaderValue::from_static("3")), (CONNECTION, HeaderValue::from_static("close"))];
    (again, page(StatusCode::SERVICE_UNAVAILABLE, message("One moment", words))).into_response()
}

fn page(status: StatusCode, text: String) -> Response {
    let content_type = [(CONTENT_TYPE, HeaderValue::from_static("text/html; charset=utf-8"))];
    (status, headers(Keep::Never), content_type, Body::from(text)).into_response()
}
