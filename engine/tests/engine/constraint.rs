//! Grammars: the tokens that come are those that the masks allow, with one step in flight and with two, beside requests
//! that nothing constrains; a grammar that cannot go on ends its own request and no other.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex},
    thread,
    time::Duration,
};

use stoker_engine::{
    EngineHandle, EngineLimits, FinishReason, Request, RequestEvent, RequestStream, SamplingParams, StopParams,
    TokenId,
    constraint::{Constraint, Grammar, Matcher},
    exec::sim::{SimExecutor, SimScript},
};

use crate::{common, overlap::start_with_two};

/// What the toy grammar does when `n_tokens` have come.
#[derive(Clone, Copy, Debug)]
pub(crate) enum End {
    /// Allows this token and nothing else.
    Token(TokenId),
    /// Allows nothing.
    Nothing,
    /// Refuses what was drawn.
    Refusal,
}

/// Every token's number modulo 3 is one more than that of the token before, beginning with 0: the mask of a position
/// depends on the very token before it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cycle {
    pub(crate) n_tokens: usize,
    pub(crate) end: End,
}

#[derive(Debug)]
struct CycleMatcher {
    cycle: Cycle,
    n_accepted: usize,
    next_class: TokenId,
}

impl Grammar for Cycle {
    fn matcher(&self) -> Box<dyn Matcher> {
        Box::new(CycleMatcher { cycle: *self, n_accepted: 0, next_class: 0 })
    }
}

impl Matcher for CycleMatcher {
    fn allow(&mut self, mask: &mut [u32]) -> Result<(), String> {
        assert!(mask.iter().all(|word| *word == 0), "masks come zeroed");
        let is_over = self.n_accepted >= self.cycle.n_tokens;
        let allowed: Vec<usize> = match self.cycle.end {
            End::Token(token) if is_over => vec![token as usize],
            End::Nothing if is_over => vec![],
            _ => (self.next_class as usize..32 * mask.len()).step_by(3).collect(),
        };
        let is_early = |token: &usize| !is_over && matches!(self.cycle.end, End::Token(end) if end as usize == *token);
        let allowed = allowed.into_iter().filter(|token| !is_early(token));
        allowed.for_each(|token| mask[token / 32] |= 1 << (token % 32));
        Ok(())
    }

    fn accept(&mut self, token: TokenId) -> Result<(), String> {
        if matches!(self.cycle.end, End::Refusal) && self.n_accepted == self.cycle.n_tokens {
            return Err("enough".into());
        }
        assert_eq!(token % 3, self.next_class, "only allowed tokens are drawn, and every one is told in order");
        (self.n_accepted, self.next_class) = (self.n_accepted + 1, (token + 1) % 3);
        Ok(())
    }
}

pub(crate) fn asked(n: u32, constraint: Option<Cycle>) -> Request {
    let prompt: Vec<TokenId> = (0..5 + n * 4).map(|i| (n * 131 + i * i * 7 + i * 13) % 256).collect();
    let stop = StopParams { max_tokens: 100, ..StopParams::default() };
    let constraint = constraint.map(|cycle| Constraint(Arc::new(cycle)));
    let temperature = (n % 3) as f32 * 0.6;
    let sampling = SamplingParams { temperature, seed: n.into(), constraint, ..SamplingParams::default() };
    Request { prompt, sampling, stop, logprobs: None, ..Request::default() }
}

pub(crate) fn read_all(mut stream: RequestStream) -> (Vec<TokenId>, FinishReason) {
    let mut all = Vec::new();
    loop {
        match stream.blocking_next().expect("a terminal comes") {
            RequestEvent::Prompt(_) | RequestEvent::Embedding(_) => {}
            RequestEvent::Delta { tokens, .. } => all.extend(tokens),
            RequestEvent::Finished { reason, .. } => return (all, reason),
        }
    }
}

pub(crate) fn run(engine: &EngineHandle, requests: Vec<Request>) -> Vec<(Vec<TokenId>, FinishReason)> {
    let streams: Vec<_> = requests.into_iter().map(|request| engine.submit(request).unwrap()).collect();
    streams.into_iter().map(read_all).collect()
}

/// Of two dozen requests somebody is preempted.
pub(crate) fn tight() -> EngineLimits {
    EngineLimits {
        kv_cache_tokens: Some(512),
        expected_completion: None,
        max_model_len: Some(256),
        ..EngineLimits::default()
    }
}

