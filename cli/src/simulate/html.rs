//! The comparison as a report for a browser, in the look of all pages.

use stoker_pages::report::{Course, Line, Report, Section};
use stoker_sim::{Comparison, plot::Panel};

use super::report::{Row, rows};

const ABOUT: &str = "Written by kubectl stoker simulate --out. Each rule on the same simulated replicas, rivals with one target that costs \
                     at most 2 % more GPU-hours than ours in all; ! is the cheapest target a rule has, and still dearer. The oracle \
                     knew what came.";
const COLUMNS: [&str; 7] = ["Rule", "Target", "Late answers", "Late, %", "Preemptions", "GPU-hours", "Reversals/h"];

/// The file.
pub(super) fn report(comparisons: &[Comparison]) -> String {
    let sections = comparisons.iter().map(section).collect();
    Report { title: "Scaling rules compared".to_owned(), about: ABOUT.to_owned(), sections }.render()
}

fn section(comparison: &Comparison) -> Section {
    let (ours, rivals) = (&comparison.ours, &comparison.one_target);
    Section {
        title: format!("{}: {} requests in {:.0} minutes", comparison.trace, ours.requests, ours.seconds / 60.0),
        columns: COLUMNS.map(str::to_owned).to_vec(),
        rows: rows(comparison, rivals).iter().map(cells).collect(),
        courses: comparison.panels().into_iter().map(course).collect(),
        ..Section::default()
    }
}

fn cells(row: &Row<'_>) -> Vec<String> {
    let Row { rule, target, outcomes, percent } = row;
    vec![
        (*rule).to_owned(),
        target.clone(),
        outcomes.misses.to_string(),
        format!("{percent:.2}"),
        outcomes.preemptions.to_string(),
        format!("{:.2}", outcomes.gpu_hours()),
        format!("{:.1}", outcomes.reversals_per_hour()),
    ]
}

fn course(panel: Panel) -> Course {
    let lines = panel.series.into_iter().map(|series| Line { name: series.name, points: series.points }).collect();
    Course { name: panel.label, lines }
}
