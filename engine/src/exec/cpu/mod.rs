//! The executor on the CPU: forward pass, then sampling on the same threads. Ranks that share a model there, and stages that it is cut into,
//! are for tests of what several GPUs do: each rank has threads of its own, and computes all stages one behind the other.

mod decoder;
mod meeting;

use std::{borrow::Cow, collections::VecDeque, sync::Arc};

use decoder::Decoder;
pub use decoder::ProjectionInput;
use meeting::Meeting;

use super::{
    Abilities, ExecError, Executor, RowsRead, RowsSpec, RowsWanted, Score,
    micro_batches::{Cut, MicroBatch, MicroBatches},
};
use stoker_fit::host::SCORED_ROWS;

use crate::{
    constraint::Masks,
    kv::{BlockId, KvDtype, KvLayout, blocks_for},
    model::{
        BoundWeights, ModelError, ModelSpec, WeightStore,
        spec::{Rank, Stage},
    },
    ops::{BatchInputs, Buffer, CpuCache, CpuOps, CpuTensor},
    pool::Pool,
    request::{Request, RequestId, TokenId},
    sample::choose,
    sched::{ChunkInput, SampleSpec, Sampled, Step, StepChunk, StepOutput},
};

/// A model, its KV cache and the threads that compute it.
#[derive(Debug)]
pub struct CpuExecutor {
    ranks: Vec<CpuRank>,
    /// One a rank.
    threads: Pool,
    vocab_size: usize,
    /// How steps are cut for the stages.
    micro_batches: MicroBatches,
    /// Of steps that were launched and not finished, oldest first.
    outputs: VecDeque<StepOutput>,
    /// What the step launched last, and the one before it, sampled, by slots of micro-batches.
    last_tokens: Vec<TokenId>,
    /// Those of the step launched last, one an entry.
    slots: Vec<usize>,
    /// Its draws that wait for their masks.
    unmasked: Vec<Unmasked>,
    /// Rows that the next step is asked for, and what those of the last one hold.
    wanted: Vec<RowsSpec>,
    read: Vec<RowsRead>,
}

/// A model or a rank's share of one, and the threads that compute it.
#[derive(Debug)]
struct CpuRank {
    /// One at least.
    stages: Vec<CpuStage>,
    ops: CpuOps,
    vocab_size: usize,
}

/// Some layers of it, and their KV cache.
#[derive(Debug)]
struct CpuStage {
    model: Decoder,
    cache: CpuCache,
}

/// A text on its way through the layers of a model.
#[derive(Clone, Debug)]
pub struct Passage {
    inputs: BatchInputs,
    hidden: CpuTensor,
}

/// A draw that waits for its mask: a [`SampleSpec`] that outlives the launch, with its logits.
#[derive(Debug)]
struct Unmasked {
    entry: usize,
    logits: Vec<f32>,
    request: Arc<Request>,
    position: usize,
    banned: Vec<TokenId>,
    history: Vec<TokenId>,
    slot: usize,
    sampled: Sampled,
}

impl Unmasked {
    fn new(entry: usize, spec: &SampleSpec<'_>, logits: &[f32]) -> Self {
        let SampleSpec { request, position, banned, history, slot, .. } = *spec;
        Self {
            entry,
            logits: logits.to_vec(),
            request: Arc::clone(request),
            position,
            banned: banned.to_vec(),
            history: history.to_vec(),
            slot,
            sampled: Sampled::NotANumber,
        }
    }

    fn choose(&self, mask: &[u32]) -> Sampled {
        let Self { logits, request, position, banned, history, slot, .. } = self;
        let spec = SampleSpec { request, position: *position, banned, history, slot: *slot, enters_slot: false };
        choose(logits, &spec, Some(mask))
    }
}

