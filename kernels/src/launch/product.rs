//! Launches of the GEMM for few rows. Which GEMM takes which shape is decided in [`crate::choose`].

use super::{Entry, GATE_UP_GROUP, GemmShape, LaunchConfig, config, count, norm_tiles, not_empty, refused};
use crate::{
    device::Properties,
    entry::{SKINNY_INT4_BYTES_MAX, SKINNY_RING_BYTES},
    error::KernelError,
    int4::{GroupSize, STEP},
};

/// Most rows of x that the small-batch matrix product takes.
pub const SKINNY_ROWS_MAX: usize = 8;

/// Rows of w that the small-batch product takes at a time.
const SKINNY_TILE_ROWS: usize = 16;
const OP: &str = "skinny_gemm";

/// What the small-batch product does at its end. The formulas are in `csrc/skinny.cuh`.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum SkinnyForm {
    /// Stores activations.
    Bf16,
    /// Stores logits.
    F32,
    /// Adds to the residual stream.
    Update,
    /// Stores activations of a norm.
    ScaledBf16,
    /// Stores logits of a norm.
    ScaledF32,
    /// Activates gate and up of a norm.
    Gated,
}

impl SkinnyForm {
    /// Those of both kernels: from registers, through the ring.
    fn entries(self) -> [Entry; 2] {
        match self {
            Self::Bf16 => [Entry::SkinnyBf16, Entry::SkinnySm90Bf16],
            Self::F32 => [Entry::SkinnyF32, Entry::SkinnySm90F32],
            Self::Update => [Entry::SkinnyUpdate, Entry::SkinnySm90Update],
            Self::ScaledBf16 => [Entry::SkinnyScaledBf16, Entry::SkinnySm90ScaledBf16],
            Self::ScaledF32 => [Entry::SkinnyScaledF32, Entry::SkinnySm90ScaledF32],
            Self::Gated => [Entry::SkinnyGated, Entry::SkinnySm90Gated],
        }
    }

    /// The same of weights of four bits.
    fn int4_entry(self) -> Result<Entry, KernelError> {
        match self {
            Self::Bf16 => Ok(Entry::SkinnyInt4Bf16),
            Self::Update => Ok(Entry::SkinnyInt4Update),
            Self::ScaledBf16 => Ok(Entry::SkinnyInt4Scaled),
            Self::Gated => Ok(Entry::SkinnyInt4Gated),
            Self::F32 | Self::ScaledF32 => Err(refused(OP, "logits are of weights in bf16".to_owned())),
        }
    }

    /// The same of weights in e4m3.
    fn e4m3_entries(self) -> Result<[Entry; 2], KernelError> {
        match self {
            Self::Bf16 => Ok([Entry::SkinnyE4m3Bf16, Entry::SkinnySm90E4m3Bf16]),
            Self::Update => Ok([Entry::SkinnyE4m3Update, Entry::SkinnySm90E4m3Update]),
            Self::ScaledBf16 => Ok([Entry::SkinnyE4m3Scaled, Entry::SkinnySm90E4m3Scaled]),
            Self::Gated => Ok([Entry::SkinnyE4m3Gated, Entry::SkinnySm90E4m3Gated]),
            Self::F32 | Self::ScaledF32 => Err(refused(OP, "logits are of weights in bf16".to_owned())),
        }
    }
}

/// How the small-batch product reads the weights.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum SkinnyKernel {
    /// Straight into registers: every chip.
    Registers,
    /// By the bulk copy engine through a ring in shared memory, one block a multiprocessor: Hopper and later.
    Ring {
        /// Multiprocessors of the chip.
        n_multiprocessors: u32,
    },
}

impl SkinnyKernel {
    /// The one with the ring where the chip has it.
    pub fn for_device(properties: Properties) -> Self {
        let Properties { capability, n_multiprocessors, .. } = properties;
        if capability >= (9, 0) { Self::Ring { n_multiprocessors } } else { Self::Registers }
    }

    /// The faster one for one row and `n` rows of weights. Blocks of registers that are let in early crowd on some multiprocessors,
    /// unless there are enough of them for several rounds. Where there are they read faster than the ring: a step of
    /// Llama-3.1-8B takes 4034 µs with gate, up and head by registers and the rest through the ring, 4102 with down by registers,
    /// 4252 with gate and up through the ring.
    pub fn for_one_row(n: usize, properties: Properties) -> Self {
        const REGISTERS_TILES_MIN: u32 = 8;
        let n_tiles = count(norm_tiles(n));
        let is_several_rounds = n_tiles >= REGISTERS_TILES_MIN * properties.n_multiprocessors;
        if is_several_rounds { Self::Registers } else { Self::for_device(properties) }
    }
}

