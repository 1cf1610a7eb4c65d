//! Spans on their way to a collector: OTLP over HTTP, in JSON. Off unless an endpoint is named. No request waits for it: what the line
//! does not hold is dropped and counted. Knows no request.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use prometheus::IntCounter;
use serde_json::{Value, json};
use tokio::sync::mpsc::{Receiver, Sender, channel};

/// Spans that wait for the exporter at most.
const LINE_SPANS: usize = 4096;
/// Spans of one message.
const BATCH_SPANS: usize = 512;
/// A span waits no longer for others.
const BATCH_EVERY: Duration = Duration::from_secs(1);
/// A collector that takes longer loses a batch.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Below an endpoint, as OTLP has it.
const PATH: &str = "/v1/traces";

/// What a span is in a trace.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum SpanKind {
    /// A part of a span.
    Internal = 1,
    /// The whole of a request as this process answers it.
    Server = 2,
}

/// A stretch of time in which something was done.
#[derive(Clone, Debug, PartialEq)]
pub struct Span {
    /// 32 hexadecimal digits.
    pub trace_id: String,
    /// 16 hexadecimal digits.
    pub span_id: String,
    /// Of the span that it is a part of.
    pub parent_id: Option<String>,
    /// What was done.
    pub name: String,
    /// See [`SpanKind`].
    pub kind: SpanKind,
    /// Its beginning.
    pub began: SystemTime,
    /// Its end.
    pub ended: SystemTime,
    /// What is known of it: texts and numbers.
    pub attributes: Vec<(&'static str, Value)>,
    /// Why it failed, if it did.
    pub error: Option<String>,
}

/// The near end of the line to the collector.
#[derive(Clone, Debug)]
pub struct SpanLine {
    spans: Sender<Span>,
    dropped: IntCounter,
}

impl SpanLine {
    /// A line to a collector below `endpoint`, for as long as the process lives; `dropped` counts what does not reach it.
    pub fn open(endpoint: &str, service: String, dropped: IntCounter) -> anyhow::Result<Self> {
        // An error means that somebody in this process chose a provider before.
        let _chosen_before = rustls::crypto::ring::default_provider().install_default();
        let url = format!("{}{PATH}", endpoint.trim_end_matches('/'));
        let url = url.parse().with_context(|| format!("{url} is no URL"))?;
        let client = reqwest::Client::builder().timeout(TIMEOUT).build()?;
        let (spans, line) = channel(LINE_SPANS);
        tokio::spawn(export(line, Collector { client, url, service }, dropped.clone()));
        Ok(Self { spans, dropped })
    }

