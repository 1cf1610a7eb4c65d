//! What a peer on a GPU printed about itself, as figures of our run, and the ratios between both. A GPU holds one engine at a
//! time, so the peer runs between two runs of ours. Starts nothing.

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use stoker_figures::{Figure, Key, Run, System, better, median};

use crate::case::Case;

/// Begins every line of a log that is meant for us; all others are the peer's own.
const MARK: &str = "SAMPLES ";
const OURS: &str = "stoker";

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    version: String,
    case: String,
    metric: String,
    samples: Vec<f64>,
}

/// What a peer ran.
#[derive(Clone, Copy, Debug)]
pub struct PeerModel<'a> {
    /// Its name in figures.
    pub name: &'a str,
    /// The format of its weights.
    pub dtype: &'a str,
}

/// The figures in a peer's log. A log without any, or with a case that is not ours, is an error that names the line.
pub fn figures(log: &str, system: &str, model: PeerModel<'_>, run: &Run) -> Result<Vec<Figure>> {
    let marked = log.lines().enumerate().filter_map(|(idx, line)| Some((idx + 1, line.strip_prefix(MARK)?)));
    let found: Vec<Figure> = marked
        .map(|(number, line)| figure(line, system, model, run).with_context(|| format!("line {number}: {line}")))
        .collect::<Result<_>>()?;
    ensure!(!found.is_empty(), "no line of the log begins with {MARK:?}: the peer did not run");
    Ok(found)
}

fn figure(line: &str, system: &str, model: PeerModel<'_>, run: &Run) -> Result<Figure> {
    let Line { version, case, metric, samples } = serde_json::from_str(line)?;
    case.parse::<Case>().map_err(anyhow::Error::msg)?;
    ensure!(!samples.is_empty(), "a figure needs a sample");
    let system = System { name: system.to_owned(), version };
    let key = Key { model: model.name, dtype: model.dtype, case: &case, metric: &metric };
    Ok(run.figure_of(&system, key, &samples))
}

/// Every figure, then for each case that we and a peer measured in one run: how many times better we were, one sample for each of
/// our turns.
pub fn joined(figures: Vec<Figure>) -> Vec<Figure> {
    let peers: BTreeSet<&str> =
        figures.iter().map(|figure| figure.system.as_str()).filter(|name| *name != OURS && *name != "memory").collect();
    let theirs = figures.iter().filter(|figure| peers.contains(figure.system.as_str()) && is_headline(figure));
    let ratios: Vec<Figure> = theirs.filter_map(|theirs| ratio(theirs, &figures)).collect();
    [figures, ratios].concat()
}

fn is_headline(figure: &Figure) -> bool {
    figure.case.parse::<Case>().is_ok_and(|case| case.headline() == figure.metric)
}

fn ratio(theirs: &Figure, figures: &[Figure]) -> Option<Figure> {
    let subject = |figure: &Figure| {
        (figure.run.clone(), figure.case.clone(), figure.metric.clone(), figure.model.clone(), figure.dtype.clone())
    };
    let ours: Vec<_> =
        figures.iter().filter(|figure| figure.system == OURS && subject(figure) == subject(theirs)).collect();
    let ratios: Vec<f64> = ours.iter().map(|ours| better(&ours.metric).ratio(ours.value, theirs.value)).collect();
    let last = ours.last()?;
    Some(Figure {
        metric: format!("ratio_to_{}", theirs.system),
        value: median(&ratios),
        n: u32::try_from(ratios.len()).unwrap_or(u32::MAX),
        min: ratios.iter().copied().fold(f64::INFINITY, f64::min),
        max: ratios.iter().copied().fold(f64::NEG_INFINITY, f64::max),
        ..(*last).clone()
    })
}

#[cfg(test)]
mod tests {
    use stoker_figures::Conditions;

    use super::*;

    const MODEL: PeerModel<'static> = PeerModel { name: "llama-3.1-8b", dtype: "bf16" };
    const LOG: &str = "INFO loading\n\
        SAMPLES {\"version\": \"0.24.0\", \"case\": \"concurrent_32\", \"metric\": \"itl_ms\", \"samples\": [6.0, 5.8, 5.9]}\n\
        SAMPLES {\"version\": \"0.24.0\", \"case\": \"concurrent_32\", \"metric\": \"tok_s\", \"samples\": [4300]}\n";

    fn run(name: &str) -> Run {
        Run::named(name.into(), Conditions { commit: "c".into(), machine: "1x H200".into(), command: "x".into() })
    }

    fn ours(name: &str, itl_ms: f64) -> Figure {
        let key = Key { model: MODEL.name, dtype: MODEL.dtype, case: "concurrent_32", metric: "itl_ms" };
        run(name).figure(key, &[itl_ms])
    }

    #[test]
    fn a_peers_samples_become_figures_of_our_run() {
        let found = figures(LOG, "vllm", MODEL, &run("a")).unwrap();
        let first = (found[0].value, found[0].n, found[0].min, found[0].max);
        assert_eq!((found.len(), first), (2, (5.9, 3, 5.8, 6.0)));
        assert_eq!(
            (found[0].system.as_str(), found[0].version.as_str(), found[0].run.as_str()),
            ("vllm", "0.24.0", "a")
        );
    }

    #[test]
    fn a_log_that_says_nothing_or_nonsense_is_refused() {
        let refused = |log: &str| format!("{:#}", figures(log, "vllm", MODEL, &run("a")).unwrap_err());
        assert!(refused("Traceback: no GPU\n").contains("did not run"));
        assert!(refused("x\nSAMPLES {\"case\"\n").starts_with("line 2"));
        let unknown = "SAMPLES {\"version\": \"1\", \"case\": \"batch\", \"metric\": \"tok_s\", \"samples\": [1]}\n";
        assert!(refused(unknown).contains("batch is not a case"));
        assert!(refused(&unknown.replace("batch", "start").replace("[1]", "[]")).contains("needs a sample"));
    }

    #[test]
    fn ratios_are_formed_of_both_our_turns_and_only_inside_a_run() {
        let theirs = figures(LOG, "vllm", MODEL, &run("a")).unwrap();
        let all = [vec![ours("a", 5.0)], theirs, vec![ours("a", 5.9), ours("b", 1.0)]].concat();
        let ratios: Vec<_> = joined(all).into_iter().filter(|figure| figure.metric == "ratio_to_vllm").collect();
        assert_eq!(ratios.len(), 1, "tok_s is not what the case is for: {ratios:?}");
        assert_eq!((ratios[0].n, ratios[0].min, ratios[0].max), (2, 1.0, 5.9 / 5.0));
        assert_eq!(ratios[0].system, "stoker");
    }
}
