//! The executor over the GPUs of a tensor-parallel group. Each rank has a thread, its share of the weights and of every head's cache,
//! and launches every step, which is put together once; they meet in kernels alone (`kernels/csrc/reduce.cuh`). Each draws all tokens
//! from the same bits, so none waits for another's token, and the first one's are read.

use stoker_kernels::Device;

use super::{
    batch::{Batch, BatchLimits},
    executor::CudaRank,
    layout::StepShape,
};
use crate::{
    constraint::Masks,
    exec::{Abilities, ExecError, Executor, RowsRead, RowsSpec},
    pool::Pool,
    request::TokenId,
    sched::{MAX_STEPS_IN_FLIGHT, Step, StepOutput},
};

/// A model on one GPU or on several.
#[derive(Debug)]
pub struct CudaExecutor {
    ranks: Vec<CudaRank>,
    /// One a rank, the caller's for the first.
    threads: Pool,
    limits: BatchLimits,
    /// Rows that are read of the step that is launched next.
    wanted: Vec<RowsSpec>,
    /// What rows of the step finished last hold.
    read: Vec<RowsRead>,
}

impl CudaExecutor {
    /// Over ranks that know where each other's memory is.
    pub(super) fn new(ranks: Vec<CudaRank>, threads: Pool, limits: BatchLimits) -> Self {
        Self { ranks, threads, limits, wanted: Vec::new(), read: Vec::new() }
    }

    /// Real steps over the first KV block, so that the first request finds kernels loaded and steps recorded.
    pub(super) fn warm_up(&mut self) -> Result<(), ExecError> {
        self.on_each(CudaRank::warm_up)
    }

    /// Sets the cache's scales, of layers' keys and values as the checkpoint says, else as real prompts say.
    pub(super) fn find_kv_scales(&mut self, published: &[Option<[f32; 2]>]) -> Result<(), ExecError> {
        self.on_each(|rank| rank.find_kv_scales(published))
    }

    /// Logits after each of `tokens`, one row a token, computed `chunk_len` tokens at a time (no more than sequences may
    /// run) on the path requests take. Uses the first KV blocks: only for an executor that serves nobody.
    pub fn teacher_forced_logits(&mut self, tokens: &[TokenId], chunk_len: usize) -> Result<Vec<Vec<f32>>, ExecError> {
        self.of_each(|rank| rank.teacher_forced_logits(tokens, chunk_len)).map(first)
    }

    /// What `measure` finds on the first rank, of what all of them do. It may not launch more on one than on another.
    pub fn measure<T: Send>(
        &mut self,
        measure: impl Fn(&mut CudaRank) -> Result<T, ExecError> + Sync,
    ) -> Result<T, ExecError> {
        self.of_each(measure).map(first)
    }

    /// The only rank, or the first.
    pub fn first(&mut self) -> &mut CudaRank {
        &mut self.ranks[0]
    }

    fn on_each(&mut self, act: impl Fn(&mut CudaRank) -> Result<(), ExecError> + Sync) -> Result<(), ExecError> {
        self.of_each(act).map(drop)
    }

    fn of_each<T: Send>(
        &mut self,
        act: impl Fn(&mut CudaRank) -> Result<T, ExecError> + Sync,
    ) -> Result<Vec<T>, ExecError> {
        on_threads(&mut self.threads, &mut self.ranks, act)
    }

    fn launch_batch(&mut self, batch: &Batch<'_>, shape: &StepShape) -> Result<(), ExecError> {
        self.on_each(|rank| rank.launch(batch, shape))
    }

    fn launch_and_read(&mut self, batch: &mut Batch<'_>, wanted: &[RowsSpec]) -> Result<(), ExecError> {
        let [rank] = &mut self.ranks[..] else { unreachable!("{wanted:?} was refused") };
        batch.attend_everywhere();
        rank.launch_and_read(batch, wanted)
    }
}

/// `act` for every item, each on a thread of its own; the first problem of those that had one.
pub(super) fn on_threads<A: Send, T: Send, E: Send>(
    threads: &mut Pool,
    items: &mut [A],
    act: impl Fn(&mut A) -> Result<T, E> + Sync,
) -> Result<Vec<T>, E> {
    let mut acts: Vec<(&mut A, Option<Result<T, E>>)> = items.iter_mut().map(|item| (item, None)).collect();
    threads.for_each(&mut acts, |_, (item, result)| *result = Some(act(item)));
    acts.into_iter().map(|(_, result)| result.expect("every task runs")).collect()
}

fn first<T>(of_ranks: Vec<T>) -> T {
    of_ranks.into_iter().next().expect("there is a rank")
}

impl Drop for CudaExecutor {
    fn drop(&mut self) {
        // Nobody's memory goes while a kernel of another rank may read it. A failure means that none runs any more.
        for rank in &self.ranks {
            let _ = rank.synchronize();
        }
        // What is freed goes back to the driver when its stream is waited for next: the engine that starts next has it.
        let devices: Vec<Device> = self.ranks.drain(..).map(|rank| rank.device().clone()).collect();
        for device in devices {
            let _ = device.synchronize();
        }
    }
}

impl Executor for CudaExecutor {
    fn max_steps_in_flight(&self) -> usize {
        MAX_STEPS_IN_FLIGHT
    }

    fn n_devices(&self) -> u32 {
        self.ranks.len() as u32
    }

    fn abilities(&self) -> Abilities {
        let reads_prompts = self.ranks.len() == 1 && self.ranks[0].reads_rows();
        Abilities { reads_prompts, names_logprobs: false }
    }

    fn read(&mut self, wanted: Vec<RowsSpec>) {
        self.wanted = wanted;
    }

    fn take_read(&mut self) -> Vec<RowsRead> {
        std::mem::take(&mut self.read)
    }

    fn launch(&mut self, step: &Step<'_>) -> Result<(), ExecError> {
        let mut batch = Batch::new(step, self.limits);
        let wanted = std::mem::take(&mut self.wanted);
        if !wanted.is_empty() {
            return self.launch_and_read(&mut batch, &wanted);
        }
        let shape = batch.shape();
        self.launch_batch(&batch, &shape)
    }

    fn constrain(&mut self, masks: Masks<'_>) -> Result<(), ExecError> {
        self.on_each(|rank| rank.constrain(masks))
    }

    fn nears_end(&mut self) -> Result<bool, ExecError> {
        self.ranks[0].nears_end()
    }

    fn finish(&mut self) -> Result<StepOutput, ExecError> {
        self.ranks[1..].iter_mut().for_each(CudaRank::pass_over);
        let (output, read) = self.ranks[0].finish()?;
        self.read = read;
        Ok(output)
    }

    fn idle_seconds(&self) -> Option<f64> {
        self.ranks[0].idle_seconds()
    }
}
