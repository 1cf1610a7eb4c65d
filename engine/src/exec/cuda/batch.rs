//! A step as the GPU takes it: rows in the order of the kernels (decodes first), attention cut into pieces, and the
//! packed inputs filled in. Pure: nothing here touches the device.

use stoker_fit::gpu::StepBounds;
use stoker_kernels::{
    launch::Heads,
    packed::{Corner, Filling},
    plan::{
        Context, DecodeItem, DecodePlan, DecodeReader, PrefillChunk, PrefillSplit, PrefillTile, SplitPolicy,
        decode_items_max, plan_decode, plan_prefill, prefill_tiles_max,
    },
    sampling::SampleRow,
};

use super::{
    layout::{Sampled, StepLayout, StepShape, bucket, prompt_bucket},
    sampling::Draws,
};
use crate::{
    kv::BLOCK_TOKENS,
    sched::{ChunkInput, SampleSpec, Step, StepChunk},
};

/// What bounds every step of an executor.
#[derive(Clone, Copy, Debug)]
pub(super) struct BatchLimits {
    pub(super) heads: Heads,
    pub(super) policy: SplitPolicy,
    pub(super) prefill_split: PrefillSplit,
    pub(super) max_num_seqs: usize,
    /// Tokens of a step.
    pub(super) max_rows: usize,
    pub(super) max_model_len: usize,
    /// Logits of a row.
    pub(super) vocab: usize,
}

impl BatchLimits {
    /// Blocks of the longest context.
    pub(super) fn blocks_per_row(&self) -> usize {
        self.max_model_len.div_ceil(BLOCK_TOKENS)
    }

    /// Whether a chunk goes through decode attention: any of one token, where only speed counts. Where bits count, what
    /// the token is decides, so that no prompt token's depend on how the prompt was cut.
    fn decodes(&self, chunk: &StepChunk<'_>) -> bool {
        match self.policy {
            SplitPolicy::Balanced { .. } => chunk.input.n_tokens() == 1,
            SplitPolicy::Fixed { .. } => !chunk.is_prefill,
        }
    }

    /// What the memory plan takes of it.
    pub(super) fn bounds(&self) -> StepBounds {
        let Self { heads, policy, prefill_split, max_num_seqs, max_rows, max_model_len, vocab: _ } = *self;
        StepBounds { heads, policy, prefill_split, max_num_seqs, max_rows, max_model_len }
    }

    /// Pieces of decode attention that a graph for `n` sequences has room for.
    pub(super) fn items_max(&self, n: usize) -> usize {
        decode_items_max(n, self.max_model_len, self.heads, self.policy)
    }
}

/// One step in the kernels' order.
#[derive(Debug)]
pub(super) struct Batch<'a> {
    /// Decodes, then prefill chunks, each in the step's order.
    chunks: Vec<StepChunk<'a>>,
    n_decode: usize,
    /// Where the step's chunks begin, in its order.
    first_rows: Vec<u32>,
    /// Rows that are drawn, in the step's order.
    sampled_rows: Vec<u32>,
    /// How they are drawn.
    specs: Vec<SampleSpec<'a>>,
    draws: Draws,
    decodes: DecodePlan,
    tiles: Vec<PrefillTile>,
    /// Those of the last layer, where only drawn rows attend.
    drawn_tiles: Vec<PrefillTile>,
    limits: BatchLimits,
}

impl<'a> Batch<'a> {
    /// Orders the rows and plans attention.
    pub(super) fn new(step: &Step<'a>, limits: BatchLimits) -> Self {
        let is_decode = |chunk: &&StepChunk<'_>| limits.decodes(chunk);
        let mut chunks: Vec<StepChunk<'a>> = step.chunks.iter().filter(is_decode).copied().collect();
        let n_decode = chunks.len();
        chunks.extend(step.chunks.iter().filter(|chunk| !is_decode(chunk)));
        let contexts = chunks[..n_decode].iter().map(|chunk| Context {
            n_tokens: chunk.start + 1,
            n_settled: settled(chunk),
            blocks: chunk.blocks,
        });
        let decodes = plan_decode(&contexts.collect::<Vec<_>>(), limits.heads, limits.policy);
        let prefills = prefill_chunks(&chunks, n_decode);
        let first_rows = first_rows(step, n_decode, &limits);
        let (sampled_rows, specs) = sampled(step, &first_rows);
        let draws = Draws::new(&specs, limits.vocab);
        let drawn = drawn_chunks(&prefills, &chunks[n_decode..]);
        let [tiles, drawn_tiles] =
            [&prefills, &drawn].map(|chunks| plan_prefill(chunks, limits.heads, limits.prefill_split));
        Self { chunks, n_decode, first_rows, sampled_rows, specs, draws, decodes, tiles, drawn_tiles, limits }
    }

