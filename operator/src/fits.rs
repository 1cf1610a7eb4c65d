//! Whether a deployment's model fits the nodes that its pods may land on, before one is made; and how far that plan was from what a
//! replica took. Pure: nodes and what agents said are arguments.
//!
//! How large a model is, is known of those inside the agent, and of others once a replica has read their `config.json`: the status
//! keeps it. It informs, and keeps pods from being made in one case only: every node that could take them is of a kind that the
//! model certainly does not fit, so that a pod could do nothing but hold GPUs and fail. Nodes that there are not yet keep nobody
//! from anything: a cluster may add one for a pod that waits.

mod candidates;
mod judge;
mod measured;
#[cfg(test)]
mod tests;

use std::collections::HashMap;

use k8s_openapi::api::core::v1::Node;
use serde_json::Value;
use stoker_crds::{InferenceDeployment, conditions, devices::Gpus, fit::asked, status::FitStatus};
use stoker_fit::plan::Model;
use stoker_replica::{Replica, Trouble};

use self::{
    candidates::{Field, field},
    judge::judge,
    measured::{Numbers, numbers},
};
use crate::{observe::Described, watched::Seen};

/// What is looked at.
#[derive(Clone, Copy, Debug)]
pub struct Scene<'a> {
    /// The deployment as it was asked for, with the status last written.
    pub deployment: &'a InferenceDeployment,
    /// The revision that it asks for.
    pub revision: &'a str,
    /// Its replicas, of any revision.
    pub replicas: &'a [Replica],
    /// What they say of their model, by the UID of the pod.
    pub descriptions: &'a HashMap<String, Described>,
    /// The nodes.
    pub nodes: &'a Seen<Node>,
    /// The GPUs among what drivers publish, or why nobody knows them.
    pub devices: &'a Result<Gpus<'a>, String>,
}

/// What there is to say.
#[derive(Clone, Debug, PartialEq)]
pub struct Outlook {
    /// Whether it fits.
    pub opinion: Opinion,
    /// The numbers, and what they are from.
    pub status: FitStatus,
}

/// Whether a model fits.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Opinion {
    /// `None`: nobody knows.
    pub fits: Option<bool>,
    /// Reason and message.
    pub trouble: Trouble,
    /// A pod of the revision could only fail.
    pub is_hopeless: bool,
}

impl Opinion {
    fn unknown(reason: &str, why: impl Into<String>) -> Self {
        Self { fits: None, trouble: Trouble::new(reason, why), is_hopeless: false }
    }
}

/// Looks at a deployment.
pub fn look(scene: &Scene<'_>) -> Outlook {
    let source = scene.deployment.spec.model.source.clone();
    let before = before(scene);
    let config = told_config(scene).or_else(|| before?.config.clone());
    let (opinion, numbers) = match model(&source, config.as_deref()) {
        Ok(model) => of_model(scene, &model),
        Err(why) => (Opinion::unknown(conditions::REASON_MODEL_UNKNOWN, why), Numbers::default()),
    };
    let Numbers { place, planned, measured, memory_error_percent, kv_error_percent } = numbers;
    let status = FitStatus { source, config, place, planned, measured, memory_error_percent, kv_error_percent };
    Outlook { opinion, status }
}

fn of_model(scene: &Scene<'_>, model: &Model) -> (Opinion, Numbers) {
    let asked = asked(&scene.deployment.spec);
    let field = field(scene);
    let judged = match &field {
        Field::Unknown(why) => {
            judge::Judged { opinion: Opinion::unknown(conditions::REASON_NODES_UNKNOWN, why), planned: None }
        }
        Field::Known(candidates) => judge(model, &asked, candidates),
    };
    let numbers = numbers(scene, model, &asked).unwrap_or_else(|| Numbers::planned(judged.planned));
    (judged.opinion, numbers)
}

/// What was written of this source before.
fn before<'a>(scene: &Scene<'a>) -> Option<&'a FitStatus> {
    let before = scene.deployment.status.as_ref()?.fit.as_ref()?;
    (before.source == scene.deployment.spec.model.source).then_some(before)
}

/// What replicas of the revision read.
fn told_config(scene: &Scene<'_>) -> Option<String> {
    of_revision(scene).find_map(|(_, described)| described.description.config.clone())
}

/// Replicas of the revision that said something.
fn of_revision<'a>(scene: &Scene<'a>) -> impl Iterator<Item = (&'a Replica, &'a Described)> + use<'a> {
    let Scene { replicas, descriptions, revision, .. } = *scene;
    let of = replicas.iter().filter(move |replica| replica.pod.revision == revision);
    of.filter_map(|replica| Some((replica, descriptions.get(&replica.pod.uid)?)))
}

/// The model, or why nobody knows it.
fn model(source: &str, config: Option<&str>) -> Result<Model, String> {
    let builtin = source.strip_prefix("builtin://").and_then(Model::builtin);
    let text = builtin.or(config).ok_or_else(|| {
        format!(
            "nobody here knows yet how large {source} is: its first replica tells, once it has read the model's config.json; to know \
             before, give that to kubectl stoker plan --config"
        )
    })?;
    let uncovered = |error: &dyn std::fmt::Display| format!("this operator cannot tell how large {source} is: {error}");
    let config: Value = serde_json::from_str(text).map_err(|error| uncovered(&error))?;
    Model::from_json(&config, "config.json").map_err(|error| uncovered(&error))
}
