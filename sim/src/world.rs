//! A world: a load, the replicas that meet it, how requests find them, and what goes wrong.

use std::str::FromStr;

use stoker_crds::contract::KV_BLOCK_TOKENS;
use stoker_workload::{Request, Trace, named_trace};
use thiserror::Error;

use crate::model::{ReplicaModel, Slo};

/// See the module.
#[derive(Clone, Debug, PartialEq)]
pub struct World {
    /// Which requests arrive when.
    pub trace: Trace,
    /// The replicas that serve them.
    pub replica: ReplicaModel,
    /// Replicas that serve when it begins, the same for every rule.
    pub initial: u32,
    /// How a request finds its replica.
    pub router: Router,
    /// What goes wrong.
    pub mishaps: Mishaps,
    /// Nodes that keep the model in memory for the next replicas.
    pub standby: u32,
}

/// How a request finds its replica.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Router {
    /// The better of two random replicas, by KV wanted: close to what a gateway with load information does.
    #[default]
    BestOfTwo,
    /// A random replica for each connection, as kube-proxy does, with one connection a request.
    Random,
    /// The replica with the fewest requests, as a proxy that counts its own does.
    LeastRequests,
    /// The replica that begins soonest with what is not cached of the prompt, within bounded load: our gateway, one that sends
    /// everything.
    Prefix,
}

impl Router {
    /// All of them with their names in commands.
    pub const ALL: [(&str, Self); 4] = [
        ("best-of-two", Self::BestOfTwo),
        ("random", Self::Random),
        ("least-requests", Self::LeastRequests),
        ("prefix", Self::Prefix),
    ];
}

impl FromStr for Router {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        let known = Self::ALL.iter().find(|(known, _)| *known == name);
        known.map(|(_, router)| *router).ok_or_else(|| {
            format!("no router is called {name:?}: use {}", Self::ALL.map(|(known, _)| known).join(", "))
        })
    }
}

/// What goes wrong with replicas.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mishaps {
    /// How often a serving replica is lost, per replica and hour. Its requests are asked again elsewhere, from their
    /// beginning and late by then; its pod is made anew.
    pub losses_per_hour: f64,
    /// Share of the replicas that land on a slow node.
    pub slow_share: f64,
    /// How many times as long everything takes there.
    pub slow_times: f64,
}

impl Default for Mishaps {
    fn default() -> Self {
        Self { losses_per_hour: 0.0, slow_share: 0.0, slow_times: 1.0 }
    }
}

/// A request that no replica of this model can serve.
#[derive(Debug, Error, PartialEq)]
#[error(
    "request {idx} (at {arrived:.1} s) has {tokens} tokens, which do not fit into the {capacity} tokens of a replica's KV \
     cache: give a larger `blocks` with --replica, or leave the request out"
)]
pub struct DoesNotFit {
    idx: usize,
    arrived: f64,
    tokens: u64,
    capacity: u64,
}

/// Load with which a world begins, in shares of what its first replicas carry.
const INITIAL_SHARE: f64 = 2.0 / 3.0;
const FIRST_SECONDS: f64 = 60.0;

impl World {
    /// These requests on these replicas, with enough of them for the first minute.
    pub fn of(trace: Trace, replica: ReplicaModel) -> Result<Self, DoesNotFit> {
        let capacity = u64::from(replica.blocks) * u64::from(KV_BLOCK_TOKENS);
        let tokens = |request: &Request| u64::from(request.prompt_tokens) + u64::from(request.completion_tokens);
        if let Some(idx) = trace.requests.iter().position(|request| tokens(request) > capacity) {
            let request = &trace.requests[idx];
            return Err(DoesNotFit { idx: idx + 1, arrived: request.arrived, tokens: tokens(request), capacity });
        }
        let first = trace.requests.iter().take_while(|request| request.arrived < FIRST_SECONDS);
        let seconds = FIRST_SECONDS.min(trace.seconds);
        let initial = needed(first, &replica, seconds, Slo::default()) / INITIAL_SHARE;
        let initial = (initial.ceil() as u32).max(1);
        Ok(Self { trace, replica, initial, router: Router::default(), mishaps: Mishaps::default(), standby: 0 })
    }
}

/// Replicas that these requests keep at the edge of the SLO, if they come evenly within `seconds`: by the work they
/// are, beside the steps that a promised token rate takes anyway, or by the KV they hold meanwhile.
pub(crate) fn needed<'a>(
    requests: impl Iterator<Item = &'a Request>,
    replica: &ReplicaModel,
    seconds: f64,
    slo: Slo,
) -> f64 {
    let usable = (1.0 - replica.step_seconds / slo.itl_seconds).max(0.1);
    let stay = |request: &Request| f64::from(request.completion_tokens) * slo.itl_seconds / 2.0;
    let (work, blocks) = requests.fold((0.0, 0.0), |(work, blocks), request| {
        (work + replica.work_seconds(request), blocks + replica.blocks(request) * stay(request))
    });
    (work / usable).max(blocks / f64::from(replica.blocks)) / seconds
}

/// A named trace on the replicas it was made for; `None` for an unknown name.
pub fn named_world(name: &str, seed: u64) -> Option<World> {
    let named = named_trace(name, seed)?;
    let model = ReplicaModel::default();
    let replica = ReplicaModel { start_seconds: named.start_seconds.unwrap_or(model.start_seconds), ..model };
    let initial = comfortable(&named.trace.requests);
    Some(World {
        trace: named.trace,
        replica,
        initial,
        router: Router::default(),
        mishaps: Mishaps::default(),
        standby: 0,
    })
}

/// Replicas that carry the first minute in comfort: three chat requests of 5,600 tokens per second each.
fn comfortable(requests: &[Request]) -> u32 {
    let first = requests.iter().take_while(|request| request.arrived < FIRST_SECONDS);
    let tokens: f64 = first.map(|request| f64::from(request.prompt_tokens + request.completion_tokens)).sum();
    (tokens / FIRST_SECONDS / (3.0 * 5_600.0)).ceil() as u32
}

#[cfg(test)]
mod tests {
    use stoker_workload::EXAMPLE_LINE;

    use super::*;

    #[test]
    fn a_request_that_fits_nowhere_is_named() {
        let trace = Trace::parse("x", &EXAMPLE_LINE.replace("900", "9000000")).unwrap();
        let refusal = World::of(trace, ReplicaModel::default()).unwrap_err().to_string();
        assert!(
            refusal.starts_with("request 1 (at 0.5 s) has 9000200 tokens, which do not fit into the 868496"),
            "{refusal}"
        );
    }

    #[test]
    fn every_router_has_a_name_and_others_are_refused() {
        for (name, router) in Router::ALL {
            assert_eq!(name.parse(), Ok(router));
        }
        assert!("nearest".parse::<Router>().unwrap_err().contains("best-of-two, random, least-requests, prefix"));
    }
}
