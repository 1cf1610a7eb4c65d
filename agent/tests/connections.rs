//! Connections over real sockets: slow heads, slow answers, the end.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    thread::sleep,
    time::{Duration, Instant},
};

use axum::{Router, routing::get};
use stoker_agent::connections;
use tokio::{
    net::TcpListener,
    runtime::Runtime,
    sync::oneshot::{self, Receiver, Sender},
    task::JoinHandle,
};

const HEAD_TIMEOUT: Duration = Duration::from_millis(300);
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
        let runtime = Runtime::new().unwrap();
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
        let address = listener.local_addr().unwrap();
        let (tell, asked) = oneshot::channel();
        let (end, ended) = oneshot::channel();
        let ended = async move { ended.await.unwrap_or_default() };
        let serving = runtime.spawn(connections::serve(listener, slow_router(tell), HEAD_TIMEOUT, ended));
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
    Router::new().route("/slow", get(slow))
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
fn an_answer_may_take_longer_than_a_head() {
    let server = Server::start();
    let answer = read_to_close(&mut server.send(SLOW_REQUEST));
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n") && answer.ends_with("slow"), "{answer}");
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
