//! What would make a model fit: each change is enough alone, because the plan with it was made before it is said.

use std::fmt::{self, Display};

use super::{Asked, Model, Place, RANKS_MAX, STAGES_MAX, plan};
use crate::{
    BLOCK_TOKENS,
    gpu::{CARDS, Card, KvFormat},
};

/// Shortest context worth telling.
const CONTEXT_MIN: u32 = 512;
/// Most of a GPU that is worth telling: what is left is the driver's and that of small surprises.
const FRACTION_MAX: f64 = 0.95;
/// Most memory of a pod that is looked at.
const HOST_BYTES_MAX: u64 = 1 << 42;

/// One change.
#[derive(Clone, Debug, PartialEq)]
pub enum Remedy {
    /// So many GPUs, or ranks on CPUs.
    Ranks(usize),
    /// So many stages, with GPUs of their own: for models that ranks do not divide, or not far enough.
    Stages(usize),
    /// So many stages in place of ranks.
    StagesAlone(usize),
    /// Weights in e4m3.
    Fp8,
    /// Keys and values in e4m3.
    Fp8Cache,
    /// So many tokens of context at most.
    Context(u32),
    /// As large a share of the GPU.
    MemoryFraction(f64),
    /// GPUs of another kind.
    Card(Card),
    /// As much memory of the pod.
    HostMemory(u64),
    /// Several together: none of them is enough alone.
    Together(Vec<Remedy>),
}

impl Remedy {
    /// With it.
    pub fn apply(&self, asked: &mut Asked, place: &mut Place) {
        match self {
            Self::Ranks(n_ranks) => asked.n_ranks = *n_ranks,
            Self::Stages(n_stages) => asked.n_stages = *n_stages,
            Self::StagesAlone(n_stages) => (asked.n_ranks, asked.n_stages) = (1, *n_stages),
            Self::Fp8 => asked.fp8 = true,
            Self::Fp8Cache => asked.kv_format = KvFormat::E4m3,
            Self::Context(tokens) => asked.max_model_len = Some(*tokens),
            Self::MemoryFraction(fraction) => asked.memory_fraction = *fraction,
            Self::Card(card) => *place = Place::Gpu(*card),
            Self::HostMemory(limit_bytes) => *place = Place::Host { limit_bytes: *limit_bytes },
            Self::Together(remedies) => remedies.iter().for_each(|remedy| remedy.apply(asked, place)),
        }
    }

    fn is_enough(&self, model: &Model, asked: &Asked, place: Place) -> bool {
        let (mut asked, mut place) = (*asked, place);
        self.apply(&mut asked, &mut place);
        plan(model, &asked, place).is_ok()
    }
}

/// The nearest changes with which it fits, in order; none where it fits, or where nothing helps.
pub fn remedies(model: &Model, asked: &Asked, place: Place) -> Vec<Remedy> {
    if plan(model, asked, place).is_ok() {
        return Vec::new();
    }
    let enough = |remedy: &Remedy| remedy.is_enough(model, asked, place);
    let alone: Vec<Remedy> = match place {
        Place::Gpu(_) => {
            let ranks = more_ranks(asked).chain(more_stages(asked)).chain(stages_alone(asked)).find(&enough);
            let formats = [Remedy::Fp8, Remedy::Fp8Cache].into_iter().filter(&enough);
            let fraction = fractions(asked).find(&enough);
            ranks.into_iter().chain(formats).chain(context(model, asked, place)).chain(fraction).collect()
        }
        Place::Host { .. } => {
            host_memory(model, asked, place).into_iter().chain(context(model, asked, place)).collect()
        }
    };
    if alone.is_empty() { together(model, asked, place).into_iter().collect() } else { alone }
}

fn more_ranks(asked: &Asked) -> impl Iterator<Item = Remedy> {
    let n_ranks = asked.n_ranks;
    (n_ranks + 1..=RANKS_MAX).map(Remedy::Ranks)
}

fn more_stages(asked: &Asked) -> impl Iterator<Item = Remedy> {
    (asked.n_stages + 1..=STAGES_MAX).map(Remedy::Stages)
}

/// From as many GPUs on as there were to be.
fn stages_alone(asked: &Asked) -> impl Iterator<Item = Remedy> {
    let n_gpus = asked.n_ranks.saturating_mul(asked.n_stages);
    let fewest = if asked.n_ranks > 1 { n_gpus } else { STAGES_MAX + 1 };
    (fewest..=STAGES_MAX).map(Remedy::StagesAlone)
}

fn fractions(asked: &Asked) -> impl Iterator<Item = Remedy> {
    let fraction = asked.memory_fraction;
    (1..=100)
        .map(|percent| f64::from(percent) / 100.0)
        .filter(move |f| *f > fraction && *f <= FRACTION_MAX)
        .map(Remedy::MemoryFraction)
}

