//! What a deployment adds to its pods: variables and volumes of the kinds that `spec.pod` knows. Pure.

use k8s_openapi::{
    api::core::v1::{
        ConfigMapKeySelector, ConfigMapVolumeSource, EmptyDirVolumeSource, EnvVar, EnvVarSource,
        PersistentVolumeClaimVolumeSource, SecretKeySelector, SecretVolumeSource, Volume, VolumeMount,
    },
    apimachinery::pkg::api::resource::Quantity,
};
use stoker_crds::pod::{EmptyDir, EnvSource, EnvVariable, Medium, PodVolume};

use crate::validate::as_quantity;

pub(super) fn env(variable: &EnvVariable) -> EnvVar {
    let EnvVariable { name, value, value_from } = variable.clone();
    EnvVar { name, value, value_from: value_from.map(env_source) }
}

fn env_source(source: EnvSource) -> EnvVarSource {
    let EnvSource { secret_key_ref, config_map_key_ref } = source;
    EnvVarSource {
        secret_key_ref: secret_key_ref.map(|at| SecretKeySelector { name: at.name, key: at.key, optional: None }),
        config_map_key_ref: config_map_key_ref.map(|at| ConfigMapKeySelector {
            name: at.name,
            key: at.key,
            optional: None,
        }),
        ..EnvVarSource::default()
    }
}

/// The volume at this place in the list. Its name shows nowhere else.
pub(super) fn volume(place: usize, volume: &PodVolume) -> Volume {
    let PodVolume { mount_path: _, read_only: _, empty_dir, config_map, secret, persistent_volume_claim } =
        volume.clone();
    Volume {
        name: volume_name(place),
        empty_dir: empty_dir.map(empty_dir_source),
        config_map: config_map
            .map(|files| ConfigMapVolumeSource { name: files.name, ..ConfigMapVolumeSource::default() }),
        secret: secret
            .map(|files| SecretVolumeSource { secret_name: Some(files.secret_name), ..SecretVolumeSource::default() }),
        persistent_volume_claim: persistent_volume_claim.map(|claim| PersistentVolumeClaimVolumeSource {
            claim_name: claim.claim_name,
            read_only: Some(is_read_only(volume)),
        }),
        ..Volume::default()
    }
}

pub(super) fn volume_mount(place: usize, volume: &PodVolume) -> VolumeMount {
    VolumeMount {
        name: volume_name(place),
        mount_path: volume.mount_path.clone(),
        read_only: Some(is_read_only(volume)),
        ..VolumeMount::default()
    }
}

/// An emptyDir that cannot be written is good for nothing; a claim is read unless somebody says that it is written.
fn is_read_only(volume: &PodVolume) -> bool {
    volume.read_only.unwrap_or(volume.empty_dir.is_none())
}

fn empty_dir_source(empty_dir: EmptyDir) -> EmptyDirVolumeSource {
    let size_limit: Option<Quantity> = empty_dir.size_limit.map(as_quantity);
    let medium = empty_dir.medium.map(|medium| match medium {
        Medium::Memory => "Memory".to_owned(),
    });
    EmptyDirVolumeSource { medium, size_limit }
}

fn volume_name(place: usize) -> String {
    format!("added-{place}")
}
