//! Launches of the matrix product for few rows, and which product takes which shape.

use super::{Entry, GemmShape, LaunchConfig, OutputType, config, count, not_empty, refused};
use crate::{device::Properties, entry::SKINNY_RING_BYTES, error::KernelError};

/// Most rows of x that the small-batch matrix product takes.
pub const SKINNY_ROWS_MAX: usize = 16;

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
    /// The faster one that the chip has.
    pub fn for_device(properties: Properties) -> Self {
        let Properties { capability, n_multiprocessors, .. } = properties;
        if capability >= (9, 0) { Self::Ring { n_multiprocessors } } else { Self::Registers }
    }
}

/// What multiplies a shape.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum LinearKernel {
    /// Ours, for few rows.
    Skinny(SkinnyKernel),
    /// cuBLASLt.
    Blas,
}

impl LinearKernel {
    /// The fastest one on an H200 (run k2 in docs/benchmarks/NOTES.md): the ring where weights are small and start-up counts
    /// (4096 x 6144: 14.3 µs, registers 16.1, cuBLASLt 16.6), registers for one row of x, cuBLASLt from two rows up, since
    /// ours read x once a tile (4096 x 28672 for 8 rows: 62.9 against 55.2).
    pub fn for_shape(shape: GemmShape, properties: Properties) -> Self {
        const SMALL_BYTES: usize = 64 << 20;
        let is_small = 2 * shape.n * shape.k <= SMALL_BYTES;
        let best = SkinnyKernel::for_device(properties);
        match (shape.m, best) {
            _ if !shape.k.is_multiple_of(8) => Self::Blas,
            (1, SkinnyKernel::Ring { .. }) if !is_small => Self::Skinny(SkinnyKernel::Registers),
            (1, best) => Self::Skinny(best),
            (2..=8, SkinnyKernel::Ring { .. }) if is_small => Self::Skinny(best),
            _ => Self::Blas,
        }
    }
}

/// Matrix product of up to [`SKINNY_ROWS_MAX`] rows.
pub fn skinny_gemm(shape: GemmShape, output: OutputType, kernel: SkinnyKernel) -> Result<LaunchConfig, KernelError> {
    const OP: &str = "skinny_gemm";
    not_empty(OP, shape.m.min(shape.n).min(shape.k))?;
    if shape.m > SKINNY_ROWS_MAX {
        return Err(refused(OP, format!("{} rows are more than {SKINNY_ROWS_MAX}", shape.m)));
    }
    if !shape.k.is_multiple_of(8) {
        return Err(refused(OP, format!("depth {} is not a multiple of 8", shape.k)));
    }
    let [registers, ring] = match (shape.m, output) {
        (0..=8, OutputType::Bf16) => [Entry::SkinnyM8Bf16, Entry::SkinnySm90M8Bf16],
        (0..=8, OutputType::F32) => [Entry::SkinnyM8F32, Entry::SkinnySm90M8F32],
        (_, OutputType::Bf16) => [Entry::SkinnyM16Bf16, Entry::SkinnySm90M16Bf16],
        (_, OutputType::F32) => [Entry::SkinnyM16F32, Entry::SkinnySm90M16F32],
        (_, OutputType::Activated) => return Err(refused(OP, "it does not activate".to_owned())),
    };
    let n_tiles = count(shape.n.div_ceil(16));
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
        let config =
            skinny_gemm(GemmShape { m: 9, n: 4097, k: 4096 }, OutputType::F32, SkinnyKernel::Registers).unwrap();
        assert_eq!((config.entry, config.grid), (Entry::SkinnyM16F32, [257, 1, 1]));
        let config = skinny_gemm(GemmShape { m: 8, n: 16, k: 8 }, OutputType::Bf16, SkinnyKernel::Registers).unwrap();
        assert_eq!((config.entry, config.grid), (Entry::SkinnyM8Bf16, [1, 1, 1]));
    }

    #[test]
    fn a_ring_takes_one_block_a_multiprocessor_and_no_more_than_there_are_tiles() {
        let ring = SkinnyKernel::Ring { n_multiprocessors: 132 };
        let blocks = |n| skinny_gemm(GemmShape { m: 1, n, k: 4096 }, OutputType::Bf16, ring).unwrap().grid[0];
        assert_eq!([16, 17, 4096, 128_256].map(blocks), [1, 2, 132, 132]);
    }

    #[test]
    fn products_go_where_they_were_measured_to_be_fastest() {
        let ring = LinearKernel::Skinny(SkinnyKernel::Ring { n_multiprocessors: 132 });
        let registers = LinearKernel::Skinny(SkinnyKernel::Registers);
        let chosen = |m, n| LinearKernel::for_shape(GemmShape { m, n, k: 4096 }, H200);
        assert_eq!([chosen(1, 6144), chosen(1, 28672)], [ring, registers]);
        assert_eq!([chosen(8, 6144), chosen(8, 28672)], [ring, LinearKernel::Blas]);
        assert_eq!([chosen(9, 6144), chosen(256, 6144)], [LinearKernel::Blas; 2]);
    }
}
