//! Reads bodies of requests within bounds: of each one's length and time, and of the memory that all take together. Knows nothing of
//! what is in them.

use std::time::Duration;

use axum::{
    body::Body,
    http::{HeaderMap, StatusCode, header},
};
use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use hyper::body::Body as _;
use tokio::{
    sync::{Semaphore, SemaphorePermit},
    time::timeout,
};

use crate::{allocator::note_body, pages::Pages};

/// Largest body, in bytes, where nobody says otherwise. A prompt that fills a context of a million tokens is smaller.
pub const MAX_BYTES: usize = 8 << 20;
/// A body that has not arrived by then is given up.
pub const TIMEOUT: Duration = Duration::from_secs(30);

/// A body above the limit is read to its end up to this many times the limit: a client that still writes would see a broken connection
/// instead of the answer.
const DISCARDED: usize = 8;
/// A shorter body is less than the buffer that it comes in.
const COPIED_BYTES: usize = 16 << 10;
/// What a body has without asking, so that small requests are read however many large ones are.
const FREE_BYTES: usize = 16 << 10;
/// What all together have beyond that, in bytes: 32 of the largest.
pub const ROOM_BYTES: usize = 32 * MAX_BYTES;
const ROOM_KIB: usize = ROOM_BYTES >> 10;

/// Memory is the process's, so its bound is, too.
static ROOM: Semaphore = Semaphore::const_new(ROOM_KIB);

/// Why a body was not read.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum BodyError {
    /// It is compressed.
    #[error("content-encoding {0:?} is not supported: send the body as it is")]
    Encoded(String),
    /// It is too long.
    #[error("the body has at least {received} bytes, the limit is {bytes_max}: send a shorter prompt")]
    TooLarge {
        /// Bytes that came or were announced.
        received: u64,
        /// Bytes that may come.
        bytes_max: usize,
    },
    /// Others have the memory there is for bodies.
    #[error(
        "{} MiB of request bodies are being read at once, and more are not kept: send the request again in a second, or one of at most \
         {} KiB",
        ROOM_KIB >> 10,
        FREE_BYTES >> 10
    )]
    NoRoom,
    /// Its end did not come in time.
    #[error("the body did not arrive within {} s", TIMEOUT.as_secs())]
    Late,
    /// Its connection ended.
    #[error("the body ended early: {0}")]
    Incomplete(String),
}

impl BodyError {
    /// HTTP status.
    pub fn status(&self) -> StatusCode {
        match self {
            Self::Encoded(_) => StatusCode::UNSUPPORTED_MEDIA_TYPE,
            Self::TooLarge { .. } => StatusCode::PAYLOAD_TOO_LARGE,
            Self::NoRoom => StatusCode::TOO_MANY_REQUESTS,
            Self::Late => StatusCode::REQUEST_TIMEOUT,
            Self::Incomplete(_) => StatusCode::BAD_REQUEST,
        }
    }

    /// A word programs can branch on.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Encoded(_) => "unsupported_encoding",
            Self::TooLarge { .. } => "body_too_large",
            Self::NoRoom => "too_many_bodies",
            Self::Late => "body_timeout",
            Self::Incomplete(_) => "incomplete_body",
        }
    }

    /// Seconds after which the same request may be read.
    pub fn retry_after_seconds(&self) -> Option<u32> {
        (*self == Self::NoRoom).then_some(1)
    }
}

/// A body's part of the room of all. It is given back when this is dropped.
#[derive(Debug, Default)]
pub struct Place {
    permit: Option<SemaphorePermit<'static>>,
}

