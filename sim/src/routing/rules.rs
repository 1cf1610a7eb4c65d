//! Rules that choose a replica: ours, the usual ones, and two of the field written from their documents. A rule sees what its
//! gateway could: what replicas said when they were asked last, and what it sent itself.
//!
//! - llm-d's endpoint picker with its chart's weights: 2 · queue + 2 · kv + 3 · prefix, each 0 to 1, highest wins, equals by chance.
//!   Replicas are asked every 50 ms; prefixes are those that it sent, by blocks of 64 characters, at most 31,250 a replica.
//! - Dynamo's router: cost = prefill blocks + decode blocks, lowest wins. Which blocks a replica holds it knows at once, from events;
//!   what is active it counts itself.
//! - Consistent hashing with bounded loads of the prompt's first hundred tokens, at most 1.25 times the mean (KubeAI's PrefixHash).

use std::collections::VecDeque;

use stoker_routing::{
    Ask, Capacity, Choice, Hearing, Own, PrefixIndex, ReplicaView, Reported, Rules, Sent, load, mix, route,
};
use stoker_workload::Rng;

use super::{
    cache::Cache,
    prompt::{BLOCK_TOKENS, Prompt},
    replica::CACHE_BLOCKS,
};

/// Which rule.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum RuleName {
    /// Ours: gateways that take turns.
    Stoker {
        /// One or three.
        n_gateways: usize,
        /// What they hear of replicas.
        hears: Hears,
        /// Whether they tell each other what they have on replicas.
        tell: bool,
    },
    /// By chance.
    Random,
    /// In turn.
    RoundRobin,
    /// Fewest requests.
    LeastRequests,
    /// Consistent hashing with bounded loads.
    ConsistentHash,
    /// llm-d's endpoint picker.
    LlmD,
    /// Dynamo's router.
    Dynamo,
}

/// What a replica says when it is asked.
#[derive(Clone, Copy, Debug, Default)]
pub struct Said {
    /// Requests that it computes.
    pub running: u32,
    /// Requests that wait for their first step.
    pub waiting: u32,
    /// Prompt tokens of those.
    pub prefill_tokens: u64,
    /// KV blocks that requests hold, of all.
    pub kv_share: f64,
}

/// What became of a beginning of prompts in a cache.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Event {
    Stored(u64),
    Removed(u64),
}

/// What gateways of ours hear of replicas' caches.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Hears {
    /// All of it, as late as it is.
    All,
    /// All of it, a second late.
    Late,
    /// Nine events of ten; that there were others nobody knows.
    Most,
    /// Nothing: they know what they sent.
    Nothing,
}

impl Hears {
    /// From a step's end to the gateway, in seconds: what agents wait for more, and a network.
    fn seconds(self) -> f64 {
        if self == Self::Late { 1.0 } else { 0.05 }
    }

    /// Of events.
    fn lost_share(self) -> f64 {
        if self == Self::Most { 0.1 } else { 0.0 }
    }
}

impl RuleName {
    /// Ours as it runs, with one gateway.
    pub const STOKER: Self = Self::stoker(1, Hears::All);

    /// Ours as it runs, with so many gateways that hear so much.
    pub const fn stoker(n_gateways: usize, hears: Hears) -> Self {
        Self::Stoker { n_gateways, hears, tell: true }
    }

    /// All of them.
    pub const ALL: [Self; 15] = [
        Self::STOKER,
        Self::stoker(3, Hears::All),
        Self::Stoker { n_gateways: 3, hears: Hears::All, tell: false },
        Self::stoker(1, Hears::Late),
        Self::stoker(3, Hears::Late),
        Self::stoker(1, Hears::Most),
        Self::stoker(3, Hears::Most),
        Self::stoker(1, Hears::Nothing),
        Self::stoker(3, Hears::Nothing),
        Self::Random,
        Self::RoundRobin,
        Self::LeastRequests,
        Self::ConsistentHash,
        Self::LlmD,
        Self::Dynamo,
    ];

