//! A canary: one replica of a new revision beside those that serve, until its gate has passed for long enough. Here is what is asked of
//! it and which part of the requests it gets; [`drift`] and [`traffic`] measure, [`gate`] judges, [`trial`] follows it over time, all of
//! them pure; [`Examiner`] alone asks agents.

pub mod drift;
mod examiner;
mod findings;
pub mod gate;
mod prompts;
pub mod traffic;
pub mod trial;

use jiff::SignedDuration;
use stoker_crds::{
    InferenceDeployment,
    canary::{CanarySpec, PromptsSpec, TrafficSpec},
    endpoints::WHOLE_WEIGHT,
    status::CanaryPhase,
};

pub use self::{examiner::Examiner, findings::Findings};
use self::{
    gate::{Gate, PromptsGate, TrafficGate},
    prompts::PROMPTS,
};

/// Percent of requests that a canary gets where the deployment does not say.
const WEIGHT_PERCENT: u32 = 10;
/// Seconds that its gate has to pass where the deployment does not say.
const SECONDS: u32 = 300;

/// What is asked of a canary.
#[derive(Clone, Debug, PartialEq)]
pub struct Canary {
    /// Percent of the deployment's requests.
    pub weight_percent: u32,
    /// How long its gate has to pass.
    pub passes_for: SignedDuration,
    /// Its gate.
    pub gate: Gate,
}

impl Canary {
    /// With the defaults of what is not said.
    pub fn of(spec: &CanarySpec) -> Self {
        let CanarySpec { weight, seconds, analysis } = spec;
        Self {
            weight_percent: weight.unwrap_or(WEIGHT_PERCENT),
            passes_for: SignedDuration::from_secs(seconds.unwrap_or(SECONDS).into()),
            gate: Gate {
                prompts: analysis.prompts.as_ref().map(prompts_gate),
                traffic: analysis.traffic.as_ref().map(traffic_gate),
            },
        }
    }
}

fn prompts_gate(spec: &PromptsSpec) -> PromptsGate {
    let own = || PROMPTS.map(str::to_owned).into();
    PromptsGate { max_mean_drift: spec.max_mean_drift.unwrap_or(0.1), texts: spec.texts.clone().unwrap_or_else(own) }
}

fn traffic_gate(spec: &TrafficSpec) -> TrafficGate {
    TrafficGate {
        min_requests: spec.min_requests.unwrap_or(50).into(),
        max_ttft_ratio: spec.max_ttft_ratio.unwrap_or(1.5),
        max_itl_ratio: spec.max_itl_ratio.unwrap_or(1.5),
        max_error_percent: spec.max_error_percent.unwrap_or(1.0),
    }
}

/// The part beside others' of a replica of this revision, so many others serving, as its deployment's status says.
pub fn weight_of(deployment: &InferenceDeployment, revision: &str, n_others: usize) -> u32 {
    let Some(rollout) = deployment.status.as_ref().and_then(|status| status.rollout.as_ref()) else {
        return WHOLE_WEIGHT;
    };
    let given_up = rollout.rolled_back.as_ref().is_some_and(|gone| gone.revision == revision);
    let on_trial = rollout.canary.as_ref().filter(|canary| canary.revision == revision);
    let spec = deployment.spec.rollout.as_ref().and_then(|rollout| rollout.canary.as_ref());
    match (on_trial, spec) {
        // It leaves. Alone it is better than nobody.
        _ if given_up => 1,
        (Some(canary), Some(spec)) if canary.phase != CanaryPhase::Passed => {
            weight(spec.weight.unwrap_or(WEIGHT_PERCENT), n_others)
        }
        _ => WHOLE_WEIGHT,
    }
}

/// The weight with which one replica beside others of whole weight gets that percent of all requests; at most a whole one, because it is
/// one replica.
fn weight(percent: u32, n_others: usize) -> u32 {
    let others = u64::from(WHOLE_WEIGHT) * n_others as u64;
    let rest = u64::from(100 - percent.min(99));
    let weight = (others * u64::from(percent) + rest / 2) / rest;
    match n_others {
        0 => WHOLE_WEIGHT,
        _ => weight.clamp(1, WHOLE_WEIGHT.into()) as u32,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn the_status_says_whose_part_is_small() {
        let weights = |canary: Value, rolled_back: Value| {
            let deployment: InferenceDeployment = serde_json::from_value(json!({
                "apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceDeployment", "metadata": {"name": "chat"},
                "spec": {"model": {"source": "builtin://ember"}, "rollout": {"canary": {"analysis": {"prompts": {}}}}},
                "status": {"rollout": {
                    "asked": "new", "phase": "Canary", "movedAt": "2026-01-31T12:00:00Z", "canary": canary, "rolledBack": rolled_back,
                }},
            }))
            .expect("a deployment");
            ["old", "new"].map(|revision| weight_of(&deployment, revision, 1))
        };
        let phase = |phase: &str| json!({"revision": "new", "phase": phase, "message": ""});
        let gone = json!({"revision": "new", "to": "old", "at": "2026-01-31T12:00:00Z", "message": ""});
        assert_eq!(weights(Value::Null, Value::Null), [100, 100]);
        assert_eq!(weights(phase("Starting"), Value::Null), [100, 11], "from its first request on");
        assert_eq!(weights(phase("Analysing"), Value::Null), [100, 11]);
        assert_eq!(weights(phase("Failed"), Value::Null), [100, 11], "it is kept");
        assert_eq!(weights(phase("Passed"), Value::Null), [100, 100]);
        assert_eq!(weights(phase("Failed"), gone), [100, 1], "it leaves");
    }

    #[test]
    fn a_canary_has_its_share_of_the_deployment_and_no_more_than_a_replica_has() {
        let share = |percent, n_others| {
            let weight = f64::from(weight(percent, n_others));
            weight / (weight + 100.0 * n_others as f64) * 100.0
        };
        for (percent, n_others) in [(10, 1), (10, 3), (10, 9), (1, 2), (50, 1), (25, 3)] {
            let got = share(percent, n_others);
            assert!((got - f64::from(percent)).abs() < 0.5, "{percent} % beside {n_others}: {got}");
        }
        assert_eq!(weight(10, 50), WHOLE_WEIGHT, "a fifty-first replica's work is a fifty-first of all");
        assert_eq!(weight(1, 0), WHOLE_WEIGHT, "nobody else serves");
    }
}
