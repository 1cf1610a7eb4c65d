//! What `stoker-agent fetch --keep-resident` does once the model is there: it keeps its files in this node's memory until it is ended, and
//! answers whether they are there. Serves no request and computes nothing.

use std::{
    net::{IpAddr, SocketAddr},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::Context;
use axum::{Json, Router, extract::State, http::StatusCode, routing::get};
use serde_json::{Value, json};
use stoker_edge::connections::{self, ADMIN_LIMITS};
use stoker_fetch::{lease, resident::Resident};
use tokio::net::TcpListener;

/// Between two looks whether the files are still there.
const LOOK_PAUSE: Duration = Duration::from_secs(1);
/// Between two times that pages without a lock are asked for: the kernel takes pages by what was used least over minutes.
const TOUCH_PAUSE: Duration = Duration::from_secs(10);
/// Between two lines on how far it is.
const LINE_PAUSE: Duration = Duration::from_secs(5);

/// How far it is.
#[derive(Debug, Default)]
struct Kept {
    bytes: AtomicU64,
    total: AtomicU64,
}

impl Kept {
    fn is_all(&self) -> bool {
        let total = self.total.load(Ordering::Relaxed);
        total > 0 && self.bytes.load(Ordering::Relaxed) == total
    }
}

/// Keeps the files in `dir`; returns when it cannot go on. A signal ends the process around it.
pub(crate) async fn keep(label: String, dir: &Path, (host, port): (IpAddr, u16)) -> anyhow::Result<u8> {
    let lease = lease::hold(dir).context("hold the model in its cache")?;
    let kept = Arc::new(Kept::default());
    let address = SocketAddr::new(host, port);
    let listener = TcpListener::bind(address).await.with_context(|| format!("listen on {address}"))?;
    eprintln!("{label}: whether it is in memory says http://{}/readyz", listener.local_addr()?);
    let router = Router::new().route("/readyz", get(readyz)).with_state(kept.clone());
    tokio::spawn(connections::serve(listener, router, ADMIN_LIMITS, || {}, std::future::pending()));
    let dir = dir.to_owned();
    let ended = tokio::task::spawn_blocking(move || stay(&label, &dir, &kept)).await;
    drop(lease);
    ended.context("keep a model in memory")?
}

/// 200 once all bytes are there.
async fn readyz(State(kept): State<Arc<Kept>>) -> (StatusCode, Json<Value>) {
    let status = if kept.is_all() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let (bytes, total) = (kept.bytes.load(Ordering::Relaxed), kept.total.load(Ordering::Relaxed));
    (status, Json(json!({"residentBytes": bytes, "bytes": total})))
}

/// Never returns but for what keeps it from going on.
fn stay(label: &str, dir: &Path, kept: &Kept) -> anyhow::Result<u8> {
    let mut resident = Resident::of(dir)?;
    kept.total.store(resident.bytes(), Ordering::Relaxed);
    let (begun, total) = (Instant::now(), gb(resident.bytes()));
    let mut said = begun;
    resident.bring(|bytes| {
        kept.bytes.store(bytes, Ordering::Relaxed);
        if said.elapsed() >= LINE_PAUSE {
            eprintln!("{label}: {:.2} of {total:.2} GB in memory", gb(bytes));
            said = Instant::now();
        }
    })?;
    let (seconds, locked) = (begun.elapsed().as_secs_f64(), gb(resident.locked_bytes()));
    eprintln!("{label}: {total:.2} GB in memory after {seconds:.1} s, {locked:.2} GB of it locked there");
    let mut touched = Instant::now();
    loop {
        thread::sleep(LOOK_PAUSE);
        resident.check()?;
        if touched.elapsed() >= TOUCH_PAUSE {
            resident.touch()?;
            touched = Instant::now();
        }
    }
}

fn gb(bytes: u64) -> f64 {
    bytes as f64 / 1e9
}
