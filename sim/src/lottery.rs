//! A lottery of worlds: load, replicas, routing and mishaps drawn by seed from wide ranges, so that a rule cannot be made
//! for the worlds that judge it.
//!
//! Owns the ranges. Even seeds are the half on which constants may be chosen; odd seeds are never looked at while
//! choosing, and both are reported. What users were promised is what such replicas can keep at all: where one prompt
//! alone takes longer than the usual SLO, theirs is longer.

use stoker_workload::{HashIds, Request, Rng, Trace};

use crate::{
    fleet::Setting,
    model::{ReplicaModel, Slo},
    world::{Mishaps, Router, World, needed},
};

const SECONDS: f64 = 3600.0;
/// Requests and completion tokens of one world at most, so that hundreds can be simulated in minutes: a large fleet is drawn
/// with replicas on which each token costs more, as those of larger models do, and if that is not enough it is smaller.
const REQUESTS_MAX: f64 = 30_000.0;
const COMPLETION_TOKENS_MAX: f64 = 8e6;
/// Each token costs at most this many times what it does on the replica that was measured.
const DEARER_MAX: f64 = 24.0;
/// Requests from which the mean load of a mix is computed.
const SAMPLES: usize = 400;

/// One world and the bounds in which every rule meets it.
#[derive(Clone, Debug)]
pub struct Drawn {
    /// The world.
    pub world: World,
    /// Bounds, seed and SLO.
    pub setting: Setting,
    /// Mean load in replicas at the edge of the SLO.
    pub need: f64,
    /// Load neither changes nor comes in bursts.
    pub is_constant: bool,
}

/// Draws the world of a seed; another `variant` is the same world on another day: other arrivals, lengths, starts.
pub fn drawn(seed: u64, variant: u64) -> Drawn {
    let mut rng = Rng::seeded(seed.wrapping_mul(0x2545_f491_4f6c_dd1d) ^ 0x0107_7e27);
    let mut replica = replica(&mut rng);
    let mix = Mix::drawn(&mut rng);
    let shape = Shape::drawn(&mut rng);
    let variation = if rng.uniform() < 0.5 { 1.0 } else { between(&mut rng, 1.5, 5.0) };
    let wanted = between(&mut rng, 0.7, 40.0);
    let router = [Router::BestOfTwo, Router::BestOfTwo, Router::Random, Router::LeastRequests][pick(&mut rng, 4)];
    let mishaps = mishaps(&mut rng);
    let room = between(&mut rng, 1.3, 3.0);

    let samples: Vec<Request> =
        (0..SAMPLES).map(|idx| mix.request(idx as f64 / SAMPLES as f64, 0.0, &mut rng)).collect();
    let mean_tokens = samples.iter().map(|request| f64::from(request.completion_tokens)).sum::<f64>() / SAMPLES as f64;
    let rate_max = (REQUESTS_MAX / SECONDS).min(COMPLETION_TOKENS_MAX / mean_tokens / SECONDS);
    let per_rate = |replica: &ReplicaModel| needed(samples.iter(), replica, SAMPLES as f64, slo(&samples, replica));
    let dearer = (wanted / (rate_max * per_rate(&replica))).clamp(1.0, DEARER_MAX);
    replica = dearer_tokens(replica, dearer);
    let (slo, per_rate) = (slo(&samples, &replica), per_rate(&replica));
    let rate = (wanted / per_rate).min(rate_max) / shape.mean();
    let need = rate * shape.mean() * per_rate;

    let mut rng = Rng::seeded(seed ^ variant.wrapping_mul(0x9e6c_63d0_876a_68c5));
    let requests = arrivals(&shape, rate, variation, |at, rng| mix.request(at / SECONDS, at, rng), &mut rng);
    let trace = Trace { name: format!("{seed}"), seconds: SECONDS, requests };
    let max = ((rate * shape.peak() * per_rate * room).ceil() as u32 + 2).clamp(4, 100);
    let world = World { router, mishaps, ..World::of(trace, replica).expect("drawn lengths fit into drawn caches") };
    let is_constant =
        matches!(shape, Shape::Constant) && variation == 1.0 && mix.shifts_at.is_none() && mix.growth == 1.0;
    Drawn { world, setting: Setting { min: 1, max, seed: seed ^ variant, slo }, need, is_constant }
}

/// Log-uniform: as many below the geometric middle as above.
fn between(rng: &mut Rng, low: f64, high: f64) -> f64 {
    low * (high / low).powf(rng.uniform())
}

fn pick(rng: &mut Rng, n: usize) -> usize {
    (rng.uniform() * n as f64) as usize
}

fn replica(rng: &mut Rng) -> ReplicaModel {
    let model = ReplicaModel::default();
    let blocks = (f64::from(model.blocks) * between(rng, 0.12, 2.0)) as u32;
    let start_seconds = between(rng, 5.0, 600.0);
    ReplicaModel { blocks, start_seconds, ..model }.times_as_fast(between(rng, 0.3, 5.0))
}

