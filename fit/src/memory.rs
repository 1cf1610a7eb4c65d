//! The memory plan (D10): weights, workspace and KV cache are sized before serving. Pure arithmetic.

mod fix;
#[cfg(test)]
mod tests;

pub use fix::{Fix, Fixes};

use crate::{BLOCK_TOKENS, blocks_for};

/// What a KV cache is for, and how large it was asked to be.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct CacheUse {
    /// Tokens of one sequence at most.
    pub max_model_len: usize,
    /// Sequences that run together at most.
    pub max_num_seqs: usize,
    /// Tokens that it holds, if somebody asked.
    pub asked_tokens: Option<u32>,
}

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

    /// Of what weights and workspace leave, for the KV cache. On the host a part is for what grows with requests: the tokenizer's
    /// words, texts on their way, allocator slack.
    fn kv_share_percent(self) -> u64 {
        match self.place {
            Place::Host => 80,
            Place::Device(_) => 100,
        }
    }

    /// How many tokens the KV cache holds where nobody says. On the host, every sequence at full length: more is of no use. On
    /// a GPU all that fits: nobody else needs the memory, and what is not in use keeps prefixes.
    fn kv_tokens(self, fitting_tokens: u64, cache: CacheUse) -> u64 {
        match self.place {
            Place::Host => fitting_tokens.min(longest_use(cache)),
            Place::Device(_) => fitting_tokens,
        }
    }

    /// What makes room for `needed_bytes` in all.
    fn room_for(self, needed_bytes: u64) -> Fix {
        match self.place {
            Place::Host => Fix::RaiseLimit(needed_bytes),
            Place::Device(memory) => memory.room_for(needed_bytes),
        }
    }
}

impl DeviceMemory {
    fn room_for(self, needed_bytes: u64) -> Fix {
        // In steps that a person would write, rounded up.
        let percent = (needed_bytes.saturating_add(self.taken_bytes) as f64 * 100.0 / self.total_bytes as f64).ceil();
        if percent <= 100.0 {
            Fix::RaiseFraction(percent / 100.0)
        } else {
            Fix::LargerGpu { needed_bytes, memory: self }
        }
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

/// Why a model does not fit; names the numbers and the settings that would.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum MemoryError {
    /// Weights and workspace leave no room for a KV cache.
    #[error(
        "weights need {}, a step's workspace {} and the KV cache of one sequence {}, but {limit} is {}: {fixes}",
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
        /// What would fit.
        fixes: Fixes,
    },
    /// The KV cache would not hold one sequence of full length.
    #[error("the KV cache holds {kv_tokens} tokens but one sequence may have {max_model_len}: {fixes}")]
    KvBelowContext {
        /// Tokens that the cache would hold.
        kv_tokens: u64,
        /// Tokens one sequence may have.
        max_model_len: u64,
        /// What would fit.
        fixes: Fixes,
    },
    /// The KV cache asked for is beyond the limit.
    #[error(
        "a KV cache of {kv_tokens} tokens needs {}, but {limit} of {} leaves {} for it: {fixes}",
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
        /// What would fit.
        fixes: Fixes,
    },
}

impl MemoryError {
    /// The numbers, without what would fit.
    pub fn numbers(&self) -> String {
        match self {
            Self::WeightsTooLarge { weights_bytes, workspace_bytes, limit_bytes, kv_bytes, .. } => {
                let all = weights_bytes.saturating_add(*workspace_bytes).saturating_add(*kv_bytes);
                format!(
                    "weights need {}, a step's workspace {} and the KV cache of one sequence {}: {} in all, and {} may be used",
                    mib(*weights_bytes),
                    mib(*workspace_bytes),
                    mib(*kv_bytes),
                    mib(all),
                    mib(*limit_bytes)
                )
            }
            Self::KvBelowContext { kv_tokens, max_model_len, .. } => {
                format!("the KV cache has room for {kv_tokens} tokens, and one sequence may have {max_model_len}")
            }
            Self::KvTooLarge { kv_tokens, kv_bytes, left_bytes, .. } => {
                let (needed, left) = (mib(*kv_bytes), mib(*left_bytes));
                format!("a KV cache of {kv_tokens} tokens needs {needed}, and {left} are left for it")
            }
        }
    }
}

impl MemoryPlan {
    /// Sizes the KV cache: as asked, or every sequence at full length as far as the limit allows.
    pub fn new(needs: MemoryNeeds, cache: CacheUse, budget: MemoryBudget) -> Result<Self, MemoryError> {
        let kv_tokens = CacheSizing::new(needs, cache, budget).tokens(cache)?;
        Ok(Self {
            weights_bytes: needs.weights_bytes,
            workspace_bytes: needs.workspace_bytes,
            kv_bytes_per_token: needs.kv_bytes_per_token,
            kv_blocks: (kv_tokens / BLOCK_TOKENS as u64).try_into().unwrap_or(u32::MAX),
            kv_bytes: kv_tokens * needs.kv_bytes_per_token,
            limit_bytes: budget.limit_bytes,
        })
    }

    /// Tokens the KV cache holds.
    pub fn kv_tokens(&self) -> u64 {
        u64::from(self.kv_blocks) * BLOCK_TOKENS as u64
    }
}

