//! The threads on which grammars are walked: they take drawn tokens in and fill the next masks while the step is computed.
//! Where a mask leaves one token they go on behind it, so that the engine knows tokens ahead of their draws. Each piece of
//! work is a matcher that goes there and comes back with its mask; nothing is shared. They start with the first constrained
//! request. Knows no sequences and no steps.

use std::{
    collections::VecDeque,
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
    request::{FinishReason, RequestId, TokenId},
};

/// Threads at most: 64 masks of 50 us each, the slow ones, are ready in less than a millisecond.
const MAX_THREADS: usize = 4;

/// Tokens that are known ahead at most: more than any step has use for, and a grammar may force tokens without end.
const MAX_AHEAD: usize = 256;

/// A matcher, the tokens that must come next, and the mask of the draw behind them.
#[derive(Debug)]
pub(crate) struct Walk {
    matcher: Box<dyn Matcher>,
    mask: Vec<u32>,
    /// Tokens that must come. The matcher has taken them in, the engine has not told of them yet.
    ahead: VecDeque<TokenId>,
    /// Of those, from the first, the ones that the scheduler has.
    n_taken: usize,
    /// Why nothing can be drawn behind them.
    dead_end: Option<String>,
    /// Tokens that may end the completion: what is behind one is nobody's.
    ends: Arc<[TokenId]>,
}

impl Walk {
    fn new(matcher: Box<dyn Matcher>, n_words: usize, ends: Arc<[TokenId]>) -> Self {
        Self { matcher, mask: vec![0; n_words], ahead: VecDeque::new(), n_taken: 0, dead_end: None, ends }
    }

    /// Marks what may be drawn next, in a mask that may hold anything; or why nothing may.
    pub(crate) fn fill_next(&self, mask: &mut [u32]) -> Result<(), String> {
        match (self.ahead.get(self.n_taken), &self.dead_end) {
            (Some(token), _) => {
                mask.fill(0);
                mask[*token as usize / 32] |= 1 << (token % 32);
            }
            (None, Some(reason)) => return Err(reason.clone()),
            (None, None) => mask.copy_from_slice(&self.mask),
        }
        Ok(())
    }

    /// Why nothing more can come, if all before it was told.
    pub(crate) fn is_over(&self) -> Option<&str> {
        self.dead_end.as_deref().filter(|_| self.ahead.is_empty())
    }

    /// Tokens that must come next, behind those that were taken.
    pub(crate) fn ahead(&self) -> impl ExactSizeIterator<Item = TokenId> {
        self.ahead.range(self.n_taken..).copied()
    }

    /// The scheduler has so many of them.
    pub(crate) fn take_ahead(&mut self, n_tokens: usize) {
        self.n_taken += n_tokens;
        assert!(self.n_taken <= self.ahead.len(), "only what is ahead is taken");
    }

    /// Takes a token in that was known ahead; `false`: it was not, and a thread has to. An error: another one was drawn, as it may be
    /// where the model gives the only token that is allowed no chance at all.
    pub(crate) fn goes_on_by(&mut self, token: TokenId) -> Result<bool, String> {
        let Some(known) = self.ahead.pop_front() else { return Ok(false) };
        if known != token {
            return Err(format!("the grammar does not take token {token}: only {known} may come here"));
        }
        self.n_taken = self.n_taken.saturating_sub(1);
        Ok(true)
    }

    /// Brings the walk to the next draw that can have several outcomes.
    fn run_ahead(&mut self) {
        self.dead_end = self.advance().err();
    }

    fn advance(&mut self) -> Result<(), String> {
        loop {
            self.fill()?;
            match only_token(&self.mask) {
                Some(token) if !self.ends.contains(&token) && self.ahead.len() < MAX_AHEAD => {
                    self.accept(token)?;
                    self.ahead.push_back(token);
                }
                _ => return Ok(()),
            }
        }
    }

    fn fill(&mut self) -> Result<(), String> {
        self.mask.fill(0);
        self.matcher.allow(&mut self.mask).map_err(|reason| format!("the grammar failed: {reason}"))?;
        match self.mask.iter().all(|word| *word == 0) {
            true => Err("the grammar allows no token here".into()),
            false => Ok(()),
        }
    }

    fn accept(&mut self, token: TokenId) -> Result<(), String> {
        let taken = self.matcher.accept(token);
        taken.map_err(|refused| format!("the grammar does not take token {token}: {refused}"))
    }
}

/// The token of a mask that allows one.
fn only_token(mask: &[u32]) -> Option<TokenId> {
    let mut words = (0..).zip(mask).filter(|(_, word)| **word != 0);
    let (idx, word) = words.next()?;
    (word.is_power_of_two() && words.next().is_none()).then(|| 32 * idx + word.trailing_zeros())
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
        /// Tokens that may end the completion.
        ends: Arc<[TokenId]>,
        /// Which of the grammar's masks narrow.
        spelling: Spelling,
    },
    /// Take in the token that was drawn.
    GoOn(Walk, TokenId),
    /// Drop what an ended request leaves, which may be large.
    Drop(Walk),
}

