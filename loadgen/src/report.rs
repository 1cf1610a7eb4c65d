//! A run as a report for a browser, in the look of all pages: the summary, and its course over time. Pure.

use stoker_pages::report::{Course, Line, Report, Section};

use crate::{
    run::{Heard, Outcome},
    summary::{Failures, Percentiles, Summary},
};

const ABOUT: &str = "Written by stoker-load --html. Requests leave when they were planned, answered or not; latencies count from that moment. \
                     Courses are by the moment at which a request was planned.";
/// Points of a course at most.
const POINTS: f64 = 120.0;

/// The file.
pub fn report(title: &str, summary: &Summary, outcomes: &[Outcome]) -> String {
    let sections = vec![requests(summary), latencies(summary, outcomes)];
    Report { title: title.to_owned(), about: ABOUT.to_owned(), sections }.render()
}

fn requests(summary: &Summary) -> Section {
    let row = |name: &str, value: String| vec![name.to_owned(), value];
    let mut rows = vec![
        row("Planned", summary.planned.to_string()),
        row("Answered", summary.answered.to_string()),
        row("Answered a second", format!("{:.2}", summary.answered_per_second)),
        row("Completion tokens a second", format!("{:.1}", summary.completion_tokens_per_second)),
        row("Met the targets", format!("{} ({:.1} %)", summary.goodput.count, summary.goodput.share * 100.0)),
    ];
    let failed = |(kind, Failures { count, first }): (&String, &Failures)| row(kind, format!("{count}: {first}"));
    rows.extend(summary.failures.iter().map(failed));
    Section {
        title: format!("Requests in {:.1} s", summary.seconds),
        columns: vec!["What".to_owned(), "How many".to_owned()],
        rows,
        ..Section::default()
    }
}

fn latencies(summary: &Summary, outcomes: &[Outcome]) -> Section {
    let rows = [
        ("To the first text", &summary.ttft_seconds),
        ("Between pieces of text", &summary.itl_seconds),
        ("To the last text", &summary.e2e_seconds),
        ("Sent late by", &summary.send_lag_seconds),
    ];
    let cells = |(name, Percentiles { p50, p90, p99, max }): (&str, &Percentiles)| {
        let numbers = [p50, p90, p99, max].map(|seconds| format!("{seconds:.3}"));
        std::iter::once(name.to_owned()).chain(numbers).collect()
    };
    Section {
        title: "Latencies in seconds".to_owned(),
        columns: ["", "p50", "p90", "p99", "max"].map(str::to_owned).to_vec(),
        rows: rows.into_iter().map(cells).collect(),
        courses: courses(outcomes),
        ..Section::default()
    }
}

/// Over steps of at least a second.
fn courses(outcomes: &[Outcome]) -> Vec<Course> {
    let planned = |outcome: &Outcome| outcome.planned.map_or(0.0, |planned| planned.as_secs_f64());
    let step = (outcomes.iter().map(planned).fold(0.0, f64::max) / POINTS).max(1.0);
    let mut steps: Vec<Vec<&Outcome>> = Vec::new();
    for outcome in outcomes.iter().filter(|outcome| outcome.planned.is_some()) {
        let idx = (planned(outcome) / step) as usize;
        if steps.len() <= idx {
            steps.resize(idx + 1, Vec::new());
        }
        steps[idx].push(outcome);
    }
    let line = |name: &str, of: &dyn Fn(&[&Outcome]) -> f64| Line {
        name: name.to_owned(),
        points: steps.iter().enumerate().map(|(idx, all)| (idx as f64 * step, of(all))).collect(),
    };
    let answers = |all: &[&Outcome]| heard(all).count() as f64 / step;
    let ttft =
        |of: fn(Percentiles) -> f64| move |all: &[&Outcome]| of(Percentiles::of(heard(all).map(|heard| heard.ttft)));
    vec![
        Course {
            name: "Requests a second".to_owned(),
            lines: vec![line("answered", &answers), line("planned", &|all| all.len() as f64 / step)],
        },
        Course {
            name: "Seconds to the first text".to_owned(),
            lines: vec![line("p50", &ttft(|of| of.p50)), line("p99", &ttft(|of| of.p99))],
        },
    ]
}

fn heard<'a>(outcomes: &'a [&'a Outcome]) -> impl Iterator<Item = &'a Heard> {
    outcomes.iter().filter_map(|outcome| outcome.result.as_ref().ok())
}
