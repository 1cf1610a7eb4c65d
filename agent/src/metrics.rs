//! Prometheus metrics: our own families (`stoker_*`, buckets fine enough for a step of a few milliseconds) and the vLLM
//! families that dashboards and inference gateways scrape (D18). Owns the registry; readings come in by argument.

use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

use prometheus::{
    Gauge, GaugeVec, Histogram, HistogramOpts, IntCounter, IntCounterVec, IntGauge, Opts, Registry, TextEncoder,
    core::Collector,
};
use stoker_crds::contract::{AgentPhase, KV_BLOCK_TOKENS, LoadReport};
use stoker_engine::{EngineLoad, RequestSample, Samples, grammar::Source};

/// Seconds from 0.5 ms to 2 min: a token of a small model takes 1 ms, a long prompt on a CPU minutes.
const FINE_SECONDS: [f64; 24] = [
    0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0,
    2.0, 5.0, 10.0, 30.0, 60.0, 120.0,
];
/// vLLM's buckets, so that dashboards made for it add up across servers.
const VLLM_TTFT: [f64; 22] = [
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
];
const VLLM_ITL: [f64; 19] =
    [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0];
const VLLM_REQUEST: [f64; 21] = [
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
];
const VLLM_STEP: [f64; 13] = [1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0];
const VLLM_N: [f64; 5] = [1.0, 2.0, 5.0, 10.0, 20.0];
/// Powers of two up to a million tokens.
const TOKENS: [f64; 21] = [
    1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 32768.0,
    65536.0, 131072.0, 262144.0, 524288.0, 1048576.0,
];

/// Every metric of this process.
pub struct Metrics {
    registry: Registry,
    own: OwnFamilies,
    vllm: VllmFamilies,
    /// Totals are raised to the engine's: two writers at once would count an increase twice.
    raising: Mutex<()>,
}

/// Counters of what answers are made of.
#[derive(Clone, Debug)]
pub struct AnswerMeters {
    /// Tool calls that ended.
    pub complete_calls: IntCounter,
    /// Tool calls that the end of the answer cut off.
    pub cut_off_calls: IntCounter,
    /// Choices with reasoning.
    pub reasoning: IntCounter,
}

struct OwnFamilies {
    http_requests: IntCounterVec,
    phase: GaugeVec,
    load_progress: Gauge,
    start_seconds: Gauge,
    stalled_seconds: Gauge,
    kv_blocks: GaugeVec,
    waiting_prefill_tokens: IntGauge,
    prefix_queried: IntCounter,
    prefix_hit: IntCounter,
    prefix_evicted: IntCounter,
    grammars: IntCounterVec,
    grammar_seconds: Histogram,
    grammar_memory_bytes: IntGauge,
    forced_tokens: IntCounter,
    tool_calls: IntCounterVec,
    reasoning_answers: IntCounter,
    kv_events: IntCounterVec,
    spans_dropped: IntCounter,
    given_bytes: IntCounter,
    ttft: Histogram,
    itl: Histogram,
    e2e: Histogram,
    queue: Histogram,
}

struct VllmFamilies {
    running: IntGauge,
    waiting: IntGauge,
    kv_usage: Gauge,
    cache_config: GaugeVec,
    preemptions: IntCounter,
    prompt_tokens: IntCounter,
    generation_tokens: IntCounter,
    prefix_queries: IntCounter,
    prefix_hits: IntCounter,
    prompt_tokens_cached: IntCounter,
    request_success: IntCounterVec,
    ttft: Histogram,
    itl: Histogram,
    iteration_tokens: Histogram,
    params_n: Histogram,
    request: VllmRequestFamilies,
}

/// Of requests that ended.
struct VllmRequestFamilies {
    e2e: Histogram,
    queue: Histogram,
    inference: Histogram,
    prefill: Histogram,
    decode: Histogram,
    per_token: Histogram,
    prompt_tokens: Histogram,
    prefill_computed: Histogram,
    generation_tokens: Histogram,
    max_generation_tokens: Histogram,
    params_max_tokens: Histogram,
    preemptions: Histogram,
}

impl Metrics {
    /// All families at zero.
    pub fn new(model_name: &str) -> Self {
        let register = Registration { registry: Registry::new(), model_name };
        let (own, vllm) = (OwnFamilies::new(&register), VllmFamilies::new(&register));
        Self { registry: register.registry, own, vllm, raising: Mutex::new(()) }
    }

