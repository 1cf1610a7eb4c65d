//! One run: every case, asked of every contender in turn, sample by sample, with the machine's speeds probed around each. Pairs
//! what was measured side by side; knows no engine.

use anyhow::{Context, Result};
use stoker_figures::{Figure, Key, Run, System, better};

use stoker_engine::model::ModelSpec;

use crate::{case::Case, probe::Speeds, reading::Reading};

/// A system that cases are asked of.
pub trait Contender {
    /// Its name and version.
    fn system(&self) -> System;

    /// Work of the same kind that is not counted. An error: this system does not take part in the case.
    fn warm_up(&mut self, case: Case) -> Result<()>;

    /// One sample of a case: every metric it has, the same ones each time.
    fn sample(&mut self, case: Case) -> Result<Vec<Reading>>;
}

/// What figures of a session say of the model.
#[derive(Clone, Debug)]
pub struct Subject {
    /// Its name.
    pub model: String,
    /// The format of its weights.
    pub dtype: String,
    /// What stands before the name of a case: instructions that are not the machine's best.
    pub case_prefix: String,
    /// Bytes of weights that one decoded token reads, where memory and no cache holds them.
    pub bytes_per_token: Option<u64>,
    /// What it is made of.
    pub spec: ModelSpec,
}

/// One process of measuring.
pub struct Session<'a> {
    /// Names its figures.
    pub run: &'a Run,
    /// What is measured.
    pub subject: &'a Subject,
    /// Samples of each case.
    pub samples: usize,
    /// What this machine does at best, now; none where something else computes.
    pub probe: Option<&'a mut dyn FnMut() -> Speeds>,
    /// Told of every sample.
    pub progress: &'a mut dyn FnMut(&str),
}

/// All samples of one system in one case.
#[derive(Clone, Debug)]
struct Samples {
    system: System,
    readings: Vec<Vec<Reading>>,
}

impl Session<'_> {
    /// Measures one case. The first contender is ours: its failure ends the session. A peer that does not take part is told
    /// and left out.
    pub fn measure(&mut self, contenders: &mut [Box<dyn Contender>], case: Case) -> Result<Vec<Figure>> {
        let mut able = self.warm_up(contenders, case)?;
        let mut found: Vec<_> =
            able.iter().map(|contender| Samples { system: contender.system(), readings: Vec::new() }).collect();
        let mut speeds = Vec::from_iter(self.probed());
        for turn in 0..self.samples {
            for place in in_turn(able.len(), turn) {
                let system = &found[place].system;
                let mut readings = able[place].sample(case).with_context(|| format!("{case} of {}", system.name))?;
                speeds.extend(self.probed());
                let around = &speeds[speeds.len().saturating_sub(2)..];
                readings.extend(
                    [self.share_of_ceiling(case, &readings, around), self.share_of_peak(case, &readings, around)]
                        .into_iter()
                        .flatten(),
                );
                (self.progress)(&told(case, turn, self.samples, system, &readings));
                found[place].readings.push(readings);
            }
        }
        Ok(self.figures(case, &found, &speeds))
    }

    fn warm_up<'c>(
        &mut self,
        contenders: &'c mut [Box<dyn Contender>],
        case: Case,
    ) -> Result<Vec<&'c mut Box<dyn Contender>>> {
        let mut able = Vec::new();
        for contender in contenders {
            let name = contender.system().name;
            (self.progress)(&format!("{case}: {name} warms up"));
            match contender.warm_up(case) {
                Ok(()) => able.push(contender),
                Err(error) if able.is_empty() => return Err(error).with_context(|| format!("warm up for {case}")),
                Err(error) => (self.progress)(&format!("skipped: {case} of {name}: {error:#}")),
            }
        }
        Ok(able)
    }

    fn probed(&mut self) -> Option<Speeds> {
        self.probe.as_mut().map(|probe| probe())
    }

    /// How much of the memory's speed around a sample its decoding used.
    fn share_of_ceiling(&self, case: Case, readings: &[Reading], around: &[Speeds]) -> Option<Reading> {
        let bytes = self.subject.bytes_per_token.filter(|_| matches!(case, Case::Decode(_)))?;
        let ceiling = mean(around.iter().map(|speeds| speeds.gb_s))?;
        Some(Reading::new("share_of_ceiling", tok_s(readings)? * bytes as f64 / 1e9 / ceiling))
    }

    /// How much of what the cores multiply around a sample its prompt used.
    fn share_of_peak(&self, case: Case, readings: &[Reading], around: &[Speeds]) -> Option<Reading> {
        let Case::Prefill(n_tokens) = case else { return None };
        let peak = mean(around.iter().filter_map(|speeds| speeds.gflop_s))?;
        let seconds = f64::from(n_tokens) / tok_s(readings)?;
        Some(Reading::new("share_of_peak", self.subject.spec.prompt_flop(n_tokens as usize) / seconds / 1e9 / peak))
    }

    fn figures(&self, case: Case, found: &[Samples], speeds: &[Speeds]) -> Vec<Figure> {
        let Subject { model, dtype, case_prefix, .. } = self.subject;
        let case_name = format!("{case_prefix}{case}");
        let figure = |system: &System, metric: &str, samples: &[f64]| {
            self.run.figure_of(system, Key { model, dtype, case: &case_name, metric }, samples)
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
        let gb_s: Vec<f64> = speeds.iter().map(|speeds| speeds.gb_s).collect();
        let multiplied = speeds.iter().filter(|_| matches!(case, Case::Prefill(_)));
        let gflop_s: Vec<f64> = multiplied.filter_map(|speeds| speeds.gflop_s).collect();
        for (name, version, metric, samples) in
            [("memory", "read", "gb_s", gb_s), ("cores", "multiply-add", "gflop_s", gflop_s)]
        {
            if !samples.is_empty() {
                figures.push(figure(&System { name: name.into(), version: version.into() }, metric, &samples));
            }
        }
        figures
    }
}

