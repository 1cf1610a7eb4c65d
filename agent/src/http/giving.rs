//! The port on which files of the model are given to replicas that fetch it: by what the cache calls their content, in ranges, to who has
//! a ticket. Reads and gives, decides nothing: who is let in says [`crate::ticket`].
//!
//! It has a thread of its own that the kernel runs last, so many streams, and a rate: requests are answered first.

use std::{
    fs::File,
    io,
    net::SocketAddr,
    ops::Range,
    os::unix::fs::FileExt,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use axum::{
    Extension, Router,
    body::Body,
    extract::{Path, State},
    http::{
        HeaderMap, StatusCode,
        header::{CONTENT_LENGTH, CONTENT_RANGE, RANGE},
    },
    response::{IntoResponse, Response},
    routing::get,
};
use bytes::Bytes;
use futures::stream;
use prometheus::IntCounter;
use stoker_crds::{
    holders::{BLOBS_PATH, TICKET_HEADER, Ticket},
    intent::SIGNATURE_HEADER,
};
use stoker_edge::connections::{self, Limits};
use tokio::{
    net::TcpListener,
    sync::{OwnedSemaphorePermit, Semaphore, watch},
};

use crate::{
    http::error::ApiError,
    intent::RefusalLog,
    replica::Replica,
    ticket::{Giver, NotAdmitted, PresentedTicket, admit},
};

/// Files given at the same time; who asks for one more is told to come again.
const STREAMS_MAX: usize = 8;
/// Read and written at once.
const PIECE_BYTES: usize = 256 << 10;
/// What was not given in time may be made up for by so much.
const BURST: Duration = Duration::from_millis(50);
/// Lower than all that computes and answers.
const NICENESS: i32 = 10;
/// Who reads nothing for so long is gone; its place is wanted.
const LIMITS: Limits =
    Limits { head: Duration::from_secs(15), stall: Duration::from_secs(15), n_connections: 64, http2: false };

/// What all requests share.
struct Counter {
    replica: Arc<Replica>,
    streams: Arc<Semaphore>,
    pace: Mutex<Pace>,
    refusals: Mutex<RefusalLog>,
    given: IntCounter,
}

/// Gives files until the process is to end.
pub fn start(listener: TcpListener, replica: Arc<Replica>, exit: watch::Receiver<Option<u8>>) -> io::Result<()> {
    let listener = listener.into_std()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    std::thread::Builder::new().name("giving".to_owned()).spawn(move || {
        if let Err(error) = rustix::process::nice(NICENESS) {
            tracing::debug!(%error, "files are given at the priority of all else");
        }
        runtime.block_on(serve(listener, replica, exit));
    })?;
    Ok(())
}

async fn serve(listener: std::net::TcpListener, replica: Arc<Replica>, mut exit: watch::Receiver<Option<u8>>) {
    let listener = match TcpListener::from_std(listener) {
        Ok(listener) => listener,
        Err(error) => return tracing::warn!(%error, "files of the model are given to nobody"),
    };
    let routes = router(replica);
    let for_whom = |from: &SocketAddr| routes.clone().layer(Extension(*from));
    // The sender lives in the replica, which outlives this.
    let ended = async move { _ = exit.wait_for(Option::is_some).await };
    connections::serve_each(LIMITS.places(), listener, for_whom, LIMITS, || {}, ended).await;
}

fn router(replica: Arc<Replica>) -> Router {
    let counter = Counter {
        streams: Arc::new(Semaphore::new(STREAMS_MAX)),
        pace: Mutex::default(),
        refusals: Mutex::default(),
        given: replica.metrics().given_bytes(),
        replica,
    };
    Router::new().route(&format!("{BLOBS_PATH}{{name}}"), get(give)).with_state(Arc::new(counter))
}

async fn give(
    State(counter): State<Arc<Counter>>,
    Extension(from): Extension<SocketAddr>,
    Path(name): Path<String>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let ticket = counter.admit(&headers, from)?;
    let file = counter.replica.shelf().and_then(|shelf| shelf.file(&name)).ok_or_else(|| not_here(&name))?;
    let file = File::open(file).map_err(|error| unreadable(&name, &error))?;
    let size = file.metadata().map_err(|error| unreadable(&name, &error))?.len();
    let asked = headers.get(RANGE).and_then(|range| range.to_str().ok()).unwrap_or_default();
    let range = range(asked, size).ok_or_else(|| no_range(asked, size))?;
    let Ok(place) = counter.streams.clone().try_acquire_owned() else { return Err(busy()) };
    let head = [
        (CONTENT_RANGE, format!("bytes {}-{}/{size}", range.start, range.end - 1)),
        (CONTENT_LENGTH, (range.end - range.start).to_string()),
    ];
    let rest = Rest { file, range, ticket, counter, _place: place };
    let body = Body::from_stream(stream::try_unfold(rest, Rest::next));
    Ok((StatusCode::PARTIAL_CONTENT, head, body).into_response())
}

impl Counter {
    fn admit(&self, headers: &HeaderMap, from: SocketAddr) -> Result<Ticket, ApiError> {
        let text = |name| headers.get(name).map(|value| value.to_str().unwrap_or_default());
        let keys = self.replica.settings().authority.public_keys();
        let commit = self.replica.shelf().map_or("", |shelf| shelf.commit());
        let giver = Giver { receiver: self.replica.receiver(), commit, keys: &keys };
        let presented = PresentedTicket { ticket: text(TICKET_HEADER), signature: text(SIGNATURE_HEADER) };
        admit(presented, from.ip(), giver).map_err(|refused| self.refuse(refused, from))
    }

    fn refuse(&self, refused: NotAdmitted, from: SocketAddr) -> ApiError {
        let mut refusals = self.refusals.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(not_told) = refusals.note(refused.code(), Instant::now()) {
            tracing::warn!(code = refused.code(), reason = %refused, %from, not_told, "a file of the model was refused");
        }
        ApiError::new(refused.status(), refused.code(), refused.to_string())
    }
}

/// What of a file is still to be given.
struct Rest {
    file: File,
    range: Range<u64>,
    ticket: Ticket,
    counter: Arc<Counter>,
    _place: OwnedSemaphorePermit,
}

impl Rest {
    async fn next(mut self) -> io::Result<Option<(Bytes, Self)>> {
        let left = usize::try_from(self.range.end - self.range.start).unwrap_or(PIECE_BYTES);
        let count = left.min(PIECE_BYTES);
        if count == 0 {
            return Ok(None);
        }
        let wait = {
            let mut pace = self.counter.pace.lock().unwrap_or_else(PoisonError::into_inner);
            pace.wait(count as u64, self.ticket.bytes_per_second, Instant::now())
        };
        tokio::time::sleep(wait).await;
        let mut piece = vec![0; count];
        // What was loaded is mostly in memory; where it is not, nobody but those who fetch waits for the disk.
        self.file.read_exact_at(&mut piece, self.range.start)?;
        self.range.start += count as u64;
        self.counter.given.inc_by(count as u64);
        Ok(Some((piece.into(), self)))
    }
}

/// A rate that all streams share. Pure.
#[derive(Debug, Default)]
struct Pace {
    free_at: Option<Instant>,
}

impl Pace {
    /// How long so many more bytes have to wait.
    fn wait(&mut self, bytes: u64, bytes_per_second: u64, now: Instant) -> Duration {
        let takes = Duration::from_secs_f64(bytes as f64 / bytes_per_second.max(1) as f64);
        let earliest = now.checked_sub(BURST).unwrap_or(now);
        let begins = self.free_at.map_or(now, |free_at| free_at.max(earliest));
        self.free_at = Some(begins + takes);
        begins.saturating_duration_since(now)
    }
}

/// The one range that `bytes=A-B` asks for, if a file of this size has all of it.
fn range(asked: &str, size: u64) -> Option<Range<u64>> {
    let (first, last) = asked.strip_prefix("bytes=")?.split_once('-')?;
    let (first, last): (u64, u64) = (first.parse().ok()?, last.parse().ok()?);
    (first <= last && last < size).then(|| first..last + 1)
}

fn not_here(name: &str) -> ApiError {
    ApiError::new(StatusCode::NOT_FOUND, "no_such_blob", format!("the model here has no file with the content {name}"))
}

fn no_range(asked: &str, size: u64) -> ApiError {
    let message = format!("\"{asked}\" is no range of a file of {size} bytes: ask for bytes=FIRST-LAST");
    ApiError::new(StatusCode::RANGE_NOT_SATISFIABLE, "no_such_range", message)
}

fn unreadable(name: &str, error: &io::Error) -> ApiError {
    ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "unreadable", format!("{name}: {error}"))
}

