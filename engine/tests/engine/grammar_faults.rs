//! Matchers that fail in the middle of a request: it ends where it was, with the reason, and no other notices; nothing is computed
//! any more for who cannot go on, wherever it is.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use stoker_engine::{
    EngineHandle, EngineLimits, FinishReason, Request, SamplingParams, TokenId,
    constraint::{Constraint, Grammar, Matcher},
    exec::sim::{SimExecutor, SimScript},
};

use crate::{
    common,
    constraint::{Cycle, End, asked, read_all, run, tight},
    overlap::start_with_two,
};

/// What fails.
#[derive(Clone, Copy, Debug)]
enum Fault {
    /// A mask cannot be filled: a limit was met.
    Mask,
    /// A token is not taken, though the mask allowed it.
    Token,
    /// The same two, by a fault of ours.
    MaskPanics,
    TokenPanics,
}

const FAULTS: [Fault; 4] = [Fault::Mask, Fault::Token, Fault::MaskPanics, Fault::TokenPanics];

impl Fault {
    /// Tokens that the client has when it comes at the mask or the token of that number.
    fn n_told(self, at: usize) -> usize {
        match self {
            Self::Mask | Self::MaskPanics => at,
            Self::Token | Self::TokenPanics => at + 1,
        }
    }

    fn is_reason(self, reason: &FinishReason) -> bool {
        match (self, reason) {
            (Self::Mask, FinishReason::Unfollowed(text)) => text == "the grammar failed: a limit",
            (Self::Token, FinishReason::Unfollowed(text)) => {
                text.starts_with("the grammar does not take token ") && text.ends_with(": a limit")
            }
            (Self::MaskPanics | Self::TokenPanics, FinishReason::Error(text)) => {
                text == "the grammar failed: its matcher panicked"
            }
            _ => false,
        }
    }
}

/// Another grammar, until it fails.
#[derive(Clone, Debug)]
struct Failing<G> {
    inner: G,
    fault: Fault,
    at: usize,
}

#[derive(Debug)]
struct FailingMatcher {
    inner: Box<dyn Matcher>,
    fault: Fault,
    /// Masks and tokens before it.
    n_masks_left: usize,
    n_tokens_left: usize,
}

impl<G: Grammar> Grammar for Failing<G> {
    fn matcher(&self) -> Box<dyn Matcher> {
        let Self { inner, fault, at } = self;
        Box::new(FailingMatcher { inner: inner.matcher(), fault: *fault, n_masks_left: *at, n_tokens_left: *at })
    }
}

impl Matcher for FailingMatcher {
    fn allow(&mut self, mask: &mut [u32]) -> Result<(), String> {
        match (self.fault, self.n_masks_left) {
            (Fault::Mask, 0) => return Err("a limit".into()),
            (Fault::MaskPanics, 0) => panic!("a fault of ours"),
            _ => self.n_masks_left = self.n_masks_left.saturating_sub(1),
        }
        self.inner.allow(mask)
    }

    fn accept(&mut self, token: TokenId) -> Result<(), String> {
        match (self.fault, self.n_tokens_left) {
            (Fault::Token, 0) => return Err("a limit".into()),
            (Fault::TokenPanics, 0) => panic!("a fault of ours"),
            _ => self.n_tokens_left = self.n_tokens_left.saturating_sub(1),
        }
        self.inner.accept(token)
    }
}

fn constrained(request: Request, grammar: impl Grammar + 'static) -> Request {
    let constraint = Some(Constraint(Arc::new(grammar)));
    Request { sampling: SamplingParams { constraint, ..request.sampling }, ..request }
}

#[test]
fn a_matcher_that_fails_ends_its_request_where_it_was_and_no_other() {
    let model = common::checkpoint("gqa-f32");
    // Also those are preempted whose matchers fail, before and after.
    let (one, two) = (common::start(&model, tight()), start_with_two(&model, tight()));
    let end = End::Token(one.model().eos[0]);
    let cycle = |n: u32| n.is_multiple_of(2).then_some(Cycle { n_tokens: 40 + n as usize, end });
    let expected = run(&one, (0..24).map(|n| asked(n, cycle(n))).collect());
    let fault = |n: u32| {
        let at = [0, 1, 17, 30][n as usize % 16 / 4] + n as usize / 16;
        n.is_multiple_of(4).then(|| (FAULTS[n as usize / 4 % 4], at))
    };
    let faulty = |n: u32| match (cycle(n), fault(n)) {
        (Some(inner), Some((fault, at))) => constrained(asked(n, None), Failing { inner, fault, at }),
        (cycle, _) => asked(n, cycle),
    };
    for engine in [one, two] {
        let found = run(&engine, (0..24).map(faulty).collect());
        for (n, ((tokens, reason), whole)) in (0..).zip(found.iter().zip(&expected)) {
            let Some((fault, at)) = fault(n) else {
                assert_eq!((tokens, reason), (&whole.0, &whole.1), "{n} is told the same beside those that fail");
                continue;
            };
            assert_eq!(tokens, &whole.0[..fault.n_told(at)], "{n}, {fault:?} at {at}");
            assert!(fault.is_reason(reason), "{n}, {fault:?} at {at}: {reason:?}");
        }
        let load = engine.load();
        assert!(load.preemptions > 0, "the tight cache preempted somebody");
        assert_eq!(load.free_blocks + load.cached_blocks, load.total_blocks, "every block came back");
    }
}

