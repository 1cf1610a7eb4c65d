//! How long a request and its answer are on their way: replicas that write stamped events at a pace, and clients that read how old
//! these are when they arrive. Both are in one process and read one clock, so nothing of an engine's time is in it.

use std::{
    net::SocketAddr,
    sync::{Arc, LazyLock, Mutex, PoisonError},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use axum::{
    Router,
    body::{Body, Bytes},
    http::{HeaderMap, Response},
    routing::{get, post},
};
use memchr::memmem;
use stoker_crds::endpoints::{EndpointState, ReplicaEndpoint, WHOLE_WEIGHT};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    task::JoinHandle,
    time::{MissedTickBehavior, interval},
};

const CHAT: &str = "/v1/chat/completions";
/// As agents say that they live.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
const OK: &[u8] = b"HTTP/1.1 200 ";
const STAMP: &[u8] = b"\"stamp\":";
/// Digits of a stamp: a client can tell where it ends.
const STAMP_DIGITS: usize = 19;

static BEGUN: LazyLock<Instant> = LazyLock::new(Instant::now);

fn now_ns() -> u64 {
    BEGUN.elapsed().as_nanos() as u64
}

/// How an answer is streamed.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// Tokens, one an event.
    pub n_tokens: u32,
    /// Between two of them.
    pub gap: Duration,
}

/// A replica that computes nothing. It ends when this is dropped.
pub struct PacedReplica {
    address: SocketAddr,
    server: JoinHandle<()>,
}

