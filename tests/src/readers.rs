//! People who have pages open, without their browsers: each holds a stream of changes and counts its bytes. Speaks the least HTTP that does.

use std::{
    io::{Read, Write},
    net::TcpStream,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};

/// Between two looks at whether it is over.
const PATIENCE: Duration = Duration::from_millis(500);

/// Open pages. They are closed when this is dropped.
pub struct Readers {
    bytes: Arc<AtomicU64>,
    over: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Readers {
    /// Opens a page of each of these paths at an address such as `127.0.0.1:8081`.
    pub fn open(address: &str, paths: &[String]) -> Result<Self> {
        let mut readers = Self { bytes: Arc::default(), over: Arc::default(), threads: Vec::new() };
        for path in paths {
            let mut stream = TcpStream::connect(address).with_context(|| format!("open {path}"))?;
            stream.set_read_timeout(Some(PATIENCE))?;
            stream.write_all(request(address, path).as_bytes())?;
            let (bytes, over) = (readers.bytes.clone(), readers.over.clone());
            readers.threads.push(std::thread::spawn(move || {
                let mut buffer = [0; 16 * 1024];
                while !over.load(Ordering::Relaxed) {
                    // A timeout is a page on which nothing changed.
                    match stream.read(&mut buffer) {
                        Ok(0) => return,
                        Ok(count) => _ = bytes.fetch_add(count as u64, Ordering::Relaxed),
                        Err(_) => {}
                    }
                }
            }));
        }
        Ok(readers)
    }

    /// What came so far.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// True while no page was closed by the other side.
    pub fn are_open(&self) -> bool {
        self.threads.iter().all(|thread| !thread.is_finished())
    }
}

impl Drop for Readers {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // It has nothing to say when it ends.
            let _ = thread.join();
        }
    }
}

/// How long a page takes until all of it is there, and its bytes.
pub fn paint(address: &str, path: &str) -> Result<(Duration, usize)> {
    let begun = Instant::now();
    let mut stream = TcpStream::connect(address)?;
    stream.write_all(request(address, path).as_bytes())?;
    let mut page = Vec::new();
    stream.read_to_end(&mut page)?;
    ensure!(page.starts_with(b"HTTP/1.1 200"), "{path}: {}", String::from_utf8_lossy(&page));
    Ok((begun.elapsed(), page.len()))
}

fn request(address: &str, path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n")
}
