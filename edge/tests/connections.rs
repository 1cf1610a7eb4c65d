//! Connections over real sockets: slow heads, slow answers, the end.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    convert::Infallible,
    io::{ErrorKind, Read, Write},
    net::{SocketAddr, TcpStream},
    thread::sleep,
    time::{Duration, Instant},
};

use axum::{Router, body::Body, routing::get};
use stoker_edge::connections::{self, Limits};
use tokio::{
    net::TcpListener,
    runtime::Runtime,
    sync::oneshot::{self, Receiver, Sender},
    task::JoinHandle,
};

const HEAD_TIMEOUT: Duration = Duration::from_millis(300);
const LIMITS: Limits = Limits { head: HEAD_TIMEOUT, stall: Duration::from_millis(300), n_connections: 3, http2: false };
/// Longer than a head may take.
const SLOW_ANSWER: Duration = Duration::from_millis(900);
/// Enough on any machine for what happens within a second.
const PATIENCE: Duration = Duration::from_secs(20);
const SLOW_REQUEST: &str = "GET /slow HTTP/1.1\r\nhost: a\r\n\r\n";

/// A server and the threads it runs on.
struct Server {
    address: SocketAddr,
    end: Sender<()>,
    serving: JoinHandle<()>,
    /// Gets a word when the slow answer is being made.
    asked: Receiver<()>,
    runtime: Runtime,
}

impl Server {
    fn start() -> Self {
        Self::with(LIMITS)
    }

    fn with(limits: Limits) -> Self {
        let runtime = Runtime::new().unwrap();
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
        let address = listener.local_addr().unwrap();
        let (tell, asked) = oneshot::channel();
        let (end, ended) = oneshot::channel();
        let ended = async move { ended.await.unwrap_or_default() };
        let serving = runtime.spawn(connections::serve(listener, slow_router(tell), limits, || {}, ended));
        Self { address, end, serving, asked, runtime }
    }

    fn send(&self, text: &str) -> TcpStream {
        let mut connection = TcpStream::connect(self.address).unwrap();
        connection.set_read_timeout(Some(PATIENCE)).unwrap();
        connection.write_all(text.as_bytes()).unwrap();
        connection
    }
}

/// Answers `/slow` slowly, and tells when it begins to.
fn slow_router(tell: Sender<()>) -> Router {
    let tell = std::sync::Arc::new(std::sync::Mutex::new(Some(tell)));
    let slow = move || async move {
        if let Some(tell) = tell.lock().unwrap().take() {
            tell.send(()).unwrap();
        }
        tokio::time::sleep(SLOW_ANSWER).await;
        "slow"
    };
    Router::new().route("/slow", get(slow)).route("/endless", get(endless))
}

/// Megabytes until its reader is gone.
async fn endless() -> Body {
    Body::from_stream(futures::stream::repeat(Ok::<_, Infallible>(vec![b'x'; 1 << 20])))
}

/// What the server writes until it closes the connection.
fn read_to_close(connection: &mut TcpStream) -> String {
    let mut answer = String::new();
    connection.read_to_string(&mut answer).expect("the server closes the connection");
    answer
}

#[test]
fn a_client_that_sends_its_head_byte_by_byte_is_let_go() {
    let server = Server::start();
    let mut connection = server.send("GET /slow HTTP/1.1\r\nhost: a\r\nx-slow: ");
    let began = Instant::now();
    while connection.write_all(b"x").is_ok() {
        assert!(began.elapsed() < PATIENCE, "the server still listens to a head after {PATIENCE:?}");
        sleep(HEAD_TIMEOUT / 10);
    }
}

#[test]
fn a_client_that_sends_nothing_is_let_go() {
    let server = Server::start();
    assert_eq!(read_to_close(&mut server.send("")), "");
}

#[test]
fn where_http2_may_be_spoken_a_client_of_http1_is_served_and_one_that_does_not_say_which_is_let_go() {
    let server = Server::with(Limits { http2: true, ..LIMITS });
    let answer = read_to_close(&mut server.send(SLOW_REQUEST));
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n") && answer.ends_with("slow"), "{answer}");
    for begun in ["", "P", "PRI * HTTP/2.0\r\n\r\n", "GET /slow HT"] {
        let began = Instant::now();
        let said = read_to_close(&mut server.send(begun));
        assert!(
            said.is_empty() && began.elapsed() >= HEAD_TIMEOUT / 2,
            "{begun:?}: {said:?} after {:?}",
            began.elapsed()
        );
    }
    let mut of_http2 = server.send("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0");
    let mut frame = [0; 9];
    of_http2.read_exact(&mut frame).unwrap();
    assert_eq!(frame[3], 4, "it begins with its SETTINGS: {frame:?}");
}

#[test]
fn an_answer_may_take_longer_than_a_head() {
    let server = Server::start();
    let answer = read_to_close(&mut server.send(SLOW_REQUEST));
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n") && answer.ends_with("slow"), "{answer}");
}

#[test]
fn a_client_that_stops_reading_is_let_go_and_one_that_reads_slowly_is_not() {
    let server = Server::start();
    let request = "GET /endless HTTP/1.1\r\nhost: a\r\n\r\n";
    let mut stalled = server.send(request);
    let mut slow = server.send(request);
    let mut piece = vec![0; 1 << 20];
    let began = Instant::now();
    while began.elapsed() < LIMITS.stall * 4 {
        slow.read_exact(&mut piece).expect("a reader is served");
        sleep(LIMITS.stall / 10);
    }
    // What the kernel took before stays to be read, and nothing follows it.
    let mut n_bytes = 0;
    loop {
        match stalled.read(&mut piece) {
            Ok(0) => break,
            Ok(n) => n_bytes += n,
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::ConnectionReset);
                break;
            }
        }
        assert!(n_bytes < 100 << 20, "the server still writes to who did not read for {:?}", began.elapsed());
    }
}

#[test]
fn one_connection_too_many_is_closed_until_another_is() {
    let server = Server::with(Limits { head: PATIENCE, ..LIMITS });
    let mut open: Vec<TcpStream> = (0..LIMITS.n_connections).map(|_| server.send("GET /sl")).collect();
    let is_served = || {
        let mut answer = String::new();
        let mut connection = server.send("GET /nowhere HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n");
        connection.read_to_string(&mut answer).is_ok_and(|_| answer.starts_with("HTTP/1.1 404"))
    };
    assert!(!is_served());
    drop(open.pop());
    let began = Instant::now();
    while !is_served() {
        assert!(began.elapsed() < PATIENCE, "nobody is served after one has left");
        sleep(Duration::from_millis(10));
    }
}

#[test]
fn at_the_end_an_answer_is_finished_and_nobody_new_is_heard() {
    let server = Server::start();
    let mut connection = server.send(SLOW_REQUEST);
    let Server { address, end, serving, asked, runtime } = server;
    runtime.block_on(asked).unwrap();
    end.send(()).unwrap();
    let answer = read_to_close(&mut connection);
    assert!(answer.ends_with("slow"), "{answer}");
    runtime.block_on(async { tokio::time::timeout(PATIENCE, serving).await }).expect("the server ends").unwrap();
    assert!(TcpStream::connect(address).is_err());
}
