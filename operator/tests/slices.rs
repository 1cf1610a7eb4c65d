//! A Service and its EndpointSlices: where they lead with gateways and without, and what a plan does about those that are there.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::{
    core::v1::Service,
    discovery::v1::{Endpoint, EndpointSlice},
};
use serde_json::json;
use stoker_crds::InferenceDeployment;
use stoker_operator::{
    desired::{Desired, desired, labels},
    gateways::Front,
    observe::{Child, Observed},
    plan::{self, Plan},
    validate::{Defaults, ValidatedDeployment, validate},
};

fn deployment() -> InferenceDeployment {
    let object = json!({
        "apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceDeployment",
        "spec": {"model": {"source": "builtin://ember"}},
        "metadata": {"name": "chat", "namespace": "team", "uid": "uid-chat", "generation": 1, "resourceVersion": "1"},
    });
    serde_json::from_value(object).unwrap()
}

fn valid() -> ValidatedDeployment {
    validate(&deployment(), &Defaults { agent_image: "agent:1".into(), ..Defaults::default() }).unwrap()
}

fn front(addresses: &[&str]) -> Front {
    let endpoint = |address: &&str| Endpoint { addresses: vec![(*address).to_owned()], ..Endpoint::default() };
    Front { port: 10_007, places: vec![("IPv4".to_owned(), addresses.iter().map(endpoint).collect())] }
}

/// What should be there, led to these gateways.
fn led(addresses: &[&str]) -> Desired {
    let valid = valid();
    let front = Some(front(addresses)).filter(|_| !addresses.is_empty());
    desired(&valid, "").behind(&valid.identity, front.as_ref())
}

/// What a plan does beside this Service and these slices, all other children being as they should be.
fn planned(desired: &Desired, service: &Service, slices: &[EndpointSlice]) -> Plan {
    let observed = Observed {
        service: Child::Own(Arc::new(service.clone())),
        slices: slices.iter().cloned().map(Arc::new).collect(),
        config_maps: [&desired.config_map, &desired.keys].map(|map| Child::Own(Arc::new(map.clone()))).into(),
        budget: Child::Own(Arc::new(desired.budget.clone())),
        ..Observed::of(Arc::new(deployment()))
    };
    plan::plan(&valid(), desired, &observed, Timestamp::UNIX_EPOCH)
}

fn selector(desired: &Desired) -> &std::collections::BTreeMap<String, String> {
    desired.service.spec.as_ref().unwrap().selector.as_ref().unwrap()
}

#[test]
fn a_service_that_leads_to_gateways_selects_no_replica() {
    let (past, through) = (led(&[]), led(&["10.0.0.4", "10.0.0.5"]));
    assert!(past.slices.is_empty());
    assert_eq!(*selector(&past), labels::selector("chat"));
    let of_replica = past.pod(0).metadata.labels.unwrap();
    assert!(!selector(&through).iter().all(|(key, value)| of_replica.get(key) == Some(value)));
    let [slice] = through.slices.as_slice() else { panic!("{:?}", through.slices) };
    let port = &slice.ports.as_ref().unwrap()[0];
    assert_eq!((port.name.as_deref(), port.port), (Some("http"), Some(10_007)));
    assert_eq!(port.name, past.service.spec.unwrap().ports.unwrap()[0].name, "kube-proxies match them by name");
    assert_eq!(slice.endpoints.as_ref().unwrap().len(), 2);
    let labels = slice.metadata.labels.as_ref().unwrap();
    assert_eq!(labels["kubernetes.io/service-name"], "chat");
    assert_eq!(slice.metadata.owner_references.as_ref().unwrap()[0].uid, "uid-chat");
}

#[test]
fn what_leads_where_it_should_is_left_alone_and_all_else_is_written() {
    let through = led(&["10.0.0.4", "10.0.0.5"]);
    let (service, slices) = (&through.service, &through.slices);
    let settled = planned(&through, service, slices);
    assert!(settled.apply_slices.is_empty() && settled.prune_slices.is_empty() && !settled.apply_service, "{settled}");

    let name = vec!["chat-gateway-ipv4".to_owned()];
    assert_eq!(planned(&through, service, &[]).apply_slices, name);
    for other in [led(&["10.0.0.4"]), led(&["10.0.0.4", "10.0.0.5", "10.0.0.6"])] {
        assert_eq!(planned(&through, service, &other.slices).apply_slices, name, "{:?}", other.slices);
    }
    let mut astray = slices.clone();
    astray[0].metadata.labels.as_mut().unwrap().insert("kubernetes.io/service-name".into(), "another".into());
    assert_eq!(planned(&through, service, &astray).apply_slices, name);
    let mut elsewhere = slices.clone();
    elsewhere[0].ports.as_mut().unwrap()[0].port = Some(10_008);
    assert_eq!(planned(&through, service, &elsewhere).apply_slices, name);
}

#[test]
fn gateways_come_and_go_with_service_and_slices() {
    let (past, through) = (led(&[]), led(&["10.0.0.4"]));
    let comes = planned(&through, &past.service, &[]);
    assert_eq!((comes.apply_slices.len(), comes.apply_service, comes.prune_slices.len()), (1, true, 0), "{comes}");
    let goes = planned(&past, &through.service, &through.slices);
    assert_eq!((goes.apply_slices.len(), goes.apply_service, goes.prune_slices.len()), (0, true, 0), "{goes}");
    let gone = planned(&past, &past.service, &through.slices);
    assert_eq!((gone.apply_slices.len(), gone.apply_service), (0, false), "{gone}");
    assert_eq!(gone.prune_slices, ["chat-gateway-ipv4"]);
}