/// What may spell a text that must come.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Spelling {
    /// The tokens that the model's tokenizer makes of it.
    Canonical,
    /// Any that do.
    Any,
}

/// A walk that is back with its mask, or why it cannot go on.
pub(crate) type Return = (RequestId, Result<Walk, FinishReason>);

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
        let done = match done {
            Ok(done) => done.map_err(FinishReason::Unfollowed),
            Err(_) => Err(FinishReason::Error("the grammar failed: its matcher panicked".into())),
        };
        if let Some(back) = done.transpose()
            && outbox.send((id, back)).is_err()
        {
            return;
        }
    }
}

fn advance(task: Task) -> Result<Option<Walk>, String> {
    let mut walk = match task {
        Task::Begin { constraint, n_words, tokens, ends, spelling } => {
            let matcher = match spelling {
                Spelling::Canonical => constraint.0.matcher(),
                Spelling::Any => constraint.0.any_spelling(),
            };
            let mut walk = Walk::new(matcher, n_words, ends);
            for token in tokens {
                walk.fill()?;
                walk.accept(token)?;
            }
            walk
        }
        Task::GoOn(mut walk, token) => {
            walk.accept(token)?;
            walk
        }
        Task::Drop(walk) => {
            drop(walk);
            return Ok(None);
        }
    };
    walk.run_ahead();
    Ok(Some(walk))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lets these tokens come, and behind them nothing.
    #[derive(Debug)]
    struct Row(VecDeque<Vec<TokenId>>);

    impl Matcher for Row {
        fn allow(&mut self, mask: &mut [u32]) -> Result<(), String> {
            let next = self.0.front().into_iter().flatten();
            next.for_each(|token| mask[*token as usize / 32] |= 1 << (token % 32));
            Ok(())
        }

        fn accept(&mut self, token: TokenId) -> Result<(), String> {
            let allowed = self.0.pop_front().ok_or("nothing may come")?;
            allowed.contains(&token).then_some(()).ok_or_else(|| format!("{allowed:?} may come"))
        }
    }

    fn walk(row: &[&[TokenId]], ends: &[TokenId]) -> Walk {
        let row = row.iter().map(|allowed| allowed.to_vec()).collect();
        let mut walk = Walk::new(Box::new(Row(row)), 2, ends.into());
        walk.run_ahead();
        walk
    }

    fn next(walk: &Walk) -> Result<[u32; 2], String> {
        let mut mask = [u32::MAX; 2];
        walk.fill_next(&mut mask).map(|()| mask)
    }

    #[test]
    fn what_must_come_is_known_ahead_of_the_next_choice() {
        let mut walk = walk(&[&[3], &[40], &[1, 2], &[5]], &[]);
        assert_eq!(walk.ahead().collect::<Vec<_>>(), [3, 40]);
        assert_eq!(next(&walk), Ok([1 << 3, 0]), "a draw may take the first of them");
        walk.take_ahead(1);
        assert_eq!(next(&walk), Ok([0, 1 << 8]));
        walk.take_ahead(1);
        assert_eq!((next(&walk), walk.ahead().len()), (Ok([0b110, 0]), 0));
        assert_eq!(
            [3, 40].map(|token| walk.goes_on_by(token)),
            [Ok(true), Ok(true)],
            "no thread is needed for what is told later"
        );
        assert_eq!(walk.goes_on_by(2), Ok(false), "what was drawn has to be taken in");
    }

    #[test]
    fn another_token_than_the_one_that_may_come_ends_its_request_and_no_other() {
        let refused = walk(&[&[3], &[1, 2]], &[]).goes_on_by(9).unwrap_err();
        assert_eq!(refused, "the grammar does not take token 9: only 3 may come here");
    }

    #[test]
    fn nothing_is_known_behind_an_end_token() {
        let walk = walk(&[&[3], &[7], &[4]], &[7]);
        assert_eq!(walk.ahead().collect::<Vec<_>>(), [3]);
    }

    #[test]
    fn a_dead_end_is_told_behind_what_comes_before_it() {
        let mut walk = walk(&[&[3]], &[]);
        assert_eq!(next(&walk), Ok([1 << 3, 0]));
        walk.take_ahead(1);
        assert_eq!(next(&walk), Err("the grammar allows no token here".into()));
    }

    #[test]
    fn a_grammar_without_an_end_is_followed_so_far() {
        let walk = walk(&vec![&[3][..]; 2 * MAX_AHEAD], &[]);
        assert_eq!(walk.ahead().len(), MAX_AHEAD);
    }

    #[test]
    fn a_mask_of_one_token_is_told_from_others() {
        let of = |words: &[u32]| only_token(words);
        assert_eq!((of(&[0, 1 << 5]), of(&[1, 0])), (Some(37), Some(0)));
        assert_eq!((of(&[0, 0]), of(&[1, 1]), of(&[3, 0])), (None, None, None));
    }
}
