//! Our rule and its rivals over the same traces at the same GPU-hours.
//!
//! Owns the search for the rivals' targets, twice. *One target*: like ours, a rule has one setting for everything; it is
//! the one with the fewest late answers among those whose GPU-hours, summed over the traces, are at most ours.
//! *Hindsight*: for each trace alone the best setting within our GPU-hours there, which nobody has who does not know
//! the day before it begins. Ours runs with its defaults in both.

use std::sync::{
    Mutex,
    atomic::{AtomicUsize, Ordering},
};

use stoker_scaling::{DecisionRecord, ScalingSpec};

use crate::{
    fleet::{SAMPLE_SECONDS, Setting, simulate},
    oracle::foreseen,
    outcome::{Outcomes, Sample},
    peer_rule::PeerRule,
    plot::{Panel, Series},
    rules::Stoker,
    world::World,
};

/// GPU-hours that still count as equal.
pub const EQUAL_WITHIN: f64 = 0.02;
/// Name of our rule in figures.
pub const STOKER: &str = "stoker";

/// A few percent beside a threshold that serves everybody another may serve nobody, so that the grid must be fine: with 24
/// points the best found for KPA answered a third more requests late.
const GRID_POINTS: u32 = 60;
const BISECTIONS: u32 = 4;
/// Points tried between the best one and each of its neighbours.
const FINE_POINTS: u32 = 4;

/// A rival at its best.
#[derive(Clone, Debug)]
pub struct Tuned {
    /// Which one, with what was given of its knobs.
    pub rival: String,
    /// Its target.
    pub target: f64,
    /// What it came to.
    pub outcomes: Outcomes,
    /// Its cheapest setting still costs more than ours.
    pub is_dearer: bool,
}

/// How far the search for a rival's targets is.
#[derive(Clone, Debug)]
pub struct Progress {
    /// Whose.
    pub rival: String,
    /// Simulations of the grid that are done.
    pub done: usize,
    /// Simulations of the grid.
    pub of: usize,
}

/// One trace under our rule and each rival.
#[derive(Clone, Debug)]
pub struct Comparison {
    /// Name of the trace.
    pub trace: String,
    /// It says what prompts share, so that replicas looked for it in their caches.
    pub names_prefixes: bool,
    /// What ours came to.
    pub ours: Outcomes,
    /// What somebody who knew the load would have come to with no more late answers than ours; `None` where even that one
    /// had more.
    pub oracle: Option<Outcomes>,
    /// The rivals with one target for all traces.
    pub one_target: Vec<Tuned>,
    /// The rivals with the best target for this trace.
    pub hindsight: Vec<Tuned>,
}

/// Runs everything: one comparison a trace. `progress` hears of every simulation of a grid, from any thread.
pub fn compare(
    worlds: &[World],
    spec: &ScalingSpec,
    rivals: &[PeerRule],
    setting: &Setting,
    progress: &(dyn Fn(Progress) + Sync),
) -> Vec<Comparison> {
    let ours = in_parallel(worlds, |world| run_ours(world, spec, setting).0);
    let pairs: Vec<_> = worlds.iter().zip(&ours).collect();
    let oracles = in_parallel(&pairs, |(world, ours)| oracle(world, ours, setting));
    let mut comparisons: Vec<Comparison> = pairs
        .into_iter()
        .zip(oracles)
        .map(|((world, ours), oracle)| Comparison {
            trace: world.trace.name.clone(),
            names_prefixes: world.trace.requests.iter().any(|request| !request.hash_ids.is_empty()),
            ours: ours.clone(),
            oracle,
            one_target: Vec::new(),
            hindsight: Vec::new(),
        })
        .collect();
    for rival in rivals {
        let search = Search { rival, worlds, setting, progress };
        let gpu_hours = ours.iter().map(Outcomes::gpu_hours).sum();
        let tried = search.tried(gpu_hours);
        let one = search.one_target(&tried, gpu_hours);
        let each = search.hindsight(&tried, &ours);
        for (comparison, (one, best)) in comparisons.iter_mut().zip(one.into_iter().zip(each)) {
            comparison.one_target.push(one);
            comparison.hindsight.push(best);
        }
    }
    comparisons
}

/// Our rule alone: what it came to, and its decisions.
pub fn run_ours(world: &World, spec: &ScalingSpec, setting: &Setting) -> (Outcomes, Vec<DecisionRecord>) {
    let mut rule = Stoker::new(spec.clone(), world.initial.clamp(setting.min, setting.max));
    let outcomes = simulate(world, &mut rule, setting);
    (outcomes, rule.into_records())
}

/// The cheapest that somebody who knows the load does with no more late answers.
fn oracle(world: &World, ours: &Outcomes, setting: &Setting) -> Option<Outcomes> {
    let runs = foreseen(world, setting);
    runs.into_iter().map(|(_, outcomes)| outcomes).find(|outcomes| outcomes.misses <= ours.misses)
}

