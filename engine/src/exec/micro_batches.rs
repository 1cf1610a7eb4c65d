//! A step in parts, for stages of a pipeline: while one part is in the second stage, the next one is in the first. Pure.
//!
//! ```text
//! stage 0:  [ N.0 ][ N.1 ][ N+1.0 ][ N+1.1 ] ...
//! stage 1:         [ N.0 ][ N.1   ][ N+1.0 ] ...      N+1.0 is fed what N.0 has drawn, and does not wait for N.1
//! ```
//! So a sequence that is fed stays in the part that drew for it, unless parts have become too unlike. What is not fed may read blocks that a
//! chunk in front of it writes in the same step: those keep their order, and the parts are computed in theirs.
//!
//! (Huang et al. 2019, GPipe, <https://arxiv.org/abs/1811.06965>, for training; parts of decodes instead of parts of a batch here.)

use crate::{
    kv::BLOCK_TOKENS,
    sched::{ChunkInput, Step, StepChunk},
};

/// Rows that a part has at the least: fewer take as long as so many, whose weights are read all the same.
const ROWS_MIN: usize = 8;
/// How much more than its share of decodes a part may have, as a part of the share: a sequence that changes parts waits once for the
/// whole step before.
const SURPLUS: usize = 8;

/// Cuts steps, and remembers where what they draw lies.
#[derive(Debug)]
pub(super) struct MicroBatches {
    n_stages: usize,
    /// Draws of a step at most.
    max_sampled: usize,
    /// Those of the step before, in its order.
    drawn: Vec<Place>,
    /// Which half of the places the next step's draws take: those of the step before are read meanwhile.
    turn: usize,
}

/// Where a draw lies.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
struct Place {
    /// The part that drew it.
    part: usize,
    /// Below twice as many as a step may draw.
    slot: usize,
}

/// A part of a step, a step by itself: what it is fed is a slot, not an entry of the step before.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct MicroBatch<'a> {
    pub(super) step: Step<'a>,
    /// Which of the whole step's draws its own are, in its order.
    pub(super) entries: Vec<usize>,
    /// Where these lie for the step behind: from here on.
    pub(super) first_slot: usize,
    /// The last part of the step before that it is fed by.
    pub(super) fed_by: Option<usize>,
}

/// Whether a step may be cut.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Cut {
    May,
    /// Something of it is needed together: rows that are read, logits that wait for their masks.
    MayNot,
}

impl MicroBatches {
    /// For steps with at most `max_sampled` draws.
    pub(super) fn new(n_stages: usize, max_sampled: usize) -> Self {
        Self { n_stages, max_sampled, drawn: Vec::new(), turn: 0 }
    }

    /// Slots of all draws.
    pub(super) fn n_slots(&self) -> usize {
        2 * self.max_sampled
    }

