//! A round. It decides on the caches first. Only if that would write anything does it read the API server and decide again, so a
//! settled deployment costs no request and no decision that changes something rests on a stale cache.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use jiff::Timestamp;
use kube::{ResourceExt, runtime::controller::Action};
use stoker_crds::{InferenceDeployment, InferenceDeploymentStatus};
use tracing::{Instrument, info, info_span, warn};

use super::{Context, SAFETY_NET, decision::Decision};
use crate::{
    apply::{Applied, Apply, Refusal},
    desired::config_map_name,
    error::ReconcileError,
    lint,
    observe::{Observed, observe_cached, observe_live},
    plan,
    refused::Attempt,
    revision::revision,
    status::status_of_invalid,
    validate::{SpecError, validate},
};

/// When to try again what somebody else's object blocks.
const RETRY_BLOCKED: Duration = Duration::from_secs(10);
/// Whether pods without our labels are gone: no event says so.
const LOOK_FOR_STRAYS: Duration = Duration::from_secs(300);

/// One round with its metrics and log fields.
pub(super) async fn reconcile(
    deployment: Arc<InferenceDeployment>,
    context: Arc<Context>,
) -> Result<Action, ReconcileError> {
    let span = info_span!("round", namespace = deployment.namespace(), name = deployment.name_any());
    let started = Instant::now();
    let _under_way = context.vitals.round();
    let outcome = round(deployment.clone(), &context).instrument(span).await;
    context.metrics.reconcile_seconds.observe(started.elapsed().as_secs_f64());
    if outcome.is_ok() {
        context.failures.forget(&deployment);
    }
    outcome
}

/// Observe, validate, plan, apply, status.
async fn round(deployment: Arc<InferenceDeployment>, context: &Context) -> Result<Action, ReconcileError> {
    if deployment.metadata.deletion_timestamp.is_some() {
        // Children are owned: the garbage collector deletes them, SIGTERM drains them.
        return Ok(Action::await_change());
    }
    if !context.leadership.holds() {
        return Err(ReconcileError::NotLeading);
    }
    let cached = observe_cached(deployment.clone(), &context.caches, &context.readings);
    if let Some(settled) = context.settled(&cached, context.readings.now()) {
        return Ok(settled);
    }
    let revision_map = validate(&deployment, &context.defaults)
        .map(|valid| config_map_name(&valid.identity.name, &revision(&valid.replica)))
        .ok();
    let (client, caches) = (&context.client, &context.caches);
    let live = observe_live(&deployment, revision_map.as_deref(), client, caches, &context.readings).await;
    match live.map_err(ReconcileError::Observe)? {
        Some(live) => context.carry_out(&live, context.readings.now()).await,
        None => Ok(Action::await_change()),
    }
}

impl Context {
    /// When to look again, if nothing is to be written; `None` if something is.
    fn settled(&self, observed: &Observed, now: Timestamp) -> Option<Action> {
        let before = observed.deployment.status.as_ref();
        match self.decide(observed, now) {
            Err(error) => {
                let status = invalid_status(&error, observed, now);
                (before == Some(&status)).then(|| Action::requeue(SAFETY_NET))
            }
            Ok(decision) => {
                let attempt = Attempt::of(&observed.deployment, &decision.plan);
                let standing = self.refused.standing(&attempt, Instant::now());
                let waits = standing.as_ref().and_then(|_| self.refused.wait(&attempt, Instant::now()));
                let idle = decision.plan.is_empty() || standing.is_some();
                let outlook = decision.outlook(observed, &standing.unwrap_or_default(), now);
                // Whether strays are still there is not in any cache.
                let settled = idle && decision.plan.taken.is_empty() && observed.strays.is_empty();
                (settled && before == Some(&outlook.status)).then(|| decision.next_look(&outlook, now, waits))
            }
        }
    }

    /// Plans from a fresh observation and writes what it takes.
    async fn carry_out(&self, observed: &Observed, now: Timestamp) -> Result<Action, ReconcileError> {
        let decision = match self.decide(observed, now) {
            Ok(decision) => decision,
            Err(error) => {
                warn!(%error, "cannot be deployed");
                let status = invalid_status(&error, observed, now);
                self.report(observed, &Applied::default(), &status).await?;
                return Ok(Action::requeue(SAFETY_NET));
            }
        };
        if let Err(refused) = self.lint(&decision, observed, now) {
            let refusal = Refusal { what: "this operator's own plan".to_owned(), message: refused.to_string() };
            let applied = Applied { refusals: vec![refusal], ..Applied::default() };
            self.report(observed, &applied, &decision.outlook(observed, &applied, now).status).await?;
            return Err(refused);
        }
        let attempt = Attempt::of(&observed.deployment, &decision.plan);
        let applied = match self.refused.standing(&attempt, Instant::now()) {
            Some(standing) => standing,
            None => self.attempt(&attempt, &decision, observed, now).await?,
        };
        let outlook = decision.outlook(observed, &applied, now);
        self.report(observed, &applied, &outlook.status).await?;
        let blocked = !decision.plan.taken.is_empty() || !applied.strays.is_empty();
        let strays = (!observed.strays.is_empty()).then_some(LOOK_FOR_STRAYS);
        let refused = self.refused.wait(&attempt, Instant::now());
        let at_most = [blocked.then_some(RETRY_BLOCKED), refused, strays].into_iter().flatten().min();
        Ok(decision.next_look(&outlook, now, at_most))
    }

    /// Writes, and keeps in mind what was refused.
    async fn attempt(
        &self,
        attempt: &Attempt,
        decision: &Decision,
        observed: &Observed,
        now: Timestamp,
    ) -> Result<Applied, ReconcileError> {
        let applied = match self.apply(decision, observed, now).await {
            Ok(applied) => applied,
            Err(error) => {
                let refusal = self.refused.in_error(attempt, &error, self.failures.of(&observed.deployment));
                Applied { refusals: vec![refusal.ok_or(error)?], ..Applied::default() }
            }
        };
        self.refused.note(attempt.clone(), &applied.refusals, Instant::now());
        if !applied.refusals.is_empty() {
            self.refused.keep_only(&self.deployments.state().iter().filter_map(|object| object.uid()).collect());
        }
        Ok(applied)
    }

    fn lint(&self, decision: &Decision, observed: &Observed, now: Timestamp) -> Result<(), ReconcileError> {
        let wanted = plan::wanted(&decision.deployment, &decision.desired, observed);
        let violations = lint::check(&decision.plan, &wanted, &observed.replicas, now);
        if violations.is_empty() {
            return Ok(());
        }
        self.metrics.plans_refused.inc();
        Err(ReconcileError::Lint(violations))
    }

    async fn apply(&self, decision: &Decision, observed: &Observed, now: Timestamp) -> Result<Applied, ReconcileError> {
        if decision.plan.is_empty() {
            return Ok(Applied::default());
        }
        info!(plan = %decision.plan.to_string().trim_end().replace('\n', "; "), "applying");
        let apply = Apply {
            client: self.client.clone(),
            metrics: self.metrics.clone(),
            namespace: decision.deployment.identity.namespace.clone(),
            drain: decision.deployment.replica.drain,
        };
        apply.run(&decision.plan, &decision.desired, observed, now).await
    }
}

fn invalid_status(error: &SpecError, observed: &Observed, now: Timestamp) -> InferenceDeploymentStatus {
    let deployment = &observed.deployment;
    let previous = deployment.status.clone().unwrap_or_default();
    status_of_invalid(error, deployment.metadata.generation, &previous, now)
}
