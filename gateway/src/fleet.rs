//! What is known of all replicas at one moment: the operator's last document, joined with what this gateway has there and saw. A
//! value: a new document makes a new fleet, and requests keep the one that they began with.

mod deployment;
mod member;
mod registry;
#[cfg(test)]
mod tests;

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

pub use self::{
    deployment::{Deployment, Room},
    member::Member,
    registry::{Change, Registry},
};
use crate::{tenants::Tenant, vital::Vital};

/// Who is in no document any more is known for as long as it has requests, and for so long: one may be on its way there by a document of
/// before, and who comes back is the same.
const LINGER_MS: u64 = 60_000;

/// See the module.
#[derive(Clone, Debug, Default)]
pub struct Fleet {
    /// Of which document; `None` before the first.
    pub version: Option<Version>,
    /// `IP:PORT` of every gateway, this one among them.
    pub gateways: Vec<String>,
    deployments: Vec<Arc<Deployment>>,
    by_model: HashMap<String, Vec<usize>>,
    /// Those that are in no document any more and may have requests.
    left: Vec<Left>,
}

/// A replica that was in a document before.
#[derive(Clone, Debug)]
struct Left {
    uid: String,
    address: Option<String>,
    vital: Arc<Vital>,
    left_ms: u64,
}

/// A replica of which is asked whether it lives.
#[derive(Clone, Copy, Debug)]
pub struct Watched<'a> {
    /// `IP:PORT`.
    pub address: Option<&'a str>,
    /// What is known of it.
    pub vital: &'a Arc<Vital>,
    /// It is in no document any more.
    pub has_left: bool,
}

/// A document's number.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Version {
    /// Who numbered it.
    pub source: String,
    /// The number.
    pub number: u64,
}

/// Who a request is for, as far as its connection says.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Whom {
    /// It came through the port of this deployment, `NAME.NAMESPACE`, and is for no other.
    Port(String),
    /// It names this host, which may be a deployment's.
    Host(String),
}

/// Why no deployment is asked.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Lost {
    /// Nobody serves a model of that name.
    Unknown(String),
    /// Several do; their `NAME.NAMESPACE`.
    Ambiguous(String, Vec<String>),
    /// No model is named, and there are several.
    Unnamed,
}

impl Fleet {
    /// All deployments.
    pub fn deployments(&self) -> &[Arc<Deployment>] {
        &self.deployments
    }

    /// Names of the models of those that may be asked by this tenant, in order.
    pub fn models(&self, whom: &Whom, tenant: Option<&Tenant>) -> Vec<&str> {
        let may = |deployment: &&Arc<Deployment>| tenant.is_none_or(|tenant| tenant.may_ask(deployment));
        let models = self.within(whom).iter().filter(may).flat_map(|deployment| &deployment.models);
        let mut names: Vec<&str> = models.map(String::as_str).collect();
        names.sort_unstable();
        names.dedup();
        names
    }

    /// The deployment that a host name means: `NAME.NAMESPACE`, `NAME.NAMESPACE.svc` and what may follow that.
    pub fn of_host(&self, host: &str) -> Option<&Arc<Deployment>> {
        let host = host.rsplit_once(':').map_or(host, |(host, _)| host);
        let mut labels = host.split('.');
        let (name, namespace) = (labels.next()?, labels.next()?);
        let is_service = labels.next().is_none_or(|label| label == "svc");
        let named = |deployment: &&Arc<Deployment>| deployment.name == name && deployment.namespace == namespace;
        self.deployments.iter().find(named).filter(|_| is_service)
    }

    /// The deployments that may be asked: the one that is meant, or all.
    pub fn within(&self, whom: &Whom) -> &[Arc<Deployment>] {
        let (Whom::Port(host) | Whom::Host(host)) = whom;
        match (whom, self.of_host(host)) {
            (_, Some(deployment)) => std::slice::from_ref(deployment),
            (Whom::Port(_), None) => &[],
            (Whom::Host(_), None) => &self.deployments,
        }
    }

    /// The deployment to ask: the one that is meant, else the model's, else the only one.
    pub fn find(&self, whom: &Whom, model: Option<&str>) -> Result<&Arc<Deployment>, Lost> {
        let (Whom::Port(host) | Whom::Host(host)) = whom;
        if let Some(deployment) = self.of_host(host) {
            return Ok(deployment);
        }
        if let Whom::Port(host) = whom {
            return Err(Lost::Unknown(host.clone()));
        }
        let Some(model) = model else {
            let only = Some(&self.deployments).filter(|all| all.len() == 1);
            return only.and_then(|all| all.first()).ok_or(Lost::Unnamed);
        };
        match self.by_model.get(model).map(Vec::as_slice) {
            None | Some([]) => Err(Lost::Unknown(model.to_owned())),
            Some([only]) => Ok(&self.deployments[*only]),
            Some(several) => {
                let hosts = several.iter().map(|place| self.deployments[*place].host());
                Err(Lost::Ambiguous(model.to_owned(), hosts.collect()))
            }
        }
    }

    /// All replicas that may have requests: those of each deployment together, and those that left.
    pub fn watched<'a>(&'a self) -> impl Iterator<Item = Vec<Watched<'a>>> {
        let member =
            |member: &'a Member| Watched { address: member.address.as_deref(), vital: &member.vital, has_left: false };
        let left = |left: &'a Left| Watched { address: left.address.as_deref(), vital: &left.vital, has_left: true };
        let together = self.deployments.iter().map(move |deployment| deployment.members.iter().map(member).collect());
        together.chain([self.left.iter().map(left).collect()])
    }

    /// All replicas that may have requests, by the UIDs of their pods.
    pub fn vitals(&self) -> impl Iterator<Item = (&str, &Arc<Vital>)> {
        let members = self.members().map(|member| (member.uid.as_str(), &member.vital));
        members.chain(self.left.iter().map(|left| (left.uid.as_str(), &left.vital)))
    }

    /// Slots of replicas in the prefix index, by the UIDs of their pods.
    pub fn slots(&self) -> impl Iterator<Item = (&str, u32)> {
        self.members().map(|member| (member.uid.as_str(), member.slot))
    }

    fn members(&self) -> impl Iterator<Item = &Member> {
        self.deployments.iter().flat_map(|deployment| &deployment.members)
    }

    /// Who is in none of these documents but was before.
    fn left_without(&self, uids: &HashSet<String>, now_ms: u64) -> Vec<Left> {
        let leaves = |member: &Member| {
            let Member { uid, address, vital, .. } = member;
            Left { uid: uid.clone(), address: address.clone(), vital: Arc::clone(vital), left_ms: now_ms }
        };
        let lingers = |left: &Left| left.vital.has_requests() || now_ms.saturating_sub(left.left_ms) < LINGER_MS;
        let all = self.members().map(leaves).chain(self.left.iter().cloned());
        all.filter(|left| !uids.contains(&left.uid) && lingers(left)).collect()
    }
}
