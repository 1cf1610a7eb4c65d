//! One deployment: how it is and why, who its replicas are, what its load was, what was decided, and what other settings would
//! have decided. Everything that is opened is in the address.

mod decisions;
mod load;
mod query;
mod replicas;
mod view;
mod what_if;

use maud::{Markup, html};

pub use self::{
    query::{DeploymentQuery, Range, Settings},
    view::{
        Change, Condition, Decision, Deployment, History, Opened, Point, ReplicaLoad, ReplicaRow, RevisionCount,
        Scaling, Told, WhatIf,
    },
};
use crate::{
    layout::{Page, Step},
    live::{self, Fragment},
    view::{Summary, mark},
    words,
};

/// Events that are seen at once: older ones are a click away.
const EVENTS: usize = 15;

/// The whole page.
pub fn page(view: &Deployment, query: &DeploymentQuery) -> String {
    let Summary { namespace, name, .. } = &view.summary;
    let main = html! {
        @for part in parts(view, query) {
            (maud::PreEscaped(part.html))
            @if part.id == "decisions" { (what_if::section(view, query)) }
        }
    };
    let events = format!("{}/events{}", view.summary.href(), query.address());
    let ns = format!("/?ns={}", words::encoded(namespace));
    let step = |name: &str, href| Step { name: words::beginning(name, 64), href };
    Page {
        title: &words::beginning(name, 80),
        trail: &[step("Stoker", Some("/".to_owned())), step(namespace, Some(ns)), step(name, None)],
        aside: live::sign(&events),
        main,
        styles: &[],
        scripts: &[&live::SCRIPT],
    }
    .render()
}

/// Its parts that change.
pub fn parts(view: &Deployment, query: &DeploymentQuery) -> Vec<Fragment> {
    vec![
        Fragment::new("head", head(view)),
        Fragment::new("why", decisions::why(view, query)),
        Fragment::new("load", load::section(view, query)),
        Fragment::new("decisions", decisions::list(view, query)),
        Fragment::new("replicas", replicas::section(view)),
        Fragment::new("rollout", rollout(view)),
        Fragment::new("conditions", conditions(view)),
        Fragment::new("events", events(view)),
    ]
}

/// A deployment that there is not.
pub fn absent(namespace: &str, name: &str) -> String {
    let main = html! {
        h1 { "No such deployment" }
        p { "There is no InferenceDeployment " code { (words::beginning(namespace, 64)) "/" (words::beginning(name, 64)) } " that this operator watches. It may have been deleted." }
        p { a href="/" { "All deployments" } }
    };
    let trail = [Step { name: "Stoker".to_owned(), href: Some("/".to_owned()) }];
    Page { title: "No such deployment", trail: &trail, aside: html! {}, main, styles: &[], scripts: &[] }.render()
}

/// In the place of a deployment that went while its page was open.
pub fn gone() -> Fragment {
    Fragment::new(
        "head",
        html! {
            div #head { h1 { "Deleted" } p.note.bad { "This deployment is gone. What stands below is what was last known of it." } }
        },
    )
}

fn head(view: &Deployment) -> Markup {
    let Summary { name, namespace, model, state, replicas, load, gpus } = &view.summary;
    html! {
        div #head {
            div.title {
                h1 { (words::beginning(name, 80)) } (mark(state.tone, &state.word))
            }
            p.quiet.clip { (words::beginning(namespace, 64)) " · " (words::beginning(model, 300)) @if !view.revision.is_empty() { " · revision " span.mono { (words::beginning(&view.revision, 40)) } } }
            @if !state.message.is_empty() { p.clip { (words::beginning(&state.message, 1000)) } }
            @if !view.url.is_empty() {
                p.clip { "Talk to it at " code { (words::beginning(view.url.trim_end_matches("/v1"), 300)) } " inside the cluster: a page for people, and the API at " code { "/v1" } "." }
            }
            dl.facts {
                div { dt { "Replicas serving" } dd { (replicas.serving) " " small { "of " (replicas.wanted)
                    @if replicas.starting > 0 { ", " (replicas.starting) " starting" }
                    @if replicas.leaving > 0 { ", " (replicas.leaving) " leaving" }
                } } }
                div { dt { "KV in use" } dd { (words::known(load.kv, words::percent)) } }
                div { dt { "Requests" } dd { (load.running) " " small { "running, " (load.waiting) " waiting" } } }
                div { dt { "Tokens" } dd { (words::known(load.tokens, words::rate)) " " small { "a second" } } }
                div { dt { "TTFT p50 / p95" } dd.tight { (load.ttft.words()) } }
                div { dt { "ITL p50 / p95" } dd.tight { (load.itl.words()) } }
                div { dt { "Preemptions" } dd { (load.preemptions) " " small { "a minute" } } }
                @if gpus.used + gpus.waiting > 0 {
                    div { dt { "GPUs" } dd { (gpus.used) " " small { "in use" @if gpus.waiting > 0 { ", " (gpus.waiting) " waited for" } } } }
                }
            }
            @if replicas.serving > load.fresh {
                p.note.wait { "Only " (load.fresh) " of " (replicas.serving) " serving replicas " @if load.fresh == 1 { "has" } @else { "have" } " a reading of the last seconds that can be believed; numbers are of those." }
            }
        }
    }
}

