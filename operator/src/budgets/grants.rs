//! Who may have how many replicas, of all deployments of namespaces with a budget together. Pure: no clock, nothing remembered; the
//! same claims get the same grants.
//!
//! GPUs are handed out replica by replica. What was granted before stays, and where nothing was, what runs. Then everybody gets what is theirs by right, then what is left
//! is lent; higher priorities first, among equals who has less. A namespace that wants its own GPUs and finds them lent gets them
//! back from namespaces of a lower priority, never from its equals: it waits for these, and nobody borrows more meanwhile. Replicas that
//! found no room for long come last: what they cannot use is offered to others, and they get it back when nobody wants it, or when those
//! found no room either.

use std::cmp::Reverse;

/// What a namespace may have.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Budget {
    /// It.
    pub namespace: String,
    /// GPUs by right.
    pub gpus: u64,
    /// Who goes first: the higher one.
    pub priority: i32,
    /// GPUs beyond these at most.
    pub borrows: u64,
}

/// What a deployment wants.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Claim {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// GPUs of a replica; at least one.
    pub gpus: u64,
    /// Replicas that come before what others want beyond theirs.
    pub min: u32,
    /// Replicas.
    pub wanted: u32,
    /// Replicas that it was granted before; where nothing was granted yet, those that run.
    pub held: u32,
    /// Replicas that there was no room for, for as long as waiting is no fault.
    pub stuck: u32,
}

impl Claim {
    /// Replicas that it keeps if nobody is owed them: of those it had, those that are wanted and that there is room for.
    pub fn kept(&self) -> u32 {
        self.held.min(self.wanted.saturating_sub(self.stuck))
    }
}

/// What it gets.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Grant {
    /// Replicas.
    pub replicas: u32,
    /// Why it is not what is wanted, if it is not.
    pub blocked: Option<Blocked>,
}

/// Why a claim gets no more.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Blocked {
    /// The namespace has what it may have; by its deployments that hold most.
    Spent(Vec<String>),
    /// Its own GPUs are lent to these, whose priority is no lower.
    Lent(Vec<String>),
    /// Nothing is left to borrow: these have it, or have a right to it and wait.
    NothingLeft(Vec<String>),
}

impl Blocked {
    /// Who has what is wanted, as NAMESPACE/NAME, the largest first.
    pub fn holders(&self) -> &[String] {
        match self {
            Self::Spent(holders) | Self::Lent(holders) | Self::NothingLeft(holders) => holders,
        }
    }
}

/// Holders that are named at most.
const NAMED: usize = 3;

/// The grants of claims, in their order. A claim of a namespace without a budget gets what it wants.
pub fn grants(budgets: &[Budget], claims: &[Claim]) -> Vec<Grant> {
    let mut book = Book::open(budgets, claims);
    while book.hand_out_one() {}
    book.close()
}

/// Grants while they are made.
#[derive(Clone)]
struct Book<'a> {
    budgets: &'a [Budget],
    claims: &'a [Claim],
    /// The budget of each claim.
    budget_of: Vec<Option<usize>>,
    granted: Vec<u32>,
    /// Why each claim gets no more, as far as that is known.
    blocked: Vec<Option<Blocked>>,
    /// GPUs that the namespace of each budget was granted.
    used: Vec<u64>,
}

/// In which order replicas are handed out.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
enum Turn {
    ByRight,
    Borrowed,
    /// There was no room for it.
    Stuck,
}

impl<'a> Book<'a> {
    /// What is held is kept.
    fn open(budgets: &'a [Budget], claims: &'a [Claim]) -> Self {
        let budget_of: Vec<Option<usize>> =
            claims.iter().map(|claim| budgets.iter().position(|budget| budget.namespace == claim.namespace)).collect();
        let kept = |(claim, budget): (&Claim, &Option<usize>)| {
            if budget.is_some() { claim.kept() } else { claim.wanted }
        };
        let granted: Vec<u32> = claims.iter().zip(&budget_of).map(kept).collect();
        let mut used = vec![0; budgets.len()];
        for ((claim, budget), granted) in claims.iter().zip(&budget_of).zip(&granted) {
            if let Some(budget) = budget {
                used[*budget] += u64::from(*granted) * claim.gpus;
            }
        }
        Self { budgets, claims, budget_of, granted, blocked: vec![None; claims.len()], used }
    }

