//! Streams of events over real sockets: what comes before, with and behind them on the same connection.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    io::{self, Read, Write},
    net::{Shutdown, SocketAddr, TcpStream},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread::sleep,
    time::{Duration, Instant},
};

use axum::{
    Router,
    body::{Body, Bytes},
    extract::Request,
    http::{Response, header::CONTENT_TYPE},
    routing::{get, post},
};
use futures::{StreamExt, stream};
use stoker_edge::connections::{self, Limits};
use tokio::{net::TcpListener, runtime::Runtime, sync::mpsc, task::JoinHandle};

/// Enough on any machine for what happens within a second.
const PATIENCE: Duration = Duration::from_secs(20);
/// Whoever waits for a connection to be closed does not wait until the server closes one that is idle.
const LONG: Duration = Duration::from_secs(3 * PATIENCE.as_secs());
const LIMITS: Limits = Limits { head: LONG, stall: Duration::from_millis(500), n_connections: 100, http2: false };
const TERMINATOR: &str = "0\r\n\r\n";

type Events = mpsc::UnboundedReceiver<io::Result<&'static str>>;
type Say = mpsc::UnboundedSender<io::Result<&'static str>>;

/// A server whose streams say what the test says.
struct Server {
    address: SocketAddr,
    end: tokio::sync::oneshot::Sender<()>,
    serving: JoinHandle<()>,
    /// Who says something on the stream that was asked for last.
    say: Arc<Mutex<Option<Say>>>,
    /// Streams that were dropped.
    n_gone: Arc<AtomicUsize>,
    runtime: Runtime,
}

/// Counts where it is dropped.
struct Gone(Arc<AtomicUsize>);

impl Drop for Gone {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

fn events(body: Body) -> Response<Body> {
    Response::builder().header(CONTENT_TYPE, "text/event-stream").body(body).unwrap()
}

impl Server {
    fn start() -> Self {
        let runtime = Runtime::new().unwrap();
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
        let address = listener.local_addr().unwrap();
        let (say, n_gone) = (Arc::new(Mutex::new(None)), Arc::new(AtomicUsize::new(0)));
        let (kept, counted) = (Arc::clone(&say), Arc::clone(&n_gone));
        let told = move || {
            let (tell, events) = mpsc::unbounded_channel();
            *kept.lock().unwrap() = Some(tell);
            Body::from_stream(stream::unfold((events, Gone(Arc::clone(&counted))), said))
        };
        let [asked, posted, early] = [told.clone(), told.clone(), told];
        let answered = |body: Body| async move { events(body) };
        let routes = Router::new()
            .route("/stream", get(move || answered(asked())).post(move |_: Bytes| answered(posted())))
            // Nothing of the request's body is read.
            .route("/early", post(move |_: Request| answered(early())))
            .route(
                "/endless",
                get(move || answered(Body::from_stream(stream::repeat(megabyte()).map(Ok::<_, io::Error>)))),
            )
            .route(
                "/ready",
                get(move || answered(Body::from_stream(stream::iter(["a", "bc", ""].map(Ok::<_, io::Error>))))),
            )
            .route("/echo", post(|body: Bytes| async { body }))
            .route("/hello", get(|| async { "hello" }));
        let (end, ended) = tokio::sync::oneshot::channel();
        let ended = async move { ended.await.unwrap_or_default() };
        let serving = runtime.spawn(connections::serve(listener, routes, LIMITS, || {}, ended));
        Self { address, end, serving, say, n_gone, runtime }
    }

    fn send(&self, text: &str) -> Client {
        let connection = TcpStream::connect(self.address).unwrap();
        connection.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut client = Client { connection, seen: String::new() };
        client.send(text);
        client
    }

    /// Waits for who asked for a stream.
    fn say(&self) -> Say {
        self.waits_until(|| self.say.lock().unwrap().is_some(), "a stream is asked for");
        self.say.lock().unwrap().take().unwrap()
    }

