//! Who may have how many GPUs: of all deployments in namespaces with an [`InferenceBudget`] together.
//!
//! [`Treasurer`] looks at deployments, pods and budgets every two seconds and leaves its grants in [`Grants`]; rounds work towards no
//! more replicas than were granted. Deciding is pure ([`grants`]); what was granted is in statuses, so an operator that begins to lead
//! grants the same. Writes nothing but the status of budgets.

mod claims;
pub mod grants;
mod report;

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, PoisonError, RwLock},
    time::Duration,
};

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, Client, Resource, ResourceExt,
    api::{Patch, PatchParams},
    runtime::reflector::{ObjectRef, Store},
};
use serde_json::json;
use stoker_crds::{InferenceBudget, InferenceDeployment, inference_budget::InferenceBudgetStatus};
use tokio::sync::mpsc;
use tracing::warn;

pub use self::{
    claims::budget_of,
    report::{budget_status, granted_verdict},
};
use self::{
    claims::{claim, leaves},
    grants::{Budget, Claim, Grant},
};
use crate::{
    apply::FIELD_MANAGER,
    metrics::Metrics,
    observe::by_owner,
    readings::Readings,
    vitals::Vitals,
    watched::{Seen, Watched},
};

/// How often is looked.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// A grant, and what it is of.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Granted {
    /// Replicas that are wanted.
    pub wanted: u32,
    /// Fewest of them whose lack is a fault: all, or `scaling.min`.
    pub owed: u32,
    /// GPUs of each.
    pub gpus: u64,
    /// What it gets.
    pub grant: Grant,
}

/// Grants by the UID of deployments, and which namespaces have budgets. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct Grants {
    by_uid: Arc<RwLock<HashMap<String, Granted>>>,
    budgets: Watched<InferenceBudget>,
}

impl Grants {
    /// Of these budgets.
    pub fn of_budgets(budgets: Watched<InferenceBudget>) -> Self {
        Self { budgets, ..Self::default() }
    }

    /// What a deployment was granted; `None`: nothing limits it. One that was not looked at yet has what its status says, and a new one
    /// nothing.
    pub fn of(&self, deployment: &InferenceDeployment) -> Option<Granted> {
        let namespace = deployment.namespace();
        let is_limited = match self.budgets.seen() {
            Seen::All(budgets) => budgets.iter().any(|budget| budget.namespace() == namespace),
            Seen::NotYet => deployment.status.as_ref().is_some_and(|status| status.budget.is_some()),
            Seen::Denied => false,
        };
        if deployment.spec.gpus() == 0 || !is_limited {
            return None;
        }
        let by_uid = self.by_uid.read().unwrap_or_else(PoisonError::into_inner);
        Some(by_uid.get(&deployment.uid()?).cloned().unwrap_or_else(|| written(deployment)))
    }

    /// What a deployment was granted when it was looked at last, by this operator or another one.
    fn before(&self, deployment: &InferenceDeployment) -> Option<u32> {
        let by_uid = self.by_uid.read().unwrap_or_else(PoisonError::into_inner);
        let known = by_uid.get(&deployment.uid()?).map(|granted| granted.grant.replicas);
        let written = || Some(deployment.status.as_ref()?.budget.as_ref()?.granted.max(0).unsigned_abs());
        known.or_else(written)
    }

    fn set(&self, grants: HashMap<String, Granted>) {
        *self.by_uid.write().unwrap_or_else(PoisonError::into_inner) = grants;
    }
}

fn written(deployment: &InferenceDeployment) -> Granted {
    let before = deployment.status.as_ref().and_then(|status| status.budget.as_ref());
    let replicas = before.map_or(0, |before| before.granted.max(0).unsigned_abs());
    let claim = claim(deployment, std::iter::empty(), None, Timestamp::UNIX_EPOCH);
    Granted { grant: Grant { replicas, blocked: None }, ..of_claim(&claim, Grant::default()) }
}

fn of_claim(claim: &Claim, grant: Grant) -> Granted {
    Granted { wanted: claim.wanted, owed: claim.min.min(claim.wanted), gpus: claim.gpus, grant }
}

/// Grants for as long as it runs.
pub struct Treasurer {
    /// Who writes the status of budgets.
    pub client: Client,
    /// The deployments.
    pub deployments: Store<InferenceDeployment>,
    /// Their pods.
    pub pods: Store<Pod>,
    /// The clock.
    pub readings: Readings,
    /// Where grants go.
    pub grants: Grants,
    /// Whose deployment to look at again, bounded: when it is full, the next look asks again.
    pub changed: mpsc::Sender<ObjectRef<InferenceDeployment>>,
    /// Counts writes.
    pub metrics: Arc<Metrics>,
    /// Where it shows that it goes on.
    pub vitals: Vitals,
}