    /// Draws after every row, not only where the step asks: for comparing logits.
    pub(super) fn sample_every_row(&mut self) {
        self.sampled_rows = (0..self.n_rows() as u32).collect();
        self.drawn_tiles.clone_from(&self.tiles);
        self.specs.clear();
        self.draws = Draws::new(&[], self.limits.vocab);
    }

    /// Rows are read beside: all attend in the last layer, too.
    pub(super) fn attend_everywhere(&mut self) {
        self.drawn_tiles.clone_from(&self.tiles);
    }

    /// The first row of one of the step's chunks.
    pub(super) fn first_row(&self, chunk_idx: usize) -> u32 {
        self.first_rows[chunk_idx]
    }

    fn n_rows(&self) -> usize {
        self.chunks.iter().map(|chunk| chunk.input.n_tokens()).sum()
    }

    /// How the rows are drawn, in the step's order.
    pub(super) fn specs(&self) -> &[SampleSpec<'a>] {
        &self.specs
    }

    /// The same as the device takes it.
    pub(super) fn draws(&self) -> &Draws {
        &self.draws
    }

    /// A batch of decodes that are all drawn is padded to its bucket, and so is the end of one prompt: then the shape is a
    /// function of the bucket alone.
    pub(super) fn shape(&self) -> StepShape {
        let (n_rows, n_sampled) = (self.n_rows(), self.sampled_rows.len());
        let is_decode = self.n_decode == n_rows && n_sampled == n_rows;
        let decodes = is_decode.then(|| decode_shape(bucket(n_rows, self.limits.max_num_seqs), &self.limits));
        let is_end_of_prompt = self.chunks.len() == 1 && self.n_decode == 0 && n_sampled == 1;
        let bucket = prompt_bucket(n_rows, self.limits.max_rows).filter(|_| is_end_of_prompt);
        let recorded = decodes.or_else(|| Some(prompt_shape(bucket?, &self.limits)));
        recorded.filter(|shape| self.fits(shape)).unwrap_or_else(|| self.own_shape())
    }

    /// What it has, without padding.
    pub(super) fn own_shape(&self) -> StepShape {
        StepShape {
            n_rows: self.n_rows(),
            n_decode: self.n_decode,
            n_items: self.decodes.items.len(),
            n_tiles: self.tiles.len(),
            n_drawn_tiles: self.drawn_tiles.len(),
            n_sequences: self.chunks.len(),
            n_sampled: self.sampled_rows.len(),
            sampled: Sampled::Listed,
            blocks_per_row: self.limits.blocks_per_row(),
        }
    }

    /// Whether a recorded step has room for all planned pieces of attention. One that has not is computed as it is.
    fn fits(&self, shape: &StepShape) -> bool {
        self.decodes.items.len() <= shape.n_items
            && self.tiles.len() <= shape.n_tiles
            && self.drawn_tiles.len() <= shape.n_drawn_tiles
    }

    /// What of the block table holds something.
    pub(super) fn used_table(&self, layout: &StepLayout) -> Corner<i32> {
        let most_blocks = self.chunks.iter().map(|chunk| chunk.blocks.len()).max().unwrap_or(0);
        Corner {
            table: layout.table,
            row_values: self.limits.blocks_per_row(),
            n_rows: self.chunks.len(),
            n_columns: most_blocks.min(self.limits.blocks_per_row()),
        }
    }

    /// Writes the inputs; what pads a bucket computes nothing that is kept.
    pub(super) fn fill(&self, layout: &StepLayout, filling: &mut Filling<'_>) {
        fill(filling.field(layout.sources), self.chunks.iter().flat_map(|chunk| sources(chunk.input)), 0);
        let positions = |chunk: &StepChunk<'a>| chunk.start..chunk.start + chunk.input.n_tokens();
        fill(filling.field(layout.positions), self.chunks.iter().flat_map(positions).map(|at| at as i32), 0);
        let slots = self.chunks.iter().flat_map(|chunk| positions(chunk).map(|at| slot(chunk, at)));
        fill(filling.field(layout.slots), slots, -1);
        if !layout.listed.is_empty() {
            fill(filling.field(layout.listed), self.sampled_rows.iter().copied(), 0);
        }
        fill(filling.field(layout.items), self.decodes.items.iter().copied(), DecodeItem::NONE);
        fill(filling.field(layout.readers), self.decodes.readers.iter().copied(), DecodeReader::NONE);
        fill(filling.field(layout.tiles), self.tiles.iter().copied(), PrefillTile::NONE);
        fill(filling.field(layout.drawn_tiles), self.drawn_tiles.iter().copied(), PrefillTile::NONE);
        fill(filling.field(layout.rows), self.draws.rows.iter().copied(), SampleRow::GREEDY);
        let table = filling.field(layout.table).chunks_exact_mut(self.limits.blocks_per_row());
        for (row, chunk) in table.zip(&self.chunks) {
            fill_table_row(row, chunk);
        }
    }
}

