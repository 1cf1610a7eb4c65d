//! What is known of all replicas at one moment: the operator's last document, joined with what this gateway has there and saw. A
//! value: a new document makes a new fleet, and requests keep the one that they began with.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use stoker_crds::endpoints::{DeploymentEndpoints, EndpointLoad, EndpointState, Endpoints, ReplicaEndpoint};
use stoker_routing::{Own, ReplicaView, Reported, hash, load};

use crate::{
    room::{BURST, Told, places, window},
    tenants::Tenant,
    vital::{Life, Vital},
};

/// A load that has not changed for so long is not believed: the agents' clocks go on in every report.
const STALE_MS: u64 = 10_000;
/// A replica that has not computed anything for so long while work waited is as one that does not answer.
const STALLED_SECONDS: f64 = 10.0;
/// Who is in no document any more is known for as long as it has requests, and for so long: one may be on its way there by a document of
/// before, and who comes back is the same.
const LINGER_MS: u64 = 60_000;

/// See the module.
#[derive(Clone, Debug, Default)]
pub struct Fleet {
    /// Of which document; `None` before the first.
    pub version: Option<Version>,
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

/// A deployment and its replicas.
#[derive(Debug)]
pub struct Deployment {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Names that it takes in `model`.
    pub models: Vec<String>,
    /// Replicas that it should have.
    pub replicas_wanted: u32,
    /// Where requests arrive that are for it alone.
    pub port: Option<u16>,
    /// Its replicas, in any state.
    pub members: Vec<Member>,
    /// Of its name: what prompts are hashed behind.
    pub salt: u64,
    /// KV blocks of its members' caches, by slot.
    kv_blocks: HashMap<u32, u32>,
}

/// One replica.
#[derive(Debug)]
pub struct Member {
    /// By which the prefix index knows it.
    pub slot: u32,
    /// Name of its pod.
    pub pod: String,
    /// `IP:PORT`.
    pub address: Option<String>,
    /// `IP:PORT` where it says what its prefix cache holds, if it does.
    pub events: Option<String>,
    /// Whether it takes requests.
    pub state: EndpointState,
    /// What this gateway has there and saw.
    pub vital: Arc<Vital>,
    /// UID of its pod.
    pub uid: String,
    seed: u64,
    weight: u32,
    serving_since_ms: u64,
    report: Option<Report>,
}

/// A load, when it came and what was there then.
#[derive(Clone, Debug)]
struct Report {
    load: EndpointLoad,
    seen_ms: u64,
    own_then: Own,
    /// Requests that may be there without an answer until the next one.
    window: u32,
}

/// Whether a deployment's replicas take more requests now.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Room {
    /// Whether any replica takes requests.
    pub serves: bool,
    /// Requests that they take before others have begun; all if none of them answers: it is asked then, and says why.
    pub places: u32,
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

impl Deployment {
    /// The shortest host name that means it.
    pub fn host(&self) -> String {
        format!("{}.{}", self.name, self.namespace)
    }

    /// Members that may be sent requests and were not tried before, and what routing sees of them.
    pub fn candidates(&self, now_ms: u64, tried: &[u32]) -> (Vec<&Member>, Vec<ReplicaView>) {
        let untried = |member: &&Member| !tried.contains(&member.slot);
        let members: Vec<&Member> =
            self.members.iter().filter(|member| member.takes_requests()).filter(untried).collect();
        let views = members.iter().map(|member| member.view(now_ms)).collect();
        (members, views)
    }

    /// How much room there is; no more members are looked at than it takes to find as much as is `enough`.
    pub fn room(&self, now_ms: u64, enough: u32) -> Room {
        // Who is only suspect has its places where nobody else has any: a moment's silence of the only one lets nobody past the line.
        let (mut serves, mut places, mut of_suspects) = (false, None::<u32>, None::<u32>);
        for member in self.members.iter().filter(|member| member.takes_requests()) {
            serves = true;
            if member.is_up(now_ms) {
                let all = if member.vital.is_suspect(now_ms) { &mut of_suspects } else { &mut places };
                *all = Some(all.unwrap_or(0).saturating_add(member.places(now_ms)));
            }
            if places.is_some_and(|places| places >= enough) {
                break;
            }
        }
        Room { serves, places: places.or(of_suspects).unwrap_or(u32::MAX) }
    }