impl PacedReplica {
    /// Starts it on a free port of the loopback.
    pub async fn start() -> Result<Self> {
        let routes = Router::new().route(CHAT, post(answer)).route("/healthz", get(|| async { "ok" }));
        // Prompts of a hundred thousand tokens.
        let routes = routes.layer(axum::extract::DefaultBodyLimit::max(8 << 20));
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let server = tokio::spawn(async move {
            use axum::serve::ListenerExt;
            // It ends with its owner.
            let _ = axum::serve(listener.tap_io(|io| _ = io.set_nodelay(true)), routes).await;
        });
        Ok(Self { address, server })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// What the operator would tell of it.
    pub fn endpoint(&self, pod: &str) -> ReplicaEndpoint {
        ReplicaEndpoint {
            pod: pod.to_owned(),
            uid: format!("uid-{pod}"),
            address: Some(self.address.to_string()),
            events: None,
            revision: "r".to_owned(),
            weight: WHOLE_WEIGHT,
            state: EndpointState::Serving,
            load: None,
        }
    }
}

impl Drop for PacedReplica {
    fn drop(&mut self) {
        self.server.abort();
    }
}

/// What an answer still has to say.
struct Telling {
    pace: Pace,
    n_told: u32,
    /// What the request's way took: the first event is older by that.
    way_ns: u64,
    has_marks: bool,
    ticks: tokio::time::Interval,
}

async fn answer(headers: HeaderMap, _body: Bytes) -> Response<Body> {
    let number = |name: &str| headers.get(name).and_then(|value| value.to_str().ok()?.parse::<u64>().ok()).unwrap_or(0);
    let pace = Pace { n_tokens: number("x-tokens") as u32, gap: Duration::from_micros(number("x-gap-us")) };
    let mut ticks = interval(pace.gap.min(KEEP_ALIVE));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let has_marks = headers.contains_key("x-stoker-drawn");
    let way_ns = now_ns().saturating_sub(number("x-stamp"));
    let telling = Telling { pace, n_told: 0, way_ns, has_marks, ticks };
    let events = futures::stream::unfold(Some(telling), |telling| async {
        let mut telling = telling?;
        telling.ticks.tick().await;
        let event = telling.event();
        let is_last = telling.n_told > telling.pace.n_tokens;
        Some((Ok::<_, std::io::Error>(event), (!is_last).then_some(telling)))
    });
    let head = Response::builder().header("content-type", "text/event-stream").header("x-stoker-model", "aa-bb");
    head.body(Body::from_stream(events)).expect("these headers are valid")
}

impl Telling {
    fn event(&mut self) -> Bytes {
        let is_silent = self.pace.gap > KEEP_ALIVE && self.n_told > 0;
        let (text, mark) = if is_silent {
            (": still there\n\n".to_owned(), ": stoker\n")
        } else if self.n_told == self.pace.n_tokens {
            ("data: [DONE]\n\n".to_owned(), ": stoker done\n")
        } else {
            let stamp = now_ns().saturating_sub(std::mem::take(&mut self.way_ns));
            let mark = if self.n_told == 0 { ": stoker opened\n: stoker 0 0 17\n" } else { ": stoker 0 0 17\n" };
            (chunk(stamp), mark)
        };
        self.n_told += u32::from(!is_silent);
        if self.has_marks { (text + mark).into() } else { text.into() }
    }
}

/// A chunk of a chat completion, about as long as an agent's.
fn chunk(stamp: u64) -> String {
    format!(
        "data: {{\"id\":\"chatcmpl-0123456789abcdef0123456789abcdef\",\"object\":\"chat.completion.chunk\",\"created\":1764000000,\
         \"model\":\"chat\",\"choices\":[{{\"index\":0,\"delta\":{{\"content\":\" token\"}},\"logprobs\":null,\"finish_reason\":null}}],\
         \"stamp\":{stamp:0STAMP_DIGITS$}}}\n\n"
    )
}

/// How long events were on their way, in milliseconds.
#[derive(Clone, Debug, Default)]
pub struct Transit {
    /// The first of each answer, the request's way included.
    pub first_ms: Vec<f64>,
    /// All others.
    pub later_ms: Vec<f64>,
    /// Answers that did not come whole.
    pub n_failed: usize,
}

/// A request, over and over.
#[derive(Clone, Debug)]
pub struct Load {
    /// Who is asked, one after the other.
    pub to: Vec<SocketAddr>,
    /// Requests a second, however long answers take.
    pub rate: f64,
    /// For how long.
    pub time: Duration,
    /// How answers are streamed.
    pub pace: Pace,
    /// The prompts, one after the other.
    pub prompts: Vec<String>,
}

/// Connections that wait for their next request, one list for each address.
type Pool = Arc<Vec<Mutex<Vec<TcpStream>>>>;

impl Load {
    /// Sends it, and waits for all answers.
    pub async fn run(&self) -> Transit {
        let pool: Pool = Arc::new(self.to.iter().map(|_| Mutex::default()).collect());
        let (begun, mut asked) = (Instant::now(), Vec::new());
        for number in 0..(self.rate * self.time.as_secs_f64()) as usize {
            tokio::time::sleep_until((begun + Duration::from_secs_f64(number as f64 / self.rate)).into()).await;
            let (place, prompt) = (number % self.to.len(), &self.prompts[number % self.prompts.len()]);
            let (pool, address, body) = (Arc::clone(&pool), self.to[place], body(prompt));
            let pace = self.pace;
            asked.push(tokio::spawn(async move {
                let kept = pool[place].lock().unwrap_or_else(PoisonError::into_inner).pop();
                let mut connection = match kept {
                    Some(kept) => kept,
                    None => TcpStream::connect(address).await?,
                };
                let transit = ask(&mut connection, &body, pace).await?;
                pool[place].lock().unwrap_or_else(PoisonError::into_inner).push(connection);
                anyhow::Ok(transit)
            }));
        }
        let mut all = Transit::default();
        for answer in asked {
            match answer.await {
                Ok(Ok(one)) => {
                    all.first_ms.extend(one.first_ms);
                    all.later_ms.extend(one.later_ms);
                }
                _ => all.n_failed += 1,
            }
        }
        all
    }
}

fn body(prompt: &str) -> String {
    format!(
        "{{\"model\":\"chat\",\"stream\":true,\"max_tokens\":100,\"messages\":[{{\"role\":\"user\",\"content\":\"{prompt}\"}}]}}"
    )
}

/// Sends a request and reads the head of its answer and what comes with it.
async fn send(connection: &mut TcpStream, body: &str, pace: Pace) -> Result<()> {
    connection.set_nodelay(true)?;
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nhost: chat.default\r\ncontent-type: application/json\r\ncontent-length: {}\r\nx-tokens: {}\r\n\
         x-gap-us: {}\r\nx-stamp: {}\r\n\r\n",
        body.len(),
        pace.n_tokens,
        pace.gap.as_micros(),
        now_ns()
    );
    connection.write_all(&[head.as_bytes(), body.as_bytes()].concat()).await?;
    Ok(())
}

