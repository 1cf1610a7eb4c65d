//! What lies between the stages of a pipeline, if there are several: rows that each hands over to the next, and tokens on their way back
//! to the first.

use stoker_kernels::{KernelError, handover::Handover, mark::Mark};

use super::executor::CudaRank;
use crate::{exec::micro_batches::MicroBatches, sched::MAX_STEPS_IN_FLIGHT};

/// See the module.
#[derive(Debug)]
pub(super) struct Stages {
    pub(super) micro_batches: MicroBatches,
    /// Ranks of each.
    pub(super) n_ranks: usize,
    /// From each stage to the next, one a rank.
    pub(super) handovers: Vec<Vec<Handover>>,
    /// When the draws of parts have arrived at the first stage: of the last steps, each part's, one a rank.
    fed: [Vec<Vec<Mark>>; MAX_STEPS_IN_FLIGHT],
    pub(super) n_launched: usize,
    /// What the part launched last leaves for the first stage.
    pub(super) newest: Feeding,
}

/// The draws of a part on their way to the first stage.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Feeding {
    /// Steps launched before its own.
    pub(super) step: usize,
    pub(super) part: usize,
    pub(super) n_drawn: usize,
    pub(super) first_slot: usize,
}

impl Stages {
    /// Between ranks of as many stages, each of `n_ranks`, with room for `n_values` of rows.
    pub(super) fn of(ranks: &[CudaRank], n_ranks: usize, n_values: usize) -> Result<Self, KernelError> {
        let stages: Vec<&[CudaRank]> = ranks.chunks(n_ranks).collect();
        let n_stages = stages.len();
        let handover = |(from, to): (&CudaRank, &CudaRank)| Handover::new(from.device(), to.device(), n_values);
        let handovers = stages.windows(2).map(|pair| pair[0].iter().zip(pair[1]).map(handover).collect());
        let last = stages[n_stages - 1];
        let marks = || last.iter().map(|rank| Mark::new(rank.device())).collect::<Result<Vec<_>, _>>();
        let of_parts = || (0..n_stages).map(|_| marks()).collect::<Result<Vec<_>, _>>();
        Ok(Self {
            micro_batches: MicroBatches::new(n_stages, ranks[0].max_sampled()),
            n_ranks,
            handovers: handovers.collect::<Result<_, _>>()?,
            fed: [of_parts()?, of_parts()?],
            n_launched: 0,
            newest: Feeding::default(),
        })
    }

    /// Nothing lies between.
    pub(super) fn is_one(&self) -> bool {
        self.handovers.is_empty()
    }

    /// When the draws of a part of the step of that number have arrived, one a rank.
    pub(super) fn fed(&self, step: usize, part: usize) -> &[Mark] {
        &self.fed[step % MAX_STEPS_IN_FLIGHT][part]
    }
}
