//! A deployment, its pods and what is written of it, round after round: the operator's own functions, and no cluster.

use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::ResourceExt;
use serde_json::{Value, json};
use stoker_crds::{InferenceDeployment, InferenceDeploymentStatus, status::RolloutStatus};
use stoker_operator::{
    apply::Applied,
    canary::gate::Finding,
    course::{Course, settle},
    desired::{Desired, desired},
    lint,
    observe::{Child, Observed},
    plan::{self, Plan},
    status::{Outlook, Round, status_of},
    validate::{Defaults, validate},
};
use stoker_replica::{Needs, ObservedPod, Reading, Replica, Stage};

/// A deployment with what happened to it.
pub(crate) struct Life {
    pub(crate) spec: Value,
    pub(crate) status: Option<InferenceDeploymentStatus>,
    pub(crate) replicas: Vec<Replica>,
    pub(crate) maps: Vec<ConfigMap>,
    pub(crate) now: Timestamp,
    /// What was found of the canary.
    pub(crate) finding: Option<Finding>,
}

/// What a round saw and said.
pub(crate) struct Seen {
    pub(crate) desired: Desired,
    pub(crate) plan: Plan,
    pub(crate) course: Course,
    pub(crate) outlook: Outlook,
}

pub(crate) fn spec(change: &str, rollout: Value) -> Value {
    json!({"model": {"source": "builtin://ember"}, "replicas": 1, "pod": {"annotations": {"change": change}}, "rollout": rollout})
}

impl Life {
    /// One replica serves the first revision.
    pub(crate) fn begun(rollout: Value) -> Self {
        let now = "2026-01-31T12:00:00Z".parse().unwrap();
        let mut life =
            Self { spec: spec("a", rollout), status: None, replicas: Vec::new(), maps: Vec::new(), now, finding: None };
        let first = life.round();
        life.add(&first.desired.revision, Stage::Serving);
        life.round();
        life
    }

    pub(crate) fn change(&mut self, change: &str) {
        self.spec["pod"]["annotations"]["change"] = json!(change);
    }

    fn observed(&self) -> Observed {
        let object = json!({
            "apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceDeployment", "spec": self.spec, "status": self.status,
            "metadata": {"name": "chat", "namespace": "default", "uid": "uid", "generation": 1, "resourceVersion": "1"},
        });
        let deployment: InferenceDeployment = serde_json::from_value(object).unwrap();
        Observed {
            replicas: self.replicas.clone(),
            config_maps: self.maps.iter().map(|map| Child::Own(Arc::new(map.clone()))).collect(),
            ..Observed::of(Arc::new(deployment))
        }
    }

    /// A round: what it decided, with its ConfigMap and status written.
    pub(crate) fn round(&mut self) -> Seen {
        let observed = self.observed();
        let defaults = Defaults { agent_image: "agent:1".into(), ..Defaults::default() };
        let deployment = settle(validate(&observed.deployment, &defaults).unwrap(), &observed);
        let desired = desired(&deployment, "");
        let plan = plan::plan(&deployment, &desired, &observed, self.now);
        let wanted = plan::wanted(&deployment, &desired, &observed);
        assert_eq!(lint::check(&plan, &wanted, &observed.replicas, self.now), []);
        if plan.apply_config_map {
            self.maps.push(desired.config_map.clone());
        }
        if plan.apply_canary_map {
            self.maps.extend(desired.canary.as_ref().map(|canary| canary.config_map.clone()));
        }
        self.maps.retain(|map| !plan.prune_config_maps.contains(&map.name_any()));
        let applied = Applied::default();
        let round = Round {
            deployment: &deployment,
            desired: &desired,
            observed: &observed,
            plan: &plan,
            applied: &applied,
            decision: None,
            finding: self.finding.as_ref(),
            fit: None,
            granted: None,
        };
        let outlook = status_of(&round, self.now);
        self.status = Some(outlook.status.clone());
        Seen { plan, course: deployment.course.clone(), desired, outlook }
    }

    pub(crate) fn after(&mut self, seconds: i64) -> Seen {
        self.now += SignedDuration::from_secs(seconds);
        self.round()
    }

    pub(crate) fn add(&mut self, revision: &str, stage: Stage) {
        let ordinal = u32::try_from(self.replicas.len()).unwrap();
        let pod = ObservedPod {
            name: format!("chat-{revision}-{ordinal}"),
            uid: format!("uid-{revision}-{ordinal}"),
            revision: revision.to_owned(),
            ordinal,
            resource_version: "1".into(),
            created: self.now,
            stage,
            lost: false,
            gone_by: None,
            node: None,
            needs: Needs::default(),
        };
        self.replicas.push(Replica { pod, reading: Reading::default(), intent: None });
    }

    pub(crate) fn rollout(&self) -> &RolloutStatus {
        self.status.as_ref().unwrap().rollout.as_ref().unwrap()
    }

    pub(crate) fn condition(&self, type_: &str) -> (String, String) {
        let conditions = &self.status.as_ref().unwrap().conditions;
        conditions
            .iter()
            .find(|condition| condition.type_ == type_)
            .map(|found| (found.status.clone(), found.reason.clone()))
            .unwrap_or_default()
    }
}
