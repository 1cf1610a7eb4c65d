//! The life of one container: find its program, run it, probe it, start it again when its policy says so, stop it within
//! its grace period. Owns the process; tells the pod what it sees and never talks about other containers.

use std::{
    net::Ipv4Addr,
    path::{Path, PathBuf},
    process::ExitStatus,
    sync::Arc,
    time::Duration,
};

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Container, Pod, Probe};
use kube::ResourceExt;
use rustix::process::Signal;
use tokio::{
    process::Child,
    sync::{mpsc, watch},
    task::JoinSet,
    time::{Instant, sleep, sleep_until},
};

use super::{
    backoff::Backoff,
    context::{EventKind, NodeContext},
    environment::environment,
    gpus::GpusOfPod,
    launch::{Launch, launch},
    probe::{ProbeKind, ProbeSpec, Verdict},
    processes::ProcessKey,
    rewrite::Mount,
    view::{ContainerPhase, ContainerView, Ended},
};

/// Between "cannot pull" and "backing off": long enough to be seen.
const PULL_FAILURE_SHOWN: Duration = Duration::from_secs(1);
/// Between two looks for a ConfigMap key that was missing.
const CONFIG_RETRY: Duration = Duration::from_secs(2);
/// How much of a log becomes the termination message: a kubelet's limits.
const MESSAGE_MAX_BYTES: usize = 2048;
const MESSAGE_MAX_LINES: usize = 80;

/// When the container must be gone; `None` while it may run.
pub(crate) type StopAt = Option<Instant>;

/// What a container is in its pod.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Role {
    /// Runs to its end before others start.
    Init,
    /// Runs beside others.
    Main,
}

/// One container and where to report.
pub(crate) struct ContainerLoop {
    pub(crate) ctx: Arc<NodeContext>,
    pub(crate) pod: Arc<Pod>,
    pub(crate) role: Role,
    pub(crate) container_idx: usize,
    pub(crate) container: Container,
    pub(crate) address: Ipv4Addr,
    pub(crate) gpus: Arc<GpusOfPod>,
    pub(crate) mounts: Vec<Mount>,
    pub(crate) dir: PathBuf,
    pub(crate) views: Arc<watch::Sender<Vec<ContainerView>>>,
    pub(crate) stop: watch::Receiver<StopAt>,
    pub(crate) view: ContainerView,
}

/// The probes of a container, understood.
#[derive(Clone, Default)]
struct Probes {
    startup: Option<ProbeSpec>,
    readiness: Option<ProbeSpec>,
    liveness: Option<ProbeSpec>,
}

/// What is ready to run.
struct Prepared {
    launch: Launch,
    probes: Probes,
}

/// How waiting ended.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Waited {
    Over,
    Stopped,
}

impl ContainerLoop {
    /// Runs until the container must not run again.
    pub(crate) async fn run(mut self) {
        let mut backoff = Backoff::new(self.ctx.backoff);
        while let Some(prepared) = self.prepare().await {
            let begun = Instant::now();
            let ended = self.run_once(&prepared).await;
            self.view.started = false;
            self.view.ready = false;
            self.show(ContainerPhase::Terminated(ended.clone()));
            if self.is_stopping() || !restarts(&self.pod, self.role, ended.exit_code) {
                return;
            }
            if self.wait_for_restart(backoff.after(begun.elapsed()), ended).await == Waited::Stopped {
                return;
            }
            self.view.restarts += 1;
        }
    }

    /// Everything but the process; `None` when the container was stopped before that could be had.
    async fn prepare(&mut self) -> Option<Prepared> {
        let entry_point = self.entry_point().await?;
        loop {
            match self.understand(&entry_point).await {
                Ok(prepared) => return Some(prepared),
                Err(message) => self.show(ContainerPhase::Waiting { reason: "CreateContainerConfigError", message }),
            }
            if self.pause(CONFIG_RETRY).await == Waited::Stopped {
                return None;
            }
        }
    }

    async fn entry_point(&mut self) -> Option<PathBuf> {
        let image = self.container.image.clone().unwrap_or_default();
        let mut backoff = Backoff::new(self.ctx.backoff);
        let mut wait = backoff.after(Duration::ZERO);
        loop {
            let (found, names) = {
                let images = self.ctx.images.read().expect("no holder panics");
                (images.entry_point(&image), images.names())
            };
            if found.is_some() || self.is_stopping() {
                return found;
            }
            let message = format!(
                "failed to pull image \"{image}\": the process node has no binary for it (it knows: {names}); start it with --image NAME=BINARY"
            );
            self.ctx.event(&self.pod, EventKind::Warning, "Failed", message.clone());
            self.show(ContainerPhase::Waiting { reason: "ErrImagePull", message: message.clone() });
            self.pause(PULL_FAILURE_SHOWN).await;
            self.show(ContainerPhase::Waiting {
                reason: "ImagePullBackOff",
                message: format!("Back-off pulling image \"{image}\": ErrImagePull: {message}"),
            });
            wait = backoff.after(Duration::ZERO).max(wait);
            self.pause(wait).await;
        }
    }

