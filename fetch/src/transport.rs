//! One request: what may be told to whom, redirects followed by hand, failures told apart into those that pass and those
//! that do not.

use std::{error::Error, fmt, io, ops::Range, time::Duration};

use reqwest::{
    Client, ClientBuilder, Method, Response, StatusCode, Url,
    header::{ACCEPT_ENCODING, HeaderMap, LOCATION, RANGE, RETRY_AFTER},
    redirect::Policy,
};

use crate::{backoff, error::FetchError};

/// For a connection, and between two pieces of an answer: a server that says nothing for longer is taken for gone.
const SILENCE: Duration = Duration::from_secs(30);
/// A hub sends to a store, that to a mirror of it; more is a circle.
const REDIRECTS: usize = 8;
/// Of a refusal: more words are read by nobody.
const SAID_BYTES: usize = 16 << 10;

/// What sends requests.
#[derive(Clone, Debug)]
pub(crate) struct Transport {
    client: Client,
}

/// What is asked for.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) url: Url,
    /// For the origin of `url`, and for nobody that it redirects to: a token is among them.
    pub(crate) headers: HeaderMap,
}

impl Request {
    /// Says nothing about who asks.
    pub(crate) fn plain(url: Url) -> Self {
        Self { url, headers: HeaderMap::new() }
    }
}

/// Why a request got no useful answer.
#[derive(Debug)]
pub(crate) enum Failure {
    /// Trying again may help.
    Passing { reason: String, retry_after: Option<Duration> },
    /// It will not.
    Final(Box<FetchError>),
}

/// What a server says no with.
#[derive(Clone, Debug)]
pub(crate) struct Refusal {
    pub(crate) status: StatusCode,
    pub(crate) said: Said,
    pub(crate) headers: HeaderMap,
    pub(crate) url: Url,
}

/// What a refusal says of itself.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub(crate) struct Said {
    /// A word that programs read.
    pub(crate) code: String,
    /// Words that people read.
    pub(crate) words: String,
}

/// Reads headers and body of a refusal.
pub(crate) type Listen = fn(&HeaderMap, &[u8]) -> Said;

impl From<FetchError> for Failure {
    fn from(error: FetchError) -> Self {
        Self::Final(Box::new(error))
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Passing { reason, .. } => f.write_str(reason),
            Self::Final(error) => write!(f, "{error}"),
        }
    }
}

impl Failure {
    pub(crate) fn passing(reason: impl ToString) -> Self {
        Self::Passing { reason: reason.to_string(), retry_after: None }
    }
}

impl Transport {
    pub(crate) fn new() -> Result<Self, FetchError> {
        let client = builder()
            .redirect(Policy::none())
            .connect_timeout(SILENCE)
            .read_timeout(SILENCE)
            .build()
            .map_err(|error| FetchError::Client { reason: error_chain(&error) })?;
        Ok(Self { client })
    }

    /// What requests that are made elsewhere are sent with.
    pub(crate) fn client(&self) -> &Client {
        &self.client
    }

    /// Asks for the bytes of `range`, or for all, and follows where it is sent. The answer's URL is where it came from.
    pub(crate) async fn get(&self, request: &Request, range: Option<Range<u64>>) -> Result<Response, Failure> {
        let mut next = request.clone();
        for _ in 0..REDIRECTS {
            let answer = self.once(Method::GET, &next, range.clone()).await?;
            if !answer.status().is_redirection() {
                return Ok(answer);
            }
            let url = redirected(&next.url, answer.headers())?;
            let kept = url.origin() == request.url.origin();
            let headers = if kept { request.headers.clone() } else { HeaderMap::new() };
            next = Request { url, headers };
        }
        Err(Failure::passing(format!("more than {REDIRECTS} redirects, the last to {}", shown(&next.url))))
    }

    /// Asks once.
    pub(crate) async fn once(
        &self,
        method: Method,
        request: &Request,
        range: Option<Range<u64>>,
    ) -> Result<Response, Failure> {
        // Lengths must be those of the bytes that were published.
        let mut asked = self.client.request(method, request.url.clone()).header(ACCEPT_ENCODING, "identity");
        if let Some(Range { start, end }) = range {
            asked = asked.header(RANGE, format!("bytes={start}-{}", end - 1));
        }
        asked.headers(request.headers.clone()).send().await.map_err(|error| unanswered(&request.url, &error))
    }
}