#[test]
fn constrained_tokens_follow_the_grammar_and_leave_their_neighbours_alone() {
    let model = common::checkpoint("gqa-f32");
    // A matcher outlives a preemption.
    let (one, two) = (common::start(&model, tight()), start_with_two(&model, tight()));
    let end = one.model().eos[0];
    let cycle = |n: u32| n.is_multiple_of(2).then_some(Cycle { n_tokens: 40 + n as usize, end: End::Token(end) });
    let mixed = || (0..24).map(|n| asked(n, cycle(n))).collect();
    let expected = run(&one, mixed());
    assert_eq!(run(&two, mixed()), expected);
    assert!(one.load().preemptions > 0 && two.load().preemptions > 0, "the tight cache preempted somebody");
    for (n, (tokens, reason)) in (0..).zip(&expected).filter(|(n, _)| n % 2 == 0) {
        let (last, cycle) = tokens.split_last().expect("tokens came");
        assert!(cycle.iter().zip((0..3).cycle()).all(|(token, class)| token % 3 == class), "{n}: {tokens:?}");
        assert_eq!((*last, cycle.len(), reason), (end, 40 + n, &FinishReason::Stop), "{n}");
    }
    let free = run(&one, (0..24).map(|n| asked(n, None)).collect());
    for n in (1..24).step_by(2) {
        assert_eq!(free[n], expected[n], "an unconstrained request is told the same beside constrained ones");
    }
}

#[test]
fn a_grammar_that_cannot_go_on_ends_its_own_request_with_the_reason() {
    for max_steps_in_flight in [1, 2] {
        let script = SimScript { max_steps_in_flight, completion: "x".repeat(30), ..SimScript::default() };
        let engine = SimExecutor::start(script, EngineLimits::default()).unwrap();
        let cycle = |end| Some(Cycle { n_tokens: 4, end });
        let mut early = asked(3, cycle(End::Token(256)));
        early.stop.min_tokens = 9;
        let requests = vec![asked(0, cycle(End::Nothing)), asked(1, cycle(End::Refusal)), early, asked(4, None)];
        let [dead, refused, early, free] = run(&engine, requests).try_into().unwrap();
        let error = |text: &str| FinishReason::Unfollowed(text.into());
        assert_eq!((dead.0.len(), dead.1), (4, error("the grammar allows no token here")));
        assert_eq!(refused.0.len(), 5);
        assert!(matches!(refused.1, FinishReason::Unfollowed(text) if text.ends_with("enough")));
        let too_short = "the grammar allows only the end here, but min_tokens asks for more: lower min_tokens";
        assert_eq!((early.0.len(), early.1), (4, error(too_short)));
        assert_eq!((free.0.len(), free.1), (31, FinishReason::Stop));
    }
}

/// Lets these tokens come, one after the other, and behind them nothing.
#[derive(Clone, Debug)]
struct Row(VecDeque<TokenId>);

impl Grammar for Row {
    fn matcher(&self) -> Box<dyn Matcher> {
        Box::new(self.clone())
    }
}

impl Matcher for Row {
    fn allow(&mut self, mask: &mut [u32]) -> Result<(), String> {
        self.0.front().into_iter().for_each(|token| mask[*token as usize / 32] |= 1 << (token % 32));
        Ok(())
    }

    fn accept(&mut self, token: TokenId) -> Result<(), String> {
        (self.0.pop_front() == Some(token)).then_some(()).ok_or_else(|| format!("{token} is not next"))
    }
}

#[test]
fn what_had_to_come_is_told_before_the_end_of_a_grammar_that_cannot_go_on() {
    for max_steps_in_flight in [1, 2] {
        let script = SimScript { max_steps_in_flight, completion: "x".repeat(30), ..SimScript::default() };
        let engine = SimExecutor::start(script, EngineLimits::default()).unwrap();
        let constraint = Some(Constraint(Arc::new(Row([70, 71, 72, 73, 74].into()))));
        let plain = asked(0, None);
        let row = Request { sampling: SamplingParams { constraint, ..plain.sampling.clone() }, ..plain };
        let drawn = Request { logprobs: Some(0), ..row.clone() };
        let dead = FinishReason::Unfollowed("the grammar allows no token here".into());
        for (tokens, reason) in run(&engine, vec![row, drawn]) {
            assert_eq!((tokens, reason), (vec![70, 71, 72, 73, 74], dead.clone()));
        }
    }
}

/// Another grammar, each of whose masks takes its time: now and then much more than a step.
#[derive(Debug)]
struct Slow<G>(G, fn(usize) -> Duration);

#[derive(Debug)]
struct SlowMatcher {
    inner: Box<dyn Matcher>,
    takes: fn(usize) -> Duration,
    n_masks: usize,
}

