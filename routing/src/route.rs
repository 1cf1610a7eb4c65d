//! The choice itself: of the replicas that admit anything, the one that begins with the prompt soonest.
//!
//! What a replica would have to do first is counted in tokens of prefill: those of the prompt that it does not hold, those of prompts
//! that wait there, and for each sequence beside it what it slows prefill by. The first weigh more: who waits loses time, who computes again
//! what another one holds takes it from all; the more so the more everybody has to do. Replicas that have more than their share of requests are
//! left out. Among those that are nearly equal the one that says it holds most is chosen, then the prompt's own key decides, by rendezvous hashing: gateways that have never heard of
//! each other send prompts that begin alike to the same replica. Where several hold the same of a prompt, all of it is the key: what many prompts begin with would lead all
//! of them to one of those that hold it. What is nearly equal is some sequences wide: gateways know what others sent a moment late, or by reports alone, and
//! the more replicas are equal to all of them, the more often they choose alike ([0027](../../docs/decisions/0027-gateways-agree-by-what-they-take-for-equal.md)). Where no replica has told its load, the first two by the key are
//! compared, with those that hold a prefix: what one gateway knows is too little to look for the least of all, and all would find the same.
//!
//! A replica of less than a whole weight is one that is tried: it gets its part of all requests, whatever it holds and has to do, by a
//! draw that requests of one session share. By cost it would get none where prompts begin alike: it holds nothing of them.
//!
//! Pure: the same values, the same choice, whatever the order of replicas.

use crate::{
    BYTES_PER_TOKEN,
    chain::Chain,
    index::{Matches, Source},
    load::Load,
    mix::mix,
};

/// Constants of the choice.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rules {
    /// A replica has at most this many times the mean of requests,
    pub balance: f64,
    /// and this many more: where there is little to do, nobody is late for it.
    pub slack: f64,
    /// Tokens that wait which a token that the replica does not hold counts as,
    pub uncached_weight: f64,
    /// and as many more for each time that all replicas have this many tokens to do first: what is computed again holds up all who wait.
    pub crowd_tokens: f64,
    /// Tokens that a sequence in progress counts as there: it is slowed by what is computed beside it, and does not wait for its end.
    pub crowd_sequence_tokens: f64,
    /// Tokens of prefill that a sequence in progress counts as.
    pub sequence_tokens: f64,
    /// Who holds more of the prompt is chosen although it costs at most this many tokens more,
    pub near_tokens: f64,
    /// and of those that hold as much, if anything, costs that differ by at most this many are equal.
    pub alike_tokens: f64,
    /// From this share of referenced KV blocks on, a replica is likely to preempt.
    pub kv_high: f64,
    /// Tokens of prefill that a full cache counts as.
    pub kv_full_tokens: f64,
    /// A replica takes its whole share when it has served for this long.
    pub slow_start_ms: u64,
}

impl Default for Rules {
    fn default() -> Self {
        Self {
            balance: 1.25,
            slack: 2.0,
            uncached_weight: 1.5,
            crowd_tokens: 8192.0,
            crowd_sequence_tokens: 64.0,
            sequence_tokens: 256.0,
            near_tokens: 1024.0,
            alike_tokens: 512.0,
            kv_high: 0.8,
            kv_full_tokens: 8192.0,
            slow_start_ms: 10_000,
        }
    }
}

/// The least part of its share that a replica takes in slow start.
const FIRST_SHARE: f64 = 0.1;
/// Weight of a whole replica: constants of rules are about one of them.
const WHOLE: u32 = 100;
/// Of the draw for who is tried: keys are drawn for replicas by other numbers.
const TRIAL: u64 = 0x7472_6961_6c73;

/// What is asked, as far as the choice depends on it.
#[derive(Clone, Copy, Debug)]
pub struct Ask<'a> {
    /// The prompt.
    pub chain: &'a Chain,
    /// What the client said that belongs together, instead of the prompt's beginning.
    pub session: Option<u64>,
    /// A number of this request alone, the same whenever it is chosen for again.
    pub request: u64,
    /// By the clock of the replicas' `serving_since_ms`.
    pub now_ms: u64,
}

/// One replica that may be sent something.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ReplicaView {
    /// By which the index knows it.
    pub slot: u32,
    /// The same number at every gateway, another for every replica.
    pub seed: u64,
    /// Its share beside others', in hundredths of a replica; 0: it gets nothing.
    pub weight: u32,
    /// Since when it serves.
    pub serving_since_ms: u64,
    /// Whether it answered when it was asked last. Those that did not are asked only if no other is left.
    pub is_healthy: bool,
    /// What it has to do.
    pub load: Load,
}

