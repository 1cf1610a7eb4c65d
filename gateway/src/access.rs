//! The one line in the log that each request has, written when its answer has ended, however it did, and its span, if there is a collector
//! of traces. No prompt and no key is in either.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use axum::http::{HeaderMap, HeaderValue, Method};
use stoker_edge::trace::{Asked, Parent, ServerSpan};

use crate::{gateway::Gateway, metrics::Metrics, permit::Permit, tenants::Tenant, usage::Usage};

/// A replica that was lost with an answer that goes on.
struct Loss {
    pod: String,
    why: String,
    /// What came from it last, came then.
    heard: Instant,
    known: Instant,
}

/// What is said of a request. Writes its line when it is dropped.
pub struct Access {
    metrics: Arc<Metrics>,
    begun: Instant,
    method: Method,
    path: String,
    request_id: HeaderValue,
    trace_id: String,
    span: Option<ServerSpan>,
    /// `NAME.NAMESPACE` of the deployment that was asked.
    pub deployment: String,
    /// Pod of the replica that answered.
    pub pod: String,
    /// Why that one.
    pub reason: &'static str,
    /// Replicas that were asked.
    pub attempts: u32,
    /// Time in line, before the first of them.
    pub line_time: Duration,
    /// Status of the answer; 0: there was none.
    pub status: u16,
    /// Replicas that were lost in the middle of the answer.
    pub resumes: u32,
    /// What the answer cost.
    pub usage: Usage,
    tenant: Option<Arc<Tenant>>,
    permit: Option<Permit>,
    /// Whose loss its client waits out.
    loss: Option<Loss>,
    n_bytes: u64,
    head_seconds: f64,
    ending: &'static str,
}

impl Access {
    /// A request came.
    pub fn begin(gateway: &Gateway, method: Method, path: &str, headers: &HeaderMap, request_id: HeaderValue) -> Self {
        gateway.metrics.in_flight.inc();
        let span = ServerSpan::begin(gateway.spans(), Asked { method: &method, route: path, headers });
        Self {
            metrics: Arc::clone(&gateway.metrics),
            begun: Instant::now(),
            method,
            path: path.to_owned(),
            request_id,
            trace_id: Parent::of(headers).map_or_else(String::new, |parent| parent.trace_id),
            span,
            deployment: String::new(),
            pod: String::new(),
            reason: "",
            attempts: 0,
            line_time: Duration::ZERO,
            status: 0,
            resumes: 0,
            usage: Usage::default(),
            tenant: None,
            permit: None,
            loss: None,
            n_bytes: 0,
            head_seconds: 0.0,
            ending: "left",
        }
    }

    /// What replicas are told of the trace, if they are to know themselves as a part of this; else they are told what came.
    pub fn traceparent(&self) -> Option<HeaderValue> {
        self.span.as_ref().map(ServerSpan::traceparent)
    }

    /// It is this tenant's.
    pub fn asked_by(&mut self, tenant: Option<&Arc<Tenant>>) {
        self.tenant = tenant.cloned();
    }

    /// It is within its tenant's limits.
    pub fn permitted(&mut self, permit: Option<Permit>) {
        self.permit = permit;
    }

    /// The head of the answer is there.
    pub fn answered(&mut self, status: u16) {
        self.status = status;
        self.head_seconds = self.begun.elapsed().as_secs_f64();
    }

    /// Bytes of a replica's answer came.
    pub fn passed(&mut self, n_bytes: usize) {
        self.n_bytes += n_bytes as u64;
    }

    /// Its replica was lost, of which it heard last then. Of several before anything comes the first counts: the client waits since.
    pub fn lost(&mut self, why: &str, heard: Instant) {
        let pod = &self.pod;
        tracing::warn!(pod, why, "a replica was lost before the end of its answer");
        self.loss.get_or_insert_with(|| Loss { pod: pod.clone(), why: why.to_owned(), heard, known: Instant::now() });
    }

    /// Its replica was lost, and this one goes on.
    pub fn goes_on(&mut self, pod: &str, is_exact: bool) {
        let exact = if is_exact { "true" } else { "false" };
        self.metrics.resumed.with_label_values(&[self.deployment.as_str(), exact]).inc();
        self.resumes += 1;
        self.pod = pod.to_owned();
    }

