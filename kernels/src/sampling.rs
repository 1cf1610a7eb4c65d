//! From logits to the next token on the device: the draw, everything that may change it, and log-probabilities. The same
//! function of (seed, position) as the engine's CPU sampler (`engine/src/sample.rs`); checks buffers, launches.
//!
//! ```text
//! in every step        sample: rows without options, cut in pieces
//! if any row has some  mark_tokens: sequences that enter a slot; sampling_floor: rows that need a selection over all;
//!                      sample_options: the draw, log-probabilities, the drawn token counted
//! once masks are there the last two again, for the rows that waited for them
//! ```

use cudarc::driver::{CudaSlice, CudaView, CudaViewMut};
use stoker_fit::gpu;
pub use stoker_fit::gpu::{COUNT_MAX, EDITS_MAX, LOGPROB_WORDS, LOGPROBS_MAX};

use crate::{
    Device, KernelError, Kernels, check_len, check_room,
    launch::{self, Rows, SAMPLE_PIECES_MAX},
};

/// The token of a row with a NaN among its logits. Its embedding is zeros.
pub const NO_TOKEN: u32 = u32::MAX;
/// A larger top-k needs a selection over the whole row. The same constant as in `csrc/sampling.cuh`.
const TOP_K_MAX: u32 = 256;

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
    /// Subtracted once from generated tokens.
    pub presence: f32,
    /// Subtracted for each time a token was generated.
    pub frequency: f32,
    /// Divides positive, multiplies negative logits of tokens in prompt or completion; 1 is off.
    pub repetition: f32,
    /// Whose marks change its logits; -1: none.
    pub slot: i32,
    /// Which mask of allowed tokens; -1: all are.
    pub mask: i32,
    /// Which of the step's log-probabilities are its own; -1: none are wanted.
    pub logprobs: i32,
    /// Likeliest tokens beside the drawn one, at most [`LOGPROBS_MAX`].
    pub n_top: u32,
    /// 0: nothing but seed and temperature. See [`SampleRow::with_options`].
    pub options: u32,
}

impl SampleRow {
    /// The likeliest token.
    pub const GREEDY: Self = Self {
        seed: 0,
        position: 0,
        temperature: 0.0,
        top_p: 1.0,
        ln_min_p: f32::NEG_INFINITY,
        top_k: 0,
        presence: 0.0,
        frequency: 0.0,
        repetition: 1.0,
        slot: -1,
        mask: -1,
        logprobs: -1,
        n_top: 0,
        options: 0,
    };

    /// The row, saying whether it has options: then it is [`Kernels::sample_options`] that draws it.
    pub fn with_options(self) -> Self {
        let has_options = self.is_filtered() || self.slot >= 0 || self.mask >= 0 || self.logprobs >= 0;
        Self { options: has_options.into(), ..self }
    }

    /// Whether the row is drawn from a part of its tokens.
    fn is_filtered(self) -> bool {
        self.temperature > 0.0 && (self.top_k > 0 || self.top_p < 1.0 || self.ln_min_p > f32::NEG_INFINITY)
    }

    /// Whether a filter by rank needs more than the few largest of `vocab` logits.
    pub fn needs_selection(self, vocab: usize) -> bool {
        let has_top_k = self.top_k > 0 && (self.top_k as usize) < vocab;
        self.temperature > 0.0 && if has_top_k { self.top_k > TOP_K_MAX } else { self.top_p < 1.0 }
    }
}

/// What changes the logit of one token beside penalties. The same fields as in `csrc/mark_tokens.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenEdit {
    /// The token; at most one edit has it.
    pub token: u32,
    /// Added last.
    pub bias: f32,
    /// No draw for a position below this one gives the token.
    pub banned_until: u32,
}

/// A sequence that enters a slot. The same fields as in `csrc/mark_tokens.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SlotEntry {
    /// The slot; what it held is forgotten.
    pub slot: u32,
    /// Where the sequence's tokens begin.
    pub first_token: u32,
    /// Tokens of its prompt.
    pub n_prompt: u32,
    /// Tokens of prompt and completion.
    pub n_tokens: u32,
    /// Where its edits begin.
    pub first_edit: u32,
    /// At most [`EDITS_MAX`].
    pub n_edits: u32,
}

records!(SampleRow, TokenEdit, SlotEntry);

// The memory plan counts by these.
const _: () = assert!(size_of::<SampleRow>() == gpu::SAMPLE_ROW_BYTES);
const _: () = assert!(size_of::<TokenEdit>() == gpu::TOKEN_EDIT_BYTES);
const _: () = assert!(size_of::<SlotEntry>() == gpu::SLOT_ENTRY_BYTES);

