//! The engine thread: drain the inbox, schedule, execute, resolve, publish. It is the only owner of the scheduler's
//! state; everyone else sends commands.

use std::{
    sync::{
        Arc,
        mpsc::{Receiver, SyncSender, TrySendError},
    },
    time::Instant,
};

use crate::{
    exec::{ExecError, Executor},
    handle::Admission,
    metrics::{Meters, StepReading},
    output::OutputMessage,
    request::{FinishReason, Request, RequestId},
    sched::{SchedLimits, SchedState, StepEffects, StepOutput, StepPlan, resolve, schedule},
};

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
        if self.state.is_idle() {
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

    fn obey(&mut self, command: Command) -> Inbox {
        match command {
            Command::Submit { id, request } => self.state.submit(id, request),
            Command::End { id, reason } => self.state.end(id, reason),
            Command::EndAll(reason) => self.state.end_all(&reason),
            Command::Shutdown => return Inbox::Closed,
        }
        Inbox::Open
    }

    fn step(&mut self) -> Result<(), ExecError> {
        if self.state.is_idle() {
            return Ok(());
        }
        let began = Instant::now();
        let plan = schedule(&mut self.state, &self.limits);
        let output = self.execute(&plan)?;
        let now = Instant::now();
        let reading = StepReading::new(&plan, (now - began).as_secs_f64());
        let effects = resolve(&mut self.state, plan, output, &self.limits);
        self.publish(effects, reading, now)
    }

    fn execute(&mut self, plan: &StepPlan) -> Result<StepOutput, ExecError> {
        if plan.chunks.is_empty() { Ok(StepOutput::default()) } else { self.executor.execute(plan) }
    }

    fn publish(&self, effects: StepEffects, reading: StepReading, now: Instant) -> Result<(), ExecError> {
        let left_line = effects.started.len() + effects.ended.iter().filter(|ended| ended.never_started).count();
        self.admission.leave_line(left_line);
        self.meters.step(&reading, &self.state, now);
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
