//! From a model that was read to an executor on its GPUs: whether each GPU and the kernels can run it, the memory plan, the
//! weights' way there.

use std::{thread, time::Instant};

use stoker_fit::{
    gpu::Capacity,
    memory::{DeviceMemory, MemoryBudget, MemoryNeeds, MemoryPlan},
};
use stoker_kernels::{
    Device, KernelError, Kernels,
    blas::Blas,
    cache::KvFormat,
    choose::{Chip, Numerics},
    device::Link,
    launch::PrefillKernel,
    plan::{PrefillSplit, SplitPolicy},
    ranks::RANKS_MAX,
};

use super::{
    batch::BatchLimits,
    executor::CudaRank,
    forward::{Forward, ForwardParts},
    memory::{Memory, MemorySize, Others},
    ranks::{CudaExecutor, on_threads},
    shape::ModelShape,
    weights,
};
use crate::{
    config::{EngineConfig, EngineLimits, StepSizes},
    each::each,
    engine::{EngineParts, ReadModel, StartError, WeightSource, rank_threads},
    exec::ExecError,
    info::{Loaded, ModelInfo},
    model::{BoundWeights, ModelError, ModelSpec, RopeTable, spec::Rank},
    sched::SchedLimits,
};

/// Share of the start that is over when the weights are on the GPU; the rest is the warm-up.
const WEIGHTS_SHARE: f32 = 0.9;

/// Rows that a cluster of two tiles multiplies together. A step with one row more takes about as long as one with as many more: 1,024
/// rows of an 8B model take 23.2 ms on an H200, 1,040 27.4 and 1,280 29.0.
const TILE_ROWS: usize = 256;

/// Why a model does not run on the GPU.
#[derive(Debug, thiserror::Error)]
pub enum CudaError {
    /// The GPU, its driver or its libraries.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// The model has something that the kernels have not.
    #[error("the model does not run on the GPU yet: {0}")]
    Uncovered(String),
    /// The model's files.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// Settings that the GPU cannot keep: sizes that some step could not be launched with, a quantisation that it has no kernels for.
    #[error("{0}")]
    Refused(String),
    /// The first steps.
    #[error("warm up: {0}")]
    WarmUp(ExecError),
}

impl CudaError {
    /// The machine simply has no GPU: nothing to warn of.
    pub fn is_absence(&self) -> bool {
        matches!(self, Self::Kernel(KernelError::NoDriver | KernelError::NoDevice { .. }))
    }

    /// The GPU cannot keep a promise that the settings make: computing elsewhere is not what was asked.
    pub fn is_refusal(&self) -> bool {
        matches!(self, Self::Refused(_) | Self::Kernel(KernelError::NotInvariant { .. }))
    }
}

/// GPUs with everything loaded that any model needs there: opened while a model's files are read.
#[derive(Debug)]
pub(crate) struct OpenGpus {
    gpus: Vec<OpenGpu>,
    link: Link,
    others: Others,
}

/// One of them.
#[derive(Debug)]
struct OpenGpu {
    kernels: Kernels,
    blas: Option<Blas>,
    chip: Chip,
    name: String,
}

impl OpenGpus {
    /// As many GPUs as share the model, from `ordinal` on. Allocates no memory but the libraries' own.
    pub(crate) fn open(ordinal: usize, limits: &EngineLimits) -> Result<Self, CudaError> {
        let ordinals: Vec<usize> = (0..limits.tensor_parallel).map(|rank| ordinal.saturating_add(rank)).collect();
        let (devices, link) = Device::open_group(&ordinals)?;
        let devices: Vec<_> = devices.iter().zip(&ordinals).collect();
        let open = |(device, ordinal): &(&Device, &usize)| OpenGpu::open(device, **ordinal, limits);
        let gpus = each(&devices, open).into_iter().collect::<Result<_, _>>()?;
        Ok(Self { gpus, link, others: Others::There })
    }

    /// A GPU for the first of the ranks, which computes its share alone.
    fn open_share(ordinal: usize, limits: &EngineLimits) -> Result<Self, CudaError> {
        let gpus = vec![OpenGpu::open(&Device::open(ordinal)?, ordinal, limits)?];
        Ok(Self { gpus, link: Link::NvLink, others: Others::Away })
    }
}