    /// As it is called in figures.
    pub fn word(self) -> &'static str {
        match self {
            Self::Stoker { tell: false, .. } => "stoker, 3 gateways that do not tell each other",
            Self::Stoker { n_gateways, hears, .. } => match (n_gateways, hears) {
                (1, Hears::All) => "stoker",
                (1, Hears::Late) => "stoker, events 1 s late",
                (1, Hears::Most) => "stoker, a tenth of events lost",
                (1, Hears::Nothing) => "stoker, no events",
                (_, Hears::All) => "stoker, 3 gateways",
                (_, Hears::Late) => "stoker, 3 gateways, events 1 s late",
                (_, Hears::Most) => "stoker, 3 gateways, a tenth of events lost",
                (_, Hears::Nothing) => "stoker, 3 gateways, no events",
            },
            Self::Random => "random",
            Self::RoundRobin => "round robin",
            Self::LeastRequests => "least requests",
            Self::ConsistentHash => "consistent hashing",
            Self::LlmD => "llm-d rules",
            Self::Dynamo => "dynamo rules",
        }
    }

    /// How old what replicas said may be, in seconds.
    pub fn asks_every(self) -> f64 {
        match self {
            Self::Stoker { .. } => 2.0,
            _ => 0.05,
        }
    }

    /// The rule on so many replicas.
    pub fn rule(self, n_replicas: usize, seed: u64) -> Rule {
        let (n_gateways, hears, tell) = match self {
            Self::Stoker { n_gateways, hears, tell } => (n_gateways, hears, tell),
            _ => (1, Hears::Nothing, false),
        };
        Rule {
            name: self,
            tell,
            rng: Rng::seeded(seed),
            turn: 0,
            gateways: (0..n_gateways as u64).map(|at| Gateway::new(n_replicas, hears, seed + at)).collect(),
            seen: match self {
                Self::LlmD => (0..n_replicas).map(|_| Cache::of(31_250)).collect(),
                _ => Vec::new(),
            },
            sent: vec![(0, 0); n_replicas],
            open: Vec::new(),
            agreed: Agreed::default(),
        }
    }
}

/// What gateways of ours have on a replica, as far as one of them knows.
#[derive(Clone, Debug, Default)]
struct OnReplica {
    now: Own,
    /// When the replica was asked.
    then: Own,
}

#[derive(Debug)]
struct Gateway {
    index: PrefixIndex,
    sent: Vec<OnReplica>,
    hears: Hears,
    /// Of each replica; none if it hears nothing.
    hearings: Vec<Hearing>,
    /// Events on their way, with the second at which they come.
    coming: VecDeque<(f64, Hearing, Event)>,
    /// What other gateways say of a replica, on its way, with the second at which it comes.
    told: VecDeque<(f64, usize, Told)>,
    /// Which of them are lost.
    rng: Rng,
}

impl Gateway {
    fn new(n_replicas: usize, hears: Hears, seed: u64) -> Self {
        let mut index = PrefixIndex::bounded(1 << 20);
        let heard = if hears == Hears::Nothing { 0 } else { n_replicas };
        Self {
            hearings: (0..heard).map(|slot| index.hear(slot as u32)).collect(),
            index,
            sent: vec![OnReplica::default(); n_replicas],
            hears,
            coming: VecDeque::new(),
            told: VecDeque::new(),
            rng: Rng::seeded(seed),
        }
    }

    /// Events leave a replica.
    fn sends(&mut self, replica: usize, now: f64, events: &[Event]) {
        let Some(hearing) = self.hearings.get(replica) else { return };
        for event in events {
            if self.rng.uniform() >= self.hears.lost_share() {
                self.coming.push_back((now + self.hears.seconds(), *hearing, *event));
            }
        }
    }

    /// Takes in those that have come, and what others told.
    fn listen(&mut self, now: f64) {
        while let Some((at, replica, told)) = self.told.pop_front_if(|(at, ..)| *at <= now) {
            match told {
                Told::Has(change) => self.sent[replica].change(change),
                Told::Sent(sent) => self.index.note_sent(&sent, replica as u32, gateway_ms(at)),
            }
        }
        while let Some((_, hearing, event)) = self.coming.pop_front_if(|(at, ..)| *at <= now) {
            match event {
                Event::Stored(name) => self.index.store(&hearing, name),
                Event::Removed(name) => self.index.remove(&hearing, name),
            }
        }
    }
}

impl Gateway {
    /// What it would choose, by what it has heard and sent.
    fn would_choose(&mut self, prompt: &Prompt, now: f64, said: &[Said]) -> Choice {
        self.listen(now);
        let view = |(replica, (said, sent)): (usize, (&Said, &OnReplica))| {
            let reported = Reported {
                running: said.running,
                waiting: said.waiting,
                prefill_tokens: said.prefill_tokens,
                kv_share: said.kv_share as f32,
            };
            ReplicaView {
                slot: replica as u32,
                seed: mix(17, replica as u64),
                weight: 100,
                serving_since_ms: 0,
                is_healthy: true,
                load: load(Some(reported), sent.then, sent.now),
            }
        };
        let views: Vec<ReplicaView> = said.iter().zip(&self.sent).enumerate().map(view).collect();
        let (chain, now_ms) = (&*prompt.chain, gateway_ms(now));
        let capacity = |slot: u32| Capacity {
            kv_blocks: CACHE_BLOCKS as u32,
            waiting_tokens: views[slot as usize].load.prefill_tokens,
        };
        let matches = self.index.matches(chain, now_ms, capacity);
        let ask = Ask { chain, session: None, request: 0, now_ms };
        route(&ask, &views, &matches, &Rules::default()).expect("there are replicas")
    }
}

