//! One measured figure, the run it belongs to, and the file it is appended to. Renders nothing.

use std::{
    fs::{self, OpenOptions},
    io::Write as _,
    path::Path,
};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::stats::median;

/// One measured figure with everything needed to repeat it.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Figure {
    /// One process of measuring on one machine; ratios are formed only inside a run.
    pub run: String,
    /// Commit the measured program was built from.
    pub commit: String,
    /// The machine, in words.
    pub machine: String,
    /// What was measured: `stoker` or a peer.
    pub system: String,
    /// Its version.
    pub version: String,
    /// Model or model shape in lower case; `none` for control-plane figures.
    pub model: String,
    /// Number format of the weights, `none` for control-plane figures.
    pub dtype: String,
    /// What was done, e.g. `start`, `concurrent_64`.
    pub case: String,
    /// What was read, with its unit last, e.g. `seconds`, `rss_mb`.
    pub metric: String,
    /// Median of the samples.
    pub value: f64,
    /// Number of samples.
    pub n: u32,
    /// Smallest sample.
    pub min: f64,
    /// Largest sample.
    pub max: f64,
    /// The command that measures it again.
    pub command: String,
}

impl Figure {
    /// The kind of GPU that it was measured on, in one word such as `H200`; empty without one. Figures of other kinds stand beside each
    /// other, those of other processors replace each other: what a deployment runs on is chosen by its GPU.
    pub fn gpu(&self) -> &str {
        let count_and_name =
            self.machine.split_once("x ").filter(|(count, _)| count.bytes().all(|byte| byte.is_ascii_digit()));
        let name = count_and_name.map_or("", |(_, name)| name.trim_start_matches("NVIDIA "));
        name.split([' ', ',']).next().unwrap_or_default()
    }
}

/// What all figures of one process of measuring share.
#[derive(Clone, Debug)]
pub struct Run {
    name: String,
    conditions: Conditions,
}

/// Under what a run measures.
#[derive(Clone, Debug)]
pub struct Conditions {
    /// See [`Figure::commit`].
    pub commit: String,
    /// See [`Figure::machine`].
    pub machine: String,
    /// See [`Figure::command`].
    pub command: String,
}

impl Conditions {
    /// The checkout this process stands in (or `$STOKER_COMMIT`, where none came along) and this machine's processor.
    /// `command` repeats the run.
    pub fn here(command: &str) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Self {
            commit: std::env::var("STOKER_COMMIT")
                .unwrap_or_else(|_| output_of("git", &["describe", "--always", "--dirty", "--abbrev=9"])),
            machine: format!("{cores} cores, {}", cpu_model()),
            command: command.to_owned(),
        }
    }
}

/// The GPUs of this machine in words, if it has any and their driver's tool.
pub fn gpus() -> Option<String> {
    let listed = output_of("nvidia-smi", &["--query-gpu=name,driver_version", "--format=csv,noheader"]);
    let n_gpus = listed.lines().count();
    let (name, driver) = listed.lines().next()?.split_once(", ")?;
    Some(format!("{n_gpus}x {}, driver {driver}", name.trim_start_matches("NVIDIA ")))
}

/// Who was measured.
#[derive(Clone, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct System {
    /// `stoker` or a peer.
    pub name: String,
    /// Its version.
    pub version: String,
}

impl System {
    /// Stoker, as built.
    pub fn stoker() -> Self {
        Self { name: "stoker".to_owned(), version: env!("CARGO_PKG_VERSION").to_owned() }
    }
}

impl Run {
    /// A run on this machine, of this checkout. `command` repeats it.
    pub fn start(command: &str) -> Self {
        Self::under(Conditions::here(command))
    }

    /// A run named after the time.
    pub fn under(conditions: Conditions) -> Self {
        let now = output_of("date", &["-u", "+%Y-%m-%dT%H:%M"]);
        Self::named(format!("{now}-{}", std::process::id()), conditions)
    }