    fn waits_until(&self, is_so: impl Fn() -> bool, what: &str) {
        let began = Instant::now();
        while !is_so() {
            assert!(began.elapsed() < PATIENCE, "waited in vain until {what}");
            sleep(Duration::from_millis(5));
        }
    }
}

fn megabyte() -> Bytes {
    vec![b'x'; 1 << 20].into()
}

async fn said((mut events, gone): (Events, Gone)) -> Option<(io::Result<&'static str>, (Events, Gone))> {
    Some((events.recv().await?, (events, gone)))
}

struct Client {
    connection: TcpStream,
    /// What came.
    seen: String,
}

impl Client {
    fn send(&mut self, text: &str) {
        self.connection.write_all(text.as_bytes()).unwrap();
    }

    /// Reads until this came, and takes what came before it and itself.
    fn until(&mut self, text: &str) -> String {
        let mut piece = [0; 4096];
        loop {
            if let Some(at) = self.seen.find(text) {
                let rest = self.seen.split_off(at + text.len());
                return std::mem::replace(&mut self.seen, rest);
            }
            let n_bytes = self.connection.read(&mut piece).unwrap();
            assert!(n_bytes > 0, "it ended without {text:?}: {:?}", self.seen);
            self.seen.push_str(std::str::from_utf8(&piece[..n_bytes]).unwrap());
        }
    }

    fn until_close(mut self) -> String {
        self.connection.read_to_string(&mut self.seen).expect("the server closes the connection");
        self.seen
    }

    fn until_close_or_silence(mut self) -> String {
        self.connection.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
        let mut piece = [0; 4096];
        while let Ok(n_bytes @ 1..) = self.connection.read(&mut piece) {
            self.seen.push_str(std::str::from_utf8(&piece[..n_bytes]).unwrap());
        }
        self.seen
    }
}

const STREAM: &str = "POST /stream HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n{}";
const HELLO: &str = "GET /hello HTTP/1.1\r\nhost: a\r\n\r\n";

#[test]
fn events_come_in_chunks_and_the_connection_takes_another_request_behind_them() {
    let server = Server::start();
    let mut client = server.send(STREAM);
    for _ in 0..2 {
        let say = server.say();
        let head = client.until("\r\n\r\n");
        assert!(head.starts_with("HTTP/1.1 200 OK\r\n") && head.contains("transfer-encoding: chunked\r\n"), "{head}");
        assert!(head.contains("date: ") && !head.contains("connection:"), "{head}");
        for event in ["data: a\n\n", "data: a longer one\n\n"] {
            say.send(Ok(event)).unwrap();
            assert_eq!(client.until("\n\n\r\n"), format!("{:x}\r\n{event}\r\n", event.len()));
        }
        drop(say);
        assert_eq!(client.until(TERMINATOR), TERMINATOR);
        client.send(STREAM);
    }
    drop(server.say());
    client.until(TERMINATOR);
    client.send(HELLO);
    assert!(client.until("hello").contains("content-length: 5\r\n"));
    assert_eq!(server.n_gone.load(Ordering::SeqCst), 3, "each is gone with its end");
}

#[test]
fn what_is_ready_comes_at_once_and_a_part_without_bytes_is_no_end() {
    let server = Server::start();
    let answer = server.send("GET /ready HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n").until_close();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.contains("connection: close"), "{head}");
    assert_eq!(body, "1\r\na\r\n2\r\nbc\r\n0\r\n\r\n");
}

#[test]
fn requests_that_follow_before_the_stream_has_ended_are_answered_behind_it() {
    let server = Server::start();
    // With the request, and while its answer comes.
    let mut client = server.send(&format!("{HELLO}{STREAM}{HELLO}"));
    let say = server.say();
    client.until("hello");
    client.until("\r\n\r\n");
    client.send("POST /echo HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\n\r\nagain");
    sleep(Duration::from_millis(100));
    say.send(Ok("data: a\n\n")).unwrap();
    assert_eq!(client.until("\n\n\r\n"), "9\r\ndata: a\n\n\r\n");
    drop(say);
    assert!(client.until("hello").starts_with(TERMINATOR));
    assert!(client.until("again").contains("HTTP/1.1 200"));
}

#[test]
fn a_request_that_comes_in_the_middle_of_a_stream_is_answered_behind_it() {
    let server = Server::start();
    let mut client = server.send(STREAM);
    let say = server.say();
    client.until("\r\n\r\n");
    let (first, rest) = HELLO.split_at(9);
    client.send(first);
    sleep(Duration::from_millis(100));
    client.send(rest);
    drop(say);
    assert!(client.until("hello").starts_with(TERMINATOR));
}

