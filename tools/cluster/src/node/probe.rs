//! Startup, readiness and liveness probes as a kubelet runs them: HTTP GET and TCP connect, thresholds, delays. Reports
//! verdicts and acts on none; the container's loop does.

use std::{net::Ipv4Addr, time::Duration};

use k8s_openapi::{
    api::core::v1::{Container, HTTPGetAction, Probe},
    apimachinery::pkg::util::intstr::IntOrString,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    sync::mpsc,
    time::{sleep, timeout},
};

/// Bytes of an answer that are read: a status line and the headers that matter fit.
const MAX_ANSWER_BYTES: usize = 1024;

/// Which question a probe answers.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum ProbeKind {
    Startup,
    Readiness,
    Liveness,
}

/// A threshold was reached.
#[derive(Clone, Debug)]
pub(crate) struct Verdict {
    pub(crate) kind: ProbeKind,
    /// `Err` says what the last try saw.
    pub(crate) outcome: Result<(), String>,
}

/// A probe whose numbers are checked and defaulted.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ProbeSpec {
    action: Action,
    delay: Duration,
    period: Duration,
    timeout: Duration,
    thresholds: Thresholds,
}

#[derive(Clone, Debug, PartialEq)]
enum Action {
    Http { port: u16, path: String, headers: Vec<(String, String)> },
    Tcp { port: u16 },
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Thresholds {
    success: u32,
    failure: u32,
}

impl ProbeSpec {
    /// Understands `probe` of `container`, or says what this node cannot do.
    pub(crate) fn of(probe: &Probe, container: &Container) -> Result<Self, String> {
        let seconds = |value: Option<i32>, default: u32| Duration::from_secs(u64::from(count(value, default)));
        Ok(Self {
            action: Action::of(probe, container)?,
            delay: Duration::from_secs(u64::try_from(probe.initial_delay_seconds.unwrap_or(0)).unwrap_or(0)),
            period: seconds(probe.period_seconds, 10),
            timeout: seconds(probe.timeout_seconds, 1),
            thresholds: Thresholds {
                success: count(probe.success_threshold, 1),
                failure: count(probe.failure_threshold, 3),
            },
        })
    }

    /// Probes `address` until the receiver is gone, and sends a verdict whenever a threshold is reached anew.
    pub(crate) async fn watch(self, kind: ProbeKind, address: Ipv4Addr, verdicts: mpsc::Sender<Verdict>) {
        let mut counter = Counter::new(self.thresholds);
        sleep(self.delay).await;
        loop {
            let outcome = self.action.try_once(address, self.timeout).await;
            if counter.observe(outcome.is_ok()) && verdicts.send(Verdict { kind, outcome }).await.is_err() {
                return;
            }
            sleep(self.period).await;
        }
    }
}

fn count(value: Option<i32>, default: u32) -> u32 {
    value.and_then(|value| u32::try_from(value).ok()).filter(|&value| value > 0).unwrap_or(default)
}

impl Action {
    fn of(probe: &Probe, container: &Container) -> Result<Self, String> {
        match (&probe.http_get, &probe.tcp_socket) {
            (Some(get), _) => Self::of_get(get, container),
            (None, Some(tcp)) => Ok(Self::Tcp { port: port_number(&tcp.port, container)? }),
            (None, None) => Err("the process node runs httpGet and tcpSocket probes only".to_owned()),
        }
    }

    fn of_get(get: &HTTPGetAction, container: &Container) -> Result<Self, String> {
        if get.scheme.as_deref() == Some("HTTPS") {
            return Err("the process node probes plain HTTP only".to_owned());
        }
        let headers =
            get.http_headers.iter().flatten().map(|header| (header.name.clone(), header.value.clone())).collect();
        let path = get.path.clone().filter(|path| !path.is_empty()).unwrap_or_else(|| "/".to_owned());
        Ok(Self::Http { port: port_number(&get.port, container)?, path, headers })
    }