impl Place {
    /// Takes what a body of `n_bytes` needs more than it has.
    ///
    /// # Errors
    ///
    /// [`BodyError::NoRoom`] when others have it.
    pub fn grow(&mut self, n_bytes: usize) -> Result<(), BodyError> {
        let wanted = n_bytes.saturating_sub(FREE_BYTES).div_ceil(1024);
        let held = self.permit.as_ref().map_or(0, SemaphorePermit::num_permits);
        let missing = wanted.saturating_sub(held).min(ROOM_KIB + 1);
        let more = ROOM.try_acquire_many(missing as u32).map_err(|_| BodyError::NoRoom)?;
        match &mut self.permit {
            Some(permit) => permit.merge(more),
            None => self.permit = Some(more),
        }
        Ok(())
    }
}

/// A body that was read, and its place.
#[derive(Debug, Default)]
pub struct Read {
    bytes: Bytes,
    #[expect(dead_code, reason = "it is given back when it is dropped")]
    place: Place,
}

impl Read {
    /// The bytes, which have their place until the last of them is dropped: for who still has to look at them.
    pub fn in_place(self) -> Bytes {
        Bytes::from_owner(self)
    }

    /// The bytes, whose place is for others from now on: for who counts by other means what he keeps.
    pub fn counted_elsewhere(self) -> Bytes {
        self.bytes
    }
}

impl AsRef<[u8]> for Read {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// The body, or why it is refused.
///
/// # Errors
///
/// Each of [`BodyError`].
pub async fn read(headers: &HeaderMap, body: Body, bytes_max: usize) -> Result<Read, BodyError> {
    may_read(headers)?;
    let announced = body.size_hint().lower();
    let discarded_max = bytes_max.saturating_mul(DISCARDED);
    if announced > bytes_max as u64 && (awaits_word(headers) || announced > discarded_max as u64) {
        return Err(BodyError::TooLarge { received: announced, bytes_max });
    }
    timeout(TIMEOUT, collect(body, bytes_max, discarded_max)).await.unwrap_or(Err(BodyError::Late))
}

/// Whether a body comes as it is: a compressed one is told from one that is not JSON.
///
/// # Errors
///
/// [`BodyError::Encoded`].
pub fn may_read(headers: &HeaderMap) -> Result<(), BodyError> {
    match headers.get(header::CONTENT_ENCODING).filter(|encoding| *encoding != "identity") {
        Some(encoding) => Err(BodyError::Encoded(String::from_utf8_lossy(encoding.as_bytes()).into_owned())),
        None => Ok(()),
    }
}

/// Reads what a client still writes of a request that is refused, and keeps none of it. One that waits for a word to begin
/// gets the answer instead.
pub async fn discard(headers: &HeaderMap, body: Body) {
    if !awaits_word(headers) {
        // Whoever is too slow or sends too much may lose the answer: it was refused anyway.
        let _ = timeout(TIMEOUT, collect(body, 0, MAX_BYTES * DISCARDED)).await;
    }
}

async fn collect(mut body: Body, bytes_max: usize, discarded_max: usize) -> Result<Read, BodyError> {
    let announced = body.size_hint().lower().min(bytes_max as u64) as usize;
    let (mut kept, mut received) = (Ok(Kept::default()), 0);
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| BodyError::Incomplete(error.to_string()))?;
        let Ok(data) = frame.into_data() else { continue };
        received += data.len();
        let is_all = received == data.len() && received >= announced && body.is_end_stream();
        if is_all && received <= bytes_max {
            return alone(data);
        }
        if received > discarded_max {
            break;
        }
        kept = kept.and_then(|kept| kept.and(&data, announced, bytes_max));
    }
    note_body(received);
    match received > bytes_max {
        true => Err(BodyError::TooLarge { received: received as u64, bytes_max }),
        false => kept.map(|Kept { bytes, place, .. }| Read { bytes: bytes.freeze(), place }),
    }
}

/// What came of a body so far.
#[derive(Default)]
struct Kept {
    bytes: BytesMut,
    pages: Pages,
    place: Place,
}

