//! Starting an engine: reads and checks the model, plans memory, warms up, then starts the two threads.

use std::{
    collections::VecDeque,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::AtomicU64,
        mpsc::{channel, sync_channel},
    },
    thread,
    time::Instant,
};

use stoker_fit::{
    host::{kv_bytes_per_token, weight_bytes, workspace_bytes},
    memory::{MemoryBudget, MemoryError, MemoryNeeds, MemoryPlan},
};

use crate::{
    config::{DeviceChoice, EngineConfig, EngineLimits, KvCacheDtype, LimitError, ModelFiles, Quantization, StepSizes},
    engine_loop::EngineLoop,
    exec::{
        CacheSize, CpuExecutor, Executor,
        cuda::{CudaError, CudaModel, Gpus, OpenGpus},
    },
    handle::{Admission, EngineHandle, Shared},
    host,
    info::{Loaded, ModelInfo},
    kv::KvDtype,
    ledger::Ledger,
    matchers::Matchers,
    metrics::Meters,
    model::{Checkpoint, CheckpointFormat, ModelAssets, ModelConfig, ModelError, ModelSpec, WeightStore},
    ops::{CpuOps, Isa},
    output::{self, OUTPUT_QUEUE_MESSAGES},
    pool::Pool,
    prefix_news::PrefixTeller,
    sched::{Pace, SchedLimits, SchedState},
    text::Tokenizer,
};

/// Why an engine did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// A size cannot work.
    #[error(transparent)]
    Limits(#[from] LimitError),
    /// The model does not fit the memory.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The model's files cannot be used.
    #[error("load model: {0}")]
    Model(ModelError),
    /// The GPU that was asked for, or that a model was being brought to.
    #[error("GPU: {0}")]
    Cuda(CudaError),
    /// Random weights are made on a GPU.
    #[error("random weights need a GPU, and the model would run on the CPU: give it files with weights")]
    RandomOnCpu,
    /// Quantised products are a GPU's.
    #[error("quantization {} needs a GPU of compute capability 9.0, and the model would run on the CPU: leave it out", .0.name())]
    QuantizedOnCpu(Quantization),
    /// The cache was to be in a format that only GPUs have.
    #[error("a KV cache in {} needs a GPU, and the model would run on the CPU: leave kv_cache_dtype out", .0.name())]
    KvCacheOnCpu(KvCacheDtype),
    /// The compute threads cannot be started.
    #[error("start {threads} compute threads: {reason}")]
    Threads {
        /// How many.
        threads: usize,
        /// What the operating system said.
        reason: String,
    },
}

// By hand: the text above says the cause already, and a `source` would have it said again.
impl From<ModelError> for StartError {
    fn from(error: ModelError) -> Self {
        Self::Model(error)
    }
}

impl From<CudaError> for StartError {
    fn from(error: CudaError) -> Self {
        Self::Cuda(error)
    }
}

/// Starts engines.
#[derive(Debug)]
pub struct Engine;

/// What an executor does not know and an engine needs.
#[derive(Debug)]
pub struct EngineParts {
    /// The model behind the executor.
    pub model: ModelInfo,
    /// Its tokenizer.
    pub tokenizer: Tokenizer,
    /// The scheduler's bounds.
    pub sched: SchedLimits,
    /// Requests waiting for their first step at most.
    pub max_waiting: usize,
}

impl Engine {
    /// Reads the model, plans memory, warms up with a real step, then serves. Blocking; `progress` hears 0 to 1.
    pub fn start(config: EngineConfig, progress: impl Fn(f32) + Send + 'static) -> Result<EngineHandle, StartError> {
        let progress = Mutex::new(progress);
        let report = |share| (progress.lock().unwrap_or_else(PoisonError::into_inner))(share);
        let (executor, parts) = open(&config, &report)?;
        report(1.0);
        Ok(Self::start_with(executor, parts))
    }

    /// Starts the engine and output threads over an executor that is ready to step.
    pub fn start_with(executor: Box<dyn Executor>, parts: EngineParts) -> EngineHandle {
        let EngineParts { model, tokenizer, sched, max_waiting } = parts;
        let n_blocks = model.memory.kv_blocks as usize;
        let abilities = executor.abilities();
        let sched = SchedLimits { copies_blocks: executor.copies_blocks(), ..sched };
        let matchers = Matchers::new(model.vocab_size as usize, &sched.eos);
        let tokenizer = Arc::new(tokenizer);
        let meters = Arc::new(Meters::new(n_blocks, Instant::now()));
        // Until a step has started them, those that can run at once stand in line too.
        let admission = Arc::new(Admission::new(max_waiting + sched.max_num_seqs));
        let (commands, inbox) = channel();
        let (prefixes, prefix_news) = PrefixTeller::channel();
        let (output, messages) = sync_channel(OUTPUT_QUEUE_MESSAGES);

        let ledger = Ledger::new(Arc::clone(&tokenizer), Arc::clone(&meters));
        let engine_commands = commands.clone();
        spawn("engine-output", move || output::run(messages, ledger, engine_commands));
        let engine_loop = EngineLoop {
            inbox,
            output: output.clone(),
            executor,
            state: SchedState::new(n_blocks),
            limits: sched,
            admission: Arc::clone(&admission),
            meters: Arc::clone(&meters),
            prefixes,
            in_flight: VecDeque::new(),
            matchers,
            pace: Pace::default(),
            last_over: Instant::now(),
        };
        let thread = spawn("engine", move || engine_loop.run());
        EngineHandle::new(Shared {
            commands,
            output,
            admission,
            meters,
            tokenizer,
            model,
            abilities,
            next_id: AtomicU64::new(0),
            prefix_news: Mutex::new(Some(prefix_news)),
            thread: Mutex::new(Some(thread)),
        })
    }
}