    /// Counts an answered request by its route and status.
    pub fn http_request(&self, path: &str, status: u16) {
        self.own.http_requests.with_label_values(&[path, &status.to_string()]).inc();
    }

    /// What counts tool calls and reasoning.
    pub fn answers(&self) -> AnswerMeters {
        let calls = |outcome| self.own.tool_calls.with_label_values(&[outcome]);
        AnswerMeters {
            complete_calls: calls("complete"),
            cut_off_calls: calls("cut_off"),
            reasoning: self.own.reasoning_answers.clone(),
        }
    }

    /// What counts changes of the prefix cache, by their kind.
    pub fn kv_events(&self) -> IntCounterVec {
        self.own.kv_events.clone()
    }

    /// What counts spans that reach no collector.
    pub fn spans_dropped(&self) -> IntCounter {
        self.own.spans_dropped.clone()
    }

    /// What counts bytes of the model that others were given.
    pub fn given_bytes(&self) -> IntCounter {
        self.own.given_bytes.clone()
    }

    /// Counts a grammar that a request asked for.
    pub fn grammar(&self, source: Source, took: Duration) {
        let outcome = match source {
            Source::Compiled => "compiled",
            Source::Cached => "cached",
        };
        self.own.grammars.with_label_values(&[outcome]).inc();
        self.own.grammar_seconds.observe(took.as_secs_f64());
    }

    /// Counts a grammar that was refused.
    pub fn grammar_refused(&self) {
        self.own.grammars.with_label_values(&["refused"]).inc();
    }

    /// Notes what all grammars hold.
    pub fn grammars_hold(&self, bytes: usize) {
        self.own.grammar_memory_bytes.set(bytes as i64);
    }

    /// Notes how long the start took.
    pub fn loaded(&self, took: Duration) {
        self.own.start_seconds.set(took.as_secs_f64());
    }

    /// Takes over the engine's totals and the latencies since the last call.
    pub fn observe(&self, load: &EngineLoad, samples: &Samples) {
        let _raising = self.raising.lock().unwrap_or_else(PoisonError::into_inner);
        self.own.raise(load);
        self.vllm.raise(load);
        for seconds in &samples.ttft {
            self.own.ttft.observe(*seconds);
            self.vllm.ttft.observe(*seconds);
        }
        for seconds in &samples.itl {
            self.own.itl.observe(*seconds);
            self.vllm.itl.observe(*seconds);
        }
        for request in &samples.requests {
            self.own.request(request);
            self.vllm.request.observe(request);
        }
        for step in &samples.steps {
            self.vllm.iteration_tokens.observe(step.n_tokens as f64);
        }
    }

    /// Counts a request by the completions that it asked for.
    pub fn asked(&self, n: u32) {
        self.vllm.params_n.observe(n.into());
    }

    /// The text form, with the gauges of this reading.
    pub fn text(&self, report: &LoadReport) -> String {
        self.own.set(report);
        self.vllm.set(report);
        TextEncoder::new().encode_to_string(&self.registry.gather()).expect("metric names and labels are valid")
    }
}

