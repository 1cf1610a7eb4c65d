//! The conversation with a proxy about one request: its head and body come, where it goes is told, then its answer passes by until it has
//! ended. For as long the request has a place at its replica; whoever breaks off gives it back.
//!
//! What may be told when follows from how the proxy sends bodies. In full duplex everything that came waits until the replica is known. A
//! buffered body comes after its head was let go, and may still change it. In all other modes the replica has to be known by the
//! head, and is picked by load.

use std::{collections::VecDeque, sync::Arc};

use axum::http::{HeaderMap, HeaderValue, StatusCode, header::CONTENT_TYPE};
use bytes::{Bytes, BytesMut};
use stoker_edge::body::{self, BodyError, Place};
use tokio::{sync::mpsc, time::timeout};
use tonic::{Status, Streaming};

use super::{
    messages::{
        Answer, BodySendMode, HttpBody, HttpHeaders, ProcessingRequest, ProcessingResponse, ProtocolConfiguration,
        Said, Told, TrailersResponse,
    },
    pick::{Picked, Question, Way, pick, way},
    words,
};
use crate::{
    access::Access,
    doors::Meant,
    error::{Dialect, GatewayError},
    gateway::Gateway,
    headers::{ROUTE, is_stream, request_id},
    permit,
    usage::{Tail, Usage},
};

/// Messages that come while a request waits for its turn; a proxy that sends more waits, too.
const MESSAGES_AHEAD: usize = 64;

/// Why a conversation is over before its end.
enum Over {
    /// The request is refused.
    Refused(GatewayError),
    /// The other side has gone, or does not keep to the protocol.
    Gone,
}

impl From<BodyError> for Over {
    fn from(error: BodyError) -> Self {
        Self::Refused(error.into())
    }
}

impl From<GatewayError> for Over {
    fn from(error: GatewayError) -> Self {
        Self::Refused(error)
    }
}

/// How a proxy sends bodies.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct Modes {
    request: BodySendMode,
    response: BodySendMode,
}

impl Modes {
    /// A proxy that says nothing does what the protocol of endpoint pickers asks for.
    fn of(said: Option<ProtocolConfiguration>) -> Self {
        let Some(said) = said else {
            return Self { request: BodySendMode::FullDuplexStreamed, response: BodySendMode::FullDuplexStreamed };
        };
        Self { request: said.request_body_mode(), response: said.response_body_mode() }
    }
}

/// See the module.
pub(super) struct Talk {
    gateway: Arc<Gateway>,
    /// The deployment at whose port it came.
    meant: Option<Meant>,
    said: Streaming<ProcessingRequest>,
    /// Came while nobody listened.
    ahead: VecDeque<ProcessingRequest>,
    tell: mpsc::Sender<Result<ProcessingResponse, Status>>,
    modes: Modes,
}

/// What came behind a body.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Followed {
    ByNothing,
    ByTrailers,
}

/// A request that came over, as far as it came.
struct Opening {
    question: Question,
    has_body: bool,
    dialect: Dialect,
}

impl Talk {
    pub(super) fn new(
        gateway: Arc<Gateway>,
        meant: Option<Meant>,
        said: Streaming<ProcessingRequest>,
        tell: mpsc::Sender<Result<ProcessingResponse, Status>>,
    ) -> Self {
        Self { gateway, meant, said, ahead: VecDeque::new(), tell, modes: Modes::of(None) }
    }

    /// From the first message to the end.
    pub(super) async fn run(mut self) {
        let Some(opening) = self.opening().await else { return };
        let Question { parts, id, .. } = &opening.question;
        let (id, dialect) = (id.clone(), opening.dialect);
        let mut access =
            Access::begin(&self.gateway, parts.method.clone(), parts.uri.path(), &parts.headers, id.clone());
        match self.request(opening, &mut access).await {
            // An error: the other side has gone, and what the request had goes with it.
            Ok(picked) => _ = Passing::begin(&self.gateway, picked, access).run(&mut self).await,
            Err(Over::Refused(error)) => {
                access.answered(error.status.as_u16());
                access.whole();
                _ = self.say(words::refuse(&error, dialect, &id)).await;
            }
            Err(Over::Gone) => {}
        }
    }

    /// The first message; `None`: it is none that a conversation begins with.
    async fn opening(&mut self) -> Option<Opening> {
        let first = self.next().await?;
        let Some(Said::RequestHeaders(head)) = &first.said else {
            let message = "a conversation begins with the head of a request: set request_header_mode to SEND";
            _ = self.tell.send(Err(Status::failed_precondition(message))).await;
            return None;
        };
        if first.observability_mode {
            return None;
        }
        self.modes = Modes::of(first.protocol_config);
        let Some(mut parts) = words::request_parts(head) else {
            _ = self.tell.send(Err(Status::invalid_argument("the head of the request cannot be read"))).await;
            return None;
        };
        if let Some(meant) = self.meant.take() {
            parts.extensions.insert(meant);
        }
        let (id, dialect) = (request_id(&parts.headers), Dialect::of(parts.uri.path()));
        let subset = words::subset(first.metadata_context.as_ref());
        Some(Opening { question: Question { parts, id, subset }, has_body: !head.end_of_stream, dialect })
    }

