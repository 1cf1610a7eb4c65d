//! Planning a step while the one before it is computed changes no token: the same requests, over the same executor,
//! with one step in flight and with two.

use std::path::Path;

use stoker_engine::{
    Engine, EngineHandle, EngineLimits, FinishReason, LoadedModel, Request, RequestEvent, RequestStream,
    SamplingParams, StopParams, TokenId,
    constraint::Masks,
    exec::{CpuExecutor, ExecError, Executor},
    sched::{Step, StepOutput},
};

use crate::common;

/// The CPU's executor as one that takes two steps. It computes a step when it is launched, so nothing is gained here;
/// but the scheduler plans on tokens that it does not know.
struct TwoInFlight(CpuExecutor);

impl Executor for TwoInFlight {
    fn max_steps_in_flight(&self) -> usize {
        2
    }

    fn copies_blocks(&self) -> bool {
        self.0.copies_blocks()
    }

    fn launch(&mut self, step: &Step<'_>) -> Result<(), ExecError> {
        self.0.launch(step)
    }

    fn constrain(&mut self, masks: Masks<'_>) -> Result<(), ExecError> {
        self.0.constrain(masks)
    }

    fn finish(&mut self) -> Result<StepOutput, ExecError> {
        self.0.finish()
    }
}

pub(crate) fn start_with_two(model: &Path, limits: EngineLimits) -> EngineHandle {
    let LoadedModel { executor, parts } = LoadedModel::open(&common::config(model, limits), &|_| {}).unwrap();
    Engine::start_with(Box::new(TwoInFlight(executor)), parts)
}

/// Greedy, drawn, penalised; ended by length, by the end token, by a stop string.
fn asked(n: u32) -> Request {
    let prompt: Vec<TokenId> = (0..5 + n * 4).map(|i| (n * 131 + i * i * 7 + i * 13) % 256).collect();
    let stop = StopParams {
        max_tokens: 40 + 2 * n,
        min_tokens: n % 5,
        ignore_eos: n.is_multiple_of(2),
        stop: if n.is_multiple_of(6) { vec!["e".into()] } else { vec![] },
        ..StopParams::default()
    };
    let sampling = SamplingParams {
        temperature: (n % 3) as f32 * 0.6,
        repetition_penalty: if n.is_multiple_of(4) { 1.3 } else { 1.0 },
        seed: n.into(),
        ..SamplingParams::default()
    };
    Request { prompt, sampling, stop, logprobs: n.is_multiple_of(7).then_some(2), ..Request::default() }
}

/// All events of a stream, but for how the text was cut into pieces.
fn read_all(mut stream: RequestStream) -> (Vec<TokenId>, String, FinishReason) {
    let (mut all, mut whole) = (Vec::new(), String::new());
    loop {
        match stream.blocking_next().expect("a terminal comes") {
            RequestEvent::Prompt(_) | RequestEvent::Embedding(_) => {}
            RequestEvent::Delta { text, tokens, .. } => {
                all.extend(tokens);
                whole.push_str(&text);
            }
            RequestEvent::Finished { reason, .. } => return (all, whole, reason),
        }
    }
}

fn check(model: &Path) {
    // 24 sequences of 45 to 180 tokens do not fit: somebody is preempted, with tokens in flight.
    let tight = EngineLimits {
        kv_cache_tokens: Some(512),
        expected_completion: None,
        max_model_len: Some(256),
        ..EngineLimits::default()
    };
    let run = |engine: &EngineHandle| -> Vec<_> {
        let streams: Vec<_> = (0..24).map(|n| engine.submit(asked(n)).unwrap()).collect();
        streams.into_iter().map(read_all).collect()
    };
    let (one, two) = (common::start(model, tight.clone()), start_with_two(model, tight));
    let expected = run(&one);
    assert_eq!(run(&two), expected, "{}", model.display());
    for engine in [&one, &two] {
        assert!(engine.load().preemptions > 0, "the tight cache preempted somebody");
    }
    let reasons: Vec<_> = expected.into_iter().map(|(_, _, reason)| reason).collect();
    assert!(reasons.contains(&FinishReason::Length) && reasons.contains(&FinishReason::Stop), "{reasons:?}");
}

#[test]
fn the_same_tokens_come_with_one_step_in_flight_and_with_two() {
    check(&common::checkpoint("gqa-f32"));
    check(&common::ember());
}
