//! What a gateway says of a request beside the client's own words, and what it is told beside the answer, so that another replica can
//! go on with an answer whose replica is lost. It grants nothing: a seed, an answer's name and a prompt of tokens are any client's to choose.
//!
//! ```text
//! x-stoker-drawn: SEED-ID-CREATED   what must be the same wherever the request is answered; asks for marks in its stream
//! x-stoker-resume: N                the first N bytes of the body say what was told of the answer already, as JSON
//! x-stoker-whole: marks             of an answer that is not streamed: its marks come before it, so that it can go on elsewhere, too
//! x-stoker-prefixes: BYTES END:NAME...  what gateways call beginnings of its prompt, to hear which of them are cached ([`Prefixes`])
//! x-stoker-salt: NAME               whose request it is: prompts cached for others are not for it
//! x-stoker-tenant: NAME             whose request it is: what is kept for others is not found by it (`responses/owner.rs`)
//! x-stoker-account: GATEWAY         who asks what the tenant's requests had of devices' time that no answer told (`accounts.rs`)
//! x-stoker-device-seconds: marks    marks are to tell what choices had of their devices' time (`device_time.rs`)
//! x-stoker-model: VOCABULARY-BITS   of an answer: whose tokens it tells, and with which bits logits are computed ("" if not promised)
//! ```
//! Marks are comments, one behind all that is written at a time: what has no mark behind it was not said.
//!
//! ```text
//! : stoker opened                 what opens the answer
//! : stoker INDEX CACHED TOKEN...  more of a choice: its new tokens; of its prompt, so many were cached. CACHED/MICROS where it is asked for:
//!                                 what this replica's devices did for the choice by then, in microseconds
//! : stoker INDEX end              the end of a choice
//! : stoker done                   the end of the answer
//! : stoker elsewhere              this replica ends it; another one may go on
//! : stoker broken                 its engine stopped; another one may go on, unless the answer is what stops engines
//! : stoker failed STATUS          the end of an answer that is not streamed: what stands before is an error of this status
//! : stoker                        nothing that matters
//! ```

use std::{fmt::Write, sync::Arc, time::Duration};

use axum::http::{HeaderMap, HeaderName, StatusCode};
use bytes::Bytes;
use jiff::{Timestamp, Zoned, tz::TimeZone};
use serde::Deserialize;
use stoker_crds::{accounts::ACCOUNT_HEADER, kv_events::PREFIXES_HEADER};
use stoker_engine::{Resume, TokenId};

use crate::{
    http::{device_time::DEVICE_SECONDS, error::ApiError, prefixes::Prefixes},
    replica::ReplicaEnd,
};

const DRAWN: HeaderName = HeaderName::from_static("x-stoker-drawn");
const WHOLE: HeaderName = HeaderName::from_static("x-stoker-whole");
const PREFIXES: HeaderName = HeaderName::from_static(PREFIXES_HEADER);
const ACCOUNT: HeaderName = HeaderName::from_static(ACCOUNT_HEADER);
/// The tenant that a gateway found by its key, which it keeps to itself.
pub(crate) const TENANT: HeaderName = HeaderName::from_static("x-stoker-tenant");
const SALT: HeaderName = HeaderName::from_static("x-stoker-salt");
const RESUME: HeaderName = HeaderName::from_static("x-stoker-resume");
/// See the module.
pub(crate) const MODEL: HeaderName = HeaderName::from_static("x-stoker-model");
/// What is told of one answer at most: more than a million tokens' ids.
pub(crate) const TOLD_BYTES_MAX: usize = 8 << 20;

/// How a request came.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Passage {
    /// What was drawn for it; then its stream has marks.
    pub(crate) drawn: Option<Drawn>,
    /// What was told of its answer.
    pub(crate) told: Option<Told>,
    /// Whose it is.
    pub(crate) salt: Option<Arc<str>>,
    /// Whether its answer has marks where it is not streamed, too.
    pub(crate) tells_whole: bool,
    /// Whether marks tell device time.
    pub(crate) tells_device_time: bool,
    /// What gateways call beginnings of its prompt.
    pub(crate) prefixes: Prefixes,
}

/// What chance or a clock would decide here.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Drawn {
    /// For sampling, if the client names none.
    pub(crate) seed: u64,
    /// The answer's name, without what says its kind.
    pub(crate) id: String,
    /// Unix time in seconds.
    pub(crate) created: u64,
}

/// What a client has of an answer.
#[derive(Clone, Debug, Deserialize, PartialEq)]
pub(crate) struct Told {
    /// Of the tokens: the first half of `x-stoker-model`.
    vocabulary: String,
    choices: Vec<ToldChoice>,
}

/// What a client has of a choice.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
struct ToldChoice {
    tokens: Vec<TokenId>,
    cached: u32,
    ended: bool,
}