/// What one gateway tells another of a replica.
#[derive(Clone, Debug)]
enum Told {
    /// What it has there changes.
    Has(Change),
    /// It sent a prompt there.
    Sent(Sent),
}

/// What becomes of a gateway's requests on a replica.
#[derive(Clone, Copy, Debug, Default)]
struct Change {
    requests: i32,
    prefill_tokens: i64,
}

impl OnReplica {
    fn change(&mut self, change: Change) {
        let Own { requests, prefill_tokens } = &mut self.now;
        *requests = requests.strict_add_signed(change.requests);
        *prefill_tokens = prefill_tokens.strict_add_signed(change.prefill_tokens);
    }
}

/// From a change at a gateway to the others, in seconds: twice what it is on a loopback at the 95th percentile (`cargo run --release -p stoker-gateway --example in_flight_delay`).
const TOLD_SECONDS: f64 = 0.0005;

/// By a gateway's clock: nobody is new.
fn gateway_ms(now: f64) -> u64 {
    1_000_000 + (1000.0 * now) as u64
}

/// Choices that gateways were asked for beside the one that had the request.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Agreed {
    pub(crate) compared: u64,
    /// Of these, those that were the same.
    pub(crate) same: u64,
}

/// A request on its way: where, by which gateway, how much prefill it was thought to need.
#[derive(Clone, Copy, Debug)]
struct Open {
    replica: usize,
    gateway: usize,
    prefill_tokens: u32,
    blocks: u64,
}

/// A rule and what it remembers.
#[derive(Debug)]
pub struct Rule {
    name: RuleName,
    /// Whether gateways tell each other what they have.
    tell: bool,
    rng: Rng,
    turn: usize,
    gateways: Vec<Gateway>,
    /// Blocks that were sent to each replica (llm-d).
    seen: Vec<Cache>,
    /// Prefill blocks and decode blocks active on each replica (Dynamo).
    sent: Vec<(u64, u64)>,
    open: Vec<Open>,
    pub(crate) agreed: Agreed,
}

impl Rule {
    /// Which rule it is.
    pub fn name(&self) -> RuleName {
        self.name
    }

    /// Replicas were asked.
    pub fn asked(&mut self, now: f64) {
        for gateway in &mut self.gateways {
            gateway.listen(now);
            gateway.sent.iter_mut().for_each(|sent| sent.then = sent.now);
        }
    }

    /// A replica said what became of its cache.
    pub(crate) fn heard(&mut self, replica: usize, now: f64, events: &[Event]) {
        self.gateways.iter_mut().for_each(|gateway| gateway.sends(replica, now, events));
    }

    /// Where the next request goes. `said` is what replicas said when they were asked last, `in_flight` the requests on each, `held` how many
    /// of the prompt's first blocks each has now; requests are numbered in this order.
    pub fn choose(
        &mut self,
        prompt: &Prompt,
        now: f64,
        said: &[Said],
        in_flight: &[u32],
        held: impl Fn(usize) -> usize,
    ) -> usize {
        self.turn += 1;
        let gateway = self.turn % self.gateways.len();
        let n = said.len();
        let replica = match self.name {
            RuleName::Stoker { .. } => return self.ours(gateway, prompt, now, said),
            RuleName::Random => self.any(n),
            RuleName::RoundRobin => self.turn % n,
            RuleName::LeastRequests => self.best(n, |at| -f64::from(in_flight[at])),
            RuleName::ConsistentHash => consistent(prompt.head, in_flight),
            RuleName::LlmD => self.llm_d(&prompt.blocks, said),
            RuleName::Dynamo => self.dynamo(prompt, &held),
        };
        let held = held(replica) as u32 * BLOCK_TOKENS;
        let open = Open {
            replica,
            gateway,
            prefill_tokens: prompt.tokens.saturating_sub(held),
            blocks: u64::from(prompt.tokens.div_ceil(BLOCK_TOKENS)),
        };
        self.opens(open, now)
    }

    /// A request has its first token.
    pub fn began(&mut self, id: usize, now: f64) {
        let open = self.open[id];
        self.changes(open, now, Change { requests: 0, prefill_tokens: -i64::from(open.prefill_tokens) });
        self.sent[open.replica].0 -= u64::from(open.prefill_tokens / BLOCK_TOKENS);
    }

