//! Waiting with a reason: whoever waits says what is still missing, so a timeout explains itself.

use std::{
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, bail};

/// How often the world is asked. A process start per look, so not more often.
const INTERVAL: Duration = Duration::from_millis(150);

/// What one look at the world found.
pub(crate) enum Look<T> {
    /// It is there.
    Done(T),
    /// Not yet, because of this.
    NotYet(String),
}

/// Looks until it is done; fails with what was missing at the end.
pub(crate) fn until<T>(limit: Duration, what: &str, mut look: impl FnMut() -> Result<Look<T>>) -> Result<T> {
    let started = Instant::now();
    loop {
        let missing = match look()? {
            Look::Done(value) => return Ok(value),
            Look::NotYet(missing) => missing,
        };
        if started.elapsed() > limit {
            bail!("waited {} s for {what}: {missing}", limit.as_secs());
        }
        thread::sleep(INTERVAL);
    }
}
