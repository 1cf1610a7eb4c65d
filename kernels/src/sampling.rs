//! From logits to the next token on the device: edits of single logits, the filters' floor, the draw. The same function
//! of (seed, position) as the engine's CPU sampler (`engine/src/sample.rs`); checks buffers, launches.

use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream, CudaView, CudaViewMut};

use crate::{
    KernelError, Kernels, check_len, check_room,
    launch::{self, Rows, SAMPLE_PIECES_MAX},
};

/// The token of a row with a NaN among its logits. Its embedding is zeros.
pub const NO_TOKEN: u32 = u32::MAX;

/// How one row's token is drawn. The same fields as in `csrc/sampling.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SampleRow {
    /// The request's.
    pub seed: u64,
    /// Of the token that is drawn.
    pub position: u64,
    /// 0 is greedy.
    pub temperature: f32,
    /// 1 is off.
    pub top_p: f32,
    /// Natural logarithm of min-p; minus infinity is off.
    pub ln_min_p: f32,
    /// 0 is off.
    pub top_k: u32,
}

impl SampleRow {
    /// The likeliest token.
    pub const GREEDY: Self =
        Self { seed: 0, position: 0, temperature: 0.0, top_p: 1.0, ln_min_p: f32::NEG_INFINITY, top_k: 0 };

    /// Whether the row needs its floor computed.
    pub fn is_filtered(self) -> bool {
        self.temperature > 0.0 && (self.top_k > 0 || self.top_p < 1.0 || self.ln_min_p > f32::NEG_INFINITY)
    }
}

/// What changes one logit. At most one for a (row, token). The same fields as in `csrc/edit_logits.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LogitEdit {
    /// Row of the logits.
    pub row: u32,
    /// The token.
    pub token: u32,
    /// Times in the completion; -1 if neither prompt nor completion hold it.
    pub n_generated: i32,
    /// Added last; minus infinity bans the token.
    pub bias: f32,
}

/// One row's penalties, named as in the request. The same fields as in `csrc/edit_logits.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Penalties {
    /// Subtracted once from generated tokens.
    pub presence: f32,
    /// Subtracted for each time a token was generated.
    pub frequency: f32,
    /// Divides positive, multiplies negative logits of tokens in the history; 1 is off.
    pub repetition: f32,
}

// SAFETY: plain numbers without padding, as the kernels read them.
unsafe impl cudarc::driver::DeviceRepr for SampleRow {}
// SAFETY: as above: any bits are a value.
unsafe impl bytemuck::Zeroable for SampleRow {}
// SAFETY: as above.
unsafe impl bytemuck::Pod for SampleRow {}
// SAFETY: as above.
unsafe impl cudarc::driver::DeviceRepr for LogitEdit {}
// SAFETY: as above: any bits are a value.
unsafe impl bytemuck::Zeroable for LogitEdit {}
// SAFETY: as above.
unsafe impl bytemuck::Pod for LogitEdit {}
// SAFETY: as above.
unsafe impl cudarc::driver::DeviceRepr for Penalties {}
// SAFETY: as above: any bits are a value.
unsafe impl bytemuck::Zeroable for Penalties {}
// SAFETY: as above.
unsafe impl bytemuck::Pod for Penalties {}

/// Edits of single logits, in place.
#[derive(Debug)]
pub struct EditLogits<'a> {
    /// Rows of `vocab`.
    pub logits: CudaViewMut<'a, f32>,
    /// The edits; rows must lie inside the logits.
    pub edits: CudaView<'a, LogitEdit>,
    /// One a row of the logits.
    pub penalties: CudaView<'a, Penalties>,
    /// Logits of a row.
    pub vocab: usize,
}

/// The draw of one token a row.
#[derive(Debug)]
pub struct Sample<'a> {
    /// One a row.
    pub tokens: CudaViewMut<'a, u32>,
    /// Rows of `vocab`.
    pub logits: CudaView<'a, f32>,
    /// One a row.
    pub rows: CudaView<'a, SampleRow>,
    /// Shared by all steps.
    pub scratch: &'a mut SampleScratch,
    /// Logits of a row.
    pub vocab: usize,
    /// Whether any row is filtered: the host knows, and the floors cost a launch.
    pub filters: Filters,
}

