//! A request as a part of a trace: whose trace it is, and the span that it is itself. Written down when the request is over, if there is a
//! collector. Decides nothing about requests.

use std::time::{Duration, SystemTime};

use axum::http::{HeaderMap, HeaderValue, Method};
use serde_json::Value;

use crate::spans::{Span, SpanKind, SpanLine};

/// The header of a trace's context, as W3C has it.
pub const TRACEPARENT: &str = "traceparent";

/// A trace that somebody began, as W3C's `traceparent: 00-TRACE-PARENT-FLAGS` names it.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Parent {
    /// 32 hexadecimal digits.
    pub trace_id: String,
    span_id: String,
    /// Whether it is written down by who began it.
    is_sampled: bool,
}

impl Parent {
    /// What the headers say; only what looks like a trace.
    pub fn of(headers: &HeaderMap) -> Option<Self> {
        let sent = headers.get(TRACEPARENT)?.to_str().ok()?;
        let mut parts = sent.split('-');
        let [version, trace, span, flags] = [parts.next()?, parts.next()?, parts.next()?, parts.next()?];
        let is_hex =
            |text: &str, len| text.len() == len && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        let is_named = |text: &str, len| is_hex(text, len) && text.bytes().any(|byte| byte != b'0');
        let is_whole = is_hex(version, 2) && version != "ff" && is_hex(flags, 2);
        (is_whole && is_named(trace, 32) && is_named(span, 16)).then(|| Self {
            trace_id: trace.to_owned(),
            span_id: span.to_owned(),
            is_sampled: u8::from_str_radix(flags, 16).is_ok_and(|flags| flags & 1 == 1),
        })
    }
}

/// The span of a request that is being answered. Dropping it ends it.
#[derive(Debug)]
pub struct ServerSpan {
    line: SpanLine,
    span: Span,
}

/// What is known of a request when it comes.
#[derive(Clone, Copy, Debug)]
pub struct Asked<'a> {
    /// Its method.
    pub method: &'a Method,
    /// The route that its path is of.
    pub route: &'a str,
    /// Its headers, which may name a trace.
    pub headers: &'a HeaderMap,
}

impl ServerSpan {
    /// Begins now. `None` without a collector, and for a trace that its beginner does not write down.
    pub fn begin(line: Option<&SpanLine>, asked: Asked<'_>) -> Option<Self> {
        let (line, Asked { method, route, headers }) = (line?.clone(), asked);
        let parent = Parent::of(headers);
        if parent.as_ref().is_some_and(|parent| !parent.is_sampled) {
            return None;
        }
        let now = SystemTime::now();
        let drawn_trace = || format!("{:032x}", rand::random::<u128>().max(1));
        let span = Span {
            trace_id: parent.as_ref().map_or_else(drawn_trace, |of| of.trace_id.clone()),
            span_id: drawn_id(),
            parent_id: parent.map(|parent| parent.span_id),
            name: format!("{method} {route}"),
            kind: SpanKind::Server,
            began: now,
            ended: now,
            attributes: vec![("http.request.method", method.as_str().into()), ("http.route", route.into())],
            error: None,
        };
        Some(Self { line, span })
    }

    /// Something more is known of it.
    pub fn know(&mut self, attributes: impl IntoIterator<Item = (&'static str, Value)>) {
        self.span.attributes.extend(attributes);
    }

    /// It failed; of several reasons the first counts.
    pub fn fail(&mut self, error: String) {
        self.span.error.get_or_insert(error);
    }

    /// A part of it ended now that took so long.
    pub fn part(&self, name: &str, took: Duration, attributes: Vec<(&'static str, Value)>, error: Option<String>) {
        let now = SystemTime::now();
        self.line.send(Span {
            trace_id: self.span.trace_id.clone(),
            span_id: drawn_id(),
            parent_id: Some(self.span.span_id.clone()),
            name: name.to_owned(),
            kind: SpanKind::Internal,
            began: now - took,
            ended: now,
            attributes,
            error,
        });
    }

    /// The header for whoever does a part of it in another process.
    pub fn traceparent(&self) -> HeaderValue {
        let Span { trace_id, span_id, .. } = &self.span;
        HeaderValue::from_str(&format!("00-{trace_id}-{span_id}-01")).expect("digits and dashes")
    }
}

impl Drop for ServerSpan {
    fn drop(&mut self) {
        self.line.send(Span { ended: SystemTime::now(), ..self.span.clone() });
    }
}

fn drawn_id() -> String {
    format!("{:016x}", rand::random::<u64>().max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_is_named_by_a_well_formed_header_only() {
        let trace = "4bf92f3577b34da6a3ce929d0e0e4736";
        for (sent, named) in [
            (format!("00-{trace}-00f067aa0ba902b7-01"), Some(true)),
            (format!("00-{trace}-00f067aa0ba902b7-00"), Some(false)),
            (format!("cc-{trace}-00f067aa0ba902b7-01-what-the-future-will-be-like"), Some(true)),
            (format!("ff-{trace}-00f067aa0ba902b7-01"), None),
            (format!("00-{}-00f067aa0ba902b7-01", trace.to_uppercase()), None),
            (format!("00-{trace}-0000000000000000-01"), None),
            (format!("00-{trace}"), None),
            ("00-00000000000000000000000000000000-00f067aa0ba902b7-01".to_owned(), None),
            ("nonsense".to_owned(), None),
        ] {
            let headers = HeaderMap::from_iter([("traceparent".parse().unwrap(), sent.parse().unwrap())]);
            let found = Parent::of(&headers);
            assert!(found.as_ref().is_none_or(|parent| parent.trace_id == trace));
            assert_eq!(found.map(|parent| parent.is_sampled), named, "{sent}");
        }
    }
}
