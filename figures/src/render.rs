//! Tables made of figures: for each results file one page, for each figure its newest run. Never typed by hand.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, ensure};

use crate::{
    figure::{Figure, read},
    peers, trade,
};

/// A rendered page or picture: its file name under `docs/benchmarks` and its text.
pub type Page = (String, String);

/// One page with its pictures a results file under `dir/results`, and `README.md` that lists them.
pub fn render(dir: &Path) -> Result<Vec<Page>> {
    let files = results(&dir.join("results"))?;
    let mut index = String::from(
        "# Benchmarks\n\nRendered by `make bench` from `results/*.jsonl`; the newest run of each figure is shown, of each kind of GPU, older \
         ones stay in the files. Never typed by hand. What was predicted before each kernel was measured, and what came \
         of it, is in [NOTES.md](NOTES.md).\n\n",
    );
    let mut pages = Vec::new();
    for path in &files {
        let topic = path.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
        let all = read(path)?;
        let pictures = peers::pictures(&topic, &all);
        let speeds = if topic == QUALITY { speeds(&files)? } else { None };
        let trade = speeds.and_then(|speeds| trade::picture(&all, &speeds));
        let shown = trade.as_ref().map_or_else(String::new, |(name, _)| format!("![{name}]({name})\n\n"));
        let beside_peers = peers::section(&all, &pictures);
        let figures = newest(all);
        let _ = writeln!(index, "- [{topic}]({topic}.md): {} figures", figures.len());
        pages.push((format!("{topic}.md"), format!("# {topic}\n\n{shown}{beside_peers}{}", table(&figures))));
        pages.extend(pictures.into_iter().chain(trade));
    }
    pages.push(("README.md".to_owned(), index));
    Ok(pages)
}

/// What formats cost in answers stands beside what they give.
const QUALITY: &str = "quality";
const SPEEDS: &str = "gpu.jsonl";

fn speeds(files: &[PathBuf]) -> Result<Option<Vec<Figure>>> {
    files.iter().find(|path| path.ends_with(SPEEDS)).map(|path| read(path)).transpose()
}

fn results(dir: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(dir).with_context(|| format!("list {}", dir.display()))?;
    let paths = entries.filter_map(|entry| entry.ok().map(|entry| entry.path()));
    let mut files: Vec<_> = paths.filter(|path| path.extension().is_some_and(|ext| ext == "jsonl")).collect();
    files.sort();
    ensure!(!files.is_empty(), "no results under {}", dir.display());
    Ok(files)
}

/// The newest of each figure on each kind of GPU, sorted by case and metric. Later runs stand later in a file.
pub fn newest(figures: Vec<Figure>) -> Vec<Figure> {
    let keyed = figures.into_iter().map(|figure| {
        let key = (
            figure.case.clone(),
            figure.metric.clone(),
            figure.model.clone(),
            figure.dtype.clone(),
            figure.system.clone(),
            figure.gpu().to_owned(),
        );
        (key, figure)
    });
    keyed.collect::<BTreeMap<_, _>>().into_values().collect()
}

/// What [`cells`] say, in their order.
pub const COLUMNS: [&str; 11] =
    ["case", "metric", "system", "model", "dtype", "median", "min to max", "n", "commit", "machine", "command"];

/// A figure as a row of a table.
pub fn cells(figure: &Figure) -> [String; 11] {
    let Figure { case, metric, model, dtype, commit, machine, command, n, .. } = figure.clone();
    let system = format!("{} {}", figure.system, figure.version);
    let range = format!("{} to {}", short(figure.min), short(figure.max));
    [case, metric, system, model, dtype, short(figure.value), range, n.to_string(), commit, machine, command]
}

fn table(figures: &[Figure]) -> String {
    let row = |figure: &Figure| {
        let [first @ .., command] = cells(figure);
        format!("| {} | `{command}` |\n", first.join(" | "))
    };
    let rows: String = figures.iter().map(row).collect();
    format!("| {} |\n|---|---|---|---|---|---:|---|---:|---|---|---|\n{rows}", COLUMNS.join(" | "))
}

/// Four significant digits: more would claim a precision that no machine here has.
pub(crate) fn short(value: f64) -> String {
    if value == 0.0 {
        return "0".to_owned();
    }
    let digits = 3 - value.abs().log10().floor() as i32;
    let text = format!("{value:.*}", digits.clamp(0, 6) as usize);
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::figure::{Conditions, Key, Run};

    fn figure(run: &str, value: f64) -> Figure {
        let conditions = Conditions { commit: "c".into(), machine: "m".into(), command: "make bench".into() };
        let key = Key { model: "ember", dtype: "bf16", case: "start", metric: "seconds" };
        Run::named(run.into(), conditions).figure(key, &[value])
    }

    #[test]
    fn the_newest_run_of_a_figure_is_the_one_shown() {
        let shown = newest(vec![figure("a", 1.0), figure("b", 2.0)]);
        assert_eq!(shown, vec![figure("b", 2.0)]);
    }

    #[test]
    fn a_figure_of_another_gpu_hides_none() {
        let on = |machine: &str, run, value| Figure { machine: machine.into(), ..figure(run, value) };
        let (old, new) = (on("1x H200, driver 1", "a", 1.0), on("1x H200, driver 2", "b", 2.0));
        let other = on("1x H100 80GB HBM3, driver 1", "c", 3.0);
        assert_eq!(newest(vec![old, new.clone(), other.clone()]), [other, new]);
    }

    #[test]
    fn values_are_shown_with_four_digits() {
        let shown: Vec<_> = [0.0, 0.123456, 12.3456, 1234.56, 98765.4].map(short).into();
        assert_eq!(shown, ["0", "0.1235", "12.35", "1235", "98765"]);
    }
}