    /// The parts of the next step, in the order in which each stage computes them: one at least, and at most as many as there are stages.
    /// Where there is one stage, the slot of a draw is its entry.
    pub(super) fn of<'a>(&mut self, step: &Step<'a>, cut: Cut) -> Vec<MicroBatch<'a>> {
        if self.n_stages == 1 {
            let n_drawn = step.chunks.iter().filter(|chunk| chunk.sample.is_some()).count();
            return vec![MicroBatch {
                step: step.clone(),
                entries: (0..n_drawn).collect(),
                first_slot: 0,
                fed_by: None,
            }];
        }
        let is_constrained = step.chunks.iter().filter_map(|chunk| chunk.sample).any(|spec| spec.is_constrained());
        let n_parts = match cut {
            Cut::May if !is_constrained => (step.n_tokens() / ROWS_MIN).clamp(1, self.n_stages),
            _ => 1,
        };
        let parts = self.placed(step, n_parts);
        self.turn = 1 - self.turn;
        let mut slot = self.turn * self.max_sampled;
        let mut drawn = vec![Place::default(); parts.iter().map(|part| part.n_drawn()).sum()];
        let mut micro_batches = Vec::with_capacity(parts.len());
        for (part, Part { chunks, entries }) in parts.into_iter().enumerate() {
            let first_slot = slot;
            for entry in &entries {
                drawn[*entry] = Place { part, slot };
                slot += 1;
            }
            let fed_by = chunks.iter().filter_map(|chunk| self.place(chunk)).map(|place| place.part).max();
            let chunks = chunks.into_iter().map(|chunk| self.by_slot(chunk)).collect();
            micro_batches.push(MicroBatch { step: Step { chunks, copies: step.copies }, entries, first_slot, fed_by });
        }
        self.drawn = drawn;
        micro_batches
    }

    /// The step's chunks, in parts.
    fn placed<'a>(&self, step: &Step<'a>, n_parts: usize) -> Vec<Part<'a>> {
        let mut fed_parts: Vec<Option<usize>> =
            step.chunks.iter().map(|chunk| Some(self.place(chunk)?.part.min(n_parts - 1))).collect();
        even_out(&mut fed_parts, n_parts);
        let mut parts = vec![Part::default(); n_parts];
        // What is fed is there before the rest is shared out, in what room is left.
        let n_fed = |part: usize| fed_parts.iter().filter(|fed| **fed == Some(part)).count();
        let share = step.n_tokens().div_ceil(n_parts);
        let mut room: Vec<usize> = (0..n_parts).map(|part| share.saturating_sub(n_fed(part))).collect();
        let (mut open, mut entry) = (0, 0);
        for (chunk, fed_part) in step.chunks.iter().zip(fed_parts) {
            let mut chunk = *chunk;
            if fed_part.is_none() {
                while open + 1 < n_parts {
                    let Some((begin, rest)) = cut(&chunk, room[open]) else { break };
                    parts[open].chunks.extend(begin);
                    (open, chunk) = (open + 1, rest);
                }
                room[open] = room[open].saturating_sub(chunk.input.n_tokens());
            }
            let part = &mut parts[fed_part.unwrap_or(open)];
            if chunk.sample.is_some() {
                part.entries.push(entry);
                entry += 1;
            }
            part.chunks.push(chunk);
        }
        parts.retain(|part| !part.chunks.is_empty());
        if parts.is_empty() { vec![Part::default()] } else { parts }
    }

    fn place(&self, chunk: &StepChunk<'_>) -> Option<Place> {
        match chunk.input {
            ChunkInput::Fed { entry } => Some(self.drawn[entry]),
            ChunkInput::Known(_) => None,
        }
    }

    fn by_slot<'a>(&self, chunk: StepChunk<'a>) -> StepChunk<'a> {
        let input = self.place(&chunk).map(|place| ChunkInput::Fed { entry: place.slot });
        StepChunk { input: input.unwrap_or(chunk.input), ..chunk }
    }
}

/// A part that is being filled.
#[derive(Clone, Debug, Default)]
struct Part<'a> {
    chunks: Vec<StepChunk<'a>>,
    entries: Vec<usize>,
}

impl Part<'_> {
    fn n_drawn(&self) -> usize {
        self.entries.len()
    }
}

/// Moves decodes out of parts that have too many of them.
fn even_out(fed_parts: &mut [Option<usize>], n_parts: usize) {
    let mut n_fed = vec![0; n_parts];
    fed_parts.iter().flatten().for_each(|part| n_fed[*part] += 1);
    let share = n_fed.iter().sum::<usize>() / n_parts;
    let most = share + (share / SURPLUS).max(1);
    for fed in fed_parts.iter_mut().rev() {
        let Some(part) = fed else { continue };
        let least = (0..n_parts).min_by_key(|part| n_fed[*part]).expect("there is a part");
        if n_fed[*part] > most {
            n_fed[*part] -= 1;
            n_fed[least] += 1;
            *part = least;
        }
    }
}

