//! Benchmark figures: one JSON line each, appended to `docs/benchmarks/results/*.jsonl` and never edited, and the tables
//! rendered from them. Measures nothing itself.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    fs::{self, OpenOptions},
    io::Write as _,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

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

/// What all figures of one process of measuring share.
#[derive(Clone, Debug)]
pub struct Run {
    name: String,
    commit: String,
    machine: String,
    command: String,
}

impl Run {
    /// Names this run after the time, reads commit and machine. `command` repeats it.
    pub fn start(command: &str) -> Self {
        let now = output_of("date", &["-u", "+%Y-%m-%dT%H:%M"]);
        let commit = output_of("git", &["describe", "--always", "--dirty", "--abbrev=9"]);
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let machine = format!("{cores} cores, {}", cpu_model());
        Self { name: format!("{now}-{}", std::process::id()), commit, machine, command: command.to_owned() }
    }

    /// A figure of Stoker itself from its samples. Panics without samples: a figure that was not obtained does not exist.
    pub fn figure(&self, key: Key<'_>, samples: &[f64]) -> Figure {
        assert!(!samples.is_empty(), "no sample of {} {}", key.case, key.metric);
        let mut sorted = samples.to_vec();
        sorted.sort_by(f64::total_cmp);
        Figure {
            run: self.name.clone(),
            commit: self.commit.clone(),
            machine: self.machine.clone(),
            system: "stoker".to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            model: key.model.to_owned(),
            dtype: key.dtype.to_owned(),
            case: key.case.to_owned(),
            metric: key.metric.to_owned(),
            value: sorted[sorted.len() / 2],
            n: u32::try_from(sorted.len()).unwrap_or(u32::MAX),
            min: sorted[0],
            max: sorted[sorted.len() - 1],
            command: self.command.clone(),
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

/// A rendered page: its file name under `docs/benchmarks` and its text.
pub type Page = (String, String);

/// One page a results file under `dir/results`, and `README.md` that lists them.
pub fn render(dir: &Path) -> Result<Vec<Page>> {
    let files = results(&dir.join("results"))?;
    let mut index = String::from(
        "# Benchmarks\n\nRendered by `make bench` from `results/*.jsonl`; the newest run of each figure is shown, older \
         ones stay in the files. Never typed by hand. What was predicted before each kernel was measured, and what came \
         of it, is in [NOTES.md](NOTES.md).\n\n",
    );
    let mut pages = Vec::new();
    for path in files {
        let topic = path.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
        let figures = newest(read(&path)?);
        let _ = writeln!(index, "- [{topic}]({topic}.md): {} figures", figures.len());
        pages.push((format!("{topic}.md"), format!("# {topic}\n\n{}", table(&figures))));
    }
    pages.push(("README.md".to_owned(), index));
    Ok(pages)
}

fn results(dir: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(dir).with_context(|| format!("list {}", dir.display()))?;
    let paths = entries.filter_map(|entry| entry.ok().map(|entry| entry.path()));
    let mut files: Vec<_> = paths.filter(|path| path.extension().is_some_and(|ext| ext == "jsonl")).collect();
    files.sort();
    ensure!(!files.is_empty(), "no results under {}", dir.display());
    Ok(files)
}

fn newest(figures: Vec<Figure>) -> Vec<Figure> {
    let keyed = figures.into_iter().map(|figure| {
        let key = (
            figure.case.clone(),
            figure.metric.clone(),
            figure.model.clone(),
            figure.dtype.clone(),
            figure.system.clone(),
        );
        (key, figure)
    });
    keyed.collect::<BTreeMap<_, _>>().into_values().collect()
}

fn table(figures: &[Figure]) -> String {
    let mut text = String::from(
        "| case | metric | system | model | dtype | median | min to max | n | commit | machine | command |\n|---|---|---|---|---|---:|---|---:|---|---|---|\n",
    );
    for figure in figures {
        let _ = writeln!(
            text,
            "| {} | {} | {} {} | {} | {} | {} | {} to {} | {} | {} | {} | `{}` |",
            figure.case,
            figure.metric,
            figure.system,
            figure.version,
            figure.model,
            figure.dtype,
            short(figure.value),
            short(figure.min),
            short(figure.max),
            figure.n,
            figure.commit,
            figure.machine,
            figure.command
        );
    }
    text
}

/// Four significant digits: more would claim a precision that no machine here has.
fn short(value: f64) -> String {
    if value == 0.0 {
        return "0".to_owned();
    }
    let digits = 3 - value.abs().log10().floor() as i32;
    let text = format!("{value:.*}", digits.clamp(0, 6) as usize);
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
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

    fn figure(run: &str, value: f64) -> Figure {
        let run = Run { name: run.into(), commit: "c".into(), machine: "m".into(), command: "make bench".into() };
        run.figure(Key { model: "ember", dtype: "bf16", case: "start", metric: "seconds" }, &[value])
    }

    #[test]
    fn the_newest_run_of_a_figure_is_the_one_shown() {
        let shown = newest(vec![figure("a", 1.0), figure("b", 2.0)]);
        assert_eq!(shown, vec![figure("b", 2.0)]);
    }

    #[test]
    fn a_median_is_the_middle_sample() {
        let run = Run { name: "r".into(), commit: "c".into(), machine: "m".into(), command: "x".into() };
        let figure = run.figure(Key { model: "none", dtype: "none", case: "idle", metric: "rss_mb" }, &[3.0, 1.0, 2.0]);
        assert_eq!((figure.value, figure.min, figure.max, figure.n), (2.0, 1.0, 3.0, 3));
    }

    #[test]
    fn values_are_shown_with_four_digits() {
        let shown: Vec<_> = [0.0, 0.123456, 12.3456, 1234.56, 98765.4].map(short).into();
        assert_eq!(shown, ["0", "0.1235", "12.35", "1235", "98765"]);
    }

    #[test]
    fn a_bad_line_is_named_by_its_number() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.jsonl");
        append(&path, &[figure("a", 1.0)]).unwrap();
        fs::write(&path, fs::read_to_string(&path).unwrap() + "{}\n").unwrap();
        assert!(format!("{:#}", read(&path).unwrap_err()).contains("line 2"));
    }
}
