//! The part of a page that sets Stoker beside its peers. A ratio is formed only inside a run. Reads no file.

use crate::{figure::Figure, render::short, stats::better};

const OURS: &str = "stoker";
const RATIO: &str = "ratio_to_";

/// Tables of the newest run in which a case was measured beside a peer; empty without one.
pub(crate) fn section(figures: &[Figure]) -> String {
    let rows: Vec<String> = newest_pairs(figures).iter().map(Pair::row).chain(paired_ratios(figures)).collect();
    if rows.is_empty() {
        return String::new();
    }
    format!(
        "## Beside peers\n\nOne run, one machine, the same work. A ratio above 1 is where Stoker is better, whichever way the \
         metric counts: of the medians, or paired, the median of the ratios of samples that were taken in turn.\n\n\
         | case | metric | model | dtype | stoker | peer | ratio | machine | run |\n|---|---|---|---|---:|---|---|---|---|\n\
         {}\n## All figures\n\n",
        rows.concat()
    )
}

/// The same work by two systems in one run.
struct Pair<'a> {
    ours: &'a Figure,
    theirs: &'a Figure,
}

impl Pair<'_> {
    fn row(&self) -> String {
        let Self { ours, theirs } = self;
        let ratio = better(&ours.metric).ratio(ours.value, theirs.value);
        format!(
            "| {} | {} | {} | {} | {} | {} {}: {} | {} | {} | {} |\n",
            ours.case,
            ours.metric,
            ours.model,
            ours.dtype,
            short(ours.value),
            theirs.system,
            theirs.version,
            short(theirs.value),
            short(ratio),
            ours.machine,
            ours.run,
        )
    }
}

/// Later runs stand later in a file: the last pair of each case, metric and peer is the newest.
fn newest_pairs(figures: &[Figure]) -> Vec<Pair<'_>> {
    let mut pairs: Vec<Pair<'_>> = Vec::new();
    for theirs in figures.iter().filter(|figure| figure.system != OURS) {
        let is_ours = |figure: &&Figure| figure.system == OURS && figure.run == theirs.run && same_row(figure, theirs);
        let Some(ours) = figures.iter().rfind(is_ours) else { continue };
        pairs.retain(|pair| pair.theirs.system != theirs.system || !same_row(pair.theirs, theirs));
        pairs.push(Pair { ours, theirs });
    }
    pairs
}

fn same_row(a: &Figure, b: &Figure) -> bool {
    (&a.case, &a.metric, &a.model, &a.dtype) == (&b.case, &b.metric, &b.model, &b.dtype)
}

fn paired_ratios(figures: &[Figure]) -> impl Iterator<Item = String> {
    let is_newest = |idx: usize| !figures[idx + 1..].iter().any(|later| same_row(later, &figures[idx]));
    let ratios = figures.iter().enumerate().filter(|(_, figure)| figure.metric.starts_with(RATIO));
    ratios.filter(move |(idx, _)| is_newest(*idx)).map(|(_, ratio)| {
        let peer = ratio.metric.trim_start_matches(RATIO);
        let Figure { case, model, dtype, machine, run, n, .. } = ratio;
        let (value, min, max) = (short(ratio.value), short(ratio.min), short(ratio.max));
        format!(
            "| {case} | paired | {model} | {dtype} | | {peer} | {value} ({min} to {max}, {n}) | {machine} | {run} |\n"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::figure::{Conditions, Key, Run, System};

    fn figure(run: &str, system: &str, metric: &str, value: f64) -> Figure {
        let conditions = Conditions { commit: "c".into(), machine: "m".into(), command: "make bench".into() };
        let system = System { name: system.into(), version: "1".into() };
        let key = Key { model: "ember", dtype: "bf16", case: "concurrent_8", metric };
        Run::named(run.into(), conditions).figure_of(&system, key, &[value])
    }

    #[test]
    fn a_ratio_is_formed_inside_the_newest_run_that_has_both() {
        let figures = [
            figure("a", "stoker", "itl_ms", 6.0),
            figure("a", "vllm", "itl_ms", 6.0),
            figure("b", "stoker", "itl_ms", 5.0),
            figure("b", "vllm", "itl_ms", 6.0),
            figure("c", "stoker", "itl_ms", 1.0),
        ];
        let section = section(&figures);
        let row = "| concurrent_8 | itl_ms | ember | bf16 | 5 | vllm 1: 6 | 1.2 | m | b |";
        let rows: Vec<_> = section.lines().filter(|line| line.starts_with("| concurrent_8")).collect();
        assert_eq!(rows, [row]);
    }

    #[test]
    fn a_paired_ratio_is_shown_with_its_range() {
        let section = section(&[figure("a", "stoker", "ratio_to_llama.cpp", 1.25)]);
        assert!(
            section.contains("| concurrent_8 | paired | ember | bf16 | | llama.cpp | 1.25 (1.25 to 1.25, 1) | m | a |")
        );
    }

    #[test]
    fn without_a_peer_there_is_no_section() {
        assert_eq!(section(&[figure("a", "stoker", "itl_ms", 6.0)]), "");
        assert_eq!(section(&[figure("a", "stoker", "itl_ms", 6.0), figure("b", "vllm", "itl_ms", 6.0)]), "");
    }
}
