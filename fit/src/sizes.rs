//! Sizes of steps and of KV blocks that have a default.

/// Tokens of a KV block.
pub const BLOCK_TOKENS: usize = 16;

/// Blocks that hold `tokens` tokens.
pub fn blocks_for(tokens: usize) -> usize {
    tokens.div_ceil(BLOCK_TOKENS)
}

/// Sizes of a step where nobody says.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct StepSizes {
    /// Sequences decoded together at most.
    pub max_num_seqs: u32,
    /// Tokens computed in one step at most.
    pub max_batched_tokens: u32,
}

/// What was asked of them.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct AskedSizes {
    /// Sequences decoded together at most.
    pub max_num_seqs: Option<u32>,
    /// Tokens computed in one step at most.
    pub max_batched_tokens: Option<u32>,
}

impl StepSizes {
    /// For CPUs: a longer step would hold up the sequences that decode.
    pub const CPU: Self = Self { max_num_seqs: 64, max_batched_tokens: 512 };
    /// For a GPU: 256 sequences read the weights once for all, 8192 tokens of a prompt take a fifth of a second for 8 billion
    /// parameters.
    pub const GPU: Self = Self { max_num_seqs: 256, max_batched_tokens: 8192 };

    /// With what was asked; what was not asked gives way to it.
    pub fn with(self, asked: AskedSizes) -> Self {
        let AskedSizes { max_num_seqs, max_batched_tokens } = asked;
        Self {
            max_num_seqs: max_num_seqs.unwrap_or(self.max_num_seqs.min(max_batched_tokens.unwrap_or(u32::MAX))),
            max_batched_tokens: max_batched_tokens.unwrap_or(self.max_batched_tokens.max(max_num_seqs.unwrap_or(0))),
        }
    }
}
