//! The tile unit of AMX: eight registers of 16 rows of 64 bytes, and an instruction that multiplies two of them.
//!
//! Compilers keep nothing in these registers, so a block is one piece of assembly, from sums that are loaded to sums that are
//! stored. What the unit computes is written down in plain Rust beside it ([`Model`]), by the manual's words, so that what is built on it is
//! tested on CPUs without it, and it itself on those that have it.

use std::{arch::asm, mem::size_of, ptr, sync::OnceLock};

/// Rows of a tile, and numbers of f32 or pairs of bf16 in one of them.
pub(super) const TILE: usize = 16;
/// Bytes of a row, which are those of a step of a weight row.
pub(super) const ROW_BYTES: usize = 64;
/// Bytes of two neighbouring inputs of a packed row.
pub(super) const PAIR_BYTES: usize = 4;
/// Sums of a tile.
pub(super) const TILE_SUMS: usize = TILE * TILE;
/// Tiles of outputs and of rows in a block at most: four of sums, two of each operand.
pub(super) const SIDE: usize = 2;

/// Weights of 16 or 32 outputs and up to 32 packed rows, some steps of both, and the sums that they add to.
pub(super) struct Block {
    /// The first output's first step.
    pub w: *const u8,
    /// Bytes from one output to the next.
    pub row_bytes: usize,
    /// Tiles of outputs, 1 or 2.
    pub n_w: usize,
    /// The first step of each group of rows.
    pub x: [*const u8; SIDE],
    /// Rows of each group, at most 16; 0: there is no such group.
    pub columns: [usize; SIDE],
    pub n_steps: usize,
    /// Tiles of 16 outputs x 16 rows, those of one tile of outputs one behind the other.
    pub sums: *mut f32,
    /// Whether there is nothing in `sums` yet.
    pub is_first: bool,
}

/// What multiplies blocks. Every column of a tile has the same bits whatever stands beside it.
///
/// # Safety
/// Its functions are called where the CPU has what they need. `run` needs what its block names: weights, rows, sums.
pub(super) unsafe trait Unit: Default {
    /// Adds the products of a block.
    unsafe fn run(&mut self, block: &Block);
    /// Turns `n_rows` rows of `n_columns` numbers of 4 bytes, at most 16 of each, around. Bytes from one row to the next may be any; 16 numbers
    /// of each row of `from` may be read.
    unsafe fn turn(from: Strided<*const u8>, n_rows: usize, to: Strided<*mut u8>, n_columns: usize);
}

/// Rows, `stride` bytes apart.
#[derive(Clone, Copy)]
pub(super) struct Strided<P> {
    pub at: P,
    pub stride: usize,
}

/// The unit of this CPU, and for how many rows of each group its registers are shaped.
#[derive(Default)]
pub(super) struct Tmul(Option<[usize; SIDE]>);

/// How many rows and bytes a row each register has: palette 1 of the manual.
#[repr(C, align(64))]
struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

const _: () = assert!(size_of::<Config>() == 64, "as the instruction reads it");

/// `arch_prctl`, what asks for a component of a thread's state, and the component of tiles.
const SYS_ARCH_PRCTL: i64 = 158;
const ARCH_REQ_XCOMP_PERM: i64 = 0x1023;
const XFEATURE_XTILEDATA: i64 = 18;

/// Whether this CPU multiplies tiles of bf16 and the system lets this process do so; asks it for that.
pub(in super::super) fn is_here() -> bool {
    static IS_HERE: OnceLock<bool> = OnceLock::new();
    *IS_HERE.get_or_init(|| cfg!(target_os = "linux") && has_tiles() && is_allowed())
}

/// `CPUID.7.0:EDX`: amx-bf16 and amx-tile.
fn has_tiles() -> bool {
    const BF16: u32 = 1 << 22;
    const TILE: u32 = 1 << 24;
    let leaves = std::arch::x86_64::__cpuid(0).eax;
    leaves >= 7 && std::arch::x86_64::__cpuid_count(7, 0).edx & (BF16 | TILE) == BF16 | TILE
}

/// Linux gives threads room for tiles only when asked (5.16 and later); a system that does not know them refuses.
fn is_allowed() -> bool {
    let answer: i64;
    // SAFETY: the call reads and writes no memory of ours; the kernel keeps all registers but these.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") SYS_ARCH_PRCTL => answer,
            in("rdi") ARCH_REQ_XCOMP_PERM,
            in("rsi") XFEATURE_XTILEDATA,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    answer == 0
}