    /// A request has its last token.
    pub fn ended(&mut self, id: usize, now: f64) {
        let open = self.open[id];
        self.changes(open, now, Change { requests: -1, prefill_tokens: 0 });
        self.sent[open.replica].1 -= open.blocks;
    }

    /// What a gateway has on a replica changes: it knows at once, others when they are told.
    fn changes(&mut self, open: Open, now: f64, change: Change) {
        for at in 0..self.gateways.len() {
            match at == open.gateway {
                true => self.gateways[at].sent[open.replica].change(change),
                false => self.tells(now, at, open.replica, Told::Has(change)),
            }
        }
    }

    fn tells(&mut self, now: f64, to: usize, replica: usize, told: Told) {
        if self.tell {
            self.gateways[to].told.push_back((now + TOLD_SECONDS, replica, told));
        }
    }

    fn opens(&mut self, open: Open, now: f64) -> usize {
        self.changes(open, now, Change { requests: 1, prefill_tokens: open.prefill_tokens.into() });
        let (prefill, decode) = &mut self.sent[open.replica];
        *prefill += u64::from(open.prefill_tokens / BLOCK_TOKENS);
        *decode += open.blocks;
        self.open.push(open);
        open.replica
    }

    fn ours(&mut self, at: usize, prompt: &Prompt, now: f64, said: &[Said]) -> usize {
        let choice = self.gateways[at].would_choose(prompt, now, said);
        for other in (0..self.gateways.len()).filter(|other| *other != at) {
            self.agreed.compared += 1;
            let same = self.gateways[other].would_choose(prompt, now, said).place == choice.place;
            self.agreed.same += u64::from(same);
        }
        let sent = Sent::of(&prompt.chain, choice.matched);
        for other in (0..self.gateways.len()).filter(|other| *other != at) {
            self.tells(now, other, choice.place, Told::Sent(sent.clone()));
        }
        self.gateways[at].index.note_sent(&sent, choice.place as u32, gateway_ms(now));
        let open = Open {
            replica: choice.place,
            gateway: at,
            prefill_tokens: choice.terms.uncached_tokens,
            blocks: u64::from(prompt.tokens.div_ceil(BLOCK_TOKENS)),
        };
        self.opens(open, now)
    }

    fn llm_d(&mut self, blocks: &[u64], said: &[Said]) -> usize {
        let queues = said.iter().map(|said| said.waiting);
        let (least, most) = (queues.clone().min().unwrap_or(0), queues.max().unwrap_or(0));
        let scores: Vec<f64> = said
            .iter()
            .zip(&self.seen)
            .map(|(said, seen)| {
                let queue = if most == least { 1.0 } else { f64::from(most - said.waiting) / f64::from(most - least) };
                let kv = 1.0 - said.kv_share;
                let prefix = seen.held(blocks) as f64 / blocks.len().max(1) as f64;
                2.0 * queue + 2.0 * kv + 3.0 * prefix
            })
            .collect();
        let chosen = self.best(scores.len(), |at| scores[at]);
        self.seen[chosen].touch(blocks);
        chosen
    }

    fn dynamo(&mut self, prompt: &Prompt, held: impl Fn(usize) -> usize) -> usize {
        let blocks = u64::from(prompt.tokens.div_ceil(BLOCK_TOKENS));
        let cost = |(at, (prefill, decode)): (usize, &(u64, u64))| {
            ((prefill + blocks).saturating_sub(held(at) as u64) + decode + blocks) as f64
        };
        let costs: Vec<f64> = self.sent.iter().enumerate().map(cost).collect();
        self.best(costs.len(), |at| -costs[at])
    }

    fn any(&mut self, n: usize) -> usize {
        ((self.rng.uniform() * n as f64) as usize).min(n - 1)
    }

    /// The one with the highest score, of equals any.
    fn best(&mut self, n: usize, score: impl Fn(usize) -> f64) -> usize {
        let highest = (0..n).map(&score).max_by(f64::total_cmp).unwrap_or_default();
        let equals: Vec<usize> = (0..n).filter(|at| score(*at) >= highest).collect();
        equals[self.any(equals.len())]
    }
}

fn consistent(key: u64, in_flight: &[u32]) -> usize {
    let total: u32 = in_flight.iter().sum();
    let bound = (1.25 * f64::from(total + 1) / in_flight.len() as f64).ceil() as u32;
    let fits = (0..in_flight.len()).filter(|at| in_flight[*at] < bound);
    fits.max_by_key(|at| mix(key, *at as u64)).unwrap_or_default()
}
