//! The command line. Parses only.

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use clap::Parser;
use hyper::Uri;
use stoker_edge::{
    body::{MAX_BYTES, ROOM_BYTES},
    cors::AllowedOrigin,
    playground::Playground,
};

use crate::{gateway::Settings, line::Bounds, server::Leaving, tls::TlsFiles};

/// One address for all replicas of all InferenceDeployments.
///
/// It asks the operator where replicas are, and sends each request to the one that begins with it soonest: who holds the
/// beginning of its prompt, and who has how much to do. In a cluster the chart starts it (gateway.enabled); by hand, beside
/// an operator that listens on port 8080:
///
///     stoker-gateway --operator http://127.0.0.1:8080 --listen 127.0.0.1:8000
///
/// Then ask it as you would ask a replica. The field `model` says who is meant, or the host NAME.NAMESPACE:
///
///     curl http://127.0.0.1:8000/v1/chat/completions -d '{"model": "chat", "messages": [{"role": "user", "content": "Hello!"}]}'
///
/// Why a request went where it went is in a header of its answer:
///
///     curl -i -H 'x-stoker-route: explain' ...
///
/// GET /v1/models lists models, /readyz says whether it has heard of replicas. What it did is on another port:
///
///     curl http://127.0.0.1:8001/metrics
#[derive(Debug, Parser)]
#[command(version, verbatim_doc_comment)]
pub struct Args {
    /// URL of the operator, whose GET /v1/endpoints says where replicas are. While it does not answer, the gateway goes on
    /// with what it knows.
    #[arg(long, env = "STOKER_OPERATOR", value_name = "URL")]
    pub operator: Uri,

    /// Address to listen on; port 0 picks a free one, which the log names.
    #[arg(long, env = "STOKER_LISTEN", default_value = "0.0.0.0:8000")]
    pub listen: SocketAddr,

    /// Address of /metrics and of what the operator and other gateways ask, without TLS or keys. Default: the port after that of --listen,
    /// or a free one, which the log names, if that is 0. The operator asks port 8001.
    #[arg(long, env = "STOKER_ADMIN_LISTEN", value_name = "ADDRESS")]
    admin_listen: Option<SocketAddr>,

    /// Largest body of a request. Replicas take 8 MiB.
    #[arg(long, value_name = "BYTES", default_value_t = MAX_BYTES, value_parser = body_bytes)]
    body_bytes_max: usize,

    /// Beginnings of prompts that were sent which are remembered, and as many that replicas say to hold; a million of both take some
    /// 160 MB.
    #[arg(long, value_name = "N", default_value_t = 1 << 20)]
    prefixes_max: usize,

    /// Time for an answer that is not streamed.
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    answer_timeout: u64,

    /// A replica that has requests and says nothing for so long, not even that it lives, has stalled: its streams go on elsewhere. While other
    /// replicas speak, they do after half a second.
    #[arg(long, value_name = "SECONDS", default_value_t = 3.0, value_parser = seconds)]
    stall: f64,

    /// Time to find a replica that goes on with the stream of one that was lost.
    #[arg(long, value_name = "SECONDS", default_value_t = 30.0, value_parser = seconds)]
    resume: f64,

    /// Requests that are kept while their answers are streamed, in bytes: beyond that, streams end with their replica.
    #[arg(long, value_name = "BYTES", default_value_t = 256 << 20)]
    kept_bytes_max: u64,

    /// A request waits no longer than this in the line of its deployment, while no replica takes requests or all have enough
    /// to do. Common proxies give up a silent server after 60 s.
    #[arg(long, value_name = "SECONDS", default_value_t = 45.0, value_parser = seconds)]
    hold: f64,

    /// Requests that wait so for each deployment at most.
    #[arg(long, value_name = "N", default_value_t = 1024)]
    line_max: usize,

    /// Bytes of their bodies at most.
    #[arg(long, value_name = "BYTES", default_value_t = 64 << 20)]
    line_bytes_max: usize,

    /// Tell other proxies where requests go, too, as an endpoint picker of the Gateway API Inference Extension: gRPC
    /// (envoy.service.ext_proc.v3) on the same addresses, on that of a deployment for it alone.
    #[arg(long, env = "STOKER_ENDPOINT_PICKER")]
    endpoint_picker: bool,

    /// Who may ask: a file of tenants with hashes of their keys, as a Secret is mounted; read again when it changes. Default:
    /// everybody may.
    #[arg(long, env = "STOKER_TENANTS", value_name = "FILE")]
    pub tenants: Option<PathBuf>,

    /// Certificate for TLS on the address above, with those that vouch for it, in PEM; read again when it changes. Default: no TLS. Ports
    /// of deployments, where their Services lead, have none.
    #[arg(long, env = "STOKER_TLS_CERTIFICATE", value_name = "FILE", requires = "tls_key")]
    tls_certificate: Option<PathBuf>,

    /// Its private key, in PEM.
    #[arg(long, env = "STOKER_TLS_KEY", value_name = "FILE", requires = "tls_certificate")]
    tls_key: Option<PathBuf>,

