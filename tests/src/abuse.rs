//! Clients at their worst, on raw connections: who says nothing, speaks a byte at a time, sends what nobody would read, breaks
//! off, or asks for much and reads nothing. Each comes again at a pace of its own, by seed, until the end. Judges nothing:
//! counts how they were answered.

use std::{
    collections::BTreeMap,
    io,
    net::SocketAddr,
    sync::{
        Arc, LazyLock, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use futures::future::join_all;
use rand::{RngExt, SeedableRng, rngs::StdRng};
use serde_json::json;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpSocket, TcpStream},
    time::{sleep, timeout, timeout_at},
};

/// What somebody does with a connection.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum Abuser {
    /// Nothing.
    Idle,
    /// Sends a head, a byte every other second.
    SlowHead,
    /// The same with a body.
    SlowBody,
    /// Sends ten megabytes, announced or in chunks.
    LargeBody,
    /// Sends the longest prompt that is read.
    LongPrompt,
    /// Sends 100,000 brackets in each other.
    Brackets,
    /// Sends what is no HTTP.
    Noise,
    /// Asks properly and is gone at some time.
    Leaver,
    /// Asks for much and reads nothing of it.
    Staller,
}

/// How many of a thousand connections a kind has, and how often all of a kind act in a second. Who is slow comes back as
/// soon as he is sent away.
const CROWD: [(Abuser, usize, f64); 9] = [
    (Abuser::Idle, 300, f64::INFINITY),
    (Abuser::SlowHead, 300, f64::INFINITY),
    (Abuser::SlowBody, 300, f64::INFINITY),
    (Abuser::LargeBody, 15, 4.0),
    (Abuser::LongPrompt, 5, 0.5),
    (Abuser::Brackets, 20, 5.0),
    (Abuser::Noise, 10, 10.0),
    (Abuser::Leaver, 40, 10.0),
    (Abuser::Staller, 10, 0.5),
];
/// Connections opened in a second, in the beginning.
const OPENED_A_SECOND: f64 = 1000.0;
const LARGE_BYTES: usize = 10_000_000;
const NESTED: usize = 100_000;
/// Longer than an agent lets an answer lie.
const STALL: Duration = Duration::from_secs(90);
/// For an answer to who sent something.
const PATIENCE: Duration = Duration::from_secs(60);

/// Who abuses which agent, and for how long.
#[derive(Clone, Copy, Debug)]
pub struct Storm {
    /// The agent's public port.
    pub address: SocketAddr,
    /// Connections at a time.
    pub n_connections: usize,
    /// Of what is left to chance.
    pub seed: u64,
    /// When everybody leaves.
    pub end: Instant,
}

/// How they were answered.
#[derive(Clone, Debug, Default)]
pub struct Answers {
    /// How often who got which status; none where a connection ended without one.
    pub statuses: BTreeMap<(Abuser, Option<u16>), u64>,
    /// The most connections that were open at a time.
    pub n_open_max: usize,
}

#[derive(Default)]
struct Tally {
    statuses: Mutex<BTreeMap<(Abuser, Option<u16>), u64>>,
    n_open: AtomicUsize,
    n_open_max: AtomicUsize,
}

impl Storm {
    /// Abuses the agent until the end.
    pub async fn rage(self) -> Answers {
        let tally = Arc::new(Tally::default());
        let abusers = self.crowd().into_iter().enumerate().map(|(index, (abuser, pause))| {
            let random = StdRng::seed_from_u64(self.seed + index as u64);
            tokio::spawn(self.abuse(abuser, pause, random, Arc::clone(&tally)))
        });
        for ended in join_all(abusers.collect::<Vec<_>>()).await {
            ended.expect("an abuser does not panic");
        }
        Answers {
            statuses: tally.statuses.lock().unwrap_or_else(PoisonError::into_inner).clone(),
            n_open_max: tally.n_open_max.load(Ordering::Relaxed),
        }
    }

