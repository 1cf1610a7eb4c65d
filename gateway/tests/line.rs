//! The line before agents, by its promises: everybody leaves it once, it has bounds, nobody starves, nobody pays for another one's
//! greed, and under overload what is sent on is in time. Time is a number here: nothing waits.

use std::collections::{HashMap, HashSet, VecDeque};

use proptest::prelude::*;
use stoker_gateway::line::{Bounds, Line, Shed, Ticket, Waiter};

const ROOMY: Bounds = Bounds { requests: 100_000, bytes: usize::MAX };

fn waiter(tenant: &str, class: i32, tokens: u32) -> Waiter {
    Waiter { tenant: tenant.to_owned(), weight: 1, class, tokens, n_bytes: 10, deadline_ms: u64::MAX, due_ms: None }
}

fn joined(line: &mut Line, waiter: Waiter) -> Ticket {
    line.join(waiter, 0).expect("it has a place").ticket
}

#[test]
fn classes_go_one_after_the_other_and_tenants_take_turns_inside() {
    let mut line = Line::bounded(ROOMY);
    let mut names = HashMap::new();
    for (name, tenant, class) in [
        ("a1", "a", 0),
        ("a2", "a", 0),
        ("a3", "a", 0),
        ("b1", "b", 0),
        ("late", "b", 7),
        ("first", "c", -1),
        ("b2", "b", 0),
    ] {
        names.insert(joined(&mut line, waiter(tenant, class, 500)), name);
    }
    let order: Vec<&str> = std::iter::from_fn(|| line.pop()).map(|ticket| names[&ticket]).collect();
    assert_eq!(order, ["first", "a1", "b1", "a2", "b2", "a3", "late"]);
}

#[test]
fn who_comes_back_goes_first_with_some_requests_and_not_with_all() {
    let mut line = Line::bounded(ROOMY);
    for _ in 0..100 {
        joined(&mut line, waiter("steady", 0, 500));
    }
    for _ in 0..50 {
        line.pop();
    }
    let back: HashSet<Ticket> = (0..20).map(|_| joined(&mut line, waiter("back", 0, 500))).collect();
    let order: Vec<bool> = (0..14).filter_map(|_| line.pop()).map(|ticket| back.contains(&ticket)).collect();
    let first = order.iter().take_while(|is_back| **is_back).count();
    assert!((4..=6).contains(&first), "2048 tokens are four to six requests: {order:?}");
    let later = order[first..].iter().filter(|is_back| **is_back).count();
    assert!(later.abs_diff((order.len() - first) / 2) <= 1, "then they take turns: {order:?}");
}

#[test]
fn a_full_line_makes_no_place_for_who_would_have_as_much() {
    let ask = |tokens, weight| {
        let mut line = Line::bounded(Bounds { requests: 2, bytes: 1000 });
        let _ = [joined(&mut line, waiter("a", 0, 100)), joined(&mut line, waiter("a", 0, 100))];
        line.join(Waiter { weight, ..waiter("b", 0, tokens) }, 0).map(|joined| joined.displaced.len())
    };
    assert_eq!([ask(199, 1), ask(399, 2)], [Ok(1), Ok(1)]);
    for (tokens, weight) in [(200, 1), (300, 1), (400, 2)] {
        assert_eq!(ask(tokens, weight).map_err(|refusal| refusal.shed), Err(Shed::Full), "{tokens} {weight}");
    }
}

#[test]
fn a_full_line_makes_place_for_a_higher_class_and_for_who_has_less() {
    let mut line = Line::bounded(Bounds { requests: 4, bytes: 1000 });
    let greedy: Vec<Ticket> = (0..3).map(|_| joined(&mut line, waiter("greedy", 0, 100))).collect();
    let low = joined(&mut line, waiter("low", 5, 100));
    let join = |line: &mut Line, waiter| line.join(waiter, 0);
    assert_eq!(join(&mut line, waiter("greedy", 0, 100)).unwrap().displaced, [low], "the lowest class goes first");
    let modest = join(&mut line, waiter("modest", 0, 100)).unwrap();
    assert_eq!((modest.displaced.len(), line.len()), (1, 4));
    assert!(!greedy.contains(&modest.displaced[0]), "the last of who has the most");
    assert_eq!(join(&mut line, waiter("greedy", 0, 100)).map_err(|refusal| refusal.shed), Err(Shed::Full));
    assert_eq!(join(&mut line, waiter("other", 5, 100)).map_err(|refusal| refusal.shed), Err(Shed::Full));
    let huge = Waiter { n_bytes: 1001, ..waiter("first", -9, 1) };
    assert_eq!(join(&mut line, huge).map_err(|refusal| refusal.shed), Err(Shed::Full));
    assert_eq!(line.len(), 4, "nobody makes place for one that has none anyway");
    let large = Waiter { n_bytes: 980, ..waiter("first", -9, 1) };
    assert_eq!(join(&mut line, large).unwrap().displaced.len(), 2, "by bytes, too");
}