/// A model's files, read and checked, before a back end takes the weights.
#[derive(Debug)]
pub(crate) struct ReadModel {
    pub(crate) config: ModelConfig,
    pub(crate) assets: ModelAssets,
    pub(crate) weights: WeightSource,
}

/// Where weights come from.
#[derive(Debug)]
pub(crate) enum WeightSource {
    /// Files.
    Stored(WeightStore),
    /// Nowhere: random numbers.
    Random { seed: u64 },
}

impl ReadModel {
    pub(crate) fn read(config: &EngineConfig) -> Result<Self, StartError> {
        let (model, assets, weights) = match config.model {
            ModelFiles::Random { seed, .. } => {
                let (model, assets) = Checkpoint::without_weights(&config.model)?;
                (model, assets, WeightSource::Random { seed })
            }
            ModelFiles::Directory(_) | ModelFiles::Builtin { .. } => {
                let Checkpoint { config: model, assets, weights } = Checkpoint::open(&config.model)?;
                (model, assets, WeightSource::Stored(weights))
            }
        };
        Ok(Self { config: model, assets, weights })
    }

    /// What computes it and where its weights are.
    pub(crate) fn spec(&self) -> Result<ModelSpec, ModelError> {
        let format = match &self.weights {
            WeightSource::Stored(store) => store.format(),
            WeightSource::Random { .. } => CheckpointFormat::HuggingFace,
        };
        ModelSpec::new(&self.config, format)
    }

    /// The scheduler's bounds: as asked, else by the device.
    pub(crate) fn sched_limits(&self, limits: &EngineLimits, defaults: StepSizes) -> Result<SchedLimits, LimitError> {
        limits.validate(self.config.context_limit(limits.max_model_len), &self.assets.eos, defaults)
    }
}

/// Opens the model where it shall compute, and warms up.
fn open(
    config: &EngineConfig,
    progress: &(dyn Fn(f32) + Sync),
) -> Result<(Box<dyn Executor>, EngineParts), StartError> {
    // Both take a while, and neither waits for the other.
    let (read, opened) = thread::scope(|scope| {
        let opened = scope.spawn(|| open_gpus(config));
        (ReadModel::read(config), opened.join().expect("opening GPUs does not panic"))
    });
    let read = read?;
    if let Some(gpus) = choose_gpus(config, opened, &read)? {
        let CudaModel { executor, parts } = CudaModel::take(gpus, read, &config.limits, progress)?;
        return Ok((Box::new(executor), parts));
    }
    let LoadedModel { mut executor, parts } =
        LoadedModel::take(read, &config.limits, cpu_ops(&config.limits)?, progress)?;
    executor.warm_up();
    Ok((Box::new(executor), parts))
}

/// The GPUs that are asked for, or those that may be there; none where a CPU is.
fn open_gpus(config: &EngineConfig) -> Option<Result<OpenGpus, CudaError>> {
    let first = match config.device {
        DeviceChoice::Cpu => return None,
        DeviceChoice::Cuda(ordinal) => ordinal,
        DeviceChoice::Auto => 0,
    };
    Some(OpenGpus::open(first, &config.limits))
}

/// The GPUs, if they were asked for or such that can run the model are there.
fn choose_gpus(
    config: &EngineConfig,
    opened: Option<Result<OpenGpus, CudaError>>,
    model: &ReadModel,
) -> Result<Option<Gpus>, StartError> {
    let Some(opened) = opened else { return Ok(None) };
    match Gpus::of(opened, model, &config.limits) {
        Ok(gpus) => Ok(Some(gpus)),
        Err(problem) if matches!(config.device, DeviceChoice::Cuda(_)) => Err(problem.into()),
        Err(absent) if absent.is_absence() => {
            tracing::info!(reason = %absent, "computing on the CPU");
            Ok(None)
        }
        Err(refusal) if refusal.is_refusal() => Err(refusal.into()),
        Err(problem) => {
            tracing::warn!(reason = %problem, "the GPU is not used: computing on the CPU");
            Ok(None)
        }
    }
}