impl OwnFamilies {
    fn new(register: &Registration<'_>) -> Self {
        Self {
            http_requests: register.own_counter_vec(
                "stoker_http_requests_total",
                "HTTP requests answered, by route and status",
                &["path", "status"],
            ),
            phase: register.own_gauge_vec("stoker_phase", "1 for the phase the replica is in", &["phase"]),
            load_progress: register.own_gauge("stoker_load_progress", "Progress of loading the model, 0 to 1"),
            start_seconds: register.own_gauge("stoker_start_seconds", "From process start to ready"),
            stalled_seconds: register.own_gauge(
                "stoker_stalled_seconds",
                "Since the last completed step while work was waiting; 0 when idle",
            ),
            kv_blocks: register.own_gauge_vec(
                "stoker_kv_blocks",
                "KV blocks: referenced by sequences, cached (held by the prefix cache only), free",
                &["state"],
            ),
            waiting_prefill_tokens: register.own_int_gauge(
                "stoker_waiting_prefill_tokens",
                "Prompt tokens of waiting requests that still need prefill",
            ),
            prefix_queried: register
                .own_counter("stoker_prefix_cache_queried_tokens_total", "Prompt tokens looked up in the prefix cache"),
            prefix_hit: register
                .own_counter("stoker_prefix_cache_hit_tokens_total", "Prompt tokens that the prefix cache held"),
            prefix_evicted: register.own_counter(
                "stoker_prefix_cache_evicted_blocks_total",
                "KV blocks of the prefix cache that were given to something else",
            ),
            grammars: register.own_counter_vec(
                "stoker_grammars_total",
                "Grammars that requests asked for: compiled, found in the cache, refused",
                &["outcome"],
            ),
            grammar_seconds: register.own_seconds("stoker_grammar_seconds", "Time a request waited for its grammar"),
            grammar_memory_bytes: register.own_int_gauge(
                "stoker_grammar_memory_bytes",
                "What grammars hold in memory, about: those of requests, and those kept for the next",
            ),
            forced_tokens: register.own_counter(
                "stoker_forced_tokens_total",
                "Tokens that grammars left no choice of, and that took no draw",
            ),
            tool_calls: register.own_counter_vec(
                "stoker_tool_calls_total",
                "Tool calls in answers: complete, or cut off by the answer's end",
                &["outcome"],
            ),
            kv_events: register.own_counter_vec(
                "stoker_kv_events_total",
                "Beginnings of prompts that the prefix cache got and gave up, as gateways are told; lost: all were told anew",
                &["kind"],
            ),
            given_bytes: register
                .own_counter("stoker_weights_given_bytes_total", "Bytes of the model that other replicas were given"),
            spans_dropped: register
                .own_counter("stoker_trace_spans_dropped_total", "Spans that did not reach the collector of traces"),
            reasoning_answers: register
                .own_counter("stoker_reasoning_answers_total", "Choices of chat answers that began with reasoning"),
            ttft: register.own_seconds("stoker_time_to_first_token_seconds", "From submission to the first token"),
            itl: register.own_seconds("stoker_inter_token_latency_seconds", "Between two tokens of one sequence"),
            e2e: register.own_seconds("stoker_e2e_request_latency_seconds", "From submission to the last token"),
            queue: register.own_seconds("stoker_request_queue_time_seconds", "From submission to the first step"),
        }
    }

    fn request(&self, request: &RequestSample) {
        self.e2e.observe(request.e2e_seconds);
        if let Some(seconds) = request.queue_seconds {
            self.queue.observe(seconds);
        }
    }

    fn raise(&self, load: &EngineLoad) {
        raise(&self.prefix_queried, load.prefix_query_tokens);
        raise(&self.prefix_hit, load.prefix_hit_tokens);
        raise(&self.prefix_evicted, load.prefix_evicted_blocks);
        raise(&self.forced_tokens, load.forced_tokens);
    }

    fn set(&self, report: &LoadReport) {
        for (phase, name) in PHASES {
            self.phase.with_label_values(&[name]).set(f64::from(u8::from(report.phase == phase)));
        }
        for (state, blocks) in
            [("referenced", report.referenced_blocks), ("cached", report.cached_blocks), ("free", report.free_blocks)]
        {
            self.kv_blocks.with_label_values(&[state]).set(f64::from(blocks));
        }
        self.load_progress.set(report.load_progress);
        self.stalled_seconds.set(report.stalled_seconds);
        self.waiting_prefill_tokens.set(report.waiting_prefill_tokens as i64);
    }
}

const PHASES: [(AgentPhase, &str); 6] = [
    (AgentPhase::Loading, "loading"),
    (AgentPhase::Ready, "ready"),
    (AgentPhase::Withdrawing, "withdrawing"),
    (AgentPhase::Draining, "draining"),
    (AgentPhase::Empty, "empty"),
    (AgentPhase::Failed, "failed"),
];

