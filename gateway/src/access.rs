//! The one line in the log that each request has, written when its answer has ended, however it did. No prompt and no key is in it.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use axum::http::{HeaderMap, HeaderValue, Method};

use crate::{metrics::Metrics, permit::Permit, tenants::Tenant, usage::Usage};

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
    pub fn begin(
        metrics: Arc<Metrics>,
        method: Method,
        path: &str,
        headers: &HeaderMap,
        request_id: HeaderValue,
    ) -> Self {
        metrics.in_flight.inc();
        Self {
            metrics,
            begun: Instant::now(),
            method,
            path: path.to_owned(),
            request_id,
            trace_id: trace_id(headers).unwrap_or_default().to_owned(),
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

impl Drop for Access {
    fn drop(&mut self) {
        self.metrics.in_flight.dec();
        // Of a client that left before there was an answer, as common proxies count it.
        let code = if self.status == 0 { 499 } else { self.status };
        self.metrics.requests.with_label_values(&[self.deployment.as_str(), &code.to_string()]).inc();
        if self.head_seconds > 0.0 {
            self.metrics.head_seconds.with_label_values(&[&self.deployment]).observe(self.head_seconds);
        }
        let tenant = self.tenant.as_ref().map_or("", |tenant| tenant.name.as_str());
        if !tenant.is_empty() {
            self.metrics.tenant_requests.with_label_values(&[tenant, &code.to_string()]).inc();
        }
        if let Some(permit) = self.permit.take() {
            permit.end(&self.usage);
        }
        tracing::info!(
            tenant,
            prompt_tokens = self.usage.prompt_tokens,
            cached_tokens = self.usage.cached_tokens,
            completion_tokens = self.usage.completion_tokens,
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

/// The trace that a request is part of, as W3C's `traceparent: 00-TRACE-PARENT-FLAGS` names it. It is logged, so only what looks like one.
fn trace_id(headers: &HeaderMap) -> Option<&str> {
    let trace = headers.get("traceparent")?.to_str().ok()?.split('-').nth(1)?;
    let is_hex = trace.len() == 32 && trace.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    is_hex.then_some(trace)
}