/// A model ready to step on the CPU, and what the engine needs beside it.
#[derive(Debug)]
pub struct LoadedModel {
    /// The model with its KV cache.
    pub executor: CpuExecutor,
    /// The rest.
    pub parts: EngineParts,
}

/// Share of the start that is over when the weights are taken in; the rest is the warm-up step.
const WEIGHTS_SHARE: f32 = 0.95;

impl LoadedModel {
    /// Reads and checks everything, plans memory, then takes the weights in.
    pub fn open(config: &EngineConfig, progress: &(dyn Fn(f32) + Sync)) -> Result<Self, StartError> {
        Self::take(ReadModel::read(config)?, &config.limits, cpu_ops(&config.limits)?, progress)
    }

    fn take(
        read: ReadModel,
        limits: &EngineLimits,
        ops: Vec<CpuOps>,
        progress: &(dyn Fn(f32) + Sync),
    ) -> Result<Self, StartError> {
        if let Some(quantization) = limits.quantization {
            return Err(StartError::QuantizedOnCpu(quantization));
        }
        if let Some(dtype) = limits.kv_cache_dtype {
            return Err(StartError::KvCacheOnCpu(dtype));
        }
        let sched = read.sched_limits(limits, StepSizes::CPU)?;
        let ReadModel { config: model_config, assets, weights } = read;
        let WeightSource::Stored(weights) = weights else { return Err(StartError::RandomOnCpu) };
        let budget = MemoryBudget::host(limits.memory_limit_bytes.unwrap_or_else(host::memory_limit_bytes));
        // No more exact than the weights are.
        let dtype = if weights.is_bf16_or_less() { KvDtype::Bf16 } else { KvDtype::F32 };
        let spec = ModelSpec::new(&model_config, weights.format())?;
        spec.check_ranks(ops.len())?;
        spec.check_stages(limits.pipeline_parallel)?;
        let held = weights.held_by(&spec, weight_bytes)?;
        let needs = MemoryNeeds {
            weights_bytes: held.values().sum(),
            workspace_bytes: workspace_bytes(&model_config, sched.host_step()),
            kv_bytes_per_token: kv_bytes_per_token(&spec, ops.len(), dtype.bytes()),
        };
        let memory = MemoryPlan::new(needs, limits.cache_use(&sched), budget)?;
        let take = |share| progress(WEIGHTS_SHARE * share);
        let device = match &ops[..] {
            [ops] => format!("cpu, {} threads, {}", ops.n_threads(), ops.isa()),
            ranks => format!("cpu, {} ranks of {} threads, {}", ranks.len(), ranks[0].n_threads(), ranks[0].isa()),
        };
        let device = match limits.pipeline_parallel {
            1 => device,
            n_stages => format!("{device}, {n_stages} stages"),
        };
        let cache = CacheSize {
            dtype,
            n_blocks: memory.kv_blocks as usize,
            n_positions: sched.max_model_len,
            n_sequences: sched.max_num_seqs,
        };
        let threads = rank_threads("engine-rank", ops.len())?;
        let executor = CpuExecutor::load((ops, threads), (&spec, limits.pipeline_parallel), &weights, cache, &take)?;
        let n_params = spec.n_params();
        let loaded = Loaded { n_params, dtype: dtype_name(&model_config, &weights), held, memory, device };
        let info = ModelInfo::new(&model_config, &assets, &sched, loaded);
        let max_waiting = limits.max_waiting as usize;
        Ok(Self { executor, parts: EngineParts { model: info, tokenizer: assets.tokenizer, sched, max_waiting } })
    }
}

/// A rank's threads each: together as many as there are to be.
fn cpu_ops(limits: &EngineLimits) -> Result<Vec<CpuOps>, StartError> {
    let (threads, n_ranks) = (limits.threads.unwrap_or_else(host::n_cores), limits.tensor_parallel.max(1));
    let isa = limits.isa.unwrap_or_else(Isa::best);
    if let Some(reason) = host::crowding(threads, host::n_cpus(), host::cpu_quota()) {
        tracing::warn!("{reason}");
    }
    if let Some(reason) = host::far_memory() {
        tracing::warn!("{reason}");
    }
    let ops = (0..n_ranks).map(|_| CpuOps::new((threads / n_ranks).max(1), isa));
    ops.collect::<Result<_, _>>().map_err(|error| StartError::Threads { threads, reason: error.to_string() })
}

/// A thread a rank, the caller's for the first.
pub(crate) fn rank_threads(name: &str, n_ranks: usize) -> Result<Pool, StartError> {
    Pool::named(name, n_ranks).map_err(|error| StartError::Threads { threads: n_ranks, reason: error.to_string() })
}

/// What the weights are stored as, in one word.
fn dtype_name(config: &ModelConfig, weights: &WeightStore) -> String {
    config.quantization.as_ref().map_or_else(|| weights.format_name(), |quantization| quantization.name().into())
}

fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> thread::JoinHandle<()> {
    thread::Builder::new().name(name.into()).spawn(body).expect("the operating system gives a process two threads")
}
