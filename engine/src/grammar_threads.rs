//! The threads on which grammars are walked: they take drawn tokens in and fill the next masks while the step is computed.
//! Each piece of work is a matcher that goes there and comes back with its mask; nothing is shared. They start with the first
//! constrained request. Knows no sequences and no steps.

use std::{
    num::NonZero,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Mutex, PoisonError,
        mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    },
    thread,
    time::Duration,
};

use crate::{
    constraint::{Constraint, Matcher},
    request::{RequestId, TokenId},
};

/// Threads at most: 64 masks of 50 us each, the slow ones, are ready in less than a millisecond.
const MAX_THREADS: usize = 4;

/// A matcher and the mask of the next draw.
#[derive(Debug)]
pub(crate) struct Walk {
    matcher: Box<dyn Matcher>,
    mask: Vec<u32>,
}

impl Walk {
    /// What may be drawn next.
    pub(crate) fn mask(&self) -> &[u32] {
        &self.mask
    }

    fn fill(&mut self) -> Result<(), String> {
        self.matcher.allow(&mut self.mask).map_err(|reason| format!("the grammar failed: {reason}"))?;
        match self.mask.iter().all(|word| *word == 0) {
            true => Err("the grammar allows no token here".into()),
            false => Ok(()),
        }
    }

    fn go_on(&mut self, token: TokenId) -> Result<(), String> {
        let taken = self.matcher.accept(token);
        taken.map_err(|refused| format!("the grammar does not take token {token}: {refused}"))?;
        self.mask.fill(0);
        Ok(())
    }
}

/// What a thread is to do.
#[derive(Debug)]
pub(crate) enum Task {
    /// Begin a completion, or go on behind tokens that another engine drew.
    Begin {
        /// Of what.
        constraint: Constraint,
        /// Words of its mask.
        n_words: usize,
        /// Those tokens.
        tokens: Vec<TokenId>,
    },
    /// Take in the token that was drawn.
    GoOn(Walk, TokenId),
    /// Drop what an ended request leaves, which may be large.
    Drop(Walk),
}

/// A walk that is back with its mask, or why it cannot go on.
pub(crate) type Return = (RequestId, Result<Walk, String>);

/// The threads, as the engine thread sees them. They end when it lets go of this.
#[derive(Debug)]
pub(crate) struct GrammarThreads {
    tasks: Sender<(RequestId, Task)>,
    returns: Receiver<Return>,
}

impl GrammarThreads {
    pub(crate) fn start() -> Self {
        let (tasks, inbox) = channel();
        let (outbox, returns) = channel();
        let inbox = Arc::new(Mutex::new(inbox));
        for _ in 0..n_threads() {
            let (inbox, outbox) = (Arc::clone(&inbox), outbox.clone());
            let body = move || work(&inbox, &outbox);
            thread::Builder::new().name("grammar".into()).spawn(body).expect("the operating system gives a thread");
        }
        Self { tasks, returns }
    }

    pub(crate) fn send(&self, id: RequestId, task: Task) {
        self.tasks.send((id, task)).expect("grammar threads outlive their owner");
    }

    /// What has come back.
    pub(crate) fn returned(&self) -> impl Iterator<Item = Return> {
        self.returns.try_iter()
    }

    /// What comes back next, if it comes in time.
    pub(crate) fn wait(&self, at_most: Duration) -> Option<Return> {
        match self.returns.recv_timeout(at_most) {
            Ok(back) => Some(back),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => unreachable!("grammar threads outlive their owner"),
        }
    }
}

/// Half of what there is: the rest computes, or drives a device that does.
fn n_threads() -> usize {
    let n_cpus = thread::available_parallelism().map_or(1, NonZero::get);
    (n_cpus / 2).clamp(1, MAX_THREADS)
}

fn work(inbox: &Mutex<Receiver<(RequestId, Task)>>, outbox: &Sender<Return>) {
    loop {
        // Nothing panics while this lock is held.
        let next = inbox.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok((id, task)) = next else { return };
        let done = catch_unwind(AssertUnwindSafe(|| advance(task)));
        let done = done.unwrap_or_else(|_| Err("the grammar failed: its matcher panicked".into()));
        if let Some(back) = done.transpose()
            && outbox.send((id, back)).is_err()
        {
            return;
        }
    }
}

fn advance(task: Task) -> Result<Option<Walk>, String> {
    let mut walk = match task {
        Task::Begin { constraint, n_words, tokens } => {
            let mut walk = Walk { matcher: constraint.0.matcher(), mask: vec![0; n_words] };
            for token in tokens {
                walk.fill()?;
                walk.go_on(token)?;
            }
            walk
        }
        Task::GoOn(mut walk, token) => {
            walk.go_on(token)?;
            walk
        }
        Task::Drop(walk) => {
            drop(walk);
            return Ok(None);
        }
    };
    walk.fill()?;
    Ok(Some(walk))
}
