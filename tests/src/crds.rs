//! CRDs of before: the present one without what came later. Pure.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use serde_json::Value;

/// The CRD as it was before this field, a JSON pointer into objects. No rule of those above it is older than the field.
pub fn before(crd: &CustomResourceDefinition, field: &str) -> CustomResourceDefinition {
    let mut value = serde_json::to_value(crd).expect("a CRD is JSON");
    let mut schema = &mut value["spec"]["versions"][0]["schema"]["openAPIV3Schema"];
    let (parents, name) = field.rsplit_once('/').expect("a pointer begins with a slash");
    for parent in parents.split('/').skip(1) {
        forget_rules(schema);
        schema = &mut schema["properties"][parent];
    }
    forget_rules(schema);
    let taken = schema["properties"].as_object_mut().and_then(|properties| properties.remove(name));
    assert!(taken.is_some(), "{field} is no field");
    if let Some(required) = schema["required"].as_array_mut() {
        required.retain(|required| required != name);
    }
    serde_json::from_value(value).expect("it is still a CRD")
}

fn forget_rules(schema: &mut Value) {
    if let Some(schema) = schema.as_object_mut() {
        schema.remove("x-kubernetes-validations");
    }
}

#[cfg(test)]
mod tests {
    use stoker_crds::crd::crd;

    use super::*;

    #[test]
    fn of_before_lacks_the_field_and_has_all_others() {
        let (now, older) = (crd(), before(&crd(), "/spec/engine/maxNumSeqs"));
        let engine = |crd: &CustomResourceDefinition| {
            let value = serde_json::to_value(crd).unwrap();
            let spec = &value["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"];
            spec["properties"]["engine"]["properties"].as_object().unwrap().clone()
        };
        let mut without = engine(&now);
        assert!(without.remove("maxNumSeqs").is_some());
        assert_eq!(engine(&older), without);
    }
}
