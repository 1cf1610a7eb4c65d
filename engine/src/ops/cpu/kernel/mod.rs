//! Kernels of the CPU back end, each for every instruction set. The only place, beside the thread pool, with `unsafe` code;
//! everything else hands slices in.

#![expect(
    unsafe_code,
    reason = "instructions of a set exist only on CPUs that have it; registers are filled through pointers"
)]

#[cfg(target_arch = "x86_64")]
mod amx;
mod attend;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod blocks;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod direct;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod eights;
mod isa;
mod lanes;
mod linear;
#[cfg(target_arch = "aarch64")]
mod neon;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod panel;
mod peak;
mod portable;
mod product;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod second_level;
#[cfg(test)]
mod tests;
mod vector;

use half::{bf16, f16};
use lanes::{Lanes, Tiles};

use attend::Attend;
pub(super) use attend::{AttentionTask, CachedBytes};
pub(super) use blocks::{Panels, Quant};
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use eights::{Eights, WideEight};
use isa::Set;
pub use isa::{Isa, NoSuchIsa};
pub(super) use linear::{Weights, multiply};
use portable::{Portable, Stored};
pub(super) use product::WeightRows;

use super::buffer::{Buffer, Line};
use crate::{kv::KvDtype, model::AttentionSpec, pool::Pool};
use product::{Product, Target};

/// How weights, keys or values are stored.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Format {
    F32,
    Bf16,
    F16,
}

/// Work that is written once and compiled for every instruction set and format.
trait Kernel {
    /// Does it.
    ///
    /// # Safety
    /// The CPU has the instruction set of `L`, and the caller is compiled for it.
    unsafe fn run<L: Lanes>(self);
}

impl Format {
    /// Bytes of a number.
    pub(super) fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
        }
    }
}

impl Isa {
    /// Runs a kernel over numbers of that format.
    fn run(self, format: Format, kernel: impl Kernel) {
        // SAFETY: whoever has an `Isa` has a CPU with that set, and the functions enable no more than it.
        unsafe {
            match (self.0, format) {
                #[cfg(target_arch = "x86_64")]
                (Set::Amx, Format::Bf16) => amx(kernel),
                #[cfg(target_arch = "x86_64")]
                (Set::Avx512Bf16, Format::Bf16) => avx512_bf16(kernel),
                #[cfg(target_arch = "x86_64")]
                (Set::Amx | Set::Avx512Bf16 | Set::Avx512Vnni | Set::Avx512, Format::F32) => avx512::<f32>(kernel),
                #[cfg(target_arch = "x86_64")]
                (Set::Avx512Vnni | Set::Avx512, Format::Bf16) => avx512::<bf16>(kernel),
                #[cfg(target_arch = "x86_64")]
                (Set::Amx | Set::Avx512Bf16 | Set::Avx512Vnni | Set::Avx512, Format::F16) => avx512::<f16>(kernel),
                #[cfg(target_arch = "x86_64")]
                (Set::Avx2Vnni | Set::Avx2, Format::F32) => avx2::<f32>(kernel),
                #[cfg(target_arch = "x86_64")]
                (Set::Avx2Vnni | Set::Avx2, Format::Bf16) => avx2::<bf16>(kernel),
                #[cfg(target_arch = "x86_64")]
                (Set::Avx2Vnni | Set::Avx2, Format::F16) => avx2::<f16>(kernel),
                #[cfg(target_arch = "aarch64")]
                (Set::NeonBf16, Format::Bf16) => neon_bf16(kernel),
                #[cfg(target_arch = "aarch64")]
                (Set::NeonBf16 | Set::NeonDot | Set::Neon, Format::F32) => neon::<f32>(kernel),
                #[cfg(target_arch = "aarch64")]
                (Set::NeonDot | Set::Neon, Format::Bf16) => neon::<bf16>(kernel),
                #[cfg(target_arch = "aarch64")]
                (Set::NeonBf16 | Set::NeonDot | Set::Neon, Format::F16) => neon::<f16>(kernel),
                (Set::Portable, Format::F32) => kernel.run::<Portable<f32>>(),
                (Set::Portable, Format::Bf16) => kernel.run::<Portable<bf16>>(),
                (Set::Portable, Format::F16) => kernel.run::<Portable<f16>>(),
            }
        }
    }

