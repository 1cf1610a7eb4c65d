//! Launches of the GEMM for few rows. Which GEMM takes which shape is decided in [`crate::choose`].

use stoker_fit::gpu::GroupSize;

use super::{Entry, Epilogue, GATE_UP_GROUP, GemmShape, LaunchConfig, config, count, not_empty, refused};
use crate::{choose::ScaledBy, device::Properties, entry::SKINNY_RING_BYTES_MAX, error::KernelError};

/// Most rows of x that the small-batch matrix product takes.
pub const SKINNY_ROWS_MAX: usize = 8;

/// Most rows of x that it takes with weights of four bits.
pub const SKINNY_INT4_ROWS_MAX: usize = 4;
/// Values of the widest row whose norm the product finds that quantises it: a stage of codes.
const NORMED_ROW_MAX: usize = 4096;
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

    /// The same of weights in e4m3. Those with a scale a block are multiplied through the ring alone.
    fn e4m3_entries(self, scaled: ScaledBy) -> Result<[Entry; 2], KernelError> {
        let [by_rows, by_blocks] = match self {
            Self::Bf16 => [[Entry::SkinnyE4m3Bf16, Entry::SkinnySm90E4m3Bf16], [Entry::SkinnySm90BlocksBf16; 2]],
            Self::Update => {
                [[Entry::SkinnyE4m3Update, Entry::SkinnySm90E4m3Update], [Entry::SkinnySm90BlocksUpdate; 2]]
            }
            Self::ScaledBf16 => {
                [[Entry::SkinnyE4m3Scaled, Entry::SkinnySm90E4m3Scaled], [Entry::SkinnySm90BlocksScaled; 2]]
            }
            Self::Gated => [[Entry::SkinnyE4m3Gated, Entry::SkinnySm90E4m3Gated], [Entry::SkinnySm90BlocksGated; 2]],
            Self::F32 | Self::ScaledF32 => {
                return Err(refused(OP, "logits are of weights in bf16".to_owned()));
            }
        };
        Ok(if scaled == ScaledBy::Rows { by_rows } else { by_blocks })
    }
}

/// How the small-batch product reads the weights.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum SkinnyKernel {
    /// Straight into registers: every chip.
    Registers,
    /// By the bulk copy engine through a ring in shared memory, one block a multiprocessor: Hopper, and Blackwell of data centres.
    Ring {
        /// Multiprocessors of the chip.
        n_multiprocessors: u32,
    },
}

impl SkinnyKernel {
    /// The one with the ring where the chip has it.
    pub fn for_device(properties: Properties) -> Self {
        let Properties { capability, n_multiprocessors, .. } = properties;
        // Of others a block has less shared memory.
        if matches!(capability.0, 9..=11) { Self::Ring { n_multiprocessors } } else { Self::Registers }
    }

    /// Whether x has room where this kernel wants it.
    pub fn has_room(self, shape: GemmShape) -> bool {
        match self {
            Self::Registers => true,
            // The widest stages that there are.
            Self::Ring { .. } => RingForm::int4(GroupSize::G32).shared_bytes(shape).is_some(),
        }
    }
}

/// Of a kernel with a ring; what was fastest for one sequence of Llama-3.1-8B on an H200.
#[derive(Clone, Copy, Debug)]
struct RingForm {
    /// Warps that multiply.
    warps: u32,
    /// Stages, if there is room for them.
    stages: usize,
    stage_bytes: usize,
    x: RowBytes,
}

/// What a row of x takes in shared memory.
#[derive(Clone, Copy, Debug)]
struct RowBytes {
    /// Each 128 values.
    group: usize,
    beside: usize,
}

/// Two bytes a value; beside weights of four bits 32 more for each 128. Behind a row, what shifts banks.
const WIDE_ROW: RowBytes = RowBytes { group: 2 * 128 + 32, beside: 64 };
const BF16_RING: RingForm = RingForm { warps: 8, stages: 5, stage_bytes: 32 << 10, x: WIDE_ROW };
const E4M3_RING: RingForm = RingForm { warps: 16, stages: 4, stage_bytes: 32 << 10, x: WIDE_ROW };
/// A byte a value and digits of its sums; then, of two tiles of 16 outputs, each group's scale and sum. What the first is aligned by.
const QUANTISED_ROW: RowBytes = RowBytes { group: 128 + 16 + 2 * 16 * 8, beside: 1024 + 64 };
const QUANTISING_RING: RingForm = RingForm { warps: 16, stages: 3, stage_bytes: 34 << 10, x: QUANTISED_ROW };
/// With the scales of both eights of its rows.
const E4M3_BLOCKS_RING: RingForm = RingForm { stage_bytes: E4M3_RING.stage_bytes + 128, ..E4M3_RING };

