//! A model that cannot be loaded: what the operator reads from a replica that it started, and what a person reads.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Arc;

use stoker_agent::{
    config::{Settings, StartedBy},
    replica::Replica,
    startup,
};
use stoker_crds::contract::{AgentConfig, AgentPhase, DrainSettings, EngineSettings, ModelConfig};

fn replica(source: &str, engine: EngineSettings, started_by: StartedBy) -> Arc<Replica> {
    let model = ModelConfig { source: source.into(), served_names: vec!["m".into()], ..ModelConfig::default() };
    let config = AgentConfig { revision: "r1".into(), model, gpus: 0, engine, drain: DrainSettings::default() };
    Replica::new(Settings::validate(config, started_by).unwrap())
}

/// What `/v1/load` says of a replica that the operator started with these settings.
fn reported(source: &str, engine: EngineSettings) -> String {
    let replica = replica(source, engine, StartedBy::Operator);
    startup::load(&replica, ([127, 0, 0, 1], 8000).into()).unwrap();
    let report = replica.load_report();
    assert_eq!(report.phase, AgentPhase::Failed);
    report.error.unwrap()
}

/// What a person reads that started an agent with these settings.
fn printed(source: &str, engine: EngineSettings) -> String {
    let replica = replica(source, engine, StartedBy::Person);
    format!("{:#}", startup::load(&replica, ([127, 0, 0, 1], 8000).into()).unwrap_err())
}

#[test]
fn a_model_that_the_agent_does_not_carry_is_reported_with_those_it_does() {
    let message = reported("builtin://gpt", EngineSettings::default());
    assert_eq!(message, "load builtin://gpt: model.source builtin://gpt: this agent carries ember");
    let message = printed("builtin://gpt", EngineSettings::default());
    assert_eq!(message, "load builtin://gpt: --model builtin://gpt: this agent carries ember");
}

#[test]
fn a_size_that_cannot_work_is_called_as_its_reader_wrote_it() {
    let engine = EngineSettings { max_model_len: Some(1_000_000), ..EngineSettings::default() };
    let message = reported("builtin://ember", engine.clone());
    assert!(message.contains("engine.maxModelLen 1000000 is above the model's own limit"), "{message}");
    let message = printed("builtin://ember", engine);
    assert!(message.contains("--max-model-len 1000000 is above the model's own limit"), "{message}");
    let message =
        reported("builtin://ember", EngineSettings { kv_cache_tokens: Some(32), ..EngineSettings::default() });
    assert!(message.contains("lower engine.maxModelLen to 32, or raise engine.kvCacheTokens"), "{message}");
}
