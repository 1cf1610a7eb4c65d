//! Whether a replica takes more requests now, or they had better wait here: an agent answers in the order of arrival, so what waits
//! there waits behind whoever came first. Pure.
//!
//! What waits there is at most what this gateway sent and has heard nothing of. How much that may be is a window, which follows from what
//! the replica says: the most that was there between two reports, without what waited by the latter, is what it takes at a
//! time, and twice that keeps it busy until the next one (`tests/room.rs`).

/// So many requests may be there without an answer, whatever they are: one that is computed, and one that is there when it begins.
const QUEUE: u32 = 2;
/// The window of a replica of which nothing is known: one that was idle fills its first steps.
pub const BURST: u32 = 32;
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

/// What a replica said last, and what follows.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Told {
    /// Requests that may be there without an answer.
    pub window: u32,
    /// Tokens of prompts that waited there.
    pub waiting_tokens: u64,
    /// Tokens that were unanswered when it came.
    pub unanswered_tokens: u64,
}

/// The window after a report of so many waiting requests, where it was `before` and `most` were unanswered since the last report.
pub fn window(before: u32, waiting: u32, most: u32) -> u32 {
    let at_a_time = most.saturating_sub(waiting);
    let window = QUEUE.saturating_add(at_a_time.saturating_mul(2));
    match waiting {
        // It was not enough, or just enough.
        0 => window.max(before.saturating_mul(2).min(BURST)),
        // Part of the most was there before the window got smaller: that is no reason to send more.
        _ => window.min(before),
    }
}

/// Requests that it takes now. Of whom nothing is known takes all: who refuses says so.
pub fn places(told: Option<Told>, now: Unanswered) -> u32 {
    let Some(told) = told else { return u32::MAX };
    // What was sent before and did not wait is not in the way, even if nothing has come back: an answer that is not streamed may
    // tell nothing before its end.
    let since = (told.waiting_tokens + now.tokens).saturating_sub(told.unanswered_tokens);
    let most = if since.min(now.tokens) < QUEUE_TOKENS { told.window } else { QUEUE };
    most.saturating_sub(now.requests)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_is_what_a_replica_takes_at_a_time_and_as_much_again() {
        for (name, before, waiting, most, expected) in [
            ("idle", BURST, 0, 0, BURST),
            ("idle again", 4, 0, 0, 8),
            ("all that was sent was begun at once", BURST, 0, 60, 122),
            ("seats are taken: none began between", BURST, 32, 32, 2),
            ("and the most is of before", 2, 2, 32, 2),
            ("forty a step, and forty wait", 122, 40, 80, 82),
            ("others' requests wait", BURST, 200, 0, 2),
        ] {
            assert_eq!(window(before, waiting, most), expected, "{name}");
        }
    }

    #[test]
    fn a_replica_takes_its_window_and_of_long_prompts_two() {
        let told = |window| Some(Told { window, waiting_tokens: 0, unanswered_tokens: 0 });
        let now = |requests, tokens| Unanswered { requests, tokens };
        for (name, told, now, expected) in [
            ("nothing is known of it", None, now(900, 90_000), u32::MAX),
            ("idle", told(32), now(0, 0), 32),
            ("as much as it takes", told(32), now(32, 3200), 0),
            ("more than before the window got smaller", told(2), now(9, 900), 0),
            ("a long prompt", told(32), now(1, 90_000), 1),
            ("two of them", told(32), now(2, 180_000), 0),
        ] {
            assert_eq!(places(told, now), expected, "{name}");
        }
    }

    #[test]
    fn prompts_that_were_computed_before_a_report_are_not_in_the_way() {
        let told = Some(Told { window: 102, waiting_tokens: 0, unanswered_tokens: 100_000 });
        let tokens = |tokens| places(told, Unanswered { requests: 52, tokens });
        assert_eq!([tokens(100_000), tokens(116_383), tokens(116_384)], [50, 50, 0]);
    }
}
