//! `y = x * w^T` for rows and weights in blocks.
//!
//! Tiles of rows x outputs stay in registers while all inputs pass by: for each block and quad of inputs, `COLUMNS`
//! registers of weights meet `R` rows' four bytes in all lanes.

use std::ops::Range;

use super::{
    BLOCK, BlockKernel, BlockRows, Panels, Quant,
    lanes::BlockLanes,
    panels::{OUTPUTS, QUAD_BYTES, SCALE_BYTES},
    rows::RowBlock,
};
use crate::ops::cpu::{
    buffer::Line,
    kernel::{Isa, lanes::CacheLevel, product::Target},
};

/// Row blocks that stay in the second-level cache while weights pass by, in bytes: half of it.
const CACHED_BYTES: usize = 512 << 10;
/// How far ahead weights are asked for where one tile has all rows: one row goes through them as fast as memory has them.
const FAR_BYTES: usize = 8 << 10;
const NEAR_BYTES: usize = 2 << 10;

/// Bytes that memory is asked for.
const LINE: usize = size_of::<Line>();

/// Products of some rows with the outputs `outputs`, whole panels of them. Products that run at the same time on one
/// target have different rows or outputs.
#[derive(Debug)]
pub(in super::super) struct PanelProduct<'a> {
    pub(in super::super) x: &'a BlockRows,
    pub(in super::super) rows: Range<usize>,
    pub(in super::super) w: &'a Panels,
    pub(in super::super) outputs: Range<usize>,
    pub(in super::super) y: &'a Target<'a>,
}

impl PanelProduct<'_> {
    /// Computes them.
    pub(in super::super) fn run(self, isa: Isa) {
        isa.run_on_blocks(self);
    }
}

impl BlockKernel for PanelProduct<'_> {
    #[inline(always)]
    unsafe fn run<L: BlockLanes>(self) {
        assert_eq!(self.x.per_row * BLOCK, self.w.n_inputs(), "rows are as long as weight rows");
        // SAFETY: the caller vouches for the instruction set.
        unsafe {
            match self.w.quant() {
                _ if L::in_own_way(&self) => {}
                Quant::Q8 => self.panels::<L, Q8>(),
                Quant::Q4 => self.panels::<L, Q4>(),
            }
        }
    }
}

