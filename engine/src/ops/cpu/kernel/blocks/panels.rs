//! Weight matrices in blocks as products read them: 32 outputs side by side, so that a register's lanes are outputs and
//! scales are applied once a block. As many bytes as in the file.
//!
//! ```text
//! panel of 32 outputs:   block 0 | block 1 | ...                     all inputs of these outputs
//! block:                 32 scales f16 | quants                      17 or 9 cache lines
//! quants, 8 bits:        inputs 0-3 of output 0, of output 1, ... of output 31, inputs 4-7 of output 0, ...
//! quants, 4 bits:        the same for inputs 0-15 in the low halves, with inputs 16-31 in the high ones
//! ```
//! Quants are stored with a bias that makes them positive, as the dot product of bytes wants one side. Outputs that the
//! last panel lacks are zero.

use std::{borrow::Cow, ops::Range};

use half::f16;
use memmap2::MmapMut;

use super::{BLOCK, Quant};
use crate::pool::{Pool, RowRuns};

/// Outputs of a panel.
pub(in super::super) const OUTPUTS: usize = 32;
/// Bytes of a panel's scales in a block.
pub(super) const SCALE_BYTES: usize = OUTPUTS * size_of::<f16>();
/// From four inputs of all outputs to the next four.
pub(super) const QUAD_BYTES: usize = OUTPUTS * 4;
/// Bytes of a task that brings weights into panels.
const TASK_BYTES: usize = 256 << 10;

/// A weight matrix.
#[derive(Debug)]
pub(in super::super::super) struct Panels {
    bytes: MmapMut,
    n_outputs: usize,
    n_inputs: usize,
    quant: Quant,
}

impl Quant {
    /// Bytes of a block of a panel.
    pub(super) fn panel_block_bytes(self) -> usize {
        self.stored_bytes() * OUTPUTS
    }

    /// What is added to a weight's integer.
    pub(super) fn bias(self) -> i32 {
        match self {
            Self::Q8 => 128,
            Self::Q4 => 8,
        }
    }
}

impl Panels {
    /// Room for a matrix whose rows are whole blocks, filled by `rows`: the blocks of some outputs, one output after the other,
    /// as a GGUF file has them.
    pub(in super::super::super) fn new<'a>(
        pool: &mut Pool,
        quant: Quant,
        [n_outputs, n_inputs]: [usize; 2],
        rows: impl Fn(Range<usize>) -> Vec<Cow<'a, [u8]>> + Sync,
    ) -> Self {
        assert!(n_inputs.is_multiple_of(BLOCK), "rows are whole blocks");
        let panel_bytes = n_inputs / BLOCK * quant.panel_block_bytes();
        let mut bytes = zeros(n_outputs.div_ceil(OUTPUTS) * panel_bytes);
        let runs = RowRuns { width: panel_bytes, per_task: (TASK_BYTES / panel_bytes).max(1) };
        pool.for_rows(&mut bytes, runs, |first, panels| {
            for (idx, panel) in panels.chunks_exact_mut(panel_bytes).enumerate() {
                let first = (first + idx) * OUTPUTS;
                for (lane, row) in rows(first..n_outputs.min(first + OUTPUTS)).iter().enumerate() {
                    fill(quant, panel, lane, row);
                }
            }
        });
        Self { bytes, n_outputs, n_inputs, quant }
    }

    pub(in super::super::super) fn n_outputs(&self) -> usize {
        self.n_outputs
    }

    pub(in super::super::super) fn n_inputs(&self) -> usize {
        self.n_inputs
    }

    /// Bytes of one output.
    pub(in super::super) fn row_bytes(&self) -> usize {
        self.quant.bytes_of(self.n_inputs)
    }

    pub(in super::super) fn quant(&self) -> Quant {
        self.quant
    }

    /// The panels of those outputs, the first of which begins a panel.
    pub(super) fn of(&self, outputs: &Range<usize>) -> &[u8] {
        assert!(outputs.start.is_multiple_of(OUTPUTS) && outputs.end <= self.n_outputs, "outputs are whole panels");
        let panel_bytes = self.n_inputs / BLOCK * self.quant.panel_block_bytes();
        &self.bytes[outputs.start / OUTPUTS * panel_bytes..outputs.end.div_ceil(OUTPUTS) * panel_bytes]
    }

    /// The weights of one output in f32.
    pub(in super::super::super) fn read_row(&self, output: usize, out: &mut [f32]) {
        let lane = output % OUTPUTS;
        let panel = self.of(&(output - lane..output + 1));
        let blocks = panel.chunks_exact(self.quant.panel_block_bytes());
        for (block, out) in blocks.zip(out.as_chunks_mut::<BLOCK>().0) {
            let (scales, quants) = block.split_at(SCALE_BYTES);
            let scale = f16::from_le_bytes([scales[2 * lane], scales[2 * lane + 1]]).to_f32();
            for (input, out) in out.iter_mut().enumerate() {
                *out = scale * (self.quant.stored(quants, lane, input) - self.quant.bias()) as f32;
            }
        }
    }
}

impl Quant {
    /// The biased integer of an input.
    fn stored(self, quants: &[u8], lane: usize, input: usize) -> i32 {
        let at = |input: usize| quants[input / 4 * QUAD_BYTES + 4 * lane + input % 4];
        i32::from(match self {
            Self::Q8 => at(input),
            Self::Q4 if input < BLOCK / 2 => at(input) & 15,
            Self::Q4 => at(input - BLOCK / 2) >> 4,
        })
    }
}

/// Brings the row of one output to its place. A file has four-bit quants with their bias, and eight-bit ones without.
fn fill(quant: Quant, panel: &mut [u8], lane: usize, row: &[u8]) {
    let flip = match quant {
        Quant::Q8 => [0x80; 4],
        Quant::Q4 => [0; 4],
    };
    let blocks = panel.chunks_exact_mut(quant.panel_block_bytes()).zip(row.chunks_exact(quant.stored_bytes()));
    for (block, stored) in blocks {
        let (scales, quants) = block.split_at_mut(SCALE_BYTES);
        scales[2 * lane..][..2].copy_from_slice(&stored[..2]);
        for (quad, stored) in quants.chunks_exact_mut(QUAD_BYTES).zip(stored[2..].as_chunks::<4>().0) {
            let flipped = u32::from_ne_bytes(*stored) ^ u32::from_ne_bytes(flip);
            quad[4 * lane..][..4].copy_from_slice(&flipped.to_ne_bytes());
        }
    }
}

/// Memory of its own, so that large pages can be asked for: with small ones, reading a matrix waits for the page table.
fn zeros(n_bytes: usize) -> MmapMut {
    // An empty map is refused, and no matrix is empty.
    let map = MmapMut::map_anon(n_bytes.max(1)).expect("the memory plan left room for the weights");
    #[cfg(target_os = "linux")]
    if let Err(reason) = map.advise(memmap2::Advice::HugePage) {
        tracing::debug!(%reason, "no large pages for weights");
    }
    map
}
