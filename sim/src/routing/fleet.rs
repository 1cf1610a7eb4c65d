//! A load, a rule and replicas: runs them in virtual time and says what came of it.

use std::{cmp::Ordering, collections::BinaryHeap};

use stoker_workload::Rng;

use super::{
    cache::Cache,
    load::{Load, Request, Session},
    prompt::BLOCK_TOKENS,
    replica::{CACHE_BLOCKS, Replica},
    rules::{Agreed, Rule, RuleName, Said},
};

/// Requests of the beginning are not counted: caches are empty.
const WARM_SHARE: f64 = 0.2;

/// What is run.
#[derive(Clone, Copy, Debug)]
pub struct Setting {
    /// What is asked.
    pub load: Load,
    /// Who chooses.
    pub rule: RuleName,
}

/// What came of it.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Prompt tokens that replicas had, of all.
    pub hit_share: f64,
    /// Percentiles of the time to the first token, in seconds.
    pub ttft: Percentiles,
    /// The busiest replica's seconds over the mean's.
    pub imbalance: f64,
    /// Choices of other gateways for the same request that were the same; 1 where there is one gateway.
    pub agreement: f64,
    /// Requests that were counted.
    pub n_requests: usize,
}

/// Percentiles.
#[derive(Clone, Copy, Debug)]
pub struct Percentiles {
    /// Half are below.
    pub p50: f64,
    /// 99 of 100 are below.
    pub p99: f64,
}

/// Runs a setting to its end.
pub fn run(setting: &Setting) -> Outcome {
    let mut world = World::new(setting);
    let warm_until = setting.load.seconds * WARM_SHARE;
    let mut before = None;
    while let Some(At { seconds, event, .. }) = world.agenda.events.pop() {
        if seconds > warm_until && before.is_none() {
            before = Some(world.tally());
        }
        match event {
            Event::Look => world.look(seconds),
            Event::Ask(session) => world.ask(session, seconds),
            Event::Step(replica) => world.step(replica, seconds),
        }
    }
    let after = world.tally();
    world.outcome(&before.unwrap_or_default(), &after)
}

/// Prompt tokens that one cache of the whole fleet's size would have had, of all: what no rule can be better than by much. Requests of
/// a session come at once behind each other here.
pub fn shared_cache_hits(load: &Load) -> f64 {
    let mut cache = Cache::of(CACHE_BLOCKS * load.n_replicas);
    let (mut hits, mut tokens) = (0u64, 0u64);
    for Client { begins, mut session, mut rng } in clients(load) {
        while let Some(Request { prompt, .. }) = session.ask(&mut rng) {
            if begins > load.seconds * WARM_SHARE {
                hits += u64::from((cache.held(&prompt.blocks) as u32 * BLOCK_TOKENS).min(prompt.tokens - 1));
                tokens += u64::from(prompt.tokens);
            }
            cache.touch(&prompt.blocks);
        }
    }
    hits as f64 / tokens as f64
}

/// A session, and randomness of its own: what one does changes no other.
struct Client {
    begins: f64,
    session: Session,
    rng: Rng,
}

fn clients(load: &Load) -> Vec<Client> {
    let client =
        |(at, (begins, session))| Client { begins, session, rng: Rng::seeded(load.seed ^ ((at as u64 + 1) << 20)) };
    load.sessions().into_iter().enumerate().map(client).collect()
}

#[derive(Debug)]
enum Event {
    /// A session's next request.
    Ask(usize),
    /// A replica's step ends.
    Step(usize),
    /// Replicas are asked for their load.
    Look,
}

/// An event and when it happens; of the same time the first that was planned.
struct At {
    seconds: f64,
    number: u64,
    event: Event,
}

