//! What other settings would have decided from the same readings. Not live: it is about a window that was.

use maud::{Markup, PreEscaped, html};
use stoker_figures::{Series, Timeline, round_top};

use super::{
    query::{DeploymentQuery, Range, Settings},
    view::{Deployment, WhatIf},
};
use crate::words;

/// The section; nothing where nothing is decided.
pub(super) fn section(view: &Deployment, query: &DeploymentQuery) -> Markup {
    let Some(in_force) = view.scaling.settings else { return html! {} };
    let shown = query.tried(in_force).unwrap_or(in_force);
    html! {
        section #what-if aria-labelledby="what-if-h" {
            h2 #what-if-h { "What if" }
            p { "The recorded decisions, made again by the same function with other settings. The load is the one that the replicas of then had: with fewer of them it would have waited longer." }
            (form(&shown, query))
            @if let Some(what_if) = &view.scaling.what_if { (outcome(what_if, view.now_ms)) }
        }
    }
}

/// One setting of the form. Who leaves a field empty that may be so asks for what the object means without it, `empty`.
struct Field {
    name: &'static str,
    words: &'static str,
    step: &'static str,
    value: Option<String>,
    empty: Option<&'static str>,
}

fn fields(shown: &Settings) -> [Field; 10] {
    let whole = |name, words, value: u32| Field { name, words, step: "1", value: Some(value.to_string()), empty: None };
    let real =
        |name, words, value: f64| Field { name, words, step: "any", value: Some(value.to_string()), empty: None };
    let optional = |name, words, value: Option<f64>, empty| {
        let value = value.map(|value| value.to_string());
        Field { name, words, step: "any", value, empty: Some(empty) }
    };
    [
        whole("min", "min", shown.min),
        whole("max", "max", shown.max),
        real("kv", "targets.kv", shown.kv),
        optional("slowdown", "targets.slowdown", shown.slowdown, "as itlMs allows"),
        real("queue", "targets.queueSeconds", shown.queue),
        optional("ttft", "targets.ttftMs", shown.ttft, "none"),
        optional("itl", "targets.itlMs", shown.itl, "50"),
        real("late", "prices.lateAnswer", shown.late),
        real("hour", "prices.replicaHour", shown.hour),
        Field { step: "1", ..optional("spare", "behavior.spareReplicas", shown.spare.map(f64::from), "by prices") },
    ]
}

fn form(shown: &Settings, query: &DeploymentQuery) -> Markup {
    let range = Range::ALL.iter().find(|(range, ..)| *range == query.range).map_or("", |(_, word, _)| word);
    html! {
        form.form action="#what-if" method="get" {
            @if query.range != Range::default() { input type="hidden" name="range" value=(range); }
            @for Field { name, words, step, value, empty } in fields(shown) {
                div.field { label for={ "w-" (name) } { (words) } input id={ "w-" (name) } name=(name) type="number" step=(step) min="0" value=[value] placeholder=[empty] inputmode=[(step == "any").then_some("decimal")]; }
            }
            button { "Decide again" }
        }
    }
}

fn outcome(what_if: &WhatIf, now_ms: u64) -> Markup {
    let (Some(first), Some(last)) = (what_if.points.first(), what_if.points.last()) else {
        return html! { p.note.bad role="alert" {
            @if what_if.errors.is_empty() { "No decision is recorded yet." }
            @for error in &what_if.errors { (words::beginning(error, 300)) ". " }
        } };
    };
    let (from_ms, to_ms) = (first.0, last.0.max(first.0 + 1));
    let line = |class: &'static str, of: fn(&(u64, u32, u32)) -> u32| Series {
        class,
        is_stepped: true,
        points: what_if.points.iter().map(|point| (point.0, Some(f64::from(of(point))))).collect(),
    };
    let series = [line("b", |point| point.1), line("a", |point| point.2)];
    let top = round_top(f64::from(what_if.points.iter().map(|point| point.1.max(point.2)).max().unwrap_or(2).max(2)));
    let timeline = Timeline { from_ms, to_ms, top, series: &series, target: None, moments: &[] };
    html! {
        figure.panel {
            figcaption { span.name { "Replicas wanted" } span.key.b { "as it was" } span.key.a { "with these settings" } }
            div.plot { span.edge { (format!("{top:.0}")) } (PreEscaped(timeline.svg())) }
            div.axis aria-hidden="true" { span { (words::moment(from_ms, now_ms)) } span { (words::moment(to_ms, now_ms)) } }
        }
        div.scroll tabindex="0" role="region" aria-label="What if, in numbers" { table {
            thead { tr { th scope="col" { (what_if.points.len()) @if what_if.points.len() == 1 { " decision" } @else { " decisions" } } th.num scope="col" { "as it was" } th.num scope="col" { "with these settings" } } }
            tbody {
                tr { th scope="row" { "Replicas, mean" } td.num { (mean(what_if, |point| point.1)) } td.num { (mean(what_if, |point| point.2)) } }
                tr { th scope="row" { "Replicas, most" } td.num { (most(what_if, |point| point.1)) } td.num { (most(what_if, |point| point.2)) } }
                tr { th scope="row" { "Changes of the number" } td.num { (changes(what_if, |point| point.1)) } td.num { (changes(what_if, |point| point.2)) } }
            }
        } }
    }
}

type Of = fn(&(u64, u32, u32)) -> u32;

fn mean(what_if: &WhatIf, of: Of) -> String {
    let sum: f64 = what_if.points.iter().map(|point| f64::from(of(point))).sum();
    format!("{:.2}", sum / what_if.points.len().max(1) as f64)
}

fn most(what_if: &WhatIf, of: Of) -> u32 {
    what_if.points.iter().map(of).max().unwrap_or_default()
}

fn changes(what_if: &WhatIf, of: Of) -> usize {
    what_if.points.windows(2).filter(|pair| of(&pair[0]) != of(&pair[1])).count()
}
