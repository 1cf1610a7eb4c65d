//! Weights of four bits in groups along the depth: how large they lie on the device.

/// Outputs of a tile.
pub const TILE_ROWS: usize = 16;
/// Values of the depth that a stage of the product has.
pub const STEP: usize = 128;
/// Values of the depth that lie together.
pub const CHUNK: usize = 64;
/// Words of a chunk of a tile: four of each lane.
pub const CHUNK_WORDS: usize = 32 * 4;

/// Values that share a scale on the device. Larger groups are repeated; of 64, too, as two of 32.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum GroupSize {
    /// 32.
    G32,
    /// 128.
    G128,
}

impl GroupSize {
    /// The one that groups of so many values of a depth of `k` are stored by, if they can be.
    pub fn of(size: usize, k: usize) -> Option<Self> {
        match size {
            _ if size.is_multiple_of(STEP) || size >= k => Some(Self::G128),
            _ => size.is_multiple_of(Self::G32.values()).then_some(Self::G32),
        }
    }

    /// The one that holds all of them.
    pub fn smallest(groups: &[Self]) -> Self {
        if groups.contains(&Self::G32) { Self::G32 } else { Self::G128 }
    }

    /// Values of one.
    pub const fn values(self) -> usize {
        STEP / self.n_units()
    }

    /// Of a stage.
    pub const fn n_units(self) -> usize {
        match self {
            Self::G32 => 4,
            Self::G128 => 1,
        }
    }
}

/// A matrix of that format.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Int4Size {
    /// Outputs.
    pub n: usize,
    /// Depth.
    pub k: usize,
    /// Who shares a scale.
    pub group: GroupSize,
}

impl Int4Size {
    /// Words of all codes.
    pub fn n_code_words(self) -> usize {
        self.n_tiles() * self.n_chunks() * CHUNK_WORDS
    }

    /// Words of all scales and zero points.
    pub fn n_group_words(self) -> usize {
        self.n_tiles() * self.n_groups() * TILE_ROWS
    }

    /// Bytes on the device.
    pub fn n_bytes(self) -> usize {
        4 * (self.n_code_words() + self.n_group_words())
    }

    /// Tiles of outputs.
    pub fn n_tiles(self) -> usize {
        self.n.div_ceil(TILE_ROWS)
    }

    /// Chunks of the depth.
    pub fn n_chunks(self) -> usize {
        self.k.div_ceil(CHUNK)
    }

    /// Groups of an output, with those behind its end that fill a stage.
    pub fn n_groups(self) -> usize {
        self.k.div_ceil(STEP) * self.group.n_units()
    }
}
