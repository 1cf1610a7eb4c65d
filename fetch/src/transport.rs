//! One request: redirects followed by hand, the token sent to the hub's own origin and nowhere else, failures told apart
//! into those that pass and those that do not.

use std::{ops::Range, time::Duration};

use reqwest::{
    Client, Response, StatusCode, Url,
    header::{ACCEPT_ENCODING, AUTHORIZATION, HeaderMap, LOCATION, RANGE, RETRY_AFTER},
    redirect::Policy,
};

use crate::{backoff, error::FetchError};

/// For a connection, and between two pieces of an answer: a hub that says nothing for longer is taken for gone.
const SILENCE: Duration = Duration::from_secs(30);
/// A hub sends to a store, that to a mirror of it; more is a circle.
const REDIRECTS: usize = 8;

/// What sends requests.
#[derive(Clone)]
pub(crate) struct Transport {
    client: Client,
    endpoint: Url,
    token: Option<String>,
}

/// Why a request got no useful answer.
#[derive(Clone, Debug)]
pub(crate) enum Failure {
    /// Trying again may help.
    Passing { reason: String, retry_after: Option<Duration> },
    /// The server said no.
    Refused { status: StatusCode, code: String, said: String, url: Box<Url> },
}

impl Failure {
    pub(crate) fn passing(reason: impl ToString) -> Self {
        Self::Passing { reason: reason.to_string(), retry_after: None }
    }
}

impl Transport {
    pub(crate) fn new(endpoint: &str, token: Option<String>) -> Result<Self, FetchError> {
        let wrong = |reason: String| FetchError::Endpoint { endpoint: endpoint.to_owned(), reason };
        let url = Url::parse(endpoint).map_err(|error| wrong(error.to_string()))?;
        if !matches!(url.scheme(), "http" | "https") || url.host().is_none() {
            return Err(wrong("not an http or https URL".to_owned()));
        }
        // An error means that somebody in this process chose a provider before.
        let _chosen_before = rustls::crypto::ring::default_provider().install_default();
        let client = Client::builder()
            .redirect(Policy::none())
            .connect_timeout(SILENCE)
            .read_timeout(SILENCE)
            .user_agent(concat!("stoker/", env!("CARGO_PKG_VERSION")))
            .build()
            .map_err(|error| wrong(error_chain(&error)))?;
        Ok(Self { client, endpoint: url, token })
    }

    /// The URL of a path of the hub.
    pub(crate) fn url(&self, path: &str) -> Url {
        let mut url = self.endpoint.clone();
        let base = self.endpoint.path().trim_end_matches('/');
        let (path, query) = path.split_once('?').map_or((path, None), |(path, query)| (path, Some(query)));
        url.set_path(&format!("{base}{path}"));
        url.set_query(query);
        url
    }

    pub(crate) fn has_token(&self) -> bool {
        self.token.is_some()
    }

    /// The hub's name in messages.
    pub(crate) fn hub(&self) -> String {
        self.endpoint.as_str().trim_end_matches('/').to_owned()
    }

    /// Asks once. The answer's URL is where it came from.
    pub(crate) async fn get(&self, url: &Url, range: Option<Range<u64>>) -> Result<Response, Failure> {
        let mut url = url.clone();
        for _ in 0..REDIRECTS {
            // Lengths must be those of the bytes that were published.
            let mut request = self.client.get(url.clone()).header(ACCEPT_ENCODING, "identity");
            if let Some(Range { start, end }) = &range {
                request = request.header(RANGE, format!("bytes={start}-{}", end - 1));
            }
            if let Some(token) = self.token.as_ref().filter(|_| url.origin() == self.endpoint.origin()) {
                request = request.header(AUTHORIZATION, format!("Bearer {token}"));
            }
            let answer = request.send().await.map_err(|error| Failure::passing(error_chain(&error)))?;
            if !answer.status().is_redirection() {
                return judged(answer).await;
            }
            url = redirected(&url, answer.headers())?;
        }
        Err(Failure::passing(format!("more than {REDIRECTS} redirects, the last to {url}")))
    }
}

fn redirected(from: &Url, headers: &HeaderMap) -> Result<Url, Failure> {
    let to = headers.get(LOCATION).and_then(|to| to.to_str().ok()).unwrap_or_default();
    let to = from.join(to).map_err(|error| Failure::passing(format!("redirect of {from} to \"{to}\": {error}")))?;
    if from.scheme() == "https" && to.scheme() != "https" {
        return Err(Failure::passing(format!("redirect of {from} to {to}, which is not encrypted")));
    }
    Ok(to)
}

/// An answer with what was asked for, or why there is none.
async fn judged(answer: Response) -> Result<Response, Failure> {
    let status = answer.status();
    if status.is_success() {
        return Ok(answer);
    }
    let header = |name: &str| answer.headers().get(name).and_then(|value| value.to_str().ok()).map(str::to_owned);
    let passes = status.is_server_error()
        || matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_EARLY);
    let (url, code) = (Box::new(answer.url().clone()), header("x-error-code").unwrap_or_default());
    let (said, asked) = (header("x-error-message"), header(RETRY_AFTER.as_str()));
    if passes {
        let reason = format!("{status}{}", said.map(|said| format!(": {said}")).unwrap_or_default());
        return Err(Failure::Passing { reason, retry_after: asked.as_deref().and_then(backoff::retry_after) });
    }
    let said = said.unwrap_or_else(|| "the hub says nothing more".to_owned());
    Err(Failure::Refused { status, code, said: bounded(&said), url })
}

/// Words of others are shown, not believed to be short.
fn bounded(said: &str) -> String {
    said.chars().take(300).filter(|c| !c.is_control()).collect()
}

/// An error with its causes: the outer one alone says "error sending request".
pub(crate) fn error_chain(error: &dyn std::error::Error) -> String {
    let mut words = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        words.push_str(": ");
        words.push_str(&inner.to_string());
        cause = inner.source();
    }
    words
}
