//! The gateway as a local process beside the operator, and the EndpointSlice by which the operator finds it: what a Deployment, a
//! Service and their controllers are in a real cluster.

use std::path::PathBuf;

use serde_json::json;

use crate::{
    component::{Component, ComponentSpec},
    control_plane::ControlPlane,
    error::ClusterError,
    operator::{NAMESPACE, OperatorProcess, apply},
};

const NAME: &str = "stoker-gateway";
const HTTP_PORT: u16 = 8000;

/// What the operator is to be told with `--gateway-service`.
pub(crate) fn service() -> String {
    format!("{NAMESPACE}/{NAME}")
}

/// A running gateway. Dropping it kills it.
#[derive(Debug)]
pub struct GatewayProcess {
    component: Component,
    url: String,
}

impl GatewayProcess {
    /// Starts the gateway and says where it is.
    pub fn start(
        control_plane: &ControlPlane,
        operator: &OperatorProcess,
        binary: PathBuf,
    ) -> Result<Self, ClusterError> {
        let home = control_plane.slot().home();
        let spec = ComponentSpec {
            name: NAME,
            program: binary,
            // The port behind it is the one that the operator asks.
            args: vec![format!("--operator={}", operator.url()), format!("--listen={home}:{HTTP_PORT}")],
            env: Vec::new(),
            log: control_plane.log_path(NAME),
        };
        let component = Component::start(spec, control_plane.keeper())?;
        let slice = json!({
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
            "metadata": {"name": NAME, "namespace": NAMESPACE, "labels": {"kubernetes.io/service-name": NAME}},
            // Addresses of the loopback are refused as addresses, and taken as names.
            "addressType": "FQDN", "endpoints": [{"addresses": [home.to_string()], "conditions": {"ready": true}}],
            "ports": [{"name": "http", "port": HTTP_PORT, "protocol": "TCP"}],
        });
        apply(control_plane, &slice.to_string())?;
        Ok(Self { component, url: format!("http://{home}:{HTTP_PORT}") })
    }

    /// URL of its address for all deployments.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Starts the gateway again when it has ended. Says whether it had.
    pub fn revive(&mut self) -> Result<bool, ClusterError> {
        let ended = self.component.has_exited();
        if ended {
            self.component.restart()?;
        }
        Ok(ended)
    }
}
