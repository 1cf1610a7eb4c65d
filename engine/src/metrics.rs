//! What the engine measures of itself: gauges after each step, counters, latency samples. Written by the engine and
//! the output thread under one short lock, read by anyone; no request ever waits for a reader.

use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use stoker_cost::{CostMeter, Spent, StepReport, StepWork};

use crate::{
    latency::{LatencyWindow, RateWindow},
    request::{FinishReason, RequestTiming, Usage},
    sched::{Chunk, SchedState, StepPlan},
};

/// Latency samples kept for a reader that does not come; older ones make room and are counted.
const MAX_SAMPLES: usize = 65_536;

/// One reading of the engine.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EngineLoad {
    /// Sequences that hold KV blocks.
    pub running: u32,
    /// Requests waiting for their first step, or preempted.
    pub waiting: u32,
    /// Tokens of waiting requests that need prefill.
    pub waiting_prefill_tokens: u64,
    /// KV blocks in all.
    pub total_blocks: u32,
    /// KV blocks referenced by sequences.
    pub referenced_blocks: u32,
    /// KV blocks held only by the prefix cache.
    pub cached_blocks: u32,
    /// KV blocks that hold nothing.
    pub free_blocks: u32,
    /// Requests taken and not ended.
    pub open_requests: u32,
    /// Preemptions since start.
    pub preemptions: u64,
    /// Steps since start.
    pub steps: u64,
    /// Requests that ended since start, by reason.
    pub finished: FinishedCounts,
    /// Prompt tokens of requests that started, since start.
    pub prompt_tokens: u64,
    /// Of those, tokens looked up in the prefix cache.
    pub prefix_query_tokens: u64,
    /// Of those, tokens that it held.
    pub prefix_hit_tokens: u64,
    /// KV blocks of the prefix cache that were given to something else, since start.
    pub prefix_evicted_blocks: u64,
    /// Tokens generated since start.
    pub generation_tokens: u64,
    /// Of those, tokens that nobody drew: a grammar left nothing else.
    pub forced_tokens: u64,
    /// Median of the time to first token over the last minute.
    pub ttft_p50_seconds: Option<f64>,
    /// 95th percentile of the time to first token over the last minute.
    pub ttft_p95_seconds: Option<f64>,
    /// Median of the inter-token latency over the last minute.
    pub itl_p50_seconds: Option<f64>,
    /// 95th percentile of the inter-token latency over the last minute.
    pub itl_p95_seconds: Option<f64>,
    /// Prefill speed over the last minute, tokens a second of prefill work.
    pub prefill_tokens_per_second: Option<f64>,
    /// What steps cost and what was done.
    pub step_report: StepReport,
    /// Seconds since the last completed step (or since work arrived) while requests are open; 0 when idle.
    pub stalled_seconds: f64,
    /// Steps that had to wait because the output thread was `OUTPUT_QUEUE_MESSAGES` behind, since start.
    pub output_waits: u64,
    /// Why the engine stopped, if it did.
    pub stopped: Option<String>,
}

/// Ended requests by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct FinishedCounts {
    /// End token or stop string.
    pub stop: u64,
    /// `max_tokens` or the context.
    pub length: u64,
    /// The client went away.
    pub abort: u64,
    /// The engine failed or a deadline passed.
    pub error: u64,
}

impl FinishedCounts {
    /// Ended in any way.
    pub fn total(&self) -> u64 {
        self.stop + self.length + self.abort + self.error
    }

    fn count(&mut self, reason: &FinishReason) {
        match reason {
            FinishReason::Stop => self.stop += 1,
            FinishReason::Length => self.length += 1,
            FinishReason::Abort => self.abort += 1,
            FinishReason::Expired | FinishReason::Unfollowed(_) | FinishReason::Error(_) => self.error += 1,
        }
    }
}

/// Latencies since the last call of `take_samples`, for histograms; seconds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Samples {
    /// Time to first token, one a request that got one.
    pub ttft: Vec<f64>,
    /// Time between tokens, one a token after the first.
    pub itl: Vec<f64>,
    /// Requests that ended.
    pub requests: Vec<RequestSample>,
    /// Steps.
    pub steps: Vec<StepTimes>,
    /// Samples that nobody took in time.
    pub dropped: u64,
}