/// A block: what is read for a step and multiplied, between sums that are cleared or loaded, and stored. `{x}` is the last group of rows, which
/// may have any number of them; `{full}` is one of 16 before it, if there are two.
macro_rules! block {
    ($block:ident, clear: [$($clear:literal),*], load: [$($load:literal),*], step: [$($step:literal),*], store: [$($store:literal),*]) => {{
        let last = $block.n_groups() - 1;
        asm!(
            "test {first}, {first}",
            "jz 2f",
            $($clear,)*
            "jmp 3f",
            "2:",
            $($load,)*
            "3:",
            $($step,)*
            "add {w0}, 64",
            "add {w1}, 64",
            "add {full}, 1024",
            "add {x}, {x_step}",
            "dec {n}",
            "jnz 3b",
            $($store,)*
            w0 = inout(reg) $block.w => _,
            w1 = inout(reg) $block.w.wrapping_add(TILE * $block.row_bytes) => _,
            w_row = in(reg) $block.row_bytes,
            full = inout(reg) $block.x[0] => _,
            x = inout(reg) $block.x[last] => _,
            x_row = in(reg) $block.columns[last] * PAIR_BYTES,
            x_step = in(reg) $block.columns[last] * PAIR_BYTES * TILE,
            n = inout(reg) $block.n_steps => _,
            sums = in(reg) $block.sums,
            row = in(reg) ROW_BYTES,
            first = in(reg) usize::from($block.is_first),
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        )
    }};
}

impl Block {
    /// Groups of rows, 1 or 2.
    fn n_groups(&self) -> usize {
        if self.columns[1] > 0 { 2 } else { 1 }
    }
}

impl Tmul {
    /// Shapes the registers for so many rows of each group.
    ///
    /// # Safety
    /// [`is_here`].
    #[inline(always)]
    unsafe fn shape(&mut self, columns: [usize; SIDE]) {
        if self.0.replace(columns) == Some(columns) {
            return;
        }
        // A group that is not there has the shape of one row: a register of nothing may not be named.
        let x = columns.map(|n| (n.max(1) * PAIR_BYTES) as u16);
        let w = ROW_BYTES as u16;
        let mut config = Config { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
        // Sums of both tiles of outputs, their weights, the rows.
        config.row_bytes[..8].copy_from_slice(&[x[0], x[1], x[0], x[1], w, w, x[0], x[1]]);
        config.rows[..8].fill(TILE as u8);
        // SAFETY: the caller vouches for the CPU.
        unsafe { asm!("ldtilecfg [{}]", in(reg) ptr::from_ref(&config), options(nostack, readonly)) };
    }
}

// SAFETY: a block's operands are read and written as it says.
unsafe impl Unit for Tmul {
    #[inline(always)]
    unsafe fn run(&mut self, block: &Block) {
        assert!(block.n_steps > 0 && (block.columns[1] == 0 || block.columns[0] == TILE), "as the assembly takes it");
        // SAFETY: the caller vouches for the CPU and what the block names.
        unsafe {
            self.shape(block.columns);
            match (block.n_w, block.n_groups()) {
                (1, 1) => block!(
                    block,
                    clear: ["tilezero tmm0"],
                    load: ["tileloadd tmm0, [{sums} + {row}*1]"],
                    step: [
                        "tileloadd tmm4, [{w0} + {w_row}*1]",
                        "tileloadd tmm6, [{x} + {x_row}*1]",
                        "tdpbf16ps tmm0, tmm4, tmm6"
                    ],
                    store: ["tilestored [{sums} + {row}*1], tmm0"]
                ),
                (1, _) => block!(
                    block,
                    clear: ["tilezero tmm0", "tilezero tmm1"],
                    load: ["tileloadd tmm0, [{sums} + {row}*1]", "tileloadd tmm1, [{sums} + {row}*1 + 1024]"],
                    step: [
                        "tileloadd tmm4, [{w0} + {w_row}*1]",
                        "tileloadd tmm6, [{full} + {row}*1]",
                        "tileloadd tmm7, [{x} + {x_row}*1]",
                        "tdpbf16ps tmm0, tmm4, tmm6",
                        "tdpbf16ps tmm1, tmm4, tmm7"
                    ],
                    store: ["tilestored [{sums} + {row}*1], tmm0", "tilestored [{sums} + {row}*1 + 1024], tmm1"]
                ),
                (_, 1) => block!(
                    block,
                    clear: ["tilezero tmm0", "tilezero tmm2"],
                    load: ["tileloadd tmm0, [{sums} + {row}*1]", "tileloadd tmm2, [{sums} + {row}*1 + 2048]"],
                    step: [
                        "tileloadd tmm6, [{x} + {x_row}*1]",
                        "tileloadd tmm4, [{w0} + {w_row}*1]",
                        "tileloadd tmm5, [{w1} + {w_row}*1]",
                        "tdpbf16ps tmm0, tmm4, tmm6",
                        "tdpbf16ps tmm2, tmm5, tmm6"
                    ],
                    store: ["tilestored [{sums} + {row}*1], tmm0", "tilestored [{sums} + {row}*1 + 2048], tmm2"]
                ),
                (_, _) => block!(
                    block,
                    clear: ["tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3"],
                    load: [
                        "tileloadd tmm0, [{sums} + {row}*1]",
                        "tileloadd tmm1, [{sums} + {row}*1 + 1024]",
                        "tileloadd tmm2, [{sums} + {row}*1 + 2048]",
                        "tileloadd tmm3, [{sums} + {row}*1 + 3072]"
                    ],
                    step: [
                        "tileloadd tmm4, [{w0} + {w_row}*1]",
                        "tileloadd tmm6, [{full} + {row}*1]",
                        "tileloadd tmm7, [{x} + {x_row}*1]",
                        "tdpbf16ps tmm0, tmm4, tmm6",
                        "tileloadd tmm5, [{w1} + {w_row}*1]",
                        "tdpbf16ps tmm1, tmm4, tmm7",
                        "tdpbf16ps tmm2, tmm5, tmm6",
                        "tdpbf16ps tmm3, tmm5, tmm7"
                    ],
                    store: [
                        "tilestored [{sums} + {row}*1], tmm0",
                        "tilestored [{sums} + {row}*1 + 1024], tmm1",
                        "tilestored [{sums} + {row}*1 + 2048], tmm2",
                        "tilestored [{sums} + {row}*1 + 3072], tmm3"
                    ]
                ),
            }
        }
    }