impl RingForm {
    /// Codes of 4096 values of a tile's rows, and their groups.
    fn int4(group: GroupSize) -> Self {
        Self { warps: 16, stages: 3, stage_bytes: (32 + 2 * group.n_units()) << 10, x: WIDE_ROW }
    }

    /// Shared memory of a block: x, then stages. None if there is no room for two of them. Two blocks must not fit a multiprocessor, or
    /// others would get none.
    fn shared_bytes(self, shape: GemmShape) -> Option<u32> {
        /// Values that a row of x is padded to a multiple of; those of the widest stage.
        const STAGE_VALUES: usize = 4096;
        const BYTES_MIN: u32 = 112 << 10;
        let row = shape.k.next_multiple_of(STAGE_VALUES) / 128 * self.x.group + self.x.beside;
        let x = (shape.m * row).next_multiple_of(128);
        let room = (SKINNY_RING_BYTES_MAX as usize).checked_sub(x)?;
        let stages = self.stages.min(room / self.stage_bytes);
        (stages >= 2).then(|| count(x + stages * self.stage_bytes).max(BYTES_MIN))
    }

    fn launch(self, entry: Entry, shape: GemmShape, n_multiprocessors: u32) -> Result<LaunchConfig, KernelError> {
        let no_room = || refused(OP, format!("{} rows of {} leave no room for a ring", shape.m, shape.k));
        let n_tiles = count(shape.n.div_ceil(SKINNY_TILE_ROWS));
        Ok(LaunchConfig {
            entry,
            grid: [n_tiles.min(n_multiprocessors), 1, 1],
            // One more copies.
            threads: (self.warps + 1) * 32,
            shared_bytes: self.shared_bytes(shape).ok_or_else(no_room)?,
        })
    }
}

/// Matrix product of up to [`SKINNY_ROWS_MAX`] rows.
pub fn skinny_gemm(shape: GemmShape, form: SkinnyForm, kernel: SkinnyKernel) -> Result<LaunchConfig, KernelError> {
    skinny(shape, form.entries(), form, kernel, BF16_RING)
}

fn skinny(
    shape: GemmShape,
    [registers, through_ring]: [Entry; 2],
    form: SkinnyForm,
    kernel: SkinnyKernel,
    ring: RingForm,
) -> Result<LaunchConfig, KernelError> {
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
    let n_tiles = count(shape.n.div_ceil(SKINNY_TILE_ROWS));
    let SkinnyKernel::Ring { n_multiprocessors } = kernel else { return Ok(config(registers, [n_tiles, 1, 1], 256)) };
    ring.launch(through_ring, shape, n_multiprocessors)
}

/// The same with weights of e4m3.
pub fn skinny_gemm_e4m3(
    scaled: ScaledBy,
    shape: GemmShape,
    form: SkinnyForm,
    kernel: SkinnyKernel,
) -> Result<LaunchConfig, KernelError> {
    const WHOLE: usize = 16;
    if (scaled, kernel) == (ScaledBy::Blocks, SkinnyKernel::Registers) {
        return Err(refused(OP, "weights with a scale a block are multiplied through a ring".to_owned()));
    }
    let entries = form.e4m3_entries(scaled)?;
    if !shape.k.is_multiple_of(WHOLE) {
        return Err(refused(OP, format!("depth {} of e4m3 is not a multiple of {WHOLE}", shape.k)));
    }
    let ring = if scaled == ScaledBy::Rows { E4M3_RING } else { E4M3_BLOCKS_RING };
    skinny(shape, entries, form, kernel, ring)
}

