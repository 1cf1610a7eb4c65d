//! A run: every session begins at its planned moment, whatever became of those before it. A later turn is planned when the answer
//! before it has ended and its user has thought.
//!
//! One task owns the counts; requests are tasks of their own. The bound on requests in flight does not delay a request,
//! which would hide a stall: one above it is counted as not sent.

use std::{
    cmp::Ordering,
    collections::{BinaryHeap, HashMap},
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::{
    sync::mpsc,
    task::{Id, JoinError, JoinSet},
    time::{self, MissedTickBehavior},
};

use crate::{
    answer::{Complete, Usage},
    client::{Ask, Client, Failure, FailureKind},
    prompt::{TokenCount, prompt},
    session::{Conversation, Session},
    shape::{Kind, Verdict},
};

/// What to do.
#[derive(Clone, Debug)]
pub struct Plan {
    /// In order of their first planned moments.
    pub sessions: Vec<Session>,
    /// What sessions ask.
    pub models: Vec<Model>,
    /// Makes prompts and sampling repeatable.
    pub seed: u64,
    /// From the planned moment to the end of the answer.
    pub timeout: Duration,
    /// Requests in flight at most.
    pub in_flight_max: usize,
}

/// One model of the endpoint.
#[derive(Clone, Debug)]
pub struct Model {
    /// As requests have it.
    pub name: String,
    /// How the server counts its tokens.
    pub token_count: TokenCount,
}

/// Which request of a run it was.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Which {
    /// When it was planned, from the beginning of the run.
    pub planned: Duration,
    /// The model that it asked.
    pub model_idx: usize,
    /// Turns of its session before it.
    pub turn_idx: usize,
    /// What it asked for.
    pub kind: Kind,
}

/// What became of one request. Times count from its planned moment.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Which one.
    pub which: Which,
    /// How much later than planned it was sent.
    pub send_lag: Duration,
    /// The answer, or why there is none.
    pub result: Result<AnswerTiming, Failure>,
    /// Whether the answer is what was asked for, where not any text is.
    pub verdict: Option<Verdict>,
}

/// An answer as its reader lived it.
#[derive(Clone, Debug)]
pub struct AnswerTiming {
    /// To the first text.
    pub ttft: Duration,
    /// To the last text.
    pub e2e: Duration,
    /// Between pieces of text.
    pub gaps: Vec<Duration>,
    /// The server's count, or a token a piece.
    pub usage: Usage,
}

impl AnswerTiming {
    /// An answer to a request planned for `planned`.
    pub fn of(complete: &Complete, planned: Instant) -> Self {
        let Complete { pieces, usage, .. } = complete;
        let since = |moment: Option<&Instant>| moment.map_or(Duration::ZERO, |moment| *moment - planned);
        let counted = Usage { prompt_tokens: 0, completion_tokens: u32::try_from(pieces.len()).unwrap_or(u32::MAX) };
        Self {
            ttft: since(pieces.first()),
            e2e: since(pieces.last()),
            gaps: pieces.windows(2).map(|pair| pair[1] - pair[0]).collect(),
            usage: usage.unwrap_or(counted),
        }
    }

    /// Mean time per token after the first; nothing for a single token.
    pub fn time_per_token(&self) -> Option<Duration> {
        let after_first = self.usage.completion_tokens.checked_sub(1).filter(|tokens| *tokens > 0)?;
        Some((self.e2e - self.ttft) / after_first)
    }
}

/// What a run has come to so far.
#[derive(Debug)]
pub struct Progress<'a> {
    /// Since it began.
    pub elapsed: Duration,
    /// Requests in all, later turns of sessions too.
    pub n_planned: usize,
    /// Requests that left.
    pub n_sent: usize,
    /// Requests without an end yet.
    pub n_in_flight: usize,
    /// Those with one, in the order of their ends.
    pub outcomes: &'a [Outcome],
}

/// What a person wants of a run that goes on.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Wish {
    /// Send nothing more, wait for what is in flight.
    Finish,
    /// Wait for nothing.
    Abandon,
}

/// How often progress is told.
const PROGRESS_EVERY: Duration = Duration::from_secs(1);

