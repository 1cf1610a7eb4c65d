//! Why there are that many replicas: one decision in words, and those that changed the number.

use maud::{Markup, html};

use super::{
    query::DeploymentQuery,
    view::{Change, Decision, Deployment, Opened},
};
use crate::words;

/// Changes of the number that are seen at once: older ones are a click away.
const CHANGES: usize = 6;

/// The decision that is shown in words.
pub(super) fn why(view: &Deployment, query: &DeploymentQuery) -> Markup {
    let wanted = view.summary.replicas.wanted;
    html! {
        section #why aria-labelledby="why-h" {
            h2 #why-h { "Why " (wanted) @if wanted == 1 { " replica" } @else { " replicas" } "?" }
            p.clip { (words::beginning(&view.scaling.who, 400)) }
            @for limit in &view.scaling.limits {
                p.note.wait.clip { (words::beginning(&limit.reason, 60)) ": " (words::beginning(&limit.message, 400)) }
            }
            @match &view.scaling.opened {
                Opened::Nothing => {},
                Opened::Newest(decision) => (in_words(decision, view, "The decision that stands")),
                Opened::Asked(decision) => {
                    (in_words(decision, view, "The decision of"))
                    p { a href=(query.with_decision(None)) { "Back to the newest decision" } }
                },
                Opened::Forgotten { at_ms } => {
                    p.note.wait { "The record of the decision of " (words::moment(*at_ms, view.now_ms)) " is gone: all records are kept for some minutes, those that changed the number for the last twenty changes, and none from before this operator led." }
                    p { a href=(query.with_decision(None)) { "The newest decision" } }
                },
            }
        }
    }
}

fn in_words(decision: &Decision, view: &Deployment, title: &str) -> Markup {
    // Of the newest one no time is shown: it is made again every two seconds, mostly with the same words.
    let is_asked = title.ends_with("of");
    html! {
        figure {
            figcaption { (title) @if is_asked { " " (words::moment(decision.at_ms, view.now_ms)) } ", in the words of " code { "kubectl stoker explain" }
                @if !decision.is_reproduced { ". " strong { "Decided again from its record it comes out otherwise: the record was altered." } }
            }
            div.explained { @for line in words::beginning(&decision.words, 9_000).lines() { div { (line) } } }
        }
    }
}

/// Decisions that changed the number.
pub(super) fn list(view: &Deployment, query: &DeploymentQuery) -> Markup {
    let changes = &view.scaling.changes;
    let is_idle = view.scaling.settings.is_none() && changes.is_empty();
    let (newest, older) = changes.split_at(changes.len().min(CHANGES));
    let is_older_open = older.iter().any(|change| query.at == Some(change.at_ms));
    html! {
        section #decisions aria-labelledby="decisions-h" {
            h2 #decisions-h class=[is_idle.then_some("hidden")] { "Decisions that changed the number" }
            @if changes.is_empty() { p class=(if is_idle { "hidden" } else { "quiet" }) { "None that is known." } }
            @else {
                (table(newest, "Decisions", view, query))
                @if !older.is_empty() {
                    details #older-decisions open[is_older_open] { summary { (older.len()) " older" } (table(older, "Older decisions", view, query)) }
                }
            }
        }
    }
}

fn table(changes: &[Change], name: &str, view: &Deployment, query: &DeploymentQuery) -> Markup {
    html! {
        div.scroll tabindex="0" role="region" aria-label=(name) { table.stack {
            thead { tr { th scope="col" { "When (UTC)" } th.num scope="col" { "Replicas" } th.num scope="col" { "Pressure" } th scope="col" { "From" } th scope="col" { "Bound by" } th scope="col" { "" } } }
            tbody { @for change in changes { (row(change, view, query)) } }
        } }
    }
}

fn row(change: &Change, view: &Deployment, query: &DeploymentQuery) -> Markup {
    let is_open = query.at == Some(change.at_ms);
    html! {
        tr aria-current=[is_open.then_some("true")] {
            td.nowrap { (words::moment(change.at_ms, view.now_ms)) }
            td.num data-is="replicas" { (change.from) " → " (change.to) }
            td.num data-is="pressure" { (change.pressure_percent) " %" }
            td data-is="from" { (words::beginning(&change.cause, 40)) }
            td data-is="bound by" { (words::beginning(&change.bound, 40)) }
            td { @if change.has_record {
                a href={ (query.with_decision(Some(change.at_ms))) "#why" } { "Why" span.hidden { " " (change.from) " to " (change.to) " at " (words::moment(change.at_ms, view.now_ms)) } }
            } @else { span.quiet { "record gone" } } }
        }
    }
}
