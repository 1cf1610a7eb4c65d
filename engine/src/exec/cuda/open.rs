//! From a model that was read to an executor on a GPU: whether the GPU and the kernels can run it, the memory plan, the
//! weights' way there.

use std::time::Instant;

use stoker_kernels::{
    Device, KernelError, Kernels, Properties,
    blas::Blas,
    cache::KvFormat,
    choose::{Chip, Numerics},
    launch::PrefillKernel,
    plan::{PrefillSplit, SplitPolicy},
};

use super::{
    batch::BatchLimits,
    executor::CudaExecutor,
    forward::{Forward, ForwardParts},
    memory::Capacity,
    shape::ModelShape,
    weights,
};
use crate::{
    config::{EngineConfig, EngineLimits, Quantization, StepSizes},
    engine::{EngineParts, ReadModel, StartError, WeightSource},
    exec::ExecError,
    info::{Loaded, ModelInfo},
    memory::{DeviceMemory, MemoryBudget, MemoryNeeds, MemoryPlan},
    model::{BoundWeights, ModelError, ModelSpec, RopeTable, spec::Rank},
    sched::SchedLimits,
};

/// Share of the start that is over when the weights are on the GPU; the rest is the warm-up.
const WEIGHTS_SHARE: f32 = 0.9;

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

/// A GPU with everything loaded that a model needs there.
#[derive(Debug)]
pub(crate) struct Gpu {
    kernels: Kernels,
    blas: Option<Blas>,
    chip: Chip,
    spec: ModelSpec,
    shape: ModelShape,
    name: String,
}

impl Gpu {
    /// Opens the GPU `ordinal` for this model, or says why not. Allocates no memory but the libraries' own.
    pub(crate) fn open(ordinal: usize, read: &ReadModel, limits: &EngineLimits) -> Result<Self, CudaError> {
        let began = Instant::now();
        let device = Device::open(ordinal)?;
        let spec = read.spec()?;
        let kernels = Kernels::load(&device)?;
        let shape = ModelShape::of(&spec).map_err(CudaError::Uncovered)?;
        let shape = match limits.quantization {
            // Where numbers are e4m3 already, they are multiplied as they are if the chip can.
            None if weights::has_rows_of_e4m3(&spec) => {
                shape.clone().quantised(Quantization::Fp8, kernels.properties()).unwrap_or(shape)
            }
            None => shape,
            Some(asked) => shape.quantised(asked, kernels.properties()).map_err(CudaError::Refused)?,
        };
        let shape = shape.with_cache_of(limits.kv_cache_dtype);
        let (numerics, blas) = match limits.batch_invariant {
            true => (Numerics::BatchInvariant, None),
            false => (Numerics::Fastest, Some(Blas::new(&device)?)),
        };
        let version = blas.as_ref().map(|_| Blas::version()).transpose()?;
        let chip = Chip::new(&device.name()?, kernels.properties(), numerics, version)?;
        tracing::info!(seconds = began.elapsed().as_secs_f32(), "GPU and libraries are open");
        let name = format!("cuda:{ordinal}, {}", device.name()?);
        Ok(Self { kernels, blas, chip, spec, shape, name })
    }
}

/// A model on a GPU, and what the engine needs beside it.
#[derive(Debug)]
pub struct CudaModel {
    /// The model with its KV cache.
    pub executor: CudaExecutor,
    /// The rest.
    pub parts: EngineParts,
}

impl CudaModel {
    /// Reads and checks everything, then as the engine's start does on the GPU `ordinal`.
    pub fn open(config: &EngineConfig, ordinal: usize, progress: &(dyn Fn(f32) + Sync)) -> Result<Self, StartError> {
        let read = ReadModel::read(config)?;
        Self::take(Gpu::open(ordinal, &read, &config.limits)?, read, &config.limits, progress)
    }

