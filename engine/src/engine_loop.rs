//! The engine thread: drain the inbox, schedule, launch, finish, resolve, publish. It is the only owner of the
//! scheduler's state; everyone else sends commands.
//!
//! An executor that takes two steps in flight is always given the next one before the oldest is waited for:
//!
//! ```text
//! host    plan 2, launch 2 │ wait for 1, resolve 1 │ plan 3, launch 3 │ wait for 2 ...
//! device  [------- 1 -----------------]            [--------- 2 ----------------][---
//! ```

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        mpsc::{Receiver, SyncSender, TrySendError},
    },
    time::{Duration, Instant},
};

use crate::{
    exec::{ExecError, Executor},
    handle::Admission,
    matchers::{Awaited, Matchers, Violation},
    metrics::{Meters, StepReading, StepTimes},
    output::OutputMessage,
    prefix_news::PrefixTeller,
    request::{FinishReason, Request, RequestId},
    sched::{
        Chunk, MAX_STEPS_IN_FLIGHT, Pace, PacedStep, SchedLimits, SchedState, StepEffects, StepOutput, StepPlan,
        charge, jump, jump_over_draw, put_off, resolve, rows_wanted, schedule,
    },
    sequence::Sequence,
};

/// How long a step waits for masks in any case: what a slow one costs its neighbours at most.
const MASK_PATIENCE: Duration = Duration::from_micros(500);
/// Where the host computes, what a step waits for tokens that must come, as a part of what decoding is busy for: a sixteenth of a step
/// for nothing is little beside a whole one of those who jump ahead.
const AHEAD_PART: u32 = 12;

/// What the engine thread is told. The channel is unbounded because admission bounds it: a request sends one
/// `Submit` and at most two `End`.
#[derive(Debug)]
pub(crate) enum Command {
    /// A request that was admitted.
    Submit {
        /// Its name.
        id: RequestId,
        /// What is asked.
        request: Arc<Request>,
    },
    /// One request must leave at the next step.
    End {
        /// Whose.
        id: RequestId,
        /// Why.
        reason: FinishReason,
    },
    /// Every request must leave at the next step.
    EndAll(FinishReason),
    /// Stop for good.
    Shutdown,
}

/// The engine thread's own things.
pub(crate) struct EngineLoop {
    pub(crate) inbox: Receiver<Command>,
    pub(crate) output: SyncSender<OutputMessage>,
    pub(crate) executor: Box<dyn Executor>,
    pub(crate) state: SchedState,
    pub(crate) limits: SchedLimits,
    pub(crate) admission: Arc<Admission>,
    pub(crate) meters: Arc<Meters>,
    pub(crate) prefixes: PrefixTeller,
    /// Steps that were planned and not resolved, oldest first.
    pub(crate) in_flight: VecDeque<StepInFlight>,
    pub(crate) matchers: Matchers,
    /// What steps took.
    pub(crate) pace: Pace,
    /// When the last one was over.
    pub(crate) last_over: Instant,
}

/// A step that was planned and not resolved. One without chunks was not launched; it only has effects.
pub(crate) struct StepInFlight {
    plan: StepPlan,
    reading: StepReading,
    /// Its draws that wait for masks.
    awaited: Vec<Awaited>,
    /// Of whose prompts it reads rows.
    read: Vec<RequestId>,
}

/// Whether the loop goes on.
#[derive(Debug, PartialEq)]
enum Inbox {
    Open,
    Closed,
}

impl EngineLoop {
    /// Runs until told to stop, until nobody can tell it anything, or until the executor fails.
    pub(crate) fn run(mut self) {
        assert!((1..=MAX_STEPS_IN_FLIGHT).contains(&self.executor.max_steps_in_flight()), "one step, or two");
        let mut notice = StopNotice {
            reason: "the engine thread panicked".into(),
            output: self.output.clone(),
            meters: Arc::clone(&self.meters),
        };
        notice.reason = loop {
            if self.drain_inbox() == Inbox::Closed {
                break "the engine was shut down".into();
            }
            if let Err(error) = self.step() {
                break error.to_string();
            }
        };
    }

    /// Waits for a command only when there is nothing to compute.
    fn drain_inbox(&mut self) -> Inbox {
        if self.is_idle() {
            let first = self.inbox.recv().map_or(Inbox::Closed, |command| self.obey(command));
            if first == Inbox::Closed {
                return Inbox::Closed;
            }
        }
        while let Ok(command) = self.inbox.try_recv() {
            if self.obey(command) == Inbox::Closed {
                return Inbox::Closed;
            }
        }
        self.meters.queues(&self.state);
        Inbox::Open
    }

    fn is_idle(&self) -> bool {
        self.state.is_idle() && self.in_flight.is_empty()
    }