impl VllmFamilies {
    fn new(register: &Registration<'_>) -> Self {
        Self {
            running: register.vllm_gauge("vllm:num_requests_running", "Sequences being computed"),
            waiting: register.vllm_gauge("vllm:num_requests_waiting", "Requests waiting to be computed"),
            kv_usage: register.vllm_ratio("vllm:kv_cache_usage_perc", "Referenced part of the KV cache, 0 to 1"),
            cache_config: register.vllm_info(
                "vllm:cache_config_info",
                "Sizes of the KV cache",
                &["block_size", "num_gpu_blocks"],
            ),
            preemptions: register.vllm_counter("vllm:num_preemptions_total", "Preemptions since start"),
            prompt_tokens: register.vllm_counter("vllm:prompt_tokens_total", "Prompt tokens since start"),
            generation_tokens: register.vllm_counter("vllm:generation_tokens_total", "Tokens generated since start"),
            prefix_queries: register.vllm_counter("vllm:prefix_cache_queries_total", "Prompt tokens looked up"),
            prefix_hits: register.vllm_counter("vllm:prefix_cache_hits_total", "Prompt tokens found"),
            prompt_tokens_cached: register
                .vllm_counter("vllm:prompt_tokens_cached_total", "Prompt tokens that were not computed since start"),
            request_success: register.vllm_counter_vec(
                "vllm:request_success_total",
                "Requests that ended, by reason",
                &["finished_reason"],
            ),
            ttft: register.vllm_histogram("vllm:time_to_first_token_seconds", "Time to first token", &VLLM_TTFT),
            itl: register.vllm_histogram("vllm:inter_token_latency_seconds", "Time between tokens", &VLLM_ITL),
            iteration_tokens: register.vllm_histogram("vllm:iteration_tokens_total", "Tokens of a step", &VLLM_STEP),
            params_n: register.vllm_histogram("vllm:request_params_n", "Completions asked for", &VLLM_N),
            request: VllmRequestFamilies::new(register),
        }
    }

    fn raise(&self, load: &EngineLoad) {
        raise(&self.preemptions, load.preemptions);
        raise(&self.prompt_tokens, load.prompt_tokens);
        raise(&self.generation_tokens, load.generation_tokens);
        raise(&self.prefix_queries, load.prefix_query_tokens);
        raise(&self.prefix_hits, load.prefix_hit_tokens);
        raise(&self.prompt_tokens_cached, load.prefix_hit_tokens);
        let ended = &load.finished;
        for (reason, total) in
            [("stop", ended.stop), ("length", ended.length), ("abort", ended.abort), ("error", ended.error)]
        {
            raise(&self.request_success.with_label_values(&[reason]), total);
        }
    }

    fn set(&self, report: &LoadReport) {
        self.running.set(report.running.into());
        self.waiting.set(report.waiting.into());
        // D4: blocks held only by the prefix cache are free.
        let total = report.total_blocks.max(1);
        self.kv_usage.set(f64::from(report.referenced_blocks) / f64::from(total));
        let sizes = [KV_BLOCK_TOKENS.to_string(), report.total_blocks.to_string()];
        self.cache_config.reset();
        self.cache_config.with_label_values(&[&sizes[0], &sizes[1]]).set(1.0);
    }
}

impl VllmRequestFamilies {
    fn new(register: &Registration<'_>) -> Self {
        let seconds = |name, help| register.vllm_histogram(name, help, &VLLM_REQUEST);
        let tokens = |name, help| register.vllm_histogram(name, help, &TOKENS);
        Self {
            e2e: seconds("vllm:e2e_request_latency_seconds", "Time of a request"),
            queue: seconds("vllm:request_queue_time_seconds", "Time in the queue"),
            inference: seconds("vllm:request_inference_time_seconds", "Time behind the queue"),
            prefill: seconds("vllm:request_prefill_time_seconds", "From the first step to the first token"),
            decode: seconds("vllm:request_decode_time_seconds", "From the first token to the end"),
            per_token: register.vllm_histogram(
                "vllm:request_time_per_output_token_seconds",
                "Mean time between the tokens of a request",
                &VLLM_ITL,
            ),
            prompt_tokens: tokens("vllm:request_prompt_tokens", "Tokens of a prompt"),
            prefill_computed: tokens("vllm:request_prefill_kv_computed_tokens", "Tokens of a prompt that no cache had"),
            generation_tokens: tokens("vllm:request_generation_tokens", "Tokens generated for a request"),
            max_generation_tokens: tokens(
                "vllm:request_max_num_generation_tokens",
                "Most tokens generated for one completion of a request: each completion is a request here",
            ),
            params_max_tokens: tokens("vllm:request_params_max_tokens", "Completion tokens at most"),
            preemptions: register.vllm_histogram("vllm:request_num_preemptions", "Preemptions of a request", &VLLM_N),
        }
    }

