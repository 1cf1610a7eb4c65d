//! The memory plan (D10): weights, workspace and KV cache are sized before serving. Pure arithmetic.

use crate::{
    config::EngineLimits,
    kv::{BLOCK_TOKENS, blocks_for},
    sched::SchedLimits,
};

/// Memory that an engine may take, and how the KV cache may use what weights and workspace leave of it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MemoryBudget {
    /// For everything.
    pub limit_bytes: u64,
    /// Whose memory it is.
    place: Place,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Place {
    /// A process on the CPU.
    Host,
    /// A GPU that is ours.
    Device(DeviceMemory),
}

/// A GPU's memory as an engine finds it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeviceMemory {
    /// All there is.
    pub total_bytes: u64,
    /// In use already: by others, and by the driver for us.
    pub taken_bytes: u64,
}

impl MemoryBudget {
    /// Of a process on the CPU.
    pub fn host(limit_bytes: u64) -> Self {
        Self { limit_bytes, place: Place::Host }
    }

    /// The share of a GPU that `fraction` allows, less what is already taken of it.
    pub fn device(memory: DeviceMemory, fraction: f64) -> Self {
        let allowed = (memory.total_bytes as f64 * fraction) as u64;
        Self { limit_bytes: allowed.saturating_sub(memory.taken_bytes), place: Place::Device(memory) }
    }

    /// What the limit is called in messages.
    fn name(self) -> &'static str {
        match self.place {
            Place::Host => "the memory limit",
            Place::Device(_) => "what memory_fraction leaves of the GPU",
        }
    }

    /// Of what weights and workspace leave, for the KV cache. On the host a part is for the process itself: tokenizer,
    /// connections, allocator slack.
    fn kv_share_percent(self) -> u64 {
        match self.place {
            Place::Host => 80,
            Place::Device(_) => 100,
        }
    }

    /// How many tokens the KV cache holds where nobody says. On the host, every sequence at full length: more is of no use. On
    /// a GPU all that fits: nobody else needs the memory, and what is not in use keeps prefixes.
    fn kv_tokens(self, fitting_tokens: u64, sched: &SchedLimits) -> u64 {
        match self.place {
            Place::Host => fitting_tokens.min(longest_use(sched)),
            Place::Device(_) => fitting_tokens,
        }
    }

    /// The setting that makes room for `needed_bytes`, and its value.
    fn advice(self, needed_bytes: u64) -> String {
        match self.place {
            Place::Host => format!("raise the memory limit to at least {}", mib(needed_bytes)),
            Place::Device(memory) => memory.advice(needed_bytes),
        }
    }
}

impl DeviceMemory {
    fn advice(self, needed_bytes: u64) -> String {
        let Self { total_bytes, taken_bytes } = self;
        // In steps that a person would write, rounded up.
        let percent = ((needed_bytes + taken_bytes) as f64 * 100.0 / total_bytes as f64).ceil();
        if percent <= 100.0 {
            return format!("raise memory_fraction to at least {}", percent / 100.0);
        }
        let (total, taken, needed) = (mib(total_bytes), mib(taken_bytes), mib(needed_bytes));
        format!("no memory_fraction is enough: {needed} are needed, the GPU has {total}, of which {taken} are taken")
    }
}

/// Memory of one engine, in bytes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MemoryPlan {
    /// Weights as held.
    pub weights_bytes: u64,
    /// Intermediate results of the largest step.
    pub workspace_bytes: u64,
    /// Keys and values of one token.
    pub kv_bytes_per_token: u64,
    /// KV blocks.
    pub kv_blocks: u32,
    /// The KV cache.
    pub kv_bytes: u64,
    /// What the process may use.
    pub limit_bytes: u64,
}

/// What a model needs, whatever the settings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MemoryNeeds {
    /// Weights as held.
    pub weights_bytes: u64,
    /// Intermediate results of the largest step.
    pub workspace_bytes: u64,
    /// Keys and values of one token.
    pub kv_bytes_per_token: u64,
}