    /// Whether a member has spoken since one that has not was asked.
    pub fn speaks_louder_than(&self, silent: &Vital) -> bool {
        let spoke = |since_ms| self.members.iter().any(|member| member.vital.heard_ms() > since_ms);
        silent.unanswered_since_ms().is_some_and(spoke)
    }

    /// KV blocks that the cache of a slot's replica has; none of another deployment's.
    pub fn kv_blocks(&self, slot: u32) -> u32 {
        self.kv_blocks.get(&slot).copied().unwrap_or_default()
    }

    /// How many members are in a state.
    pub fn count(&self, state: EndpointState) -> usize {
        self.members.iter().filter(|member| member.state == state).count()
    }
}

impl Member {
    fn takes_requests(&self) -> bool {
        self.state == EndpointState::Serving && self.address.is_some()
    }

    /// Requests that it takes now.
    fn places(&self, now_ms: u64) -> u32 {
        let told = self.fresh(now_ms).map(|report| Told {
            window: report.window,
            waiting_tokens: report.load.waiting_prefill_tokens,
            unanswered_tokens: report.own_then.prefill_tokens,
        });
        places(told, self.vital.unanswered())
    }

    fn view(&self, now_ms: u64) -> ReplicaView {
        let report = self.fresh(now_ms);
        let reported = report.map(|report| report.reported());
        let then = report.map(|report| report.own_then).unwrap_or_default();
        ReplicaView {
            slot: self.slot,
            seed: self.seed,
            weight: self.weight,
            serving_since_ms: self.serving_since_ms,
            is_healthy: self.is_healthy(now_ms),
            load: load(reported, then, self.vital.own()),
        }
    }

    /// Whether it answers and computes.
    pub fn is_healthy(&self, now_ms: u64) -> bool {
        self.is_up(now_ms) && !self.vital.is_suspect(now_ms)
    }

    /// The same of one that may be silent for a moment.
    fn is_up(&self, now_ms: u64) -> bool {
        let stalls = self.fresh(now_ms).is_some_and(|report| report.load.stalled_seconds > STALLED_SECONDS);
        !stalls && self.vital.life() == Life::Lives && self.vital.breaker(|breaker| breaker.admits(now_ms))
    }

    /// KV blocks that its cache has; as many as can be where that is not known.
    fn kv_blocks(&self) -> u32 {
        self.report.as_ref().map_or(u32::MAX, |report| report.load.total_blocks)
    }

    fn fresh(&self, now_ms: u64) -> Option<&Report> {
        self.report.as_ref().filter(|report| now_ms.saturating_sub(report.seen_ms) < STALE_MS)
    }
}

impl Report {
    fn after(before: Option<&Self>, load: EndpointLoad, vital: &Vital, now_ms: u64) -> Self {
        let before = before.map_or(BURST, |before| before.window);
        let window = window(before, load.waiting, vital.begin_most());
        Self { load, seen_ms: now_ms, own_then: vital.own(), window }
    }

    fn reported(&self) -> Reported {
        let EndpointLoad { running, waiting, waiting_prefill_tokens, total_blocks, referenced_blocks, .. } = self.load;
        Reported {
            running,
            waiting,
            prefill_tokens: waiting_prefill_tokens,
            kv_share: referenced_blocks as f32 / total_blocks.max(1) as f32,
        }
    }
}

/// Makes fleets, and gives every replica its slot.
#[derive(Debug, Default)]
pub struct Registry {
    slots: HashMap<String, u32>,
    free: Vec<u32>,
    n_slots: u32,
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
                let vital = vital.map(Arc::clone).unwrap_or_default();
                Member::after(before, vital, replica, slot, if is_first { 0 } else { now_ms }, now_ms)
            });
            let members: Vec<Member> = members.collect();
            let DeploymentEndpoints { namespace, name, models, replicas_wanted, port, .. } = deployment;
            let salt = hash(hash(0, namespace.as_bytes()), name.as_bytes());
            let kv_blocks = members.iter().map(|member| (member.slot, member.kv_blocks())).collect();
            Arc::new(Deployment { namespace, name, models, replicas_wanted, port, members, salt, kv_blocks })
        });
        let deployments: Vec<_> = deployments.collect();
        let mut by_model: HashMap<String, Vec<usize>> = HashMap::new();
        for (place, deployment) in deployments.iter().enumerate() {
            for model in &deployment.models {
                by_model.entry(model.clone()).or_default().push(place);
            }
        }
        let version = Some(Version { source: endpoints.source, number: endpoints.number });
        Change { fleet: Fleet { version, deployments, by_model, left }, forgotten }
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

