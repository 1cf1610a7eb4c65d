//! The line before agents: requests for one deployment that cannot begin now, in the order in which they will. Who has the smaller class
//! is first. Inside a class it is the tenant that has sent on the fewest tokens for its weight; who had nothing in line for a while
//! has less to its account than the others, but not much less: nobody saves turns for later. Of one tenant the earliest is first of
//! those that say by when they should begin, then who came first.
//!
//! It is bounded by count and bytes. Where it is full, the last of the lowest class makes place for a higher one, and inside a class the
//! last of the tenant that has the most waiting for one that has less: so nobody is kept out by somebody else's requests. Who
//! could only begin after its deadline is refused at once, by the rate at which the line has been going on.
//!
//! Pure: its owner says what time it is, when somebody may go, and tells those who are out. Nothing here waits.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

/// Who comes back to the line has sent on at most so many tokens less than who is served then: with some requests it goes before those
/// who always wait, so that a tenant that asks now and then hardly sees them (without it `tests/line.rs`
/// finds a p95 of the time to the first token of 913 ms where it is 329).
const CREDIT_TOKENS: u64 = 2048;
/// For as long the rate of the line is remembered, about.
const RATE_SECONDS: f64 = 10.0;
/// Before so much time with somebody in line, its rate is not known: until those that went first are answered hardly anybody follows,
/// and a crowd that comes at once would be told of minutes where it takes seconds.
const RATE_SECONDS_LEAST: f64 = 3.0;
/// When to come back where the rate is not known.
const RETRY_SECONDS: u32 = 2;
/// Longer is not promised: by then the line is another one.
const RETRY_SECONDS_MAX: u32 = 120;

/// A place in line, known by its number.
pub type Ticket = u64;

/// What may wait.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Bounds {
    /// Requests.
    pub requests: usize,
    /// Bytes of their bodies.
    pub bytes: usize,
}

/// A request that wants to wait.
#[derive(Clone, Debug, PartialEq)]
pub struct Waiter {
    /// Whose.
    pub tenant: String,
    /// Its tenant's part beside others'; not 0.
    pub weight: u32,
    /// Smaller ones are sooner.
    pub class: i32,
    /// What it takes: of its prompt, and a charge for its answer; not 0.
    pub tokens: u32,
    /// Of its body.
    pub n_bytes: usize,
    /// It waits no longer than this.
    pub deadline_ms: u64,
    /// By when it should begin, if it says so: before those of its tenant that do not, or later. Nobody waits for it longer either.
    pub due_ms: Option<u64>,
}

/// The order of one tenant's requests: when they are due, then arrival.
type Order = (u64, Ticket);

/// Why a request does not wait any longer, or not at all.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Shed {
    /// The line is full, and nobody in it is to go before this one.
    Full,
    /// It could only begin after its deadline.
    Late,
    /// The line was full, and somebody else came who goes first.
    Displaced,
    /// Its deadline is over.
    Expired,
}

impl Shed {
    /// One word, for metrics.
    pub fn word(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Late => "late",
            Self::Displaced => "displaced",
            Self::Expired => "expired",
        }
    }
}

/// A request that is refused, and when to come back.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Refusal {
    /// Why.
    pub shed: Shed,
    /// By the rate of the line.
    pub retry_after_seconds: u32,
}

/// A request that waits now, and those that made place for it.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Joined {
    /// Its place.
    pub ticket: Ticket,
    /// They wait no longer.
    pub displaced: Vec<Ticket>,
}

/// See the module.
#[derive(Clone, Debug)]
pub struct Line {
    bounds: Bounds,
    /// Smallest first; in each somebody waits.
    classes: BTreeMap<i32, Class>,
    /// Where each ticket is.
    places: HashMap<Ticket, Place>,
    by_deadline: BTreeSet<(u64, Ticket)>,
    n_bytes: usize,
    next_ticket: Ticket,
    rate: Rate,
}

