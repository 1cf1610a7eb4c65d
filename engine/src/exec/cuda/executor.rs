//! One GPU's part in a step: one upload, one graph or one eager forward pass, one copy of tokens back. Two steps may be in flight; a
//! step's tokens reach the next one on the device.

mod autotune;
mod measure;

use std::collections::{HashMap, VecDeque};

use stoker_fit::gpu::Capacity;
use stoker_kernels::{
    Device, KernelError, graph::Graph, mark::Mark, packed::Packed, readback::Readback, sampling::Turn, span::Span,
};

pub use self::measure::{Decodes, MeasuredProgram};
use super::{
    batch::{Batch, BatchLimits, decode_shape, prompt_shape},
    forward::{Forward, Part, StepInputs},
    kv_scales::{self, Found, Scale},
    layout::{Sampled as SampledRows, StepLayout, StepShape, buckets, prompt_buckets},
    masks::MaskInputs,
    reads::RowReads,
    sampling::Draws,
    slots::Newcomers,
};
use crate::{
    constraint::Masks,
    exec::{ExecError, RowsRead, RowsSpec},
    kv::{BlockId, blocks_for},
    request::{RequestId, TokenId},
    sched::{ChunkInput, MAX_STEPS_IN_FLIGHT, Step, StepChunk, StepOutput},
};

/// The steps in flight, and the one before them.
const N_SPANS: usize = MAX_STEPS_IN_FLIGHT + 1;

/// A model, or a rank's share of one, on a GPU.
#[derive(Debug)]
pub struct CudaRank {
    forward: Forward,
    inputs: Packed,
    newcomers: Newcomers,
    masks: MaskInputs,
    /// Steps recorded at start.
    graphs: HashMap<StepShape, Recorded>,
    /// Where steps that may draw first tokens are about to end, by the number of the step.
    near_ends: [Mark; MAX_STEPS_IN_FLIGHT],
    readbacks: [Readback<u32>; MAX_STEPS_IN_FLIGHT],
    /// When steps computed, by their number.
    spans: [Span; N_SPANS],
    /// Steps launched and not finished, oldest first.
    in_flight: VecDeque<InFlight>,
    n_launched: usize,
    /// Before the step that was finished last.
    idle_seconds: Option<f64>,
    limits: BatchLimits,
    max_sampled: usize,
    /// For messages.
    device: String,
}

/// A step on the GPU.
#[derive(Debug)]
struct InFlight {
    /// Steps launched before it.
    number: usize,
    predecessor: Predecessor,
    shape: StepShape,
    draws: Draws,
    /// What rows of it hold that were read.
    read: Vec<RowsRead>,
}

/// A recorded step.
#[derive(Debug)]
enum Recorded {
    /// Decodes: nobody waits for a first token.
    Whole(Graph),
    /// The end of a prompt, with a mark in between.
    InTwo { most: Graph, rest: Graph },
}

/// Where the step before was when a step was launched.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Predecessor {
    UnderWay,
    Over,
}

/// Which logits of a probe are wanted.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Probe {
    NoRow,
    EveryRow,
}

impl CudaRank {
    /// Tells the ranks of a model where each other's memory is.
    pub(super) fn connect(ranks: &mut [Self]) {
        Forward::connect(&mut ranks.iter_mut().map(|rank| &mut rank.forward).collect::<Vec<_>>());
    }

    /// A rank that computes steps within these bounds.
    pub(super) fn new(
        forward: Forward,
        capacity: &Capacity,
        limits: BatchLimits,
        device: String,
    ) -> Result<Self, KernelError> {
        let gpu = forward.device();
        let readback = || Readback::new(gpu, capacity.result_words());
        Ok(Self {
            inputs: Packed::new(gpu, capacity.input_words)?,
            newcomers: Newcomers::new(gpu, capacity.max_history)?,
            masks: MaskInputs::new(gpu, capacity.max_sampled, limits.vocab)?,
            readbacks: [readback()?, readback()?],
            spans: [Span::new(gpu)?, Span::new(gpu)?, Span::new(gpu)?],
            near_ends: [Mark::new(gpu)?, Mark::new(gpu)?],
            forward,
            graphs: HashMap::new(),
            in_flight: VecDeque::new(),
            n_launched: 0,
            idle_seconds: None,
            limits,
            max_sampled: capacity.max_sampled,
            device,
        })
    }

