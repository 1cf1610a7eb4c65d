//! A run as a report for a browser, in the look of all pages: the summary, its course over time, and whole distributions, of all
//! requests and of each model, kind and place in sessions. Pure.

use std::time::Duration;

use stoker_pages::report::{Course, Line, Report, Section};

use crate::{
    run::{AnswerTiming, Model, Outcome},
    summary::{Failures, Goodput, Group, Percentiles, SORTS, Summary},
};

const ABOUT: &str = "Written by stoker-load --html. Sessions begin when they were planned, answered or not; a later turn is planned when the \
                     answer before it has ended and its user has thought. Latencies count from the planned moment, and courses over \
                     time are by it.";
/// Points of a course at most.
const POINTS: f64 = 120.0;
/// A picture has no more lines, since it has no more colours. Tables have all.
const LINES_MAX: usize = 5;

/// A time that every answer has.
type Time = fn(&AnswerTiming) -> Vec<Duration>;

const TIMES: [(&str, Time); 3] = [
    ("Milliseconds to the first text", |timing| vec![timing.ttft]),
    ("Milliseconds between pieces of text", |timing| timing.gaps.clone()),
    ("Milliseconds to the last text", |timing| vec![timing.e2e]),
];

/// What a run came to.
#[derive(Clone, Copy, Debug)]
pub struct Told<'a> {
    /// Of all requests.
    pub summary: &'a Summary,
    /// Of some of them.
    pub groups: &'a [Group],
    /// One by one.
    pub outcomes: &'a [Outcome],
    /// What outcomes count models by.
    pub models: &'a [Model],
}

/// The file.
pub fn report(title: &str, told: Told<'_>) -> String {
    let all: Vec<&Outcome> = told.outcomes.iter().collect();
    let mut sections = vec![requests(told.summary), latencies(told.summary, &all), distributions(&[("all", all)])];
    let by = SORTS.into_iter().map(|by| told.members(by)).filter(|members| !members.is_empty());
    sections.extend(by.flat_map(|members| [table(&members), compared(&members)]));
    Report { title: title.to_owned(), about: ABOUT.to_owned(), sections }.render()
}

/// A group and its requests.
type Members<'a> = Vec<(&'a Group, Vec<&'a Outcome>)>;

impl<'a> Told<'a> {
    /// The groups of one sort.
    fn members(&self, by: &str) -> Members<'a> {
        let belongs = |group: &Group, outcome: &&Outcome| group.name == outcome.group(by, self.models);
        let groups = self.groups.iter().filter(|group| group.by == by);
        groups.map(|group| (group, self.outcomes.iter().filter(|one| belongs(group, one)).collect())).collect()
    }
}

fn requests(summary: &Summary) -> Section {
    let row = |name: &str, value: String| vec![name.to_owned(), value];
    let mut rows = vec![
        row("Planned", summary.planned.to_string()),
        row("Answered", summary.answered.to_string()),
        row("Answered a second", format!("{:.2}", summary.answered_per_second)),
        row("Completion tokens a second", format!("{:.1}", summary.completion_tokens_per_second)),
    ];
    let good = |Goodput { slo, count, share, .. }: &Goodput| {
        row(&format!("Met {slo}"), format!("{count} ({:.1} %)", share * 100.0))
    };
    rows.extend(summary.goodput.iter().map(good));
    rows.extend(summary.checked.iter().map(|checked| row("JSON and tool calls", checked.to_string())));
    let failed = |(kind, Failures { count, first }): (&String, &Failures)| row(kind, format!("{count}: {first}"));
    rows.extend(summary.failures.iter().map(failed));
    Section {
        title: format!("Requests in {:.1} s", summary.seconds),
        columns: vec!["What".to_owned(), "How many".to_owned()],
        rows,
        ..Section::default()
    }
}

