//! What a rule came to over the worlds of a lottery, beside who knew what came and beside rivals with one setting.
//!
//! Owns the measures. A rival is judged at the setting that has the fewest late answers of all worlds together within our
//! GPU-hours, as a team would set it that has many deployments; the oracle at no more late answers than ours, world by
//! world.

use std::collections::BTreeMap;

use crate::{
    compare::{EQUAL_WITHIN, in_parallel, run_ours},
    fleet::simulate,
    lottery::{Drawn, drawn},
    oracle::foreseen,
    outcome::Outcomes,
    peer_rule::{Kind, PeerRule},
};
use stoker_scaling::{Replay, ScalingSpec};

/// Targets tried for each rival, from its dearest to its cheapest.
const TARGETS: u32 = 9;
/// After this many seconds a constant load should have what it needs.
const SETTLED_SECONDS: f64 = 900.0;

/// What a rule came to in one world.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Came {
    /// Late answers.
    pub late: u64,
    /// GPU-hours.
    pub hours: f64,
    /// Sequences thrown out.
    pub preemptions: u64,
}

impl Came {
    fn to(outcomes: &Outcomes) -> Self {
        Self { late: outcomes.misses, hours: outcomes.gpu_hours(), preemptions: outcomes.preemptions }
    }
}

/// Ours in one world.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ours {
    /// What it came to.
    pub came: Came,
    /// Requests answered.
    pub requests: u64,
    /// Reversals per hour.
    pub reversals: f64,
    /// Mean replicas once a constant load had a quarter of an hour; `None` where load is not constant.
    pub settled: Option<f64>,
}

/// What others came to in one world, by label: `oracle` with each factor, each rival with each target. Independent of ours,
/// so it can be kept while ours changes.
pub type Others = BTreeMap<String, Vec<(f64, Came)>>;

/// Label of who knows what comes.
pub const ORACLE: &str = "oracle";

/// Ours with its defaults in the world of a seed.
pub fn ours(seed: u64, variant: u64) -> Ours {
    let drawn = drawn(seed, variant);
    let spec = ScalingSpec::between(drawn.setting.min, drawn.setting.max);
    let (outcomes, records) = run_ours(&drawn.world, &spec, &drawn.setting);
    let is_same = |replay| replay == Replay::Identical;
    assert!(
        records.iter().step_by(97).all(|record| is_same(record.replay())),
        "world {seed}: a decision is not replayed"
    );
    Ours {
        came: Came::to(&outcomes),
        requests: outcomes.requests,
        reversals: outcomes.reversals_per_hour(),
        settled: drawn.is_constant.then(|| settled(&outcomes)),
    }
}

fn settled(outcomes: &Outcomes) -> f64 {
    let late = outcomes.samples.iter().filter(|sample| sample.at > SETTLED_SECONDS);
    let (n, sum) = late.fold((0.0, 0.0), |(n, sum), sample| (n + 1.0, sum + f64::from(sample.desired)));
    sum / f64::max(n, 1.0)
}

/// The oracle, and every rival with every target, in the world of a seed.
pub fn others(seed: u64, with_rivals: bool) -> Others {
    let Drawn { world, setting, .. } = drawn(seed, 0);
    let runs = foreseen(&world, &setting);
    let oracle = runs.iter().map(|(factor, outcomes)| (*factor, Came::to(outcomes))).collect();
    let mut others = Others::from([(ORACLE.to_owned(), oracle)]);
    for kind in Kind::ALL.into_iter().filter(|_| with_rivals) {
        let rival = PeerRule::plain(kind);
        let run = |target: f64| (target, Came::to(&simulate(&world, rival.rule(target).as_mut(), &setting)));
        others.insert(kind.name().to_owned(), targets(kind).map(run).collect());
    }
    others
}

fn targets(kind: Kind) -> impl Iterator<Item = f64> {
    let (dear, cheap) = kind.range();
    (0..TARGETS).map(move |idx| dear * (cheap / dear).powf(f64::from(idx) / f64::from(TARGETS - 1)))
}

/// The same to every seed, on all cores, in order.
pub fn for_each<R: Send>(seeds: &[u64], run: impl Fn(u64) -> R + Sync) -> Vec<R> {
    in_parallel(seeds, |seed| run(*seed))
}

