//! Whether a model fits where it shall run, with what numbers, and where it does not, what would: the nearest changes, each of which
//! is enough alone.
//!
//! What it says yes to starts: it sizes what the engine sizes, by the same functions, on a card whose free memory it takes to be
//! less than it is.

mod model;
mod remedy;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;

pub use self::{
    model::{HOST_WEIGHTS_BYTES, Model},
    remedy::{Remedy, RemedyText, gib, grouped, remedies},
};
use crate::{
    AskedSizes, StepSizes,
    gpu::{
        Capacity, Card, Chip, DecoderSizes, KvFormat, PrefillSplit, Push, SplitPolicy, StepBounds, WeightFormat,
        layer_formats, prefill_split,
    },
    host::{HostStep, kv_bytes_per_token, workspace_bytes},
    memory::{CacheUse, DeviceMemory, MemoryBudget, MemoryError, MemoryNeeds, MemoryPlan},
    model::{
        ModelError, ModelSpec,
        spec::{Rank, Stage},
    },
};

/// Ranks that share a model, or a stage of it, at most.
pub const RANKS_MAX: usize = 8;
/// Stages of a pipeline at most.
pub const STAGES_MAX: usize = 8;
/// Share of a GPU's memory where nobody says.
pub const MEMORY_FRACTION: f64 = 0.9;

/// What is asked of a model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Asked {
    /// Longest prompt plus completion. Default: the model's own limit.
    pub max_model_len: Option<u32>,
    /// Sizes of a step.
    pub sizes: AskedSizes,
    /// Tokens of the KV cache. Default: as many as fit.
    pub kv_cache_tokens: Option<u32>,
    /// Share of a GPU's memory that may be used.
    pub memory_fraction: f64,
    /// Ranks that share the model, or each stage of it: GPUs, where there are some.
    pub n_ranks: usize,
    /// Stages that its layers are cut into, each with ranks of its own.
    pub n_stages: usize,
    /// Weights are quantised to e4m3 when they are loaded.
    pub fp8: bool,
    /// How keys and values are stored.
    pub kv_format: KvFormat,
    /// The same tokens whatever else runs.
    pub batch_invariant: bool,
}

impl Default for Asked {
    fn default() -> Self {
        Self {
            max_model_len: None,
            sizes: AskedSizes::default(),
            kv_cache_tokens: None,
            memory_fraction: MEMORY_FRACTION,
            n_ranks: 1,
            n_stages: 1,
            fp8: false,
            kv_format: KvFormat::Bf16,
            batch_invariant: false,
        }
    }
}

/// Where a replica runs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Place {
    /// On GPUs of this kind, one for each rank.
    Gpu(Card),
    /// On CPUs, with this much memory.
    Host {
        /// What the process may use.
        limit_bytes: u64,
    },
}

/// A model that fits.
#[derive(Clone, Debug, PartialEq)]
pub struct Fit {
    /// Parameters of the model.
    pub n_params: u64,
    /// GPUs, or ranks on CPUs, that have a part of it.
    pub n_gpus: usize,
    /// Memory of each GPU, or of the process; of stages of a pipeline that of the one with the least room.
    pub memory: MemoryPlan,
    /// Tokens of one sequence at most.
    pub max_model_len: usize,
    /// Sequences that run together at most.
    pub max_num_seqs: usize,
    /// How projections lie on a GPU: more than one where a checkpoint has left some alone, or quantised them otherwise.
    pub formats: BTreeSet<WeightFormat>,
    /// How keys and values are stored.
    pub kv_format: KvFormat,
}

impl Fit {
    /// Sequences at full length that the KV cache holds; no more than may run.
    pub fn full_sequences(&self) -> u64 {
        let each = crate::blocks_for(self.max_model_len) * crate::BLOCK_TOKENS;
        (self.memory.kv_tokens() / each as u64).min(self.max_num_seqs as u64)
    }

    /// What it is good for.
    pub fn in_words(&self) -> String {
        let Self { max_model_len, max_num_seqs, .. } = self;
        format!(
            "{} tokens of context: {} sequences at full length; {max_num_seqs} at once have {} tokens each",
            grouped(*max_model_len as u64),
            grouped(self.full_sequences()),
            grouped(self.tokens_of_each())
        )
    }

