//! One streamed request to an OpenAI-compatible endpoint. Judges nothing, retries nothing.

use std::{fmt, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{HeaderValue, Method, Request, StatusCode, Uri, header};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper_rustls::{ConfigBuilderExt, HttpsConnector, HttpsConnectorBuilder};
use hyper_util::{
    client::legacy::{Client as HttpClient, connect::HttpConnector},
    rt::TokioExecutor,
};
use serde::Serialize;
use serde_json::{Map, Value, json};
use thiserror::Error;
use tokio::time::{Instant, timeout_at};
use tokio_rustls::rustls::{ClientConfig, RootCertStore, crypto::ring};

use crate::{
    answer::{Answer, AnswerError, Complete, Usage, shortened},
    prompt::{Counted, TokenCount, words},
    shape::Shape,
};

/// Error bodies and lists of models are not longer.
const BODY_BYTES_MAX: usize = 1 << 20;
/// Models, and the two requests that find how the server counts tokens, must be answered within this time.
const FIRST_WORDS_TIMEOUT: Duration = Duration::from_secs(60);
/// Words of the two requests that find how the server counts tokens.
const COUNTED_WORDS: [usize; 2] = [8, 72];

/// Which of the two ways to ask.
#[derive(Clone, Copy, Debug, Eq, PartialEq, clap::ValueEnum)]
pub enum Form {
    /// `/v1/chat/completions`, the prompt as one message of the user.
    Chat,
    /// `/v1/completions`, the prompt as it is.
    Completions,
}

/// What connections requests use.
#[derive(Clone, Copy, Debug, Eq, PartialEq, clap::ValueEnum)]
pub enum Connections {
    /// A new one for each request, as many users have: a Service spreads connections, not requests, over replicas.
    Fresh,
    /// Kept ones are used again.
    Kept,
}

/// When the server ends a completion.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Ending {
    /// As the model likes.
    Natural,
    /// At `max_tokens`, by `ignore_eos`: vLLM and Stoker know the field, others refuse it.
    AtMaxTokens,
}

/// How the server draws tokens.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Sampling {
    /// As the model's files say.
    OfModel,
    /// The likeliest one, by `temperature` 0.
    Greedy,
}

/// Where to ask, and how.
#[derive(Clone, Debug)]
pub struct Options {
    /// Base URL, with or without `/v1`.
    pub url: String,
    /// See [`Form`].
    pub form: Form,
    /// See [`Connections`].
    pub connections: Connections,
    /// See [`Ending`].
    pub ending: Ending,
    /// See [`Sampling`].
    pub sampling: Sampling,
    /// Sent as bearer token.
    pub api_key: Option<String>,
}

/// What is to be completed.
#[derive(Clone, Debug, Serialize)]
#[serde(untagged)]
pub enum Prompt {
    /// As text.
    Text(String),
    /// As tokens, which only [`Form::Completions`] takes.
    Tokens(Vec<u32>),
    /// As a conversation, which only [`Form::Chat`] takes.
    Messages(Vec<Value>),
}

/// One completion to ask for.
#[derive(Clone, Debug)]
pub struct Ask {
    /// The prompt.
    pub prompt: Prompt,
    /// Completion tokens at most.
    pub max_tokens: u32,
    /// Makes the text repeatable where the server can.
    pub seed: u64,
    /// What the answer has to be; other than text only [`Form::Chat`] takes it.
    pub shape: Shape,
}

/// Kinds of failure, as they are counted.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum FailureKind {
    /// No connection, or it broke before the head of an answer.
    Connect,
    /// Answered with this status.
    Status(u16),
    /// An error event within the stream.
    ErrorEvent,
    /// The stream ended before its end.
    Cut,
    /// Not what a completion looks like.
    Malformed,
    /// Not complete in time.
    Timeout,
    /// Never sent: too many were in flight.
    NotSent,
    /// Never sent: the turn before it in its session failed.
    Unreached,
    /// The run was stopped first.
    Abandoned,
}

