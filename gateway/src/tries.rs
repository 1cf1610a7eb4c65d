//! What asking replicas has come to while none has answered: whether another one may be asked, or the same ones again, and what the client
//! is told in the end. Asks nobody itself.

use std::time::Duration;

use axum::http::StatusCode;

use crate::{
    asked::Asked,
    attempt::Answered,
    error::GatewayError,
    fleet::Deployment,
    gateway::Gateway,
    search::{Loss, Losses, Patience, Rounds},
    vital::Flight,
};

/// Replicas that may refuse one request at most.
const REFUSALS_MAX: u32 = 3;
/// How long a deployment is looked at again that should have replicas and has none that takes requests: others may know that one is
/// ready a moment before this gateway has heard of it.
const NEWS: Duration = Duration::from_secs(2);

/// An answer that says no, and the place that it had.
type Refusal = (Answered, Flight);

/// What asking replicas has come to while none has answered.
#[derive(Default)]
pub(crate) struct Tries {
    /// Who was asked in this round, by their slots.
    pub(crate) tried: Vec<u32>,
    n_refused: u32,
    /// How often one was lost.
    pub(crate) losses: Losses,
    /// With those that are silent.
    pub(crate) patience: Patience,
    /// Since somebody was silent.
    rounds: Option<Rounds>,
    refusal: Option<Refusal>,
    silence: Option<String>,
}

impl Tries {
    /// One refused; the client is told what the last one said.
    pub(crate) fn refused(&mut self, refusal: Refusal) {
        self.n_refused += 1;
        self.refusal = Some(refusal);
    }

    /// One did not answer, and had not taken the request.
    pub(crate) fn unreachable(&mut self, error: String, window: Duration) {
        self.rounds.get_or_insert_with(|| Rounds::within(window));
        self.silence = Some(error);
    }

    /// The time for the search begins again: a replica that had the request may have computed for long.
    pub(crate) fn lost(&mut self, how: Loss, error: String, window: Duration) {
        self.losses.add(how);
        self.rounds = Some(Rounds::within(window));
        self.silence = Some(error);
    }

    /// Whether another replica of this round may be asked. What a replica that was lost had taken is looked a place for as streams
    /// are; what none has taken yet is load that those who are full would only send on.
    pub(crate) fn may_ask(&self, gateway: &Gateway, asked: &Asked) -> bool {
        let is_free = self.n_refused == 0 || self.losses.is_any() || asked.follows;
        is_free || self.n_refused < REFUSALS_MAX && gateway.spend_retry()
    }

    /// Whether the request goes back in line: nobody had it, and nobody takes any. Who was asked has left.
    pub(crate) fn is_held(&self, gateway: &Gateway, asked: &Asked, deployment: &Deployment) -> bool {
        self.silence.is_none() && !asked.follows && !deployment.room(gateway.now_ms(), 0).serves
    }

    /// Whether nobody was silent so far.
    pub(crate) fn all_spoke(&self) -> bool {
        self.silence.is_none()
    }

    /// Whether those who were asked take no requests any more: others may be on their way, or it is not known yet that nobody does.
    fn all_leave(&self) -> bool {
        let status = self.refusal.as_ref().map(|(response, _)| response.status());
        self.silence.is_none() && status == Some(StatusCode::SERVICE_UNAVAILABLE)
    }

    /// Waits for another round, if one is of use.
    pub(crate) async fn next_round(&mut self, asked: &Asked, deployment: &Deployment) -> bool {
        if self.refusal.is_none() && self.silence.is_none() && deployment.replicas_wanted > 0 {
            self.rounds.get_or_insert_with(|| Rounds::within(NEWS));
        }
        if self.all_leave() && !asked.follows {
            // They are not asked again: they said no.
            return self.rounds.get_or_insert_with(|| Rounds::within(NEWS)).next().await;
        }
        let is_of_use = (self.refusal.is_none() || self.losses.is_any()) && !asked.follows;
        let Some(rounds) = self.rounds.as_mut().filter(|_| is_of_use) else { return false };
        self.tried.clear();
        rounds.next().await
    }

    /// What the client is told.
    pub(crate) fn end(self, deployment: &Deployment, attempts: u32) -> Result<Refusal, GatewayError> {
        match (self.refusal, self.silence) {
            (_, Some(error)) if self.losses.are_too_many() => Err(GatewayError::lost_before_answer(deployment, &error)),
            (Some(refusal), _) => Ok(refusal),
            (None, Some(error)) => Err(GatewayError::no_answer(deployment, attempts, &error)),
            (None, None) => Err(GatewayError::no_replica(deployment)),
        }
    }
}