    fn observe(&self, request: &RequestSample) {
        let RequestSample { usage, max_tokens, queue_seconds, ttft_seconds, e2e_seconds, preemptions, .. } = request;
        self.e2e.observe(*e2e_seconds);
        if let Some(queue) = queue_seconds {
            self.queue.observe(*queue);
            self.inference.observe(e2e_seconds - queue);
        }
        if let Some((queue, ttft)) = queue_seconds.zip(*ttft_seconds) {
            self.prefill.observe(ttft - queue);
            self.decode.observe(e2e_seconds - ttft);
            if usage.completion_tokens > 1 {
                self.per_token.observe((e2e_seconds - ttft) / f64::from(usage.completion_tokens - 1));
            }
        }
        self.prompt_tokens.observe(usage.prompt_tokens.into());
        self.prefill_computed.observe(usage.prompt_tokens.saturating_sub(usage.cached_tokens).into());
        self.generation_tokens.observe(usage.completion_tokens.into());
        self.max_generation_tokens.observe(usage.completion_tokens.into());
        self.params_max_tokens.observe((*max_tokens).into());
        self.preemptions.observe((*preemptions).into());
    }
}

/// Raises a counter to a total that another component keeps.
fn raise(counter: &IntCounter, total: u64) {
    counter.inc_by(total.saturating_sub(counter.get()));
}

/// Makes families and enters them into the registry. The vLLM ones carry the labels vLLM gives them.
struct Registration<'a> {
    registry: Registry,
    model_name: &'a str,
}

impl Registration<'_> {
    fn own_counter_vec(&self, name: &str, help: &str, labels: &[&str]) -> IntCounterVec {
        self.enter(IntCounterVec::new(Opts::new(name, help), labels))
    }

    fn own_counter(&self, name: &str, help: &str) -> IntCounter {
        self.enter(IntCounter::with_opts(Opts::new(name, help)))
    }

    fn own_gauge(&self, name: &str, help: &str) -> Gauge {
        self.enter(Gauge::with_opts(Opts::new(name, help)))
    }

    fn own_int_gauge(&self, name: &str, help: &str) -> IntGauge {
        self.enter(IntGauge::with_opts(Opts::new(name, help)))
    }

    fn own_gauge_vec(&self, name: &str, help: &str, labels: &[&str]) -> GaugeVec {
        self.enter(GaugeVec::new(Opts::new(name, help), labels))
    }

    fn own_seconds(&self, name: &str, help: &str) -> Histogram {
        self.enter(Histogram::with_opts(HistogramOpts::new(name, help).buckets(FINE_SECONDS.to_vec())))
    }

    fn vllm_gauge(&self, name: &str, help: &str) -> IntGauge {
        self.enter(IntGauge::with_opts(self.vllm(name, help)))
    }

    fn vllm_ratio(&self, name: &str, help: &str) -> Gauge {
        self.enter(Gauge::with_opts(self.vllm(name, help)))
    }

    fn vllm_info(&self, name: &str, help: &str, labels: &[&str]) -> GaugeVec {
        self.enter(GaugeVec::new(self.vllm(name, help), labels))
    }

    fn vllm_counter(&self, name: &str, help: &str) -> IntCounter {
        self.enter(IntCounter::with_opts(self.vllm(name, help)))
    }

    fn vllm_counter_vec(&self, name: &str, help: &str, labels: &[&str]) -> IntCounterVec {
        self.enter(IntCounterVec::new(self.vllm(name, help), labels))
    }

    fn vllm_histogram(&self, name: &str, help: &str, buckets: &[f64]) -> Histogram {
        let opts = HistogramOpts { common_opts: self.vllm(name, help), buckets: buckets.to_vec() };
        self.enter(Histogram::with_opts(opts))
    }

    fn vllm(&self, name: &str, help: &str) -> Opts {
        Opts::new(name, help).const_label("model_name", self.model_name).const_label("engine", "0")
    }

    fn enter<C: Collector + Clone + 'static>(&self, family: prometheus::Result<C>) -> C {
        let family = family.expect("names and labels are constants of this file");
        self.registry.register(Box::new(family.clone())).expect("every name is used once");
        family
    }
}

#[cfg(test)]
mod tests {
    use stoker_engine::{FinishReason, FinishedCounts, StepTimes, Usage};

    use super::*;

