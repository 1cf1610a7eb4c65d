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
    stages::Stages,
    weights,
};
use crate::{
    config::{EngineConfig, EngineLimits, StepSizes},
    each::each,
    engine::{EngineParts, ReadModel, StartError, WeightSource, rank_threads},
    exec::ExecError,
    info::{Loaded, ModelInfo},
    model::{
        BoundWeights, ModelError, ModelSpec, RopeTable,
        spec::{Rank, Stage},
    },
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
    /// Of each stage, with what its ranks reach each other over.
    stages: Vec<(Vec<OpenGpu>, Link)>,
    others: Others,
}

/// One of them.
#[derive(Debug)]
struct OpenGpu {
    kernels: Kernels,
    blas: Option<Blas>,
    chip: Chip,
    /// With its number.
    name: String,
    kind: String,
}

/// Refuses GPUs of several kinds, by name and kind: a step is put together once, for as many multiprocessors as each has.
fn check_kinds(gpus: &[(&str, &str)]) -> Result<(), CudaError> {
    let Some(((first, kind), others)) = gpus.split_first() else { return Ok(()) };
    match others.iter().find(|(_, other)| other != kind) {
        None => Ok(()),
        Some((odd, _)) => Err(CudaError::Refused(format!(
            "{first} and {odd} are of different kinds, and a model is computed by GPUs of one kind: name such ones by \
             CUDA_VISIBLE_DEVICES, or take one GPU"
        ))),
    }
}

impl OpenGpus {
    /// As many GPUs as share the model, from `ordinal` on. Allocates no memory but the libraries' own.
    pub(crate) fn open(ordinal: usize, limits: &EngineLimits) -> Result<Self, CudaError> {
        let n_ranks = limits.tensor_parallel;
        let of_stage = |stage: usize| (0..n_ranks).map(|rank| ordinal.saturating_add(stage * n_ranks + rank)).collect();
        Self::open_each(&(0..limits.pipeline_parallel).map(of_stage).collect::<Vec<_>>(), limits)
    }

    /// These of each stage.
    fn open_each(ordinals: &[Vec<usize>], limits: &EngineLimits) -> Result<Self, CudaError> {
        let (devices, links): (Vec<_>, Vec<_>) = Device::open_stages(ordinals)?.into_iter().unzip();
        let each_device: Vec<_> = devices.iter().flatten().zip(ordinals.iter().flatten()).collect();
        let open = |(device, ordinal): &(&Device, &usize)| OpenGpu::open(device, **ordinal, limits);
        let gpus = each(&each_device, open).into_iter().collect::<Result<Vec<_>, _>>()?;
        check_kinds(&gpus.iter().map(|gpu| (gpu.name.as_str(), gpu.kind.as_str())).collect::<Vec<_>>())?;
        let mut gpus = gpus.into_iter();
        let stages =
            links.into_iter().map(|link| (gpus.by_ref().take(limits.tensor_parallel).collect(), link)).collect();
        Ok(Self { stages, others: Others::There })
    }

    /// A GPU for the first of the ranks, which computes its share alone.
    fn open_share(ordinal: usize, limits: &EngineLimits) -> Result<Self, CudaError> {
        let gpus = vec![OpenGpu::open(&Device::open(ordinal)?, ordinal, limits)?];
        Ok(Self { stages: vec![(gpus, Link::NvLink)], others: Others::Away })
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
        let kind = device.name()?;
        let name = format!("cuda:{ordinal}, {kind}");
        tracing::info!(gpu = name, seconds = began.elapsed().as_secs_f32(), "GPU and libraries are open");
        Ok(Self { kernels, blas, chip, name, kind })
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
    /// Of its stage.
    spec: ModelSpec,
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
        let spec = divided(read, limits)?;
        let OpenGpus { stages, others } = opened?;
        let of_stage = |(stage, (gpus, link)): (Stage, (Vec<OpenGpu>, Link))| {
            let spec = spec.staged(stage);
            let gpu = move |(rank, gpu)| Gpu::of(gpu, (rank, link), spec.clone(), limits);
            Rank::all(limits.tensor_parallel).zip(gpus).map(gpu)
        };
        let ranks = Stage::all(limits.pipeline_parallel).zip(stages).flat_map(of_stage).collect::<Result<_, _>>()?;
        Ok(Self { spec, ranks, others })
    }
}

/// The model's description, if so many ranks and stages divide it.
fn divided(read: &ReadModel, limits: &EngineLimits) -> Result<ModelSpec, CudaError> {
    let (n_ranks, n_stages) = (limits.tensor_parallel, limits.pipeline_parallel);
    if n_ranks > RANKS_MAX {
        return Err(CudaError::Refused(format!("tensor_parallel {n_ranks} is more than {RANKS_MAX} GPUs: take fewer")));
    }
    let spec = read.spec()?;
    let checked = spec.check_ranks(n_ranks).and_then(|()| spec.check_stages(n_stages));
    checked.map_err(|problem| CudaError::Refused(problem.to_string()))?;
    Ok(spec)
}

