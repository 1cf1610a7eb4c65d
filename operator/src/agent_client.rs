//! The operator's conversation with an agent, on the agent's admin port: read its load, give it an order; and as any client, let it
//! continue prompts. Plain HTTP/1.
//!
//! Every question is bounded in time and every answer in size. Connections are kept between questions, and nothing else is:
//! with ten thousand agents, a general client's buffers for each of them were a third of the operator's memory. Decides
//! nothing.

use std::{
    collections::HashMap,
    io,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use hyper::{Method, StatusCode};
use serde::de::DeserializeOwned;
use stoker_crds::{
    contract::{ADMIN_PORT, AGENT_PORT, LoadReport},
    description::{DESCRIPTION_BYTES_MAX, DESCRIPTION_PATH, Description},
    endpoints::{LINES_PATH, Lines},
    history::{HISTORY_BYTES_MAX, HISTORY_PATH, LoadHistory},
    holders::HOLDERS_PATH,
    intent::{INTENT_PATH, SIGNATURE_HEADER},
};
use thiserror::Error;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::timeout,
};

use crate::{canary::drift::Position, keys::Signed};

mod continuations;

/// How long an agent may take to answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);
/// How long prompts may take: a large model beside other requests.
const PROMPTS_TIMEOUT: Duration = Duration::from_secs(60);
/// Bytes of their answer that are read at most: sixteen of them take three hundred thousand.
const PROMPTS_BYTES_MAX: usize = 1 << 20;
/// Bytes of a load report that are read at most, and of its head.
const REPORT_BYTES_MAX: usize = 64 * 1024;
/// Bytes of a gateway's lines: as many as ten thousand deployments have.
const LINES_BYTES_MAX: usize = 4 << 20;
/// Headers of an answer.
const HEADERS_MAX: usize = 32;
/// How long an unused connection is kept.
const IDLE_TIMEOUT: Duration = Duration::from_secs(10);

/// Asks agents. Cheap to clone; clones share connections.
#[derive(Clone, Debug, Default)]
pub struct AgentClient {
    idle: Arc<Mutex<Idle>>,
}

/// Connections that nobody uses, one of each agent.
#[derive(Debug, Default)]
struct Idle {
    by_agent: HashMap<String, (TcpStream, Instant)>,
    /// Of agents that are gone: looked for now and then.
    swept: Option<Instant>,
}

/// Why an agent gave no usable answer.
#[derive(Debug, Error)]
pub enum AgentError {
    /// Nobody answered in time.
    #[error("no answer within {} s", .0.as_secs())]
    Timeout(Duration),
    /// Nobody listens.
    #[error("connection refused")]
    Refused,
    /// Clients are listened to and the operator is not, which no agent of this release does.
    #[error("no admin port beside the public one: an agent of an older release")]
    NoAdminPort,
    /// The connection failed.
    #[error("{0}")]
    Connection(String),
    /// The agent answered with another status than 2xx.
    #[error("answered {status}: {body}")]
    Status {
        /// Its status.
        status: StatusCode,
        /// The beginning of its answer.
        body: String,
    },
    /// An answer to prompts is not of them.
    #[error("{0}")]
    Prompts(String),
    /// The answer is not what was asked for.
    #[error("answer is no report: {0}")]
    Body(#[from] serde_json::Error),
}

impl AgentClient {
    /// Reads the load of the agent at `ip`.
    pub async fn load(&self, ip: &str) -> Result<LoadReport, AgentError> {
        let request = request(Method::GET, &address(ip, ADMIN_PORT), "/v1/load", "", b"");
        let ask = || self.ask(ip, &request, REPORT_BYTES_MAX);
        match ask().await {
            // An agent that starts has its admin port first: where clients are listened to now, it is there when it is asked again.
            Err(AgentError::Refused) if takes_clients(ip).await => match ask().await {
                Err(AgentError::Refused) => Err(AgentError::NoAdminPort),
                answered => answered,
            },
            answered => answered,
        }
    }