    async fn understand(&self, entry_point: &Path) -> Result<Prepared, String> {
        if let Some(unsupported) = unsupported(&self.pod, &self.container) {
            return Err(format!("the process node does not support {unsupported}"));
        }
        let place = self.ctx.place(self.address);
        let mut env = environment(&self.ctx.client, &self.pod, &self.container, place).await?;
        env.extend([
            ("KUBERNETES_SERVICE_HOST".to_owned(), self.ctx.api.ip().to_string()),
            ("KUBERNETES_SERVICE_PORT".to_owned(), self.ctx.api.port().to_string()),
        ]);
        env.extend(self.gpus.variables(&self.container));
        let understood =
            |probe: &Option<Probe>| probe.as_ref().map(|probe| ProbeSpec::of(probe, &self.container)).transpose();
        let probes = Probes {
            startup: understood(&self.container.startup_probe)?,
            readiness: understood(&self.container.readiness_probe)?,
            liveness: understood(&self.container.liveness_probe)?,
        };
        Ok(Prepared { launch: launch(&self.container, entry_point, env, &self.mounts), probes })
    }

    /// From the start of the process to its end.
    async fn run_once(&mut self, prepared: &Prepared) -> Ended {
        let started_at = Timestamp::now();
        let log = self.log_path();
        let mut child = match self.ctx.processes.start(self.key(), &prepared.launch, &self.dir, &log) {
            Ok(child) => child,
            Err(error) => {
                let message = format!("failed to start container: {error}");
                return Ended {
                    exit_code: 128,
                    reason: "StartError",
                    message,
                    started_at,
                    finished_at: Timestamp::now(),
                };
            }
        };
        self.ctx.event(&self.pod, EventKind::Normal, "Started", format!("Container {} started", self.container.name));
        self.view.started = prepared.probes.startup.is_none();
        self.view.ready = self.view.started && prepared.probes.readiness.is_none();
        self.show(ContainerPhase::Running { since: started_at });
        let exit_code = exit_code(self.supervise(&mut child, &prepared.probes).await);
        self.ctx.processes.ended(&self.key());
        let reason = if exit_code == 0 { "Completed" } else { "Error" };
        Ended {
            exit_code,
            reason,
            message: self.termination_message(exit_code, &log),
            started_at,
            finished_at: Timestamp::now(),
        }
    }

    /// Hears probes and orders to stop until the process has ended.
    async fn supervise(&mut self, child: &mut Child, probes: &Probes) -> std::io::Result<ExitStatus> {
        let (verdicts, mut heard) = mpsc::channel(8);
        let mut watchers = JoinSet::new();
        self.start_probes(&mut watchers, probes, &verdicts);
        let (mut terminate_at, mut kill_at): (StopAt, StopAt) = (None, None);
        if self.is_stopping() {
            (terminate_at, kill_at) = (Some(Instant::now()), *self.stop.borrow_and_update());
        }
        loop {
            tokio::select! {
                status = child.wait() => return status,
                Some(verdict) = heard.recv() => {
                    if let Some(problem) = self.hear(&verdict) {
                        self.ctx.event(&self.pod, EventKind::Warning, "Unhealthy", problem);
                        terminate_at = terminate_at.or(Some(Instant::now()));
                        kill_at = kill_at.or(Some(Instant::now() + grace(&self.pod)));
                    } else if verdict.kind == ProbeKind::Startup {
                        self.start_probes(&mut watchers, probes, &verdicts);
                    }
                }
                Ok(()) = self.stop.changed() => {
                    terminate_at = terminate_at.or_else(|| Some(Instant::now() + pre_stop_sleep(&self.container)));
                    kill_at = earlier(kill_at, *self.stop.borrow_and_update());
                }
                () = reached(terminate_at) => {
                    self.ctx.processes.signal(&self.key(), Signal::TERM);
                    terminate_at = Some(Instant::now() + FAR);
                }
                () = reached(kill_at) => {
                    self.ctx.processes.kill(&self.key());
                    kill_at = None;
                }
            }
        }
    }

