//! The executor over the GPUs of a model. Those of a tensor-parallel group each have a thread, their share of the weights and of every
//! head's cache, and launch every step, which is put together once; they meet in kernels alone (`kernels/csrc/reduce.cuh`). Each draws all
//! tokens from the same bits, so none waits for another's token, and the first one's are read.
//!
//! Stages of a pipeline are such groups one behind the other, each with some of the layers. They get a step in parts, one part after the
//! other, and hand rows over by copies that their streams wait for; what the last one draws is copied to the first one, which it feeds.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use stoker_kernels::Device;

use super::{
    batch::{Batch, BatchLimits},
    executor::CudaRank,
    kv_scales::{self, Found, Scale},
    layout::StepShape,
    stages::{Feeding, Stages},
};
use crate::{
    constraint::Masks,
    exec::{
        Abilities, ExecError, Executor, RowsRead, RowsSpec,
        micro_batches::{Cut, MicroBatch},
    },
    kv::{BlockId, blocks_for},
    pool::Pool,
    request::{RequestId, TokenId},
    sched::{ChunkInput, MAX_STEPS_IN_FLIGHT, Sampled, Step, StepChunk, StepOutput},
};

/// A stage that has not answered for so long is taken for one that has stopped. The longest part seen, 4,096 rows of Llama-3.1-8B on an H200,
/// takes 0.05 s a stage; slow GPUs with long contexts have room for parts a hundred times as long.
const LATE: Duration = Duration::from_secs(8);
/// How often the stages before the last one are looked at while that one is waited for.
const LOOKS: Duration = Duration::from_millis(1);

/// A model on one GPU or on several.
#[derive(Debug)]
pub struct CudaExecutor {
    /// Those of each stage one behind the other.
    ranks: Vec<CudaRank>,
    stages: Stages,
    /// One a rank, the caller's for the first.
    threads: Pool,
    limits: BatchLimits,
    /// Rows that are read of the step that is launched next.
    wanted: Vec<RowsSpec>,
    /// What rows of the step finished last hold.
    read: Vec<RowsRead>,
    /// Of each step in flight the draws of its parts.
    in_flight: VecDeque<Vec<Vec<usize>>>,
    idle_seconds: Option<f64>,
}

/// Which logits of a probe are wanted.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Probe {
    NoRow,
    EveryRow,
}

impl CudaExecutor {
    /// Over ranks that know where each other's memory is.
    pub(super) fn new(ranks: Vec<CudaRank>, stages: Stages, threads: Pool, limits: BatchLimits) -> Self {
        Self {
            ranks,
            stages,
            threads,
            limits,
            wanted: Vec::new(),
            read: Vec::new(),
            in_flight: VecDeque::new(),
            idle_seconds: None,
        }
    }

    /// Real steps over the first KV block, so that the first request finds kernels loaded and steps recorded. What
    /// they leave in the block is overwritten by whoever takes it.
    pub(super) fn warm_up(&mut self) -> Result<(), ExecError> {
        self.on_each(CudaRank::prepare)?;
        self.probe(&[0; 8], 0, Probe::NoRow)?;
        self.probe(&[0], 0, Probe::EveryRow)?;
        self.on_each(|rank| rank.synchronize_or_fail())
    }

    /// Sets the cache's scales: of each rank's layers and heads as `published` has them, and where there are none as real prompts say. Those
    /// go through the first KV blocks; what they leave there is overwritten by whoever takes them.
    pub(super) fn find_kv_scales(&mut self, published: &[Vec<Option<[f32; 2]>>]) -> Result<(), ExecError> {
        let of_rank = |(rank, published): (&CudaRank, &Vec<_>)| rank.first_scales(published);
        let mut scales: Vec<Vec<Vec<Scale>>> = self.ranks.iter().zip(published).map(of_rank).collect();
        let all_are_published = published.iter().flatten().all(Option::is_some);
        let rounds = if all_are_published { 0 } else { kv_scales::ROUNDS };
        // The same prompt whatever a step holds: in the batch-invariant mode scales are the same, too.
        let limits = self.limits;
        let tokens = kv_scales::prompt(kv_scales::TOKENS.min(limits.max_model_len), limits.vocab);
        for round in 0..rounds {
            self.set_kv_scales(&mut scales)?;
            for (idx, chunk) in tokens.chunks(limits.max_rows).enumerate() {
                self.probe(chunk, idx * limits.max_rows, Probe::NoRow)?;
            }
            let round = if round + 1 == rounds { kv_scales::Round::Last } else { kv_scales::Round::Early };
            let found = self.with_scales(&mut scales, |rank, scales| rank.scales_after(tokens.len(), scales, round))?;
            if found.iter().all(|found| *found == Found::Yes) {
                break;
            }
        }
        let values = || scales.iter().flatten().flatten().map(|scale| scale.value());
        let (least, most) = (values().fold(f32::INFINITY, f32::min), values().fold(0.0, f32::max));
        tracing::info!(least, most, all_are_published, "scales of the KV cache are known");
        self.set_kv_scales(&mut scales)
    }

