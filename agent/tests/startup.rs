//! A model that cannot be loaded: what the operator reads from a replica that it started, and what a person reads.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Arc;

use stoker_agent::{
    config::{Settings, StartedBy},
    replica::Replica,
    startup::{self, Loaded, TRIED_AGAIN},
};
use stoker_crds::contract::{AgentConfig, AgentPhase, DrainSettings, EngineSettings, ModelConfig, ParallelSettings};
use stoker_engine::ops::Isa;

fn config(source: &str, engine: EngineSettings) -> AgentConfig {
    AgentConfig {
        revision: "r1".into(),
        model: ModelConfig { source: source.into(), served_names: vec!["m".into()], ..ModelConfig::default() },
        gpus: 0,
        parallelism: ParallelSettings::default(),
        engine,
        drain: DrainSettings::default(),
    }
}

fn replica(source: &str, engine: EngineSettings, started_by: StartedBy) -> Arc<Replica> {
    Replica::new(Settings::validate(config(source, engine), started_by).unwrap())
}

/// Only ranks.
fn ranks(tensor: u32) -> ParallelSettings {
    ParallelSettings { tensor, pipeline: 1 }
}

/// One of ember that so many ranks and stages share, on as many GPUs or on the CPUs.
fn shared(gpus: u32, parallelism: ParallelSettings, started_by: StartedBy) -> Arc<Replica> {
    let engine = EngineSettings { threads: Some(2), ..EngineSettings::default() };
    let config = AgentConfig { gpus, parallelism, ..config("builtin://ember", engine) };
    Replica::new(Settings::validate(config, started_by).unwrap())
}

/// What `/v1/load` says of a replica that the operator started with these settings.
fn reported(source: &str, engine: EngineSettings) -> String {
    let replica = replica(source, engine, StartedBy::Operator);
    assert_eq!(load(&replica).unwrap(), Loaded::Failed);
    let report = replica.load_report();
    assert_eq!(report.phase, AgentPhase::Failed);
    let error = report.error.unwrap();
    error.strip_suffix(&format!(" ({TRIED_AGAIN})")).unwrap().to_owned()
}

/// What a person reads that started an agent with these settings.
fn printed(source: &str, engine: EngineSettings) -> String {
    let replica = replica(source, engine, StartedBy::Person);
    format!("{:#}", load(&replica).unwrap_err())
}

fn load(replica: &Arc<Replica>) -> anyhow::Result<Loaded> {
    startup::load(replica, ([127, 0, 0, 1], 8000).into())
}

#[test]
fn a_model_that_comes_later_is_loaded_at_the_next_try() {
    let folder = std::env::temp_dir().join(format!("stoker-late-model-{}", std::process::id()));
    let source = folder.to_str().unwrap();
    let replica =
        replica(source, EngineSettings { threads: Some(1), ..EngineSettings::default() }, StartedBy::Operator);
    assert_eq!(load(&replica).unwrap(), Loaded::Failed);
    assert_eq!(load(&replica).unwrap(), Loaded::Failed);
    let ember = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/ember");
    std::os::unix::fs::symlink(ember, &folder).unwrap();
    let loaded = load(&replica);
    std::fs::remove_file(&folder).unwrap();
    assert_eq!(loaded.unwrap(), Loaded::Serving);
    let report = replica.load_report();
    assert_eq!((report.phase, report.error), (AgentPhase::Ready, None));
}

#[test]
fn a_model_that_the_agent_does_not_carry_is_reported_with_those_it_does() {
    let message = reported("builtin://gpt", EngineSettings::default());
    assert_eq!(message, "load builtin://gpt: model.source builtin://gpt: this agent carries ember");
    let message = printed("builtin://gpt", EngineSettings::default());
    assert_eq!(message, "load builtin://gpt: --model builtin://gpt: this agent carries ember");
}

/// As of an image that is mounted, where the operator appends the folder that the source names.
#[test]
fn a_folder_that_is_not_there_is_reported_with_those_that_are() {
    let mounted = tempfile::tempdir().unwrap();
    for folder in ["opt/chat", "opt/draft"] {
        std::fs::create_dir_all(mounted.path().join(folder)).unwrap();
    }
    let root = mounted.path().display();
    let source = format!("{root}/opt/chat-8b");
    let why = format!("load {source}: {root}/opt has no chat-8b; there are chat, draft: correct the path in");
    assert_eq!(reported(&source, EngineSettings::default()), format!("{why} model.source"));
    assert_eq!(printed(&source, EngineSettings::default()), format!("{why} --model"));
    let empty = reported(&format!("{root}/opt/chat"), EngineSettings::default());
    assert!(empty.contains(&format!("open {root}/opt/chat/config.json")), "{empty}");
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

#[test]
fn ranks_share_a_model_and_what_is_served_says_so() {
    let replica = shared(0, ranks(2), StartedBy::Operator);
    assert_eq!(load(&replica).unwrap(), Loaded::Serving);
    let expected = format!("cpu, 2 ranks of 1 threads, {}", Isa::best());
    assert_eq!(replica.served().ok().unwrap().engine.model().device, expected);
}

#[test]
fn heads_that_ranks_do_not_divide_are_reported_with_the_setting() {
    let why = "load model: model.layers.0.self_attn.q_proj.weight: 3 ranks do not divide its 4 heads of 64; take a number of ranks that does";
    let replica = shared(0, ranks(3), StartedBy::Operator);
    assert_eq!(load(&replica).unwrap(), Loaded::Failed);
    let error = replica.load_report().error.unwrap();
    assert_eq!(error, format!("load builtin://ember with parallelism.tensor 3: {why} ({TRIED_AGAIN})"));
    let error = load(&shared(0, ranks(3), StartedBy::Person)).unwrap_err();
    assert_eq!(format!("{error:#}"), format!("load builtin://ember with --tensor-parallel 3: {why}"));
    let error = load(&shared(0, ParallelSettings { tensor: 3, pipeline: 2 }, StartedBy::Person)).unwrap_err();
    let both = "--tensor-parallel 3 and --pipeline-parallel 2";
    assert_eq!(format!("{error:#}"), format!("load builtin://ember with {both}: {why}"));
}

#[test]
fn stages_share_a_model_and_what_is_served_says_so() {
    let replica = shared(0, ParallelSettings { tensor: 2, pipeline: 2 }, StartedBy::Operator);
    assert_eq!(load(&replica).unwrap(), Loaded::Serving);
    let expected = format!("cpu, 2 ranks of 1 threads, {}, 2 stages", Isa::best());
    assert_eq!(replica.served().ok().unwrap().engine.model().device, expected);
}

/// A machine with two GPUs or more serves; any other says what it has not.
#[test]
fn gpus_that_are_not_there_are_reported_with_the_setting() {
    let replica = shared(2, ranks(2), StartedBy::Operator);
    match load(&replica).unwrap() {
        Loaded::Serving => assert!(replica.served().ok().unwrap().engine.model().device.contains("; cuda:1, ")),
        Loaded::Failed => {
            let error = replica.load_report().error.unwrap();
            assert!(error.starts_with("load builtin://ember with parallelism.tensor 2: GPU: "), "{error}");
        }
    }
}