fn tok_s(readings: &[Reading]) -> Option<f64> {
    readings.iter().find(|reading| reading.metric == "tok_s").map(|reading| reading.value)
}

fn mean(values: impl Iterator<Item = f64> + Clone) -> Option<f64> {
    let n = values.clone().count();
    (n > 0).then(|| values.sum::<f64>() / n as f64)
}

/// Forwards and backwards by turns, so that a machine that grows slower favours nobody.
fn in_turn(n: usize, turn: usize) -> Vec<usize> {
    if turn.is_multiple_of(2) { (0..n).collect() } else { (0..n).rev().collect() }
}

fn told(case: Case, turn: usize, samples: usize, system: &System, readings: &[Reading]) -> String {
    let values: Vec<_> = readings.iter().map(|reading| format!("{} {:.4}", reading.metric, reading.value)).collect();
    format!("{case} {}/{samples} {}: {}", turn + 1, system.name, values.join(", "))
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
    use stoker_engine::model::{CheckpointFormat, ModelConfig};
    use stoker_figures::Conditions;

    use super::*;
    use crate::shape::Shape;

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

    fn spec() -> ModelSpec {
        let config = Shape::named("qwen2.5-0.5b").unwrap().config("bfloat16");
        ModelSpec::new(&ModelConfig::from_json(&config, "config.json").unwrap(), CheckpointFormat::HuggingFace).unwrap()
    }

    fn play(contenders: Vec<Scripted>) -> (Result<Vec<Figure>>, Vec<String>) {
        play_case(contenders, Case::Decode(128))
    }

    fn play_case(contenders: Vec<Scripted>, case: Case) -> (Result<Vec<Figure>>, Vec<String>) {
        let conditions = Conditions { commit: "c".into(), machine: "m".into(), command: "x".into() };
        let run = Run::named("r".into(), conditions);
        let mut contenders: Vec<Box<dyn Contender>> =
            contenders.into_iter().map(|contender| Box::new(contender) as Box<dyn Contender>).collect();
        let mut heard = Vec::new();
        let mut progress = |line: &str| heard.push(line.to_owned());
        let subject = Subject {
            model: "ember".into(),
            dtype: "bf16".into(),
            case_prefix: "avx2_".into(),
            bytes_per_token: Some(100_000_000),
            spec: spec(),
        };
        let mut probe = || Speeds { gb_s: 40.0, gflop_s: Some(400.0) };
        let mut session =
            Session { run: &run, subject: &subject, samples: 3, probe: Some(&mut probe), progress: &mut progress };
        let figures = session.measure(&mut contenders, case);
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
        assert_eq!((ratio.n, ratio.system.as_str(), ratio.case.as_str()), (3, "stoker", "avx2_decode_128"));
        assert!((ratio.max - 1.2).abs() < 1e-9, "{ratio:?}");
    }

    #[test]
    fn a_peer_that_cannot_run_is_left_out_and_told() {
        let ours = Scripted { name: "stoker", rates: vec![1.0, 2.0, 3.0] };
        let (figures, heard) = play(vec![ours, Scripted { name: "llama.cpp", rates: vec![] }]);
        let systems: Vec<_> = figures.unwrap().into_iter().map(|figure| figure.system).collect();
        assert_eq!(systems, ["stoker", "stoker", "memory"]);
        assert!(heard.iter().any(|line| line == "skipped: decode_128 of llama.cpp: not installed"), "{heard:?}");
    }

    #[test]
    fn our_own_failure_ends_the_session() {
        let error = play(vec![Scripted { name: "stoker", rates: vec![] }]).0.unwrap_err();
        assert_eq!(format!("{error:#}"), "warm up for decode_128: not installed");
    }

    #[test]
    fn decoding_is_told_as_a_share_of_the_memorys_speed() {
        let figures = play(vec![Scripted { name: "stoker", rates: vec![200.0; 3] }]).0.unwrap();
        let share = figures.iter().find(|figure| figure.metric == "share_of_ceiling").unwrap();
        assert!((share.value - 0.5).abs() < 1e-9, "20 GB/s of 40: {share:?}");
    }

    #[test]
    fn a_prompt_is_told_as_a_share_of_what_the_cores_multiply() {
        let contenders = vec![Scripted { name: "stoker", rates: vec![200.0; 3] }];
        let figures = play_case(contenders, Case::Prefill(512)).0.unwrap();
        let value = |metric: &str| figures.iter().find(|figure| figure.metric == metric).map(|figure| figure.value);
        let seconds = 512.0 / 200.0;
        assert_eq!(value("share_of_peak"), Some(spec().prompt_flop(512) / seconds / 1e9 / 400.0));
        assert_eq!((value("gflop_s"), value("share_of_ceiling")), (Some(400.0), None));
    }

    #[test]
    fn contenders_go_first_by_turns() {
        assert_eq!([in_turn(3, 0), in_turn(3, 1)], [vec![0, 1, 2], vec![2, 1, 0]]);
    }
}
