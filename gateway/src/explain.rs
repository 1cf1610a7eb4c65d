//! Why a request went where it went, in one line: what the header of an answer says when it was asked for.

use std::time::Duration;

use stoker_routing::{Choice, Source};

/// `replica=POD reason=WORD …`: the terms of a choice, in tokens, and how long the request stood in line before.
pub fn explained(pod: &str, choice: &Choice, attempts: u32, line_time: Duration) -> String {
    let terms = &choice.terms;
    format!(
        "replica={pod} reason={} prefix={} cached={} uncached={} waiting={} requests={} cost={:.0} candidates={} over-share={} line-ms={} attempts={attempts}",
        choice.reason.word(),
        choice.source.map_or("none", Source::word),
        terms.cached_tokens,
        terms.uncached_tokens,
        terms.waiting_tokens,
        terms.requests,
        terms.cost,
        choice.n_candidates,
        choice.n_over_share,
        line_time.as_millis(),
    )
}