    /// Everybody with the mean pause between two acts. Of each kind there is one at least.
    fn crowd(&self) -> Vec<(Abuser, Duration)> {
        let of_kind = |(abuser, share, acts_a_second): (Abuser, usize, f64)| {
            let count = (self.n_connections * share / 1000).max(1);
            std::iter::repeat_n((abuser, Duration::from_secs_f64(count as f64 / acts_a_second)), count)
        };
        CROWD.into_iter().flat_map(of_kind).collect()
    }

    async fn abuse(self, abuser: Abuser, pause: Duration, mut random: StdRng, tally: Arc<Tally>) {
        let end = tokio::time::Instant::from_std(self.end);
        let longest = (self.n_connections as f64 / OPENED_A_SECOND).max(pause.as_secs_f64());
        let mut wait = longest * random.random::<f64>();
        loop {
            let acted = async {
                sleep(Duration::from_secs_f64(wait)).await;
                let connection = open(self.address, abuser).await?;
                let _open = tally.opened();
                act(abuser, connection, &mut random).await
            };
            match timeout_at(end, acted).await {
                Ok(answer) => tally.count(abuser, answer.ok().flatten()),
                Err(_) => return,
            }
            // Who is slow comes back nearly at once.
            wait = 0.05 + 2.0 * pause.as_secs_f64() * random.random::<f64>();
        }
    }
}

/// One connection that is open.
struct Open<'a>(&'a Tally);

impl Drop for Open<'_> {
    fn drop(&mut self) {
        self.0.n_open.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Tally {
    fn opened(&self) -> Open<'_> {
        let n_open = self.n_open.fetch_add(1, Ordering::Relaxed) + 1;
        self.n_open_max.fetch_max(n_open, Ordering::Relaxed);
        Open(self)
    }

    fn count(&self, abuser: Abuser, status: Option<u16>) {
        *self.statuses.lock().unwrap_or_else(PoisonError::into_inner).entry((abuser, status)).or_default() += 1;
    }
}

async fn open(address: SocketAddr, abuser: Abuser) -> io::Result<TcpStream> {
    let socket = TcpSocket::new_v4()?;
    if abuser == Abuser::Staller {
        // What the kernel takes for a client that does not read is soon full.
        socket.set_recv_buffer_size(4096)?;
    }
    socket.connect(address).await
}