/// Longer names are nobody's: gateways and their tenants have shorter ones.
const NAME_BYTES_MAX: usize = 64;

/// The gateway that asks for accounts and the tenant whose request it is, if both are named.
pub(crate) fn accounted(headers: &HeaderMap) -> Option<(&str, &str)> {
    let name = |name: HeaderName| headers.get(name)?.to_str().ok().filter(|name| name.len() <= NAME_BYTES_MAX);
    Some((name(ACCOUNT)?, name(TENANT)?))
}

impl Passage {
    /// What the headers say, and how many bytes of the body are told.
    pub(crate) fn of(headers: &HeaderMap) -> Result<(Self, usize), ApiError> {
        let text = |name: HeaderName| headers.get(&name).map(|value| value.to_str().unwrap_or_default());
        let drawn = match text(DRAWN) {
            Some(drawn) => Some(Drawn::parse(drawn).ok_or_else(|| malformed("x-stoker-drawn is SEED-ID-CREATED"))?),
            None => None,
        };
        let n_bytes = match text(RESUME) {
            Some(sent) if drawn.is_some() => sent.parse().ok().filter(|n_bytes| (1..=TOLD_BYTES_MAX).contains(n_bytes)),
            Some(_) => None,
            None => Some(0),
        };
        let n_bytes =
            n_bytes.ok_or_else(|| malformed("x-stoker-resume is a number of bytes, beside x-stoker-drawn"))?;
        let salt = text(SALT).filter(|salt| !salt.is_empty()).map(Arc::from);
        let tells_whole = drawn.is_some() && text(WHOLE) == Some("marks");
        let tells_device_time = text(DEVICE_SECONDS) == Some("marks");
        let prefixes = match text(PREFIXES) {
            Some(sent) => Prefixes::parse(sent)
                .ok_or_else(|| malformed("x-stoker-prefixes is BYTES END:NAME END:NAME..., with ends that rise"))?,
            None => Prefixes::default(),
        };
        Ok((Self { drawn, told: None, salt, tells_whole, tells_device_time, prefixes }, n_bytes))
    }

    /// Takes what is told off the body.
    pub(crate) fn take_told(&mut self, body: &mut Bytes, n_bytes: usize) -> Result<(), ApiError> {
        if n_bytes == 0 {
            return Ok(());
        }
        if body.len() < n_bytes {
            return Err(malformed("the body is shorter than x-stoker-resume says"));
        }
        let told = serde_json::from_slice(&body.split_to(n_bytes));
        self.told = Some(told.map_err(|error| malformed(&format!("what was told of the answer: {error}")))?);
        Ok(())
    }

    /// Whether its stream has marks.
    pub(crate) fn is_marked(&self) -> bool {
        self.drawn.is_some()
    }

    /// Refuses tokens of another vocabulary, and more choices than there are. Nothing may have been told of some.
    pub(crate) fn check(&self, vocabulary: &str, n_choices: usize) -> Result<(), ApiError> {
        let Some(told) = &self.told else { return Ok(()) };
        if told.vocabulary == vocabulary && told.choices.len() <= n_choices {
            return Ok(());
        }
        let message =
            format!("this replica cannot go on with an answer of another model, or of {} choices", told.choices.len());
        Err(ApiError::new(StatusCode::CONFLICT, "resume_mismatch", message))
    }

    /// Where a choice goes on.
    pub(crate) fn resume(&self, index: usize) -> Option<Resume> {
        let ToldChoice { tokens, cached, ended } = self.told.as_ref()?.choices.get(index)?.clone();
        let has_begun = ended || !tokens.is_empty();
        has_begun.then_some(Resume { tokens, cached_tokens: cached, has_ended: ended })
    }
}

impl Drawn {
    /// The date that a prompt may name: it is part of the prompt.
    pub(crate) fn when(&self) -> Option<Zoned> {
        let now = Timestamp::from_second(i64::try_from(self.created).ok()?).ok()?;
        Some(now.to_zoned(TimeZone::system()))
    }

    fn parse(text: &str) -> Option<Self> {
        let mut parts = text.split('-');
        let (seed, id, created) = (parts.next()?, parts.next()?, parts.next()?);
        let is_id = id.len() == 32 && id.bytes().all(|byte| byte.is_ascii_hexdigit());
        let seed = u64::from_str_radix(seed, 16).ok()?;
        let drawn = Self { seed, id: id.to_owned(), created: created.parse().ok()? };
        (is_id && parts.next().is_none()).then_some(drawn)
    }
}

fn malformed(what: &str) -> ApiError {
    ApiError::new(StatusCode::BAD_REQUEST, "malformed_passage", what)
}

