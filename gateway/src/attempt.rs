//! One replica asked once: what came of it, as a value. Whom to ask, and whether again, others decide.

use std::{io, time::Duration};

use axum::http::StatusCode;
use bytes::Bytes;
use http_body_util::{Either, Full};
use hyper::body::Body as _;
use memchr::memmem;

use crate::{
    asked::Asked,
    fleet::{Deployment, Member},
    gateway::{Gateway, Routed},
    headers::is_stream,
    relay::SILENCE,
    search::{Loss, Patience},
    upstream::ReplicaBody,
    usage::Usage,
    vital::{DEAD, Flight, Life, Vital},
};

/// An answer that is not streamed is waited for if it is not longer.
const WHOLE_BYTES_MAX: u64 = 8 << 20;
/// How often somebody who waits for a replica looks whether it has said a word.
const LOOK: Duration = Duration::from_millis(50);

/// An answer of a replica: on its way, or all of it.
pub type Answered = hyper::Response<Either<ReplicaBody, Full<Bytes>>>;

/// What came of asking one replica.
pub enum Attempt {
    /// An answer for the client.
    Answered(Answered, Flight),
    /// It said that another one should be asked.
    Refused(Answered, Flight),
    /// Nothing came back.
    Silent(Silence),
}

/// Why a replica did not answer.
pub enum Silence {
    /// No connection came about, or it stood still before.
    Unreachable(String),
    /// It was lost after the request was sent.
    Lost(Loss, String),
    /// It did not say that it lives, while others spoke. It may be slow: it can be asked again, and has more time then.
    Doubted,
}

impl Silence {
    /// In words.
    pub(crate) fn why(&self) -> &str {
        match self {
            Self::Unreachable(error) | Self::Lost(_, error) => error,
            Self::Doubted => DEAD,
        }
    }
}

/// Asks the replica that was chosen; `told`: to go on behind what was told of the answer.
pub async fn attempt(
    gateway: &Gateway,
    asked: &Asked,
    told: Option<&Bytes>,
    patience: Patience,
    routed: &Routed<'_>,
) -> Attempt {
    // Who alone knows the answer is not left for others.
    let others = Some((routed.deployment, patience)).filter(|_| !asked.follows);
    attempt_at(gateway, asked, told, others, routed.member, routed.choice.terms.uncached_tokens).await
}

/// Waits until a replica has been asked whether it lives, and others have spoken since and it has not for longer than is patience.
async fn doubted(gateway: &Gateway, vital: &Vital, others: Option<(&Deployment, Patience)>) {
    let Some((deployment, patience)) = others else { return std::future::pending().await };
    let is_doubted = || vital.is_silent_for(patience.time(), gateway.now_ms()) && deployment.speaks_louder_than(vital);
    while !is_doubted() {
        tokio::time::sleep(LOOK).await;
    }
}

/// Asks one replica; `others`: who can be asked instead.
pub(crate) async fn attempt_at(
    gateway: &Gateway,
    asked: &Asked,
    told: Option<&Bytes>,
    others: Option<(&Deployment, Patience)>,
    member: &Member,
    prefill_tokens: u32,
) -> Attempt {
    let vital = &member.vital;
    let leaves_at = if others.is_some() { Life::LeftBehind } else { Life::Stalled };
    if vital.life() >= leaves_at {
        return Attempt::Silent(Silence::Unreachable(DEAD.to_owned()));
    }
    let flight = Flight::begin(vital, prefill_tokens);
    let address = member.address.as_deref().unwrap_or_default();
    let request = match asked.to(address, told) {
        Ok(request) => request,
        Err(error) => return Attempt::Silent(Silence::Unreachable(error.to_string())),
    };
    let limit = if asked.streams { SILENCE } else { gateway.settings.answer_timeout };
    let answer = async {
        let response = gateway.send(request).await.map_err(|error| match error.is_connect() {
            true => Silence::Unreachable(chain_of(&error)),
            false => Silence::Lost(Loss::Broken, chain_of(&error)),
        })?;
        vital.heard(gateway.now_ms());
        whole_if_short(response).await.map_err(|error| Silence::Lost(Loss::Broken, chain_of(&error)))
    };
    let silent = || Silence::Lost(Loss::Broken, format!("no answer came within {} s", limit.as_secs()));
    let answer = tokio::select! {
        answer = tokio::time::timeout(limit, answer) => answer.unwrap_or_else(|_| Err(silent())),
        () = vital.falls_to(leaves_at) => Err(Silence::Lost(Loss::Left, DEAD.to_owned())),
        () = doubted(gateway, vital, others) => return Attempt::Silent(Silence::Doubted),
    };
    let response = match answer {
        Ok(response) => response,
        Err(failed) => {
            vital.breaker(|breaker| breaker.failed(gateway.now_ms()));
            return Attempt::Silent(failed);
        }
    };
    match response.extensions().get::<Plight>() {
        Some(plight) => {
            vital.breaker(|breaker| match plight {
                Plight::Ended => breaker.answered(),
                Plight::EngineDied | Plight::NotUp(_) => breaker.failed(gateway.now_ms()),
            });
            return Attempt::Silent(plight.silence());
        }
        None => vital.breaker(|breaker| breaker.answered()),
    }
    match response.status() {
        StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => Attempt::Refused(response, flight),
        StatusCode::NOT_FOUND if asked.follows => Attempt::Refused(response, flight),
        _ => Attempt::Answered(response, flight),
    }
}