/// The longest context that fits: what a sequence needs grows with it, so it is found by halving.
fn context(model: &Model, asked: &Asked, place: Place) -> Option<Remedy> {
    let longest = asked.max_model_len.unwrap_or_else(|| model.config.context_limit(None));
    let block = BLOCK_TOKENS as u32;
    let fits = |blocks: u32| Remedy::Context(blocks * block).is_enough(model, asked, place);
    let (mut fitting, mut above) = (CONTEXT_MIN / block, longest.div_ceil(block));
    if fitting >= above || !fits(fitting) {
        return None;
    }
    while fitting + 1 < above {
        let middle = fitting + (above - fitting) / 2;
        if fits(middle) { fitting = middle } else { above = middle }
    }
    Some(Remedy::Context(fitting * block))
}

/// The least memory, in quarters of a GiB.
fn host_memory(model: &Model, asked: &Asked, place: Place) -> Option<Remedy> {
    let Place::Host { limit_bytes } = place else { return None };
    let step = 1u64 << 28;
    let fits = |steps: u64| Remedy::HostMemory(steps * step).is_enough(model, asked, place);
    let (mut below, mut fitting) = (limit_bytes / step, HOST_BYTES_MAX / step);
    if below >= fitting || !fits(fitting) {
        return None;
    }
    while below + 1 < fitting {
        let middle = below + (fitting - below) / 2;
        if fits(middle) { fitting = middle } else { below = middle }
    }
    Some(Remedy::HostMemory(fitting * step))
}

/// Where nothing helps alone: formats with ranks of the same kind, then another kind of GPU, the smallest that does.
fn together(model: &Model, asked: &Asked, place: Place) -> Option<Remedy> {
    let Place::Gpu(card) = place else { return None };
    let formats = [vec![Remedy::Fp8], vec![Remedy::Fp8, Remedy::Fp8Cache]];
    let ranks: Vec<Option<Remedy>> = [None].into_iter().chain(more_ranks(asked).map(Some)).collect();
    let same_kind = formats.iter().flat_map(|formats| {
        ranks.iter().map(move |ranks| Remedy::Together(ranks.iter().chain(formats).cloned().collect()))
    });
    let larger = CARDS.iter().filter(|other| other.memory_mib > card.memory_mib);
    let other_kind = larger.flat_map(|card| {
        ranks.iter().map(move |ranks| match ranks {
            None => Remedy::Card(*card),
            Some(ranks) => Remedy::Together(vec![Remedy::Card(*card), ranks.clone()]),
        })
    });
    same_kind.chain(other_kind).find(|remedy| remedy.is_enough(model, asked, place))
}

/// In the words of a spec.
impl Display for Remedy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ranks(n) => write!(f, "{n} GPUs (parallelism.tensor: {n})"),
            Self::Stages(n) => write!(f, "{n} stages (parallelism.pipeline: {n})"),
            Self::StagesAlone(n) => {
                write!(f, "{n} stages in place of ranks (parallelism.pipeline: {n}, without tensor)")
            }
            Self::Fp8 => f.write_str("engine.quantization: fp8"),
            Self::Fp8Cache => f.write_str("engine.kvCacheDtype: fp8"),
            Self::Context(tokens) => {
                write!(f, "context of at most {} tokens (engine.maxModelLen: {tokens})", grouped(u64::from(*tokens)))
            }
            Self::MemoryFraction(fraction) => write!(f, "engine.memoryFraction: {fraction}"),
            Self::Card(card) => write!(f, "a GPU like {}", card.name),
            Self::HostMemory(bytes) => write!(f, "resources.memory: {}Mi", bytes >> 20),
            Self::Together(remedies) => {
                let texts: Vec<String> = remedies.iter().map(Self::to_string).collect();
                f.write_str(&texts.join(" with "))
            }
        }
    }
}

/// All of them in one sentence.
#[derive(Debug)]
pub struct RemedyText<'a>(pub &'a [Remedy]);

impl Display for RemedyText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let texts: Vec<String> = self.0.iter().map(Remedy::to_string).collect();
        match texts.is_empty() {
            true => f.write_str("nothing that is known here makes it fit: take a smaller model"),
            false => write!(f, "needs {}", texts.join(", or ")),
        }
    }
}

/// An amount of memory, to a tenth.
pub fn gib(bytes: u64) -> String {
    let gib = bytes as f64 / (1u64 << 30) as f64;
    if gib < 1.0 { format!("{:.1} MiB", gib * 1024.0) } else { format!("{gib:.1} GiB") }
}

/// A number in groups of three digits.
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}