/// One world with everybody in it.
#[derive(Clone, Debug)]
pub struct Played {
    /// Its seed.
    pub seed: u64,
    /// Ours on this day and on others.
    pub ours: Vec<Ours>,
    /// The others on this day.
    pub others: Others,
}

/// A line of the report.
#[derive(Clone, Debug, PartialEq)]
pub struct Measure {
    /// Name of the figure.
    pub metric: &'static str,
    /// What it is of.
    pub words: String,
    /// The number.
    pub value: f64,
}

impl Played {
    fn today(&self) -> Ours {
        self.ours[0]
    }

    /// The cheapest oracle with no more late answers than ours.
    pub fn oracle(&self) -> Option<Came> {
        let runs = self.others.get(ORACLE)?.iter().map(|(_, came)| *came);
        runs.filter(|came| came.late <= self.today().came.late).min_by(|a, b| a.hours.total_cmp(&b.hours))
    }

    /// Our hours over those of the oracle.
    pub fn over_oracle(&self) -> Option<f64> {
        self.oracle().map(|oracle| self.today().came.hours / oracle.hours)
    }

    fn spread(&self) -> f64 {
        let hours = || self.ours.iter().map(|ours| ours.came.hours);
        hours().fold(0.0, f64::max) / hours().fold(f64::INFINITY, f64::min)
    }
}

/// Everything that is measured over these worlds.
pub fn measures(played: &[Played]) -> Vec<Measure> {
    let mut measures = Vec::new();
    let mut add = |metric, words: &str, value| measures.push(Measure { metric, words: words.to_owned(), value });
    let sum = |of: fn(Ours) -> f64| played.iter().map(|played| of(played.today())).sum::<f64>();
    add("worlds", "worlds", played.len() as f64);
    add(
        "late_percent",
        "late answers, percent of all",
        100.0 * sum(|ours| ours.came.late as f64) / sum(|ours| ours.requests as f64),
    );
    add("gpu_hours", "GPU-hours", sum(|ours| ours.came.hours));
    let mut over: Vec<f64> = played.iter().filter_map(Played::over_oracle).collect();
    add(
        "hours_over_oracle_p50",
        "GPU-hours over the oracle's at no more late answers, median",
        percentile(&mut over, 0.5),
    );
    add("hours_over_oracle_p95", "the same, 95th percentile of worlds", percentile(&mut over, 0.95));
    add(
        "oracle_later",
        "worlds in which every oracle has more late answers than ours",
        (played.len() - over.len()) as f64,
    );
    let mut spreads: Vec<f64> = played.iter().map(Played::spread).collect();
    add(
        "spread_by_day_p95",
        "GPU-hours on the dearest day over the cheapest of one world, 95th percentile",
        percentile(&mut spreads, 0.95),
    );
    let above = |played: &Played| Some(played.today().settled? - played.oracle()?.hours);
    let mut above: Vec<f64> = played.iter().filter_map(above).collect();
    add(
        "constant_above_need_max",
        "constant load: replicas above the oracle's after 15 minutes, most",
        percentile(&mut above, 1.0),
    );
    add("constant_above_need_p50", "the same, median", percentile(&mut above, 0.5));
    let mut reversals: Vec<f64> = played.iter().map(|played| played.today().reversals).collect();
    add("reversals_per_hour_p95", "reversals an hour, 95th percentile", percentile(&mut reversals, 0.95));
    measures.extend(against_rivals(played));
    measures
}

