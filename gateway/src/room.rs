//! Whether a replica takes more requests now, or they had better wait here: an agent answers in the order of arrival, so what waits
//! there waits behind whoever came first. Pure.
//!
//! What waits there is at most what this gateway sent and has heard nothing of. When the replica said that nobody waits, that was
//! only on its way or being computed, and as much again may follow; when it said that somebody waits, what did not wait was what it
//! takes at a time, and twice that is enough to keep it busy until the next report.

/// So many requests may be there without an answer, whatever they are: one that is computed, and one that is there when it begins.
const QUEUE: u32 = 2;
/// So many more where nobody waits: a replica that was idle fills its first steps.
const BURST: u32 = 32;
/// So many tokens of prompts are more than a step takes: beyond them only [`QUEUE`] requests wait.
const QUEUE_TOKENS: u64 = 16_384;

/// What this gateway sent and has heard nothing of.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Unanswered {
    /// Requests.
    pub requests: u32,
    /// Tokens of their prompts, without what is thought to be cached.
    pub tokens: u64,
}

/// What a replica said last, and what this gateway had there then.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Told {
    /// Requests that waited for their first step.
    pub waiting: u32,
    /// Tokens of their prompts.
    pub waiting_tokens: u64,
    /// Then.
    pub unanswered: Unanswered,
}

/// Requests that it takes now. Of whom nothing is known takes all: who refuses says so.
pub fn places(told: Option<Told>, now: Unanswered) -> u32 {
    let Some(told) = told else { return u32::MAX };
    // What was sent before and did not wait is not in the way, even if nothing has come back: an answer that is not streamed may
    // tell nothing before its end.
    let since = (told.waiting_tokens + now.tokens).saturating_sub(told.unanswered.tokens);
    let most = if since.min(now.tokens) < QUEUE_TOKENS { window(&told) } else { QUEUE };
    most.saturating_sub(now.requests)
}

/// Requests that may be there without an answer.
fn window(told: &Told) -> u32 {
    let at_a_time = told.unanswered.requests.saturating_sub(told.waiting);
    let window = QUEUE.saturating_add(at_a_time.saturating_mul(2));
    if told.waiting == 0 { window.max(BURST) } else { window }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unanswered(requests: u32, tokens: u64) -> Unanswered {
        Unanswered { requests, tokens }
    }

    fn told(waiting: u32, waiting_tokens: u64, unanswered: Unanswered) -> Option<Told> {
        Some(Told { waiting, waiting_tokens, unanswered })
    }

    #[test]
    fn a_full_replica_has_a_short_queue_and_an_idle_one_takes_a_burst() {
        let none = Unanswered::default();
        for (name, told, now, expected) in [
            ("of whom nothing is known", None, unanswered(900, 90_000), u32::MAX),
            ("idle", told(0, 0, none), none, 32),
            ("idle, and much was sent since", told(0, 0, none), unanswered(32, 3200), 0),
            ("idle, and a long prompt was sent since", told(0, 0, none), unanswered(1, 90_000), 1),
            ("seats are taken", told(2, 200, unanswered(2, 200)), unanswered(2, 200), 0),
            ("one began since", told(2, 200, unanswered(2, 200)), unanswered(1, 100), 1),
            ("it waits behind others' requests", told(200, 20_000, none), none, 2),
            ("forty a step, and forty wait", told(40, 8000, unanswered(80, 16_000)), unanswered(80, 16_000), 2),
        ] {
            assert_eq!(places(told, now), expected, "{name}");
        }
    }

    #[test]
    fn answers_that_tell_nothing_before_their_end_do_not_close_a_replica_that_has_room() {
        let running = unanswered(50, 100_000);
        assert_eq!(places(told(0, 0, running), running), 52);
        let more = unanswered(52, 116_384);
        assert_eq!(places(told(0, 0, running), more), 0, "what was sent since may be a step's worth");
    }
}
