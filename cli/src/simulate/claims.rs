//! What the comparison was meant to show, line by line, with the figures and whether they bear it out.

use stoker_sim::{Comparison, Outcomes, Tuned};

const HEADER: &str = "| at equal GPU-hours | ours | best rule | holds |\n|---|---:|---:|---|\n";

/// What a rule must not have much of.
type Count = fn(&Outcomes) -> u64;

const LATE: Count = |outcomes| outcomes.misses;
const PREEMPTED: Count = |outcomes| outcomes.preemptions;

/// The table of claims; the best rule is the one with the fewest, for each line anew. Empty when there is none.
pub(super) fn table(comparisons: &[Comparison], rivals: fn(&Comparison) -> &[Tuned]) -> String {
    if comparisons.iter().all(|comparison| rivals(comparison).is_empty()) {
        return String::new();
    }
    let sums =
        [(LATE, "late answers, summed: at most half", 2), (PREEMPTED, "preemptions, summed: at most a third", 3)];
    let summed = sums.map(|(count, claim, times)| summed(comparisons, rivals, count, claim, times));
    let counts = [(LATE, "late answers"), (PREEMPTED, "preemptions")];
    let each = counts.map(|(count, what)| on_each_trace(comparisons, rivals, count, what));
    [HEADER.to_owned()].into_iter().chain(summed).chain(each).chain([reversals(comparisons)]).collect()
}

fn summed(
    comparisons: &[Comparison],
    rivals: fn(&Comparison) -> &[Tuned],
    count: Count,
    claim: &str,
    times: u64,
) -> String {
    let ours: u64 = comparisons.iter().map(|comparison| count(&comparison.ours)).sum();
    let of = |rival: &str| {
        let all = comparisons.iter().flat_map(rivals).filter(|tuned| tuned.rival == rival);
        all.map(|tuned| count(&tuned.outcomes)).sum::<u64>()
    };
    let compared = comparisons.first().map(rivals).unwrap_or_default();
    let Some((best, rival)) = compared.iter().map(|tuned| (of(&tuned.rival), &tuned.rival)).min_by_key(|(sum, _)| *sum)
    else {
        return String::new();
    };
    format!("| {claim} | {ours} | {best} ({}) | {} |\n", rival, yes(ours * times <= best))
}

fn on_each_trace(comparisons: &[Comparison], rivals: fn(&Comparison) -> &[Tuned], count: Count, what: &str) -> String {
    let more = comparisons.iter().filter_map(|comparison| {
        let of = |tuned: &&Tuned| count(&tuned.outcomes);
        let best = rivals(comparison).iter().min_by_key(of)?;
        let (ours, theirs) = (count(&comparison.ours), of(&best));
        (ours > theirs).then(|| format!("{} {ours} : {theirs} ({})", comparison.trace, best.rival))
    });
    let more: Vec<String> = more.collect();
    let holds = if more.is_empty() { yes(true).to_owned() } else { format!("no: {}", more.join(", ")) };
    format!("| {what}, on no trace more than any rule | | | {holds} |\n")
}

fn reversals(comparisons: &[Comparison]) -> String {
    let most = comparisons.iter().map(|comparison| comparison.ours.reversals_per_hour()).fold(0.0, f64::max);
    format!("| reversals: at most 1 per hour on any trace | {most:.1} | | {} |\n", yes(most <= 1.0))
}

fn yes(holds: bool) -> &'static str {
    if holds { "yes" } else { "no" }
}
