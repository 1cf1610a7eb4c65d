//! Ways through the pod network: which ports of replicas, gateways and operator a pod reaches that is none of them.

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::{LIMIT, pod::Pod};
use crate::{
    kubectl::Kubectl,
    wait::{Look, until},
};

/// What is listened on.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(crate) enum Port {
    ReplicaInference,
    ReplicaAdmin,
    GatewayClients,
    GatewayAdmin,
    Operator,
    OperatorPages,
}

impl Port {
    /// All of them.
    pub(crate) const ALL: [Self; 6] = [
        Self::ReplicaInference,
        Self::ReplicaAdmin,
        Self::GatewayClients,
        Self::GatewayAdmin,
        Self::Operator,
        Self::OperatorPages,
    ];

    /// The pods that listen on it (their namespace, their labels), its number, and a path that answers.
    fn place(self) -> (&'static str, &'static str, u16, &'static str) {
        const REPLICAS: (&str, &str) =
            ("default", "app.kubernetes.io/managed-by=stoker,app.kubernetes.io/instance=chat");
        const GATEWAYS: (&str, &str) = ("stoker-system", "app.kubernetes.io/name=stoker-gateway");
        const OPERATOR: (&str, &str) = ("stoker-system", "app.kubernetes.io/name=stoker-operator");
        let ((namespace, selector), number, path) = match self {
            Self::ReplicaInference => (REPLICAS, 8000, "/metrics"),
            Self::ReplicaAdmin => (REPLICAS, 8001, "/v1/load"),
            Self::GatewayClients => (GATEWAYS, 8000, "/readyz"),
            Self::GatewayAdmin => (GATEWAYS, 8001, "/metrics"),
            Self::Operator => (OPERATOR, 8080, "/metrics"),
            Self::OperatorPages => (OPERATOR, 8081, "/"),
        };
        (namespace, selector, number, path)
    }

    /// Its URL in each pod that is there to stay.
    pub(crate) fn urls(self, kubectl: &Kubectl) -> Result<Vec<String>> {
        let (namespace, selector, number, path) = self.place();
        let pods = kubectl.json(&["--namespace", namespace, "get", "pods", "-l", selector])?;
        let stay = pods["items"].as_array().context("a list of pods")?.iter().filter(|pod| stays(pod));
        let urls: Vec<_> = stay.filter_map(|pod| Some(format!("http://{}:{number}{path}", ip(pod)?))).collect();
        ensure!(!urls.is_empty(), "no pods of {selector} in {namespace}");
        Ok(urls)
    }
}

fn stays(pod: &Value) -> bool {
    pod["metadata"]["deletionTimestamp"].is_null() && pod["status"]["phase"] == "Running"
}

fn ip(pod: &Value) -> Option<&str> {
    pod["status"]["podIP"].as_str()
}

/// A pod that asks, and what it may reach.
pub(crate) struct Asker<'a> {
    /// The pod.
    pub(crate) pod: Pod<'a>,
    /// What answers it; nothing else does.
    pub(crate) reaches: &'a [Port],
}

/// Waits until each asker reaches what it may, in every pod that listens there, and nothing else in any.
pub(crate) fn wait_for(kubectl: &Kubectl, askers: &[Asker<'_>]) -> Result<()> {
    until(LIMIT, "every way to be open or shut as it should", || {
        let ports = Port::ALL.iter().map(|&port| Ok((port, port.urls(kubectl)?))).collect::<Result<Vec<_>>>()?;
        let wrong = askers.iter().map(|asker| asker.wrong(&ports)).collect::<Result<Vec<_>>>()?.concat();
        Ok(if wrong.is_empty() { Look::Done(()) } else { Look::NotYet(wrong.join("; ")) })
    })
}

impl Asker<'_> {
    /// Where the way is not as it should be.
    fn wrong(&self, ports: &[(Port, Vec<String>)]) -> Result<Vec<String>> {
        let places = || ports.iter().flat_map(|(port, urls)| urls.iter().map(move |url| (*port, url)));
        let urls: Vec<String> = places().map(|(_, url)| url.clone()).collect();
        let reached = self.pod.reaches(&urls)?;
        let wrong = places().zip(reached).filter(|((port, _), reached)| self.reaches.contains(port) != *reached);
        Ok(wrong.map(|((port, url), reached)| format!("{} {} {port:?} at {url}", self.pod, said(reached))).collect())
    }
}

fn said(reached: bool) -> &'static str {
    if reached { "reaches" } else { "does not reach" }
}