/// What draws know of running sequences: one slot each. What the tokens of prompt and completion, and edits, mean to each
/// token of the vocabulary is one word, so no draw looks at a history.
#[derive(Debug)]
pub struct Marks {
    /// Slots x vocabulary.
    marks: CudaSlice<u32>,
    /// Slots x [`EDITS_MAX`]: bias, and the position until which the token is banned.
    edits: CudaSlice<[u32; 2]>,
    vocab: usize,
}

impl Marks {
    /// For this many running sequences.
    pub fn new(device: &Device, n_slots: usize, vocab: usize) -> Result<Self, KernelError> {
        Ok(Self { marks: device.zeros(n_slots * vocab)?, edits: device.zeros(n_slots * EDITS_MAX)?, vocab })
    }
}

/// Sequences enter their slots.
#[derive(Debug)]
pub struct MarkTokens<'a> {
    /// All slots; those of the entries lie inside.
    pub marks: &'a mut Marks,
    /// One a sequence; they point into what follows.
    pub entries: CudaView<'a, SlotEntry>,
    /// Tokens of prompts and completions.
    pub histories: CudaView<'a, u32>,
    /// Edits.
    pub edits: CudaView<'a, TokenEdit>,
}

/// The draw of one token for each row that has no options.
#[derive(Debug)]
pub struct Sample<'a> {
    /// One a row; those of other rows stay.
    pub tokens: CudaViewMut<'a, u32>,
    /// Rows of `vocab`.
    pub logits: CudaView<'a, f32>,
    /// One a row.
    pub rows: CudaView<'a, SampleRow>,
    /// Shared by all steps.
    pub scratch: &'a mut SampleScratch,
    /// Logits of a row.
    pub vocab: usize,
}

/// The draw of one token for each row that has options.
#[derive(Debug)]
pub struct SampleOptions<'a> {
    /// One a row; those of other rows stay.
    pub tokens: CudaViewMut<'a, u32>,
    /// [`LOGPROB_WORDS`] for each row that wants them.
    pub logprobs: CudaViewMut<'a, u32>,
    /// Rows of the marks' vocabulary.
    pub logits: CudaView<'a, f32>,
    /// One a row; slots lie inside the marks.
    pub rows: CudaView<'a, SampleRow>,
    /// The drawn tokens are counted.
    pub marks: &'a mut Marks,
    /// Whose turn it is.
    pub turn: Turn<'a>,
    /// Whether any row [needs a selection](SampleRow::needs_selection): the host knows, and it costs a launch.
    pub selection: Selection,
    /// Shared by all steps.
    pub scratch: &'a mut SampleScratch,
}

/// Which rows are drawn.
#[derive(Debug)]
pub enum Turn<'a> {
    /// Those without a mask.
    Free,
    /// Those with one; the masks, of `vocab / 32` words rounded up each.
    Masked(CudaView<'a, u32>),
}

/// Whether floors are computed before the draw.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Selection {
    /// No row needs one.
    NotNeeded,
    /// Some row does.
    Needed,
}

/// Floors of rows, and the pieces of rows that wait for their comparison.
#[derive(Debug)]
pub struct SampleScratch {
    floors: CudaSlice<f32>,
    pub(crate) pieces: CudaSlice<u64>,
    pub(crate) tickets: CudaSlice<u32>,
}

impl SampleScratch {
    /// Allocates for batches of up to `n_rows`.
    pub fn new(device: &Device, n_rows: usize) -> Result<Self, KernelError> {
        Ok(Self {
            floors: device.zeros(n_rows)?,
            pieces: device.zeros(n_rows * SAMPLE_PIECES_MAX)?,
            tickets: device.zeros(n_rows)?,
        })
    }
}

impl Kernels {
    /// Takes sequences into their slots.
    pub fn mark_tokens(&self, op: MarkTokens<'_>) -> Result<(), KernelError> {
        let Marks { marks, edits, vocab } = op.marks;
        let launch = self.functions.launch("mark_tokens", launch::mark_tokens(op.entries.len())?);
        let launch = launch.write(&mut marks.as_view_mut()).write(&mut edits.as_view_mut()).read(&op.entries);
        launch.read(&op.histories).read(&op.edits).int(*vocab).start()
    }