    fn set_kv_scales(&mut self, scales: &mut [Vec<Vec<Scale>>]) -> Result<(), ExecError> {
        self.with_scales(scales, |rank, scales| rank.set_kv_scales(scales)).map(drop)
    }

    /// `act` on each rank, with its own.
    fn with_scales<T: Send>(
        &mut self,
        scales: &mut [Vec<Vec<Scale>>],
        act: impl Fn(&mut CudaRank, &mut Vec<Vec<Scale>>) -> Result<T, ExecError> + Sync,
    ) -> Result<Vec<T>, ExecError> {
        let mut each: Vec<_> = self.ranks.iter_mut().zip(scales).collect();
        on_threads(&mut self.threads, &mut each, |(rank, scales)| act(rank, scales))
    }

    /// Logits after each of `tokens`, one row a token, computed `chunk_len` tokens at a time (no more than sequences may
    /// run) on the path requests take. Uses the first KV blocks: only for an executor that serves nobody.
    pub fn teacher_forced_logits(&mut self, tokens: &[TokenId], chunk_len: usize) -> Result<Vec<Vec<f32>>, ExecError> {
        let room = self.ranks[0].max_sampled();
        assert!(chunk_len <= room, "there is room for the logits of {room} rows");
        let mut rows = Vec::with_capacity(tokens.len());
        for (idx, chunk) in tokens.chunks(chunk_len).enumerate() {
            self.probe(chunk, idx * chunk_len, Probe::EveryRow)?;
            let drawing = last_stage(&mut self.ranks, self.stages.n_ranks);
            let logits = on_threads(&mut self.threads, drawing, |rank| rank.drawn_logits(chunk.len()))?;
            rows.extend(first(logits));
        }
        Ok(rows)
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
        self.in_stages(&shape, |rank| rank.compute_alone(&batch, &shape))
    }

    /// `act` on the ranks of each stage behind those of the one before, which hand their rows over.
    fn in_stages(
        &mut self,
        shape: &StepShape,
        act: impl Fn(&mut CudaRank) -> Result<(), ExecError> + Sync,
    ) -> Result<(), ExecError> {
        let Self { ranks, threads, stages: Stages { n_ranks, handovers, .. }, .. } = self;
        for (idx, ranks) in ranks.chunks_mut(*n_ranks).enumerate() {
            if let Some(arriving) = idx.checked_sub(1).map(|before| &mut handovers[before]) {
                ranks.iter_mut().zip(arriving).try_for_each(|(rank, from)| rank.take_rows(shape, from))?;
            }
            on_threads(threads, ranks, &act)?;
            if let Some(leaving) = handovers.get_mut(idx) {
                ranks.iter_mut().zip(leaving).try_for_each(|(rank, to)| rank.send_rows(shape, to))?;
            }
        }
        Ok(())
    }

    /// Launches a part of the step of that number.
    fn launch_part(&mut self, step: usize, part: usize, of: &MicroBatch<'_>) -> Result<(), ExecError> {
        let batch = Batch::new(&of.step, self.limits);
        let shape = batch.shape();
        if let Some(fed_by) = of.fed_by {
            let marks = self.stages.fed(step - 1, fed_by);
            self.ranks.iter().zip(marks).try_for_each(|(rank, mark)| rank.wait_for(mark))?;
        }
        self.in_stages(&shape, |rank| rank.launch(&batch, &shape))?;
        self.stages.newest = Feeding { step, part, n_drawn: of.entries.len(), first_slot: of.first_slot };
        self.feed()
    }

