//! Kinds that a control plane has before its controllers start. Owns none of them and removes none.

use std::{collections::HashSet, time::Duration};

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::{
    Api, Client, ResourceExt,
    api::{Patch, PatchParams},
};
use tokio::time::{Instant, sleep};

use crate::error::ClusterError;

/// Who applied them, in their managed fields.
const MANAGER: &str = "stoker-cluster";
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Makes these kinds; false when whoever asks which there are is not told of all of them in this time.
pub(crate) async fn make(
    client: &Client,
    kinds: &[CustomResourceDefinition],
    patience: Duration,
) -> Result<bool, ClusterError> {
    apply(client, kinds).await?;
    let deadline = Instant::now() + patience;
    while !are_told(client, kinds).await {
        if Instant::now() >= deadline {
            return Ok(false);
        }
        sleep(POLL_INTERVAL).await;
    }
    Ok(true)
}

async fn apply(client: &Client, kinds: &[CustomResourceDefinition]) -> Result<(), ClusterError> {
    let definitions = Api::<CustomResourceDefinition>::all(client.clone());
    for kind in kinds {
        let applied = definitions.patch(&kind.name_any(), &PatchParams::apply(MANAGER), &Patch::Apply(kind)).await;
        applied.map_err(ClusterError::api(format!("apply {}", kind.name_any())))?;
    }
    Ok(())
}

/// What controllers are told at their start, which is later than the definitions' condition `Established` says.
async fn are_told(client: &Client, kinds: &[CustomResourceDefinition]) -> bool {
    let Ok(groups) = client.list_api_groups_aggregated().await else { return false };
    let resources = groups.items.iter().flat_map(|group| &group.versions).flat_map(|version| &version.resources);
    let told: HashSet<&str> = resources.filter_map(|resource| resource.resource.as_deref()).collect();
    kinds.iter().all(|kind| told.contains(kind.spec.names.plural.as_str()))
}
