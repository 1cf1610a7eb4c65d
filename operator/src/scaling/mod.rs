//! How many replicas: looks at the readings, decides every two seconds, and leaves the decision in the ledger.
//!
//! [`Autoscaler`] owns the memory of each deployment that scales; rounds take its decision from the [`Ledger`], write it
//! into the status and act on what the status says, so a decision is durable before it creates or drains anything.
//! Nothing here talks to the API server or waits for an agent; the decision itself is `stoker_scaling::decide_scale`.

mod fleet;
mod ledger;
mod report;
mod scaler;
mod starts;

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::{Duration, Instant},
};

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::{
    ResourceExt,
    runtime::reflector::{ObjectRef, Store},
};
use stoker_crds::{
    InferenceDeployment,
    conditions::{METRICS_HEALTHY, SCALING},
    scaling::{ScalingMode, ScalingSpec},
};
use stoker_replica::Replica;
use stoker_scaling::{Held, Holders};
use tokio::sync::mpsc;

pub(crate) use self::report::word;
pub use self::{
    ledger::{CoverageSummary, Latest, Ledger},
    report::{metrics_healthy, scaling_status, scaling_verdict},
};
use self::{
    scaler::{Scaler, Scene},
    starts::{Pods, Starts},
};
use crate::{
    gateways::Gateways,
    lines::Waiting,
    metrics::Metrics,
    observe::{by_owner, observe_replica},
    readings::Readings,
    validate::replicas_wanted,
    verdict::Verdict,
    vitals::Vitals,
};

/// How often is decided: as often as agents are read.
pub const DECIDE_EVERY: Duration = Duration::from_secs(2);
/// Time for the first readings after a start: without them every replica would look lost.
const FIRST_DECISION_AFTER: Duration = Duration::from_secs(3);

/// Decides for every deployment that scales, for as long as it runs.
pub struct Autoscaler {
    /// The deployments.
    pub deployments: Store<InferenceDeployment>,
    /// Their replicas' pods.
    pub pods: Store<Pod>,
    /// Pods that bring their models ahead or keep them in memory.
    pub ahead: Store<Pod>,
    /// What agents said.
    pub readings: Readings,
    /// Gateways that Services lead to, if there are any.
    pub gateways: Option<Gateways>,
    /// What waits for replicas in them.
    pub waiting: Waiting,
    /// Where decisions go.
    pub ledger: Ledger,
    /// Whose deployment to look at again, bounded: when it is full, the next tick asks again.
    pub changed: mpsc::Sender<ObjectRef<InferenceDeployment>>,
    /// Counts decisions.
    pub metrics: Arc<Metrics>,
    /// Where it shows that it goes on.
    pub vitals: Vitals,
}

/// What is kept from tick to tick.
#[derive(Clone, Debug, Default)]
pub struct Kept {
    scalers: HashMap<String, Scaler>,
    starts: Starts,
}

impl Autoscaler {
    /// Decides until the receiver of changes is gone.
    pub async fn run(self) {
        let mut kept = Kept::default();
        let mut ticks = tokio::time::interval_at(tokio::time::Instant::now() + FIRST_DECISION_AFTER, DECIDE_EVERY);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        while !self.changed.is_closed() {
            ticks.tick().await;
            self.vitals.beat("autoscaler");
            let started = Instant::now();
            self.tick(&mut kept, self.readings.now());
            self.metrics.scaling.tick_seconds.observe(started.elapsed().as_secs_f64());
        }
    }

