//! The engine around a scripted executor: streams, terminals, limits, aborts, failures.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use stoker_engine::{
    Engine, EngineHandle, EngineLimits, FinishReason, LoadedModel, RejectReason, Request, RequestEvent, RequestStream,
    SamplingParams, StopParams,
    constraint::Masks,
    exec::{
        ExecError, Executor,
        sim::{SimExecutor, SimScript},
    },
    sched::{Step, StepOutput},
};

use crate::common;

fn start(script: SimScript, limits: EngineLimits) -> EngineHandle {
    SimExecutor::start(script, limits).expect("the simulated engine starts")
}

fn request(max_tokens: u32) -> Request {
    let stop = StopParams { max_tokens, ..StopParams::default() };
    Request { prompt: vec![65; 20], sampling: SamplingParams::default(), stop, logprobs: None, ..Request::default() }
}

fn endless() -> SimScript {
    SimScript { completion: "x".repeat(2000), ..SimScript::default() }
}

fn read_all(mut stream: RequestStream) -> (String, RequestEvent) {
    let mut text = String::new();
    while let Some(event) = stream.blocking_next() {
        match event {
            RequestEvent::Prompt(_) | RequestEvent::Embedding(_) => {}
            RequestEvent::Delta { text: piece, .. } => text.push_str(&piece),
            terminal => {
                assert_eq!(stream.blocking_next(), None, "nothing follows the terminal");
                return (text, terminal);
            }
        }
    }
    panic!("the stream ended without a terminal after {text:?}");
}

fn reason(terminal: RequestEvent) -> FinishReason {
    match terminal {
        RequestEvent::Finished { reason, .. } => reason,
        delta => panic!("{delta:?} is no terminal"),
    }
}

fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !condition() {
        assert!(Instant::now() < deadline, "{what} within 10 s");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// An executor that takes its time to go.
struct Leaving {
    executor: Box<dyn Executor>,
    is_gone: Arc<AtomicBool>,
}

impl Executor for Leaving {
    fn launch(&mut self, step: &Step<'_>) -> Result<(), ExecError> {
        self.executor.launch(step)
    }

    fn constrain(&mut self, masks: Masks<'_>) -> Result<(), ExecError> {
        self.executor.constrain(masks)
    }

    fn finish(&mut self) -> Result<StepOutput, ExecError> {
        self.executor.finish()
    }
}

impl Drop for Leaving {
    fn drop(&mut self) {
        std::thread::sleep(Duration::from_millis(50));
        self.is_gone.store(true, Ordering::Release);
    }
}

/// Also where a request is still open: its stream is the last that knows the engine.
#[test]
fn who_drops_the_last_handle_or_stream_of_an_engine_waits_until_it_is_gone() {
    for has_stream in [false, true] {
        let LoadedModel { executor, parts } = common::open(&common::ember()).unwrap();
        let is_gone = Arc::new(AtomicBool::new(false));
        let leaving = Leaving { executor: Box::new(executor), is_gone: Arc::clone(&is_gone) };
        let engine = Engine::start_with(Box::new(leaving), parts);
        let stream = has_stream.then(|| engine.submit(common::greedy(vec![65; 20], 1000)).unwrap());
        drop(engine);
        assert!(!has_stream || !is_gone.load(Ordering::Acquire), "a stream keeps it");
        drop(stream);
        assert!(is_gone.load(Ordering::Acquire), "with a stream: {has_stream}");
    }
}

/// Announced in time, or so early that nobody looks out any more: what the stream carries is the same.
#[test]
fn an_announced_first_token_is_one_event_like_any_other() {
    for notice in [Duration::from_micros(500), Duration::from_millis(15)] {
        let script = SimScript { step_time: Duration::from_millis(20), notice: Some(notice), ..SimScript::default() };
        let engine = start(script, EngineLimits::default());
        let (text, terminal) = read_all(engine.submit(request(1)).unwrap());
        assert_eq!((text.as_str(), reason(terminal)), ("A", FinishReason::Length));
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let mut stream = engine.submit(request(1)).unwrap();
        let events = runtime.block_on(async { [stream.next().await, stream.next().await, stream.next().await] });
        assert!(matches!(&events[0], Some(RequestEvent::Delta { text, .. }) if text == "A"), "{notice:?}: {events:?}");
        assert!(matches!(&events[1..], [Some(RequestEvent::Finished { .. }), None]), "{notice:?}: {events:?}");
    }
}

#[test]
fn a_request_streams_its_text_and_ends_once() {
    let engine = start(SimScript::default(), EngineLimits::default());
    let (text, terminal) = read_all(engine.submit(request(100)).unwrap());
    assert_eq!(text, "All is well.");
    let RequestEvent::Finished { reason, usage, .. } = terminal else { panic!("{terminal:?}") };
    assert_eq!((reason, usage.prompt_tokens, usage.completion_tokens), (FinishReason::Stop, 20, 13));
    let load = engine.load();
    assert_eq!((load.finished.stop, load.open_requests, load.generation_tokens), (1, 0, 13));
    let samples = engine.take_samples();
    assert_eq!((samples.ttft.len(), samples.itl.len(), samples.requests.len()), (1, 12, 1));
}

/// What devices did for requests cannot be more than all of them could do in that time, and what they did not do between requests is nobody's.
#[test]
fn a_request_has_its_part_of_all_devices_time_and_nothing_of_the_time_between_requests() {
    let (n_devices, step_time) = (4, Duration::from_millis(2));
    let engine = start(SimScript { n_devices, step_time, ..SimScript::default() }, EngineLimits::default());
    for n_requests in [1, 3, 1] {
        let begun = Instant::now();
        let mut streams: Vec<_> = (0..n_requests).map(|_| engine.submit(request(100)).unwrap()).collect();
        for stream in &mut streams {
            assert_eq!(stream.device_time(), Duration::ZERO, "nothing was computed before its first event");
            while stream.blocking_next().is_some() {}
        }
        let (all, passed) = (streams.iter().map(RequestStream::device_time).sum::<Duration>(), begun.elapsed());
        assert!(all >= 13 * step_time * n_devices, "{n_requests}: {all:?} for 13 steps, if they shared all");
        assert!(all <= passed * n_devices, "{n_requests}: {all:?} in {passed:?}");
        std::thread::sleep(50 * step_time);
    }
}

#[test]
fn a_stop_string_ends_the_text_before_it() {
    let engine = start(SimScript::default(), EngineLimits::default());
    let mut asked = request(100);
    asked.stop.stop = vec!["well".into()];
    let (text, terminal) = read_all(engine.submit(asked).unwrap());
    assert_eq!(text, "All is ");
    assert!(matches!(terminal, RequestEvent::Finished { stop_match: Some(stop), .. } if stop == "well"));
    wait_until("the blocks are free", || engine.load().referenced_blocks == 0);
}

#[test]
fn logprobs_carry_texts_one_entry_a_token() {
    let engine = start(SimScript::default(), EngineLimits::default());
    let mut stream = engine.submit(Request { logprobs: Some(2), ..request(3) }).unwrap();
    let Some(RequestEvent::Delta { logprobs, tokens, .. }) = stream.blocking_next() else { panic!("a delta first") };
    assert_eq!((tokens.len(), logprobs.len(), logprobs[0].top.len()), (1, 1, 2));
    assert_eq!((logprobs[0].chosen.text.as_str(), logprobs[0].top[1].text.as_str()), ("A", "B"));
}

#[test]
fn a_request_for_no_tokens_ends_at_once_by_length() {
    let engine = start(SimScript::default(), EngineLimits::default());
    let (text, terminal) = read_all(engine.submit(request(0)).unwrap());
    assert_eq!((text.as_str(), reason(terminal)), ("", FinishReason::Length));
}

#[test]
fn many_requests_at_once_all_get_their_whole_text() {
    let limits = EngineLimits { kv_cache_tokens: Some(2048), expected_completion: None, ..EngineLimits::default() };
    let engine = start(SimScript { completion: "abc".repeat(60), ..SimScript::default() }, limits);
    let streams: Vec<_> = (0..100).map(|_| engine.submit(request(200)).unwrap()).collect();
    for stream in streams {
        assert_eq!(read_all(stream).0, "abc".repeat(60));
    }
    let load = engine.load();
    assert!(load.preemptions > 0, "2048 tokens of KV are too few for 64 sequences of 200");
    wait_until("no block is held", || engine.load().referenced_blocks == 0);
}

#[test]
fn a_second_step_in_flight_changes_neither_text_nor_counts() {
    let ended = |max_steps_in_flight| {
        let limits = EngineLimits { kv_cache_tokens: Some(2048), expected_completion: None, ..EngineLimits::default() };
        let script = SimScript { completion: "abc".repeat(20), max_steps_in_flight, ..SimScript::default() };
        let engine = start(script, limits);
        let streams: Vec<_> = (1..90).map(|n| engine.submit(request(n)).unwrap()).collect();
        let without_times = |stream| match read_all(stream) {
            (text, RequestEvent::Finished { reason, usage, .. }) => (text, reason, usage),
            (_, other) => panic!("{other:?}"),
        };
        let texts: Vec<_> = streams.into_iter().map(without_times).collect();
        let load = engine.load();
        assert_eq!(load.finished.total(), 89);
        wait_until("no block is held", || engine.load().referenced_blocks == 0);
        (texts, load.generation_tokens)
    };
    assert_eq!(ended(1), ended(2));
}

#[test]
fn a_failure_with_two_steps_in_flight_ends_every_request() {
    let script = SimScript { fail_at_step: Some(3), max_steps_in_flight: 2, ..endless() };
    let engine = start(script, EngineLimits::default());
    let streams: Vec<_> = (0..5).filter_map(|_| engine.submit(request(100)).ok()).collect();
    for stream in streams {
        assert!(matches!(reason(read_all(stream).1), FinishReason::Error(text) if text.contains("at step 3")));
    }
}

#[test]
fn a_dropped_stream_frees_its_blocks_after_the_next_step() {
    let engine = start(endless(), EngineLimits::default());
    let mut stream = engine.submit(request(2000)).unwrap();
    stream.blocking_next();
    assert!(engine.load().referenced_blocks > 0);
    drop(stream);
    wait_until("the blocks are free", || engine.load().referenced_blocks == 0);
    wait_until("the abort is counted", || engine.load().finished.abort == 1);
}

#[test]
fn a_stop_token_ends_the_text_before_it_or_behind_it_and_never_before_the_minimum() {
    let engine = start(SimScript { completion: "abcabc".into(), ..SimScript::default() }, EngineLimits::default());
    for (min_tokens, include_stop, text) in [(0, false, "a"), (0, true, "ab"), (3, false, "abca"), (3, true, "abcab")] {
        let stop_token_ids = vec![u32::from(b'b'), 7];
        let asked = request(50);
        let stop = StopParams { min_tokens, include_stop, stop_token_ids, ..asked.stop.clone() };
        let (found, terminal) = read_all(engine.submit(Request { stop, ..asked }).unwrap());
        assert_eq!((found.as_str(), reason(terminal)), (text, FinishReason::Stop), "at least {min_tokens}");
    }
}

#[test]
fn a_full_line_refuses_with_its_bound_and_takes_again_later() {
    let limits = EngineLimits { max_waiting: 2, max_num_seqs: Some(1), ..EngineLimits::default() };
    let engine = start(endless(), limits);
    let mut running = engine.submit(request(2000)).unwrap();
    running.blocking_next();
    let waiting: Vec<_> = (0..3).map(|_| engine.submit(request(5)).unwrap()).collect();
    assert_eq!(engine.submit(request(5)).unwrap_err(), RejectReason::QueueFull { waiting: 3, limit: 3 });
    drop(running);
    for stream in waiting {
        assert_eq!(read_all(stream).0, "xxxxx");
    }
    assert!(engine.submit(request(5)).is_ok());
}

#[test]
fn impossible_requests_are_refused_before_anything_starts() {
    let engine = start(SimScript::default(), EngineLimits { max_model_len: Some(64), ..EngineLimits::default() });
    let with_prompt = |prompt: Vec<u32>| engine.submit(Request { prompt, ..request(5) }).unwrap_err();
    assert_eq!(with_prompt(vec![]), RejectReason::EmptyPrompt);
    assert_eq!(with_prompt(vec![1; 64]), RejectReason::PromptTooLong { prompt_tokens: 64, max_model_len: 64 });
    assert_eq!(with_prompt(vec![1, 257]), RejectReason::BadToken { token: 257, vocab_size: 257 });
    assert_eq!(engine.load().open_requests, 0);
}

#[test]
fn the_completion_is_clamped_to_the_context() {
    let engine = start(endless(), EngineLimits { max_model_len: Some(64), ..EngineLimits::default() });
    let (text, terminal) = read_all(engine.submit(request(1000)).unwrap());
    assert_eq!((text.len(), reason(terminal)), (44, FinishReason::Length));
}

#[test]
fn a_failing_executor_ends_every_request_and_refuses_new_ones() {
    let script = SimScript { fail_at_step: Some(3), ..endless() };
    let engine = start(script, EngineLimits::default());
    let streams: Vec<_> = (0..5).filter_map(|_| engine.submit(request(100)).ok()).collect();
    for stream in streams {
        assert!(matches!(reason(read_all(stream).1), FinishReason::Error(text) if text.contains("at step 3")));
    }
    wait_until("new requests are refused", || matches!(engine.submit(request(5)), Err(RejectReason::Stopped(_))));
    assert!(engine.load().stopped.unwrap().contains("at step 3"));
}

#[test]
fn ending_all_requests_says_why_and_the_engine_goes_on() {
    let engine = start(endless(), EngineLimits::default());
    let mut stream = engine.submit(request(2000)).unwrap();
    stream.blocking_next();
    engine.abort_all("the drain deadline passed");
    assert_eq!(reason(read_all(stream).1), FinishReason::Error("the drain deadline passed".into()));
    assert_eq!(read_all(engine.submit(request(3)).unwrap()).0, "xxx");
}

#[test]
fn shutdown_ends_open_requests_and_returns() {
    let engine = start(endless(), EngineLimits::default());
    let mut stream = engine.submit(request(2000)).unwrap();
    stream.blocking_next();
    engine.shutdown();
    assert!(matches!(reason(read_all(stream).1), FinishReason::Error(_)));
    engine.shutdown();
}

#[test]
fn a_stream_outlives_the_last_handle() {
    let engine = start(SimScript::default(), EngineLimits::default());
    let stream = engine.submit(request(100)).unwrap();
    drop(engine);
    assert_eq!(read_all(stream).0, "All is well.");
}

#[test]
fn an_engine_with_work_and_no_step_shows_how_long_it_hangs() {
    let script = SimScript { step_time: Duration::from_millis(300), ..SimScript::default() };
    let engine = start(script, EngineLimits::default());
    assert_eq!(engine.load().stalled_seconds, 0.0);
    let _stream = engine.submit(request(100)).unwrap();
    std::thread::sleep(Duration::from_millis(120));
    assert!(engine.load().stalled_seconds >= 0.1);
}
