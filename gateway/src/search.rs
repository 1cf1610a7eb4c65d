//! Looking for a replica after one was lost with a request: how long, how often, and after how many losses no more. The same for
//! streams, which go on elsewhere, and for answers of which nothing has come yet. Asks nobody itself.

use std::time::Duration;

use tokio::time::{Instant, sleep};

/// Connections that may break with a request in a row without a token more: it may be what ends replicas.
const BROKEN_MAX: u32 = 3;
/// Replicas that may be left in a row without a token more, whatever befell them.
const LOST_MAX: u32 = 24;
/// Between two rounds of questions to all replicas.
const PAUSES: [Duration; 4] =
    [Duration::from_millis(50), Duration::from_millis(100), Duration::from_millis(200), Duration::from_millis(400)];

/// How a replica was lost.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Loss {
    /// Its connection broke.
    Broken,
    /// It stands still, or says that it leaves: what it was asked did not end it.
    Left,
}

/// Replicas that were lost with a request, since a token came last.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Losses {
    broken: u32,
    all: u32,
}

impl Losses {
    /// Another one was lost.
    pub fn add(&mut self, how: Loss) {
        self.all += 1;
        self.broken += u32::from(how == Loss::Broken);
    }

    /// Whether there was one.
    pub fn is_any(self) -> bool {
        self.all > 0
    }

    /// What ends replicas must not go through all of them.
    pub fn are_too_many(self) -> bool {
        self.broken >= BROKEN_MAX || self.all > LOST_MAX
    }
}

/// Rounds of questions to all replicas: who was lost may be back at the next one, and who was full may have room.
#[derive(Debug)]
pub struct Rounds {
    until: Instant,
    n_ended: usize,
}

impl Rounds {
    /// For so long from now on.
    pub fn within(window: Duration) -> Self {
        Self { until: Instant::now() + window, n_ended: 0 }
    }

    /// Waits for the next round; `false`: it would begin too late.
    pub async fn next(&mut self) -> bool {
        let Some(pause) = self.pause(Instant::now()) else { return false };
        sleep(pause).await;
        true
    }

    /// How long after a round the next one begins.
    fn pause(&mut self, now: Instant) -> Option<Duration> {
        let pause = PAUSES[self.n_ended.min(PAUSES.len() - 1)];
        self.n_ended += 1;
        (now + pause <= self.until).then_some(pause)
    }
}

/// How long a replica that is asked may say nothing, not even that it lives, while others speak: twice as long after each that did not, since
/// it may be that nothing is fast now.
#[derive(Clone, Copy, Debug)]
pub struct Patience(Duration);

impl Default for Patience {
    fn default() -> Self {
        Self(Duration::from_millis(100))
    }
}

impl Patience {
    /// So long.
    pub fn time(self) -> Duration {
        self.0
    }

    /// One was left after this time.
    pub fn double(&mut self) {
        self.0 *= 2;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_broken_connections_are_too_many_and_those_who_leave_count_less() {
        let after = |losses: &[Loss]| {
            let mut all = Losses::default();
            losses.iter().for_each(|how| all.add(*how));
            all.are_too_many()
        };
        assert!(!after(&[Loss::Broken, Loss::Left, Loss::Broken, Loss::Left]));
        assert!(after(&[Loss::Broken, Loss::Left, Loss::Broken, Loss::Broken]));
        assert_eq!([after(&[Loss::Left; 24]), after(&[Loss::Left; 25])], [false, true]);
    }

    #[test]
    fn rounds_lie_farther_apart_and_end_with_their_time() {
        let begun = Instant::now();
        let (mut rounds, mut now) = (Rounds { until: begun + Duration::from_secs(2), n_ended: 0 }, begun);
        let mut at_ms = Vec::new();
        while let Some(pause) = rounds.pause(now) {
            now += pause;
            at_ms.push((now - begun).as_millis());
        }
        assert_eq!(at_ms, [50, 150, 350, 750, 1150, 1550, 1950]);
    }
}
