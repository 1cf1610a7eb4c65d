//! Waiting here costs no throughput: an engine that is sent only what it has room for does as much as one that is sent everything at
//! once, whatever is asked. Engine and gateway are a model in which time is a number: steps of prefill and decode, reports that are
//! old when they come, a gateway that looks every 5 ms.

use std::collections::VecDeque;

use stoker_gateway::room::{BURST, Told, Unanswered, places, window};

/// An engine and what is asked of it.
#[derive(Clone, Copy)]
struct Case {
    name: &'static str,
    seats: usize,
    step_tokens: u32,
    prompt_tokens: (u32, u32),
    answer_tokens: (u32, u32),
    /// Answers say nothing before their end, as whole ones with log-probabilities.
    tells_at_the_end: bool,
}

const SECONDS: f64 = 60.0;
/// What a step takes, with one sequence and with each token more.
const STEP_MS: f64 = 10.0;
const TOKEN_MS: f64 = 0.03;
/// The gateway looks this often, and the way there takes as long.
const LOOK_MS: f64 = 5.0;
/// Between two reports, and how old each is when it comes.
const REPORT_MS: f64 = 2000.0;
const REPORT_AGE_MS: f64 = 500.0;

#[derive(Clone, Copy)]
struct Sequence {
    prompt_tokens: u32,
    prefill_left: u32,
    answer_left: u32,
    is_answered: bool,
}

struct World {
    case: Case,
    now_ms: f64,
    waiting: VecDeque<Sequence>,
    running: Vec<Sequence>,
    unanswered: Unanswered,
    unanswered_most: u32,
    n_ended: usize,
    drawn: u64,
    step_ends_ms: f64,
    told: Option<Told>,
    /// What was read, and when it comes.
    on_its_way: Option<(f64, u32, u64)>,
    read_ms: f64,
}

impl World {
    fn new(case: Case) -> Self {
        Self {
            case,
            now_ms: 0.0,
            waiting: VecDeque::new(),
            running: Vec::new(),
            unanswered: Unanswered::default(),
            unanswered_most: 0,
            n_ended: 0,
            drawn: 7,
            step_ends_ms: 0.0,
            told: Some(Told { window: BURST, ..Told::default() }),
            on_its_way: None,
            read_ms: 0.0,
        }
    }

    fn between(&mut self, (least, most): (u32, u32)) -> u32 {
        self.drawn = self.drawn.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        least + ((self.drawn >> 33) % u64::from(most - least + 1)) as u32
    }

    /// The client has more than enough to ask.
    fn send(&mut self, count: u32) {
        for _ in 0..count {
            let prompt_tokens = self.between(self.case.prompt_tokens);
            let answer_left = self.between(self.case.answer_tokens);
            self.unanswered.requests += 1;
            self.unanswered_most = self.unanswered_most.max(self.unanswered.requests);
            self.unanswered.tokens += u64::from(prompt_tokens);
            let sequence = Sequence { prompt_tokens, prefill_left: prompt_tokens, answer_left, is_answered: false };
            self.waiting.push_back(sequence);
        }
    }

    fn report(&mut self) {
        if let Some((_, waiting, waiting_tokens)) = self.on_its_way.filter(|(at_ms, ..)| *at_ms <= self.now_ms) {
            let most = std::mem::replace(&mut self.unanswered_most, self.unanswered.requests);
            let before = self.told.map_or(BURST, |told| told.window);
            let unanswered_tokens = self.unanswered.tokens;
            self.told = Some(Told { window: window(before, waiting, most), waiting_tokens, unanswered_tokens });
            self.on_its_way = None;
        }
        if self.now_ms - self.read_ms >= REPORT_MS {
            self.read_ms = self.now_ms;
            let tokens = self.waiting.iter().map(|sequence| u64::from(sequence.prefill_left)).sum();
            self.on_its_way = Some((self.now_ms + REPORT_AGE_MS, self.waiting.len() as u32, tokens));
        }
    }