impl OpenGpu {
    fn open(device: &Device, ordinal: usize, limits: &EngineLimits) -> Result<Self, CudaError> {
        let began = Instant::now();
        let kernels = Kernels::load(device)?;
        let numerics = numerics(limits);
        let blas = (numerics == Numerics::Fastest).then(|| Blas::new(device)).transpose()?;
        let version = blas.as_ref().map(|_| Blas::version()).transpose()?;
        let chip = Chip::new(&device.name()?, kernels.properties(), numerics, version)?;
        let name = format!("cuda:{ordinal}, {}", device.name()?);
        tracing::info!(gpu = name, seconds = began.elapsed().as_secs_f32(), "GPU and libraries are open");
        Ok(Self { kernels, blas, chip, name })
    }
}

/// The GPUs of a model.
#[derive(Debug)]
pub(crate) struct Gpus {
    spec: ModelSpec,
    ranks: Vec<Gpu>,
    others: Others,
}

/// One of them.
#[derive(Debug)]
struct Gpu {
    kernels: Kernels,
    blas: Option<Blas>,
    chip: Chip,
    shape: ModelShape,
    name: String,
}

impl Gpus {
    /// The GPUs that were opened, for the model's ranks, or why they do not compute it. What the settings cannot mean is said before a GPU
    /// is missed.
    pub(crate) fn of(
        opened: Result<OpenGpus, CudaError>,
        read: &ReadModel,
        limits: &EngineLimits,
    ) -> Result<Self, CudaError> {
        let spec = divided(read, limits.tensor_parallel)?;
        let OpenGpus { gpus, link, others } = opened?;
        let gpu = |(rank, gpu): (Rank, OpenGpu)| Gpu::of(gpu, (rank, link), &spec, limits);
        let ranks = Rank::all(limits.tensor_parallel).zip(gpus).map(gpu).collect::<Result<_, _>>()?;
        Ok(Self { spec, ranks, others })
    }
}

/// The model's description, if so many ranks divide it.
fn divided(read: &ReadModel, n_ranks: usize) -> Result<ModelSpec, CudaError> {
    if n_ranks > RANKS_MAX {
        return Err(CudaError::Refused(format!("tensor_parallel {n_ranks} is more than {RANKS_MAX} GPUs: take fewer")));
    }
    let spec = read.spec()?;
    spec.check_ranks(n_ranks).map_err(|problem| CudaError::Refused(problem.to_string()))?;
    Ok(spec)
}

impl Gpu {
    fn of(
        opened: OpenGpu,
        (rank, link): (Rank, Link),
        spec: &ModelSpec,
        limits: &EngineLimits,
    ) -> Result<Self, CudaError> {
        let OpenGpu { kernels, blas, chip, name } = opened;
        let shape = ModelShape::of(spec, rank).map_err(CudaError::Uncovered)?;
        let shape = shape.stored_as_described(spec, kernels.properties(), limits.quantization);
        let shape = shape.map_err(CudaError::Refused)?;
        let shape = shape.with_cache_of(limits.kv_cache_dtype).over(link, numerics(limits));
        Ok(Self { kernels, blas, chip, shape, name })
    }
}

/// Says which quantised weights lie there as bf16: the description of the model does not.
fn warn_of_bf16(shape: &ModelShape, spec: &ModelSpec) {
    let made = weights::made_bf16(spec, shape);
    let first = made.first().and_then(|weight| Some((weight, weight.scheme.as_ref()?)));
    if let (0, Some((weight, stored))) = (shape.rank.idx, first) {
        tracing::warn!(
            n = made.len(),
            first = weight.name,
            %stored,
            "quantised weights are made bf16, and take its memory and time: with --quantization fp8 an H100 or H200 keeps a byte each, quantised anew"
        );
    }
}

fn numerics(limits: &EngineLimits) -> Numerics {
    if limits.batch_invariant { Numerics::BatchInvariant } else { Numerics::Fastest }
}

/// A model on its GPUs, and what the engine needs beside it.
#[derive(Debug)]
pub struct CudaModel {
    /// The model with its KV cache.
    pub executor: CudaExecutor,
    /// The rest.
    pub parts: EngineParts,
}

/// What is the same for all ranks of a model that starts.
struct Start<'a> {
    spec: &'a ModelSpec,
    sched: &'a SchedLimits,
    limits: &'a EngineLimits,
    others: Others,
}