#[derive(Clone, Debug)]
struct Place {
    class: i32,
    tenant: String,
    /// By then it is out.
    until_ms: u64,
    tokens: u32,
    n_bytes: usize,
}

/// Tenants with requests of one class.
#[derive(Clone, Debug, Default)]
struct Class {
    n_waiting: usize,
    /// What those who are served now have sent on.
    sent: u64,
    /// Of all tenants that had something in line since the class had nothing in it.
    backlogs: HashMap<String, Backlog>,
}

/// What waits of one tenant in one class, in its order.
#[derive(Clone, Debug, Default)]
struct Backlog {
    weight: u32,
    /// What it has sent on for its weight, or what is held against it.
    sent: u64,
    /// Tokens of all that waits.
    tokens: u64,
    waiting: VecDeque<(Order, u32)>,
}

impl Line {
    /// An empty one.
    pub fn bounded(bounds: Bounds) -> Self {
        Self {
            bounds,
            classes: BTreeMap::new(),
            places: HashMap::new(),
            by_deadline: BTreeSet::new(),
            n_bytes: 0,
            next_ticket: 0,
            rate: Rate::default(),
        }
    }

    /// Requests that wait.
    pub fn len(&self) -> usize {
        self.places.len()
    }

    /// Whether nobody waits.
    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// Bytes of their bodies.
    pub fn n_bytes(&self) -> usize {
        self.n_bytes
    }

    /// How many requests of each tenant wait, in no order; a tenant is there once for each of its classes.
    pub fn waiting(&self) -> impl Iterator<Item = (&str, usize)> {
        let backlogs = self.classes.values().flat_map(|class| &class.backlogs);
        let counted = backlogs.map(|(tenant, backlog)| (tenant.as_str(), backlog.waiting.len()));
        counted.filter(|(_, n_waiting)| *n_waiting > 0)
    }

    /// So much time passed in which replicas took requests and somebody waited.
    pub fn pass(&mut self, seconds: f64) {
        self.rate.pass(seconds);
    }

    /// Takes its place, if there is one for it and it can begin in time.
    pub fn join(&mut self, waiter: Waiter, now_ms: u64) -> Result<Joined, Refusal> {
        let wait = self.rate.seconds(self.tokens_before(&waiter));
        let patience = waiter.until_ms().saturating_sub(now_ms) as f64 / 1000.0;
        let refuse = |shed, seconds| Err(Refusal { shed, retry_after_seconds: retry_after(seconds) });
        if let Some(wait) = wait.filter(|wait| *wait > patience) {
            return refuse(Shed::Late, Some(wait - patience));
        }
        let Some(displaced) = self.victims(&waiter) else { return refuse(Shed::Full, wait) };
        for ticket in &displaced {
            self.leave(*ticket);
        }
        Ok(Joined { ticket: self.enter(waiter), displaced })
    }

    /// When somebody who is out should come back.
    pub fn retry_after_seconds(&self) -> u32 {
        let tokens = self.classes.values().flat_map(|class| class.backlogs.values()).map(|backlog| backlog.tokens);
        retry_after(self.rate.seconds(tokens.sum()))
    }

    /// Whose turn it is; it waits no longer.
    pub fn pop(&mut self) -> Option<Ticket> {
        let ticket = self.classes.first_entry()?.get_mut().pop()?;
        if let Some(place) = self.places.get(&ticket) {
            self.rate.went(place.tokens);
        }
        self.leave(ticket);
        Some(ticket)
    }

    /// Those whose deadline is over; they wait no longer.
    pub fn expired(&mut self, now_ms: u64) -> Vec<Ticket> {
        let expired: Vec<Ticket> =
            self.by_deadline.iter().take_while(|(at_ms, _)| *at_ms <= now_ms).map(|(_, ticket)| *ticket).collect();
        for ticket in &expired {
            self.leave(*ticket);
        }
        expired
    }