impl Member {
    fn after(
        before: Option<&Self>,
        vital: Arc<Vital>,
        replica: ReplicaEndpoint,
        slot: u32,
        serving_if_new_ms: u64,
        now_ms: u64,
    ) -> Self {
        let known = before.and_then(|before| before.report.as_ref());
        let report = replica.load.map(|load| match known.filter(|known| known.load == load) {
            Some(known) => known.clone(),
            None => Report::after(known, load, &vital, now_ms),
        });
        let served = before.filter(|before| before.state == EndpointState::Serving);
        Self {
            slot,
            seed: hash(0, replica.uid.as_bytes()),
            serving_since_ms: served.map_or(serving_if_new_ms, |before| before.serving_since_ms),
            pod: replica.pod,
            address: replica.address,
            events: replica.events,
            state: replica.state,
            uid: replica.uid,
            weight: replica.weight,
            vital,
            report,
        }
    }

    fn restarted(&self, now: &ReplicaEndpoint) -> bool {
        let start = |load: &EndpointLoad| load.start_id.clone();
        let before = self.report.as_ref().map(|report| start(&report.load));
        before.zip(now.load.as_ref().map(start)).is_some_and(|(before, now)| before != now)
    }
}

#[cfg(test)]
mod tests {
    use stoker_crds::{contract::LoadReport, endpoints::WHOLE_WEIGHT};
    use stoker_routing::Own;

    use super::*;
    use crate::vital::Flight;

    fn replica(uid: &str, running: u32) -> ReplicaEndpoint {
        let report = LoadReport { running, start_id: "s".into(), ..LoadReport::idle(100) };
        ReplicaEndpoint {
            pod: format!("pod-{uid}"),
            uid: uid.into(),
            address: Some("10.0.0.1:8000".into()),
            events: None,
            revision: "r".into(),
            weight: WHOLE_WEIGHT,
            state: EndpointState::Serving,
            load: Some((&report).into()),
        }
    }

    fn deployment(namespace: &str, name: &str, models: &[&str], replicas: Vec<ReplicaEndpoint>) -> DeploymentEndpoints {
        DeploymentEndpoints {
            namespace: namespace.into(),
            name: name.into(),
            models: models.iter().map(|model| (*model).to_owned()).collect(),
            replicas_wanted: replicas.len() as u32,
            port: None,
            replicas,
        }
    }

    fn endpoints(deployments: Vec<DeploymentEndpoints>) -> Endpoints {
        Endpoints { source: "o".into(), number: 1, deployments }
    }

    fn fleet(deployments: Vec<DeploymentEndpoints>) -> Fleet {
        Registry::default().after(&Fleet::default(), endpoints(deployments), 0).fleet
    }

    #[test]
    fn a_deployment_is_found_by_host_then_model_then_as_the_only_one() {
        let two = fleet(vec![
            deployment("default", "chat", &["chat", "gpt"], vec![]),
            deployment("team", "chat", &["chat"], vec![]),
        ]);
        let named = |host: &str| Whom::Host(host.to_owned());
        let found = |host: &str, model: Option<&str>| two.find(&named(host), model).map(|found| found.host());
        for host in ["chat.team", "chat.team:8000", "chat.team.svc", "chat.team.svc.cluster.local:80"] {
            assert_eq!(found(host, Some("gpt")).as_deref(), Ok("chat.team"), "{host}");
        }
        assert_eq!(found("gateway", Some("gpt")).as_deref(), Ok("chat.default"));
        assert_eq!(found("chat.team.example.com", Some("gpt")).as_deref(), Ok("chat.default"), "no Service");
        let hosts = vec!["chat.default".to_owned(), "chat.team".to_owned()];
        assert_eq!(found("gateway", Some("chat")), Err(Lost::Ambiguous("chat".into(), hosts)));
        assert_eq!(found("", Some("x")), Err(Lost::Unknown("x".into())));
        assert_eq!(found("", None), Err(Lost::Unnamed));
        assert_eq!(two.models(&named("gateway"), None), ["chat", "gpt"]);
        let one = fleet(vec![deployment("a", "b", &["b"], vec![])]);
        assert_eq!(one.find(&named(""), None).map(|one| one.host()), Ok("b.a".into()));
    }

