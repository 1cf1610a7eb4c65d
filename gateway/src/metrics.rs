//! What the gateway counts: families `stoker_gateway_*` in Prometheus' text form.

use prometheus::{
    CounterVec, Encoder, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec,
    Opts, Registry, TextEncoder,
};

/// From 100 µs to a minute.
const SECONDS: [f64; 14] = [1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 20.0, 30.0, 60.0];
/// From 1 µs to 10 ms.
const DECISION_SECONDS: [f64; 9] = [1e-6, 3e-6, 1e-5, 2e-5, 5e-5, 1e-4, 3e-4, 1e-3, 1e-2];

/// See the module.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    /// Requests by deployment and status.
    pub requests: IntCounterVec,
    /// Time to the head of an answer, by deployment.
    pub head_seconds: HistogramVec,
    /// Choices by their reason.
    pub routes: IntCounterVec,
    /// Time for a choice.
    pub route_seconds: Histogram,
    /// Prompt tokens by what was thought of them: cached or not.
    pub prompt_tokens: IntCounterVec,
    /// Replicas that were asked and gave no answer for the client, by why.
    pub failed_attempts: IntCounterVec,
    /// Requests not sent again because too many were.
    pub retries_refused: IntCounter,
    /// Answers that were cut by the loss of a replica.
    pub cut: IntCounterVec,
    /// Streams that went on elsewhere when their replica was lost, by whether their text is what it would have been.
    pub resumed: IntCounterVec,
    /// From the last that came of a replica that was lost to the next byte of its answer.
    pub resume_seconds: Histogram,
    /// Bytes of requests that are kept so that their streams can go on elsewhere.
    pub kept_bytes: IntGauge,
    /// Spans that reach no collector.
    pub spans_dropped: IntCounter,
    /// Requests being answered.
    pub in_flight: IntGauge,
    /// Requests of tenants, by status.
    pub tenant_requests: IntCounterVec,
    /// Tokens of tenants: of prompts, of these cached, and of answers.
    pub tenant_tokens: IntCounterVec,
    /// Device seconds of tenants.
    pub tenant_device_seconds: CounterVec,
    /// Requests that were over a limit of their tenant, by which one.
    pub tenant_limited: IntCounterVec,
    /// Requests without a tenant's key or token.
    pub refused_keys: IntCounter,
    /// Tokens of issuers, by what came of them.
    pub tokens: IntCounterVec,
    /// 1: keys of the issuer cannot be read, and the last stay.
    pub issuer_stale: IntGaugeVec,
    /// 1: the file of tenants cannot be read, and those of before may ask.
    pub tenants_stale: IntGauge,
    /// Requests in line, by deployment and tenant.
    pub waiting: IntGaugeVec,
    /// Requests in line while no replica of their deployment takes any.
    pub held: IntGaugeVec,
    /// Time in line, of those that were there.
    pub wait_seconds: HistogramVec,
    /// Time in line of those that came while no replica took requests.
    pub held_seconds: HistogramVec,
    /// Requests refused because of the line, by why.
    pub shed: IntCounterVec,
    /// Replicas by deployment and state.
    pub replicas: IntGaugeVec,
    /// Replicas that serve and do not answer, by deployment.
    pub broken: IntGaugeVec,
    /// 1 for each of these, by deployment and pod.
    pub circuit_open: IntGaugeVec,
    /// Replicas that say what they hold, by deployment.
    pub heard: IntGaugeVec,
    /// Other gateways that say what they have on replicas.
    pub peers: IntGauge,
    /// Beginnings of prompts that are remembered, by how it is known who holds them.
    pub prefixes: IntGaugeVec,
    /// Choices of a replica that holds a part of the prompt, by how that is known.
    pub prefix: IntCounterVec,
    /// What replicas said of what they hold: beginnings stored and removed, answers with all of it, and answers that did not follow.
    pub kv_events: IntCounterVec,
    /// Questions to the operator, by how they ended.
    pub feed: IntCounterVec,
    /// Since the operator answered last.
    pub feed_age_seconds: IntGauge,
}