/// Why a replica has no answer that says so, in words.
pub(crate) const ENDED_EARLIER: &str = "it ended before the answer did";
/// See [`ENDED_EARLIER`].
pub(crate) const ENGINE_DIED: &str = "its engine stopped";

/// What a replica says of itself in place of an answer, which is nothing for a client as long as another one may answer, or the same one
/// in a moment.
#[derive(Clone, Copy)]
enum Plight {
    /// It had the request, and leaves.
    Ended,
    /// It had the request, and its engine stopped.
    EngineDied,
    /// It did not take the request: its process is new, or is about to end. In words.
    NotUp(&'static str),
}

impl Plight {
    /// How agents say it (`agent/src/http/error.rs`): a text has its quotes escaped, so nothing else of a body reads like one.
    fn of(status: StatusCode, body: &[u8]) -> Option<Self> {
        let says = |code: &str| memmem::find(body, code.as_bytes()).is_some();
        match status {
            StatusCode::INTERNAL_SERVER_ERROR if says("\"engine_died\"") => Some(Self::EngineDied),
            StatusCode::SERVICE_UNAVAILABLE if says("\"replica_ended\"") => Some(Self::Ended),
            StatusCode::SERVICE_UNAVAILABLE if says("\"engine_stopped\"") => Some(Self::NotUp(ENGINE_DIED)),
            StatusCode::SERVICE_UNAVAILABLE if says("\"model_loading\"") => Some(Self::NotUp("it loads its model")),
            StatusCode::SERVICE_UNAVAILABLE if says("\"model_failed\"") => Some(Self::NotUp("its model does not run")),
            _ => None,
        }
    }

    /// What is made of it.
    fn silence(self) -> Silence {
        match self {
            Self::Ended => Silence::Lost(Loss::Left, ENDED_EARLIER.to_owned()),
            Self::EngineDied => Silence::Lost(Loss::Broken, ENGINE_DIED.to_owned()),
            Self::NotUp(why) => Silence::Unreachable(why.to_owned()),
        }
    }
}

/// Waits for all of an answer that was made before its head was sent, so that the request can be sent again if it breaks off.
async fn whole_if_short(response: hyper::Response<ReplicaBody>) -> io::Result<Answered> {
    let (mut parts, body) = response.into_parts();
    let is_short = body.size_hint().exact().is_some_and(|n_bytes| n_bytes <= WHOLE_BYTES_MAX);
    let body = match is_short && !is_stream(&parts.headers) {
        true => {
            let whole = body.whole().await?;
            match parts.status {
                StatusCode::OK => _ = parts.extensions.insert(Usage::of_whole(&whole).unwrap_or_default()),
                status => _ = Plight::of(status, &whole).map(|plight| parts.extensions.insert(plight)),
            }
            Either::Right(Full::new(whole))
        }
        false => Either::Left(body),
    };
    Ok(Answered::from_parts(parts, body))
}

/// An error with its causes: the outermost alone says only that something failed.
fn chain_of(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source());
    std::iter::once(error.to_string()).chain(causes.map(ToString::to_string)).collect::<Vec<_>>().join(": ")
}