    /// Sets the cache's scales: of each layer and head as they are given, and where there are none as real prompts say. Those go through
    /// the first KV blocks; what they leave there is overwritten by whoever takes them. `published` are of each layer's keys and values.
    pub(super) fn find_kv_scales(&mut self, published: &[Option<[f32; 2]>]) -> Result<(), ExecError> {
        let (heads, limits) = (self.forward.model().heads, self.limits);
        let of_layer = |known: &Option<[f32; 2]>| match known {
            Some([k, v]) => [vec![Scale::Published(*k); heads.n_kv], vec![Scale::Published(*v); heads.n_kv]].concat(),
            None => vec![Scale::Measured(1.0); 2 * heads.n_kv],
        };
        let mut scales: Vec<Vec<Scale>> = published.iter().map(of_layer).collect();
        let tokens = kv_scales::prompt(kv_scales::TOKENS.min(limits.max_model_len), limits.vocab);
        for round in 0..kv_scales::ROUNDS {
            self.forward.set_kv_scales(&scales).map_err(|error| self.failed_alone(&error))?;
            if published.iter().all(Option::is_some) {
                return Ok(());
            }
            // The same prompt whatever a step holds: in the batch-invariant mode scales are the same, too.
            for (idx, chunk) in tokens.chunks(limits.max_rows).enumerate() {
                self.probe(chunk, idx * limits.max_rows, Probe::NoRow)?;
            }
            let largest = self.forward.largest_stored(blocks_for(tokens.len()));
            let largest = largest.map_err(|error| self.failed_alone(&error))?;
            let mut all_found = true;
            for (scale, largest) in scales.iter_mut().flatten().zip(largest.into_iter().flatten()) {
                let (next, found) = scale.after(largest);
                all_found &= found == Found::Yes;
                *scale = if round + 1 == kv_scales::ROUNDS { next.or_one(found) } else { next };
            }
            // Ranks have other heads, and all of them go through a prompt or none.
            if all_found && !self.forward.model().is_shared() {
                break;
            }
        }
        let values = || scales.iter().flatten().map(|scale| scale.value());
        let (least, most) = (values().fold(f32::INFINITY, f32::min), values().fold(0.0, f32::max));
        tracing::info!(least, most, "scales of the KV cache are measured");
        self.forward.set_kv_scales(&scales).map_err(|error| self.failed_alone(&error))
    }

    fn failed_alone(&self, error: &KernelError) -> ExecError {
        self.failed(&decode_shape(1, &self.limits), error)
    }

    /// Real steps over the first KV block, so that the first request finds kernels loaded and steps recorded. What
    /// they leave in the block is overwritten by whoever takes it.
    pub(super) fn warm_up(&mut self) -> Result<(), ExecError> {
        let limits = self.limits;
        let decodes = buckets(limits.max_num_seqs).map(|n| decode_shape(n, &limits));
        let prompts = prompt_buckets(limits.max_rows).map(|n| prompt_shape(n, &limits));
        for shape in decodes.chain(prompts) {
            self.record(shape).map_err(|error| self.failed(&shape, &error))?;
        }
        let prepared = self.forward.prepare();
        prepared.map_err(|error| self.failed(&decode_shape(limits.max_rows, &limits), &error))?;
        self.probe(&[0; 8], 0, Probe::NoRow)?;
        self.probe(&[0], 0, Probe::EveryRow)?;
        self.forward.device().synchronize().map_err(|error| self.failed(&decode_shape(1, &self.limits), &error))
    }