fn start(max_steps_in_flight: usize, limits: EngineLimits) -> EngineHandle {
    let script = SimScript { max_steps_in_flight, step_time: Duration::from_micros(300), ..SimScript::default() };
    SimExecutor::start(script, limits).unwrap()
}

/// Goes on for so many tokens, whatever comes.
fn long(prompt: Vec<TokenId>, max_tokens: u32) -> Request {
    common::greedy(prompt, max_tokens)
}

#[test]
fn who_cannot_go_on_ends_in_the_line() {
    for max_steps_in_flight in [1, 2] {
        for fault in [Fault::Mask, Fault::MaskPanics] {
            let engine = start(max_steps_in_flight, EngineLimits { max_num_seqs: Some(1), ..EngineLimits::default() });
            let first = engine.submit(long(vec![65; 20], 1500)).unwrap();
            let inner = Cycle { n_tokens: 9, end: End::Nothing };
            let second = constrained(asked(1, None), Failing { inner, fault, at: 0 });
            let (tokens, reason) = read_all(engine.submit(second).unwrap());
            assert!(tokens.is_empty() && fault.is_reason(&reason), "{reason:?}");
            assert_eq!(engine.load().finished.length, 0, "it did not wait for the place of the first");
            let (tokens, reason) = read_all(first);
            assert_eq!((tokens.len(), reason), (1500, FinishReason::Length));
        }
    }
}

/// Allows everything. One of its masks is awaited until somebody was preempted, and fails then.
#[derive(Clone, Debug)]
struct FailsPreempted {
    n_masks: usize,
    was_preempted: Arc<AtomicBool>,
}

impl Grammar for FailsPreempted {
    fn matcher(&self) -> Box<dyn Matcher> {
        Box::new(self.clone())
    }
}

impl Matcher for FailsPreempted {
    fn allow(&mut self, mask: &mut [u32]) -> Result<(), String> {
        mask.fill(u32::MAX);
        self.n_masks -= 1;
        if self.n_masks > 0 {
            return Ok(());
        }
        while !self.was_preempted.load(Ordering::Relaxed) {
            thread::sleep(Duration::from_millis(1));
        }
        Err("a limit".into())
    }

    fn accept(&mut self, _: TokenId) -> Result<(), String> {
        Ok(())
    }
}

#[test]
fn who_fails_after_a_preemption_is_not_computed_again() {
    for max_steps_in_flight in [1, 2] {
        // The first one grows until the second one, which waits for its mask, has to give its 45 blocks back, and then goes on.
        let limits =
            EngineLimits { kv_cache_tokens: Some(130 * 16), expected_completion: None, ..EngineLimits::default() };
        let engine = start(max_steps_in_flight, limits);
        let first = engine.submit(long(vec![65; 20], 1900)).unwrap();
        let was_preempted = Arc::new(AtomicBool::new(false));
        let grammar = FailsPreempted { n_masks: 10, was_preempted: Arc::clone(&was_preempted) };
        let second = engine.submit(constrained(long(vec![66; 700], 100), grammar)).unwrap();
        while engine.load().preemptions == 0 {
            thread::sleep(Duration::from_millis(1));
        }
        was_preempted.store(true, Ordering::Relaxed);
        let (tokens, reason) = read_all(second);
        assert!(tokens.len() == 9 && Fault::Mask.is_reason(&reason), "{}: {reason:?}", tokens.len());
        assert_eq!(engine.load().finished.length, 0, "it ended while there was no place for it");
        let (tokens, reason) = read_all(first);
        assert_eq!((tokens.len(), reason), (1900, FinishReason::Length));
    }
}