/// Does what such a client does; the status of the answer, if one came.
async fn act(abuser: Abuser, mut connection: TcpStream, random: &mut StdRng) -> io::Result<Option<u16>> {
    match abuser {
        Abuser::Idle => {}
        Abuser::SlowHead => {
            connection.write_all(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\nx-slow: ").await?;
            return trickle(&mut connection, random).await;
        }
        Abuser::SlowBody => {
            connection.write_all(head("content-length: 4096").as_bytes()).await?;
            return trickle(&mut connection, random).await;
        }
        Abuser::LargeBody => send_large(&mut connection, random.random_bool(0.5)).await?,
        Abuser::LongPrompt => send(&mut connection, &LONG_PROMPT).await?,
        Abuser::Brackets => {
            let nested = &NESTINGS[random.random_range(0..NESTINGS.len())];
            send(&mut connection, nested).await?;
        }
        Abuser::Noise => {
            let noise: Vec<u8> = (0..random.random_range(1..4096)).map(|_| random.random()).collect();
            connection.write_all(&noise).await?;
            connection.shutdown().await?;
        }
        Abuser::Leaver => return leave(&mut connection, random).await,
        Abuser::Staller => {
            send(&mut connection, &LONG_ANSWER).await?;
            sleep(STALL.mul_f64(random.random())).await;
            return Ok(None);
        }
    }
    let patience = if abuser == Abuser::Idle { Duration::MAX } else { PATIENCE };
    timeout(patience, status(&mut connection)).await.unwrap_or(Ok(None))
}

/// A byte every other second until it is answered or cut off.
async fn trickle(connection: &mut TcpStream, random: &mut StdRng) -> io::Result<Option<u16>> {
    loop {
        let pause = Duration::from_secs_f64(4.0 * random.random::<f64>());
        if let Ok(answer) = timeout(pause, status(connection)).await {
            return answer;
        }
        connection.write_all(b"a").await?;
    }
}

/// Says half of a request, or all of it, and is gone: at once or in the middle of the answer.
async fn leave(connection: &mut TcpStream, random: &mut StdRng) -> io::Result<Option<u16>> {
    let request = [head(&format!("content-length: {}", LONG_ANSWER.len())).as_bytes(), &LONG_ANSWER[..]].concat();
    if random.random_bool(0.5) {
        let said = random.random_range(0..request.len());
        connection.write_all(&request[..said]).await?;
        return Ok(None);
    }
    connection.write_all(&request).await?;
    let patience = Duration::from_millis(random.random_range(0..1000));
    timeout(patience, status(connection)).await.unwrap_or(Ok(None))
}

async fn send(connection: &mut TcpStream, body: &[u8]) -> io::Result<()> {
    connection.write_all(head(&format!("content-length: {}", body.len())).as_bytes()).await?;
    write(connection, body).await
}

async fn send_large(connection: &mut TcpStream, announced: bool) -> io::Result<()> {
    static PIECE: [u8; 50_000] = [b' '; 50_000];
    let encoding =
        if announced { format!("content-length: {LARGE_BYTES}") } else { "transfer-encoding: chunked".to_owned() };
    connection.write_all(head(&encoding).as_bytes()).await?;
    for _ in 0..LARGE_BYTES / PIECE.len() {
        if announced {
            write(connection, &PIECE).await?;
        } else {
            write(connection, format!("{:x}\r\n", PIECE.len()).as_bytes()).await?;
            write(connection, &PIECE).await?;
            write(connection, b"\r\n").await?;
        }
    }
    if announced { Ok(()) } else { write(connection, b"0\r\n\r\n").await }
}

/// Whoever is answered before he has said all finds the connection closed: what was said to him is still to be read.
async fn write(connection: &mut TcpStream, bytes: &[u8]) -> io::Result<()> {
    match connection.write_all(bytes).await {
        Err(error) if !matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset) => Err(error),
        _ => Ok(()),
    }
}

fn head(encoding: &str) -> String {
    format!("POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n{encoding}\r\n\r\n")
}

/// The status of an answer; none if the connection ends before it.
async fn status(connection: &mut TcpStream) -> io::Result<Option<u16>> {
    let mut beginning = [0; 12];
    match connection.read_exact(&mut beginning).await {
        Ok(_) => Ok(std::str::from_utf8(&beginning[9..]).ok().and_then(|code| code.parse().ok())),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(None),
        Err(error) => Err(error),
    }
}

/// Just below the largest body.
static LONG_PROMPT: LazyLock<Vec<u8>> =
    LazyLock::new(|| json!({"prompt": "The quick brown fox. ".repeat(399_000)}).to_string().into_bytes());

/// A stream of some megabytes.
static LONG_ANSWER: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let asked =
        json!({"prompt": "Once upon a time", "stream": true, "ignore_eos": true, "max_tokens": 1900, "logprobs": 5});
    asked.to_string().into_bytes()
});

/// Brackets as the whole body, and where something is expected that may have some.
static NESTINGS: LazyLock<[Vec<u8>; 4]> = LazyLock::new(|| {
    let nested = |open: &str, close: &str| [open.repeat(NESTED), close.repeat(NESTED)].concat();
    let schema = [r#"{"type":"array","items":"#.repeat(NESTED), "{}".to_owned(), "}".repeat(NESTED)].concat();
    [
        "[".repeat(NESTED).into_bytes(),
        nested("[", "]").into_bytes(),
        format!(r#"{{"prompt":{}}}"#, nested("[", "]")).into_bytes(),
        format!(r#"{{"prompt":"a","structured_outputs":{{"json":{schema}}}}}"#).into_bytes(),
    ]
});