    #[test]
    fn what_comes_through_a_deployment_s_port_is_for_no_other() {
        let both = fleet(vec![
            deployment("default", "chat", &["chat", "gpt"], vec![]),
            deployment("team", "chat", &["chat"], vec![]),
        ]);
        let team = Whom::Port("chat.team".into());
        for model in [None, Some("chat"), Some("gpt"), Some("x")] {
            assert_eq!(both.find(&team, model).map(|found| found.host()).as_deref(), Ok("chat.team"), "{model:?}");
        }
        assert_eq!(both.models(&team, None), ["chat"]);
        let gone = Whom::Port("old.team".into());
        assert_eq!(both.find(&gone, Some("gpt")).err(), Some(Lost::Unknown("old.team".into())));
        assert!(both.within(&gone).is_empty() && both.models(&gone, None).is_empty());
    }

    #[test]
    fn a_replica_keeps_its_slot_and_its_requests_and_a_restarted_one_is_forgotten() {
        let mut registry = Registry::default();
        let of = |replicas| endpoints(vec![deployment("d", "c", &["c"], replicas)]);
        let first = registry.after(&Fleet::default(), of(vec![replica("a", 1), replica("b", 1)]), 0).fleet;
        let flight = Flight::begin(&first.deployments[0].members[1].vital, 70);
        let second = registry.after(&first, of(vec![replica("b", 1)]), 5);
        let member = &second.fleet.deployments[0].members[0];
        assert_eq!((member.slot, second.forgotten), (1, vec![0]));
        assert_eq!(member.vital.own(), Own { requests: 1, prefill_tokens: 70 });
        drop(flight);
        assert_eq!(member.vital.own(), Own::default());

        let mut restarted = replica("b", 0);
        restarted.load.as_mut().unwrap().start_id = "t".into();
        let third = registry.after(&second.fleet, of(vec![replica("c", 0), restarted]), 9);
        let slots: Vec<u32> = third.fleet.members().map(|member| member.slot).collect();
        assert_eq!((slots, third.forgotten), (vec![0, 1], vec![1]), "c takes the place of a");
    }

    #[test]
    fn who_left_with_requests_is_watched_until_they_end_and_is_the_same_when_it_comes_back() {
        let mut registry = Registry::default();
        let of = |replicas| endpoints(vec![deployment("d", "c", &["c"], replicas)]);
        let first = registry.after(&Fleet::default(), of(vec![replica("a", 1), replica("b", 1)]), 0).fleet;
        let vital = Arc::clone(&first.deployments[0].members[0].vital);
        let flight = Flight::begin(&vital, 70);
        let left = |fleet: &Fleet| {
            fleet
                .watched()
                .flatten()
                .filter(|watched| watched.has_left)
                .map(|left| Arc::clone(left.vital))
                .collect::<Vec<_>>()
        };
        let without = |registry: &mut Registry, before: &Fleet, now_ms| {
            registry.after(before, of(vec![replica("b", 1)]), now_ms).fleet
        };
        let second = without(&mut registry, &first, 5);
        let third = without(&mut registry, &second, 5 + 2 * LINGER_MS);
        assert!(left(&first).is_empty() && Arc::ptr_eq(&left(&third)[0], &vital), "it has a request");
        let back = registry.after(&third, of(vec![replica("b", 1), replica("a", 1)]), 3 * LINGER_MS).fleet;
        assert!(left(&back).is_empty() && Arc::ptr_eq(&back.deployments[0].members[1].vital, &vital));
        let gone = without(&mut registry, &back, 4 * LINGER_MS);
        drop(flight);
        assert_eq!(left(&without(&mut registry, &gone, 5 * LINGER_MS - 1)).len(), 1, "a request may be on its way");
        assert!(left(&without(&mut registry, &gone, 5 * LINGER_MS)).is_empty());
    }

    #[test]
    fn a_load_that_does_not_change_grows_stale_and_the_own_requests_go_on_to_count() {
        let mut registry = Registry::default();
        let of = |running| endpoints(vec![deployment("d", "c", &["c"], vec![replica("a", running)])]);
        let first = registry.after(&Fleet::default(), of(5), 0).fleet;
        let _flight = Flight::begin(&first.deployments[0].members[0].vital, 70);
        let second = registry.after(&first, of(5), 6_000).fleet;
        let load = |fleet: &Fleet, now_ms| fleet.deployments[0].candidates(now_ms, &[]).1[0].load;
        assert_eq!(
            (load(&second, 9_000).requests, load(&second, 9_000).is_fresh),
            (3, true),
            "ours and a part of five"
        );
        assert_eq!((load(&second, 10_000).requests, load(&second, 10_000).is_fresh), (1, false));
        let third = registry.after(&second, of(6), 11_000).fleet;
        assert_eq!((load(&third, 11_000).requests, load(&third, 11_000).is_fresh), (3, true), "one of the six is ours");
    }

