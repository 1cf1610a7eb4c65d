//! A request's span, with what the engine says of it: each of its completions is a part. Decides nothing about requests.

use std::time::Duration;

use axum::extract::{MatchedPath, Request};
use serde_json::Value;
use stoker_edge::{
    spans::SpanLine,
    trace::{Asked, ServerSpan},
};
use stoker_engine::{FinishReason, RequestEvent};

/// The span of a request that is being answered. Dropping it ends it.
pub(crate) struct RequestSpan(ServerSpan);

impl RequestSpan {
    /// Begins now. `None` without a collector, and for a trace that its beginner does not write down.
    pub(crate) fn begin(line: Option<&SpanLine>, request: &Request, model: &str) -> Option<Self> {
        let route = request.extensions().get::<MatchedPath>().map_or(request.uri().path(), MatchedPath::as_str);
        let asked = Asked { method: request.method(), route, headers: request.headers() };
        let mut span = ServerSpan::begin(line, asked)?;
        span.know([("gen_ai.provider.name", "stoker".into()), ("gen_ai.response.model", model.into())]);
        let id = request.headers().get("x-request-id").and_then(|id| id.to_str().ok());
        span.know(id.map(|id| ("gen_ai.request.id", id.into())));
        Some(Self(span))
    }

    /// Takes in what becomes of one of its completions: each is a part of it.
    pub(crate) fn note(&mut self, index: u32, event: &RequestEvent) {
        let RequestEvent::Finished { reason, usage, timing, .. } = event else { return };
        let took = timing.map_or(Duration::ZERO, |timing| Duration::from_secs_f64(timing.e2e_seconds.max(0.0)));
        let error = match reason {
            FinishReason::Unfollowed(reason) | FinishReason::Error(reason) => Some(reason.clone()),
            FinishReason::Expired => Some("its deadline passed before it began".to_owned()),
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
        if let Some(error) = &error {
            self.0.fail(error.clone());
        }
        self.0.part("generate", took, attributes, error);
    }
}

fn finish_word(reason: &FinishReason) -> Option<&'static str> {
    match reason {
        FinishReason::Stop => Some("stop"),
        FinishReason::Length => Some("length"),
        FinishReason::Abort => Some("abort"),
        FinishReason::Expired | FinishReason::Unfollowed(_) | FinishReason::Error(_) => None,
    }
}
