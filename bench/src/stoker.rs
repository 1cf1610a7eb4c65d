//! Stoker as a contender: cases of the engine go to one in this process, cases of a process to an agent. Never holds both at
//! once: a GPU has room for one.

use std::path::PathBuf;

use anyhow::{Result, ensure};
use stoker_engine::{EngineLimits, MemoryPlan};
use stoker_figures::System;
use stoker_loadgen::{
    client::{Ask, Prompt},
    shape::Shape,
};

use crate::{
    agent::{Agent, AgentOptions, Resident},
    case::{Case, Size},
    in_process::{InProcess, Setup, Weights},
    prompts::Prompts,
    reading::Reading,
    session::Contender,
};

const WARM_UP_TOKENS: u32 = 8;

/// The engine and the agent on one model.
pub struct Stoker {
    setup: Setup,
    agent: PathBuf,
    /// Opens with the first case that needs it.
    engine: Option<InProcess>,
}

impl Stoker {
    /// Starts nothing yet. `agent` is the program.
    pub fn new(setup: Setup, agent: PathBuf) -> Self {
        Self { setup, agent, engine: None }
    }

    fn engine(&mut self) -> Result<&mut InProcess> {
        if self.engine.is_none() {
            let engine = InProcess::open(&self.setup)?;
            // What nvidia-smi shows while the cases run is to be these.
            let MemoryPlan { weights_bytes, workspace_bytes, kv_bytes, .. } = engine.engine().model().memory;
            let [weights, workspace, kv] = [weights_bytes, workspace_bytes, kv_bytes].map(|bytes| bytes >> 20);
            eprintln!("memory planned: weights {weights} MiB, workspace {workspace} MiB, KV cache {kv} MiB");
            self.engine = Some(engine);
        }
        Ok(self.engine.as_mut().expect("opened just above"))
    }

    /// An agent in place of the engine.
    fn agent(&mut self, limits: &EngineLimits) -> Result<Agent> {
        ensure!(self.setup.weights == Weights::Disk, "an agent reads its weights from disk");
        self.engine = None;
        let setup = Setup { limits: limits.clone(), ..self.setup.clone() };
        Agent::spawn(&AgentOptions::of(&self.agent, &setup))
    }

    /// An agent with the sizes that it has when nobody gives any: how it starts and how large it is must not depend on the
    /// other cases. How it computes is what figures say.
    fn plain_agent(&mut self) -> Result<Agent> {
        self.agent(&plain(&self.setup.limits))
    }

    fn start(&mut self) -> Result<Vec<Reading>> {
        let seconds = self.plain_agent()?.first_token(one_token())?;
        Ok(vec![Reading::new("seconds", seconds)])
    }

    fn idle(&mut self) -> Result<Vec<Reading>> {
        let mut agent = self.plain_agent()?;
        agent.first_token(one_token())?;
        let Resident { all_mb, mapped_model_mb } = agent.settled()?;
        Ok(vec![Reading::new("rss_mb", all_mb), Reading::new("rss_beyond_mb", all_mb - mapped_model_mb)])
    }

    fn http(&mut self, size: Size) -> Result<Vec<Reading>> {
        let in_process = self.engine()?.fresh_together(size)?;
        let vocab_size = self.engine()?.engine().model().vocab_size;
        let mut prompts = Prompts::new(vocab_size, self.setup.seed + 1);
        let mut agent = self.agent(&self.setup.limits.clone())?;
        agent.first_token(one_token())?;
        agent.together(&asks(&mut prompts, Size { completion_tokens: WARM_UP_TOKENS, ..size }))?;
        let (_, seconds) = agent.together(&asks(&mut prompts, size))?;
        Ok(vec![
            Reading::new("share_of_in_process", in_process / seconds),
            Reading::new("tok_s", size.all_completion_tokens() / seconds),
        ])
    }
}

/// What of an engine's limits is no size.
fn plain(limits: &EngineLimits) -> EngineLimits {
    let EngineLimits {
        threads,
        isa,
        batch_invariant,
        quantization,
        kv_cache_dtype,
        tensor_parallel,
        pipeline_parallel,
        ..
    } = *limits;
    EngineLimits {
        threads,
        isa,
        batch_invariant,
        quantization,
        kv_cache_dtype,
        tensor_parallel,
        pipeline_parallel,
        ..EngineLimits::default()
    }
}

/// The shortest prompt there is.
fn one_token() -> Prompt {
    Prompt::Tokens(vec![0])
}

fn asks(prompts: &mut Prompts, size: Size) -> Vec<Ask> {
    let prompts = prompts.many(size.requests, size.prompt_tokens).into_iter().map(Prompt::Tokens);
    prompts.map(|prompt| Ask { prompt, max_tokens: size.completion_tokens, seed: 0, shape: Shape::Text }).collect()
}

impl Contender for Stoker {
    fn system(&self) -> System {
        let stoker = System::stoker();
        match self.setup.limits.batch_invariant {
            true => System { name: format!("{}-invariant", stoker.name), ..stoker },
            false => stoker,
        }
    }

    fn warm_up(&mut self, case: Case) -> Result<()> {
        match case {
            // The first start reads the weights into the page cache.
            Case::Start | Case::Idle => self.start().map(drop),
            // Its sample opens an engine anew.
            Case::Http(_) => Ok(()),
            _ => self.engine()?.warm_up(case),
        }
    }

    fn sample(&mut self, case: Case) -> Result<Vec<Reading>> {
        match case {
            Case::Start => self.start(),
            Case::Idle => self.idle(),
            Case::Http(_) => {
                self.engine()?.warm_up(case)?;
                self.http(case.size())
            }
            _ => self.engine()?.sample(case),
        }
    }
}
