//! All deployments on one page: what runs, what does not and why. Sorted and filtered by the page's address.

mod query;

use std::collections::BTreeSet;

use maud::{Markup, html};

pub use self::query::{FleetQuery, Order, Sort};
use crate::{
    layout::{Page, Step},
    live::{self, Fragment},
    view::{Summary, Tone, mark},
    words,
};

/// Where changes of the page come from.
pub const EVENTS_PATH: &str = "/events";
/// Rows of one page: what changes in them within two seconds stays under 20 KB a second.
pub const ROWS: usize = 50;
/// Namespaces that may be chosen from; of more, one is written in the address.
const NAMESPACES: usize = 200;

/// What there is at a moment.
#[derive(Clone, Debug, Default)]
pub struct Fleet {
    /// All deployments, in any order.
    pub all: Vec<Summary>,
    /// When it was looked at.
    pub now_ms: u64,
}

/// The part of the fleet that an address asks for.
struct Chosen<'a> {
    rows: Vec<&'a Summary>,
    /// Those that fit, on whatever page.
    n_fitting: usize,
    /// The page, from 1.
    page: usize,
}

/// The whole page.
pub fn page(fleet: &Fleet, query: &FleetQuery) -> String {
    let chosen = choose(fleet, query);
    let main = html! {
        h1 { "Deployments" }
        (facts(fleet))
        (filter(fleet, query))
        (table(fleet, &chosen, query))
    };
    let events = format!("{EVENTS_PATH}{}", query.address());
    Page {
        title: "Deployments",
        trail: &[Step { name: "Stoker".to_owned(), href: None }],
        aside: live::sign(&events),
        main,
        styles: &[],
        scripts: &[&live::SCRIPT],
    }
    .render()
}

/// Its parts that change. While the rows are as many as before, each is a part of its own.
pub fn fragments(fleet: &Fleet, query: &FleetQuery, n_rows_before: Option<usize>) -> (Vec<Fragment>, usize) {
    let chosen = choose(fleet, query);
    let n_rows = chosen.rows.len();
    let mut parts = vec![Fragment::new("facts", facts(fleet))];
    if n_rows_before == Some(n_rows) && n_rows > 0 {
        let row = |(place, summary): (usize, &&Summary)| Fragment::new(row_id(place), row(place, summary));
        parts.extend(chosen.rows.iter().enumerate().map(row));
        parts.push(Fragment::new("pager", pager(&chosen, query)));
    } else {
        parts.push(Fragment::new("fleet", table(fleet, &chosen, query)));
    }
    (parts, n_rows)
}

fn choose<'a>(fleet: &'a Fleet, query: &FleetQuery) -> Chosen<'a> {
    let mut fitting: Vec<&Summary> = fleet.all.iter().filter(|summary| query.takes(summary)).collect();
    fitting.sort_by(|a, b| query.sort.compare(a, b));
    let n_fitting = fitting.len();
    let page = query.page.clamp(1, n_fitting.div_ceil(ROWS).max(1));
    let rows = fitting.into_iter().skip((page - 1) * ROWS).take(ROWS).collect();
    Chosen { rows, n_fitting, page }
}

fn facts(fleet: &Fleet) -> Markup {
    let sum = |of: fn(&Summary) -> u64| fleet.all.iter().map(of).sum::<u64>();
    let count = |tone: Tone| fleet.all.iter().filter(|summary| summary.state.tone == tone).count();
    let serving = sum(|one| one.replicas.serving.into());
    let starting = sum(|one| one.replicas.starting.into());
    let tokens: f64 = fleet.all.iter().filter_map(|one| one.load.tokens).sum();
    let (used, waiting) = (sum(|one| one.gpus.used), sum(|one| one.gpus.waiting));
    let (bad, wait) = (count(Tone::Bad), count(Tone::Wait));
    html! {
        dl.facts #facts {
            div { dt { "Deployments" } dd { (fleet.all.len())
                @if bad > 0 { " " small.trouble { (bad) " in trouble" } }
                @else if wait > 0 { " " small { (wait) " on the way" } }
            } }
            div { dt { "Replicas serving" } dd { (serving) " " small { "of " (sum(|one| one.replicas.wanted.into()))
                @if starting > 0 { ", " (starting) " starting" }
            } } }
            div { dt { "Requests" } dd { (sum(|one| one.load.running.into())) " " small { "running, " (sum(|one| one.load.waiting.into())) " waiting" } } }
            div { dt { "Tokens" } dd { (words::rate(tokens)) " " small { "a second" } } }
            div { dt { "Preemptions" } dd { (sum(|one| one.load.preemptions)) " " small { "a minute" } } }
            div { dt { "GPUs" } dd { (used) " " small { "in use"
                @if waiting > 0 { ", " (waiting) " waited for" }
            } } }
        }
    }
}