/// Whether floors are computed before the draw.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Filters {
    /// No row is filtered.
    Off,
    /// Some row is.
    On,
}

/// Floors of rows, and the pieces of rows that wait for their comparison.
#[derive(Debug)]
pub struct SampleScratch {
    // Minus infinity for rows that no filter has touched: `Filters::Off` must not read another step's floors.
    no_floors: CudaSlice<f32>,
    floors: CudaSlice<f32>,
    pieces: CudaSlice<u64>,
    tickets: CudaSlice<u32>,
}

impl SampleScratch {
    /// Allocates for batches of up to `n_rows`.
    pub fn new(stream: &Arc<CudaStream>, n_rows: usize) -> Result<Self, KernelError> {
        let failed = KernelError::driver("allocate sampling scratch");
        Ok(Self {
            no_floors: stream.clone_htod(&vec![f32::NEG_INFINITY; n_rows]).map_err(&failed)?,
            floors: stream.alloc_zeros(n_rows).map_err(&failed)?,
            pieces: stream.alloc_zeros(n_rows * SAMPLE_PIECES_MAX).map_err(&failed)?,
            tickets: stream.alloc_zeros(n_rows).map_err(&failed)?,
        })
    }

    /// Bytes on the device, for the memory plan.
    pub fn bytes(n_rows: usize) -> usize {
        n_rows * (4 + 4 + 8 * SAMPLE_PIECES_MAX + 4)
    }
}

impl Kernels {
    /// Applies penalties, bias and bans.
    pub fn edit_logits(&self, mut op: EditLogits<'_>) -> Result<(), KernelError> {
        const OP: &str = "edit_logits";
        let config = launch::edit_logits(op.edits.len())?;
        let n_rows = op.logits.len().checked_div(op.vocab).unwrap_or(0);
        check_len(OP, "logits", op.logits.len(), n_rows * op.vocab)?;
        check_len(OP, "penalties", op.penalties.len(), n_rows)?;
        let launch = self.functions.launch(OP, config).write(&mut op.logits).read(&op.edits).read(&op.penalties);
        launch.int(op.edits.len()).int(op.vocab).start()
    }

    /// Draws.
    pub fn sample(&self, mut op: Sample<'_>) -> Result<(), KernelError> {
        const OP: &str = "sample";
        let rows = Rows { n_rows: op.tokens.len(), width: op.vocab };
        let config = launch::sample(rows)?;
        check_len(OP, "logits", op.logits.len(), rows.n_rows * rows.width)?;
        check_len(OP, "rows", op.rows.len(), rows.n_rows)?;
        check_room(OP, "the scratch", op.scratch.tickets.len(), rows.n_rows)?;
        if op.filters == Filters::On {
            self.sampling_floor(&mut op, rows)?;
        }
        let scratch = op.scratch;
        let floors = if op.filters == Filters::On { &scratch.floors } else { &scratch.no_floors };
        let launch = self.functions.launch(OP, config).write(&mut op.tokens).read(&op.logits).read(&op.rows);
        let launch = launch.read(&floors.as_view()).write(&mut scratch.pieces.as_view_mut());
        launch.write(&mut scratch.tickets.as_view_mut()).int(rows.width).start()
    }

    fn sampling_floor(&self, op: &mut Sample<'_>, rows: Rows) -> Result<(), KernelError> {
        let launch =
            self.functions.launch("sampling_floor", launch::sampling_floor(rows, self.properties().capability)?);
        launch.write(&mut op.scratch.floors.as_view_mut()).read(&op.logits).read(&op.rows).int(rows.width).start()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_have_the_size_that_the_kernels_read() {
        assert_eq!((size_of::<SampleRow>(), size_of::<LogitEdit>(), size_of::<Penalties>()), (32, 16, 12));
    }

    #[test]
    fn only_rows_that_draw_and_filter_need_a_floor() {
        assert!(!SampleRow::GREEDY.is_filtered());
        assert!(!SampleRow { top_k: 5, ..SampleRow::GREEDY }.is_filtered());
        assert!(SampleRow { top_k: 5, temperature: 1.0, ..SampleRow::GREEDY }.is_filtered());
    }
}
