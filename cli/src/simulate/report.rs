//! What the comparison shows: rows for a terminal, a picture, a page with tables. Computes sums and ratios only.

use std::fmt::Write as _;

use serde_json::{Value, json};
use stoker_sim::{Comparison, Outcomes, STOKER, Tuned, plot};

use super::claims;

const COLUMNS: usize = 72;
/// Name of the row of who knew what came, with no more late answers than ours.
const ORACLE: &str = "oracle";
const HEADER: &str = "| trace | rule | target | late answers | % | preemptions | GPU-hours | reversals/h |\n\
                      |---|---|---:|---:|---:|---:|---:|---:|\n";
const SUM_HEADER: &str =
    "| rule | late answers | preemptions | GPU-hours | most reversals/h |\n|---|---:|---:|---:|---:|\n";

/// Tables and courses of one trace.
pub(crate) fn terminal(comparison: &Comparison) -> String {
    let ours = &comparison.ours;
    let minutes = ours.seconds / 60.0;
    let mut text = format!("\n{}: {} requests in {minutes:.0} minutes", comparison.trace, ours.requests);
    if comparison.names_prefixes {
        let computed = 100.0 * ours.prefill_tokens as f64 / ours.prompt_tokens.max(1) as f64;
        let _ = write!(text, "; with {STOKER}, prefill of {computed:.1} % of the prompt tokens");
    }
    text += "\n";
    text += "  rule         target      late       %  preemptions  GPU-hours  reversals/h\n";
    for row in rows(comparison, &comparison.one_target) {
        let Row { rule, target, outcomes, percent } = row;
        let _ = writeln!(
            text,
            "  {rule:<10} {target:>8} {:>9} {percent:>7.2} {:>12} {:>10.2} {:>12.1}",
            outcomes.misses,
            outcomes.preemptions,
            outcomes.gpu_hours(),
            outcomes.reversals_per_hour()
        );
    }
    comparison.panels().iter().fold(text, |text, panel| text + &plot::rows(panel, COLUMNS))
}

/// For programs: what each rule came to on each trace.
pub(crate) fn json(comparisons: &[Comparison]) -> Value {
    let rule = |row: &Row<'_>| {
        let Row { rule, target, outcomes, percent } = row;
        json!({
            "rule": rule, "target": target, "lateAnswers": outcomes.misses, "latePercent": percent,
            "preemptions": outcomes.preemptions, "gpuHours": outcomes.gpu_hours(),
            "reversalsPerHour": outcomes.reversals_per_hour(),
        })
    };
    let trace = |comparison: &Comparison| {
        let rules: Vec<Value> = rows(comparison, &comparison.one_target).iter().map(rule).collect();
        let ours = &comparison.ours;
        json!({"trace": comparison.trace, "requests": ours.requests, "seconds": ours.seconds, "rules": rules})
    };
    comparisons.iter().map(trace).collect()
}

/// The picture of one trace.
pub(crate) fn picture(comparison: &Comparison) -> String {
    plot::svg(
        &format!("{}: each rule with one target, at the same GPU-hours in all", comparison.trace),
        &comparison.panels(),
    )
}

/// Sums over the traces, each rule with one target.
pub(crate) fn sums(comparisons: &[Comparison]) -> String {
    sums_of(comparisons, |comparison, name| {
        comparison.with_one_target().find(|(rule, _)| *rule == name).map(|(_, outcomes)| outcomes)
    })
}

