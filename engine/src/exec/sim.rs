//! An executor without a model: scripted tokens, scripted timing, scripted failures. For tests of everything above
//! the executor, and for simulations.

use std::{thread, time::Duration};

use super::{ExecError, Executor};
use crate::{
    config::EngineLimits,
    engine::{Engine, EngineParts, StartError},
    handle::EngineHandle,
    info::{GenerationDefaults, ModelInfo},
    memory::{MemoryNeeds, MemoryPlan},
    request::TokenId,
    sched::{Chunk, RawLogprobs, SampleSpec, SampledToken, StepOutput, StepPlan},
    text::Tokenizer,
};

/// The end token of [`Tokenizer::bytes`].
const END_TOKEN: TokenId = 256;
/// Context of the simulated model, in tokens.
const MODEL_LIMIT: u32 = 2048;

/// What the simulated model does.
#[derive(Clone, Debug, PartialEq)]
pub struct SimScript {
    /// Every completion: these bytes, then the end token.
    pub completion: String,
    /// Time of a step, whatever it computes.
    pub step_time: Duration,
    /// Additional time for each token computed.
    pub token_time: Duration,
    /// The step, counted from 1, that fails.
    pub fail_at_step: Option<u64>,
}

impl Default for SimScript {
    fn default() -> Self {
        Self {
            completion: "All is well.".into(),
            step_time: Duration::from_millis(1),
            token_time: Duration::ZERO,
            fail_at_step: None,
        }
    }
}

/// Plays a [`SimScript`].
#[derive(Debug)]
pub struct SimExecutor {
    script: SimScript,
    steps: u64,
}

impl SimExecutor {
    /// At the beginning of the script.
    pub fn new(script: SimScript) -> Self {
        Self { script, steps: 0 }
    }

    /// Starts an engine that plays the script behind the byte tokenizer.
    pub fn start(script: SimScript, limits: EngineLimits) -> Result<EngineHandle, StartError> {
        let sched = limits.validate(MODEL_LIMIT, &[END_TOKEN])?;
        let needs = MemoryNeeds { weights_bytes: 0, workspace_bytes: 0, kv_bytes_per_token: 1 };
        let memory = MemoryPlan::new(needs, &limits, &sched, u64::from(u32::MAX))?;
        let model = ModelInfo {
            architecture: "Simulated".into(),
            n_params: 0,
            dtype: "none".into(),
            max_model_len: sched.max_model_len as u32,
            vocab_size: END_TOKEN + 1,
            eos: vec![END_TOKEN],
            memory,
            defaults: GenerationDefaults::default(),
            chat_template: None,
            bos_token: None,
            eos_token: Some("<|end|>".into()),
            device: "simulated".into(),
        };
        let max_waiting = limits.max_waiting as usize;
        let parts = EngineParts { model, tokenizer: Tokenizer::bytes(), sched, max_waiting };
        Ok(Engine::start_with(Box::new(Self::new(script)), parts))
    }

    fn sample(&self, chunk: &Chunk, spec: &SampleSpec) -> SampledToken {
        let n_generated = spec.position - spec.request.prompt.len();
        let bytes = self.script.completion.as_bytes();
        let scripted = bytes.get(n_generated).map_or(END_TOKEN, |byte| TokenId::from(*byte));
        let token = if spec.banned.contains(&scripted) { TokenId::from(b'.') } else { scripted };
        let logprobs = spec.request.logprobs.map(|k| logprobs(token, k));
        SampledToken { id: chunk.id, token, logprobs }
    }
}

impl Executor for SimExecutor {
    fn execute(&mut self, plan: &StepPlan) -> Result<StepOutput, ExecError> {
        self.steps += 1;
        thread::sleep(self.script.step_time + self.script.token_time * plan.n_tokens() as u32);
        if self.script.fail_at_step == Some(self.steps) {
            return Err(ExecError(format!("scripted failure at step {}", self.steps)));
        }
        let sampled = plan.chunks.iter().filter_map(|chunk| Some(self.sample(chunk, chunk.sample.as_ref()?))).collect();
        Ok(StepOutput { sampled })
    }
}

/// The scripted token is likeliest, the tokens after it halve in probability.
fn logprobs(token: TokenId, k: u8) -> RawLogprobs {
    let rival = |rank: u8| ((token + TokenId::from(rank)) % (END_TOKEN + 1), -f32::from(rank + 1) * 2f32.ln());
    RawLogprobs { chosen: -2f32.ln(), top: (0..k).map(rival).collect() }
}