impl fmt::Display for FailureKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Connect => f.write_str("connect"),
            Self::Status(status) => write!(f, "status {status}"),
            Self::ErrorEvent => f.write_str("error event"),
            Self::Cut => f.write_str("cut"),
            Self::Malformed => f.write_str("malformed"),
            Self::Timeout => f.write_str("timeout"),
            Self::NotSent => f.write_str("not sent"),
            Self::Unreached => f.write_str("not reached"),
            Self::Abandoned => f.write_str("abandoned"),
        }
    }
}

/// Why a request was not answered.
#[derive(Clone, Debug, Error)]
#[error("{kind}: {message}")]
pub struct Failure {
    /// How it is counted.
    pub kind: FailureKind,
    /// In words, at most a few hundred characters.
    pub message: String,
}

impl Failure {
    pub(crate) fn new(kind: FailureKind, message: impl fmt::Display) -> Self {
        Self { kind, message: shortened(&message.to_string()) }
    }

    fn connect(error: &dyn std::error::Error) -> Self {
        let mut words = error.to_string();
        let mut cause = error.source();
        while let Some(error) = cause {
            words += &format!(": {error}");
            cause = error.source();
        }
        Self::new(FailureKind::Connect, words)
    }
}

impl From<AnswerError> for Failure {
    fn from(error: AnswerError) -> Self {
        let kind = match error {
            AnswerError::Event(_) => FailureKind::ErrorEvent,
            AnswerError::Cut(_) => FailureKind::Cut,
            AnswerError::Malformed(_) | AnswerError::Empty => FailureKind::Malformed,
        };
        Self::new(kind, error)
    }
}

/// Why no client can be made.
#[derive(Debug, Error)]
pub enum ClientError {
    /// Not an address.
    #[error("{url:?} is no http or https URL, such as http://localhost:8000")]
    Url {
        /// What was given.
        url: String,
    },
    /// A key that no header can carry.
    #[error("the API key has characters that no HTTP header can carry")]
    ApiKey,
    /// Https without certificates to trust.
    #[error("read the certificates that this machine trusts: {0}")]
    Certificates(#[from] std::io::Error),
    /// The endpoint names no model.
    #[error("{url}/v1/models names no model: give --model")]
    NoModel {
        /// Where it was asked.
        url: String,
    },
    /// The endpoint did not answer as it should.
    #[error("{what}: {failure}")]
    Endpoint {
        /// What was tried.
        what: String,
        /// What happened.
        failure: Failure,
    },
    /// It answers, but its usage says nothing.
    #[error(
        "the server does not count prompt tokens (its usage: {usages:?}), so prompts of a given length cannot be made"
    )]
    NoCount {
        /// What it said.
        usages: Vec<Option<Usage>>,
    },
}

/// A client of one endpoint. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Client {
    http: HttpClient<HttpsConnector<HttpConnector>, Full<Bytes>>,
    options: Options,
    base: String,
    authorization: Option<HeaderValue>,
}

#[derive(Serialize)]
struct Body<'a> {
    model: &'a str,
    #[serde(flatten)]
    prompt: Value,
    #[serde(flatten)]
    shape: Map<String, Value>,
    max_tokens: u32,
    seed: u64,
    stream: bool,
    stream_options: Value,
    #[serde(skip_serializing_if = "Option::is_none")]
    ignore_eos: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    temperature: Option<u8>,
}

impl Client {
    /// A client; connects nowhere yet.
    pub fn new(options: Options) -> Result<Self, ClientError> {
        let base = base(&options.url).ok_or_else(|| ClientError::Url { url: options.url.clone() })?;
        let authorization = options.api_key.as_ref().map(|key| bearer(key)).transpose()?;
        let mut connector = HttpConnector::new();
        connector.enforce_http(false);
        connector.set_nodelay(true);
        let connector = HttpsConnectorBuilder::new()
            .with_tls_config(tls(&base)?)
            .https_or_http()
            .enable_http1()
            .wrap_connector(connector);
        let mut builder = HttpClient::builder(TokioExecutor::new());
        if options.connections == Connections::Fresh {
            builder.pool_max_idle_per_host(0);
        }
        Ok(Self { http: builder.build(connector), options, base, authorization })
    }

