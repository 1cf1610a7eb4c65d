//! What a round tells: the deployment's status and Events.

use k8s_openapi::api::core::v1::ObjectReference;
use kube::{
    Api, Resource, ResourceExt,
    api::{Patch, PatchParams},
    runtime::events::Event,
};
use serde_json::json;
use stoker_crds::{InferenceDeployment, InferenceDeploymentStatus};
use tracing::debug;

use super::Context;
use crate::{
    apply::{Applied, FIELD_MANAGER},
    error::ReconcileError,
    events::{events_of, old_crd},
    observe::Observed,
};

impl Context {
    /// Writes the status if it moved, and tells what happened.
    pub(super) async fn report(
        &self,
        observed: &Observed,
        applied: &Applied,
        status: &InferenceDeploymentStatus,
    ) -> Result<(), ReconcileError> {
        let deployment = &observed.deployment;
        let before = deployment.status.as_ref();
        if before != Some(status) {
            let written = self.write_status(deployment, status).await.map_err(ReconcileError::of_status);
            if let Err(ReconcileError::OldCrd(_)) = &written {
                self.publish(deployment, &old_crd()).await;
            }
            written?;
        }
        for event in events_of(&deployment.namespace().unwrap_or_default(), applied, before, status) {
            self.publish(deployment, &event).await;
        }
        Ok(())
    }

    async fn publish(&self, deployment: &InferenceDeployment, event: &Event) {
        self.metrics.wrote("Event", "create");
        if let Some(board) = &self.board {
            board.told(deployment, event, self.readings.now());
        }
        // The recorder counts an Event about the same object for the same reason as a repetition, and keeps the first
        // note. With its resource version the object is another one whenever there is something new to tell.
        let regarding =
            ObjectReference { resource_version: deployment.resource_version(), ..deployment.object_ref(&()) };
        if let Err(error) = self.recorder.publish(event, &regarding).await {
            debug!(%error, "event was not published");
        }
    }

    async fn write_status(
        &self,
        deployment: &InferenceDeployment,
        status: &InferenceDeploymentStatus,
    ) -> kube::Result<()> {
        let api =
            Api::<InferenceDeployment>::namespaced(self.client.clone(), &deployment.namespace().unwrap_or_default());
        // The UID keeps the status of a deleted namesake from landing here, the version that of an operator which was
        // stopped for a while.
        let patch = json!({
            "apiVersion": InferenceDeployment::api_version(&()),
            "kind": InferenceDeployment::kind(&()),
            "metadata": {"uid": deployment.uid(), "resourceVersion": deployment.resource_version()},
            "status": status,
        });
        self.metrics.wrote("InferenceDeployment", "apply_status");
        let params = PatchParams::apply(FIELD_MANAGER).force();
        match api.patch_status(&deployment.name_any(), &params, &Patch::Apply(&patch)).await {
            // Deleted meanwhile.
            Err(kube::Error::Api(answer)) if answer.code == 404 => Ok(()),
            result => result.map(drop),
        }
    }
}