#[test]
fn who_would_be_late_is_told_so_at_once_and_when_to_come_back() {
    let mut line = Line::bounded(ROOMY);
    for _ in 0..40 {
        joined(&mut line, waiter("a", 0, 500));
    }
    // A thousand tokens a second.
    for _ in 0..20 {
        line.pass(0.5);
        line.pop();
    }
    let ask = |line: &mut Line, tenant: &str, class| {
        let asking = Waiter { deadline_ms: 4_000, ..waiter(tenant, class, 500) };
        line.join(asking, 1_000).map(|_| ()).map_err(|refusal| (refusal.shed, refusal.retry_after_seconds))
    };
    assert_eq!(ask(&mut line, "a", 0), Err((Shed::Late, 7)), "ten seconds of its own before it, and three to wait");
    assert_eq!(ask(&mut line, "b", 1), Err((Shed::Late, 7)), "ten seconds of a higher class");
    assert_eq!([ask(&mut line, "b", 0), ask(&mut line, "a", -1)], [Ok(()), Ok(())], "not behind all of the others");
    assert!(line.expired(3_999).is_empty());
    assert_eq!(line.expired(4_000).len(), 2);
    assert_eq!(line.len(), 20);
}

#[test]
fn who_is_due_goes_before_its_tenant_s_others_and_is_told_by_its_own_time() {
    let mut line = Line::bounded(ROOMY);
    let due = |due_ms| Waiter { due_ms: Some(due_ms), deadline_ms: 45_000, ..waiter("a", 0, 500) };
    let undue = joined(&mut line, waiter("a", 0, 500));
    let [late, soon] = [9_000, 2_000].map(|due_ms| joined(&mut line, due(due_ms)));
    let higher = joined(&mut line, waiter("a", -1, 500));
    assert_eq!(std::iter::from_fn(|| line.pop()).collect::<Vec<_>>(), [higher, soon, late, undue]);

    let mut line = Line::bounded(ROOMY);
    for _ in 0..20 {
        joined(&mut line, waiter("a", 0, 500));
    }
    // A thousand tokens a second: ten seconds for all of them.
    for _ in 0..10 {
        line.pass(0.5);
        joined(&mut line, waiter("a", 0, 500));
        line.pop();
    }
    assert!(line.join(due(3_000), 1_000).is_ok(), "it goes before all that is not due");
    assert!(line.join(due(3_600), 1_000).is_ok());
    assert!(line.join(due(1_400), 1_000).is_ok(), "nothing is due before it");
    let late = line.join(due(1_900), 1_500).map(|_| ()).map_err(|refusal| refusal.shed);
    assert_eq!(late, Err(Shed::Late), "one is, which takes 500 ms of its 400");
    assert_eq!(line.expired(3_600).len(), 3, "long before anybody else's time is over");
}

#[test]
fn a_crowd_is_not_told_that_it_would_be_late_by_the_first_moments_of_its_line() {
    let mut line = Line::bounded(ROOMY);
    let crowd = |line: &mut Line| {
        (0..500).try_for_each(|_| line.join(Waiter { deadline_ms: 45_000, ..waiter("a", 0, 20) }, 0).map(|_| ()))
    };
    assert!(crowd(&mut line).is_ok());
    // Two went, and the replicas are not done with the first.
    for _ in 0..2 {
        line.pass(1.0);
        line.pop();
    }
    assert!(crowd(&mut line).is_ok(), "by that it would take minutes");
    line.pass(3.0);
    assert_eq!(crowd(&mut line).map_err(|refusal| refusal.shed), Err(Shed::Late), "it does");
}

#[derive(Clone, Debug)]
enum Event {
    Join(Waiter),
    Next,
    Leave(usize),
    Pass(u64),
}

fn events() -> impl Strategy<Value = Event> {
    let due = prop::option::of(1..60_000u64);
    let waiter = (0..5usize, 1..4u32, -1..2i32, 1..20_000u32, 0..4000usize, 1..30_000u64, due);
    let waiter = waiter.prop_map(|(tenant, weight, class, tokens, n_bytes, deadline_ms, due_ms)| {
        let tenant = format!("tenant-{tenant}");
        Event::Join(Waiter { tenant, weight, class, tokens, n_bytes, deadline_ms, due_ms })
    });
    prop_oneof![5 => waiter, 2 => Just(Event::Next), 1 => any::<usize>().prop_map(Event::Leave), 1 => (1..4000u64).prop_map(Event::Pass)]
}