    /// Tokens that each of so many sequences may have when all run.
    pub fn tokens_of_each(&self) -> u64 {
        let blocks = u64::from(self.memory.kv_blocks) / self.max_num_seqs.max(1) as u64;
        (blocks * crate::BLOCK_TOKENS as u64).min(self.max_model_len as u64)
    }
}

/// Why a model does not fit.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Misfit {
    /// Memory.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// Something that memory does not cure: ranks that do not divide heads, a format that the chip lacks, a context that the
    /// model has not.
    #[error("{0}")]
    Refused(String),
}

impl Misfit {
    /// Why, without what would fit.
    pub fn cause(&self) -> String {
        match self {
            Self::Memory(error) => error.numbers(),
            Self::Refused(problem) => problem.clone(),
        }
    }
}

impl From<ModelError> for Misfit {
    fn from(error: ModelError) -> Self {
        Self::Refused(error.to_string())
    }
}

/// The plan of a model, or why there is none.
pub fn plan(model: &Model, asked: &Asked, place: Place) -> Result<Fit, Misfit> {
    if asked.n_ranks == 0 || asked.n_ranks > RANKS_MAX {
        return Err(Misfit::Refused(format!("{} ranks are not 1 to {RANKS_MAX}", asked.n_ranks)));
    }
    if asked.n_stages == 0 || asked.n_stages > STAGES_MAX {
        return Err(Misfit::Refused(format!("{} stages are not 1 to {STAGES_MAX}", asked.n_stages)));
    }
    model.spec.check_ranks(asked.n_ranks)?;
    model.spec.check_stages(asked.n_stages)?;
    let max_model_len = context(model, asked)?;
    match place {
        Place::Gpu(card) => on_gpus(model, asked, card, max_model_len),
        Place::Host { limit_bytes } => on_host(model, asked, limit_bytes, max_model_len),
    }
}

fn context(model: &Model, asked: &Asked) -> Result<usize, Misfit> {
    let limit = model.config.context_limit(asked.max_model_len);
    match asked.max_model_len {
        Some(len) if len > limit => Err(Misfit::Refused(format!(
            "a context of {len} tokens is above the model's own limit of {limit}: lower it"
        ))),
        Some(len) if len < 2 => Err(Misfit::Refused("a context has at least 2 tokens".to_owned())),
        len => Ok(len.unwrap_or(limit) as usize),
    }
}

fn steps(asked: &Asked, defaults: StepSizes) -> Result<StepSizes, Misfit> {
    let sizes = defaults.with(asked.sizes);
    let StepSizes { max_num_seqs, max_batched_tokens } = sizes;
    if max_num_seqs == 0 || max_batched_tokens < max_num_seqs {
        let problem = format!("{max_batched_tokens} tokens a step are fewer than {max_num_seqs} sequences need");
        return Err(Misfit::Refused(problem));
    }
    Ok(sizes)
}

fn on_gpus(model: &Model, asked: &Asked, card: Card, max_model_len: usize) -> Result<Fit, Misfit> {
    let stages = Stage::all(asked.n_stages).map(|stage| on_gpus_of(stage, model, asked, card, max_model_len));
    let stages = stages.collect::<Result<Vec<_>, _>>()?;
    let formats = stages.iter().flat_map(|fit| fit.formats.clone()).collect();
    // All have as many KV blocks as the one that has room for the fewest.
    let least = stages.into_iter().min_by_key(|fit| fit.memory.kv_blocks).expect("there is a stage");
    Ok(Fit { formats, ..least })
}