/// Carries out a plan; the outcomes and how long it took, up to the last end.
pub async fn run(
    client: &Client,
    plan: Plan,
    mut wishes: mpsc::Receiver<Wish>,
    mut on_progress: impl FnMut(&Progress<'_>),
) -> (Vec<Outcome>, Duration) {
    let mut run = Running::new(client, plan);
    let mut tick = time::interval(PROGRESS_EVERY);
    tick.set_missed_tick_behavior(MissedTickBehavior::Skip);
    loop {
        let due = run.due();
        if due.is_none() && run.in_flight.is_empty() {
            return (run.outcomes, run.begun.elapsed());
        }
        tokio::select! {
            // A request that is due comes before everything else.
            biased;
            () = at(due) => run.send_next(),
            Some(ended) = run.in_flight.join_next_with_id() => run.take(ended),
            Some(wish) = wishes.recv() => run.obey(wish),
            _ = tick.tick() => on_progress(&run.progress()),
        }
    }
}

/// The next turn of a session, and what was said before it. The one that is planned first is the greatest.
struct Due {
    planned: Instant,
    session_idx: usize,
    turn_idx: usize,
    conversation: Conversation,
}

impl Ord for Due {
    fn cmp(&self, other: &Self) -> Ordering {
        (other.planned, other.session_idx).cmp(&(self.planned, self.session_idx))
    }
}

impl PartialOrd for Due {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Due {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Due {}

/// A request that has ended, and when its session goes on if it was answered.
struct Ended {
    outcome: Outcome,
    session_idx: usize,
    goes_on: Option<Due>,
}

struct Running<'a> {
    client: &'a Client,
    plan: Arc<Plan>,
    begun: Instant,
    /// Sessions that have begun.
    n_begun: usize,
    /// Sessions that are still meant to begin, with those that did.
    n_kept: usize,
    /// Whether sessions go on that have begun.
    goes_on: bool,
    later: BinaryHeap<Due>,
    n_planned: usize,
    n_sent: usize,
    in_flight: JoinSet<Ended>,
    /// Which requests these are: a task that is stopped does not say it any more.
    asked: HashMap<Id, Which>,
    outcomes: Vec<Outcome>,
}

impl<'a> Running<'a> {
    fn new(client: &'a Client, plan: Plan) -> Self {
        let n_planned = plan.sessions.iter().map(|session| session.turns.len()).sum();
        Self {
            client,
            n_kept: plan.sessions.len(),
            outcomes: Vec::with_capacity(n_planned),
            plan: Arc::new(plan),
            begun: Instant::now(),
            n_begun: 0,
            goes_on: true,
            later: BinaryHeap::new(),
            n_planned,
            n_sent: 0,
            in_flight: JoinSet::new(),
            asked: HashMap::new(),
        }
    }

    /// When the next request is due.
    fn due(&self) -> Option<Instant> {
        let later = self.later.peek().map(|due| due.planned);
        [self.arrival(), later].into_iter().flatten().min()
    }

    /// When the next session begins.
    fn arrival(&self) -> Option<Instant> {
        let next = self.plan.sessions[..self.n_kept].get(self.n_begun)?;
        Some(self.begun + Duration::from_secs_f64(next.arrived))
    }

    /// Sends what is due first.
    fn send_next(&mut self) {
        let later = self.later.peek().map(|due| due.planned);
        match self.arrival() {
            Some(planned) if later.is_none_or(|later| planned <= later) => {
                let (session_idx, conversation) = (self.n_begun, Conversation::default());
                self.n_begun += 1;
                self.send(Due { planned, session_idx, turn_idx: 0, conversation });
            }
            _ => {
                if let Some(due) = self.later.pop() {
                    self.send(due);
                }
            }
        }
    }

    fn send(&mut self, due: Due) {
        let which = self.which(due.session_idx, due.turn_idx, due.planned);
        if self.in_flight.len() >= self.plan.in_flight_max {
            self.end(due.session_idx, not_sent(which, self.plan.in_flight_max));
            return;
        }
        self.n_sent += 1;
        let (client, plan) = (self.client.clone(), Arc::clone(&self.plan));
        let task = self.in_flight.spawn(async move { one(&client, &plan, due, which).await });
        self.asked.insert(task.id(), which);
    }

    fn which(&self, session_idx: usize, turn_idx: usize, planned: Instant) -> Which {
        let session = &self.plan.sessions[session_idx];
        let kind = session.turns[turn_idx].shape.kind();
        Which { planned: planned - self.begun, model_idx: session.model_idx, turn_idx, kind }
    }

    fn take(&mut self, ended: Result<(Id, Ended), JoinError>) {
        match ended {
            Ok((id, Ended { outcome, session_idx, goes_on })) => {
                self.asked.remove(&id);
                match goes_on {
                    Some(due) => {
                        self.outcomes.push(outcome);
                        self.later.extend(Some(due).filter(|_| self.goes_on));
                    }
                    None => self.end(session_idx, outcome),
                }
            }
            Err(error) => {
                let which = self.asked.remove(&error.id()).expect("every task was noted when it began");
                self.outcomes.push(failed(which, Failure::new(FailureKind::Abandoned, error)));
            }
        }
    }

    /// The last outcome of a session; turns that a failure keeps from being asked are counted too.
    fn end(&mut self, session_idx: usize, outcome: Outcome) {
        let (which, is_answered) = (outcome.which, outcome.result.is_ok());
        self.outcomes.push(outcome);
        if is_answered || !self.goes_on {
            return;
        }
        for turn_idx in which.turn_idx + 1..self.plan.sessions[session_idx].turns.len() {
            let kind = self.plan.sessions[session_idx].turns[turn_idx].shape.kind();
            let failure = Failure::new(FailureKind::Unreached, "the turn before it in its session failed");
            self.outcomes.push(failed(Which { turn_idx, kind, ..which }, failure));
        }
    }

    fn obey(&mut self, wish: Wish) {
        self.n_kept = self.n_begun;
        self.goes_on = false;
        self.later.clear();
        match wish {
            Wish::Finish => {}
            Wish::Abandon => self.in_flight.abort_all(),
        }
    }

    fn progress(&self) -> Progress<'_> {
        Progress {
            elapsed: self.begun.elapsed(),
            n_planned: self.n_planned,
            n_sent: self.n_sent,
            n_in_flight: self.in_flight.len(),
            outcomes: &self.outcomes,
        }
    }
}

/// Waits for a moment; forever when there is none.
async fn at(moment: Option<Instant>) {
    match moment {
        Some(moment) => time::sleep_until(moment.into()).await,
        None => std::future::pending().await,
    }
}

async fn one(client: &Client, plan: &Plan, due: Due, which: Which) -> Ended {
    let Due { planned, session_idx, turn_idx, mut conversation } = due;
    let session = &plan.sessions[session_idx];
    let (turn, model) = (&session.turns[turn_idx], &plan.models[session.model_idx]);
    // Sessions lie beside each other, turns of one far apart, so that no two requests have the same seed.
    let seed = plan.seed.wrapping_add(session_idx as u64).wrapping_add((turn_idx as u64) << 32);
    let prompt = conversation.asked(prompt(turn, model.token_count, seed));
    let ask = Ask { prompt, max_tokens: turn.completion_tokens, seed, shape: turn.shape.clone() };
    let send_lag = planned.elapsed();
    let complete = match client.ask(&model.name, &ask, (planned + plan.timeout).into()).await {
        Ok(complete) => complete,
        Err(failure) => {
            return Ended { outcome: Outcome { send_lag, ..failed(which, failure) }, session_idx, goes_on: None };
        }
    };
    let (timing, verdict) = (AnswerTiming::of(&complete, planned), turn.shape.judge(&complete));
    let goes_on = session.turns.get(turn_idx + 1).map(|next| {
        let planned = planned + timing.e2e + next.think;
        conversation.answered(complete);
        Due { planned, session_idx, turn_idx: turn_idx + 1, conversation }
    });
    Ended { outcome: Outcome { which, send_lag, result: Ok(timing), verdict }, session_idx, goes_on }
}

fn not_sent(which: Which, in_flight_max: usize) -> Outcome {
    let message = format!("{in_flight_max} requests were in flight: raise --in-flight-max, or send less");
    failed(which, Failure::new(FailureKind::NotSent, message))
}

fn failed(which: Which, failure: Failure) -> Outcome {
    Outcome { which, send_lag: Duration::ZERO, result: Err(failure), verdict: None }
}