/// A rank that starts: its share of the weights is found, its memory planned.
struct StartingRank {
    gpu: Gpu,
    source: Source,
    batch: BatchLimits,
    capacity: Capacity,
    memory: MemoryPlan,
}

/// A rank whose memory is taken.
struct StartedRank {
    rank: CudaRank,
    dtype: String,
    kv_scales: Option<Vec<Option<[f32; 2]>>>,
}

impl CudaModel {
    /// Reads and checks everything, then as the engine's start does on GPUs from `ordinal` on.
    pub fn open(config: &EngineConfig, ordinal: usize, progress: &(dyn Fn(f32) + Sync)) -> Result<Self, StartError> {
        let read = ReadModel::read(config)?;
        let gpus = Gpus::of(OpenGpus::open(ordinal, &config.limits), &read, &config.limits)?;
        Self::take(gpus, read, &config.limits, progress)
    }

    /// The first rank's share of a model on the GPU `ordinal`, which computes as if what the others add were nothing: for measuring.
    pub fn open_share(
        config: &EngineConfig,
        ordinal: usize,
        progress: &(dyn Fn(f32) + Sync),
    ) -> Result<Self, StartError> {
        let read = ReadModel::read(config)?;
        let gpus = Gpus::of(OpenGpus::open_share(ordinal, &config.limits), &read, &config.limits)?;
        Self::take(gpus, read, &config.limits, progress)
    }

    /// Plans memory, brings the weights over, warms up with real steps.
    pub(crate) fn take(
        gpus: Gpus,
        read: ReadModel,
        limits: &EngineLimits,
        progress: &(dyn Fn(f32) + Sync),
    ) -> Result<Self, StartError> {
        let sched = read.sched_limits(limits, StepSizes::GPU)?;
        let replays_decodes = limits.batch_invariant;
        let sched = SchedLimits { replays_decodes, tile_rows: TILE_ROWS, ..sched };
        let ReadModel { config, assets, weights } = read;
        let Gpus { spec, ranks: gpus, others } = gpus;
        let start = Start { spec: &spec, sched: &sched, limits, others };
        let mut ranks = gpus.into_iter().map(|gpu| start.plan(gpu, &weights)).collect::<Result<Vec<_>, _>>()?;
        // All have as many KV blocks as the one with the least memory.
        let smallest = ranks.iter().min_by_key(|rank| rank.memory.kv_blocks).expect("there is a rank");
        let (memory, batch) = (smallest.memory.clone(), smallest.batch);
        let held = smallest.gpu.shape.sizes().held(spec.n_params_of(smallest.gpu.shape.rank)?);
        let name = ranks.iter().map(|rank| rank.gpu.name.as_str()).collect::<Vec<_>>().join("; ");
        let mut threads = rank_threads("engine-gpu", ranks.len())?;
        let n_blocks = memory.kv_blocks as usize;
        // The first one's share says how far all are.
        let told = |rank: &StartingRank, share| {
            if rank.gpu.shape.rank.idx == 0 {
                progress(WEIGHTS_SHARE * share);
            }
        };
        let mut waiting: Vec<Option<StartingRank>> = ranks.drain(..).map(Some).collect();
        let started = on_threads(&mut threads, &mut waiting, |rank| {
            let rank = rank.take().expect("each starts once");
            start.load(rank, n_blocks, &told)
        })?;
        leave_behind(weights);
        let StartedRank { dtype, kv_scales, .. } = &started[0];
        let (dtype, kv_scales) = (dtype.clone(), kv_scales.clone());
        let mut ranks: Vec<CudaRank> = started.into_iter().map(|started| started.rank).collect();
        CudaRank::connect(&mut ranks);
        let mut executor = CudaExecutor::new(ranks, threads, batch);
        let began = Instant::now();
        executor.warm_up().map_err(CudaError::WarmUp)?;
        if let Some(published) = &kv_scales {
            executor.find_kv_scales(published).map_err(CudaError::WarmUp)?;
        }
        tracing::info!(seconds = began.elapsed().as_secs_f32(), "first steps have run");
        let max_waiting = limits.max_waiting as usize;
        let stored_as = config.quantization.as_ref().map_or(dtype, |quantization| quantization.name().into());
        let dtype = match limits.quantization {
            None => stored_as,
            Some(quantization) => format!("{} of {stored_as}", quantization.name()),
        };
        let loaded = Loaded { n_params: spec.n_params(), dtype, held, memory, device: name };
        let info = ModelInfo::new(&config, &assets, &sched, loaded);
        Ok(Self { executor, parts: EngineParts { model: info, tokenizer: assets.tokenizer, sched, max_waiting } })
    }
}