    /// Where requests go, without a path.
    pub fn base(&self) -> &str {
        &self.base
    }

    /// The first model of the endpoint's list.
    pub async fn first_model(&self) -> Result<String, ClientError> {
        let endpoint = |failure| ClientError::Endpoint { what: "ask for models".to_owned(), failure };
        let request = self.request(Method::GET, "/v1/models", Bytes::new());
        let asked = async {
            let body = whole(self.send(request).await?.into_body()).await?;
            serde_json::from_slice::<Value>(&body).map_err(|error| Failure::new(FailureKind::Malformed, error))
        };
        let models = within(Instant::now() + FIRST_WORDS_TIMEOUT, asked).await.map_err(endpoint)?;
        let id = models["data"][0]["id"].as_str();
        id.map(str::to_owned).ok_or_else(|| ClientError::NoModel { url: self.base.clone() })
    }

    /// Finds how the server counts tokens, by two short requests.
    pub async fn token_count(&self, model: &str) -> Result<TokenCount, ClientError> {
        let mut usages = Vec::new();
        for n_words in COUNTED_WORDS {
            let prompt = words(1, n_words).collect::<Vec<_>>().join(" ");
            let ask = Ask { prompt: Prompt::Text(prompt), max_tokens: 1, seed: 0, shape: Shape::Text };
            let answer = self.ask(model, &ask, Instant::now() + FIRST_WORDS_TIMEOUT).await;
            let what = || format!("ask {model} for one token");
            let answer = answer.map_err(|failure| ClientError::Endpoint { what: what(), failure })?;
            usages.push(answer.usage);
        }
        let counted =
            |(words, usage): (usize, &Option<Usage>)| usage.map(|usage| Counted { words, tokens: usage.prompt_tokens });
        let counts: Vec<_> = COUNTED_WORDS.into_iter().zip(&usages).filter_map(counted).collect();
        let [short, long] = counts[..] else { return Err(ClientError::NoCount { usages }) };
        TokenCount::through(short, long).ok_or(ClientError::NoCount { usages })
    }

    /// Streams one completion to its end.
    pub async fn ask(&self, model: &str, ask: &Ask, deadline: Instant) -> Result<Complete, Failure> {
        self.ask_telling(model, ask, deadline, || {}).await
    }

    /// The same, and calls `begins` when the first piece is there.
    pub async fn ask_telling(
        &self,
        model: &str,
        ask: &Ask,
        deadline: Instant,
        begins: impl FnOnce(),
    ) -> Result<Complete, Failure> {
        within(deadline, self.stream(model, ask, begins)).await
    }

    async fn stream(&self, model: &str, ask: &Ask, begins: impl FnOnce()) -> Result<Complete, Failure> {
        let (path, prompt) = match (self.options.form, &ask.prompt) {
            (Form::Chat, Prompt::Messages(messages)) => ("/v1/chat/completions", json!({"messages": messages})),
            (Form::Chat, prompt) => {
                ("/v1/chat/completions", json!({"messages": [{"role": "user", "content": prompt}]}))
            }
            (Form::Completions, prompt) => ("/v1/completions", json!({"prompt": prompt})),
        };
        let body = Body {
            model,
            prompt,
            shape: ask.shape.fields(),
            max_tokens: ask.max_tokens,
            seed: ask.seed,
            stream: true,
            stream_options: json!({"include_usage": true}),
            ignore_eos: (self.options.ending == Ending::AtMaxTokens).then_some(true),
            temperature: (self.options.sampling == Sampling::Greedy).then_some(0),
        };
        let body = serde_json::to_vec(&body).expect("a request is plain data");
        let response = self.send(self.request(Method::POST, path, body.into())).await?;
        listen(response.into_body(), begins).await
    }

