//! The ConfigMap with the agent's configuration: immutable, one per revision, so that a pod restarts with what it was
//! started with; and the one with the operator's public keys, which changes under pods that run. Pure.

use std::collections::BTreeMap;

use k8s_openapi::{api::core::v1::ConfigMap, apimachinery::pkg::apis::meta::v1::ObjectMeta};
use serde::Serialize;
use stoker_crds::{
    contract::{AgentConfig, CONFIG_FILE, ModelConfig, SPEC_FILE},
    intent::KEYS_FILE,
};

use super::{config_map_name, keys_name, labels, owner};
use crate::validate::{Identity, ReplicaInputs, ValidatedDeployment};

pub(super) fn config_map(deployment: &ValidatedDeployment, revision: &str) -> ConfigMap {
    let identity = &deployment.identity;
    let config = agent_config(&deployment.replica, revision);
    let json = serde_json::to_string_pretty(&config).expect("an agent config is JSON");
    ConfigMap {
        metadata: ObjectMeta {
            name: Some(config_map_name(&identity.name, revision)),
            namespace: Some(identity.namespace.clone()),
            labels: Some(labels::child_of_revision(&identity.name, revision)),
            owner_references: Some(vec![owner(identity)]),
            ..ObjectMeta::default()
        },
        data: Some(BTreeMap::from([
            (CONFIG_FILE.to_owned(), json),
            (INPUTS_FILE.to_owned(), text(&deployment.replica)),
            (SPEC_FILE.to_owned(), text(&deployment.asked)),
        ])),
        immutable: Some(true),
        ..ConfigMap::default()
    }
}

/// What replicas are made from, for going back to the revision: one line of JSON.
pub const INPUTS_FILE: &str = "inputs.json";

fn text(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("what replicas are made from is JSON")
}

/// The public keys of the operator, for every replica of the deployment.
pub(super) fn keys(identity: &Identity, public_keys: &str) -> ConfigMap {
    ConfigMap {
        metadata: ObjectMeta {
            name: Some(keys_name(&identity.name)),
            namespace: Some(identity.namespace.clone()),
            labels: Some(labels::child(&identity.name)),
            owner_references: Some(vec![owner(identity)]),
            ..ObjectMeta::default()
        },
        data: Some(BTreeMap::from([(KEYS_FILE.to_owned(), public_keys.to_owned())])),
        ..ConfigMap::default()
    }
}

fn agent_config(inputs: &ReplicaInputs, revision: &str) -> AgentConfig {
    AgentConfig {
        revision: revision.to_owned(),
        model: ModelConfig {
            source: inputs.model_source.clone(),
            served_names: inputs.served_names.clone(),
            ..ModelConfig::default()
        },
        gpus: inputs.gpus,
        parallelism: inputs.parallelism,
        engine: inputs.engine.clone(),
        drain: inputs.drain,
    }
}