impl PanelProduct<'_> {
    /// # Safety
    /// The CPU has the set of `L`.
    #[inline(always)]
    unsafe fn panels<L: BlockLanes, Q: Quants>(&self) {
        let panel_bytes = self.x.per_row * Q::BLOCK_BYTES;
        let rows_at_once = (CACHED_BYTES / (self.x.per_row * size_of::<RowBlock>())).max(L::ROWS) / L::ROWS * L::ROWS;
        for first in self.rows.clone().step_by(rows_at_once) {
            let rows = first..self.rows.end.min(first + rows_at_once);
            for (idx, panel) in self.w.of(&self.outputs).chunks_exact(panel_bytes).enumerate() {
                let output = self.outputs.start + idx * OUTPUTS;
                let mut ahead = Ahead::of::<L>(rows.len());
                for first in (0..OUTPUTS).step_by(L::COLUMNS * L::OUTPUTS) {
                    // SAFETY: as the caller vouches.
                    unsafe { self.rows::<L, Q>(rows.clone(), Part { panel, output, first }, &mut ahead) };
                }
            }
        }
    }

    /// # Safety
    /// The CPU has the set of `L`.
    #[inline(always)]
    unsafe fn rows<L: BlockLanes, Q: Quants>(&self, rows: Range<usize>, part: Part<'_>, ahead: &mut Ahead) {
        let mut row = rows.start;
        // SAFETY: as the caller vouches.
        unsafe {
            match rows.len() {
                4 if L::ROWS == 4 => return self.tile::<L, Q, 4, true>(row, part, ahead),
                3 if L::ROWS == 4 => return self.tile::<L, Q, 3, true>(row, part, ahead),
                2 => return self.tile::<L, Q, 2, true>(row, part, ahead),
                1 => return self.tile::<L, Q, 1, true>(row, part, ahead),
                _ => {}
            }
            while row + L::ROWS <= rows.end {
                match L::ROWS {
                    4 => self.tile::<L, Q, 4, false>(row, part, ahead),
                    _ => self.tile::<L, Q, 2, false>(row, part, ahead),
                }
                row += L::ROWS;
            }
            match rows.end - row {
                3 if L::ROWS > 3 => self.tile::<L, Q, 3, false>(row, part, ahead),
                2 if L::ROWS > 2 => self.tile::<L, Q, 2, false>(row, part, ahead),
                1 => self.tile::<L, Q, 1, false>(row, part, ahead),
                _ => {}
            }
        }
    }

    /// `R` rows times a part of a panel.
    ///
    /// # Safety
    /// The CPU has the set of `L`.
    #[inline(always)]
    unsafe fn tile<L: BlockLanes, Q: Quants, const R: usize, const ALL: bool>(
        &self,
        row: usize,
        part: Part<'_>,
        ahead: &mut Ahead,
    ) {
        let (per_row, asked) = (self.x.per_row, *ahead);
        *ahead = ahead.next();
        let x = &self.x.blocks[row * per_row..(row + R) * per_row];
        // SAFETY: a panel has `per_row` blocks of `BLOCK_BYTES`, and `x` has `R` rows of as many.
        unsafe {
            match L::COLUMNS {
                2 => self.write::<L, R, 2>(row, part, sums::<L, Q, R, 2, ALL>(x.as_ptr(), per_row, part, asked)),
                _ => self.write::<L, R, 1>(row, part, sums::<L, Q, R, 1, ALL>(x.as_ptr(), per_row, part, asked)),
            }
        }
    }

    /// # Safety
    /// The CPU has the set of `L`.
    #[inline(always)]
    unsafe fn write<L: BlockLanes, const R: usize, const C: usize>(
        &self,
        row: usize,
        part: Part<'_>,
        sums: [[L::Floats; R]; C],
    ) {
        for (c, sums) in sums.into_iter().enumerate() {
            let output = part.output + part.first + c * L::OUTPUTS;
            let n = L::OUTPUTS.min(self.outputs.end.saturating_sub(output));
            for (r, sum) in sums.into_iter().enumerate().filter(|_| n > 0) {
                let mut lanes = [0.0; OUTPUTS];
                // SAFETY: `at` gives a place for `n` numbers, and a register has at most as many as `lanes`.
                unsafe {
                    let place = self.y.at(row + r, output, n);
                    if n == L::OUTPUTS {
                        L::write(sum, place);
                    } else {
                        L::write(sum, lanes.as_mut_ptr());
                        place.copy_from_nonoverlapping(lanes.as_ptr(), n);
                    }
                }
            }
        }
    }
}

/// A panel, its first output, and the outputs in it where a tile begins.
#[derive(Clone, Copy)]
struct Part<'a> {
    panel: &'a [u8],
    output: usize,
    first: usize,
}

/// What a tile asks of memory, which takes no more requests at once than it has places for. Where one tile has all rows, it asks for the weights
/// a little later. Several multiply a panel while memory answers: each of them asks for a share of the lines of the next one.
#[derive(Clone, Copy)]
struct Ahead {
    /// The first line of each block, and from one to the next, in bytes.
    first: usize,
    step: usize,
}

impl Ahead {
    fn of<L: BlockLanes>(n_rows: usize) -> Self {
        Self { first: 0, step: LINE * n_rows.div_ceil(L::ROWS) * OUTPUTS / (L::COLUMNS * L::OUTPUTS) }
    }

    /// Asks for what the block at `at` of a panel stands for. `ALL`: the tile has all rows.
    ///
    /// # Safety
    /// The CPU has the set of `L`.
    #[inline(always)]
    unsafe fn ask<L: BlockLanes, Q: Quants, const R: usize, const ALL: bool>(self, at: *const u8, panel_bytes: usize) {
        // SAFETY: the caller vouches for the instruction set.
        unsafe {
            if ALL {
                let ahead = if R == 1 { FAR_BYTES } else { NEAR_BYTES };
                for line in (0..Q::BLOCK_BYTES).step_by(LINE) {
                    L::prefetch(at.wrapping_add(ahead + line), CacheLevel::First);
                }
                return;
            }
            let mut line = self.first;
            while line < Q::BLOCK_BYTES {
                L::prefetch(at.wrapping_add(panel_bytes + line), CacheLevel::Second);
                line += self.step;
            }
        }
    }

    /// What the next tile asks for.
    fn next(self) -> Self {
        Self { first: self.first + LINE, ..self }
    }
}