async fn ask(connection: &mut TcpStream, body: &str, pace: Pace) -> Result<Transit> {
    send(connection, body, pace).await?;
    let (mut transit, mut held, mut is_first) = (Transit::default(), Vec::with_capacity(4096), true);
    while !held.ends_with(b"\r\n0\r\n\r\n") {
        ensure!(connection.read_buf(&mut held).await? > 0, "it ended early");
        let arrived = now_ns();
        let is_refused = is_first && held.len() >= OK.len() && !held.starts_with(OK);
        ensure!(!is_refused, "{}", String::from_utf8_lossy(&held));
        let mut read = 0;
        for at in memmem::find_iter(&held, STAMP).map(|at| at + STAMP.len()) {
            let Some(digits) = held.get(at..at + STAMP_DIGITS) else { break };
            let stamp: u64 = std::str::from_utf8(digits)?.parse().context("a stamp")?;
            let ms = arrived.saturating_sub(stamp) as f64 / 1e6;
            let samples = if is_first { &mut transit.first_ms } else { &mut transit.later_ms };
            samples.push(ms);
            (is_first, read) = (false, at + STAMP_DIGITS);
        }
        held.drain(..read);
    }
    ensure!(
        transit.later_ms.len() + 1 == pace.n_tokens as usize,
        "{} of {} tokens",
        transit.later_ms.len() + 1,
        pace.n_tokens
    );
    Ok(transit)
}

/// Opens streams that say one token and then nothing, and holds them.
pub async fn silent_streams(count: usize, to: SocketAddr) -> Result<Vec<TcpStream>> {
    let pace = Pace { n_tokens: 1000, gap: Duration::from_secs(1000) };
    let mut streams = Vec::with_capacity(count);
    for number in 0..count {
        let mut connection = TcpStream::connect(to).await.with_context(|| format!("open connection {number}"))?;
        send(&mut connection, &body(&format!("{number} {}", "word ".repeat(200))), pace).await?;
        let mut held = Vec::new();
        while memmem::find(&held, STAMP).is_none() {
            ensure!(connection.read_buf(&mut held).await? > 0, "stream {number} ended");
        }
        streams.push(connection);
    }
    Ok(streams)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_is_measured_is_the_way_and_not_the_pace() {
        let replica = PacedReplica::start().await.unwrap();
        let load = Load {
            to: vec![replica.address()],
            rate: 20.0,
            time: Duration::from_millis(500),
            pace: Pace { n_tokens: 10, gap: Duration::from_millis(20) },
            prompts: vec!["Hi".to_owned()],
        };
        let transit = load.run().await;
        assert_eq!((transit.first_ms.len(), transit.later_ms.len(), transit.n_failed), (10, 90, 0));
        let mut all = [transit.first_ms, transit.later_ms].concat();
        all.sort_by(f64::total_cmp);
        assert!(all[0] > 0.0 && all[50] < 20.0, "{all:?}");
    }

    #[tokio::test]
    async fn what_is_not_an_answer_is_counted() {
        let closed = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
        let pace = Pace { n_tokens: 1, gap: Duration::ZERO };
        let load =
            Load { to: vec![closed], rate: 10.0, time: Duration::from_millis(200), pace, prompts: vec![String::new()] };
        assert_eq!(load.run().await.n_failed, 2);
    }
}