    /// Reads what the agent at `ip` remembers of its load. Agents of before remember nothing: 404.
    pub async fn history(&self, ip: &str) -> Result<LoadHistory, AgentError> {
        self.ask(ip, &request(Method::GET, &address(ip, ADMIN_PORT), HISTORY_PATH, "", b""), HISTORY_BYTES_MAX).await
    }

    /// Reads what the agent at `ip` serves and what memory that took. Agents of before do not say: 404.
    pub async fn description(&self, ip: &str) -> Result<Description, AgentError> {
        let request = request(Method::GET, &address(ip, ADMIN_PORT), DESCRIPTION_PATH, "", b"");
        self.ask(ip, &request, DESCRIPTION_BYTES_MAX).await
    }

    /// Gives the agent at `ip` an order; its load after it. Giving it again changes nothing.
    pub async fn order(&self, ip: &str, order: Signed) -> Result<LoadReport, AgentError> {
        self.put(ip, INTENT_PATH, order).await
    }

    /// Tells who fetches at `ip` who has the model; its load after it. Telling it again changes nothing.
    pub async fn tell_holders(&self, ip: &str, word: Signed) -> Result<LoadReport, AgentError> {
        self.put(ip, HOLDERS_PATH, word).await
    }

    async fn put(&self, ip: &str, path: &str, said: Signed) -> Result<LoadReport, AgentError> {
        let signature = format!("{SIGNATURE_HEADER}: {}\r\n", said.signature);
        let request = request(Method::PUT, &address(ip, ADMIN_PORT), path, &signature, &said.body);
        self.ask(ip, &request, REPORT_BYTES_MAX).await
    }

    /// Reads what waits in the gateway at `ip`: its admin port speaks as that of agents does.
    pub async fn lines(&self, ip: &str) -> Result<Lines, AgentError> {
        let agent = &address(ip, ADMIN_PORT);
        let request = &request(Method::GET, agent, LINES_PATH, "", b"");
        self.question(Question { agent, request, bytes_max: LINES_BYTES_MAX, timeout: ANSWER_TIMEOUT }).await
    }

    /// Greedy continuations of these texts by the agent whose inference port is at this address, token by token.
    pub async fn continuations(&self, agent: &str, texts: &[String]) -> Result<Vec<Vec<Position>>, AgentError> {
        let body = continuations::question(texts);
        let request = &request(Method::POST, agent, continuations::PATH, "", &body);
        let question = Question { agent, request, bytes_max: PROMPTS_BYTES_MAX, timeout: PROMPTS_TIMEOUT };
        continuations::positions(self.question(question).await?, texts.len())
    }

    async fn ask<T: DeserializeOwned>(&self, ip: &str, request: &[u8], bytes_max: usize) -> Result<T, AgentError> {
        self.question(Question { agent: &address(ip, ADMIN_PORT), request, bytes_max, timeout: ANSWER_TIMEOUT }).await
    }

    async fn question<T: DeserializeOwned>(&self, question: Question<'_>) -> Result<T, AgentError> {
        let answered = timeout(question.timeout, self.exchange(question)).await;
        let Answer { status, body, .. } =
            answered.map_err(|_| AgentError::Timeout(question.timeout))?.map_err(failed)?;
        if !status.is_success() {
            let body = String::from_utf8_lossy(&body).chars().take(200).collect();
            return Err(AgentError::Status { status, body });
        }
        Ok(serde_json::from_slice(&body)?)
    }

    /// On the connection that there is, if it still is one: an agent may have closed it in the moment that we ask.
    async fn exchange(&self, question: Question<'_>) -> io::Result<Answer> {
        if let Some(kept) = self.take(question.agent)
            && let Ok(answer) = self.exchange_on(kept, question).await
        {
            return Ok(answer);
        }
        let stream = TcpStream::connect(question.agent).await?;
        stream.set_nodelay(true)?;
        self.exchange_on(stream, question).await
    }

    async fn exchange_on(&self, mut stream: TcpStream, question: Question<'_>) -> io::Result<Answer> {
        stream.write_all(question.request).await?;
        let answer = read_answer(&mut stream, question.bytes_max).await?;
        if answer.keeps {
            self.keep(question.agent, stream);
        }
        Ok(answer)
    }