    /// It waits no longer; whether it did.
    pub fn leave(&mut self, ticket: Ticket) -> bool {
        let Some(place) = self.places.remove(&ticket) else { return false };
        self.by_deadline.remove(&(place.until_ms, ticket));
        self.n_bytes -= place.n_bytes;
        if let Some(class) = self.classes.get_mut(&place.class) {
            class.leave(ticket, &place);
            if class.n_waiting == 0 {
                self.classes.remove(&place.class);
            }
        }
        true
    }

    fn enter(&mut self, waiter: Waiter) -> Ticket {
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        let (order, until_ms) = (waiter.order(ticket), waiter.until_ms());
        let Waiter { tenant, weight, class, tokens, n_bytes, .. } = waiter;
        let tokens = tokens.max(1);
        self.classes.entry(class).or_default().enter(order, &tenant, weight.max(1), tokens);
        self.by_deadline.insert((until_ms, ticket));
        self.n_bytes += n_bytes;
        self.places.insert(ticket, Place { class, tenant, until_ms, tokens, n_bytes });
        ticket
    }

    /// Tokens that go on before it: all of smaller classes, what its tenant has waiting before it, and as much of others as their weights are.
    fn tokens_before(&self, waiter: &Waiter) -> u64 {
        let sooner = self.classes.range(..waiter.class).flat_map(|(_, class)| class.backlogs.values());
        let sooner: u64 = sooner.map(|backlog| backlog.tokens).sum();
        let Some(class) = self.classes.get(&waiter.class) else { return sooner };
        let order = waiter.order(self.next_ticket);
        let own = class.backlogs.get(&waiter.tenant).map_or(0, |own| own.tokens_before(order));
        let meanwhile = |other: &Backlog| own * u64::from(other.weight) / u64::from(waiter.weight.max(1));
        let beside = class.backlogs.iter().filter(|(tenant, _)| **tenant != waiter.tenant);
        sooner + own + beside.map(|(_, other)| other.tokens.min(meanwhile(other))).sum::<u64>()
    }

    /// Who makes place for it; `None`: not enough do.
    fn victims(&self, waiter: &Waiter) -> Option<Vec<Ticket>> {
        let mut requests = (self.len() + 1).saturating_sub(self.bounds.requests);
        let mut bytes = (self.n_bytes + waiter.n_bytes).saturating_sub(self.bounds.bytes);
        let lower = self.classes.range(waiter.class..).rev();
        let mut may_go = lower.flat_map(|(class, tenants)| match *class == waiter.class {
            true => tenants.longest_last(Some(tenants.share_with(waiter))),
            false => tenants.longest_last(None),
        });
        let mut victims = Vec::new();
        while requests > 0 || bytes > 0 {
            let victim = may_go.next()?;
            requests = requests.saturating_sub(1);
            bytes = bytes.saturating_sub(self.places.get(&victim).map_or(0, |place| place.n_bytes));
            victims.push(victim);
        }
        Some(victims)
    }
}

impl Waiter {
    fn order(&self, ticket: Ticket) -> Order {
        (self.due_ms.unwrap_or(u64::MAX), ticket)
    }

    fn until_ms(&self) -> u64 {
        self.due_ms.map_or(self.deadline_ms, |due_ms| due_ms.min(self.deadline_ms))
    }

    /// Whether it is out of the line because it is due, sooner than others would be.
    pub fn is_due_first(&self) -> bool {
        self.due_ms.is_some_and(|due_ms| due_ms <= self.deadline_ms)
    }
}

impl Backlog {
    fn tokens_before(&self, order: Order) -> u64 {
        let before = self.waiting.iter().take_while(|(waiting, _)| *waiting < order);
        before.map(|(_, tokens)| u64::from(*tokens)).sum()
    }
}