fn rollout(view: &Deployment) -> Markup {
    html! {
        section #rollout aria-labelledby="rollout-h" {
            @if view.revisions.len() > 1 || view.revisions.iter().any(|one| !one.is_wanted) {
                h2 #rollout-h { "Rollout" }
                p.clip { (words::beginning(&view.progress, 500)) }
                div.scroll tabindex="0" role="region" aria-label="Revisions" { table.stack {
                    thead { tr { th scope="col" { "Revision" } th scope="col" { "" } th.num scope="col" { "Serving" } th.num scope="col" { "Starting" } th.num scope="col" { "Leaving" } } }
                    tbody { @for one in &view.revisions { tr {
                        th.mono scope="row" { (words::beginning(&one.revision, 40)) }
                        td { @if one.is_wanted { "wanted" } @else { "older" } }
                        td.num data-is="serving" { (one.serving) } td.num data-is="starting" { (one.starting) } td.num data-is="leaving" { (one.leaving) }
                    } } }
                } }
            } @else { h2.hidden #rollout-h { "Rollout" } p.hidden { "No rollout is under way." } }
        }
    }
}

fn events(view: &Deployment) -> Markup {
    let (newest, older) = view.events.split_at(view.events.len().min(EVENTS));
    html! {
        section #events aria-labelledby="events-h" {
            h2 #events-h { "Events" }
            @if view.events.is_empty() {
                p.quiet { "Nothing was told since this operator leads, " (words::moment(view.leads_since_ms, view.now_ms)) ". Older ones: " code { "kubectl get events" } "." }
            } @else {
                (told(newest, "Events", view.now_ms))
                @if !older.is_empty() { details #older-events { summary { (older.len()) " older" } (told(older, "Older Events", view.now_ms)) } }
            }
        }
    }
}

fn told(events: &[Told], name: &str, now_ms: u64) -> Markup {
    html! {
        div.scroll tabindex="0" role="region" aria-label=(name) { table.stack {
            thead { tr { th scope="col" { "When (UTC)" } th scope="col" { "Reason" } th scope="col" { "Message" } } }
            tbody { @for one in events { tr {
                td.nowrap { (words::moment(one.at_ms, now_ms)) }
                td { (mark(one.tone, &one.reason)) }
                td.clip { (words::beginning(&one.note, 300)) }
            } } }
        } }
    }
}

fn conditions(view: &Deployment) -> Markup {
    html! {
        section #conditions aria-labelledby="conditions-h" {
            h2 #conditions-h { "Conditions" }
            @if view.conditions.is_empty() { p.quiet { "None yet." } }
            @else { div.scroll tabindex="0" role="region" aria-label="Conditions" { table.stack {
                thead { tr { th scope="col" { "Condition" } th scope="col" { "Reason" } th scope="col" { "Message" } th scope="col" { "Since (UTC)" } } }
                tbody { @for one in &view.conditions { tr {
                    th.nowrap scope="row" { (words::beginning(&one.type_, 60)) ": " (words::beginning(&one.status, 20)) }
                    td { (mark(one.tone, &one.reason)) }
                    td.clip { (words::beginning(&one.message, 600)) }
                    td.nowrap data-is="since" { (words::moment(one.since_ms, view.now_ms)) }
                } } }
            } } }
        }
    }
}
