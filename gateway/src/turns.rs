//! Turns: requests begin when a replica of their deployment has [room](crate::room), and wait in its [line](crate::line) until then;
//! also while no replica takes requests at all. Who leaves the line says so by being dropped. Decides nothing about the order.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use stoker_crds::endpoints::{Line, Lines};
use tokio::{sync::oneshot, time::Instant};

use crate::{
    error::GatewayError,
    fleet::{Deployment, Fleet, Room},
    gateway::Gateway,
    line::{self, Bounds, Joined, Refusal, Shed, Ticket, Waiter},
    metrics::Metrics,
};

/// How often a line looks whether a replica has room. What waits at replicas keeps them busy for longer.
const LOOK: Duration = Duration::from_millis(5);

/// A request that may be sent to a replica. Its place is another one's when it is dropped: it is on its way then.
#[derive(Debug)]
pub struct Turn {
    on_their_way: Arc<AtomicU32>,
}

impl Turn {
    fn given(on_their_way: &Arc<AtomicU32>) -> Self {
        on_their_way.fetch_add(1, Ordering::Relaxed);
        Self { on_their_way: Arc::clone(on_their_way) }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.on_their_way.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The lines of all deployments. See the module.
#[derive(Debug)]
pub struct Turns {
    bounds: Bounds,
    queues: Mutex<HashMap<String, Queue>>,
}

/// A line, and who is told when it is their turn.
#[derive(Debug)]
struct Queue {
    line: line::Line,
    waiting: HashMap<Ticket, oneshot::Sender<Result<Turn, Refusal>>>,
    /// Turns that were given, of requests that are not sent yet.
    on_their_way: Arc<AtomicU32>,
    /// Somebody looks whether there is room.
    is_followed: bool,
    looked: Instant,
}

/// Whether a request begins at once.
enum Begun {
    Goes(Turn),
    Waits(Waiting),
}

/// A request in line. It is not any more when this is dropped.
struct Waiting {
    gateway: Arc<Gateway>,
    host: String,
    ticket: Ticket,
    /// No replica took requests when it came.
    is_held: bool,
    told: oneshot::Receiver<Result<Turn, Refusal>>,
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let mut queues = self.gateway.turns.lock();
        if let Some(queue) = queues.get_mut(&self.host) {
            queue.waiting.remove(&self.ticket);
            queue.line.leave(self.ticket);
        }
    }
}

impl Turns {
    /// Lines of this length.
    pub fn bounded(bounds: Bounds) -> Self {
        Self { bounds, queues: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Queue>> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Deployments that are not there any more have no line, once nobody waits in it.
    pub fn keep_only(&self, fleet: &Fleet) {
        self.lock().retain(|host, queue| queue.is_followed || fleet.of_host(host).is_some());
    }

    /// What waits for whom, and what was sent where.
    pub fn lines(&self, fleet: &Fleet, now_ms: u64) -> Lines {
        let queues = self.lock();
        let line = |deployment: &Arc<Deployment>| {
            let waiting = queues.get(&deployment.host()).map_or(0, |queue| queue.line.len());
            let waiting = u32::try_from(waiting).unwrap_or(u32::MAX);
            let replicas: Vec<_> = deployment.members.iter().filter_map(|member| member.routed(now_ms)).collect();
            let (namespace, name) = (deployment.namespace.clone(), deployment.name.clone());
            (waiting > 0 || !replicas.is_empty()).then_some(Line { namespace, name, waiting, replicas })
        };
        Lines { lines: fleet.deployments().iter().filter_map(line).collect() }
    }

    /// Counts those who wait in lines, by tenant, and those for whom there is nobody.
    pub fn count(&self, gateway: &Gateway, metrics: &Metrics) {
        // Whoever else looks at this moment counts before or after.
        let queues = self.lock();
        metrics.waiting.reset();
        metrics.held.reset();
        for (host, queue) in &*queues {
            for (tenant, n_waiting) in queue.line.waiting() {
                metrics.waiting.with_label_values(&[host.as_str(), tenant]).add(n_waiting as i64);
            }
            let n_held = if room(gateway, host, 0).serves { 0 } else { queue.line.len() };
            metrics.held.with_label_values(&[host.as_str()]).set(n_held as i64);
        }
    }
}

/// Waits until a request may be sent to a replica of a deployment.
pub async fn turn(gateway: &Arc<Gateway>, deployment: &Deployment, waiter: Waiter) -> Result<Turn, GatewayError> {
    let host = deployment.host();
    let is_due_first = waiter.is_due_first();
    let shed = |refusal| refused(gateway, deployment, refusal, is_due_first);
    let mut waiting = match begin(gateway, &host, waiter).map_err(shed)? {
        Begun::Goes(turn) => return Ok(turn),
        Begun::Waits(waiting) => waiting,
    };
    let begun = Instant::now();
    let told = (&mut waiting.told).await.expect("who is in line is told");
    let seconds = begun.elapsed().as_secs_f64();
    gateway.metrics.wait_seconds.with_label_values(&[&host]).observe(seconds);
    if waiting.is_held {
        gateway.metrics.held_seconds.with_label_values(&[&host]).observe(seconds);
    }
    told.map_err(shed)
}

fn begin(gateway: &Arc<Gateway>, host: &str, waiter: Waiter) -> Result<Begun, Refusal> {
    let now_ms = gateway.now_ms();
    let mut queues = gateway.turns.lock();
    if !queues.contains_key(host) {
        queues.insert(host.to_owned(), Queue::bounded(gateway.turns.bounds));
    }
    let queue = queues.get_mut(host).expect("it was just put there");
    let room = room(gateway, host, queue.n_on_their_way() + 1);
    if queue.line.is_empty() && queue.has_place(room) {
        return Ok(Begun::Goes(Turn::given(&queue.on_their_way)));
    }
    let Joined { ticket, displaced } = queue.line.join(waiter, now_ms)?;
    queue.refuse(&displaced, Shed::Displaced);
    let (tell, told) = oneshot::channel();
    queue.waiting.insert(ticket, tell);
    if !std::mem::replace(&mut queue.is_followed, true) {
        queue.looked = Instant::now();
        tokio::spawn(follow(Arc::clone(gateway), host.to_owned()));
    }
    let (gateway, host, is_held) = (Arc::clone(gateway), host.to_owned(), !room.serves);
    Ok(Begun::Waits(Waiting { gateway, host, ticket, is_held, told }))
}

/// Gives turns for as long as somebody waits.
async fn follow(gateway: Arc<Gateway>, host: String) {
    let mut looks = tokio::time::interval(LOOK);
    looks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        looks.tick().await;
        let (room, now_ms) = (room(&gateway, &host, u32::MAX), gateway.now_ms());
        let mut queues = gateway.turns.lock();
        let Some(queue) = queues.get_mut(&host) else { return };
        queue.look(room, now_ms);
        if queue.line.is_empty() {
            queue.is_followed = false;
            return;
        }
    }
}

impl Queue {
    fn bounded(bounds: Bounds) -> Self {
        Self {
            line: line::Line::bounded(bounds),
            waiting: HashMap::new(),
            on_their_way: Arc::default(),
            is_followed: false,
            looked: Instant::now(),
        }
    }