/// Why a replica was chosen.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Reason {
    /// It holds a part of the prompt.
    Prefix,
    /// It has the least to do.
    Load,
    /// It is the prompt's own among equals.
    Key,
    /// Of the prompt's first two, it has less to do; nobody told its load.
    TwoChoices,
    /// It is tried, and this request is drawn for it.
    Trial,
    /// No other was left.
    Only,
}

impl Reason {
    /// One word, for metrics and for who asks.
    pub fn word(self) -> &'static str {
        match self {
            Self::Prefix => "prefix",
            Self::Load => "load",
            Self::Key => "key",
            Self::TwoChoices => "two_choices",
            Self::Trial => "trial",
            Self::Only => "only",
        }
    }
}

/// What a choice was made by.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Terms {
    /// Tokens of the prompt that need prefill there.
    pub uncached_tokens: u32,
    /// Tokens of it that are held there.
    pub cached_tokens: u32,
    /// Tokens of other prompts that come first.
    pub waiting_tokens: u64,
    /// Requests there.
    pub requests: u32,
    /// All of it, in tokens that wait.
    pub cost: f64,
}

/// Which replica, and why.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choice {
    /// Its place among the views.
    pub place: usize,
    /// Bytes of the prompt that it holds.
    pub matched: u32,
    /// How that is known, if it holds any.
    pub source: Option<Source>,
    /// Why.
    pub reason: Reason,
    /// What it was chosen by.
    pub terms: Terms,
    /// Replicas that could have been chosen.
    pub n_candidates: usize,
    /// Of these, those with more than their share of requests.
    pub n_over_share: usize,
}

/// Whether a replica may be chosen, and if not, why.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Standing {
    /// It may.
    Fits,
    /// It has more than its share of requests: it may if all have.
    OverShare,
    /// It did not answer, and others do.
    Silent,
    /// Its weight is 0.
    Weightless,
    /// It is tried and the request was not drawn for it, or the other way round.
    NotDrawn,
}

impl Standing {
    /// One word, for who asks.
    pub fn word(self) -> &'static str {
        match self {
            Self::Fits => "fits",
            Self::OverShare => "over_share",
            Self::Silent => "silent",
            Self::Weightless => "weightless",
            Self::NotDrawn => "not_drawn",
        }
    }
}

/// What a choice sees of one replica.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Score {
    /// Whether it may be chosen.
    pub standing: Standing,
    /// What it is chosen by, if it may.
    pub terms: Terms,
    /// How it is known what it holds, if it holds any.
    pub source: Option<Source>,
}

/// A replica that may be chosen, by its place, and what it costs.
#[derive(Clone, Copy)]
struct Candidate {
    place: usize,
    cost: f64,
}

/// What a choice is made of.
struct Scene<'a> {
    ask: &'a Ask<'a>,
    replicas: &'a [ReplicaView],
    matches: &'a Matches,
    rules: &'a Rules,
    /// What a token that is not held counts as.
    uncached_weight: f64,
}

/// Chooses; `None` if there is nobody to choose.
pub fn route(ask: &Ask<'_>, replicas: &[ReplicaView], matches: &Matches, rules: &Rules) -> Option<Choice> {
    let field = Field::of(ask, replicas, rules);
    let scene = Scene { ask, replicas, matches, rules, uncached_weight: field.uncached_weight(replicas) };
    let (mut fitting, mut over) = (Vec::with_capacity(replicas.len()), Vec::new());
    for (place, replica) in replicas.iter().enumerate() {
        let candidates = match field.standing(replica) {
            Standing::Fits => &mut fitting,
            Standing::OverShare => &mut over,
            Standing::Silent | Standing::Weightless | Standing::NotDrawn => continue,
        };
        candidates.push(Candidate { place, cost: scene.terms(replica).cost });
    }
    let (n_candidates, n_over_share) = (field.n_candidates, over.len());
    let candidates = if fitting.is_empty() { over } else { fitting };
    let (place, reason) = match (n_candidates, field.is_fresh) {
        (0, _) => return None,
        (_, _) if field.drawn == Some(true) => (scene.least(&candidates)?.0, Reason::Trial),
        (1, _) => (candidates.first()?.place, Reason::Only),
        (_, true) => scene.least(&candidates)?,
        (_, false) => scene.of_two(&candidates)?,
    };
    let slot = replicas[place].slot;
    let (matched, source, terms) = (matches.of(slot), matches.source(slot), scene.terms(&replicas[place]));
    Some(Choice { place, matched, source, reason, terms, n_candidates, n_over_share })
}