    /// Attention tasks, shared out over the threads: `queries` and `out` have all query heads of all rows of the batch,
    /// and no two tasks the same rows and head.
    pub(super) fn attend(
        self,
        pool: &mut Pool,
        tasks: &[AttentionTask<'_>],
        cached: CachedBytes<'_>,
        spec: AttentionSpec,
        queries: &[f32],
        out: &mut [f32],
    ) {
        let format = match cached.layout.dtype {
            KvDtype::F32 => Format::F32,
            KvDtype::Bf16 => Format::Bf16,
        };
        assert_eq!(queries.len(), out.len(), "each query has its result");
        let out = Target::new(out, spec.heads.n_heads * spec.heads.head_dim);
        pool.run(tasks.len(), &|idx| {
            self.run(format, Attend { task: &tasks[idx], cached, spec, queries, out: &out });
        });
    }

    /// Room for rows of `width` numbers as products with weights of that format read them.
    fn unpacked(self, n_rows: usize, width: usize, format: Format) -> PackedRows {
        let mut packed = PackedRows::default();
        self.run(format, Reserve { n_rows, width, packed: &mut packed });
        packed
    }

    /// How several rows meet weights of that format.
    fn tiles(self, format: Format) -> Tiles {
        let mut tiles = Tiles::InPlace;
        self.run(format, AskTiles(&mut tiles));
        tiles
    }

    /// Rows of `width` numbers as they lie, if products with weights of that format can read them so.
    fn as_they_lie(self, x: &[f32], width: usize, format: Format) -> Option<Rows<'_>> {
        let stride = self.unpacked(0, width, format).stride;
        let bytes: &[u8] = bytemuck::cast_slice(x);
        let reads = self.tiles(format) == Tiles::Panel && stride == width * size_of::<f32>();
        reads.then(|| Rows { bytes, stride, n_rows: x.len() / width })
    }

    /// Packs rows into lines, the first row at their beginning; all rows, or a multiple of those that are packed together. Lines that rows do not
    /// fill are zero before.
    fn pack(self, rows: &[f32], width: usize, format: Format, lines: &mut [Line]) {
        self.run(format, Pack { rows, width, lines });
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")]
unsafe fn avx512_bf16(kernel: impl Kernel) {
    // SAFETY: the caller found the instruction set, and this function enables it.
    unsafe { kernel.run::<avx512::Bf16Dot<false>>() }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")]
unsafe fn amx(kernel: impl Kernel) {
    // SAFETY: the caller found the instruction set, and this function enables what compilers know of it.
    unsafe { kernel.run::<avx512::Bf16Dot<true>>() }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
unsafe fn avx512<T: avx512::Wide512>(kernel: impl Kernel) {
    // SAFETY: the caller found the instruction set, and this function enables it.
    unsafe { kernel.run::<avx512::Avx512<T>>() }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn avx2<T: WideEight>(kernel: impl Kernel) {
    // SAFETY: the caller found the instruction set, and this function enables it.
    unsafe { kernel.run::<Eights<std::arch::x86_64::__m256, T>>() }
}

#[cfg(target_arch = "aarch64")]
#[target_feature(enable = "neon")]
unsafe fn neon<T: WideEight>(kernel: impl Kernel) {
    // SAFETY: the caller found the instruction set, and this function enables it.
    unsafe { kernel.run::<Eights<neon::Pair, T>>() }
}

#[cfg(target_arch = "aarch64")]
#[target_feature(enable = "neon,bf16")]
unsafe fn neon_bf16(kernel: impl Kernel) {
    // SAFETY: the caller found the instruction set, and this function enables it.
    unsafe { kernel.run::<neon::Bf16Dot>() }
}

/// Rows as a product reads them: each as long as whole steps.
#[derive(Clone, Copy, Debug)]
struct Rows<'a> {
    bytes: &'a [u8],
    /// Bytes from one row to the next.
    stride: usize,
    n_rows: usize,
}

/// The same, each padded with zeros.
#[derive(Debug, Default)]
struct PackedRows {
    lines: Buffer<Line>,
    /// Bytes from one row to the next.
    stride: usize,
    n_rows: usize,
}

impl PackedRows {
    fn rows(&self) -> Rows<'_> {
        Rows { bytes: bytemuck::cast_slice(&self.lines), stride: self.stride, n_rows: self.n_rows }
    }

    /// Room for rows of `width` numbers, in the place of what it had: zeros, where packing leaves some.
    #[inline(always)]
    fn reserve<L: Lanes>(&mut self, n_rows: usize, width: usize) {
        self.n_rows = n_rows;
        self.stride = stride::<L>(width);
        let n_lines = (self.stride * n_rows).div_ceil(size_of::<Line>());
        let is_filled = width.is_multiple_of(L::STEP) && (self.stride * n_rows).is_multiple_of(size_of::<Line>());
        // What it had goes first.
        self.lines = Buffer::default();
        self.lines = if is_filled { Buffer::unwritten(n_lines) } else { Buffer::zeros(n_lines) };
    }
}

struct Reserve<'a> {
    n_rows: usize,
    width: usize,
    packed: &'a mut PackedRows,
}

impl Kernel for Reserve<'_> {
    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        self.packed.reserve::<L>(self.n_rows, self.width);
    }
}

