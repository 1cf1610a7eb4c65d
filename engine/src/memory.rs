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
    /// What the limit is called in messages.
    name: &'static str,
    /// Of what is left, for the KV cache.
    kv_share_percent: u64,
    kv_size: KvSize,
}

/// How large a KV cache is made where nobody says.
#[derive(Clone, Copy, Debug, PartialEq)]
enum KvSize {
    /// Every sequence at full length: more is of no use.
    LongestUse,
    /// All that fits: nobody else needs the memory, and what is not in use keeps prefixes.
    Whatever,
}

impl MemoryBudget {
    /// Of a process on the CPU. A part is for the process itself: tokenizer, connections, allocator slack.
    pub fn host(limit_bytes: u64) -> Self {
        Self { limit_bytes, name: "the memory limit", kv_share_percent: 80, kv_size: KvSize::LongestUse }
    }

    /// Of a GPU that is ours.
    pub fn device(limit_bytes: u64) -> Self {
        let name = "the memory that gpu_memory_fraction allows";
        Self { limit_bytes, name, kv_share_percent: 100, kv_size: KvSize::Whatever }
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
        "weights need {} and a step's workspace {}, but {limit} is {}: raise {limit} to at least {}",
        mib(*weights_bytes), mib(*workspace_bytes), mib(*limit_bytes), mib(*least_bytes)
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
        /// What would do, with a KV cache for one sequence.
        least_bytes: u64,
    },
    /// The KV cache would not hold one sequence of full length.
    #[error(
        "the KV cache holds {kv_tokens} tokens but one sequence may have {max_model_len}: {}raise {setting} to at \
         least {needed}",
        if *kv_tokens > 0 { format!("lower max_model_len to {kv_tokens}, or ") } else { String::new() }
    )]
    KvBelowContext {
        /// Tokens that fit.
        kv_tokens: u64,
        /// Tokens one sequence may have.
        max_model_len: u64,
        /// The setting that is too small.
        setting: &'static str,
        /// What it would have to be.
        needed: String,
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
        let fitting_tokens = left_bytes.saturating_mul(budget.kv_share_percent) / 100 / needs.kv_bytes_per_token;
        let kv_tokens = match limits.kv_cache_tokens {
            Some(asked) => asked_tokens(asked.into(), fitting_tokens, needs, left_bytes, budget)?,
            None if budget.kv_size == KvSize::Whatever => fitting_tokens,
            None => fitting_tokens.min(longest_use(sched)),
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
        limit: budget.name,
        limit_bytes,
        least_bytes: least_limit(needs, sched, budget),
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
    let MemoryBudget { name: limit, limit_bytes, .. } = budget;
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
    let (setting, needed) = match limits.kv_cache_tokens {
        Some(_) => ("kv_cache_tokens", context_tokens.to_string()),
        None => (budget.name, mib(least_limit(needs, sched, budget))),
    };
    MemoryError::KvBelowContext {
        kv_tokens: kv_blocks * BLOCK_TOKENS as u64,
        max_model_len: sched.max_model_len as u64,
        setting,
        needed,
    }
}

/// The smallest limit under which one sequence of full length fits.
fn least_limit(needs: MemoryNeeds, sched: &SchedLimits, budget: MemoryBudget) -> u64 {
    let context_tokens = (blocks_for(sched.max_model_len) * BLOCK_TOKENS) as u64;
    let kv = context_tokens.saturating_mul(needs.kv_bytes_per_token);
    let share = kv.saturating_mul(100) / budget.kv_share_percent + 1;
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

    #[test]
    fn a_gpus_cache_takes_all_that_is_left() {
        let limits = EngineLimits::default();
        let sched = limits.validate(2048, &[], StepSizes::CPU).unwrap();
        let plan = MemoryPlan::new(NEEDS, &limits, &sched, MemoryBudget::device(100 << 30)).unwrap();
        let message = MemoryPlan::new(NEEDS, &limits, &sched, MemoryBudget::device(8 << 20)).unwrap_err().to_string();
        assert!(message.contains("gpu_memory_fraction allows is 8 MiB: raise"), "{message}");
        let used = plan.weights_bytes + plan.workspace_bytes + plan.kv_bytes;
        assert!(plan.limit_bytes - used < BLOCK_TOKENS as u64 * NEEDS.kv_bytes_per_token);
    }

    #[test]
    fn with_little_memory_the_cache_is_a_share_of_what_is_left() {
        let plan = plan(EngineLimits::default(), 240 * MIB).unwrap();
        assert_eq!(plan.kv_bytes, 160 * MIB);
        assert!(plan.weights_bytes + plan.workspace_bytes + plan.kv_bytes < plan.limit_bytes);
    }

    #[test]
    fn the_limit_named_in_a_refusal_is_enough() {
        let Err(MemoryError::WeightsTooLarge { least_bytes, .. }) = plan(EngineLimits::default(), 30 * MIB) else {
            panic!("30 MiB cannot hold 32 MiB of weights");
        };
        assert!(plan(EngineLimits::default(), least_bytes).is_ok());
        assert!(matches!(
            plan(EngineLimits::default(), least_bytes - MIB),
            Err(MemoryError::KvBelowContext { setting: "the memory limit", .. })
        ));
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