/// The page of results.
pub(crate) fn page(comparisons: &[Comparison]) -> String {
    let mut text = String::from(
        "# Scaling rules on eight traces\n\nWritten by `kubectl stoker simulate --trace all --against hpa-queue --against \
         kpa --against wva --against wva-v2 --out docs/autoscaling`, never by hand. What the words mean and what follows from it: \
         [autoscaling](../autoscaling.md).\n\n## One target for all traces\n\nOurs runs with its defaults. Each other rule \
         runs with the one target that has the fewest late answers among those that cost, summed over the traces, at \
         most 2 % more GPU-hours than ours, out of 60 from one extreme to the other, 4 at the edge of that budget and 8 \
         around the best. `!`: the cheapest target it has, and still dearer.\n\n",
    );
    text += &sums(comparisons);
    text += "\n";
    text += &claims::table(comparisons, |comparison| &comparison.one_target);
    text += "\n";
    text += &table(comparisons, |comparison| &comparison.one_target);
    text += "\n## Hindsight: the best target for each trace alone\n\nEach other rule gets, trace by trace, the target with \
             the fewest late answers within our GPU-hours on that trace: nobody has it who does not know the load before \
             it comes.\n\n";
    text += &sums_of(comparisons, |comparison, name| {
        comparison.with_hindsight().find(|(rule, _)| *rule == name).map(|(_, outcomes)| outcomes)
    });
    text += "\n";
    text += &claims::table(comparisons, |comparison| &comparison.hindsight);
    text += "\n";
    text += &table(comparisons, |comparison| &comparison.hindsight);
    text += "\n## Pictures\n\n";
    for comparison in comparisons {
        let _ = writeln!(text, "![{0}]({0}.svg)\n", comparison.trace);
    }
    text
}

fn table(comparisons: &[Comparison], rivals: fn(&Comparison) -> &[Tuned]) -> String {
    let mut text = String::from(HEADER);
    for comparison in comparisons {
        for Row { rule, target, outcomes, percent } in rows(comparison, rivals(comparison)) {
            let _ = writeln!(
                text,
                "| {} | {rule} | {target} | {} | {percent:.2} | {} | {:.2} | {:.1} |",
                comparison.trace,
                outcomes.misses,
                outcomes.preemptions,
                outcomes.gpu_hours(),
                outcomes.reversals_per_hour()
            );
        }
    }
    text
}

/// A rule on a trace.
pub(super) struct Row<'a> {
    pub(super) rule: &'a str,
    pub(super) target: String,
    pub(super) outcomes: &'a Outcomes,
    /// Late answers, of all.
    pub(super) percent: f64,
}

/// Ours, who knew what came, and these.
pub(super) fn rows<'a>(comparison: &'a Comparison, rivals: &'a [Tuned]) -> Vec<Row<'a>> {
    let percent = |outcomes: &Outcomes| 100.0 * outcomes.misses as f64 / outcomes.requests.max(1) as f64;
    let ours = &comparison.ours;
    let mut rows = vec![Row { rule: STOKER, target: "default".to_owned(), outcomes: ours, percent: percent(ours) }];
    rows.extend(comparison.oracle.iter().map(|outcomes| Row {
        rule: ORACLE,
        target: "foresight".to_owned(),
        outcomes,
        percent: percent(outcomes),
    }));
    rows.extend(rivals.iter().map(|tuned| Row {
        rule: &tuned.rival,
        target: format!("{:.3}{}", tuned.target, if tuned.is_dearer { "!" } else { "" }),
        outcomes: &tuned.outcomes,
        percent: percent(&tuned.outcomes),
    }));
    rows
}

fn sums_of<'a>(comparisons: &'a [Comparison], of: impl Fn(&'a Comparison, &str) -> Option<&'a Outcomes>) -> String {
    let rivals = comparisons.first().map(|comparison| comparison.one_target.as_slice()).unwrap_or_default();
    let names = [STOKER, ORACLE].into_iter().chain(rivals.iter().map(|tuned| tuned.rival.as_str()));
    names.fold(String::from(SUM_HEADER), |mut text, name| {
        let of_rule =
            |comparison: &'a Comparison| if name == ORACLE { comparison.oracle.as_ref() } else { of(comparison, name) };
        let all: Vec<&Outcomes> = comparisons.iter().filter_map(of_rule).collect();
        if !all.is_empty() {
            let misses: u64 = all.iter().map(|outcomes| outcomes.misses).sum();
            let preemptions: u64 = all.iter().map(|outcomes| outcomes.preemptions).sum();
            let hours: f64 = all.iter().map(|outcomes| outcomes.gpu_hours()).sum();
            let reversals = all.iter().map(|outcomes| outcomes.reversals_per_hour()).fold(0.0, f64::max);
            let _ = writeln!(text, "| {name} | {misses} | {preemptions} | {hours:.1} | {reversals:.1} |");
        }
        text
    })
}