/// Matrix product of up to [`SKINNY_ROWS_MAX`] rows.
pub fn skinny_gemm(shape: GemmShape, form: SkinnyForm, kernel: SkinnyKernel) -> Result<LaunchConfig, KernelError> {
    not_empty(OP, shape.m.min(shape.n).min(shape.k))?;
    if shape.m > SKINNY_ROWS_MAX {
        return Err(refused(OP, format!("{} rows are more than {SKINNY_ROWS_MAX}", shape.m)));
    }
    if !shape.k.is_multiple_of(8) {
        return Err(refused(OP, format!("depth {} is not a multiple of 8", shape.k)));
    }
    if form == SkinnyForm::Gated && !shape.n.is_multiple_of(2 * GATE_UP_GROUP) {
        let whole = 2 * GATE_UP_GROUP;
        return Err(refused(OP, format!("{} rows of gate and up are not a multiple of {whole}", shape.n)));
    }
    let [registers, ring] = form.entries();
    let n_tiles = count(shape.n.div_ceil(SKINNY_TILE_ROWS));
    Ok(match kernel {
        SkinnyKernel::Registers => config(registers, [n_tiles, 1, 1], 256),
        // 8 consumer warps and a producer.
        SkinnyKernel::Ring { n_multiprocessors } => LaunchConfig {
            entry: ring,
            grid: [n_tiles.min(n_multiprocessors), 1, 1],
            threads: 288,
            shared_bytes: SKINNY_RING_BYTES,
        },
    })
}

/// The same with weights of e4m3.
pub fn skinny_gemm_e4m3(shape: GemmShape, form: SkinnyForm, kernel: SkinnyKernel) -> Result<LaunchConfig, KernelError> {
    const WHOLE: usize = 16;
    let [registers, ring] = form.e4m3_entries()?;
    if !shape.k.is_multiple_of(WHOLE) {
        return Err(refused(OP, format!("depth {} of e4m3 is not a multiple of {WHOLE}", shape.k)));
    }
    let entry = if kernel == SkinnyKernel::Registers { registers } else { ring };
    Ok(LaunchConfig { entry, ..skinny_gemm(shape, form, kernel)? })
}

/// Bytes of rows of x that a block of the product of weights of four bits holds.
fn skinny_int4_x_bytes(shape: GemmShape) -> usize {
    2 * shape.m * shape.k.next_multiple_of(STEP)
}

/// Bytes of the weights that are on their way to a block; the same as `kRingBytes` in `csrc/skinny_int4_sm90.cu`.
fn skinny_int4_ring_bytes(group: GroupSize) -> usize {
    const WARPS: usize = 8;
    match group {
        GroupSize::G128 => WARPS * 5 * (1024 + 256),
        GroupSize::G32 => WARPS * 3 * (1024 + 4 * 256),
    }
}

/// Whether that many rows have room beside the weights of four bits that they are multiplied with.
pub fn skinny_takes_int4(shape: GemmShape) -> bool {
    let has_room =
        skinny_int4_x_bytes(shape) + skinny_int4_ring_bytes(GroupSize::G128) <= SKINNY_INT4_BYTES_MAX as usize;
    shape.m <= SKINNY_ROWS_MAX && shape.k.is_multiple_of(8) && has_room
}