    /// Brings what the newest part drew to the first stage.
    fn feed(&mut self) -> Result<(), ExecError> {
        if self.stages.is_one() {
            return Ok(());
        }
        let Feeding { step, part, n_drawn, first_slot } = self.stages.newest;
        let (first, rest) = self.ranks.split_at_mut(self.stages.n_ranks);
        let last = last_stage(rest, self.stages.n_ranks);
        let ways = last.iter().zip(first).zip(self.stages.fed(step, part));
        ways.into_iter().try_for_each(|((last, first), fed)| last.feed(first, (n_drawn, first_slot), fed))
    }

    fn launch_and_read(&mut self, batch: &mut Batch<'_>, wanted: &[RowsSpec]) -> Result<(), ExecError> {
        let [rank] = &mut self.ranks[..] else { unreachable!("{wanted:?} was refused") };
        batch.attend_everywhere();
        rank.launch_and_read(batch, wanted)
    }

    /// Waits for what the last stage drew of the oldest part. Its stream may wait for ever for a stage that has failed or stopped, so these
    /// are looked at.
    fn await_stages(&self) -> Result<(), ExecError> {
        let began = Instant::now();
        let mut looked = began;
        let last = &self.ranks[self.ranks.len() - self.stages.n_ranks];
        while !last.has_results()? {
            if looked.elapsed() >= LOOKS {
                looked = Instant::now();
                self.ranks.iter().try_for_each(CudaRank::check)?;
                if began.elapsed() >= LATE {
                    return Err(last.given_up(LATE.as_secs()));
                }
            }
            std::hint::spin_loop();
        }
        Ok(())
    }

    /// What the oldest part in flight drew, of the first rank that draws.
    fn finish_part(&mut self) -> Result<(StepOutput, Vec<RowsRead>), ExecError> {
        if !self.stages.is_one() {
            self.await_stages()?;
        }
        let drawing = last_stage(&mut self.ranks, self.stages.n_ranks);
        drawing[1..].iter_mut().for_each(CudaRank::pass_over);
        let finished = drawing[0].finish()?;
        self.idle_seconds = match (self.idle_seconds, drawing[0].idle_seconds()) {
            (Some(before), Some(seconds)) => Some(before + seconds),
            (before, seconds) => before.or(seconds),
        };
        Ok(finished)
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

/// The ranks that draw, of stages of so many.
fn last_stage(ranks: &mut [CudaRank], n_ranks: usize) -> &mut [CudaRank] {
    let begin = ranks.len() - n_ranks;
    &mut ranks[begin..]
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
        let wanted = std::mem::take(&mut self.wanted);
        let cut = if wanted.is_empty() { Cut::May } else { Cut::MayNot };
        let parts = self.stages.micro_batches.of(step, cut);
        let number = self.stages.n_launched;
        self.stages.n_launched += 1;
        match wanted.is_empty() {
            true => {
                let mut parts = parts.iter().enumerate();
                parts.try_for_each(|(idx, part)| self.launch_part(number, idx, part))?;
            }
            false => self.launch_and_read(&mut Batch::new(&parts[0].step, self.limits), &wanted)?,
        }
        self.in_flight.push_back(parts.into_iter().map(|part| part.entries).collect());
        Ok(())
    }

    fn constrain(&mut self, masks: Masks<'_>) -> Result<(), ExecError> {
        let drawing = last_stage(&mut self.ranks, self.stages.n_ranks);
        on_threads(&mut self.threads, drawing, |rank| rank.constrain(masks))?;
        self.feed()
    }

    fn nears_end(&mut self) -> Result<bool, ExecError> {
        if self.stages.is_one() { self.ranks[0].nears_end() } else { Ok(false) }
    }

    fn finish(&mut self) -> Result<StepOutput, ExecError> {
        let parts = self.in_flight.pop_front().expect("finish is called once for each launch");
        let mut sampled = vec![Sampled::NotANumber; parts.iter().map(Vec::len).sum()];
        self.idle_seconds = None;
        for entries in parts {
            let (output, read) = self.finish_part()?;
            self.read = read;
            entries.into_iter().zip(output.sampled).for_each(|(entry, token)| sampled[entry] = token);
        }
        Ok(StepOutput { sampled })
    }

    fn idle_seconds(&self) -> Option<f64> {
        self.idle_seconds
    }
}
