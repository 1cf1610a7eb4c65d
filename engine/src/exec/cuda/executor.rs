//! One GPU's part in a step: one upload, one graph or one eager forward pass, one copy of tokens back. Two steps may be in flight; a
//! step's tokens reach the next one on the device.

mod autotune;
mod measure;

use std::collections::{HashMap, VecDeque};

use stoker_fit::gpu::Capacity;
use stoker_kernels::{
    Device, KernelError, graph::Graph, handover::Handover, mark::Mark, packed::Packed, readback::Readback,
    sampling::Turn, span::Span,
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
    kv::blocks_for,
    sched::{MAX_STEPS_IN_FLIGHT, Step, StepOutput},
};

/// A model, or a rank's share of one or of a stage of it, on a GPU.
#[derive(Debug)]
pub struct CudaRank {
    forward: Forward,
    inputs: Packed,
    newcomers: Newcomers,
    masks: MaskInputs,
    /// Steps recorded at start.
    graphs: HashMap<StepShape, Recorded>,
    /// Where steps that may draw first tokens are about to end, by the number of the step.
    near_ends: Vec<Mark>,
    /// As many as steps, or parts of steps, may be in flight.
    readbacks: Vec<Readback<u32>>,
    /// When steps computed, by their number: those in flight, and the one before them.
    spans: Vec<Span>,
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
        // Each step has a part for each stage at most.
        let n_in_flight = MAX_STEPS_IN_FLIGHT * forward.model().stage.of;
        let readback = |_| Readback::new(gpu, capacity.result_words());
        Ok(Self {
            inputs: Packed::new(gpu, capacity.input_words, n_in_flight)?,
            newcomers: Newcomers::new(gpu, capacity.max_history)?,
            masks: MaskInputs::new(gpu, capacity.max_sampled, limits.vocab)?,
            readbacks: (0..n_in_flight).map(readback).collect::<Result<_, _>>()?,
            spans: (0..=n_in_flight).map(|_| Span::new(gpu)).collect::<Result<_, _>>()?,
            near_ends: (0..n_in_flight).map(|_| Mark::new(gpu)).collect::<Result<_, _>>()?,
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

    /// The scales of the cache to begin with, of each layer keys' heads and values' heads; `published` are those that the checkpoint has.
    pub(super) fn first_scales(&self, published: &[Option<[f32; 2]>]) -> Vec<Vec<Scale>> {
        let n_heads = self.forward.model().heads.n_kv;
        let of_layer = |known: &Option<[f32; 2]>| match known {
            Some([k, v]) => [vec![Scale::Published(*k); n_heads], vec![Scale::Published(*v); n_heads]].concat(),
            None => vec![Scale::Measured(1.0); 2 * n_heads],
        };
        published.iter().map(of_layer).collect()
    }

    /// Stores keys and values by these from now on.
    pub(super) fn set_kv_scales(&mut self, scales: &[Vec<Scale>]) -> Result<(), ExecError> {
        self.forward.set_kv_scales(scales).map_err(|error| self.failed_alone(&error))
    }

    /// Makes `scales` what they are after a prompt of `n_tokens` in the first KV blocks; whether all are found.
    pub(super) fn scales_after(
        &self,
        n_tokens: usize,
        scales: &mut [Vec<Scale>],
        round: kv_scales::Round,
    ) -> Result<Found, ExecError> {
        let largest = self.forward.largest_stored(blocks_for(n_tokens));
        let largest = largest.map_err(|error| self.failed_alone(&error))?;
        let mut all_found = Found::Yes;
        for (scale, largest) in scales.iter_mut().flatten().zip(largest.into_iter().flatten()) {
            let (next, found) = scale.after(largest);
            if found == Found::No {
                all_found = Found::No;
            }
            *scale = if round == kv_scales::Round::Last { next.or_one(found) } else { next };
        }
        Ok(all_found)
    }

    fn failed_alone(&self, error: &KernelError) -> ExecError {
        self.failed(&decode_shape(1, &self.limits), error)
    }

    /// Records steps, and loads the code of all others.
    pub(super) fn prepare(&mut self) -> Result<(), ExecError> {
        let limits = self.limits;
        let decodes = buckets(limits.max_num_seqs).map(|n| decode_shape(n, &limits));
        let prompts = prompt_buckets(limits.max_rows).map(|n| prompt_shape(n, &limits));
        for shape in decodes.chain(prompts) {
            self.record(shape).map_err(|error| self.failed(&shape, &error))?;
        }
        let prepared = self.forward.prepare();
        prepared.map_err(|error| self.failed(&decode_shape(limits.max_rows, &limits), &error))
    }

    /// Rows of logits that there is room for.
    pub(super) fn max_sampled(&self) -> usize {
        self.max_sampled
    }

    /// The logits of the first `n` drawn rows of what was computed last.
    pub(super) fn drawn_logits(&mut self, n: usize) -> Result<Vec<Vec<f32>>, ExecError> {
        let gathered = self.forward.gather_logits(n);
        let rows = gathered.and_then(|()| (0..n).map(|row| self.forward.logits(row)).collect::<Result<Vec<_>, _>>());
        rows.map_err(|error| self.failed(&decode_shape(n, &self.limits), &error))
    }

    /// Computes a step of nobody.
    pub(super) fn compute_alone(&mut self, batch: &Batch<'_>, shape: &StepShape) -> Result<(), ExecError> {
        self.compute(batch, shape).map_err(|error| self.failed(shape, &error))
    }

    /// Hands the rows of a step over to the next stage.
    pub(super) fn send_rows(&self, shape: &StepShape, to: &mut Handover) -> Result<(), ExecError> {
        self.forward.send_rows(shape.n_rows, to).map_err(|error| self.failed(shape, &error))
    }

    /// Takes them from the stage before.
    pub(super) fn take_rows(&mut self, shape: &StepShape, from: &mut Handover) -> Result<(), ExecError> {
        self.forward.take_rows(shape.n_rows, from).map_err(|error| self.failed(shape, &error))
    }

    /// Leaves what was drawn last where the first stage finds it, from `slot` on; `fed` marks when it is there.
    pub(super) fn feed(&self, first: &mut Self, (n, slot): (usize, usize), fed: &Mark) -> Result<(), ExecError> {
        let sent = self.forward.feed(&mut first.forward, n, slot).and_then(|()| fed.set(self.device()));
        sent.map_err(|error| self.failed_alone(&error))
    }

    /// What is launched from here on waits for `mark`.
    pub(super) fn wait_for(&self, mark: &Mark) -> Result<(), ExecError> {
        self.device().wait_for(mark).map_err(|error| self.failed_alone(&error))
    }

    /// A failure of anything launched so far, if it shows yet.
    pub(super) fn check(&self) -> Result<(), ExecError> {
        self.device().is_idle().map(drop).map_err(|error| self.failed_alone(&error))
    }

    /// Whether the results of the oldest step are there.
    pub(super) fn has_results(&self) -> Result<bool, ExecError> {
        let step = self.in_flight.front().expect("asked for a step in flight");
        self.readbacks[step.number % self.readbacks.len()].is_done().map_err(|error| self.failed(&step.shape, &error))
    }

    /// Why this rank is given up.
    pub(super) fn given_up(&self, seconds: u64) -> ExecError {
        ExecError(format!("{}: a stage of the pipeline has not answered for {seconds} s", self.device))
    }

    /// Uploads and launches one step; its draw without filters included.
    fn compute(&mut self, batch: &Batch<'_>, shape: &StepShape) -> Result<(), KernelError> {
        let layout = StepLayout::new(shape);
        self.inputs.upload(layout.whole, batch.used_table(&layout), |filling| batch.fill(&layout, filling))?;
        let near_end = &self.near_ends[self.n_launched % self.near_ends.len()];
        let Self { forward, inputs, graphs, limits, .. } = self;
        // Behind the upload: the device computes nothing while it copies.
        self.spans[self.n_launched % self.spans.len()].begin(forward.device())?;
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
        self.spans[self.n_launched % self.spans.len()].begin(forward.device())?;
        let step = StepInputs { shape, layout: &layout, packed: inputs, policy: limits.policy };
        let reads = RowReads::new(wanted, |chunk_idx| batch.first_row(chunk_idx));
        let read = forward.launch_and_read(step, &reads)?;
        self.near_ends[self.n_launched % self.near_ends.len()].set(forward.device())?;
        Ok(read.shared_out(wanted, forward.model().hidden))
    }

    fn launch_step(&mut self, batch: &Batch<'_>, shape: &StepShape, wanted: &[RowsSpec]) -> Result<(), KernelError> {
        let number = self.n_launched;
        let read = match wanted.is_empty() {
            true => self.compute(batch, shape).map(|()| Vec::new())?,
            false => self.compute_and_read(batch, shape, wanted)?,
        };
        if !self.forward.model().stage.is_last() {
            self.n_launched += 1;
            return Ok(());
        }
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
        self.spans[number % self.spans.len()].end(self.forward.device())?;
        let words = self.forward.results(draws.n_result_words(self.max_sampled));
        let n_readbacks = self.readbacks.len();
        self.readbacks[number % n_readbacks].request(&words)
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
        let words = self.readbacks[step.number % self.readbacks.len()].wait()?;
        let sampled = step.draws.outcomes(words, self.max_sampled);
        if step.predecessor == Predecessor::UnderWay {
            let span = |number: usize| &self.spans[number % self.spans.len()];
            self.idle_seconds = Some(span(step.number).seconds_after(span(step.number - 1))?);
        }
        Ok(StepOutput { sampled })
    }

    fn failed(&self, shape: &StepShape, error: &KernelError) -> ExecError {
        let StepShape { n_rows, n_decode, n_sequences, .. } = shape;
        let step = format!("step of {n_rows} rows ({n_decode} decode) of {n_sequences} sequences");
        // A fault of one shows at whoever waits for it, too.
        let shared = match self.forward.model().n_gpus() {
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

    /// The same, for who tells an engine.
    pub(super) fn synchronize_or_fail(&mut self) -> Result<(), ExecError> {
        self.synchronize().map_err(|error| self.failed_alone(&error))
    }

    /// Waits until all that was launched has run.
    pub(super) fn synchronize(&self) -> Result<(), KernelError> {
        self.device().synchronize()
    }

    /// As [`Executor`](crate::exec::Executor) does, for one of the ranks that all do.
    pub(super) fn launch(&mut self, batch: &Batch<'_>, shape: &StepShape) -> Result<(), ExecError> {
        assert!(self.in_flight.len() < self.readbacks.len(), "a step is finished before a third one is launched");
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
            let near_end = &self.near_ends[step.number % self.near_ends.len()];
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
