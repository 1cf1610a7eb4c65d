//! Each rule at its best within the same GPU-hours.
//!
//! Owns the search: a rule that needs a target gets the one with the fewest broken promises among all tried whose
//! GPU-hours are at most ours. That is hindsight in its favour, trace by trace; ours runs with its defaults.

use super::{
    fleet::{Rule, Setting, simulate},
    outcome::Outcomes,
    rules::{HpaQueue, Kpa, Wva},
    trace::Trace,
};

/// GPU-hours that still count as equal.
pub const EQUAL_WITHIN: f64 = 0.02;
const GRID_POINTS: u32 = 10;
const BISECTIONS: u32 = 6;

/// A rule that ours is compared with.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Rival {
    /// See [`HpaQueue`].
    HpaQueue,
    /// See [`Kpa`].
    Kpa,
    /// See [`Wva`].
    Wva,
}

/// A rival at its best.
#[derive(Clone, Debug)]
pub struct Tuned {
    /// Which one.
    pub rival: Rival,
    /// Its target.
    pub target: f64,
    /// What it came to.
    pub outcomes: Outcomes,
    /// Its cheapest setting still costs more than ours.
    pub is_dearer: bool,
}

impl Rival {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::HpaQueue, Self::Kpa, Self::Wva];

    /// Its name in commands and figures.
    pub fn name(self) -> &'static str {
        match self {
            Self::HpaQueue => "hpa-queue",
            Self::Kpa => "kpa",
            Self::Wva => "wva",
        }
    }

    /// The rival of a name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|rival| rival.name() == name)
    }

    /// Targets from the dearest to the cheapest that make sense.
    fn range(self) -> (f64, f64) {
        match self {
            Self::HpaQueue => (0.02, 500.0),
            Self::Kpa => (1.0, 500.0),
            Self::Wva => (0.101, 1.0),
        }
    }

    fn rule(self, target: f64) -> Box<dyn Rule> {
        match self {
            Self::HpaQueue => Box::new(HpaQueue::new(target)),
            Self::Kpa => Box::new(Kpa::new(target)),
            Self::Wva => Box::new(Wva::new(target)),
        }
    }

    fn run(self, target: f64, trace: &Trace, setting: &Setting) -> Run {
        Run { target, outcomes: simulate(trace, self.rule(target).as_mut(), setting) }
    }

    /// Finds its best setting within `gpu_hours`.
    pub fn tuned(self, trace: &Trace, setting: &Setting, gpu_hours: f64) -> Tuned {
        let limit = gpu_hours * (1.0 + EQUAL_WITHIN);
        let (dear, cheap) = self.range();
        let at = |share: f64| dear * (cheap / dear).powf(share);
        let grid = (0..GRID_POINTS).map(|idx| f64::from(idx) / f64::from(GRID_POINTS - 1));
        let mut runs: Vec<Run> = grid.map(|share| self.run(at(share), trace, setting)).collect();
        runs.extend(self.bisected(&runs, limit, trace, setting));
        self.best_of(runs, limit)
    }

    /// Between the cheapest setting that costs too much and the next cheaper one, the edge is found.
    fn bisected(self, grid: &[Run], limit: f64, trace: &Trace, setting: &Setting) -> Vec<Run> {
        let Some(edge) = grid.iter().rposition(|run| run.outcomes.gpu_hours() > limit) else { return Vec::new() };
        let Some(next) = grid.get(edge + 1) else { return Vec::new() };
        let (mut dear, mut cheap) = (grid[edge].target, next.target);
        let mut runs = Vec::new();
        for _ in 0..BISECTIONS {
            let run = self.run((dear * cheap).sqrt(), trace, setting);
            let end = if run.outcomes.gpu_hours() > limit { &mut dear } else { &mut cheap };
            *end = run.target;
            runs.push(run);
        }
        runs
    }

    fn best_of(self, runs: Vec<Run>, limit: f64) -> Tuned {
        let affordable = |run: &Run| run.outcomes.gpu_hours() <= limit;
        let is_dearer = !runs.iter().any(affordable);
        let best = if is_dearer {
            runs.into_iter().min_by(|a, b| a.outcomes.gpu_seconds.total_cmp(&b.outcomes.gpu_seconds))
        } else {
            runs.into_iter().filter(affordable).min_by_key(|run| run.outcomes.misses)
        };
        let Run { target, outcomes } = best.expect("the grid is not empty");
        Tuned { rival: self, target, outcomes, is_dearer }
    }
}

struct Run {
    target: f64,
    outcomes: Outcomes,
}