impl<G: Grammar> Grammar for Slow<G> {
    fn matcher(&self) -> Box<dyn Matcher> {
        Box::new(SlowMatcher { inner: self.0.matcher(), takes: self.1, n_masks: 0 })
    }
}

impl Matcher for SlowMatcher {
    fn allow(&mut self, mask: &mut [u32]) -> Result<(), String> {
        thread::sleep((self.takes)(self.n_masks));
        self.n_masks += 1;
        self.inner.allow(mask)
    }

    fn accept(&mut self, token: TokenId) -> Result<(), String> {
        self.inner.accept(token)
    }
}

fn slowed(request: Request, takes: fn(usize) -> Duration) -> Request {
    let Some(Constraint(grammar)) = &request.sampling.constraint else { return request };
    let constraint = Some(Constraint(Arc::new(Slow(Shared(Arc::clone(grammar)), takes))));
    Request { sampling: SamplingParams { constraint, ..request.sampling }, ..request }
}

#[derive(Debug)]
struct Shared(Arc<dyn Grammar>);

impl Grammar for Shared {
    fn matcher(&self) -> Box<dyn Matcher> {
        self.0.matcher()
    }
}

#[test]
fn late_masks_change_no_token() {
    let model = common::checkpoint("gqa-f32");
    let tight = EngineLimits {
        kv_cache_tokens: Some(512),
        expected_completion: None,
        max_model_len: Some(256),
        ..EngineLimits::default()
    };
    let (one, two) = (common::start(&model, tight.clone()), start_with_two(&model, tight));
    let end = one.model().eos[0];
    let all = || {
        let cycle = |n: u32| (n % 3 != 2).then_some(Cycle { n_tokens: 20 + n as usize, end: End::Token(end) });
        // Penalties read every token that was drawn before; log-probabilities come from what was computed again.
        let with = |n: u32, request: Request| Request {
            sampling: SamplingParams { frequency_penalty: (n % 2) as f32, ..request.sampling },
            logprobs: Some(2),
            ..request
        };
        (0..12).map(move |n| with(n, asked(n, cycle(n))))
    };
    let expected = run(&one, all().collect());
    let takes = |n: usize| Duration::from_millis(if n % 5 == 3 { 4 } else { 0 });
    for engine in [one, two] {
        let late = all().map(|request| slowed(request, takes)).collect();
        assert_eq!(run(&engine, late), expected);
    }
}

#[test]
fn nobody_waits_for_the_mask_of_another() {
    static GATE: Mutex<()> = Mutex::new(());
    /// Opens when the test says so.
    fn shut(n_masks: usize) -> Duration {
        if n_masks == 2 {
            drop(GATE.lock());
        }
        Duration::ZERO
    }
    for max_steps_in_flight in [1, 2] {
        let script = SimScript { max_steps_in_flight, completion: "x".repeat(30), ..SimScript::default() };
        let engine = SimExecutor::start(script, EngineLimits::default()).unwrap();
        let gate = GATE.lock().unwrap();
        let stuck = slowed(asked(0, Some(Cycle { n_tokens: 4, end: End::Token(256) })), shut);
        let stuck = engine.submit(stuck).unwrap();
        for n in 1..4 {
            let [(tokens, reason)] = run(&engine, vec![asked(n, None)]).try_into().unwrap();
            assert_eq!((tokens.len(), reason), (31, FinishReason::Stop), "the third mask of another is not there");
        }
        assert_eq!(engine.load().finished.stop, 3, "the other one still waits");
        drop(gate);
        let (tokens, reason) = read_all(stuck);
        assert_eq!((tokens.len(), reason), (5, FinishReason::Stop));
    }
}

/// A grammar whose matcher is broken.
#[derive(Debug)]
struct Broken;

impl Grammar for Broken {
    fn matcher(&self) -> Box<dyn Matcher> {
        panic!("a fault of ours");
    }
}

#[test]
fn a_matcher_that_panics_ends_its_own_request() {
    let engine = SimExecutor::start(SimScript::default(), EngineLimits::default()).unwrap();
    let constraint = Some(Constraint(Arc::new(Broken)));
    let broken = asked(0, None);
    let broken = Request { sampling: SamplingParams { constraint, ..broken.sampling }, ..broken };
    let many = (0..8).map(|_| broken.clone()).chain([asked(1, None)]).collect();
    let mut ended = run(&engine, many);
    assert_eq!(ended.pop().expect("nine were asked").1, FinishReason::Stop, "a free request goes on beside them");
    let error = FinishReason::Error("the grammar failed: its matcher panicked".into());
    assert!(ended.into_iter().all(|(tokens, reason)| tokens.is_empty() && reason == error));
}
