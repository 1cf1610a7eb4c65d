//! The operator's own HTTP: `/metrics`, `/healthz`, `/readyz`. Reads only.

use std::sync::Arc;

use axum::{Router, extract::State, http::StatusCode, routing::get};
use tokio::net::TcpListener;

use crate::{lease::Leadership, metrics::Metrics};

/// What the answers are made from.
#[derive(Clone, Debug)]
pub struct Health {
    /// What `/metrics` renders.
    pub metrics: Arc<Metrics>,
    /// Whether we lead; a standby is as ready as a leader.
    pub leadership: Leadership,
}

/// Serves until the process ends.
pub async fn serve(listener: TcpListener, health: Health) -> std::io::Result<()> {
    let routes = Router::new()
        .route("/metrics", get(metrics))
        .route("/healthz", get(|| async { "ok" }))
        .route("/readyz", get(|| async { "ok" }))
        .with_state(health);
    axum::serve(listener, routes).await
}

async fn metrics(State(health): State<Health>) -> Result<String, (StatusCode, String)> {
    health.metrics.leader.set(health.leadership.holds().into());
    health.metrics.render().map_err(|error| (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()))
}