    /// At SIGTERM: unready and still taking requests for this long, so that load balancers stop sending first.
    #[arg(long, value_name = "SECONDS", default_value_t = 3)]
    withdraw: u64,

    /// After that: what is being answered may take this much longer.
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    drain: u64,

    /// The page at `/` on which people talk to the models.
    #[arg(long, env = "STOKER_PLAYGROUND", value_enum, default_value_t)]
    pub playground: Playground,

    /// Collector of traces, as http://localhost:4318: each request is a span there (OTLP over HTTP, in JSON), and what a replica does for it is
    /// a part of that. Default: none.
    #[arg(long, env = "OTEL_EXPORTER_OTLP_ENDPOINT", value_name = "URL")]
    pub otlp_endpoint: Option<String>,

    /// Origin whose pages may ask from a browser (CORS), as https://app.example, or `*` for all; repeat for more. Default: none may.
    #[arg(long = "allow-origin", env = "STOKER_ALLOW_ORIGIN", value_delimiter = ',', value_name = "ORIGIN")]
    pub allowed_origins: Vec<AllowedOrigin>,

    /// What to log: error, warn, info, debug, or a filter. One line a request is at info.
    #[arg(long, env = "RUST_LOG", default_value = "info", value_name = "FILTER")]
    pub log: String,
}

/// A larger one would have no room even alone.
fn body_bytes(text: &str) -> Result<usize, String> {
    let bytes = text.parse().map_err(|_| "a number of bytes".to_owned())?;
    if (1..=ROOM_BYTES).contains(&bytes) { Ok(bytes) } else { Err(format!("between 1 and {ROOM_BYTES} bytes")) }
}

/// A time that makes sense for a machine.
fn seconds(text: &str) -> Result<f64, String> {
    let seconds: f64 = text.parse().map_err(|_| "a number of seconds".to_owned())?;
    if (0.1..=3600.0).contains(&seconds) { Ok(seconds) } else { Err("between 0.1 and 3600 seconds".to_owned()) }
}

impl Args {
    /// What the gateway is made with.
    pub fn settings(&self) -> Settings {
        Settings {
            body_bytes_max: self.body_bytes_max,
            prefixes_max: self.prefixes_max,
            answer_timeout: Duration::from_secs(self.answer_timeout),
            stall: Duration::from_secs_f64(self.stall),
            kept_bytes_max: self.kept_bytes_max,
            resume: Duration::from_secs_f64(self.resume),
            hold: Duration::from_secs_f64(self.hold),
            picks_endpoints: self.endpoint_picker,
            allowed_origins: self.allowed_origins.clone(),
            line: Bounds { requests: self.line_max, bytes: self.line_bytes_max },
            ..Settings::default()
        }
    }

    /// Where it listens for those who are not clients.
    pub fn admin_listen(&self) -> SocketAddr {
        let next = match self.listen.port() {
            0 => 0,
            port => port.saturating_add(1),
        };
        self.admin_listen.unwrap_or(SocketAddr::new(self.listen.ip(), next))
    }

    /// Where certificate and key are, if there is TLS.
    pub fn tls_files(&self) -> Option<TlsFiles> {
        let (certificate, key) = self.tls_certificate.clone().zip(self.tls_key.clone())?;
        Some(TlsFiles { certificate, key, http2: self.endpoint_picker })
    }

    /// How it ends.
    pub fn leaving(&self) -> Leaving {
        Leaving { withdraw: Duration::from_secs(self.withdraw), drain: Duration::from_secs(self.drain) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_port_that_is_not_for_clients_is_the_next_one() {
        let admin = |args: &[&str]| {
            let all = [&["stoker-gateway", "--operator", "http://127.0.0.1:8080"], args].concat();
            Args::parse_from(all).admin_listen().to_string()
        };
        assert_eq!(admin(&[]), format!("0.0.0.0:{}", stoker_crds::contract::ADMIN_PORT));
        assert_eq!(admin(&["--listen", "127.0.0.1:0"]), "127.0.0.1:0");
        assert_eq!(admin(&["--listen", "127.0.0.1:9000", "--admin-listen", "10.0.0.1:7"]), "10.0.0.1:7");
    }

    #[test]
    fn a_body_that_would_never_have_room_is_refused_at_the_start() {
        let of = |bytes: &str| {
            let args = ["stoker-gateway", "--operator", "http://127.0.0.1:8080", "--body-bytes-max", bytes];
            Args::try_parse_from(args).map(|args| args.settings().body_bytes_max).map_err(|error| error.to_string())
        };
        assert_eq!(of("1048576"), Ok(1 << 20));
        assert_eq!(of("268435456"), Ok(ROOM_BYTES));
        for bytes in ["0", "268435457"] {
            let refusal = of(bytes).unwrap_err();
            assert!(refusal.contains("--body-bytes-max") && refusal.contains("between 1 and 268435456"), "{refusal}");
        }
    }
}
