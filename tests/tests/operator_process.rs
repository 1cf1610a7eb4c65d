//! The operator as a process among others: one writes at a time, a successor takes over, SIGTERM ends it in order.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::time::Duration;

use k8s_openapi::api::coordination::v1::Lease;
use kube::Api;
use serde_json::{Value, json};
use stoker_cluster::Audit;
use stoker_tests::operator::{Operator, Rig};

const SOON: Duration = Duration::from_secs(40);
/// A Lease runs out after 15 s; two more tries and a slow machine.
const TAKE_OVER_WITHIN: Duration = Duration::from_secs(30);

fn holder(rig: &Rig) -> String {
    let leases = Api::<Lease>::namespaced(rig.client(), "stoker-system");
    let lease = rig.block_on(leases.get("stoker-operator")).unwrap();
    lease.spec.unwrap().holder_identity.unwrap_or_default()
}

/// What this operator was allowed to change so far, from the API server's own log.
fn writes_of(rig: &Rig, operator: &Operator) -> Vec<String> {
    let log = std::fs::read_to_string(rig.cluster.control_plane.audit_log()).unwrap();
    let lines = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let ours =
        lines.filter(|entry| entry["userAgent"].as_str().is_some_and(|agent| agent.contains(&operator.identity())));
    let writes = ours.filter(|entry| !["get", "list", "watch"].contains(&entry["verb"].as_str().unwrap_or_default()));
    let accepted = writes.filter(|entry| entry["responseStatus"]["code"].as_u64().is_some_and(|code| code < 300));
    accepted.map(|entry| format!("{} {}", entry["verb"], entry["requestURI"])).collect()
}

#[test]
fn one_operator_leads_and_another_takes_over() {
    let mut rig = Rig::start(Audit::Metadata).unwrap();
    rig.wait("the first leads", SOON, |rig| Ok(rig.operator.leads())).unwrap();
    let first = holder(&rig);
    let mut second = Operator::start(&rig.cluster.control_plane).unwrap();
    rig.apply("chat", json!({"model": {"source": "builtin://ember"}})).unwrap();
    rig.wait_ready("chat", SOON).unwrap();
    assert!(!second.leads());
    assert_eq!(holder(&rig), first);

    // Killed, the first cannot release the Lease: it has to run out.
    rig.operator.kill().unwrap();
    rig.wait("the second leads", TAKE_OVER_WITHIN, |_| Ok(second.leads())).unwrap();
    rig.scale("chat", 2).unwrap();
    rig.wait_ready("chat", SOON).unwrap();

    // Frozen in the middle of a roll until its Lease ran out, the second is no leader when it goes on: it writes nothing
    // more and ends.
    rig.operator.restart().unwrap();
    let change = json!({"model": {"source": "builtin://ember"}, "replicas": 2, "engine": {"maxNumSeqs": 2}});
    rig.apply("chat", change).unwrap();
    rig.wait("the roll has begun", SOON, |rig| Ok(rig.pods("chat")?.len() > 2)).unwrap();
    second.freeze().unwrap();
    rig.wait("the first leads again", TAKE_OVER_WITHIN, |rig| Ok(rig.operator.leads())).unwrap();
    let frozen = writes_of(&rig, &second);
    assert!(!frozen.is_empty());
    second.thaw().unwrap();
    assert_eq!(second.wait_for_end(SOON).unwrap(), Some(1));
    rig.wait_ready("chat", SOON).unwrap();
    assert_eq!(writes_of(&rig, &second), frozen, "written after its lease ran out");

    // Asked to stop, it lets go of the Lease at once.
    rig.operator.terminate().unwrap();
    assert_eq!(rig.operator.wait_for_end(SOON).unwrap(), Some(0));
    assert_eq!(holder(&rig), "");
}

#[test]
fn a_deployment_that_cannot_be_read_is_told_so_and_blinds_nobody() {
    let rig = Rig::start(Audit::Off).unwrap();
    // A newer schema: threads became a word.
    let mut crd = serde_json::to_value(stoker_crds::crd::crd()).unwrap();
    let properties = &mut crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"];
    properties["spec"]["properties"]["engine"]["properties"]["threads"] = json!({"type": "string"});
    rig.cluster.apply(&crd.to_string()).unwrap();
    let object = |name: &str, spec: serde_json::Value| json!({"apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceDeployment", "metadata": {"name": name}, "spec": spec});
    let odd = object("odd", json!({"model": {"source": "builtin://ember"}, "engine": {"threads": "many"}}));
    rig.wait("the newer object is stored", SOON, |rig| Ok(rig.cluster.apply(&odd.to_string()).is_ok())).unwrap();
    rig.wait("it is told", SOON, |rig| {
        let conditions = rig.cluster.get("infd", "odd").unwrap_or_default()["status"]["conditions"].to_string();
        Ok(conditions.contains("InvalidSpec") && conditions.contains("cannot read this object"))
    })
    .unwrap();
    rig.apply("plain", json!({"model": {"source": "builtin://ember"}})).unwrap();
    // Other clients of the typed API cannot list any more; the operator can.
    rig.wait("the other one serves", SOON, |rig| {
        let status = rig.cluster.get("infd", "plain").unwrap_or_default()["status"].clone();
        Ok(status["readyOfWanted"] == "1/1")
    })
    .unwrap();
}

#[test]
fn under_an_older_crd_an_event_says_which_one_to_apply() {
    let rig = Rig::start(Audit::Off).unwrap();
    let path = "/spec/versions/0/schema/openAPIV3Schema/properties/status/properties/scaling";
    let older = json!([{"op": "remove", "path": path}]).to_string();
    rig.cluster.kubectl(&["patch", "crd", "inferencedeployments.stoker.dev", "--type=json", "-p", &older]);
    rig.wait("the older CRD is in force", SOON, |rig| {
        // Between the two schemas there may be none.
        let schema = rig.cluster.try_kubectl(&["get", "--raw", "/openapi/v3/apis/stoker.dev/v1alpha1"]);
        Ok(schema.is_ok_and(|schema| !schema.contains("pressurePercent")))
    })
    .unwrap();
    rig.apply("chat", json!({"model": {"source": "builtin://ember"}, "scaling": {"max": 2}})).unwrap();
    rig.wait("the Event is there", SOON, |rig| {
        let events = rig.cluster.kubectl(&[
            "get",
            "events",
            "-o",
            "jsonpath={range .items[*]}{.reason}: {.message}{\"\\n\"}{end}",
        ]);
        Ok(events.contains("CrdTooOld: The installed CRD is older") && events.contains("apply the CRD of this release"))
    })
    .unwrap();
}