/// Where the time of one step went, in seconds: the engine thread's, and the device's before it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepTimes {
    /// Tokens that it computed.
    pub n_tokens: usize,
    /// Prompt tokens of these; 0: it only decoded.
    pub n_prefill_tokens: usize,
    /// A device's idle time between the step before and this one, if that one was still under way when this one was handed over:
    /// what is lost between two steps that follow each other.
    pub idle_seconds: Option<f64>,
    /// Deciding it.
    pub schedule_seconds: f64,
    /// Handing it to the executor. On a back end that computes with the host's own CPUs, the whole computation.
    pub launch_seconds: f64,
    /// Waiting for its results.
    pub finish_seconds: f64,
    /// Taking them in.
    pub resolve_seconds: f64,
}

/// One ended request.
#[derive(Clone, Debug, PartialEq)]
pub struct RequestSample {
    /// Why it ended.
    pub reason: FinishReason,
    /// Token counts.
    pub usage: Usage,
    /// Completion tokens that it might have had.
    pub max_tokens: u32,
    /// From submission to the first step; `None` if it never started.
    pub queue_seconds: Option<f64>,
    /// From submission to the first token; `None` if there was none.
    pub ttft_seconds: Option<f64>,
    /// From submission to the end.
    pub e2e_seconds: f64,
    /// Times it lost its blocks.
    pub preemptions: u32,
}

impl RequestSample {
    /// The same for who asked.
    pub(crate) fn timing(&self) -> Option<RequestTiming> {
        let (queue_seconds, ttft_seconds) = self.queue_seconds.zip(self.ttft_seconds)?;
        Some(RequestTiming { queue_seconds, ttft_seconds, e2e_seconds: self.e2e_seconds })
    }
}

/// The one place measurements are kept.
#[derive(Debug)]
pub(crate) struct Meters {
    epoch: Instant,
    readings: Mutex<Readings>,
}

#[derive(Debug)]
struct Readings {
    load: EngineLoad,
    ttft: LatencyWindow,
    itl: LatencyWindow,
    prefill: RateWindow,
    samples: Samples,
    cost: Cost,
    /// When a step last completed, or when work arrived at an idle engine.
    last_progress: Instant,
    /// When a step last completed.
    last_step: Instant,
}

/// What steps cost, and what was done.
#[derive(Debug, Default)]
struct Cost {
    meter: CostMeter,
    spent: Spent,
    /// As it was learned in this second: it is asked for with each request.
    learned: Option<(u64, StepReport)>,
}

impl Cost {
    fn step(&mut self, work: StepWork, seconds: f64) {
        self.meter.step(work, seconds);
        self.spent.step(work);
    }

    fn request(&mut self, usage: &Usage, second: u64) {
        let Some(cost) = self.report(second).cost else { return };
        let Usage { prompt_tokens, completion_tokens, cached_tokens } = *usage;
        let (cached, new) = (f64::from(cached_tokens), f64::from(prompt_tokens.saturating_sub(cached_tokens)));
        // The first token of the answer comes with the last of the prompt.
        let answer = StepWork::answer(f64::from(completion_tokens.saturating_sub(1)), f64::from(prompt_tokens));
        self.spent.request(cost.work_seconds(StepWork::prefill(new, cached) + answer));
    }

    fn report(&mut self, second: u64) -> StepReport {
        let learned = match self.learned {
            Some((then, report)) if then == second => report,
            _ => self.meter.report(Spent::default()),
        };
        self.learned = Some((second, learned));
        StepReport { spent: self.spent, ..learned }
    }
}

impl Meters {
    pub(crate) fn new(n_blocks: usize, now: Instant) -> Self {
        let load = EngineLoad { total_blocks: n_blocks as u32, free_blocks: n_blocks as u32, ..EngineLoad::default() };
        let readings = Readings {
            load,
            ttft: LatencyWindow::new(),
            itl: LatencyWindow::new(),
            prefill: RateWindow::new(),
            samples: Samples::default(),
            cost: Cost::default(),
            last_progress: now,
            last_step: now,
        };
        Self { epoch: now, readings: Mutex::new(readings) }
    }

    /// A request was taken.
    pub(crate) fn opened(&self, now: Instant) {
        let mut readings = self.lock();
        if readings.load.open_requests == 0 {
            readings.last_progress = now;
        }
        readings.load.open_requests += 1;
    }

    /// A request that was counted as taken was not.
    pub(crate) fn turned_away(&self) {
        self.lock().load.open_requests -= 1;
    }

    /// A request ended.
    pub(crate) fn ended(&self, sample: RequestSample, now: Instant) {
        let second = self.second(now);
        let mut readings = self.lock();
        readings.cost.request(&sample.usage, second);
        readings.load.open_requests -= 1;
        readings.load.finished.count(&sample.reason);
        let Samples { requests, dropped, .. } = &mut readings.samples;
        push_bounded(requests, sample, dropped);
    }