impl Gpu {
    fn of(
        opened: OpenGpu,
        (rank, link): (Rank, Link),
        spec: ModelSpec,
        limits: &EngineLimits,
    ) -> Result<Self, CudaError> {
        let OpenGpu { kernels, blas, chip, name, kind: _ } = opened;
        let shape = ModelShape::of(&spec, rank).map_err(CudaError::Uncovered)?;
        let shape = shape.stored_as_described(&spec, kernels.properties(), limits.quantization);
        let shape = shape.map_err(CudaError::Refused)?;
        let shape = shape.with_cache_of(limits.kv_cache_dtype).over(link, numerics(limits));
        Ok(Self { kernels, blas, chip, spec, shape, name })
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

    /// The same with all stages on one GPU, beside each other: for tests where there are not as many. Each plans for what is free before any of
    /// them takes something, so the limits say how large the KV cache is.
    pub fn open_stages_on_one(
        config: &EngineConfig,
        ordinal: usize,
        progress: &(dyn Fn(f32) + Sync),
    ) -> Result<Self, StartError> {
        let read = ReadModel::read(config)?;
        let ordinals = vec![vec![ordinal]; config.limits.pipeline_parallel];
        let gpus = Gpus::of(OpenGpus::open_each(&ordinals, &config.limits), &read, &config.limits)?;
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
        let held = smallest.gpu.shape.sizes().held(smallest.gpu.spec.n_params_of(smallest.gpu.shape.rank)?);
        let n_values = ranks.iter().map(|rank| rank.capacity.arriving_values(&rank.gpu.shape.sizes())).max();
        // A share that is measured is alone.
        let n_ranks_of_stage = limits.tensor_parallel.min(ranks.len());
        let name = ranks.iter().map(|rank| rank.gpu.name.as_str()).collect::<Vec<_>>().join("; ");
        let mut threads = rank_threads("engine-gpu", ranks.len())?;
        let n_blocks = memory.kv_blocks as usize;
        // The first one's share says how far all are.
        let told = |rank: &StartingRank, share| {
            if (rank.gpu.shape.rank.idx, rank.gpu.shape.stage.idx) == (0, 0) {
                progress(WEIGHTS_SHARE * share);
            }
        };
        let mut waiting: Vec<Option<StartingRank>> = ranks.drain(..).map(Some).collect();
        let started = on_threads(&mut threads, &mut waiting, |rank| {
            let rank = rank.take().expect("each starts once");
            start.load(rank, n_blocks, &told)
        })?;
        leave_behind(weights);
        let dtype = started[0].dtype.clone();
        let kv_scales: Option<Vec<_>> = started.iter().map(|rank| rank.kv_scales.clone()).collect();
        let mut ranks: Vec<CudaRank> = started.into_iter().map(|started| started.rank).collect();
        ranks.chunks_mut(n_ranks_of_stage).for_each(CudaRank::connect);
        let stages = Stages::of(&ranks, n_ranks_of_stage, n_values.unwrap_or(0)).map_err(CudaError::from)?;
        let mut executor = CudaExecutor::new(ranks, stages, threads, batch);
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
        let Self { sched, limits, .. } = *self;
        let Gpu { kernels, blas, chip, spec, shape, name } = gpu;
        let source = Source::of(weights, self.spec, shape.rank)?;
        let shape = source.kept(shape, &spec);
        warn_of_bf16(&shape, &spec);
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
        Ok(StartingRank { gpu: Gpu { kernels, blas, chip, spec, shape, name }, source, batch, capacity, memory })
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
        let StartingRank { gpu: Gpu { kernels, blas, chip, shape, name, .. }, batch, capacity, .. } = starting;
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
        let loaded = load(&gpu.kernels, &gpu.shape, &gpu.spec, &starting.source, progress)?;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_of_several_kinds_are_refused_by_name() {
        let [h200, other, l40s] = [
            ("cuda:0, NVIDIA H200", "NVIDIA H200"),
            ("cuda:1, NVIDIA H200", "NVIDIA H200"),
            ("cuda:2, NVIDIA L40S", "NVIDIA L40S"),
        ];
        assert!(check_kinds(&[]).is_ok() && check_kinds(&[h200]).is_ok() && check_kinds(&[h200, other]).is_ok());
        let refusal = check_kinds(&[h200, other, l40s]).unwrap_err();
        assert!(refusal.is_refusal());
        let said = refusal.to_string();
        assert!(said.starts_with("cuda:0, NVIDIA H200 and cuda:2, NVIDIA L40S are of different kinds"), "{said}");
    }
}