impl Class {
    fn enter(&mut self, order: Order, tenant: &str, weight: u32, tokens: u32) {
        let backlog = self.backlogs.entry(tenant.to_owned()).or_default();
        if backlog.waiting.is_empty() {
            backlog.sent = backlog.sent.max(self.sent.saturating_sub(CREDIT_TOKENS));
        }
        // What the file says now holds for all that waits.
        backlog.weight = weight;
        backlog.tokens += u64::from(tokens);
        let place = backlog.waiting.partition_point(|(waiting, _)| *waiting < order);
        backlog.waiting.insert(place, (order, tokens));
        self.n_waiting += 1;
    }

    fn leave(&mut self, ticket: Ticket, place: &Place) {
        let Some(backlog) = self.backlogs.get_mut(&place.tenant) else { return };
        backlog.waiting.retain(|((_, waiting), _)| *waiting != ticket);
        backlog.tokens -= u64::from(place.tokens);
        self.n_waiting -= 1;
    }

    /// Whose turn it is; between equals, whose first is due first or came first.
    fn pop(&mut self) -> Option<Ticket> {
        let turn = |backlog: &Backlog| backlog.waiting.front().map(|(order, _)| (backlog.sent, *order));
        let waiting = self.backlogs.values_mut().filter(|backlog| !backlog.waiting.is_empty());
        let backlog = waiting.min_by_key(|backlog| turn(backlog))?;
        self.sent = self.sent.max(backlog.sent);
        let ((_, ticket), tokens) = *backlog.waiting.front()?;
        backlog.sent += share(tokens.into(), backlog.weight);
        Some(ticket)
    }

    /// What its tenant would have waiting with it, for its weight.
    fn share_with(&self, waiter: &Waiter) -> u64 {
        let own = self.backlogs.get(&waiter.tenant).map_or(0, |own| own.tokens);
        share(own + u64::from(waiter.tokens), waiter.weight)
    }

    /// Those who are last, one after the other of the tenant that has the most waiting by then for its weight, as long as that is more
    /// than `least`.
    fn longest_last(&self, least: Option<u64>) -> impl Iterator<Item = Ticket> {
        let mut left: Vec<(u64, &Backlog, usize)> =
            self.backlogs.values().map(|backlog| (backlog.tokens, backlog, backlog.waiting.len())).collect();
        std::iter::from_fn(move || {
            let still = left.iter_mut().filter(|(.., n_left)| *n_left > 0);
            let (tokens, backlog, n_left) = still.max_by_key(|(tokens, backlog, n_left)| {
                (share(*tokens, backlog.weight), backlog.waiting.get(n_left - 1).map(|(order, _)| *order))
            })?;
            if least.is_some_and(|least| share(*tokens, backlog.weight) <= least) {
                return None;
            }
            *n_left -= 1;
            let ((_, ticket), of_it) = *backlog.waiting.get(*n_left)?;
            *tokens -= u64::from(of_it);
            Some(ticket)
        })
    }
}

/// What counts when tenants are compared.
fn share(tokens: u64, weight: u32) -> u64 {
    tokens / u64::from(weight.max(1))
}

fn retry_after(seconds: Option<f64>) -> u32 {
    seconds.map_or(RETRY_SECONDS, |seconds| (seconds.ceil() as u32).clamp(1, RETRY_SECONDS_MAX))
}

/// Tokens a second that go on while somebody waits. What is long ago counts less.
#[derive(Clone, Copy, Debug, Default)]
struct Rate {
    tokens: f64,
    seconds: f64,
}

impl Rate {
    fn pass(&mut self, seconds: f64) {
        let kept = (-seconds / RATE_SECONDS).exp();
        (self.tokens, self.seconds) = (self.tokens * kept, self.seconds * kept + seconds);
    }

    fn went(&mut self, tokens: u32) {
        self.tokens += f64::from(tokens);
    }

    /// How long so many tokens take; `None`: nobody knows yet.
    fn seconds(&self, tokens: u64) -> Option<f64> {
        let is_known = self.seconds >= RATE_SECONDS_LEAST && self.tokens > 0.0;
        is_known.then(|| tokens as f64 * self.seconds / self.tokens)
    }
}
