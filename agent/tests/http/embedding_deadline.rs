//! Texts that wait for their turn to be embedded or compared, and may not wait for ever.

use std::{path::Path, time::Duration};

use serde_json::json;
use stoker_engine::{
    DeviceChoice, Engine, EngineConfig, EngineLimits, LoadedModel, ModelFiles,
    constraint::Masks,
    exec::{Abilities, CpuExecutor, ExecError, Executor, RowsRead, RowsSpec},
    sched::{Step, StepOutput},
};

use crate::agent::Agent;

/// Takes so long for each step.
const STEP: Duration = Duration::from_millis(20);

struct Slow(CpuExecutor);

impl Executor for Slow {
    fn abilities(&self) -> Abilities {
        self.0.abilities()
    }

    fn read(&mut self, wanted: Vec<RowsSpec>) {
        self.0.read(wanted);
    }

    fn take_read(&mut self) -> Vec<RowsRead> {
        self.0.take_read()
    }

    fn launch(&mut self, step: &Step<'_>) -> Result<(), ExecError> {
        self.0.launch(step)
    }

    fn constrain(&mut self, masks: Masks<'_>) -> Result<(), ExecError> {
        self.0.constrain(masks)
    }

    fn finish(&mut self) -> Result<StepOutput, ExecError> {
        std::thread::sleep(STEP);
        self.0.finish()
    }
}

/// A model of embeddings that takes one text at a time, and one token of it in a step.
fn slow() -> Agent {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/goldens/embeddings/llama-mean");
    let limits = EngineLimits { max_num_seqs: Some(1), max_batched_tokens: Some(1), ..EngineLimits::default() };
    let config = EngineConfig { model: ModelFiles::Directory(model), limits, device: DeviceChoice::Cpu };
    let LoadedModel { executor, parts } = LoadedModel::open(&config, &|_| {}).unwrap();
    Agent::of(Engine::start_with(Box::new(Slow(executor)), parts))
}

#[tokio::test]
async fn a_text_that_is_not_embedded_by_its_deadline_ends_by_that_name() {
    let agent = slow();
    // Some seconds of steps: nobody else's turn comes before it is given up.
    let long = agent.send_aside("/v1/embeddings", &json!({"input": "a b c d ".repeat(60)}).to_string());
    agent.wait_until("the first one runs", |load| load.running == 1).await;
    for (path, mut late) in [
        ("/v1/embeddings", json!({"input": ["late", "later"]})),
        ("/score", json!({"text_1": "late", "text_2": "later"})),
    ] {
        late["deadline_ms"] = json!(20);
        let (status, answer) = agent.post(path, late).await;
        let error = &answer["error"];
        assert_eq!((status.as_u16(), &error["code"]), (504, &json!("deadline_exceeded")), "{path}: {answer}");
        assert_eq!((&error["param"], &error["type"]), (&json!("deadline_ms"), &json!("server_error")), "{path}");
    }
    assert!(!long.is_finished(), "who runs goes on");
    agent.wait_until("nobody waits", |load| load.waiting == 0 && load.running == 1).await;
    long.abort();
    let (status, answer) = agent.post("/v1/embeddings", json!({"input": "x", "deadline_ms": 600_000})).await;
    assert_eq!((status.as_u16(), answer["data"].as_array().map(Vec::len)), (200, Some(1)), "in time: {answer}");
}