/// A row's token, or `-1 - entry` where the step before draws it.
fn sources(input: ChunkInput<'_>) -> impl Iterator<Item = i32> {
    let (known, fed) = match input {
        ChunkInput::Known(tokens) => (tokens, None),
        ChunkInput::Fed { entry } => (&[][..], Some(-1 - entry as i32)),
    };
    known.iter().map(|token| *token as i32).chain(fed)
}

/// The shape of a step that decodes `n` sequences.
pub(super) fn decode_shape(n: usize, limits: &BatchLimits) -> StepShape {
    StepShape {
        n_rows: n,
        n_decode: n,
        n_items: limits.items_max(n),
        n_tiles: 0,
        n_drawn_tiles: 0,
        n_sequences: n,
        n_sampled: n,
        sampled: Sampled::Every,
        blocks_per_row: limits.blocks_per_row(),
    }
}

/// The shape of a step that computes the last `n` tokens of one prompt and draws the token behind them.
pub(super) fn prompt_shape(n: usize, limits: &BatchLimits) -> StepShape {
    let n_tiles = |n_tokens| prefill_tiles_max(n_tokens, limits.heads, limits.prefill_split);
    StepShape {
        n_rows: n,
        n_decode: 0,
        n_items: 0,
        n_tiles: n_tiles(n),
        n_drawn_tiles: n_tiles(1),
        n_sequences: 1,
        n_sampled: 1,
        sampled: Sampled::Listed,
        blocks_per_row: limits.blocks_per_row(),
    }
}

/// Tokens in front of a chunk that no kernel of its step writes. A sequence that the step before drew for had its blocks then; the blocks
/// that one finds when it begins, or begins again, may be what another one computes in the same step.
fn settled(chunk: &StepChunk<'_>) -> usize {
    match chunk.input {
        ChunkInput::Fed { .. } => chunk.start,
        ChunkInput::Known(_) => 0,
    }
}

fn prefill_chunks(chunks: &[StepChunk<'_>], n_decode: usize) -> Vec<PrefillChunk> {
    let mut first_row = n_decode;
    let chunk = |(sequence, chunk): (usize, &StepChunk<'_>)| {
        let n_tokens = chunk.input.n_tokens();
        first_row += n_tokens;
        PrefillChunk { sequence, first_row: first_row - n_tokens, n_computed: chunk.start, n_tokens }
    };
    chunks.iter().enumerate().skip(n_decode).map(chunk).collect()
}

/// The drawn rows of prefills: the last one, where it is drawn.
fn drawn_chunks(prefills: &[PrefillChunk], chunks: &[StepChunk<'_>]) -> Vec<PrefillChunk> {
    let last_row = |prefill: &PrefillChunk| PrefillChunk {
        first_row: prefill.first_row + prefill.n_tokens - 1,
        n_computed: prefill.n_computed + prefill.n_tokens - 1,
        n_tokens: 1,
        ..*prefill
    };
    let drawn = prefills.iter().zip(chunks).filter(|(_, chunk)| chunk.sample.is_some());
    drawn.map(|(prefill, _)| last_row(prefill)).collect()
}

/// Where each of the step's chunks begins.
fn first_rows(step: &Step<'_>, n_decode: usize, limits: &BatchLimits) -> Vec<u32> {
    let (mut decode_row, mut prefill_row) = (0, n_decode);
    let mut first_row = |chunk: &StepChunk<'_>| {
        let next = if limits.decodes(chunk) { &mut decode_row } else { &mut prefill_row };
        *next += chunk.input.n_tokens();
        (*next - chunk.input.n_tokens()) as u32
    };
    step.chunks.iter().map(&mut first_row).collect()
}

/// The rows that the step draws after and how, in its order.
fn sampled<'a>(step: &Step<'a>, first_rows: &[u32]) -> (Vec<u32>, Vec<SampleSpec<'a>>) {
    let last_row = |(chunk, first_row): (&StepChunk<'a>, &u32)| {
        Some((first_row + chunk.input.n_tokens() as u32 - 1, chunk.sample?))
    };
    step.chunks.iter().zip(first_rows).filter_map(last_row).unzip()
}

