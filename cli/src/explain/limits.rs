//! What stands between the number that was decided and the replicas that there are: what the status says of grants and of fitting. Pure.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use serde_json::{Value, json};
use stoker_crds::{
    InferenceDeploymentStatus,
    conditions::{FITS, GRANTED},
};

/// Lines beside those of a decision; none where nothing was said.
pub(super) fn lines(status: &InferenceDeploymentStatus) -> String {
    let condition = |type_: &str| status.conditions.iter().find(|condition| condition.type_ == type_);
    let said = [("granted", GRANTED), ("fits", FITS)].map(|(label, type_)| Some((label, condition(type_)?)));
    let line = |(label, condition): (&str, &Condition)| {
        let answer = match condition.status.as_str() {
            "True" => "yes",
            "False" => "no",
            _ => "unknown",
        };
        format!("  {label:<11} {answer}, {}: {}\n", condition.reason, condition.message)
    };
    said.into_iter().flatten().map(line).collect()
}

/// The same for programs.
pub(super) fn json(status: &InferenceDeploymentStatus) -> Value {
    let is_one = |type_: &str| [GRANTED, FITS].contains(&type_);
    let conditions: Vec<_> = status.conditions.iter().filter(|condition| is_one(&condition.type_)).collect();
    json!({"budget": status.budget, "fit": status.fit, "conditions": conditions})
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(conditions: &[(&str, &str, &str, &str)]) -> InferenceDeploymentStatus {
        let conditions: Vec<Value> = conditions
            .iter()
            .map(|(type_, status, reason, message)| {
                json!({"type": type_, "status": status, "reason": reason, "message": message,
                    "lastTransitionTime": "2026-01-31T12:00:30Z"})
            })
            .collect();
        serde_json::from_value(
            json!({"conditions": conditions, "budget": {"wanted": 3, "granted": 2, "blockedBy": ["b/batch"]}}),
        )
        .unwrap()
    }

    #[test]
    fn grants_and_fit_stand_beside_the_decision_with_their_reasons() {
        let lent = ("Granted", "False", "BudgetLent", "2 of 3 replicas: its own GPUs are lent");
        let unknown = ("Fits", "Unknown", "ModelUnknown", "nobody knows yet");
        let ready = ("Ready", "True", "Serving", "2 of 3 serve");
        let seen = status(&[ready, unknown, lent]);
        let words = "  granted     no, BudgetLent: 2 of 3 replicas: its own GPUs are lent\n  \
                     fits        unknown, ModelUnknown: nobody knows yet\n";
        assert_eq!(lines(&seen), words);
        let fits = status(&[("Fits", "True", "Fits", "on 1 x H100")]);
        assert_eq!(lines(&fits), "  fits        yes, Fits: on 1 x H100\n");
        assert_eq!(lines(&status(&[ready])), "");
        let json = json(&seen);
        assert_eq!(
            (json["budget"]["granted"].as_i64(), json["conditions"].as_array().map(Vec::len)),
            (Some(2), Some(2))
        );
    }
}
