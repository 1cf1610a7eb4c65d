//! Heads of HTTP/1.1: what a request to a replica begins with, and what its answer does. Pure.

use std::io::Write;

use axum::http::{
    HeaderMap, HeaderName, HeaderValue, Method, Response, StatusCode, Version,
    header::{CONNECTION, CONTENT_LENGTH, HOST, TRANSFER_ENCODING},
    request, response,
};
use httparse::{EMPTY_HEADER, Status};

/// A longer head is not read.
const BYTES_MAX: usize = 64 << 10;
/// Headers of an answer at most.
const HEADERS_MAX: usize = 100;

/// How long the body of an answer is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Length {
    /// So many bytes.
    Known(u64),
    /// As its chunks say.
    Chunked,
    /// Until its connection ends.
    UntilClose,
}

/// The head of an answer.
#[derive(Debug)]
pub(super) struct Head {
    /// Status and headers.
    pub(super) parts: response::Parts,
    /// Of the body behind it.
    pub(super) length: Length,
    /// Whether its connection takes another request afterwards.
    pub(super) stays_open: bool,
    /// Bytes of it.
    pub(super) n_bytes: usize,
}

/// Why an answer cannot be read.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum Unreadable {
    /// No HTTP, or a head without bounds.
    #[error("what it answers is not HTTP/1")]
    Head,
    /// It does not say where the body ends.
    #[error("the length of its answer cannot be read")]
    Length,
    /// Chunks that are none.
    #[error("a chunk of its answer cannot be read")]
    Chunk,
}

/// The head of a request with a body of so many bytes. What is about the connection is ours to say.
pub(super) fn written(parts: &request::Parts, authority: &str, n_bytes: usize) -> Vec<u8> {
    let target = parts.uri.path_and_query().map_or("/", |target| target.as_str());
    let mut head = format!("{} {target} HTTP/1.1\r\nhost: {authority}\r\n", parts.method).into_bytes();
    let is_ours = |name: &HeaderName| [HOST, CONTENT_LENGTH, TRANSFER_ENCODING, CONNECTION].contains(name);
    for (name, value) in parts.headers.iter().filter(|(name, _)| !is_ours(name)) {
        for piece in [name.as_str().as_bytes(), b": ", value.as_bytes(), b"\r\n"] {
            head.extend_from_slice(piece);
        }
    }
    if n_bytes > 0 || parts.method == Method::POST {
        // Writing to memory does not fail.
        let _ = write!(head, "content-length: {n_bytes}\r\n");
    }
    head.extend_from_slice(b"\r\n");
    head
}

/// The head at the beginning of these bytes; `None` while there is more to come of it.
pub(super) fn read(bytes: &[u8]) -> Result<Option<Head>, Unreadable> {
    let mut fields = [EMPTY_HEADER; HEADERS_MAX];
    let mut answer = httparse::Response::new(&mut fields);
    let n_bytes = match answer.parse(bytes).map_err(|_| Unreadable::Head)? {
        Status::Complete(n_bytes) => n_bytes,
        Status::Partial if bytes.len() >= BYTES_MAX => return Err(Unreadable::Head),
        Status::Partial => return Ok(None),
    };
    let status = answer.code.and_then(|code| StatusCode::from_u16(code).ok()).ok_or(Unreadable::Head)?;
    if status == StatusCode::SWITCHING_PROTOCOLS {
        // Nobody asked for another one.
        return Err(Unreadable::Head);
    }
    let headers = owned(answer.headers)?;
    let length = length(status, &headers)?;
    let stays_open = answer.version == Some(1) && length != Length::UntilClose && !says_close(&headers);
    let mut parts = Response::new(()).into_parts().0;
    (parts.status, parts.headers, parts.version) = (status, headers, Version::HTTP_11);
    Ok(Some(Head { parts, length, stays_open, n_bytes }))
}