    /// Grants the replica whose turn it is, or notes why its claim gets none; false when there is nobody to look at.
    fn hand_out_one(&mut self) -> bool {
        let waiting = (0..self.claims.len()).filter(|&idx| self.wants(idx));
        let next = waiting.filter_map(|idx| Some((self.place(idx)?, idx))).min();
        let Some((_, idx)) = next else { return false };
        match self.offer(idx) {
            Ok(()) => self.give(idx),
            Err(blocked) => self.blocked[idx] = Some(blocked),
        }
        true
    }

    fn give(&mut self, idx: usize) {
        self.granted[idx] += 1;
        if let Some(budget) = self.budget_of[idx] {
            self.used[budget] += self.claims[idx].gpus;
        }
    }

    fn take_back(&mut self, idx: usize) {
        self.granted[idx] -= 1;
        if let Some(budget) = self.budget_of[idx] {
            self.used[budget] -= self.claims[idx].gpus;
        }
    }

    fn wants(&self, idx: usize) -> bool {
        self.granted[idx] < self.claims[idx].wanted && self.blocked[idx].is_none()
    }

    /// The place in line of a claim's next replica; of equals who has the smaller share of what it wants, then by name.
    fn place(&self, idx: usize) -> Option<impl Ord + use<'a>> {
        let claim = &self.claims[idx];
        let budget = &self.budgets[self.budget_of[idx]?];
        let borrowed = self.beyond(idx, claim.gpus);
        let (granted, wanted) = (u64::from(self.granted[idx]), u64::from(claim.wanted));
        let is_above_min = self.granted[idx] >= claim.min;
        let share = granted * 1_000_000 / wanted.max(1);
        Some((self.turn(idx), Reverse(budget.priority), is_above_min, borrowed, share, &claim.namespace, &claim.name))
    }

    fn turn(&self, idx: usize) -> Turn {
        let claim = &self.claims[idx];
        match () {
            () if self.granted[idx] >= claim.wanted.saturating_sub(claim.stuck) => Turn::Stuck,
            () if self.beyond(idx, claim.gpus) > 0 => Turn::Borrowed,
            () => Turn::ByRight,
        }
    }

    /// GPUs beyond its budget that the namespace of a claim would have with so many more.
    fn beyond(&self, idx: usize, more: u64) -> u64 {
        let own = |budget: usize| (self.used[budget] + more).saturating_sub(self.budgets[budget].gpus);
        self.budget_of[idx].map_or(0, own)
    }

    fn gpus_of(&self, idx: usize) -> u64 {
        u64::from(self.granted[idx]) * self.claims[idx].gpus
    }

    /// GPUs that all budgets together lack for so many more.
    fn missing(&self, gpus: u64) -> u64 {
        let all: u64 = self.budgets.iter().map(|budget| budget.gpus).sum();
        (self.used.iter().sum::<u64>() + gpus).saturating_sub(all)
    }

    /// Makes room for a claim's next replica, or says who is in its way.
    fn offer(&mut self, idx: usize) -> Result<(), Blocked> {
        let gpus = self.claims[idx].gpus;
        let budget = &self.budgets[self.budget_of[idx].expect("claims without a budget want nothing more")];
        let beyond = self.beyond(idx, gpus);
        if beyond > budget.borrows {
            let own = |other: &usize| self.budget_of[*other] == self.budget_of[idx];
            return Err(Blocked::Spent(self.named(own)));
        }
        let missing = self.missing(gpus);
        if beyond > 0 {
            return self.lend(idx, missing);
        }
        if missing == 0 {
            return Ok(());
        }
        // A replica that there is no room for takes nothing from anybody.
        let takes = self.turn(idx) == Turn::ByRight;
        let given = if takes { self.given_back(budget.priority, missing) } else { None };
        match given {
            Some(given) => {
                given.into_iter().for_each(|idx| self.take_back(idx));
                // It may be more than was needed.
                self.blocked.fill(None);
                Ok(())
            }
            None => Err(Blocked::Lent(self.named(|&other| other != idx && self.beyond(other, 0) > 0))),
        }
    }

    /// Nothing is lent while somebody waits for what is theirs.
    fn lend(&self, idx: usize, missing: u64) -> Result<(), Blocked> {
        let waits = |other: &usize| {
            matches!(self.blocked[*other], Some(Blocked::Lent(_))) && self.turn(*other) == Turn::ByRight
        };
        let owed: Vec<usize> = (0..self.claims.len()).filter(waits).collect();
        if missing == 0 && owed.is_empty() {
            return Ok(());
        }
        if !owed.is_empty() {
            return Err(Blocked::NothingLeft(self.named(|other| owed.contains(other))));
        }
        let others = |other: &usize| self.budget_of[*other] != self.budget_of[idx] && self.budget_of[*other].is_some();
        let borrowers = self.named(|other| others(other) && self.beyond(*other, 0) > 0);
        Err(Blocked::NothingLeft(if borrowers.is_empty() { self.named(others) } else { borrowers }))
    }

    /// Replicas that borrowers of a lower priority give back until so many GPUs are free: of the lowest priority first, then of who
    /// borrowed most. `None`: all of theirs would not do, so nobody gives any.
    fn given_back(&self, priority: i32, missing: u64) -> Option<Vec<usize>> {
        let mut book = self.clone();
        let mut given = Vec::new();
        let mut freed = 0;
        while freed < missing {
            let gives = |idx: &usize| {
                let budget = book.budget_of[*idx].map(|budget| &self.budgets[budget]);
                book.granted[*idx] > 0
                    && book.beyond(*idx, 0) > 0
                    && budget.is_some_and(|budget| budget.priority < priority)
            };
            let line = |idx: &usize| {
                let budget = book.budget_of[*idx].map_or(0, |budget| self.budgets[budget].priority);
                let claim = &self.claims[*idx];
                let is_below_min = book.granted[*idx] <= claim.min;
                (budget, Reverse(book.beyond(*idx, 0)), is_below_min, Reverse(book.gpus_of(*idx)), &claim.name)
            };
            let idx = (0..self.claims.len()).filter(gives).min_by_key(line)?;
            book.take_back(idx);
            freed += self.claims[idx].gpus;
            given.push(idx);
        }
        // A large one that came late may be enough without those before it.
        let mut spare = freed - missing;
        given.retain(|&idx| {
            let is_needed = self.claims[idx].gpus > spare;
            spare -= if is_needed { 0 } else { self.claims[idx].gpus };
            is_needed
        });
        Some(given)
    }

    /// Claims that have something, those with most GPUs first.
    fn named(&self, is_meant: impl Fn(&usize) -> bool) -> Vec<String> {
        let mut all: Vec<usize> = (0..self.claims.len()).filter(is_meant).collect();
        all.sort_by_key(|&idx| (Reverse(self.gpus_of(idx)), &self.claims[idx].namespace, &self.claims[idx].name));
        let named = all.into_iter().take(NAMED).map(|idx| &self.claims[idx]);
        named.map(|claim| format!("{}/{}", claim.namespace, claim.name)).collect()
    }

    fn close(self) -> Vec<Grant> {
        self.granted.into_iter().zip(self.blocked).map(|(replicas, blocked)| Grant { replicas, blocked }).collect()
    }
}
