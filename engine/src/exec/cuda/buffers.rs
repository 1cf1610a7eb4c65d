//! The device memory that a step writes, allocated once at start.

use stoker_fit::gpu::Capacity;
use stoker_kernels::{
    CudaSlice, Device, KernelError,
    attention::{DecodeScratch, PrefillScratch},
    bf16,
    launch::{UPDATE_ROWS_MAX, norm_tiles},
    quantise::QuantisedRows,
    sampling::{Marks, SampleScratch},
};

use super::shape::ModelShape;

/// What a step writes, sized for the largest one.
#[derive(Debug)]
pub(super) struct Buffers {
    pub(super) tokens: CudaSlice<u32>,
    pub(super) stream: Stream,
    pub(super) qkv: CudaSlice<bf16>,
    pub(super) attended: CudaSlice<bf16>,
    pub(super) gate_up: CudaSlice<bf16>,
    pub(super) activated: CudaSlice<bf16>,
    /// Rows that a quantised product multiplies; empty where there is none.
    pub(super) quantised: QuantisedRows,
    /// Weights of four bits that were widened for the product behind; empty where none are.
    pub(super) widened: QuantisedRows,
    /// The drawn rows of `attended` in the last layer, where they are not all.
    pub(super) gathered: CudaSlice<bf16>,
    pub(super) logits: CudaSlice<f32>,
    /// Tokens of up to `max_sampled` rows, then log-probabilities of as many.
    pub(super) sampled: CudaSlice<u32>,
    pub(super) max_sampled: usize,
    /// What draws know of running sequences.
    pub(super) marks: Marks,
    pub(super) decode_scratch: DecodeScratch,
    pub(super) prefill_scratch: PrefillScratch,
    pub(super) sample_scratch: SampleScratch,
}

/// The residual stream, and what lies beside it between two products.
#[derive(Debug)]
pub(super) struct Stream {
    pub(super) residual: CudaSlice<bf16>,
    /// What a half of a layer gives, where the norm behind it adds it to the residual.
    pub(super) update: CudaSlice<bf16>,
    /// The residual's norm, or the residual times the norm's weight where the product behind it scales its result.
    pub(super) normed: CudaSlice<bf16>,
    /// Sums of squares of the residual, where the product behind it scales its result.
    pub(super) squares: CudaSlice<f32>,
}

impl Buffers {
    /// Allocates them.
    pub(super) fn new(device: &Device, shape: &ModelShape, capacity: &Capacity) -> Result<Self, KernelError> {
        let rows = |width: usize| device.zeros::<bf16>(capacity.max_rows * width);
        let n = capacity.max_sampled;
        Ok(Self {
            tokens: device.zeros(capacity.max_rows)?,
            stream: Stream {
                residual: rows(shape.hidden)?,
                update: rows(shape.hidden)?,
                normed: rows(shape.hidden)?,
                squares: device.zeros(UPDATE_ROWS_MAX * norm_tiles(shape.hidden))?,
            },
            qkv: rows(shape.heads.qkv_width())?,
            attended: rows(shape.attended_width())?,
            gate_up: rows(2 * shape.inner)?,
            activated: rows(shape.inner)?,
            quantised: {
                let (n_values, n_rows) = capacity.quantised_rows(&shape.sizes());
                let rows = QuantisedRows::zeros(device, n_values, n_rows)?;
                rows.beside_codes(device, capacity.code_sums(&shape.sizes()))?
            },
            widened: {
                let (n_values, n_outputs) = capacity.widened(&shape.sizes());
                QuantisedRows::zeros(device, n_values, n_outputs)?
            },
            gathered: device.zeros(n * shape.attended_width())?,
            logits: device.zeros(n * shape.vocab)?,
            sampled: device.zeros(capacity.result_words())?,
            max_sampled: n,
            marks: Marks::new(device, n, shape.vocab)?,
            decode_scratch: DecodeScratch::new(device.stream(), capacity.decode_scratch(shape.heads))?,
            prefill_scratch: PrefillScratch::new(device.stream(), capacity.max_pieces, shape.heads)?,
            sample_scratch: SampleScratch::new(device, n)?,
        })
    }
}