    /// Until it is told where the request goes, and all of it that came has passed.
    async fn request(&mut self, opening: Opening, access: &mut Access) -> Result<Picked, Over> {
        let Opening { question, has_body, .. } = opening;
        let by_prompt = way(&question.parts)? == Way::ByPrompt;
        // Before its body: nothing is kept for those who may not ask.
        permit::who(&self.gateway, &question.parts.headers).await?;
        match self.modes.request {
            BodySendMode::FullDuplexStreamed if by_prompt && has_body => {
                let (body, followed) = self.collect(&question.parts.headers).await?;
                let picked = self.pick(question, Some(body.clone()), access).await?;
                self.say(words::destination(Told::RequestHeaders, &picked.address, &picked.changes)).await?;
                self.send_back(body, followed).await?;
                Ok(picked)
            }
            BodySendMode::Buffered if by_prompt && has_body => {
                body::may_read(&question.parts.headers)?;
                self.say(words::pass(Told::RequestHeaders(Answer::default()))).await?;
                let body = self.whole().await?;
                let picked = self.pick(question, Some(body), access).await?;
                self.say(words::destination(Told::RequestBody, &picked.address, &picked.changes)).await?;
                Ok(picked)
            }
            _ => {
                let nothing = (by_prompt && !has_body).then(Bytes::new);
                let picked = self.pick(question, nothing, access).await?;
                self.say(words::destination(Told::RequestHeaders, &picked.address, &picked.changes)).await?;
                Ok(picked)
            }
        }
    }

    /// A body that comes in pieces, and what is behind it.
    async fn collect(&mut self, headers: &HeaderMap) -> Result<(Bytes, Followed), Over> {
        body::may_read(headers)?;
        let bytes_max = self.gateway.settings.body_bytes_max;
        let collected = async {
            let (mut body, mut place) = (BytesMut::new(), Place::default());
            loop {
                match self.next().await.and_then(|message| message.said).ok_or(Over::Gone)? {
                    Said::RequestBody(HttpBody { body: piece, end_of_stream }) => {
                        let n_bytes = body.len() + piece.len();
                        if n_bytes > bytes_max {
                            return Err(BodyError::TooLarge { received: n_bytes as u64, bytes_max }.into());
                        }
                        place.grow(n_bytes)?;
                        body.extend_from_slice(&piece);
                        if end_of_stream {
                            return Ok((body.freeze(), Followed::ByNothing));
                        }
                    }
                    Said::RequestTrailers(_) => return Ok((body.freeze(), Followed::ByTrailers)),
                    _ => return Err(Over::Gone),
                }
            }
        };
        timeout(body::TIMEOUT, collected).await.unwrap_or_else(|_| Err(BodyError::Late.into()))
    }

    /// A body that comes at once.
    async fn whole(&mut self) -> Result<Bytes, Over> {
        let bytes_max = self.gateway.settings.body_bytes_max;
        let message = timeout(body::TIMEOUT, self.next()).await.map_err(|_| BodyError::Late)?;
        let Some(Said::RequestBody(HttpBody { body, .. })) = message.and_then(|message| message.said) else {
            return Err(Over::Gone);
        };
        match body.len() > bytes_max {
            true => Err(BodyError::TooLarge { received: body.len() as u64, bytes_max }.into()),
            false => Ok(body),
        }
    }

    /// The body that was kept, and what came behind it.
    async fn send_back(&mut self, body: Bytes, followed: Followed) -> Result<(), Over> {
        let ends = followed == Followed::ByNothing;
        for piece in words::pass_body(Told::RequestBody, BodySendMode::FullDuplexStreamed, body, ends) {
            self.say(piece).await?;
        }
        match followed {
            Followed::ByTrailers => self.say(words::pass(Told::RequestTrailers(TrailersResponse {}))).await,
            Followed::ByNothing => Ok(()),
        }
    }

    /// Picks, unless the other side goes before that.
    async fn pick(&mut self, question: Question, body: Option<Bytes>, access: &mut Access) -> Result<Picked, Over> {
        let gateway = Arc::clone(&self.gateway);
        tokio::select! {
            picked = pick(&gateway, question, body, access) => picked.map_err(Over::Refused),
            () = self.gone() => Err(Over::Gone),
        }
    }

    /// Until the other side has gone. What it says meanwhile is kept.
    async fn gone(&mut self) {
        while self.ahead.len() < MESSAGES_AHEAD {
            match self.said.message().await {
                Ok(Some(message)) => self.ahead.push_back(message),
                Ok(None) | Err(_) => return,
            }
        }
        self.tell.closed().await;
    }

    /// What is said next; `None`: nothing more.
    async fn next(&mut self) -> Option<ProcessingRequest> {
        match self.ahead.pop_front() {
            Some(message) => Some(message),
            None => self.said.message().await.ok().flatten(),
        }
    }

    async fn say(&mut self, told: ProcessingResponse) -> Result<(), Over> {
        self.tell.send(Ok(told)).await.map_err(|_| Over::Gone)
    }
}