/// What stands behind a piece of a stream. See the module.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Mark {
    Opened,
    More { index: u32, cached: u32, device_time: Option<Duration>, tokens: Vec<TokenId> },
    End { index: u32 },
    Done,
    Elsewhere,
    Broken,
    Failed { status: StatusCode },
    Nothing,
}

impl Mark {
    /// What the replica's own end is.
    pub(crate) fn of_end(end: ReplicaEnd) -> Self {
        match end {
            ReplicaEnd::Left => Self::Elsewhere,
            ReplicaEnd::EngineDied => Self::Broken,
        }
    }

    /// The piece with its mark.
    pub(crate) fn behind(&self, frames: &Bytes) -> Bytes {
        let mut line = String::from(": stoker");
        // Writing to a string does not fail.
        let _ = match self {
            Self::Opened => write!(line, " opened"),
            Self::More { index, cached, device_time, tokens } => {
                let head = match device_time {
                    Some(time) => write!(line, " {index} {cached}/{}", time.as_micros()),
                    None => write!(line, " {index} {cached}"),
                };
                tokens.iter().try_fold(head, |_, token| Ok(write!(line, " {token}"))).and_then(|last| last)
            }
            Self::End { index } => write!(line, " {index} end"),
            Self::Done => write!(line, " done"),
            Self::Elsewhere => write!(line, " elsewhere"),
            Self::Broken => write!(line, " broken"),
            Self::Failed { status } => write!(line, " failed {}", status.as_u16()),
            Self::Nothing => Ok(()),
        };
        line.push('\n');
        [frames.as_ref(), line.as_bytes()].concat().into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "0123456789abcdef0123456789abcdef";

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        pairs.iter().map(|(name, value)| (HeaderName::from_static(name), value.parse().unwrap())).collect()
    }

    #[test]
    fn a_passage_is_read_whole_or_refused() {
        let drawn = format!("ff-{ID}-7");
        let (passage, n_bytes) =
            Passage::of(&headers(&[("x-stoker-drawn", &drawn), ("x-stoker-resume", "5")])).unwrap();
        assert_eq!((passage.drawn, n_bytes), (Some(Drawn { seed: 255, id: ID.into(), created: 7 }), 5));
        assert_eq!(Passage::of(&HeaderMap::new()).unwrap(), (Passage::default(), 0));
        let long = format!("{ID}0");
        for (drawn, resume) in [
            ("", "1"),
            ("ff", "1"),
            (&format!("fg-{ID}-7"), "1"),
            (&format!("ff-{long}-7"), "1"),
            (&format!("ff-{ID}-7-8"), "1"),
            (&drawn, "0"),
            (&drawn, "-1"),
            (&drawn, "99999999999999999999"),
        ] {
            let sent = headers(&[("x-stoker-drawn", drawn), ("x-stoker-resume", resume)]);
            assert_eq!(Passage::of(&sent).unwrap_err().code, "malformed_passage", "{drawn} {resume}");
        }
        assert!(Passage::of(&headers(&[("x-stoker-resume", "5")])).is_err(), "alone it says too little");
    }

    #[test]
    fn what_was_told_is_taken_off_the_body() {
        let told = r#"{"vocabulary":"v","choices":[{"tokens":[5,6],"cached":3,"ended":false},{"tokens":[],"cached":0,"ended":false}]}"#;
        let mut body = Bytes::from(format!("{told}{{\"n\":2}}"));
        let mut passage = Passage::default();
        passage.take_told(&mut body, told.len()).unwrap();
        assert_eq!(body, r#"{"n":2}"#);
        assert_eq!(passage.resume(0), Some(Resume { tokens: vec![5, 6], cached_tokens: 3, has_ended: false }));
        assert_eq!((passage.resume(1), passage.resume(2)), (None, None), "nothing was told of these");
        assert!(passage.check("v", 2).is_ok());
        assert!(passage.check("w", 2).is_err() && passage.check("v", 1).is_err());
        for (body, n_bytes) in [("{}", 2), ("{", 1), ("", 5)] {
            assert!(Passage::default().take_told(&mut Bytes::from(body), n_bytes).is_err(), "{body}");
        }
    }

    #[test]
    fn marks_are_comments() {
        let frames = Bytes::from("data: 1\n\n");
        let text = |mark: Mark| String::from_utf8(mark.behind(&frames).to_vec()).unwrap();
        let more = |device_time| Mark::More { index: 1, cached: 32, device_time, tokens: vec![7, 8] };
        assert_eq!(text(more(None)), "data: 1\n\n: stoker 1 32 7 8\n");
        assert_eq!(text(more(Some(Duration::from_nanos(1_234_567)))), "data: 1\n\n: stoker 1 32/1234 7 8\n");
        assert_eq!(text(Mark::End { index: 0 }), "data: 1\n\n: stoker 0 end\n");
        assert_eq!(text(Mark::Nothing), "data: 1\n\n: stoker\n");
    }
}
