//! A run: every request leaves at its planned moment, whatever became of those before it.
//!
//! One task owns the counts; requests are tasks of their own. The bound on requests in flight does not delay a request,
//! which would hide a stall: one above it is counted as not sent.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use stoker_workload::Request;
use tokio::{
    sync::mpsc,
    task::{JoinError, JoinSet},
    time::{self, MissedTickBehavior},
};

use crate::{
    answer::{Complete, Usage},
    client::{Ask, Client, Failure, FailureKind, Prompt},
    prompt::{TokenCount, prompt},
};

/// What to do.
#[derive(Clone, Debug)]
pub struct Plan {
    /// In order of their planned moments.
    pub requests: Vec<Request>,
    /// Name of the model to ask.
    pub model: String,
    /// How the server counts tokens.
    pub token_count: TokenCount,
    /// Makes prompts and sampling repeatable.
    pub seed: u64,
    /// From the planned moment to the end of the answer.
    pub timeout: Duration,
    /// Requests in flight at most.
    pub in_flight_max: usize,
}

/// What became of one request. Times count from its planned moment.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// When it was planned, from the beginning of the run; nothing of one that was abandoned.
    pub planned: Option<Duration>,
    /// How much later than planned it was sent.
    pub send_lag: Duration,
    /// The answer, or why there is none.
    pub result: Result<Heard, Failure>,
}

/// An answer as its reader lived it.
#[derive(Clone, Debug)]
pub struct Heard {
    /// To the first text.
    pub ttft: Duration,
    /// To the last text.
    pub e2e: Duration,
    /// Between pieces of text.
    pub gaps: Vec<Duration>,
    /// The server's count, or a token a piece.
    pub usage: Usage,
}

impl Heard {
    /// An answer to a request planned for `planned`.
    pub fn of(complete: &Complete, planned: Instant) -> Self {
        let Complete { pieces, usage } = complete;
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
    /// Requests in all.
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
            planned = at(due) => run.send(planned),
            Some(ended) = run.in_flight.join_next() => run.outcomes.push(ended.unwrap_or_else(|error| abandoned(&error))),
            Some(wish) = wishes.recv() => run.obey(wish),
            _ = tick.tick() => on_progress(&run.progress()),
        }
    }
}

struct Running<'a> {
    client: &'a Client,
    plan: Arc<Plan>,
    begun: Instant,
    n_sent: usize,
    /// Requests that are still meant to leave, with those that did.
    n_kept: usize,
    in_flight: JoinSet<Outcome>,
    outcomes: Vec<Outcome>,
}

impl<'a> Running<'a> {
    fn new(client: &'a Client, plan: Plan) -> Self {
        Self {
            client,
            n_kept: plan.requests.len(),
            outcomes: Vec::with_capacity(plan.requests.len()),
            plan: Arc::new(plan),
            begun: Instant::now(),
            n_sent: 0,
            in_flight: JoinSet::new(),
        }
    }

    /// When the next request is due.
    fn due(&self) -> Option<Instant> {
        let next = self.plan.requests[..self.n_kept].get(self.n_sent)?;
        Some(self.begun + Duration::from_secs_f64(next.arrived))
    }

    fn send(&mut self, planned: Instant) {
        let idx = self.n_sent;
        self.n_sent += 1;
        if self.in_flight.len() >= self.plan.in_flight_max {
            let outcome = not_sent(self.plan.in_flight_max);
            self.outcomes.push(Outcome { planned: Some(planned - self.begun), ..outcome });
            return;
        }
        let (client, plan, begun) = (self.client.clone(), Arc::clone(&self.plan), self.begun);
        self.in_flight.spawn(async move {
            let outcome = one(&client, &plan, idx, planned).await;
            Outcome { planned: Some(planned - begun), ..outcome }
        });
    }

    fn obey(&mut self, wish: Wish) {
        self.n_kept = self.n_sent;
        match wish {
            Wish::Finish => {}
            Wish::Abandon => self.in_flight.abort_all(),
        }
    }

    fn progress(&self) -> Progress<'_> {
        Progress {
            elapsed: self.begun.elapsed(),
            n_planned: self.plan.requests.len(),
            n_sent: self.n_sent,
            n_in_flight: self.in_flight.len(),
            outcomes: &self.outcomes,
        }
    }
}

/// Waits for a moment and returns it; forever when there is none.
async fn at(moment: Option<Instant>) -> Instant {
    match moment {
        Some(moment) => {
            time::sleep_until(moment.into()).await;
            moment
        }
        None => std::future::pending().await,
    }
}

async fn one(client: &Client, plan: &Plan, idx: usize, planned: Instant) -> Outcome {
    let request = &plan.requests[idx];
    let seed = plan.seed.wrapping_add(idx as u64);
    let prompt = Prompt::Text(prompt(request, plan.token_count, seed));
    let ask = Ask { prompt, max_tokens: request.completion_tokens, seed };
    let send_lag = planned.elapsed();
    let complete = client.ask(&plan.model, &ask, (planned + plan.timeout).into()).await;
    Outcome { planned: None, send_lag, result: complete.map(|complete| Heard::of(&complete, planned)) }
}

fn not_sent(in_flight_max: usize) -> Outcome {
    let message = format!("{in_flight_max} requests were in flight: raise --in-flight-max, or send less");
    Outcome { planned: None, send_lag: Duration::ZERO, result: Err(Failure::new(FailureKind::NotSent, message)) }
}

fn abandoned(error: &JoinError) -> Outcome {
    Outcome { planned: None, send_lag: Duration::ZERO, result: Err(Failure::new(FailureKind::Abandoned, error)) }
}