    fn take(&self, agent: &str) -> Option<TcpStream> {
        let (stream, since) = self.idle().by_agent.remove(agent)?;
        (since.elapsed() < IDLE_TIMEOUT).then_some(stream)
    }

    fn keep(&self, agent: &str, stream: TcpStream) {
        let (mut idle, now) = (self.idle(), Instant::now());
        idle.by_agent.insert(agent.to_owned(), (stream, now));
        if idle.swept.is_none_or(|swept| now.duration_since(swept) >= IDLE_TIMEOUT) {
            idle.by_agent.retain(|_, (_, since)| now.duration_since(*since) < IDLE_TIMEOUT);
            idle.swept = Some(now);
        }
    }

    fn idle(&self) -> MutexGuard<'_, Idle> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What is asked.
#[derive(Clone, Copy, Debug)]
struct Question<'a> {
    /// Address of the agent.
    agent: &'a str,
    request: &'a [u8],
    /// Bytes of the answer that are read at most.
    bytes_max: usize,
    /// How long it may take.
    timeout: Duration,
}

/// What came back.
#[derive(Debug)]
struct Answer {
    status: StatusCode,
    body: Vec<u8>,
    /// Another question may follow on the same connection.
    keeps: bool,
}

/// The first lines of an answer.
#[derive(Clone, Copy, Debug)]
struct Head {
    status: StatusCode,
    bytes: usize,
    /// Of the body. An agent always says; whoever does not ends with the connection.
    length: Option<usize>,
    closes: bool,
}

/// The address of the inference port of the agent at `ip`.
pub fn inference_address(ip: &str) -> String {
    address(ip, AGENT_PORT)
}

/// `IP:PORT` as it stands in a URL, whatever kind of address it is.
pub(crate) fn address(ip: &str, port: u16) -> String {
    if ip.contains(':') { format!("[{ip}]:{port}") } else { format!("{ip}:{port}") }
}

fn request(method: Method, host: &str, path: &str, headers: &str, body: &[u8]) -> Vec<u8> {
    let length = body.len();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n{headers}\r\n"
    );
    [head.as_bytes(), body].concat()
}

