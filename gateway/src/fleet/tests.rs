//! Fleets made of documents, and what is found in them.

use stoker_crds::{
    contract::LoadReport,
    endpoints::{DeploymentEndpoints, EndpointLoad, EndpointState, Endpoints, ReplicaEndpoint, WHOLE_WEIGHT},
};
use stoker_routing::Own;

use super::*;
use crate::{
    room::BURST,
    vital::{Flight, Life},
};

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
    Endpoints { source: "o".into(), number: 1, gateways: vec![], deployments }
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
    assert_eq!((load(&second, 9_000).requests, load(&second, 9_000).is_fresh), (3, true), "ours and a part of five");
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
    let second = registry.after(&first, of(vec![ReplicaEndpoint { load: Some(full()), ..replica("a", 4) }]), 0).fleet;
    assert_eq!(room(&second, u32::MAX), Room { serves: true, places: 0 }, "nine wait there");
    flights.iter_mut().take(8).for_each(Flight::prefilled);
    assert_eq!(room(&second, u32::MAX).places, 1, "eight began since");
    assert!(vital.begin_asking(0) && vital.is_suspect(200));
    assert_eq!(second.deployments[0].room(200, u32::MAX).places, 1, "it is only suspect");
    vital.end_asking();
    vital.set_life(Life::Stalled);
    assert_eq!(room(&second, u32::MAX), Room { serves: true, places: u32::MAX }, "who asks learns why nobody answers");
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
    let of =
        |uids: &[&str]| endpoints(vec![deployment("d", "c", &["c"], uids.iter().map(|uid| replica(uid, 0)).collect())]);
    let first = registry.after(&Fleet::default(), of(&["a"]), 50_000).fleet;
    let second = registry.after(&first, of(&["a", "b"]), 60_000).fleet;
    let since: Vec<u64> = second.members().map(|member| member.serving_since_ms).collect();
    assert_eq!(since, [0, 60_000]);
}