    /// Logits after each of `tokens`, one row a token, computed `chunk_len` tokens at a time (no more than sequences may
    /// run) on the path requests take. Uses the first KV blocks: only for an executor that serves nobody.
    pub(super) fn teacher_forced_logits(
        &mut self,
        tokens: &[TokenId],
        chunk_len: usize,
    ) -> Result<Vec<Vec<f32>>, ExecError> {
        assert!(chunk_len <= self.max_sampled, "there is room for the logits of {} rows", self.max_sampled);
        let chunks = tokens.chunks(chunk_len).enumerate();
        let rows: Result<Vec<_>, _> = chunks.map(|(idx, chunk)| self.logits_of(chunk, idx * chunk_len)).collect();
        Ok(rows?.concat())
    }

    fn logits_of(&mut self, tokens: &[TokenId], start: usize) -> Result<Vec<Vec<f32>>, ExecError> {
        let rows = 0..tokens.len();
        self.probe(tokens, start, Probe::EveryRow)?;
        let gathered = self.forward.gather_logits(tokens.len());
        let rows = gathered.and_then(|()| rows.map(|row| self.forward.logits(row)).collect::<Result<Vec<_>, _>>());
        rows.map_err(|error| self.failed(&decode_shape(tokens.len(), &self.limits), &error))
    }

    /// Computes tokens of nobody in the first KV blocks.
    fn probe(&mut self, tokens: &[TokenId], start: usize, samples: Probe) -> Result<(), ExecError> {
        let blocks: Vec<BlockId> = (0..blocks_for(start + tokens.len()) as u32).map(BlockId).collect();
        let input = ChunkInput::Known(tokens);
        let id = RequestId(u64::MAX);
        let chunk = StepChunk { id, input, start, blocks: &blocks, sample: None, is_prefill: true };
        let mut batch = Batch::new(&Step::of(vec![chunk]), self.limits);
        if samples == Probe::EveryRow {
            batch.sample_every_row();
        }
        let shape = batch.shape();
        self.compute(&batch, &shape).map_err(|error| self.failed(&shape, &error))
    }

    /// Uploads and launches one step; its draw without filters included.
    fn compute(&mut self, batch: &Batch<'_>, shape: &StepShape) -> Result<(), KernelError> {
        let layout = StepLayout::new(shape);
        self.inputs.upload(layout.whole, batch.used_table(&layout), |filling| batch.fill(&layout, filling))?;
        let near_end = &self.near_ends[self.n_launched % MAX_STEPS_IN_FLIGHT];
        let Self { forward, inputs, graphs, limits, .. } = self;
        // Behind the upload: the device computes nothing while it copies.
        self.spans[self.n_launched % N_SPANS].begin(forward.device())?;
        let step = StepInputs { shape, layout: &layout, packed: inputs, policy: limits.policy };
        match graphs.get_mut(shape) {
            Some(Recorded::Whole(graph)) => graph.launch(),
            Some(Recorded::InTwo { most, rest }) => {
                most.launch()?;
                near_end.set(forward.device())?;
                rest.launch()
            }
            None => {
                forward.launch_part(step, Part::Most)?;
                near_end.set(forward.device())?;
                forward.launch_part(step, Part::Rest)
            }
        }
    }

    /// Records the steps of one shape. Launched once before, so that all code is loaded. Nobody is served yet.
    fn record(&mut self, shape: StepShape) -> Result<(), KernelError> {
        let layout = StepLayout::new(&shape);
        self.upload_padding(&layout)?;
        let Self { forward, inputs, limits, .. } = self;
        let step = StepInputs { shape: &shape, layout: &layout, packed: inputs, policy: limits.policy };
        let device = forward.device().clone();
        forward.launch(step)?;
        let recorded = match shape.sampled {
            SampledRows::Every => Recorded::Whole(device.capture(|| forward.launch(step))?),
            SampledRows::Listed => Recorded::InTwo {
                most: device.capture(|| forward.launch_part(step, Part::Most))?,
                rest: device.capture(|| forward.launch_part(step, Part::Rest))?,
            },
        };
        self.graphs.insert(shape, recorded);
        Ok(())
    }

