//! Masks of allowed tokens on their way to the device, one copy for all of a step's.

use stoker_fit::gpu::mask_input_words;
use stoker_kernels::{
    CudaView, Device, KernelError,
    packed::{Corner, Field, Layout, Packed},
};

use crate::{constraint::Masks, sched::MAX_STEPS_IN_FLIGHT};

/// Room for the masks of the largest step.
#[derive(Debug)]
pub(super) struct MaskInputs {
    packed: Packed,
}

impl MaskInputs {
    pub(super) fn new(device: &Device, n_rows: usize, vocab: usize) -> Result<Self, KernelError> {
        Ok(Self { packed: Packed::new(device, mask_input_words(n_rows, vocab), MAX_STEPS_IN_FLIGHT)? })
    }

    /// Sends them; what is launched from here on finds them until the next ones are sent.
    pub(super) fn bring(&mut self, masks: Masks<'_>) -> Result<CudaView<'_, u32>, KernelError> {
        let (whole, words, table) = layout(masks.words.len());
        let all = Corner { table, row_values: 0, n_rows: 0, n_columns: 0 };
        self.packed.upload(whole, all, |filling| filling.field(words).copy_from_slice(masks.words))?;
        Ok(self.packed.view(words))
    }
}

/// Masks, and an empty table: all of the copy is used.
fn layout(n_words: usize) -> (Layout, Field<u32>, Field<i32>) {
    let mut whole = Layout::default();
    let (words, table) = (whole.field(n_words), whole.field(0));
    (whole, words, table)
}