/// Why a model does not fit; names the numbers and the setting that would.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum MemoryError {
    /// Weights and workspace alone are too much.
    #[error(
        "weights need {}, a step's workspace {} and the KV cache of one sequence {}, but {limit} is {}: {advice}",
        mib(*weights_bytes), mib(*workspace_bytes), mib(*kv_bytes), mib(*limit_bytes)
    )]
    WeightsTooLarge {
        /// Weights.
        weights_bytes: u64,
        /// Workspace.
        workspace_bytes: u64,
        /// What the limit is called.
        limit: &'static str,
        /// What may be used.
        limit_bytes: u64,
        /// Keys and values of one sequence at full length.
        kv_bytes: u64,
        /// The setting that would do.
        advice: String,
    },
    /// The KV cache would not hold one sequence of full length.
    #[error(
        "the KV cache holds {kv_tokens} tokens but one sequence may have {max_model_len}: {}{advice}",
        if *kv_tokens > 0 { format!("lower max_model_len to {kv_tokens}, or ") } else { String::new() }
    )]
    KvBelowContext {
        /// Tokens that fit.
        kv_tokens: u64,
        /// Tokens one sequence may have.
        max_model_len: u64,
        /// The setting that would do.
        advice: String,
    },
    /// The KV cache asked for is beyond the limit.
    #[error(
        "a KV cache of {kv_tokens} tokens needs {}, but {limit} of {} leaves {} for it: lower kv_cache_tokens to \
         {fitting_tokens}",
        mib(*kv_bytes), mib(*limit_bytes), mib(*left_bytes)
    )]
    KvTooLarge {
        /// Tokens asked for.
        kv_tokens: u64,
        /// Their bytes.
        kv_bytes: u64,
        /// What the limit is called.
        limit: &'static str,
        /// What may be used.
        limit_bytes: u64,
        /// What weights and workspace leave.
        left_bytes: u64,
        /// Tokens that would fit.
        fitting_tokens: u64,
    },
}

impl MemoryPlan {
    /// Sizes the KV cache: as asked, or every sequence at full length as far as the limit allows.
    pub fn new(
        needs: MemoryNeeds,
        limits: &EngineLimits,
        sched: &SchedLimits,
        budget: MemoryBudget,
    ) -> Result<Self, MemoryError> {
        let limit_bytes = budget.limit_bytes;
        let left_bytes = left_for_kv(needs, sched, budget)?;
        let fitting_tokens = left_bytes.saturating_mul(budget.kv_share_percent()) / 100 / needs.kv_bytes_per_token;
        let kv_tokens = match limits.kv_cache_tokens {
            Some(asked) => asked_tokens(asked.into(), fitting_tokens, needs, left_bytes, budget)?,
            None => budget.kv_tokens(fitting_tokens, sched),
        };
        let kv_blocks = kv_tokens / BLOCK_TOKENS as u64;
        if kv_blocks < blocks_for(sched.max_model_len) as u64 {
            return Err(below_context(kv_blocks, limits, needs, sched, budget));
        }
        Ok(Self {
            weights_bytes: needs.weights_bytes,
            workspace_bytes: needs.workspace_bytes,
            kv_bytes_per_token: needs.kv_bytes_per_token,
            kv_blocks: kv_blocks.try_into().unwrap_or(u32::MAX),
            kv_bytes: kv_blocks * BLOCK_TOKENS as u64 * needs.kv_bytes_per_token,
            limit_bytes,
        })
    }

    /// Tokens the KV cache holds.
    pub fn kv_tokens(&self) -> u64 {
        u64::from(self.kv_blocks) * BLOCK_TOKENS as u64
    }
}

/// Tokens of all sequences at full length, in whole blocks each.
fn longest_use(sched: &SchedLimits) -> u64 {
    (sched.max_num_seqs * blocks_for(sched.max_model_len) * BLOCK_TOKENS) as u64
}

