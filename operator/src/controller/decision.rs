//! What a round decides about a deployment, from what was observed of it and all else that is known.

use std::time::Duration;

use jiff::Timestamp;
use kube::runtime::controller::Action;
use stoker_crds::devices::Gpus;

use super::{Context, SAFETY_NET};
use crate::{
    apply::Applied,
    budgets::Granted,
    canary::gate::Finding,
    course,
    desired::{Desired, desired},
    devices, fits,
    image_volumes::Ground,
    observe::Observed,
    plan::{self, Plan},
    rollback,
    scaling::Latest,
    standby,
    status::{Outlook, Round, status_of},
    validate::{SpecError, ValidatedDeployment, validate},
};

/// What was decided about a deployment.
pub(super) struct Decision {
    pub deployment: ValidatedDeployment,
    pub desired: Desired,
    pub plan: Plan,
    /// On the number of replicas.
    pub scaling: Option<Latest>,
    /// What was found of its canary.
    pub finding: Option<Finding>,
    /// Whether its model fits.
    pub fit: fits::Outlook,
    /// What its namespace's budget grants.
    pub granted: Option<Granted>,
}

impl Context {
    pub(super) fn decide(&self, observed: &Observed, now: Timestamp) -> Result<Decision, SpecError> {
        let granted = self.grants.of(&observed.deployment);
        let asked = validate(&observed.deployment, &self.defaults)?;
        let asked = asked.limited_to(granted.as_ref().map(|granted| granted.grant.replicas));
        let published = self.devices.seen();
        let devices = devices::gpus(published.as_ref(), &observed.deployment.spec);
        let settled = course::settle(asked, observed).delivered_on(&Ground {
            rule: self.defaults.models.image_volumes,
            server: self.release,
            nodes: &self.nodes.seen(),
            devices: devices.as_ref().ok(),
            spec: &observed.deployment.spec,
        });
        let deployment = self.among_others(settled).warm_on(&observed.standbys);
        let identity = &deployment.identity;
        let front = self.gateways.as_ref().and_then(|gateways| gateways.front(&identity.uid));
        let pools = self.caches.pools.kept();
        let desired =
            desired(&deployment, &self.keyring.public()).behind(identity, front.as_ref()).pooled(identity, pools);
        let fit = self.fit(&deployment, &desired, observed, &devices);
        let plan = plan::plan(&deployment, &desired, observed, now);
        let plan = if fit.opinion.is_hopeless { plan.without_hopeless(&deployment.course) } else { plan };
        let plan = plan.with_standby(&self.standby(&deployment, &desired, observed, &devices), now);
        let scaling = self.ledger.latest(&observed.deployment);
        let finding = self.findings.of(observed.deployment.metadata.uid.as_deref());
        Ok(Decision { deployment, desired, plan, scaling, finding, fit, granted })
    }

    fn fit(
        &self,
        deployment: &ValidatedDeployment,
        desired: &Desired,
        observed: &Observed,
        devices: &Result<Gpus<'_>, String>,
    ) -> fits::Outlook {
        fits::look(&fits::Scene {
            deployment: &observed.deployment,
            revision: rollback::asked(deployment, desired),
            replicas: &observed.replicas,
            descriptions: &observed.descriptions,
            nodes: &self.nodes.seen(),
            devices,
        })
    }

    /// Where its model could be kept in memory, if it is to be.
    fn standby<'a>(
        &self,
        deployment: &ValidatedDeployment,
        desired: &'a Desired,
        observed: &'a Observed,
        devices: &Result<Gpus<'_>, String>,
    ) -> standby::Scene<'a> {
        let wanted = deployment.nodes_on_standby();
        let written = observed.deployment.status.as_ref().and_then(|status| status.standby.as_ref());
        let is_refused =
            written.is_some_and(|written| written.revision == desired.revision && written.refused.is_some());
        let (revision, pods) = (desired.revision.as_str(), &*observed.standbys);
        // Others' pods are looked at for those alone that want it.
        let spots = if wanted == 0 { Ok(Vec::new()) } else { self.spots(deployment, observed, devices) };
        standby::Scene { wanted, revision, spots, pods, is_refused }
    }

    fn spots(
        &self,
        deployment: &ValidatedDeployment,
        observed: &Observed,
        devices: &Result<Gpus<'_>, String>,
    ) -> Result<Vec<standby::Spot>, String> {
        standby::spots(&standby::Ground {
            deployment,
            spec: &observed.deployment.spec,
            replicas: &observed.replicas,
            nodes: &self.nodes.seen(),
            devices: devices.as_ref().map_err(Clone::clone)?,
            pods: &self.caches.pods.state(),
        })
    }

    /// The same, knowing where others have its model, if nodes keep that.
    fn among_others(&self, deployment: ValidatedDeployment) -> ValidatedDeployment {
        if deployment.kept_by_nodes().is_none() {
            return deployment;
        }
        let others = self.deployments.state();
        deployment.among(others.iter().filter_map(|other| other.status.as_ref()?.model.as_ref()))
    }
}

impl Decision {
    pub(super) fn outlook(&self, observed: &Observed, applied: &Applied, now: Timestamp) -> Outlook {
        let Self { deployment, desired, plan, scaling, finding, fit, granted } = self;
        let (decision, finding, fit) = (scaling.as_ref(), finding.as_ref(), Some(fit));
        status_of(
            &Round { deployment, desired, observed, plan, applied, decision, finding, fit, granted: granted.as_ref() },
            now,
        )
    }

    /// The earliest moment at which time alone changes plan or status.
    pub(super) fn next_look(&self, outlook: &Outlook, now: Timestamp, at_most: Option<Duration>) -> Action {
        let safety_net = at_most.unwrap_or(SAFETY_NET);
        let Plan { pods, standby, adoption, .. } = &self.plan;
        let moments = [pods.look_again, standby.look_again, adoption.look_again, outlook.look_again];
        let wait = moments.into_iter().flatten().min().map(|moment| moment.duration_since(now));
        let wait = wait.map(|wait| Duration::try_from(wait).unwrap_or_default());
        Action::requeue(wait.map_or(safety_net, |wait| wait.min(safety_net)))
    }
}