fn slot(chunk: &StepChunk<'_>, position: usize) -> i32 {
    (chunk.blocks[position / BLOCK_TOKENS].0 as usize * BLOCK_TOKENS + position % BLOCK_TOKENS) as i32
}

fn fill_table_row(row: &mut [i32], chunk: &StepChunk<'_>) {
    for (entry, block) in row.iter_mut().zip(chunk.blocks) {
        *entry = block.0 as i32;
    }
}

/// `values`, then padding to the end. All of them have room: the layout was made for a shape that counts them.
fn fill<T: Copy>(target: &mut [T], values: impl Iterator<Item = T>, padding: T) {
    let mut room = target.iter_mut();
    for value in values {
        *room.next().expect("the layout has room for every planned piece") = value;
    }
    room.for_each(|target| *target = padding);
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use stoker_fit::gpu::Capacity;

    use super::*;
    use crate::{
        kv::BlockId,
        request::{Request, RequestId, SamplingParams, StopParams},
    };

    const LIMITS: BatchLimits = BatchLimits {
        heads: Heads { n_q: 4, n_kv: 2, dim: 64 },
        policy: SplitPolicy::Balanced { n_slots: 264 },
        prefill_split: PrefillSplit::Fill { n_slots: 132 },
        max_num_seqs: 8,
        max_rows: 64,
        max_model_len: 64,
        vocab: 100,
    };

    #[test]
    fn the_memory_plan_counts_inputs_as_they_are_packed() {
        for limits in [LIMITS, BatchLimits { max_num_seqs: 7, max_rows: 1000, max_model_len: 4097, ..LIMITS }] {
            let capacity = Capacity::new(&limits.bounds());
            let (n, n_pieces) = (capacity.max_sampled, capacity.max_pieces);
            let largest = StepShape {
                n_rows: limits.max_rows,
                n_tiles: limits.max_rows + n_pieces,
                n_drawn_tiles: n + n_pieces,
                sampled: Sampled::Listed,
                ..decode_shape(n, &limits)
            };
            assert_eq!(capacity.input_words, StepLayout::new(&largest).whole.n_words());
        }
    }

    fn request() -> Arc<Request> {
        let (sampling, stop) = (SamplingParams::default(), StopParams::default());
        Arc::new(Request { prompt: vec![1], sampling, stop, logprobs: None, ..Request::default() })
    }

    fn chunk<'a>(input: ChunkInput<'a>, start: usize, sample: Option<SampleSpec<'a>>) -> StepChunk<'a> {
        let blocks = &[BlockId(7), BlockId(3), BlockId(5)];
        StepChunk { id: RequestId(1), input, start, blocks, sample, is_prefill: false }
    }

    /// A prompt's end, a decode and a prompt's beginning; the first two are drawn.
    fn mixed(request: &Arc<Request>) -> Step<'_> {
        let sample = Some(SampleSpec { request, position: 1, banned: &[], history: &[], slot: 0, enters_slot: false });
        Step::of(vec![
            chunk(ChunkInput::Known(&[10, 11, 12]), 15, sample),
            chunk(ChunkInput::Fed { entry: 4 }, 20, sample),
            chunk(ChunkInput::Known(&[20, 21]), 0, None),
        ])
    }

    #[test]
    fn decodes_come_first_and_draws_keep_the_order_of_the_step() {
        let request = request();
        let batch = Batch::new(&mixed(&request), LIMITS);
        assert_eq!(batch.sampled_rows, [3, 0]);
        let tokens: Vec<i32> = batch.chunks.iter().flat_map(|chunk| sources(chunk.input)).collect();
        assert_eq!(tokens, [-5, 10, 11, 12, 20, 21]);
        assert_eq!(slot(&batch.chunks[1], 16), 3 * 16);
        let shape = batch.shape();
        assert_eq!((shape.n_rows, shape.n_decode, shape.n_sequences, shape.n_sampled), (6, 1, 3, 2));
        assert_eq!(shape.sampled, Sampled::Listed);
    }

    #[test]
    fn only_drawn_rows_of_prefills_attend_in_the_last_layer() {
        let request = request();
        let mut batch = Batch::new(&mixed(&request), LIMITS);
        let rows = |tiles: &[PrefillTile]| tiles.iter().map(|t| (t.first_row, t.n_tokens, t.first_visible)).collect();
        let drawn: Vec<_> = rows(&batch.drawn_tiles);
        assert_eq!(drawn, [(3, 1, 18)]);
        batch.sample_every_row();
        let (every, all): (Vec<_>, Vec<_>) = (rows(&batch.drawn_tiles), rows(&batch.tiles));
        assert_eq!(every, all);
    }

    #[test]
    fn only_who_was_drawn_for_in_the_step_before_has_tokens_that_may_be_read_early() {
        let fed = chunk(ChunkInput::Fed { entry: 0 }, 40, None);
        // The last token of a prompt whose beginning was found: who computes that may be in the same step.
        let found = StepChunk { is_prefill: true, ..chunk(ChunkInput::Known(&[1]), 48, None) };
        let again = chunk(ChunkInput::Known(&[2]), 32, None);
        let batch = Batch::new(&Step::of(vec![fed, found, again]), LIMITS);
        let of = |row: i32| batch.decodes.items.iter().find(|item| item.sequence == row).unwrap().n_settled;
        assert_eq!([0, 1, 2].map(of), [40, 0, 0]);
    }

    #[test]
    fn where_bits_count_a_prompt_of_one_token_is_no_decode() {
        let invariant = BatchLimits { policy: SplitPolicy::fixed(64, 264), ..LIMITS };
        let of_prompt = StepChunk { is_prefill: true, ..chunk(ChunkInput::Known(&[1]), 5, None) };
        let generated = chunk(ChunkInput::Known(&[2]), 9, None);
        let step = Step::of(vec![of_prompt, generated]);
        let n_decode = |limits| Batch::new(&step, limits).n_decode;
        assert_eq!((n_decode(invariant), n_decode(LIMITS)), (1, 2));
        let batch = Batch::new(&step, invariant);
        assert_eq!((batch.tiles.len(), batch.decodes.items.len()), (1, 1));
    }

    #[test]
    fn the_shape_of_a_decode_step_depends_on_its_bucket_only() {
        let request = request();
        let sample =
            Some(SampleSpec { request: &request, position: 1, banned: &[], history: &[], slot: 0, enters_slot: false });
        let step = |start| Step::of(vec![chunk(ChunkInput::Known(&[1]), start, sample); 3]);
        let shape = |start| Batch::new(&step(start), LIMITS).shape();
        assert_eq!(shape(2), shape(40));
        assert_eq!(shape(2), decode_shape(4, &LIMITS));
    }

    #[test]
    fn the_shape_of_a_prompts_end_depends_on_its_bucket_only() {
        let request = request();
        let sample =
            Some(SampleSpec { request: &request, position: 1, banned: &[], history: &[], slot: 0, enters_slot: false });
        let step = |tokens, start| Step::of(vec![chunk(ChunkInput::Known(tokens), start, sample)]);
        let shape = |tokens, start| Batch::new(&step(tokens, start), LIMITS).shape();
        assert_eq!(shape(&[1; 17], 0), shape(&[1; 32], 15));
        assert_eq!(shape(&[1; 17], 0), prompt_shape(32, &LIMITS));
        let undrawn = Step::of(vec![chunk(ChunkInput::Known(&[1; 17]), 0, None)]);
        assert_eq!(Batch::new(&undrawn, LIMITS).shape().n_rows, 17);
    }

    #[test]
    fn a_batch_of_more_pieces_than_its_graph_has_room_for_is_computed_as_it_is() {
        let request = request();
        let spec =
            SampleSpec { request: &request, position: 1, banned: &[], history: &[], slot: 0, enters_slot: false };
        let step = Step::of(vec![chunk(ChunkInput::Known(&[1]), 2, Some(spec)); 3]);
        let mut batch = Batch::new(&step, LIMITS);
        let recorded = batch.shape();
        batch.decodes.items.resize(recorded.n_items + 1, DecodeItem::NONE);
        let shape = batch.shape();
        assert_eq!((shape.n_items, shape.n_rows, shape.sampled), (recorded.n_items + 1, 3, Sampled::Listed));
    }

    #[test]
    #[should_panic(expected = "the layout has room for every planned piece")]
    fn nothing_planned_is_left_out_in_silence() {
        fill(&mut [0; 2], [1, 2, 3].into_iter(), -1);
    }

    #[test]
    fn a_step_of_nobody_is_all_padding() {
        let nobody = Batch::new(&Step::default(), LIMITS);
        assert!(nobody.decodes.items.is_empty() && nobody.tiles.is_empty() && nobody.sampled_rows.is_empty());
    }

    #[test]
    fn what_is_left_of_an_array_is_padded() {
        let mut target = [9; 4];
        fill(&mut target, [1, 2].into_iter(), -1);
        assert_eq!(target, [1, 2, -1, -1]);
    }
}
