//! A proxy between the operator and the real API server that fails what a script says, by seed, and watches over every
//! write that passes.
//!
//! The operator speaks plain HTTP to it; it speaks to the API server with the operator's own rights. Users go past it.

mod answers;
mod events;
mod invariants;
mod script;

use std::{
    fs,
    net::SocketAddr,
    path::PathBuf,
    process::Command,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread::sleep,
    time::Duration,
};

use anyhow::Result;
use axum::{
    Router,
    body::{Body, to_bytes},
    extract::{Request, State},
    http::StatusCode,
    response::{IntoResponse, Response},
};
use http_body_util::BodyExt;
use kube::Client;
use serde_json::{Value, json};
use stoker_cluster::{ControlPlane, Identity, is_running};
use tokio::{net::TcpListener, runtime::Runtime, sync::watch};

use crate::{operator::client_of, witness::Witness};
use answers::{answer_of, broken, cut, refusal, upstream};
pub use script::Fault;
use script::{Kind, Script, Verdict};

const BODY_BYTES_MAX: usize = 16 << 20;

/// The proxy. It ends when it is dropped.
pub struct FaultProxy {
    shared: Arc<Shared>,
    kubeconfig: PathBuf,
    _runtime: Runtime,
}

struct Shared {
    upstream: Client,
    /// With all rights: what an operator may not look at is looked at all the same.
    observer: Client,
    script: Mutex<Script>,
    /// Process of the operator that is to be killed. Held while it is being killed, so that nobody takes it for alive meanwhile.
    victim: Mutex<u32>,
    /// Raised when every watch is to end.
    watches_end: watch::Sender<u32>,
    seen: Mutex<Seen>,
    witness: Mutex<Witness>,
    /// How soon the operator hears what happens; of the faults so far the one that lasts.
    heard_within: Mutex<Option<Duration>>,
}

/// What passed.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    /// Writes, those of the Lease left out.
    pub writes: u64,
    /// Requests or events that something was done to.
    pub faults: u64,
    /// What no write may do.
    pub violations: Vec<String>,
}

impl FaultProxy {
    /// Starts a proxy in front of this control plane.
    pub fn start(control_plane: &ControlPlane, seed: u64) -> Result<Self> {
        let runtime = Runtime::new()?;
        let upstream = runtime.block_on(client_of(&control_plane.kubeconfig_of(Identity::Operator)))?;
        let observer = runtime.block_on(client_of(&control_plane.kubeconfig_path()))?;
        let shared = Arc::new(Shared {
            upstream,
            observer,
            script: Mutex::new(Script::of(seed)),
            victim: Mutex::new(0),
            watches_end: watch::Sender::new(0),
            seen: Mutex::default(),
            witness: Mutex::default(),
            heard_within: Mutex::new(Fault::None.heard_within()),
        });
        runtime.spawn(invariants::hear_pods(shared.clone()));
        runtime.spawn(invariants::hear_deployments(shared.clone()));
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0"))?;
        let address = listener.local_addr()?;
        let app = Router::new().fallback(pass).with_state(shared.clone());
        runtime.spawn(async move { axum::serve(listener, app).await });
        let kubeconfig = control_plane.dir().join(format!("kubeconfig-{}", address.port()));
        fs::write(&kubeconfig, kubeconfig_of(address).to_string())?;
        Ok(Self { shared, kubeconfig, _runtime: runtime })
    }

    /// The file that leads the operator here.
    pub fn kubeconfig(&self) -> PathBuf {
        self.kubeconfig.clone()
    }

    /// From now on this goes wrong, and this process is the operator.
    pub fn begin(&self, fault: Fault, operator: u32) {
        *lock(&self.shared.victim) = operator;
        *lock(&self.shared.heard_within) = fault.heard_within();
        lock(&self.shared.script).begin(fault);
    }

    /// True when this process is the one that is killed next.
    pub fn aims_at(&self, operator: u32) -> bool {
        *lock(&self.shared.victim) == operator
    }

    /// Nothing goes wrong any more. Watches begin anew: what they missed, they missed.
    pub fn end(&self) {
        *lock(&self.shared.victim) = 0;
        lock(&self.shared.script).end();
        self.shared.watches_end.send_modify(|count| *count += 1);
    }

    /// Something else than this proxy did something wrong.
    pub fn note_fault(&self) {
        lock(&self.shared.seen).faults += 1;
    }

    /// What passed so far.
    pub fn seen(&self) -> Seen {
        lock(&self.shared.seen).clone()
    }
}

fn kubeconfig_of(address: SocketAddr) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "faults",
        "clusters": [{"name": "faults", "cluster": {"server": format!("http://{address}")}}],
        "contexts": [{"name": "faults", "context": {"cluster": "faults", "user": "nobody"}}],
        "users": [{"name": "nobody", "user": {}}],
    })
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn pass(State(shared): State<Arc<Shared>>, request: Request) -> Response {
    match shared.pass(request).await {
        Ok(response) => response,
        Err(error) => (StatusCode::BAD_GATEWAY, format!("{error:#}")).into_response(),
    }
}

impl Shared {
    async fn pass(self: Arc<Self>, request: Request) -> Result<Response> {
        let (parts, body) = request.into_parts();
        let body = to_bytes(body, BODY_BYTES_MAX).await?;
        let path = parts.uri.path();
        let kind = Kind::of(&parts.method, path, parts.uri.query().unwrap_or_default());
        let verdict = lock(&self.script).judge(kind, path);
        if !matches!(verdict, Verdict::Pass) {
            lock(&self.seen).faults += 1;
        }
        match verdict {
            Verdict::Refuse(code) => return Ok(refusal(code)),
            Verdict::Late(wait) => tokio::time::sleep(wait).await,
            Verdict::KillBefore => {
                self.kill();
                return Ok(cut());
            }
            Verdict::Away => {
                self.watches_end.send_modify(|count| *count += 1);
                return Ok(cut());
            }
            _ => {}
        }
        if kind.writes && !kind.of_lease {
            lock(&self.seen).writes += 1;
            self.watch_over(&parts.method, path, &body).await;
            if kind.of_status {
                self.watch_over_status(path, &body).await;
            }
            self.watch_over_leader(&parts).await;
        }
        let answer = self.upstream.send(upstream(&parts, body)?).await?;
        if kind.watches {
            return Ok(self.watched(answer));
        }
        let (head, body) = answer.into_parts();
        let mut body = body.collect().await?.to_bytes();
        if kind.lists {
            let older = lock(&self.script).older(&parts.uri.to_string(), &body);
            body = if verdict == Verdict::Stale { older } else { body };
        }
        match verdict {
            Verdict::KillAfter => self.kill(),
            Verdict::Lose => {}
            Verdict::Half => return Ok(answer_of(&head, broken(body.slice(..body.len() / 2)))),
            _ => return Ok(answer_of(&head, Body::from(body))),
        }
        Ok(cut())
    }

    fn kill(&self) {
        let mut victim = lock(&self.victim);
        let pid = std::mem::take(&mut *victim);
        if pid != 0 {
            // It may have ended by itself.
            let _ = Command::new("kill").args(["-s", "KILL", &pid.to_string()]).status();
            while is_running(pid) {
                sleep(Duration::from_millis(5));
            }
        }
    }

    fn violation(&self, what: String) {
        lock(&self.seen).violations.push(what);
    }
}