/// Every token costs more; a step by itself does not.
fn dearer_tokens(replica: ReplicaModel, times: f64) -> ReplicaModel {
    ReplicaModel {
        sequence_seconds: replica.sequence_seconds * times,
        context_token_seconds: replica.context_token_seconds * times,
        prefill_token_seconds: replica.prefill_token_seconds * times,
        prefill_pair_seconds: replica.prefill_pair_seconds * times,
        ..replica
    }
}

fn mishaps(rng: &mut Rng) -> Mishaps {
    let losses_per_hour = if rng.uniform() < 0.2 { between(rng, 0.1, 1.0) } else { 0.0 };
    let slow_share = if rng.uniform() < 0.2 { between(rng, 0.1, 0.3) } else { 0.0 };
    Mishaps { losses_per_hour, slow_share, slow_times: between(rng, 1.3, 2.5) }
}

/// A prompt longer than nineteen of twenty may meet another, and still the SLO can be kept.
fn slo(samples: &[Request], replica: &ReplicaModel) -> Slo {
    let prefill = |request: &Request| {
        replica.prefill_seconds(request.prompt_tokens - request.cached_tokens, request.cached_tokens)
    };
    let mut prefills: Vec<f64> = samples.iter().map(prefill).collect();
    prefills.sort_by(f64::total_cmp);
    let long = prefills[prefills.len() * 19 / 20];
    let usual = Slo::default();
    Slo {
        ttft_seconds: usual.ttft_seconds.max(3.0 * long),
        stall_seconds: usual.stall_seconds.max(3.0 * long),
        ..usual
    }
}

/// How long requests are.
#[derive(Clone, Copy, Debug)]
struct Kind {
    prompt: f64,
    prompt_sigma: f64,
    cached_share: f64,
    completion: f64,
    completion_sigma: f64,
}

/// Turns of a conversation, short questions, code completion, documents, reasoning, agents.
const KINDS: [Kind; 6] = [
    Kind { prompt: 4000.0, prompt_sigma: 0.7, cached_share: 0.88, completion: 400.0, completion_sigma: 0.65 },
    Kind { prompt: 400.0, prompt_sigma: 0.9, cached_share: 0.0, completion: 250.0, completion_sigma: 0.8 },
    Kind { prompt: 1500.0, prompt_sigma: 0.9, cached_share: 0.0, completion: 14.0, completion_sigma: 0.8 },
    Kind { prompt: 15_000.0, prompt_sigma: 0.45, cached_share: 0.3, completion: 350.0, completion_sigma: 0.6 },
    Kind { prompt: 700.0, prompt_sigma: 0.8, cached_share: 0.2, completion: 3000.0, completion_sigma: 0.6 },
    Kind { prompt: 9000.0, prompt_sigma: 0.6, cached_share: 0.93, completion: 120.0, completion_sigma: 0.9 },
];

/// Which requests come: one or two kinds, which may change within the hour, and whose answers may grow.
#[derive(Clone, Debug)]
struct Mix {
    first: Kind,
    other: Kind,
    share_of_other: f64,
    /// From here on the other kind is as frequent as the first was.
    shifts_at: Option<f64>,
    /// How many times as long answers are at the end.
    growth: f64,
}

impl Mix {
    fn drawn(rng: &mut Rng) -> Self {
        let (first, other) = (KINDS[pick(rng, KINDS.len())], KINDS[pick(rng, KINDS.len())]);
        let share_of_other = if rng.uniform() < 0.5 { 0.0 } else { between(rng, 0.02, 0.3) };
        let shifts_at = (rng.uniform() < 0.15).then(|| 0.3 + 0.5 * rng.uniform());
        let growth = if rng.uniform() < 0.15 { between(rng, 1.5, 3.0) } else { 1.0 };
        Self { first, other, share_of_other, shifts_at, growth }
    }

    /// At this share of the hour.
    fn request(&self, share: f64, arrived: f64, rng: &mut Rng) -> Request {
        let is_shifted = self.shifts_at.is_some_and(|at| share >= at);
        let (usual, rare) = if is_shifted { (self.other, self.first) } else { (self.first, self.other) };
        let kind = if rng.uniform() < self.share_of_other { rare } else { usual };
        let prompt = rng.log_normal(kind.prompt, kind.prompt_sigma).clamp(16.0, 40_000.0);
        let growth = 1.0 + (self.growth - 1.0) * share;
        let completion = (growth * rng.log_normal(kind.completion, kind.completion_sigma)).clamp(1.0, 16_000.0);
        Request {
            arrived,
            prompt_tokens: prompt as u32,
            cached_tokens: (prompt * kind.cached_share) as u32,
            completion_tokens: completion as u32,
            hash_ids: HashIds::default(),
        }
    }
}

