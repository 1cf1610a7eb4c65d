//! Why a request went where it went, in one line: what the header of an answer says when it was asked for.

use stoker_routing::{Choice, Source};

/// `replica=POD reason=WORD …`: the terms of a choice, in tokens.
pub fn explained(pod: &str, choice: &Choice, attempts: u32) -> String {
    let terms = &choice.terms;
    format!(
        "replica={pod} reason={} prefix={} cached={} uncached={} waiting={} requests={} cost={:.0} candidates={} over-share={} attempts={attempts}",
        choice.reason.word(),
        choice.source.map_or("none", Source::word),
        terms.cached_tokens,
        terms.uncached_tokens,
        terms.waiting_tokens,
        terms.requests,
        terms.cost,
        choice.n_candidates,
        choice.n_over_share,
    )
}
