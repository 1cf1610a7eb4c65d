//! What was measured: the printed table, and JSON lines in the form of all figures of this project (one line a figure,
//! appended, never edited).

use std::{fs::OpenOptions, io::Write, path::Path};

use anyhow::{Context, Result};
use serde::Serialize;

/// The best this device does today, on random data.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ceilings {
    /// Device-to-device copy, bytes read plus bytes written.
    pub gb_s: f64,
    /// bf16 product of 8192 x 8192 x 8192.
    pub tflop_s: f64,
}

/// What bounds an operation, and how much of it there is.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Work {
    /// Bytes that must move through the device's memory.
    Bytes(f64),
    /// Operations that the tensor cores must do.
    Flops(f64),
}

/// Measured cases of one run.
#[derive(Debug)]
pub(crate) struct Report {
    ceilings: Ceilings,
    only: String,
    cases: Vec<Case>,
}

/// One operation at one shape, done by one system.
#[derive(Debug)]
struct Case {
    name: String,
    system: &'static str,
    work: Work,
    us: Vec<f64>,
}

/// What all figures of a run share.
#[derive(Clone, Debug)]
pub(crate) struct RunName {
    pub(crate) run: String,
    pub(crate) commit: String,
    pub(crate) machine: String,
}

#[derive(Serialize)]
struct Figure<'a> {
    run: &'a str,
    commit: &'a str,
    machine: &'a str,
    system: &'a str,
    version: &'a str,
    model: &'a str,
    dtype: &'a str,
    case: &'a str,
    metric: &'a str,
    value: f64,
    n: usize,
    min: f64,
    max: f64,
    command: &'a str,
}

impl Report {
    pub(crate) fn new(ceilings: Ceilings, only: String) -> Self {
        println!("copies {:.0} GB/s, products {:.0} TFLOP/s", ceilings.gb_s, ceilings.tflop_s);
        println!("{:34} {:>9} {:>9} {:>11} {:>6}", "case", "system", "us", "rate", "share");
        Self { ceilings, only, cases: Vec::new() }
    }

    /// Whether the case was asked for.
    pub(crate) fn wants(&self, name: &str) -> bool {
        name.contains(&self.only)
    }

    /// Records and prints one case.
    pub(crate) fn add(&mut self, name: &str, system: &'static str, work: Work, us: Vec<f64>) {
        let (us_median, rate, share) =
            (median(&us), work.rate(median(&us)), work.rate(median(&us)) / self.ceiling(work));
        println!("{name:34} {system:>9} {us_median:9.2} {rate:6.0} {:4} {:5.1}%", work.metric(), 100.0 * share);
        self.cases.push(Case { name: name.to_owned(), system, work, us });
    }

    /// Appends all figures to a file.
    pub(crate) fn append(&self, path: &Path, name: &RunName) -> Result<()> {
        let file = OpenOptions::new().create(true).append(true).open(path);
        let mut file = file.with_context(|| format!("open {}", path.display()))?;
        for case in &self.cases {
            for figure in self.figures(case, name) {
                writeln!(file, "{}", serde_json::to_string(&figure)?)?;
            }
        }
        Ok(())
    }

    fn figures<'a>(&self, case: &'a Case, name: &'a RunName) -> [Figure<'a>; 3] {
        let rates: Vec<f64> = case.us.iter().map(|us| case.work.rate(*us)).collect();
        let shares: Vec<f64> = rates.iter().map(|rate| rate / self.ceiling(case.work)).collect();
        [("us", &case.us), (case.work.metric(), &rates), ("share_of_ceiling", &shares)].map(|(metric, samples)| {
            Figure {
                run: &name.run,
                commit: &name.commit,
                machine: &name.machine,
                system: case.system,
                version: if case.system == "stoker" { env!("CARGO_PKG_VERSION") } else { "13" },
                model: "llama-3.1-8b",
                dtype: "bf16",
                case: &case.name,
                metric,
                value: median(samples),
                n: samples.len(),
                min: samples.iter().copied().fold(f64::INFINITY, f64::min),
                max: samples.iter().copied().fold(0.0, f64::max),
                command: "cargo run --release -p stoker-kernels --bin kernel-bench",
            }
        })
    }

    fn ceiling(&self, work: Work) -> f64 {
        match work {
            Work::Bytes(_) => self.ceilings.gb_s,
            Work::Flops(_) => self.ceilings.tflop_s,
        }
    }
}

impl Work {
    /// GB/s or TFLOP/s at a time.
    fn rate(self, us: f64) -> f64 {
        match self {
            Self::Bytes(bytes) => bytes / us / 1e3,
            Self::Flops(flops) => flops / us / 1e6,
        }
    }

    fn metric(self) -> &'static str {
        match self {
            Self::Bytes(_) => "gb_s",
            Self::Flops(_) => "tflop_s",
        }
    }
}

/// The middle sample.
pub(crate) fn median(samples: &[f64]) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_work_over_time() {
        assert_eq!(Work::Bytes(4e9).rate(1000.0), 4000.0);
        assert_eq!(Work::Flops(8e11).rate(1000.0), 800.0);
    }

    #[test]
    fn every_case_gives_time_rate_and_share() {
        let mut report = Report::new(Ceilings { gb_s: 4000.0, tflop_s: 800.0 }, String::new());
        report.add("kernel_x", "stoker", Work::Bytes(2e9), vec![1000.0, 900.0, 1100.0]);
        let name = RunName { run: "r".into(), commit: "c".into(), machine: "m".into() };
        let figures = report.figures(&report.cases[0], &name);
        let found: Vec<_> = figures.iter().map(|figure| (figure.metric, figure.value)).collect();
        assert_eq!(found, [("us", 1000.0), ("gb_s", 2000.0), ("share_of_ceiling", 0.5)]);
    }
}
