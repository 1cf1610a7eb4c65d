//! Between a client and a server on loopback: passes requests on and answers back, remembers what was asked, and lets answers
//! go wrong where a test wants them to.
//!
//! It reads no meaning into what passes. A client's `Host` stays, so that signatures over it hold.

use std::{
    collections::VecDeque,
    io::{self, BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{sleep, spawn},
    time::Duration,
};

use anyhow::Result;

use crate::hub::{Asked, Fault, parse_range};

/// Written at once: a fault can be put between two.
const PIECE_BYTES: usize = 64 << 10;

/// See the module. It stops answering when it is dropped.
pub struct Middle {
    shared: Arc<Shared>,
    address: SocketAddr,
}

struct Shared {
    server: SocketAddr,
    /// Part of a path and what goes wrong there next, once each.
    faults: Mutex<VecDeque<(String, Fault)>>,
    asked: Mutex<Vec<Asked>>,
    /// Microseconds between two pieces of a body.
    pause_us: AtomicU64,
    ended: AtomicBool,
}

/// First line and headers, of a request or an answer.
struct Head {
    line: String,
    headers: Vec<(String, String)>,
}

impl Head {
    fn read(reader: &mut impl BufRead) -> io::Result<Option<Self>> {
        let mut line = String::new();
        if reader.read_line(&mut line)? == 0 {
            return Ok(None);
        }
        let mut head = Self { line: line.trim_end().to_owned(), headers: Vec::new() };
        loop {
            let mut header = String::new();
            reader.read_line(&mut header)?;
            let Some((name, value)) = header.trim_end().split_once(':') else { return Ok(Some(head)) };
            head.headers.push((name.to_owned(), value.trim().to_owned()));
        }
    }

    fn word(&self, place: usize) -> &str {
        self.line.split(' ').nth(place).unwrap_or_default()
    }

    fn value(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(of, _)| of.eq_ignore_ascii_case(name)).map(|(_, value)| &**value)
    }

    fn without(mut self, names: &[&str]) -> Self {
        self.headers.retain(|(of, _)| !names.iter().any(|name| of.eq_ignore_ascii_case(name)));
        self
    }

    fn with(mut self, name: &str, value: &str) -> Self {
        self.headers.push((name.to_owned(), value.to_owned()));
        self
    }

    fn write(&self, writer: &mut impl Write) -> io::Result<()> {
        let headers: String = self.headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
        writer.write_all(format!("{}\r\n{headers}\r\n", self.line).as_bytes())
    }
}

impl Middle {
    /// Before the server at `server`.
    pub fn start(server: SocketAddr) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?;
        let (faults, asked) = (Mutex::default(), Mutex::default());
        let shared =
            Arc::new(Shared { server, faults, asked, pause_us: AtomicU64::new(0), ended: AtomicBool::new(false) });
        let serving = shared.clone();
        spawn(move || {
            for connection in listener.incoming().flatten() {
                if serving.ended.load(Ordering::SeqCst) {
                    return;
                }
                let shared = serving.clone();
                // A client that goes away ends its connection, nothing else.
                spawn(move || _ = serve(connection, &shared));
            }
        });
        Ok(Self { shared, address })
    }

    /// Host and port.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The next answers to paths that contain `part` go wrong, one for each fault.
    pub fn fail(&self, part: &str, faults: impl IntoIterator<Item = Fault>) {
        lock(&self.shared.faults).extend(faults.into_iter().map(|fault| (part.to_owned(), fault)));
    }

    /// Faults that nobody met.
    pub fn faults_left(&self) -> usize {
        lock(&self.shared.faults).len()
    }

    /// A pause between every two pieces of 64 KiB.
    pub fn slow_down(&self, pause: Duration) {
        self.shared.pause_us.store(u64::try_from(pause.as_micros()).unwrap_or(u64::MAX), Ordering::SeqCst);
    }

    /// Requests that came since this was last called.
    pub fn take_asked(&self) -> Vec<Asked> {
        std::mem::take(&mut lock(&self.shared.asked))
    }
}