struct AskTiles<'a>(&'a mut Tiles);

impl Kernel for AskTiles<'_> {
    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        *self.0 = L::TILES;
    }
}

struct Pack<'a> {
    rows: &'a [f32],
    width: usize,
    lines: &'a mut [Line],
}

impl Kernel for Pack<'_> {
    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        L::pack_rows(self.rows, self.width, self.lines);
    }
}

#[inline(always)]
fn pack<L: Lanes>(rows: &[f32], width: usize, lines: &mut [Line]) {
    let packed_rows = bytemuck::cast_slice_mut(lines).chunks_mut(stride::<L>(width));
    for (row, packed) in rows.chunks_exact(width).zip(packed_rows) {
        L::pack(row, packed);
    }
}

/// Bytes of a packed row of `width` numbers.
#[inline(always)]
fn stride<L: Lanes>(width: usize) -> usize {
    width.div_ceil(L::STEP) * L::X_BYTES
}

/// As they are.
#[inline(always)]
fn pack_f32(row: &[f32], packed: &mut [u8]) {
    let bytes: &[u8] = bytemuck::cast_slice(row);
    packed[..bytes.len()].copy_from_slice(bytes);
}

/// Rounded to the nearest, ties to even.
#[inline(always)]
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
fn pack_bf16(row: &[f32], packed: &mut [u8]) {
    for (value, packed) in row.iter().zip(packed.as_chunks_mut().0) {
        *packed = rounded(*value).to_ne_bytes();
    }
}

/// The upper half of an f32 after rounding; a NaN stays one. Written without branches, so that it vectorises.
#[inline(always)]
pub(super) fn rounded(value: f32) -> u16 {
    let bits = value.to_bits();
    let nearest = bits.wrapping_add(0x7FFF + (bits >> 16 & 1));
    let kept = if value.is_nan() { bits | 0x40_0000 } else { nearest };
    (kept >> 16) as u16
}

/// Stored numbers to f32, in plain Rust: for what is read once.
pub(super) fn widen(format: Format, stored: &[u8], out: &mut [f32]) {
    match format {
        Format::F32 => widen_as::<f32>(stored, out),
        Format::Bf16 => widen_as::<bf16>(stored, out),
        Format::F16 => widen_as::<f16>(stored, out),
    }
}

fn widen_as<T: Stored>(stored: &[u8], out: &mut [f32]) {
    for (bytes, out) in stored.chunks_exact(T::BYTES).zip(out) {
        *out = T::widened(bytes);
    }
}
