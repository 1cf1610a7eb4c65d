//! One run: every case, asked of every contender in turn, sample by sample. Pairs what was measured side by side; knows no
//! engine.

use anyhow::{Context, Result};
use stoker_figures::{Figure, Key, Run, System, better};

use crate::case::Case;

/// One number of one sample.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Reading {
    /// Its metric, by the names of docs/benchmarks.
    pub metric: &'static str,
    /// In the metric's unit.
    pub value: f64,
}

impl Reading {
    /// A value of a metric.
    pub fn new(metric: &'static str, value: f64) -> Self {
        Self { metric, value }
    }
}

/// A system that cases are asked of.
pub trait Contender {
    /// Its name and version.
    fn system(&self) -> System;

    /// Work of the same kind that is not counted.
    fn warm_up(&mut self, case: Case) -> Result<()>;

    /// One sample of a case: every metric it has, the same ones each time.
    fn sample(&mut self, case: Case) -> Result<Vec<Reading>>;
}

/// What figures of a session say of the model.
#[derive(Clone, Copy, Debug)]
pub struct Subject<'a> {
    /// Its name.
    pub model: &'a str,
    /// The format of its weights.
    pub dtype: &'a str,
}

/// How often, and who hears of it.
pub struct Plan<'a> {
    /// Samples of each case.
    pub samples: usize,
    /// Told of every sample.
    pub progress: &'a mut dyn FnMut(&str),
}

/// All samples of one system in one case.
#[derive(Clone, Debug)]
struct Samples {
    system: System,
    readings: Vec<Vec<Reading>>,
}

/// Measures one case. The first contender is ours: its failure ends the session. A peer that fails is left out, with the
/// reason told.
pub fn measure(
    contenders: &mut [Box<dyn Contender>],
    case: Case,
    subject: Subject<'_>,
    run: &Run,
    plan: &mut Plan<'_>,
) -> Result<Vec<Figure>> {
    let mut found: Vec<Samples> = Vec::new();
    let mut able = Vec::new();
    for (idx, contender) in contenders.iter_mut().enumerate() {
        (plan.progress)(&format!("{case}: {} warms up", contender.system().name));
        match contender.warm_up(case) {
            Ok(()) => able.push(idx),
            Err(error) if idx == 0 => return Err(error).with_context(|| format!("warm up for {case}")),
            Err(error) => (plan.progress)(&format!("skipped: {case} of {}: {error:#}", contender.system().name)),
        }
    }
    able.iter().for_each(|idx| found.push(Samples { system: contenders[*idx].system(), readings: Vec::new() }));
    for turn in 0..plan.samples {
        for place in in_turn(able.len(), turn) {
            let contender = &mut contenders[able[place]];
            let readings = contender.sample(case).with_context(|| format!("{case} of {}", contender.system().name))?;
            (plan.progress)(&told(case, turn, plan.samples, &contender.system(), &readings));
            found[place].readings.push(readings);
        }
    }
    Ok(figures(case, subject, run, &found))
}

/// Forwards and backwards by turns, so that a machine that grows slower favours nobody.
fn in_turn(n: usize, turn: usize) -> Vec<usize> {
    if turn.is_multiple_of(2) { (0..n).collect() } else { (0..n).rev().collect() }
}

fn told(case: Case, turn: usize, samples: usize, system: &System, readings: &[Reading]) -> String {
    let values: Vec<_> = readings.iter().map(|reading| format!("{} {:.4}", reading.metric, reading.value)).collect();
    format!("{case} {}/{samples} {}: {}", turn + 1, system.name, values.join(", "))
}

fn figures(case: Case, subject: Subject<'_>, run: &Run, found: &[Samples]) -> Vec<Figure> {
    let Subject { model, dtype } = subject;
    let case_name = case.to_string();
    let figure = |system: &System, metric: &str, samples: &[f64]| {
        run.figure_of(system, Key { model, dtype, case: &case_name, metric }, samples)
    };
    let mut figures = Vec::new();
    for samples in found {
        for Reading { metric, .. } in samples.readings.first().into_iter().flatten() {
            figures.push(figure(&samples.system, metric, &samples.of(metric)));
        }
    }
    let Some((ours, peers)) = found.split_first() else { return figures };
    for peer in peers {
        let ratios = paired_ratios(case.headline(), ours, peer);
        if !ratios.is_empty() {
            figures.push(figure(&ours.system, &format!("ratio_to_{}", peer.system.name), &ratios));
        }
    }
    figures
}