/// One setting and what it came to on every trace.
struct Tried {
    target: f64,
    outcomes: Vec<Outcomes>,
}

impl Tried {
    fn gpu_hours(&self) -> f64 {
        self.outcomes.iter().map(Outcomes::gpu_hours).sum()
    }

    fn misses(&self) -> u64 {
        self.outcomes.iter().map(|outcomes| outcomes.misses).sum()
    }

    fn preemptions(&self) -> u64 {
        self.outcomes.iter().map(|outcomes| outcomes.preemptions).sum()
    }
}

struct Search<'a> {
    rival: &'a PeerRule,
    worlds: &'a [World],
    setting: &'a Setting,
    progress: &'a (dyn Fn(Progress) + Sync),
}

impl Search<'_> {
    fn try_target(&self, target: f64) -> Tried {
        Tried { target, outcomes: in_parallel(self.worlds, |world| self.run(target, world)) }
    }

    fn run(&self, target: f64, world: &World) -> Outcomes {
        simulate(world, self.rival.rule(target).as_mut(), self.setting)
    }

    /// A grid, settings around the cheapest one that costs too much, and settings around the best.
    fn tried(&self, gpu_hours: f64) -> Vec<Tried> {
        if let Some(target) = self.rival.target() {
            return vec![self.try_target(target)];
        }
        let mut tried = self.grid();
        let points: Vec<_> = tried.iter().map(|tried| (tried.target, tried.gpu_hours())).collect();
        bisect(&points, limit(gpu_hours), |target| {
            tried.push(self.try_target(target));
            tried.last().map_or(0.0, Tried::gpu_hours)
        });
        if let Some(best) = best(&tried, gpu_hours) {
            let around = around(best.target, tried.iter().map(|tried| tried.target));
            tried.extend(around.into_iter().map(|target| self.try_target(target)));
        }
        tried
    }

    /// All simulations of the grid at once, so that no core waits for the longest trace of a target.
    fn grid(&self) -> Vec<Tried> {
        let (dear, cheap) = self.rival.kind.range();
        let target = |idx: u32| dear * (cheap / dear).powf(f64::from(idx) / f64::from(GRID_POINTS - 1));
        let targets: Vec<f64> = (0..GRID_POINTS).map(target).collect();
        let pairs: Vec<(f64, &World)> =
            targets.iter().flat_map(|target| self.worlds.iter().map(|world| (*target, world))).collect();
        let done = AtomicUsize::new(0);
        let outcomes = in_parallel(&pairs, |(target, world)| {
            let outcomes = self.run(*target, world);
            let done = done.fetch_add(1, Ordering::Relaxed) + 1;
            (self.progress)(Progress { rival: self.rival.label(), done, of: pairs.len() });
            outcomes
        });
        let of_targets = outcomes.chunks(self.worlds.len());
        targets.iter().zip(of_targets).map(|(target, all)| Tried { target: *target, outcomes: all.to_vec() }).collect()
    }

    fn one_target(&self, tried: &[Tried], gpu_hours: f64) -> Vec<Tuned> {
        let best = best(tried, gpu_hours);
        let cheapest = || tried.iter().min_by(|a, b| a.gpu_hours().total_cmp(&b.gpu_hours()));
        let Tried { target, outcomes } = best.or_else(cheapest).expect("the grid is not empty");
        outcomes
            .iter()
            .map(|outcomes| Tuned {
                rival: self.rival.label(),
                target: *target,
                outcomes: outcomes.clone(),
                is_dearer: best.is_none(),
            })
            .collect()
    }

    fn hindsight(&self, tried: &[Tried], ours: &[Outcomes]) -> Vec<Tuned> {
        let indices: Vec<usize> = (0..self.worlds.len()).collect();
        in_parallel(&indices, |idx| self.best_on(*idx, tried, ours[*idx].gpu_hours()))
    }

    fn best_on(&self, idx: usize, tried: &[Tried], gpu_hours: f64) -> Tuned {
        let of_trace = |tried: &Tried| Tried { target: tried.target, outcomes: vec![tried.outcomes[idx].clone()] };
        let mut runs: Vec<Tried> = tried.iter().map(of_trace).collect();
        runs.sort_by(|a, b| a.target.total_cmp(&b.target));
        let alone = Search { worlds: &self.worlds[idx..=idx], ..*self };
        if self.rival.target().is_some() {
            return alone.one_target(&runs, gpu_hours).remove(0);
        }
        let points: Vec<_> = runs.iter().map(|run| (run.target, run.gpu_hours())).collect();
        bisect(&points, limit(gpu_hours), |target| {
            runs.push(alone.try_target(target));
            runs.last().map_or(0.0, Tried::gpu_hours)
        });
        if let Some(best) = best(&runs, gpu_hours) {
            let around = around(best.target, runs.iter().map(|run| run.target));
            runs.extend(around.into_iter().map(|target| alone.try_target(target)));
        }
        alone.one_target(&runs, gpu_hours).remove(0)
    }
}