    fn obey(&mut self, command: Command) -> Inbox {
        match command {
            Command::Submit { id, request } => {
                self.matchers.open(id, &request);
                self.state.submit(id, request);
            }
            Command::End { id, reason } => self.state.end(id, reason),
            Command::EndAll(reason) => self.state.end_all(&reason),
            Command::Shutdown => return Inbox::Closed,
        }
        Inbox::Open
    }

    /// Launches one step more if there is something to compute, and takes the oldest in when the executor takes no more.
    fn step(&mut self) -> Result<(), ExecError> {
        self.wait_for_tokens_ahead();
        self.note_masks();
        let has_launched = !self.state.is_idle() && self.launch()?;
        if !has_launched {
            self.wait_for_masks();
        }
        self.constrain_oldest()?;
        if has_launched && self.in_flight.len() < self.executor.max_steps_in_flight() {
            return Ok(());
        }
        let Some(oldest) = self.in_flight.pop_front() else { return Ok(()) };
        self.take_in(oldest)?;
        self.constrain_oldest()
    }

    /// Where the host computes, tokens that are not known before the step have to wait for the next one.
    fn wait_for_tokens_ahead(&mut self) {
        if self.executor.max_steps_in_flight() > 1 || self.matchers.is_empty() {
            return;
        }
        let draws = |sequence: &&Sequence| sequence.in_flight == 0 && !sequence.awaits_mask;
        let ids: Vec<RequestId> = self.state.running.iter().filter(draws).map(|sequence| sequence.id).collect();
        self.matchers.late(&ids, Instant::now() + MASK_PATIENCE.min(self.pace.busy_at_least() / AHEAD_PART));
    }

    /// Who cannot go on ends, draws that were put off and whose masks have come since are planned again, and who has no draw in
    /// flight takes what must come next.
    fn note_masks(&mut self) {
        self.matchers.take_returns();
        self.end_violators(self.matchers.violations());
        let Self { state, matchers, limits, meters, .. } = self;
        if state.awaits_masks() {
            state.note_masks(|id| !matchers.is_away(id));
        }
        for id in matchers.with_tokens_ahead() {
            let n_tokens = jump(state, id, &matchers.ahead(id), limits);
            matchers.take_ahead(id, n_tokens);
            meters.jumped(n_tokens);
        }
    }

    /// When nothing can be computed before a mask comes.
    fn wait_for_masks(&mut self) {
        let computes = |step: &StepInFlight| !step.plan.chunks.is_empty();
        if !self.in_flight.iter().any(computes) && self.state.awaits_masks() {
            self.matchers.wait(MASK_PATIENCE);
        }
    }

    /// Gives the oldest step in flight the masks that it waits for: all tokens before its own are known now. Draws whose
    /// masks are late are put off, and those that are no choice are given up for what must come.
    fn constrain_oldest(&mut self) -> Result<(), ExecError> {
        let Some(oldest) = self.in_flight.front_mut().filter(|oldest| !oldest.awaited.is_empty()) else {
            return Ok(());
        };
        let awaited = std::mem::take(&mut oldest.awaited);
        // While its forward pass is computed, waiting costs nobody anything.
        let begun_at = oldest.reading.launched_at.max(self.last_over);
        let deadline = (begun_at + self.pace.busy_at_least()).max(Instant::now() + MASK_PATIENCE);
        let ids: Vec<RequestId> = awaited.iter().map(|awaited| awaited.id).collect();
        for late in self.matchers.late(&ids, deadline) {
            if !put_off(&mut self.state, &mut oldest.plan, late) {
                self.matchers.wait_for(late);
            }
        }
        for Awaited { id, .. } in &awaited {
            let ahead = self.matchers.ahead(*id);
            let n_tokens = jump_over_draw(&mut self.state, &mut oldest.plan, *id, &ahead, &self.limits);
            self.matchers.take_ahead(*id, n_tokens);
            self.meters.jumped(n_tokens);
        }
        let (masks, mut violations) = self.matchers.masks(&awaited, &self.limits);
        // Behind what it took there may be nothing to draw; but that is told first.
        violations.retain(|violation| oldest.plan.draws(violation.id));
        self.executor.constrain(masks)?;
        self.end_violators(violations);
        Ok(())
    }

    fn end_violators(&mut self, violations: Vec<Violation>) {
        for Violation { id, reason } in violations {
            self.matchers.close(id);
            self.state.end(id, reason);
        }
    }

    /// Plans a step and begins it; `false` if it computes nothing.
    fn launch(&mut self) -> Result<bool, ExecError> {
        let began = Instant::now();
        self.state.expire(began);
        let plan = schedule(&mut self.state, &self.limits);
        let planned_at = Instant::now();
        let computes = !plan.chunks.is_empty();
        let read = self.ask_for_rows(&plan);
        if computes {
            self.executor.launch(&plan.step(&self.state, &self.limits))?;
        }
        let times = StepTimes {
            n_tokens: plan.chunks.iter().map(|chunk| chunk.n_tokens).sum(),
            n_prefill_tokens: plan.n_prefill_tokens(),
            schedule_seconds: (planned_at - began).as_secs_f64(),
            launch_seconds: planned_at.elapsed().as_secs_f64(),
            ..StepTimes::default()
        };
        let reading = StepReading::new(&plan, planned_at, times);
        let awaited = self.awaited(&plan);
        self.in_flight.push_back(StepInFlight { plan, reading, awaited, read });
        Ok(computes)
    }