    /// Inputs of nobody: all rows are padding.
    fn upload_padding(&mut self, layout: &StepLayout) -> Result<(), KernelError> {
        let nobody = Batch::new(&Step::default(), self.limits);
        self.inputs.upload(layout.whole, nobody.used_table(layout), |filling| nobody.fill(layout, filling))
    }

    /// The same of a step of which rows are read, one by one; waits for these.
    fn compute_and_read(
        &mut self,
        batch: &Batch<'_>,
        shape: &StepShape,
        wanted: &[RowsSpec],
    ) -> Result<Vec<RowsRead>, KernelError> {
        let layout = StepLayout::new(shape);
        self.inputs.upload(layout.whole, batch.used_table(&layout), |filling| batch.fill(&layout, filling))?;
        let Self { forward, inputs, limits, .. } = self;
        self.spans[self.n_launched % N_SPANS].begin(forward.device())?;
        let step = StepInputs { shape, layout: &layout, packed: inputs, policy: limits.policy };
        let reads = RowReads::new(wanted, |chunk_idx| batch.first_row(chunk_idx));
        let read = forward.launch_and_read(step, &reads)?;
        self.near_ends[self.n_launched % MAX_STEPS_IN_FLIGHT].set(forward.device())?;
        Ok(read.shared_out(wanted, forward.model().hidden))
    }

    fn launch_step(&mut self, batch: &Batch<'_>, shape: &StepShape, wanted: &[RowsSpec]) -> Result<(), KernelError> {
        let number = self.n_launched;
        let read = match wanted.is_empty() {
            true => self.compute(batch, shape).map(|()| Vec::new())?,
            false => self.compute_and_read(batch, shape, wanted)?,
        };
        let draws = batch.draws().clone();
        let forward = &mut self.forward;
        self.newcomers.bring(batch.specs(), |packed, layout| forward.enter_slots(packed, layout))?;
        if draws.has_free_options {
            let layout = StepLayout::new(shape);
            let step = StepInputs { shape, layout: &layout, packed: &self.inputs, policy: self.limits.policy };
            forward.draw_options(step, Turn::Free, draws.selection)?;
        }
        if draws.n_masked == 0 {
            self.request_results(number, &draws)?;
        }
        let predecessor = if self.in_flight.is_empty() { Predecessor::Over } else { Predecessor::UnderWay };
        self.n_launched += 1;
        self.in_flight.push_back(InFlight { number, predecessor, shape: *shape, draws, read });
        Ok(())
    }

    /// Behind the last launch of a step. Also of one without draws: it is over when it has run, not before.
    fn request_results(&mut self, number: usize, draws: &Draws) -> Result<(), KernelError> {
        self.spans[number % N_SPANS].end(self.forward.device())?;
        let words = self.forward.results(draws.n_result_words(self.max_sampled));
        self.readbacks[number % MAX_STEPS_IN_FLIGHT].request(&words)
    }

    /// Draws those rows of the newest step that waited for their masks.
    fn draw_masked(&mut self, masks: Masks<'_>) -> Result<(), KernelError> {
        let Self { forward, inputs, masks: mask_inputs, limits, in_flight, .. } = self;
        let newest = in_flight.back().expect("a step was launched");
        let (number, draws) = (newest.number, newest.draws.clone());
        assert_eq!(masks.iter().len(), draws.n_masked, "one mask for each constrained entry");
        let masks = mask_inputs.bring(masks)?;
        let layout = StepLayout::new(&newest.shape);
        let step = StepInputs { shape: &newest.shape, layout: &layout, packed: inputs, policy: limits.policy };
        forward.draw_options(step, Turn::Masked(masks), draws.selection)?;
        self.request_results(number, &draws)
    }