    /// Draws rows without options.
    pub fn sample(&self, mut op: Sample<'_>) -> Result<(), KernelError> {
        const OP: &str = "sample";
        let rows = Rows { n_rows: op.tokens.len(), width: op.vocab };
        let config = launch::sample(rows)?;
        check_len(OP, "logits", op.logits.len(), rows.n_rows * rows.width)?;
        check_len(OP, "rows", op.rows.len(), rows.n_rows)?;
        check_room(OP, "the scratch", op.scratch.tickets.len(), rows.n_rows)?;
        let scratch = op.scratch;
        let launch = self.functions.launch(OP, config).write(&mut op.tokens).read(&op.logits).read(&op.rows);
        let launch = launch.write(&mut scratch.pieces.as_view_mut()).write(&mut scratch.tickets.as_view_mut());
        launch.int(rows.width).start()
    }

    /// Draws rows with options.
    pub fn sample_options(&self, mut op: SampleOptions<'_>) -> Result<(), KernelError> {
        const OP: &str = "sample_options";
        let rows = Rows { n_rows: op.tokens.len(), width: op.marks.vocab };
        let config = launch::sample_options(rows)?;
        check_len(OP, "logits", op.logits.len(), rows.n_rows * rows.width)?;
        check_len(OP, "rows", op.rows.len(), rows.n_rows)?;
        check_room(OP, "the scratch", op.scratch.floors.len(), rows.n_rows)?;
        let has_floors = self.sampling_floor(&mut op, rows)?;
        let (masks, is_masked) = op.turn.masks();
        let floors = op.scratch.floors.as_view();
        let launch = self.functions.launch(OP, config).write(&mut op.tokens).write(&mut op.logprobs);
        let launch = launch.read(&op.logits).read(&op.rows).write(&mut op.marks.marks.as_view_mut());
        let launch = launch.read(&op.marks.edits.as_view()).read_optional(masks);
        launch.read_optional(has_floors.then_some(&floors)).int(rows.width).int(is_masked).start()
    }

    /// Floors of rows that need a selection, where a kernel of its own does it faster than the draw would.
    fn sampling_floor(&self, op: &mut SampleOptions<'_>, rows: Rows) -> Result<bool, KernelError> {
        let config = launch::sampling_floor(rows, self.properties().capability)?;
        let Some(config) = config.filter(|_| op.selection == Selection::Needed) else { return Ok(false) };
        let (masks, is_masked) = op.turn.masks();
        let launch = self.functions.launch("sampling_floor", config).write(&mut op.scratch.floors.as_view_mut());
        let launch = launch.read(&op.logits).read(&op.rows).read(&op.marks.marks.as_view());
        launch.read(&op.marks.edits.as_view()).read_optional(masks).int(rows.width).int(is_masked).start()?;
        Ok(true)
    }
}

impl<'a> Turn<'a> {
    fn masks(&self) -> (Option<&CudaView<'a, u32>>, usize) {
        match self {
            Self::Free => (None, 0),
            Self::Masked(masks) => (Some(masks), 1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_have_the_size_that_the_kernels_read() {
        assert_eq!((size_of::<SampleRow>(), size_of::<TokenEdit>(), size_of::<SlotEntry>()), (64, 12, 24));
    }

    #[test]
    fn a_row_has_options_when_more_than_seed_and_temperature_matter() {
        let has_options = |row: SampleRow| row.with_options().options == 1;
        let drawn = SampleRow { temperature: 1.0, seed: 7, ..SampleRow::GREEDY };
        assert!(!has_options(SampleRow::GREEDY) && !has_options(drawn));
        assert!(!has_options(SampleRow { top_k: 5, ..SampleRow::GREEDY }), "greedy is greedy among the top 5");
        for row in [
            SampleRow { top_k: 5, ..drawn },
            SampleRow { slot: 0, ..SampleRow::GREEDY },
            SampleRow { mask: 0, ..SampleRow::GREEDY },
            SampleRow { logprobs: 0, ..SampleRow::GREEDY },
        ] {
            assert!(has_options(row), "{row:?}");
        }
    }

    #[test]
    fn only_what_the_few_largest_cannot_tell_needs_a_selection() {
        let drawn = SampleRow { temperature: 1.0, ..SampleRow::GREEDY };
        let needs = |row: SampleRow| row.needs_selection(1000);
        assert!(needs(SampleRow { top_p: 0.9, ..drawn }));
        assert!(needs(SampleRow { top_k: 257, ..drawn }));
        assert!(needs(SampleRow { top_k: 1000, top_p: 0.9, ..drawn }), "all of them are no top");
        assert!(!needs(SampleRow { top_k: 256, top_p: 0.9, ..drawn }));
        assert!(!needs(SampleRow { top_k: 1000, ..drawn }));
        assert!(!needs(SampleRow { top_p: 0.9, ..SampleRow::GREEDY }));
    }
}