    /// A step begins; the time that it takes.
    fn begin_step(&mut self) -> f64 {
        let mut budget = self.case.step_tokens;
        for sequence in &mut self.running {
            let tokens = if sequence.prefill_left > 0 { sequence.prefill_left.min(budget) } else { 1 };
            budget = budget.saturating_sub(tokens);
            sequence.prefill_left = sequence.prefill_left.saturating_sub(tokens);
            sequence.answer_left -= u32::from(sequence.prefill_left == 0 && tokens > 0);
        }
        while budget > 0 && self.running.len() < self.case.seats {
            let Some(mut sequence) = self.waiting.pop_front() else { break };
            let tokens = sequence.prefill_left.min(budget);
            budget -= tokens;
            sequence.prefill_left -= tokens;
            sequence.answer_left -= u32::from(sequence.prefill_left == 0);
            self.running.push(sequence);
        }
        STEP_MS + TOKEN_MS * f64::from(self.case.step_tokens - budget)
    }

    /// It ends, and its tokens are told.
    fn end_step(&mut self) {
        let at_the_end = self.case.tells_at_the_end;
        for sequence in &mut self.running {
            let says = sequence.prefill_left == 0 && (!at_the_end || sequence.answer_left == 0);
            if says && !std::mem::replace(&mut sequence.is_answered, true) {
                self.unanswered.requests -= 1;
                self.unanswered.tokens -= u64::from(sequence.prompt_tokens);
            }
        }
        let before = self.running.len();
        self.running.retain(|sequence| sequence.prefill_left > 0 || sequence.answer_left > 0);
        self.n_ended += before - self.running.len();
    }

    /// Answers that ended, where the gateway sends what `room` says.
    fn run(case: Case, room: impl Fn(&Self) -> u32) -> usize {
        let mut world = Self::new(case);
        while world.now_ms < SECONDS * 1000.0 {
            world.pass(&room);
        }
        world.n_ended
    }

    fn pass(&mut self, room: impl Fn(&Self) -> u32) {
        if self.now_ms >= self.step_ends_ms {
            self.end_step();
            self.step_ends_ms = self.now_ms + self.begin_step();
        }
        self.report();
        self.send(room(self));
        self.now_ms += LOOK_MS;
    }
}

fn cases() -> [Case; 5] {
    let chat = Case {
        name: "chat",
        seats: 64,
        step_tokens: 2048,
        prompt_tokens: (50, 1000),
        answer_tokens: (20, 300),
        tells_at_the_end: false,
    };
    [
        chat,
        Case { name: "long prompts", step_tokens: 8192, prompt_tokens: (4000, 30_000), ..chat },
        Case {
            name: "labels",
            seats: 256,
            step_tokens: 8192,
            prompt_tokens: (100, 300),
            answer_tokens: (1, 1),
            ..chat
        },
        Case { name: "a small engine", seats: 4, step_tokens: 512, ..chat },
        Case { name: "whole answers", tells_at_the_end: true, ..chat },
    ]
}

#[test]
fn an_engine_that_is_sent_what_it_has_room_for_loses_no_throughput() {
    for case in cases() {
        let with_room = World::run(case, |world| places(world.told, world.unanswered));
        let with_all = World::run(case, |world| 500u32.saturating_sub(world.waiting.len() as u32));
        let part = with_room as f64 / with_all as f64;
        eprintln!("{}: {with_room} answers of {with_all}, {part:.3}", case.name);
        assert!(part >= 0.98, "{}: {with_room} answers, {with_all} where everything is sent at once", case.name);
    }
}

#[test]
fn a_full_engine_s_queue_is_short() {
    // What says nothing before its end may wait or not: nobody can tell.
    for case in cases().into_iter().filter(|case| !case.tells_at_the_end) {
        let mut world = World::new(case);
        let (mut waiting, mut n_looks) = (0, 0);
        while world.now_ms < SECONDS * 1000.0 {
            world.pass(|world| places(world.told, world.unanswered));
            if world.now_ms > SECONDS * 500.0 {
                waiting += world.waiting.len() as u32;
                n_looks += 1;
            }
        }
        let (waiting, per_second) = (f64::from(waiting) / f64::from(n_looks), world.n_ended as f64 / SECONDS);
        eprintln!("{}: {waiting:.1} wait at the engine, which ends {per_second:.1} a second", case.name);
        assert!(waiting <= 3.0 + per_second / 3.0, "{}: {waiting:.1} wait of {per_second:.1} a second", case.name);
    }
}