fn against_rivals(played: &[Played]) -> Vec<Measure> {
    let ours = |played: &Played| played.today().came;
    let late: u64 = played.iter().map(|played| ours(played).late).sum();
    let preemptions: u64 = played.iter().map(|played| ours(played).preemptions).sum();
    let hours: f64 = played.iter().map(|played| ours(played).hours).sum();
    let best = |kind: &Kind| {
        let runs = |played: &Played, idx: usize| played.others.get(kind.name()).map(|runs| runs[idx].1);
        let all = |idx: usize| played.iter().map(|played| runs(played, idx)).collect::<Option<Vec<Came>>>();
        let tried = (0..TARGETS as usize).filter_map(all);
        let affordable =
            tried.filter(|came| came.iter().map(|came| came.hours).sum::<f64>() <= hours * (1.0 + EQUAL_WITHIN));
        let late = |came: &Vec<Came>| came.iter().map(|came| came.late).sum::<u64>();
        affordable.min_by_key(late).map(|came| (late(&came), kind.name(), came))
    };
    let rivals: Vec<_> = Kind::ALL.iter().filter_map(best).collect();
    let Some((best_late, name, _)) = rivals.iter().min_by_key(|(late, ..)| *late) else { return Vec::new() };
    let thrown = |came: &[Came]| came.iter().map(|came| came.preemptions).sum::<u64>();
    let fewest = rivals.iter().map(|(.., came)| thrown(came)).min().unwrap_or_default();
    let is_lost = |idx: usize| {
        let mine = ours(&played[idx]);
        rivals.iter().any(|(.., came)| came[idx].late < mine.late && came[idx].hours <= mine.hours)
    };
    let lost = (0..played.len()).filter(|idx| is_lost(*idx)).count();
    let lines = rivals.iter().map(|(late, name, came)| {
        format!("{name}: {late} late in {:.0} h", came.iter().map(|came| came.hours).sum::<f64>())
    });
    let lines: Vec<String> = lines.collect();
    vec![
        Measure {
            metric: "late_over_best_rival",
            words: format!(
                "late answers ({late}) over those of {name} with one setting at equal hours ({})",
                lines.join("; ")
            ),
            value: late as f64 / (*best_late).max(1) as f64,
        },
        Measure {
            metric: "preemptions_over_fewest",
            words: format!("preemptions ({preemptions}) over the fewest of a rival"),
            value: preemptions as f64 / fewest.max(1) as f64,
        },
        Measure {
            metric: "worlds_lost_share",
            words: "share of worlds in which one of them has fewer late answers at no more hours".to_owned(),
            value: lost as f64 / played.len().max(1) as f64,
        },
    ]
}

/// Nearest rank; 0 of nothing.
fn percentile(values: &mut [f64], share: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let rank = (share * values.len() as f64).ceil() as usize;
    values.get(rank.saturating_sub(1)).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn played(late: u64, hours: f64, others: &[(&str, &[(u64, f64)])]) -> Played {
        let came = |late, hours| Came { late, hours, preemptions: 0 };
        let ours = Ours { came: came(late, hours), requests: 100, reversals: 0.0, settled: None };
        let others = others.iter().map(|(name, runs)| {
            let runs = runs.iter().map(|(late, hours)| (1.0, came(*late, *hours)));
            ((*name).to_owned(), runs.collect())
        });
        Played { seed: 0, ours: vec![ours], others: others.collect() }
    }

    #[test]
    fn the_oracle_is_the_cheapest_with_no_more_late_answers() {
        let world = played(5, 6.0, &[(ORACLE, &[(9, 2.0), (5, 3.0), (0, 4.0)])]);
        assert_eq!(world.over_oracle(), Some(2.0));
        assert_eq!(played(0, 6.0, &[(ORACLE, &[(9, 2.0)])]).over_oracle(), None);
    }

    #[test]
    fn a_rival_has_one_setting_for_all_worlds_within_our_hours() {
        let nine = |runs: [(u64, f64); 2]| [[runs[0]; 8].as_slice(), &[runs[1]]].concat();
        // The first setting is too dear in all; the last is affordable and better in the second world only.
        let (one, other) = (nine([(0, 9.0), (30, 2.0)]), nine([(0, 9.0), (1, 2.0)]));
        let worlds = [played(10, 3.0, &[("kpa", &one)]), played(10, 3.0, &[("kpa", &other)])];
        let measures = against_rivals(&worlds);
        let value = |metric| measures.iter().find(|measure| measure.metric == metric).map(|measure| measure.value);
        assert_eq!(value("late_over_best_rival"), Some(20.0 / 31.0));
        assert_eq!(value("worlds_lost_share"), Some(0.5));
    }

    #[test]
    fn percentiles_are_values_that_occurred() {
        assert_eq!(percentile(&mut [3.0, 1.0, 2.0], 0.5), 2.0);
        assert_eq!([percentile(&mut [3.0, 1.0], 1.0), percentile(&mut [], 0.5)], [3.0, 0.0]);
    }
}
