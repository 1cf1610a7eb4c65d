//! What a stream takes of which nothing comes: no buffer of its connection. Alone in its program, since it counts all that is allocated there.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    sync::atomic::{AtomicUsize, Ordering},
};

use axum::{
    Router,
    body::{Body, Bytes},
    http::{Response, header::CONTENT_TYPE},
    routing::post,
};
use futures::{StreamExt, stream};
use stoker_edge::connections::{self, Limits};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};

/// The system's allocator, and the bytes that it has given and not got back.
struct Counting;

static LIVE_BYTES: AtomicUsize = AtomicUsize::new(0);

#[global_allocator]
static ALLOCATOR: Counting = Counting;

// SAFETY: the system's allocator, asked for what was asked for.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LIVE_BYTES.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE_BYTES.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(pointer, layout) }
    }
}

const STREAMS: usize = 64;
/// hyper has two buffers of 8 KiB for a connection. The clients of this test are counted, too.
const BYTES_MAX: usize = 6 << 10;

#[tokio::test]
async fn a_stream_that_waits_has_no_buffer() {
    let event = || Ok::<_, std::io::Error>("data: a\n\n");
    let routes = Router::new().route(
        "/",
        post(move |_body: Bytes| async move {
            let body = Body::from_stream(stream::iter([event()]).chain(stream::pending()));
            Response::builder().header(CONTENT_TYPE, "text/event-stream").body(body).unwrap()
        }),
    );
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(connections::serve(listener, routes, Limits::default(), || {}, std::future::pending()));
    let request = format!("POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1000\r\n\r\n{}", "x".repeat(1000));
    let open = async || {
        let mut client = TcpStream::connect(address).await.unwrap();
        client.write_all(request.as_bytes()).await.unwrap();
        let (mut seen, mut piece) = (Vec::new(), [0; 1024]);
        while !seen.ends_with(b"\n\n\r\n") {
            let n_bytes = client.read(&mut piece).await.unwrap();
            assert!(n_bytes > 0);
            seen.extend_from_slice(&piece[..n_bytes]);
        }
        client
    };
    let mut clients = vec![open().await];
    clients.reserve(STREAMS);
    let before = LIVE_BYTES.load(Ordering::Relaxed);
    for _ in 0..STREAMS {
        clients.push(open().await);
    }
    let each = (LIVE_BYTES.load(Ordering::Relaxed) - before) / STREAMS;
    assert!(each < BYTES_MAX, "{each} bytes for a stream and its client");
}
