//! An executor without a model: scripted tokens, scripted timing, scripted failures. For tests of everything above
//! the executor, and for simulations.

use std::{
    collections::VecDeque,
    thread,
    time::{Duration, Instant},
};

use super::{ExecError, Executor};
use stoker_fit::{
    format::BytesByFormat,
    memory::{MemoryBudget, MemoryNeeds, MemoryPlan},
};

use crate::{
    config::{EngineLimits, StepSizes},
    constraint::{Masks, allows},
    engine::{Engine, EngineParts, StartError},
    handle::EngineHandle,
    info::{GenerationDefaults, ModelInfo},
    pooling::EmbeddingForm,
    request::TokenId,
    sched::{RawLogprobs, SampleSpec, Sampled, Step, StepOutput},
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
    /// How long before its end every step is announced, if it is.
    pub notice: Option<Duration>,
    /// Steps that may be in flight; 1 or 2.
    pub max_steps_in_flight: usize,
    /// Devices that it is on.
    pub n_devices: u32,
}

impl Default for SimScript {
    fn default() -> Self {
        Self {
            completion: "All is well.".into(),
            step_time: Duration::from_millis(1),
            token_time: Duration::ZERO,
            fail_at_step: None,
            notice: None,
            max_steps_in_flight: 1,
            n_devices: 1,
        }
    }
}

/// Plays a [`SimScript`].
#[derive(Debug)]
pub struct SimExecutor {
    script: SimScript,
    steps: u64,
    /// Steps that were launched and not finished, oldest first.
    in_flight: VecDeque<SimStep>,
}

/// A step in flight.
#[derive(Debug)]
struct SimStep {
    outcome: Result<StepOutput, ExecError>,
    /// Entries that wait for a mask.
    constrained: Vec<usize>,
    over_at: Instant,
}

impl SimExecutor {
    /// At the beginning of the script.
    pub fn new(script: SimScript) -> Self {
        Self { script, steps: 0, in_flight: VecDeque::new() }
    }

    /// Starts an engine that plays the script behind the byte tokenizer.
    pub fn start(script: SimScript, limits: EngineLimits) -> Result<EngineHandle, StartError> {
        let sched = limits.validate(MODEL_LIMIT, &[END_TOKEN], StepSizes::CPU)?;
        let needs = MemoryNeeds { weights_bytes: 0, workspace_bytes: 0, kv_bytes_per_token: 1 };
        let memory = MemoryPlan::new(needs, limits.cache_use(&sched), MemoryBudget::host(u32::MAX.into()))?;
        let model = ModelInfo {
            architecture: "Simulated".into(),
            n_params: 0,
            dtype: "none".into(),
            held: BytesByFormat::new(),
            max_model_len: sched.max_model_len as u32,
            max_num_seqs: sched.max_num_seqs as u32,
            vocab_size: END_TOKEN + 1,
            hidden_size: 1,
            eos: vec![END_TOKEN],
            memory,
            defaults: GenerationDefaults::default(),
            embedding: EmbeddingForm::default(),
            relevance: None,
            chat_template: None,
            bos_token: None,
            eos_token: Some("<|end|>".into()),
            device: "simulated".into(),
        };
        let max_waiting = limits.max_waiting as usize;
        let parts = EngineParts { model, tokenizer: Tokenizer::bytes(), sched, max_waiting };
        Ok(Engine::start_with(Box::new(Self::new(script)), parts))
    }

    fn sample(&self, spec: &SampleSpec<'_>) -> Sampled {
        let n_generated = spec.position - spec.request.prompt.len();
        let bytes = self.script.completion.as_bytes();
        let scripted = bytes.get(n_generated).map_or(END_TOKEN, |byte| TokenId::from(*byte));
        let token = if spec.banned.contains(&scripted) { TokenId::from(b'.') } else { scripted };
        let logprobs = spec.request.logprobs.map(|k| logprobs(token, k));
        Sampled::Token { token, logprobs }
    }
}

impl Executor for SimExecutor {
    fn max_steps_in_flight(&self) -> usize {
        self.script.max_steps_in_flight
    }

    fn n_devices(&self) -> u32 {
        self.script.n_devices
    }

    /// There is nothing to copy, and tokens are counted as where there is.
    fn copies_blocks(&self) -> bool {
        true
    }

    /// The simulated device works on its own: a step begins when the one before it is over.
    fn launch(&mut self, step: &Step<'_>) -> Result<(), ExecError> {
        self.steps += 1;
        let took = self.script.step_time + self.script.token_time * step.n_tokens() as u32;
        let now = Instant::now();
        let begins_at = self.in_flight.back().map_or(now, |last| last.over_at.max(now));
        let specs = || step.chunks.iter().filter_map(|chunk| chunk.sample);
        let constrained = specs().enumerate().filter(|(_, spec)| spec.is_constrained()).map(|(entry, _)| entry);
        let outcome = if self.script.fail_at_step == Some(self.steps) {
            Err(ExecError(format!("scripted failure at step {}", self.steps)))
        } else {
            Ok(StepOutput { sampled: specs().map(|spec| self.sample(&spec)).collect() })
        };
        let constrained = constrained.collect();
        self.in_flight.push_back(SimStep { outcome, constrained, over_at: begins_at + took });
        Ok(())
    }

    /// A scripted token that its mask forbids gives way to the first one that it allows.
    fn constrain(&mut self, masks: Masks<'_>) -> Result<(), ExecError> {
        let newest = self.in_flight.back_mut().expect("a step was launched");
        if let Ok(output) = &mut newest.outcome {
            for (entry, mask) in newest.constrained.iter().zip(masks.iter()) {
                let token = output.sampled[*entry].token().expect("every simulated entry is a token");
                let allowed = (token..=END_TOKEN).chain(0..token).find(|token| allows(mask, *token));
                output.sampled[*entry] = Sampled::Token { token: allowed.unwrap_or(token), logprobs: None };
            }
        }
        Ok(())
    }

    fn nears_end(&mut self) -> Result<bool, ExecError> {
        let step = self.in_flight.front().expect("asked for a step in flight");
        let Some(notice) = self.script.notice else { return Ok(false) };
        thread::sleep(step.over_at.saturating_duration_since(Instant::now() + notice));
        Ok(true)
    }

    fn finish(&mut self) -> Result<StepOutput, ExecError> {
        let SimStep { outcome, over_at, .. } =
            self.in_flight.pop_front().expect("finish is called once for each launch");
        thread::sleep(over_at.saturating_duration_since(Instant::now()));
        outcome
    }
}

/// The scripted token is likeliest, the tokens after it halve in probability.
fn logprobs(token: TokenId, k: u8) -> RawLogprobs {
    let rival = |rank: u8| ((token + TokenId::from(rank)) % (END_TOKEN + 1), -f32::from(rank + 1) * 2f32.ln());
    RawLogprobs { chosen: -2f32.ln(), top: (0..k).map(rival).collect() }
}