/// Copies: nothing that is kept of an answer keeps what it was read into.
fn owned(fields: &[httparse::Header<'_>]) -> Result<HeaderMap, Unreadable> {
    let mut headers = HeaderMap::with_capacity(fields.len());
    for field in fields {
        let name = HeaderName::from_bytes(field.name.as_bytes()).map_err(|_| Unreadable::Head)?;
        headers.append(name, HeaderValue::from_bytes(field.value).map_err(|_| Unreadable::Head)?);
    }
    Ok(headers)
}

fn length(status: StatusCode, headers: &HeaderMap) -> Result<Length, Unreadable> {
    if status.is_informational() || status == StatusCode::NO_CONTENT || status == StatusCode::NOT_MODIFIED {
        return Ok(Length::Known(0));
    }
    let mut codings = headers.get_all(TRANSFER_ENCODING).iter();
    match (codings.next(), codings.next()) {
        (None, _) => {}
        (Some(coding), None) if coding.as_bytes().eq_ignore_ascii_case(b"chunked") => return Ok(Length::Chunked),
        _ => return Err(Unreadable::Length),
    }
    let mut lengths = headers.get_all(CONTENT_LENGTH).iter();
    let Some(said) = lengths.next() else { return Ok(Length::UntilClose) };
    let is_number = said.as_bytes().iter().all(u8::is_ascii_digit) && lengths.all(|other| other == said);
    let number = said.to_str().ok().and_then(|digits| digits.parse().ok());
    number.filter(|_| is_number).map(Length::Known).ok_or(Unreadable::Length)
}

fn says_close(headers: &HeaderMap) -> bool {
    let values = headers.get_all(CONNECTION).iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).any(|option| option.trim().eq_ignore_ascii_case("close"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(text: &str) -> Result<Option<(u16, Length, bool, usize)>, Unreadable> {
        let found = read(text.as_bytes())?;
        Ok(found.map(|head| (head.parts.status.as_u16(), head.length, head.stays_open, head.n_bytes)))
    }

    #[test]
    fn an_answer_says_how_long_it_is_and_whether_its_connection_stays() {
        for (fields, length, stays_open) in [
            ("content-length: 5\r\n", Length::Known(5), true),
            ("content-length: 5\r\nContent-Length: 5\r\n", Length::Known(5), true),
            ("transfer-encoding: Chunked\r\n", Length::Chunked, true),
            ("transfer-encoding: chunked\r\nconnection: x, Close\r\n", Length::Chunked, false),
            ("", Length::UntilClose, false),
        ] {
            let text = format!("HTTP/1.1 200 OK\r\n{fields}\r\n");
            assert_eq!(head(&format!("{text}body")), Ok(Some((200, length, stays_open, text.len()))), "{fields}");
            assert_eq!(head(&text[..text.len() - 1]), Ok(None), "{fields}");
        }
        assert!(!head("HTTP/1.0 200 OK\r\ncontent-length: 5\r\n\r\n").unwrap().unwrap().2);
        assert_eq!(head("HTTP/1.1 204 No Content\r\n\r\n").unwrap().unwrap().1, Length::Known(0));
    }

    #[test]
    fn an_answer_of_two_meanings_is_not_read() {
        for fields in [
            "content-length: 5\r\ncontent-length: 6\r\n",
            "content-length: +5\r\n",
            "content-length: 99999999999999999999\r\n",
            "transfer-encoding: gzip, chunked\r\n",
            "transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n",
        ] {
            assert_eq!(head(&format!("HTTP/1.1 200 OK\r\n{fields}\r\n")), Err(Unreadable::Length), "{fields}");
        }
        for text in ["SSH-2.0-x\r\n\r\n", "HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\n\r\n"] {
            assert_eq!(head(text), Err(Unreadable::Head), "{text}");
        }
        assert_eq!(head(&format!("HTTP/1.1 200 OK\r\nx: {}", "y".repeat(BYTES_MAX))), Err(Unreadable::Head));
    }

    #[test]
    fn a_request_has_its_headers_and_the_connection_s_are_ours() {
        let request = axum::http::Request::post("http://a:1/v1/x?y=z").header("x-a", "b").header("host", "other");
        let (parts, ()) = request.header("content-length", "9").body(()).unwrap().into_parts();
        let written = String::from_utf8(written(&parts, "a:1", 2)).unwrap();
        assert_eq!(written, "POST /v1/x?y=z HTTP/1.1\r\nhost: a:1\r\nx-a: b\r\ncontent-length: 2\r\n\r\n");
    }
}
