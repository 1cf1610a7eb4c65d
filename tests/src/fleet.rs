//! Nodes and agents that are not there, by the thousand: pods become ready as soon as they are made, and one process answers
//! for the agents of all of them, by the address that was asked. Needs a network namespace of its own, because it listens on
//! the agents' admin port of every loopback address.

use std::{
    collections::HashMap,
    net::{IpAddr, Ipv4Addr},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use futures::StreamExt;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, Client, ResourceExt,
    api::{Patch, PatchParams},
    runtime::{
        WatchStreamExt,
        watcher::{self, Event, watcher},
    },
};
use serde_json::json;
use stoker_crds::{
    contract::{ADMIN_PORT, AgentPhase, LoadReport},
    intent::{Order, Want},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::Semaphore,
};

/// Statuses that are written at a time.
const STATUSES_AT_ONCE: usize = 16;
const TOTAL_BLOCKS: u32 = 1000;

/// See the module. Clones share the agents.
#[derive(Clone, Default)]
pub struct Fleet {
    agents: Arc<Mutex<Agents>>,
}

#[derive(Default)]
struct Agents {
    by_ip: HashMap<Ipv4Addr, Arc<Agent>>,
    /// Addresses given so far.
    given: u32,
}

/// One agent that is not there.
struct Agent {
    uid: String,
    revision: String,
    started: Instant,
    /// Of the order that it took last.
    number: AtomicU64,
    drains: AtomicBool,
    /// It takes connections and answers nothing, as one that hangs.
    dead: AtomicBool,
    reads: Mutex<Reads>,
}

/// When it was read.
#[derive(Default)]
struct Reads {
    last: Option<Instant>,
    longest_pause: Duration,
}

impl Fleet {
    /// Begins to answer for the agents of all pods that there are and that come.
    pub async fn start(client: Client) -> Result<Self> {
        let fleet = Self::default();
        let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, ADMIN_PORT)).await;
        let listener =
            listener.context("listen for all agents: run in a network namespace of its own, as `make bench-fleet`")?;
        tokio::spawn(fleet.clone().answer(listener));
        tokio::spawn(fleet.clone().follow(client));
        Ok(fleet)
    }

    /// Every n-th agent hangs from now on, or none.
    pub fn hang(&self, every: Option<usize>) {
        for (place, agent) in self.lock().by_ip.values().enumerate() {
            agent.dead.store(every.is_some_and(|every| place % every == 0), Ordering::SeqCst);
        }
    }

    /// Forgets how long agents waited to be read.
    pub fn forget_pauses(&self) {
        for agent in self.lock().by_ip.values() {
            agent.reads().longest_pause = Duration::ZERO;
        }
    }

    /// The longest that an agent which answers had to wait for its next reading, one that it still waits for included: no
    /// reading was older than that and the time of an answer.
    pub fn longest_pause(&self) -> Duration {
        let agents = self.lock();
        let alive = agents.by_ip.values().filter(|agent| !agent.dead.load(Ordering::SeqCst));
        let pauses = alive.map(|agent| {
            let reads = agent.reads();
            reads.longest_pause.max(reads.last.map_or(Duration::MAX, |last| last.elapsed()))
        });
        pauses.max().unwrap_or_default()
    }

    /// Agents that there are.
    pub fn count(&self) -> usize {
        self.lock().by_ip.len()
    }

    fn lock(&self) -> MutexGuard<'_, Agents> {
        self.agents.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn answer(self, listener: TcpListener) {
        while let Ok((stream, _)) = listener.accept().await {
            let Ok(IpAddr::V4(ip)) = stream.local_addr().map(|address| address.ip()) else { continue };
            if let Some(agent) = self.lock().by_ip.get(&ip) {
                // Who breaks off is asked for nothing more.
                tokio::spawn(converse(agent.clone(), stream));
            }
        }
    }

    /// Pods get an address, an agent and a status that says that it is ready.
    async fn follow(self, client: Client) {
        let pods = Api::<Pod>::all(client.clone());
        let config = watcher::Config::default().labels("app.kubernetes.io/managed-by=stoker");
        let mut events = watcher(pods, config).default_backoff().boxed();
        let places = Arc::new(Semaphore::new(STATUSES_AT_ONCE));
        while let Some(event) = events.next().await {
            match event {
                Ok(Event::Apply(pod) | Event::InitApply(pod)) if is_new(&pod) => {
                    let ip = self.admit(&pod);
                    let place = places.clone().acquire_owned().await.expect("nobody closes it");
                    let client = client.clone();
                    tokio::spawn(async move {
                        let _place = place;
                        if let Err(error) = start(client, &pod, ip).await {
                            eprintln!("{}: {error}", pod.name_any());
                        }
                    });
                }
                Ok(Event::Delete(pod)) => {
                    let uid = pod.uid();
                    self.lock().by_ip.retain(|_, agent| uid.as_ref() != Some(&agent.uid));
                }
                Ok(_) => {}
                Err(error) => eprintln!("watch of pods: {error}"),
            }
        }
    }

    /// Gives the pod's agent an address that nobody had before.
    fn admit(&self, pod: &Pod) -> Ipv4Addr {
        let agent = Arc::new(Agent {
            uid: pod.uid().unwrap_or_default(),
            revision: pod.labels().get("stoker.dev/revision").cloned().unwrap_or_default(),
            started: Instant::now(),
            number: AtomicU64::new(0),
            drains: AtomicBool::new(false),
            dead: AtomicBool::new(false),
            reads: Mutex::default(),
        });
        let mut agents = self.lock();
        agents.given += 1;
        let [_, high, middle, low] = agents.given.to_be_bytes();
        let ip = Ipv4Addr::new(127, 128 | high, middle, low);
        agents.by_ip.insert(ip, agent);
        ip
    }
}

