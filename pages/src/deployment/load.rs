//! Load over time: one panel for each thing that is measured, all on one axis, decisions on it.

use maud::{Markup, PreEscaped, html};
use stoker_figures::{Moment, Series, Timeline, round_top};

use super::{
    query::{DeploymentQuery, Range},
    view::{Change, Deployment, Point},
};
use crate::words;

/// One thing that is measured.
struct Panel<'a> {
    name: &'a str,
    /// The newest value, in words.
    now: String,
    series: Vec<Series>,
    /// Class and name of each series, where there are several.
    legend: &'a [(&'static str, &'static str)],
    target: Option<f64>,
    /// The least that the upper edge stands for.
    least_top: f64,
    top: fn(f64) -> String,
}

/// The section.
pub(super) fn section(view: &Deployment, query: &DeploymentQuery) -> Markup {
    let (from_ms, to_ms) = (view.now_ms.saturating_sub(query.range.ms()), view.now_ms);
    let moments: Vec<Moment> = view.scaling.changes.iter().map(|change| moment(change, query)).collect();
    // Said once, at the replicas: what is below has the same times.
    let silent: Vec<Moment> =
        moments.iter().map(|moment| Moment { words: String::new(), href: None, ..moment.clone() }).collect();
    let is_known = view.history.points.iter().any(|point| point.at_ms >= from_ms);
    html! {
        section #load aria-labelledby="load-h" {
            div.title {
                h2 #load-h { "Load" }
                nav.choice aria-label="How far back" {
                    @for (range, _, name) in Range::ALL {
                        a href={ (query.with_range(range)) "#load" } aria-current=[(range == query.range).then_some("true")] { (name) }
                    }
                }
            }
            @if is_known {
                div.panels {
                    @for (idx, panel) in panels(view).iter().enumerate() { (drawn(panel, (from_ms, to_ms), if idx == 0 { &moments } else { &silent })) }
                    // One below each column; where there is one column the second is not shown.
                    @for class in ["axis", "axis second"] { (axis(class, from_ms, to_ms, query.range)) }
                }
                @if view.leads_since_ms > from_ms.max(view.created_ms) { (before(view)) }
            } @else { p.quiet { "No point yet: the first comes within ten seconds." } }
        }
    }
}

/// Of what stands left of the moment since which this operator leads.
fn before(view: &Deployment) -> Markup {
    let n_witnesses = view.history.n_witnesses;
    html! {
        p.quiet { "Before " (words::moment(view.leads_since_ms, view.now_ms)) " another operator led, or none. "
            @match n_witnesses {
                0 => "What it read is not known any more.",
                1 => "The load of then is what one replica that still runs remembers of itself. What others carried is not in it.",
                _ => { "The load of then is what " (n_witnesses) " replicas that still run remember of themselves. What others carried is not in it." }
            }
        }
    }
}

fn moment(change: &Change, query: &DeploymentQuery) -> Moment {
    Moment {
        at_ms: change.at_ms,
        words: format!("{} → {} replicas, from {}", change.from, change.to, change.cause),
        href: change.has_record.then(|| format!("{}#why", query.with_decision(Some(change.at_ms)))),
        is_open: query.at == Some(change.at_ms),
    }
}

fn panels(view: &Deployment) -> Vec<Panel<'_>> {
    let (replicas, load) = (&view.summary.replicas, &view.summary.load);
    let line = |class: &'static str, of: &dyn Fn(&Point) -> Option<f64>| series(view, class, of);
    let stepped = |class: &'static str, of: &dyn Fn(&Point) -> Option<f64>| Series {
        is_stepped: true,
        ..series(view, class, of)
    };
    let count: fn(f64) -> String = |value| format!("{value:.0}");
    vec![
        Panel {
            name: "Replicas",
            now: format!("{} serving of {}", replicas.serving, replicas.wanted),
            series: vec![stepped("b", &|point| point.wanted), stepped("a", &|point| point.serving)],
            legend: &[("a", "serving"), ("b", "wanted")],
            target: None,
            least_top: 2.0,
            top: count,
        },
        Panel {
            name: "KV in use",
            now: words::known(load.kv, words::percent),
            series: vec![line("a", &|point| point.kv)],
            legend: &[],
            target: view.scaling.kv_target,
            least_top: 1.0,
            top: words::percent,
        },
        Panel {
            name: "Requests",
            now: format!("{} running, {} waiting", load.running, load.waiting),
            series: vec![line("b", &|point| point.waiting), line("a", &|point| point.running)],
            legend: &[("a", "running"), ("b", "waiting")],
            target: None,
            least_top: 4.0,
            top: count,
        },
        Panel {
            name: "Tokens a second",
            now: words::known(load.tokens, words::rate),
            series: vec![line("a", &|point| point.tokens)],
            legend: &[],
            target: None,
            least_top: 10.0,
            top: words::rate,
        },
        Panel {
            name: "TTFT p95",
            now: words::known(load.ttft.p95, words::seconds),
            series: vec![line("a", &|point| point.ttft)],
            legend: &[],
            target: view.scaling.settings.and_then(|settings| settings.ttft).map(|ms| ms / 1000.0),
            least_top: 0.01,
            top: words::seconds,
        },
        Panel {
            name: "ITL p95",
            now: words::known(load.itl.p95, words::seconds),
            series: vec![line("a", &|point| point.itl)],
            legend: &[],
            target: view.scaling.settings.and_then(|settings| settings.itl).map(|ms| ms / 1000.0),
            least_top: 0.01,
            top: words::seconds,
        },
    ]
}

/// Points of the history, with nothing between two that are further apart than they should be.
fn series(view: &Deployment, class: &'static str, of: &dyn Fn(&Point) -> Option<f64>) -> Series {
    let mut points = Vec::with_capacity(view.history.points.len());
    let mut before_ms: Option<u64> = None;
    for point in &view.history.points {
        if before_ms.is_some_and(|before_ms| point.at_ms > before_ms + 5 * view.history.step_ms / 2) {
            points.push((before_ms.unwrap_or_default() + view.history.step_ms, None));
        }
        points.push((point.at_ms, of(point)));
        before_ms = Some(point.at_ms);
    }
    Series { class, is_stepped: false, points }
}

fn drawn(panel: &Panel<'_>, (from_ms, to_ms): (u64, u64), moments: &[Moment]) -> Markup {
    let values = panel.series.iter().flat_map(|series| series.points.iter().filter_map(|(_, value)| *value));
    let most = values.chain(panel.target).fold(panel.least_top, f64::max);
    let top = round_top(most);
    let timeline = Timeline { from_ms, to_ms, top, series: &panel.series, target: panel.target, moments };
    html! {
        figure.panel {
            figcaption {
                span.name { (panel.name) }
                @for (class, name) in panel.legend { span.key.(class) { (name) } }
                @if let Some(target) = panel.target { span.key.target { "target " (words::rounded((panel.top)(target))) } }
                span.now { (panel.now) }
            }
            div.plot { span.edge { (words::rounded((panel.top)(top))) } (PreEscaped(timeline.svg())) }
        }
    }
}

/// As many parts as are whole minutes, so that marks are seen to be as far apart as they are.
fn axis(class: &str, from_ms: u64, to_ms: u64, range: Range) -> Markup {
    let parts = match range {
        Range::Minutes => 5,
        Range::Hour => 4,
        Range::SixHours | Range::Day => 6,
    };
    let marks = (0..=parts).map(|part| from_ms + (to_ms - from_ms) * part / parts);
    html! { div class=(class) aria-hidden="true" { @for at_ms in marks { span { (words::minute(at_ms)) } } } }
}
