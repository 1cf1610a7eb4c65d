//! Nothing of an object is accepted and then ignored: each field of a schema, changed or taken out, changes a child, the agent's
//! configuration or a decision, or is refused; put back, everything is as before.
//!
//! The fields come from the schemas, so a new one is in one of the objects here or the test fails. Of a deployment what replicas are made
//! from has to be seen in what is made: the copies of the spec that a revision keeps, its hash, and what was merely read do not count. How
//! replicas are replaced and scaled is seen in what decides about that.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod fields;

use serde_json::{Value, json};
use stoker_crds::{InferenceBudget, contract::SPEC_FILE};
use stoker_operator::{
    budgets::{
        budget_of,
        grants::{Budget, Claim, grants},
    },
    desired::{INPUTS_FILE, desired},
    validate::{Defaults, ModelDefaults, ValidatedDeployment, validate},
};

use self::fields::{another, fields, objects, schema_of_spec, take_out};

/// Fields that decide over replicas, and are in none of them.
const DECIDES: [&str; 3] = ["/replicas", "/rollout", "/scaling"];

/// What follows from a spec, as text; the refusal if nothing does.
#[derive(Debug, PartialEq)]
struct Wants {
    /// Children.
    made: String,
    /// What decides about them.
    decides: String,
}

impl Wants {
    /// What has to follow this field.
    fn of(&self, field: &str) -> &str {
        let decides = DECIDES.iter().any(|part| field.starts_with(part));
        if decides { &self.decides } else { &self.made }
    }
}

fn wants(spec: &Value) -> Result<Wants, String> {
    let object = json!({
        "apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceDeployment", "spec": spec,
        "metadata": {"name": "chat", "namespace": "default", "uid": "uid-chat", "generation": 1, "resourceVersion": "1"},
    });
    let deployment = serde_json::from_value(object).map_err(|error| error.to_string())?;
    let models = ModelDefaults { node_cache: Some("/var/lib/models".into()), ..ModelDefaults::default() };
    let defaults = Defaults { agent_image: "agent:1".into(), models, ..Defaults::default() };
    let valid = validate(&deployment, &defaults).map_err(|error| error.to_string())?;
    let mut desired = desired(&valid, "");
    let kept = desired.config_map.data.as_mut().unwrap();
    assert!([SPEC_FILE, INPUTS_FILE].map(|copy| kept.remove(copy).is_some()) == [true; 2], "copies have other names");
    let children = (&desired.service, &desired.config_map, &desired.budget, &desired.network_policy, &desired.claim);
    let made = format!("{children:?} {:?}", desired.pod(0)).replace(&desired.revision, "REVISION");
    let ValidatedDeployment {
        replicas,
        replacing,
        progress_deadline,
        paused,
        keep_revisions,
        auto_rollback,
        canary,
        scaling,
        ..
    } = valid;
    let of_rollout = (replacing, progress_deadline, paused, keep_revisions, auto_rollback, canary);
    Ok(Wants { made, decides: format!("{replicas} {of_rollout:?} {scaling:?}") })
}

#[test]
fn every_field_changes_what_is_wanted_or_is_refused() {
    let objects = objects();
    let fields = fields(&schema_of_spec(stoker_crds::crd::crd()), "");
    assert!(fields.len() > 50, "{fields:?}");
    for field in fields {
        let spec = objects.iter().find(|object| object.pointer(&field).is_some());
        let spec = spec.unwrap_or_else(|| panic!("{field} is in no object of this test"));
        let before = wants(spec).unwrap_or_else(|refusal| panic!("{spec}: {refusal}"));
        let is_ignored = |spec: &Value| wants(spec).is_ok_and(|after| after.of(&field) == before.of(&field));
        let mut without = spec.clone();
        take_out(&mut without, &field);
        assert!(!is_ignored(&without), "{field} taken out changes nothing");
        if let Some(value) = another(spec.pointer(&field).unwrap()) {
            let mut changed = spec.clone();
            *changed.pointer_mut(&field).unwrap() = value;
            assert!(!is_ignored(&changed), "{field} changed changes nothing");
        }
        assert_eq!(wants(spec), Ok(before), "{field} put back");
    }
}

/// Replicas that deployments of a budget's namespace and of others get, in a world where its priority decides and in one where nobody is
/// in its way; the refusal if there is none.
fn granted(spec: &Value) -> Result<String, String> {
    let object = json!({"apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceBudget", "spec": spec,
        "metadata": {"name": "default", "namespace": "own"}});
    let own: InferenceBudget = serde_json::from_value(object).map_err(|error| error.to_string())?;
    let other =
        |namespace: &str, gpus, priority, borrows| Budget { namespace: namespace.into(), gpus, priority, borrows };
    let claim = |namespace: &str, wanted| {
        let (namespace, name) = (namespace.to_owned(), "chat".to_owned());
        Claim { namespace, name, gpus: 1, min: 1, wanted, ..Claim::default() }
    };
    // Two GPUs that nobody claims, and three who would borrow them.
    let contested = [other("above", 1, 10, 1), other("below", 1, 3, u64::MAX), other("idle", 2, 0, 0)];
    let alone = [other("idle", 50, 0, 0)];
    let of = |others: &[Budget]| {
        let budgets = [&[budget_of(&own)], others].concat();
        grants(&budgets, &["own", "above", "below"].map(|namespace| claim(namespace, 40)))
    };
    Ok(format!("{:?} {:?}", of(&contested), of(&alone)))
}

#[test]
fn every_field_of_a_budget_changes_grants_or_is_refused() {
    let spec = json!({"gpus": 2, "priority": 5, "borrowing": {"maxGpus": 4}});
    let mut fields = fields(&schema_of_spec(stoker_crds::crd::budget_crd()), "");
    assert_eq!(fields.len(), 3, "{fields:?}");
    fields.push("/borrowing".to_owned());
    let before = granted(&spec).unwrap();
    for field in fields {
        let mut without = spec.clone();
        take_out(&mut without, &field);
        assert_ne!(granted(&without).as_ref(), Ok(&before), "{field} taken out");
        if let Some(value) = another(spec.pointer(&field).unwrap_or_else(|| panic!("{field} is not in this test"))) {
            let mut changed = spec.clone();
            *changed.pointer_mut(&field).unwrap() = value;
            assert_ne!(granted(&changed).as_ref(), Ok(&before), "{field} changed");
        }
        assert_eq!(granted(&spec).as_ref(), Ok(&before), "{field} put back");
    }
}
