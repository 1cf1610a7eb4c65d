//! The operator's own HTTP: where full records of decisions are. Reached by a URL, or through the API server by a
//! forwarded port of the pod that holds the Lease. Owns the way there; understands nothing of records.

use anyhow::{Context, Result, bail};
use clap::Args;
use http_body_util::Full;
use hyper::{Request, StatusCode, header};
use k8s_openapi::api::{coordination::v1::Lease, core::v1::Pod};
use kube::{Api, ResourceExt};
use stoker_crds::scaling_status::RECORDS_PATH;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    time::{Duration, timeout},
};

use crate::{cluster::Cluster, http};

/// Port of an operator whose pod names none.
const PORT: u16 = 8080;
const ANSWER_TIMEOUT: Duration = Duration::from_secs(20);

/// Where the operator is.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Operator")]
pub(crate) struct OperatorArgs {
    /// URL of the operator's HTTP, such as http://localhost:8080. Default: a forwarded port of the leading pod.
    #[arg(long = "operator", env = "STOKER_OPERATOR_URL", value_name = "URL")]
    url: Option<String>,
    #[command(flatten)]
    place: LeasePlace,
}

/// Where the operators' Lease is.
#[derive(Clone, Debug, Args)]
pub(crate) struct LeasePlace {
    /// Namespace of the operator's Lease and pods.
    #[arg(long, default_value = "stoker-system", value_name = "NAMESPACE")]
    operator_namespace: String,
    /// Name of its Lease: RELEASE-operator.
    #[arg(long, default_value = "stoker-operator", value_name = "NAME")]
    operator_lease: String,
}

/// Asks for the records of a deployment that were made after `after_ms`: lines of JSON, oldest first.
pub(crate) async fn records(args: &OperatorArgs, cluster: &Cluster, name: &str, after_ms: u64) -> Result<String> {
    ask(args, cluster, &format!("{RECORDS_PATH}/{}/{name}?after={after_ms}", cluster.namespace)).await
}

/// Asks for a path.
pub(crate) async fn ask(args: &OperatorArgs, cluster: &Cluster, path: &str) -> Result<String> {
    let asked = async {
        match &args.url {
            Some(url) => by_url(url, path).await,
            None => by_pod(args, cluster, path).await,
        }
    };
    timeout(ANSWER_TIMEOUT, asked).await.with_context(|| format!("no answer within {} s", ANSWER_TIMEOUT.as_secs()))?
}

async fn by_url(url: &str, path: &str) -> Result<String> {
    let (stream, host) = http::connect(url).await.with_context(|| format!("reach the operator at {url}"))?;
    get(stream, &host, path).await.with_context(|| format!("ask the operator at {url}"))
}

async fn by_pod(args: &OperatorArgs, cluster: &Cluster, path: &str) -> Result<String> {
    let (pods, pod) = leading_pod(&args.place, cluster, "--operator").await?;
    let (name, port) = (pod.name_any(), port(&pod, "http").unwrap_or(PORT));
    let mut forwarder =
        pods.portforward(&name, &[port]).await.with_context(|| format!("forward port {port} of {name}"))?;
    let stream = forwarder.take_stream(port).context("the forwarded port has a stream")?;
    let answer = get(stream, &name, path).await.with_context(|| format!("ask the operator's pod {name}"));
    forwarder.abort();
    answer
}

/// The pod that leads, and the API that it was read by. `flag` names another way to it.
pub(crate) async fn leading_pod(place: &LeasePlace, cluster: &Cluster, flag: &str) -> Result<(Api<Pod>, Pod)> {
    let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), &place.operator_namespace);
    let name = leader(place, cluster).await?;
    let pod = pods.get_opt(&name).await.with_context(|| format!("read the operator's pod {name}"))?;
    let pod = pod.with_context(|| {
        format!(
            "{name} leads, and is no pod of {}: it runs elsewhere, so give its URL with {flag}",
            place.operator_namespace
        )
    })?;
    Ok((pods, pod))
}

/// Who holds the Lease.
async fn leader(place: &LeasePlace, cluster: &Cluster) -> Result<String> {
    let LeasePlace { operator_namespace: namespace, operator_lease: lease } = place;
    let leases: Api<Lease> = Api::namespaced(cluster.client.clone(), namespace);
    let found = leases.get_opt(lease).await.with_context(|| format!("read Lease {lease} in {namespace}"))?;
    let found = found.with_context(|| {
        format!("no Lease {lease} in {namespace}: name them with --operator-namespace and --operator-lease")
    })?;
    let holder = found.spec.and_then(|spec| spec.holder_identity).filter(|holder| !holder.is_empty());
    holder.with_context(|| format!("nobody holds Lease {lease} in {namespace}: no operator leads now"))
}

async fn get(stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static, host: &str, path: &str) -> Result<String> {
    let request = Request::get(path).header(header::HOST, host).body(Full::default()).context("make a request")?;
    let (status, text) = http::ask(stream, request).await?;
    match status {
        StatusCode::OK => Ok(text),
        _ if text.is_empty() => bail!("{status}"),
        _ => bail!("{}", text.trim()),
    }
}

/// The port of this name of a pod's containers.
pub(crate) fn port(pod: &Pod, name: &str) -> Option<u16> {
    let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
    let mut ports = containers.flat_map(|container| container.ports.iter().flatten());
    let named = ports.find(|port| port.name.as_deref() == Some(name))?;
    u16::try_from(named.container_port).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_port_is_found_by_its_name() {
        let pod = |ports: serde_json::Value| -> Pod {
            serde_json::from_value(json!({"spec": {"containers": [{"name": "operator", "ports": ports}]}})).unwrap()
        };
        let named = json!([{"name": "x", "containerPort": 1}, {"name": "http", "containerPort": 9000}]);
        assert_eq!(port(&pod(named.clone()), "http"), Some(9000));
        assert_eq!((port(&pod(json!([])), "http"), port(&pod(named), "pages")), (None, None));
    }
}