impl Kept {
    /// More of it; nothing is kept of one that is too long or has no room.
    fn and(mut self, data: &[u8], announced: usize, bytes_max: usize) -> Result<Self, BodyError> {
        let received = self.bytes.len() + data.len();
        if received > bytes_max {
            return Err(BodyError::TooLarge { received: received as u64, bytes_max });
        }
        self.place.grow(received)?;
        self.bytes.reserve(announced.saturating_sub(self.bytes.len()));
        self.pages.make_ready(self.bytes.len(), data.len(), self.bytes.spare_capacity_mut());
        self.bytes.extend_from_slice(data);
        Ok(self)
    }
}

/// A body that came at once. A short one is copied: it would keep the buffer that its connection reads into for as long as its answer
/// lasts.
fn alone(data: Bytes) -> Result<Read, BodyError> {
    note_body(data.len());
    let mut place = Place::default();
    place.grow(data.len())?;
    let bytes = if data.len() < COPIED_BYTES { Bytes::copy_from_slice(&data) } else { data };
    Ok(Read { bytes, place })
}

/// `Expect: 100-continue`: the client sends its body once it is asked for, which reading it does.
fn awaits_word(headers: &HeaderMap) -> bool {
    headers.get(header::EXPECT).is_some_and(|expected| expected.as_bytes().eq_ignore_ascii_case(b"100-continue"))
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn largest() -> Result<Read, BodyError> {
        read(&HeaderMap::new(), Body::from(vec![b'x'; MAX_BYTES]), MAX_BYTES).await
    }

    /// One test, since the room is one.
    #[tokio::test]
    async fn together_they_have_a_bound_and_the_room_of_who_is_gone_is_there_again() {
        let place = |n_bytes| {
            let mut place = Place::default();
            place.grow(n_bytes).map(|()| place)
        };
        let mut places: Vec<Place> = (0..32).map(|_| place(MAX_BYTES + FREE_BYTES).unwrap()).collect();
        assert!(place(FREE_BYTES).is_ok() && place(FREE_BYTES + 1).is_err());
        assert_eq!(largest().await.unwrap_err(), BodyError::NoRoom);
        places.pop();
        // Until the last part of it is dropped.
        let body = largest().await.unwrap().in_place();
        let part = body.slice(MAX_BYTES - 1..);
        drop(body);
        assert_eq!(largest().await.unwrap_err(), BodyError::NoRoom);
        assert_eq!(part, "x");
        drop(part);
        let bodies = [largest().await.unwrap().counted_elsewhere(), largest().await.unwrap().counted_elsewhere()];
        assert_eq!(bodies.map(|body| body.len()), [MAX_BYTES; 2]);
    }

    #[tokio::test]
    async fn one_has_a_bound_whether_it_is_announced_or_not() {
        let stream = |n_frames: usize| {
            let frames = (0..n_frames).map(|_| Ok::<_, std::io::Error>(Bytes::from_static(&[b'x'; 1000])));
            Body::from_stream(futures::stream::iter(frames.collect::<Vec<_>>()))
        };
        let told = |received| Err(BodyError::TooLarge { received, bytes_max: 2000 });
        let length = |read: Result<Read, BodyError>| read.map(|read| read.counted_elsewhere().len());
        let none = HeaderMap::new();
        assert_eq!(length(read(&none, stream(2), 2000).await), Ok(2000));
        assert_eq!(length(read(&none, stream(3), 2000).await), told(3000));
        assert_eq!(length(read(&none, Body::from(vec![b'x'; 2001]), 2000).await), told(2001));
        // Not read to its end: whoever sends so much may lose the answer.
        assert_eq!(length(read(&none, stream(99), 2000).await), told(17_000));
        let waits = HeaderMap::from_iter([(header::EXPECT, "100-continue".parse().unwrap())]);
        assert_eq!(length(read(&waits, Body::from(vec![b'x'; 2001]), 2000).await), told(2001));
        let packed = HeaderMap::from_iter([(header::CONTENT_ENCODING, "gzip".parse().unwrap())]);
        assert_eq!(length(read(&packed, stream(1), 2000).await), Err(BodyError::Encoded("gzip".into())));
    }
}
