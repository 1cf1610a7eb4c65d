//! Shared by the engine's integration tests: where the tiny checkpoints lie, and how to run one.

use std::{
    env,
    path::{Path, PathBuf},
};

use stoker_engine::{
    DeviceChoice, Engine, EngineConfig, EngineHandle, EngineLimits, FinishReason, LoadedModel, ModelFiles, Request,
    RequestEvent, RequestStream, SamplingParams, StartError, StopParams, TokenId,
};

/// A model of `tests/goldens/engine`.
pub(crate) fn checkpoint(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/goldens/engine").join(name)
}

/// The built-in model's files.
pub(crate) fn ember() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/ember")
}

/// A configuration of one model directory. `STOKER_CPU_ISA` names the instructions that compute, as it does for the agent; one
/// that is not here fails the test.
pub(crate) fn config(directory: &Path, limits: EngineLimits) -> EngineConfig {
    let forced = env::var("STOKER_CPU_ISA").ok().map(|name| name.parse().unwrap_or_else(|refusal| panic!("{refusal}")));
    let limits = EngineLimits { isa: limits.isa.or(forced), ..limits };
    EngineConfig { model: ModelFiles::Directory(directory.to_path_buf()), limits, device: DeviceChoice::Cpu }
}

/// Opens a model without serving it.
pub(crate) fn open(directory: &Path) -> Result<LoadedModel, StartError> {
    LoadedModel::open(&config(directory, EngineLimits::default()), &|_| {})
}

/// A model is refused, in words that contain every part.
pub(crate) fn refused_with(directory: &Path, parts: &[&str]) {
    let message = match open(directory) {
        Ok(_) => panic!("the model was accepted; expected a refusal with {parts:?}"),
        Err(error) => error.to_string(),
    };
    for part in parts {
        assert!(message.contains(part), "{part:?} is not in: {message}");
    }
}

/// Serves a model.
pub(crate) fn start(directory: &Path, limits: EngineLimits) -> EngineHandle {
    Engine::start(config(directory, limits), |_| {}).expect("the checkpoint starts")
}

/// A greedy request that ends by length only.
pub(crate) fn greedy(prompt: Vec<TokenId>, max_tokens: u32) -> Request {
    let sampling = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
    let stop = StopParams { max_tokens, ignore_eos: true, ..StopParams::default() };
    Request { prompt, sampling, stop, logprobs: None, ..Request::default() }
}

/// All tokens and the text of a stream that must end by length.
pub(crate) fn read_all(mut stream: RequestStream) -> (Vec<TokenId>, String) {
    let (mut all, mut whole) = (Vec::new(), String::new());
    while let Some(event) = stream.blocking_next() {
        match event {
            RequestEvent::Prompt(_) | RequestEvent::Embedding(_) => {}
            RequestEvent::Delta { text, tokens, .. } => {
                all.extend(tokens);
                whole.push_str(&text);
            }
            RequestEvent::Finished { reason, .. } => assert_eq!(reason, FinishReason::Length),
        }
    }
    (all, whole)
}