impl Drop for Middle {
    fn drop(&mut self) {
        self.shared.ended.store(true, Ordering::SeqCst);
        // Wakes what waits for a connection.
        let _ = TcpStream::connect(self.address);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn serve(connection: TcpStream, shared: &Shared) -> io::Result<()> {
    connection.set_nodelay(true)?;
    let mut reader = BufReader::new(connection.try_clone()?);
    let mut writer = connection;
    while let Some(request) = Head::read(&mut reader)? {
        let asked = Asked {
            store: false,
            what: format!("{} {}", request.word(0), request.word(1)),
            range: request.value("range").and_then(parse_range),
            authorization: request.value("authorization").map(str::to_owned),
        };
        // What goes wrong does so in a body, and there is none of HEAD.
        let fault = if request.word(0) == "GET" { shared.fault(request.word(1)) } else { None };
        lock(&shared.asked).push(asked.clone());
        let whole = match fault {
            Some(Fault::Status(status, retry_after)) => refuse(&mut writer, status, retry_after)?,
            _ => pass(&mut writer, request, asked, fault, shared)?,
        };
        if !whole {
            return Ok(());
        }
    }
    Ok(())
}

impl Shared {
    fn fault(&self, path: &str) -> Option<Fault> {
        let mut faults = lock(&self.faults);
        let place = faults.iter().position(|(part, _)| path.contains(part.as_str()))?;
        faults.remove(place).map(|(_, fault)| fault)
    }
}

fn refuse(writer: &mut TcpStream, status: u16, retry_after: Option<u32>) -> io::Result<bool> {
    let head = Head { line: format!("HTTP/1.1 {status} Status"), headers: Vec::new() }.with("Content-Length", "0");
    let head = retry_after
        .map(|seconds| seconds.to_string())
        .into_iter()
        .fold(head, |head, seconds| head.with("Retry-After", &seconds));
    head.write(writer)?;
    Ok(true)
}

/// Passes a request on and its answer back; whether all of that came.
fn pass(
    writer: &mut TcpStream,
    request: Head,
    asked: Asked,
    fault: Option<Fault>,
    shared: &Shared,
) -> io::Result<bool> {
    let is_head = request.word(0) == "HEAD";
    let dropped: &[&str] = if fault == Some(Fault::NoRange) { &["connection", "range"] } else { &["connection"] };
    let mut server = TcpStream::connect(shared.server)?;
    request.without(dropped).with("Connection", "close").write(&mut server)?;
    let mut answers = BufReader::new(server);
    let Some(answer) = Head::read(&mut answers)? else { return Ok(false) };
    let mut body = if is_head { Vec::new() } else { read_body(&answer, &mut answers)? };
    let start =
        asked.range.filter(|_| answer.word(1) == "206").map_or(0, |range| usize::try_from(range.start).unwrap_or(0));
    let length =
        if is_head { answer.value("content-length").unwrap_or("0").to_owned() } else { body.len().to_string() };
    answer
        .without(&["connection", "transfer-encoding", "content-length"])
        .with("Content-Length", &length)
        .write(writer)?;
    let mut ends_at = body.len();
    match fault {
        Some(Fault::Wrong(place)) if (start..start + body.len()).contains(&place) => body[place - start] ^= 1,
        Some(Fault::Cut(count)) => ends_at = count.min(body.len()),
        _ => {}
    }
    for piece in body[..ends_at].chunks(PIECE_BYTES) {
        writer.write_all(piece)?;
        let pause = shared.pause_us.load(Ordering::Relaxed);
        if pause > 0 {
            sleep(Duration::from_micros(pause));
        }
    }
    Ok(ends_at == body.len())
}

/// To the end of the connection, out of chunks if it comes in such.
fn read_body(head: &Head, reader: &mut impl BufRead) -> io::Result<Vec<u8>> {
    let mut body = Vec::new();
    if !head.value("transfer-encoding").is_some_and(|coding| coding.eq_ignore_ascii_case("chunked")) {
        reader.read_to_end(&mut body)?;
        return Ok(body);
    }
    loop {
        let mut line = String::new();
        reader.read_line(&mut line)?;
        let count = u64::from_str_radix(line.trim(), 16).map_err(io::Error::other)?;
        if count == 0 {
            return Ok(body);
        }
        reader.by_ref().take(count).read_to_end(&mut body)?;
        reader.read_line(&mut line)?;
    }
}