impl PartialEq for At {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for At {}

impl PartialOrd for At {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for At {
    /// The earliest is the greatest, as a heap gives the greatest first.
    fn cmp(&self, other: &Self) -> Ordering {
        other.seconds.total_cmp(&self.seconds).then(other.number.cmp(&self.number))
    }
}

#[derive(Default)]
struct Agenda {
    events: BinaryHeap<At>,
    planned: u64,
}

impl Agenda {
    fn plan(&mut self, seconds: f64, event: Event) {
        self.planned += 1;
        self.events.push(At { seconds, number: self.planned, event });
    }
}

/// One request's way.
struct Entry {
    client: usize,
    asked: f64,
    first_token: f64,
}

/// Sums up to a moment.
#[derive(Default)]
struct Tally {
    n_requests: usize,
    prompt_tokens: u64,
    cached_tokens: u64,
    busy: Vec<f64>,
    agreed: Agreed,
}

struct World {
    rule: Rule,
    replicas: Vec<Replica>,
    /// What they said when they were asked last.
    said: Vec<Said>,
    in_flight: Vec<u32>,
    clients: Vec<Client>,
    entries: Vec<Entry>,
    prompt_tokens: u64,
    /// Clients that may ask again.
    n_open: usize,
    agenda: Agenda,
}

impl World {
    fn new(setting: &Setting) -> Self {
        let (load, n) = (&setting.load, setting.load.n_replicas);
        let clients = clients(load);
        let mut agenda = Agenda::default();
        for (at, client) in clients.iter().enumerate() {
            agenda.plan(client.begins, Event::Ask(at));
        }
        agenda.plan(0.0, Event::Look);
        Self {
            rule: setting.rule.rule(n, load.seed),
            replicas: (0..n).map(|_| Replica::new()).collect(),
            said: vec![Said::default(); n],
            in_flight: vec![0; n],
            entries: Vec::new(),
            prompt_tokens: 0,
            n_open: clients.len(),
            clients,
            agenda,
        }
    }

    fn look(&mut self, now: f64) {
        if self.n_open > 0 {
            self.said = self.replicas.iter().map(Replica::said).collect();
            self.rule.asked(now);
            self.agenda.plan(now + self.rule.name().asks_every(), Event::Look);
        }
    }

    fn ask(&mut self, at: usize, now: f64) {
        let client = &mut self.clients[at];
        let Some(request) = client.session.ask(&mut client.rng) else {
            self.n_open -= 1;
            return;
        };
        self.prompt_tokens += u64::from(request.prompt.tokens);
        let held = |at: usize| self.replicas[at].cache.held(&request.prompt.blocks);
        let chosen = self.rule.choose(&request.prompt, now, &self.said, &self.in_flight, held);
        self.in_flight[chosen] += 1;
        let replica = &mut self.replicas[chosen];
        let was_idle = replica.until.is_none();
        replica.take(self.entries.len(), request, now);
        self.entries.push(Entry { client: at, asked: now, first_token: f64::NAN });
        if let Some(until) = replica.until.filter(|_| was_idle) {
            self.agenda.plan(until, Event::Step(chosen));
        }
    }

    fn step(&mut self, at: usize, now: f64) {
        let stepped = self.replicas[at].end_step(now);
        self.rule.heard(at, now, &self.replicas[at].take_events());
        for id in stepped.began {
            self.entries[id].first_token = now;
            self.rule.began(id, now);
        }
        for id in stepped.ended {
            self.rule.ended(id, now);
            self.in_flight[at] -= 1;
            let client = &mut self.clients[self.entries[id].client];
            let pause = client.session.pause(&mut client.rng);
            self.agenda.plan(now + pause, Event::Ask(self.entries[id].client));
        }
        if let Some(until) = self.replicas[at].until {
            self.agenda.plan(until, Event::Step(at));
        }
    }

    fn tally(&self) -> Tally {
        Tally {
            n_requests: self.entries.len(),
            prompt_tokens: self.prompt_tokens,
            cached_tokens: self.replicas.iter().map(|replica| replica.cached_tokens).sum(),
            busy: self.replicas.iter().map(|replica| replica.busy).collect(),
            agreed: self.rule.agreed,
        }
    }

    /// Of what came between two moments.
    fn outcome(&self, before: &Tally, after: &Tally) -> Outcome {
        let counted = &self.entries[before.n_requests..];
        let mut ttft: Vec<f64> = counted.iter().map(|entry| entry.first_token - entry.asked).collect();
        ttft.sort_by(f64::total_cmp);
        let at = |share: f64| ttft[((ttft.len() - 1) as f64 * share) as usize];
        let begun = before.busy.iter().copied().chain(std::iter::repeat(0.0));
        let busy: Vec<f64> = after.busy.iter().zip(begun).map(|(after, before)| after - before).collect();
        let cached = (after.cached_tokens - before.cached_tokens) as f64;
        let n_compared = after.agreed.compared - before.agreed.compared;
        let n_same = after.agreed.same - before.agreed.same;
        Outcome {
            hit_share: cached / (after.prompt_tokens - before.prompt_tokens) as f64,
            ttft: Percentiles { p50: at(0.5), p99: at(0.99) },
            imbalance: busy.iter().copied().fold(0.0, f64::max) * busy.len() as f64 / busy.iter().sum::<f64>(),
            agreement: if n_compared > 0 { n_same as f64 / n_compared as f64 } else { 1.0 },
            n_requests: counted.len(),
        }
    }
}