impl CpuExecutor {
    /// Takes a model over, for a rank on each of `ops` and a thread of `threads`, cut into so many stages, over empty caches of that size.
    pub(crate) fn load(
        (ops, mut threads): (Vec<CpuOps>, Pool),
        (spec, n_stages): (&ModelSpec, usize),
        weights: &WeightStore,
        cache: CacheSize,
        progress: &(dyn Fn(f32) + Sync),
    ) -> Result<Self, ModelError> {
        let bound = Rank::all(ops.len()).map(|rank| weights.clone().bind(spec, rank));
        let bound = bound.collect::<Result<Vec<_>, _>>()?;
        let parts = ops.into_iter().zip(Meeting::of_group(bound.len())).zip(&bound);
        let mut starting: Vec<_> = parts.map(|part| (Some(part), None)).collect();
        threads.for_each(&mut starting, |idx, (part, started)| {
            let ((ops, meeting), weights) = part.take().expect("each starts once");
            // The first one's share says how far all are.
            let told = |share| {
                if idx == 0 {
                    progress(share);
                }
            };
            *started = Some(CpuRank::load((ops, meeting), (spec, n_stages), weights, cache, &told));
        });
        let ranks = starting.into_iter().map(|(_, started)| started.expect("every task runs")).collect();
        let micro_batches = MicroBatches::new(n_stages, cache.n_sequences);
        Ok(Self {
            ranks,
            threads,
            vocab_size: spec.vocab_size,
            outputs: VecDeque::new(),
            last_tokens: vec![0; micro_batches.n_slots()],
            micro_batches,
            slots: Vec::new(),
            unmasked: Vec::new(),
            wanted: Vec::new(),
            read: Vec::new(),
        })
    }

    /// One real step over the first KV block, so that the first request finds code and weights paged in. What it
    /// leaves in the block is overwritten by whoever takes it.
    pub fn warm_up(&mut self) {
        self.logits(&probe(&[0], 0));
    }

    /// Logits after each of `tokens`, one row a token, computed `chunk_len` tokens at a time on the path requests
    /// take. Uses the first KV blocks: only for an executor that serves nobody.
    pub fn teacher_forced_logits(&mut self, tokens: &[TokenId], chunk_len: usize) -> Vec<Vec<f32>> {
        let mut rows = Vec::with_capacity(tokens.len());
        for (idx, chunk) in tokens.chunks(chunk_len).enumerate() {
            let logits = self.logits(&probe(chunk, idx * chunk_len));
            rows.extend(logits.chunks(self.vocab_size).map(<[f32]>::to_vec));
        }
        rows
    }

    /// A text on its way through the layers, before the first one.
    pub fn passage(&mut self, tokens: &[TokenId]) -> Passage {
        let inputs = probe(tokens, 0);
        let (CpuStage { model, .. }, ops) = self.only_stage();
        Passage { hidden: model.embed(ops, &inputs), inputs }
    }

    /// Brings a text through one layer; `heard` is told what enters its projections. For whoever looks into a model, layer by layer: uses
    /// the first KV blocks, so only for an executor that serves nobody, and that is one rank.
    pub fn pass(&mut self, passage: &mut Passage, layer: usize, heard: &mut dyn FnMut(ProjectionInput, &CpuTensor)) {
        let (CpuStage { model, cache }, ops) = self.only_stage();
        model.layer(ops, cache, layer, (&mut passage.hidden, &passage.inputs), heard);
    }

    fn only_stage(&mut self) -> (&mut CpuStage, &mut CpuOps) {
        let [CpuRank { stages, ops, .. }] = &mut self.ranks[..] else { panic!("layers are looked into on one rank") };
        let [stage] = &mut stages[..] else { panic!("layers are looked into in one stage") };
        (stage, ops)
    }

    /// Logits of the rows that a step samples, in its order, on the path requests take. All of its tokens are known.
    pub fn step_logits(&mut self, step: &Step<'_>) -> Vec<Vec<f32>> {
        self.logits(&BatchInputs::new(step)).chunks(self.vocab_size).map(<[f32]>::to_vec).collect()
    }

    /// Computes a part of a step, and samples what is free of it.
    fn launch_part(&mut self, part: &MicroBatch<'_>, wanted: &[RowsSpec], sampled: &mut [Sampled]) {
        let mut inputs = BatchInputs::new(&part.step);
        for fed in &inputs.fed_rows {
            inputs.token_ids[fed.row as usize] = self.last_tokens[fed.entry as usize];
        }
        let (logits, read) = self.logits_and_rows(&inputs, wanted);
        self.read.extend(read);
        let chunks = &part.step.chunks;
        let histories: Vec<Cow<'_, [TokenId]>> = chunks.iter().map(|chunk| self.history(chunk)).collect();
        let specs = chunks.iter().zip(&histories);
        let specs = specs.filter_map(|(chunk, history)| Some(SampleSpec { history, ..chunk.sample? }));
        let specs: Vec<SampleSpec<'_>> = specs.collect();
        let mut of_part = vec![Sampled::NotANumber; specs.len()];
        self.ranks[0].ops.pool().for_each(&mut of_part, |row, sampled| {
            if !specs[row].is_constrained() {
                *sampled = choose(row_of(&logits, row, self.vocab_size), &specs[row], None);
            }
        });
        let constrained = specs.iter().enumerate().filter(|(_, spec)| spec.is_constrained());
        let await_mask = |(row, spec)| Unmasked::new(part.entries[row], spec, row_of(&logits, row, self.vocab_size));
        self.unmasked.extend(constrained.map(await_mask));
        part.entries.iter().zip(of_part).for_each(|(entry, token)| sampled[*entry] = token);
    }