impl Start<'_> {
    /// Finds a rank's weights and plans its memory.
    fn plan(&self, gpu: Gpu, weights: &WeightSource) -> Result<StartingRank, StartError> {
        let Self { spec, sched, limits, .. } = *self;
        let Gpu { kernels, blas, chip, shape, name } = gpu;
        let source = Source::of(weights, spec, shape.rank)?;
        let shape = source.kept(shape, spec);
        warn_of_bf16(&shape, spec);
        let batch = batch_limits(&shape, &kernels, sched, limits);
        let capacity = Capacity::new(&batch.bounds());
        capacity.check().map_err(CudaError::Refused)?;
        let sizes = shape.sizes();
        let needs = MemoryNeeds {
            weights_bytes: sizes.weights_bytes(spec.n_params_of(shape.rank)?),
            workspace_bytes: capacity.workspace_bytes(&sizes),
            kv_bytes_per_token: sizes.kv_bytes_per_token(),
        };
        let memory = MemoryPlan::new(
            needs,
            limits.cache_use(sched),
            budget(kernels.device(), limits).map_err(CudaError::from)?,
        )?;
        log_plan(&memory, &name, shape.kv_format);
        Ok(StartingRank { gpu: Gpu { kernels, blas, chip, shape, name }, source, batch, capacity, memory })
    }

    /// Brings a rank's weights over and takes its memory.
    fn load(
        &self,
        starting: StartingRank,
        n_blocks: usize,
        progress: &(dyn Fn(&StartingRank, f32) + Sync),
    ) -> Result<StartedRank, CudaError> {
        let told = |share| progress(&starting, share);
        let loaded = || self.load_weights(&starting, &told);
        let memory = || self.take_memory(&starting, n_blocks);
        let (loaded, memory) = match self.limits.quantization {
            // Both wait for the driver most of the time, and not for each other.
            None => thread::scope(|scope| {
                let memory = scope.spawn(memory);
                (loaded(), memory.join().expect("allocating does not panic"))
            }),
            // What is quantised on arrival is larger until it is: the cache waits until that is freed.
            Some(_) => {
                let loaded = loaded()?;
                (Ok(loaded), memory())
            }
        };
        let (LoadedWeights { weights, dtype, kv_scales }, memory) = (loaded?, memory?);
        let StartingRank { gpu: Gpu { kernels, blas, chip, shape, name }, batch, capacity, .. } = starting;
        let parts = ForwardParts { kernels, blas, chip, shape, weights, memory };
        let rank = CudaRank::new(Forward::new(parts, &capacity), &capacity, batch, name)?;
        rank.synchronize()?;
        Ok(StartedRank { rank, dtype, kv_scales })
    }

    fn load_weights(
        &self,
        starting: &StartingRank,
        progress: &(dyn Fn(f32) + Sync),
    ) -> Result<LoadedWeights, CudaError> {
        let (began, gpu) = (Instant::now(), &starting.gpu);
        let loaded = load(&gpu.kernels, &gpu.shape, self.spec, &starting.source, progress)?;
        tracing::info!(gpu = gpu.name, seconds = began.elapsed().as_secs_f32(), "weights are on the GPU");
        Ok(loaded)
    }

    fn take_memory(&self, starting: &StartingRank, n_blocks: usize) -> Result<Memory, CudaError> {
        let (began, shape) = (Instant::now(), &starting.gpu.shape);
        let rope = |settings| RopeTable::new(settings, shape.heads.dim, self.sched.max_model_len);
        let rope_sets: Vec<RopeTable> = self.spec.rope_sets.iter().map(rope).collect();
        let size = MemorySize { capacity: &starting.capacity, n_blocks, others: self.others };
        let memory = Memory::new(starting.gpu.kernels.device(), shape, &rope_sets, size)?;
        tracing::info!(seconds = began.elapsed().as_secs_f32(), "GPU memory is taken");
        Ok(memory)
    }
}

