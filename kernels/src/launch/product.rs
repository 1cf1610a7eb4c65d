//! Launches of the matrix product for few rows, and which product takes which shape.

use super::{Entry, GATE_UP_GROUP, GemmShape, LaunchConfig, OutputType, config, count, not_empty, refused};
use crate::{device::Properties, entry::SKINNY_RING_BYTES, error::KernelError};

/// Most rows of x that the small-batch matrix product takes.
pub const SKINNY_ROWS_MAX: usize = 8;

/// Most rows that hand on the residual stream weighted; the same constant as `kScaledRows` in `csrc/gemm_residual.cuh`.
pub const CHAINED_ROWS_MAX: usize = 128;
/// Values of the residual stream whose squares an update adds up at the least.
pub const NORM_TILE: usize = 16;

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
}

/// Sums of squares that an update leaves of a row for a norm over `width` values, at the most.
pub fn norm_tiles(width: usize) -> usize {
    width.div_ceil(NORM_TILE)
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

/// Whether weights are read so fast that start-up counts.
fn is_small(n: usize, k: usize) -> bool {
    const SMALL_BYTES: usize = 64 << 20;
    2 * n * k <= SMALL_BYTES
}

/// What multiplies a shape.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum LinearKernel {
    /// Ours, for few rows.
    Skinny(SkinnyKernel),
    /// Ours, for any number of rows.
    Gemm,
    /// cuBLASLt, or ours for any number of rows where that was faster at start.
    Blas,
}

impl LinearKernel {
    /// The fastest one on an H200 (run k2 in docs/benchmarks/NOTES.md): the ring where weights are small and start-up counts
    /// (4096 x 6144: 14.3 µs, registers 16.1, cuBLASLt 16.6), registers for one row of x, cuBLASLt from two rows up, since
    /// ours read x once a tile (4096 x 28672 for 8 rows: 62.9 against 55.2). Where rows are handed on weighted, the product for
    /// any number of rows, which can do that; not for logits, which cuBLASLt has sooner by 1 to 8 %.
    pub fn for_shape(shape: GemmShape, output: OutputType, properties: Properties) -> Self {
        // Beyond, cuBLASLt gains more by cutting the depth than norms and additions cost as launches: with 64 rows a step took
        // 6.47 ms instead of 6.08.
        const GEMM_ROWS_MAX: usize = 32;
        let GemmShape { m, n, k } = shape;
        match (m, SkinnyKernel::for_device(properties)) {
            _ if !k.is_multiple_of(8) => Self::Blas,
            (2..=GEMM_ROWS_MAX, _) if properties.capability == (9, 0) && output != OutputType::F32 => Self::Gemm,
            (1, _) => Self::Skinny(SkinnyKernel::for_one_row(n, properties)),
            (2..=8, ring @ SkinnyKernel::Ring { .. }) if is_small(n, k) => Self::Skinny(ring),
            _ => Self::Blas,
        }
    }
}

/// What a product that ends in the residual stream leaves for the norm behind it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Left {
    /// Its result: the norm adds it.
    Result,
    /// The residual, with its result added.
    Residual,
    /// The residual with its result added, and beside it what the next product needs of the norm: see [`crate::skinny`].
    Weighted,
}

impl Left {
    /// Of a product that is added to the residual. Where our own kernels multiply throughout, launches count. Many rows are bound by
    /// arithmetic: the product has time to read and write the residual. Between, the norm adds: it reads the residual anyway.
    pub fn of_update(shape: GemmShape, properties: Properties) -> Self {
        match (shape.m, LinearKernel::for_shape(shape, OutputType::Updated, properties)) {
            (1, _) => Self::Weighted,
            (_, LinearKernel::Gemm) if shape.n.is_multiple_of(8) => Self::Weighted,
            (2..512, _) => Self::Result,
            _ => Self::Residual,
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    const H200: Properties =
        Properties { n_multiprocessors: 132, capability: (9, 0), l2_bytes: 60 << 20, shared_bytes_max: 227 << 10 };

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

    #[test]
    fn products_go_where_they_were_measured_to_be_fastest() {
        let ring = LinearKernel::Skinny(SkinnyKernel::Ring { n_multiprocessors: 132 });
        let registers = LinearKernel::Skinny(SkinnyKernel::Registers);
        let chosen = |m, n, output| LinearKernel::for_shape(GemmShape { m, n, k: 4096 }, output, H200);
        let activations = |m, n| chosen(m, n, OutputType::Bf16);
        assert_eq!([activations(1, 6144), activations(1, 16_384), activations(1, 28672)], [ring, ring, registers]);
        assert_eq!([activations(2, 6144), activations(32, 28672)], [LinearKernel::Gemm; 2]);
        assert_eq!([activations(33, 6144), activations(256, 6144)], [LinearKernel::Blas; 2]);
        let logits = |m| chosen(m, 128_256, OutputType::F32);
        assert_eq!([logits(1), logits(2), logits(64)], [registers, LinearKernel::Blas, LinearKernel::Blas]);
    }

    #[test]
    fn other_chips_have_the_ring_or_registers_for_few_rows_of_small_weights() {
        let chosen = |m, n, capability| {
            let properties = Properties { capability, ..H200 };
            LinearKernel::for_shape(GemmShape { m, n, k: 4096 }, OutputType::Bf16, properties)
        };
        let ring = LinearKernel::Skinny(SkinnyKernel::Ring { n_multiprocessors: 132 });
        assert_eq!([chosen(8, 6144, (10, 0)), chosen(8, 28672, (10, 0))], [ring, LinearKernel::Blas]);
        assert_eq!(chosen(8, 6144, (8, 0)), LinearKernel::Blas);
    }

    #[test]
    fn where_one_row_is_handed_on_weighted_every_product_is_ours() {
        let by = |n, k| LinearKernel::for_shape(GemmShape { m: 1, n, k }, OutputType::F32, H200);
        let is_ours = |[n, k]: [usize; 2]| by(n, k) == LinearKernel::Skinny(SkinnyKernel::for_one_row(n, H200));
        assert!([[6144, 4096], [28672, 4096], [4096, 14336], [128_256, 4096]].into_iter().all(is_ours));
    }

    #[test]
    fn what_is_handed_on_weighted_was_multiplied_by_a_kernel_that_can() {
        let left = |m, capability| {
            let shape = GemmShape { m, n: 4096, k: 4096 };
            Left::of_update(shape, Properties { capability, ..H200 })
        };
        assert_eq!([1, 2, 32].map(|m| left(m, (9, 0))), [Left::Weighted; 3]);
        assert_eq!([33, 511, 512].map(|m| left(m, (9, 0))), [Left::Result, Left::Result, Left::Residual]);
        assert_eq!([1, 2, 32].map(|m| left(m, (8, 0))), [Left::Weighted, Left::Result, Left::Result]);
    }

    #[test]
    fn a_residual_of_odd_width_is_not_updated_by_the_product() {
        assert_eq!(Left::of_update(GemmShape { m: 2, n: 4097, k: 4096 }, H200), Left::Result);
    }
}