    /// The startup probe while the container has not started, the other two afterwards.
    fn start_probes(&self, watchers: &mut JoinSet<()>, probes: &Probes, verdicts: &mpsc::Sender<Verdict>) {
        let wanted = if self.view.started {
            vec![(ProbeKind::Readiness, &probes.readiness), (ProbeKind::Liveness, &probes.liveness)]
        } else {
            vec![(ProbeKind::Startup, &probes.startup)]
        };
        watchers.abort_all();
        for (kind, probe) in wanted {
            if let Some(probe) = probe.clone() {
                watchers.spawn(probe.watch(kind, self.address, verdicts.clone()));
            }
        }
    }

    /// Takes in a verdict; says why the process must be restarted, if it must.
    fn hear(&mut self, verdict: &Verdict) -> Option<String> {
        match (verdict.kind, &verdict.outcome) {
            (ProbeKind::Startup, Ok(())) => {
                self.view.started = true;
                self.view.ready = self.container.readiness_probe.is_none();
            }
            (ProbeKind::Readiness, outcome) => self.view.ready = outcome.is_ok(),
            (ProbeKind::Liveness, Ok(())) => {}
            (ProbeKind::Startup, Err(problem)) => return Some(format!("Startup probe failed: {problem}")),
            (ProbeKind::Liveness, Err(problem)) => return Some(format!("Liveness probe failed: {problem}")),
        }
        self.show(self.view.state.clone());
        None
    }

    async fn wait_for_restart(&mut self, wait: Duration, ended: Ended) -> Waited {
        self.view.last = Some(ended.clone());
        if wait.is_zero() {
            return if self.is_stopping() { Waited::Stopped } else { Waited::Over };
        }
        let (name, uid) = (self.pod.name_any(), self.pod.uid().unwrap_or_default());
        let place =
            format!("container={} pod={name}_{}({uid})", self.container.name, self.pod.namespace().unwrap_or_default());
        let message = format!("back-off {}s restarting failed {place}", wait.as_secs());
        self.ctx.event(&self.pod, EventKind::Warning, "BackOff", message.clone());
        self.show(ContainerPhase::Waiting { reason: "CrashLoopBackOff", message });
        let waited = self.pause(wait).await;
        if waited == Waited::Stopped {
            self.show(ContainerPhase::Terminated(ended));
        }
        waited
    }

    fn show(&mut self, state: ContainerPhase) {
        self.view.state = state;
        let view = self.view.clone();
        self.views.send_modify(|views| views[self.container_idx] = view);
    }

    fn is_stopping(&self) -> bool {
        self.stop.borrow().is_some()
    }

    async fn pause(&mut self, duration: Duration) -> Waited {
        tokio::select! {
            () = sleep(duration) => Waited::Over,
            _ = self.stop.wait_for(Option::is_some) => Waited::Stopped,
        }
    }

    fn key(&self) -> ProcessKey {
        let namespace = self.pod.namespace().unwrap_or_default();
        ProcessKey { namespace, pod: self.pod.name_any(), container: self.container.name.clone() }
    }

    fn log_path(&self) -> PathBuf {
        self.dir.join("logs").join(&self.container.name).join(format!("{}.log", self.view.restarts))
    }

    fn termination_message(&self, exit_code: i32, log: &Path) -> String {
        if exit_code == 0 || self.container.termination_message_policy.as_deref() != Some("FallbackToLogsOnError") {
            return String::new();
        }
        let text = std::fs::read(log).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
        end_of_log(&text).to_owned()
    }
}

/// A day: an order to stop was given, and is not given again.
const FAR: Duration = Duration::from_secs(86_400);

async fn reached(at: StopAt) {
    match at {
        Some(at) => sleep_until(at).await,
        None => std::future::pending().await,
    }
}

fn earlier(one: StopAt, other: StopAt) -> StopAt {
    one.into_iter().chain(other).min()
}

/// What the pod asks for and this node cannot do. Refused, because a pod that runs without it would be another pod.
fn unsupported(pod: &Pod, container: &Container) -> Option<&'static str> {
    let spec = pod.spec.as_ref()?;
    let hooks = container.lifecycle.as_ref();
    let only_sleeps = hooks.and_then(|hooks| hooks.pre_stop.as_ref()).is_none_or(|hook| hook.sleep.is_some());
    let checks = [
        (spec.init_containers.iter().flatten().any(goes_on), "init containers that go on running"),
        (hooks.is_some_and(|hooks| hooks.post_start.is_some()), "postStart hooks"),
        (!only_sleeps, "preStop hooks other than sleep"),
        (container.env_from.as_ref().is_some_and(|sources| !sources.is_empty()), "envFrom"),
    ];
    checks.into_iter().find(|(asked, _)| *asked).map(|(_, what)| what)
}

