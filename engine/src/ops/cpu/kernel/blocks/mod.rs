//! Products with weights in blocks: 32 small integers that share a scale, as GGUF's Q8_0 and Q4_0 have them.
//!
//! Rows are brought into blocks of the same kind first ([`rows`]), so that a product is one of integers:
//!
//! ```text
//! y = sum over blocks  f32(sum over 32 inputs  q_w * q_x) * (d_w * d_x)       in the order of the blocks
//! ```
//! The inner sum is exact, and the outer one has one order and rounds each operation by itself. So a product has the
//! same bits alone and in company, and on every instruction set.

mod lanes;
#[cfg(target_arch = "aarch64")]
mod mmla;
#[cfg(target_arch = "aarch64")]
mod neon;
mod panels;
mod portable;
mod product;
mod rows;
#[cfg(test)]
mod tests;
#[cfg(target_arch = "x86_64")]
mod widened;
#[cfg(target_arch = "x86_64")]
mod x86;

pub(super) use panels::OUTPUTS as PANEL_OUTPUTS;
pub(super) use product::PanelProduct;
pub(super) use rows::BlockRows;

pub(in super::super) use panels::Panels;

use super::{Isa, isa::Set};
use lanes::BlockLanes;

/// Values of a block.
pub(super) const BLOCK: usize = 32;

/// How small the integers are.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(in super::super) enum Quant {
    /// 8 bits.
    Q8,
    /// 4 bits.
    Q4,
}

impl Quant {
    /// Bytes of a block in a GGUF file: its scale in f16, then its integers.
    pub(in super::super) fn stored_bytes(self) -> usize {
        match self {
            Self::Q8 => 2 + BLOCK,
            Self::Q4 => 2 + BLOCK / 2,
        }
    }

    /// Bytes of so many values, whole blocks of them.
    pub(in super::super) fn bytes_of(self, n_values: usize) -> usize {
        n_values / BLOCK * self.stored_bytes()
    }
}

/// Work that is written once and compiled for every instruction set.
trait BlockKernel {
    /// Does it.
    ///
    /// # Safety
    /// The CPU has the instruction set of `L`, and the caller is compiled for it.
    unsafe fn run<L: BlockLanes>(self);
}

impl Isa {
    /// Whether many rows and weights of eight bits are widened before they meet, so that a task does that for all of its rows.
    pub(super) fn widens_blocks(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        return matches!(self.0, Set::Avx512 | Set::Avx2);
        #[cfg(not(target_arch = "x86_64"))]
        false
    }

    /// Runs a kernel over blocks.
    fn run_on_blocks(self, kernel: impl BlockKernel) {
        // SAFETY: whoever has an `Isa` has a CPU with that set, and the functions enable no more than it.
        unsafe {
            match self.0 {
                #[cfg(target_arch = "x86_64")]
                Set::Amx | Set::Avx512Bf16 | Set::Avx512Vnni => avx512_vnni(kernel),
                #[cfg(target_arch = "x86_64")]
                Set::Avx2Vnni => avx2_vnni(kernel),
                #[cfg(target_arch = "x86_64")]
                Set::Avx512 | Set::Avx2 => avx2(kernel),
                #[cfg(target_arch = "aarch64")]
                Set::NeonBf16 => neon_mmla(kernel),
                #[cfg(target_arch = "aarch64")]
                Set::NeonDot => neon_dot(kernel),
                #[cfg(target_arch = "aarch64")]
                Set::Neon => kernel.run::<portable::Portable>(),
                Set::Portable => kernel.run::<portable::Portable>(),
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
unsafe fn avx512_vnni(kernel: impl BlockKernel) {
    // SAFETY: the caller found the instruction set, and this function enables it.
    unsafe { kernel.run::<x86::Vnni>() }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c,avxvnni")]
unsafe fn avx2_vnni(kernel: impl BlockKernel) {
    // SAFETY: the caller found the instruction set, and this function enables it.
    unsafe { kernel.run::<x86::Avx2<x86::Dpbusd>>() }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn avx2(kernel: impl BlockKernel) {
    // SAFETY: the caller found the instruction set, and this function enables it.
    unsafe { kernel.run::<x86::Avx2<x86::Maddubs>>() }
}

#[cfg(target_arch = "aarch64")]
#[target_feature(enable = "neon,dotprod")]
unsafe fn neon_dot(kernel: impl BlockKernel) {
    // SAFETY: the caller found the instruction set, and this function enables it.
    unsafe { kernel.run::<neon::NeonDot<false>>() }
}

#[cfg(target_arch = "aarch64")]
#[target_feature(enable = "neon,dotprod,i8mm")]
unsafe fn neon_mmla(kernel: impl BlockKernel) {
    // SAFETY: the caller found the instruction set, and this function enables it.
    unsafe { kernel.run::<neon::NeonDot<true>>() }
}
