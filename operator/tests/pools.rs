//! The InferencePool of a deployment: what it says, and what a plan does about one that is there.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde_json::json;
use stoker_crds::InferenceDeployment;
use stoker_operator::{
    desired::{Desired, desired, labels},
    observe::{Child, Holder, Observed},
    plan::{self, Plan, Upkeep},
    pools::{FailureMode, InferencePool, PoolPort},
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

fn with_pool(failure_mode: Option<FailureMode>) -> Desired {
    let valid = valid();
    desired(&valid, "").pooled(&valid.identity, failure_mode)
}

/// What a plan does beside this pool, all other children being as they should be.
fn planned(desired: &Desired, pool: Child<InferencePool>) -> Plan {
    let observed = Observed {
        service: Child::Own(Arc::new(desired.service.clone())),
        config_maps: [&desired.config_map, &desired.keys].map(|map| Child::Own(Arc::new(map.clone()))).into(),
        budget: Child::Own(Arc::new(desired.budget.clone())),
        pool,
        ..Observed::of(Arc::new(deployment()))
    };
    plan::plan(&valid(), desired, &observed, Timestamp::UNIX_EPOCH)
}

#[test]
fn a_pool_has_the_replicas_of_its_service_and_names_it_as_who_picks() {
    let pool = with_pool(Some(FailureMode::FailClose)).pool.unwrap();
    assert_eq!(pool.spec.selector.match_labels, labels::selector("chat"));
    let object = serde_json::to_value(&pool).unwrap();
    assert_eq!(
        (&object["apiVersion"], &object["kind"]),
        (&json!("inference.networking.k8s.io/v1"), &json!("InferencePool"))
    );
    let picker = json!({"name": "chat", "port": {"number": 8000}, "failureMode": "FailClose"});
    assert_eq!(
        (&object["spec"]["endpointPickerRef"], &object["spec"]["targetPorts"]),
        (&picker, &json!([{"number": 8000}]))
    );
    assert_eq!((&object["metadata"]["namespace"], object.get("status")), (&json!("team"), None));
    assert_eq!(with_pool(None).pool, None);
}

#[test]
fn a_pool_is_written_when_it_is_missing_or_says_something_else_goes_when_none_is_wanted_and_another_s_is_left() {
    let wanted = with_pool(Some(FailureMode::FailClose));
    let own = |pool: &InferencePool| Child::Own(Arc::new(pool.clone()));
    let made = wanted.pool.clone().unwrap();
    let mut moved = made.clone();
    moved.spec.target_ports = vec![PoolPort { number: 9 }];
    let mut nobody = made.clone();
    nobody.spec.endpoint_picker_ref = None;
    let foreign = || Child::Foreign { name: "chat".into(), holder: Holder::Other };
    let mut leaving = made.clone();
    leaving.metadata.deletion_timestamp = Some(Time(Timestamp::UNIX_EPOCH));
    for (name, there, upkeep) in [
        ("missing", Child::Absent, Upkeep::Apply),
        ("as it should be", own(&made), Upkeep::Leave),
        ("another port", own(&moved), Upkeep::Apply),
        ("nobody picks", own(&nobody), Upkeep::Apply),
        ("of another mode", own(&with_pool(Some(FailureMode::FailOpen)).pool.unwrap()), Upkeep::Apply),
        ("somebody else's", foreign(), Upkeep::Leave),
    ] {
        let plan = planned(&wanted, there);
        assert_eq!((plan.pool, plan.taken.len()), (upkeep, 0), "{name}");
        assert_eq!(plan.to_string().contains("apply InferencePool"), upkeep == Upkeep::Apply, "{name}");
    }
    for (name, there, upkeep) in [
        ("none", Child::Absent, Upkeep::Leave),
        ("one of before", own(&made), Upkeep::Delete),
        ("one of before that was changed", own(&moved), Upkeep::Delete),
        ("one that goes already", own(&leaving), Upkeep::Leave),
        ("somebody else's", foreign(), Upkeep::Leave),
    ] {
        let plan = planned(&with_pool(None), there);
        assert_eq!(plan.pool, upkeep, "{name}, where no pools are kept");
        assert_eq!(plan.to_string().contains("delete InferencePool"), upkeep == Upkeep::Delete, "{name}");
    }
}