/// A chunk in what goes into `room` rows, if anything, and the rest; `None` where all of it does. Cut between blocks, as prompts are.
fn cut<'a>(chunk: &StepChunk<'a>, room: usize) -> Option<(Option<StepChunk<'a>>, StepChunk<'a>)> {
    let ChunkInput::Known(tokens) = chunk.input else { unreachable!("what is fed has one row, and its part") };
    if tokens.len() <= room {
        return None;
    }
    let end = (chunk.start + room) / BLOCK_TOKENS * BLOCK_TOKENS;
    if end <= chunk.start {
        return Some((None, *chunk));
    }
    let (begin, rest) = tokens.split_at(end - chunk.start);
    let begin = StepChunk { input: ChunkInput::Known(begin), sample: None, ..*chunk };
    Some((Some(begin), StepChunk { input: ChunkInput::Known(rest), start: end, ..*chunk }))
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeMap, sync::Arc};

    use proptest::prelude::*;

    use super::*;
    use crate::{
        request::{Request, RequestId, TokenId},
        sched::SampleSpec,
    };

    /// A sequence in a step: its tokens, if they are known, and whether it draws.
    #[derive(Clone, Debug)]
    struct Asked {
        id: u64,
        known: Option<Vec<TokenId>>,
        start: usize,
        draws: bool,
    }

    fn step<'a>(asked: &'a [Asked], drew: &[u64], request: &'a Arc<Request>) -> Step<'a> {
        let spec = SampleSpec { request, position: 1, banned: &[], history: &[], slot: 0, enters_slot: false };
        let chunk = |asked: &'a Asked| StepChunk {
            id: RequestId(asked.id),
            input: match &asked.known {
                Some(tokens) => ChunkInput::Known(tokens),
                None => ChunkInput::Fed { entry: drew.iter().position(|id| *id == asked.id).expect("it drew") },
            },
            start: asked.start,
            blocks: &[],
            sample: asked.draws.then_some(spec),
            is_prefill: asked.known.is_some(),
        };
        Step::of(asked.iter().map(chunk).collect())
    }

    fn prompt(id: u64, n_tokens: usize) -> Asked {
        Asked { id, known: Some((0..n_tokens as u32).collect()), start: 0, draws: true }
    }

    fn decode(id: u64) -> Asked {
        Asked { id, known: None, start: 7, draws: true }
    }

    fn ids(part: &MicroBatch<'_>) -> Vec<u64> {
        part.step.chunks.iter().map(|chunk| chunk.id.0).collect()
    }

    #[test]
    fn decodes_stay_where_they_were_drawn_for_and_wait_for_no_other_part() {
        let (request, mut cutter) = (Arc::new(Request::default()), MicroBatches::new(2, 64));
        let prompts: Vec<_> = (0..20).map(|id| prompt(id, 1)).collect();
        let first: Vec<_> = cutter.of(&step(&prompts, &[], &request), Cut::May);
        assert_eq!([ids(&first[0]), ids(&first[1])], [(0..10).collect::<Vec<_>>(), (10..20).collect()]);
        assert_eq!((first[0].first_slot, first[1].first_slot), (64, 74));
        // The first one has ended: nobody changes parts.
        let drew: Vec<u64> = (0..20).collect();
        let decodes: Vec<_> = (1..20).map(decode).collect();
        let second = cutter.of(&step(&decodes, &drew, &request), Cut::May);
        assert_eq!([ids(&second[0]), ids(&second[1])], [(1..10).collect::<Vec<_>>(), (10..20).collect()]);
        assert_eq!((second[0].fed_by, second[1].fed_by), (Some(0), Some(1)));
        assert_eq!(second[1].step.chunks[0].input, ChunkInput::Fed { entry: 74 });
        assert_eq!((second[0].first_slot, second[1].first_slot), (0, 9));
        assert_eq!((&second[0].entries, &second[1].entries), (&(0..9).collect(), &(9..19).collect()));
    }

    #[test]
    fn parts_that_have_become_unlike_are_evened_out() {
        let (request, mut cutter) = (Arc::new(Request::default()), MicroBatches::new(2, 64));
        let prompts: Vec<_> = (0..40).map(|id| prompt(id, 1)).collect();
        cutter.of(&step(&prompts, &[], &request), Cut::May);
        let (drew, left): (Vec<u64>, Vec<_>) = ((0..40).collect(), (14..40).map(decode).collect());
        let parts = cutter.of(&step(&left, &drew, &request), Cut::May);
        assert_eq!(parts.iter().map(|part| part.step.chunks.len()).collect::<Vec<_>>(), [12, 14]);
        // Whoever came over waits for the part that drew for it.
        assert_eq!((parts[0].fed_by, parts[1].fed_by), (Some(1), Some(1)));
    }

    #[test]
    fn a_long_prompt_is_cut_between_blocks_and_drawn_once() {
        let (request, mut cutter) = (Arc::new(Request::default()), MicroBatches::new(2, 64));
        let prompts = [prompt(0, 10), prompt(1, 1000)];
        let parts = cutter.of(&step(&prompts, &[], &request), Cut::May);
        let chunks = |part: &MicroBatch<'_>| -> Vec<(u64, usize, usize, bool)> {
            let of = |c: &StepChunk<'_>| (c.id.0, c.start, c.input.n_tokens(), c.sample.is_some());
            part.step.chunks.iter().map(of).collect()
        };
        assert_eq!(chunks(&parts[0]), [(0, 0, 10, true), (1, 0, 480, false)]);
        assert_eq!(chunks(&parts[1]), [(1, 480, 520, true)]);
        assert_eq!((&parts[0].entries, &parts[1].entries), (&vec![0], &vec![1]));
    }

    #[test]
    fn few_rows_and_what_must_stay_together_are_one_part() {
        let (request, mut cutter) = (Arc::new(Request::default()), MicroBatches::new(4, 64));
        let prompts: Vec<_> = (0..15).map(|id| prompt(id, 1)).collect();
        assert_eq!(cutter.of(&step(&prompts, &[], &request), Cut::May).len(), 1);
        assert_eq!(cutter.of(&step(&[prompt(0, 500)], &[], &request), Cut::MayNot).len(), 1);
        assert_eq!(cutter.of(&step(&[prompt(0, 500)], &[], &request), Cut::May).len(), 4);
        assert_eq!(cutter.of(&Step::default(), Cut::May).len(), 1);
    }

    /// Steps of sequences that come, decode and end.
    fn courses() -> impl Strategy<Value = (usize, Vec<(Vec<usize>, u8)>)> {
        let step = (proptest::collection::vec(1usize..200, 0..6), any::<u8>());
        (2usize..5, proptest::collection::vec(step, 1..20))
    }

    proptest! {
        #[test]
        fn every_row_is_computed_once_in_order_and_fed_what_was_drawn_for_it((n_stages, course) in courses()) {
            let request = Arc::new(Request::default());
            let mut cutter = MicroBatches::new(n_stages, 256);
            let (mut drew, mut next_id): (Vec<u64>, u64) = (Vec::new(), 0);
            // Who drew into which slot.
            let mut slots: BTreeMap<usize, u64> = BTreeMap::new();
            for (prompts, ends) in course {
                let fed = drew.iter().enumerate().filter(|(idx, _)| ends.rotate_left(*idx as u32 % 8) & 3 != 0);
                let mut asked: Vec<Asked> = fed.map(|(_, id)| decode(*id)).collect();
                asked.extend(prompts.iter().map(|n_tokens| {
                    next_id += 1;
                    prompt(next_id, *n_tokens)
                }));
                let whole = step(&asked, &drew, &request);
                let parts = cutter.of(&whole, Cut::May);
                prop_assert!(!parts.is_empty() && parts.len() <= n_stages);
                let known = |step: &Step<'_>| -> Vec<(u64, usize)> {
                    let rows = |c: &StepChunk<'_>| match c.input {
                        ChunkInput::Known(tokens) => {
                            let (id, start) = (c.id.0, c.start);
                            (start..start + tokens.len()).map(move |at| (id, at)).collect::<Vec<_>>()
                        }
                        ChunkInput::Fed { .. } => Vec::new(),
                    };
                    step.chunks.iter().flat_map(rows).collect()
                };
                prop_assert_eq!(parts.iter().flat_map(|part| known(&part.step)).collect::<Vec<_>>(), known(&whole));
                let mut drawn = BTreeMap::new();
                let drawing: Vec<u64> = asked.iter().map(|asked| asked.id).collect();
                let mut entries: Vec<usize> = Vec::new();
                for part in &parts {
                    for chunk in &part.step.chunks {
                        if let ChunkInput::Fed { entry } = chunk.input {
                            prop_assert_eq!(slots.get(&entry), Some(&chunk.id.0));
                        }
                    }
                    let of_part: Vec<u64> =
                        part.step.chunks.iter().filter(|c| c.sample.is_some()).map(|c| c.id.0).collect();
                    prop_assert_eq!(&of_part, &part.entries.iter().map(|entry| drawing[*entry]).collect::<Vec<_>>());
                    for (idx, id) in of_part.iter().enumerate() {
                        let slot = part.first_slot + idx;
                        prop_assert!(slot < cutter.n_slots());
                        // Nobody's draw of the step before is overwritten while this one may read it.
                        prop_assert!(!slots.contains_key(&slot));
                        drawn.insert(slot, *id);
                    }
                    entries.extend(&part.entries);
                }
                entries.sort_unstable();
                prop_assert_eq!(entries, (0..drawing.len()).collect::<Vec<_>>());
                (slots, drew) = (drawn, drawing);
            }
        }
    }
}
