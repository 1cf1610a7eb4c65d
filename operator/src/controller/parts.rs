//! What goes on beside rounds: replicas are asked, numbers decided, grants computed, canaries examined, gateways told.

use kube::{Client, runtime::reflector::ObjectRef};
use stoker_crds::InferenceDeployment;
use tokio::{sync::mpsc, task::JoinSet};

use super::{Options, Shared, watches::Watches};
use crate::{
    agent_client::AgentClient,
    budgets::Treasurer,
    canary::{Examiner, Findings},
    endpoints::Publisher,
    keys::{KeyStore, Keyring, renew},
    lines::{Asker, Waiting},
    pages::Sources,
    probe::Probe,
    readings::Readings,
    scaling::Autoscaler,
};

/// What the parts are made of, much of it shared with rounds.
pub(super) struct Parts<'a> {
    pub client: &'a Client,
    pub options: &'a Options,
    pub shared: &'a Shared,
    pub watches: &'a Watches,
    pub readings: &'a Readings,
    pub findings: &'a Findings,
    pub agents: AgentClient,
    /// What clients wait for, as gateways say.
    pub waiting: Waiting,
    /// Deployments that a part wants a round of.
    pub changed: mpsc::Sender<ObjectRef<InferenceDeployment>>,
}

impl Parts<'_> {
    /// Begins all of them. They run for as long as rounds ask for them: one that ends has panicked.
    pub(super) fn begin(self, (key_store, keyring): (KeyStore, Keyring)) -> JoinSet<()> {
        let mut parts = JoinSet::new();
        parts.spawn(self.probe(keyring.clone()).run());
        parts.spawn(self.autoscaler().run());
        parts.spawn(self.asker().run());
        parts.spawn(self.examiner().run());
        parts.spawn(self.treasurer().run());
        parts.spawn(self.publisher().run());
        if let Some(board) = self.shared.board.clone() {
            parts.spawn(board.keep(self.sources(), self.agents.clone(), self.shared.vitals.clone()));
        }
        parts.spawn(renew(key_store, keyring, self.watches.deployments.clone(), self.changed));
        parts
    }

    fn probe(&self, keyring: Keyring) -> Probe {
        Probe {
            pods: self.watches.caches.pods.clone(),
            agents: self.agents.clone(),
            keyring,
            leadership: self.shared.leadership.clone(),
            give_bytes_per_second: self.options.defaults.models.give_bytes_per_second,
            readings: self.readings.clone(),
            changed: self.changed.clone(),
            metrics: self.shared.metrics.clone(),
            vitals: self.shared.vitals.clone(),
        }
    }

    fn autoscaler(&self) -> Autoscaler {
        Autoscaler {
            deployments: self.watches.deployments.clone(),
            pods: self.watches.caches.pods.clone(),
            ahead: self.watches.caches.prefetches.clone(),
            readings: self.readings.clone(),
            gateways: self.watches.gateways.clone(),
            waiting: self.waiting.clone(),
            ledger: self.shared.ledger.clone(),
            changed: self.changed.clone(),
            metrics: self.shared.metrics.clone(),
            vitals: self.shared.vitals.clone(),
        }
    }

    fn asker(&self) -> Asker {
        Asker {
            gateways: self.watches.gateways.clone(),
            client: self.agents.clone(),
            leadership: self.shared.leadership.clone(),
            waiting: self.waiting.clone(),
            vitals: self.shared.vitals.clone(),
        }
    }

    fn examiner(&self) -> Examiner {
        Examiner {
            deployments: self.watches.deployments.clone(),
            pods: self.watches.caches.pods.clone(),
            readings: self.readings.clone(),
            agents: self.agents.clone(),
            leadership: self.shared.leadership.clone(),
            findings: self.findings.clone(),
            changed: self.changed.clone(),
            vitals: self.shared.vitals.clone(),
        }
    }

    fn treasurer(&self) -> Treasurer {
        Treasurer {
            client: self.client.clone(),
            deployments: self.watches.deployments.clone(),
            pods: self.watches.caches.pods.clone(),
            readings: self.readings.clone(),
            grants: self.watches.grants.clone(),
            changed: self.changed.clone(),
            metrics: self.shared.metrics.clone(),
            vitals: self.shared.vitals.clone(),
        }
    }

    fn publisher(&self) -> Publisher {
        Publisher {
            deployments: self.watches.deployments.clone(),
            pods: self.watches.caches.pods.clone(),
            readings: self.readings.clone(),
            listed: self.watches.listed.clone(),
            published: self.shared.endpoints.clone(),
            gateways: self.watches.gateways.clone(),
            source: format!("{}-{}", self.options.identity, self.readings.now().as_millisecond()),
            vitals: self.shared.vitals.clone(),
        }
    }

    fn sources(&self) -> Sources {
        Sources {
            deployments: self.watches.deployments.clone(),
            pods: self.watches.caches.pods.clone(),
            readings: self.readings.clone(),
            ledger: self.shared.ledger.clone(),
        }
    }
}