    /// A request began to be computed; `cached_tokens` is `None` without a prefix cache.
    pub(crate) fn started(&self, prompt_tokens: u32, cached_tokens: Option<u64>) {
        let load = &mut self.lock().load;
        load.prompt_tokens += u64::from(prompt_tokens);
        if let Some(cached_tokens) = cached_tokens {
            load.prefix_query_tokens += u64::from(prompt_tokens);
            load.prefix_hit_tokens += cached_tokens;
        }
    }

    /// A token came, `seconds` after the submission if it is the first, after the token before it otherwise.
    pub(crate) fn token(&self, is_first: bool, seconds: f64, now: Instant) {
        let second = self.second(now);
        let mut readings = self.lock();
        readings.load.generation_tokens += 1;
        let Readings { ttft, itl, samples, .. } = &mut *readings;
        let (window, kept) = if is_first { (ttft, &mut samples.ttft) } else { (itl, &mut samples.itl) };
        window.record(second, seconds);
        push_bounded(kept, seconds, &mut samples.dropped);
    }

    /// The queues or blocks changed.
    pub(crate) fn queues(&self, state: &SchedState) {
        self.lock().load.set_queues(state);
    }

    /// A step completed: the scheduler stands at `state`.
    pub(crate) fn step(&self, plan: &StepReading, state: &SchedState, now: Instant) {
        let second = self.second(now);
        let mut readings = self.lock();
        readings.last_progress = now;
        readings.load.steps += 1;
        readings.load.preemptions += plan.n_preempted as u64;
        // A step that was launched behind another one begins when that one is over.
        let began = plan.launched_at.max(readings.last_step);
        readings.last_step = now;
        let n_prefill_tokens = plan.times.n_prefill_tokens as f64;
        let seconds = now.saturating_duration_since(began).as_secs_f64();
        if plan.n_tokens > 0 {
            readings.cost.step(plan.work, seconds);
        }
        if n_prefill_tokens > 0.0 {
            let share = n_prefill_tokens / plan.n_tokens as f64;
            readings.prefill.record(second, n_prefill_tokens, seconds * share);
        }
        let Samples { steps, dropped, .. } = &mut readings.samples;
        push_bounded(steps, plan.times, dropped);
        readings.load.set_queues(state);
    }

    /// A sequence jumped ahead by so many tokens.
    pub(crate) fn jumped(&self, n_tokens: usize) {
        if n_tokens > 0 {
            self.lock().load.forced_tokens += n_tokens as u64;
        }
    }

    /// A step's results had to wait for the output thread.
    pub(crate) fn output_was_full(&self) {
        self.lock().load.output_waits += 1;
    }

    /// The engine stopped for good.
    pub(crate) fn stopped(&self, reason: &str) {
        self.lock().load.stopped.get_or_insert_with(|| reason.to_owned());
    }

    /// Why the engine stopped, if it did.
    pub(crate) fn stop_reason(&self) -> Option<String> {
        self.lock().load.stopped.clone()
    }

    pub(crate) fn load(&self, now: Instant) -> EngineLoad {
        let second = self.second(now);
        let mut readings = self.lock();
        let is_idle = readings.load.open_requests == 0;
        let stalled = now.saturating_duration_since(readings.last_progress).as_secs_f64();
        EngineLoad {
            ttft_p50_seconds: readings.ttft.percentile(50, second),
            ttft_p95_seconds: readings.ttft.percentile(95, second),
            itl_p50_seconds: readings.itl.percentile(50, second),
            itl_p95_seconds: readings.itl.percentile(95, second),
            prefill_tokens_per_second: readings.prefill.per_second(second),
            step_report: readings.cost.report(second),
            stalled_seconds: if is_idle { 0.0 } else { stalled },
            ..readings.load.clone()
        }
    }

    pub(crate) fn take_samples(&self) -> Samples {
        std::mem::take(&mut self.lock().samples)
    }

    fn second(&self, now: Instant) -> u64 {
        now.saturating_duration_since(self.epoch).as_secs()
    }

    /// A panic while the lock was held leaves plain numbers behind, which are still worth reading.
    fn lock(&self) -> MutexGuard<'_, Readings> {
        self.readings.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a step's plan says for the meters, kept while `resolve` consumes the plan.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepReading {
    n_tokens: usize,
    n_preempted: usize,
    work: StepWork,
    pub(crate) launched_at: Instant,
    pub(crate) times: StepTimes,
}