fn is_new(pod: &Pod) -> bool {
    let ip = pod.status.as_ref().and_then(|status| status.pod_ip.as_ref());
    ip.is_none() && pod.metadata.deletion_timestamp.is_none()
}

/// What scheduler and kubelet write about a pod that runs, at once.
async fn start(client: Client, pod: &Pod, ip: Ipv4Addr) -> kube::Result<()> {
    let now = Timestamp::from_second(Timestamp::now().as_second()).unwrap_or_default().to_string();
    let is = |type_: &str| json!({"type": type_, "status": "True", "lastTransitionTime": now});
    let container = json!({
        "name": "agent", "image": "agent", "imageID": "agent", "ready": true, "started": true, "restartCount": 0,
        "state": {"running": {"startedAt": now}},
    });
    let status = json!({"status": {
        "phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}], "startTime": now,
        "conditions": [is("PodScheduled"), is("Initialized"), is("ContainersReady"), is("Ready")],
        "containerStatuses": [container],
    }});
    let pods = Api::<Pod>::namespaced(client, &pod.namespace().unwrap_or_default());
    match pods.patch_status(&pod.name_any(), &PatchParams::default(), &Patch::Merge(status)).await {
        // It is gone already.
        Err(kube::Error::Api(answer)) if answer.code == 404 => Ok(()),
        result => result.map(drop),
    }
}

/// Answers what is asked on one connection until the other side leaves.
async fn converse(agent: Arc<Agent>, mut stream: TcpStream) {
    let mut asked = Vec::with_capacity(1024);
    while matches!(stream.read_buf(&mut asked).await, Ok(1..)) {
        if agent.dead.load(Ordering::SeqCst) {
            asked.clear();
            continue;
        }
        while let Some(body) = next_request(&mut asked) {
            let report = agent.obey(&body);
            let text = serde_json::to_string(&report).unwrap_or_default();
            let answer = format!(
                "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{text}",
                text.len()
            );
            if stream.write_all(answer.as_bytes()).await.is_err() {
                return;
            }
        }
    }
}

/// Takes one whole request from what was read; its body. The benchmark's own operator writes it: nothing here is for bad input.
fn next_request(asked: &mut Vec<u8>) -> Option<Vec<u8>> {
    let head = asked.windows(4).position(|window| window == b"\r\n\r\n")? + 4;
    let text = String::from_utf8_lossy(&asked[..head]).to_ascii_lowercase();
    let length = text.lines().find_map(|line| line.strip_prefix("content-length:")?.trim().parse::<usize>().ok());
    let end = head + length.unwrap_or(0);
    if asked.len() < end {
        return None;
    }
    let body = asked[head..end].to_vec();
    asked.drain(..end);
    Some(body)
}

impl Agent {
    /// Takes an order, if there is one, and says how it is.
    fn obey(&self, body: &[u8]) -> LoadReport {
        match serde_json::from_slice::<Order>(body) {
            Ok(order) => {
                self.number.store(order.number, Ordering::SeqCst);
                self.drains.store(matches!(order.want, Want::Drain(_)), Ordering::SeqCst);
            }
            Err(_) => self.note_read(),
        }
        let number = self.number.load(Ordering::SeqCst);
        let drains = self.drains.load(Ordering::SeqCst);
        LoadReport {
            start_id: self.uid.clone(),
            up_ms: u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX),
            intent: (number > 0).then_some(number),
            revision: self.revision.clone(),
            phase: if drains { AgentPhase::Empty } else { AgentPhase::Ready },
            ..LoadReport::idle(TOTAL_BLOCKS)
        }
    }

    fn note_read(&self) {
        let mut reads = self.reads();
        let pause = reads.last.map(|last| last.elapsed()).unwrap_or_default();
        reads.longest_pause = reads.longest_pause.max(pause);
        reads.last = Some(Instant::now());
    }

    fn reads(&self) -> MutexGuard<'_, Reads> {
        self.reads.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
