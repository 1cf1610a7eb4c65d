//! How attention is cut into pieces, as far as sizes depend on it, and where pieces wait for their merge.

/// Tokens of a KV block on the device.
pub const BLOCK_SIZE: usize = crate::BLOCK_TOKENS;
/// Rows of a decode tile: sequences that are read together times query heads of one KV head.
pub const DECODE_TILE_ROWS: usize = 16;
/// Rows of a prefill tile: tokens times query heads of one KV head.
pub const PREFILL_TILE_ROWS: usize = 128;
/// Smallest piece of a context worth its merge: four KV blocks, one for each warp.
pub const PIECE_TOKENS_MIN: usize = 4 * BLOCK_SIZE;
/// The same as [`PIECE_TOKENS_MIN`] where pieces do not grow with the batch.
const FIXED_PIECE_TOKENS_MIN: usize = 256;

/// Attention heads of one rank.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Heads {
    /// Query heads.
    pub n_q: usize,
    /// KV heads.
    pub n_kv: usize,
    /// Dimensions of a head.
    pub dim: usize,
}

impl Heads {
    /// Query heads that share a KV head.
    pub fn group(self) -> usize {
        self.n_q / self.n_kv
    }

    /// Width of a fused QKV row.
    pub fn qkv_width(self) -> usize {
        (self.n_q + 2 * self.n_kv) * self.dim
    }

    /// Values of one KV block of one layer, in each of the two caches.
    pub fn block_values(self) -> usize {
        self.n_kv * BLOCK_SIZE * self.dim
    }
}

/// How contexts are cut.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum SplitPolicy {
    /// So that the pieces fill the chip, and once for all that share them: the result's last bits depend on who else is in
    /// the batch.
    Balanced {
        /// Thread blocks that run at once: two a multiprocessor.
        n_slots: usize,
    },
    /// Always pieces of this many tokens, a multiple of the block size: the same bits at any batch size.
    Fixed {
        /// Tokens of a piece.
        piece_tokens: usize,
        /// Thread blocks that run at once; they take the pieces in turn, as plans have many pieces or few.
        n_slots: usize,
    },
}

impl SplitPolicy {
    /// Fixed pieces for contexts of up to `len_max` tokens: at most 32 a context, which fill the chip for one sequence of
    /// eight KV heads, and none so short that merging counts.
    pub fn fixed(len_max: usize, n_slots: usize) -> Self {
        Self::Fixed { piece_tokens: len_max.div_ceil(32).next_power_of_two().max(FIXED_PIECE_TOKENS_MIN), n_slots }
    }

    /// Sequences that may be read together: their query heads fill the rows of a tensor-core tile.
    pub fn readers_max(self, heads: Heads) -> usize {
        match self {
            Self::Balanced { .. } => DECODE_TILE_ROWS / heads.group(),
            Self::Fixed { .. } => 1,
        }
    }

    /// Rows that the result of a piece has room for: query heads of all its readers.
    pub fn slot_rows(self, heads: Heads) -> usize {
        self.readers_max(heads) * heads.group()
    }
}

/// Pieces at most, for `n_sequences` of any length up to `len_max` that share whatever they like: what a captured graph and
/// its workspace are made for.
pub fn decode_items_max(n_sequences: usize, len_max: usize, heads: Heads, policy: SplitPolicy) -> usize {
    let longest = len_max.div_ceil(PIECE_TOKENS_MIN).max(1);
    match policy {
        // What is read together has round(tokens / share) pieces, at least one, and no more tokens than its sequences have
        // alone; the shares fill the slots of one KV head.
        SplitPolicy::Balanced { n_slots } => (n_sequences + n_slots.div_ceil(heads.n_kv)).min(n_sequences * longest),
        SplitPolicy::Fixed { piece_tokens, .. } => n_sequences * len_max.div_ceil(piece_tokens),
    }
}

/// How the contexts of prefill tiles are cut.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum PrefillSplit {
    /// Not at all: the same bits at any batch size.
    Never,
    /// So that the pieces fill the chip where tiles do not.
    Fill {
        /// Thread blocks that run at once.
        n_slots: usize,
    },
}

/// How a chip cuts them where only speed counts: the tiles of wgmma alone are merged again, and only Hopper has it.
pub fn prefill_split(capability: (i32, i32), n_multiprocessors: u32) -> PrefillSplit {
    if capability == (9, 0) { PrefillSplit::Fill { n_slots: n_multiprocessors as usize } } else { PrefillSplit::Never }
}

/// Pieces of cut tiles at most: what the scratch of prefill attention is made for.
pub fn prefill_pieces_max(heads: Heads, split: PrefillSplit) -> usize {
    match split {
        PrefillSplit::Never => 0,
        // A cut tile of length L has round(L / share) pieces, at most 4/3 of L / share from 1.5 on; all lengths together
        // are the shares of the slots of one KV head.
        PrefillSplit::Fill { n_slots } => 2 * n_slots.div_ceil(heads.n_kv),
    }
}

/// Bytes of what prefill attention keeps of so many pieces.
pub(super) fn prefill_scratch_bytes(n_pieces: usize, heads: Heads) -> usize {
    4 * n_pieces.max(1) * heads.n_kv * (PREFILL_TILE_ROWS * (heads.dim + 2) + 1)
}

/// What decode attention's scratch is made for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct ScratchSize {
    /// Sequences of the largest batch.
    pub n_sequences: usize,
    /// Pieces of the largest plan ([`decode_items_max`]).
    pub n_items: usize,
    /// How contexts are cut.
    pub policy: SplitPolicy,
    /// The rank's heads.
    pub heads: Heads,
}

impl ScratchSize {
    /// Bytes on the device, for the memory plan.
    pub fn bytes(self) -> usize {
        4 * (self.rows() * (self.heads.dim + 2) + self.n_sequences * self.heads.n_kv)
    }

    /// Rows of all results of pieces.
    pub fn rows(self) -> usize {
        self.n_items * self.heads.n_kv * self.policy.slot_rows(self.heads)
    }
}