impl StepReading {
    pub(crate) fn new(plan: &StepPlan, launched_at: Instant, times: StepTimes) -> Self {
        let work = plan.chunks.iter().map(work_of).fold(StepWork::default(), std::ops::Add::add);
        Self { n_tokens: plan.n_tokens(), n_preempted: plan.preempted.len(), work, launched_at, times }
    }
}

fn work_of(chunk: &Chunk) -> StepWork {
    let (tokens, before) = (chunk.n_tokens as f64, chunk.start as f64);
    if chunk.is_prefill { StepWork::prefill(tokens, before) } else { StepWork::answer(tokens, before) }
}

impl EngineLoad {
    fn set_queues(&mut self, state: &SchedState) {
        self.running = state.running.len() as u32;
        self.waiting = state.waiting.len() as u32;
        self.waiting_prefill_tokens = state.waiting_prefill_tokens() as u64;
        self.referenced_blocks = state.pool.n_referenced() as u32;
        self.cached_blocks = state.pool.n_cached() as u32;
        self.free_blocks = state.pool.n_free() as u32;
        self.prefix_evicted_blocks = state.pool.n_evicted();
    }
}

fn push_bounded<T>(kept: &mut Vec<T>, sample: T, dropped: &mut u64) {
    if kept.len() < MAX_SAMPLES {
        kept.push(sample);
    } else {
        *dropped += 1;
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::request::RequestId;

    #[test]
    fn an_engine_with_open_requests_and_no_step_is_stalled_and_an_idle_one_is_not() {
        let start = Instant::now();
        let meters = Meters::new(4, start);
        let later = start + Duration::from_secs(100);
        assert_eq!(meters.load(later).stalled_seconds, 0.0);
        meters.opened(later);
        assert_eq!(meters.load(later + Duration::from_secs(3)).stalled_seconds, 3.0);
        let reading = StepReading::new(&StepPlan::default(), later, StepTimes::default());
        meters.step(&reading, &SchedState::new(4), later + Duration::from_secs(4));
        assert_eq!(meters.load(later + Duration::from_secs(5)).stalled_seconds, 1.0);
    }

    #[test]
    fn what_steps_cost_is_learned_from_them_and_requests_are_priced_by_it() {
        let start = Instant::now();
        let meters = Meters::new(1, start);
        let mut now = start;
        // Ten milliseconds and one more for each of so many sequences.
        for step in 0..400usize {
            let chunk = |running_idx| Chunk {
                id: RequestId(running_idx as u64),
                running_idx,
                start: 100 + step,
                n_tokens: 1,
                fed_entry: None,
                samples: true,
                enters_slot: false,
                is_prefill: false,
                is_put_off: false,
            };
            let plan = StepPlan { chunks: (0..1 + step % 8).map(chunk).collect(), ..StepPlan::default() };
            let launched_at = now;
            now += Duration::from_millis(10 + plan.chunks.len() as u64);
            meters.step(&StepReading::new(&plan, launched_at, StepTimes::default()), &SchedState::new(1), now);
        }
        let StepReport { cost, error, spent } = meters.load(now).step_report;
        let cost = cost.unwrap();
        assert!((cost.step_seconds - 0.01).abs() < 5e-4 && error < 0.02, "{cost:?}, {error}");
        let eight = StepWork { decodes: 8.0, context_tokens: 8.0 * 300.0, ..StepWork::default() };
        assert!((cost.step(eight) - 0.018).abs() < 5e-4, "{cost:?}");
        assert_eq!((spent.decodes, spent.requests), (1800.0, 0.0));
        let usage = Usage { prompt_tokens: 100, completion_tokens: 51, cached_tokens: 0 };
        meters.opened(now);
        meters.ended(
            RequestSample {
                reason: FinishReason::Stop,
                usage,
                max_tokens: 100,
                queue_seconds: None,
                ttft_seconds: None,
                e2e_seconds: 1.0,
                preemptions: 0,
            },
            now,
        );
        let spent = meters.load(now).step_report.spent;
        let answer = cost.work_seconds(StepWork::answer(50.0, 100.0));
        assert!(spent.requests == 1.0 && spent.request_seconds >= answer, "{spent:?}");
    }

    #[test]
    fn samples_are_handed_out_once_and_bounded() {
        let now = Instant::now();
        let meters = Meters::new(1, now);
        for _ in 0..MAX_SAMPLES + 3 {
            meters.token(false, 0.01, now);
        }
        let samples = meters.take_samples();
        assert_eq!((samples.itl.len(), samples.dropped), (MAX_SAMPLES, 3));
        assert_eq!(meters.take_samples(), Samples::default());
    }
}