fn on_gpus_of(stage: Stage, model: &Model, asked: &Asked, card: Card, max_model_len: usize) -> Result<Fit, Misfit> {
    // The first one's share of a vocabulary is the largest.
    let rank = Rank { idx: 0, of: asked.n_ranks };
    let spec = model.spec.staged(stage);
    let sizes = sizes_on(&spec, asked, card.chip, rank)?;
    let steps = steps(asked, StepSizes::GPU)?;
    let capacity = Capacity::new(&bounds(&sizes, asked, card.chip, (steps, max_model_len)));
    capacity.check().map_err(Misfit::Refused)?;
    let needs = MemoryNeeds {
        weights_bytes: sizes.weights_bytes(spec.n_params_of(rank)?),
        workspace_bytes: capacity.workspace_bytes(&sizes),
        kv_bytes_per_token: sizes.kv_bytes_per_token(),
    };
    let cache = cache_use(asked, steps, max_model_len);
    let device = DeviceMemory { total_bytes: card.given_bytes(), taken_bytes: card.taken_bytes() };
    let memory = MemoryPlan::new(needs, cache, MemoryBudget::device(device, asked.memory_fraction))?;
    Ok(Fit {
        n_params: model.spec.n_params(),
        n_gpus: asked.n_ranks * asked.n_stages,
        memory,
        max_model_len,
        max_num_seqs: cache.max_num_seqs,
        formats: sizes.formats(),
        kv_format: sizes.kv_format,
    })
}

/// In the formats that the engine takes there.
fn sizes_on(spec: &ModelSpec, asked: &Asked, chip: Chip, rank: Rank) -> Result<DecoderSizes, Misfit> {
    let sizes = DecoderSizes::of(spec, rank).ok_or_else(|| Misfit::Refused("it has no layers".to_owned()))?;
    // Over NVLink, where ranks share more: nobody knows the links yet.
    let sizes = DecoderSizes { kv_format: asked.kv_format, push: Push::Lines, ..sizes };
    let layers = layer_formats(spec, rank, chip.capability, asked.fp8).map_err(Misfit::Refused)?;
    Ok(DecoderSizes { layers, ..sizes })
}

fn bounds(sizes: &DecoderSizes, asked: &Asked, chip: Chip, (steps, max_model_len): (StepSizes, usize)) -> StepBounds {
    let n_slots = 2 * chip.n_multiprocessors as usize;
    let (policy, prefill_split) = match asked.batch_invariant {
        true => (SplitPolicy::fixed(max_model_len, n_slots), PrefillSplit::Never),
        false => (SplitPolicy::Balanced { n_slots }, prefill_split(chip.capability, chip.n_multiprocessors)),
    };
    StepBounds {
        heads: sizes.heads,
        policy,
        prefill_split,
        max_num_seqs: steps.max_num_seqs as usize,
        max_rows: steps.max_batched_tokens as usize,
        max_model_len,
    }
}

fn cache_use(asked: &Asked, steps: StepSizes, max_model_len: usize) -> CacheUse {
    CacheUse { max_model_len, max_num_seqs: steps.max_num_seqs as usize, asked_tokens: asked.kv_cache_tokens }
}

fn on_host(model: &Model, asked: &Asked, limit_bytes: u64, max_model_len: usize) -> Result<Fit, Misfit> {
    if asked.fp8 || asked.kv_format != KvFormat::Bf16 {
        return Err(Misfit::Refused("fp8 needs a GPU: leave it out".to_owned()));
    }
    let steps = steps(asked, StepSizes::CPU)?;
    let step = HostStep {
        max_batched_tokens: steps.max_batched_tokens as usize,
        max_num_seqs: steps.max_num_seqs as usize,
        max_model_len,
    };
    let needs = MemoryNeeds {
        weights_bytes: model.host_bytes(),
        workspace_bytes: workspace_bytes(&model.config, step),
        kv_bytes_per_token: kv_bytes_per_token(&model.spec, asked.n_ranks, model.host_kv_bytes()),
    };
    let memory = MemoryPlan::new(needs, cache_use(asked, steps, max_model_len), MemoryBudget::host(limit_bytes))?;
    Ok(Fit {
        n_params: model.spec.n_params(),
        n_gpus: asked.n_ranks,
        memory,
        max_model_len,
        max_num_seqs: step.max_num_seqs,
        formats: BTreeSet::from([WeightFormat::Bf16]),
        kv_format: KvFormat::Bf16,
    })
}
