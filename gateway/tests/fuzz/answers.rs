//! Answers of replicas as bytes on a connection, cut anywhere: read to an end, and what two readers take for an answer is the same to both,
//! ours and hyper's.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use axum::http::{Request, StatusCode};
use bytes::Bytes;
use http_body_util::{BodyExt, Empty};
use hyper_util::rt::TokioIo;
use rand::{RngExt, rngs::StdRng};
use stoker_gateway::upstream::Upstream;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::Mutex,
};

use crate::{every_input, mutate::Corpus};

const PATIENCE: Duration = Duration::from_secs(20);

type Read = Option<(StatusCode, Bytes)>;

/// Says the same parts to everybody who connects and asks, and ends the connection.
struct Replica {
    address: SocketAddr,
    parts: Arc<Mutex<Vec<Vec<u8>>>>,
}

impl Replica {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (address, parts) = (listener.local_addr().unwrap(), Arc::new(Mutex::new(Vec::<Vec<u8>>::new())));
        let said = Arc::clone(&parts);
        tokio::spawn(async move {
            while let Ok((mut connection, _)) = listener.accept().await {
                let _ = connection.set_nodelay(true);
                let _ = connection.read(&mut [0; 1024]).await;
                for part in said.lock().await.iter() {
                    // Whoever has read enough leaves.
                    let _ = connection.write_all(part).await;
                    tokio::task::yield_now().await;
                }
            }
        });
        Self { address, parts }
    }

    async fn by_us(&self) -> Read {
        let request = Request::get(format!("http://{}/", self.address)).body(Bytes::new()).unwrap();
        // A gateway of its own: what is left on a connection is another input's.
        let answer = Upstream::default().send(request).await.ok()?;
        let status = answer.status();
        Some((status, answer.into_body().whole().await.ok()?))
    }

    async fn by_hyper(&self) -> Read {
        let stream = TcpStream::connect(self.address).await.ok()?;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.ok()?;
        tokio::spawn(connection);
        let request = Request::get("/").header("host", "x").body(Empty::<Bytes>::new()).unwrap();
        let answer = sender.send_request(request).await.ok()?;
        let status = answer.status();
        Some((status, answer.into_body().collect().await.ok()?.to_bytes()))
    }
}

fn seeds() -> Vec<Vec<u8>> {
    let events = "data: {\"a\":1}\n\n: stoker opened\n";
    let chunk = format!("{:x}\r\n{events}\r\n", events.len());
    [
        format!("HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n{chunk}{chunk}0\r\n\r\n"),
        format!("HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n\r\n{chunk}3;x=\"y\"\r\nabc\r\n0\r\nx-trailer: 1\r\n\r\n"),
        format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\nx: y\r\n\r\n{events}", events.len()),
        "HTTP/1.1 429 Too Many Requests\r\nretry-after: 1\r\ncontent-length: 2\r\n\r\n{}".to_owned(),
        "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}".to_owned(),
        format!("HTTP/1.0 200 OK\r\n\r\n{events}"),
        "HTTP/1.1 204 No Content\r\n\r\n".to_owned(),
    ]
    .map(String::into_bytes)
    .to_vec()
}

const WORDS: &[&[u8]] = &[
    b"transfer-encoding: chunked\r\n",
    b"transfer-encoding: gzip, chunked\r\n",
    b"content-length: 0\r\n",
    b"content-length: 5, 5\r\n",
    b"content-length: +5\r\n",
    b"content-length: 18446744073709551616\r\n",
    b"\r\n\r\n",
    b"0\r\n\r\n",
    b"ffffffffffffffff\r\n",
    b"\n",
    b"HTTP/1.1 100 Continue\r\n\r\n",
    b"connection: close\r\n",
    b"x: \x00\r\n",
    b"\x0b",
];

fn cut(bytes: &[u8], random: &mut StdRng) -> Vec<Vec<u8>> {
    let at = random.random_range(0..=bytes.len());
    vec![bytes[..at].to_vec(), bytes[at..].to_vec()]
}

async fn check(replica: &Replica, input: &[u8], random: &mut StdRng) -> bool {
    *replica.parts.lock().await = cut(input, random);
    let both = async { (replica.by_us().await, replica.by_hyper().await) };
    let Ok((ours, others)) = tokio::time::timeout(PATIENCE, both).await else {
        panic!("it has no end: {}", String::from_utf8_lossy(input));
    };
    if let (Some(ours), Some(others)) = (&ours, &others) {
        assert_eq!(ours, others, "{}", String::from_utf8_lossy(input));
    }
    ours.is_some()
}

#[test]
fn answers_are_read_as_hyper_reads_them() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let replica = runtime.block_on(Replica::start());
    let seeds = seeds();
    for (seed, is_read) in seeds.iter().zip([true; 7]) {
        let (ours, others) = runtime.block_on(async {
            *replica.parts.lock().await = vec![seed.clone()];
            (replica.by_us().await, replica.by_hyper().await)
        });
        assert!(ours.is_some() == is_read && ours == others, "{}: {ours:?} {others:?}", String::from_utf8_lossy(seed));
    }
    let corpus = Corpus { seeds: &seeds, words: WORDS };
    // Two connections each.
    every_input("answers", 10, |number| {
        let (input, mut random) = corpus.input(number);
        runtime.block_on(check(&replica, &input, &mut random))
    });
}