    /// Waits for a step's results; then the device's clock knows when it began.
    fn output_of(&mut self, step: &InFlight) -> Result<StepOutput, KernelError> {
        let words = self.readbacks[step.number % MAX_STEPS_IN_FLIGHT].wait()?;
        let sampled = step.draws.outcomes(words, self.max_sampled);
        if step.predecessor == Predecessor::UnderWay {
            let span = |number: usize| &self.spans[number % N_SPANS];
            self.idle_seconds = Some(span(step.number).seconds_after(span(step.number - 1))?);
        }
        Ok(StepOutput { sampled })
    }

    fn failed(&self, shape: &StepShape, error: &KernelError) -> ExecError {
        let StepShape { n_rows, n_decode, n_sequences, .. } = shape;
        let step = format!("step of {n_rows} rows ({n_decode} decode) of {n_sequences} sequences");
        // A fault of one shows at whoever waits for it, too.
        let shared = match self.forward.model().rank.of {
            1 => String::new(),
            of => format!("one of {of} GPUs that share the model, which fail together: "),
        };
        ExecError(format!("{shared}{} stream 0: {step}: {error}", self.device))
    }
}

impl CudaRank {
    /// What it computes on.
    pub(super) fn device(&self) -> &Device {
        self.forward.device()
    }

    /// Waits until all that was launched has run.
    pub(super) fn synchronize(&self) -> Result<(), KernelError> {
        self.device().synchronize()
    }

    /// As [`Executor`](crate::exec::Executor) does, for one of the ranks that all do.
    pub(super) fn launch(&mut self, batch: &Batch<'_>, shape: &StepShape) -> Result<(), ExecError> {
        assert!(self.in_flight.len() < MAX_STEPS_IN_FLIGHT, "a step is finished before a third one is launched");
        self.launch_step(batch, shape, &[]).map_err(|error| self.failed(shape, &error))
    }

    /// The same of a step of which rows are read, all of which attend.
    pub(super) fn launch_and_read(&mut self, batch: &Batch<'_>, wanted: &[RowsSpec]) -> Result<(), ExecError> {
        let shape = batch.own_shape();
        self.launch_step(batch, &shape, wanted).map_err(|error| self.failed(&shape, &error))
    }

    /// Whether rows can be read.
    pub(super) fn reads_rows(&self) -> bool {
        self.forward.reads_rows()
    }

    pub(super) fn constrain(&mut self, masks: Masks<'_>) -> Result<(), ExecError> {
        let shape = self.in_flight.back().expect("a step was launched").shape;
        self.draw_masked(masks).map_err(|error| self.failed(&shape, &error))
    }

    pub(super) fn nears_end(&mut self) -> Result<bool, ExecError> {
        let step = self.in_flight.front().expect("asked for a step in flight");
        let can_tell = step.shape.sampled == SampledRows::Listed;
        if can_tell {
            let near_end = &self.near_ends[step.number % MAX_STEPS_IN_FLIGHT];
            near_end.wait().map_err(|error| self.failed(&step.shape, &error))?;
        }
        Ok(can_tell)
    }

    /// The same for a rank whose results are not read: those of the first one are the same.
    pub(super) fn pass_over(&mut self) {
        self.in_flight.pop_front().expect("it launched what the first one did");
    }

    /// What the oldest step drew, and what rows of it hold that were read.
    pub(super) fn finish(&mut self) -> Result<(StepOutput, Vec<RowsRead>), ExecError> {
        let step = self.in_flight.pop_front().expect("finish is called once for each launch");
        self.idle_seconds = None;
        let output = self.output_of(&step).map_err(|error| self.failed(&step.shape, &error))?;
        Ok((output, step.read))
    }

    pub(super) fn idle_seconds(&self) -> Option<f64> {
        self.idle_seconds
    }
}