fn busy() -> ApiError {
    let message = format!("{STREAMS_MAX} files are being given: come again");
    let error = ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "giving_enough", message);
    ApiError { retry_after_seconds: Some(1), ..error }
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink};

    use axum::http::Request;
    use http_body_util::BodyExt;
    use ring::signature::{Ed25519KeyPair, KeyPair};
    use stoker_crds::{
        holders::TICKET_PURPOSE,
        intent::{hex, signed_bytes},
    };
    use stoker_fetch::Shelf;
    use tower::ServiceExt;

    use super::*;
    use crate::{config::Settings, intent::Authority};

    /// A replica with one file on its shelf, and one of another model beside that. Its operator's key is of seed 1.
    fn holder(dir: &std::path::Path) -> Arc<Replica> {
        let (blobs, model) = (dir.join("blobs"), dir.join("models/a--b@c1"));
        [&blobs, &model].into_iter().for_each(|made| fs::create_dir_all(made).unwrap());
        fs::write(blobs.join("sha256-1"), "0123456789").unwrap();
        fs::write(blobs.join("sha256-2"), "of another model").unwrap();
        symlink("../../blobs/sha256-1", model.join("model.safetensors")).unwrap();
        let (config, keys) = (dir.join("agent.json"), dir.join("keys"));
        let said = r#"{"revision": "r", "model": {"source": "/models", "servedNames": ["m"]}}"#;
        fs::write(&config, said).unwrap();
        fs::write(&keys, hex(key().public_key().as_ref())).unwrap();
        let authority = Authority { pod_uid: Some("pod".to_owned()), keys: Some(keys) };
        let replica = Replica::new(Settings::of_operator(&config, authority).unwrap());
        replica.offer(Shelf::of(&model).unwrap().unwrap());
        replica
    }

    fn key() -> Ed25519KeyPair {
        Ed25519KeyPair::from_seed_unchecked(&[1; 32]).unwrap()
    }

    /// Status, range and body of what an address is given that shows a ticket for 10.0.0.7.
    async fn given(replica: &Arc<Replica>, from: &str, name: &str, range: &str) -> (u16, String, String) {
        let ticket = Ticket {
            pod_uid: "pod".to_owned(),
            start_id: replica.receiver().start_id.to_owned(),
            commit: "c1".to_owned(),
            address: "10.0.0.7".parse().unwrap(),
            expires_up_ms: u64::MAX,
            bytes_per_second: 1 << 30,
        };
        let text = serde_json::to_string(&ticket).unwrap();
        let signature = hex(key().sign(&signed_bytes(TICKET_PURPOSE, text.as_bytes())).as_ref());
        let request = Request::get(format!("{BLOBS_PATH}{name}")).header(RANGE, range);
        let request = request.header(TICKET_HEADER, text).header(SIGNATURE_HEADER, signature);
        let from: SocketAddr = format!("{from}:5").parse().unwrap();
        let routes = router(replica.clone()).layer(Extension(from));
        let answer = routes.oneshot(request.body(Body::empty()).unwrap()).await.unwrap();
        let status = answer.status().as_u16();
        let range = answer.headers().get(CONTENT_RANGE).map(|range| range.to_str().unwrap().to_owned());
        let body = answer.into_body().collect().await.unwrap().to_bytes();
        (status, range.unwrap_or_default(), String::from_utf8(body.to_vec()).unwrap())
    }

    #[test]
    fn a_range_is_given_to_the_address_of_the_ticket_and_of_the_served_model_alone() {
        let dir = tempfile::tempdir().unwrap();
        let replica = holder(dir.path());
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let given = |from, name, range| runtime.block_on(given(&replica, from, name, range));
        let (status, range, body) = given("10.0.0.7", "sha256-1", "bytes=2-5");
        assert_eq!((status, range.as_str(), body.as_str()), (206, "bytes 2-5/10", "2345"));
        assert_eq!(replica.metrics().given_bytes().get(), 4);
        let refused = |from, name, range, status, code| {
            let (found, _, body) = given(from, name, range);
            assert!(found == status && body.contains(code), "{found} {body}");
        };
        refused("10.0.0.8", "sha256-1", "bytes=2-5", 403, "other_address");
        refused("10.0.0.7", "sha256-2", "bytes=2-5", 404, "no_such_blob");
        refused("10.0.0.7", "..%2Fblobs%2Fsha256-2", "bytes=2-5", 404, "no_such_blob");
        refused("10.0.0.7", "sha256-1", "bytes=2-10", 416, "no_such_range");
        assert_eq!(replica.metrics().given_bytes().get(), 4);
    }

    #[test]
    fn one_whole_range_is_given_and_no_other() {
        assert_eq!(range("bytes=0-9", 10), Some(0..10));
        assert_eq!(range("bytes=4-4", 10), Some(4..5));
        for asked in ["", "bytes=0-10", "bytes=5-4", "bytes=5-", "bytes=-5", "bytes=0-1,3-4", "items=0-1"] {
            assert_eq!(range(asked, 10), None, "{asked}");
        }
        assert_eq!(range("bytes=0-0", 0), None);
    }

    #[test]
    fn streams_share_one_rate_and_what_came_late_is_made_up_for_a_little() {
        let (mut pace, now) = (Pace::default(), Instant::now());
        let mut at = |millis| pace.wait(100, 1000, now + Duration::from_millis(millis)).as_millis();
        assert_eq!([at(0), at(0), at(0)], [0, 100, 200], "a tenth of a second each");
        assert_eq!(at(320), 0, "it was its turn at 300");
        assert_eq!(at(400), 0);
        // Long idle: no more is made up for than the burst.
        assert_eq!([at(10_000), at(10_000)], [0, 50]);
    }
}
