//! The output thread: takes what steps produced and what was submitted, in order, and keeps the ledger.
//! Detokenisation happens here so that the engine thread only computes.

use std::{
    sync::{
        Arc,
        mpsc::{Receiver, Sender},
    },
    time::Instant,
};

use crate::{
    engine_loop::Command,
    events::EventSender,
    ledger::Ledger,
    request::{FinishReason, Request, RequestId},
    sched::StepEffects,
    wakefulness::look_out,
};

/// Messages between engine and output thread at most; a full queue makes the engine wait, so memory stays bounded.
pub(crate) const OUTPUT_QUEUE_MESSAGES: usize = 1024;

/// What the output thread is told.
#[derive(Debug)]
pub(crate) enum OutputMessage {
    /// A request was taken. Always sent before the engine hears of the request.
    Open {
        /// Its name.
        id: RequestId,
        /// What was asked.
        request: Arc<Request>,
        /// Where its events go.
        events: EventSender,
        /// When it came.
        at: Instant,
    },
    /// A step with first tokens of these requests is about to complete.
    Soon(Vec<RequestId>),
    /// A step completed.
    Step {
        /// What it changed.
        effects: StepEffects,
        /// When.
        at: Instant,
    },
    /// The engine thread is gone; nothing will be computed any more.
    Stopped(String),
}

/// Runs until every sender is gone.
pub(crate) fn run(messages: Receiver<OutputMessage>, mut ledger: Ledger, engine: Sender<Command>) {
    let mut stopped: Option<String> = None;
    let mut next = messages.recv().ok();
    while let Some(message) = next {
        let mut announced = None;
        match message {
            OutputMessage::Open { id, request, events, at } => ledger.open(id, &request, events, at),
            OutputMessage::Soon(ids) => {
                ledger.announce(&ids);
                announced = look_out(|| messages.try_recv().ok());
            }
            OutputMessage::Step { effects, at } => end_in_engine(ledger.apply(effects, at), &engine),
            OutputMessage::Stopped(reason) => stopped = Some(reason),
        }
        // Also a request opened after the engine stopped gets its terminal.
        if let Some(reason) = &stopped {
            ledger.close_all(reason, Instant::now());
        }
        next = announced.or_else(|| messages.recv().ok());
    }
}

/// An engine that is gone needs no word: its `Stopped` message ends whatever is open.
fn end_in_engine(ids: Vec<RequestId>, engine: &Sender<Command>) {
    for id in ids {
        let _ = engine.send(Command::End { id, reason: FinishReason::Abort });
    }
}