    fn report() -> LoadReport {
        LoadReport {
            running: 3,
            waiting: 2,
            waiting_prefill_tokens: 40,
            referenced_blocks: 5,
            cached_blocks: 2,
            free_blocks: 3,
            preemptions: 1,
            finished: 1,
            ..LoadReport::idle(10)
        }
    }

    fn samples() -> Samples {
        let request = RequestSample {
            reason: FinishReason::Stop,
            usage: Usage { prompt_tokens: 5, completion_tokens: 3, cached_tokens: 1 },
            max_tokens: 16,
            queue_seconds: Some(0.25),
            ttft_seconds: Some(0.5),
            e2e_seconds: 1.0,
            preemptions: 0,
        };
        let step = StepTimes { n_tokens: 7, ..StepTimes::default() };
        Samples {
            ttft: vec![0.01],
            itl: vec![0.004, 0.004],
            requests: vec![request],
            steps: vec![step],
            ..Samples::default()
        }
    }

    #[test]
    fn dashboards_made_for_vllm_find_their_families_and_labels() {
        let metrics = Metrics::new("m");
        let load = EngineLoad {
            prefix_query_tokens: 96,
            prefix_hit_tokens: 80,
            prefix_evicted_blocks: 1,
            ..EngineLoad::default()
        };
        metrics.observe(&load, &samples());
        metrics.asked(3);
        let text = metrics.text(&report());
        for line in [
            "vllm:num_requests_running{engine=\"0\",model_name=\"m\"} 3",
            "vllm:num_requests_waiting{engine=\"0\",model_name=\"m\"} 2",
            "vllm:kv_cache_usage_perc{engine=\"0\",model_name=\"m\"} 0.5",
            "vllm:cache_config_info{block_size=\"16\",engine=\"0\",model_name=\"m\",num_gpu_blocks=\"10\"} 1",
            "vllm:inter_token_latency_seconds_count{engine=\"0\",model_name=\"m\"} 2",
            "vllm:request_success_total{engine=\"0\",finished_reason=\"stop\",model_name=\"m\"} 0",
            "vllm:prompt_tokens_cached_total{engine=\"0\",model_name=\"m\"} 80",
            "vllm:request_inference_time_seconds_sum{engine=\"0\",model_name=\"m\"} 0.75",
            "vllm:request_prefill_time_seconds_sum{engine=\"0\",model_name=\"m\"} 0.25",
            "vllm:request_decode_time_seconds_sum{engine=\"0\",model_name=\"m\"} 0.5",
            "vllm:request_time_per_output_token_seconds_sum{engine=\"0\",model_name=\"m\"} 0.25",
            "vllm:request_prefill_kv_computed_tokens_sum{engine=\"0\",model_name=\"m\"} 4",
            "vllm:request_max_num_generation_tokens_sum{engine=\"0\",model_name=\"m\"} 3",
            "vllm:request_params_max_tokens_sum{engine=\"0\",model_name=\"m\"} 16",
            "vllm:request_params_n_sum{engine=\"0\",model_name=\"m\"} 3",
            "vllm:request_num_preemptions_bucket{engine=\"0\",model_name=\"m\",le=\"1\"} 1",
            "vllm:iteration_tokens_total_sum{engine=\"0\",model_name=\"m\"} 7",
            "stoker_phase{phase=\"ready\"} 1",
            "vllm:prefix_cache_queries_total{engine=\"0\",model_name=\"m\"} 96",
            "vllm:prefix_cache_hits_total{engine=\"0\",model_name=\"m\"} 80",
            "stoker_prefix_cache_queried_tokens_total 96",
            "stoker_prefix_cache_hit_tokens_total 80",
            "stoker_prefix_cache_evicted_blocks_total 1",
            "stoker_kv_blocks{state=\"free\"} 3",
            "stoker_inter_token_latency_seconds_bucket{le=\"0.004\"} 2",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
        }
    }

    #[test]
    fn totals_are_raised_and_never_counted_twice() {
        let metrics = Metrics::new("m");
        let load = EngineLoad {
            prompt_tokens: 7,
            finished: FinishedCounts { stop: 2, ..FinishedCounts::default() },
            ..EngineLoad::default()
        };
        metrics.observe(&load, &Samples::default());
        metrics.observe(&load, &Samples::default());
        assert_eq!(metrics.vllm.prompt_tokens.get(), 7);
        assert_eq!(metrics.vllm.request_success.with_label_values(&["stop"]).get(), 2);
    }
}