fn latencies(summary: &Summary, outcomes: &[&Outcome]) -> Section {
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
fn courses(outcomes: &[&Outcome]) -> Vec<Course> {
    let planned = |outcome: &Outcome| outcome.which.planned.as_secs_f64();
    let step = (outcomes.iter().map(|one| planned(one)).fold(0.0, f64::max) / POINTS).max(1.0);
    let mut steps: Vec<Vec<&Outcome>> = Vec::new();
    for outcome in outcomes {
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
    let answers = |all: &[&Outcome]| timings(all).count() as f64 / step;
    let rates = Course {
        name: "Requests a second".to_owned(),
        lines: vec![line("answered", &answers), line("planned", &|all| all.len() as f64 / step)],
    };
    let course = |(name, time): (&str, Time)| {
        let percentile =
            |of: fn(Percentiles) -> f64| move |all: &[&Outcome]| 1e3 * of(Percentiles::of(times(all, time)));
        let lines = vec![line("p50", &percentile(|of| of.p50)), line("p99", &percentile(|of| of.p99))];
        Course { name: name.to_owned(), lines }
    };
    std::iter::once(rates).chain(TIMES.map(course)).collect()
}

/// Every percentile of every time.
fn distributions(members: &[(&str, Vec<&Outcome>)]) -> Section {
    let course = |(name, time): (&str, Time)| Course {
        name: name.to_owned(),
        lines: members.iter().take(LINES_MAX).map(|(name, all)| percentiles(name, times(all, time))).collect(),
    };
    Section {
        title: "From the fastest to the slowest".to_owned(),
        courses: TIMES.map(course).to_vec(),
        along: Some("100 % of them".to_owned()),
        ..Section::default()
    }
}

fn percentiles(name: &str, times: impl Iterator<Item = Duration>) -> Line {
    let mut ms: Vec<f64> = times.map(|time| time.as_secs_f64() * 1e3).collect();
    ms.sort_by(f64::total_cmp);
    let last = ms.len().saturating_sub(1) as f64;
    let at = |percent: u32| {
        let idx = (f64::from(percent) / 100.0 * last).round() as usize;
        ms.get(idx).map(|value| (f64::from(percent), *value))
    };
    Line { name: name.to_owned(), points: (0..=100).filter_map(at).collect() }
}

/// A row for each group.
fn table(members: &Members<'_>) -> Section {
    let by = members.first().map_or("", |(group, _)| group.by);
    let mut columns: Vec<String> =
        [by, "answered", "ttft p50", "p99", "itl p50", "p99", "e2e p50", "p99"].map(str::to_owned).to_vec();
    let slos = members.iter().flat_map(|(group, _)| &group.summary.goodput).map(|good| format!("met {}", good.slo));
    columns.extend(slos.take(members.first().map_or(0, |(group, _)| group.summary.goodput.len())));
    let row = |(Group { name, summary, .. }, _): &(&Group, Vec<&Outcome>)| {
        let mut cells = vec![name.clone(), format!("{} / {}", summary.answered, summary.planned)];
        for Percentiles { p50, p99, .. } in [&summary.ttft_seconds, &summary.itl_seconds, &summary.e2e_seconds] {
            cells.extend([p50, p99].map(|seconds| format!("{seconds:.3}")));
        }
        cells.extend(summary.goodput.iter().map(|good| format!("{:.1} %", good.share * 100.0)));
        cells
    };
    Section {
        title: format!("By {by}, in seconds"),
        columns,
        rows: members.iter().map(row).collect(),
        ..Section::default()
    }
}

fn compared(members: &Members<'_>) -> Section {
    let named: Vec<_> = members.iter().map(|(group, all)| (group.name.as_str(), all.clone())).collect();
    let by = members.first().map_or("", |(group, _)| group.by);
    Section { title: format!("By {by}, from the fastest to the slowest"), ..distributions(&named) }
}

fn times<'a>(outcomes: &[&'a Outcome], time: Time) -> impl Iterator<Item = Duration> + 'a {
    timings(outcomes).flat_map(time)
}

fn timings<'a>(outcomes: &[&'a Outcome]) -> impl Iterator<Item = &'a AnswerTiming> + 'a {
    outcomes.iter().copied().filter_map(|outcome| outcome.result.as_ref().ok()).collect::<Vec<_>>().into_iter()
}
