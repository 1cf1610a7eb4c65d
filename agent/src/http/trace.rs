//! A request as a part of a trace: whose trace it is, how long it took and what it came to. Written down when the request is over, if there
//! is a collector. Decides nothing about requests.

use std::time::{Duration, SystemTime};

use axum::{
    extract::{MatchedPath, Request},
    http::HeaderMap,
};
use serde_json::Value;
use stoker_engine::{FinishReason, RequestEvent};

use crate::spans::{Span, SpanKind, SpanLine};

/// A trace that somebody began, as W3C's `traceparent: 00-TRACE-PARENT-FLAGS` names it.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Parent {
    /// 32 hexadecimal digits.
    pub(crate) trace_id: String,
    span_id: String,
    /// Whether it is written down by who began it.
    is_sampled: bool,
}

impl Parent {
    /// What the headers say; only what looks like a trace.
    pub(crate) fn of(headers: &HeaderMap) -> Option<Self> {
        let sent = headers.get("traceparent")?.to_str().ok()?;
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
pub(crate) struct RequestSpan {
    line: SpanLine,
    span: Span,
}

impl RequestSpan {
    /// Begins now. `None` without a collector, and for a trace that its beginner does not write down.
    pub(crate) fn begin(line: Option<&SpanLine>, request: &Request, model: &str) -> Option<Self> {
        let line = line?.clone();
        let parent = Parent::of(request.headers());
        if parent.as_ref().is_some_and(|parent| !parent.is_sampled) {
            return None;
        }
        let path = request.extensions().get::<MatchedPath>().map_or(request.uri().path(), MatchedPath::as_str);
        let now = SystemTime::now();
        let mut attributes = vec![
            ("http.request.method", Value::from(request.method().as_str())),
            ("http.route", path.into()),
            ("gen_ai.provider.name", "stoker".into()),
            ("gen_ai.response.model", model.into()),
        ];
        let id = request.headers().get("x-request-id").and_then(|id| id.to_str().ok());
        attributes.extend(id.map(|id| ("gen_ai.request.id", id.into())));
        let span = Span {
            trace_id: parent
                .as_ref()
                .map_or_else(|| format!("{:032x}", rand::random::<u128>()), |of| of.trace_id.clone()),
            span_id: drawn_id(),
            parent_id: parent.map(|parent| parent.span_id),
            name: format!("{} {path}", request.method()),
            kind: SpanKind::Server,
            began: now,
            ended: now,
            attributes,
            error: None,
        };
        Some(Self { line, span })
    }

    /// Takes in what becomes of one of its completions: each is a part of it.
    pub(crate) fn note(&mut self, index: u32, event: &RequestEvent) {
        let RequestEvent::Finished { reason, usage, timing, .. } = event else { return };
        let now = SystemTime::now();
        let took = timing.map_or(Duration::ZERO, |timing| Duration::from_secs_f64(timing.e2e_seconds.max(0.0)));
        let error = match reason {
            FinishReason::Error(reason) => Some(reason.clone()),
            FinishReason::Stop | FinishReason::Length | FinishReason::Abort => None,
        };
        let mut attributes = vec![
            ("gen_ai.choice.index", Value::from(index)),
            ("gen_ai.usage.input_tokens", usage.prompt_tokens.into()),
            ("gen_ai.usage.cache_read.input_tokens", usage.cached_tokens.into()),
            ("gen_ai.usage.output_tokens", usage.completion_tokens.into()),
        ];
        attributes.extend(finish_word(reason).map(|word| ("gen_ai.response.finish_reasons", word.into())));
        attributes.extend(timing.iter().flat_map(|timing| {
            [
                ("gen_ai.latency.time_in_queue", timing.queue_seconds.into()),
                ("gen_ai.latency.time_to_first_token", timing.ttft_seconds.into()),
                ("gen_ai.latency.e2e", timing.e2e_seconds.into()),
            ]
        }));
        self.span.error = self.span.error.take().or_else(|| error.clone());
        self.line.send(Span {
            trace_id: self.span.trace_id.clone(),
            span_id: drawn_id(),
            parent_id: Some(self.span.span_id.clone()),
            name: "generate".into(),
            kind: SpanKind::Internal,
            began: now - took,
            ended: now,
            attributes,
            error,
        });
    }
}

impl Drop for RequestSpan {
    fn drop(&mut self) {
        self.line.send(Span { ended: SystemTime::now(), ..self.span.clone() });
    }
}

fn finish_word(reason: &FinishReason) -> Option<&'static str> {
    match reason {
        FinishReason::Stop => Some("stop"),
        FinishReason::Length => Some("length"),
        FinishReason::Abort => Some("abort"),
        FinishReason::Error(_) => None,
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
