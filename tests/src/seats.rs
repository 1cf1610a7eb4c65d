//! Stand-in replicas that compute nothing: each has seats, and a request that has one keeps it until the test says that somebody ends.
//! Who asks waits in the order of arrival, as at an agent, and the replica says how many do.

use std::{
    net::SocketAddr,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use anyhow::Result;
use axum::{
    Router,
    body::{Body, Bytes},
    extract::State,
    http::{HeaderMap, Response, StatusCode},
    routing::{get, post},
};
use stoker_crds::{
    contract::LoadReport,
    endpoints::{EndpointState, ReplicaEndpoint, WHOLE_WEIGHT},
};
use tokio::{net::TcpListener, sync::Semaphore, task::JoinHandle};

/// A replica with seats. It ends when this is dropped.
pub struct SeatedReplica {
    address: SocketAddr,
    hall: Arc<Hall>,
    server: JoinHandle<()>,
}

struct Hall {
    /// First come, first served.
    seats: Semaphore,
    /// Everybody who has a seat waits for one of these.
    ends: Semaphore,
    /// Tenants of requests in the order in which these got a seat.
    begun: Mutex<Vec<String>>,
    asked: AtomicU64,
    ended: AtomicU64,
    reports: AtomicU64,
    leaves: AtomicBool,
}

impl SeatedReplica {
    /// Starts it on a free port of the loopback.
    pub async fn start(seats: usize) -> Result<Self> {
        let hall = Arc::new(Hall {
            seats: Semaphore::new(seats),
            ends: Semaphore::new(0),
            begun: Mutex::default(),
            asked: AtomicU64::new(0),
            ended: AtomicU64::new(0),
            reports: AtomicU64::new(0),
            leaves: AtomicBool::new(false),
        });
        let routes =
            Router::new().route("/v1/chat/completions", post(answer)).route("/healthz", get(|| async { "ok" }));
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let routes = routes.with_state(Arc::clone(&hall));
        let server = tokio::spawn(async move {
            // It ends with its owner.
            let _ = axum::serve(listener, routes).await;
        });
        Ok(Self { address, hall, server })
    }

    /// So many of those who have a seat leave it, as soon as there are so many.
    pub fn end(&self, count: usize) {
        self.hall.ends.add_permits(count);
    }

    /// From now on it refuses whoever asks, as an agent that drains does.
    pub fn leave(&self) {
        self.hall.leaves.store(true, Ordering::SeqCst);
    }

    /// Tenants in the order in which their requests got a seat.
    pub fn begun(&self) -> Vec<String> {
        self.hall.begun.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Requests that came.
    pub fn asked(&self) -> u64 {
        self.hall.asked.load(Ordering::SeqCst)
    }

    /// What the operator would tell of it.
    pub fn endpoint(&self, pod: &str, state: EndpointState) -> ReplicaEndpoint {
        let begun = self.begun().len() as u64;
        let load = LoadReport {
            up_ms: self.hall.reports.fetch_add(1, Ordering::SeqCst),
            waiting: self.asked().saturating_sub(begun) as u32,
            running: begun.saturating_sub(self.hall.ended.load(Ordering::SeqCst)) as u32,
            ..LoadReport::idle(1000)
        };
        ReplicaEndpoint {
            pod: pod.to_owned(),
            uid: format!("uid-{pod}"),
            address: Some(self.address.to_string()),
            revision: "r".to_owned(),
            weight: WHOLE_WEIGHT,
            state,
            events: None,
            load: Some((&load).into()),
        }
    }
}

impl Drop for SeatedReplica {
    fn drop(&mut self) {
        self.server.abort();
    }
}

/// A stream: its head comes with a seat, its end when the test says so.
async fn answer(State(hall): State<Arc<Hall>>, headers: HeaderMap, _body: Bytes) -> Response<Body> {
    let tenant = headers.get("x-stoker-salt").and_then(|name| name.to_str().ok()).unwrap_or_default().to_owned();
    hall.asked.fetch_add(1, Ordering::SeqCst);
    if hall.leaves.load(Ordering::SeqCst) {
        let refused = Response::builder().status(StatusCode::SERVICE_UNAVAILABLE).header("retry-after", "1");
        return refused.body(Body::from("draining")).expect("these headers are valid");
    }
    hall.seats.acquire().await.expect("nobody closes it").forget();
    hall.begun.lock().unwrap_or_else(PoisonError::into_inner).push(tenant);
    let events = futures::stream::unfold((hall, 0), |(hall, n_told)| async move {
        match n_told {
            0 => Some((Ok::<_, std::io::Error>(Bytes::from("data: {}\n\n")), (hall, 1))),
            1 => {
                hall.ends.acquire().await.expect("nobody closes it").forget();
                hall.ended.fetch_add(1, Ordering::SeqCst);
                hall.seats.add_permits(1);
                Some((Ok(Bytes::from("data: [DONE]\n\n")), (hall, 2)))
            }
            _ => None,
        }
    });
    let head = Response::builder().header("content-type", "text/event-stream");
    head.body(Body::from_stream(events)).expect("these headers are valid")
}
