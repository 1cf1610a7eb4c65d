//! Sequences that enter their slots, on their way to the device: histories and edits of single logits, packed so that one
//! copy brings those of several. Once a sequence, and again after preemption; a step without newcomers does nothing of this.

use stoker_fit::gpu::{EDITED_MAX, ENTRIES_MAX, newcomer_words};
use stoker_kernels::{
    Device, KernelError,
    packed::{Corner, Field, Layout, Packed},
    sampling::{EDITS_MAX, SlotEntry, TokenEdit},
};

use super::sampling::{token_edits, uses_marks};
use crate::{
    request::TokenId,
    sched::{MAX_STEPS_IN_FLIGHT, SampleSpec},
};

/// The way there.
#[derive(Debug)]
pub(super) struct Newcomers {
    packed: Packed,
    max_tokens: usize,
}

/// Where the arrays of one copy lie.
#[derive(Clone, Copy, Debug)]
pub(super) struct EntryLayout {
    pub(super) entries: Field<SlotEntry>,
    pub(super) histories: Field<TokenId>,
    pub(super) edits: Field<TokenEdit>,
    /// Nothing: all of the copy is used.
    table: Field<i32>,
    whole: Layout,
}

impl EntryLayout {
    fn new(n_entries: usize, n_tokens: usize, n_edits: usize) -> Self {
        let mut whole = Layout::default();
        Self {
            entries: whole.field(n_entries),
            // A kernel's argument points somewhere even where there is nothing.
            histories: whole.field(n_tokens.max(1)),
            edits: whole.field(n_edits.max(1)),
            table: whole.field(0),
            whole,
        }
    }
}

/// What one copy brings.
#[derive(Debug, Default)]
struct Load {
    entries: Vec<SlotEntry>,
    histories: Vec<TokenId>,
    edits: Vec<TokenEdit>,
}

impl Load {
    fn has_room(&self, n_tokens: usize, n_edits: usize, max_tokens: usize) -> bool {
        self.entries.len() < ENTRIES_MAX
            && self.histories.len() + n_tokens <= max_tokens
            && self.edits.len() + n_edits <= EDITED_MAX * EDITS_MAX
    }

    fn push(&mut self, spec: &SampleSpec<'_>, edits: &[TokenEdit]) {
        assert!(edits.len() <= EDITS_MAX, "biases are bounded when a request is taken, and end tokens are few");
        self.entries.push(SlotEntry {
            slot: spec.slot as u32,
            first_token: self.histories.len() as u32,
            n_prompt: spec.request.prompt.len() as u32,
            n_tokens: spec.history.len() as u32,
            first_edit: self.edits.len() as u32,
            n_edits: edits.len() as u32,
        });
        self.histories.extend(spec.history);
        self.edits.extend(edits);
    }
}

impl Newcomers {
    /// Room for one sequence of `max_tokens` at least.
    pub(super) fn new(device: &Device, max_tokens: usize) -> Result<Self, KernelError> {
        Ok(Self { packed: Packed::new(device, newcomer_words(max_tokens), MAX_STEPS_IN_FLIGHT)?, max_tokens })
    }

    /// Brings those of `specs` over that enter slots whose marks they use; `enter` launches what takes them in.
    pub(super) fn bring(
        &mut self,
        specs: &[SampleSpec<'_>],
        mut enter: impl FnMut(&Packed, EntryLayout) -> Result<(), KernelError>,
    ) -> Result<(), KernelError> {
        for load in loads(specs, self.max_tokens) {
            let layout = EntryLayout::new(load.entries.len(), load.histories.len(), load.edits.len());
            let all = Corner { table: layout.table, row_values: 0, n_rows: 0, n_columns: 0 };
            self.packed.upload(layout.whole, all, |filling| {
                filling.field(layout.entries).copy_from_slice(&load.entries);
                filling.field(layout.histories)[..load.histories.len()].copy_from_slice(&load.histories);
                filling.field(layout.edits)[..load.edits.len()].copy_from_slice(&load.edits);
            })?;
            enter(&self.packed, layout)?;
        }
        Ok(())
    }
}

/// As many copies as those who enter need: nearly always one or none.
fn loads(specs: &[SampleSpec<'_>], max_tokens: usize) -> Vec<Load> {
    let mut loads: Vec<Load> = Vec::new();
    for spec in specs.iter().filter(|spec| spec.enters_slot && uses_marks(spec.request)) {
        let edits = token_edits(spec);
        let has_room = |load: &Load| load.has_room(spec.history.len(), edits.len(), max_tokens);
        if !loads.last().is_some_and(has_room) {
            loads.push(Load::default());
        }
        loads.last_mut().expect("one was pushed").push(spec, &edits);
    }
    loads
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::request::{Request, SamplingParams, StopParams};

    #[test]
    fn the_memory_plan_counts_newcomers_as_they_are_packed() {
        for max_tokens in [0, 1, 8191, 131_072] {
            let layout = EntryLayout::new(ENTRIES_MAX, max_tokens, EDITED_MAX * EDITS_MAX);
            assert_eq!(layout.whole.n_words(), newcomer_words(max_tokens));
        }
    }

    #[test]
    fn newcomers_share_a_copy_as_long_as_it_has_room() {
        let sampling = SamplingParams { presence_penalty: 1.0, ..SamplingParams::default() };
        let asked = |sampling| {
            Arc::new(Request {
                prompt: vec![1, 2, 3],
                sampling,
                stop: StopParams::default(),
                logprobs: None,
                ..Request::default()
            })
        };
        let (request, plain) = (asked(sampling), asked(SamplingParams::default()));
        let spec = |slot, request| SampleSpec {
            request,
            position: 4,
            banned: &[],
            history: &[1, 2, 3, 9],
            slot,
            enters_slot: true,
        };
        let stays = SampleSpec { enters_slot: false, ..spec(7, &request) };
        let specs = [spec(5, &request), stays, spec(2, &plain), spec(0, &request), spec(1, &request)];
        let found = loads(&specs, 10);
        let slots: Vec<Vec<u32>> =
            found.iter().map(|load| load.entries.iter().map(|entry| entry.slot).collect()).collect();
        assert_eq!(slots, [vec![5, 0], vec![1]]);
        let second = found[0].entries[1];
        assert_eq!((second.first_token, second.n_prompt, second.n_tokens), (4, 3, 4));
        assert_eq!(found[1].histories, [1, 2, 3, 9]);
    }
}
