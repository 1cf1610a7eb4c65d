//! An answer that is not streamed. Who passes requests on may ask to be told its tokens as they come (`x-stoker-whole`), in the marks of
//! a stream; behind them comes the body that would have come alone. Dropping it aborts the request.

use std::time::Duration;

use axum::{
    Json,
    body::Body,
    http::{HeaderValue, header},
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use serde::Serialize;
use stoker_engine::{FinishReason, RequestEvent};

use crate::http::{
    body::model_header,
    choices::{Choices, Collected, Completion, Taken},
    error::ApiError,
    passage::{MODEL, Mark},
    stream::{has_failed, stopped},
    usage::{UsageBody, UsageSum},
};

/// Silence after which a mark says that the answer is still being made.
const ALIVE_PERIOD: Duration = Duration::from_secs(15);

/// How an API writes an answer when all of it is there.
pub(crate) struct Writing<W> {
    /// Its body.
    pub(crate) answer: W,
    /// The body of an error that it became, as the API's own errors are written.
    pub(crate) failure: fn(&ApiError) -> Bytes,
}

impl<W> Writing<W> {
    /// One whose errors are OpenAI's.
    pub(crate) fn of_openai(answer: W) -> Self {
        Self { answer, failure: |error| json_of(&error.body()) }
    }
}

/// The response with all of these choices.
pub(crate) async fn whole<B, W>(
    mut choices: Choices,
    usage: UsageSum,
    writing: Writing<W>,
) -> Result<Response, ApiError>
where
    B: Serialize,
    W: FnOnce(Vec<Completion>, UsageBody) -> B + Send + 'static,
{
    if !choices.tells_whole() {
        let (completions, usage) = choices.collect(usage).await?;
        return Ok((choices.device_time(), Json((writing.answer)(completions, usage))).into_response());
    }
    let model = model_header(&choices);
    let collected = Collected::new(choices.n_choices(), usage);
    let mut telling = Telling { collected, choices, writing: Some(writing), is_opened: false, first: None };
    telling.begin().await?;
    let pieces = futures::stream::unfold(telling, |mut telling| async {
        let piece = telling.next_piece().await?;
        Some((Ok::<Bytes, std::convert::Infallible>(piece), telling))
    });
    let mut response = Response::new(Body::from_stream(pieces));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    model.into_iter().for_each(|model| drop(response.headers_mut().insert(MODEL, model)));
    Ok(response)
}

struct Telling<W> {
    choices: Choices,
    collected: Collected,
    /// Nothing once the body was written.
    writing: Option<Writing<W>>,
    is_opened: bool,
    /// What was waited for before the head was sent.
    first: Option<(u32, RequestEvent)>,
}

impl<B: Serialize, W: FnOnce(Vec<Completion>, UsageBody) -> B> Telling<W> {
    /// Takes in what another replica told, and waits for the first event: what fails before has an error's status.
    async fn begin(&mut self) -> Result<(), ApiError> {
        for (index, event) in self.choices.take_told().unwrap_or_default() {
            self.collected.take(index, event).map_err(|reason| self.choices.failed(&reason))?;
        }
        match tokio::time::timeout(ALIVE_PERIOD, self.choices.next()).await {
            Ok(Some((_, RequestEvent::Finished { reason, .. }))) if has_failed(&reason) => {
                return Err(self.choices.failed(&reason));
            }
            Ok(Some(first)) => self.first = Some(first),
            Ok(None) => return Err(self.choices.failed(&stopped())),
            Err(_) => {}
        }
        Ok(())
    }

    async fn next_piece(&mut self) -> Option<Bytes> {
        let mark = loop {
            self.writing.as_ref()?;
            if !std::mem::replace(&mut self.is_opened, true) {
                break Mark::Opened;
            }
            let next = match self.first.take() {
                Some(first) => Ok(Some(first)),
                None => tokio::time::timeout(ALIVE_PERIOD, self.choices.next()).await,
            };
            let taken = match next {
                Ok(Some((index, event))) => {
                    self.collected.take(index, event).map(|taken| taken.map(|taken| (index, taken)))
                }
                Ok(None) => Err(stopped()),
                Err(_) => break Mark::Nothing,
            };
            match taken {
                Ok(Some((index, Taken::Tokens(tokens)))) => {
                    break self.choices.more(index, tokens);
                }
                Ok(Some((_, Taken::End))) if self.collected.is_whole() => return self.end(),
                Ok(Some((index, Taken::End))) => break Mark::End { index },
                Ok(None) => {}
                Err(reason) => return self.fail(&reason),
            }
        };
        Some(mark.behind(&Bytes::new()))
    }

    /// The body, which is the answer's end.
    fn end(&mut self) -> Option<Bytes> {
        let writing = self.writing.take()?;
        let (completions, usage) = self.collected.all();
        Some(Mark::Done.behind(&line(&json_of(&(writing.answer)(completions, usage)))))
    }

    /// What ends this replica does not end the answer: another one may go on.
    fn fail(&mut self, reason: &FinishReason) -> Option<Bytes> {
        let writing = self.writing.take()?;
        if let Some(end) = self.choices.replica_end() {
            return Some(Mark::of_end(end).behind(&Bytes::new()));
        }
        let error = self.choices.failed(reason);
        Some(Mark::Failed { status: error.status }.behind(&line(&(writing.failure)(&error))))
    }
}

/// A mark begins a line: JSON has no line feed of its own.
fn line(body: &Bytes) -> Bytes {
    [body.as_ref(), b"\n"].concat().into()
}

/// As `axum::Json` writes it.
pub(crate) fn json_of(body: &impl Serialize) -> Bytes {
    serde_json::to_vec(body).expect("answers have names as keys").into()
}