async fn read_answer(stream: &mut TcpStream, bytes_max: usize) -> io::Result<Answer> {
    let mut read = Vec::with_capacity(1024);
    let mut head = None;
    loop {
        if head.is_none() {
            head = head_of(&read)?;
        }
        let ends = head.and_then(|head| Some(head.bytes + head.length?));
        if ends.is_some_and(|ends| read.len() >= ends) {
            break;
        }
        if read.len() > bytes_max || ends.is_some_and(|ends| ends > bytes_max) {
            return Err(io::Error::other(format!("an answer of more than {bytes_max} bytes")));
        }
        if stream.read_buf(&mut read).await? == 0 {
            // Only a body of no known length ends so.
            let ended = head.is_some_and(|head| head.length.is_none());
            if ended {
                break;
            }
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
    let Some(Head { status, bytes, length, closes }) = head else { return Err(io::ErrorKind::UnexpectedEof.into()) };
    let keeps = !closes && length.is_some_and(|length| read.len() == bytes + length);
    Ok(Answer { status, body: read.split_off(bytes), keeps })
}

/// The head of what was read, once it is whole.
fn head_of(read: &[u8]) -> io::Result<Option<Head>> {
    let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
    let mut answer = httparse::Response::new(&mut headers);
    let httparse::Status::Complete(bytes) = answer.parse(read).map_err(io::Error::other)? else { return Ok(None) };
    let value = |name: &str| {
        let header = answer.headers.iter().find(|header| header.name.eq_ignore_ascii_case(name))?;
        std::str::from_utf8(header.value).ok().map(str::trim)
    };
    if value("transfer-encoding").is_some() {
        return Err(io::Error::other("an answer in pieces, which no agent gives"));
    }
    let length = value("content-length").map(|length| length.parse().map_err(io::Error::other)).transpose()?;
    let closes =
        answer.version == Some(0) || value("connection").is_some_and(|value| value.eq_ignore_ascii_case("close"));
    let status = StatusCode::from_u16(answer.code.unwrap_or_default()).map_err(io::Error::other)?;
    Ok(Some(Head { status, bytes, length, closes }))
}

async fn takes_clients(ip: &str) -> bool {
    timeout(ANSWER_TIMEOUT, TcpStream::connect(inference_address(ip))).await.is_ok_and(|connected| connected.is_ok())
}

fn failed(error: io::Error) -> AgentError {
    match error.kind() {
        io::ErrorKind::ConnectionRefused => AgentError::Refused,
        _ => AgentError::Connection(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    const REQUEST: &[u8] = b"GET /v1/load HTTP/1.1\r\n\r\n";

    /// An agent that gives these answers, each on a connection of its own or, joined by `|`, one after another on one; how many
    /// connections it had comes back with what the client made of each.
    async fn outcomes(answers: &[&str]) -> (usize, Vec<Result<String, String>>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let agent = listener.local_addr().unwrap().to_string();
        let (client, mut outcomes) = (AgentClient::default(), Vec::new());
        let scripts: Vec<Vec<String>> =
            answers.iter().map(|script| script.split('|').map(str::to_owned).collect()).collect();
        let questions: usize = scripts.iter().map(Vec::len).sum();
        let server = tokio::spawn(async move {
            let mut connections = 0;
            for script in scripts {
                let (mut stream, _) = listener.accept().await.unwrap();
                connections += 1;
                for answer in script {
                    let mut asked = [0; 1024];
                    let n_bytes = stream.read(&mut asked).await.unwrap();
                    assert_eq!(&asked[..n_bytes], REQUEST);
                    stream.write_all(answer.as_bytes()).await.unwrap();
                }
            }
            connections
        });
        for _ in 0..questions {
            let question =
                Question { agent: &agent, request: REQUEST, bytes_max: REPORT_BYTES_MAX, timeout: ANSWER_TIMEOUT };
            let answer = client.exchange(question).await;
            let text =
                answer.map(|answer| format!("{} {}", answer.status.as_u16(), String::from_utf8_lossy(&answer.body)));
            outcomes.push(text.map_err(|error| error.to_string()));
        }
        (server.await.unwrap(), outcomes)
    }

    #[tokio::test]
    async fn questions_share_a_connection_and_one_that_was_closed_is_opened_again() {
        let one = "HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\none";
        let two = "HTTP/1.1 503 Service Unavailable\r\ncontent-length: 3\r\n\r\ntwo";
        let joined = format!("{one}|{two}");
        let (connections, said) = outcomes(&[&joined, one]).await;
        assert_eq!(connections, 2);
        assert_eq!(said, [Ok("200 one".to_owned()), Ok("503 two".to_owned()), Ok("200 one".to_owned())]);
    }

    #[tokio::test]
    async fn an_answer_that_is_half_or_none_is_a_failure() {
        for (answer, why) in [
            ("HTTP/1.1 200 OK\r\ncontent-length: 30\r\n\r\nhalf", "unexpected end of file"),
            ("HTTP/1.1 200 OK\r\ncontent-le", "unexpected end of file"),
            ("", "unexpected end of file"),
            ("220 mail.example ESMTP\r\n\r\n", "invalid HTTP version"),
            ("HTTP/1.1 200 OK\r\ncontent-length: 70000\r\n\r\n", "an answer of more than 65536 bytes"),
            ("HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n", "invalid digit found in string"),
            (
                "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
                "an answer in pieces, which no agent gives",
            ),
        ] {
            assert_eq!(outcomes(&[answer]).await.1, [Err(why.to_owned())], "{answer}");
        }
        // Without a length it is whole when the connection ends, and that is not kept.
        let closed = "HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nall";
        assert_eq!(outcomes(&[closed, closed]).await, (2, vec![Ok("200 all".to_owned()), Ok("200 all".to_owned())]));
    }

    #[tokio::test]
    async fn a_body_without_end_is_cut() {
        let endless = format!("HTTP/1.1 200 OK\r\n\r\n{}", "a".repeat(REPORT_BYTES_MAX + 1));
        assert_eq!(outcomes(&[&endless]).await.1, [Err("an answer of more than 65536 bytes".to_owned())]);
    }
}
