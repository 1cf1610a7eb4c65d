//! Launches of the GEMM for few rows. Which GEMM takes which shape is decided in [`crate::choose`].

use super::{Entry, GATE_UP_GROUP, GemmShape, LaunchConfig, config, count, norm_tiles, not_empty, refused};
use crate::{device::Properties, entry::SKINNY_RING_BYTES, error::KernelError};

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