/// What bounds the size of a KV cache. Tokens are in whole blocks.
struct CacheSizing {
    needs: MemoryNeeds,
    budget: MemoryBudget,
    /// Tokens one sequence may have, as asked.
    max_model_len: u64,
    /// One sequence at full length.
    context_tokens: u64,
    /// As asked, if anything was.
    asked_tokens: Option<u64>,
    /// What weights and workspace leave.
    left_bytes: u64,
    /// How many tokens have room there.
    fitting_tokens: u64,
}

impl CacheSizing {
    fn new(needs: MemoryNeeds, cache: CacheUse, budget: MemoryBudget) -> Self {
        let fixed_bytes = needs.weights_bytes.saturating_add(needs.workspace_bytes);
        let left_bytes = budget.limit_bytes.saturating_sub(fixed_bytes);
        let for_kv_bytes = left_bytes.saturating_mul(budget.kv_share_percent()) / 100;
        Self {
            needs,
            budget,
            max_model_len: cache.max_model_len as u64,
            context_tokens: (blocks_for(cache.max_model_len) * BLOCK_TOKENS) as u64,
            asked_tokens: cache.asked_tokens.map(|tokens| whole_blocks(tokens.into())),
            left_bytes,
            fitting_tokens: whole_blocks(for_kv_bytes / needs.kv_bytes_per_token.max(1)),
        }
    }

    /// Tokens that the cache shall hold: room for one sequence at least.
    fn tokens(&self, cache: CacheUse) -> Result<u64, MemoryError> {
        let Self { context_tokens, fitting_tokens, .. } = *self;
        match self.asked_tokens {
            _ if fitting_tokens == 0 => Err(self.no_room()),
            Some(asked) if asked < context_tokens => Err(self.asked_below_context(asked)),
            Some(asked) if asked > fitting_tokens => Err(self.asked_too_large(asked)),
            Some(asked) => Ok(asked),
            None if fitting_tokens < context_tokens => Err(self.fits_below_context()),
            None => Ok(self.budget.kv_tokens(fitting_tokens, cache)),
        }
    }

    fn no_room(&self) -> MemoryError {
        let MemoryNeeds { weights_bytes, workspace_bytes, .. } = self.needs;
        MemoryError::WeightsTooLarge {
            weights_bytes,
            workspace_bytes,
            limit: self.budget.name(),
            limit_bytes: self.budget.limit_bytes,
            kv_bytes: self.bytes(self.context_tokens),
            fixes: Fixes(vec![self.room_for(self.context_tokens.max(self.asked_tokens.unwrap_or(0)))]),
        }
    }

    fn fits_below_context(&self) -> MemoryError {
        let fixes = vec![Fix::ShortenContext(self.fitting_tokens), self.room_for(self.context_tokens)];
        self.below_context(self.fitting_tokens, fixes)
    }

    fn asked_below_context(&self, asked_tokens: u64) -> MemoryError {
        let fits = |tokens: u64| (1..=self.fitting_tokens).contains(&tokens);
        let shorten = fits(asked_tokens).then_some(Fix::ShortenContext(asked_tokens));
        let enlarge = fits(self.context_tokens).then_some(Fix::EnlargeCache(self.context_tokens));
        let mut fixes: Vec<_> = shorten.into_iter().chain(enlarge).collect();
        if fixes.is_empty() {
            fixes.push(Fix::SetBoth(self.fitting_tokens));
        }
        self.below_context(asked_tokens, fixes)
    }

    fn below_context(&self, kv_tokens: u64, fixes: Vec<Fix>) -> MemoryError {
        MemoryError::KvBelowContext { kv_tokens, max_model_len: self.max_model_len, fixes: Fixes(fixes) }
    }

    fn asked_too_large(&self, asked_tokens: u64) -> MemoryError {
        let smaller = if self.fitting_tokens < self.context_tokens { Fix::SetBoth } else { Fix::ShrinkCache };
        MemoryError::KvTooLarge {
            kv_tokens: asked_tokens,
            kv_bytes: self.bytes(asked_tokens),
            limit: self.budget.name(),
            limit_bytes: self.budget.limit_bytes,
            left_bytes: self.left_bytes,
            fixes: Fixes(vec![smaller(self.fitting_tokens), self.room_for(asked_tokens)]),
        }
    }

    /// What makes room for a cache of this many tokens.
    fn room_for(&self, tokens: u64) -> Fix {
        let MemoryNeeds { weights_bytes, workspace_bytes, .. } = self.needs;
        let share = self.bytes(tokens).saturating_mul(100) / self.budget.kv_share_percent() + 1;
        self.budget.room_for(weights_bytes.saturating_add(workspace_bytes).saturating_add(share))
    }

    fn bytes(&self, tokens: u64) -> u64 {
        tokens.saturating_mul(self.needs.kv_bytes_per_token)
    }
}

/// Tokens of all sequences at full length, in whole blocks each.
fn longest_use(cache: CacheUse) -> u64 {
    (cache.max_num_seqs * blocks_for(cache.max_model_len) * BLOCK_TOKENS) as u64
}

fn whole_blocks(tokens: u64) -> u64 {
    tokens / BLOCK_TOKENS as u64 * BLOCK_TOKENS as u64
}

fn mib(bytes: u64) -> String {
    format!("{} MiB", bytes.div_ceil(1 << 20))
}