    /// Sends a span some time.
    pub fn send(&self, span: Span) {
        if self.spans.try_send(span).is_err() {
            self.dropped.inc();
        }
    }
}

/// Who takes spans.
struct Collector {
    client: reqwest::Client,
    url: reqwest::Url,
    service: String,
}

async fn export(mut line: Receiver<Span>, collector: Collector, dropped: IntCounter) {
    let mut is_lost = false;
    while let Some(first) = line.recv().await {
        tokio::time::sleep(BATCH_EVERY).await;
        let others = std::iter::from_fn(|| line.try_recv().ok());
        let batch: Vec<Span> = std::iter::once(first).chain(others).take(BATCH_SPANS).collect();
        match collector.take(&batch).await {
            Ok(()) => is_lost = false,
            Err(error) => {
                dropped.inc_by(batch.len() as u64);
                // Once for each time that it goes away.
                if !std::mem::replace(&mut is_lost, true) {
                    tracing::warn!(%error, url = %collector.url, "spans do not reach their collector");
                }
            }
        }
    }
}

impl Collector {
    async fn take(&self, batch: &[Span]) -> Result<(), reqwest::Error> {
        let answer = self.client.post(self.url.clone()).json(&message(&self.service, batch)).send().await?;
        answer.error_for_status().map(drop)
    }
}

/// OTLP's `ExportTraceServiceRequest`.
fn message(service: &str, spans: &[Span]) -> Value {
    let resource = [("service.name", service.into()), ("service.version", env!("CARGO_PKG_VERSION").into())];
    let spans: Vec<Value> = spans.iter().map(written).collect();
    let scope = json!({"name": service, "version": env!("CARGO_PKG_VERSION")});
    json!({"resourceSpans": [{
        "resource": {"attributes": attributes(&resource)}, "scopeSpans": [{"scope": scope, "spans": spans}]}]})
}

fn written(span: &Span) -> Value {
    let mut written = json!({
        "traceId": span.trace_id, "spanId": span.span_id, "name": span.name, "kind": span.kind as u8,
        "startTimeUnixNano": nanos(span.began), "endTimeUnixNano": nanos(span.ended),
        "attributes": attributes(&span.attributes),
    });
    if let Some(parent) = &span.parent_id {
        written["parentSpanId"] = parent.as_str().into();
    }
    if let Some(error) = &span.error {
        written["status"] = json!({"code": 2, "message": error});
    }
    written
}

/// 64 bits are texts in OTLP's JSON.
fn nanos(time: SystemTime) -> String {
    time.duration_since(UNIX_EPOCH).map_or(0, |age| age.as_nanos()).to_string()
}

fn attributes(known: &[(&'static str, Value)]) -> Vec<Value> {
    let value = |value: &Value| match value {
        Value::Number(number) if number.is_f64() => json!({"doubleValue": number}),
        Value::Number(number) => json!({"intValue": number.to_string()}),
        Value::String(text) => json!({"stringValue": text}),
        other => json!({"stringValue": other.to_string()}),
    };
    known.iter().map(|(key, known)| json!({"key": key, "value": value(known)})).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_span_is_written_as_otlp_has_it_in_json() {
        let at = |seconds: f64| UNIX_EPOCH + Duration::from_secs_f64(seconds);
        let span = Span {
            trace_id: "4bf92f3577b34da6a3ce929d0e0e4736".into(),
            span_id: "00f067aa0ba902b7".into(),
            parent_id: Some("53995c3f42cd8ad8".into()),
            name: "POST /v1/completions".into(),
            kind: SpanKind::Server,
            began: at(1.5),
            ended: at(2.0),
            attributes: vec![("n", 3.into()), ("seconds", 0.25.into()), ("model", "m".into())],
            error: Some("it broke".into()),
        };
        let expected = json!({
            "traceId": "4bf92f3577b34da6a3ce929d0e0e4736", "spanId": "00f067aa0ba902b7",
            "parentSpanId": "53995c3f42cd8ad8", "name": "POST /v1/completions", "kind": 2,
            "startTimeUnixNano": "1500000000", "endTimeUnixNano": "2000000000",
            "attributes": [
                {"key": "n", "value": {"intValue": "3"}},
                {"key": "seconds", "value": {"doubleValue": 0.25}},
                {"key": "model", "value": {"stringValue": "m"}},
            ],
            "status": {"code": 2, "message": "it broke"},
        });
        let message = message("s", &[span]);
        assert_eq!(message["resourceSpans"][0]["scopeSpans"][0]["spans"], json!([expected]));
        let service = json!({"key": "service.name", "value": {"stringValue": "s"}});
        assert_eq!(message["resourceSpans"][0]["resource"]["attributes"][0], service);
    }

    #[tokio::test]
    async fn what_the_line_does_not_hold_is_counted_and_nobody_waits() {
        let dropped = IntCounter::new("dropped", "spans").unwrap();
        let (spans, _line) = channel(1);
        let line = SpanLine { spans, dropped: dropped.clone() };
        let span = Span {
            trace_id: String::new(),
            span_id: String::new(),
            parent_id: None,
            name: String::new(),
            kind: SpanKind::Internal,
            began: UNIX_EPOCH,
            ended: UNIX_EPOCH,
            attributes: Vec::new(),
            error: None,
        };
        (0..3).for_each(|_| line.send(span.clone()));
        assert_eq!(dropped.get(), 2);
    }
}