fn until_ms(waiter: &Waiter) -> u64 {
    waiter.deadline_ms.min(waiter.due_ms.unwrap_or(u64::MAX))
}

/// A line beside what is known to wait in it.
struct Watched {
    line: Line,
    bounds: Bounds,
    waiting: HashMap<Ticket, Waiter>,
    now_ms: u64,
}

impl Watched {
    /// Takes a ticket out of what waits: each is there until it leaves, and leaves once.
    fn left(&mut self, ticket: Ticket) -> Result<Waiter, TestCaseError> {
        self.waiting.remove(&ticket).ok_or_else(|| TestCaseError::fail(format!("ticket {ticket} leaves twice")))
    }

    fn happens(&mut self, event: Event) -> Result<(), TestCaseError> {
        match event {
            Event::Join(waiter) => {
                let due_ms = waiter.due_ms.map(|due_ms| self.now_ms + due_ms);
                let asking = Waiter { deadline_ms: self.now_ms + waiter.deadline_ms, due_ms, ..waiter };
                let Ok(joined) = self.line.join(asking.clone(), self.now_ms) else { return Ok(()) };
                for ticket in joined.displaced {
                    let displaced = self.left(ticket)?;
                    prop_assert!(displaced.class >= asking.class, "{displaced:?} makes place for {asking:?}");
                }
                prop_assert!(self.waiting.insert(joined.ticket, asking).is_none(), "a ticket is there twice");
            }
            Event::Next => {
                let Some(ticket) = self.line.pop() else {
                    prop_assert!(self.waiting.is_empty());
                    return Ok(());
                };
                let next = self.left(ticket)?;
                for (other, waiting) in &self.waiting {
                    prop_assert!(waiting.class >= next.class);
                    let order = |waiter: &Waiter, ticket| (waiter.due_ms.unwrap_or(u64::MAX), ticket);
                    let is_before = order(waiting, *other) < order(&next, ticket);
                    let is_of_same = waiting.class == next.class && waiting.tenant == next.tenant;
                    prop_assert!(
                        !(is_of_same && is_before),
                        "of one tenant, who is due first is first, then who came first"
                    );
                }
            }
            Event::Leave(nth) => {
                let tickets: Vec<Ticket> = self.waiting.keys().copied().collect();
                let Some(ticket) = tickets.get(nth % tickets.len().max(1)) else { return Ok(()) };
                prop_assert!(self.line.leave(*ticket));
                prop_assert!(!self.line.leave(*ticket));
                self.left(*ticket)?;
            }
            Event::Pass(ms) => {
                self.now_ms += ms;
                self.line.pass(ms as f64 / 1000.0);
                for ticket in self.line.expired(self.now_ms) {
                    prop_assert!(until_ms(&self.left(ticket)?) <= self.now_ms);
                }
                prop_assert!(self.waiting.values().all(|waiting| until_ms(waiting) > self.now_ms));
            }
        }
        self.agrees()
    }

    fn agrees(&self) -> Result<(), TestCaseError> {
        let bytes: usize = self.waiting.values().map(|waiting| waiting.n_bytes).sum();
        prop_assert_eq!((self.line.len(), self.line.n_bytes()), (self.waiting.len(), bytes));
        prop_assert!(self.line.len() <= self.bounds.requests && bytes <= self.bounds.bytes, "it has bounds");
        let by_tenant: usize = self.line.waiting().map(|(_, n_waiting)| n_waiting).sum();
        prop_assert_eq!(by_tenant, self.waiting.len());
        Ok(())
    }
}

proptest! {
    #[test]
    fn everybody_leaves_once_and_the_line_has_bounds(events in prop::collection::vec(events(), 0..300)) {
        let bounds = Bounds { requests: 20, bytes: 30_000 };
        let mut watched = Watched { line: Line::bounded(bounds), bounds, waiting: HashMap::new(), now_ms: 0 };
        for event in events {
            watched.happens(event)?;
        }
        while !watched.waiting.is_empty() {
            watched.happens(Event::Next)?;
        }
        prop_assert_eq!(watched.line.pop(), None);
    }

    /// While all tenants wait, what each has sent on for its weight differs by no more than the largest request.
    #[test]
    fn nobody_starves_inside_a_class(
        weights in prop::collection::vec(1..5u32, 2..6),
        sizes in prop::collection::vec(1..5000u32, 600),
    ) {
        let mut line = Line::bounded(ROOMY);
        let mut of = HashMap::new();
        for (at, tokens) in sizes.iter().enumerate() {
            let tenant = at % weights.len();
            let asking = Waiter { weight: weights[tenant], ..waiter(&format!("{tenant}"), 0, *tokens) };
            of.insert(joined(&mut line, asking), (tenant, f64::from(*tokens)));
        }
        let mut sent = vec![0.0; weights.len()];
        let mut left = vec![sizes.len() / weights.len(); weights.len()];
        while left.iter().all(|left| *left > 0) {
            let (tenant, tokens) = of[&line.pop().unwrap()];
            sent[tenant] += tokens / f64::from(weights[tenant]);
            left[tenant] -= 1;
            let most = sent.iter().copied().fold(f64::MIN, f64::max);
            let least = sent.iter().copied().fold(f64::MAX, f64::min);
            prop_assert!(most - least <= 5001.0, "{sent:?} of weights {weights:?}");
        }
    }
}