/// What a client is made with.
pub(crate) fn builder() -> ClientBuilder {
    // An error means that somebody in this process chose a provider before.
    let _chosen_before = rustls::crypto::ring::default_provider().install_default();
    Client::builder().user_agent(concat!("stoker/", env!("CARGO_PKG_VERSION")))
}

/// A certificate that nobody vouches for is the same when it is asked for again.
fn unanswered(url: &Url, error: &reqwest::Error) -> Failure {
    let mut cause: Option<&(dyn Error + 'static)> = Some(error);
    while let Some(error) = cause {
        if let Some(reason @ rustls::Error::InvalidCertificate(_)) = of_tls(error) {
            return FetchError::Certificate { url: shown(url), reason: reason.to_string() }.into();
        }
        cause = error.source();
    }
    Failure::passing(error_chain(error))
}

/// What TLS says, below errors of I/O that are put around it.
fn of_tls<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a rustls::Error> {
    match error.downcast_ref::<io::Error>() {
        Some(outer) => of_tls(outer.get_ref()?),
        None => error.downcast_ref(),
    }
}

fn redirected(from: &Url, headers: &HeaderMap) -> Result<Url, Failure> {
    let to = header(headers, LOCATION.as_str());
    let to =
        from.join(to).map_err(|error| Failure::passing(format!("redirect of {} to \"{to}\": {error}", shown(from))))?;
    if from.scheme() == "https" && to.scheme() != "https" {
        return Err(Failure::passing(format!("redirect of {} to {}, which is not encrypted", shown(from), shown(&to))));
    }
    Ok(to)
}

/// An answer with what was asked for, or why there is none: what passes by itself, else what `refused` makes of it.
pub(crate) async fn judged(
    answer: Response,
    listen: Listen,
    refused: impl FnOnce(Refusal) -> Failure,
) -> Result<Response, Failure> {
    let status = answer.status();
    if status.is_success() {
        return Ok(answer);
    }
    let (headers, url) = (answer.headers().clone(), answer.url().clone());
    let Said { code, words } = listen(&headers, &beginning(answer).await);
    let said = Said { code: bounded(&code), words: bounded(&words) };
    let passes = status.is_server_error()
        || matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_EARLY);
    if passes {
        let words = Some(said.words).filter(|words| !words.is_empty());
        let reason = format!("{status}{}", words.map(|words| format!(": {words}")).unwrap_or_default());
        return Err(Failure::Passing {
            reason,
            retry_after: backoff::retry_after(header(&headers, RETRY_AFTER.as_str())),
        });
    }
    Err(refused(Refusal { status, said, headers, url }))
}

/// A URL for messages: a query may hold a signature that lets whoever reads it in.
pub(crate) fn shown(url: &Url) -> String {
    let mut url = url.clone();
    url.set_query(None);
    url.set_fragment(None);
    url.to_string()
}

/// A header's text; nothing if it is not there.
pub(crate) fn header<'a>(headers: &'a HeaderMap, name: &str) -> &'a str {
    headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
}

/// What comes of a body, at most [`SAID_BYTES`].
async fn beginning(mut answer: Response) -> Vec<u8> {
    let mut read = Vec::new();
    while let Ok(Some(bytes)) = answer.chunk().await {
        read.extend_from_slice(&bytes[..bytes.len().min(SAID_BYTES - read.len())]);
        if read.len() == SAID_BYTES {
            break;
        }
    }
    read
}

/// Words of others are shown, not believed to be short.
fn bounded(said: &str) -> String {
    said.chars().take(300).filter(|c| !c.is_control()).collect()
}

/// An error with its causes: the outer one alone says "error sending request".
pub(crate) fn error_chain(error: &dyn Error) -> String {
    let mut words = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        words.push_str(": ");
        words.push_str(&inner.to_string());
        cause = inner.source();
    }
    words
}