    #[test]
    fn only_who_serves_is_a_candidate_and_a_stalled_one_is_not_healthy() {
        let states = EndpointState::ALL.map(|state| ReplicaEndpoint { state, ..replica(state.word(), 0) });
        let mut stalled = replica("stalled", 3);
        stalled.load.as_mut().unwrap().stalled_seconds = 60.0;
        let homeless = ReplicaEndpoint { address: None, ..replica("homeless", 0) };
        let fleet = fleet(vec![deployment("d", "c", &["c"], states.into_iter().chain([stalled, homeless]).collect())]);
        let (members, views) = fleet.deployments[0].candidates(0, &[]);
        let pods: Vec<&str> = members.iter().map(|member| member.pod.as_str()).collect();
        assert_eq!(pods, ["pod-serving", "pod-stalled"]);
        assert_eq!([views[0].is_healthy, views[1].is_healthy], [true, false]);
    }

    #[test]
    fn there_is_room_where_a_healthy_replica_has_some_and_where_none_is_healthy() {
        let mut registry = Registry::default();
        let full = || EndpointLoad { waiting: 9, up_ms: 5, ..replica("a", 4).load.unwrap() };
        let of = |replicas| endpoints(vec![deployment("d", "c", &["c"], replicas)]);
        let first = registry.after(&Fleet::default(), of(vec![replica("a", 1), replica("b", 1)]), 0).fleet;
        let room = |fleet: &Fleet, enough| fleet.deployments[0].room(0, enough);
        assert_eq!(room(&first, u32::MAX), Room { serves: true, places: 2 * BURST });
        assert_eq!(room(&first, 1), Room { serves: true, places: BURST }, "it need not know more");
        let vital = Arc::clone(&first.deployments[0].members[0].vital);
        let mut flights: Vec<Flight> = (0..9).map(|_| Flight::begin(&vital, 70)).collect();
        let second =
            registry.after(&first, of(vec![ReplicaEndpoint { load: Some(full()), ..replica("a", 4) }]), 0).fleet;
        assert_eq!(room(&second, u32::MAX), Room { serves: true, places: 0 }, "nine wait there");
        flights.iter_mut().take(8).for_each(Flight::prefilled);
        assert_eq!(room(&second, u32::MAX).places, 1, "eight began since");
        assert!(vital.begin_asking(0) && vital.is_suspect(200));
        assert_eq!(second.deployments[0].room(200, u32::MAX).places, 1, "it is only suspect");
        vital.end_asking();
        vital.set_life(Life::Stalled);
        assert_eq!(
            room(&second, u32::MAX),
            Room { serves: true, places: u32::MAX },
            "who asks learns why nobody answers"
        );
        vital.set_life(Life::Lives);
        drop((0..40).map(|_| Flight::begin(&vital, 70)).collect::<Vec<_>>());
        let third = registry.after(&second, of(vec![replica("a", 5)]), 0).fleet;
        assert_eq!(room(&third, u32::MAX).places, 2 + 2 * 41 - 1, "forty were answered since, and nobody waits");
        let starting = ReplicaEndpoint { state: EndpointState::Starting, ..replica("a", 0) };
        assert!(!room(&registry.after(&second, of(vec![starting]), 0).fleet, 0).serves);
    }

    #[test]
    fn who_was_there_before_the_gateway_is_not_new() {
        let mut registry = Registry::default();
        let of = |uids: &[&str]| {
            endpoints(vec![deployment("d", "c", &["c"], uids.iter().map(|uid| replica(uid, 0)).collect())])
        };
        let first = registry.after(&Fleet::default(), of(&["a"]), 50_000).fleet;
        let second = registry.after(&first, of(&["a", "b"]), 60_000).fleet;
        let since: Vec<u64> = second.members().map(|member| member.serving_since_ms).collect();
        assert_eq!(since, [0, 60_000]);
    }
}
