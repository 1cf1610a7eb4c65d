//! What the arithmetic units do at best: products with weights of a format, with everything in registers.

use std::hint::black_box;

use super::{
    Format, Isa, Kernel,
    lanes::{Lanes, Tiles},
};

/// Bytes that a step of any lanes is read from.
const STEP_BYTES: usize = 128;
/// Sums in flight, a register each: as many as the tiles of products have.
const SUMS: usize = 24;
const PANEL_SUMS: usize = 12;

impl Isa {
    /// Multiplies and adds `n_steps` times in each of the sums of a tile; how many operations that were.
    pub(in super::super) fn multiply_add(self, format: Format, n_steps: usize) -> u64 {
        let mut n_operations = 0;
        self.run(format, Peak { n_steps, n_operations: &mut n_operations });
        n_operations
    }
}

struct Peak<'a> {
    n_steps: usize,
    n_operations: &'a mut u64,
}

impl Kernel for Peak<'_> {
    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        // SAFETY: the caller vouches for the instruction set.
        *self.n_operations = unsafe {
            match L::TILES {
                Tiles::InPlace => multiply_add::<L, SUMS>(self.n_steps),
                Tiles::Panel => multiply_add::<L, PANEL_SUMS>(self.n_steps),
                #[cfg(target_arch = "x86_64")]
                Tiles::Unit => super::amx::multiply_add(self.n_steps),
            }
        };
    }
}

/// # Safety
/// The CPU has the set of `L`.
#[inline(always)]
unsafe fn multiply_add<L: Lanes, const N: usize>(n_steps: usize) -> u64 {
    let step = black_box([0u8; STEP_BYTES]);
    // SAFETY: no step is longer than `STEP_BYTES`; the caller vouches for the instruction set.
    unsafe {
        let (x, w) = (L::x(step.as_ptr()), L::w(step.as_ptr()));
        let mut sums = [L::zero(); N];
        for _ in 0..n_steps {
            for sum in &mut sums {
                *sum = L::add(*sum, x, w);
            }
        }
        black_box(sums);
    }
    2 * (n_steps * N * L::STEP) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_set_counts_what_it_computes_in_whole_steps() {
        for isa in Isa::available() {
            for format in [Format::F32, Format::Bf16, Format::F16] {
                let one = isa.multiply_add(format, 1);
                assert!(
                    one >= 2 * PANEL_SUMS as u64 && isa.multiply_add(format, 1000) == 1000 * one,
                    "{isa} {format:?}"
                );
            }
        }
    }
}
