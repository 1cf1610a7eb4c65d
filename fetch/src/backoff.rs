//! How long to wait before a try is repeated. Pure: chance comes in by argument.

use std::time::Duration;

/// After the first failure.
const FIRST: Duration = Duration::from_millis(500);
/// At most, when the server does not say.
const LONGEST: Duration = Duration::from_secs(30);
/// At most, when it does: who asks for more is asked again earlier.
const LONGEST_ASKED: Duration = Duration::from_secs(300);

/// Before try `failures + 1` of something that failed `failures` times in a row without getting anywhere. `chance` from 0
/// to 1 spreads many clients that failed at once; what the server asks for is kept.
pub fn pause(failures: u32, chance: f64, retry_after: Option<Duration>) -> Duration {
    let doubled = FIRST.saturating_mul(1 << failures.saturating_sub(1).min(10)).min(LONGEST);
    let spread = doubled.mul_f64(0.5 + 0.5 * chance.clamp(0.0, 1.0));
    retry_after.map_or(spread, |asked| asked.min(LONGEST_ASKED).max(spread))
}

/// Seconds of a `Retry-After` header. Dates are not understood, and as good as none.
pub fn retry_after(header: &str) -> Option<Duration> {
    header.trim().parse().ok().map(Duration::from_secs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_are_spread_and_end() {
        let ms = |failures, chance| pause(failures, chance, None).as_millis();
        assert_eq!([1, 2, 3, 4].map(|failures| ms(failures, 1.0)), [500, 1_000, 2_000, 4_000]);
        assert_eq!([1, 2].map(|failures| ms(failures, 0.0)), [250, 500]);
        assert_eq!(ms(1_000_000, 1.0), 30_000);
    }

    #[test]
    fn the_server_may_ask_for_more_and_not_for_less() {
        let asked = |seconds| pause(1, 1.0, Some(Duration::from_secs(seconds))).as_millis();
        assert_eq!([0, 7, 86_400].map(asked), [500, 7_000, 300_000]);
        assert_eq!(retry_after(" 12 "), Some(Duration::from_secs(12)));
        assert_eq!(retry_after("Wed, 21 Oct 2026 07:28:00 GMT"), None);
    }
}