/// The same with weights of four bits, which only the ring multiplies.
pub fn skinny_gemm_int4(
    shape: GemmShape,
    form: SkinnyForm,
    kernel: SkinnyKernel,
    group: GroupSize,
) -> Result<LaunchConfig, KernelError> {
    if kernel == SkinnyKernel::Registers {
        return Err(refused(OP, "weights of four bits are multiplied through a ring".to_owned()));
    }
    if shape.m > SKINNY_INT4_ROWS_MAX {
        let most = SKINNY_INT4_ROWS_MAX;
        return Err(refused(OP, format!("{} rows are more than {most} with weights of four bits", shape.m)));
    }
    let entry = match form {
        SkinnyForm::Bf16 => Entry::SkinnyInt4Bf16,
        SkinnyForm::Update => Entry::SkinnyInt4Update,
        SkinnyForm::ScaledBf16 => Entry::SkinnyInt4Scaled,
        SkinnyForm::Gated => Entry::SkinnyInt4Gated,
        SkinnyForm::F32 | SkinnyForm::ScaledF32 => {
            return Err(refused(OP, "logits are of weights in bf16".to_owned()));
        }
    };
    skinny(shape, [entry; 2], form, kernel, RingForm::int4(group))
}

/// Whether the product of a row that it quantises, and of its norm, is for such a shape and end.
pub fn fits_quantising_ring(shape: GemmShape, epilogue: Epilogue, is_normed: bool) -> bool {
    let GemmShape { m, n, k } = shape;
    let is_whole = match epilogue {
        Epilogue::Bf16 | Epilogue::Sum => true,
        Epilogue::Gated => n.is_multiple_of(2 * GATE_UP_GROUP),
        Epilogue::F32 | Epilogue::Update => false,
    };
    m == 1
        && is_whole
        && k.is_multiple_of(GroupSize::G128.values())
        && (!is_normed || k <= NORMED_ROW_MAX)
        && QUANTISING_RING.shared_bytes(shape).is_some()
}

/// The product of a row that it quantises, which must fit.
pub fn quantising_ring(
    shape: GemmShape,
    epilogue: Epilogue,
    n_multiprocessors: u32,
) -> Result<LaunchConfig, KernelError> {
    let entry = match epilogue {
        Epilogue::Gated => Entry::SkinnyInt4E4m3Gated,
        Epilogue::Sum => Entry::SkinnyInt4E4m3Sum,
        Epilogue::Bf16 | Epilogue::F32 | Epilogue::Update => Entry::SkinnyInt4E4m3Bf16,
    };
    QUANTISING_RING.launch(entry, shape, n_multiprocessors)
}

#[cfg(test)]
mod tests {
    use super::{super::norm_tiles, *};

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
        let by =
            |scaled, k, form| skinny_gemm_e4m3(scaled, GemmShape { m: 1, n: 64, k }, form, SkinnyKernel::Registers);
        let of = |k, form| by(ScaledBy::Rows, k, form);
        assert_eq!(of(48, SkinnyForm::Update).unwrap().entry, Entry::SkinnyE4m3Update);
        let in_blocks = "skinny_gemm: weights with a scale a block are multiplied through a ring";
        let refusals = [
            (by(ScaledBy::Blocks, 48, SkinnyForm::Update), in_blocks),
            (of(40, SkinnyForm::Bf16), "skinny_gemm: depth 40 of e4m3 is not a multiple of 16"),
            (of(48, SkinnyForm::F32), "skinny_gemm: logits are of weights in bf16"),
        ];
        refusals.into_iter().for_each(|(refusal, text)| assert_eq!(refusal.unwrap_err().to_string(), text));
    }

    #[test]
    fn a_row_is_quantised_by_its_product_alone_in_whole_groups_and_normed_where_it_is_no_wider_than_a_stage() {
        let fits = |m, n, k, epilogue, is_normed| fits_quantising_ring(GemmShape { m, n, k }, epilogue, is_normed);
        assert!(fits(1, 28_672, 4096, Epilogue::Gated, true) && fits(1, 8192, 28_672, Epilogue::Sum, false));
        for misfit in [
            fits(2, 4096, 4096, Epilogue::Bf16, false),
            fits(1, 4096, 4160, Epilogue::Bf16, false),
            fits(1, 4096, 5120, Epilogue::Bf16, true),
            fits(1, 4104, 4096, Epilogue::Gated, false),
            fits(1, 4096, 4096, Epilogue::Update, false),
        ] {
            assert!(!misfit);
        }
        let config = quantising_ring(GemmShape { m: 1, n: 4096, k: 14_336 }, Epilogue::Sum, 132).unwrap();
        assert_eq!((config.entry, config.grid, config.threads), (Entry::SkinnyInt4E4m3Sum, [132, 1, 1], 544));
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