/// Kubernetes calls it a sidecar.
fn goes_on(init: &Container) -> bool {
    init.restart_policy.as_deref() == Some("Always")
}

fn grace(pod: &Pod) -> Duration {
    let seconds = pod.spec.as_ref().and_then(|spec| spec.termination_grace_period_seconds).unwrap_or(30);
    Duration::from_secs(u64::try_from(seconds).unwrap_or(0))
}

fn pre_stop_sleep(container: &Container) -> Duration {
    let hook = container.lifecycle.as_ref().and_then(|lifecycle| lifecycle.pre_stop.as_ref());
    let seconds = hook.and_then(|hook| hook.sleep.as_ref()).map_or(0, |sleep| sleep.seconds);
    Duration::from_secs(u64::try_from(seconds).unwrap_or(0))
}

fn restarts(pod: &Pod, role: Role, exit_code: i32) -> bool {
    match (pod.spec.as_ref().and_then(|spec| spec.restart_policy.as_deref()).unwrap_or("Always"), role) {
        ("Never", _) => false,
        ("OnFailure", _) | (_, Role::Init) => exit_code != 0,
        (_, Role::Main) => true,
    }
}

/// A process that a signal ended has 128 + the signal, as a shell says it.
fn exit_code(status: std::io::Result<ExitStatus>) -> i32 {
    use std::os::unix::process::ExitStatusExt;
    status.map_or(255, |status| status.code().or(status.signal().map(|signal| 128 + signal)).unwrap_or(255))
}

/// The last lines of a log that fit a termination message.
fn end_of_log(text: &str) -> &str {
    let text = text.trim_end();
    let by_lines = text.rmatch_indices('\n').nth(MESSAGE_MAX_LINES - 1).map_or(0, |(idx, _)| idx + 1);
    let by_bytes = text.ceil_char_boundary(text.len().saturating_sub(MESSAGE_MAX_BYTES));
    &text[by_lines.max(by_bytes)..]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_termination_message_is_the_end_of_the_log() {
        assert_eq!(end_of_log("one\ntwo\n"), "one\ntwo");
        assert_eq!(end_of_log(&"line\n".repeat(200)).lines().count(), MESSAGE_MAX_LINES);
        assert_eq!(end_of_log(&"é".repeat(5000)).len(), MESSAGE_MAX_BYTES);
        assert_eq!(end_of_log(""), "");
    }

    #[test]
    fn what_this_node_cannot_do_is_named() {
        let pod =
            |spec: serde_json::Value| -> Pod { serde_json::from_value(serde_json::json!({"spec": spec})).unwrap() };
        let plain = serde_json::json!({"name": "a"});
        let check = |spec: serde_json::Value| {
            let pod = pod(spec);
            let container = pod.spec.as_ref().unwrap().containers[0].clone();
            unsupported(&pod, &container)
        };
        assert_eq!(check(serde_json::json!({"containers": [plain]})), None);
        assert_eq!(check(serde_json::json!({"containers": [plain], "initContainers": [plain]})), None);
        let sidecar = serde_json::json!({"name": "b", "restartPolicy": "Always"});
        assert_eq!(
            check(serde_json::json!({"containers": [plain], "initContainers": [sidecar]})),
            Some("init containers that go on running")
        );
        let sleeps = serde_json::json!({"name": "a", "lifecycle": {"preStop": {"sleep": {"seconds": 1}}}});
        assert_eq!(check(serde_json::json!({"containers": [sleeps]})), None);
    }

    #[test]
    fn the_restart_policy_decides_by_exit_code() {
        let pod = |policy: &str| {
            serde_json::from_value(serde_json::json!({"spec": {"containers": [], "restartPolicy": policy}})).unwrap()
        };
        let decided = |policy: &str, role| [0, 1].map(|code| restarts(&pod(policy), role, code));
        assert_eq!(decided("Always", Role::Main), [true, true]);
        assert_eq!(decided("OnFailure", Role::Main), [false, true]);
        assert_eq!(decided("Never", Role::Main), [false, false]);
        assert_eq!(decided("Always", Role::Init), [false, true]);
        assert_eq!(decided("Never", Role::Init), [false, false]);
    }
}
