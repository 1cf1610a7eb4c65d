//! Who knows what comes: the requests of the whole world, the replicas' true speed, and how long a start takes.
//!
//! It orders in time what the next start time will need, gives away at once what nobody will need by then, and is told
//! with hindsight by how much to multiply. So its GPU-hours bound from below what a rule without foresight can hope for; it
//! is no optimum, only one that nobody can complain about.

use crate::{
    fleet::{Rule, Setting, View, simulate},
    outcome::Outcomes,
    world::{World, needed},
};

/// Load is known by the slice of this many seconds.
const SLICE_SECONDS: f64 = 10.0;
/// The factors that hindsight chooses from, from the cheapest.
const FACTORS: [f64; 12] = [0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.15, 1.3, 1.5, 1.8, 2.3, 3.0];
/// A start takes longer than this many standard deviations of its logarithm above the median once in forty.
const START_DEVIATIONS: f64 = 2.0;

/// See the module.
#[derive(Clone, Debug)]
pub struct Oracle {
    wanted: Vec<u32>,
}

impl Oracle {
    /// Knows this world, and keeps this many times what its load is.
    pub fn of(world: &World, factor: f64, setting: &Setting) -> Self {
        let needs = needs(world, setting);
        let replica = &world.replica;
        let start = replica.start_seconds * (START_DEVIATIONS * replica.start_sigma).exp();
        let ahead = (start / SLICE_SECONDS).ceil() as usize + 1;
        let wanted = |idx: usize| {
            let coming = &needs[idx..(idx + ahead + 1).min(needs.len())];
            let most = coming.iter().copied().fold(0.0, f64::max);
            ((factor * most - 1e-9).ceil() as u32).max(1)
        };
        Self { wanted: (0..needs.len()).map(wanted).collect() }
    }
}

/// Replicas at the edge of the SLO, by slice.
fn needs(world: &World, setting: &Setting) -> Vec<f64> {
    let n_slices = (world.trace.seconds / SLICE_SECONDS).ceil() as usize + 1;
    let mut slices = vec![Vec::new(); n_slices];
    for request in &world.trace.requests {
        slices[(request.arrived / SLICE_SECONDS) as usize].push(request);
    }
    let need = |slice: &Vec<_>| needed(slice.iter().copied(), &world.replica, SLICE_SECONDS, setting.slo);
    let arriving: Vec<f64> = slices.iter().map(need).collect();
    // What arrived is still there for as long as its answer takes.
    let stays = |world: &World| {
        let tokens: u64 = world.trace.requests.iter().map(|request| u64::from(request.completion_tokens)).sum();
        tokens as f64 / world.trace.requests.len().max(1) as f64 * setting.slo.itl_seconds / 2.0
    };
    let keep = (-SLICE_SECONDS / stays(world).max(1e-3)).exp();
    let mut present = arriving[0];
    let smooth = |arriving: &f64| {
        present = present * keep + arriving * (1.0 - keep);
        present
    };
    arriving.iter().map(smooth).collect()
}

impl Rule for Oracle {
    fn look(&mut self, view: &View<'_>) -> Option<u32> {
        let idx = (view.now / SLICE_SECONDS) as usize;
        self.wanted.get(idx).copied()
    }
}

/// What the oracle comes to with each factor, cheapest first: with the first that has no more late answers than a rule,
/// that rule is compared.
pub fn foreseen(world: &World, setting: &Setting) -> Vec<(f64, Outcomes)> {
    let run = |factor: f64| (factor, simulate(world, &mut Oracle::of(world, factor, setting), setting));
    let mut runs: Vec<(f64, Outcomes)> = Vec::new();
    for factor in FACTORS {
        runs.push(run(factor));
        // More would cost more and help nobody.
        if runs.last().is_some_and(|(_, outcomes)| outcomes.misses == 0) {
            break;
        }
    }
    runs.sort_by(|(_, a), (_, b)| a.gpu_seconds.total_cmp(&b.gpu_seconds));
    runs
}