/// What [`route`] sees of each replica, in their order.
pub fn scores(ask: &Ask<'_>, replicas: &[ReplicaView], matches: &Matches, rules: &Rules) -> Vec<Score> {
    let field = Field::of(ask, replicas, rules);
    let scene = Scene { ask, replicas, matches, rules, uncached_weight: field.uncached_weight(replicas) };
    let score = |replica: &ReplicaView| Score {
        standing: field.standing(replica),
        terms: scene.terms(replica),
        source: matches.source(replica.slot),
    };
    replicas.iter().map(score).collect()
}

/// Who may be chosen, and how many requests each may have.
struct Field<'a> {
    ask: &'a Ask<'a>,
    rules: &'a Rules,
    some_answer: bool,
    /// Whether it goes to those that are tried; `None`: there are none, or no others.
    drawn: Option<bool>,
    n_candidates: usize,
    is_fresh: bool,
    /// Requests for each part of a share.
    bound: f64,
}

impl<'a> Field<'a> {
    fn of(ask: &'a Ask<'a>, replicas: &[ReplicaView], rules: &'a Rules) -> Self {
        let some_answer = replicas.iter().any(|replica| replica.weight > 0 && replica.is_healthy);
        let mut field = Self { ask, rules, some_answer, drawn: None, n_candidates: 0, is_fresh: false, bound: 0.0 };
        field.drawn = draw(ask, replicas.iter().filter(|replica| field.out(replica).is_none()));
        let (mut requests, mut shares, mut n_candidates, mut is_fresh) = (0.0, 0.0, 0, false);
        for replica in replicas.iter().filter(|replica| field.out(replica).is_none()) {
            requests += f64::from(replica.load.requests);
            shares += share(replica, ask.now_ms, rules);
            n_candidates += 1;
            is_fresh |= replica.load.is_fresh;
        }
        let bound = rules.balance * (requests + 1.0) / shares + rules.slack / f64::from(WHOLE);
        Self { n_candidates, is_fresh, bound, ..field }
    }

    /// Why it may not be chosen whatever it has to do, if so.
    fn out(&self, replica: &ReplicaView) -> Option<Standing> {
        match replica {
            ReplicaView { weight: 0, .. } => Some(Standing::Weightless),
            ReplicaView { is_healthy: false, .. } if self.some_answer => Some(Standing::Silent),
            replica if self.drawn.is_some_and(|is_trial| is_trial != is_tried(replica)) => Some(Standing::NotDrawn),
            _ => None,
        }
    }

    /// What a token that is not held counts as: by how much would be held up where the least would be.
    fn uncached_weight(&self, replicas: &[ReplicaView]) -> f64 {
        let candidates = replicas.iter().filter(|replica| self.out(replica).is_none());
        let held_up = |ReplicaView { load, .. }: &ReplicaView| {
            load.prefill_tokens as f64 + self.rules.crowd_sequence_tokens * f64::from(load.requests)
        };
        let least = candidates.map(held_up).min_by(f64::total_cmp);
        self.rules.uncached_weight * (1.0 + least.unwrap_or_default() / self.rules.crowd_tokens)
    }

    fn standing(&self, replica: &ReplicaView) -> Standing {
        self.out(replica).unwrap_or_else(|| {
            let most = (self.bound * share(replica, self.ask.now_ms, self.rules)).max(1.0);
            if f64::from(replica.load.requests) < most { Standing::Fits } else { Standing::OverShare }
        })
    }
}

fn is_tried(replica: &ReplicaView) -> bool {
    replica.weight < WHOLE
}

/// Whether it goes to those that are tried; `None`: there are none, or no others.
fn draw<'a>(ask: &Ask<'_>, replicas: impl Iterator<Item = &'a ReplicaView>) -> Option<bool> {
    let (mut tried, mut whole) = (0, 0);
    for replica in replicas {
        let sum = if is_tried(replica) { &mut tried } else { &mut whole };
        *sum += u64::from(replica.weight);
    }
    if tried == 0 || whole == 0 {
        return None;
    }
    let drawn = mix(ask.session.unwrap_or(ask.request), TRIAL) % (tried + whole);
    Some(drawn < tried)
}

/// How much of a whole replica's load this one may have.
fn share(replica: &ReplicaView, now_ms: u64, rules: &Rules) -> f64 {
    let served_ms = now_ms.saturating_sub(replica.serving_since_ms);
    if served_ms >= rules.slow_start_ms {
        return replica.weight.into();
    }
    f64::from(replica.weight) * (served_ms as f64 / rules.slow_start_ms as f64).max(FIRST_SHARE)
}