impl Metrics {
    /// Registers all families.
    pub fn new() -> prometheus::Result<Self> {
        let registry = Registry::new();
        let named = |name: &str, help: &str| Opts::new(format!("stoker_gateway_{name}"), help);
        let counters = |name: &str, help: &str, labels: &[&str]| {
            let family = IntCounterVec::new(named(name, help), labels)?;
            registry.register(Box::new(family.clone())).map(|()| family)
        };
        let gauges = |name: &str, help: &str, labels: &[&str]| {
            let family = IntGaugeVec::new(named(name, help), labels)?;
            registry.register(Box::new(family.clone())).map(|()| family)
        };
        let gauge = |name: &str, help: &str| {
            let family = IntGauge::with_opts(named(name, help))?;
            registry.register(Box::new(family.clone())).map(|()| family)
        };
        let histogram =
            |name: &str, help: &str, buckets: &[f64]| HistogramOpts::from(named(name, help)).buckets(buckets.to_vec());
        let head_seconds =
            HistogramVec::new(histogram("head_seconds", "Time to the head of an answer", &SECONDS), &["deployment"])?;
        let route_seconds =
            Histogram::with_opts(histogram("route_seconds", "Time for the choice of a replica", &DECISION_SECONDS))?;
        let retries_refused =
            IntCounter::with_opts(named("retries_refused_total", "Requests not sent again because too many were"))?;
        registry.register(Box::new(head_seconds.clone()))?;
        registry.register(Box::new(route_seconds.clone()))?;
        let wait_seconds = HistogramVec::new(
            histogram("wait_seconds", "Time in line, of requests that could not begin at once", &SECONDS),
            &["deployment"],
        )?;
        registry.register(Box::new(wait_seconds.clone()))?;
        let tenant_device_seconds = CounterVec::new(
            named(
                "tenant_device_seconds_total",
                "Time that replicas' devices spent on tenants' requests, times the devices",
            ),
            &["tenant"],
        )?;
        registry.register(Box::new(tenant_device_seconds.clone()))?;
        let held_seconds = HistogramVec::new(
            histogram("held_seconds", "Time in line, of requests that came while no replica took any", &SECONDS),
            &["deployment"],
        )?;
        registry.register(Box::new(held_seconds.clone()))?;
        let resume_seconds = Histogram::with_opts(histogram(
            "resume_seconds",
            "From the loss of a replica to the next byte of its answer",
            &SECONDS,
        ))?;
        registry.register(Box::new(resume_seconds.clone()))?;
        registry.register(Box::new(retries_refused.clone()))?;
        let spans_dropped = IntCounter::with_opts(named(
            "trace_spans_dropped_total",
            "Spans that did not reach the collector of traces",
        ))?;
        registry.register(Box::new(spans_dropped.clone()))?;
        let refused_keys =
            IntCounter::with_opts(named("refused_keys_total", "Requests without the key or token of a tenant"))?;
        registry.register(Box::new(refused_keys.clone()))?;
        Ok(Self {
            requests: counters("requests_total", "Requests by deployment and status", &["deployment", "code"])?,
            routes: counters("routes_total", "Choices of a replica by their reason", &["deployment", "reason"])?,
            prompt_tokens: counters(
                "prompt_tokens_total",
                "Prompt tokens, estimated, by whether they were thought to be cached",
                &["deployment", "kind"],
            )?,
            failed_attempts: counters(
                "failed_attempts_total",
                "Replicas asked that gave no answer for the client, by why",
                &["deployment", "why"],
            )?,
            cut: counters("answers_cut_total", "Answers that were cut by the loss of a replica", &["deployment"])?,
            resumed: counters(
                "resumed_total",
                "Streams that went on elsewhere when their replica was lost, by whether the text is certain to be the same",
                &["deployment", "exact"],
            )?,
            resume_seconds,
            spans_dropped,
            kept_bytes: gauge(
                "kept_bytes",
                "Bytes of requests that are kept so that their streams can go on elsewhere",
            )?,
            in_flight: gauge("requests_in_flight", "Requests being answered")?,
            tenant_requests: counters("tenant_requests_total", "Requests of tenants by status", &["tenant", "code"])?,
            tenant_tokens: counters("tenant_tokens_total", "Tokens of tenants by kind", &["tenant", "kind"])?,
            tenant_device_seconds,
            tenant_limited: counters(
                "tenant_limited_total",
                "Requests over a limit of their tenant, by which one",
                &["tenant", "limit"],
            )?,
            tenants_stale: gauge("tenants_stale", "1: the file of tenants cannot be read, those of before may ask")?,
            refused_keys,
            tokens: counters(
                "tokens_total",
                "Tokens of issuers: verified by their signature, remembered from before, refused",
                &["outcome"],
            )?,
            issuer_stale: gauges(
                "issuer_keys_stale",
                "1: keys of the issuer cannot be read, the last stay",
                &["issuer"],
            )?,
            waiting: gauges("waiting", "Requests in line", &["deployment", "tenant"])?,
            held: gauges("held", "Requests in line while no replica takes any", &["deployment"])?,
            wait_seconds,
            held_seconds,
            shed: counters("shed_total", "Requests refused because of the line, by why", &["deployment", "reason"])?,
            replicas: gauges("replicas", "Replicas by state", &["deployment", "state"])?,
            broken: gauges("replicas_broken", "Replicas that serve and do not answer", &["deployment"])?,
            circuit_open: gauges(
                "circuit_open",
                "1: this replica should serve and does not answer, so that nothing is sent there",
                &["deployment", "pod"],
            )?,
            heard: gauges("replicas_heard", "Replicas that say which prefixes they hold", &["deployment"])?,
            peers: gauge("peers", "Other gateways that say what they have on replicas")?,
            prefixes: gauges(
                "prefixes",
                "Beginnings of prompts that are remembered, by how it is known who holds them",
                &["source"],
            )?,
            prefix: counters(
                "prefix_total",
                "Choices of a replica that holds a part of the prompt, by how that is known",
                &["deployment", "source"],
            )?,
            kv_events: counters(
                "kv_events_total",
                "What replicas said of the prefixes that they hold: stored, removed; whole: all of them at once; gap: lost or out of order",
                &["kind"],
            )?,
            feed: counters("feed_total", "Questions to the operator by how they ended", &["outcome"])?,
            feed_age_seconds: gauge("feed_age_seconds", "Since the operator answered last")?,
            head_seconds,
            route_seconds,
            retries_refused,
            registry,
        })
    }

    /// All families as text.
    pub fn render(&self) -> prometheus::Result<String> {
        let mut text = Vec::new();
        TextEncoder::new().encode(&self.registry.gather(), &mut text)?;
        Ok(String::from_utf8_lossy(&text).into_owned())
    }
}