    /// Something came: if a replica was lost before, its client waited for this since it had heard of that one.
    pub fn came(&mut self) {
        let Some(Loss { pod, why, heard, known }) = self.loss.take() else { return };
        self.metrics.resume_seconds.observe(heard.elapsed().as_secs_f64());
        let millis = |time: Duration| time.as_millis() as u64;
        tracing::info!(
            lost = pod,
            why,
            pod = self.pod,
            gap_ms = millis(heard.elapsed()),
            search_ms = millis(known.elapsed()),
            "an answer goes on elsewhere"
        );
    }

    /// The answer ended as it should.
    pub fn whole(&mut self) {
        self.ending = "whole";
    }

    /// The replica was lost in the middle of it.
    pub fn cut(&mut self) {
        self.ending = "cut";
        self.metrics.cut.with_label_values(&[&self.deployment]).inc();
    }
}

impl Access {
    /// What its span says of it.
    fn end_span(&mut self, code: u16, tenant: &str) {
        let Some(mut span) = self.span.take() else { return };
        if self.line_time > Duration::ZERO {
            span.know([("stoker.line_seconds", self.line_time.as_secs_f64().into())]);
        }
        if self.head_seconds > 0.0 {
            span.know([("stoker.head_seconds", self.head_seconds.into())]);
        }
        span.know(self.usage.device_time.map(|time| ("stoker.device_seconds", time.as_secs_f64().into())));
        let texts = [
            ("stoker.deployment", self.deployment.as_str()),
            ("stoker.pod", &self.pod),
            ("stoker.reason", self.reason),
            ("stoker.tenant", tenant),
            ("stoker.ending", self.ending),
            ("gen_ai.request.id", self.request_id.to_str().unwrap_or_default()),
        ];
        span.know(texts.into_iter().filter(|(_, text)| !text.is_empty()).map(|(key, text)| (key, text.into())));
        span.know([
            ("http.response.status_code", code.into()),
            ("stoker.attempts", self.attempts.into()),
            ("stoker.resumes", self.resumes.into()),
            ("gen_ai.usage.input_tokens", self.usage.prompt_tokens.into()),
            ("gen_ai.usage.cache_read.input_tokens", self.usage.cached_tokens.into()),
            ("gen_ai.usage.output_tokens", self.usage.completion_tokens.into()),
        ]);
        if self.ending == "cut" {
            span.fail("the replica was lost in the middle of the answer".to_owned());
        } else if code >= 500 {
            span.fail(format!("answered {code}"));
        }
    }
}

impl Drop for Access {
    fn drop(&mut self) {
        self.metrics.in_flight.dec();
        // Of a client that left before there was an answer, as common proxies count it.
        let code = if self.status == 0 { 499 } else { self.status };
        self.metrics.requests.with_label_values(&[self.deployment.as_str(), &code.to_string()]).inc();
        if self.head_seconds > 0.0 {
            self.metrics.head_seconds.with_label_values(&[&self.deployment]).observe(self.head_seconds);
        }
        let of = self.tenant.clone();
        let tenant = of.as_ref().map_or("", |tenant| tenant.name.as_str());
        self.end_span(code, tenant);
        if !tenant.is_empty() {
            self.metrics.tenant_requests.with_label_values(&[tenant, &code.to_string()]).inc();
        }
        if let Some(permit) = self.permit.take() {
            permit.end(&self.usage);
        }
        let device_seconds = self.usage.device_time.map(|time| time.as_secs_f64());
        tracing::info!(
            tenant,
            prompt_tokens = self.usage.prompt_tokens,
            cached_tokens = self.usage.cached_tokens,
            completion_tokens = self.usage.completion_tokens,
            device_seconds,
            method = %self.method,
            path = self.path,
            status = code,
            deployment = self.deployment,
            pod = self.pod,
            reason = self.reason,
            attempts = self.attempts,
            resumes = self.resumes,
            bytes = self.n_bytes,
            line_seconds = self.line_time.as_secs_f64(),
            head_seconds = self.head_seconds,
            seconds = self.begun.elapsed().as_secs_f64(),
            ending = self.ending,
            request_id = self.request_id.to_str().unwrap_or_default(),
            trace_id = self.trace_id,
            "request"
        );
    }
}