    fn has_place(&self, room: Room) -> bool {
        room.serves && self.n_on_their_way() < room.places
    }

    fn n_on_their_way(&self) -> u32 {
        self.on_their_way.load(Ordering::Relaxed)
    }

    /// Who may go goes, and whose time is over is told so.
    fn look(&mut self, room: Room, now_ms: u64) {
        let passed = std::mem::replace(&mut self.looked, Instant::now()).elapsed();
        if room.serves {
            self.line.pass(passed.as_secs_f64());
        }
        let expired = self.line.expired(now_ms);
        self.refuse(&expired, Shed::Expired);
        while self.has_place(room)
            && let Some(ticket) = self.line.pop()
        {
            self.tell(ticket, Ok(Turn::given(&self.on_their_way)));
        }
    }

    fn refuse(&mut self, tickets: &[Ticket], shed: Shed) {
        let retry_after_seconds = self.line.retry_after_seconds();
        for ticket in tickets {
            self.tell(*ticket, Err(Refusal { shed, retry_after_seconds }));
        }
    }

    /// Whoever is not there any more has left a place to the next one.
    fn tell(&mut self, ticket: Ticket, said: Result<Turn, Refusal>) {
        if let Some(tell) = self.waiting.remove(&ticket) {
            let _ = tell.send(said);
        }
    }
}

fn room(gateway: &Gateway, host: &str, enough: u32) -> Room {
    gateway.fleet().of_host(host).map(|deployment| deployment.room(gateway.now_ms(), enough)).unwrap_or_default()
}

/// `is_due_first`: it waited for no longer than it said itself.
fn refused(gateway: &Gateway, deployment: &Deployment, refusal: Refusal, is_due_first: bool) -> GatewayError {
    let host = deployment.host();
    gateway.metrics.shed.with_label_values(&[host.as_str(), refusal.shed.word()]).inc();
    let fleet = gateway.fleet();
    let newest = fleet.of_host(&host).map_or(deployment, |newest| &**newest);
    match refusal.shed {
        Shed::Late | Shed::Expired if is_due_first => GatewayError::deadline_exceeded(&host, refusal),
        Shed::Expired if !room(gateway, &host, 0).serves => GatewayError::no_replica(newest),
        _ => GatewayError::shed(&host, refusal, gateway.settings.hold.as_secs_f64()),
    }
}
