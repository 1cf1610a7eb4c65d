//! A report that stands by itself: one file with tables and courses over time, in the look of all pages. What it needs is in it, nothing
//! comes from elsewhere and nothing runs, so that it can be sent to a colleague. Knows nobody's figures.

use maud::{DOCTYPE, Markup, PreEscaped, html};
use stoker_figures::{Series, Timeline, round_top};

use crate::{assets::STYLE, words};

/// Colours that lines have, in their order.
const COLOURS: [&str; 5] = ["a", "b", "c", "d", "e"];
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'";

/// See the module.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// What it is about.
    pub title: String,
    /// How it was made, and what its words mean.
    pub about: String,
    /// What it shows.
    pub sections: Vec<Section>,
}

/// A table, and courses below it; either may be empty.
#[derive(Clone, Debug, Default)]
pub struct Section {
    /// Its heading.
    pub title: String,
    /// Words of the columns, the first one that of the rows' names.
    pub columns: Vec<String>,
    /// Cells, each row as long as `columns`.
    pub rows: Vec<Vec<String>>,
    /// How many times better than something else each row is, drawn as a bar beside its name; may be empty.
    pub ratios: Vec<f64>,
    /// Courses, all over the same time.
    pub courses: Vec<Course>,
    /// What stands at the end of the courses, where they are not over time.
    pub along: Option<String>,
}

/// Values of one kind, over time or something else.
#[derive(Clone, Debug, Default)]
pub struct Course {
    /// What is measured, with its unit.
    pub name: String,
    /// What is compared, the one that the report is about first.
    pub lines: Vec<Line>,
}

/// Values over time.
#[derive(Clone, Debug, Default)]
pub struct Line {
    /// Whose.
    pub name: String,
    /// Seconds since the beginning, or places along something else, in order, and how much.
    pub points: Vec<(f64, f64)>,
}

impl Report {
    /// The file.
    pub fn render(&self) -> String {
        let Self { title, about, sections } = self;
        let document = html! {
            (DOCTYPE)
            html lang="en" {
                head {
                    meta charset="utf-8";
                    meta name="viewport" content="width=device-width, initial-scale=1";
                    meta name="color-scheme" content="light dark";
                    meta http-equiv="Content-Security-Policy" content=(POLICY);
                    title { (title) " · Stoker" }
                    style { (PreEscaped(STYLE.text)) }
                }
                body { main {
                    h1 { (title) }
                    p.quiet { (about) }
                    @for section in sections { (part(section)) }
                } }
            }
        };
        document.into_string()
    }
}

fn part(section: &Section) -> Markup {
    let seconds = section.courses.iter().flat_map(|course| &course.lines).filter_map(|line| line.points.last());
    let seconds = seconds.map(|(at, _)| *at).fold(1.0, f64::max);
    html! {
        section {
            h2 { (section.title) }
            @if !section.rows.is_empty() { (table(section)) }
            @if !section.courses.is_empty() {
                @let end = section.along.clone().unwrap_or_else(|| words::rounded(words::seconds(seconds)));
                @let n_panels = section.courses.len();
                div.panels {
                    @for course in &section.courses { (drawn(course, seconds)) }
                    // One below each column. The second column has the fewer panels, so its axis comes first where they are not
                    // as many; where there is one column it is not shown.
                    @let axes = if n_panels % 2 == 1 { ["axis second", "axis"] } else { ["axis", "axis second"] };
                    @for class in axes.into_iter().filter(|class| n_panels > 1 || *class == "axis") {
                        div class=(class) aria-hidden="true" { span { "0" } span { (end) } }
                    }
                }
            }
        }
    }
}

fn table(section: &Section) -> Markup {
    let sizes = section.ratios.iter().map(|ratio| ratio.log2().abs()).filter(|size| size.is_finite());
    let octaves = sizes.fold(1.0, f64::max);
    html! {
        div.scroll tabindex="0" role="region" aria-label=(section.title) { table {
            thead { tr {
                @for (idx, column) in section.columns.iter().enumerate() {
                    th.num[is_of_numbers(section, idx)] scope="col" { (column) }
                    @if idx == 0 && !section.ratios.is_empty() { th scope="col" { "behind | ahead" } }
                }
            } }
            tbody { @for (nth, row) in section.rows.iter().enumerate() { tr {
                @for (idx, cell) in row.iter().enumerate() {
                    @if idx == 0 {
                        th scope="row" { (cell) }
                        @if let Some(ratio) = section.ratios.get(nth) { td { (bar(*ratio, octaves)) } }
                    } @else {
                        td.num[is_of_numbers(section, idx)] { (cell) }
                    }
                }
            } } }
        } }
    }
}

/// Whether a column has numbers only, ranges of them included: those stand to the right, words to the left.
fn is_of_numbers(section: &Section, column: usize) -> bool {
    let mut cells = section.rows.iter().filter_map(|row| row.get(column));
    column > 0 && cells.all(|cell| !cell.replace(" to ", " ").contains(char::is_alphabetic))
}

/// A bar on a logarithmic axis, from 1 in its middle to the right where ahead and to the left where behind; `octaves` each way.
/// The row says the number, so the bar says nothing to who hears it.
fn bar(ratio: f64, octaves: f64) -> Markup {
    let along = |ratio: f64| 60.0 + 58.0 * (ratio.log2() / octaves).clamp(-1.0, 1.0);
    let (from, to) = (along(ratio.min(1.0)), along(ratio.max(1.0)));
    html! {
        svg.ratio viewBox="0 0 120 12" aria-hidden="true" {
            @if !ratio.is_nan() {
                rect.behind[ratio < 1.0] x=(format!("{from:.1}")) y="2" width=(format!("{:.1}", to - from)) height="8" {}
            }
            path d="M60 0V12" {}
        }
    }
}

fn drawn(course: &Course, seconds: f64) -> Markup {
    let ms = |at: f64| (at.max(0.0) * 1000.0) as u64;
    let line = |(idx, Line { points, .. }): (usize, &Line)| Series {
        class: COLOURS[idx % COLOURS.len()],
        is_stepped: false,
        points: points.iter().map(|(at, value)| (ms(*at), value.is_finite().then_some(*value))).collect(),
    };
    // The first one is what the report is about: it lies above the others.
    let series: Vec<Series> = course.lines.iter().enumerate().rev().map(line).collect();
    let values = course.lines.iter().flat_map(|line| &line.points).map(|(_, value)| *value);
    let top = round_top(values.fold(0.0, f64::max));
    let timeline = Timeline { from_ms: 0, to_ms: ms(seconds), top, series: &series, target: None, moments: &[] };
    html! {
        figure.panel {
            figcaption {
                span.name { (course.name) }
                @if course.lines.len() > 1 {
                    @for (idx, line) in course.lines.iter().enumerate() { span.key.(COLOURS[idx % COLOURS.len()]) { (line.name) } }
                }
            }
            div.plot { span.edge { (words::rounded(words::rate(top))) } (PreEscaped(timeline.svg())) }
        }
    }
}