    /// A part of a run that has its name already, measured by another process.
    pub fn named(name: String, conditions: Conditions) -> Self {
        Self { name, conditions }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// A figure of Stoker itself from its samples; panics without any.
    pub fn figure(&self, key: Key<'_>, samples: &[f64]) -> Figure {
        self.figure_of(&System::stoker(), key, samples)
    }

    /// A figure of any system from its samples. Panics without samples: a figure that was not obtained does not exist.
    pub fn figure_of(&self, system: &System, key: Key<'_>, samples: &[f64]) -> Figure {
        let Conditions { commit, machine, command } = self.conditions.clone();
        Figure {
            run: self.name.clone(),
            commit,
            machine,
            system: system.name.clone(),
            version: system.version.clone(),
            model: key.model.to_owned(),
            dtype: key.dtype.to_owned(),
            case: key.case.to_owned(),
            metric: key.metric.to_owned(),
            value: median(samples),
            n: u32::try_from(samples.len()).unwrap_or(u32::MAX),
            min: samples.iter().copied().fold(f64::INFINITY, f64::min),
            max: samples.iter().copied().fold(f64::NEG_INFINITY, f64::max),
            command,
        }
    }
}

/// What a figure is of.
#[derive(Clone, Copy, Debug)]
pub struct Key<'a> {
    /// See [`Figure::model`].
    pub model: &'a str,
    /// See [`Figure::dtype`].
    pub dtype: &'a str,
    /// See [`Figure::case`].
    pub case: &'a str,
    /// See [`Figure::metric`].
    pub metric: &'a str,
}

/// Appends figures to a results file.
pub fn append(path: &Path, figures: &[Figure]) -> Result<()> {
    let mut file =
        OpenOptions::new().create(true).append(true).open(path).with_context(|| format!("open {}", path.display()))?;
    for figure in figures {
        writeln!(file, "{}", serde_json::to_string(figure)?)?;
    }
    Ok(())
}

/// Reads a results file; a bad line is named by its number.
pub fn read(path: &Path) -> Result<Vec<Figure>> {
    let text = fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?;
    text.lines()
        .enumerate()
        .map(|(idx, line)| {
            serde_json::from_str(line).with_context(|| format!("{} line {}: not a figure", path.display(), idx + 1))
        })
        .collect()
}

fn output_of(program: &str, args: &[&str]) -> String {
    let output = std::process::Command::new(program).args(args).output();
    output.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned()).unwrap_or_default()
}

fn cpu_model() -> String {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = info.lines().find_map(|line| line.strip_prefix("model name")?.split(':').nth(1));
    model.map_or_else(|| std::env::consts::ARCH.to_owned(), |name| name.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figure(samples: &[f64]) -> Figure {
        let conditions = Conditions { commit: "c".into(), machine: "m".into(), command: "make bench".into() };
        let key = Key { model: "none", dtype: "none", case: "idle", metric: "rss_mb" };
        Run::named("r".into(), conditions).figure(key, samples)
    }

    #[test]
    fn a_machine_says_which_gpu_it_has() {
        let gpu = |machine: &str| Figure { machine: machine.into(), ..figure(&[1.0]) }.gpu().to_owned();
        assert_eq!(["1x H200, driver 580.159.04", "1x NVIDIA H200"].map(gpu), ["H200", "H200"]);
        assert_eq!(gpu("2x H100 80GB HBM3, driver 580.159.04"), "H100");
        assert_eq!(["2 cores, AMD EPYC", "4 cores, Matrix 9", "m", ""].map(gpu), ["", "", "", ""]);
    }

    #[test]
    fn a_figure_carries_median_and_range() {
        let figure = figure(&[3.0, 1.0, 2.0]);
        assert_eq!((figure.value, figure.min, figure.max, figure.n), (2.0, 1.0, 3.0, 3));
    }

    #[test]
    fn a_figure_survives_its_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.jsonl");
        append(&path, &[figure(&[1.0])]).unwrap();
        append(&path, &[figure(&[2.0])]).unwrap();
        assert_eq!(read(&path).unwrap(), [figure(&[1.0]), figure(&[2.0])]);
    }

    #[test]
    fn a_bad_line_is_named_by_its_number() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.jsonl");
        append(&path, &[figure(&[1.0])]).unwrap();
        fs::write(&path, fs::read_to_string(&path).unwrap() + "{}\n").unwrap();
        assert!(format!("{:#}", read(&path).unwrap_err()).contains("line 2"));
    }
}