    fn request(&self, method: Method, path: &str, body: Bytes) -> Request<Full<Bytes>> {
        let mut request = Request::new(Full::new(body));
        *request.method_mut() = method;
        *request.uri_mut() = format!("{}{path}", self.base).parse().expect("a checked base and our own path");
        let headers = request.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(authorization) = &self.authorization {
            headers.insert(header::AUTHORIZATION, authorization.clone());
        }
        request
    }

    /// The response, if it is one of success.
    async fn send(&self, request: Request<Full<Bytes>>) -> Result<http::Response<Incoming>, Failure> {
        let response = self.http.request(request).await.map_err(|error| Failure::connect(&error))?;
        let status = response.status();
        if status == StatusCode::OK {
            return Ok(response);
        }
        let body = whole(response.into_body()).await?;
        Err(Failure::new(FailureKind::Status(status.as_u16()), String::from_utf8_lossy(&body)))
    }
}

/// Trust as this machine does. Plain http needs no certificates, so their absence is no error there.
fn tls(base: &str) -> Result<ClientConfig, ClientError> {
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("ring has the default protocol versions");
    let builder = if base.starts_with("https:") {
        builder.with_native_roots()?
    } else {
        builder.with_root_certificates(RootCertStore::empty())
    };
    Ok(builder.with_no_client_auth())
}

/// Scheme, host and port of a URL; a path other than `/v1` is kept, for servers behind one.
fn base(url: &str) -> Option<String> {
    let trimmed = url.trim_end_matches('/');
    let trimmed = trimmed.strip_suffix("/v1").unwrap_or(trimmed);
    let uri: Uri = trimmed.parse().ok()?;
    let is_http = matches!(uri.scheme_str(), Some("http" | "https")) && uri.host().is_some_and(|host| !host.is_empty());
    (is_http && uri.query().is_none()).then(|| trimmed.to_owned())
}

fn bearer(key: &str) -> Result<HeaderValue, ClientError> {
    let mut value = HeaderValue::from_str(&format!("Bearer {key}")).map_err(|_| ClientError::ApiKey)?;
    value.set_sensitive(true);
    Ok(value)
}

async fn within<T>(deadline: Instant, asked: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    let timed_out = |_| Err(Failure::new(FailureKind::Timeout, "not complete in time"));
    timeout_at(deadline, asked).await.unwrap_or_else(timed_out)
}

async fn whole(body: Incoming) -> Result<Bytes, Failure> {
    let collected = Limited::new(body, BODY_BYTES_MAX).collect().await;
    collected.map(|body| body.to_bytes()).map_err(|error| Failure::new(FailureKind::Cut, error))
}

async fn listen(mut body: Incoming, begins: impl FnOnce()) -> Result<Complete, Failure> {
    let (mut answer, mut begins) = (Answer::default(), Some(begins));
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| Failure::new(FailureKind::Cut, error))?;
        if let Some(data) = frame.data_ref() {
            answer.take(data, std::time::Instant::now())?;
            if let Some(begins) = begins.take_if(|_| answer.has_begun()) {
                begins();
            }
        }
    }
    Ok(answer.end()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_base_is_found_in_every_spelling_and_nonsense_is_refused() {
        for url in ["http://h:8000", "http://h:8000/", "http://h:8000/v1", "http://h:8000/v1/"] {
            assert_eq!(base(url).as_deref(), Some("http://h:8000"), "{url}");
        }
        assert_eq!(base("https://h/serve/v1").as_deref(), Some("https://h/serve"));
        for url in ["", "h:8000", "ftp://h", "http://", "http://h/?a=b"] {
            assert_eq!(base(url), None, "{url}");
        }
    }
}