    /// Plans memory, brings the weights over, warms up with real steps.
    pub(crate) fn take(
        gpu: Gpu,
        read: ReadModel,
        limits: &EngineLimits,
        progress: &(dyn Fn(f32) + Sync),
    ) -> Result<Self, StartError> {
        let sched =
            SchedLimits { replays_decodes: limits.batch_invariant, ..read.sched_limits(limits, StepSizes::GPU)? };
        let ReadModel { config, assets, weights } = read;
        let Gpu { kernels, blas, chip, spec, shape, name } = gpu;
        let source = Source::of(weights, &spec)?;
        let shape = match limits.quantization {
            None => source.keep_four_bits(shape, &spec, kernels.properties()),
            Some(_) => shape,
        };
        let device = kernels.device().clone();
        let batch = batch_limits(&shape, &kernels, &sched, limits);
        let capacity = Capacity::new(&sched, &batch);
        capacity.check(&sched).map_err(CudaError::Refused)?;
        let needs = MemoryNeeds {
            weights_bytes: shape.weights_bytes(spec.n_params()),
            workspace_bytes: capacity.workspace_bytes(&shape, sched.max_model_len),
            kv_bytes_per_token: shape.kv_bytes_per_token(),
        };
        let memory = MemoryPlan::new(needs, limits, &sched, budget(&device, limits).map_err(CudaError::from)?)?;
        log_plan(&memory, &name, shape.kv_format);
        let began = Instant::now();
        let loaded = load(&kernels, &shape, &spec, source, &|share| progress(WEIGHTS_SHARE * share))?;
        tracing::info!(seconds = began.elapsed().as_secs_f32(), "weights are on the GPU");
        let rope = |settings| RopeTable::new(settings, shape.heads.dim, sched.max_model_len);
        let rope_sets = spec.rope_sets.iter().map(rope).collect();
        let parts = ForwardParts {
            kernels,
            blas,
            chip,
            shape,
            weights: loaded.weights,
            rope_sets,
            n_blocks: memory.kv_blocks as usize,
        };
        let began = Instant::now();
        let forward = Forward::new(parts, &capacity).map_err(CudaError::from)?;
        let mut executor = CudaExecutor::new(forward, &capacity, batch, name.clone()).map_err(CudaError::from)?;
        tracing::info!(seconds = began.elapsed().as_secs_f32(), "GPU memory is taken");
        let began = Instant::now();
        executor.warm_up().map_err(CudaError::WarmUp)?;
        if let Some(published) = &loaded.kv_scales {
            executor.find_kv_scales(published).map_err(CudaError::WarmUp)?;
        }
        tracing::info!(seconds = began.elapsed().as_secs_f32(), "first steps have run");
        let max_waiting = limits.max_waiting as usize;
        let stored_as = config.quantization.as_ref().map_or(loaded.dtype, |quantization| quantization.name().into());
        let dtype = match limits.quantization {
            None => stored_as,
            Some(quantization) => format!("{} of {stored_as}", quantization.name()),
        };
        let loaded = Loaded { n_params: spec.n_params(), dtype, memory, device: name };
        let info = ModelInfo::new(&config, &assets, &sched, loaded);
        Ok(Self { executor, parts: EngineParts { model: info, tokenizer: assets.tokenizer, sched, max_waiting } })
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
    fn of(weights: WeightSource, spec: &ModelSpec) -> Result<Self, ModelError> {
        Ok(match weights {
            WeightSource::Stored(store) => Self::Stored(store.bind(spec, Rank::ALONE)?),
            WeightSource::Random { seed } => Self::Random { seed },
        })
    }

    /// Projections of four bits are multiplied as they are where the chip can.
    fn keep_four_bits(&self, shape: ModelShape, spec: &ModelSpec, properties: Properties) -> ModelShape {
        match self {
            Self::Stored(bound) => weights::as_stored(shape, spec, bound, properties),
            Self::Random { .. } => weights::as_described(shape, spec, properties),
        }
    }
}

fn load(
    kernels: &Kernels,
    shape: &ModelShape,
    spec: &ModelSpec,
    source: Source,
    progress: &(dyn Fn(f32) + Sync),
) -> Result<LoadedWeights, CudaError> {
    let has_scales = shape.kv_format == KvFormat::E4m3;
    match source {
        Source::Stored(bound) => {
            let kv_scales = has_scales.then(|| bound.kv_scales(spec)).transpose()?;
            let weights = weights::load(kernels, shape, spec, &bound, progress)?;
            Ok(LoadedWeights { weights, dtype: bound.format_name(), kv_scales })
        }
        Source::Random { seed } => {
            let weights = weights::random(kernels, shape, spec, seed)?;
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
            false => PrefillKernel::for_device(properties, shape.heads).split(),
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