    /// One decision for every deployment that scales, at a time of the clock of readings.
    pub fn tick(&self, kept: &mut Kept, now: Timestamp) {
        let Kept { scalers, starts } = kept;
        let deployments = self.deployments.state();
        let scaling: Vec<_> =
            deployments.iter().filter_map(|deployment| Some((deployment, decides(deployment)?))).collect();
        let uids: HashSet<String> = scaling.iter().filter_map(|(deployment, _)| deployment.uid()).collect();
        scalers.retain(|uid, _| uids.contains(uid));
        for gone in self.ledger.keep_only(&uids) {
            self.metrics.scaling.forget(&gone);
        }
        let (mut pods, ahead) = (by_owner(&self.pods), by_owner(&self.ahead));
        starts.keep_only(&pods);
        for (deployment, spec) in scaling {
            let Some(uid) = deployment.uid() else { continue };
            let own = pods.remove(&uid).unwrap_or_default();
            let model = &deployment.spec.model.source;
            let ahead = (spec.standby > 0).then(|| ahead.get(&uid).map_or(&[][..], Vec::as_slice));
            starts.learn(model, Pods { replicas: &own, ahead });
            let reading = |pod: &Pod| self.readings.at(pod.metadata.uid.as_deref().unwrap_or_default(), now);
            let seen: Vec<Replica> = own.iter().map(|pod| observe_replica(pod, reading(pod))).collect();
            let scene = Scene {
                spec,
                wanted: replicas_wanted(deployment),
                status: deployment.status.as_ref(),
                replicas: &seen,
                held: self.held(deployment),
                start_seconds: starts.p90_seconds(model),
                warm_start_seconds: starts.warm_p90_seconds(model),
                now,
            };
            let scaler = scalers.entry(uid).or_insert_with(|| Scaler::resume(&scene));
            let latest = scaler.step(&scene);
            self.tell(deployment, spec, latest, now);
        }
    }

    /// Leaves the decision in the ledger, and asks for a round if the status is to say something else.
    fn tell(&self, deployment: &InferenceDeployment, spec: &ScalingSpec, latest: Latest, now: Timestamp) {
        let target = ObjectRef::from_obj(deployment);
        self.metrics.scaling.decided(&target, &latest.record);
        let before = deployment.status.as_ref().and_then(|status| status.scaling.as_ref());
        let after = scaling_status(spec, replicas_wanted(deployment), before, Some(&latest), now);
        let verdicts = [
            (METRICS_HEALTHY, metrics_healthy(&latest.coverage)),
            (SCALING, scaling_verdict(&after, spec, Some(&latest.record))),
        ];
        let says_otherwise = verdicts.iter().any(|(type_, verdict)| says_otherwise(deployment, type_, verdict));
        let moved = before != Some(&after) || says_otherwise;
        self.ledger.record(deployment, latest);
        if moved {
            // Full, or the operator stops: the next tick asks again.
            let _ = self.changed.try_send(target);
        }
    }

    /// What gateways hold for a deployment. Where its Service leads past them nobody would hold what comes that way.
    fn held(&self, deployment: &InferenceDeployment) -> Held {
        let (namespace, name) = (deployment.namespace().unwrap_or_default(), deployment.name_any());
        let gateways = self.gateways.as_ref().zip(deployment.uid());
        let is_led = gateways.is_some_and(|(gateways, uid)| gateways.leads(&uid));
        let held = self.waiting.of(&namespace, &name, Instant::now());
        if is_led { held } else { Held { by: Holders::Nobody, ..held } }
    }
}

/// A condition is not what it is to be. One that was never written is written by the rounds of a start.
fn says_otherwise(deployment: &InferenceDeployment, type_: &str, verdict: &Verdict) -> bool {
    let conditions = deployment.status.iter().flat_map(|status| &status.conditions);
    let mut said = conditions.filter(|condition| condition.type_ == type_);
    said.any(|condition| condition.message != verdict.trouble.message)
}

/// The specification, if anything is to be decided by it.
fn decides(deployment: &InferenceDeployment) -> Option<&ScalingSpec> {
    let leaves = deployment.metadata.deletion_timestamp.is_some();
    deployment
        .spec
        .scaling
        .as_ref()
        .filter(|spec| !leaves && spec.mode != ScalingMode::External && spec.errors().is_empty())
}