/// The kind of the quants, known when a tile is compiled.
trait Quants {
    /// Bytes of a block of a panel.
    const BLOCK_BYTES: usize;
    /// The sums of a block: `quants` of some outputs with the rows' inputs.
    ///
    /// # Safety
    /// `quants` may be read for a block of `C` registers of outputs. The CPU has the set of `L`.
    unsafe fn block<L: BlockLanes, const R: usize, const C: usize>(
        quants: *const u8,
        x: [&RowBlock; R],
    ) -> [[L::Ints; R]; C];
}

struct Q8;
struct Q4;

impl Quants for Q8 {
    const BLOCK_BYTES: usize = (2 + BLOCK) * OUTPUTS;

    #[inline(always)]
    unsafe fn block<L: BlockLanes, const R: usize, const C: usize>(
        quants: *const u8,
        x: [&RowBlock; R],
    ) -> [[L::Ints; R]; C] {
        // SAFETY: quads and columns are inside the block.
        unsafe {
            let mut sums = [x.map(|x| L::start::<128>(x)); C];
            for quad in 0..BLOCK / 4 {
                for (c, sums) in sums.iter_mut().enumerate() {
                    let w = L::bytes(quants.add(quad * QUAD_BYTES + c * 4 * L::OUTPUTS));
                    for (sum, x) in sums.iter_mut().zip(x) {
                        *sum = L::dot::<128>(*sum, w, x.quants.as_ptr().add(4 * quad));
                    }
                }
            }
            finished::<L, R, C, 128>(sums, x)
        }
    }
}

impl Quants for Q4 {
    const BLOCK_BYTES: usize = (2 + BLOCK / 2) * OUTPUTS;

    #[inline(always)]
    unsafe fn block<L: BlockLanes, const R: usize, const C: usize>(
        quants: *const u8,
        x: [&RowBlock; R],
    ) -> [[L::Ints; R]; C] {
        // SAFETY: quads and columns are inside the block.
        unsafe {
            let mut sums = [x.map(|x| L::start::<8>(x)); C];
            for quad in 0..BLOCK / 8 {
                for (c, sums) in sums.iter_mut().enumerate() {
                    let [low, high] = L::halves(L::bytes(quants.add(quad * QUAD_BYTES + c * 4 * L::OUTPUTS)));
                    for (sum, x) in sums.iter_mut().zip(x) {
                        let x = x.quants.as_ptr().add(4 * quad);
                        *sum = L::dot::<8>(L::dot::<8>(*sum, low, x), high, x.add(BLOCK / 2));
                    }
                }
            }
            finished::<L, R, C, 8>(sums, x)
        }
    }
}

/// # Safety
/// The CPU has the set of `L`.
#[inline(always)]
unsafe fn finished<L: BlockLanes, const R: usize, const C: usize, const BIAS: i32>(
    mut sums: [[L::Ints; R]; C],
    x: [&RowBlock; R],
) -> [[L::Ints; R]; C] {
    for sums in &mut sums {
        for (sum, x) in sums.iter_mut().zip(x) {
            // SAFETY: as the caller vouches.
            *sum = unsafe { L::finish::<BIAS>(*sum, x) };
        }
    }
    sums
}

/// `R` rows of `n_blocks` blocks times `C` registers of outputs.
///
/// # Safety
/// `x` has the rows one behind the other; the part's panel has as many blocks. The CPU has the set of `L`.
#[inline(always)]
unsafe fn sums<L: BlockLanes, Q: Quants, const R: usize, const C: usize, const ALL: bool>(
    x: *const RowBlock,
    n_blocks: usize,
    part: Part<'_>,
    ahead: Ahead,
) -> [[L::Floats; R]; C] {
    let mut at = part.panel.as_ptr();
    // SAFETY: as the caller vouches.
    unsafe {
        let mut sums = [[L::zero(); R]; C];
        for block in 0..n_blocks {
            let x: [&RowBlock; R] = std::array::from_fn(|r| &*x.add(r * n_blocks + block));
            ahead.ask::<L, Q, R, ALL>(at, part.panel.len());
            let ints = Q::block::<L, R, C>(at.add(SCALE_BYTES + part.first * 4), x);
            for c in 0..C {
                let scales = L::scales(at.add((part.first + c * L::OUTPUTS) * 2));
                for r in 0..R {
                    sums[c][r] = L::add_scaled(sums[c][r], ints[c][r], scales, x[r].scale);
                }
            }
            at = at.add(Q::BLOCK_BYTES);
        }
        sums
    }
}