    /// The tokens that penalties read: also the one that the step before has just sampled.
    fn history<'a>(&self, chunk: &StepChunk<'a>) -> Cow<'a, [TokenId]> {
        match (chunk.input, chunk.sample) {
            (ChunkInput::Fed { entry }, Some(spec)) if spec.request.sampling.has_penalties() => {
                Cow::Owned([spec.history, &[self.last_tokens[entry]]].concat())
            }
            (_, spec) => Cow::Borrowed(spec.map_or(&[], |spec| spec.history)),
        }
    }

    /// A row without a token has ended its sequence, or waits for its mask: what is fed for it goes nowhere.
    fn note_last_tokens(&mut self) {
        let newest = self.outputs.back().expect("a step was launched");
        for (slot, sampled) in self.slots.iter().zip(&newest.sampled) {
            self.last_tokens[*slot] = sampled.token().unwrap_or(0);
        }
    }

    fn logits(&mut self, inputs: &BatchInputs) -> Buffer<f32> {
        self.logits_and_rows(inputs, &[]).0
    }

    /// What every rank computes, of the first.
    fn logits_and_rows(&mut self, inputs: &BatchInputs, wanted: &[RowsSpec]) -> (Buffer<f32>, Vec<RowsRead>) {
        let mut results: Vec<_> = self.ranks.iter_mut().map(|rank| (rank, None)).collect();
        self.threads.for_each(&mut results, |_, (rank, result)| *result = Some(rank.compute(inputs, wanted)));
        results.into_iter().find_map(|(_, result)| result).expect("there is a rank")
    }
}

impl CpuRank {
    fn load(
        (mut ops, meeting): (CpuOps, Meeting),
        (spec, n_stages): (&ModelSpec, usize),
        weights: &BoundWeights,
        cache: CacheSize,
        progress: &dyn Fn(f32),
    ) -> Self {
        let stage = |stage: Stage| {
            let told = |share: f32| progress((stage.idx as f32 + share) / n_stages as f32);
            let (spec, rank) = (spec.staged(stage), meeting.rank());
            let cache_of_stage = CpuCache::new(kv_layout(&spec, rank, cache.dtype, cache.n_blocks));
            let model = Decoder::load(&mut ops, meeting.clone(), spec, weights, cache.n_positions, &told);
            CpuStage { model, cache: cache_of_stage }
        };
        let stages = Stage::all(n_stages).map(stage).collect();
        Self { stages, ops, vocab_size: spec.vocab_size }
    }

    fn compute(&mut self, inputs: &BatchInputs, wanted: &[RowsSpec]) -> (Buffer<f32>, Vec<RowsRead>) {
        let Self { stages, ops, .. } = self;
        let through =
            |arriving, CpuStage { model, cache }: &mut CpuStage| Some(model.hidden(ops, cache, inputs, arriving));
        let hidden = stages.iter_mut().fold(None, through).expect("there is a stage");
        let read = |spec: &RowsSpec| {
            let first = inputs.cu_seqlens[spec.chunk_idx] + spec.first_row as u32;
            match &spec.wanted {
                RowsWanted::Scores { tokens, k } => RowsRead::Scores(self.scores_of(&hidden, first, tokens, *k)),
                RowsWanted::Outputs { n_rows } => self.outputs_of(&hidden, (first..).take(*n_rows).collect()),
            }
        };
        let read = wanted.iter().map(read).collect();
        (self.logits(&hidden, &inputs.sampled_rows), read)
    }

    fn logits(&mut self, hidden: &CpuTensor, rows: &[u32]) -> Buffer<f32> {
        let Self { stages, ops, .. } = self;
        stages.last().expect("there is a stage").model.logits(ops, hidden, rows).values
    }

    fn outputs_of(&mut self, hidden: &CpuTensor, rows: Vec<u32>) -> RowsRead {
        let Self { stages, ops, .. } = self;
        let outputs = stages.last().expect("there is a stage").model.outputs(ops, hidden, &rows);
        RowsRead::Outputs { width: outputs.values.len() / rows.len(), values: outputs.values.to_vec() }
    }

