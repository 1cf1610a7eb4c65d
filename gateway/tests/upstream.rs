//! Replicas as the gateway reads them: what they say in any number of parts, connections that are used again, and those that are not.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::http::Request;
use bytes::Bytes;
use stoker_gateway::upstream::{SendError, Upstream};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};

/// Who says these parts to every request, one after the other, and then waits for the next or ends the connection.
struct Replica {
    address: SocketAddr,
    n_connections: Arc<AtomicUsize>,
}

impl Replica {
    async fn start(parts: &'static [&'static str], stays: bool) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (address, n_connections) = (listener.local_addr().unwrap(), Arc::new(AtomicUsize::new(0)));
        let counted = Arc::clone(&n_connections);
        tokio::spawn(async move {
            while let Ok((connection, _)) = listener.accept().await {
                counted.fetch_add(1, Ordering::SeqCst);
                tokio::spawn(answer(connection, parts, stays));
            }
        });
        Self { address, n_connections }
    }

    fn n_connections(&self) -> usize {
        self.n_connections.load(Ordering::SeqCst)
    }

    async fn ask(&self, upstream: &Upstream, body: &'static str) -> Result<String, String> {
        let request = Request::post(format!("http://{}/x", self.address)).body(Bytes::from(body)).unwrap();
        let answer = upstream.send(request).await.map_err(|error| error.to_string())?;
        let whole = answer.into_body().whole().await.map_err(|error| error.to_string())?;
        Ok(String::from_utf8(whole.to_vec()).unwrap())
    }
}

async fn answer(mut connection: TcpStream, parts: &[&str], stays: bool) {
    connection.set_nodelay(true).unwrap();
    let mut request = [0; 4096];
    while connection.read(&mut request).await.is_ok_and(|n_bytes| n_bytes > 0) {
        for part in parts {
            if connection.write_all(part.as_bytes()).await.is_err() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        if !stays {
            return;
        }
    }
}

const WHOLE: &[&str] = &["HTTP/1.1 200 OK\r\nconte", "nt-length: 5\r\n\r", "\nhel", "lo"];

#[tokio::test]
async fn an_answer_is_the_same_in_any_number_of_parts() {
    for parts in [
        WHOLE,
        &["HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nhel\r\n2;x=y\r\nlo\r\n0\r\nx: y\r\n\r\n"],
        &[
            "HTTP/1.1 100 Continue\r\n\r",
            "\nHTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n",
            "0",
            "3\r",
            "\nhel\r\n2\r\nl",
            "o\r\n0\r\n",
            "\r\n",
        ],
    ] {
        let (replica, upstream) = (Replica::start(parts, true).await, Upstream::default());
        for _ in 0..3 {
            assert_eq!(replica.ask(&upstream, "{}").await, Ok("hello".to_owned()), "{parts:?}");
        }
        assert_eq!(replica.n_connections(), 1, "{parts:?}");
    }
}

#[tokio::test]
async fn a_connection_is_used_again_only_where_nothing_is_left_of_it() {
    for (parts, stays) in [
        (["HTTP/1.1 200 OK\r\ncontent-length: 5\r\nconnection: close\r\n\r\nhello"], true),
        (["HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello"], false),
        (["HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello, and more than it said"], true),
        (["HTTP/1.0 200 OK\r\n\r\nhello"], false),
    ] {
        let parts: &'static [&'static str] = Box::leak(Box::new(parts));
        let (replica, upstream) = (Replica::start(parts, stays).await, Upstream::default());
        for _ in 0..2 {
            assert_eq!(replica.ask(&upstream, "{}").await, Ok("hello".to_owned()), "{parts:?}");
            // What the other side does to a connection that waits is known a moment later.
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        assert_eq!(replica.n_connections(), 2, "{parts:?}");
    }
}

#[tokio::test]
async fn who_leaves_in_the_middle_leaves_the_connection() {
    let (replica, upstream) = (Replica::start(WHOLE, true).await, Upstream::default());
    let request = Request::post(format!("http://{}/x", replica.address)).body(Bytes::from("{}")).unwrap();
    drop(upstream.send(request).await.unwrap());
    assert_eq!(replica.ask(&upstream, "{}").await, Ok("hello".to_owned()));
    assert_eq!(replica.n_connections(), 2);
}

#[tokio::test]
async fn half_an_answer_is_none() {
    for (parts, why) in [
        (
            &["HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhell"] as &'static [&'static str],
            "its connection ended before its answer",
        ),
        (
            &["HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n"],
            "its connection ended before its answer",
        ),
        (
            &["HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello!!"],
            "a chunk of its answer cannot be read",
        ),
        (
            &["HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello"],
            "the length of its answer cannot be read",
        ),
        (&["SSH-2.0-x\r\n"], "what it answers is not HTTP/1"),
    ] {
        let (replica, upstream) = (Replica::start(parts, false).await, Upstream::default());
        assert_eq!(replica.ask(&upstream, "{}").await, Err(why.to_owned()), "{parts:?}");
    }
    let (replica, upstream) = (Replica::start(&[], false).await, Upstream::default());
    assert!(replica.ask(&upstream, "{}").await.unwrap_err().ends_with(" broke"));
}

#[tokio::test]
async fn whoever_refuses_a_body_is_heard_though_not_all_of_it_was_sent() {
    let refusal = &["HTTP/1.1 413 Payload Too Large\r\ncontent-length: 5\r\nconnection: close\r\n\r\nhello"];
    let (replica, upstream) = (Replica::start(refusal, true).await, Upstream::default());
    let body = "x".repeat(4 << 20);
    let request = Request::post(format!("http://{}/x", replica.address)).body(Bytes::from(body)).unwrap();
    let answer = upstream.send(request).await.unwrap();
    assert_eq!(answer.status(), 413);
    assert_eq!(answer.into_body().whole().await.unwrap(), "hello");
}

#[tokio::test]
async fn who_is_not_there_was_not_asked() {
    let closed = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let request = Request::get(format!("http://{closed}/x")).body(Bytes::new()).unwrap();
    let error = Upstream::default().send(request).await.unwrap_err();
    assert!(matches!(error, SendError::Connect { .. }) && error.is_connect(), "{error}");
    let nowhere = Request::get("/x").body(Bytes::new()).unwrap();
    assert!(Upstream::default().send(nowhere).await.unwrap_err().is_connect());
}