#[test]
fn whoever_wants_it_closed_has_it_closed_and_http_1_0_has_no_chunks() {
    let server = Server::start();
    for (request, end) in [
        ("GET /stream HTTP/1.1\r\nhost: a\r\nconnection: x, Close\r\n\r\n", "9\r\ndata: a\n\n\r\n0\r\n\r\n"),
        ("GET /stream HTTP/1.0\r\nhost: a\r\n\r\n", "\r\n\r\ndata: a\n\n"),
    ] {
        let client = server.send(request);
        let say = server.say();
        say.send(Ok("data: a\n\n")).unwrap();
        drop(say);
        let answer = client.until_close();
        assert!(answer.ends_with(end), "{answer:?}");
    }
}

#[test]
fn a_head_without_a_body_has_no_stream_behind_it() {
    let server = Server::start();
    let mut client = server.send("HEAD /stream HTTP/1.1\r\nhost: a\r\n\r\n");
    client.until("\r\n\r\n");
    client.send(HELLO);
    assert!(client.until("hello").starts_with("HTTP/1.1 200 OK\r\n"));
    assert_eq!(server.n_gone.load(Ordering::SeqCst), 1);
}

#[test]
fn what_is_left_of_a_request_that_was_answered_early_is_not_taken_for_another_one() {
    let server = Server::start();
    let mut client =
        server.send(&format!("POST /early HTTP/1.1\r\nhost: a\r\ncontent-length: {}\r\n\r\n", HELLO.len()));
    let say = server.say();
    client.until("\r\n\r\n");
    client.send(HELLO);
    say.send(Ok("data: a\n\n")).unwrap();
    drop(say);
    // Read and thrown away, or the connection is closed.
    let answer = client.until_close_or_silence();
    assert!(answer.contains("data: a") && !answer.contains("hello"), "{answer:?}");
}

#[test]
fn a_stream_that_breaks_off_has_no_end() {
    let server = Server::start();
    let mut client = server.send(STREAM);
    let say = server.say();
    say.send(Ok("data: a\n\n")).unwrap();
    client.until("\n\n\r\n");
    say.send(Err(io::Error::other("lost"))).unwrap();
    assert_eq!(client.until_close(), "");
}

#[test]
fn the_stream_of_a_client_that_leaves_is_gone_also_while_nothing_comes() {
    let server = Server::start();
    let client = server.send(STREAM);
    let say = server.say();
    drop(client);
    server.waits_until(|| say.is_closed(), "the stream is gone");
    let mut client = server.send(STREAM);
    let say = server.say();
    client.until("\r\n\r\n");
    // Whoever says no more is taken for one who left.
    client.connection.shutdown(Shutdown::Write).unwrap();
    server.waits_until(|| say.is_closed(), "the stream is gone");
}

#[test]
fn a_client_that_does_not_read_its_stream_is_let_go() {
    let server = Server::start();
    let client = server.send("GET /endless HTTP/1.1\r\nhost: a\r\n\r\n");
    sleep(LIMITS.stall * 3);
    let (mut connection, mut piece, mut n_bytes) = (client.connection, vec![0; 1 << 20], 0);
    while let Ok(n @ 1..) = connection.read(&mut piece) {
        n_bytes += n;
        assert!(n_bytes < 100 << 20, "the server still writes to who did not read");
    }
}

#[test]
fn at_the_end_a_stream_is_finished_and_its_connection_closed() {
    let server = Server::start();
    let mut client = server.send(STREAM);
    let say = server.say();
    client.until("\r\n\r\n");
    let Server { end, serving, runtime, .. } = server;
    end.send(()).unwrap();
    sleep(Duration::from_millis(100));
    assert!(!serving.is_finished());
    say.send(Ok("data: a\n\n")).unwrap();
    drop(say);
    assert_eq!(client.until_close(), "9\r\ndata: a\n\n\r\n0\r\n\r\n");
    runtime.block_on(async { tokio::time::timeout(PATIENCE, serving).await }).expect("the server ends").unwrap();
}