fn left_for_kv(needs: MemoryNeeds, sched: &SchedLimits, budget: MemoryBudget) -> Result<u64, MemoryError> {
    let limit_bytes = budget.limit_bytes;
    let fixed = needs.weights_bytes.saturating_add(needs.workspace_bytes);
    limit_bytes.checked_sub(fixed).filter(|left| *left > 0).ok_or_else(|| MemoryError::WeightsTooLarge {
        weights_bytes: needs.weights_bytes,
        workspace_bytes: needs.workspace_bytes,
        limit: budget.name(),
        limit_bytes,
        kv_bytes: context_bytes(needs, sched),
        advice: budget.advice(least_limit(needs, sched, budget)),
    })
}

fn asked_tokens(
    asked: u64,
    fitting_tokens: u64,
    needs: MemoryNeeds,
    left_bytes: u64,
    budget: MemoryBudget,
) -> Result<u64, MemoryError> {
    if asked <= fitting_tokens {
        return Ok(asked);
    }
    let kv_bytes = asked.saturating_mul(needs.kv_bytes_per_token);
    let (limit, limit_bytes) = (budget.name(), budget.limit_bytes);
    Err(MemoryError::KvTooLarge { kv_tokens: asked, kv_bytes, limit, limit_bytes, left_bytes, fitting_tokens })
}

fn below_context(
    kv_blocks: u64,
    limits: &EngineLimits,
    needs: MemoryNeeds,
    sched: &SchedLimits,
    budget: MemoryBudget,
) -> MemoryError {
    let context_tokens = blocks_for(sched.max_model_len) * BLOCK_TOKENS;
    let advice = match limits.kv_cache_tokens {
        Some(_) => format!("raise kv_cache_tokens to at least {context_tokens}"),
        None => budget.advice(least_limit(needs, sched, budget)),
    };
    MemoryError::KvBelowContext {
        kv_tokens: kv_blocks * BLOCK_TOKENS as u64,
        max_model_len: sched.max_model_len as u64,
        advice,
    }
}

/// Keys and values of one sequence at full length, in whole blocks.
fn context_bytes(needs: MemoryNeeds, sched: &SchedLimits) -> u64 {
    let context_tokens = (blocks_for(sched.max_model_len) * BLOCK_TOKENS) as u64;
    context_tokens.saturating_mul(needs.kv_bytes_per_token)
}

/// The smallest limit under which one sequence of full length fits.
fn least_limit(needs: MemoryNeeds, sched: &SchedLimits, budget: MemoryBudget) -> u64 {
    let share = context_bytes(needs, sched).saturating_mul(100) / budget.kv_share_percent() + 1;
    needs.weights_bytes.saturating_add(needs.workspace_bytes).saturating_add(share)
}