/// The same with weights of four bits: as many blocks a multiprocessor, two or three, as leave the fewest tiles to the slowest. Their
/// shared memory keeps more from coming (`csrc/skinny.cuh`).
pub fn skinny_gemm_int4(
    shape: GemmShape,
    form: SkinnyForm,
    group: GroupSize,
    n_multiprocessors: u32,
) -> Result<LaunchConfig, KernelError> {
    /// Of which three do not fit a multiprocessor.
    const TWO_BYTES: u32 = 76 << 10;
    /// Of which three do.
    const THREE_BYTES: u32 = 68 << 10;
    skinny_gemm(shape, form, SkinnyKernel::Registers)?;
    let entry = form.int4_entry()?;
    if !skinny_takes_int4(shape) {
        let GemmShape { m, k, .. } = shape;
        return Err(refused(OP, format!("{m} rows of {k} have no room beside weights of four bits")));
    }
    let (n_tiles, x_bytes) = (count(shape.n.div_ceil(SKINNY_TILE_ROWS)), count(skinny_int4_x_bytes(shape)));
    let bytes = x_bytes + count(skinny_int4_ring_bytes(group));
    let slowest = |n_blocks: u32| n_blocks * n_tiles.div_ceil(n_blocks * n_multiprocessors);
    let n_blocks = if bytes <= THREE_BYTES && slowest(3) < slowest(2) { 3 } else { 2 };
    Ok(LaunchConfig {
        entry,
        grid: [n_tiles.min(n_blocks * n_multiprocessors), 1, 1],
        threads: 256,
        shared_bytes: bytes.max(if n_blocks == 2 { TWO_BYTES } else { THREE_BYTES }),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_skinny_product_takes_sixteen_weight_rows_a_block() {
        let launch = |m, n, form| {
            let config = skinny_gemm(GemmShape { m, n, k: 4096 }, form, SkinnyKernel::Registers).unwrap();
            (config.entry, config.grid)
        };
        assert_eq!(launch(8, 4097, SkinnyForm::ScaledF32), (Entry::SkinnyScaledF32, [257, 1, 1]));
        assert_eq!(launch(1, 16, SkinnyForm::Update), (Entry::SkinnyUpdate, [1, 1, 1]));
        assert_eq!([1, 16, 17, 4096].map(norm_tiles), [1, 1, 2, 256]);
    }

    #[test]
    fn weights_in_e4m3_are_read_sixteen_at_a_time() {
        let of = |k, form| skinny_gemm_e4m3(GemmShape { m: 1, n: 64, k }, form, SkinnyKernel::Registers);
        assert_eq!(of(48, SkinnyForm::Update).unwrap().entry, Entry::SkinnyE4m3Update);
        let refusals = [
            (of(40, SkinnyForm::Bf16), "skinny_gemm: depth 40 of e4m3 is not a multiple of 16"),
            (of(48, SkinnyForm::F32), "skinny_gemm: logits are of weights in bf16"),
        ];
        refusals.into_iter().for_each(|(refusal, text)| assert_eq!(refusal.unwrap_err().to_string(), text));
    }

    #[test]
    fn weights_of_four_bits_have_as_many_blocks_as_leave_the_fewest_tiles_to_the_slowest() {
        let of =
            |m, n, k| skinny_gemm_int4(GemmShape { m, n, k }, SkinnyForm::ScaledBf16, GroupSize::G128, 132).unwrap();
        let blocks = |m, n, k| of(m, n, k).grid[0];
        // 384, 256, 1792 and 256 tiles: three, two, two and two blocks a multiprocessor.
        let found = [blocks(1, 6144, 4096), blocks(1, 4096, 4096), blocks(1, 28_672, 4096), blocks(1, 4096, 14_336)];
        assert_eq!(found, [384, 256, 264, 256]);
        assert!(of(1, 6144, 4096).shared_bytes < of(1, 4096, 4096).shared_bytes);
        let refusal = skinny_gemm_int4(GemmShape { m: 4, n: 16, k: 14_336 }, SkinnyForm::Bf16, GroupSize::G128, 132);
        let text = "skinny_gemm: 4 rows of 14336 have no room beside weights of four bits";
        assert_eq!(refusal.unwrap_err().to_string(), text);
    }

    #[test]
    fn gate_and_up_that_do_not_lie_in_whole_turns_are_refused() {
        let refusal = skinny_gemm(GemmShape { m: 1, n: 40, k: 8 }, SkinnyForm::Gated, SkinnyKernel::Registers);
        let text = "skinny_gemm: 40 rows of gate and up are not a multiple of 16";
        assert_eq!(refusal.unwrap_err().to_string(), text);
    }

    #[test]
    fn a_ring_takes_one_block_a_multiprocessor_and_no_more_than_there_are_tiles() {
        let ring = SkinnyKernel::Ring { n_multiprocessors: 132 };
        let blocks = |n| skinny_gemm(GemmShape { m: 1, n, k: 4096 }, SkinnyForm::Update, ring).unwrap().grid[0];
        assert_eq!([16, 17, 4096, 128_256].map(blocks), [1, 2, 132, 132]);
    }
}
