//! Replicas by node, with how far each is and what it carries.

use std::collections::BTreeMap;

use maud::{Markup, html};

use super::view::{Deployment, ReplicaRow};
use crate::{view::mark, words};

/// The section.
pub(super) fn section(view: &Deployment) -> Markup {
    let mut by_node: BTreeMap<&str, Vec<&ReplicaRow>> = BTreeMap::new();
    for replica in &view.replicas {
        by_node.entry(&replica.node).or_default().push(replica);
    }
    html! {
        section #replicas aria-labelledby="replicas-h" {
            h2 #replicas-h { "Replicas" }
            @if view.replicas.is_empty() { p.quiet { "No replica." } }
            @else {
                div.scroll tabindex="0" role="region" aria-label="Replicas" { table.stack {
                    thead { tr {
                        th scope="col" { "Replica" } th scope="col" { "Phase" } th.num scope="col" { "KV" } th.num scope="col" { "Running" } th.num scope="col" { "Tokens/s" }
                        th.num scope="col" { "TTFT p50 / p95" } th.num scope="col" { "ITL p50 / p95" } th.num scope="col" { "Preempt/min" } th scope="col" { "Made (UTC)" }
                    } }
                    @for (node, replicas) in &by_node {
                        tbody {
                            tr.group { th scope="rowgroup" colspan="9" { @if node.is_empty() { "without a node" } @else { "node " (words::beginning(node, 80)) } span.quiet { " · " (replicas.len()) } } }
                            @for replica in replicas { (row(replica, view.now_ms)) }
                        }
                    }
                } }
                @if view.n_more_replicas > 0 { p.quiet { "And " (view.n_more_replicas) " more, which need no look: " code { "kubectl get pods" } " has them all." } }
            }
        }
    }
}

fn row(replica: &ReplicaRow, now_ms: u64) -> Markup {
    let ReplicaRow { pod, older_revision, tone, phase, words: said, progress, load, created_ms, .. } = replica;
    html! {
        tr {
            th.nowrap scope="row" { (words::beginning(pod, 80)) @if let Some(revision) = older_revision { div.under { "older revision " (words::beginning(revision, 20)) } } }
            td.state { (mark(*tone, phase))
                @if let Some(share) = progress { " " progress max="100" value=(format!("{:.0}", share * 100.0)) aria-label={ "start of " (words::beginning(pod, 80)) } {} }
                @if !said.is_empty() { div.under { (words::beginning(said, 180)) } }
            }
            @match load {
                Some(load) => {
                    td.num data-is="KV" { (words::percent(load.kv)) }
                    td.num data-is="running" { (load.running) @if load.waiting > 0 { span.quiet { " + " (load.waiting) } } }
                    td.num data-is="tokens/s" { (words::known(load.tokens, words::rate)) }
                    td.num data-is="TTFT" { (load.ttft.words()) }
                    td.num data-is="ITL" { (load.itl.words()) }
                    td.num data-is="preempt/min" { (load.preemptions) }
                },
                // A cell of its own for each of what is not known, so that rows have the same columns.
                None => { @for _ in 0..6 { td.num.quiet.unknown { (words::UNKNOWN) } } },
            }
            td.nowrap data-is="made" { (words::moment(*created_ms, now_ms)) }
        }
    }
}