/// A request that was sent on, and its answer. It has a place at its replica until this is dropped.
struct Passing {
    gateway: Arc<Gateway>,
    picked: Picked,
    access: Access,
    tail: Tail,
}

impl Passing {
    fn begin(gateway: &Arc<Gateway>, picked: Picked, access: Access) -> Self {
        Self { gateway: Arc::clone(gateway), picked, access, tail: Tail::default() }
    }

    /// Lets everything pass until the answer has ended, or the other side says nothing more.
    async fn run(mut self, talk: &mut Talk) -> Result<(), Over> {
        let modes = talk.modes;
        while let Some(said) = talk.next().await.and_then(|message| message.said) {
            let is_answered = self.ends(&said);
            for told in self.pass(said, modes) {
                talk.say(told).await?;
            }
            if is_answered {
                self.ended();
                return Ok(());
            }
        }
        Ok(())
    }

    fn ends(&self, said: &Said) -> bool {
        match said {
            Said::ResponseHeaders(head) => head.end_of_stream,
            Said::ResponseBody(body) => body.end_of_stream,
            Said::ResponseTrailers(_) => true,
            Said::RequestHeaders(_) | Said::RequestBody(_) | Said::RequestTrailers(_) => false,
        }
    }

    fn ended(&mut self) {
        if self.access.status == StatusCode::OK.as_u16() {
            self.access.usage = self.access.usage.and(self.tail.usage());
        }
        self.access.whole();
    }

    fn pass(&mut self, said: Said, modes: Modes) -> Vec<ProcessingResponse> {
        match said {
            Said::RequestHeaders(_) => Vec::new(),
            Said::RequestBody(part) => {
                words::pass_body(Told::RequestBody, modes.request, part.body, part.end_of_stream)
            }
            Said::RequestTrailers(_) => vec![words::pass(Told::RequestTrailers(TrailersResponse {}))],
            Said::ResponseHeaders(head) => vec![self.answered(&head, modes)],
            Said::ResponseBody(part) => {
                self.picked.flight.prefilled();
                self.picked.flight.vital().heard(self.gateway.now_ms());
                self.access.passed(part.body.len());
                self.tail.pass(&part.body);
                words::pass_body(Told::ResponseBody, modes.response, part.body, part.end_of_stream)
            }
            Said::ResponseTrailers(_) => vec![words::pass(Told::ResponseTrailers(TrailersResponse {}))],
        }
    }

    /// The head of the answer came.
    fn answered(&mut self, head: &HttpHeaders, modes: Modes) -> ProcessingResponse {
        if let Some((status, headers)) = words::response_head(head) {
            let (flight, now_ms) = (&mut self.picked.flight, self.gateway.now_ms());
            self.access.answered(status.as_u16());
            self.access.usage = Usage::of_head(&headers);
            if is_in_its_place(status, &headers) {
                flight.vital().breaker(|breaker| breaker.failed(now_ms));
            } else {
                flight.vital().heard(now_ms);
                flight.vital().breaker(|breaker| breaker.answered());
            }
            if modes.response == BodySendMode::None {
                // More is not said of it: how it ends, nobody knows.
                self.access.whole();
                flight.prefilled();
            } else if !is_stream(&headers) {
                flight.prefilled();
            }
        }
        match &self.picked.reasons {
            Some(reasons) => words::pass_with(Told::ResponseHeaders, &ROUTE, reasons),
            None => words::pass(Told::ResponseHeaders(Answer::default())),
        }
    }
}

/// Whether an answer is what a proxy says in the place of a replica that it could not reach: replicas do not put errors in plain text.
fn is_in_its_place(status: StatusCode, headers: &HeaderMap) -> bool {
    let is_plain = |kind: &HeaderValue| kind.as_bytes().starts_with(b"text/plain");
    let could_not = [StatusCode::BAD_GATEWAY, StatusCode::SERVICE_UNAVAILABLE, StatusCode::GATEWAY_TIMEOUT];
    could_not.contains(&status) && headers.get(CONTENT_TYPE).is_some_and(is_plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proxy_that_says_nothing_of_bodies_sends_them_in_full_duplex() {
        let duplex = BodySendMode::FullDuplexStreamed;
        assert_eq!(Modes::of(None), Modes { request: duplex, response: duplex });
        let said = ProtocolConfiguration { request_body_mode: 2, response_body_mode: 0 };
        assert_eq!(Modes::of(Some(said)), Modes { request: BodySendMode::Buffered, response: BodySendMode::None });
    }

    #[test]
    fn what_a_proxy_says_for_a_replica_is_told_from_what_a_replica_says() {
        let with = |kind: &'static str| HeaderMap::from_iter([(CONTENT_TYPE, HeaderValue::from_static(kind))]);
        for (status, kind, expected) in [
            (503, "text/plain", true),
            (504, "text/plain; charset=utf-8", true),
            (503, "application/json", false),
            (500, "text/plain", false),
            (200, "text/plain", false),
        ] {
            let status = StatusCode::from_u16(status).unwrap();
            assert_eq!(is_in_its_place(status, &with(kind)), expected, "{status} {kind}");
        }
    }
}