    /// Few rows at a time: their logits are as large as the vocabulary.
    fn scores_of(&mut self, hidden: &CpuTensor, first: u32, tokens: &[TokenId], k: u8) -> Vec<Score> {
        let rows: Vec<u32> = (first..).take(tokens.len()).collect();
        let mut scores = Vec::with_capacity(rows.len());
        for (rows, tokens) in rows.chunks(SCORED_ROWS).zip(tokens.chunks(SCORED_ROWS)) {
            let logits = self.logits(hidden, rows);
            let mut scored = vec![None; tokens.len()];
            self.ops.pool().for_each(&mut scored, |row, score| {
                *score = Some(Score::new(row_of(&logits, row, self.vocab_size), tokens[row], k));
            });
            scores.extend(scored.into_iter().flatten());
        }
        scores
    }
}

/// One of the rows of logits.
fn row_of(logits: &[f32], row: usize, vocab_size: usize) -> &[f32] {
    &logits[row * vocab_size..][..vocab_size]
}

impl Executor for CpuExecutor {
    fn copies_blocks(&self) -> bool {
        true
    }

    fn abilities(&self) -> Abilities {
        Abilities::ALL
    }

    fn read(&mut self, wanted: Vec<RowsSpec>) {
        self.wanted = wanted;
    }

    fn take_read(&mut self) -> Vec<RowsRead> {
        std::mem::take(&mut self.read)
    }

    /// Computes the whole step: the compute threads are the CPUs that the host would need for anything else.
    fn launch(&mut self, step: &Step<'_>) -> Result<(), ExecError> {
        let stages = self.ranks.iter_mut().flat_map(|rank| &mut rank.stages);
        stages.for_each(|stage| stage.cache.copy(step.copies));
        let wanted = std::mem::take(&mut self.wanted);
        let parts = self.micro_batches.of(step, if wanted.is_empty() { Cut::May } else { Cut::MayNot });
        let mut sampled = vec![Sampled::NotANumber; parts.iter().map(|part| part.entries.len()).sum()];
        self.slots = vec![0; sampled.len()];
        self.unmasked.clear();
        for part in &parts {
            self.launch_part(part, &wanted, &mut sampled);
            part.entries.iter().zip(part.first_slot..).for_each(|(entry, slot)| self.slots[*entry] = slot);
        }
        self.outputs.push_back(StepOutput { sampled });
        self.note_last_tokens();
        Ok(())
    }

    fn constrain(&mut self, masks: Masks<'_>) -> Result<(), ExecError> {
        let Self { ranks, unmasked, outputs, .. } = self;
        let masks: Vec<&[u32]> = masks.iter().collect();
        assert_eq!(masks.len(), unmasked.len(), "one mask for each constrained entry");
        ranks[0].ops.pool().for_each(unmasked, |idx, draw| draw.sampled = draw.choose(masks[idx]));
        let newest = outputs.back_mut().expect("a step was launched");
        unmasked.drain(..).for_each(|draw| newest.sampled[draw.entry] = draw.sampled);
        self.note_last_tokens();
        Ok(())
    }

    fn finish(&mut self) -> Result<StepOutput, ExecError> {
        Ok(self.outputs.pop_front().expect("finish is called once for each launch"))
    }
}

/// What a cache is made for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CacheSize {
    /// Number format of keys and values.
    pub(crate) dtype: KvDtype,
    /// Blocks, on every rank.
    pub(crate) n_blocks: usize,
    /// Positions of a sequence.
    pub(crate) n_positions: usize,
    /// Sequences of a step.
    pub(crate) n_sequences: usize,
}

/// The cache of a rank's share of a model.
pub(crate) fn kv_layout(spec: &ModelSpec, rank: Rank, dtype: KvDtype, n_blocks: usize) -> KvLayout {
    let heads = spec.layers.first().map(|layer| layer.attention.attention.heads.of_rank(rank));
    KvLayout {
        n_layers: spec.layers.len(),
        n_kv_heads: heads.map_or(0, |heads| heads.n_kv_heads),
        head_dim: heads.map_or(0, |heads| heads.head_dim),
        n_blocks,
        dtype,
    }
}

/// Tokens of nobody in the first KV blocks, with logits for every row.
fn probe(tokens: &[TokenId], start: usize) -> BatchInputs {
    let blocks: Vec<BlockId> = (0..blocks_for(start + tokens.len()) as u32).map(BlockId).collect();
    let input = ChunkInput::Known(tokens);
    let chunk = StepChunk { id: RequestId(u64::MAX), input, start, blocks: &blocks, sample: None, is_prefill: true };
    let inputs = BatchInputs::new(&Step::of(vec![chunk]));
    BatchInputs { sampled_rows: (0..tokens.len() as u32).collect(), ..inputs }
}
