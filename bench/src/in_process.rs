//! The engine inside this process, asked through its public handle. Times from outside, as a caller sees them; chooses no case.

use std::{
    collections::BTreeMap,
    num::NonZero,
    path::PathBuf,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use crate::{
    case::{Case, OWN_TOKENS, PREFIX_COMPLETION_TOKENS, PREFIX_REQUESTS, PREFIX_TOKENS, Reads, Size},
    constrained::{self, TokenByToken},
    mix::{self, Answer, Arrival},
    prompts::Prompts,
    reading::{Phases, Reading, step_readings},
    sampled::{Asked, Kind},
};
use anyhow::{Context, Result, bail, ensure};
use stoker_engine::{
    DeviceChoice, Engine, EngineConfig, EngineHandle, EngineLimits, FinishReason, KvCacheDtype, ModelFiles, Pooling,
    Quantization, RejectReason, Request, RequestEvent, RequestStream, SamplingParams, StopParams, TokenId,
    constraint::Constraint,
    grammar::{GrammarCompiler, GrammarSpec},
    ops::Isa,
};

/// Completion tokens of a warm-up: a prefill and some decode steps of the same batch.
const WARM_UP_TOKENS: u32 = 8;
/// Sequences decoded together at most unless told otherwise; more requests wait, as in the peers' baselines.
pub const MAX_NUM_SEQS: u32 = 256;
const KV_BLOCK_TOKENS: u32 = 16;

/// Where the engine takes weights from.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, clap::ValueEnum)]
pub enum Weights {
    /// The files in the model's directory.
    #[default]
    Disk,
    /// Random numbers made on the GPU: nothing is written or read, and only the engine in this process can have them.
    Device,
}

/// A model and the sizes it is run with.
#[derive(Clone, Debug)]
pub struct Setup {
    /// The model: a directory, or a GGUF file.
    pub model: PathBuf,
    /// Its weights.
    pub weights: Weights,
    /// What computes.
    pub device: DeviceChoice,
    /// Sizes of the engine.
    pub limits: EngineLimits,
    /// Seed of the prompts.
    pub seed: u64,
}

/// What of the engine's sizes a user may set.
#[derive(Clone, Copy, Debug)]
pub struct Tuning {
    /// Compute threads.
    pub threads: Option<usize>,
    /// Instructions.
    pub isa: Option<Isa>,
    /// Sequences a step at the most.
    pub max_num_seqs: u32,
    /// Tokens a step; at least the sequences of the largest case.
    pub max_batched_tokens: Option<u32>,
    /// Measure the batch-invariant mode.
    pub batch_invariant: bool,
    /// How weights are quantised when they are loaded.
    pub quantization: Option<Quantization>,
    /// GPUs that share the model.
    pub tensor_parallel: usize,
    /// Stages that its layers are cut into.
    pub pipeline_parallel: usize,
    /// How keys and values are stored.
    pub kv_cache_dtype: Option<KvCacheDtype>,
    /// Time between two tokens that prompts of others may take.
    pub itl_target: Option<Duration>,
}

impl Default for Tuning {
    fn default() -> Self {
        Self {
            threads: None,
            isa: None,
            max_num_seqs: MAX_NUM_SEQS,
            max_batched_tokens: None,
            batch_invariant: false,
            quantization: None,
            tensor_parallel: 1,
            pipeline_parallel: 1,
            kv_cache_dtype: None,
            itl_target: None,
        }
    }
}

impl Tuning {
    /// Threads as the engine chooses them.
    pub fn n_threads(self) -> usize {
        self.threads.unwrap_or_else(|| thread::available_parallelism().map_or(1, NonZero::get))
    }
}

/// The smallest engine that holds every case at once, so that memory says what the work needs.
pub fn limits_for(cases: &[Case], tuning: Tuning) -> EngineLimits {
    let sizes: Vec<Size> = cases.iter().map(|case| case.size()).collect();
    let most = |of: &dyn Fn(&Size) -> u32| sizes.iter().map(of).max().unwrap_or(1);
    let max_num_seqs = most(&|size| size.requests).min(tuning.max_num_seqs);
    let context = |size: &Size| size.context_tokens() + 1;
    let in_blocks = |size: &Size| context(size).next_multiple_of(KV_BLOCK_TOKENS);
    EngineLimits {
        max_model_len: cases.iter().map(|case| case.positions()).max(),
        max_num_seqs: Some(max_num_seqs),
        max_batched_tokens: tuning.max_batched_tokens.map(|tokens| tokens.max(max_num_seqs)),
        max_waiting: most(&|size| size.requests).max(EngineLimits::default().max_waiting),
        kv_cache_tokens: Some(most(&|size| size.requests.min(max_num_seqs) * in_blocks(size))),
        threads: tuning.threads,
        isa: tuning.isa,
        batch_invariant: tuning.batch_invariant,
        quantization: tuning.quantization,
        tensor_parallel: tuning.tensor_parallel,
        pipeline_parallel: tuning.pipeline_parallel,
        kv_cache_dtype: tuning.kv_cache_dtype,
        itl_target: tuning.itl_target,
        ..EngineLimits::default()
    }
}

/// A running engine and its prompts.
pub struct InProcess {
    engine: EngineHandle,
    prompts: Prompts,
    /// What warm requests begin with.
    prefix: Vec<TokenId>,
    /// Seconds of the prefill alone of `concurrent_N`, by N.
    prefill_seconds: BTreeMap<u32, f64>,
}

impl InProcess {
    /// Starts the engine; blocking.
    pub fn open(setup: &Setup) -> Result<Self> {
        let directory = setup.model.clone();
        let model = match setup.weights {
            Weights::Disk => ModelFiles::Directory(directory),
            Weights::Device => ModelFiles::Random { directory, seed: setup.seed },
        };
        let config = EngineConfig { model, limits: setup.limits.clone(), device: setup.device };
        let engine =
            Engine::start(config, |_| ()).with_context(|| format!("start the engine on {}", setup.model.display()))?;
        let prompts = Prompts::new(engine.model().vocab_size, setup.seed);
        Ok(Self { engine, prompts, prefix: Vec::new(), prefill_seconds: BTreeMap::new() })
    }

    /// The handle, for readings that the engine keeps itself.
    pub fn engine(&self) -> &EngineHandle {
        &self.engine
    }

    /// Prompts that nobody has seen.
    pub(crate) fn prompts(&mut self) -> &mut Prompts {
        &mut self.prompts
    }

    /// Work of the case's kind that is not counted.
    pub fn warm_up(&mut self, case: Case) -> Result<()> {
        let size = case.size();
        let short = Size { completion_tokens: size.completion_tokens.min(WARM_UP_TOKENS), ..size };
        match case {
            // Long enough to warm itself.
            Case::Offline(_) | Case::Balanced(_) | Case::Mix(_) | Case::Beside(_) => Ok(()),
            Case::PrefixWarm | Case::SharedPrefix => self.warm_prefix().map(drop),
            _ => self.fresh_together(short).map(drop),
        }
    }

    /// One sample of a case that needs no process of its own.
    pub fn sample(&mut self, case: Case) -> Result<Vec<Reading>> {
        let size = case.size();
        match case {
            Case::Prefill(_) | Case::Ttft(_) => Ok(self.alone(size)?.readings(case)),
            Case::Decode(_) | Case::SingleStream => {
                self.engine.take_samples();
                let readings = self.alone(size)?.readings(case);
                Ok(self.with_steps(readings))
            }
            Case::Concurrent(n) => {
                let readings = self.concurrent(n, size)?.readings(case);
                Ok(self.with_steps(readings))
            }
            Case::Offline(_) | Case::Balanced(_) => Ok(whole(self.fresh_together(size)?).readings(case)),
            Case::PrefixWarm => Ok(whole(self.warm_prefix()?).readings(case)),
            Case::SharedPrefix => self.shared_prefix(size),
            Case::Sampled(kind, _) => self.sampled(size, kind),
            Case::Neighbour(_) => self.neighbour(size),
            Case::Constrained(_) => self.constrained(size),
            Case::Required(_) => self.required(size),
            Case::Read(reads, _) => self.read(size, reads),
            Case::Mix(rate) => Ok(mix::readings(&self.answers(&mix::arrivals(rate))?)),
            Case::Beside(tokens) => Ok(mix::beside_readings(&self.answers(&mix::beside(tokens))?)),
            Case::Start | Case::Idle | Case::Http(_) => {
                bail!("{case} is a case of a process, not of an engine in this one")
            }
        }
    }

    /// The peers' definition: what decoding costs is the whole less a prefill of as many prompts, measured once.
    fn concurrent(&mut self, n: u32, size: Size) -> Result<Phases> {
        let prefill = match self.prefill_seconds.get(&n) {
            Some(seconds) => *seconds,
            None => self.fresh_together(Size { completion_tokens: 1, ..size })?,
        };
        self.prefill_seconds.insert(n, prefill);
        // Only the steps of the counted run are this sample's.
        self.engine.take_samples();
        Ok(Phases { first: prefill, last: self.fresh_together(size)? })
    }

    /// What the steps since the last call were like, where a device computes. On a CPU the host's own threads compute, and
    /// there is no time beside it.
    fn with_steps(&self, mut readings: Vec<Reading>) -> Vec<Reading> {
        let steps = self.engine.take_samples().steps;
        if !self.engine.model().device.starts_with("cpu") {
            readings.extend(step_readings(&steps));
        }
        readings
    }

    fn shared_prefix(&mut self, size: Size) -> Result<Vec<Reading>> {
        self.warm_prefix()?;
        let shared = self.prompts.after(&self.prefix, PREFIX_REQUESTS, OWN_TOKENS);
        let shared = self.together(shared, PREFIX_COMPLETION_TOKENS)?;
        let unshared = self.fresh_together(size)?;
        Ok(vec![Reading::new("gain", unshared / shared), Reading::new("seconds", shared)])
    }

    /// Greedy first, so that both find the chip as warm.
    fn sampled(&mut self, size: Size, kind: Kind) -> Result<Vec<Reading>> {
        let vocab_size = self.engine.model().vocab_size;
        let greedy = self.all_ended(size, |idx| Kind::Greedy.asked(vocab_size, idx as u64))?;
        let seconds = self.all_ended(size, |idx| kind.asked(vocab_size, idx as u64))?;
        let tok_s = size.all_completion_tokens() / seconds;
        Ok(vec![Reading::new("share_of_greedy", greedy / seconds), Reading::new("tok_s", tok_s)])
    }

    /// Free first, so that both find the chip as warm. Schemas are compiled before.
    fn constrained(&mut self, size: Size) -> Result<Vec<Reading>> {
        let schemas = self.compiled(size, constrained::schema)?;
        let vocab_size = self.engine.model().vocab_size;
        let free = || Kind::Greedy.asked(vocab_size, 0);
        let bound = |idx: usize| {
            let Asked { sampling, logprobs } = free();
            Asked { sampling: SamplingParams { constraint: Some(schemas[idx].clone()), ..sampling }, logprobs }
        };
        let without = self.all_ended(size, |_| free())?;
        let seconds = self.all_ended(size, bound)?;
        let tok_s = size.all_completion_tokens() / seconds;
        Ok(vec![Reading::new("share_of_free", without / seconds), Reading::new("tok_s", tok_s)])
    }

    /// Token by token first. The same tokens both times, but for what prompts make of them.
    fn required(&mut self, size: Size) -> Result<Vec<Reading>> {
        let schemas = self.compiled(size, constrained::required)?;
        let (vocab_size, end) = (self.engine.model().vocab_size, self.engine.model().eos[0]);
        let bound = |constraint: Constraint| {
            let Asked { sampling, logprobs } = Kind::Greedy.asked(vocab_size, 0);
            Asked { sampling: SamplingParams { constraint: Some(constraint), ..sampling }, logprobs }
        };
        let token_by_token = |idx: usize| {
            let grammar = TokenByToken { inner: schemas[idx].clone(), end };
            bound(Constraint(Arc::new(grammar)))
        };
        let prompts = self.prompts.many(size.requests, size.prompt_tokens);
        // An end token never comes: one by one, a mask says that it might.
        let stop = StopParams { min_tokens: size.completion_tokens, ..endless(size.completion_tokens) };
        let without = self.all_of(&prompts, &stop, token_by_token)?;
        let before = self.engine.load();
        let seconds = self.all_of(&prompts, &stop, |idx| bound(schemas[idx].clone()))?;
        let after = self.engine.load();
        let n_tokens = (after.generation_tokens - before.generation_tokens) as f64;
        Ok(vec![
            Reading::new("gain", without / seconds),
            Reading::new("tok_s", size.all_completion_tokens() / seconds),
            Reading::new("forced_share", (after.forced_tokens - before.forced_tokens) as f64 / n_tokens),
        ])
    }

    /// Prompts of which nothing is read first, so that both find the chip as warm.
    fn read(&mut self, size: Size, reads: Reads) -> Result<Vec<Reading>> {
        let without = self.fresh_together(size)?;
        let prompts = self.prompts.many(size.requests, size.prompt_tokens);
        let vocab_size = self.engine.model().vocab_size;
        let ask = |prompt| {
            let Asked { sampling, .. } = Kind::Greedy.asked(vocab_size, 0);
            let plain = Request { prompt, sampling, stop: endless(size.completion_tokens), ..Request::default() };
            self.engine.submit(match reads {
                Reads::Embedding => Request { pooling: Some(Pooling::Mean), ..plain },
                Reads::Scores => Request { prompt_logprobs: Some(5), ..plain },
            })
        };
        let begun = Instant::now();
        let mut streams = prompts.into_iter().map(ask).collect::<Result<Vec<_>, _>>()?;
        streams.iter_mut().try_for_each(|stream| to_the_end(stream, size.completion_tokens))?;
        let seconds = begun.elapsed().as_secs_f64();
        let n_tokens = f64::from(size.requests * size.prompt_tokens);
        Ok(vec![Reading::new("share_of_unread", without / seconds), Reading::new("tok_s", n_tokens / seconds)])
    }

    /// A schema a request.
    fn compiled(&self, size: Size, schema: fn(u32) -> GrammarSpec) -> Result<Vec<Constraint>> {
        let compiler = GrammarCompiler::new(self.engine.tokenizer(), &self.engine.model().eos)?;
        (0..size.requests).map(|n| Ok(compiler.compile(&schema(n))?.0)).collect()
    }

    /// Until the greedy requests have ended: the last one is not waited for.
    fn neighbour(&mut self, size: Size) -> Result<Vec<Reading>> {
        let last = size.requests as usize - 1;
        let vocab_size = self.engine.model().vocab_size;
        let greedy = self.all_ended(size, |idx| Kind::Greedy.asked(vocab_size, idx as u64))?;
        let kind_of = |idx| if idx == last { Kind::Everything } else { Kind::Greedy };
        let beside = self.all_ended(size, |idx| kind_of(idx).asked(vocab_size, idx as u64))?;
        Ok(vec![Reading::new("loss", 1.0 - greedy / beside)])
    }

    /// Every request has a thread that sends it when it is due and notes when its tokens come.
    fn answers(&mut self, arrivals: &[Arrival]) -> Result<Vec<Answer>> {
        let prompts: Vec<_> = arrivals.iter().map(|arrival| self.prompts.fresh(arrival.prompt_tokens)).collect();
        let (engine, begun) = (&*self, Instant::now());
        thread::scope(|scope| {
            let ask = |(arrival, prompt)| scope.spawn(move || engine.answer(begun, arrival, prompt));
            let asked: Vec<_> = arrivals.iter().zip(prompts).map(ask).collect();
            asked.into_iter().map(|asked| asked.join().expect("it does not panic")).collect()
        })
    }

    fn answer(&self, begun: Instant, arrival: &Arrival, prompt: Vec<TokenId>) -> Result<Answer> {
        let due = begun + Duration::from_secs_f64(arrival.at);
        thread::sleep(due.saturating_duration_since(Instant::now()));
        let mut stream = self.greedy(prompt, arrival.completion_tokens)?;
        let mut answer = Answer { prompt_tokens: arrival.prompt_tokens, tokens: Vec::new() };
        while let Some(event) = stream.blocking_next() {
            match event {
                RequestEvent::Delta { tokens, .. } => answer.tokens.extend(tokens.iter().map(|_| due.elapsed())),
                other => ensure_whole(&other, arrival.completion_tokens)?,
            }
        }
        Ok(answer)
    }

    /// Seconds until all but the last of fresh requests have ended, and for a single one until it has.
    fn all_ended(&mut self, size: Size, asked_of: impl Fn(usize) -> Asked) -> Result<f64> {
        let prompts = self.prompts.many(size.requests, size.prompt_tokens);
        self.all_of(&prompts, &endless(size.completion_tokens), asked_of)
    }

    /// The same of these prompts.
    fn all_of(&self, prompts: &[Vec<TokenId>], stop: &StopParams, asked_of: impl Fn(usize) -> Asked) -> Result<f64> {
        let begun = Instant::now();
        let submit = |(idx, prompt): (usize, &Vec<TokenId>)| self.submit(prompt.clone(), stop.clone(), asked_of(idx));
        let mut streams = prompts.iter().enumerate().map(submit).collect::<Result<Vec<_>, _>>()?;
        let last = if streams.len() > 1 { streams.pop() } else { None };
        streams.iter_mut().try_for_each(|stream| to_the_end(stream, stop.max_tokens))?;
        let seconds = begun.elapsed().as_secs_f64();
        last.into_iter().try_for_each(|mut stream| to_the_end(&mut stream, stop.max_tokens))?;
        Ok(seconds)
    }

    /// Seconds to the first token after the prefix, which is computed first if nobody has sent it yet.
    fn warm_prefix(&mut self) -> Result<f64> {
        if self.prefix.is_empty() {
            self.prefix = self.prompts.fresh(PREFIX_TOKENS);
            let first = self.prompts.after(&self.prefix, 1, OWN_TOKENS);
            self.together(first, 1)?;
        }
        let prompts = self.prompts.after(&self.prefix, 1, OWN_TOKENS);
        self.together(prompts, 1)
    }

    /// The same for fresh prompts.
    pub fn fresh_together(&mut self, size: Size) -> Result<f64> {
        let prompts = self.prompts.many(size.requests, size.prompt_tokens);
        self.together(prompts, size.completion_tokens)
    }

    /// Seconds from the first submission until the last request has ended.
    fn together(&self, prompts: Vec<Vec<TokenId>>, completion_tokens: u32) -> Result<f64> {
        let begun = Instant::now();
        let streams: Vec<_> =
            prompts.into_iter().map(|prompt| self.greedy(prompt, completion_tokens)).collect::<Result<_>>()?;
        for mut stream in streams {
            to_the_end(&mut stream, completion_tokens)?;
        }
        Ok(begun.elapsed().as_secs_f64())
    }

    /// One fresh prompt by itself.
    pub(crate) fn alone(&mut self, size: Size) -> Result<Phases> {
        let prompt = self.prompts.fresh(size.prompt_tokens);
        let begun = Instant::now();
        let mut stream = self.greedy(prompt, size.completion_tokens)?;
        let event = stream.blocking_next().context("a stream begins with an event")?;
        let first = begun.elapsed().as_secs_f64();
        ensure!(matches!(event, RequestEvent::Delta { .. }), "the request ended before its first token: {event:?}");
        to_the_end(&mut stream, size.completion_tokens)?;
        Ok(Phases { first, last: begun.elapsed().as_secs_f64() })
    }

    pub(crate) fn greedy(&self, prompt: Vec<TokenId>, max_tokens: u32) -> Result<RequestStream> {
        Ok(self.try_greedy(prompt, max_tokens)?)
    }

    /// For a load that may be more than the engine takes.
    pub(crate) fn try_greedy(&self, prompt: Vec<TokenId>, max_tokens: u32) -> Result<RequestStream, RejectReason> {
        self.submit(prompt, endless(max_tokens), Kind::Greedy.asked(self.engine.model().vocab_size, 0))
    }

    fn submit(&self, prompt: Vec<TokenId>, stop: StopParams, asked: Asked) -> Result<RequestStream, RejectReason> {
        let Asked { sampling, logprobs } = asked;
        self.engine.submit(Request { prompt, sampling, stop, logprobs, ..Request::default() })
    }
}

/// So many tokens, whatever they are.
fn endless(max_tokens: u32) -> StopParams {
    StopParams { max_tokens, ignore_eos: true, ..StopParams::default() }
}

/// A sample whose first tokens nobody told apart from its last.
fn whole(seconds: f64) -> Phases {
    Phases { first: seconds, last: seconds }
}

/// A request that did less work than the case says would make the figure a lie.
pub(crate) fn to_the_end(stream: &mut RequestStream, completion_tokens: u32) -> Result<()> {
    while let Some(event) = stream.blocking_next() {
        if let RequestEvent::Finished { .. } = event {
            return ensure_whole(&event, completion_tokens);
        }
    }
    bail!("a stream ended without a terminal")
}

fn ensure_whole(event: &RequestEvent, completion_tokens: u32) -> Result<()> {
    let RequestEvent::Finished { reason, usage, .. } = event else { return Ok(()) };
    let n_tokens = usage.completion_tokens;
    ensure!(
        *reason == FinishReason::Length && n_tokens == completion_tokens,
        "a request ended with {reason:?} after {n_tokens} of {completion_tokens} tokens"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_engine_is_as_large_as_the_largest_case() {
        let limits = limits_for(&[Case::Ttft(2048), Case::Concurrent(8)], Tuning::default());
        assert_eq!(limits.max_model_len, Some(2050));
        assert_eq!(limits.max_num_seqs, Some(8));
        assert_eq!(limits.kv_cache_tokens, Some(8 * 784));
    }

    #[test]
    fn a_thousand_requests_wait_for_a_place_among_256() {
        let limits = limits_for(&[Case::Offline(1000)], Tuning::default());
        assert_eq!((limits.max_num_seqs, limits.max_waiting), (Some(256), 1000));
    }

    #[test]
    fn more_at_once_have_room_for_as_many() {
        let tuning = Tuning { max_num_seqs: 512, ..Tuning::default() };
        let limits = limits_for(&[Case::Balanced(1000)], tuning);
        assert_eq!((limits.max_num_seqs, limits.max_model_len), (Some(512), Some(2049)));
        assert_eq!(limits.kv_cache_tokens, Some(512 * 2064));
    }
}