/// All of a budget that is looked at.
pub fn slim(mut budget: InferenceBudget) -> InferenceBudget {
    let metadata = &mut budget.metadata;
    metadata.managed_fields = None;
    metadata.resource_version = None;
    budget
}

impl Treasurer {
    /// Looks until the receiver of changes is gone.
    pub async fn run(self) {
        let mut ticks = tokio::time::interval(LOOK_EVERY);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        while !self.changed.is_closed() {
            ticks.tick().await;
            self.vitals.beat("treasurer");
            if let Seen::All(budgets) = self.grants.budgets.seen() {
                self.look(&budgets, self.readings.now()).await;
            }
        }
    }

    async fn look(&self, objects: &[InferenceBudget], now: Timestamp) {
        let budgets: Vec<Budget> = objects.iter().map(budget_of).collect();
        let (deployments, claims) = self.claims(&budgets, now);
        let grants = grants::grants(&budgets, &claims);
        let by_uid = deployments
            .iter()
            .zip(&claims)
            .zip(&grants)
            .filter_map(|((deployment, claim), grant)| Some((deployment.uid()?, of_claim(claim, grant.clone()))));
        self.grants.set(by_uid.collect());
        // Also those whose budget is gone.
        for deployment in self.deployments.state().iter().filter(|deployment| self.is_news(deployment)) {
            // Full, or the operator stops: the next look asks again.
            _ = self.changed.try_send(ObjectRef::from_obj(&**deployment));
        }
        let all: Vec<(&Claim, &Grant)> = claims.iter().zip(&grants).collect();
        for (object, budget) in objects.iter().zip(&budgets) {
            let status = report::status_of(budget, object.metadata.generation, &all);
            if object.status.as_ref() != Some(&status) {
                self.write(object, &status).await;
            }
        }
    }

    /// Deployments that claim GPUs of a budget, and their claims.
    fn claims(&self, budgets: &[Budget], now: Timestamp) -> (Vec<Arc<InferenceDeployment>>, Vec<Claim>) {
        let namespaces: HashSet<&str> = budgets.iter().map(|budget| budget.namespace.as_str()).collect();
        let mut deployments = self.deployments.state();
        deployments.retain(|deployment| {
            deployment.spec.gpus() > 0 && namespaces.contains(deployment.namespace().unwrap_or_default().as_str())
        });
        let pods = by_owner(&self.pods);
        let own = |deployment: &InferenceDeployment| {
            deployment.uid().and_then(|uid| pods.get(&uid)).map(Vec::as_slice).unwrap_or_default()
        };
        let somebody_leaves = deployments.iter().flat_map(|deployment| own(deployment)).any(|pod| leaves(pod));
        let claims: Vec<Claim> = deployments
            .iter()
            .map(|deployment| {
                // There may be room as soon as these are gone.
                let now = if somebody_leaves { Timestamp::UNIX_EPOCH } else { now };
                claim(deployment, own(deployment).iter().map(|pod| &**pod), self.grants.before(deployment), now)
            })
            .collect();
        (deployments, claims)
    }

    fn is_news(&self, deployment: &InferenceDeployment) -> bool {
        let said = deployment.status.as_ref().and_then(|status| status.budget.as_ref());
        self.grants.of(deployment).map(|granted| budget_status(&granted)).as_ref() != said
    }

    async fn write(&self, object: &InferenceBudget, status: &InferenceBudgetStatus) {
        let api = Api::<InferenceBudget>::namespaced(self.client.clone(), &object.namespace().unwrap_or_default());
        let patch = json!({
            "apiVersion": InferenceBudget::api_version(&()),
            "kind": InferenceBudget::kind(&()),
            "metadata": {"uid": object.uid()},
            "status": status,
        });
        self.metrics.wrote("InferenceBudget", "apply_status");
        let params = PatchParams::apply(FIELD_MANAGER).force();
        match api.patch_status(&object.name_any(), &params, &Patch::Apply(&patch)).await {
            // Deleted meanwhile.
            Err(kube::Error::Api(answer)) if answer.code == 404 => {}
            Err(error) => warn!(%error, namespace = object.namespace(), "write the status of a budget"),
            Ok(_) => {}
        }
    }
}