fn mib(bytes: u64) -> String {
    format!("{} MiB", bytes.div_ceil(1 << 20))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::StepSizes;

    const MIB: u64 = 1 << 20;
    const NEEDS: MemoryNeeds =
        MemoryNeeds { weights_bytes: 32 * MIB, workspace_bytes: 8 * MIB, kv_bytes_per_token: 8192 };

    fn plan(limits: EngineLimits, limit_bytes: u64) -> Result<MemoryPlan, MemoryError> {
        let sched = limits.validate(2048, &[], StepSizes::CPU).unwrap();
        MemoryPlan::new(NEEDS, &limits, &sched, MemoryBudget::host(limit_bytes))
    }

    #[test]
    fn with_plenty_of_memory_every_sequence_may_be_full() {
        assert_eq!(plan(EngineLimits::default(), 1 << 40).unwrap().kv_tokens(), 64 * 2048);
    }

    fn plan_on_gpu(memory: DeviceMemory, fraction: f64) -> Result<MemoryPlan, MemoryError> {
        let limits = EngineLimits::default();
        let sched = limits.validate(2048, &[], StepSizes::CPU).unwrap();
        MemoryPlan::new(NEEDS, &limits, &sched, MemoryBudget::device(memory, fraction))
    }

    #[test]
    fn a_gpus_cache_takes_all_that_is_left() {
        let memory = DeviceMemory { total_bytes: 100 << 30, taken_bytes: 1 << 30 };
        let plan = plan_on_gpu(memory, 0.9).unwrap();
        assert_eq!(plan.limit_bytes, 89 << 30);
        let used = plan.weights_bytes + plan.workspace_bytes + plan.kv_bytes;
        assert!(plan.limit_bytes - used < BLOCK_TOKENS as u64 * NEEDS.kv_bytes_per_token);
    }

    #[test]
    fn a_gpu_with_too_little_memory_names_every_part_and_the_fraction_that_is_enough() {
        let memory = DeviceMemory { total_bytes: 200 * MIB, taken_bytes: 20 * MIB };
        let message = plan_on_gpu(memory, 0.2).unwrap_err().to_string();
        assert_eq!(
            message,
            "weights need 32 MiB, a step's workspace 8 MiB and the KV cache of one sequence 16 MiB, but what \
             memory_fraction leaves of the GPU is 20 MiB: raise memory_fraction to at least 0.39"
        );
        assert!(plan_on_gpu(memory, 0.39).is_ok());
        let message = plan_on_gpu(memory, 0.35).unwrap_err().to_string();
        assert!(
            message.ends_with("lower max_model_len to 1280, or raise memory_fraction to at least 0.39"),
            "{message}"
        );
    }

    #[test]
    fn a_gpu_that_is_too_small_at_any_fraction_says_so() {
        let memory = DeviceMemory { total_bytes: 64 * MIB, taken_bytes: 30 * MIB };
        let message = plan_on_gpu(memory, 1.0).unwrap_err().to_string();
        assert!(message.contains("no memory_fraction is enough: 57 MiB are needed, the GPU has 64 MiB"), "{message}");
    }

    #[test]
    fn with_little_memory_the_cache_is_a_share_of_what_is_left() {
        let plan = plan(EngineLimits::default(), 240 * MIB).unwrap();
        assert_eq!(plan.kv_bytes, 160 * MIB);
        assert!(plan.weights_bytes + plan.workspace_bytes + plan.kv_bytes < plan.limit_bytes);
    }

    #[test]
    fn the_limit_named_in_a_refusal_is_enough() {
        let message = plan(EngineLimits::default(), 30 * MIB).unwrap_err().to_string();
        assert!(message.ends_with("raise the memory limit to at least 61 MiB"), "{message}");
        assert!(plan(EngineLimits::default(), 61 * MIB).is_ok());
        let below = plan(EngineLimits::default(), 59 * MIB);
        assert!(matches!(below, Err(MemoryError::KvBelowContext { .. })), "{below:?}");
    }

    #[test]
    fn a_cache_below_one_context_is_refused_with_the_size_that_works() {
        let limits = EngineLimits { kv_cache_tokens: Some(1000), ..EngineLimits::default() };
        let message = plan(limits, 1 << 40).unwrap_err().to_string();
        assert!(message.contains("lower max_model_len to 992"), "{message}");
        assert!(message.contains("raise kv_cache_tokens to at least 2048"), "{message}");
    }

    #[test]
    fn a_cache_beyond_the_limit_is_refused_with_the_size_that_fits() {
        let limits = EngineLimits { kv_cache_tokens: Some(1_000_000), ..EngineLimits::default() };
        let Err(MemoryError::KvTooLarge { fitting_tokens, .. }) = plan(limits.clone(), 240 * MIB) else {
            panic!("8 GB do not fit 240 MiB");
        };
        let fitting = EngineLimits { kv_cache_tokens: Some(fitting_tokens as u32), ..limits };
        assert!(plan(fitting, 240 * MIB).is_ok());
    }
}