/// Tokens that a replica has to do first.
fn before(replica: &ReplicaView, now_ms: u64, rules: &Rules) -> f64 {
    let load = &replica.load;
    let sequences = rules.sequence_tokens * f64::from(load.requests);
    let before = load.prefill_tokens as f64 + sequences + kv_tokens(load.kv_share.into(), rules);
    // A replica of half the weight, or that has just begun, is taken for one that is half as fast.
    let share = share(replica, now_ms, rules);
    if share == f64::from(WHOLE) { before } else { before * f64::from(WHOLE) / share }
}

/// What a cache that is nearly full counts as.
fn kv_tokens(kv_share: f64, rules: &Rules) -> f64 {
    if kv_share <= rules.kv_high {
        return 0.0;
    }
    rules.kv_full_tokens * ((kv_share - rules.kv_high) / (1.0 - rules.kv_high)).min(1.0)
}

/// Weighted rendezvous hashing: the replica with the highest number has the key, and shares of keys are as weights are.
fn affinity(key: u64, replica: &ReplicaView) -> f64 {
    // In (0, 1): of 52 bits, and never an end.
    let drawn = ((mix(key, replica.seed) >> 12) as f64 + 0.5) / (1u64 << 52) as f64;
    -f64::from(replica.weight) / drawn.ln()
}

/// Those that cost at most so much more than the least.
fn cheapest(candidates: impl Iterator<Item = Candidate> + Clone, more: f64) -> Vec<Candidate> {
    let lowest = candidates.clone().map(|candidate| candidate.cost).min_by(f64::total_cmp);
    candidates.filter(|candidate| lowest.is_some_and(|lowest| candidate.cost <= lowest + more)).collect()
}

impl Scene<'_> {
    fn terms(&self, replica: &ReplicaView) -> Terms {
        let load = &replica.load;
        let cached_tokens = self.matches.of(replica.slot) / BYTES_PER_TOKEN;
        let uncached_tokens = self.ask.chain.n_tokens().saturating_sub(cached_tokens);
        Terms {
            uncached_tokens,
            cached_tokens,
            waiting_tokens: load.prefill_tokens,
            requests: load.requests,
            cost: self.uncached_weight * f64::from(uncached_tokens) + before(replica, self.ask.now_ms, self.rules),
        }
    }

    fn matched(&self, candidate: &Candidate) -> u32 {
        self.matches.of(self.replicas[candidate.place].slot)
    }

    /// Whose it is, among those that say they hold this much of it.
    fn affinity(&self, candidate: &Candidate, exact: u32) -> f64 {
        let of_prompt = if exact > 0 { self.ask.chain.whole() } else { self.ask.chain.key() };
        affinity(self.ask.session.unwrap_or(of_prompt), &self.replicas[candidate.place])
    }

    /// Of those that cost nearly as little as the least, the one that says it holds most; of equals the key's own. What was only sent
    /// somewhere does not count for this: other gateways sent other things, and all of them have the key.
    fn least(&self, candidates: &[Candidate]) -> Option<(usize, Reason)> {
        let exact = |candidate: &Candidate| self.matches.exact(self.replicas[candidate.place].slot);
        let near = cheapest(candidates.iter().copied(), self.rules.near_tokens);
        let held = near.iter().map(exact).max()?;
        let alike = near.iter().copied().filter(|candidate| exact(candidate) == held);
        let alike = cheapest(alike, self.rules.alike_tokens);
        let affinity = |candidate: &Candidate| self.affinity(candidate, held);
        let chosen = alike.iter().max_by(|a, b| affinity(a).total_cmp(&affinity(b)))?;
        let reason = match (self.matched(chosen), alike.len()) {
            (1.., _) => Reason::Prefix,
            (0, 1) => Reason::Load,
            (0, _) => Reason::Key,
        };
        Some((chosen.place, reason))
    }

    /// The cheaper of the key's first two and of those that hold a prefix.
    fn of_two(&self, candidates: &[Candidate]) -> Option<(usize, Reason)> {
        let mut by_key: Vec<(f64, &Candidate)> =
            candidates.iter().map(|candidate| (self.affinity(candidate, 0), candidate)).collect();
        by_key.sort_by(|(a, _), (b, _)| b.total_cmp(a));
        let compared =
            by_key.iter().enumerate().filter(|(rank, (_, candidate))| *rank < 2 || self.matched(candidate) > 0);
        // Of equals the first: it has the key.
        let (_, (_, chosen)) = compared.min_by(|(_, (_, a)), (_, (_, b))| a.cost.total_cmp(&b.cost))?;
        let reason = if self.matched(chosen) > 0 { Reason::Prefix } else { Reason::TwoChoices };
        Some((chosen.place, reason))
    }
}
