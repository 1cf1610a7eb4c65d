//! What a tenant has used of its limits: buckets that fill again with time. Each gateway counts for itself. Pure: its owner says what
//! time it is.

use crate::tenants::Limits;

/// A whole one is this many parts: what comes back in a millisecond is a whole number of them.
const PARTS: i64 = 60_000;

/// A minute's worth of something, which comes back evenly.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct Bucket {
    /// In [`PARTS`]; below 0: so many are owed.
    level: i64,
    at_ms: u64,
}

impl Bucket {
    fn full(per_minute: u32, now_ms: u64) -> Self {
        Self { level: i64::from(per_minute) * PARTS, at_ms: now_ms }
    }

    /// What it holds now, of `per_minute` at most.
    fn filled(self, per_minute: u32, now_ms: u64) -> Self {
        let passed_ms = i64::try_from(now_ms.saturating_sub(self.at_ms)).unwrap_or(i64::MAX);
        let level = self.level.saturating_add(passed_ms.saturating_mul(per_minute.into()));
        Self { level: level.min(i64::from(per_minute) * PARTS), at_ms: now_ms }
    }
}

/// What has been used.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Quota {
    /// Full, before the first request.
    requests: Option<Bucket>,
    tokens: Option<Bucket>,
    running: u32,
}

/// A limit that is reached.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Exceeded {
    /// Which one, as the file calls it.
    pub limit: &'static str,
    /// What it is.
    pub most: u32,
    /// When to come back.
    pub retry_after_seconds: u32,
}

/// When somebody else's request may have ended: nobody knows.
const RETRY_RUNNING_SECONDS: u32 = 1;

impl Quota {
    /// A request of about so many prompt tokens begins, if it may.
    pub fn begin(&mut self, limits: &Limits, prompt_tokens: u32, now_ms: u64) -> Result<(), Exceeded> {
        if let Some(most) = limits.concurrent_requests.filter(|most| self.running >= *most) {
            let retry_after_seconds = RETRY_RUNNING_SECONDS;
            return Err(Exceeded { limit: "concurrentRequests", most, retry_after_seconds });
        }
        let requests = take("requestsPerMinute", limits.requests_per_minute, self.requests, 1, now_ms)?;
        let tokens = take("tokensPerMinute", limits.tokens_per_minute, self.tokens, prompt_tokens, now_ms)?;
        (self.requests, self.tokens) = (requests, tokens);
        self.running += 1;
        Ok(())
    }

    /// It ended, and had so many tokens more than was thought, or fewer; they are owed, or come back.
    pub fn end(&mut self, tokens_more: i64) {
        self.running = self.running.saturating_sub(1);
        self.owe(tokens_more);
    }

    /// It had so many tokens more than was thought, or fewer.
    pub fn owe(&mut self, tokens_more: i64) {
        if let Some(bucket) = &mut self.tokens {
            bucket.level = bucket.level.saturating_sub(tokens_more.saturating_mul(PARTS));
        }
    }
}

/// Takes from a bucket. What is more than a minute's worth needs a full one, and leaves it empty for longer.
fn take(
    limit: &'static str,
    per_minute: Option<u32>,
    bucket: Option<Bucket>,
    count: u32,
    now_ms: u64,
) -> Result<Option<Bucket>, Exceeded> {
    let Some(most) = per_minute else { return Ok(None) };
    let now = bucket.unwrap_or(Bucket::full(most, now_ms)).filled(most, now_ms);
    let missing = i64::from(count.min(most)) * PARTS - now.level;
    if missing > 0 {
        let in_a_second = u64::from(most) * 1000;
        let seconds = missing.unsigned_abs().div_ceil(in_a_second);
        return Err(Exceeded { limit, most, retry_after_seconds: u32::try_from(seconds).unwrap_or(u32::MAX) });
    }
    Ok(Some(Bucket { level: now.level - i64::from(count) * PARTS, ..now }))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits =
        Limits { requests_per_minute: Some(3), tokens_per_minute: Some(600), concurrent_requests: Some(2) };

    fn exceeded(limit: &'static str, most: u32, retry_after_seconds: u32) -> Result<(), Exceeded> {
        Err(Exceeded { limit, most, retry_after_seconds })
    }

    #[test]
    fn each_limit_is_named_with_when_to_come_back() {
        let mut quota = Quota::default();
        assert_eq!([quota.begin(&LIMITS, 10, 0), quota.begin(&LIMITS, 10, 0)], [Ok(()), Ok(())]);
        assert_eq!(quota.begin(&LIMITS, 10, 0), exceeded("concurrentRequests", 2, 1));
        quota.end(0);
        assert_eq!(quota.begin(&LIMITS, 10, 0), Ok(()));
        quota.end(0);
        assert_eq!(quota.begin(&LIMITS, 10, 0), exceeded("requestsPerMinute", 3, 20));
        assert_eq!(quota.begin(&LIMITS, 10, 19_000), exceeded("requestsPerMinute", 3, 1));
        assert_eq!(quota.begin(&LIMITS, 10, 20_000), Ok(()));
    }

    #[test]
    fn tokens_that_were_not_foreseen_are_owed() {
        let limits = Limits { tokens_per_minute: Some(600), ..Limits::default() };
        let mut quota = Quota::default();
        assert_eq!(quota.begin(&limits, 100, 0), Ok(()));
        quota.end(800);
        // 300 tokens are owed: ten a second come back.
        assert_eq!(quota.begin(&limits, 50, 0), exceeded("tokensPerMinute", 600, 35));
        assert_eq!(quota.begin(&limits, 50, 35_000), Ok(()));
    }

    #[test]
    fn a_prompt_longer_than_a_minute_s_worth_waits_for_a_full_bucket_and_is_not_refused_for_ever() {
        let limits = Limits { tokens_per_minute: Some(600), ..Limits::default() };
        let mut quota = Quota::default();
        assert_eq!(quota.begin(&limits, 6000, 0), Ok(()));
        assert_eq!(quota.begin(&limits, 6000, 0), exceeded("tokensPerMinute", 600, 600));
        assert_eq!(quota.begin(&limits, 6000, 600_000), Ok(()));
    }

    #[test]
    fn what_is_refused_costs_nothing_and_no_limit_is_none() {
        let mut quota = Quota::default();
        let limits = Limits { tokens_per_minute: Some(60), ..LIMITS };
        assert_eq!(quota.begin(&limits, 60, 0), Ok(()));
        quota.end(0);
        for _ in 0..10 {
            assert!(quota.begin(&limits, 60, 0).is_err());
        }
        assert_eq!(quota.begin(&limits, 60, 60_000), Ok(()));
        let mut free = Quota::default();
        assert!((0..1000).all(|_| free.begin(&Limits::default(), u32::MAX, 0).is_ok()));
    }
}