    #[inline(always)]
    unsafe fn turn(from: Strided<*const u8>, n_rows: usize, to: Strided<*mut u8>, n_columns: usize) {
        // SAFETY: a CPU with tiles has AVX-512; the caller vouches for the rows.
        unsafe { super::super::avx512::turn16((from.at, from.stride), n_rows, (to.at, to.stride), n_columns) }
    }
}

impl Drop for Tmul {
    fn drop(&mut self) {
        if self.0.is_some() {
            // Threads that switch need not keep the registers any more.
            // SAFETY: they were shaped, so the CPU has the instruction.
            unsafe { asm!("tilerelease", options(nostack, nomem)) };
        }
    }
}

/// Sums, two products each, of everything in registers: what the unit does at best. How many operations that were.
///
/// # Safety
/// [`is_here`].
pub(super) unsafe fn multiply_add(n_steps: usize) -> u64 {
    let mut unit = Tmul::default();
    if n_steps > 0 {
        // SAFETY: the caller vouches for the CPU; no memory is touched.
        unsafe {
            unit.shape([TILE; SIDE]);
            asm!(
                "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
                "tilezero tmm4", "tilezero tmm5", "tilezero tmm6", "tilezero tmm7",
                "2:",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "dec {n}",
                "jnz 2b",
                n = inout(reg) n_steps => _,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack, nomem),
            );
        }
    }
    const MULTIPLIED: usize = SIDE * SIDE * TILE * TILE * (ROW_BYTES / 2);
    2 * (n_steps * MULTIPLIED) as u64
}

/// The same by the manual's description of `TDPBF16PS`, but that numbers too small to be normal are kept.
#[cfg(test)]
#[derive(Default)]
pub(super) struct Model;

#[cfg(test)]
// SAFETY: needs no instruction of its own; a block's operands are read and written as it says.
unsafe impl Unit for Model {
    unsafe fn run(&mut self, block: &Block) {
        for tile in 0..block.n_w {
            for (group, n_columns) in block.columns.into_iter().enumerate() {
                for (row, column) in (0..TILE).flat_map(|row| (0..n_columns).map(move |column| (row, column))) {
                    // SAFETY: the caller vouches for what the block names.
                    unsafe {
                        let sum = block.sums.add((tile * SIDE + group) * TILE_SUMS + row * TILE + column);
                        let mut total = if block.is_first { 0.0 } else { sum.read() };
                        for step in 0..block.n_steps {
                            total += products(block, tile * TILE + row, group, column, step);
                        }
                        sum.write(total);
                    }
                }
            }
        }
    }

    unsafe fn turn(from: Strided<*const u8>, n_rows: usize, to: Strided<*mut u8>, n_columns: usize) {
        for (row, column) in (0..n_rows).flat_map(|row| (0..n_columns).map(move |column| (row, column))) {
            // SAFETY: the caller vouches for the rows.
            unsafe {
                let number = from.at.add(row * from.stride + column * 4).cast::<u32>().read_unaligned();
                to.at.add(column * to.stride + row * 4).cast::<u32>().write_unaligned(number);
            }
        }
    }
}

/// What a step adds: first and second numbers of pairs are summed apart, then together.
///
/// # Safety
/// As [`Unit::run`].
#[cfg(test)]
unsafe fn products(block: &Block, output: usize, group: usize, column: usize, step: usize) -> f32 {
    let pair_bytes = block.columns[group] * PAIR_BYTES;
    let mut sums = [0.0_f32; 2];
    for pair in 0..TILE {
        for (half, sum) in sums.iter_mut().enumerate() {
            // SAFETY: the caller vouches for the block.
            let (w, x) = unsafe {
                let w = block.w.add(output * block.row_bytes + step * ROW_BYTES + pair * 4 + half * 2);
                let x = block.x[group].add((step * TILE + pair) * pair_bytes + column * 4 + half * 2);
                (w.cast::<half::bf16>().read_unaligned(), x.cast::<half::bf16>().read_unaligned())
            };
            *sum = w.to_f32().mul_add(x.to_f32(), *sum);
        }
    }
    sums[0] + sums[1]
}
