//! What each operation of a step takes, and whether they end alike one by one and recorded. Only for an executor that serves nobody:
//! sequences lie in the first KV blocks, one behind the other.

use stoker_kernels::{KernelError, graph::Graph, timing};

use super::{
    super::{
        batch::{Batch, decode_shape},
        layout::{Sampled, StepLayout},
        listing::{Ceilings, Line, groups, line},
        program::Op,
    },
    CudaRank, Recorded, StepInputs,
};
use crate::{
    exec::ExecError,
    kv::{BlockId, blocks_for},
    request::RequestId,
    sched::{ChunkInput, Step, StepChunk},
};

const ROUNDS: usize = 15;

/// A step's program with what it took.
#[derive(Clone, Debug)]
pub struct MeasuredProgram {
    /// Its operations, those of all layers behind each other.
    pub lines: Vec<Line>,
    /// Microseconds of the whole step, recorded as it is served.
    pub step_us: f64,
}

/// Sequences that decode.
#[derive(Clone, Copy, Debug)]
pub struct Decodes {
    /// How many; a recorded row count.
    pub n: usize,
    /// Tokens of each, the new one included.
    pub context: usize,
}

impl CudaRank {
    /// The program of a step, measured.
    pub fn measure_program(&mut self, decodes: Decodes, ceilings: Ceilings) -> Result<MeasuredProgram, ExecError> {
        let measured = self.measured(decodes, ceilings);
        measured.map_err(|error| self.failed(&decode_shape(decodes.n, &self.limits), &error))
    }

    /// Of `n_replays` of the recorded step how many end in logits that are not, to the last bit, those of its operations launched one by
    /// one, each when the one before has ended: kernels that start before that may not see anything half-written.
    pub fn replays_that_differ(&mut self, decodes: Decodes, n_replays: usize) -> Result<usize, ExecError> {
        let found = self.differing(decodes, n_replays);
        found.map_err(|error| self.failed(&decode_shape(decodes.n, &self.limits), &error))
    }

    fn measured(&mut self, decodes: Decodes, ceilings: Ceilings) -> Result<MeasuredProgram, KernelError> {
        let groups = groups(self.forward.programs(), decodes.n);
        let line = |ops: &Vec<Op>| line(self.forward.model(), ops, decodes.n, ceilings);
        let mut lines: Vec<Line> = groups.iter().map(line).collect();
        for (line, ops) in lines.iter_mut().zip(&groups) {
            let mut graph = self.record_ops(decodes, ops)?;
            let us = timing::in_turns(self.forward.device(), &mut [&mut graph], ROUNDS)?;
            line.measured_us = Some(us[0] / ops.len() as f64);
        }
        let mut step = self.record_ops(decodes, &self.ops(decodes.n))?;
        let us = timing::in_turns(self.forward.device(), &mut [&mut step], ROUNDS)?;
        Ok(MeasuredProgram { lines, step_us: us[0] })
    }

    fn differing(&mut self, decodes: Decodes, n_replays: usize) -> Result<usize, KernelError> {
        let layout = self.upload_decodes(decodes)?;
        let shape = decode_shape(decodes.n, &self.limits);
        for op in self.ops(decodes.n) {
            let Self { forward, inputs, limits, .. } = self;
            forward.run(
                StepInputs { shape: &shape, layout: &layout, packed: inputs, policy: limits.policy },
                &[op],
                decodes.n,
            )?;
            forward.device().synchronize()?;
        }
        let wanted = self.logit_bits(decodes.n)?;
        let mut n_differ = 0;
        for _ in 0..n_replays {
            let Some(Recorded::Whole(graph)) = self.graphs.get_mut(&shape) else {
                panic!("{} rows are not recorded", decodes.n)
            };
            graph.launch()?;
            n_differ += usize::from(self.logit_bits(decodes.n)? != wanted);
        }
        Ok(n_differ)
    }

    fn logit_bits(&mut self, n: usize) -> Result<Vec<u32>, KernelError> {
        self.forward.gather_logits(n)?;
        let rows = (0..n).map(|row| self.forward.logits(row)).collect::<Result<Vec<_>, _>>()?;
        Ok(rows.into_iter().flatten().map(f32::to_bits).collect())
    }

    /// A step's operations in their order.
    fn ops(&self, n: usize) -> Vec<Op> {
        let programs = self.forward.programs();
        programs.body(n).ops.iter().chain(programs.tail(n, Sampled::Every).iter()).copied().collect()
    }

    pub(super) fn record_ops(&mut self, decodes: Decodes, ops: &[Op]) -> Result<Graph, KernelError> {
        let layout = self.upload_decodes(decodes)?;
        let shape = decode_shape(decodes.n, &self.limits);
        let Self { forward, inputs, limits, .. } = self;
        let step = StepInputs { shape: &shape, layout: &layout, packed: inputs, policy: limits.policy };
        let device = forward.device().clone();
        forward.run(step, ops, decodes.n)?;
        device.capture(|| forward.run(step, ops, decodes.n))
    }

    /// The inputs of a step.
    fn upload_decodes(&mut self, Decodes { n, context }: Decodes) -> Result<StepLayout, KernelError> {
        let n_blocks = blocks_for(context);
        let blocks: Vec<BlockId> = (0..(n * n_blocks) as u32).map(BlockId).collect();
        let tokens: Vec<u32> = (1..=n as u32).collect();
        let chunk = |(row, blocks)| StepChunk {
            id: RequestId(u64::MAX),
            input: ChunkInput::Known(&tokens[row..=row]),
            start: context - 1,
            blocks,
            sample: None,
            is_prefill: false,
        };
        let chunks = blocks.chunks(n_blocks).enumerate().map(chunk).collect();
        let mut batch = Batch::new(&Step::of(chunks), self.limits);
        batch.sample_every_row();
        let layout = StepLayout::new(&decode_shape(n, &self.limits));
        self.inputs.upload(layout.whole, batch.used_table(&layout), |filling| batch.fill(&layout, filling))?;
        Ok(layout)
    }
}