/// Lets go of files on a thread of its own: nobody waits until what was mapped of a large model has left the address space.
fn leave_behind(weights: WeightSource) {
    let WeightSource::Stored(store) = weights else { return };
    let spawned = thread::Builder::new().name("engine-unmap".to_owned()).spawn(move || store.let_go());
    if let Err(reason) = spawned {
        tracing::debug!(%reason, "files were let go of at once");
    }
}

/// Weights on the GPU.
struct LoadedWeights {
    weights: weights::Weights,
    /// Number format as stored.
    dtype: String,
    /// What the checkpoint says of each layer's keys and values, if the cache has scales.
    kv_scales: Option<Vec<Option<[f32; 2]>>>,
}

/// Where weights come from: found and checked.
enum Source {
    Stored(BoundWeights),
    Random { seed: u64 },
}

impl Source {
    fn of(weights: &WeightSource, spec: &ModelSpec, rank: Rank) -> Result<Self, ModelError> {
        Ok(match weights {
            WeightSource::Stored(store) => Self::Stored(store.clone().bind(spec, rank)?),
            WeightSource::Random { seed } => Self::Random { seed: *seed },
        })
    }

    /// The shape with what of its formats the weights are, not only by their description.
    fn kept(&self, shape: ModelShape, spec: &ModelSpec) -> ModelShape {
        match self {
            Self::Stored(bound) => weights::as_stored(shape, spec, bound),
            Self::Random { .. } => shape,
        }
    }
}

fn load(
    kernels: &Kernels,
    shape: &ModelShape,
    spec: &ModelSpec,
    source: &Source,
    progress: &(dyn Fn(f32) + Sync),
) -> Result<LoadedWeights, CudaError> {
    let has_scales = shape.kv_format == KvFormat::E4m3;
    match source {
        Source::Stored(bound) => {
            let kv_scales = has_scales.then(|| bound.kv_scales(spec)).transpose()?;
            let weights = weights::load(kernels, shape, spec, bound, progress)?;
            Ok(LoadedWeights { weights, dtype: bound.format_name(), kv_scales })
        }
        Source::Random { seed } => {
            let weights = weights::random(kernels, shape, spec, *seed)?;
            kernels.device().synchronize()?;
            progress(1.0);
            Ok(LoadedWeights {
                weights,
                dtype: "bf16".into(),
                kv_scales: has_scales.then(|| vec![None; spec.layers.len()]),
            })
        }
    }
}

fn batch_limits(shape: &ModelShape, kernels: &Kernels, sched: &SchedLimits, limits: &EngineLimits) -> BatchLimits {
    let properties = kernels.properties();
    // Two blocks of decode attention run on a multiprocessor at once. Of e4m3 a third one, where there are more.
    let n_slots = 2 * properties.n_multiprocessors as usize;
    BatchLimits {
        heads: shape.heads,
        policy: match limits.batch_invariant {
            true => SplitPolicy::fixed(sched.max_model_len, n_slots),
            false => SplitPolicy::Balanced { n_slots },
        },
        prefill_split: match limits.batch_invariant {
            true => PrefillSplit::Never,
            false => PrefillKernel::for_device(properties).split(),
        },
        max_num_seqs: sched.max_num_seqs,
        max_rows: sched.max_batched_tokens,
        max_model_len: sched.max_model_len,
        vocab: shape.vocab,
    }
}

fn budget(device: &Device, limits: &EngineLimits) -> Result<MemoryBudget, KernelError> {
    let (free, total) = device.memory()?;
    let memory = DeviceMemory { total_bytes: total as u64, taken_bytes: (total - free) as u64 };
    Ok(MemoryBudget::device(memory, limits.memory_fraction))
}

fn log_plan(memory: &MemoryPlan, device: &str, kv_format: KvFormat) {
    let mib = |bytes: u64| bytes >> 20;
    tracing::info!(
        device,
        weights_mib = mib(memory.weights_bytes),
        workspace_mib = mib(memory.workspace_bytes),
        kv_mib = mib(memory.kv_bytes),
        kv_tokens = memory.kv_tokens(),
        kv_bytes_per_token = memory.kv_bytes_per_token,
        ?kv_format,
        limit_mib = mib(memory.limit_bytes),
        "GPU memory planned"
    );
}
