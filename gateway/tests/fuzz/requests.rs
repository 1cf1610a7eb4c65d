//! Requests as bytes on a connection, read as the gateway's server reads them: no panic, no connection without an end, no answer that is
//! none, no more bytes in bodies than came, and nothing in the headers for a replica that would end a header there.

use std::{
    io,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use axum::{
    Router,
    body::Body,
    extract::{Request, State},
    http::{Method, StatusCode, header},
    serve::Listener,
};
use stoker_edge::connections::{Limits, serve};
use stoker_gateway::{
    body,
    headers::{request_id, to_replica},
    scan::Facts,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex},
    sync::mpsc,
};

use crate::{every_input, mutate::Corpus};

/// More than any input has.
const BUFFER: usize = 64 << 10;
const BODY_MAX: usize = 4096;
const PATIENCE: Duration = Duration::from_secs(20);
/// A connection takes a few polls of its task to have read all that came.
const POLLS: usize = 12;

static SOMEBODY_PANICKED: AtomicBool = AtomicBool::new(false);

/// What the gateway saw of a request.
#[derive(Clone, Debug, PartialEq)]
struct Seen {
    method: Method,
    target: String,
    body: Vec<u8>,
}

type Log = Arc<Mutex<Vec<Seen>>>;

/// Connections that are handed over.
struct Handed(mpsc::Receiver<DuplexStream>);

impl Listener for Handed {
    type Io = DuplexStream;
    type Addr = ();

    async fn accept(&mut self) -> (DuplexStream, ()) {
        match self.0.recv().await {
            Some(connection) => (connection, ()),
            None => std::future::pending().await,
        }
    }

    fn local_addr(&self) -> io::Result<()> {
        Ok(())
    }
}

/// Reads a request as the gateway does before it asks a replica.
async fn read(State(log): State<Log>, request: Request<Body>) -> StatusCode {
    let (parts, body) = request.into_parts();
    let body = match body::read(&parts.headers, body, BODY_MAX).await {
        Ok(body) => body,
        Err(error) => return error.status,
    };
    let passed = to_replica(parts.headers.clone(), &request_id(&parts.headers), None);
    assert!(passed.values().all(|value| !value.as_bytes().iter().any(|byte| matches!(byte, b'\r' | b'\n' | 0))));
    for name in [header::TRANSFER_ENCODING, header::CONTENT_LENGTH, header::CONNECTION, header::HOST, header::UPGRADE] {
        assert!(!passed.contains_key(&name), "{name} is the connection's own");
    }
    let _ = Facts::scan(&body);
    log.lock().unwrap().push(Seen { method: parts.method, target: parts.uri.to_string(), body: body.to_vec() });
    StatusCode::OK
}

/// A server, and what it saw.
struct House {
    hand: mpsc::Sender<DuplexStream>,
    log: Log,
}

impl House {
    fn open() -> Self {
        let (hand, handed) = mpsc::channel(1);
        let log = Log::default();
        let router = Router::new().fallback(read).with_state(Arc::clone(&log));
        tokio::spawn(serve(Handed(handed), router, Limits::default(), || {}, std::future::pending()));
        Self { hand, log }
    }

    /// What is seen of a connection on which these bytes come and then nothing more, and what is answered.
    async fn reads(&self, input: &[u8]) -> (Vec<Seen>, Vec<u8>) {
        let (mut client, server) = duplex(BUFFER);
        self.hand.send(server).await.unwrap();
        // Whoever is refused is not listened to: that is no error of this side.
        let _ = client.write_all(input).await;
        for _ in 0..POLLS {
            tokio::task::yield_now().await;
        }
        let _ = client.shutdown().await;
        let mut answer = Vec::new();
        let ended = tokio::time::timeout(PATIENCE, client.read_to_end(&mut answer)).await;
        assert!(ended.is_ok(), "the connection has no end: {}", String::from_utf8_lossy(input));
        (std::mem::take(&mut *self.log.lock().unwrap()), answer)
    }
}

const CHAT: &str = "POST /v1/chat/completions HTTP/1.1\r\nHost: chat.default\r\n";
const JSON: &str = r#"{"model":"chat","messages":[{"role":"user","content":"Hi"}]}"#;

fn whole(headers: &str, body: &str) -> Vec<u8> {
    format!("{CHAT}{headers}\r\n{body}").into_bytes()
}