/// Numbers that look random, the same in every run.
struct Drawn(u64);

impl Drawn {
    fn unit(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    }

    /// Time until the next of so many arrivals a second, in ms.
    fn gap_ms(&mut self, per_second: f64) -> f64 {
        -self.unit().ln() / per_second * 1000.0
    }
}

/// Who asks, how often and for what.
#[derive(Clone)]
struct Client {
    tenant: &'static str,
    class: i32,
    per_second: f64,
    tokens: (u32, u32),
}

/// What came of a client's requests.
#[derive(Default)]
struct Outcome {
    /// Times to the first token, in ms, of those that had one.
    ttft_ms: Vec<f64>,
    asked: usize,
    refused: usize,
    /// Tokens of those that began before their clients gave up.
    good_tokens: f64,
}

impl Outcome {
    fn p95_ms(&self) -> f64 {
        let mut sorted = self.ttft_ms.clone();
        sorted.sort_by(f64::total_cmp);
        sorted[sorted.len() * 95 / 100]
    }
}

/// A replica that computes so many tokens a second, one prompt after the other, and has a short queue.
const TOKENS_PER_SECOND: f64 = 10_000.0;
const QUEUE: usize = 2;
const PATIENCE_MS: u64 = 10_000;

/// One replica behind a line of these bounds, for so long.
struct World {
    line: Option<Line>,
    /// Without a line all wait at the replica, as they come.
    queue: VecDeque<Request>,
    clients: Vec<Client>,
    outcomes: Vec<Outcome>,
    requests: HashMap<Ticket, Request>,
    idle_at_ms: f64,
}

#[derive(Clone, Copy)]
struct Request {
    client: usize,
    came_ms: f64,
    tokens: u32,
}

impl World {
    fn run(clients: &[Client], line: Option<Line>, seconds: f64) -> Vec<Outcome> {
        let outcomes = clients.iter().map(|_| Outcome::default()).collect();
        let mut world = World {
            line,
            queue: VecDeque::new(),
            clients: clients.to_vec(),
            outcomes,
            requests: HashMap::new(),
            idle_at_ms: 0.0,
        };
        let mut arrivals = arrivals(clients, seconds).into_iter().peekable();
        for now_ms in 0..(seconds * 1000.0) as u64 {
            while let Some(request) = arrivals.next_if(|request| request.came_ms < now_ms as f64) {
                world.arrives(request, now_ms);
            }
            world.goes_on(now_ms);
        }
        world.outcomes
    }

    fn arrives(&mut self, request: Request, now_ms: u64) {
        let Client { tenant, class, .. } = self.clients[request.client];
        self.outcomes[request.client].asked += 1;
        let Some(line) = &mut self.line else { return self.queue.push_back(request) };
        let asking = Waiter { deadline_ms: now_ms + PATIENCE_MS, ..waiter(tenant, class, request.tokens) };
        match line.join(asking, now_ms) {
            Ok(joined) => {
                let displaced: HashSet<Ticket> = joined.displaced.into_iter().collect();
                self.out(displaced);
                self.requests.insert(joined.ticket, request);
            }
            Err(_) => self.outcomes[request.client].refused += 1,
        }
    }

    fn out(&mut self, tickets: impl IntoIterator<Item = Ticket>) {
        for ticket in tickets {
            let request = self.requests.remove(&ticket).expect("it waits");
            self.outcomes[request.client].refused += 1;
        }
    }

    fn goes_on(&mut self, now_ms: u64) {
        if let Some(mut line) = self.line.take() {
            if !line.is_empty() {
                line.pass(0.001);
            }
            let expired = line.expired(now_ms);
            self.out(expired);
            while self.queue.len() < QUEUE
                && let Some(ticket) = line.pop()
            {
                let request = self.requests.remove(&ticket).expect("it waits");
                self.queue.push_back(request);
            }
            self.line = Some(line);
        }
        while self.idle_at_ms <= now_ms as f64
            && let Some(request) = self.queue.pop_front()
        {
            self.computes(request, now_ms as f64);
        }
    }