    async fn try_once(&self, address: Ipv4Addr, limit: Duration) -> Result<(), String> {
        let attempt = async {
            match self {
                Self::Tcp { port } => connect(address, *port).await.map(drop),
                Self::Http { port, path, headers } => get(address, *port, path, headers).await,
            }
        };
        timeout(limit, attempt).await.unwrap_or_else(|_| Err(format!("no answer within {} s", limit.as_secs())))
    }
}

/// A port by number, or by the name that `container` gives it.
pub(crate) fn port_number(port: &IntOrString, container: &Container) -> Result<u16, String> {
    let number = match port {
        IntOrString::Int(number) => Some(*number),
        IntOrString::String(name) => {
            let named = container.ports.iter().flatten().find(|port| port.name.as_deref() == Some(name));
            named.map(|port| port.container_port).or_else(|| name.parse().ok())
        }
    };
    number
        .and_then(|number| u16::try_from(number).ok())
        .ok_or_else(|| format!("container {} has no port {port:?}", container.name))
}

async fn connect(address: Ipv4Addr, port: u16) -> Result<TcpStream, String> {
    TcpStream::connect((address, port)).await.map_err(|error| format!("connect {address}:{port}: {error}"))
}

/// `Ok` for a status from 200 to 399, as for a kubelet.
async fn get(address: Ipv4Addr, port: u16, path: &str, headers: &[(String, String)]) -> Result<(), String> {
    let mut stream = connect(address, port).await?;
    let extra: String = headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
    let request = format!(
        "GET {path} HTTP/1.1\r\nHost: {address}:{port}\r\nUser-Agent: kube-probe/stoker\r\nConnection: close\r\n{extra}\r\n"
    );
    let failed = |error: std::io::Error| format!("GET http://{address}:{port}{path}: {error}");
    stream.write_all(request.as_bytes()).await.map_err(failed)?;
    let mut answer = Vec::new();
    stream.take(MAX_ANSWER_BYTES as u64).read_to_end(&mut answer).await.map_err(failed)?;
    match status_code(&answer) {
        Some(200..=399) => Ok(()),
        Some(code) => Err(format!("HTTP probe failed with statuscode: {code}")),
        None => Err(format!("GET http://{address}:{port}{path}: not an HTTP answer")),
    }
}

fn status_code(answer: &[u8]) -> Option<u16> {
    let line = answer.split(|&byte| byte == b'\r').next()?;
    let line = std::str::from_utf8(line).ok()?.strip_prefix("HTTP/1.")?;
    line.split(' ').nth(1)?.parse().ok()
}

/// Counts tries in a row; says when a threshold is reached, once.
#[derive(Debug)]
struct Counter {
    thresholds: Thresholds,
    in_a_row: u32,
    last: Option<bool>,
    said: Option<bool>,
}

impl Counter {
    fn new(thresholds: Thresholds) -> Self {
        Self { thresholds, in_a_row: 0, last: None, said: None }
    }

    fn observe(&mut self, ok: bool) -> bool {
        self.in_a_row = if self.last == Some(ok) { self.in_a_row + 1 } else { 1 };
        self.last = Some(ok);
        let threshold = if ok { self.thresholds.success } else { self.thresholds.failure };
        let news = self.in_a_row >= threshold && self.said != Some(ok);
        if news {
            self.said = Some(ok);
        }
        news
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_verdict_needs_its_threshold_in_a_row_and_is_said_once() {
        let mut counter = Counter::new(Thresholds { success: 1, failure: 3 });
        let tries = [true, true, false, false, true, false, false, false, false, true];
        let said: Vec<bool> = tries.iter().map(|&ok| counter.observe(ok)).collect();
        assert_eq!(said, [true, false, false, false, false, false, false, true, false, true]);
    }

    #[test]
    fn status_lines_are_read_and_noise_is_not() {
        assert_eq!(status_code(b"HTTP/1.1 503 Service Unavailable\r\nA: b\r\n"), Some(503));
        assert_eq!(status_code(b"HTTP/1.0 200\r\n"), Some(200));
        assert_eq!(status_code(b"SSH-2.0-x\r\n"), None);
        assert_eq!(status_code(b""), None);
    }

    #[test]
    fn a_named_port_is_the_containers() {
        let container: Container =
            serde_json::from_str(r#"{"name":"a","ports":[{"name":"http","containerPort":8000}]}"#).unwrap();
        assert_eq!(port_number(&IntOrString::String("http".to_owned()), &container), Ok(8000));
        assert!(port_number(&IntOrString::String("nope".to_owned()), &container).is_err());
    }
}