/// Load over the hour, in multiples of its lowest.
#[derive(Clone, Debug)]
enum Shape {
    Constant,
    /// From 1 to `high` within a stretch, and in half of the worlds back.
    Ramp {
        high: f64,
        begin: f64,
        end: f64,
        back: bool,
    },
    /// A day, from trough to peak to trough.
    Day {
        high: f64,
    },
    /// A square wave.
    OnOff {
        high: f64,
        period: f64,
    },
    /// Crowds that come at once and go at once.
    Flash {
        high: f64,
        crowds: Vec<(f64, f64)>,
    },
}

impl Shape {
    fn drawn(rng: &mut Rng) -> Self {
        match pick(rng, 10) {
            0..=2 => Self::Constant,
            3 | 4 => {
                let begin = SECONDS * 0.4 * rng.uniform();
                let end = begin + SECONDS * (0.05 + 0.45 * rng.uniform());
                Self::Ramp { high: between(rng, 1.5, 6.0), begin, end, back: rng.uniform() < 0.5 }
            }
            5 | 6 => Self::Day { high: between(rng, 2.0, 8.0) },
            7 => Self::OnOff { high: between(rng, 1.5, 4.0), period: between(rng, 180.0, 1500.0) },
            _ => {
                let n = 1 + pick(rng, 3);
                let crowd = |rng: &mut Rng| {
                    let begin = SECONDS * (0.1 + 0.8 * rng.uniform());
                    (begin, begin + between(rng, 60.0, 400.0))
                };
                Self::Flash { high: between(rng, 1.5, 5.0), crowds: (0..n).map(|_| crowd(rng)).collect() }
            }
        }
    }

    fn at(&self, at: f64) -> f64 {
        match self {
            Self::Constant => 1.0,
            Self::Ramp { high, begin, end, back } => {
                let up = ((at - begin) / (end - begin)).clamp(0.0, 1.0);
                let down = if *back { ((at - end) / (SECONDS - end).max(1.0)).clamp(0.0, 1.0) } else { 0.0 };
                1.0 + (high - 1.0) * (up - down)
            }
            Self::Day { high } => 1.0 + (high - 1.0) * (0.5 - 0.5 * (at / SECONDS * std::f64::consts::TAU).cos()),
            Self::OnOff { high, period } => {
                if (at / period * 2.0) as u64 % 2 == 1 {
                    *high
                } else {
                    1.0
                }
            }
            Self::Flash { high, crowds } => {
                if crowds.iter().any(|(from, to)| (*from..*to).contains(&at)) {
                    *high
                } else {
                    1.0
                }
            }
        }
    }

    fn mean(&self) -> f64 {
        (0..SECONDS as u32).map(|second| self.at(f64::from(second))).sum::<f64>() / SECONDS
    }

    fn peak(&self) -> f64 {
        (0..SECONDS as u32).map(|second| self.at(f64::from(second))).fold(0.0, f64::max)
    }
}

/// Gaps of a Gamma distribution, which a changing rate stretches and shrinks.
fn arrivals(
    shape: &Shape,
    rate: f64,
    variation: f64,
    request: impl Fn(f64, &mut Rng) -> Request,
    rng: &mut Rng,
) -> Vec<Request> {
    let gamma = 1.0 / (variation * variation);
    let gap = |rng: &mut Rng| if variation == 1.0 { rng.exponential() } else { rng.gamma(gamma) };
    let mut requests = Vec::new();
    // Somewhere within the first gap, and not at its end: a long one is more likely to be met.
    let mut at = rng.uniform() * gap(rng) / (rate * shape.at(0.0));
    while at < SECONDS {
        requests.push(request(at, rng));
        let mut left = gap(rng);
        // The rate may change within a long gap.
        while left > 0.0 && at < SECONDS {
            let (pace, until) = (rate * shape.at(at), at + 1.0);
            let step = (left / pace).min(until - at);
            left = if step < until - at { 0.0 } else { left - step * pace };
            at += step;
        }
    }
    requests
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_world_is_its_seed_and_a_variant_only_another_day() {
        let (one, again, other_day) = (drawn(4, 0), drawn(4, 0), drawn(4, 1));
        assert_eq!(one.world, again.world);
        assert_eq!((&one.world.replica, one.world.router), (&other_day.world.replica, other_day.world.router));
        assert_ne!(one.world.trace.requests, other_day.world.trace.requests);
    }

    #[test]
    fn worlds_keep_their_ranges_and_differ() {
        let worlds: Vec<Drawn> = (0..60).map(|seed| drawn(seed, 0)).collect();
        for Drawn { world, setting, need, .. } in &worlds {
            assert!(world.trace.requests.is_sorted_by_key(|request| request.arrived));
            assert!(!world.trace.requests.is_empty() && world.trace.requests.len() < 60_000);
            assert!((4..=100).contains(&setting.max) && *need > 0.0 && *need <= 40.0, "{need}");
            assert!((5.0..=600.0).contains(&world.replica.start_seconds));
        }
        let large = worlds.iter().filter(|drawn| drawn.need > 8.0).count();
        let small = worlds.iter().filter(|drawn| drawn.need < 2.0).count();
        assert!(large >= 6 && small >= 12, "{large} large, {small} small");
    }
}
