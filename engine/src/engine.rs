//! Starting an engine: reads and checks the model, plans memory, warms up, then starts the two threads.

use std::{
    sync::{
        Arc, Mutex,
        atomic::AtomicU64,
        mpsc::{channel, sync_channel},
    },
    thread,
    time::Instant,
};

use crate::{
    config::LimitError,
    engine_loop::EngineLoop,
    exec::Executor,
    handle::{Admission, EngineHandle, Shared},
    info::ModelInfo,
    ledger::Ledger,
    memory::MemoryError,
    metrics::Meters,
    output::{self, OUTPUT_QUEUE_MESSAGES},
    sched::{SchedLimits, SchedState},
    text::Tokenizer,
};

/// Why an engine did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// A size cannot work.
    #[error(transparent)]
    Limits(#[from] LimitError),
    /// The model does not fit the memory.
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

/// Starts engines.
#[derive(Debug)]
pub struct Engine;

/// What an executor does not know and an engine needs.
#[derive(Debug)]
pub struct EngineParts {
    /// The model behind the executor.
    pub model: ModelInfo,
    /// Its tokenizer.
    pub tokenizer: Tokenizer,
    /// The scheduler's bounds.
    pub sched: SchedLimits,
    /// Requests waiting for their first step at most.
    pub max_waiting: usize,
}

impl Engine {
    /// Starts the engine and output threads over an executor that is ready to step.
    pub fn start_with(executor: Box<dyn Executor>, parts: EngineParts) -> EngineHandle {
        let EngineParts { model, tokenizer, sched, max_waiting } = parts;
        let n_blocks = model.memory.kv_blocks as usize;
        let tokenizer = Arc::new(tokenizer);
        let meters = Arc::new(Meters::new(n_blocks, Instant::now()));
        let admission = Arc::new(Admission::new(max_waiting));
        let (commands, inbox) = channel();
        let (output, messages) = sync_channel(OUTPUT_QUEUE_MESSAGES);

        let ledger = Ledger::new(Arc::clone(&tokenizer), Arc::clone(&meters));
        let engine_commands = commands.clone();
        spawn("engine-output", move || output::run(messages, ledger, engine_commands));
        let engine_loop = EngineLoop {
            inbox,
            output: output.clone(),
            executor,
            state: SchedState::new(n_blocks),
            limits: sched,
            admission: Arc::clone(&admission),
            meters: Arc::clone(&meters),
        };
        let thread = spawn("engine", move || engine_loop.run());
        EngineHandle::new(Shared {
            commands,
            output,
            admission,
            meters,
            tokenizer,
            model,
            next_id: AtomicU64::new(0),
            thread: Mutex::new(Some(thread)),
        })
    }
}

fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> thread::JoinHandle<()> {
    thread::Builder::new().name(name.into()).spawn(body).expect("the operating system gives a process two threads")
}