    fn computes(&mut self, request: Request, now_ms: f64) {
        let begins_ms = self.idle_at_ms.max(now_ms - 1.0).max(request.came_ms);
        self.idle_at_ms = begins_ms + f64::from(request.tokens) / TOKENS_PER_SECOND * 1000.0;
        let outcome = &mut self.outcomes[request.client];
        let ttft_ms = self.idle_at_ms - request.came_ms;
        outcome.ttft_ms.push(ttft_ms);
        if ttft_ms <= PATIENCE_MS as f64 + 2000.0 {
            outcome.good_tokens += f64::from(request.tokens);
        }
    }
}

fn arrivals(clients: &[Client], seconds: f64) -> Vec<Request> {
    let mut all = Vec::new();
    for (client, Client { per_second, tokens: (least, most), .. }) in clients.iter().enumerate() {
        // Of a client the same, whoever is there beside it.
        let mut drawn = Drawn(client as u64 + 1);
        let mut came_ms = drawn.gap_ms(*per_second);
        while came_ms < seconds * 1000.0 {
            let tokens = least + (drawn.unit() * f64::from(most - least)) as u32;
            all.push(Request { client, came_ms, tokens });
            came_ms += drawn.gap_ms(*per_second);
        }
    }
    all.sort_by(|a, b| a.came_ms.total_cmp(&b.came_ms));
    all
}

fn line() -> Line {
    Line::bounded(Bounds { requests: 1024, bytes: 64 << 20 })
}

/// A tenant that asks for this part of its share, beside eight that ask for all of theirs and a tenth at so many times its own.
fn p95_ms(part: f64, times: f64, line: Option<Line>) -> f64 {
    let tenants = ["modest", "b", "c", "d", "e", "f", "g", "h", "i", "greedy"];
    let mut clients = tenants.map(|tenant| Client { tenant, class: 0, per_second: 2.0, tokens: (200, 800) });
    clients[0].per_second *= part;
    clients[9].per_second *= times;
    World::run(&clients, line, 3000.0)[0].p95_ms()
}

#[test]
fn a_tenant_at_ten_times_its_share_does_not_raise_another_s_ttft_by_a_fifth() {
    for part in [0.5, 0.8] {
        let (fair, beside_greed) = (p95_ms(part, 1.0, Some(line())), p95_ms(part, 10.0, Some(line())));
        eprintln!("at {part} of a share: p95 TTFT {fair:.0} ms, {beside_greed:.0} beside a tenant at ten shares");
        assert!(beside_greed <= 1.2 * fair, "at {part} of a share: {fair:.0} ms, {beside_greed:.0} beside greed");
    }
    let without = p95_ms(0.5, 10.0, None);
    assert!(without > 60_000.0, "{without:.0} ms without a line: the test sees what it is about");
}

#[test]
fn what_is_sent_on_under_four_times_the_load_is_in_time() {
    let clients = [
        Client { tenant: "a", class: 0, per_second: 10.0, tokens: (200, 800) },
        Client { tenant: "b", class: 5, per_second: 40.0, tokens: (200, 1800) },
        Client { tenant: "c", class: 5, per_second: 2.0, tokens: (200, 1800) },
    ];
    let seconds = 300.0;
    let good = |outcomes: &[Outcome]| {
        outcomes.iter().map(|outcome| outcome.good_tokens).sum::<f64>() / (TOKENS_PER_SECOND * seconds)
    };
    for length in [30, 1024] {
        let line = Line::bounded(Bounds { requests: length, bytes: 64 << 20 });
        let outcomes = World::run(&clients, Some(line), seconds);
        let [first, greedy, modest] = outcomes.as_slice() else { panic!("three clients") };
        eprintln!("line of {length}: goodput {:.3}", good(&outcomes));
        assert!(good(&outcomes) >= 0.95, "line of {length}: {:.3} of what can be done", good(&outcomes));
        assert_eq!(first.refused, 0, "line of {length}: the lowest class goes first");
        assert!(modest.refused * 20 < modest.asked || length > 30, "{} of {}", modest.refused, modest.asked);
        assert!(greedy.refused * 2 > greedy.asked, "{} of {}", greedy.refused, greedy.asked);
    }
    let without = World::run(&clients, None, seconds);
    assert!(good(&without) < 0.2, "{:.3} without a line: the test sees what it is about", good(&without));
}
