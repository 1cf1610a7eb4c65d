//! The fleet after a document.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use stoker_crds::endpoints::{DeploymentEndpoints, Endpoints};
use stoker_routing::hash;
use tokio::sync::Notify;

use super::{Deployment, Fleet, Member, Version};
use crate::vital::Vital;

/// Makes fleets, and gives every replica its slot.
#[derive(Debug, Default)]
pub struct Registry {
    slots: HashMap<String, u32>,
    free: Vec<u32>,
    n_slots: u32,
    /// Told when what this gateway has on any replica changes.
    in_flight_changed: Arc<Notify>,
}

/// A fleet, and slots whose replicas hold nothing any more.
#[derive(Debug)]
pub struct Change {
    /// What is known now.
    pub fleet: Fleet,
    /// See [`stoker_routing::PrefixIndex::forget`].
    pub forgotten: Vec<u32>,
}

impl Registry {
    /// One whose replicas tell so when what this gateway has there changes.
    pub fn telling(in_flight_changed: Arc<Notify>) -> Self {
        Self { in_flight_changed, ..Self::default() }
    }

    /// The fleet after `before`, as a document that has just come says.
    pub fn after(&mut self, before: &Fleet, endpoints: Endpoints, now_ms: u64) -> Change {
        let known: HashMap<&str, &Member> = before.members().map(|member| (member.uid.as_str(), member)).collect();
        let replicas = endpoints.deployments.iter().flat_map(|deployment| &deployment.replicas);
        let uids: HashSet<String> = replicas.map(|replica| replica.uid.clone()).collect();
        let mut forgotten = self.release(&uids);
        let left = before.left_without(&uids, now_ms);
        let left_before: HashMap<&str, &Arc<Vital>> =
            before.left.iter().map(|left| (left.uid.as_str(), &left.vital)).collect();
        // Before the first document nobody served longer: those that are there then are not new.
        let is_first = before.version.is_none();
        let deployments = endpoints.deployments.into_iter().map(|deployment| {
            let members = deployment.replicas.into_iter().map(|replica| {
                let before = known.get(replica.uid.as_str()).copied();
                let slot = self.slot(&replica.uid);
                if before.is_some_and(|before| before.restarted(&replica)) {
                    forgotten.push(slot);
                }
                let vital =
                    before.map(|before| &before.vital).or_else(|| left_before.get(replica.uid.as_str()).copied());
                let vital = vital.map_or_else(|| Arc::new(Vital::telling(&self.in_flight_changed)), Arc::clone);
                Member::after(before, vital, replica, slot, if is_first { 0 } else { now_ms }, now_ms)
            });
            let members: Vec<Member> = members.collect();
            let DeploymentEndpoints { namespace, name, models, replicas_wanted, port, .. } = deployment;
            let salt = hash(hash(0, namespace.as_bytes()), name.as_bytes());
            Arc::new(Deployment { namespace, name, models, replicas_wanted, port, members, salt })
        });
        let deployments: Vec<_> = deployments.collect();
        let mut by_model: HashMap<String, Vec<usize>> = HashMap::new();
        for (place, deployment) in deployments.iter().enumerate() {
            for model in &deployment.models {
                by_model.entry(model.clone()).or_default().push(place);
            }
        }
        let version = Some(Version { source: endpoints.source, number: endpoints.number });
        Change { fleet: Fleet { version, gateways: endpoints.gateways, deployments, by_model, left }, forgotten }
    }

    fn slot(&mut self, uid: &str) -> u32 {
        if let Some(slot) = self.slots.get(uid) {
            return *slot;
        }
        let slot = self.free.pop().unwrap_or_else(|| {
            self.n_slots += 1;
            self.n_slots - 1
        });
        self.slots.insert(uid.to_owned(), slot);
        slot
    }

    /// Takes back the slots of all but these.
    fn release(&mut self, uids: &HashSet<String>) -> Vec<u32> {
        let gone: Vec<u32> = self.slots.extract_if(|uid, _| !uids.contains(uid)).map(|(_, slot)| slot).collect();
        self.free.extend(&gone);
        gone
    }
}