fn filter(fleet: &Fleet, query: &FleetQuery) -> Markup {
    let namespaces: BTreeSet<&str> = fleet.all.iter().map(|summary| summary.namespace.as_str()).collect();
    html! {
        form.form action="/" method="get" role="search" {
            div.field { label for="q" { "Name or model" } input #q name="q" type="search" value=(query.q) maxlength="200"; }
            @if namespaces.len() > 1 || !query.ns.is_empty() {
                div.field {
                    label for="ns" { "Namespace" }
                    select #ns name="ns" {
                        option value="" { "all" }
                        @for name in namespaces.iter().take(NAMESPACES) {
                            option value=(name) selected[*name == query.ns] { (name) }
                        }
                    }
                }
            }
            div.field {
                label for="state" { "State" }
                select #state name="state" {
                    option value="" { "any" }
                    option value="trouble" selected[query.is_trouble_only()] { "not as it should be" }
                }
            }
            @if query.sort != Sort::default() { input type="hidden" name="sort" value=(query.sort.word()); }
            button { "Show" }
            @if query.is_narrow() { a.button href="/" { "All" } }
        }
    }
}

fn table(fleet: &Fleet, chosen: &Chosen<'_>, query: &FleetQuery) -> Markup {
    html! {
        div #fleet {
            @if chosen.rows.is_empty() {
                p.empty.scroll { @if fleet.all.is_empty() {
                    "No InferenceDeployment yet. " code { "kubectl apply -f" } " one, and it stands here."
                } @else { "No deployment is like that." } }
            } @else {
                div.scroll tabindex="0" role="region" aria-label="Deployments" {
                    table.fleet.stack {
                        thead { tr {
                            (head(query, Order::Name, "Deployment", None))
                            (head(query, Order::State, "State", None))
                            (head(query, Order::Replicas, "Replicas", Some("serving of wanted")))
                            (head(query, Order::Kv, "KV", Some("share of KV blocks that sequences reference")))
                            (head(query, Order::Running, "Running", Some("requests running + waiting")))
                            (head(query, Order::Tokens, "Tokens/s", Some("generated, all replicas together")))
                            (head(query, Order::Ttft, "TTFT p50 / p95", Some("time to first token over the last minute")))
                            (head(query, Order::Itl, "ITL p50 / p95", Some("between two tokens, over the last minute")))
                            (head(query, Order::Preemptions, "Preempt/min", Some("sequences thrown out of the KV cache")))
                            (head(query, Order::Gpus, "GPUs", Some("in use, and waited for")))
                        } }
                        tbody { @for (place, summary) in chosen.rows.iter().enumerate() { (row(place, summary)) } }
                    }
                }
            }
            (pager(chosen, query))
        }
    }
}

fn head(query: &FleetQuery, order: Order, words: &str, title: Option<&str>) -> Markup {
    let sorted = (query.sort.order == order).then_some(if query.sort.descending { "descending" } else { "ascending" });
    let class = (!matches!(order, Order::Name | Order::State)).then_some("num");
    html! { th scope="col" class=[class] aria-sort=[sorted] title=[title] { a href=(query.sorted_by(order)) { (words) } } }
}

fn row_id(place: usize) -> String {
    format!("row-{place}")
}

fn row(place: usize, summary: &Summary) -> Markup {
    let Summary { namespace, name, model, state, replicas, load, gpus } = summary;
    html! {
        tr id=(row_id(place)) {
            th scope="row" {
                a href=(summary.href()) { (words::beginning(name, 80)) }
                div.under { (words::beginning(namespace, 64)) " · " span title=(words::beginning(model, 300)) { (words::beginning(model, 40)) } }
            }
            td.state { (mark(state.tone, &state.word)) @if !matches!(state.tone, Tone::Good) && !state.message.is_empty() { div.under { (words::beginning(&state.message, 240)) } } }
            td.num data-is="replicas" { (replicas.serving) " / " (replicas.wanted)
                @if replicas.starting > 0 { div.under { "+" (replicas.starting) " starting" } }
                @if replicas.leaving > 0 { div.under { "−" (replicas.leaving) " leaving" } }
            }
            td.num data-is="KV" { (words::known(load.kv, words::percent)) }
            td.num data-is="running" { (load.running) @if load.waiting > 0 { span.quiet { " + " (load.waiting) } } }
            td.num data-is="tokens/s" { (words::known(load.tokens, words::rate)) }
            td.num data-is="TTFT" { (load.ttft.words()) }
            td.num data-is="ITL" { (load.itl.words()) }
            td.num data-is="preempt/min" { (load.preemptions) }
            td.num data-is="GPUs" { (gpus.used) @if gpus.waiting > 0 { div.under { "+" (gpus.waiting) " waited for" } } }
        }
    }
}

fn pager(chosen: &Chosen<'_>, query: &FleetQuery) -> Markup {
    let Chosen { n_fitting, page, .. } = *chosen;
    let n_pages = n_fitting.div_ceil(ROWS).max(1);
    let (first, last) = ((page - 1) * ROWS + 1, (page * ROWS).min(n_fitting));
    html! {
        nav.pager #pager aria-label="Pages" {
            @if n_pages > 1 {
                span.quiet { (first) " to " (last) " of " (n_fitting) }
                @if page > 1 { a rel="prev" href=(query.on_page(page - 1)) { "Before" } }
                @if page < n_pages { a rel="next" href=(query.on_page(page + 1)) { "After" } }
            }
        }
    }
}