    /// Tells the executor which rows of prompts are read of the step that is launched next.
    fn ask_for_rows(&mut self, plan: &StepPlan) -> Vec<RequestId> {
        let (read, wanted): (Vec<_>, Vec<_>) = rows_wanted(&mut self.state, plan).into_iter().unzip();
        if !wanted.is_empty() {
            self.executor.read(wanted);
        }
        read
    }

    /// The draws of a plan that wait for masks. The state is as it was planned on.
    fn awaited(&self, plan: &StepPlan) -> Vec<Awaited> {
        let samples = plan.chunks.iter().filter(|chunk| chunk.samples);
        let of = |chunk: &Chunk| Awaited::of(&self.state.running[chunk.running_idx], chunk.start + chunk.n_tokens);
        samples.filter_map(of).collect()
    }

    fn take_in(&mut self, step: StepInFlight) -> Result<(), ExecError> {
        let StepInFlight { plan, mut reading, read, .. } = step;
        let waiting_since = Instant::now();
        let output = if plan.chunks.is_empty() {
            StepOutput::default()
        } else {
            self.announce(&plan)?;
            let output = self.executor.finish()?;
            reading.times.idle_seconds = self.executor.idle_seconds();
            output
        };
        let now = Instant::now();
        // A step that was launched behind another one begins when that one is over.
        let took = now - reading.launched_at.max(std::mem::replace(&mut self.last_over, now));
        if !plan.chunks.is_empty() {
            self.note_pace(&plan, took);
            charge(&mut self.state, &plan, took * self.executor.n_devices());
        }
        let mut effects = resolve(&mut self.state, plan, output, &self.limits);
        if !read.is_empty() {
            effects.read = read.into_iter().zip(self.executor.take_read()).collect();
        }
        reading.times.finish_seconds = (now - waiting_since).as_secs_f64();
        reading.times.resolve_seconds = now.elapsed().as_secs_f64();
        effects.ended.iter().for_each(|ended| self.matchers.close(ended.id));
        self.matchers.accept(&effects.tokens);
        self.publish(effects, reading, now)
    }

    /// How much of a prompt fits between two tokens, as steps have been of late.
    fn note_pace(&mut self, plan: &StepPlan, took: Duration) {
        let n_decodes = plan.chunks.iter().filter(|chunk| !chunk.is_prefill).count();
        let (n_prefill_tokens, seconds) = (plan.n_prefill_tokens(), took.as_secs_f64());
        self.pace.note(PacedStep { n_prefill_tokens, n_decodes, seconds });
        if let Some(target) = self.limits.itl_target {
            self.limits.prefill_share = self.pace.share(target.time);
        }
    }

    /// Calls those who wait for first tokens of the oldest step, shortly before it ends.
    fn announce(&mut self, plan: &StepPlan) -> Result<(), ExecError> {
        let first_tokens = plan.chunks.iter().filter(|chunk| chunk.is_prefill && chunk.samples);
        let ids: Vec<RequestId> = first_tokens.map(|chunk| chunk.id).collect();
        if !ids.is_empty() && self.executor.nears_end()? {
            // An output thread with a full queue is awake.
            let _ = self.output.try_send(OutputMessage::Soon(ids));
        }
        Ok(())
    }

    fn publish(&mut self, effects: StepEffects, reading: StepReading, now: Instant) -> Result<(), ExecError> {
        let left_line = effects.started.len() + effects.ended.iter().filter(|ended| ended.never_started).count();
        self.admission.leave_line(left_line);
        self.meters.step(&reading, &self.state, now);
        self.prefixes.tell(&mut self.state.pool);
        let sent = match self.output.try_send(OutputMessage::Step { effects, at: now }) {
            Err(TrySendError::Full(message)) => {
                self.meters.output_was_full();
                self.output.send(message).map_err(drop)
            }
            sent => sent.map_err(drop),
        };
        sent.map_err(|()| ExecError("the output thread is gone: nobody can be told of the tokens".into()))
    }
}

/// Tells the output thread that the engine is gone, on every way out, so that every open request gets its terminal.
struct StopNotice {
    reason: String,
    output: SyncSender<OutputMessage>,
    meters: Arc<Meters>,
}

impl Drop for StopNotice {
    fn drop(&mut self) {
        self.meters.stopped(&self.reason);
        let _ = self.output.send(OutputMessage::Stopped(std::mem::take(&mut self.reason)));
    }
}