/// Requests as clients send them, and those that two readers take for different ones.
fn seeds() -> Vec<Vec<u8>> {
    let length = format!("content-length: {}\r\n", JSON.len());
    let (first, second) = JSON.split_at(20);
    let chunks =
        format!("{:x}\r\n{first}\r\n{:X};x=y\r\n{second}\r\n0\r\nx-trailer: 1\r\n\r\n", first.len(), second.len());
    let one = whole(&length, JSON);
    let hidden = String::from_utf8(one.clone()).unwrap();
    vec![
        one.clone(),
        whole("transfer-encoding: chunked\r\n", &chunks),
        [one.clone(), b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n".to_vec(), one].concat(),
        whole(
            &format!(
                "{length}expect: 100-continue\r\nconnection: close, x-hop\r\nx-hop: 1\r\nauthorization: Bearer k\r\n"
            ),
            JSON,
        ),
        whole(&format!("{length}transfer-encoding: chunked\r\n"), &format!("0\r\n\r\n{hidden}")),
        whole(&format!("content-length: 2\r\n{length}"), &format!("{{}}{hidden}")),
        whole("transfer-encoding: chunked, identity\r\n", &format!("0\r\n\r\n{hidden}")),
        whole("transfer-encoding: xchunked\r\n", &format!("0\r\n\r\n{hidden}")),
        whole("content-length : 2\r\n", &format!("{{}}{hidden}")),
        whole("content-length: 2\r\n transfer-encoding: chunked\r\n", &format!("{{}}{hidden}")),
        b"GET http://chat.default/v1/models?x=%00 HTTP/1.0\r\nx-stoker-resume: 5\r\nx-stoker-salt: other\r\n\r\n"
            .to_vec(),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00".to_vec(),
    ]
}

/// Requests that are seen of each: of those with two meanings none, or one that ends its connection, so that nothing behind it is one.
const SEEN: [usize; 12] = [1, 1, 3, 1, 1, 0, 0, 0, 0, 0, 1, 0];

const WORDS: &[&[u8]] = &[
    b"Transfer-Encoding: chunked\r\n",
    b"transfer-encoding:\tchunked\r\n",
    b"transfer-encoding: identity\r\n",
    b"Content-Length: 0\r\n",
    b"content-length: +5\r\n",
    b"content-length: 99999999999999999999\r\n",
    b"\r\n\r\n",
    b"\n\n",
    b"\r\r\n",
    b"0\r\n\r\n",
    b"ffffffffffffffff\r\n",
    b"GET / HTTP/1.1\r\n\r\n",
    b"HTTP/1.0",
    b" HTTP/1.1",
    b"host: a.b\r\n",
    b"expect: 100-continue\r\n",
    b"x: \x00\r\n",
    b"connection: upgrade\r\n",
    b"upgrade: h2c\r\n",
    b": x\r\n",
    b"\x0b",
    b"\xe2\x98\x83",
];

async fn check(house: &House, input: &[u8]) -> bool {
    let (seen, answer) = house.reads(input).await;
    assert!(!SOMEBODY_PANICKED.load(Ordering::Relaxed), "a panic: {}", String::from_utf8_lossy(input));
    assert!(answer.is_empty() || answer.starts_with(b"HTTP/1."), "{}", String::from_utf8_lossy(&answer));
    let n_bytes: usize = seen.iter().map(|seen| seen.body.len() + seen.target.len()).sum();
    assert!(n_bytes <= input.len() + seen.len(), "{seen:?} of {}", String::from_utf8_lossy(input));
    !seen.is_empty()
}

#[test]
fn requests_are_read_or_refused_and_connections_end() {
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        SOMEBODY_PANICKED.store(true, Ordering::Relaxed);
        before(info);
    }));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let house = runtime.block_on(async { House::open() });
    let seeds = seeds();
    for (seed, n_seen) in seeds.iter().zip(SEEN) {
        let seen = runtime.block_on(house.reads(seed)).0;
        assert_eq!(seen.len(), n_seen, "{}: {seen:?}", String::from_utf8_lossy(seed));
        let is_whole = |seen: &Seen| seen.body.is_empty() || seen.body == JSON.as_bytes();
        assert!(seen.iter().all(is_whole), "{seen:?}");
    }
    let corpus = Corpus { seeds: &seeds, words: WORDS };
    every_input("requests", 1, |number| runtime.block_on(check(&house, &corpus.input(number).0)));
}