/// The setting with the fewest late answers among those within the budget.
fn best(tried: &[Tried], gpu_hours: f64) -> Option<&Tried> {
    let affordable = tried.iter().filter(|tried| tried.gpu_hours() <= limit(gpu_hours));
    let late = |tried: &Tried| (tried.misses(), tried.preemptions());
    affordable.min_by(|a, b| late(a).cmp(&late(b)).then(a.gpu_hours().total_cmp(&b.gpu_hours())))
}

/// Targets between the best and the next ones below and above it.
fn around(best: f64, tried: impl Iterator<Item = f64> + Clone) -> Vec<f64> {
    let below = tried.clone().filter(|target| *target < best).max_by(f64::total_cmp);
    let above = tried.filter(|target| *target > best).min_by(f64::total_cmp);
    let step = |next: f64, idx: u32| best * (next / best).powf(f64::from(idx) / f64::from(FINE_POINTS + 1));
    below.into_iter().chain(above).flat_map(|next| (1..=FINE_POINTS).map(move |idx| step(next, idx))).collect()
}

fn limit(gpu_hours: f64) -> f64 {
    gpu_hours * (1.0 + EQUAL_WITHIN)
}

/// Looks for the edge of what is affordable between the cheapest point that is not and the next one.
fn bisect(points: &[(f64, f64)], limit: f64, mut hours: impl FnMut(f64) -> f64) {
    let Some(edge) = points.iter().rposition(|(_, hours)| *hours > limit) else { return };
    let Some((next, _)) = points.get(edge + 1) else { return };
    let (mut dear, mut cheap) = (points[edge].0, *next);
    for _ in 0..BISECTIONS {
        let target = (dear * cheap).sqrt();
        let end = if hours(target) > limit { &mut dear } else { &mut cheap };
        *end = target;
    }
}

/// Does the same to every item, on all cores, and keeps the order.
pub(crate) fn in_parallel<T: Sync, R: Send>(items: &[T], run: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let n_threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get).min(items.len());
    let todo = Mutex::new((0..items.len()).rev().collect::<Vec<_>>());
    let done = Mutex::new(Vec::with_capacity(items.len()));
    let next = || todo.lock().expect("no thread panics").pop();
    std::thread::scope(|scope| {
        for _ in 0..n_threads {
            scope.spawn(|| {
                while let Some(idx) = next() {
                    let result = run(&items[idx]);
                    done.lock().expect("no thread panics").push((idx, result));
                }
            });
        }
    });
    let mut done = done.into_inner().expect("no thread panics");
    done.sort_by_key(|(idx, _)| *idx);
    done.into_iter().map(|(_, result)| result).collect()
}

impl Comparison {
    /// Every rule with one target, ours first.
    pub fn with_one_target(&self) -> impl Iterator<Item = (&str, &Outcomes)> {
        self.ours_and(&self.one_target)
    }

    /// Every rule at its best on this trace, ours first.
    pub fn with_hindsight(&self) -> impl Iterator<Item = (&str, &Outcomes)> {
        self.ours_and(&self.hindsight)
    }

    fn ours_and<'a>(&'a self, rivals: &'a [Tuned]) -> impl Iterator<Item = (&'a str, &'a Outcomes)> {
        let rivals = rivals.iter().map(|tuned| (tuned.rival.as_str(), &tuned.outcomes));
        std::iter::once((STOKER, &self.ours)).chain(rivals)
    }

    /// Replicas, KV usage, late answers and preemptions over time, the rivals with one target.
    pub fn panels(&self) -> Vec<Panel> {
        let panel = |label: &str, value: fn(&Sample) -> f64| Panel {
            label: label.to_owned(),
            series: self.with_one_target().map(|(name, outcomes)| series(name, outcomes, value)).collect(),
        };
        let arrivals = Panel {
            label: "requests per second".to_owned(),
            series: vec![series(STOKER, &self.ours, |sample| f64::from(sample.arrivals) / SAMPLE_SECONDS)],
        };
        vec![
            arrivals,
            panel("replicas that cost money", |sample| f64::from(sample.members)),
            panel("KV blocks referenced, share", |sample| sample.kv),
            panel("late answers per 10 s", |sample| f64::from(sample.misses)),
            panel("preemptions so far", |sample| sample.preemptions as f64),
        ]
    }
}

fn series(name: &str, outcomes: &Outcomes, value: fn(&Sample) -> f64) -> Series {
    Series { name: name.to_owned(), points: outcomes.samples.iter().map(|sample| (sample.at, value(sample))).collect() }
}