impl Samples {
    fn of(&self, metric: &str) -> Vec<f64> {
        let readings = self.readings.iter().flatten().filter(|reading| reading.metric == metric);
        readings.map(|reading| reading.value).collect()
    }
}

/// How many times better ours was than the peer's sample taken beside it.
fn paired_ratios(metric: &str, ours: &Samples, peer: &Samples) -> Vec<f64> {
    let pairs = ours.of(metric).into_iter().zip(peer.of(metric));
    pairs.map(|(ours, theirs)| better(metric).ratio(ours, theirs)).collect()
}

#[cfg(test)]
mod tests {
    use anyhow::bail;
    use stoker_figures::Conditions;

    use super::*;

    /// Plays samples of a rate; fails where there is none left.
    struct Scripted {
        name: &'static str,
        rates: Vec<f64>,
    }

    impl Contender for Scripted {
        fn system(&self) -> System {
            System { name: self.name.into(), version: "1".into() }
        }

        fn warm_up(&mut self, _: Case) -> Result<()> {
            if self.rates.is_empty() { bail!("not installed") } else { Ok(()) }
        }

        fn sample(&mut self, _: Case) -> Result<Vec<Reading>> {
            Ok(vec![Reading::new("tok_s", self.rates.remove(0))])
        }
    }

    fn play(contenders: Vec<Scripted>) -> (Result<Vec<Figure>>, Vec<String>) {
        let conditions = Conditions { commit: "c".into(), machine: "m".into(), command: "x".into() };
        let run = Run::named("r".into(), conditions);
        let mut contenders: Vec<Box<dyn Contender>> =
            contenders.into_iter().map(|contender| Box::new(contender) as Box<dyn Contender>).collect();
        let mut heard = Vec::new();
        let mut progress = |line: &str| heard.push(line.to_owned());
        let mut plan = Plan { samples: 3, progress: &mut progress };
        let subject = Subject { model: "ember", dtype: "bf16" };
        let figures = measure(&mut contenders, Case::Decode(128), subject, &run, &mut plan);
        (figures, heard)
    }

    /// The machine halves its speed after the first sample: the ratio of medians would be 110 / 100.
    #[test]
    fn a_ratio_is_the_median_of_samples_taken_side_by_side() {
        let ours = Scripted { name: "stoker", rates: vec![220.0, 120.0, 110.0] };
        let peer = Scripted { name: "llama.cpp", rates: vec![200.0, 100.0, 100.0] };
        let figures = play(vec![ours, peer]).0.unwrap();
        let ratio = figures.iter().find(|figure| figure.metric == "ratio_to_llama.cpp").unwrap();
        assert!((ratio.value - 1.1).abs() < 1e-9, "{ratio:?}");
        assert_eq!((ratio.n, ratio.system.as_str()), (3, "stoker"));
        assert!((ratio.max - 1.2).abs() < 1e-9, "{ratio:?}");
    }

    #[test]
    fn a_peer_that_cannot_run_is_left_out_and_told() {
        let ours = Scripted { name: "stoker", rates: vec![1.0, 2.0, 3.0] };
        let (figures, heard) = play(vec![ours, Scripted { name: "llama.cpp", rates: vec![] }]);
        assert_eq!(figures.unwrap().len(), 1);
        assert!(heard.iter().any(|line| line == "skipped: decode_128 of llama.cpp: not installed"), "{heard:?}");
    }

    #[test]
    fn our_own_failure_ends_the_session() {
        let error = play(vec![Scripted { name: "stoker", rates: vec![] }]).0.unwrap_err();
        assert_eq!(format!("{error:#}"), "warm up for decode_128: not installed");
    }

    #[test]
    fn contenders_go_first_by_turns() {
        assert_eq!([in_turn(3, 0), in_turn(3, 1)], [vec![0, 1, 2], vec![2, 1, 0]]);
    }
}
